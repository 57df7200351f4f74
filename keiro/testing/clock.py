"""A clock that stands still while anything is done and jumps to the next deadline when all runs only wait.

Every deadline of a run is a time of its store, so it is enough to move the store's clock and to say so. Sleeps,
timeouts and the pauses of retries end at once, in the order of their deadlines, each recorded at its own.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any, Final

from keiro.definition import patience
from keiro.engine import Engine
from keiro.errors import InvalidCall
from keiro.events import ms_of, time_of
from keiro.lanes import lane_in
from keiro.limits import begins, queues_of
from keiro.rows import Status
from keiro.stores.base import wall_ms

LOOK_S: Final = 0.001
"""How often it is looked whether all runs only wait. Two looks in a row must see the same."""
PAGE: Final = 1000


class SkippingClock:
    """The clock of these open engines, on memory or SQLite, until they are closed. It begins at `start` (default: now).

    It moves by itself only while somebody waits for a result (`handle.result()`, `engine.execute(...)`), so that a test
    can complete a deferred, or send a command, before its timeout; `await clock.advance(...)` moves it by so much. What
    a body or a step awaits besides runs in real time. Raises `InvalidCall` for an engine on Postgres, whose clock is
    the server's, and for one that is not open.
    """

    def __init__(self, *engines: Engine, start: datetime | None = None) -> None:
        if not engines:
            raise InvalidCall("SkippingClock() is the clock of nothing: pass the engines that shall live by it")
        if start is not None and (not isinstance(start, datetime) or start.tzinfo is None):
            raise InvalidCall(f"SkippingClock(start={start!r}): give a datetime with its zone")
        self._now = wall_ms() if start is None else ms_of(start)
        self._engines = engines
        self._advancing = False
        for engine in engines:
            if engine.url.startswith("postgres"):
                raise InvalidCall("a Postgres server has its own clock: let time skip on memory:// or SQLite")
            engine._opened()
            store: Any = engine.store
            store.now_ms = self.now_ms
        self._task = asyncio.get_running_loop().create_task(self._skip_for_ever(), name="keiro skipping clock")

    def now_ms(self) -> int:
        """The time it is, in milliseconds since the epoch."""
        return self._now

    def now(self) -> datetime:
        """The time it is (UTC)."""
        return time_of(self._now)

    async def advance(self, duration: float | timedelta) -> datetime:
        """Let `duration` (seconds) pass, with all that is due in it, in order; return when all runs only wait again.
        The time it is then."""
        length = patience(duration, "advance(duration)")
        if length is None or self._advancing:
            raise InvalidCall("advance(duration) takes seconds or a timedelta, and one call at a time")
        until = self._now + round(length * 1000)
        self._advancing = True
        try:
            while True:
                due = await self._resting()
                if due is None or due > until:
                    break
                await self._move(due)
            await self._move(until)
            await self._resting()
        finally:
            self._advancing = False
        return time_of(self._now)

    async def _skip_for_ever(self) -> None:
        while self._open():
            await asyncio.sleep(LOOK_S)
            if not self._awaited():
                continue
            due = await self._resting()
            # Looked at again: the test may have got its result, or begun to advance, meanwhile.
            if due is not None and self._awaited():
                await self._move(due)

    def _open(self) -> list[Engine]:
        return [engine for engine in self._engines if engine._worker is not None and engine._closer is None]

    def _awaited(self) -> bool:
        return not self._advancing and any(engine._waiting for engine in self._open())

    async def _resting(self) -> int | None:
        """Return once all runs only wait; when the first of them is due, None if none ever is."""
        before: list[object] | None = None
        while engines := self._open():
            seen: list[object] | None = []
            dues: list[int] = []
            for engine in engines:
                if seen is not None:
                    state = await self._state(engine, dues)
                    seen = None if state is None else [*seen, *state]
            if seen is not None and seen == before:
                return min(dues, default=None)
            before = seen
            # Longer than all that is ready in the loop takes: what a commit has just woken is seen at the next look.
            await asyncio.sleep(LOOK_S)
        return None

    async def _state(self, engine: Engine, dues: list[int]) -> list[object] | None:
        """Where the runs of an engine stand, None if something is to be done; adds to `dues` when they are due."""
        shut = await self._shut(engine)
        due = await engine.store.next_due_ms([name for name in engine._workflows if name not in shut])
        later = await engine.store.next_due_ms(sorted(shut)) if shut else None
        dues += [at for at in (due, later) if at is not None and (at is due or at > self._now)]
        before = None
        while pending := await engine.store.runs(status=Status.PENDING, before=before, limit=PAGE):
            for run in pending:
                own = lane_in(engine._workflows, run)
                if own is not None and (run.next_attempt_at_ms or 0) <= self._now:
                    if own not in shut or not begins(run):
                        return None
                    dues.append(shut[own])
            before = pending[-1].run_key
        worker = engine._worker
        if worker is None or worker.claiming or engine._births or (due is not None and due <= self._now):
            return None
        state: list[object] = [due, later]
        for driver in engine._resident.values():
            if not driver.resting:
                return None
            state.append((driver.run.run_id, driver.epoch, driver.version, due := driver.waits.next_due_ms()))
            if due is not None:
                dues.append(due)
        return state

    async def _shut(self, engine: Engine) -> dict[str, int]:
        """The workflows whose rate lets no run begin now, and when it does."""
        return {
            name: opens
            for queue, names in queues_of(engine._limits).values()
            if (opens := await engine.store.opens_ms(queue, self._now)) is not None
            for name in names
        }

    async def _move(self, now_ms: int) -> None:
        self._now = max(self._now, now_ms)
        for engine in self._open():
            worker = engine._worker
            assert worker is not None
            # Before anybody looks: by the new time the leases have ended.
            await engine.store.renew(worker.key)
            for driver in list(engine._resident.values()):
                driver.waits.clock_moved()
            worker.wake()
