"""The replayer: today's body against a recorded journal, without running a step and without writing.

It is the engine's own driver that replays. What the journal does not have is not done but held for ever; once the body
has ended, or does nothing but hold, what it has asked for is compared with what is recorded.
"""

from __future__ import annotations

import asyncio
from asyncio import Future, Task
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw

from keiro import codec
from keiro.decisions import Command, New, Outcome, Stored
from keiro.definition import Step, Workflow
from keiro.driver import Driver, Within
from keiro.errors import DecodeFailed, InvalidCall, KeiroError, NonDeterminism, RunSealed, StepNameClash
from keiro.events import (
    Event,
    StateChanged,
    StepRecorded,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowRetried,
    WorkflowStarted,
    ms_of,
)
from keiro.failures import Failure, capture, summary
from keiro.history import History, Recorded
from keiro.identity import run_id
from keiro.mapper import EventMapper
from keiro.projections.runs import project
from keiro.retry import Retry
from keiro.rows import Head, Run, Status
from keiro.run import workflow_of
from keiro.waits import Waits, is_external

QUIET: Final = 50
"""After so many turns of the event loop in which nothing is asked for, a body that holds does nothing else."""
PATIENCE_S: Final = 0.25
"""How long a body that seems to have left something out may still ask for it: it may await what is no step."""
STUCK_S: Final = 10.0
"""How long a body may await what is no step and ask for nothing."""
_AGAIN: Final = frozenset(("WorkflowRetried", "WorkflowResurrected", "StepRetracted"))
_WRONG: Final = (DecodeFailed, NonDeterminism, StepNameClash, InvalidCall)
"""Errors that say that body and journal do not fit, whatever became of the run then."""


_decode_state: Final = msgspec.json.Decoder(StateChanged).decode


class Problem(msgspec.Struct, frozen=True):
    """Something that would break. `kind` is one of

    `not_recorded` (a step is asked for that is not recorded, and the journal goes on without it), `never_asked_for` (a
    recorded step, or something the run is parked for), `inputs_differ`, `other_result` (of a completed run), `fails`
    (the body raises where the run had not failed), `decode_failed`, `incomplete` (events are missing), and `stuck` (the
    body neither ends nor asks for anything).
    """

    kind: str
    step: str | None
    message: str


class Replayed(msgspec.Struct, frozen=True):
    """What a replay has shown."""

    run_id: str
    status: str
    """Where the run stands in the journal; `pending` also where it was running."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing would break."""
        return not self.problems

    def check(self) -> None:
        """Raise `NonDeterminism`, which says all problems, unless there is none."""
        if self.problems:
            said = "; ".join(problem.message for problem in self.problems)
            raise NonDeterminism(f"{self.run_id} cannot be replayed by today's code: {said}")


async def replay(history: Iterable[Event], workflow: Any) -> Replayed:
    """Run the body of `workflow` against the events of a run, from its first on, and report what would break.

    No step runs and nothing is written, so it may be done anywhere. `history` is `[e async for e in handle.events()]`,
    or what `load_history` gives; it may end anywhere: what comes after its end is not recorded yet. Raises
    `InvalidCall` for events that are no run's beginning, or those of another workflow's run.
    """
    definition = workflow_of(workflow)
    mapper = EventMapper([definition])
    rows = []
    for event in history:
        topic, payload = mapper.encode(event)
        version = event.originator_version
        rows.append(Stored(version, 0, version, b"", topic, payload, ms_of(event.timestamp)))
    return await replay_stored(rows, definition)


async def replay_stored(stored: Sequence[Stored], workflow: Workflow) -> Replayed:
    """As `replay`, of rows of the journal."""
    if not stored or stored[0].version != 1 or stored[0].topic != WorkflowStarted.TOPIC:
        raise InvalidCall("a replay begins with the first event of a run, WorkflowStarted: pass all of its events")
    mapper = EventMapper([workflow])
    started = msgspec.json.decode(stored[0].payload, type=WorkflowStarted)
    own = run_id(started.workflow, started.key, started.round)
    if started.workflow != workflow.name:
        raise InvalidCall(f"{own} is a run of {started.workflow!r} and cannot be replayed by {workflow.name!r}")
    run: Run | None = None
    try:
        events = [mapper.decode_row(row, own) for row in stored]
    except DecodeFailed as error:
        return Replayed(own, "unknown", (Problem("decode_failed", None, str(error)),))
    for event, row in zip(events, stored, strict=True):
        run = project(run, event, row.recorded_at_ms)
    assert run is not None
    driver = _Replaying(_Journal(mapper), workflow, run, Head(run_key=0, version=stored[-1].version), list(stored))
    task = asyncio.create_task(driver.drive(), name=f"replay {own}")
    driver.again_at = max((row.version for row in stored if row.topic in _AGAIN), default=0)
    try:
        stuck = await _ended_or_holding(driver, task)
        problems = tuple(_problems(driver, task, events, stuck))
    finally:
        driver.seal()
        for future in driver.futures:
            future.cancel()
        await asyncio.wait([task], timeout=1)
    return Replayed(own, run.status, problems)


async def _ended_or_holding(driver: _Replaying, task: Task[None]) -> bool:
    """Return when the body has ended, or asks for nothing more; whether it was given up."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    quiet = 0
    while not task.done():
        before = driver.progress
        # One that awaits what is no step is not asked a hundred thousand times a second.
        await asyncio.sleep(0 if quiet < QUIET else 0.001)
        quiet = quiet + 1 if driver.progress == before else 0
        if quiet == 0:
            began = loop.time()
        elif quiet > QUIET:
            left = PATIENCE_S if driver.held and (driver.left_over() or driver.dropped()) else 0.0
            if loop.time() - began > (left if driver.held else STUCK_S):
                return not driver.held
    return False


def _problems(driver: _Replaying, task: Task[None], events: Sequence[Event], stuck: bool) -> Iterable[Problem]:
    run, workflow = driver.was, driver.workflow
    if task.done() and not task.cancelled() and (fault := task.exception()) is not None:
        if not isinstance(fault, KeiroError):
            raise fault
        yield Problem("decode_failed" if isinstance(fault, DecodeFailed) else "incomplete", None, str(fault))
        return
    yield from driver.reported
    if stuck:
        yield Problem(
            "stuck", None, f"the body asks for nothing and has not ended after {STUCK_S:g} s: what it awaits is no step"
        )
    error, outcome = driver.error, driver.outcome
    completed = next((event for event in reversed(events) if isinstance(event, WorkflowCompleted)), None)
    if error is not None:
        told = summary(capture(error))
        if isinstance(error, DecodeFailed):
            yield Problem("decode_failed", None, told)
            return
        redone = run.attempts > 0 or driver.again_at > 0
        if run.status == Status.FAILED:
            failure = msgspec.json.decode(run.failure_json or "null", type=Failure)
            if isinstance(error, _WRONG) and capture(error).type != failure.type:
                yield Problem("fails", None, f"the body raises {told}, where it had raised {summary(failure)}")
        elif completed is not None or isinstance(error, _WRONG) or not redone:
            where = "which had completed" if completed is not None else "which had not failed there"
            yield Problem("fails", None, f"the body raises {told}, in a run {where}")
    elif completed is not None and isinstance(outcome, WorkflowCompleted):
        yield from _compared(workflow, completed, outcome)
    left = driver.left_over()
    for name in left:
        yield Problem("never_asked_for", name, f"{name!r} is recorded and not asked for")
    for name in driver.dropped():
        yield Problem("never_asked_for", name, f"the run is parked for {name!r}, which is not waited for")
    if (left or completed is not None) and error is None:
        for name in driver.held:
            if completed is not None or not (name in driver.parked or is_external(name)):
                yield Problem("not_recorded", name, f"{name!r} is asked for and not recorded")


def _compared(workflow: Workflow, was: WorkflowCompleted, now: WorkflowCompleted) -> Iterable[Problem]:
    if (was.handoff is None) != (now.handoff is None):
        how = ("returned", "hands over to a next round")
        before, after = how if was.handoff is None else ("handed over to a next round", "returns")
        yield Problem("other_result", None, f"the body {after}, where it had {before}")
    elif not _same(workflow, was.result, now.result):
        before, after = (_shown(event.result) for event in (was, now))
        yield Problem("other_result", None, f"the body returns {after}, where it had returned {before}")


def _same(workflow: Workflow, was: Raw, now: Raw) -> bool:
    if bytes(was) == bytes(now) or msgspec.json.decode(was) == msgspec.json.decode(now):
        return True
    try:
        # Another order of what has none, such as the elements of a set.
        return bool(workflow.decode_result(bytes(was)) == workflow.decode_result(bytes(now)))
    except DecodeFailed:
        return False


def _shown(raw: Raw) -> str:
    text = bytes(raw).decode()
    return text if len(text) <= 100 else f"{text[:99]}…"


class _Journal:
    """The host of a replay: it has no store, no time and no lease, and hears what the driver doubts."""

    strict = False
    payload_limit = codec.PAYLOAD_LIMIT

    def __init__(self, mapper: EventMapper) -> None:
        self.mapper = mapper
        self.store: Any = self
        self.reported: list[Problem] = []

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """Nothing comes after what is recorded."""
        return {key: [] for key in run_keys}

    def wall_ms(self) -> int:
        """No time passes: whatever is due is due later."""
        return 0

    def holds(self) -> bool:
        """What begins is held by the driver."""
        return True

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Other inputs; the other doubts are found by what is left over."""
        if event == "inputs_differ":
            step = str(fields["step"])
            self.reported.append(Problem("inputs_differ", step, f"{step!r} is recorded with other inputs"))

    def birth_owner(self, workflow: Workflow) -> int | None:
        """No child is born."""
        return None

    def submit_birth(self, command: Command) -> Future[Outcome]:
        """Unreachable: nothing is recorded."""
        raise AssertionError(command)

    async def perform(self, call: object, record: object, *, is_async: bool) -> NoReturn:
        """Unreachable: a step."""
        raise AssertionError(record)

    async def child_cancelled(self, run_id: str) -> bool:
        """Unreachable: a step."""
        raise AssertionError(run_id)

    async def child_status(self, run_id: str) -> str:
        """Unreachable: a step."""
        raise AssertionError(run_id)


class _Held(Waits):
    """Waits that are never over."""

    _driver: _Replaying

    async def over(self, kind: str, step: str, due_ms: int | None = None, clock: str | None = None) -> bool:
        return await self._driver.hold(step)

    async def command(self, step: str, due_ms: int | None, clock: str) -> bool:
        return await self._driver.hold(step)


class _Replaying(Driver):
    def __init__(self, host: _Journal, workflow: Workflow, run: Run, head: Head, stored: list[Stored]) -> None:
        super().__init__(host, workflow, run, head, History((), stored))
        self.was = run
        self.reported = host.reported
        self.held: dict[str, None] = {}
        self.futures: list[Future[None]] = []
        self.taken: set[str] = set()
        self.outcome: Event | None = None
        self.error: BaseException | None = None
        self.again_at = 0
        """From this version on, what is recorded was asked for by an attempt that knew all of the past."""
        self.parked: tuple[str, ...] = ()
        if run.status == Status.SUSPENDED:
            changes = (_decode_state(row.payload) for row in reversed(stored) if row.topic == StateChanged.TOPIC)
            self.parked = next(
                tuple(wait.step for wait in change.waits if wait.kind != "timeout")
                for change in changes
                if change.state == "suspended"
            )

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with everything the body asks for."""
        return len(self._history), len(self._names), len(self.futures), len(self.taken), self._begun

    def left_over(self) -> list[str]:
        """What is recorded, had to be asked for and is not. Completions of deferreds and of children may come unasked;
        an attempt that goes another way than a failed one before it leaves out what that one did."""
        return [
            name
            for name, found in self._history.items()
            if found.version > self.again_at and name not in self.taken and not is_external(name) and name[:3] != "awk"
        ]

    def dropped(self) -> list[str]:
        """What the run is parked for and the body does not wait for."""
        return [name for name in self.parked if name not in self.held]

    async def hold(self, step: str) -> bool:
        """What is not recorded does not happen."""
        self.held[step] = None
        future: Future[None] = self._loop.create_future()
        self.futures.append(future)
        await future
        raise RunSealed(step)

    @property
    def waits(self) -> Waits:
        return _Held(self)

    def _failed(self, error: BaseException) -> Event:
        self.error = error
        return super()._failed(error)

    async def _take(self, strand: Any, found: Recorded) -> None:
        self.taken.add(found.step)
        await super()._take(strand, found)

    async def _execute(
        self,
        strand: Any,
        step: Step,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retry: Retry | None,
        timeout: float | None,
        attempt: int,
    ) -> Any:
        self._begun += 1
        step.decode.compile()
        return await self.hold(name)

    async def _record(
        self, *events: New, alone: bool = True, exact: bool = False, within: Within | None = None
    ) -> tuple[Outcome, int]:
        event = events[-1].event
        match event:
            case WorkflowCompleted() | WorkflowFailed() | WorkflowRetried():
                self.outcome = event
            case StepRecorded(step=step):
                await self.hold(step)
            case StateChanged(waits=waits):
                await self.hold(waits[0].step)
        raise RunSealed(f"the replay of {self.run.run_id} has ended")


# Histories outside of a journal


class _Row(msgspec.Struct, frozen=True):
    version: int
    topic: str
    payload: Raw
    recorded_at_ms: int


def dump_history(history: Iterable[Event]) -> str:
    """The events of a run as JSON, to be kept with the tests of its workflow."""
    mapper = EventMapper()
    rows = []
    for event in history:
        topic, payload = mapper.encode(event)
        rows.append(_Row(event.originator_version, topic, Raw(payload.encode()), ms_of(event.timestamp)))
    return msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n"


def load_history(text: str | bytes) -> list[Event]:
    """The events in what `dump_history` has made, or `keiro journal RUN --json`. Raises `DecodeFailed`."""
    try:
        rows = msgspec.json.decode(text, type=list[_Row])
        started = msgspec.json.decode(rows[0].payload, type=WorkflowStarted) if rows else None
    except msgspec.DecodeError as error:
        raise DecodeFailed(
            f"this is no history of a run ({error}): load what dump_history or `keiro journal RUN --json` gave",
            where="history",
        ) from error
    own = "" if started is None else run_id(started.workflow, started.key, started.round)
    read: Callable[..., Event] = EventMapper().decode
    return [read(row.topic, bytes(row.payload).decode(), own, row.version, row.recorded_at_ms) for row in rows]
