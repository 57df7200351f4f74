"""Clocks, deferred completions and children as rows: what operators and queries see of a run's waits.

Pure: an event of a run gives changes of rows, which the store writes in the transaction that appends the event. The
journal decides; nothing here is read to decide anything but what a rotation carries over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from keiro.events import (
    Event,
    StateChanged,
    StepRecorded,
    StepRetracted,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowResurrected,
)
from keiro.failures import Failure
from keiro.identity import child_result_step, parse_run_id
from keiro.rows import Run

DEFERREDS: Final = "keiro_deferred_completions"
CLOCKS: Final = "keiro_clock_deadlines"
CHILDREN: Final = "keiro_workflow_children"
SEALED: Final = frozenset(("exit_json", "metadata_json", "result", "failure_reason"))
"""Columns of these tables that carry what users stored."""


class Exit(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a deferred or a child ended, as the step that its end records: exactly one of the three is there.

    It wraps the value, so that an honest result that looks like a failure is delivered as it is.
    """

    ok: Raw | UnsetType = UNSET
    failed: Failure | UnsetType = UNSET
    cancelled: str | UnsetType | None = UNSET


class Spawned(msgspec.Struct, frozen=True, gc=False):
    """What the step of a spawn records: which run the child is."""

    run_id: str
    workflow: str
    key: str
    on_cancel: str


class Put(msgspec.Struct, frozen=True, gc=False):
    """Insert a row unless one with its key is there."""

    table: str
    key: Mapping[str, Any]
    values: Mapping[str, Any]


class Set(msgspec.Struct, frozen=True, gc=False):
    """Change the row with this key, if it is there and `unless_set` (a column) is NULL."""

    table: str
    key: Mapping[str, Any]
    values: Mapping[str, Any]
    unless_set: str | None = None


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Delete the row with this key."""

    table: str
    key: Mapping[str, Any]


Change = Put | Set | Forget

decode_exit: Final = msgspec.json.Decoder(Exit).decode
_decode_spawned: Final = msgspec.json.Decoder(Spawned).decode


def changes(run: Run, events: Iterable[Event], at_ms: int) -> Iterator[Change]:
    """The changes of rows that `events` of `run`, recorded at `at_ms` together, bring about. `run` is the row after."""
    spawned: dict[str, Spawned] = {}
    for event in events:
        if isinstance(event, StepRecorded) and event.step.startswith("child:"):
            yield from _of_child(run, event, at_ms, spawned)
        else:
            yield from _changes(run, event, at_ms)


def _changes(run: Run, event: Event, at_ms: int) -> Iterator[Change]:
    if isinstance(event, StateChanged | WorkflowCompleted | WorkflowFailed):
        for name in event.consumed:
            address = {**_address(run), "deferred_name": name}
            yield Set(DEFERREDS, address, {"consumed_at_ms": at_ms}, unless_set="consumed_at_ms")
    match event:
        case StateChanged(state="clock_scheduled"):
            for wait in event.waits:
                values = {"deferred_name": wait.step, "due_at_ms": wait.due_at_ms, "completed_at_ms": None}
                yield Put(CLOCKS, {**_address(run), "clock_name": wait.step}, values)
        case StepRecorded() if ":" in event.step:
            yield from _recorded(run, event, at_ms)
        case StepRetracted() if ":" in event.step:
            kind, _, name = event.step.partition(":")
            if kind == "awk":
                yield Forget(DEFERREDS, {**_address(run), "deferred_name": name})
            elif kind in ("sleep", "timeout"):
                yield Forget(CLOCKS, {**_address(run), "clock_name": event.step})
        case WorkflowCompleted() | WorkflowFailed() | WorkflowCancelled():
            yield Set(CLOCKS, _address(run), {"completed_at_ms": at_ms}, unless_set="completed_at_ms")
            if isinstance(event, WorkflowCompleted) and event.handoff is not None:
                return
            # Later rounds have a parent in any case, the round before: where there is no such row, nothing changes.
            if run.parent_run_id is not None:
                yield _child_ended({"child_id": run.key, "child_name": run.workflow}, exit_of(event), at_ms)
        case WorkflowResurrected() if run.parent_run_id is not None:
            again = {"status": "running", "failed": False, "failure_reason": None, "completed_at": None}
            yield Set(CHILDREN, {"child_id": run.key, "child_name": run.workflow}, {**again, "updated_at": at_ms})


def _recorded(run: Run, event: StepRecorded, at_ms: int) -> Iterator[Change]:
    kind, _, name = event.step.partition(":")
    match kind:
        case "sleep" | "timeout":
            done = {"completed_at_ms": at_ms}
            yield Set(CLOCKS, {**_address(run), "clock_name": event.step}, done, unless_set="completed_at_ms")
        case "awk":
            values = {"exit_json": bytes(event.result).decode(), "metadata_json": None, "completed_at_ms": at_ms}
            yield Put(DEFERREDS, {**_address(run), "deferred_name": name}, {**values, "consumed_at_ms": None})


def _of_child(run: Run, event: StepRecorded, at_ms: int, spawned: dict[str, Spawned]) -> Iterator[Change]:
    _, key, what = event.step.split(":") if event.step.count(":") == 2 else (*event.step.split(":"), "")
    if what == "result" and key in spawned:
        # The spawn has found a child that had ended: there is no end to come that would say so.
        child = spawned[key]
        yield _child_ended({"child_id": key, "child_name": child.workflow}, decode_exit(event.result), at_ms)
    elif not what:
        child = spawned[key] = _decode_spawned(event.result)
        values = {
            "parent_id": run.key,
            "parent_name": run.workflow,
            "await_step": child_result_step(child.key),
            "status": "running",
            "result": None,
            "failed": False,
            "failure_reason": None,
            "created_at": at_ms,
            "updated_at": at_ms,
            "completed_at": None,
        }
        yield Put(CHILDREN, {"child_id": child.key, "child_name": child.workflow}, values)


def exit_of(event: Event) -> Exit:
    """How a run that ended with this event ended, as its parent is told."""
    match event:
        case WorkflowCompleted():
            return Exit(ok=event.result)
        case WorkflowFailed():
            return Exit(failed=event.failure)
        case WorkflowCancelled():
            return Exit(cancelled=event.reason)
    raise AssertionError(event)


def _child_ended(key: Mapping[str, Any], ended: Exit, at_ms: int) -> Change:
    failure = None if ended.failed is UNSET else ended.failed
    values = {
        "status": "completed" if ended.ok is not UNSET else "failed" if failure is not None else "cancelled",
        "result": None if ended.ok is UNSET else bytes(ended.ok).decode(),
        "failed": failure is not None,
        "failure_reason": None if failure is None else failure.message,
        "updated_at": at_ms,
        "completed_at": at_ms,
    }
    return Set(CHILDREN, key, values, unless_set="completed_at")


def _address(run: Run) -> dict[str, Any]:
    return {"flow_name": run.workflow, "execution_id": run.run_id}


TIMESTAMPS: Final = frozenset(("created_at", "updated_at", "completed_at"))
"""Columns that hold a time with its zone and not milliseconds."""


def timestamp(ms: int) -> str:
    """Milliseconds since the epoch in ISO 8601, UTC, with milliseconds."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


class ChildRow(msgspec.Struct, frozen=True, kw_only=True):
    """A child of a run. Times are ISO 8601 in UTC; `result` is JSON text, None unless it completed."""

    child_id: str
    child_name: str
    parent_id: str
    parent_name: str
    await_step: str
    status: str
    result: str | None
    failed: bool
    failure_reason: str | None
    created_at: str
    updated_at: str
    completed_at: str | None

    @property
    def run_id(self) -> str:
        """The run id of the child."""
        return str(parse_run_id(f"wf:{self.child_name}-{self.child_id}"))
