"""Replay forced at every await, so that a body that depends on more than its journal shows it in a test.

In production a run that waits stays in memory for a while and most runs are never replayed: what is wrong with a body
then shows after a crash. Here every wait parks at once, and, if asked for, every record ends the stay in memory.
"""

from __future__ import annotations

import asyncio
from asyncio import Task
from contextlib import suppress
from typing import Any, ClassVar, Final

from keiro.decisions import Appended, New, Outcome
from keiro.driver import Driver, Within
from keiro.engine import Engine
from keiro.errors import NonDeterminism, StoreError
from keiro.events import AttemptFailed, StepRecorded
from keiro.testing.drivers import drive_with
from keiro.waits import Waits, is_external

TICKS: Final = 100
"""So many turns of the event loop a replayed body gets to ask for all that is recorded."""
_AGAIN: Final = frozenset(("WorkflowRetried", "WorkflowResurrected", "StepRetracted"))


def force_replay(engine: Engine, *, every_step: bool = False) -> None:
    """Replay runs that this engine drives from now on whenever they wait, and with `every_step` after every record.

    A body that asks for something else at a replay fails with `NonDeterminism`, which says what is recorded and was
    not asked for. An engine with `strict=True` finds other inputs of a step as well, and steps that a body which
    returns has not asked for.
    """
    drive_with(engine, _Forced, every_step=every_step)


class _AtOnce(Waits):
    def rest(self) -> None:
        if self._timer is None and self._task is None:
            # Not in this turn of the loop: other tasks of the body may be about to begin a step.
            self._timer = self._loop.call_later(0.001, self._look)

    def _look(self) -> None:
        self._mark = (self._driver.version, self._begun)
        super()._look()


class _Forced(Driver):
    every_step: ClassVar[bool]
    evicting: Task[None] | None = None

    @property
    def waits(self) -> Waits:
        if self._waits is None:
            self._waits = _AtOnce(self)
        return self._waits

    async def _record(
        self, *events: New, alone: bool = True, exact: bool = False, within: Within | None = None
    ) -> tuple[Outcome, int]:
        if not self.over:
            await self._check_asked(events)
        outcome, at_ms = await super()._record(*events, alone=alone, exact=exact, within=within)
        ends = any(isinstance(one.event, StepRecorded | AttemptFailed) for one in events)
        if self.every_step and ends and isinstance(outcome, Appended) and self.evicting is None:
            # Other steps under way end and are recorded first: no effect of theirs happens twice.
            self.evicting = self._loop.create_task(self._evict(), name=f"evict {self.run.run_id}")
            self.drain()
        return outcome, at_ms

    async def _evict(self) -> None:
        assert self.task is not None
        await asyncio.wait([self.task])
        if not self.lost:
            with suppress(StoreError):  # an engine that is being closed hands its runs back itself
                await self.host.store.release(self.owner or 0, [self.run.run_key])
                engine: Any = self.host
                engine.woken()

    async def _check_asked(self, events: tuple[New, ...]) -> None:
        """Raise `NonDeterminism` where the body goes on and has not asked for all that is recorded.

        Whatever is recorded was asked for before, on the strength of what was recorded at the time. So a replay asks
        for it before anything new can end, and a body that does not would ask for new things for ever.
        """
        for _ in range(TICKS):
            if not (left := self._left_over()):
                return
            await asyncio.sleep(0)
        rows = (await self.host.store.history([self.run.run_key]))[self.run.run_key]
        if _AGAIN.isdisjoint(row.topic for row in rows):
            asked: Any = events[-1].event
            new = getattr(asked, "step", None) or ", ".join(wait.step for wait in getattr(asked, "waits", ()))
            raise NonDeterminism(
                f"a replay of {self.run.run_id} asks for {new!r}, which is not recorded, and not for what is: "
                f"{', '.join(left[:10])}. The body depends on something that is no step: the time, a random number, "
                "the environment, a set's order"
            )

    def _left_over(self) -> list[str]:
        steps = [name for name in self._history if not is_external(name) and not name.startswith(("awk", "child:"))]
        return sorted({*steps, *(name for name in self._clocks or () if not self._asked(name))})

    def _asked(self, clock: str) -> bool:
        base, _, count = clock.removeprefix("timeout:until:").partition("#")
        if clock.startswith("timeout:until:"):
            base = f"until:{base}"
        seen = self._names.get(base)
        return seen is not None and seen[1] >= int(count or 1)
