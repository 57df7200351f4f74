"""The operational row of a run: a fold of its events.

Owner, lease and `started_at_ms` belong to workers, not to the journal: `running` here means "not parked", and a row
rebuilt from the journal says `pending` where the kept one says `running`.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from keiro.attributes import STEP as ATTRIBUTES
from keiro.attributes import merged
from keiro.events import (
    Event,
    StateChanged,
    StepRecorded,
    StepRetracted,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowResurrected,
    WorkflowRetried,
    WorkflowStarted,
)
from keiro.identity import run_id
from keiro.rows import Run, Status

_encode: Final = msgspec.json.Encoder().encode


def project(run: Run | None, event: Event, at_ms: int) -> Run | None:
    """The row after `event`, recorded at `at_ms`; the very same object where the event does not change it."""
    match event:
        case WorkflowStarted():
            own = run_id(event.workflow, event.key, event.round)
            return Run(
                run_id=own,
                workflow=event.workflow,
                key=event.key,
                status=Status.PENDING,
                lineage_id=event.lineage or own,
                round_ordinal=event.round,
                parent_run_id=event.parent,
                on_cancel=event.on_cancel,
                version_tag=event.version,
                attributes_json=None if event.attributes is None else _encode(event.attributes).decode(),
                input_json=bytes(event.input).decode(),
                created_at_ms=at_ms,
                deadline_at_ms=event.deadline_at_ms,
                next_attempt_at_ms=event.start_at_ms,
                priority=event.priority,
                cleanup_ms=event.cleanup_ms,
            )
        case WorkflowCompleted() if run is not None:
            after = _ended(run, Status.COMPLETED, at_ms, result_json=bytes(event.result).decode())
            return after if event.handoff is None else replace(after, handoff_run_id=event.handoff)
        case WorkflowFailed() if run is not None:
            return _ended(run, Status.FAILED, at_ms, failure_json=_encode(event.failure).decode())
        case WorkflowCancelled() if run is not None:
            return _ended(run, Status.CANCELLED, at_ms)
        case WorkflowRetried() if run is not None:
            return replace(
                run,
                status=Status.PENDING,
                attempts=event.attempt,
                next_attempt_at_ms=event.next_attempt_at_ms,
                failure_json=_encode(event.failure).decode(),
            )
        case StateChanged(state="suspended") if run is not None:
            return _suspended(run, event)
        case StateChanged(state="cancel_requested") if run is not None:
            return _asked(run, at_ms if event.requested_at_ms is None else event.requested_at_ms)
        case WorkflowResurrected() if run is not None:
            if event.parent is not None:
                run = replace(run, parent_run_id=event.parent, on_cancel=event.on_cancel)
            return replace(
                run, status=Status.PENDING, attempts=0, finished_at_ms=None, failure_json=None, result_json=None
            )
        case StepRecorded() if run is not None and event.step.startswith(ATTRIBUTES):
            if run.status == Status.SUSPENDED:
                run = replace(run, status=Status.PENDING, **_NO_WAIT)
            attributes = merged(run.attributes_json, msgspec.json.decode(event.result))
            return replace(run, attributes_json=None if attributes is None else _encode(attributes).decode())
        case _ if run is not None and run.status == Status.SUSPENDED and _wakes(run, event):
            return replace(run, status=Status.PENDING, **_NO_WAIT)
        case _:
            return run


def claimed(run: Run, now_ms: int) -> Run:
    """The row of a run that a worker has just claimed."""
    return replace(
        run,
        status=Status.RUNNING,
        started_at_ms=now_ms if run.started_at_ms is None else run.started_at_ms,
        next_attempt_at_ms=None,
        **_NO_WAIT,
    )


_NO_WAIT: Final[dict[str, None]] = {"wake_at_ms": None, "waiting_reason": None, "waiting_token": None}


def _suspended(run: Run, event: StateChanged) -> Run:
    dues = [wait.due_at_ms for wait in event.waits if wait.due_at_ms is not None]
    # One that listens to commands shows, because a command looks for it; else the first that was begun.
    shown = next((wait for wait in event.waits if wait.kind == "until"), event.waits[0])
    return replace(
        run,
        status=Status.SUSPENDED,
        wake_at_ms=min(dues, default=None),
        waiting_reason=shown.kind,
        waiting_token=shown.step,
    )


def _asked(run: Run, at_ms: int) -> Run:
    """Whoever has it goes on with it, and else it is to be driven now: whatever it waited for is not waited for."""
    asked = replace(run, cancel_requested_at_ms=at_ms)
    if run.status == Status.RUNNING:
        return asked
    return replace(asked, status=Status.PENDING, next_attempt_at_ms=None, **_NO_WAIT)


def _wakes(run: Run, event: Event) -> bool:
    """Whether something a parked run may wait for has come: what others record, and the commands it listens to."""
    return isinstance(event, StepRecorded | StepRetracted) or (":" in event.TOPIC and run.waiting_reason == "until")


def _ended(
    run: Run, status: Status, at_ms: int, *, result_json: str | None = None, failure_json: str | None = None
) -> Run:
    return replace(
        run,
        status=status,
        finished_at_ms=at_ms,
        result_json=result_json,
        failure_json=failure_json,
        next_attempt_at_ms=None,
        **_NO_WAIT,
    )
