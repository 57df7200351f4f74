"""What the rows of one run must be, by its journal: which are not, and what mends them.

Pure. Whoever calls it loads everything of the run in one transaction under the journal's lock, so that what is merely
under way is never taken for damage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from keiro.events import Event, ms_of
from keiro.failures import Failure
from keiro.identity import child_result_step, parse_run_id
from keiro.projections.rebuilt import ComputedRuns, mended, same_identity
from keiro.projections.waits import CHILDREN, CLOCKS, DEFERREDS, SEALED, Change, ChildRow, Forget, Put, Set, changes
from keiro.rows import Head, Run, Status


class Finding(msgspec.Struct, frozen=True):
    """Something of a run that is not what its journal says.

    `kind` is `run`, `head`, `owner`, `clock`, `deferred` or `child`: a row of that name is wrong, missing or too many.
    `what` says so for people; `fixed` whether it was mended, durably.
    """

    kind: str
    run_id: str
    what: str
    fixed: bool = False


class Examined(msgspec.Struct, frozen=True):
    """All there is of a run. `clocks` and `deferreds` are rows by name, with the columns of `COLUMNS`; `listed` says
    that its owner, if it has one, is a listed worker. `parent` is that of the lineage, and `child` the row that says so
    to it; of a round with another behind it neither is looked at."""

    run: Run
    head: Head
    listed: bool
    events: Sequence[Event]
    clocks: Mapping[str, Mapping[str, Any]]
    deferreds: Mapping[str, Mapping[str, Any]]
    parent: str | None = None
    child: ChildRow | None = None


class Diagnosis(msgspec.Struct, frozen=True):
    """What was found, and the repairs: the row of the run, the version of its head, and changes of other rows."""

    findings: tuple[Finding, ...] = ()
    run: Run | None = None
    version: int | None = None
    changes: tuple[Change, ...] = ()


COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    CLOCKS: ("clock_name", "deferred_name", "due_at_ms", "completed_at_ms"),
    DEFERREDS: ("deferred_name", "exit_json", "completed_at_ms", "consumed_at_ms"),
}
"""Of the rows that are compared: the column of the name, and those that the journal says. `metadata_json` is none of
its."""


def diagnose(of: Examined) -> Diagnosis:
    """What of a run is not as its journal says. A run without events says nothing and is left alone."""
    if not of.events:
        return Diagnosis()
    run_id = of.run.run_id
    found: list[Finding] = []
    computed = ComputedRuns({})
    rows: dict[str, dict[str, dict[str, Any]]] = {CLOCKS: {}, DEFERREDS: {}}
    for event in of.events:
        computed.fold([event])
        run = computed.runs.get(run_id)
        if run is not None:
            for change in changes(run, [event], ms_of(event.timestamp)):
                if change.table in rows:
                    _apply(rows[change.table], change)
    folded = computed.runs.get(run_id)
    should_be = mended(of.run, folded, of.head.owner is not None)
    wrong = [name for name in of.run.__struct_fields__ if getattr(of.run, name) != getattr(should_be, name)]
    if folded is not None and wrong and same_identity(of.run, folded):
        told = ", ".join(_differs(name, getattr(of.run, name), getattr(should_be, name)) for name in wrong)
        found.append(Finding("run", run_id, told))
    newest = of.events[-1].originator_version
    if of.head.version != newest:
        found.append(Finding("head", run_id, f"the head is at version {of.head.version}, the journal at {newest}"))
    if not of.listed:
        found.append(Finding("owner", run_id, f"it is owned by worker {of.head.owner}, which is not listed"))
    repairs: list[Change] = []
    for table, kind, kept in ((CLOCKS, "clock", of.clocks), (DEFERREDS, "deferred", of.deferreds)):
        for name in sorted({**kept, **rows[table]}):
            told_of = _compare(of.run, table, name, rows[table].get(name), kept.get(name), repairs)
            if told_of is not None:
                found.append(Finding(kind, run_id, f"{name}: {told_of}"))
    if should_be.handoff_run_id is None and (told_of := _compare_child(of, should_be, repairs)) is not None:
        found.append(Finding("child", run_id, told_of))
    return Diagnosis(
        tuple(found),
        should_be if any(one.kind == "run" for one in found) else None,
        newest if of.head.version != newest else None,
        tuple(repairs),
    )


def _compare_child(of: Examined, run: Run, repairs: list[Change]) -> str | None:
    """What the parent's row of a run does not say as the run itself does. Its times are the parent's to know."""
    if of.child is None and of.parent is None:
        return None
    failure = None if run.failure_json is None else msgspec.json.decode(run.failure_json, type=Failure)
    wanted: dict[str, Any] = {
        "status": str(run.status) if run.terminal else "running",
        "result": run.result_json if run.status == Status.COMPLETED else None,
        "failed": run.status == Status.FAILED,
        "failure_reason": failure.message if failure is not None and run.status == Status.FAILED else None,
    }
    if of.parent is not None:
        parent = parse_run_id(of.parent)
        wanted |= {"parent_id": parent.key, "parent_name": parent.workflow}
    ended = {"completed_at": run.finished_at_ms, "updated_at": run.finished_at_ms or run.created_at_ms}
    key = {"child_id": run.key, "child_name": run.workflow}
    if of.child is None:
        born = {"await_step": child_result_step(run.key), "created_at": run.created_at_ms}
        repairs.append(Put(CHILDREN, key, {**wanted, **born, **ended}))
        return "its parent has no row of it"
    kept = {name: getattr(of.child, name) for name in wanted}
    # A database may spell JSON in its own way.
    wrong = [name for name in wanted if _value(name, kept[name]) != _value(name, wanted[name])]
    if (of.child.completed_at is None) == run.terminal:
        wrong.append("completed_at")
    if not wrong:
        return None
    repairs.append(Set(CHILDREN, key, {**{name: wanted[name] for name in wrong if name in wanted}, **ended}))
    told = (_differs(name, getattr(of.child, name), {**wanted, **ended}[name]) for name in wrong)
    return f"its parent's row of it: {', '.join(told)}"


def _value(name: str, value: Any) -> Any:
    return msgspec.json.decode(value) if name == "result" and value is not None else value


def _apply(rows: dict[str, dict[str, Any]], change: Change) -> None:
    name = change.key.get(COLUMNS[change.table][0])
    match change:
        case Put() if name is not None:
            rows.setdefault(name, dict(change.values))
        case Forget() if name is not None:
            rows.pop(name, None)
        case Set():
            for row in [rows[name]] if name in rows else rows.values() if name is None else ():
                if change.unless_set is None or row[change.unless_set] is None:
                    row.update(change.values)


def _compare(
    run: Run,
    table: str,
    name: str,
    wanted: Mapping[str, Any] | None,
    kept: Mapping[str, Any] | None,
    repairs: list[Change],
) -> str | None:
    first, *columns = COLUMNS[table]
    key = {"flow_name": run.workflow, "execution_id": run.run_id, first: name}
    if wanted is None:
        repairs.append(Forget(table, key))
        return "there is a row, and the journal knows of none"
    if kept is None:
        repairs.append(Put(table, key, wanted))
        return "there is no row"
    wrong = [column for column in columns if wanted[column] != kept[column]]
    if not wrong:
        return None
    repairs.append(Set(table, key, {column: wanted[column] for column in wrong}))
    return ", ".join(_differs(column, kept[column], wanted[column]) for column in wrong)


def _differs(column: str, kept: object, wanted: object) -> str:
    # What users stored may be secret: it is not shown.
    if column.endswith("_json") or column in SEALED:
        return f"{column} differs"
    return f"{column} is {'NULL' if kept is None else kept}, not {'NULL' if wanted is None else wanted}"
