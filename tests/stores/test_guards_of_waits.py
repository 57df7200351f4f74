"""Deferred completions, clocks and children: what their tables refuse, and what goes with a deleted run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores.conftest import RUN, Database, PostgresDatabase, SQLiteDatabase

DEFERRED: dict[str, Any] = {
    "flow_name": "order",
    "execution_id": "wf:order-1",
    "deferred_name": "approved",
    "exit_json": '{"ok":true}',
    "completed_at_ms": 7,
}
CLOCK: dict[str, Any] = {
    "flow_name": "order",
    "execution_id": "wf:order-1",
    "clock_name": "sleep:1",
    "deferred_name": "sleep:1",
    "due_at_ms": 7,
}
CHILD: dict[str, Any] = {
    "child_id": "1",
    "child_name": "ship",
    "parent_id": "1",
    "parent_name": "order",
    "await_step": "child:1:result",
}
TABLES = {
    "keiro_deferred_completions": DEFERRED,
    "keiro_clock_deadlines": CLOCK,
    "keiro_workflow_children": CHILD,
}
NAMES = [
    (table, column)
    for table in ("keiro_deferred_completions", "keiro_clock_deadlines")
    for column in TABLES[table]
    if column.endswith(("_name", "_id"))
]
INTEGERS = [
    ("keiro_deferred_completions", "completed_at_ms"),
    ("keiro_deferred_completions", "consumed_at_ms"),
    ("keiro_clock_deadlines", "due_at_ms"),
    ("keiro_clock_deadlines", "completed_at_ms"),
]


def run(key: str, round_ordinal: int = 0) -> dict[str, Any]:
    """A row of keiro_runs."""
    lineage = f"wf:order-{key}"
    run_id = f"{lineage}#{round_ordinal}" if round_ordinal else lineage
    return RUN | {"run_id": run_id, "key": key, "lineage_id": lineage, "round_ordinal": round_ordinal}


@pytest.fixture
def held(database: Database) -> Database:
    """A database with one run."""
    database.insert("keiro_runs", run("1"))
    return database


def refuses(database: Database, table: str, row: dict[str, Any]) -> None:
    before = database.rows(f"SELECT * FROM {table}")
    with pytest.raises(database.refused):
        database.insert(table, row)
    assert database.rows(f"SELECT * FROM {table}") == before


@pytest.mark.parametrize(("table", "row"), TABLES.items())
def test_a_table_takes_its_row_once(held: Database, table: str, row: dict[str, Any]) -> None:
    held.insert(table, row)

    refuses(held, table, row)


@pytest.mark.parametrize(("table", "row"), TABLES.items())
def test_what_is_required_cannot_be_null(held: Database, table: str, row: dict[str, Any]) -> None:
    for column in row:
        refuses(held, table, row | {column: None})


@pytest.mark.parametrize(("table", "column"), NAMES)
def test_names_are_not_empty(held: Database, table: str, column: str) -> None:
    refuses(held, table, TABLES[table] | {column: ""})


@pytest.mark.parametrize(("table", "column"), INTEGERS)
def test_times_lie_between_0_and_2_to_the_53(held: Database, table: str, column: str) -> None:
    bad: list[Any] = [-1, 2**53]
    if held.dialect == "sqlite":
        bad += [1.5, "soon", b"1"]
    for value in bad:
        refuses(held, table, TABLES[table] | {column: value})

    held.insert(table, TABLES[table] | {column: 2**53 - 1})


@pytest.mark.parametrize("column", ["exit_json", "metadata_json"])
def test_completions_are_json_that_is_kept_as_it_was_given(held: Database, column: str) -> None:
    for bad in ("", "{", "NaN", b"{"):
        refuses(held, "keiro_deferred_completions", DEFERRED | {column: bad})

    text = '{"b" : [1.0, null], "a":"\\u00e9"}'
    held.insert("keiro_deferred_completions", DEFERRED | {column: text})
    assert held.rows(f"SELECT {column} FROM keiro_deferred_completions") == [(text,)]


@pytest.mark.parametrize("table", ["keiro_deferred_completions", "keiro_clock_deadlines"])
def test_waits_are_of_a_run_that_exists(held: Database, table: str) -> None:
    refuses(held, table, TABLES[table] | {"execution_id": "wf:order-none"})


@pytest.mark.parametrize("status", ["running", "completed", "cancelled", "failed"])
def test_a_child_is_in_one_of_four_states(held: Database, status: str) -> None:
    """CH-06."""
    for bad in ("pending", "RUNNING", ""):
        refuses(held, "keiro_workflow_children", CHILD | {"status": bad})

    held.insert("keiro_workflow_children", CHILD | {"status": status})


def test_the_result_of_a_child_is_json(held: Database) -> None:
    for bad in ("", "{", "{'a': 1}"):
        refuses(held, "keiro_workflow_children", CHILD | {"result": bad})

    # A child that returned null is not one that has not returned.
    held.insert("keiro_workflow_children", CHILD | {"result": "null"})
    assert held.rows("SELECT child_id FROM keiro_workflow_children WHERE result IS NOT NULL") == [("1",)]


def test_whether_a_child_failed_is_true_or_false(held: Database) -> None:
    for bad in ("maybe", 2):
        refuses(held, "keiro_workflow_children", CHILD | {"failed": bad})

    held.insert("keiro_workflow_children", CHILD | {"failed": True})


def test_a_child_is_born_running_now(held: Database) -> None:
    held.insert("keiro_workflow_children", CHILD)

    found = held.rows(
        "SELECT status, failed, result, failure_reason, completed_at, created_at = updated_at"
        " FROM keiro_workflow_children"
    )
    assert found == [("running", False, None, None, None, True)]


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_the_time_of_birth_is_iso_8601_in_utc(held: SQLiteDatabase) -> None:
    held.insert("keiro_workflow_children", CHILD)

    ((born, now),) = held.rows("SELECT created_at, strftime('%Y-%m-%dT%H:%M:%f') FROM keiro_workflow_children")

    assert born.endswith("+00:00")
    assert born.removesuffix("+00:00") <= now


# What goes with a run


@pytest.fixture
def related(held: Database) -> Database:
    """Three runs and a second round, each with a wait of either kind; the second run is a child of the first and has
    the third as a child."""
    for row in (run("2"), run("3"), run("1", 1)):
        held.insert("keiro_runs", row)
    for run_id in ("wf:order-1", "wf:order-1#1", "wf:order-2", "wf:order-3"):
        held.insert("keiro_deferred_completions", DEFERRED | {"execution_id": run_id})
        held.insert("keiro_clock_deadlines", CLOCK | {"execution_id": run_id})
    for parent, child in (("1", "2"), ("2", "3"), ("1", "elsewhere")):
        link = {"child_id": child, "child_name": "order", "parent_id": parent, "parent_name": "order"}
        held.insert("keiro_workflow_children", CHILD | link)
    # The same key under another name is another run.
    held.insert("keiro_workflow_children", CHILD | {"child_id": "1", "parent_id": "2", "parent_name": "ship"})
    return held


def waits(database: Database) -> list[str]:
    """The runs that have waits, which must be of both kinds."""
    found = [
        database.rows(f"SELECT execution_id FROM {table} ORDER BY 1")
        for table in ("keiro_deferred_completions", "keiro_clock_deadlines")
    ]
    assert found[0] == found[1]
    return [run_id for (run_id,) in found[0]]


def links(database: Database) -> list[tuple[Any, ...]]:
    """(parent, child) by workflow and key."""
    return database.rows(
        "SELECT parent_name || ' ' || parent_id, child_name || ' ' || child_id"
        " FROM keiro_workflow_children ORDER BY 1, 2"
    )


def test_waits_go_with_their_round_and_children_with_their_lineage(related: Database) -> None:
    """R2."""
    related.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1#1'")
    assert waits(related) == ["wf:order-1", "wf:order-2", "wf:order-3"]
    assert len(links(related)) == 4

    related.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-2'")
    assert waits(related) == ["wf:order-1", "wf:order-3"]
    assert links(related) == [("order 1", "order elsewhere"), ("ship 2", "ship 1")]

    related.rows("DELETE FROM keiro_runs")
    assert waits(related) == []
    assert links(related) == [("ship 2", "ship 1")]


def test_a_run_that_is_not_deleted_after_all_keeps_its_waits(related: Database) -> None:
    related.insert("keiro_runs", run("4") | {"parent_run_id": "wf:order-3"})
    before = waits(related), links(related)

    with pytest.raises(related.guarded):
        related.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-3'")

    assert (waits(related), links(related)) == before


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_waits_do_not_let_runs_be_truncated(related: PostgresDatabase) -> None:
    with pytest.raises(related.guarded):
        related.rows("TRUNCATE keiro_runs CASCADE")

    assert len(waits(related)) == 4
