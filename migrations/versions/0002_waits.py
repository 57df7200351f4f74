"""What runs wait for: deferred completions, clocks, children; and the round a completed one has handed off to.

The SQL stands here in full, as history; `keiro.stores.schema` says what the tables look like now.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    for statement in [*_tables(d), *_indexes(d), *_triggers(d)]:
        connection.exec_driver_sql(statement)


def _tables(d: ddl.Dialect) -> list[str]:
    runs = d.table("keiro_runs")
    return [
        f"ALTER TABLE {runs} ADD COLUMN handoff_run_id {d.id}",
        f"ALTER TABLE {runs} ADD COLUMN {d.count('priority', -(2**31 - 1))} NOT NULL DEFAULT 0",
        f"ALTER TABLE {runs} ADD COLUMN {d.integer('cleanup_ms')}",
        f"ALTER TABLE {d.table('keiro_run_heads')} ADD COLUMN queue {d.id}",
        f"""CREATE TABLE {d.table("keiro_queue_starts")} (
    queue {d.id} NOT NULL CHECK (length(queue) > 0),
    {d.integer("at_ms")} NOT NULL,
    {d.count("started", 1)} NOT NULL,
    PRIMARY KEY (queue, at_ms)
)""",
        f"""CREATE TABLE {d.table("keiro_deferred_completions")} (
    flow_name {d.id} NOT NULL CHECK (length(flow_name) > 0),
    execution_id {d.id} NOT NULL CHECK (length(execution_id) > 0) REFERENCES {runs} (run_id),
    deferred_name {d.id} NOT NULL CHECK (length(deferred_name) > 0),
    {d.json("exit_json")} NOT NULL,
    {d.json("metadata_json")},
    {d.integer("completed_at_ms")} NOT NULL,
    {d.integer("consumed_at_ms")},
    PRIMARY KEY (flow_name, execution_id, deferred_name)
)""",
        f"""CREATE TABLE {d.table("keiro_clock_deadlines")} (
    flow_name {d.id} NOT NULL CHECK (length(flow_name) > 0),
    execution_id {d.id} NOT NULL CHECK (length(execution_id) > 0) REFERENCES {runs} (run_id),
    clock_name {d.id} NOT NULL CHECK (length(clock_name) > 0),
    deferred_name {d.id} NOT NULL CHECK (length(deferred_name) > 0),
    {d.integer("due_at_ms")} NOT NULL,
    {d.integer("completed_at_ms")},
    PRIMARY KEY (flow_name, execution_id, clock_name)
)""",
        f"""CREATE TABLE {d.table("keiro_workflow_children")} (
    child_id {d.id} NOT NULL,
    child_name {d.id} NOT NULL,
    parent_id {d.id} NOT NULL,
    parent_name {d.id} NOT NULL,
    await_step TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'running' CONSTRAINT keiro_workflow_children_status_chk
        CHECK (status IN ('running', 'completed', 'cancelled', 'failed')),
    {d.jsonb("result")},
    failed BOOLEAN NOT NULL DEFAULT false CHECK (failed IN (false, true)),
    failure_reason TEXT,
    {d.timestamp("created_at")} NOT NULL DEFAULT {d.now},
    {d.timestamp("updated_at")} NOT NULL DEFAULT {d.now},
    {d.timestamp("completed_at")},
    PRIMARY KEY (child_id, child_name)
)""",
        # What a replay would read of the journal, for a stretch of a long run: it may be missing.
        f"""CREATE TABLE {d.table("keiro_step_maps")} (
    {d.integer("run_key", 1)} NOT NULL,
    {d.count("until_version", 1)} NOT NULL,
    {d.json("state")} NOT NULL,
    PRIMARY KEY (run_key, until_version)
)""",
    ]


def _indexes(d: ddl.Dialect) -> list[str]:
    clocks, children = d.table("keiro_clock_deadlines"), d.table("keiro_workflow_children")
    deferreds = d.table("keiro_deferred_completions")
    runs = d.table("keiro_runs")
    index = "DROP INDEX keiro.{}" if d.name == "postgresql" else "DROP INDEX {}"
    return [
        # Three queues for each workflow: what may be driven at once, what is paced, what is parked and has a time.
        index.format("keiro_runs_pending_idx"),
        index.format("keiro_runs_wake_idx"),
        f"CREATE INDEX keiro_runs_pending_idx ON {runs} (workflow, priority, created_at_ms, run_key)"
        " WHERE status = 'pending' AND next_attempt_at_ms IS NULL",
        f"CREATE INDEX keiro_runs_paced_idx ON {runs} (workflow, next_attempt_at_ms)"
        " WHERE status = 'pending' AND next_attempt_at_ms IS NOT NULL",
        f"CREATE INDEX keiro_runs_wake_idx ON {runs} (workflow, wake_at_ms)"
        " WHERE status = 'suspended' AND wake_at_ms IS NOT NULL",
        # The same by version, of runs that have one: a pinned workflow's queue is its version's alone.
        f"CREATE INDEX keiro_runs_pending_version_idx ON {runs}"
        " (workflow, version_tag, priority, created_at_ms, run_key)"
        " WHERE status = 'pending' AND next_attempt_at_ms IS NULL AND version_tag IS NOT NULL",
        f"CREATE INDEX keiro_runs_paced_version_idx ON {runs} (workflow, version_tag, next_attempt_at_ms)"
        " WHERE status = 'pending' AND next_attempt_at_ms IS NOT NULL AND version_tag IS NOT NULL",
        f"CREATE INDEX keiro_runs_wake_version_idx ON {runs} (workflow, version_tag, wake_at_ms)"
        " WHERE status = 'suspended' AND wake_at_ms IS NOT NULL AND version_tag IS NOT NULL",
        # What has ended, in the order of ends: retention begins with the oldest and looks at nothing that is younger.
        f"CREATE INDEX keiro_runs_finished_idx ON {runs} (finished_at_ms, run_key)"
        " WHERE finished_at_ms IS NOT NULL AND handoff_run_id IS NULL",
        # Runs that are asked to end and have not: few, for a while.
        f"CREATE INDEX keiro_runs_asked_idx ON {runs} (cancel_requested_at_ms)"
        " WHERE cancel_requested_at_ms IS NOT NULL AND finished_at_ms IS NULL",
        f"CREATE INDEX keiro_run_heads_queue_idx ON {d.table('keiro_run_heads')} (queue, owner)"
        " WHERE queue IS NOT NULL AND owner IS NOT NULL",
        f"CREATE INDEX keiro_clock_deadlines_pending_idx ON {clocks} (completed_at_ms, due_at_ms)",
        f"CREATE INDEX keiro_clock_deadlines_execution_idx ON {clocks} (execution_id)",
        f"CREATE INDEX keiro_deferred_completions_execution_idx ON {deferreds} (execution_id)",
        f"CREATE INDEX keiro_workflow_children_parent_idx ON {children} (parent_id, parent_name)",
        f"CREATE INDEX keiro_workflow_children_running_idx ON {children} (status) WHERE status = 'running'",
    ]


def _triggers(d: ddl.Dialect) -> list[str]:
    runs, children = d.table("keiro_runs"), d.table("keiro_workflow_children")
    clocks, deferreds = d.table("keiro_clock_deadlines"), d.table("keiro_deferred_completions")
    maps = d.table("keiro_step_maps")
    own = "child_id = OLD.key AND child_name = OLD.workflow"
    theirs = "parent_id = OLD.key AND parent_name = OLD.workflow"
    return [
        # Before the run goes, because these refer to it.
        *d.trigger(
            "keiro_runs_forget_waits",
            "BEFORE DELETE",
            runs,
            [
                f"DELETE FROM {clocks} WHERE execution_id = OLD.run_id",
                f"DELETE FROM {deferreds} WHERE execution_id = OLD.run_id",
                f"DELETE FROM {maps} WHERE run_key = OLD.run_key",
            ],
        ),
        # Children are of a lineage: they go with its first round.
        *d.trigger(
            "keiro_runs_forget_children",
            "AFTER DELETE",
            runs,
            [f"DELETE FROM {children} WHERE ({own}) OR ({theirs})"],
            when="OLD.round_ordinal = 0",
        ),
    ]
