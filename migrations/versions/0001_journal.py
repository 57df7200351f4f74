"""The journal, the rows of a run, workers, projection tracking and snapshots.

The SQL stands here in full, as history; `keiro.stores.schema` says what the tables look like now.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    for statement in [*_tables(d), *_indexes(d), *_triggers(d)]:
        connection.exec_driver_sql(statement)


def _tables(d: ddl.Dialect) -> list[str]:
    return [
        f"""CREATE TABLE {d.table("keiro_runs")} (
    run_key {d.identity},
    run_id {d.id} NOT NULL CONSTRAINT keiro_runs_run_id_key UNIQUE,
    workflow {d.id} NOT NULL,
    key {d.id} NOT NULL,
    status TEXT NOT NULL CONSTRAINT keiro_runs_status_chk
        CHECK (status IN ('pending', 'running', 'suspended', 'completed', 'failed', 'cancelled')),
    lineage_id {d.id} NOT NULL,
    {d.count("round_ordinal")} NOT NULL DEFAULT 0,
    parent_run_id {d.id} CONSTRAINT keiro_runs_parent_fkey REFERENCES {d.table("keiro_runs")} (run_id),
    on_cancel TEXT CONSTRAINT keiro_runs_on_cancel_chk CHECK (on_cancel IN ('cancel', 'detach')),
    version_tag TEXT,
    {d.json("attributes_json")},
    {d.json("input_json")} NOT NULL,
    {d.json("result_json")},
    {d.json("failure_json")},
    {d.count("attempts")} NOT NULL DEFAULT 0,
    {d.integer("created_at_ms")} NOT NULL,
    {d.integer("started_at_ms")},
    {d.integer("finished_at_ms")},
    {d.integer("next_attempt_at_ms")},
    {d.integer("wake_at_ms")},
    waiting_reason TEXT,
    waiting_token {d.id},
    {d.integer("deadline_at_ms")},
    {d.integer("cancel_requested_at_ms")},
    CONSTRAINT keiro_runs_finished_chk
        CHECK ((finished_at_ms IS NOT NULL) = (status IN ('completed', 'failed', 'cancelled'))),
    CONSTRAINT keiro_runs_waiting_chk
        CHECK (waiting_reason IS NOT NULL OR (wake_at_ms IS NULL AND waiting_token IS NULL))
)""",
        # The only row a step touches: no foreign key, and room on its page for the new version (a HOT
        # update). Vacuum comes early, because a fifth of a large table, the default, is many dead rows to
        # step over.
        f"""CREATE TABLE {d.table("keiro_run_heads")} (
    run_key {d.bigint} NOT NULL PRIMARY KEY,
    {d.count("version")} NOT NULL,
    {d.integer("owner", 1)},
    {d.integer("epoch")} NOT NULL DEFAULT 0
){d.storage(fillfactor=50, autovacuum_vacuum_scale_factor=0.01, autovacuum_vacuum_threshold=500)}""",
        # Event ids derive from the run's identity, so what is unique in a run is unique in the store. An
        # index over the ids of all runs would dirty a page of its own for every event.
        f"""CREATE TABLE {d.table("keiro_journal")} (
    position {d.identity} CONSTRAINT keiro_journal_position_chk CHECK (position > 0),
    {d.integer("run_key", 1)} NOT NULL,
    {d.count("version", 1)} NOT NULL,
    {d.uuid("event_id")} NOT NULL,
    topic TEXT NOT NULL,
    {d.text("payload")} NOT NULL,
    {d.integer("recorded_at_ms")} NOT NULL,
    CONSTRAINT keiro_journal_version_key UNIQUE (run_key, version),
    CONSTRAINT keiro_journal_event_key UNIQUE (run_key, event_id)
)""",
        f"""CREATE TABLE {d.table("keiro_workers")} (
    worker_key {d.identity},
    worker_id {d.id} NOT NULL CONSTRAINT keiro_workers_worker_id_key UNIQUE,
    host TEXT NOT NULL,
    {d.integer("pid")} NOT NULL,
    process_started TEXT NOT NULL,
    address TEXT,
    {d.integer("started_at_ms")} NOT NULL,
    {d.integer("lease_expires_at_ms")} NOT NULL
)""",
        f"""CREATE TABLE {d.table("keiro_projection_tracking")} (
    name {d.id} NOT NULL PRIMARY KEY,
    {d.integer("position")} NOT NULL
)""",
        f"""CREATE TABLE {d.table("keiro_snapshots")} (
    originator_id {d.id} NOT NULL,
    {d.count("originator_version")} NOT NULL,
    topic TEXT NOT NULL,
    {d.json("state")} NOT NULL,
    PRIMARY KEY (originator_id, originator_version)
)""",
    ]


def _indexes(d: ddl.Dialect) -> list[str]:
    runs, heads, workers = d.table("keiro_runs"), d.table("keiro_run_heads"), d.table("keiro_workers")
    return [
        f"CREATE INDEX keiro_runs_pending_idx ON {runs} (workflow, run_key) WHERE status = 'pending'",
        f"CREATE INDEX keiro_runs_wake_idx ON {runs} (wake_at_ms, run_key)"
        " WHERE status = 'suspended' AND wake_at_ms IS NOT NULL",
        f"CREATE INDEX keiro_runs_parent_idx ON {runs} (parent_run_id) WHERE parent_run_id IS NOT NULL",
        f"CREATE UNIQUE INDEX keiro_runs_lineage_idx ON {runs} (lineage_id, round_ordinal) WHERE round_ordinal > 0",
        f"CREATE INDEX keiro_run_heads_owner_idx ON {heads} (owner) WHERE owner IS NOT NULL",
        f"CREATE INDEX keiro_workers_lease_idx ON {workers} (lease_expires_at_ms)",
    ]


def _triggers(d: ddl.Dialect) -> list[str]:
    runs, heads, journal = d.table("keiro_runs"), d.table("keiro_run_heads"), d.table("keiro_journal")
    snapshots = d.table("keiro_snapshots")
    append_only = d.refuse("the journal is append-only: an event is never changed")
    statements = [
        *d.trigger(
            "keiro_runs_identity",
            "BEFORE UPDATE OF run_key, run_id, created_at_ms",
            runs,
            [d.refuse("run_key, run_id and created_at_ms of a run never change")],
            when="NEW.run_key <> OLD.run_key OR NEW.run_id <> OLD.run_id OR NEW.created_at_ms <> OLD.created_at_ms",
        ),
        # A snapshot that outlived its run would be taken for the state of the next run with the same id.
        *d.trigger(
            "keiro_runs_forget",
            "AFTER DELETE",
            runs,
            [
                f"DELETE FROM {heads} WHERE run_key = OLD.run_key",
                f"DELETE FROM {journal} WHERE run_key = OLD.run_key",
                f"DELETE FROM {snapshots} WHERE originator_id = OLD.run_id",
            ],
        ),
        *d.trigger("keiro_journal_no_update", "BEFORE UPDATE", journal, [append_only]),
        *d.trigger(
            "keiro_journal_no_delete",
            "BEFORE DELETE",
            journal,
            [d.refuse("the journal is append-only: events go only with their run, delete that")],
            when=f"EXISTS (SELECT 1 FROM {runs} WHERE run_key = OLD.run_key)",
        ),
    ]
    if d.name == "sqlite":
        # INSERT OR REPLACE deletes the rows in its way, and fires their delete triggers only on connections
        # with recursive_triggers on. So an insert that meets a row is refused before. NEW.position is -1
        # unless the statement gives one, and it must not: positions are the database's to give, as on
        # Postgres.
        statements += d.trigger(
            "keiro_journal_no_replace",
            "BEFORE INSERT",
            journal,
            [append_only],
            when=f"NEW.position > 0 OR EXISTS (SELECT 1 FROM {journal} WHERE run_key = NEW.run_key"
            f" AND version = NEW.version) OR EXISTS (SELECT 1 FROM {journal} WHERE run_key = NEW.run_key"
            " AND event_id = NEW.event_id)",
        )
    else:
        # TRUNCATE fires no row triggers: it would empty the journal, or leave one without runs.
        for name, table in (("keiro_runs", runs), ("keiro_journal", journal)):
            statements += d.trigger(
                f"{name}_no_truncate",
                "BEFORE TRUNCATE",
                table,
                [d.refuse(f"{name} cannot be truncated: delete runs")],
            )
    return statements
