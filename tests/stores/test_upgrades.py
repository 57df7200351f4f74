"""From every earlier revision to the newest one, with data: nothing is lost, what has to be made up for is, many may do
it at once, and what fails or dies half-way leaves the database as it was."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from keiro.errors import MigrationRequired, StoreError
from keiro.stores import migrate
from tests.stores import test_guards_of_plans as plans
from tests.stores import test_guards_of_waits as waits
from tests.stores.conftest import EVENT, Database
from tests.stores.test_migrations import (
    COLUMNS,
    INDEXES,
    KEYS,
    OLDER_TABLES,
    TRIGGERS,
    Inventory,
    call_of,
    environment,
    on_sqlite,
)

SINCE: dict[str, dict[str, dict[str, Any]]] = {
    "0001": OLDER_TABLES,
    "0002": {
        "keiro_queue_starts": {"queue": "q", "at_ms": 5, "started": 2},
        **waits.TABLES,
        "keiro_step_maps": {"run_key": 1, "until_version": 1, "state": "[]"},
    },
    "0003": {"keiro_run_parents": {"child_id": "wf:order-a", "parent_id": "wf:order-b", "seq": 1}},
    "0005": {
        "keiro_selection_suspected_edges": plans.EDGE,
        **{table: row for table, row in plans.OF_RUNS.items() if table != "keiro_plan_input_legacy_runs"},
    },
}
"""A row for each table that a revision has made."""

# The start of a run is its first event; what follows is what the case is about.
CASES: dict[str, tuple[dict[str, Any], list[str], bool]] = {
    "a step": ({}, ["StepRecorded"], True),
    "a step in a run that has ended": ({"status": "completed", "finished_at_ms": 9}, ["StepRecorded"], True),
    "a step in a run that is parked": ({"status": "suspended"}, ["StepRecorded", "StateChanged"], True),
    "an attempt that began": ({}, ["AttemptStarted"], True),
    "an attempt that failed": ({}, ["AttemptFailed"], True),
    "a step much later": ({}, [*["StateChanged"] * 40, "StepRecorded"], True),
    "a step under way": ({"status": "running", "started_at_ms": 6}, [], True),
    "a worker that went away": ({"status": "pending", "started_at_ms": 6}, [], True),
    "never begun": ({}, [], False),
    "parked before any step": ({"status": "suspended", "started_at_ms": 6}, ["StateChanged"], False),
    "ended without a step": (
        {"status": "cancelled", "started_at_ms": 6, "finished_at_ms": 9},
        ["WorkflowCancelled"],
        False,
    ),
    "a command of its own": ({}, ["order:StepRecorded"], False),
}
"""Runs as an earlier version left them, their events, and whether steps of them may have run."""


@pytest.fixture(params=migrate.REVISIONS[:-1])
def older(request: pytest.FixtureRequest, empty: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database at an earlier revision, with a row in every table."""
    at = migrate.REVISIONS.index(request.param) + 1
    with monkeypatch.context() as patched:
        patched.setattr(migrate, "REVISIONS", migrate.REVISIONS[:at])
        patched.setattr(migrate, "HEAD", request.param)
        empty.ensure()
    for table, row in tables_of(empty).items():
        empty.insert(table, row)
    return empty


def revision_of(database: Database) -> str:
    ((revision,),) = database.rows("SELECT version_num FROM keiro_alembic_version")
    return str(revision)


def tables_of(database: Database) -> dict[str, dict[str, Any]]:
    """A row for each table there is, in the order in which they can be inserted."""
    until = revision_of(database)
    return {table: row for since, rows in SINCE.items() if since <= until for table, row in rows.items()}


def held(database: Database, tables: dict[str, dict[str, Any]]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of these tables."""
    return {table: database.rows(f"SELECT {', '.join(row)} FROM {table}") for table, row in tables.items()}


def is_up_to_date(database: Database) -> None:
    """The database is as if it had been made today."""
    found = Inventory(database)
    assert revision_of(database) == migrate.HEAD
    assert found.columns == sorted(COLUMNS if database.dialect == "postgresql" else map(on_sqlite, COLUMNS))
    assert (found.indexes, found.keys) == (INDEXES, KEYS)
    assert found.triggers == TRIGGERS[database.dialect]


def test_every_row_is_brought_along(older: Database) -> None:
    """R1."""
    tables = tables_of(older)
    before = held(older, tables)
    assert all(before.values())
    with pytest.raises(MigrationRequired, match=f"this keiro needs revision {migrate.HEAD}"):
        older.ensure("verify")

    older.ensure()

    assert held(older, tables) == before
    is_up_to_date(older)
    for table, row in tables_of(older).items():
        if table not in tables:
            older.insert(table, row)
    older.rows("DELETE FROM keiro_runs")
    for table in ("keiro_journal", "keiro_clock_deadlines", "keiro_plan_input_heads"):
        assert older.rows(f"SELECT * FROM {table}") == []


@pytest.mark.parametrize("older", [one for one in migrate.REVISIONS if one < "0005"], indirect=True)
def test_runs_whose_steps_ran_before_inputs_were_observed_are_marked(older: Database) -> None:
    """R2."""
    older.rows("DELETE FROM keiro_runs")
    for name, (row, topics, _) in CASES.items():
        parked = {"waiting_reason": "sleep"} if row.get("status") == "suspended" else {}
        older.insert("keiro_runs", plans.run(name) | parked | row)
        ((run_key,),) = older.rows("SELECT run_key FROM keiro_runs WHERE key = ?", name)
        for version, topic in enumerate(["WorkflowStarted", *topics], 1):
            event_id = run_key.to_bytes(8, "big") + version.to_bytes(8, "big")
            event = {"run_key": run_key, "version": version, "topic": topic, "event_id": event_id}
            older.insert("keiro_journal", EVENT | event)

    older.ensure()

    marked = [run_id for (run_id,) in older.rows("SELECT run_id FROM keiro_plan_input_legacy_runs")]
    assert sorted(marked) == sorted(f"wf:order-{name}" for name, (_, _, ran) in CASES.items() if ran)
    # It stays, until the run goes.
    for sql in ("DELETE FROM keiro_plan_input_legacy_runs", "UPDATE keiro_plan_input_legacy_runs SET run_id = run_id"):
        with pytest.raises(older.guarded):
            older.rows(sql)
    older.insert("keiro_runs", plans.run("of today"))
    older.rows("DELETE FROM keiro_runs WHERE key <> 'a step'")
    assert older.rows("SELECT run_id FROM keiro_plan_input_legacy_runs") == [("wf:order-a step",)]


def test_a_new_database_has_no_runs_to_mark(database: Database) -> None:
    assert database.rows("SELECT * FROM keiro_plan_input_legacy_runs") == []


def test_one_that_fails_half_way_leaves_all_as_it_was(older: Database) -> None:
    """R6."""
    # What the last revision makes cannot be made: its name is taken.
    revision, tables = revision_of(older), tables_of(older)
    last = "keiro_runs_handed_off_idx"
    older.rows(f"CREATE VIEW {last} AS SELECT 1 AS one")
    before, rows = Inventory(older), held(older, tables)

    with pytest.raises(StoreError, match=last):
        older.ensure()

    assert revision_of(older) == revision
    assert vars(Inventory(older)) == vars(before) | {"_rows": older.rows}
    assert held(older, tables) == rows
    older.rows(f"DROP VIEW {last}")
    older.ensure()
    is_up_to_date(older)
    assert held(older, tables) == rows


def run_program(database: Database, program: str) -> subprocess.Popen[str]:
    """A process that runs `program` with `ensure()`, which brings the database up to date."""
    call, address = call_of(database)
    begin = f"from keiro.stores import migrate\nensure = lambda: migrate.{call}({address!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", begin + program],
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_migrator_that_dies_leaves_all_as_it_was(older: Database) -> None:
    """R6."""
    revision, tables = revision_of(older), tables_of(older)
    before, rows = Inventory(older), held(older, tables)

    # After its last statement, before the commit.
    dies = "import os, signal\nrun = migrate._run_revisions\n"
    dies += "migrate._run_revisions = lambda one: (run(one), os.kill(os.getpid(), signal.SIGKILL))\nensure()"
    process = run_program(older, dies)
    process.communicate()

    assert process.returncode == -9
    assert revision_of(older) == revision
    assert vars(Inventory(older)) == vars(before) | {"_rows": older.rows}
    assert held(older, tables) == rows
    older.ensure()
    is_up_to_date(older)
    assert held(older, tables) == rows


def test_processes_that_upgrade_at_once_take_turns(older: Database) -> None:
    """R7."""
    tables = tables_of(older)
    rows = held(older, tables)
    ready = "import alembic.command, sqlalchemy\nprint('ready', flush=True)\ninput()\nensure()"
    processes = [run_program(older, ready) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    failures = [process.communicate()[1] for process in processes]

    assert failures == [""] * 4
    is_up_to_date(older)
    assert held(older, tables) == rows


@pytest.mark.parametrize("mode", ["migrate", "verify"])
def test_data_of_a_newer_keiro_is_left_alone(database: Database, mode: migrate.Mode) -> None:
    """R6."""
    tables = tables_of(database)
    for table, row in tables.items():
        database.insert(table, row)
    database.rows("UPDATE keiro_alembic_version SET version_num = '9999'")
    before, rows = Inventory(database), held(database, tables)

    with pytest.raises(MigrationRequired, match=r"newer keiro \(revision 9999"):
        database.ensure(mode)

    assert vars(Inventory(database)) == vars(before) | {"_rows": database.rows}
    assert held(database, tables) == rows
