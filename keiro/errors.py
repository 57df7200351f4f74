"""Every exception keiro raises for a caller.

Each message says what was wrong, where, and what to do next. Control flow inside a body (`RunSealed`) is a
`BaseException`, so that a broad `except Exception` in user code cannot swallow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keiro.failures import Failure


class KeiroError(Exception):
    """Base of all keiro errors."""


class RunConflict(KeiroError):
    """A run with this workflow and key exists and was started with another input."""


class RunParentCycle(RunConflict):
    """A run would be among its own ancestors; nothing was written.

    `path` goes from the child down to the parent it was to have, over what is recorded: each is a parent of the next
    (run ids of round 0). A run that was to be its own parent is alone in it.
    """

    def __init__(self, message: str, path: tuple[str, ...]) -> None:
        super().__init__(message)
        self.path = path


class RunNotFound(KeiroError):
    """No run has this id."""


class RunEnded(KeiroError):
    """The run has ended and records nothing more."""


class InvalidName(KeiroError, ValueError):
    """A workflow name, key, step name or run id breaks the rules for names."""


class InvalidCall(KeiroError, TypeError):
    """A workflow or step was called with arguments it does not take, or used where it cannot be."""


class InvalidOptions(InvalidCall):
    """A listing was asked for with options it does not have, or values they do not take."""

    code = "invalid_options"


class InvalidCursor(KeiroError, ValueError):
    """What was given as a cursor is none, or is of a listing with other options."""

    code = "invalid_cursor"


class EffectUnknown(KeiroError):
    """An irreversible step was interrupted, so that nobody knows whether its effect happened, and it has no idempotency
    key with which it could be repeated. Find out, then go on: catch this in the body, or allow another attempt by
    `engine.retract_step` and `engine.resurrect`."""

    code = "effect_unknown"


class SourceChanged(KeiroError):
    """A cursor or revision is of another database, or of a newer state of this one than it has now."""

    code = "source_changed"


class UnknownWorkflow(KeiroError):
    """The workflow is not registered with this engine."""


class StepFailed(KeiroError):
    """A step failed and its original exception could not be built again; `failure` holds all that was stored."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class StepNameClash(KeiroError):
    """Two tasks of one run used the same step name: replay could not tell them apart."""


class WorkflowFailed(KeiroError):
    """The run ended as failed; the original exception is `__cause__`."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class CleanupOnly(KeiroError):
    """The run is asked to end, and was asked for something else than a cleanup step."""


class WorkflowCancelled(KeiroError):
    """The run ended as cancelled."""


class ChildFailed(WorkflowFailed):
    """A child run failed; the original exception is `__cause__`."""


class ChildCancelled(WorkflowCancelled):
    """A child run was cancelled."""


class DeferredCancelled(KeiroError):
    """The deferred this run waited for was cancelled."""


class PayloadRejected(KeiroError, ValueError):
    """A value cannot be stored. `where` names the step or input, `path` the place in the value (`$.a[3]`)."""

    def __init__(self, message: str, *, where: str, path: str = "$") -> None:
        super().__init__(message)
        self.where = where
        self.path = path


class DecodeFailed(KeiroError, ValueError):
    """A stored value does not fit the annotation it is read with. `where` names the step or input."""

    def __init__(self, message: str, *, where: str) -> None:
        super().__init__(message)
        self.where = where


class NonDeterminism(KeiroError):
    """A replay asked for something the journal contradicts."""


class ProjectionFailed(KeiroError):
    """A projection could not fold an event, or its table took no rows; nothing was written.

    `projection` names it; `position` is the event's place in the journal, None where no event is to blame.
    """

    def __init__(self, message: str, *, projection: str, position: int | None = None) -> None:
        super().__init__(message)
        self.projection = projection
        self.position = position


class FenceLost(KeiroError):
    """Another worker owns the run now; nothing was written."""


class StoreError(KeiroError):
    """Base of errors of the store."""


class StoreBusy(StoreError):
    """Another process held the store's lock for longer than the limit; nothing was written. Try again."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or written (lost server, full disk, read-only file); nothing was written."""


class MigrationRequired(StoreError):
    """The database schema is older or newer than this version of keiro, or is not keiro's."""


class ContinueAsNew(BaseException):
    """Raised by `run.continue_as_new` to leave the body: `payload` is the input of the next round.

    A `BaseException`, because user code must not swallow it.
    """

    def __init__(self, payload: bytes) -> None:
        super().__init__("this round ends and the next one begins")
        self.payload = payload


class RunSealed(BaseException):
    """Raised by every `run.*` call of a body whose run this process must no longer drive.

    A `BaseException`, because user code must not swallow it: from this point nothing is recorded.
    """
