"""The operational rows as the journal says them, and what of a kept row must be the same.

Owner, lease and `started_at_ms` are the workers' and no event says them; everything else of `keiro_runs` is folded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from keiro.events import Event, ms_of
from keiro.projections.runs import project
from keiro.rows import RUN_COLUMNS, Run, Status

_GIVEN: Final = ("run_key", "run_id", "created_at_ms")  # never change; the store refuses it
FOLDED_COLUMNS: Final = tuple(name for name in RUN_COLUMNS if name not in (*_GIVEN, "started_at_ms"))
"""Columns that a rebuild mends."""


class ComputedRuns:
    """The rows of all runs by id, folded event by event from the beginning."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self.runs = dict(runs)

    def fold(self, events: Sequence[Event]) -> set[str]:
        """Fold more events; the runs they changed."""
        changed: set[str] = set()
        for event in events:
            name = event.originator_id
            before = self.runs.get(name)
            after = project(before, event, ms_of(event.timestamp))
            if after is not None and after is not before:
                self.runs[name] = after
                changed.add(name)
        return changed


def mended(kept: Run, folded: Run | None, owned: bool) -> Run:
    """The kept row as it should be; equal to it where it is right. `owned`: a worker drives the run."""
    if folded is None:
        return kept
    if folded.status == Status.SUSPENDED and (owned or kept.status == Status.PENDING):
        # A claim of what was due woke it, which no event tells.
        folded = replace(folded, status=Status.PENDING, wake_at_ms=None, waiting_reason=None, waiting_token=None)
    return replace(
        folded,
        run_key=kept.run_key,
        run_id=kept.run_id,
        created_at_ms=kept.created_at_ms,
        started_at_ms=kept.started_at_ms,
        # Taken away when the parent was collected, which no event of the child tells.
        parent_run_id=None if kept.parent_run_id is None else folded.parent_run_id,
        status=Status.RUNNING if folded.status == Status.PENDING and owned else folded.status,
        # Taken away by the claim that the pause was for, which no event tells.
        next_attempt_at_ms=None if kept.next_attempt_at_ms is None else folded.next_attempt_at_ms,
    )


def same_identity(kept: Run, folded: Run) -> bool:
    """Whether what a store never changes about a row is what the journal says."""
    return kept.run_id == folded.run_id and kept.created_at_ms == folded.created_at_ms
