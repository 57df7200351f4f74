"""The attempts of the steps of one run: a fold of its events, computed when it is asked for.

An attempt of a plain step that succeeds is one event; those of steps with a tier, and those that checked in, were known
before they ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from keiro.events import (
    AttemptFailed,
    AttemptProgressed,
    AttemptStarted,
    Event,
    StepRecorded,
    StepRetracted,
    ms_of,
)
from keiro.failures import Failure

OF_USERS: Final = ("tx:", "compensate:")
"""What the names of steps begin with that run a function of the user's, of those that the engine names."""


class AttemptState(StrEnum):
    """Where an attempt stands."""

    RUNNING = "running"  # it has begun, and nothing was recorded of its end: it is under way, or was interrupted
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Effect(StrEnum):
    """What is known of the effect of an attempt that was recorded before it began."""

    INTENDED = "intended"  # it may be happening now
    SUCCEEDED = "succeeded"
    UNKNOWN = "unknown"  # the attempt failed: it may have happened before


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a step. Times are integer milliseconds since the epoch, UTC."""

    step: str
    attempt: int
    state: AttemptState
    tier: str | None = None
    effect: Effect | None = None
    """None where the attempt was not recorded before it began."""
    idempotency_key: str | None = None
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    checkpoint: Any = None
    """The newest one, as JSON has it."""
    failure: Failure | None = None
    retracted: bool = False
    """Whether what was recorded of the step counts no more."""


def attempts(events: Iterable[Event]) -> list[AttemptRow]:
    """The attempts of a run's steps, in the order in which something was first recorded of each."""
    rows: list[AttemptRow] = []
    newest: dict[tuple[str, int], int] = {}  # where in `rows`, of those that are not retracted

    def put(event: AttemptStarted | AttemptProgressed | AttemptFailed | StepRecorded, **changes: Any) -> None:
        place = newest.get((event.step, event.attempt))
        if place is None:
            newest[event.step, event.attempt] = len(rows)
            row = AttemptRow(step=event.step, attempt=event.attempt, state=AttemptState.RUNNING)
            rows.append(replace(row, **changes))
        else:
            rows[place] = replace(rows[place], **changes)

    for event in events:
        at_ms = ms_of(event.timestamp)
        match event:
            case AttemptStarted():
                put(
                    event,
                    started_at_ms=at_ms,
                    tier=event.tier,
                    effect=Effect.INTENDED,
                    idempotency_key=event.idempotency_key,
                )
            case AttemptProgressed():
                put(event, checkpoint=msgspec.json.decode(event.checkpoint))
            case AttemptFailed() | StepRecorded():
                failed = isinstance(event, AttemptFailed)
                place = newest.get((event.step, event.attempt))
                before = None if place is None else rows[place]
                changes: dict[str, Any] = {
                    "state": AttemptState.FAILED if failed else AttemptState.SUCCEEDED,
                    "finished_at_ms": at_ms,
                }
                if before is None or before.started_at_ms is None:
                    changes["started_at_ms"] = event.started_at_ms or None
                if before is not None and before.effect is not None:
                    changes["effect"] = Effect.UNKNOWN if failed else Effect.SUCCEEDED
                if isinstance(event, AttemptFailed):
                    changes["failure"] = event.failure
                if failed or ":" not in event.step or event.step.startswith(OF_USERS):
                    put(event, **changes)
            case StepRetracted():
                for one in [one for one in newest if one[0] == event.step]:
                    place = newest.pop(one)
                    rows[place] = replace(rows[place], retracted=True)
    return rows
