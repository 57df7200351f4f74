"""The tables that are specified for waits, children and plans, object by object: each column with its type and what it
takes, each key, index, trigger and cascade.

What keiro adds to these tables, and what it does in another way, is listed first; nothing else may differ.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from tests.stores import test_guards_of_plans as plans
from tests.stores import test_guards_of_waits as waits
from tests.stores.conftest import Database, SQLiteDatabase
from tests.stores.test_migrations import Inventory, on_sqlite

# Where keiro differs

ADDED = {
    "keiro_deferred_completions.consumed_at_ms": "the run has read it: nothing is looked for there any more",
    "keiro_deferred_completions_execution_idx": "the reference to the run, and the collection of runs",
    "keiro_clock_deadlines_execution_idx": "the same",
    "keiro_workflow_children.failed": "a child that failed is neither completed nor cancelled",
    "keiro_workflow_children.failure_reason": "the same",
    "keiro_runs_forget_waits": "waits go with their run; the reference alone would keep it from being deleted",
    "keiro_runs_forget_children": "children go with the first round of their lineage",
    "keiro_runs_forget_plans": "on SQLite, for clients that do not switch foreign keys on",
    **dict.fromkeys(
        (f"{table}_{guard}" for table in plans.OF_RUNS for guard in ("no_replace", "no_truncate")),
        "REPLACE on SQLite and TRUNCATE on Postgres go past the triggers that guard deletion",
    ),
}
"""What the tables below have besides, and why."""

# What is listed. Types as Postgres calls them; behind the comma what the values are checked for.

COLUMNS = """
keiro_deferred_completions.flow_name text not null, name
keiro_deferred_completions.execution_id text not null, run
keiro_deferred_completions.deferred_name text not null, name
keiro_deferred_completions.exit_json text not null, json
keiro_deferred_completions.metadata_json text, json
keiro_deferred_completions.completed_at_ms bigint not null, time
keiro_clock_deadlines.flow_name text not null, name
keiro_clock_deadlines.execution_id text not null, run
keiro_clock_deadlines.clock_name text not null, name
keiro_clock_deadlines.deferred_name text not null, name
keiro_clock_deadlines.due_at_ms bigint not null, time
keiro_clock_deadlines.completed_at_ms bigint, time
keiro_selection_suspected_edges.scope text not null, name
keiro_selection_suspected_edges.affects text not null, name
keiro_selection_suspected_edges.confidence double precision not null, share
keiro_selection_suspected_edges.valid_from_ms bigint not null, time
keiro_selection_suspected_edges.evidence_json text not null, json
keiro_plan_input_legacy_runs.run_id text not null, run
keiro_plan_input_heads.run_id text not null, run
keiro_plan_input_heads.plan_id text not null, name
keiro_plan_input_heads.base_digest text not null, name
keiro_plan_input_heads.generation bigint not null, time
keiro_plan_input_heads.environment_digest text, name
keiro_plan_input_heads.merge_state_version bigint, version
keiro_plan_input_generations.run_id text not null, run
keiro_plan_input_generations.plan_id text not null, name
keiro_plan_input_generations.generation bigint not null, time
keiro_plan_input_generations.snapshot_json text not null, json
keiro_plan_input_generations.checksum text not null, digest
keiro_plan_merge_intents.run_id text not null, run
keiro_plan_merge_intents.stopped_node_id text not null, name
keiro_plan_merge_intents.intent_json text not null, json
keiro_plan_merge_intents.checksum text not null, digest
keiro_plan_merge_completions.run_id text not null, run
keiro_plan_merge_completions.stopped_node_id text not null, node
keiro_plan_merge_completions.generation bigint not null, positive
keiro_plan_merge_completions.merge_node_id text not null, name
keiro_plan_merge_completions.completion_json text not null, json
keiro_plan_merge_completions.checksum text not null, digest
keiro_workflow_children.child_id text not null, text
keiro_workflow_children.child_name text not null, text
keiro_workflow_children.parent_id text not null, text
keiro_workflow_children.parent_name text not null, text
keiro_workflow_children.await_step text not null, text
keiro_workflow_children.status text not null default 'running', status
keiro_workflow_children.result jsonb, json
keiro_workflow_children.created_at timestamp with time zone not null default now(), moment
keiro_workflow_children.updated_at timestamp with time zone not null default now(), moment
keiro_workflow_children.completed_at timestamp with time zone, moment
""".strip().splitlines()

KEYS = """
keiro_deferred_completions primary key(flow_name,execution_id,deferred_name)
keiro_deferred_completions foreign key(execution_id) references keiro_runs(run_id)
keiro_clock_deadlines primary key(flow_name,execution_id,clock_name)
keiro_clock_deadlines foreign key(execution_id) references keiro_runs(run_id)
keiro_selection_suspected_edges primary key(scope,affects)
keiro_plan_input_legacy_runs primary key(run_id)
keiro_plan_input_legacy_runs foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_input_heads primary key(run_id,plan_id)
keiro_plan_input_heads foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_input_generations primary key(run_id,plan_id,generation)
keiro_plan_input_generations foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_merge_intents primary key(run_id,stopped_node_id)
keiro_plan_merge_intents foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_merge_completions primary key(run_id,stopped_node_id)
keiro_plan_merge_completions unique(run_id,generation)
keiro_plan_merge_completions unique(run_id,merge_node_id)
keiro_plan_merge_completions foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_merge_completions foreign key(run_id,stopped_node_id) references keiro_plan_merge_intents(run_id,stopped_node_id) on delete cascade
keiro_workflow_children primary key(child_id,child_name)
""".strip().splitlines()  # noqa: E501

INDEXES = """
keiro_clock_deadlines_pending_idx keiro_clock_deadlines(completed_at_ms,due_at_ms)
keiro_plan_input_heads_run_idx unique keiro_plan_input_heads(run_id)
keiro_workflow_children_parent_idx keiro_workflow_children(parent_id,parent_name)
keiro_workflow_children_running_idx keiro_workflow_children(status) where status = 'running'
""".strip().splitlines()

_GENERATION = "UPDATE keiro_plan_input_heads SET generation = generation"
TRIGGERS = {
    "keiro_plan_input_legacy_runs_no_update": ["UPDATE keiro_plan_input_legacy_runs SET run_id = 'wf:order-2'"],
    "keiro_plan_input_legacy_runs_no_delete": ["DELETE FROM keiro_plan_input_legacy_runs"],
    "keiro_plan_input_heads_forward_only": [
        f"{_GENERATION} + 2",
        f"{_GENERATION} - 0",
        f"{_GENERATION} + 1, run_id = 'wf:order-2'",
        f"{_GENERATION} + 1, plan_id = 'another'",
        f"{_GENERATION} + 1, base_digest = 'another'",
    ],
    "keiro_plan_input_heads_environment_required": [
        "INSERT INTO keiro_plan_input_heads (run_id, plan_id, base_digest, generation)"
        " VALUES ('wf:order-2', 'plan', 'base', 0)"
    ],
    "keiro_plan_input_heads_environment_immutable": [
        f"{_GENERATION} + 1, environment_digest = 'another'",
        f"{_GENERATION} + 1, environment_digest = NULL",
    ],
    "keiro_plan_input_heads_merge_version_immutable": [f"{_GENERATION} + 1, merge_state_version = NULL"],
    "keiro_plan_input_heads_no_delete": ["DELETE FROM keiro_plan_input_heads"],
    "keiro_plan_input_generations_no_update": [
        "UPDATE keiro_plan_input_generations SET snapshot_json = '[]'",
        "UPDATE keiro_plan_input_generations SET generation = generation + 1",
    ],
    "keiro_plan_input_generations_no_delete": ["DELETE FROM keiro_plan_input_generations"],
    "keiro_plan_merge_intents_no_update": ["UPDATE keiro_plan_merge_intents SET intent_json = '[]'"],
    "keiro_plan_merge_intents_no_delete": ["DELETE FROM keiro_plan_merge_intents WHERE stopped_node_id = 'free'"],
    "keiro_plan_merge_completions_no_update": ["UPDATE keiro_plan_merge_completions SET completion_json = '[]'"],
    "keiro_plan_merge_completions_no_delete": ["DELETE FROM keiro_plan_merge_completions"],
}
"""What each trigger refuses, and nothing else does."""


_UNWHOLE: list[Any] = [1.5, "soon", b"1"]
CHECKS: dict[str, tuple[list[Any], list[Any]]] = {
    "name": (["x"], [""]),
    "text": (["", "x"], []),
    "run": (["wf:order-2"], ["", "wf:order-none"]),
    "node": (["free"], ["", "none"]),
    "json": (["null", '{"a" : 1}'], ["", "{", "{'a': 1}", "NaN"]),
    "digest": ([plans.DIGEST[::-1]], ["", plans.DIGEST[1:], plans.DIGEST + "0"]),
    "time": ([0, 2**53 - 1], [-1, 2**53]),
    "positive": ([1, 2**53 - 1], [-1, 0, 2**53]),
    "version": ([1], [-1, 0, 2, 2**53]),
    "share": ([0, 0.25, 1], [-0.5, 1.5, math.nan, math.inf, "high"]),
    "status": (["running", "completed", "cancelled"], ["", "pending", "RUNNING"]),
    "moment": (["2026-12-01T08:00:00+00:00"], []),
}
"""What a column takes and what it refuses, by what it is checked for."""

ROWS = {**waits.TABLES, **plans.TABLES}
"""A row for each table."""


class Client:
    """One connection; whatever is tried on it is undone."""

    def __init__(self, connection: Any, refused: tuple[type[Exception], ...], mark: str) -> None:
        self._connection = connection
        self._refused = refused
        self._mark = mark

    def gives(self, *statements: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of the last one of these statements, which has the values."""
        self._connection.execute("BEGIN")
        try:
            for sql in statements[:-1]:
                self._connection.execute(sql)
            found = self._connection.execute(statements[-1].replace("?", self._mark), tuple(values))
            return found.fetchall() if found.description else []
        finally:
            self._connection.execute("ROLLBACK")

    def takes(self, *statements: str, values: Iterable[Any] = ()) -> bool:
        """Whether the database does all of this."""
        try:
            self.gives(*statements, values=values)
        except self._refused:
            return False
        return True


@pytest.fixture
def client(database: Database) -> Iterator[Client]:
    """A client of a database with two runs: the first one has a row in each table, the second one an intent."""
    for key in ("1", "2"):
        database.insert("keiro_runs", plans.run(key))
    for table, row in ROWS.items():
        database.insert(table, row)
    for key in ("1", "2"):
        free = {"run_id": f"wf:order-{key}", "stopped_node_id": "free"}
        database.insert("keiro_plan_merge_intents", plans.INTENT | free)
    if isinstance(database, SQLiteDatabase):
        with closing(sqlite3.connect(database.path, isolation_level=None)) as connection:
            connection.execute("PRAGMA foreign_keys = ON")
            yield Client(connection, database.refused, "?")
    else:
        with psycopg.connect(database.url, autocommit=True, options="-c search_path=keiro,public") as server:  # type: ignore[attr-defined]
            yield Client(server, database.refused, "%s")


def ours(lines: Iterable[str]) -> list[str]:
    """The lines of an inventory about the tables above, without what is added to them."""
    table = re.compile(r"(?:\w+ (?:unique )?)?(keiro_\w+)[( .]")
    found = []
    for line in lines:
        named = table.match(line)
        assert named is not None, line
        if (named.group(1) in ROWS or line.split()[0] in ROWS) and line.split()[0] not in ADDED:
            found.append(line.replace(" text C", " text"))
    return sorted(found)


def triggers(database: Database) -> set[str]:
    """The triggers of the tables above."""
    if database.dialect == "sqlite":
        sql = "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'"
    else:
        sql = (
            "SELECT tgname::text, relname::text FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid"
            " WHERE relnamespace = 'keiro'::regnamespace AND NOT tgisinternal"
        )
    return {name for name, table in database.rows(sql) if table in ROWS}


def test_tables_are_those_listed_and_what_is_added(database: Database) -> None:
    """R1."""
    found = Inventory(database)
    columns = [line.rpartition(",")[0] for line in COLUMNS]

    assert ours(found.columns) == sorted(columns if database.dialect == "postgresql" else map(on_sqlite, columns))
    assert ours(found.keys) == sorted(KEYS)
    assert ours(found.indexes) == sorted(INDEXES)
    assert triggers(database) - ADDED.keys() == TRIGGERS.keys()


def test_what_is_added_is_there(database: Database) -> None:
    found = Inventory(database)
    names = {line.split()[0] for line in (*found.columns, *found.indexes, *found.triggers)}

    of_the_other = ("_no_truncate",) if database.dialect == "sqlite" else ("_no_replace", "_forget_plans")
    assert {name for name in ADDED if not name.endswith(of_the_other)} <= names


@pytest.mark.parametrize("table", ROWS)
def test_values_are_checked_as_listed(client: Client, database: Database, table: str) -> None:
    """R11."""
    # What is inserted meets no row that is there, and refers to one that is.
    other = {"flow_name": "other", "scope": "other", "child_id": "other", "run_id": "wf:order-2"}
    row = {name: other.get(name, value) for name, value in ROWS[table].items()}
    if table == "keiro_plan_merge_completions":
        row["stopped_node_id"] = "free"

    def takes(values: dict[str, Any]) -> bool:
        into = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        return client.takes(into, values=values.values())

    assert takes(row)
    for line in COLUMNS:
        check = line.rpartition(", ")[2]
        of, _, column = line.split()[0].partition(".")
        if of == table:
            taken, refused = CHECKS[check]
            if database.dialect == "sqlite" and check in ("time", "positive", "version"):
                refused = refused + _UNWHOLE
            assert [value for value in taken if not takes(row | {column: value})] == [], line
            assert [value for value in refused if takes(row | {column: value})] == [], line


def test_each_trigger_refuses_what_nothing_else_refuses(client: Client, database: Database) -> None:
    """R2, R3, R4, R5."""
    for name, statements in TRIGGERS.items():
        table = next(table for table in ROWS if name.startswith(f"{table}_"))
        drop = f"DROP TRIGGER {name}" + ("" if database.dialect == "sqlite" else f" ON {table}")
        for sql in statements:
            assert not client.takes(sql), sql
            assert client.takes(drop, sql), sql

    assert client.takes(f"{_GENERATION} + 1")


def count(table: str, where: str) -> str:
    return f"SELECT count(*) FROM {table} WHERE {where}"


@pytest.mark.parametrize("table", [*plans.OF_RUNS, "keiro_deferred_completions", "keiro_clock_deadlines"])
def test_rows_of_a_run_go_with_it(client: Client, table: str) -> None:
    """R2."""
    column = "run_id" if "plan" in table else "execution_id"
    its = count(table, f"{column} = 'wf:order-1'")
    assert client.gives(its) != [(0,)]

    assert client.gives("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'", its) == [(0,)]


def test_a_completion_goes_with_its_intent(client: Client, database: Database) -> None:
    """R5: where nothing guards them."""
    tables = ("keiro_plan_merge_intents", "keiro_plan_merge_completions")
    on = {table: "" if database.dialect == "sqlite" else f" ON {table}" for table in tables}
    unguarded = [f"DROP TRIGGER {table}_no_delete{on[table]}" for table in tables]

    left = client.gives(
        *unguarded, "DELETE FROM keiro_plan_merge_intents", count("keiro_plan_merge_completions", "1 = 1")
    )

    assert left == [(0,)]
