"""The steps of one run: a fold of its events, computed when it is asked for.

The journal is the record of steps; a row beside it would cost half the throughput of a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from keiro.events import AttemptFailed, AttemptStarted, Event, StepRecorded, WorkflowRetried, ms_of
from keiro.failures import Failure


class StepStatus(StrEnum):
    """Where a step stands."""

    RUNNING = "running"  # an attempt has begun and nothing was recorded of it yet
    WAITING = "waiting"  # an attempt failed, the next one has a time
    FAILED = "failed"  # it raised and has no further attempt
    SUCCEEDED = "succeeded"  # its result is recorded: it never runs again


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run. Times are integer milliseconds since the epoch, UTC, and those of the newest `attempt`."""

    step: str
    """The name, with `#2`, `#3` for the later ones of the same name."""
    status: StepStatus
    attempt: int
    started_at_ms: int | None = None
    """None where the event that would say so was not recorded."""
    finished_at_ms: int | None = None
    """When the result or the failure was recorded."""
    duration_ms: int | None = None
    next_attempt_at_ms: int | None = None
    result: Any = None
    """What the step returned, as JSON has it; None too where it has no result (yet)."""
    failure: Failure | None = None


def project_step(row: StepRow | None, event: Event) -> StepRow | None:
    """The row of a step after an event of that step; None for events that are none of a step's."""
    at_ms = ms_of(event.timestamp)
    match event:
        case AttemptStarted():
            return StepRow(step=event.step, status=StepStatus.RUNNING, attempt=event.attempt, started_at_ms=at_ms)
        case StepRecorded():
            started = event.started_at_ms or _began(row, event.attempt)
            return StepRow(
                step=event.step,
                status=StepStatus.SUCCEEDED,
                attempt=event.attempt,
                started_at_ms=started,
                finished_at_ms=at_ms,
                duration_ms=_between(started, at_ms),
                result=msgspec.json.decode(event.result),
            )
        case AttemptFailed():
            started = event.started_at_ms or _began(row, event.attempt)
            again = event.next_attempt_at_ms
            return StepRow(
                step=event.step,
                status=StepStatus.FAILED if again is None else StepStatus.WAITING,
                attempt=event.attempt,
                started_at_ms=started,
                finished_at_ms=at_ms,
                duration_ms=_between(started, at_ms),
                next_attempt_at_ms=again,
                failure=event.failure,
            )
    return row


def steps(events: Iterable[Event]) -> list[StepRow]:
    """The steps of a run, in the order in which something was first recorded of them."""
    rows: dict[str, StepRow] = {}
    for event in events:
        match event:
            case AttemptStarted() | StepRecorded() | AttemptFailed():
                row = project_step(rows.get(event.step), event)
                if row is not None:
                    rows[event.step] = row
            case WorkflowRetried():
                # The workflow runs again: what had failed for good gets another chance, what succeeded stays.
                for name, row in rows.items():
                    if row.status is StepStatus.FAILED:
                        rows[name] = replace(
                            row, status=StepStatus.WAITING, next_attempt_at_ms=event.next_attempt_at_ms
                        )
    return list(rows.values())


def _began(row: StepRow | None, attempt: int) -> int | None:
    return row.started_at_ms if row is not None and row.attempt == attempt else None


def _between(started: int | None, finished: int) -> int | None:
    # Clocks are set back now and then; a duration is not.
    return None if started is None else max(finished - started, 0)
