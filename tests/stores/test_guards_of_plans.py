"""Inputs and merges of plans, and suspected edges: what their tables refuse, and what goes with a deleted run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.stores.conftest import RUN, Database, PostgresDatabase, SQLiteDatabase

DIGEST = "0123456789abcdef" * 4
EDGE: dict[str, Any] = {
    "scope": "src/**",
    "affects": "build",
    "confidence": 0.5,
    "valid_from_ms": 7,
    "evidence_json": '["seen"]',
}
LEGACY: dict[str, Any] = {"run_id": "wf:order-1"}
HEAD: dict[str, Any] = {
    "run_id": "wf:order-1",
    "plan_id": "plan",
    "base_digest": "base",
    "generation": 0,
    "environment_digest": "environment",
    "merge_state_version": 1,
}
GENERATION: dict[str, Any] = {
    "run_id": "wf:order-1",
    "plan_id": "plan",
    "generation": 0,
    "snapshot_json": "{}",
    "checksum": DIGEST,
}
INTENT: dict[str, Any] = {
    "run_id": "wf:order-1",
    "stopped_node_id": "compile",
    "intent_json": "{}",
    "checksum": DIGEST,
}
COMPLETION: dict[str, Any] = {
    "run_id": "wf:order-1",
    "stopped_node_id": "compile",
    "generation": 1,
    "merge_node_id": "compile+merge",
    "completion_json": "{}",
    "checksum": DIGEST,
}
OF_RUNS = {
    "keiro_plan_input_legacy_runs": LEGACY,
    "keiro_plan_input_heads": HEAD,
    "keiro_plan_input_generations": GENERATION,
    "keiro_plan_merge_intents": INTENT,
    "keiro_plan_merge_completions": COMPLETION,
}
"""A row for each table whose rows are of a run; the last one needs the one before."""
TABLES = {"keiro_selection_suspected_edges": EDGE, **OF_RUNS}

COLUMNS = [(table, column) for table, row in TABLES.items() for column in row]
NAMES = [
    (table, column)
    for table, column in COLUMNS
    if column in {"scope", "affects", "plan_id", "base_digest", "environment_digest"} or column.endswith("_node_id")
]
INTEGERS = [(table, column) for table, column in COLUMNS if column in {"generation", "valid_from_ms"}]
JSON = [(table, column) for table, column in COLUMNS if column.endswith("_json")]
CHECKSUMS = [(table, column) for table, column in COLUMNS if column == "checksum"]


def run(key: str) -> dict[str, Any]:
    """A row of keiro_runs."""
    return RUN | {"run_id": f"wf:order-{key}", "key": key, "lineage_id": f"wf:order-{key}"}


@pytest.fixture
def held(database: Database) -> Database:
    """A database with two runs; of the first one an action has been stopped."""
    for key in ("1", "2"):
        database.insert("keiro_runs", run(key))
    return database


@pytest.fixture
def planned(held: Database) -> Database:
    """A database with two runs that have a row in each table, and a suspected edge."""
    held.insert("keiro_selection_suspected_edges", EDGE)
    for table, row in OF_RUNS.items():
        for key in ("1", "2"):
            held.insert(table, row | {"run_id": f"wf:order-{key}"})
    return held


def texts(table: str, columns: list[str]) -> str:
    """A query for the rows of a table, as six columns of text."""
    cast = [f"CAST({column} AS TEXT)" for column in columns]
    return f"SELECT '{table}', {', '.join([*cast, *['NULL'] * (6 - len(cast))])} FROM {table}"


ROWS = " UNION ALL ".join(texts(table, [*row]) for table, row in (TABLES | {"keiro_runs": {"run_id": None}}).items())


def everything(database: Database) -> list[tuple[Any, ...]]:
    """All rows of these tables, and all runs."""
    return sorted(database.rows(ROWS), key=str)


def insert(database: Database, table: str, row: dict[str, Any]) -> None:
    """Insert a row; of a completion the intent too, if that is missing."""
    if table == "keiro_plan_merge_completions":
        _intend(database, row["run_id"])
    database.insert(table, row)


def _intend(database: Database, run_id: str) -> None:
    if not database.rows("SELECT 1 FROM keiro_plan_merge_intents WHERE run_id = ?", run_id):
        database.insert("keiro_plan_merge_intents", INTENT | {"run_id": run_id})


def refuses(database: Database, table: str, row: dict[str, Any]) -> None:
    """A row is refused, and for what is in it."""
    if table == "keiro_plan_merge_completions":
        _intend(database, "wf:order-1")
    before = everything(database)
    with pytest.raises(database.refused):
        database.insert(table, row)
    assert everything(database) == before


def withstands(database: Database, sql: str, *values: Any) -> None:
    """A statement is refused and has changed nothing."""
    before = everything(database)
    with pytest.raises(database.guarded):
        database.rows(sql, *values)
    assert everything(database) == before


# Values


@pytest.mark.parametrize(("table", "row"), TABLES.items())
def test_a_table_takes_its_row_once(held: Database, table: str, row: dict[str, Any]) -> None:
    insert(held, table, row)

    refuses(held, table, row)


def test_what_is_required_cannot_be_null(held: Database) -> None:
    """R4: the environment of a head is required."""
    for table, column in COLUMNS:
        if column != "merge_state_version":
            refuses(held, table, TABLES[table] | {column: None})


def test_names_are_not_empty(held: Database) -> None:
    for table, column in NAMES:
        refuses(held, table, TABLES[table] | {column: ""})


@pytest.mark.parametrize(("table", "column"), INTEGERS)
def test_integers_lie_between_their_first_and_2_to_the_53(held: Database, table: str, column: str) -> None:
    """R11."""
    first = 1 if table == "keiro_plan_merge_completions" else 0
    bad: list[Any] = [first - 1, -1, 2**53, "soon", b"1", math.inf]
    if held.dialect == "sqlite":
        # Postgres rounds the fractions that clients send, before any check.
        bad.append(1.5)
    for value in bad:
        refuses(held, table, TABLES[table] | {column: value})

    for key, value in enumerate((first, 2**53 - 1), 1):
        row = {"scope": f"{key}/**", "run_id": f"wf:order-{key}", column: value}
        insert(held, table, {name: row.get(name, given) for name, given in TABLES[table].items()})
    assert sorted(held.rows(f"SELECT {column} FROM {table}")) == [(first,), (2**53 - 1,)]


def test_json_is_checked_and_kept_as_it_was_given(held: Database) -> None:
    # Checksums are of the very text.
    text = '{"b" : [1.0, null], "a":"\\u00e9", "a": 1e2}'
    for table, column in JSON:
        for bad in ("", "{", "{'a': 1}", "NaN", "[1] 2", b"{"):
            refuses(held, table, TABLES[table] | {column: bad})

        insert(held, table, TABLES[table] | {column: text})
        assert (text,) in held.rows(f"SELECT {column} FROM {table}")


def test_checksums_have_64_digits(held: Database) -> None:
    for table, column in CHECKSUMS:
        for bad in ("", DIGEST[1:], DIGEST + "0"):
            refuses(held, table, TABLES[table] | {column: bad})


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_text_is_never_kept_as_bytes_on_sqlite(held: SQLiteDatabase) -> None:
    for table, column in [*NAMES, *JSON, *CHECKSUMS]:
        refuses(held, table, TABLES[table] | {column: str(TABLES[table][column]).encode()})


def test_confidence_is_a_number_from_0_to_1(held: Database) -> None:
    bad: list[Any] = [-0.001, 1.001, -1, 2, math.nan, math.inf, -math.inf, "high"]
    if held.dialect == "sqlite":
        bad.append(b"0.5")
    for value in bad:
        refuses(held, "keiro_selection_suspected_edges", EDGE | {"confidence": value})

    for value in (0, 0.1, 1):
        held.insert("keiro_selection_suspected_edges", EDGE | {"confidence": value, "scope": str(value)})
    found = held.rows("SELECT confidence FROM keiro_selection_suspected_edges ORDER BY confidence")
    assert found == [(0.0,), (0.1,), (1.0,)]


def test_suspected_edges_are_trained(planned: Database) -> None:
    planned.rows("UPDATE keiro_selection_suspected_edges SET confidence = 0.525, evidence_json = '[1]'")
    for bad in ("confidence = 1.5", "confidence = 'NaN'", "evidence_json = '['", "valid_from_ms = -1", "scope = ''"):
        before = everything(planned)
        with pytest.raises(planned.refused):
            planned.rows(f"UPDATE keiro_selection_suspected_edges SET {bad}")
        assert everything(planned) == before

    planned.rows("DELETE FROM keiro_selection_suspected_edges")
    assert planned.rows("SELECT * FROM keiro_selection_suspected_edges") == []


def test_the_version_of_merges_is_1_or_not_known(held: Database) -> None:
    for bad in (0, 2, -1, 2**53, "soon"):
        refuses(held, "keiro_plan_input_heads", HEAD | {"merge_state_version": bad})
    if held.dialect == "sqlite":
        for bad in (1.5, b"1"):
            refuses(held, "keiro_plan_input_heads", HEAD | {"merge_state_version": bad})

    held.insert("keiro_plan_input_heads", HEAD | {"merge_state_version": None})


# Which rows there can be


@pytest.mark.parametrize(("table", "row"), OF_RUNS.items())
def test_rows_are_of_a_run_that_exists(held: Database, table: str, row: dict[str, Any]) -> None:
    held.insert("keiro_plan_merge_intents", INTENT)
    refuses(held, table, row | {"run_id": "wf:order-none"})


def test_a_run_has_one_plan(held: Database) -> None:
    held.insert("keiro_plan_input_heads", HEAD)

    refuses(held, "keiro_plan_input_heads", HEAD | {"plan_id": "another"})
    held.insert("keiro_plan_input_heads", HEAD | {"run_id": "wf:order-2"})


def test_a_completion_has_an_intent(held: Database) -> None:
    """R5."""
    held.insert("keiro_plan_merge_intents", INTENT)
    refuses(held, "keiro_plan_merge_completions", COMPLETION | {"stopped_node_id": "test"})
    refuses(held, "keiro_plan_merge_completions", COMPLETION | {"run_id": "wf:order-2"})

    held.insert("keiro_plan_merge_completions", COMPLETION)


def test_a_generation_and_a_node_come_of_one_merge(held: Database) -> None:
    """R5."""
    for node in ("compile", "test"):
        held.insert("keiro_plan_merge_intents", INTENT | {"stopped_node_id": node})
    held.insert("keiro_plan_merge_completions", COMPLETION)
    other = COMPLETION | {"stopped_node_id": "test", "generation": 2, "merge_node_id": "test+merge"}

    refuses(held, "keiro_plan_merge_completions", other | {"generation": 1})
    refuses(held, "keiro_plan_merge_completions", other | {"merge_node_id": "compile+merge"})

    held.insert("keiro_plan_merge_completions", other)


# What never changes

FIXED = [(table, column) for table, row in OF_RUNS.items() for column in row if table != "keiro_plan_input_heads"]
OTHER = {"run_id": "wf:order-3", "generation": 9, "checksum": DIGEST[::-1]}


def test_what_was_observed_and_decided_never_changes(planned: Database) -> None:
    """R2, R3, R5."""
    planned.insert("keiro_runs", run("3"))
    for table, column in FIXED:
        value = OTHER.get(column, "[]")

        withstands(planned, f"UPDATE {table} SET {column} = ? WHERE run_id = 'wf:order-1'", value)
        withstands(planned, f"UPDATE {table} SET {column} = {column}")


def test_a_head_goes_forward_by_one_generation(planned: Database) -> None:
    """R3."""
    planned.rows("UPDATE keiro_plan_input_heads SET generation = generation + 1")
    assert planned.rows("SELECT generation FROM keiro_plan_input_heads") == [(1,), (1,)]

    for generation in ("generation", "generation - 1", "generation + 2", "0", "9", "NULL"):
        withstands(planned, f"UPDATE keiro_plan_input_heads SET generation = {generation}")


def test_a_head_changes_in_nothing_but_its_generation(planned: Database) -> None:
    """R3, R4."""
    planned.insert("keiro_runs", run("3"))
    for change in (
        "run_id = 'wf:order-3'",
        "plan_id = 'another'",
        "base_digest = 'another'",
        "environment_digest = 'another'",
        "environment_digest = NULL",
        "merge_state_version = NULL",
    ):
        for also in ("", ", generation = generation + 1"):
            withstands(planned, f"UPDATE keiro_plan_input_heads SET {change}{also} WHERE run_id = 'wf:order-1'")


@contextmanager
def without(database: Database, table: str, trigger: str) -> Iterator[None]:
    """For this block a trigger does not fire."""
    if database.dialect == "postgresql":
        database.rows(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}")
        yield
        database.rows(f"ALTER TABLE {table} ENABLE TRIGGER {trigger}")
    else:
        ((sql,),) = database.rows("SELECT sql FROM sqlite_master WHERE name = ?", trigger)
        database.rows(f"DROP TRIGGER {trigger}")
        yield
        database.rows(sql)


def test_a_head_of_which_the_environment_is_not_known_stays_so(held: Database) -> None:
    """R4."""
    with without(held, "keiro_plan_input_heads", "keiro_plan_input_heads_environment_required"):
        held.insert("keiro_plan_input_heads", HEAD | {"environment_digest": None, "merge_state_version": None})

    held.rows("UPDATE keiro_plan_input_heads SET generation = 1")

    for column, value in (("environment_digest", "'found'"), ("merge_state_version", "1")):
        withstands(held, f"UPDATE keiro_plan_input_heads SET {column} = {value}, generation = 2")
    assert held.rows("SELECT generation, environment_digest, merge_state_version FROM keiro_plan_input_heads") == [
        (1, None, None)
    ]
    refuses(held, "keiro_plan_input_heads", HEAD | {"run_id": "wf:order-2", "environment_digest": None})


# What goes when


def test_nothing_is_deleted_while_its_run_is_there(planned: Database) -> None:
    """R2, R3, R5."""
    # An intent without a completion, which would keep it too.
    planned.insert("keiro_plan_merge_intents", INTENT | {"stopped_node_id": "test"})
    withstands(planned, "DELETE FROM keiro_plan_merge_intents WHERE stopped_node_id = 'test'")

    for table in OF_RUNS:
        withstands(planned, f"DELETE FROM {table}")
        withstands(planned, f"DELETE FROM {table} WHERE run_id = 'wf:order-2'")

    planned.rows("UPDATE keiro_runs SET status = 'completed', finished_at_ms = 9")

    for table in OF_RUNS:
        withstands(planned, f"DELETE FROM {table}")


def runs_of(database: Database) -> dict[str, list[str]]:
    """The runs that each table has rows of."""
    return {
        table: [run_id for (run_id,) in database.rows(f"SELECT run_id FROM {table} ORDER BY 1")] for table in OF_RUNS
    }


def test_all_of_a_run_goes_with_it_and_nothing_else(planned: Database) -> None:
    """R2."""
    planned.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'")

    assert runs_of(planned) == {table: ["wf:order-2"] for table in OF_RUNS}
    assert len(planned.rows("SELECT * FROM keiro_selection_suspected_edges")) == 1

    planned.rows("DELETE FROM keiro_runs")
    assert runs_of(planned) == {table: [] for table in OF_RUNS}
    assert len(planned.rows("SELECT * FROM keiro_selection_suspected_edges")) == 1


def test_a_run_that_is_not_deleted_after_all_keeps_its_plan(planned: Database) -> None:
    planned.insert("keiro_runs", run("3") | {"parent_run_id": "wf:order-1"})

    withstands(planned, "DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'")


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_plan_goes_with_its_run_from_a_client_without_foreign_keys(planned: SQLiteDatabase, recursive: str) -> None:
    """R2: as the shell of SQLite comes. Else the next run of the key would find it."""
    planned.pragmas = ["foreign_keys = OFF", f"recursive_triggers = {recursive}"]

    planned.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'")

    assert runs_of(planned) == {table: ["wf:order-2"] for table in OF_RUNS}


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_plan_does_not_outlive_a_run_that_is_replaced_on_keiros_connections(planned: SQLiteDatabase) -> None:
    planned.pragmas.append("recursive_triggers = ON")

    columns = ", ".join(RUN)
    planned.rows(f"INSERT OR REPLACE INTO keiro_runs ({columns}) SELECT {columns} FROM keiro_runs WHERE key = '1'")

    assert runs_of(planned) == {table: ["wf:order-2"] for table in OF_RUNS}


# Ways round

SAME = {table: ", ".join(row) for table, row in OF_RUNS.items()}


def test_no_upsert_changes_a_row(planned: Database) -> None:
    keys = {
        "keiro_plan_input_generations": "run_id, plan_id, generation",
        "keiro_plan_merge_intents": "run_id, stopped_node_id",
        "keiro_plan_merge_completions": "run_id, stopped_node_id",
    }
    for table, columns in SAME.items():
        same = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table} WHERE run_id = 'wf:order-1'"

        withstands(planned, same)
        withstands(planned, f"{same} ON CONFLICT ({keys.get(table, 'run_id')}) DO UPDATE SET run_id = 'wf:order-1'")


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
@pytest.mark.parametrize("keys", ["ON", "OFF"])
@pytest.mark.parametrize("table", OF_RUNS)
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_no_statement_replaces_a_row_on_sqlite(planned: SQLiteDatabase, table: str, keys: str, recursive: str) -> None:
    planned.insert("keiro_runs", run("3"))
    planned.insert("keiro_plan_merge_intents", INTENT | {"run_id": "wf:order-3"})
    planned.pragmas = [f"foreign_keys = {keys}", f"recursive_triggers = {recursive}"]
    columns = SAME[table]
    third = f"SELECT 1, 'wf:order-3'{columns.removeprefix('run_id')} FROM {table} WHERE run_id = 'wf:order-2'"

    withstands(planned, f"REPLACE INTO {table} ({columns}) SELECT {columns} FROM {table}")
    withstands(planned, f"REPLACE INTO {table} (rowid, {columns}) {third}")
    withstands(planned, f"UPDATE OR REPLACE {table} SET run_id = 'wf:order-1' WHERE run_id = 'wf:order-2'")
    withstands(planned, f"UPDATE OR REPLACE {table} SET rowid = 1 WHERE rowid = 2")
    withstands(planned, f"UPDATE OR IGNORE {table} SET rowid = 9")


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_head_that_goes_forward_stays_in_its_place(planned: SQLiteDatabase, recursive: str) -> None:
    planned.pragmas.append(f"recursive_triggers = {recursive}")

    withstands(
        planned, "UPDATE OR REPLACE keiro_plan_input_heads SET rowid = 1, generation = generation + 1 WHERE rowid = 2"
    )


@pytest.mark.parametrize("column", ["generation", "merge_node_id"])
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_merge_that_takes_the_place_of_another_is_refused_on_sqlite(planned: SQLiteDatabase, column: str) -> None:
    planned.insert("keiro_plan_merge_intents", INTENT | {"stopped_node_id": "test"})
    other = COMPLETION | {"stopped_node_id": "test", "generation": 2, "merge_node_id": "test+merge"}
    row = other | {column: COMPLETION[column]}

    marks = ", ".join("?" * len(row))
    withstands(planned, f"REPLACE INTO keiro_plan_merge_completions ({', '.join(row)}) VALUES ({marks})", *row.values())


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_no_statement_goes_past_the_triggers_on_postgres(planned: PostgresDatabase) -> None:
    withstands(planned, "TRUNCATE keiro_runs CASCADE")
    for table in OF_RUNS:
        merge = f"MERGE INTO {table} t USING (SELECT 'wf:order-1' AS run_id) s ON t.run_id = s.run_id WHEN MATCHED THEN"

        withstands(planned, f"TRUNCATE {table} CASCADE")
        withstands(planned, f"{merge} DELETE")
        withstands(planned, f"{merge} UPDATE SET run_id = 'wf:order-1'")
