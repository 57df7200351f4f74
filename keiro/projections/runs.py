"""The operational row of a run: a fold of its events.

Owner, lease and `started_at_ms` belong to workers, not to the journal: `running` here means "not parked", and a row
rebuilt from the journal says `pending` where the kept one says `running`.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from keiro.events import (
    Event,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
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
            )
        case WorkflowCompleted() if run is not None:
            return _ended(run, Status.COMPLETED, at_ms, result_json=bytes(event.result).decode())
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
        case _:
            return run


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
        wake_at_ms=None,
        waiting_reason=None,
        waiting_token=None,
    )
