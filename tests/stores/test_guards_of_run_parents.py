"""The table of run parents: what it refuses, what goes with a deleted run, what an upgrade fills in, and by which
indexes it is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from keiro.stores import migrate
from keiro.stores.sql import Tables
from tests.stores.conftest import EVENT, Database, PostgresDatabase, SQLiteDatabase
from tests.stores.test_guards_of_waits import refuses, run

TABLE = "keiro_run_parents"
EDGE: dict[str, Any] = {"child_id": "wf:order-2", "parent_id": "wf:order-1", "seq": 1}


def edges(database: Database) -> list[tuple[Any, ...]]:
    return database.rows(f"SELECT child_id, parent_id, seq FROM {TABLE} ORDER BY seq, child_id")


def test_an_edge_is_taken_once_and_whole(database: Database) -> None:
    database.insert(TABLE, EDGE)

    refuses(database, TABLE, EDGE)
    refuses(database, TABLE, EDGE | {"seq": 2})
    for column in EDGE:
        refuses(database, TABLE, EDGE | {"child_id": "wf:order-3", column: None})
    for column in ("child_id", "parent_id"):
        refuses(database, TABLE, EDGE | {"child_id": "wf:order-3", column: ""})


def test_numbers_lie_between_0_and_2_to_the_53(database: Database) -> None:
    """R11."""
    bad: list[Any] = [-1, 2**53]
    if database.dialect == "sqlite":
        bad += [1.5, "soon", b"1"]
    for value in bad:
        refuses(database, TABLE, EDGE | {"seq": value})

    database.insert(TABLE, EDGE | {"seq": 0})
    database.insert(TABLE, EDGE | {"child_id": "wf:order-3", "seq": 2**53 - 1})


def test_edges_go_with_a_run_on_either_side_however_it_is_deleted(database: Database) -> None:
    """J7."""
    for key in ("1", "2", "3"):
        database.insert("keiro_runs", run(key))
    database.insert("keiro_runs", run("2", 1))
    for seq, (child, parent) in enumerate([("2", "1"), ("3", "2"), ("3", "1"), ("4", "3")], 1):
        database.insert(TABLE, {"child_id": f"wf:order-{child}", "parent_id": f"wf:order-{parent}", "seq": seq})

    database.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-2#1'")
    assert len(edges(database)) == 4

    database.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-2'")
    assert edges(database) == [("wf:order-3", "wf:order-1", 3), ("wf:order-4", "wf:order-3", 4)]

    database.rows("DELETE FROM keiro_runs")
    assert edges(database) == []


def test_an_upgrade_gives_the_children_there_are_their_edges(empty: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(migrate, "REVISIONS", ("0001", "0002"))
        patched.setattr(migrate, "HEAD", "0002")
        empty.ensure()
    rows = [run("1"), run("2"), run("3"), run("1", 1)]
    for key, (row, parent) in enumerate(zip(rows, (None, "wf:order-1", "wf:order-1", "wf:order-1"), strict=True), 1):
        empty.insert("keiro_runs", row | {"parent_run_id": parent})
        empty.insert("keiro_journal", EVENT | {"run_key": key})
        empty.insert("keiro_journal", EVENT | {"run_key": key, "version": 2, "event_id": b"other-event-id--"})

    empty.ensure()

    # By the place of each one's first event; a round is no child of the one before.
    assert edges(empty) == [("wf:order-2", "wf:order-1", 3), ("wf:order-3", "wf:order-1", 5)]


def filled(database: Database, n: int) -> None:
    """Put n edges into the table: chains of four, many of which share a parent."""
    series = (
        "generate_series(1, ?) AS s(n)"
        if database.dialect == "postgresql"
        else "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < ?) SELECT n FROM s) AS s"
    )
    database.rows(
        f"INSERT INTO {TABLE} (child_id, parent_id, seq) SELECT 'wf:order-' || n, CASE WHEN n - n / 4 * 4 = 0"
        f" THEN 'wf:order-root' ELSE 'wf:order-' || (n - 1) END, n FROM {series}",
        n,
    )
    database.rows(f"ANALYZE {TABLE}")


def plan(database: Database, sql: str, *values: Any) -> str:
    explain = "EXPLAIN " if database.dialect == "postgresql" else "EXPLAIN QUERY PLAN "
    return "\n".join(str(row[-1]) for row in database.rows(explain + sql, *values))


def test_edges_are_found_and_numbered_by_their_indexes(database: Database) -> None:
    filled(database, 20_000)
    text = Tables("keiro." if database.dialect == "postgresql" else "")
    run_id = "wf:order-17"
    asked = {
        "last_edge": (text.last_edge, ()),
        "edge": (text.edge, (run_id, run_id)),
        "parents_of": (text.parents_of, (run_id,)),
        "children_of": (text.children_of, (run_id,)),
        "above": (text.above, (run_id,)),
        "below": (text.below, (run_id,)),
    }
    plans = {name: plan(database, sql, *values) for name, (sql, values) in asked.items()}

    for name, found in plans.items():
        assert not re.search(rf"Seq Scan on {TABLE}|SCAN (e|{TABLE})\b(?! USING)", found), f"{name}: {found}"
    assert "keiro_run_parents_seq_idx" in plans["last_edge"]
    for name in ("parents_of", "children_of"):
        assert not re.search("Sort|TEMP B-TREE", plans[name]), plans[name]


def test_a_chain_that_closes_on_itself_is_gone_round_once(database: Database) -> None:
    """J4: the walk upwards ends, whatever the rows say."""
    for seq, (child, parent) in enumerate([("1", "2"), ("2", "3"), ("3", "1"), ("1", "1")], 1):
        database.insert(TABLE, {"child_id": child, "parent_id": parent, "seq": seq})

    assert isinstance(database, SQLiteDatabase | PostgresDatabase)
    found = database.rows(Tables("keiro." if database.dialect == "postgresql" else "").above, "1")

    assert found == [("1", "2"), ("2", "3"), ("3", "1"), ("1", "1")]
