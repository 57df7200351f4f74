"""What the tables refuse from any client: values out of range, and every way to change what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stores.conftest import EVENT, RUN, Database, PostgresDatabase, SQLiteDatabase

TABLES: dict[str, dict[str, Any]] = {
    "keiro_runs": RUN,
    "keiro_run_heads": {"run_key": 1, "version": 1, "owner": 1, "epoch": 0},
    "keiro_journal": EVENT,
    "keiro_workers": {
        "worker_id": "w",
        "host": "h",
        "pid": 1,
        "process_started": "0",
        "address": None,
        "started_at_ms": 1,
        "lease_expires_at_ms": 1,
    },
    "keiro_projection_tracking": {"name": "steps", "position": 0},
    "keiro_snapshots": {"originator_id": "wf:order-1", "originator_version": 1, "topic": "t", "state": "{}"},
}
"""A row that each table takes."""

FINISHED = RUN | {"status": "completed"}
WAITING = RUN | {"status": "suspended", "waiting_reason": "sleep"}

INTEGERS = [
    ("keiro_runs", "created_at_ms", RUN),
    ("keiro_runs", "started_at_ms", RUN),
    ("keiro_runs", "finished_at_ms", FINISHED),
    ("keiro_runs", "next_attempt_at_ms", RUN),
    ("keiro_runs", "wake_at_ms", WAITING),
    ("keiro_runs", "deadline_at_ms", RUN),
    ("keiro_runs", "cancel_requested_at_ms", RUN),
    ("keiro_runs", "cleanup_ms", RUN),
    ("keiro_run_heads", "epoch", TABLES["keiro_run_heads"]),
    ("keiro_journal", "recorded_at_ms", EVENT),
    ("keiro_workers", "pid", TABLES["keiro_workers"]),
    ("keiro_workers", "started_at_ms", TABLES["keiro_workers"]),
    ("keiro_workers", "lease_expires_at_ms", TABLES["keiro_workers"]),
    ("keiro_projection_tracking", "position", TABLES["keiro_projection_tracking"]),
]
COUNTS = [
    ("keiro_runs", "round_ordinal", RUN),
    ("keiro_runs", "attempts", RUN),
    ("keiro_run_heads", "version", TABLES["keiro_run_heads"]),
    ("keiro_snapshots", "originator_version", TABLES["keiro_snapshots"]),
]
KEYS = [("keiro_journal", "run_key", EVENT), ("keiro_run_heads", "owner", TABLES["keiro_run_heads"])]
JSON = [
    ("keiro_runs", "attributes_json", RUN),
    ("keiro_runs", "input_json", RUN),
    ("keiro_runs", "result_json", RUN),
    ("keiro_runs", "failure_json", RUN),
    ("keiro_snapshots", "state", TABLES["keiro_snapshots"]),
]


def count(database: Database, table: str) -> int:
    return int(database.rows(f"SELECT count(*) FROM {table}")[0][0])


def refuses(database: Database, table: str, row: dict[str, Any]) -> None:
    before = count(database, table)
    with pytest.raises(database.refused):
        database.insert(table, row)
    assert count(database, table) == before


def test_ch_06_a_child_has_no_other_status_than_these(database: Database) -> None:
    row = {"child_name": "ship", "parent_id": "1", "parent_name": "order", "await_step": "child:1:result"}
    for status in ("running", "completed", "cancelled", "failed"):
        database.insert("keiro_workflow_children", row | {"child_id": status, "status": status})
    for bad in ("suspended", "RUNNING", "", None):
        refuses(database, "keiro_workflow_children", row | {"child_id": "odd", "status": bad})


@pytest.mark.parametrize("table", TABLES)
def test_a_table_takes_its_row(database: Database, table: str) -> None:
    database.insert(table, TABLES[table])

    assert count(database, table) == 1


@pytest.mark.parametrize(("table", "column", "row"), INTEGERS)
def test_integers_lie_between_0_and_2_to_the_53(
    database: Database, table: str, column: str, row: dict[str, Any]
) -> None:
    """R11."""
    for bad in (-1, 2**53):
        refuses(database, table, row | {column: bad})

    database.insert(table, row | {column: 2**53 - 1})
    assert database.rows(f"SELECT {column} FROM {table}") == [(2**53 - 1,)]


@pytest.mark.parametrize(("table", "column", "row"), [*COUNTS, ("keiro_journal", "version", EVENT)])
def test_counts_are_32_bit_and_not_negative(database: Database, table: str, column: str, row: dict[str, Any]) -> None:
    for bad in (-1, 2**31):
        refuses(database, table, row | {column: bad})

    database.insert(table, row | {column: 2**31 - 1})


@pytest.mark.parametrize(("table", "column", "row"), [*KEYS, ("keiro_journal", "version", EVENT)])
def test_keys_and_versions_begin_at_1(database: Database, table: str, column: str, row: dict[str, Any]) -> None:
    refuses(database, table, row | {column: 0})


@pytest.mark.parametrize(("table", "column", "row"), [*INTEGERS, *COUNTS, *KEYS])
def test_sqlite_takes_nothing_but_integers_for_integers(
    tmp_path: Path, table: str, column: str, row: dict[str, Any]
) -> None:
    database = SQLiteDatabase(tmp_path / "runs.db")
    database.ensure()

    for bad in (1.5, "soon", b"1"):
        refuses(database, table, row | {column: bad})


@pytest.mark.parametrize(("table", "column", "row"), JSON)
def test_json_columns_take_json_only(database: Database, table: str, column: str, row: dict[str, Any]) -> None:
    for bad in ("", "{", "{'a': 1}", "NaN", "[1] 2", b"{"):
        refuses(database, table, row | {column: bad})

    text = '{"b" : [1.0, null], "a":"\\u00e9"}'
    database.insert(table, row | {column: text})
    assert database.rows(f"SELECT {column} FROM {table}") == [(text,)], "the text is kept as it was given"


def test_text_is_never_kept_as_bytes_on_sqlite(tmp_path: Path) -> None:
    database = SQLiteDatabase(tmp_path / "runs.db")
    database.ensure()

    refuses(database, "keiro_journal", EVENT | {"payload": b"{}"})
    refuses(database, "keiro_runs", RUN | {"input_json": b"[]"})


@pytest.mark.parametrize(
    "row",
    [
        RUN | {"status": "paused"},
        RUN | {"status": "PENDING"},
        RUN | {"status": "completed"},
        RUN | {"status": "failed"},
        RUN | {"status": "cancelled"},
        RUN | {"status": "pending", "finished_at_ms": 9},
        RUN | {"status": "running", "finished_at_ms": 9},
        RUN | {"status": "suspended", "finished_at_ms": 9},
        RUN | {"status": "suspended", "wake_at_ms": 9},
        RUN | {"status": "suspended", "waiting_token": "approved"},
        RUN | {"on_cancel": "ignore"},
        RUN | {"parent_run_id": "wf:order-none"},
    ],
)
def test_a_run_must_be_consistent(database: Database, row: dict[str, Any]) -> None:
    refuses(database, "keiro_runs", row)


@pytest.mark.parametrize(
    "row",
    [
        FINISHED | {"finished_at_ms": 9},
        RUN | {"status": "failed", "finished_at_ms": 9, "failure_json": "{}"},
        RUN | {"status": "cancelled", "finished_at_ms": 9},
        RUN | {"status": "running", "started_at_ms": 9},
        WAITING | {"wake_at_ms": 9, "waiting_token": "approved"},
        RUN | {"on_cancel": "cancel"},
        RUN | {"on_cancel": "detach", "parent_run_id": "wf:order-1"},
    ],
)
def test_a_consistent_run_is_taken(database: Database, row: dict[str, Any]) -> None:
    database.insert("keiro_runs", row)


@pytest.mark.parametrize(("table", "row"), TABLES.items())
def test_what_is_required_cannot_be_null(database: Database, table: str, row: dict[str, Any]) -> None:
    optional = {"owner", "address"}
    for column in row.keys() - optional:
        if (database.dialect, table, column) == ("sqlite", "keiro_run_heads", "run_key"):
            continue  # SQLite gives a number to an integer primary key that is NULL
        refuses(database, table, row | {column: None})


def test_event_ids_are_16_bytes(database: Database) -> None:
    for bad in (b"0123456789abcde", b"0123456789abcdef0", b""):
        refuses(database, "keiro_journal", EVENT | {"event_id": bad})


def test_run_ids_and_worker_ids_are_unique(database: Database) -> None:
    for table in ("keiro_runs", "keiro_workers"):
        database.insert(table, TABLES[table])

        refuses(database, table, TABLES[table])


def test_a_round_after_the_first_is_unique_in_its_lineage(database: Database) -> None:
    database.insert("keiro_runs", RUN)
    database.insert("keiro_runs", RUN | {"run_id": "wf:order-1#1", "round_ordinal": 1})

    refuses(database, "keiro_runs", RUN | {"run_id": "wf:order-other#1", "round_ordinal": 1})


def test_versions_and_event_ids_are_unique_in_a_run(database: Database) -> None:
    database.insert("keiro_journal", EVENT)

    refuses(database, "keiro_journal", EVENT | {"event_id": b"another event id"})
    refuses(database, "keiro_journal", EVENT | {"version": 2})
    database.insert("keiro_journal", EVENT | {"run_key": 2})


# Append-only


@pytest.fixture
def recorded(database: Database) -> Database:
    """Two runs of two events each, with head and snapshot."""
    for key in (1, 2):
        run_id = f"wf:order-{key}"
        database.insert("keiro_runs", RUN | {"run_id": run_id, "key": str(key), "lineage_id": run_id})
        database.insert("keiro_run_heads", {"run_key": key, "version": 2})
        for version in (1, 2):
            event_id = bytes([key, version]) * 8
            database.insert("keiro_journal", EVENT | {"run_key": key, "version": version, "event_id": event_id})
        database.insert("keiro_snapshots", TABLES["keiro_snapshots"] | {"originator_id": run_id})
    return database


def journal(database: Database) -> list[tuple[Any, ...]]:
    return database.rows("SELECT * FROM keiro_journal ORDER BY position")


_INTO = "INTO keiro_journal (run_key, version, event_id, topic, payload, recorded_at_ms)"
_SAME_VERSION = "(1, 1, {fresh}, 'T', '[]', 7)"
_SAME_EVENT = "(1, 3, (SELECT event_id FROM keiro_journal WHERE run_key = 1 AND version = 2), 'T', '[]', 7)"

EVERYWHERE = [
    "UPDATE keiro_journal SET payload = '[]'",
    "UPDATE keiro_journal SET recorded_at_ms = recorded_at_ms WHERE run_key = 1 AND version = 1",
    "DELETE FROM keiro_journal",
    "DELETE FROM keiro_journal WHERE run_key = 1 AND version = 2",
    f"INSERT {_INTO} VALUES {_SAME_VERSION}",
    f"INSERT {_INTO} VALUES {_SAME_EVENT}",
    f"INSERT {_INTO} VALUES {_SAME_VERSION} ON CONFLICT (run_key, version) DO UPDATE SET payload = '[]'",
    f"INSERT {_INTO} VALUES {_SAME_EVENT} ON CONFLICT (run_key, event_id) DO UPDATE SET payload = '[]'",
]
SQLITE_ONLY = [
    "UPDATE OR IGNORE keiro_journal SET payload = '[]'",
    "UPDATE OR REPLACE keiro_journal SET version = 2 WHERE run_key = 1",
    "UPDATE keiro_journal SET rowid = rowid + 10",
    f"INSERT OR REPLACE {_INTO} VALUES {_SAME_VERSION}",
    f"INSERT OR REPLACE {_INTO} VALUES {_SAME_EVENT}",
    f"REPLACE {_INTO} VALUES {_SAME_VERSION}",
    "INSERT OR REPLACE INTO keiro_journal VALUES (1, 1, 9, {fresh}, 'T', '[]', 7)",
    "INSERT OR REPLACE INTO keiro_journal VALUES ('1', 1, 9, {fresh}, 'T', '[]', 7)",
    "INSERT INTO keiro_journal VALUES (900, 1, 9, {fresh}, 'T', '[]', 7)",
    "INSERT INTO keiro_journal VALUES (-1, 1, 9, {fresh}, 'T', '[]', 7)",
]
_MERGE = "MERGE INTO keiro_journal j USING (SELECT 1 AS run_key) s ON j.run_key = s.run_key WHEN MATCHED THEN"
POSTGRES_ONLY = [
    "TRUNCATE keiro_journal",
    "TRUNCATE keiro_runs CASCADE",
    f"{_MERGE} UPDATE SET payload = '[]'",
    f"{_MERGE} DELETE",
    "INSERT INTO keiro_journal VALUES (900, 1, 9, {fresh}, 'T', '[]', 7)",
    "INSERT INTO keiro_journal OVERRIDING SYSTEM VALUE VALUES (-1, 1, 9, {fresh}, 'T', '[]', 7)",
]


def attack(database: Database, sql: str, fresh: str) -> None:
    before = journal(database)
    assert len(before) == 4
    with pytest.raises(database.guarded):
        database.rows(sql.replace("{fresh}", fresh))
    assert journal(database) == before


@pytest.mark.parametrize("recursive", ["ON", "OFF"])
@pytest.mark.parametrize("sql", [*EVERYWHERE, *SQLITE_ONLY])
@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_no_statement_changes_the_journal_on_sqlite(recorded: SQLiteDatabase, sql: str, recursive: str) -> None:
    recorded.pragmas.append(f"recursive_triggers = {recursive}")

    attack(recorded, sql, "x'30313233343536373839616263646566'")


@pytest.mark.parametrize("sql", [*EVERYWHERE, *POSTGRES_ONLY])
@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_no_statement_changes_the_journal_on_postgres(recorded: PostgresDatabase, sql: str) -> None:
    attack(recorded, sql, "gen_random_uuid()")


def test_what_a_run_is_never_changes(recorded: Database) -> None:
    """R2."""
    before = recorded.rows("SELECT * FROM keiro_runs ORDER BY run_key")

    for column, value in (("run_id", "wf:order-9"), ("created_at_ms", 6), ("run_key", 9)):
        with pytest.raises(recorded.guarded):
            recorded.rows(f"UPDATE keiro_runs SET {column} = ? WHERE run_key = 1", value)

    assert recorded.rows("SELECT * FROM keiro_runs ORDER BY run_key") == before


def test_how_a_run_stands_may_change(recorded: Database) -> None:
    recorded.rows("UPDATE keiro_runs SET status = 'failed', finished_at_ms = 9, created_at_ms = 5 WHERE key = '1'")

    assert recorded.rows("SELECT status FROM keiro_runs ORDER BY run_key") == [("failed",), ("pending",)]


def test_deleting_a_run_deletes_all_that_is_its_own_and_nothing_else(recorded: Database) -> None:
    """R2."""
    recorded.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'")

    assert recorded.rows("SELECT run_key FROM keiro_runs") == [(2,)]
    assert recorded.rows("SELECT run_key FROM keiro_run_heads") == [(2,)]
    assert recorded.rows("SELECT run_key, version FROM keiro_journal ORDER BY version") == [(2, 1), (2, 2)]
    assert recorded.rows("SELECT originator_id FROM keiro_snapshots") == [("wf:order-2",)]


def test_a_run_with_children_is_not_deleted_before_them(recorded: Database) -> None:
    recorded.rows("UPDATE keiro_runs SET parent_run_id = 'wf:order-1' WHERE run_id = 'wf:order-2'")

    with pytest.raises(recorded.guarded):
        recorded.rows("DELETE FROM keiro_runs WHERE run_id = 'wf:order-1'")
    assert len(journal(recorded)) == 4

    recorded.rows("DELETE FROM keiro_runs")
    assert journal(recorded) == []


def test_keys_and_positions_are_never_given_twice(recorded: Database) -> None:
    last = journal(recorded)[-1][0]
    recorded.rows("DELETE FROM keiro_runs")

    recorded.insert("keiro_runs", RUN)
    recorded.insert("keiro_journal", EVENT)

    assert recorded.rows("SELECT run_key FROM keiro_runs")[0][0] > 2
    assert journal(recorded)[0][0] > last


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_run_that_is_replaced_takes_its_journal_along_on_keiros_connections(
    recorded: SQLiteDatabase,
) -> None:
    recorded.pragmas.append("recursive_triggers = ON")

    columns = ", ".join(RUN)
    recorded.rows(f"INSERT OR REPLACE INTO keiro_runs ({columns}) SELECT {columns} FROM keiro_runs WHERE key = '1'")

    assert recorded.rows("SELECT DISTINCT run_key FROM keiro_journal") == [(2,)]
