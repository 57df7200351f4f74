"""Opening a database: what is made, what is refused, and that many may do it at once or fail half-way."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory

import keiro
from keiro.errors import MigrationRequired, StoreBusy, StoreError, StoreUnavailable
from keiro.stores import ddl, migrate, schema
from keiro.testing.postgres import PostgresServer
from tests.stores.conftest import EVENT, RUN, Database, PostgresDatabase, SQLiteDatabase

# The inventory, as Postgres calls the types; `C` marks ids, which compare by their bytes.
COLUMNS = """
keiro_alembic_version.version_num character varying not null
keiro_clock_deadlines.flow_name text C not null
keiro_clock_deadlines.execution_id text C not null
keiro_clock_deadlines.clock_name text C not null
keiro_clock_deadlines.deferred_name text C not null
keiro_clock_deadlines.due_at_ms bigint not null
keiro_clock_deadlines.completed_at_ms bigint
keiro_deferred_completions.flow_name text C not null
keiro_deferred_completions.execution_id text C not null
keiro_deferred_completions.deferred_name text C not null
keiro_deferred_completions.exit_json text not null
keiro_deferred_completions.metadata_json text
keiro_deferred_completions.completed_at_ms bigint not null
keiro_deferred_completions.consumed_at_ms bigint
keiro_execution_attributes.run_id text C not null
keiro_execution_attributes.name text C not null
keiro_execution_attributes.value text C not null
keiro_execution_attributes.created_at_ms bigint not null
keiro_execution_counts.execution_flow text C not null
keiro_execution_counts.status text not null
keiro_execution_counts.runs bigint not null
keiro_execution_marks.mark bigint not null identity
keiro_execution_marks.run_id text C not null
keiro_execution_words.run_id text C not null
keiro_execution_words.word text C not null
keiro_execution_words.created_at_ms bigint not null
keiro_executions.run_id text C not null
keiro_executions.status text not null
keiro_executions.execution_flow text C not null
keiro_executions.execution_parent_id text C
keiro_executions.execution_lineage text C not null
keiro_executions.waiting_reason text
keiro_executions.round_ordinal integer not null
keiro_executions.version_tag text
keiro_executions.attempts integer not null
keiro_executions.created_at_ms bigint not null
keiro_executions.started_at_ms bigint
keiro_executions.finished_at_ms bigint
keiro_executions.next_attempt_at_ms bigint
keiro_executions.wake_at_ms bigint
keiro_executions.waiting_token text C
keiro_executions.cancel_requested_at_ms bigint
keiro_executions.attributes_json text
keiro_executions.failure_json text
keiro_journal.position bigint not null identity
keiro_journal.run_key bigint not null
keiro_journal.version integer not null
keiro_journal.event_id uuid not null
keiro_journal.topic text not null
keiro_journal.payload text not null
keiro_journal.recorded_at_ms bigint not null
keiro_plan_input_generations.run_id text C not null
keiro_plan_input_generations.plan_id text C not null
keiro_plan_input_generations.generation bigint not null
keiro_plan_input_generations.snapshot_json text not null
keiro_plan_input_generations.checksum text not null
keiro_plan_input_heads.run_id text C not null
keiro_plan_input_heads.plan_id text C not null
keiro_plan_input_heads.base_digest text C not null
keiro_plan_input_heads.generation bigint not null
keiro_plan_input_heads.environment_digest text C
keiro_plan_input_heads.merge_state_version bigint
keiro_plan_input_legacy_runs.run_id text C not null
keiro_plan_merge_completions.run_id text C not null
keiro_plan_merge_completions.stopped_node_id text C not null
keiro_plan_merge_completions.generation bigint not null
keiro_plan_merge_completions.merge_node_id text C not null
keiro_plan_merge_completions.completion_json text not null
keiro_plan_merge_completions.checksum text not null
keiro_plan_merge_intents.run_id text C not null
keiro_plan_merge_intents.stopped_node_id text C not null
keiro_plan_merge_intents.intent_json text not null
keiro_plan_merge_intents.checksum text not null
keiro_projection_tracking.name text C not null
keiro_projection_tracking.position bigint not null
keiro_run_changes.run_id text C not null
keiro_run_changes.revision bigint not null
keiro_run_changes.deleted boolean not null default false
keiro_run_source.one integer not null
keiro_run_source.source text not null
keiro_run_source.revision bigint not null
keiro_run_heads.run_key bigint not null
keiro_run_heads.version integer not null
keiro_run_heads.owner bigint
keiro_run_heads.epoch bigint not null default 0
keiro_run_heads.queue text C
keiro_queue_starts.queue text C not null
keiro_queue_starts.at_ms bigint not null
keiro_queue_starts.started integer not null
keiro_run_parents.child_id text C not null
keiro_run_parents.parent_id text C not null
keiro_run_parents.seq bigint not null
keiro_runs.run_key bigint not null identity
keiro_runs.run_id text C not null
keiro_runs.workflow text C not null
keiro_runs.key text C not null
keiro_runs.status text not null
keiro_runs.lineage_id text C not null
keiro_runs.round_ordinal integer not null default 0
keiro_runs.parent_run_id text C
keiro_runs.on_cancel text
keiro_runs.version_tag text
keiro_runs.attributes_json text
keiro_runs.input_json text not null
keiro_runs.result_json text
keiro_runs.failure_json text
keiro_runs.attempts integer not null default 0
keiro_runs.created_at_ms bigint not null
keiro_runs.started_at_ms bigint
keiro_runs.finished_at_ms bigint
keiro_runs.next_attempt_at_ms bigint
keiro_runs.wake_at_ms bigint
keiro_runs.waiting_reason text
keiro_runs.waiting_token text C
keiro_runs.deadline_at_ms bigint
keiro_runs.cancel_requested_at_ms bigint
keiro_runs.handoff_run_id text C
keiro_runs.priority integer not null default 0
keiro_runs.cleanup_ms bigint
keiro_selection_suspected_edges.scope text C not null
keiro_selection_suspected_edges.affects text C not null
keiro_selection_suspected_edges.confidence double precision not null
keiro_selection_suspected_edges.valid_from_ms bigint not null
keiro_selection_suspected_edges.evidence_json text not null
keiro_snapshots.originator_id text C not null
keiro_snapshots.originator_version integer not null
keiro_snapshots.topic text not null
keiro_snapshots.state text not null
keiro_step_maps.run_key bigint not null
keiro_step_maps.until_version integer not null
keiro_step_maps.state text not null
keiro_workers.worker_key bigint not null identity
keiro_workers.worker_id text C not null
keiro_workers.host text not null
keiro_workers.pid bigint not null
keiro_workers.process_started text not null
keiro_workers.address text
keiro_workers.started_at_ms bigint not null
keiro_workers.lease_expires_at_ms bigint not null
keiro_workflow_children.child_id text C not null
keiro_workflow_children.child_name text C not null
keiro_workflow_children.parent_id text C not null
keiro_workflow_children.parent_name text C not null
keiro_workflow_children.await_step text not null
keiro_workflow_children.status text not null default 'running'
keiro_workflow_children.result jsonb
keiro_workflow_children.failed boolean not null default false
keiro_workflow_children.failure_reason text
keiro_workflow_children.created_at timestamp with time zone not null default now()
keiro_workflow_children.updated_at timestamp with time zone not null default now()
keiro_workflow_children.completed_at timestamp with time zone
""".strip().splitlines()

INDEXES = """
keiro_clock_deadlines_execution_idx keiro_clock_deadlines(execution_id)
keiro_clock_deadlines_pending_idx keiro_clock_deadlines(completed_at_ms,due_at_ms)
keiro_deferred_completions_execution_idx keiro_deferred_completions(execution_id)
keiro_plan_input_heads_run_idx unique keiro_plan_input_heads(run_id)
keiro_run_heads_owner_idx keiro_run_heads(owner) where owner is not null
keiro_run_heads_queue_idx keiro_run_heads(queue,owner) where queue is not null and owner is not null
keiro_run_parents_children_idx keiro_run_parents(parent_id,seq,child_id)
keiro_run_parents_first_idx keiro_run_parents(child_id,seq,parent_id)
keiro_run_parents_parent_idx keiro_run_parents(parent_id)
keiro_run_parents_seq_idx keiro_run_parents(seq)
keiro_runs_asked_idx keiro_runs(cancel_requested_at_ms) where cancel_requested_at_ms is not null and finished_at_ms is null
keiro_runs_finished_idx keiro_runs(finished_at_ms,run_key) where finished_at_ms is not null and handoff_run_id is null
keiro_runs_handed_off_idx keiro_runs(finished_at_ms,run_key) where handoff_run_id is not null and round_ordinal > 0
keiro_runs_lineage_idx unique keiro_runs(lineage_id,round_ordinal) where round_ordinal > 0
keiro_runs_paced_idx keiro_runs(workflow,next_attempt_at_ms) where status = 'pending' and next_attempt_at_ms is not null
keiro_runs_paced_version_idx keiro_runs(workflow,version_tag,next_attempt_at_ms) where status = 'pending' and next_attempt_at_ms is not null and version_tag is not null
keiro_runs_parent_idx keiro_runs(parent_run_id) where parent_run_id is not null
keiro_runs_pending_idx keiro_runs(workflow,priority,created_at_ms,run_key) where status = 'pending' and next_attempt_at_ms is null
keiro_runs_pending_version_idx keiro_runs(workflow,version_tag,priority,created_at_ms,run_key) where status = 'pending' and next_attempt_at_ms is null and version_tag is not null
keiro_runs_wake_idx keiro_runs(workflow,wake_at_ms) where status = 'suspended' and wake_at_ms is not null
keiro_runs_wake_version_idx keiro_runs(workflow,version_tag,wake_at_ms) where status = 'suspended' and wake_at_ms is not null and version_tag is not null
keiro_workers_lease_idx keiro_workers(lease_expires_at_ms)
keiro_workflow_children_parent_idx keiro_workflow_children(parent_id,parent_name)
keiro_workflow_children_running_idx keiro_workflow_children(status) where status = 'running'
""".strip().splitlines()  # noqa: E501
INDEXES += [
    "keiro_execution_attributes_idx keiro_execution_attributes(name,value,created_at_ms,run_id)",
    "keiro_execution_words_idx keiro_execution_words(word,created_at_ms,run_id)",
    "keiro_executions_round_page_idx keiro_executions(execution_lineage,round_ordinal,run_id)",
]
for mask in range(32):
    # Bit by bit: status, execution_flow, execution_parent_id, execution_lineage, waiting_reason.
    names = ("status", "execution_flow", "execution_parent_id", "execution_lineage", "waiting_reason")
    chosen = "".join(f"{name}," for bit, name in enumerate(names) if mask >> bit & 1)
    INDEXES.append(f"keiro_executions_listing_{mask} keiro_executions({chosen}created_at_ms,run_id)")
INDEXES.sort()

KEYS = """
keiro_alembic_version primary key(version_num)
keiro_clock_deadlines foreign key(execution_id) references keiro_runs(run_id)
keiro_clock_deadlines primary key(flow_name,execution_id,clock_name)
keiro_deferred_completions foreign key(execution_id) references keiro_runs(run_id)
keiro_deferred_completions primary key(flow_name,execution_id,deferred_name)
keiro_execution_attributes foreign key(run_id) references keiro_executions(run_id) on delete cascade
keiro_execution_attributes primary key(run_id,name)
keiro_execution_counts primary key(execution_flow,status)
keiro_execution_marks primary key(mark)
keiro_execution_words foreign key(run_id) references keiro_executions(run_id) on delete cascade
keiro_execution_words primary key(run_id,word)
keiro_executions primary key(run_id)
keiro_journal primary key(position)
keiro_journal unique(run_key,event_id)
keiro_journal unique(run_key,version)
keiro_plan_input_generations foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_input_generations primary key(run_id,plan_id,generation)
keiro_plan_input_heads foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_input_heads primary key(run_id,plan_id)
keiro_plan_input_legacy_runs foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_input_legacy_runs primary key(run_id)
keiro_plan_merge_completions foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_merge_completions foreign key(run_id,stopped_node_id) references keiro_plan_merge_intents(run_id,stopped_node_id) on delete cascade
keiro_plan_merge_completions primary key(run_id,stopped_node_id)
keiro_plan_merge_completions unique(run_id,generation)
keiro_plan_merge_completions unique(run_id,merge_node_id)
keiro_plan_merge_intents foreign key(run_id) references keiro_runs(run_id) on delete cascade
keiro_plan_merge_intents primary key(run_id,stopped_node_id)
keiro_projection_tracking primary key(name)
keiro_queue_starts primary key(queue,at_ms)
keiro_run_changes primary key(run_id)
keiro_run_changes unique(revision)
keiro_run_heads primary key(run_key)
keiro_run_parents primary key(child_id,parent_id)
keiro_run_source primary key(one)
keiro_runs foreign key(parent_run_id) references keiro_runs(run_id)
keiro_runs primary key(run_key)
keiro_runs unique(run_id)
keiro_selection_suspected_edges primary key(scope,affects)
keiro_snapshots primary key(originator_id,originator_version)
keiro_step_maps primary key(run_key,until_version)
keiro_workers primary key(worker_key)
keiro_workers unique(worker_id)
keiro_workflow_children primary key(child_id,child_name)
""".strip().splitlines()  # noqa: E501

TRIGGERS = {
    "sqlite": [
        "keiro_executions_creation_immutable",
        "keiro_journal_no_delete",
        "keiro_journal_no_replace",
        "keiro_journal_no_update",
        "keiro_plan_input_generations_no_delete",
        "keiro_plan_input_generations_no_replace",
        "keiro_plan_input_generations_no_update",
        "keiro_plan_input_heads_environment_immutable",
        "keiro_plan_input_heads_environment_required",
        "keiro_plan_input_heads_forward_only",
        "keiro_plan_input_heads_merge_version_immutable",
        "keiro_plan_input_heads_no_delete",
        "keiro_plan_input_heads_no_replace",
        "keiro_plan_input_legacy_runs_no_delete",
        "keiro_plan_input_legacy_runs_no_replace",
        "keiro_plan_input_legacy_runs_no_update",
        "keiro_plan_merge_completions_no_delete",
        "keiro_plan_merge_completions_no_replace",
        "keiro_plan_merge_completions_no_update",
        "keiro_plan_merge_intents_no_delete",
        "keiro_plan_merge_intents_no_replace",
        "keiro_plan_merge_intents_no_update",
        "keiro_run_parents_gc",
        "keiro_run_parents_mark_deleted",
        "keiro_run_parents_mark_inserted",
        "keiro_run_parents_mark_updated",
        "keiro_runs_forget",
        "keiro_runs_forget_children",
        "keiro_runs_forget_plans",
        "keiro_runs_forget_waits",
        "keiro_runs_identity",
        "keiro_runs_mark",
        "keiro_runs_mark_deleted",
    ],
    "postgresql": [
        "keiro_executions_creation_immutable",
        "keiro_journal_no_delete",
        "keiro_journal_no_truncate",
        "keiro_journal_no_update",
        "keiro_plan_input_generations_no_delete",
        "keiro_plan_input_generations_no_truncate",
        "keiro_plan_input_generations_no_update",
        "keiro_plan_input_heads_environment_immutable",
        "keiro_plan_input_heads_environment_required",
        "keiro_plan_input_heads_forward_only",
        "keiro_plan_input_heads_merge_version_immutable",
        "keiro_plan_input_heads_no_delete",
        "keiro_plan_input_heads_no_truncate",
        "keiro_plan_input_legacy_runs_no_delete",
        "keiro_plan_input_legacy_runs_no_truncate",
        "keiro_plan_input_legacy_runs_no_update",
        "keiro_plan_merge_completions_no_delete",
        "keiro_plan_merge_completions_no_truncate",
        "keiro_plan_merge_completions_no_update",
        "keiro_plan_merge_intents_no_delete",
        "keiro_plan_merge_intents_no_truncate",
        "keiro_plan_merge_intents_no_update",
        "keiro_run_parents_gc",
        "keiro_run_parents_mark_deleted",
        "keiro_run_parents_mark_inserted",
        "keiro_run_parents_mark_updated",
        "keiro_runs_forget",
        "keiro_runs_forget_children",
        "keiro_runs_forget_waits",
        "keiro_runs_identity",
        "keiro_runs_mark",
        "keiro_runs_mark_deleted",
        "keiro_runs_no_truncate",
    ],
}

_SQLITE_TYPES = {
    "bigint": "INTEGER",
    "integer": "INTEGER",
    "uuid": "BLOB",
    "text": "TEXT",
    "double precision": "REAL",
    "jsonb": "TEXT",
    "boolean": "BOOLEAN",
    "timestamp with time zone": "TEXT",
    "character varying": "VARCHAR(32)",
}


def on_sqlite(column: str) -> str:
    """A line of COLUMNS as SQLite has it."""
    name, rest = column.split(" ", 1)
    rest = rest.replace("text C", "text")
    kind = next(kind for kind in _SQLITE_TYPES if rest.startswith(kind))
    # The key of a table is its rowid there: it counts up, and needs no NOT NULL.
    rest = rest.replace(" not null identity", " identity")
    rest = rest.replace("default now()", f"default {ddl.SQLite.now.strip('()')})")
    return f"{name} {_SQLITE_TYPES[kind]}{rest.removeprefix(kind)}"


def tidy(sql: str) -> str:
    """An index's definition without the spellings in which the dialects differ."""
    text = re.sub(r'keiro\.|using btree |::text|"', "", " ".join(sql.lower().split()))
    head, _, where = text.partition(" where ")
    found = re.fullmatch(r"create (unique )?index (\w+) on (\w+) \((.*)\)", head)
    assert found is not None, sql
    unique, name, table, columns = found.groups(default="")
    condition = f" where {re.sub('[()]', '', where)}" if where else ""
    return f"{name} {unique}{table}({columns.replace(', ', ',')}){condition}"


class Inventory:
    """What a database holds of keiro."""

    def __init__(self, database: Database) -> None:
        self._rows = database.rows
        of_sqlite = isinstance(database, SQLiteDatabase)
        self.columns = sorted(self._sqlite_columns() if of_sqlite else self._postgres_columns())
        self.indexes = sorted(map(tidy, self._sqlite_indexes() if of_sqlite else self._postgres_indexes()))
        self.keys = sorted(self._sqlite_keys() if of_sqlite else self._postgres_keys())
        self.triggers = sorted(self._sqlite_triggers() if of_sqlite else self._postgres_triggers())

    def _sqlite_tables(self) -> list[tuple[str, str]]:
        return self._rows("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'sqlite_*'")

    def _sqlite_columns(self) -> Iterator[str]:
        for table, sql in self._sqlite_tables():
            for _, name, kind, required, default, _ in self._rows(f"PRAGMA table_info({table})"):
                counts_up = re.search(rf"\b{name} INTEGER (NOT NULL )?PRIMARY KEY AUTOINCREMENT", sql)
                yield (
                    f"{table}.{name} {kind}{' not null' if required and not counts_up else ''}"
                    f"{' identity' if counts_up else ''}{f' default {default}' if default else ''}"
                )

    def _sqlite_indexes(self) -> list[str]:
        found = self._rows("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        return [sql for (sql,) in found]

    def _sqlite_keys(self) -> Iterator[str]:
        for table, _ in self._sqlite_tables():
            columns = self._rows(f"PRAGMA table_info({table})")
            key = sorted((place, name) for _, name, _, _, _, place in columns if place)
            yield f"{table} primary key({','.join(name for _, name in key)})"
            for _, index, _, origin, _ in self._rows(f"PRAGMA index_list({table})"):
                if origin == "u":
                    parts = self._rows(f"PRAGMA index_info({index})")
                    yield f"{table} unique({','.join(name for _, _, name in parts)})"
            for lines in self._sqlite_references(table).values():
                other, _, _, _, action, _ = lines[0]
                here, there = (",".join(line[at] for line in lines) for at in (1, 2))
                cascade = "" if action == "NO ACTION" else f" on delete {action.lower()}"
                yield f"{table} foreign key({here}) references {other}({there}){cascade}"

    def _sqlite_references(self, table: str) -> dict[int, list[tuple[Any, ...]]]:
        """The foreign keys by number: (other table, column, other column, on update, on delete, match), in order."""
        found: dict[int, list[tuple[Any, ...]]] = {}
        for number, _, *line in sorted(self._rows(f"PRAGMA foreign_key_list({table})")):
            found.setdefault(number, []).append(tuple(line))
        return found

    def _sqlite_triggers(self) -> list[str]:
        return [name for (name,) in self._rows("SELECT name FROM sqlite_master WHERE type = 'trigger'")]

    def _postgres_columns(self) -> Iterator[str]:
        for table, name, kind, collation, nullable, identity, default in self._rows(
            "SELECT table_name, column_name, data_type, collation_name, is_nullable, is_identity,"
            " column_default FROM information_schema.columns WHERE table_schema = 'keiro'"
        ):
            yield (
                f"{table}.{name} {kind}{' C' if collation == 'C' else ''}"
                f"{'' if nullable == 'YES' else ' not null'}{' identity' if identity == 'YES' else ''}"
                f"{f' default {default}'.removesuffix('::text') if default else ''}"
            )

    def _postgres_indexes(self) -> list[str]:
        found = self._rows(
            "SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class ON oid = indrelid"
            " WHERE relnamespace = 'keiro'::regnamespace"
            " AND NOT EXISTS"
            " (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('p', 'u'))"
        )
        return [sql for (sql,) in found]

    def _postgres_keys(self) -> Iterator[str]:
        for table, definition in self._rows(
            "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'keiro'::regnamespace AND contype IN ('p', 'u', 'f')"
        ):
            text = re.sub(r'keiro\.|"', "", definition.lower()).replace(" (", "(").replace(", ", ",")
            yield f"{table.removeprefix('keiro.')} {text}"

    def _postgres_triggers(self) -> list[str]:
        found = self._rows(
            "SELECT tgname::text FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid"
            " WHERE c.relnamespace = 'keiro'::regnamespace AND NOT tgisinternal"
        )
        return [name for (name,) in found]


def is_blank(database: Database) -> bool:
    """Whether a database has no table (or schema) at all."""
    if isinstance(database, SQLiteDatabase):
        return not database.rows("SELECT name FROM sqlite_master WHERE type = 'table'")
    return not database.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'keiro'")


def engine_of(database: Database) -> sqlalchemy.Engine:
    """An engine that finds the tables of `keiro.stores.schema`."""
    if isinstance(database, SQLiteDatabase):
        url = f"sqlite:///{database.path}"
    else:
        assert isinstance(database, PostgresDatabase)
        url = database.url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    return engine.execution_options(**schema.EXECUTION_OPTIONS[engine.dialect.name])


# What is made


def test_a_fresh_database_has_exactly_this(database: Database) -> None:
    """R1."""
    found = Inventory(database)

    columns = COLUMNS if database.dialect == "postgresql" else map(on_sqlite, COLUMNS)
    assert found.columns == sorted(columns)
    assert found.indexes == INDEXES
    assert found.keys == KEYS
    assert found.triggers == TRIGGERS[database.dialect]
    assert database.rows("SELECT version_num FROM keiro_alembic_version") == [(migrate.HEAD,)]


def test_a_second_time_changes_nothing(database: Database) -> None:
    """R1."""
    before = Inventory(database)
    database.insert("keiro_runs", RUN)

    database.ensure()
    database.ensure(mode="verify")

    assert vars(Inventory(database)) == vars(before) | {"_rows": database.rows}
    assert database.rows("SELECT count(*) FROM keiro_runs") == [(1,)]


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_a_file_is_in_wal_mode(database: SQLiteDatabase) -> None:
    assert database.rows("PRAGMA journal_mode") == [("wal",)]


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_the_hot_row_has_room_for_updates_in_place(database: PostgresDatabase) -> None:
    (options,) = database.rows("SELECT reloptions FROM pg_class WHERE relname = 'keiro_run_heads'")[0]

    assert "fillfactor=50" in options


def test_the_tables_of_the_package_are_those_of_the_revisions(
    database: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if database.dialect == "sqlite":
        other: Database = SQLiteDatabase(tmp_path / "made-from-metadata.db")
        compare_with(other, database)
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        with server.database() as url:
            other = PostgresDatabase(url)
            other.rows("CREATE SCHEMA keiro")
            compare_with(other, database)


def compare_with(blank: Database, migrated: Database) -> None:
    engine = engine_of(blank)
    with engine.begin() as connection:
        schema.metadata.create_all(connection)
    from_metadata, from_revisions = Inventory(blank), Inventory(migrated)

    def ours(lines: list[str]) -> list[str]:
        return [line for line in lines if not line.startswith(migrate.VERSION_TABLE)]

    assert from_metadata.columns == ours(from_revisions.columns)
    assert from_metadata.indexes == from_revisions.indexes
    assert from_metadata.keys == ours(from_revisions.keys)


def test_the_tables_of_the_package_can_be_queried(database: Database) -> None:
    event_id = uuid.uuid4()

    with engine_of(database).begin() as connection:
        connection.execute(schema.runs.insert().values(**RUN))
        connection.execute(schema.journal.insert().values(**EVENT | {"event_id": event_id}))
        found = connection.execute(
            sqlalchemy.select(schema.journal.c.event_id, schema.runs.c.run_id)
            .join(schema.runs, schema.runs.c.run_key == schema.journal.c.run_key)
            .where(schema.journal.c.event_id == event_id)
        ).all()

    assert found == [(event_id, RUN["run_id"])]


def test_the_applications_own_tables_and_its_own_alembic_are_left_alone(empty: Database) -> None:
    where = "" if empty.dialect == "sqlite" else "public."
    empty.rows(f"CREATE TABLE {where}alembic_version (version_num TEXT NOT NULL)")
    empty.rows(f"INSERT INTO {where}alembic_version VALUES ('cafe')")

    empty.ensure()

    assert empty.rows(f"SELECT * FROM {where}alembic_version") == [("cafe",)]


@pytest.mark.parametrize("name", ["with space.db", "50%.db", "what?.db", "hash#.db", "naïve ☕.db", "file:x.db"])
def test_any_file_name_will_do(tmp_path: Path, name: str) -> None:
    migrate.ensure_sqlite(str(tmp_path / name))
    migrate.ensure_sqlite(str(tmp_path / name), mode="verify")

    assert name in os.listdir(tmp_path)


def test_a_relative_path_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    migrate.ensure_sqlite("runs.db")

    assert "runs.db" in os.listdir(tmp_path)


@pytest.mark.parametrize("url", ["host=127.0.0.1 dbname={dbname} port={port} user=postgres", "{url}?connect_timeout=3"])
def test_any_address_that_libpq_understands_will_do(postgres_url: str, url: str) -> None:
    parts = psycopg.conninfo.conninfo_to_dict(postgres_url)

    migrate.ensure_postgres(url.format(url=postgres_url, **parts))

    migrate.ensure_postgres(postgres_url, mode="verify")


# Nothing is loaded that is not needed


def test_a_database_that_is_up_to_date_is_opened_without_sqlalchemy(database: Database) -> None:
    call, address = call_of(database)
    program = f"""if True:
        import sys
        from keiro.stores import migrate
        migrate.{call}({address!r})
        print(*{{"sqlalchemy", "alembic"}} & set(sys.modules))
    """

    assert python("-c", program).stdout.split() == []


# What is refused


def test_revisions_are_those_of_the_script_folder() -> None:
    scripts = ScriptDirectory(str(migrate.script_location()))

    assert [script.revision for script in scripts.walk_revisions()] == list(reversed(migrate.REVISIONS))
    assert scripts.get_current_head() == migrate.HEAD


@pytest.mark.parametrize(
    ("revision", "has_tables", "state"),
    [
        (None, False, migrate.Behind(None)),
        (None, True, migrate.Foreign()),
        (migrate.HEAD, True, migrate.Current()),
        ("9999", True, migrate.Newer("9999")),
        ("", True, migrate.Newer("")),
    ],
)
def test_a_database_is_classified_by_its_revision(revision: str | None, has_tables: bool, state: migrate.State) -> None:
    assert migrate.classify(revision, has_tables) == state


def test_an_older_revision_is_behind() -> None:
    assert len(migrate.REVISIONS) > 1
    for older in migrate.REVISIONS[:-1]:
        assert migrate.classify(older, True) == migrate.Behind(older)


@pytest.mark.parametrize("mode", ["migrate", "verify"])
def test_a_database_of_a_newer_keiro_is_refused_untouched(database: Database, mode: migrate.Mode) -> None:
    database.rows("UPDATE keiro_alembic_version SET version_num = '9999'")
    before = Inventory(database)

    with pytest.raises(MigrationRequired, match=r"newer keiro \(revision 9999.*install"):
        database.ensure(mode)

    assert Inventory(database).columns == before.columns
    assert database.rows("SELECT version_num FROM keiro_alembic_version") == [("9999",)]


@pytest.mark.parametrize("mode", ["migrate", "verify"])
def test_tables_that_are_not_ours_are_refused_untouched(empty: Database, mode: migrate.Mode) -> None:
    if empty.dialect == "postgresql":
        empty.rows("CREATE SCHEMA keiro")
    empty.rows("CREATE TABLE keiro_workflow_children (child_id TEXT)")

    with pytest.raises(MigrationRequired, match="not keiro's"):
        empty.ensure(mode)

    assert Inventory(empty).columns[0].startswith("keiro_workflow_children.child_id")
    assert len(Inventory(empty).columns) == 1


def test_tables_without_a_revision_are_refused(database: Database) -> None:
    database.rows("DELETE FROM keiro_alembic_version")

    with pytest.raises(MigrationRequired, match="no revision in keiro_alembic_version"):
        database.ensure()


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_keiro_tables_outside_the_schema_do_not_matter(empty: PostgresDatabase) -> None:
    empty.rows("CREATE TABLE public.keiro_notes (text TEXT)")

    empty.ensure()


def test_verifying_changes_nothing_and_says_what_to_run(empty: Database) -> None:
    with pytest.raises(MigrationRequired, match=r"no tables of keiro.*`keiro migrate --url (sqlite|postgresql)://"):
        empty.ensure("verify")

    if isinstance(empty, SQLiteDatabase):
        assert not empty.path.exists()
    else:
        assert is_blank(empty)


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
def test_verifying_a_database_without_our_tables_leaves_its_mode(empty: SQLiteDatabase) -> None:
    empty.rows("CREATE TABLE notes (text TEXT)")

    with pytest.raises(MigrationRequired):
        empty.ensure("verify")

    assert empty.rows("PRAGMA journal_mode") == [("delete",)]


def test_a_password_is_never_shown(postgres_url: str) -> None:
    url = postgres_url.replace("postgres@", "postgres:hunter2@")

    with pytest.raises(MigrationRequired) as raised:
        migrate.ensure_postgres(url, mode="verify")

    assert "hunter2" not in str(raised.value)
    assert postgres_url in str(raised.value)


# Everything or nothing


def test_what_fails_half_way_leaves_nothing(empty: Database) -> None:
    """R6."""
    # The last table of the first revision cannot be made: its name is taken.
    if empty.dialect == "postgresql":
        empty.rows("CREATE SCHEMA keiro")
    empty.rows("CREATE VIEW keiro_snapshots AS SELECT 1 AS one")

    with pytest.raises(StoreError, match="keiro_snapshots"):
        empty.ensure()

    assert Inventory(empty).columns in ([], ["keiro_snapshots.one integer"])
    empty.rows("DROP VIEW keiro_snapshots")
    empty.ensure()
    assert Inventory(empty).keys == KEYS


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_the_schema_goes_too_when_the_upgrade_fails(empty: PostgresDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(migrate, "_run_revisions", fail)

    with pytest.raises(RuntimeError, match="power cut"):
        empty.ensure()

    assert is_blank(empty)


# Many at once


def call_of(database: Database) -> tuple[str, str]:
    """The function that opens this database, and its argument."""
    if isinstance(database, SQLiteDatabase):
        return "ensure_sqlite", str(database.path)
    assert isinstance(database, PostgresDatabase)
    return "ensure_postgres", database.url


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment(), text=True, capture_output=True, check=True)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(keiro.__file__).parents[1])}


def test_processes_that_open_a_new_database_at_once_all_succeed(empty: Database) -> None:
    """R7."""
    call, address = call_of(empty)
    program = f"""if True:
        import alembic.command, sqlalchemy
        from keiro.stores import migrate
        print("ready", flush=True)
        input()
        migrate.{call}({address!r})
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    failures = [process.communicate()[1] for process in processes]

    assert failures == [""] * 8
    assert [process.returncode for process in processes] == [0] * 8
    assert Inventory(empty).keys == KEYS
    assert empty.rows("SELECT version_num FROM keiro_alembic_version") == [(migrate.HEAD,)]


def test_threads_may_open_databases_at_once(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{n}.db") for n in range(8)]
    together = threading.Barrier(len(paths), timeout=60)

    def open_one(path: str) -> None:
        together.wait()
        migrate.ensure_sqlite(path)

    with ThreadPoolExecutor(len(paths)) as threads:
        list(threads.map(open_one, paths))

    for path in paths:
        assert Inventory(SQLiteDatabase(Path(path))).keys == KEYS


@pytest.mark.parametrize("empty", ["sqlite"], indirect=True)
@pytest.mark.parametrize("held", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_locked_file_is_waited_for(
    empty: SQLiteDatabase, monkeypatch: pytest.MonkeyPatch, held: str, mode: str
) -> None:
    with closing(sqlite3.connect(empty.path, isolation_level=None)) as other:
        other.execute(f"PRAGMA journal_mode = {mode}")
        other.execute("CREATE TABLE notes (text TEXT)")
        other.execute(held)
        other.execute("INSERT INTO notes VALUES ('x')")
        with pytest.raises(StoreBusy, match="locked by another connection"):
            empty.ensure(timeout=0)
        with pytest.raises(StoreBusy, match="locked by another connection"):
            empty.ensure(timeout=0.02)

        monkeypatch.setattr(migrate.time, "sleep", lambda _: other.in_transaction and other.execute("COMMIT"))
        empty.ensure()

    assert Inventory(empty).triggers == TRIGGERS["sqlite"]
    assert empty.rows("SELECT * FROM notes") == [("x",)]


@pytest.mark.parametrize("empty", ["postgres"], indirect=True)
def test_another_migrator_is_waited_for(empty: PostgresDatabase) -> None:
    with psycopg.connect(empty.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [migrate.MIGRATION_LOCK])
        with pytest.raises(StoreBusy, match="Try again"):
            empty.ensure(timeout=0.02)
        assert is_blank(empty)

    empty.ensure()


@pytest.fixture
def overtaken(empty: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database that another process migrates after this one has looked, and before it has the lock."""
    upgrade = migrate._upgrade

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(migrate, "_upgrade", upgrade)
        empty.ensure()
        upgrade(*arguments)

    monkeypatch.setattr(migrate, "_upgrade", late)
    return empty


def test_the_second_migrator_finds_the_work_done(overtaken: Database) -> None:
    overtaken.ensure()

    assert overtaken.rows("SELECT version_num FROM keiro_alembic_version") == [(migrate.HEAD,)]


def test_the_second_migrator_respects_a_newer_one(overtaken: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    run = migrate._run_revisions

    def run_as_a_newer_keiro(connection: sqlalchemy.Connection) -> None:
        run(connection)
        table = "keiro_alembic_version" if overtaken.dialect == "sqlite" else "keiro.keiro_alembic_version"
        connection.exec_driver_sql(f"UPDATE {table} SET version_num = '9999'")

    monkeypatch.setattr(migrate, "_run_revisions", run_as_a_newer_keiro)

    with pytest.raises(MigrationRequired, match="newer keiro"):
        overtaken.ensure()

    assert overtaken.rows("SELECT version_num FROM keiro_alembic_version") == [("9999",)]


def test_a_migrator_that_waited_sees_what_was_done_meanwhile(postgres_url: str) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    serializable = f"{postgres_url}?options=-c%20default_transaction_isolation%3Dserializable"
    with psycopg.connect(postgres_url, autocommit=True) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT pg_advisory_lock(%s)", [migrate.MIGRATION_LOCK])
        late = threads.submit(migrate.ensure_postgres, serializable)
        while other.execute(waiting).fetchone() == (0,):
            assert not late.done()
        # The holder of the lock migrates; in a transaction of its own, which must not wait for that lock.
        program = "from keiro.stores import migrate; migrate.MIGRATION_LOCK += 1; "
        python("-c", program + f"migrate.ensure_postgres({postgres_url!r})")
        other.execute("SELECT pg_advisory_unlock(%s)", [migrate.MIGRATION_LOCK])

        late.result()

    assert Inventory(PostgresDatabase(postgres_url)).keys == KEYS


# Later revisions


@pytest.fixture
def at_first_revision(empty: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database as the first revision leaves it."""
    with monkeypatch.context() as patched:
        patched.setattr(migrate, "REVISIONS", ("0001",))
        patched.setattr(migrate, "HEAD", "0001")
        empty.ensure()
    assert empty.rows("SELECT version_num FROM keiro_alembic_version") == [("0001",)]
    return empty


OLDER_TABLES = {
    "keiro_runs": RUN,
    "keiro_run_heads": {"run_key": 1, "version": 1, "epoch": 3},
    "keiro_journal": EVENT,
    "keiro_workers": {
        "worker_id": "w",
        "host": "h",
        "pid": 1,
        "process_started": "0",
        "started_at_ms": 1,
        "lease_expires_at_ms": 1,
    },
    "keiro_projection_tracking": {"name": "steps", "position": 7},
    "keiro_snapshots": {"originator_id": RUN["run_id"], "originator_version": 1, "topic": "t", "state": "{}"},
}
"""A row for each table of the first revision."""


def held(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of the tables of the first revision."""
    return {table: database.rows(f"SELECT {', '.join(row)} FROM {table}") for table, row in OLDER_TABLES.items()}


@pytest.fixture
def in_use(at_first_revision: Database) -> Database:
    """A database of the first revision that holds data."""
    for table, row in OLDER_TABLES.items():
        at_first_revision.insert(table, row)
    return at_first_revision


def test_a_database_in_use_is_brought_up_to_date_with_all_it_holds(in_use: Database) -> None:
    before = held(in_use)
    with pytest.raises(MigrationRequired, match=f"is at revision 0001 and this keiro needs revision {migrate.HEAD}"):
        in_use.ensure("verify")

    in_use.ensure()

    found = Inventory(in_use)
    assert found.columns == sorted(COLUMNS if in_use.dialect == "postgresql" else map(on_sqlite, COLUMNS))
    assert (found.indexes, found.keys) == (INDEXES, KEYS)
    assert found.triggers == TRIGGERS[in_use.dialect]
    assert held(in_use) == before
    assert in_use.rows("SELECT handoff_run_id FROM keiro_runs") == [(None,)]
    in_use.insert("keiro_clock_deadlines", CLOCK)
    in_use.rows("DELETE FROM keiro_runs")
    assert in_use.rows("SELECT * FROM keiro_clock_deadlines") == []


CLOCK = {
    "flow_name": "order",
    "execution_id": RUN["run_id"],
    "clock_name": "sleep:1",
    "deferred_name": "sleep:1",
    "due_at_ms": 9,
}


def test_an_update_that_fails_half_way_leaves_the_database_as_it_was(in_use: Database) -> None:
    """R6."""
    # The last table of the second revision cannot be made: its name is taken.
    in_use.rows("CREATE VIEW keiro_workflow_children AS SELECT 1 AS one")
    before, rows = Inventory(in_use), held(in_use)

    with pytest.raises(StoreError, match="keiro_workflow_children"):
        in_use.ensure()

    assert vars(Inventory(in_use)) == vars(before) | {"_rows": in_use.rows}
    assert held(in_use) == rows
    assert in_use.rows("SELECT version_num FROM keiro_alembic_version") == [("0001",)]
    in_use.rows("DROP VIEW keiro_workflow_children")
    in_use.ensure()
    assert Inventory(in_use).keys == KEYS


def test_a_revision_made_from_the_template_runs(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "100% keiro"
    shutil.copytree(migrate.script_location(), scripts, ignore=shutil.ignore_patterns("__pycache__"))
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    made = ScriptDirectory.from_config(config).generate_revision("9000", "a note", head="head")
    assert made is not None
    path = Path(made.path)
    table = "keiro_notes" if database.dialect == "sqlite" else "keiro.keiro_notes"
    text = path.read_text().replace("statements: list[str] = []", f'statements = ["CREATE TABLE {table} (note TEXT)"]')
    path.write_text(text)
    before = migrate.HEAD
    monkeypatch.setattr(migrate, "REVISIONS", (*migrate.REVISIONS, "9000"))
    monkeypatch.setattr(migrate, "HEAD", "9000")
    monkeypatch.setattr(migrate, "script_location", lambda: scripts)

    with pytest.raises(MigrationRequired, match=f"is at revision {before} and this keiro needs revision 9000"):
        database.ensure("verify")
    database.insert("keiro_runs", RUN)
    database.ensure()

    assert database.rows("SELECT * FROM keiro_notes") == []
    assert database.rows("SELECT version_num FROM keiro_alembic_version") == [("9000",)]
    assert database.rows("SELECT count(*) FROM keiro_runs") == [(1,)]
    assert Inventory(database).triggers == TRIGGERS[database.dialect]


def test_an_installation_without_revisions_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(migrate, "__file__", str(tmp_path / "keiro" / "stores" / "migrate.py"))

    with pytest.raises(MigrationRequired, match="install keiro-durable again"):
        migrate.script_location()


def test_an_installed_package_has_its_revisions_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside, beside = tmp_path / "keiro" / "migrations", tmp_path / "migrations"
    for folder in (inside, beside):
        folder.mkdir(parents=True)
        (folder / "env.py").touch()
    monkeypatch.setattr(migrate, "__file__", str(tmp_path / "keiro" / "stores" / "migrate.py"))

    assert migrate.script_location() == inside


# What this machine cannot do


def test_too_old_an_sqlite_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))

    with pytest.raises(StoreUnavailable, match=r"needs 3\.38\.0"):
        migrate.ensure_sqlite(str(tmp_path / "runs.db"))


def test_a_file_system_without_wal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda _, **options: connect(":memory:", **options))

    with pytest.raises(StoreUnavailable, match=r"cannot be put in WAL mode.*local disk"):
        migrate.ensure_sqlite("runs.db")


def test_too_old_a_postgres_is_named(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    monkeypatch.setattr(migrate, "MIN_POSTGRES", 99)

    with pytest.raises(StoreUnavailable, match="keiro needs 99 or newer"):
        migrate.ensure_postgres(postgres_url)


def test_a_database_that_cannot_hold_every_text_is_refused(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(StoreUnavailable, match=r"LATIN1.*UTF8"):
                migrate.ensure_postgres(postgres_server.url("latin"))
        finally:
            admin.execute("DROP DATABASE latin")


def test_postgres_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(StoreUnavailable, match=r"keiro-durable\[postgres\]"):
        migrate.ensure_postgres("postgresql://127.0.0.1/runs")
