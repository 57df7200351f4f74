"""`engine.schedules`: runs that are started by the clock.

What is asked for here becomes commands to the run that is the schedule (`keiro.schedule`), and what is shown is folded
from its journal; there is no table and no loop besides.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from keiro import retention
from keiro.cron import Cron
from keiro.decisions import Appended, Collected, Existing, InputDiffers, Refused, Start, new
from keiro.definition import Workflow
from keiro.errors import InvalidCall, InvalidName, KeiroError, RunNotFound, StoreError
from keiro.events import WorkflowStarted, time_of
from keiro.identity import check_command_id, check_key, run_id
from keiro.rows import Run, Status
from keiro.run import fold
from keiro.schedule import (
    SCHEDULE,
    Definition,
    ScheduleRun,
    State,
    Ticked,
    input_at,
    next_tick,
    tick_key,
    ticks_due,
)

if TYPE_CHECKING:
    from keiro.engine import Engine, Handle

OVERLAPS: Final = ("skip", "allow")
MOST_NAME_BYTES: Final = 400
"""The keys of its runs are longer than the name of a schedule."""
_PAGE: Final = 500
_SAMPLE: Final = time_of(0)


class _Tick:
    """The type of `TICK`."""

    def __repr__(self) -> str:
        return "keiro.TICK"


TICK: Final[Any] = _Tick()
"""Stands for the time of the tick among the arguments of `engine.schedules.put`. The body gets an aware datetime on the
clock of the schedule's zone; a triggered run gets the time of its trigger."""


class ScheduleRow(msgspec.Struct, frozen=True):
    """A schedule. Times are in UTC; `next_at` is None while it is paused. `last_at` and `last_run_id` are of the run
    that it has started last, for a tick or a trigger."""

    name: str
    workflow: str
    cron: str
    zone: str
    overlap: str
    backfill: bool
    paused: bool
    next_at: datetime | None
    last_at: datetime | None
    last_run_id: str | None


class Schedules:
    """The schedules of a store, whoever drives them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def put(
        self,
        name: str,
        workflow: Any,
        /,
        *args: Any,
        cron: str,
        zone: str = "UTC",
        overlap: str = "skip",
        backfill: bool = False,
        **kwargs: Any,
    ) -> bool:
        """Start a run of `workflow` with these arguments whenever `cron` ticks on the clock of `zone`. On return the
        schedule is durable. Put again with the same definition nothing changes, with another it is changed in place:
        the next tick is one of the new definition. Whether anything was changed.

        The key of a run is `<name>-<tick in UTC>`, as in `nightly-20261201T080000Z`, and `keiro.TICK` among the
        arguments stands for that time. `overlap="skip"` leaves a tick out while a run that the schedule has started
        goes on, `"allow"` starts it all the same. Ticks that were missed, because no worker was there within a minute,
        are left out; `backfill=True` makes up for them, at most the newest 1000 at once.

        Raises `InvalidCall` for an expression, a zone or arguments that there are not, `InvalidName`,
        `PayloadRejected`, `UnknownWorkflow`: nothing is written then.
        """
        return await self.define(name, workflow, args, kwargs, cron=cron, zone=zone, overlap=overlap, backfill=backfill)

    async def define(
        self,
        name: str,
        workflow: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        cron: str,
        zone: str,
        overlap: str,
        backfill: bool,
    ) -> bool:
        """As `put`, for arguments that may have any name."""
        engine = self._engine
        engine._opened()
        key = _checked(name)
        target = engine._startable(workflow)
        if target.name == SCHEDULE:
            raise InvalidCall("a schedule cannot start schedules: pass a workflow of your own")
        if overlap not in OVERLAPS:
            raise InvalidCall(
                f"overlap={overlap!r}: it is 'skip' or 'allow'. To run them one after the other, use 'allow' and a "
                "workflow with a keiro.Queue of concurrency 1"
            )
        if not isinstance(backfill, bool):
            raise InvalidCall(f"backfill={backfill!r}: backfill is True or False")
        if Cron(cron, zone).after(engine.wall_ms()) is None:
            raise InvalidCall(f"cron={cron!r}: it does not tick within 50 years, so nothing would ever be started")
        stored, tick_names = _input(target, args, kwargs, engine.payload_limit)
        definition = Definition(
            target.name,
            stored,
            cron,
            zone,
            overlap,
            backfill,
            tick_names,
            target.version,
            target.patches,
            target.cleanup_ms,
        )
        found = await self._find(key)
        if found is not None and found[0].terminal:
            # What is left of one that was deleted, or cancelled as a run: a schedule that is put is a new one.
            await self._remove(key)
            found = await self._find(key)  # another process may have put it meanwhile
        if found is None:
            await engine.start(ScheduleRun, id=key)
        state = State() if found is None else found[1]
        before = state.definition
        if before == definition:
            return False
        retimed = before is None or (before.cron, before.zone) != (cron, zone)
        next_at_ms = next_tick(cron, zone, engine.wall_ms(), state) if retimed else None
        await engine.command(run_id(SCHEDULE, key), ScheduleRun.define, definition, retimed, next_at_ms)
        return True

    async def pause(self, name: str) -> bool:
        """Let no tick start a run from now on; runs that are under way go on. Whether it was not paused before. Raises
        `RunNotFound`."""
        run, state, _ = await self._defined(name)
        if state.paused:
            return False
        await self._engine.command(run.lineage_id, ScheduleRun.pause)
        return True

    async def resume(self, name: str) -> bool:
        """Let it tick again, from the next tick on: those of the pause are not made up for. Whether it was paused.
        Raises `RunNotFound`."""
        run, state, definition = await self._defined(name)
        if not state.paused:
            return False
        next_at_ms = next_tick(definition.cron, definition.zone, self._engine.wall_ms(), state)
        await self._engine.command(run.lineage_id, ScheduleRun.resume, next_at_ms)
        return True

    async def trigger(self, name: str, *, id: str | None = None) -> Handle:
        """Start a run now, besides the ticks, whatever `overlap` says and also while the schedule is paused; its
        handle. With `id`, the same trigger sent twice starts one run. Raises `RunNotFound`, `InvalidName`."""
        run, _, definition = await self._defined(name)
        key = check_key(f"{name}-trigger-{uuid.uuid4().hex[:12] if id is None else check_command_id(id)}")
        at_ms = self._engine.wall_ms()
        await self._engine.command(run.lineage_id, ScheduleRun.trigger, key, at_ms, id=key)
        _, state, _ = await self._defined(name)
        for one in state.triggers:
            if one.key == key:
                # Here too, so that it is there on return; whoever drives the schedule finds it started, or starts it
                # where this process is gone by now.
                await self.begin(definition, key, one.at_ms)
        return self._engine.handle(run_id(definition.workflow, key))

    async def delete(self, name: str) -> bool:
        """Delete a schedule, whose name is free then; the runs that it has started stay. Whether there was one."""
        self._engine._opened()
        key = _checked(name)
        found = await self._find(key)
        if found is None:
            return False
        if not found[0].terminal:
            await self._engine.cancel(run_id(SCHEDULE, key), reason="the schedule was deleted")
        await self._remove(key)
        return not found[0].terminal

    async def list(self) -> list[ScheduleRow]:
        """All schedules, by name."""
        engine = self._engine
        engine._opened()
        names: dict[str, None] = {}
        # Twice, because one that is driven, or parked, between two looks would be in neither.
        for status in (Status.SUSPENDED, Status.PENDING, Status.RUNNING, Status.SUSPENDED, Status.PENDING):
            before = None
            while page := await engine.store.runs(status=status, workflow=SCHEDULE, before=before, limit=_PAGE):
                names.update((run.key, None) for run in page)
                before = page[-1].run_key
        found = await asyncio.gather(*map(self._find, sorted(names)))
        return [
            _row(run.key, one[1], definition)
            for one in found
            if one is not None and not (run := one[0]).terminal and (definition := one[1].definition) is not None
        ]

    # The run that is the schedule

    async def _find(self, key: str) -> tuple[Run, State] | None:
        store, own = self._engine.store, run_id(SCHEDULE, key)
        first = await store.run(own)
        if first is None:
            return None
        run = first if first.handoff_run_id is None else await store.newest(own) or first
        state = await self._folded(run)
        if state is None:
            return None  # another process has removed it since it was looked up
        if run.parent_run_id is not None and not state.inherited:
            before = await self._closed(run.parent_run_id)
            if before is None:
                return None
            state = state.after(before)
        return run, state

    async def _defined(self, name: str) -> tuple[Run, State, Definition]:
        self._engine._opened()
        found = await self._find(_checked(name))
        if found is None or found[0].terminal or found[1].definition is None:
            raise RunNotFound(
                f"there is no schedule {name!r} at {self._engine._shown_url}: put it first, or check its name against "
                "`keiro schedules list`"
            )
        return found[0], found[1], found[1].definition

    async def _folded(self, run: Run) -> State | None:
        rows = (await self._engine.store.history([run.run_key]))[run.run_key]
        if not rows:
            return None
        return fold(ScheduleRun, [self._engine.mapper.decode_row(row, run.run_id) for row in rows]).state

    async def _remove(self, key: str) -> None:
        own = run_id(SCHEDULE, key)
        match await retention.remove(self._engine.store, own):
            case Collected():
                self._engine._forgotten(own)
            case Refused(reason):
                # It is there anew, if another process has put it between the two transactions.
                run = await self._engine.store.run(own)
                if run is not None and run.terminal and run.handoff_run_id is None:
                    raise KeiroError(f"{own} cannot be deleted: {reason}")

    # What the run asks of its engine

    async def closed(self, run_id: str) -> State:
        """The state at the end of a round that has ended."""
        state = await self._closed(run_id)
        if state is None:
            raise StoreError(f"{run_id} is gone, and what its schedule was with it: put the schedule again")
        return state

    async def _closed(self, run_id: str) -> State | None:
        run = await self._engine.store.run(run_id)
        return None if run is None else await self._folded(run)

    async def tick(self, name: str, state: State, now_ms: int) -> Ticked:
        """Start what is due."""
        definition, due_ms = state.definition, state.due_ms
        assert definition is not None and due_ms is not None
        ticks, next_at_ms = ticks_due(definition, due_ms, now_ms)
        still = state.open
        if ticks and definition.overlap == "skip":
            still = tuple([one for one in state.open if await self._goes_on(one)])
            ticks = [] if still else ticks[-1:]
        if not ticks:
            return Ticked(next_at_ms, open=still)
        started = await asyncio.gather(*(self.begin(definition, tick_key(name, at), at) for at in ticks))
        return Ticked(next_at_ms, ticks[-1], started[-1], (started[-1],))

    async def _goes_on(self, run_id: str) -> bool:
        store = self._engine.store
        run = await store.run(run_id)
        if run is not None and run.handoff_run_id is not None:
            run = await store.newest(run.lineage_id)
        return run is not None and not run.terminal

    async def begin(self, definition: Definition, key: str, at_ms: int) -> str:
        """Start a run, unless it has been started; its id."""
        engine, own = self._engine, run_id(definition.workflow, key)
        # The code that will drive it is rather that of this worker than that of whoever put the schedule.
        code = engine._workflows.get(definition.workflow) or definition
        started = WorkflowStarted(
            workflow=definition.workflow,
            key=key,
            input=Raw(input_at(definition, at_ms)),
            version=code.version,
            patches=code.patches,
            cleanup_ms=code.cleanup_ms,
        )
        match await engine.store.submit(Start(own, new(started, uuid.uuid4().bytes), engine.wall_ms())):
            case Appended() | Existing() | InputDiffers():
                return own  # with another input too: the tick has its run
            case outcome:
                raise KeiroError(f"starting {own} was answered with {outcome!r}")


def _checked(name: str) -> str:
    if len(check_key(name).encode()) > MOST_NAME_BYTES:
        raise InvalidName(f"the name of a schedule has at most {MOST_NAME_BYTES} bytes of UTF-8: {name!r:.100}")
    return name


def _input(target: Workflow, args: tuple[Any, ...], kwargs: dict[str, Any], limit: int) -> tuple[str, tuple[str, ...]]:
    """The stored input, and the names in it that stand for the time of the tick."""
    sampled = (
        [_SAMPLE if one is TICK else one for one in args],
        {name: _SAMPLE if one is TICK else one for name, one in kwargs.items()},
    )
    stored = target.input.encode(tuple(sampled[0]), sampled[1], limit=limit).decode()
    signature = inspect.signature(target.body)
    names: list[str] = []
    for name, value in signature.bind(None, *args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if value is TICK:
            names.append(name)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            names += [one for one in value if value[one] is TICK]
        elif kind is inspect.Parameter.VAR_POSITIONAL and any(one is TICK for one in value):
            raise InvalidCall(f"keiro.TICK cannot be one of *{name}: give the parameter it is for a name of its own")
    return stored, tuple(names)


def _row(name: str, state: State, definition: Definition) -> ScheduleRow:
    return ScheduleRow(
        name=name,
        workflow=definition.workflow,
        cron=definition.cron,
        zone=definition.zone,
        overlap=definition.overlap,
        backfill=definition.backfill,
        paused=bool(state.paused),
        next_at=_time(state.due_ms),
        last_at=_time(state.last_at_ms),
        last_run_id=state.last_run_id,
    )


def _time(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else time_of(at_ms)
