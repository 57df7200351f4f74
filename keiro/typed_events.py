"""Events of runs as typed values for consumers outside: one form for attempts, one for what becomes of a run.

A consumer says which run it speaks for, and `decode` gives it an entry of the journal as one of these, or an error that
says which of four things is wrong. Constructors check strictly, so that what was made can be decoded again. They
present what the journal says and add nothing to it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from keiro.errors import KeiroError
from keiro.events import (
    ENGINE_EVENTS,
    AttemptFailed,
    AttemptProgressed,
    AttemptStarted,
    Event,
    OpaqueEvent,
    StateChanged,
    StepRecorded,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowResurrected,
    WorkflowRetried,
    WorkflowStarted,
    ms_of,
)
from keiro.failures import Failure as StoredFailure
from keiro.feed import JournalEntry
from keiro.identity import RunId, deferred_step, parse_run_id
from keiro.projections.waits import decode_exit

ATTEMPT_EVENT_TYPE: Final = "keiro.engine.v2.attempt-lifecycle"
STATE_EVENT_TYPE: Final = "keiro.engine.v2.state-event"
NAMESPACE: Final = "keiro.engine."
"""What the types of the engine's own events begin with: one that is not known is never passed over."""
LATEST_MS: Final = 2**53 - 1

Code: TypeAlias = Literal["malformed", "unsupported", "foreign", "transition"]


class EventError(KeiroError):
    """An event that is none for this consumer. `code` says why: `malformed` (it breaks a rule of its form),
    `unsupported` (the engine's, of a kind or version that is not known here), `foreign` (of another run, lineage or
    source), or `transition` (its lifecycle does not follow)."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are not known are refused."""


class Lineage(_Strict, frozen=True):
    """Where a run stands among others: the `root` of its lineage, a `child` of another run, or a `continuation`."""

    kind: Literal["root", "child", "continuation"]
    run_id: str
    lineage_id: str
    root_run_id: str
    round: int = 0
    parent_run_id: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "root":
            _hold(self.run_id == self.root_run_id, "a root is its own root run")
            _hold(self.round == 0 and self.parent_run_id is None, "a root has round 0 and no parent")
            return
        _hold(self.parent_run_id not in (None, self.run_id), "a derived run has a parent, which is not itself")
        if self.kind == "continuation":
            _hold(self.round > 0, "a continuation has a round above 0")
            _hold(self.run_id != self.root_run_id, "a continuation is not the root run")
        else:
            _hold(self.round == 0, "a child begins with round 0")


class Success(_Strict, frozen=True, tag_field="kind", tag="success"):
    """What was returned, as JSON."""

    value: Raw


class Failure(_Strict, frozen=True, tag_field="kind", tag="failure"):
    """Why there is no value: an `error` that was raised, or that it was `interrupted`. `detail` is JSON."""

    reason: Literal["error", "defect", "interrupted", "encoding"]
    detail: Raw


Result: TypeAlias = Success | Failure


class AttemptLifecycle(_Strict, frozen=True):
    """How far an attempt has come. A finish and a result come together, and with an end alone; a clock that was set
    back may put the finish before the start."""

    state: Literal["running", "suspended", "succeeded", "failed"]
    started_at_ms: int
    heartbeat_at_ms: int | None = None
    checkpoint: Raw | UnsetType = UNSET
    finished_at_ms: int | None = None
    result: Result | None = None

    def __post_init__(self) -> None:
        for name in ("started_at_ms", "heartbeat_at_ms", "finished_at_ms"):
            value = getattr(self, name)
            _hold(value is None or 0 <= value <= LATEST_MS, f"{name} is a time in milliseconds since the epoch")
        if self.state in ("running", "suspended"):
            _hold(self.finished_at_ms is None and self.result is None, f"an attempt that is {self.state} has no end")
            return
        _hold(self.finished_at_ms is not None and self.result is not None, f"one that {self.state} has an end")
        _hold(self.heartbeat_at_ms is None and self.checkpoint is UNSET, "one that has ended sends no heartbeat")
        _hold(
            isinstance(self.result, Success if self.state == "succeeded" else Failure),
            f"the result of one that {self.state} is of that kind",
        )


class AttemptPayload(_Strict, frozen=True):
    """An attempt of a step. `step_key_digest` is the SHA-256 of the step's name, in hex."""

    lineage: Lineage
    execution_id: str
    step_key_digest: str
    attempt: int
    lifecycle: AttemptLifecycle
    version: Literal[2] = 2

    def __post_init__(self) -> None:
        _hold(self.execution_id == self.lineage.run_id, "execution_id is the run of the lineage")
        _hold(len(self.step_key_digest) == 64, "step_key_digest is a SHA-256 in hex")
        _hold(self.attempt >= 0, "attempt is a number from 0")


class DeferredWait(_Strict, frozen=True, tag_field="kind", tag="deferred"):
    """Something that comes from outside, or from a child."""

    wait_id: str


class ClockWait(_Strict, frozen=True, tag_field="kind", tag="clock"):
    """A time that comes."""

    wait_id: str
    due_at_ms: int


Wait: TypeAlias = DeferredWait | ClockWait


class ExecutionLifecycle(_Strict, frozen=True):
    """Where a run stands. Who drives it is no part of it."""

    state: Literal["running", "suspended", "completed"]
    waits: tuple[Wait, ...] = ()
    result: Result | None = None

    def __post_init__(self) -> None:
        _hold((self.state == "completed") == (self.result is not None), "a result is of a run that has ended")
        if self.state == "suspended":
            _hold(bool(self.waits), "a suspended run waits for something")
        elif self.state == "completed":
            _hold(not self.waits, "a run that has ended waits for nothing")


class Execution(_Strict, frozen=True, tag_field="kind", tag="execution"):
    """The run itself has come to another state."""

    lifecycle: ExecutionLifecycle


class DeferredCompleted(_Strict, frozen=True, tag_field="kind", tag="deferred-completed"):
    """A deferred was completed, failed or cancelled."""

    wait_id: str
    result: Result


class ClockScheduled(_Strict, frozen=True, tag_field="kind", tag="clock-scheduled"):
    """A clock was set."""

    clock_id: str
    wait_id: str
    due_at_ms: int


StateEvent: TypeAlias = Execution | DeferredCompleted | ClockScheduled


class StatePayload(_Strict, frozen=True):
    """Something that became of a run."""

    lineage: Lineage
    execution_id: str
    event: StateEvent
    version: Literal[2] = 2

    def __post_init__(self) -> None:
        _hold(self.execution_id == self.lineage.run_id, "execution_id is the run of the lineage")


Payload: TypeAlias = AttemptPayload | StatePayload


class TypedEvent(msgspec.Struct, frozen=True):
    """A typed event and the entry it presents."""

    event_type: str
    payload: Payload
    entry: JournalEntry


class Ignored(msgspec.Struct, frozen=True):
    """An entry that no typed event presents: of the body's own steps, say, or of a command."""

    entry: JournalEntry


class Unknown(msgspec.Struct, frozen=True):
    """An entry of a type that this process does not know, for a consumer that wants to see those."""

    entry: JournalEntry


class Consumer(msgspec.Struct, frozen=True):
    """Whom events are for: one run, as its lineage says, and what is done with types that are not known."""

    lineage: Lineage
    unknown: Literal["ignore", "surface"] = "ignore"

    @staticmethod
    def of(started: WorkflowStarted) -> Consumer:
        """The consumer of a run, by its first event as it stands in the journal."""
        return Consumer(lineage_of_run(started))


def lineage_of_run(started: WorkflowStarted) -> Lineage:
    """The lineage of a run, by its first event as it stands in the journal."""
    run_id = started.originator_id
    if started.round:
        return Lineage(
            kind="continuation",
            run_id=run_id,
            lineage_id=started.lineage,
            root_run_id=started.lineage,
            round=started.round,
            parent_run_id=started.parent or str(RunId(started.workflow, started.key, started.round - 1)),
        )
    if started.parent is not None:
        return Lineage(kind="child", run_id=run_id, lineage_id=run_id, root_run_id=run_id, parent_run_id=started.parent)
    return Lineage(kind="root", run_id=run_id, lineage_id=run_id, root_run_id=run_id)


def decode(entry: JournalEntry, consumer: Consumer) -> TypedEvent | Ignored | Unknown:
    """An entry of the journal as a typed event. Raises `EventError`."""
    try:
        event, run_id = entry.event, entry.run_id
        parse_run_id(run_id)
    except Exception as error:
        raise EventError("malformed", f"this is no entry of the journal: {error}") from error
    lineage = consumer.lineage
    if run_id != lineage.run_id:
        raise EventError("foreign", f"event {entry.position} is of {run_id}, and this consumer of {lineage.run_id}")
    if isinstance(event, OpaqueEvent):
        if ":" not in event.topic or event.topic.startswith(NAMESPACE):
            raise EventError("unsupported", f"{event.topic!r} is of an engine that is newer than this one")
        return Unknown(entry) if consumer.unknown == "surface" else Ignored(entry)
    if type(event) not in ENGINE_EVENTS.values():
        return Ignored(entry)
    if isinstance(event, WorkflowStarted) and lineage_of_run(event) != lineage:
        raise EventError("foreign", f"{run_id} began as {lineage_of_run(event)}, and this consumer is of {lineage}")
    try:
        payload = _payload(event, lineage, ms_of(event.timestamp))
    except (msgspec.DecodeError, ValueError) as error:
        raise EventError("malformed", f"event {entry.position} of {run_id} cannot be presented: {error}") from error
    if payload is None:
        return Ignored(entry)
    kind = ATTEMPT_EVENT_TYPE if isinstance(payload, AttemptPayload) else STATE_EVENT_TYPE
    return TypedEvent(kind, payload, entry)


def decode_payload(event_type: str, data: bytes | str, consumer: Consumer) -> Payload:
    """A payload in its JSON form, as it was sent on by somebody. Raises `EventError`."""
    if event_type not in _DECODERS:
        code: Code = "unsupported" if event_type.startswith(NAMESPACE) else "malformed"
        raise EventError(code, f"{event_type!r} is no type of event that is known here")
    try:
        payload: Payload = _DECODERS[event_type].decode(data)
    except msgspec.DecodeError as error:
        raise EventError("malformed", f"{event_type}: {error}") from error
    if payload.lineage != consumer.lineage:
        raise EventError("foreign", f"it is of {payload.lineage}, and this consumer of {consumer.lineage}")
    return payload


def encode_payload(payload: Payload) -> bytes:
    """The JSON form of a payload."""
    return _encoder.encode(payload)


def follows(before: AttemptLifecycle | None, after: AttemptLifecycle) -> None:
    """Raise `EventError` (`transition`) unless an attempt that stood at `before` may stand at `after` next."""
    if before is not None and before.state in ("succeeded", "failed") and before != after:
        raise EventError("transition", f"an attempt that {before.state} does not become {after.state}")


def step_key_digest(step: str) -> str:
    """The digest by which typed events name a step."""
    return hashlib.sha256(step.encode()).hexdigest()


_encoder: Final = msgspec.json.Encoder()
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    ATTEMPT_EVENT_TYPE: msgspec.json.Decoder(AttemptPayload),
    STATE_EVENT_TYPE: msgspec.json.Decoder(StatePayload),
}
_AWAITED: Final = deferred_step("")


def _hold(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _payload(event: Event, lineage: Lineage, at_ms: int) -> Payload | None:
    match event:
        case WorkflowStarted() | WorkflowResurrected():
            return _state(lineage, Execution(lifecycle=ExecutionLifecycle(state="running")))
        case StateChanged(state="suspended"):
            waits = tuple(
                DeferredWait(wait_id=wait.step)
                if wait.due_at_ms is None
                else ClockWait(wait_id=wait.step, due_at_ms=wait.due_at_ms)
                for wait in event.waits
            )
            return _state(lineage, Execution(lifecycle=ExecutionLifecycle(state="suspended", waits=waits)))
        case StateChanged(state="clock_scheduled"):
            (wait,) = event.waits
            return _state(lineage, ClockScheduled(clock_id=wait.step, wait_id=wait.step, due_at_ms=wait.due_at_ms or 0))
        case StepRecorded() if event.step.startswith(_AWAITED):
            exit_ = decode_exit(event.result)
            result: Result = Success(value=Raw(b"null"))
            if exit_.ok is not UNSET:
                result = Success(value=exit_.ok)
            elif exit_.failed is not UNSET:
                result = _failed(exit_.failed)
            elif exit_.cancelled is not UNSET:
                result = _interrupted(exit_.cancelled)
            return _state(lineage, DeferredCompleted(wait_id=event.step, result=result))
        case WorkflowCompleted():
            return _ended(lineage, Success(value=event.result))
        case WorkflowFailed():
            return _ended(lineage, _failed(event.failure))
        case WorkflowCancelled():
            return _ended(lineage, _interrupted(event.reason))
        case WorkflowRetried():
            return _state(lineage, Execution(lifecycle=ExecutionLifecycle(state="running")))
        case AttemptStarted():
            return _attempt(lineage, event.step, event.attempt, AttemptLifecycle(state="running", started_at_ms=at_ms))
        case AttemptProgressed():
            running = AttemptLifecycle(
                state="running", started_at_ms=at_ms, heartbeat_at_ms=at_ms, checkpoint=event.checkpoint
            )
            return _attempt(lineage, event.step, event.attempt, running)
        case StepRecorded() if ":" not in event.step:
            done = AttemptLifecycle(
                state="succeeded",
                started_at_ms=event.started_at_ms,
                finished_at_ms=at_ms,
                result=Success(value=event.result),
            )
            return _attempt(lineage, event.step, event.attempt, done)
        case AttemptFailed():
            failed = AttemptLifecycle(
                state="failed",
                started_at_ms=event.started_at_ms,
                finished_at_ms=at_ms,
                result=_failed(event.failure),
            )
            return _attempt(lineage, event.step, event.attempt, failed)
    return None


def _state(lineage: Lineage, event: StateEvent) -> StatePayload:
    return StatePayload(lineage=lineage, execution_id=lineage.run_id, event=event)


def _ended(lineage: Lineage, result: Result) -> StatePayload:
    return _state(lineage, Execution(lifecycle=ExecutionLifecycle(state="completed", result=result)))


def _attempt(lineage: Lineage, step: str, attempt: int, lifecycle: AttemptLifecycle) -> AttemptPayload:
    return AttemptPayload(
        lineage=lineage,
        execution_id=lineage.run_id,
        step_key_digest=step_key_digest(step),
        attempt=attempt,
        lifecycle=lifecycle,
    )


def _failed(failure: StoredFailure) -> Failure:
    return Failure(reason="error", detail=Raw(_encoder.encode({"type": failure.type, "message": failure.message})))


def _interrupted(reason: str | None) -> Failure:
    return Failure(reason="interrupted", detail=Raw(_encoder.encode(reason)))
