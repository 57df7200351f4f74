"""Everything that can happen to a run, as the journal stores it.

An event is a frozen `msgspec.Struct` that is also an aggregate event of the `eventsourcing` library. The journal keeps
`originator_id`, `originator_version` and `timestamp` in columns of their own, so these fields have blank defaults and are
omitted from the stored JSON: what is encoded is only what happened.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Raw

from keiro.failures import Failure
from keiro.library import CanMutateAggregate

_BLANK_TIME: Final = datetime.fromtimestamp(0, UTC)


class Event(msgspec.Struct, CanMutateAggregate[str], frozen=True, kw_only=True, omit_defaults=True):
    """Base of all events of a run.

    `originator_id` is the run id, `originator_version` its place in the run (from 1, without gaps), `timestamp` the
    time it was recorded (UTC, millisecond resolution).
    """

    TOPIC: ClassVar[str] = ""
    class_version: ClassVar[int] = 1

    originator_id: str = ""
    originator_version: int = 0
    timestamp: datetime = _BLANK_TIME

    def apply(self, aggregate: Any) -> None:
        """Change the user's state; engine events do not."""

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
    on_cancel: str | None = None
    deadline_at_ms: int | None = None
    attributes: dict[str, Any] | None = None
    version: str | None = None
    """The version tag of the workflow's code."""

    def mutate(self, aggregate: Any) -> Any:
        """Create the aggregate this run folds into: the registered class of its workflow."""
        from keiro.run import blank_aggregate

        return blank_aggregate(self)


class StepRecorded(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A step ended with a result: it never runs again in this round."""

    TOPIC: ClassVar[str] = "StepRecorded"

    step: str
    result: Raw
    attempt: int = 1
    started_at_ms: int = 0
    inputs_digest: str | None = None


class AttemptStarted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that must be known before its body runs is about to run."""

    TOPIC: ClassVar[str] = "AttemptStarted"

    step: str
    attempt: int


class AttemptFailed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt of a step raised. Without `next_attempt_at_ms` the step has failed for good and raises on replay."""

    TOPIC: ClassVar[str] = "AttemptFailed"

    step: str
    attempt: int
    failure: Failure
    next_attempt_at_ms: int | None = None
    started_at_ms: int = 0
    inputs_digest: str | None = None


class WorkflowCompleted(Event, frozen=True, kw_only=True, omit_defaults=True):
    """The body returned `result`."""

    TOPIC: ClassVar[str] = "WorkflowCompleted"

    result: Raw


class WorkflowFailed(Event, frozen=True, kw_only=True, omit_defaults=True):
    """An exception left the body and the workflow's retry policy allows no further attempt."""

    TOPIC: ClassVar[str] = "WorkflowFailed"

    failure: Failure


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


ENGINE_EVENTS: Final[dict[str, type[Event]]] = {
    cls.TOPIC: cls
    for cls in (
        WorkflowStarted,
        StepRecorded,
        AttemptStarted,
        AttemptFailed,
        WorkflowCompleted,
        WorkflowFailed,
        WorkflowRetried,
        WorkflowCancelled,
    )
}
TERMINAL: Final = frozenset((WorkflowCompleted.TOPIC, WorkflowFailed.TOPIC, WorkflowCancelled.TOPIC))
