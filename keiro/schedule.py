"""A cron schedule as a run: the built-in workflow `keiro.schedule`, whose key is the name of the schedule.

It waits for the next tick as any run waits, and starts a run whose key is made of the tick: so a tick has one run,
whoever drives it and however often. When it ticks next is recorded with what decided it: no replay asks the zone data.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol, cast

import msgspec
from msgspec.structs import replace

from keiro import codec
from keiro.commands import event
from keiro.cron import cron_of
from keiro.events import ms_of, time_of
from keiro.retry import Retry
from keiro.run import WorkflowRun

SCHEDULE: Final = "keiro.schedule"
"""The name of the built-in workflow."""
ROUND: Final = 50
"""So many ticks and changes are in one round: what is replayed for each tick stays short."""
LATE_MS: Final = 60_000
"""A tick whose clock was fired later than that is missed, and starts a run only as a part of a backfill."""
MOST: Final = 1000
"""So many missed ticks are made up for at most, the newest."""
_FOR_EVER: Final = Retry(2**31, initial=1, factor=2, maximum=60)


class Definition(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a schedule starts, and when. `input` is the stored input of the target, encoded where it was put, so that a
    worker without the target's code can start it; `tick_names` are the arguments that get the time of the tick."""

    workflow: str
    input: str
    cron: str
    zone: str
    overlap: str
    backfill: bool
    tick_names: tuple[str, ...] = ()
    version: str | None = None
    patches: tuple[str, ...] = ()
    cleanup_ms: int | None = None


class Trigger(msgspec.Struct, frozen=True):
    """A run that is to be started besides the ticks: its key, and the time it gets as that of its tick."""

    key: str
    at_ms: int


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a schedule stands. In a new round all is unset until the state of the one before is inherited; what
    commands have set by then counts more."""

    definition: Definition | None = None
    paused: bool | None = None
    timed: bool = False
    """Whether `next_at_ms` was decided in this round."""
    next_at_ms: int | None = None
    last_at_ms: int | None = None
    last_run_id: str | None = None
    open: tuple[str, ...] = ()
    """Runs that had not ended when it was last looked."""
    triggers: tuple[Trigger, ...] = ()
    revision: int = 0
    """Counts the commands, so that a tick does not undo what came while it was decided on."""
    inherited: bool = False

    def after(self, before: State) -> State:
        """This state of a new round, on top of that of the round before."""
        return State(
            definition=self.definition or before.definition,
            paused=before.paused if self.paused is None else self.paused,
            timed=True,
            next_at_ms=self.next_at_ms if self.timed else before.next_at_ms,
            last_at_ms=before.last_at_ms,
            last_run_id=before.last_run_id,
            open=before.open,
            triggers=before.triggers + self.triggers,
            revision=self.revision,
            inherited=True,
        )

    @property
    def due_ms(self) -> int | None:
        """When it ticks next; None while it is paused, and where it never does."""
        return None if self.paused or self.definition is None else self.next_at_ms


class Ticked(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one or more ticks that were due: `run_id` is the newest run that was started, if any was."""

    next_at_ms: int | None = None
    at_ms: int | None = None
    run_id: str | None = None
    open: tuple[str, ...] = ()


class Starter(Protocol):
    """What a schedule needs of the engine that hosts it."""

    async def closed(self, run_id: str) -> State:
        """The state at the end of a round that has ended."""

    async def tick(self, name: str, state: State, now_ms: int) -> Ticked:
        """Start what is due."""

    async def begin(self, definition: Definition, key: str, at_ms: int) -> str:
        """Start a run, unless it has been started; its id."""


class ScheduleRun(WorkflowRun, name=SCHEDULE):
    """The built-in workflow. Its commands say what is so from then on: they can be applied to any state."""

    def __init__(self) -> None:
        self.state = State()

    @event("Defined")
    def define(self, definition: Definition, retimed: bool, next_at_ms: int | None) -> None:
        """The schedule is this from now on; with `retimed` it ticks next at `next_at_ms`, else when it would have."""
        state = replace(self.state, definition=definition, revision=self.state.revision + 1)
        self.state = replace(state, timed=True, next_at_ms=next_at_ms) if retimed else state

    @event("Paused")
    def pause(self) -> None:
        """No more ticks."""
        self.state = replace(self.state, paused=True, revision=self.state.revision + 1)

    @event("Resumed")
    def resume(self, next_at_ms: int | None) -> None:
        """Ticks again, the first time at `next_at_ms`."""
        state = replace(self.state, paused=False, timed=True, next_at_ms=next_at_ms)
        self.state = replace(state, revision=self.state.revision + 1)

    @event("Triggered")
    def trigger(self, key: str, at_ms: int) -> None:
        """A run is to be started besides the ticks."""
        self.state = replace(self.state, triggers=(*self.state.triggers, Trigger(key, at_ms)))

    @event("Inherited")
    def inherit(self, state: State) -> None:
        """How the round before has ended."""
        self.state = self.state.after(state)

    @event("Ticked")
    def ticked(self, ticked: Ticked, revision: int) -> None:
        """What was due at `revision` is dealt with."""
        state = self.state
        if state.revision == revision:
            state = replace(state, next_at_ms=ticked.next_at_ms)
        if ticked.run_id is not None:
            state = replace(state, last_at_ms=ticked.at_ms, last_run_id=ticked.run_id)
        self.state = replace(state, open=ticked.open)

    @event("Begun")
    def begun(self, run_id: str, at_ms: int) -> None:
        """The first of the triggers is dealt with."""
        state = replace(self.state, triggers=self.state.triggers[1:], last_at_ms=at_ms, last_run_id=run_id)
        self.state = replace(state, open=(*state.open, run_id))

    async def execute(self) -> None:
        """Wait and start, for a round."""
        if self.info.parent_run_id is not None:
            before = self.info.parent_run_id

            async def inherit() -> State:
                # Read from the journal and not passed on as input: a command may have come to the round after its body
                # had seen the last one. Now it has ended, and takes no more.
                return await self._starter.closed(before)

            await self.apply(ScheduleRun.inherit, await self.step(inherit, retry=_FOR_EVER))
        for _ in range(ROUND):
            if self.state.triggers:
                await self._begin(self.state.triggers[0])
                continue
            seen, due_ms = self.state.revision, self.state.due_ms
            # As seconds from now, though it is a time of day: only where the clock is first set does it count.
            wait = None if due_ms is None else max(due_ms - self._keiro_driver.wall_ms(), 0) / 1000
            try:
                await self.until(partial(self._is_told, seen), timeout=wait)
            except TimeoutError:
                await self._tick(ms_of(self.now()))
        self.continue_as_new()

    @property
    def _starter(self) -> Starter:
        # Asked for in steps only: what replays a journal has no engine.
        return cast(Starter, cast(Any, self._keiro_driver).host.schedules)

    def _is_told(self, seen: int) -> bool:
        return self.state.revision != seen or bool(self.state.triggers)

    async def _begin(self, trigger: Trigger) -> None:
        definition = self.state.definition
        assert definition is not None

        async def start() -> str:
            return await self._starter.begin(definition, trigger.key, trigger.at_ms)

        run_id = await self.step(start, retry=_FOR_EVER)
        await self.apply(ScheduleRun.begun, run_id, trigger.at_ms)

    async def _tick(self, now_ms: int) -> None:
        state, name = self.state, self.key

        async def tick() -> Ticked:
            return await self._starter.tick(name, state, now_ms)

        ticked = await self.step(tick, retry=_FOR_EVER)
        await self.apply(ScheduleRun.ticked, ticked, state.revision)


def next_tick(cron: str, zone: str, now_ms: int, state: State) -> int | None:
    """When a schedule ticks next that is defined or resumed now: never at or before a tick that has started a run, also
    where the clock was put back since."""
    return cron_of(cron, zone).after(max(now_ms, state.last_at_ms or 0))


def ticks_due(definition: Definition, due_ms: int, now_ms: int) -> tuple[list[int], int | None]:
    """The ticks to start a run for, of those that are due since `due_ms`, and the next one after them.

    `now_ms` is when the clock was fired, which any worker does in time, so what is late then is late because there was
    none. Without backfill only the newest tick counts, and only if it is not missed.
    """
    cron = cron_of(definition.cron, definition.zone)
    now_ms = max(now_ms, due_ms)
    if definition.backfill:
        ticks = cron.newest(due_ms - 1, now_ms, MOST)
    else:
        ticks = [at for at in cron.newest(due_ms - 1, now_ms, 1) if now_ms - at <= LATE_MS]
    return ticks, cron.after(now_ms)


def tick_key(name: str, at_ms: int) -> str:
    """The key of the run of a tick."""
    return f"{name}-{time_of(at_ms).astimezone(UTC):%Y%m%dT%H%M%SZ}"


def input_at(definition: Definition, at_ms: int) -> bytes:
    """The stored input of the run of a tick, which is shown its time on the clock of the schedule's zone."""
    if not definition.tick_names:
        return definition.input.encode()
    shown: datetime = cron_of(definition.cron, definition.zone).shown(at_ms)
    given = msgspec.json.decode(definition.input, type=dict[str, msgspec.Raw])
    given.update(dict.fromkeys(definition.tick_names, msgspec.Raw(msgspec.json.encode(shown))))
    return codec.encode(given, where=f"input of workflow {definition.workflow!r}")
