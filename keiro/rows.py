"""The two rows every run has: its operational row and its head.

`Run` is the row of `keiro_runs`, a fold of the run's events. `Head` is the row of `keiro_run_heads`: the only one a
step touches, and what every append of an owner is fenced by.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec


class Status(StrEnum):
    """Where a run stands."""

    PENDING = "pending"  # nobody drives it; a worker may claim it
    RUNNING = "running"  # exactly while a worker owns it
    SUSPENDED = "suspended"  # parked: an open wait will make it pending
    COMPLETED = "completed"  # the body returned
    FAILED = "failed"  # an exception left the body
    CANCELLED = "cancelled"  # stopped on request


TERMINAL: Final = frozenset((Status.COMPLETED, Status.FAILED, Status.CANCELLED))


class Run(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run as its operational row shows it. Times are integer milliseconds since the epoch, UTC; JSON is text."""

    run_key: int = 0
    run_id: str
    workflow: str
    key: str
    status: str
    lineage_id: str
    round_ordinal: int = 0
    parent_run_id: str | None = None
    on_cancel: str | None = None
    version_tag: str | None = None
    attributes_json: str | None = None
    input_json: str
    result_json: str | None = None
    failure_json: str | None = None
    attempts: int = 0
    created_at_ms: int
    started_at_ms: int | None = None
    finished_at_ms: int | None = None
    next_attempt_at_ms: int | None = None
    wake_at_ms: int | None = None
    waiting_reason: str | None = None
    waiting_token: str | None = None
    deadline_at_ms: int | None = None
    cancel_requested_at_ms: int | None = None
    handoff_run_id: str | None = None
    """The next round, where this one has handed off to it."""
    priority: int = 0
    """Of the runs that wait for a worker, those with the lowest come first."""
    cleanup_ms: int | None = None
    """How long the body may take to end once a cancellation is requested; None where it ends the run at once."""

    @property
    def terminal(self) -> bool:
        """Whether the run has ended."""
        return self.status in TERMINAL

    @property
    def grace_over_ms(self) -> int | None:
        """When a run that is asked to end is cancelled whatever its body does; None for one that is not asked."""
        if self.cancel_requested_at_ms is None or self.cleanup_ms is None:
            return None
        return self.cancel_requested_at_ms + self.cleanup_ms


class Head(msgspec.Struct, kw_only=True, gc=False):
    """Version of the newest event of a run, and who may append: the worker `owner` in its `epoch`."""

    run_key: int
    version: int
    owner: int | None = None
    epoch: int = 0


RUN_COLUMNS: Final = Run.__struct_fields__
PAYLOAD_COLUMNS: Final = ("input_json", "result_json", "failure_json")
"""Columns of a run that carry what users stored: the codec chain seals them. Attributes stay clear: runs are found by
them."""
