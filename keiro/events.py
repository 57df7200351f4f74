"""Everything that can happen to a run, as the journal stores it.

An event is a frozen `msgspec.Struct` that is also an aggregate event of the `eventsourcing` library. The
journal keeps `originator_id`, `originator_version` and `timestamp` in columns of their own, so these fields
have blank defaults and are omitted from the stored JSON: what is encoded is only what happened.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import force_setattr, replace

from keiro.errors import DecodeFailed
from keiro.failures import Failure
from keiro.library import CanMutateAggregate

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
# Below this (year 2223), milliseconds divided by 1000 round to the right microsecond.
_EXACT_MS: Final = 8_000_000_000_000
_LAST_MS: Final = 253_402_300_799_999
_MILLISECOND: Final = timedelta(milliseconds=1)


def time_of(ms: int) -> datetime:
    """Integer milliseconds since the epoch as an aware datetime in UTC, at most the last one of year 9999."""
    if 0 <= ms < _EXACT_MS:
        return datetime.fromtimestamp(ms / 1000, UTC)
    return _EPOCH + timedelta(milliseconds=min(ms, _LAST_MS))


def ms_of(time: datetime) -> int:
    """An aware datetime as integer milliseconds since the epoch."""
    return (time - _EPOCH) // _MILLISECOND


class Event(msgspec.Struct, CanMutateAggregate[str], frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events of a run.

    `originator_id` is the run id, `originator_version` its place in the run (from 1, without gaps),
    `timestamp` the time it was recorded (UTC, millisecond resolution).
    """

    TOPIC: ClassVar[str] = ""
    class_version: ClassVar[int] = 1

    originator_id: str = ""
    originator_version: int = 0
    timestamp: datetime = _EPOCH

    def apply(self, aggregate: Any) -> None:
        """Change the user's state; engine events do not."""

    def mutate(self, aggregate: Any) -> Any:
        """Apply this event to the aggregate (None before the first event) and return it.

        Raises `StoreError` unless it is the next event of that run.
        """
        from keiro.run import advance

        return advance(aggregate, (self,))

    def _as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__}


class WorkflowStarted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The first event of every run. `input` is the JSON object of the body's arguments by parameter name."""

    TOPIC: ClassVar[str] = "WorkflowStarted"

    workflow: str
    key: str
    input: Raw
    round: int = 0
    lineage: str = ""
    """The run id of round 0; empty for round 0 itself."""
    parent: str | None = None
    parent_seq: int | None = None
    """Of a run that was born as a child: the number of the edge to its parent among all edges of the store."""
    on_cancel: str | None = None
    deadline_at_ms: int | None = None
    start_at_ms: int | None = None
    """When it is to be driven for the first time, where that is not at once."""
    attributes: dict[str, Any] | None = None
    version: str | None = None
    """The version tag of the workflow's code."""
    patches: tuple[str, ...] = ()
    """The patches that the program which began the round had: for this round they are decided."""
    priority: int = 0
    """Where the run stands among those that wait for a worker: the lowest first."""
    cleanup_ms: int | None = None
    """How long the body may take to end once it is asked to; None where it is not asked, but cancelled at once."""


class StepRecorded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A step ended with a result: it never runs again in this round."""

    TOPIC: ClassVar[str] = "StepRecorded"

    step: str
    result: Raw
    attempt: int = 1
    started_at_ms: int = 0
    inputs_digest: str | None = None


class AttemptStarted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that must be known before its body runs is about to run: from here on its effect is intended, and
    until its end is recorded nobody knows whether it happened."""

    TOPIC: ClassVar[str] = "AttemptStarted"

    step: str
    attempt: int
    tier: str | None = None
    idempotency_key: str | None = None
    preimage: Raw | UnsetType = UNSET
    """What a compensable step will change, as it was before."""


class AttemptProgressed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that is under way has come to a checkpoint: should it end without a record, it is resumed there."""

    TOPIC: ClassVar[str] = "AttemptProgressed"

    step: str
    attempt: int
    checkpoint: Raw


class AttemptFailed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt of a step raised; without `next_attempt_at_ms` the step has failed for good."""

    TOPIC: ClassVar[str] = "AttemptFailed"

    step: str
    attempt: int
    failure: Failure
    next_attempt_at_ms: int | None = None
    started_at_ms: int = 0
    inputs_digest: str | None = None


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something a parked run waits for: `step` is the name that will be recorded when it comes, `due_at_ms` the time
    by which it comes at the latest, in milliseconds since the epoch."""

    kind: str
    """`sleep`, `deferred`, `child`, `until` or `retry`; `timeout` beside one that has a limit."""
    step: str
    due_at_ms: int | None = None
    retracted: int = 0
    """How often what was recorded of the step had been retracted by then."""


class StateChanged(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The run is parked (`suspended`, with what it waits for), a clock of it was set (`clock_scheduled`), or it is
    asked to end (`cancel_requested`)."""

    TOPIC: ClassVar[str] = "StateChanged"

    state: str
    waits: tuple[Wait, ...] = ()
    consumed: tuple[str, ...] = ()
    """The deferreds whose completions the body has taken since it said so last."""
    reason: str | None = None
    """Why it is asked to end."""
    requested_at_ms: int | None = None
    """When that was asked of the parent it has it from; None where it was asked itself."""


class StepRetracted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """What was recorded of a step counts no more: it runs again, or is waited for again."""

    TOPIC: ClassVar[str] = "StepRetracted"

    step: str
    reason: str | None = None


class WorkflowCompleted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The body returned `result`, or handed off to the next round."""

    TOPIC: ClassVar[str] = "WorkflowCompleted"

    result: Raw = Raw(b"null")
    handoff: str | None = None
    """The run id of the next round."""
    consumed: tuple[str, ...] = ()
    """As in `StateChanged`."""


class WorkflowFailed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An exception left the body and the workflow's retry policy allows no further attempt."""

    TOPIC: ClassVar[str] = "WorkflowFailed"

    failure: Failure
    consumed: tuple[str, ...] = ()
    """As in `StateChanged`."""


class WorkflowRetried(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An exception left the body; the workflow's retry policy runs it again at `next_attempt_at_ms`."""

    TOPIC: ClassVar[str] = "WorkflowRetried"

    attempt: int
    failure: Failure
    next_attempt_at_ms: int


class WorkflowCancelled(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The run was cancelled; it records nothing more."""

    TOPIC: ClassVar[str] = "WorkflowCancelled"

    reason: str | None = None


class WorkflowResurrected(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A failed run goes on: what was recorded stays, steps that failed for good get another chance."""

    TOPIC: ClassVar[str] = "WorkflowResurrected"

    reason: str | None = None
    parent: str | None = None
    """The lineage that attached to the run after its end: it is its parent from here on."""
    on_cancel: str | None = None


class RunLinked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The run `child` has `parent` as a parent besides the one it was born to; both are run ids of round 0.

    It stands in the journal of the child, or of the parent where the child had ended. `seq` counts the edges of the
    store.
    """

    TOPIC: ClassVar[str] = "RunLinked"

    child: str
    parent: str
    seq: int


class RunUnlinked(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The run `child` has `parent` as a parent no more."""

    TOPIC: ClassVar[str] = "RunUnlinked"

    child: str
    parent: str


class OpaqueEvent(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An event this process has no class for: of another program's command, or of a newer keiro."""

    topic: str
    data: Raw
    """The stored JSON."""

    def apply(self, aggregate: Any) -> None:
        """Change nothing; raise `DecodeFailed` if the aggregate's own class should know the event."""
        workflow, _, name = self.topic.partition(":")
        own = getattr(type(aggregate), "_keiro_workflow", None)
        if name and own is not None and own.name == workflow:
            raise DecodeFailed(
                f"event {self.originator_version} of {self.originator_id} is {name}, which the class "
                f"{type(aggregate).__qualname__} does not have: what was recorded must stay readable, so "
                "keep its event method or event class",
                where=self.topic,
            )


E = TypeVar("E", bound=Event)

ENGINE_EVENTS: Final[dict[str, type[Event]]] = {
    cls.TOPIC: cls
    for cls in (
        WorkflowStarted,
        StepRecorded,
        AttemptStarted,
        AttemptProgressed,
        AttemptFailed,
        StateChanged,
        StepRetracted,
        WorkflowCompleted,
        WorkflowFailed,
        WorkflowRetried,
        WorkflowCancelled,
        WorkflowResurrected,
        RunLinked,
        RunUnlinked,
    )
}
TERMINAL: Final = frozenset((WorkflowCompleted.TOPIC, WorkflowFailed.TOPIC, WorkflowCancelled.TOPIC))


def blank(event: E) -> E:
    """The event without what the journal keeps in columns; the same object if it has nothing of that."""
    if event.originator_version == 0 and not event.originator_id and event.timestamp is _EPOCH:
        return event
    return replace(event, originator_id="", originator_version=0, timestamp=_EPOCH)


def placed(event: E, run_id: str, version: int, recorded_at_ms: int) -> E:
    """A copy of the event as it stands in the journal of a run."""
    return replace(event, originator_id=run_id, originator_version=version, timestamp=time_of(recorded_at_ms))


def place(event: Event, run_id: str, version: int, recorded_at_ms: int) -> None:
    """Fill in the columns of an event that was decoded just now and that nobody else has seen."""
    force_setattr(event, "originator_id", run_id)
    force_setattr(event, "originator_version", version)
    force_setattr(event, "timestamp", time_of(recorded_at_ms))
