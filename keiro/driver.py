"""Drives one run in this process: replays its journal, executes what is new, records, and settles it.

A step whose record is in the history returns it without running. Everything else is appended under the fence of this
worker; once the run is sealed (fence lost, shutdown) every call of the body raises `RunSealed` and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import random
import secrets
import uuid
from asyncio import Future, Task
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Protocol
from weakref import ReferenceType, ref

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from keiro import codec, history
from keiro.asked import Asked
from keiro.attempts import MOST_BYTES, Attempt, inside
from keiro.attributes import MOST as MOST_ATTRIBUTES
from keiro.attributes import STEP as ATTRIBUTES
from keiro.attributes import merged
from keiro.decisions import (
    CANCELLED,
    AlreadyPresent,
    Append,
    Appended,
    Command,
    Cyclic,
    FenceLost,
    New,
    Outcome,
    Refused,
    RefusedTerminal,
    Rotate,
    Spawn,
    Start,
    Stored,
    VersionConflict,
    fold,
    new,
)
from keiro.definition import COMPENSABLE, Step, Workflow
from keiro.errors import (
    ContinueAsNew,
    EffectUnknown,
    InvalidCall,
    NonDeterminism,
    PayloadRejected,
    ProjectionFailed,
    RunConflict,
    RunParentCycle,
    RunSealed,
    StepNameClash,
    StoreError,
)
from keiro.events import (
    AttemptFailed,
    AttemptProgressed,
    AttemptStarted,
    Event,
    StateChanged,
    StepRecorded,
    StepRetracted,
    Wait,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowRetried,
    WorkflowStarted,
)
from keiro.failures import capture, revive, summary
from keiro.history import (
    IRREVERSIBLE,
    Begun,
    History,
    Recorded,
    Request,
    check_contiguous,
    decode_step,
    past_of,
    read_step,
    request_of,
)
from keiro.identity import StepIds, again, begun_step, check_key, child_step, parse_run_id, run_id, token_step
from keiro.mapper import EventMapper
from keiro.projections.run_parents import closes
from keiro.projections.waits import Spawned
from keiro.reports import SENTENCES
from keiro.retry import Retry
from keiro.rows import Head, Run
from keiro.run import WorkflowRun, aggregate_of, apply_event, bind, new_events
from keiro.stores.base import Store
from keiro.stores.connections import to_the_end
from keiro.threads import in_thread
from keiro.waits import Waits, is_external

_NO_MORE: Final = 2**62
"""The version up to which there are snapshots of a run that gets no more of them: a gap could not be read over."""
COMPLETED: Final = "__workflow_completed__"
FAILED: Final = "__workflow_failed__"
STARTED: Final = "__workflow_started__"
STORE_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Host(Protocol):
    """What a driver needs of the engine that hosts it."""

    store: Store
    mapper: EventMapper
    strict: bool
    payload_limit: int

    def wall_ms(self) -> int:
        """The time events are recorded at."""

    def holds(self) -> bool:
        """Whether this process still owns its runs, so that an effect may begin; if not, it seals them."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""

    def birth_owner(self, workflow: Workflow) -> int | None:
        """The worker to be that a run of this workflow may be born as owned by, if there is one and it has room."""

    def submit_birth(self, command: Command) -> Future[Outcome]:
        """Send a command with which a run may be born as ours."""

    async def perform(
        self, call: Callable[[Any], Awaitable[bytes]], record: Callable[[bytes], Command], *, is_async: bool
    ) -> tuple[bytes, Outcome] | Outcome:
        """Call with a connection and execute the command that records what that gave, in one transaction."""

    async def child_cancelled(self, run_id: str) -> bool:
        """Cancel a run; whether it was this call that did."""

    async def child_status(self, run_id: str) -> str:
        """Where a run stands."""


class Handle(Protocol):
    """Who is told of the end of a run that it started."""

    ended: Run | None


class Strand:
    """One asyncio task of a run: where it stands in time and in its own stream of random numbers.

    Strands are named by the path of their creation (`0`, `0.1`, `0.1.2`), which a replay repeats, not by the order in
    which they happened to run.
    """

    __slots__ = ("children", "driver", "now_ms", "path", "rng", "task")

    def __init__(self, driver: Driver, task: ReferenceType[Task[Any]], path: str, now_ms: int) -> None:
        self.driver = driver
        self.task = task
        self.path = path
        self.now_ms = now_ms
        self.children = 0
        self.rng: random.Random | None = None


_strand: ContextVar[Strand | tuple[Driver, str, int] | None] = inside

# A run without commands needs no queue of its own: an empty deque takes more memory than the rest of the driver.
_NO_EVENTS: Final[deque[Stored]] = deque(maxlen=0)


class Driver:
    """One resident run."""

    __slots__ = (
        "__weakref__",
        "_attempts",
        "_begun",
        "_behind",
        "_called",
        "_catching",
        "_cleaning",
        "_clocks",
        "_consumed",
        "_handoff",
        "_history",
        "_idle",
        "_ids",
        "_in_flight",
        "_instance",
        "_keeping",
        "_kept_until",
        "_known",
        "_loop",
        "_names",
        "_past",
        "_patches",
        "_progress",
        "_raced",
        "_reading",
        "_recording",
        "_retracted",
        "_root",
        "_spawned",
        "_told",
        "_undo",
        "_unseen",
        "_version",
        "_waits",
        "_weight",
        "asked",
        "draining",
        "epoch",
        "handle",
        "host",
        "lost",
        "over",
        "owner",
        "parking",
        "run",
        "sealed",
        "task",
        "workflow",
    )

    def __init__(self, host: Host, workflow: Workflow, run: Run, head: Head, history: History) -> None:
        self.host = host
        self.workflow = workflow
        self.run = run
        self.owner = head.owner
        self.epoch = head.epoch
        self.sealed = False
        self.over = False
        self.draining: asyncio.Event | None = None
        self.handle: Callable[[], Handle | None] | None = None  # a weak reference to that of its start
        self._in_flight = 0
        self._called = 0
        self._begun = 0
        self.lost = False
        self.task: Task[None] | None = None
        self._version = head.version
        self._loop = asyncio.get_running_loop()
        self._names: dict[str, Any] = {}
        self._ids = StepIds(run.workflow, run.key, run.round_ordinal)
        self._past: History | None = history
        self._kept_until = 0  # the version up to which there are snapshots
        self._weight = 0  # the size of what was recorded since
        self._history: dict[str, Recorded] = {}
        self._unseen = _NO_EVENTS
        self._known = head.version
        self._root: Strand | None = None
        self._instance: WorkflowRun
        self._recording = 0
        self._reading = 0
        self._cleaning = 0  # how many cleanup steps are under way
        self.asked: Asked | None = None
        self._raced = 0  # the version of the last race that was replayed without its losers
        self._handoff: ContinueAsNew | None = None  # once the body has asked for the next round
        self._patches = workflow.patches  # those of the round's beginning, where it is not read: it began here
        self.parking: Future[None] | None = None  # while it is being decided whether the run leaves this process
        # What most runs never need is made when it is first needed.
        self._waits: Waits | None = None
        self._catching: Task[None] | None = None
        self._behind = False  # whether others may have appended what was not read here
        self._clocks: dict[str, int] | None = None
        self._retracted: dict[str, int] | None = None
        self._consumed: set[str] | None = None
        self._told: set[str] | None = None  # of those that were consumed, what the journal says
        self._spawned: dict[str, int] | None = None
        self._keeping: Task[None] | None = None
        self._attempts: dict[str, Begun] | None = None  # those the journal knows of, of steps without a result
        self._idle: dict[str, tuple[asyncio.Timeout, float]] | None = None
        self._progress: dict[str, tuple[bytes, Task[None]]] | None = None
        self._undo: dict[str, tuple[int, Step, Any, tuple[Any, ...], dict[str, Any]]] | None = None

    # Life

    async def drive(self) -> None:
        """Run the body to its end and settle the run, unless it is sealed before."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        if self.sealed:
            return  # before its first tick: there was no task to cancel yet
        self._remember()
        self._root = Strand(self, ref(task), "0", self.run.created_at_ms)
        _strand.set(self._root)
        if self.asked is not None:
            self.asked.watch()
        try:
            self._instance = instance = aggregate_of(self.workflow, self.run)
            bind(instance, self)
            args, kwargs = self.workflow.input.decode(self.run.input_json.encode())
            result = await self.workflow.body(instance, *args, **kwargs)
            if self.sealed:
                return  # the body swallowed the seal and went on to its end: whatever it returned is not the run's
            if self.asked is None and self._handoff is not None:
                # It swallowed the end of its round, which holds all the same: nothing it did since is recorded.
                self.host.report("handoff_swallowed", self.run.run_id)
                raise self._handoff
            # Where it swallowed its interruption, that changes nothing.
            event: Event | ContinueAsNew = self._completed(result) if self.asked is None else self._cancelled()
        except (RunSealed, ContinueAsNew):
            if self.sealed or self._handoff is None:
                return
            event = self._handoff
        except asyncio.CancelledError as error:
            # Cancelled from outside (shutdown, the loop's end): the run is handed back, it has not failed. Without a
            # request to cancel this task, the body awaited something that was cancelled: that is its own failure.
            asked = self.asked
            if self.sealed or task.cancelling() > (0 if asked is None else asked.cancels):
                self.sealed = True
                raise
            event = self._failed(error) if asked is None else self._cancelled()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # the process, or this coroutine, is about to end: nothing has been decided about the run
        except BaseException as error:
            # Also what is no Exception: left to the engine, it would be driven into again and again, and never end.
            event = self._failed(error) if self._handoff is None or not _is_handoff(error) else self._handoff
            if self.asked is not None:
                self.host.report("cleanup_failed", self.run.run_id, error=summary(capture(error)))
                event = self._cancelled()
        finally:
            # From here on no task that the body has left behind begins an effect, whose record would be refused, and
            # none waits any more.
            self.over = True
            if self._waits is not None:
                self._waits.seal()
            if self.asked is not None:
                self.asked.release()
        if self.asked is not None and self.asked.cancels:
            task.uncancel()
        try:
            await (self._rotate(event.payload) if isinstance(event, ContinueAsNew) else self._settle(event))
        except RunSealed:
            return  # what a sealed body raises is not the run's either
        if self.run.terminal and self._kept_until > 1:
            with suppress(StoreError):
                await self.host.store.drop_step_maps(self.run.run_key)

    def _completed(self, result: Any) -> Event:
        self._check_replayed()
        payload = codec.encode(result, where=f"result of workflow {self.run.workflow!r}", limit=self.host.payload_limit)
        # A result that nobody could read would make the run completed, and every look at it an error.
        self.workflow.decode_result(payload)
        return WorkflowCompleted(result=Raw(payload))

    def _cancelled(self) -> Event:
        """How a run that is asked to end ends, however its body did."""
        assert self.asked is not None
        return WorkflowCancelled(reason=self.asked.reason)

    def _check_replayed(self) -> None:
        """Whether the body that has returned is the one that was recorded."""
        if self._called != self._begun:
            self._doubt("never_awaited", self._called - self._begun)
        # Children, deferreds and tokens may be asked for again and stay. What is older than a race may have been
        # recorded by a loser of it, which a replay leaves out.
        forgotten = sorted(
            name
            for name, found in self._history.items()
            if found.version > self._raced and not name.startswith(("awk", "child:"))
        )
        if forgotten:
            self._doubt("never_asked_for", ", ".join(forgotten[:10]))

    def _doubt(self, what: str, steps: object) -> None:
        if self.host.strict:
            raise NonDeterminism(SENTENCES[what][1].format(run_id=self.run.run_id, steps=steps))
        self.host.report(what, self.run.run_id, steps=steps)

    def _remember(self) -> None:
        """Read the history, here and not where runs are adopted: one that cannot be read stops no other run."""
        assert self._past is not None
        (snapshots, stored), self._past = self._past, None
        others = [row for one in snapshots for row in one.events(self.run.run_key)]
        first = (others or stored)[:1]
        if first and first[0].version == 1:
            self._patches = _decode_started(first[0].payload).patches
        if not snapshots:
            stored = stored[1:] if first and first[0].version == 1 else stored
        after = self._kept_until = snapshots[-1].until if snapshots else 1
        check_contiguous(self.run.run_id, stored, after=after, until=self._known)
        # More than the head had at the claim, where somebody appended before the history was read.
        self._version = self._known = stored[-1].version if stored else max(after, self._known)
        past = past_of(self.run.run_id, stored, snapshots)
        self._history, self._clocks, self._retracted, self._told, request, self._attempts = past
        if request is not None:
            self._ask(request)
            # What came from outside after the request is not delivered: nobody waited for it any more.
            for name in [name for name, found in self._history.items() if found.version > request.version]:
                if is_external(name):
                    del self._history[name]
        if self.workflow.aggregate is not None:
            self._unseen = deque(row for row in (*others, *stored) if ":" in row.topic)

    def _failed(self, error: BaseException) -> Event:
        policy = self.workflow.retry
        attempt = self.run.attempts + 1
        delay = None
        if policy is not None and not isinstance(error, PayloadRejected):
            delay = policy.delay(attempt, error, random.random())
        failure = capture(error)
        if delay is None:
            return WorkflowFailed(failure=failure)
        due = self.host.wall_ms() + round(delay * 1000)
        return WorkflowRetried(attempt=attempt, failure=failure, next_attempt_at_ms=due)

    def _ask(self, request: Request) -> None:
        """The run is asked to end."""
        self.run = replace(self.run, cancel_requested_at_ms=request.at_ms)
        self.asked = Asked(self, request.version, request.reason)

    async def _settle(self, event: Event) -> None:
        # A failure may be followed by another one after a resurrection or a retry, so its id is fresh each time.
        event_id = uuid.uuid4().bytes
        if isinstance(event, WorkflowCompleted | WorkflowCancelled):
            event_id = self._ids(COMPLETED if isinstance(event, WorkflowCompleted) else CANCELLED)
        consumed = self.newly_consumed()
        if consumed and isinstance(event, WorkflowCompleted | WorkflowFailed):
            event = replace(event, consumed=consumed)
        run = self.run
        alone = run.parent_run_id is None and not self._clocks and not consumed and run.cleanup_ms is None
        outcome, _ = await self._record(new(event, event_id), alone=alone)
        if isinstance(outcome, VersionConflict):
            await self._settle_asked(run)
            return
        match event:
            case WorkflowFailed():
                self.host.report("run_failed", self.run.run_id, error=summary(event.failure))
            case WorkflowRetried():
                seconds = (event.next_attempt_at_ms - self.host.wall_ms()) / 1000
                failure = summary(event.failure)
                self.host.report(
                    "run_retried", self.run.run_id, attempt=event.attempt, error=failure, seconds=round(seconds, 1)
                )

    async def _settle_asked(self, run: Run) -> None:
        """The body has ended, and before that was recorded the run was asked to end: so it ends as cancelled."""
        assert self.asked is not None
        self.run = replace(run, cancel_requested_at_ms=self.run.cancel_requested_at_ms)
        await self._settle(self._cancelled())

    def seal(self) -> None:
        """Stop the body before its next effect; from now on nothing is recorded."""
        if not self.sealed:
            self.sealed = True
            if self.draining is not None:
                self.draining.set()
            if self._waits is not None:
                self._waits.seal()
            if self.asked is not None:
                self.asked.release()
            if self.task is not None and not self.task.done():
                self.task.cancel()

    def drain(self) -> None:
        """Let the steps under way end and be recorded, begin no other, then stop."""
        self.draining = asyncio.Event()
        if not self._in_flight:
            self.seal()

    # Recording

    async def _record(
        self, *events: New, alone: bool = True, exact: bool = False, within: Within | None = None
    ) -> tuple[Outcome, int]:
        """Append events under the fence, however often the store is away meanwhile; and when they were recorded.

        With `exact`, only if nothing else has been appended that was not read here: else the outcome is
        `VersionConflict`, and what came has been read. `within` makes the append part of a command of more runs.
        """
        self._recording += 1  # one coroutine for all of it: every step goes through here
        try:
            pauses = iter(STORE_RETRY_S)
            while True:
                if self.parking is not None:
                    await asyncio.shield(self.parking)
                if self.sealed:
                    raise RunSealed(_sealed(self.run.run_id))
                at_ms = self.host.wall_ms()
                if exact and self._behind:
                    # The head is known to be further than what was read: an append that holds at the head would
                    # be recorded as if nothing had come, and a replay would read it the other way round.
                    await self.catch_up()
                    return VersionConflict(self._version), at_ms
                try:
                    outcome = await self._send(events, at_ms, alone, exact, within)
                except (StoreError, ProjectionFailed) as error:
                    # The effect has happened: its record must not be lost to an outage, or to a read model that cannot
                    # fold it. Nothing was written (or it was, and its id tells), so the same event is sent again, at
                    # the version the run now has.
                    if self._left_behind(events):
                        # Its record would be refused, so neither an engine that closes nor an outage is news to it.
                        raise RunSealed(_sealed(self.run.run_id)) from error
                    what = "record_refused" if isinstance(error, ProjectionFailed) else "store_away"
                    self.host.report(what, self.run.run_id, error=str(error))
                    await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))
                    await self._reload()
                    continue
                if type(outcome) is Appended:
                    self._appended(outcome, events)
                    return outcome, at_ms
                if isinstance(outcome, AlreadyPresent):
                    self._version = max(self._version, outcome.stored.version)
                    return outcome, outcome.stored.recorded_at_ms
                if isinstance(outcome, VersionConflict):
                    self._version = outcome.version
                    await self.catch_up()
                    return outcome, at_ms
                if isinstance(outcome, Cyclic):
                    await self._reload()
                    raise RunParentCycle(closes(outcome.path), outcome.path)
                if isinstance(outcome, Refused):
                    await self._reload()
                    raise RunConflict(f"{self.run.run_id}: {outcome.reason}")
                raise self._fenced(outcome, events)
        finally:
            self._recording -= 1

    def _appended(self, outcome: Appended, events: tuple[New, ...]) -> None:
        if outcome.version > self._version:
            # Somebody else appended to this run meanwhile; the store decided anew, on what is there now.
            # The version hides it from those who compare versions, so this is the last time to notice.
            self._version = outcome.version
            self.wake()
        if outcome.version - self._kept_until >= history.EVERY:
            self._keep_snapshot(outcome.version)
        if outcome.version == self._known + len(events) and not _of_user(events):
            self._known = outcome.version  # nobody else's event is between them

    def _fenced(self, outcome: Outcome, events: tuple[New, ...]) -> RunSealed:
        """The run has ended, or is another's: nothing more is recorded here."""
        self.lost = True
        self.seal()
        match outcome:
            case _ if self._left_behind(events):
                pass  # nobody has taken the run: it gave up its owner when it ended
            case FenceLost():
                self.host.report("fence_lost", self.run.run_id)
            case RefusedTerminal():
                self.host.report("already_ended", self.run.run_id, status=outcome.status)
        return RunSealed(_sealed(self.run.run_id))

    async def _perform(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        name: str,
        record: Callable[[bytes], StepRecorded],
    ) -> tuple[bytes, Outcome, int]:
        """Call a step with a connection, and record what it returned in the transaction on it: its payload, the outcome
        of the append, and when it was recorded. While the store is away the whole transaction is tried again."""
        events: tuple[New, ...] = ()
        at_ms = 0

        async def call(connection: Any) -> bytes:
            value = await _limited(step, (connection, *args), kwargs, timeout, partial(to_the_end, connection))
            self._check_not_interrupted(step)
            return codec.encode(value, where=f"result of step {name!r}", limit=self.host.payload_limit)

        def append(payload: bytes, expected: int | None = None, *, exact: bool = False) -> Append:
            nonlocal events, at_ms
            if self.sealed or not self.host.holds():
                raise RunSealed(_sealed(self.run.run_id))
            run, at_ms = self.run, self.host.wall_ms()
            events = (new(record(payload), self._id(name)),)
            return Append(
                run.run_id, events, at_ms, run.run_key, self.owner, self.epoch, expected, exact=exact, alone=False
            )

        pauses = iter(STORE_RETRY_S)
        looks = False
        while True:
            done: tuple[bytes, Outcome] | Outcome
            try:
                if looks:
                    # What was lost may be the answer to the commit. Under the lock of the journal, which that commit
                    # held, this tells whether it is there, and appends nothing.
                    done = await self.host.store.submit(append(b"null", -1, exact=True))
                    looks = False
                    if isinstance(done, VersionConflict):
                        continue
                else:
                    done = await self.host.perform(call, append, is_async=step.is_async)
            except StoreError as error:
                if self.sealed:
                    raise RunSealed(_sealed(self.run.run_id)) from error
                self.host.report("store_away", self.run.run_id, error=str(error))
                await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))
                looks = True
                continue
            payload, outcome = done if isinstance(done, tuple) else (b"", done)
            if isinstance(outcome, Appended):
                self._version += 1
                self._weight += len(payload)
                self._appended(outcome, events)
            elif isinstance(outcome, AlreadyPresent):
                self._version = max(self._version, outcome.stored.version)
                at_ms = outcome.stored.recorded_at_ms
            else:
                raise self._fenced(outcome, events)
            return payload, outcome, at_ms

    def _left_behind(self, events: tuple[New, ...]) -> bool:
        """Whether these are of a task that the body left behind, while or after the end of the run is recorded."""
        return self.over and self.run.terminal and events[0].event.__class__ in (StepRecorded, AttemptFailed)

    def _send(
        self, events: tuple[New, ...], at_ms: int, alone: bool, exact: bool, within: Within | None
    ) -> Future[Outcome]:
        append = self._appending(events, at_ms, alone and within is None, exact)
        return self.host.store.submit(append) if within is None else self.host.submit_birth(within(append))

    def _appending(self, events: tuple[New, ...], at_ms: int, alone: bool = True, exact: bool = False) -> Append:
        run = self.run
        first = events[0].event
        if type(first) is StepRecorded and not first.step.startswith(ATTRIBUTES):
            after = run
        else:
            after = fold(run, events, at_ms)
        expected = self._version
        self._version = expected + len(events)
        self._weight += len(events[0].payload)
        changed = None
        if after is not run:
            self.run = changed = after
        return Append(
            run.run_id,
            events,
            at_ms,
            run.run_key,
            self.owner,
            self.epoch,
            expected,
            changed,
            exact,
            alone and not exact,
        )

    # Snapshots

    def _keep_snapshot(self, recorded: int) -> None:
        if self._keeping is None:
            name = f"snapshot {self.run.run_id}"
            self._keeping = self._loop.create_task(self._keep_snapshots(recorded), name=name)

    async def _keep_snapshots(self, recorded: int) -> None:
        """Keep snapshots of what has been recorded since the last one, up to the version `recorded`, so that a replay
        has less to read."""
        run_key, store = self.run.run_key, self.host.store
        weight, self._weight = self._weight, 0
        try:
            if weight > history.MOST_BYTES:
                self._kept_until = _NO_MORE
                return
            while recorded - self._kept_until >= history.EVERY:
                after = self._kept_until if self._kept_until > 1 else 0
                await store.snapshot(run_key, after, after + history.EVERY)
                self._kept_until = after + history.EVERY
                await asyncio.sleep(0)
        except StoreError as error:
            # Only a replay would have been quicker for it.
            self._kept_until = _NO_MORE
            if not self.over and not self.sealed:
                self.host.report("snapshot_failed", self.run.run_id, error=str(error))
        finally:
            self._keeping = None

    # What others append

    @property
    def version(self) -> int:
        """The version the run has when all that was sent is recorded."""
        return self._version

    @property
    def busy(self) -> bool:
        """Whether a step runs, something is being recorded, or the body is about to be interrupted."""
        return bool(self._in_flight or self._recording or (self.asked is not None and not self.asked.interrupted))

    @property
    def delivering(self) -> bool:
        """Whether something is being recorded or read that the body is to see, or a cleanup step is under way."""
        return bool(self._recording or self._reading or self._cleaning or self._catching or self.parking)

    def gone_on(self) -> object:
        """Something else whenever the body has gone on."""
        return self._version, self._called, self._begun, len(self._history)

    def left_before(self, version: int) -> bool:
        """Whether the body has not asked yet for all of its own that was recorded before this version."""
        return any(
            self._raced < found.version < version and not name.startswith(("awk", "child:"))
            for name, found in self._history.items()
        )

    @property
    def resting(self) -> bool:
        """Whether the body does nothing but wait, as far as it does so through `run`."""
        waits = self._waits
        idle = not self.busy and self.parking is None and self._catching is None and not self.sealed and not self.over
        return idle and bool(waits) and waits is not None and not waits.come()

    def newly_consumed(self) -> tuple[str, ...]:
        """The deferreds whose completions the body has taken, and the journal does not say so yet."""
        return () if self._consumed is None else tuple(sorted(self._consumed - (self._told or set())))

    def is_recorded(self, step: str) -> bool:
        """Whether `step` is in the history that was read and not yet taken."""
        return step in self._history

    def wake(self) -> None:
        """Others have appended to the run: read it, if anything waits for that, else when something does."""
        self._behind = True
        # A run that may be asked to end is asked whatever it does.
        if (self._waits or self.run.cleanup_ms is not None) and self._catching is None and not self.sealed:
            self._catching = self._loop.create_task(self.catch_up(), name=f"catch up {self.run.run_id}")
            self._catching.add_done_callback(self._caught_up)

    def _caught_up(self, task: Task[None]) -> None:
        self._catching = None
        error = None if task.cancelled() else task.exception()
        if self.sealed:
            return  # it was stopped meanwhile, and nothing waits any more
        if error is not None:
            self.host.report("store_away", self.run.run_id, error=str(error))
            self._loop.call_later(0.5, self.wake)
        else:
            self.look()  # what came while the journal was read may not be in what was read

    def look(self) -> None:
        """Read what others appended while nothing waited for it, if they did."""
        if self._behind:
            self.wake()

    async def catch_up(self) -> None:
        """Read what was appended since, and give it to who waits for it."""
        known = self._known
        self._behind = False  # before it is read: what comes meanwhile is read again
        try:
            rows = await self._read_on(known)
        except BaseException:
            self._behind = True
            raise
        self._absorb(known, rows)

    def _absorb(self, known: int, rows: list[Stored]) -> None:
        rows = [row for row in rows if row.version > self._known]  # others may have read on meanwhile
        if not rows:
            return
        check_contiguous(self.run.run_id, rows, after=self._known, until=self._known)
        for row in rows:
            if ":" in row.topic:
                if self.workflow.aggregate is not None:
                    if self._unseen is _NO_EVENTS:
                        self._unseen = deque()
                    self._unseen.append(row)
                    if self._waits is not None:
                        self._waits.commanded()
            elif row.topic == "StepRecorded":
                found = read_step(row)
                if is_external(found.step) and self.asked is None:
                    self._history[found.step] = found
                    if self._waits is not None:
                        self._waits.recorded(found.step)
            elif row.topic == "StateChanged" and self.run.cleanup_ms is not None:
                changed = _decode_state(row.payload)
                if changed.state == "cancel_requested":
                    self._ask(request_of(row, changed))
                    assert self.asked is not None
                    self.asked.watch()
            elif row.topic == "StepRetracted":
                # A child was resurrected: what the body has not asked for yet is waited for anew, as a replay will.
                step = _decode_retracted(row.payload).step
                if is_external(step):
                    self._history.pop(step, None)
        self._known = rows[-1].version
        self._version = max(self._version, self._known)

    async def _reload(self) -> None:
        pauses = iter(STORE_RETRY_S)
        while True:
            if self.sealed:
                raise RunSealed(_sealed(self.run.run_id))
            try:
                found = await self.host.store.head(self.run.run_id)
            except StoreError:
                await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))
                continue
            if found is not None:
                self._version = found[1].version
                self.wake()  # as where others appended: whose the last events are is not known here
            return

    # What a body calls

    def step(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        retry: Retry | None,
        timeout: float | None,
    ) -> Coroutine[Any, Any, Any]:
        """Reserve the step's name now; the coroutine returns its result."""
        strand = self._here()
        name = self._reserve(name, strand)
        self._called += 1
        found = self._history.pop(name, None)
        if found is None:
            call = self._execute(strand, step, name, args, kwargs, retry or step.retry, timeout or step.timeout, 1)
        else:
            call = self._replay(strand, found, step, name, args, kwargs, retry, timeout)
        return self._clean(call) if step.cleanup else call

    async def _clean(self, call: Coroutine[Any, Any, Any]) -> Any:
        self._cleaning += 1
        try:
            return await call
        finally:
            self._cleaning -= 1

    def _reserve(self, name: str, strand: Strand) -> str:
        seen = self._names.get(name)
        if seen is None:
            self._names[name] = [strand.path, 1]
            return name
        if seen[0] != strand.path:
            raise StepNameClash(
                f"step {name!r} of {self.run.run_id} is used by two tasks at once, a replay could not tell them apart: "
                "pass key= to name each call, or use run.scope(key) or run.map(...)"
            )
        seen[1] += 1
        return f"{name}#{seen[1]}"

    async def _replay(
        self,
        strand: Strand,
        found: Recorded,
        step: Step,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retry: Retry | None,
        timeout: float | None,
    ) -> Any:
        self._begun += 1
        if found.inputs_digest is not None and found.inputs_digest != codec.digest(args, kwargs):
            problem = f"step {name!r} of {self.run.run_id} was recorded with other inputs than it is called with now"
            if self.host.strict:
                raise NonDeterminism(f"{problem}: the body must call it with the same values at every replay")
            self.host.report("inputs_differ", self.run.run_id, step=name)
        failed = found.failed
        if failed is not None and failed.next_attempt_at_ms is not None:
            if self.asked is not None and not step.cleanup:
                await self.asked.refuse(f"step {name!r}")
            await self._pause(name, failed.next_attempt_at_ms)
            self._called += 1
            return await self._execute(
                strand, step, name, args, kwargs, retry or step.retry, timeout or step.timeout, failed.attempt + 1
            )
        strand.now_ms = found.at_ms
        if self._unseen:
            await self._deliver(found.version)
        if failed is not None:
            raise revive(failed.failure)
        value = step.decode(found.result)
        if step.compensate is not None:
            self._can_undo(found.version, name, step, value, args, kwargs)
        return value

    async def _execute(
        self,
        strand: Strand,
        step: Step,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retry: Retry | None,
        timeout: float | None,
        attempt: int,
    ) -> Any:
        host = self.host
        self._begun += 1
        # An annotation that no JSON can be read as is refused before the effect, not after it.
        step.decode.compile()
        if step.tier == IRREVERSIBLE and retry is not None and step.idempotency_key is None:
            raise InvalidCall(
                f"step {name!r} is irreversible and has retries: without idempotency_key= a second attempt could "
                "perform its effect twice. Give it one, or no retry"
            )
        if self._attempts is not None and (known := self._attempts.get(name)) is not None:
            attempt = max(attempt, known.attempt + known.failed)  # one that was interrupted goes on under its number
        digest = codec.digest(args, kwargs) if args or kwargs else None
        while True:
            if self.draining is not None:
                # Steps of other tasks are still to end and be recorded: raising here could stop the body before.
                await self.draining.wait()
            if self.parking is not None:
                await asyncio.shield(self.parking)
            if self.asked is not None and not step.cleanup:
                await self.asked.refuse(f"step {name!r}")
            if self.sealed or self.over or not host.holds():
                raise RunSealed(_sealed(self.run.run_id))
            started = host.wall_ms()
            self._in_flight += 1
            outside = _strand.set((self, name, attempt))
            try:
                try:
                    if step.tier is not None and not step.transactional:
                        await self._admit(step, name, attempt, args, kwargs)
                    if step.transactional:
                        record = partial(_recorded, name, attempt, started, digest)
                        payload, outcome, strand.now_ms = await self._perform(step, args, kwargs, timeout, name, record)
                    else:
                        if timeout is not None or step.idle_timeout is not None:
                            value = await self._timed(step, name, args, kwargs, timeout)
                        elif step.is_async:
                            value = await step.fn(*args, **kwargs)
                        else:
                            value = await in_thread(step.fn, args, kwargs)
                        self._check_not_interrupted(step)
                        payload = codec.encode(value, where=f"result of step {name!r}", limit=host.payload_limit)
                except Exception as error:
                    self._check_not_interrupted(step)
                    failed = AttemptFailed(
                        step=name,
                        attempt=attempt,
                        failure=capture(error),
                        next_attempt_at_ms=self._next_attempt(retry, attempt, error),
                        started_at_ms=started,
                        inputs_digest=digest,
                    )
                    outcome, strand.now_ms = await self._record(new(failed, uuid.uuid4().bytes))
                    again_at = failed.next_attempt_at_ms
                    then = "it is raised in the body" if again_at is None else "it is tried again"
                    if self._attempts is not None and (known := self._attempts.get(name)) is not None:
                        known.attempt, known.failed = attempt, True
                    told = summary(failed.failure)
                    host.report("attempt_failed", self.run.run_id, step=name, attempt=attempt, error=told, then=then)
                    if self.workflow.aggregate is not None:
                        await self._deliver(self._version_of(outcome))
                    if again_at is None:
                        # Raised as a replay will raise it, so that the body sees the same now.
                        again = revive(failed.failure)
                        raise again.with_traceback(error.__traceback__) from again.__cause__
                else:
                    if not step.transactional:
                        recorded = _recorded(name, attempt, started, digest, payload)
                        outcome, strand.now_ms = await self._record(new(recorded, self._id(name)))
                    if type(outcome) is AlreadyPresent:
                        # Another writer recorded this step first: its value is the step's.
                        payload = bytes(decode_step(outcome.stored.payload).result)
                    if self.workflow.aggregate is not None:
                        await self._deliver(self._version_of(outcome))
                    if self._attempts is not None:
                        self._attempts.pop(name, None)
                    # Decoded only now: a value that its own annotation cannot read raises every time, but its effect
                    # is not repeated.
                    value = step.decode(payload)
                    if step.compensate is not None:
                        self._can_undo(self._version_of(outcome), name, step, value, args, kwargs)
                    return value
            finally:
                try:
                    _strand.reset(outside)
                except ValueError:
                    pass  # what was left suspended is closed by whoever collects it, in a context of its own
                self._in_flight -= 1
                if self.draining is not None and not self._in_flight:
                    self.seal()
            await self._pause(name, again_at)
            attempt += 1

    # Attempts

    async def _admit(self, step: Step, name: str, attempt: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a tier asks for before an attempt: that it is known before anything of its effect may have happened."""
        known = None if self._attempts is None else self._attempts.get(name)
        key: str | None = None
        preimage: Raw | UnsetType = UNSET
        if step.tier == IRREVERSIBLE:
            key = None if step.idempotency_key is None else step.idempotency_key(*args, **kwargs)
            if key is not None and (not isinstance(key, str) or not key):
                raise InvalidCall(f"idempotency_key of step {name!r} must give a text, and gave {key!r:.200}")
            if key is None and known is not None:
                raise EffectUnknown(
                    f"{self.run.run_id}: attempt {known.attempt} of the irreversible step {name!r} was interrupted, "
                    "and nobody knows whether its effect happened. It has no idempotency key, so it is not repeated: "
                    "find out, and catch this in the body, or allow another attempt by engine.retract_step and "
                    "engine.resurrect"
                )
        elif step.tier == COMPENSABLE:
            if known is not None and known.preimage is not UNSET and step.restore is not None:
                await _run(step.restore, (msgspec.json.decode(known.preimage), *args), kwargs)
            if (known is None or known.failed) and step.preimage is not None:
                taken = await _run(step.preimage, args, kwargs)
                where = f"preimage of step {name!r}"
                preimage = Raw(codec.encode(taken, where=where, limit=self.host.payload_limit))
        else:
            return
        if known is not None and not known.failed:
            return  # it is recorded that this attempt has begun
        started = AttemptStarted(step=name, attempt=attempt, tier=step.tier, idempotency_key=key, preimage=preimage)
        event_id = uuid.uuid4().bytes if known is not None else self._ids(begun_step(name, self.retractions(name)))
        await self._record(new(started, event_id))
        if self._attempts is None:
            self._attempts = {}
        checkpoint = None if known is None else known.checkpoint
        self._attempts[name] = Begun(attempt, step.tier, key, preimage, checkpoint)

    def attempt(self, step: str, number: int) -> Attempt:
        """What is known of an attempt that is under way."""
        known = None if self._attempts is None else self._attempts.get(step)
        return Attempt(
            self.run.run_id,
            step,
            number,
            (None if known is None else known.key) or f"{self.run.run_id}/{self._again(step)}",
            None if known is None or known.checkpoint is None else msgspec.json.decode(known.checkpoint),
        )

    def beat(self, step: str, number: int, *checkpoint: Any) -> None:
        """A sign of life of an attempt; from any thread."""
        payload = None
        if checkpoint:
            payload = codec.encode(checkpoint[0], where=f"checkpoint of step {step!r}", limit=MOST_BYTES)
        if asyncio._get_running_loop() is self._loop:
            self._beat(step, number, payload)
        else:
            self._loop.call_soon_threadsafe(self._beat, step, number, payload)

    def _beat(self, step: str, number: int, payload: bytes | None) -> None:
        if self._idle is not None and (timed := self._idle.get(step)) is not None and not timed[0].expired():
            timed[0].reschedule(self._loop.time() + timed[1])
        if payload is None or self.sealed or self.over:
            return
        if self._progress is None:
            self._progress = {}
        if step not in self._progress:
            task = self._loop.create_task(self._record_progress(step, number), name=f"progress {self.run.run_id}")
            self._progress[step] = (payload, task)
        else:
            self._progress[step] = (payload, self._progress[step][1])

    async def _record_progress(self, step: str, number: int) -> None:
        """Record checkpoints of an attempt, the newest of those that came while the last one was being recorded."""
        assert self._progress is not None
        recorded: bytes | None = None
        try:
            while (payload := self._progress[step][0]) is not recorded:
                progress = AttemptProgressed(step=step, attempt=number, checkpoint=Raw(payload))
                await self._record(new(progress, uuid.uuid4().bytes))
                recorded = payload
                if self._attempts is None:
                    self._attempts = {}
                self._attempts.setdefault(step, Begun(number)).checkpoint = Raw(payload)
        except RunSealed:
            pass  # whoever drives the run now goes on from the last one that was recorded
        finally:
            del self._progress[step]

    async def _timed(
        self, step: Step, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Any:
        if step.idle_timeout is None:
            return await _limited(step, args, kwargs, timeout)
        if self._idle is None:
            self._idle = {}
        try:
            async with asyncio.timeout(step.idle_timeout) as limit:
                self._idle[name] = (limit, step.idle_timeout)
                return await _limited(step, args, kwargs, timeout)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"step {step.name!r} sent no heartbeat for {step.idle_timeout:g} s") from None
            raise
        finally:
            del self._idle[name]

    def _can_undo(
        self, version: int, name: str, step: Step, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._undo is None:
            self._undo = {}
        self._undo[name] = (version, step, value, args, kwargs)

    def compensate(self) -> Coroutine[Any, Any, None]:
        """Undo what compensable steps have done, the newest first."""
        self._here()
        return self._compensate()

    async def _compensate(self) -> None:
        while self._undo:
            # By the order of their records, which is that of every replay.
            name = max(self._undo, key=lambda name: self._undo[name][0])  # type: ignore[index]
            _, step, value, args, kwargs = self._undo.pop(name)
            assert step.compensate is not None
            undoing = copy.copy(step.compensate)
            undoing.cleanup = True  # what was done is undone, also in a run that is asked to end
            await self.step(undoing, (value, *args), kwargs, name=f"compensate:{name}", retry=None, timeout=None)

    def _check_not_interrupted(self, step: Step) -> None:
        """A step that was interrupted for the request counts as interrupted, whatever it made of it: a replay, which
        does not run it, raises the same."""
        if self.asked is not None and self.asked.interrupted and not step.cleanup:
            raise asyncio.CancelledError

    def _next_attempt(self, retry: Retry | None, attempt: int, error: Exception) -> int | None:
        # A value that cannot be stored will not become storable by running the step again.
        if retry is None or isinstance(error, PayloadRejected | EffectUnknown):
            return None
        delay = retry.delay(attempt, error, random.random())
        return None if delay is None else self.host.wall_ms() + round(delay * 1000)

    async def _pause(self, name: str, until_ms: int) -> None:
        if until_ms > self.host.wall_ms():
            await self.waits.over("retry", f"retry:{name}", until_ms)

    def _id(self, name: str) -> bytes:
        """The id of the event that records a step."""
        return self._ids(self._again(name))

    def _again(self, name: str) -> str:
        return again(name, self._retracted.get(name, 0)) if self._retracted else name

    def retractions(self, step: str) -> int:
        """How often what was recorded of a step was retracted."""
        return self._retracted.get(step, 0) if self._retracted else 0

    # Waits

    @property
    def waits(self) -> Waits:
        """The open waits."""
        if self._waits is None:
            self._waits = Waits(self)
        return self._waits

    async def _own(self, strand: Strand, step: str, result: bytes, *, exact: bool = False) -> bool:
        """Record a step of the engine's own; False if something came before it, where that must not be."""
        self._check_going_on()
        recorded = StepRecorded(step=step, result=Raw(result), started_at_ms=self.host.wall_ms())
        outcome, at_ms = await self._record(new(recorded, self._id(step)), alone=False, exact=exact)
        if isinstance(outcome, VersionConflict):
            return False
        if self._clocks is not None:
            self._clocks.pop(step, None)
        strand.now_ms = at_ms
        if self.workflow.aggregate is not None:
            await self._deliver(self._version_of(outcome))
        return True

    def _check_going_on(self) -> None:
        if self.asked is not None and self.asked.interrupted:
            raise asyncio.CancelledError  # in a task that nobody awaits
        if self.sealed or self.over or not self.host.holds():
            raise RunSealed(_sealed(self.run.run_id))

    async def _take(self, strand: Strand, found: Recorded) -> None:
        """A recorded step is delivered to the body."""
        strand.now_ms = found.at_ms
        if self._unseen:
            await self._deliver(found.version)

    async def _clock(self, kind: str, step: str, due_ms: int) -> int:
        """Set a clock, unless it is set: the first deadline wins."""
        if self._clocks is None:
            self._clocks = {}
        if step not in self._clocks:
            self._check_going_on()
            set_ = StateChanged(state="clock_scheduled", waits=(Wait(kind, step, due_ms),))
            outcome, _ = await self._record(new(set_, self._ids(f"clock:{self._again(step)}")), alone=False)
            if isinstance(outcome, AlreadyPresent):
                due_ms = _decode_state(outcome.stored.payload).waits[0].due_at_ms or due_ms
            self._clocks[step] = due_ms
        return self._clocks[step]

    def sleep(self, due_ms: Callable[[], int], name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine ends when `due_ms` has come, as it was when it was first asked."""
        strand = self._here()
        step = self._reserve(f"sleep:{name}", strand)
        return self._sleep(strand, self._history.pop(step, None), step, due_ms)

    async def _sleep(self, strand: Strand, found: Recorded | None, step: str, due_ms: Callable[[], int]) -> None:
        if found is not None:
            await self._take(strand, found)
            return
        if self.asked is not None:
            await self.asked.refuse(f"the sleep {step!r}")
        known = (self._clocks or {}).get(step)
        due = await self._clock("sleep", step, due_ms() if known is None else known)
        await self.waits.over("sleep", step, due)
        await self._own(strand, step, b"null")

    def wait(self, kind: str, step: str, timeout: float | None) -> Callable[[], Coroutine[Any, Any, Recorded]]:
        """Reserve the clock's name now; the coroutine waits for a step that others record, and raises `TimeoutError`
        after `timeout` seconds. It is made when it is awaited: a task that is cancelled before it begins awaits none.
        """
        strand = self._here()
        limit = None if timeout is None else self._reserve(f"timeout:{step}", strand)
        return partial(self._await, strand, kind, step, timeout, limit)

    async def _await(self, strand: Strand, kind: str, step: str, timeout: float | None, limit: str | None) -> Recorded:
        expired = None if limit is None else self._history.pop(limit, None)
        while True:
            found = self._history.get(step)
            if expired is not None and (found is None or expired.version < found.version):
                await self._take(strand, expired)
                raise self._too_late(step, timeout)
            if found is not None:
                if kind == "deferred":
                    self._consumed = self._consumed or set()
                    self._consumed.add(step.removeprefix("awk:"))
                await self._take(strand, found)
                return found
            if self.asked is not None:
                await self.asked.refuse(f"the wait for {step!r}")
            due = None
            if limit is not None and timeout is not None:
                due = await self._clock("timeout", limit, self.host.wall_ms() + round(timeout * 1000))
            if self._behind:
                # It may have come while nothing waited for it, and nobody wakes the run for it again.
                await self.catch_up()
                continue
            if await self.waits.over(kind, step, due, limit):
                continue
            assert limit is not None
            # Only if nothing came before it: whichever is first in the journal has won, for every replay.
            if await self._own(strand, limit, b"null", exact=True):
                raise self._too_late(step, timeout)

    def _too_late(self, step: str, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"{self.run.run_id} waited {timeout:g} s for {step!r}, and it did not come")

    def until(self, predicate: Callable[[], Any], timeout: float | None, name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine ends when `predicate` holds for what the body has been delivered."""
        strand = self._here()
        step = self._reserve(f"until:{name}", strand)
        return self._until(strand, self._history.pop(step, None), step, predicate, timeout)

    async def _until(
        self, strand: Strand, found: Recorded | None, step: str, predicate: Callable[[], Any], timeout: float | None
    ) -> None:
        limit = f"timeout:{step}"
        expired = None if timeout is None else self._history.pop(limit, None)
        if found is not None or expired is not None:
            recorded = found or expired
            assert recorded is not None
            await self._take(strand, recorded)
            if found is None:
                raise self._too_late(step, timeout)
            return
        if self.asked is not None:
            await self.asked.refuse(f"the wait {step!r}")
        due = None
        if timeout is not None:
            due = await self._clock("timeout", limit, self.host.wall_ms() + round(timeout * 1000))
        await self.catch_up()
        while True:
            held = bool(predicate())
            while not held and self._unseen:
                await self._deliver(self._unseen[0].version)
                held = bool(predicate())
            # Recorded only at the version that the body has seen, so that a replay delivers as much before it.
            if held:
                if not self._unseen and await self._own(strand, step, b"null", exact=True):
                    return
                if self._unseen:
                    await self._deliver(self._known)
                continue
            if await self.waits.command(step, due, limit):
                continue
            if not self._unseen and await self._own(strand, limit, b"null", exact=True):
                raise self._too_late(step, timeout)

    def first(self, awaitables: Sequence[Awaitable[Any]], name: str) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Reserve the name now; the coroutine gives the index and the value of what is done first."""
        strand = self._here()
        step = self._reserve(f"first:{name}", strand)
        # Reserved now and for all of them: a replay runs the winner only, and as the strand that it was.
        number = strand.children + 1
        strand.children += len(awaitables)
        return self._first(strand, self._history.pop(step, None), step, awaitables, number)

    async def _first(
        self, strand: Strand, found: Recorded | None, step: str, awaitables: Sequence[Awaitable[Any]], number: int
    ) -> tuple[int, Any]:
        racing = dict(enumerate(awaitables))
        if found is not None:
            winner = int(msgspec.json.decode(found.result))
            self._raced = max(self._raced, found.version)
            for index in [index for index in racing if index != winner]:
                self._discard(racing.pop(index))
        elif self.asked is not None and self.asked.interrupted:
            for awaitable in awaitables:
                self._discard(awaitable)
            await self.asked.refuse(f"the race {step!r}")
        tasks = {
            index: asyncio.ensure_future(self._branch(strand, number + index, awaitable))
            for index, awaitable in racing.items()
        }
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            winner = next(index for index, task in tasks.items() if task.done())
        finally:
            for task in tasks.values():
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        if found is None:
            await self._own(strand, step, b"%d" % winner)
        else:
            await self._take(strand, found)  # after the winner, as it was recorded after it
        return winner, tasks[winner].result()

    async def _branch(self, strand: Strand, number: int, awaitable: Awaitable[Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        _strand.set(Strand(self, ref(task), f"{strand.path}.{number}", strand.now_ms))
        return await awaitable

    def _discard(self, loser: object) -> None:
        """Leave out what lost a race, with the coroutines that it was given: nobody will await them."""
        if isinstance(loser, Future):
            loser.cancel()
        elif inspect.iscoroutine(loser) and inspect.getcoroutinestate(loser) == inspect.CORO_CREATED:
            if loser.cr_code in _OF_STEPS:
                self._called -= 1
            given = [] if loser.cr_frame is None else list(loser.cr_frame.f_locals.values())
            loser.close()
            for one in given:
                for inner in one if isinstance(one, tuple | list) else (one,):
                    self._discard(inner)

    def token(self, name: str) -> Coroutine[Any, Any, str]:
        """The coroutine gives the token of a deferred, which is recorded before it is given out."""
        strand = self._here()
        return self._token(strand, token_step(name))

    async def _token(self, strand: Strand, step: str) -> str:
        found = self._history.get(step)
        if found is None:
            if self.asked is not None:
                await self.asked.refuse(f"the token {step!r}")
            await self._own(strand, step, b'"%s"' % secrets.token_urlsafe(18).encode())
            rows = await self._read_on(1)
            found = next(one for row in rows if row.topic == "StepRecorded" and (one := read_step(row)).step == step)
            self._history[step] = found
        secret: str = msgspec.json.decode(found.result)
        return secret

    # Children

    def spawn(
        self,
        workflow: Workflow,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
        on_cancel: str,
        priority: int,
    ) -> Coroutine[Any, Any, str]:
        """Reserve the child's key now; the coroutine records the child and gives its key."""
        strand = self._here()
        if key is None:
            if self._spawned is None:
                self._spawned = {}
            path = f"{workflow.name}-" + strand.path.partition(".")[2]
            number = self._spawned[path] = self._spawned.get(path, 0) + 1
            key = f"{self.run.key}-{path}.{number}" if strand.path != "0" else f"{self.run.key}-{path}{number}"
        payload = workflow.input.encode(args, kwargs, limit=self.host.payload_limit)
        return self._spawn(strand, workflow, payload, check_key(key), on_cancel, priority)

    async def _spawn(
        self, strand: Strand, workflow: Workflow, payload: bytes, key: str, on_cancel: str, priority: int
    ) -> str:
        step, child = child_step(key), run_id(workflow.name, key)
        found = self._history.get(step)
        if found is None:
            if self.asked is not None:
                await self.asked.refuse(f"the spawn of {child}")
            self._check_going_on()
            at_ms = self.host.wall_ms()
            lineage = self.run.lineage_id
            started = WorkflowStarted(
                workflow=workflow.name,
                key=key,
                input=Raw(payload),
                parent=lineage,
                on_cancel=on_cancel,
                version=workflow.version,
                patches=workflow.patches,
                priority=priority,
                cleanup_ms=workflow.cleanup_ms,
            )
            spawned = Spawned(run_id=child, workflow=workflow.name, key=key, on_cancel=on_cancel)
            recorded = StepRecorded(step=step, result=Raw(msgspec.json.encode(spawned)), started_at_ms=at_ms)
            start = Start(child, new(started, self._ids(f"start:{child}")), at_ms, self.host.birth_owner(workflow))
            outcome, strand.now_ms = await self._record(
                new(recorded, self._id(step)), within=lambda append: Spawn(append, start)
            )
            if isinstance(outcome, VersionConflict):
                # Asked to end before the child was there: its family is complete, and this one never exists.
                assert self.asked is not None
                await self.asked.refuse(f"the spawn of {child}")
            if self._known < self._version_of(outcome):
                await self.catch_up()  # maybe the child had ended before, and the spawn told so
            result = outcome.stored.payload if isinstance(outcome, AlreadyPresent) else None
            found = Recorded(step, recorded.result if result is None else decode_step(result).result)
            found.at_ms = strand.now_ms
            self._history[step] = found
        else:
            await self._take(strand, found)
        known = _decode_spawned(found.result)
        if known.run_id != child:
            raise RunConflict(
                f"{self.run.run_id}: the child {key!r} is {known.run_id} here and cannot be {child} too: give the "
                "other one an id of its own"
            )
        return key

    def of_child(self, run_id: str, what: str) -> Coroutine[Any, Any, Any]:
        """Cancel a child, or ask for its status, as a recorded step."""
        key = parse_run_id(run_id).key
        step = Step(
            partial(self.host.child_cancelled if what == "cancel" else self.host.child_status, run_id), name=what
        )
        return self.step(step, (), {}, name=f"child:{key}:{what}", retry=None, timeout=None)

    # Rounds

    def continue_as_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContinueAsNew:
        """What ends this round and begins the next one with these inputs, when it is raised. From here on the body
        begins nothing more: neither a `finally` block, nor another task, nor who swallows it."""
        self._here()
        if self.asked is not None:
            if self.asked.interrupted:
                self.asked.fail("the next round")
            self.asked.interrupt()
            raise asyncio.CancelledError
        self._handoff = ContinueAsNew(self.workflow.input.encode(args, kwargs, limit=self.host.payload_limit))
        self.over = True
        return self._handoff

    async def _rotate(self, payload: bytes) -> None:
        run = self.run
        following = run_id(run.workflow, run.key, run.round_ordinal + 1)
        ids = StepIds(run.workflow, run.key, run.round_ordinal + 1)
        started = WorkflowStarted(
            workflow=run.workflow,
            key=run.key,
            input=Raw(payload),
            round=run.round_ordinal + 1,
            lineage=run.lineage_id,
            parent=run.run_id,
            on_cancel=run.on_cancel,
            deadline_at_ms=run.deadline_at_ms,
            version=self.workflow.version,
            patches=self.workflow.patches,
            priority=run.priority,
            cleanup_ms=self.workflow.cleanup_ms,
            attributes=None if run.attributes_json is None else msgspec.json.decode(run.attributes_json),
        )
        taken = frozenset(self._consumed or ())

        def within(append: Append) -> Rotate:
            return Rotate(append, Start(following, new(started, ids(STARTED)), append.at_ms), taken)

        ending = WorkflowCompleted(handoff=following, consumed=self.newly_consumed())
        outcome, _ = await self._record(new(ending, self._ids(COMPLETED)), within=within)
        if isinstance(outcome, VersionConflict):
            await self._settle_asked(run)

    def wall_ms(self) -> int:
        """The time it is now."""
        return self.host.wall_ms()

    def patched(self, patch: str) -> bool:
        """Whether this round was begun by a program that had the patch."""
        self._here()
        return patch in self._patches

    # Attributes

    def set_attributes(self, values: dict[str, Any], name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine records the attributes as a step."""
        strand = self._here()
        name = self._reserve(name, strand)
        return self._set_attributes(strand, self._history.pop(name, None), values, name)

    async def _set_attributes(self, strand: Strand, found: Recorded | None, values: dict[str, Any], name: str) -> None:
        if found is not None:
            await self._take(strand, found)
            return
        if self.asked is not None:
            await self.asked.refuse(f"the attributes {name!r}")
        if len(merged(self.run.attributes_json, values) or ()) > MOST_ATTRIBUTES:
            raise InvalidCall(
                f"run.set_attributes: {self.run.run_id} would have more than {MOST_ATTRIBUTES} attributes"
            )
        await self._own(strand, name, msgspec.json.encode(values))

    # Commands of the aggregate

    def apply(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Coroutine[Any, Any, None]:
        """Reserve the command's name now; the coroutine records its events and delivers them to the body's instance."""
        strand = self._here()
        name = self._reserve(name, strand)
        return self._apply(strand, self._history.pop(name, None), method, args, kwargs, name)

    async def _apply(
        self,
        strand: Strand,
        found: Recorded | None,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> None:
        if found is None:
            if self.asked is not None:
                await self.asked.refuse(f"the command {name!r}")
            # What the command decides on is what the body sees: a copy of its instance, as it is now.
            triggered = new_events(copy.deepcopy(self._instance), method, args, kwargs)
            events = [self._user_event(event) for event in triggered]
            recorded = StepRecorded(step=name, result=Raw(b"null"), started_at_ms=self.host.wall_ms())
            # The step goes last: an event without it would be applied twice after a crash between the two.
            outcome, strand.now_ms = await self._record(*events, new(recorded, self._ids(name)))
            version = self._version_of(outcome)
        else:
            strand.now_ms, version = found.at_ms, found.version
        await self._deliver(version)

    def _user_event(self, event: Event) -> New:
        return New(event, uuid.uuid4().bytes, self.host.mapper.encode(event)[1])

    def _version_of(self, outcome: Outcome) -> int:
        if isinstance(outcome, Appended):
            return outcome.version
        return outcome.stored.version if isinstance(outcome, AlreadyPresent) else self._version

    async def _deliver(self, version: int) -> None:
        """Bring the body's instance to `version`: a replay delivers the same events at the same places."""
        while version > (known := self._known):
            rows = await self._read_on(known)
            if self._known == known:  # else another task of the body has read on meanwhile
                check_contiguous(self.run.run_id, rows, after=known, until=version)
                self._absorb(known, rows)
        while self._unseen and self._unseen[0].version <= version:
            apply_event(self._instance, self.host.mapper.decode_row(self._unseen.popleft(), self.run.run_id))

    async def _read_on(self, after: int) -> list[Stored]:
        """The events of the run since version `after`, however often the store is away meanwhile: they are recorded,
        and an outage between that and this is no failure of the body's."""
        self._reading += 1
        try:
            return await self._read(after)
        finally:
            self._reading -= 1

    async def _read(self, after: int) -> list[Stored]:
        pauses = iter(STORE_RETRY_S)
        while True:
            if self.sealed:
                raise RunSealed(_sealed(self.run.run_id))
            try:
                return (await self.host.store.history([self.run.run_key], after))[self.run.run_key]
            except StoreError as error:
                self.host.report("store_away", self.run.run_id, error=str(error))
            await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))

    @property
    def info(self) -> Info:
        """What is known about the run as it is driven here."""
        run = self.run
        return Info(
            run_id=run.run_id,
            attempt=run.attempts + 1,
            version_tag=run.version_tag,
            parent_run_id=run.parent_run_id,
            created_at_ms=run.created_at_ms,
        )

    # Deterministic values

    def _here(self) -> Strand:
        found = _strand.get()
        if isinstance(found, tuple):
            if found[0] is self and not (self.sealed or self.over):
                raise InvalidCall(
                    f"{self.run.run_id}: run.* was called inside the step {found[1]!r}. A replay takes the step's "
                    "result and does not run it: call run.* in the body, and pass the step what it needs"
                )
            found = None
        parent = found
        task = asyncio.current_task(self._loop)
        if parent is not None and parent.driver is self and parent.task() is task:
            if self.sealed or self.over:
                raise RunSealed(_sealed(self.run.run_id))
            return parent
        # A new task of the body has inherited the strand of the one that made it. Whoever has none, or one of another
        # run, comes from outside, and a replay would not meet it.
        if parent is None or parent.driver is not self or task is None or asyncio._get_running_loop() is not self._loop:
            raise InvalidCall(
                f"{self.run.run_id}: run.* was called from outside its body, by {_caller(task)}. Only the body and the "
                "tasks it starts may call it, in their event loop: pass them what they need, or start a run of its own"
            )
        if self.sealed or self.over:
            raise RunSealed(_sealed(self.run.run_id))
        parent.children += 1
        strand = Strand(self, ref(task), f"{parent.path}.{parent.children}", parent.now_ms)
        _strand.set(strand)
        return strand

    def now_ms(self) -> int:
        """The time of the last event delivered to this task."""
        return self._here().now_ms

    def rng(self) -> random.Random:
        """This task's own stream of random numbers, the same at every replay."""
        strand = self._here()
        if strand.rng is None:
            strand.rng = random.Random(f"{self.run.run_id}/{strand.path}")
        return strand.rng

    def random(self) -> float:
        """A number in [0, 1)."""
        return self.rng().random()

    def uuid4(self) -> uuid.UUID:
        """A random UUID."""
        return uuid.UUID(int=self.rng().getrandbits(128), version=4)


class Info(msgspec.Struct, frozen=True):
    """A run as it is driven here. `attempt` counts the body's attempts under the workflow's retry policy, from 1."""

    run_id: str
    attempt: int
    version_tag: str | None
    parent_run_id: str | None
    created_at_ms: int


Within = Callable[[Append], Command]
_OF_STEPS: Final = (Driver._execute.__code__, Driver._replay.__code__)


_decode_state: Final = msgspec.json.Decoder(StateChanged).decode
_decode_started: Final = msgspec.json.Decoder(WorkflowStarted).decode
_decode_spawned: Final = msgspec.json.Decoder(Spawned).decode
_decode_retracted: Final = msgspec.json.Decoder(StepRetracted).decode


def _is_handoff(error: BaseException) -> bool:
    """Whether a task group wraps what has ended the round, and what stopped the group's other tasks, and no failure."""
    return isinstance(error, BaseExceptionGroup) and error.split((ContinueAsNew, RunSealed))[1] is None


def _recorded(name: str, attempt: int, started: int, digest: str | None, payload: bytes) -> StepRecorded:
    return StepRecorded(step=name, result=Raw(payload), attempt=attempt, started_at_ms=started, inputs_digest=digest)


async def _run(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await (step.fn(*args, **kwargs) if step.is_async else in_thread(step.fn, args, kwargs))


async def _limited(
    step: Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seconds: float | None,
    thread: Callable[..., Awaitable[Any]] = in_thread,
) -> Any:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds if step.is_async else None) as limit:
            if step.is_async:
                return await step.fn(*args, **kwargs)
            # Counted from when a thread is free for it: until then the step has not taken any time.
            if seconds is None:
                return await thread(step.fn, args, kwargs)
            return await thread(step.fn, args, kwargs, lambda: limit.reschedule(loop.time() + seconds))
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"step {step.name!r} took longer than its timeout of {seconds:g} s") from None
        raise


def _of_user(events: tuple[New, ...]) -> bool:
    return ":" in events[0].event.TOPIC or (len(events) > 1 and any(":" in one.event.TOPIC for one in events))


def _sealed(run_id: str) -> str:
    return f"{run_id} has ended or is no longer driven by this process; nothing more is recorded here"


def _caller(task: Task[Any] | None) -> str:
    return "no task" if task is None else f"task {task.get_name()}"
