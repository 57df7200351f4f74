"""What plans of actions keep beside the journal: what their inputs were, which merges they decided on, and the edges
that selection suspects.

The SQL stands here in full, as history; `keiro.stores.schema` says what the tables look like now.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

LEGACY, HEADS, GENERATIONS = (
    "keiro_plan_input_legacy_runs",
    "keiro_plan_input_heads",
    "keiro_plan_input_generations",
)
INTENTS, COMPLETIONS = "keiro_plan_merge_intents", "keiro_plan_merge_completions"


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    for statement in [*_tables(d), _backfill(d), *_triggers(d)]:
        connection.exec_driver_sql(statement)


def _tables(d: ddl.Dialect) -> list[str]:
    run = f"REFERENCES {d.table('keiro_runs')} (run_id) ON DELETE CASCADE"
    return [
        # Of no run: what was learned outlives the runs it was learned from.
        f"""CREATE TABLE {d.table("keiro_selection_suspected_edges")} (
    {d.named("scope")} NOT NULL,
    {d.named("affects")} NOT NULL,
    {d.real("confidence", 0, 1)} NOT NULL,
    {d.integer("valid_from_ms")} NOT NULL,
    {d.json("evidence_json")} NOT NULL,
    PRIMARY KEY (scope, affects)
)""",
        f"""CREATE TABLE {d.table(LEGACY)} (
    run_id {d.id} NOT NULL PRIMARY KEY {run}
)""",
        # Without an environment, or a version of merges, nobody knows what the head was observed under: NULL is what
        # can be said of it, and it stays.
        f"""CREATE TABLE {d.table(HEADS)} (
    run_id {d.id} NOT NULL {run},
    {d.named("plan_id")} NOT NULL,
    {d.named("base_digest")} NOT NULL,
    {d.integer("generation")} NOT NULL,
    {d.named("environment_digest")},
    merge_state_version {d.bigint} CHECK (merge_state_version = 1),
    PRIMARY KEY (run_id, plan_id)
)""",
        f"CREATE UNIQUE INDEX keiro_plan_input_heads_run_idx ON {d.table(HEADS)} (run_id)",
        f"""CREATE TABLE {d.table(GENERATIONS)} (
    run_id {d.id} NOT NULL {run},
    {d.named("plan_id")} NOT NULL,
    {d.integer("generation")} NOT NULL,
    {d.json("snapshot_json")} NOT NULL,
    {d.digest("checksum")} NOT NULL,
    PRIMARY KEY (run_id, plan_id, generation)
)""",
        f"""CREATE TABLE {d.table(INTENTS)} (
    run_id {d.id} NOT NULL {run},
    {d.named("stopped_node_id")} NOT NULL,
    {d.json("intent_json")} NOT NULL,
    {d.digest("checksum")} NOT NULL,
    PRIMARY KEY (run_id, stopped_node_id)
)""",
        f"""CREATE TABLE {d.table(COMPLETIONS)} (
    run_id {d.id} NOT NULL {run},
    {d.named("stopped_node_id")} NOT NULL,
    {d.integer("generation", 1)} NOT NULL,
    {d.named("merge_node_id")} NOT NULL,
    {d.json("completion_json")} NOT NULL,
    {d.digest("checksum")} NOT NULL,
    PRIMARY KEY (run_id, stopped_node_id),
    UNIQUE (run_id, generation),
    UNIQUE (run_id, merge_node_id),
    FOREIGN KEY (run_id, stopped_node_id) REFERENCES {d.table(INTENTS)} (run_id, stopped_node_id) ON DELETE CASCADE
)""",
    ]


def _backfill(d: ddl.Dialect) -> str:
    # The steps of these runs may have changed the files that a plan would observe, so what the files were can no longer
    # be found out. Of a run that was being driven the journal does not tell the step under way.
    return f"""INSERT INTO {d.table(LEGACY)} (run_id) SELECT r.run_id FROM {d.table("keiro_runs")} r
    WHERE (r.started_at_ms IS NOT NULL AND r.status IN ('pending', 'running'))
    OR EXISTS (SELECT 1 FROM {d.table("keiro_journal")} j WHERE j.run_key = r.run_key
        AND j.topic IN ('StepRecorded', 'AttemptStarted', 'AttemptFailed'))"""


def _triggers(d: ddl.Dialect) -> list[str]:
    heads = d.table(HEADS)
    inputs, merges = "plan inputs belong to their run: they go with it", "merges belong to their run: they go with it"
    # By its rowid an update could take the place of another run's head (UPDATE OR REPLACE).
    fixed = ["run_id", "plan_id", "base_digest", *(["rowid"] if d.name == "sqlite" else [])]
    moved = " OR ".join(d.differ(f"NEW.{column}", f"OLD.{column}") for column in fixed)
    statements = [
        *ddl.unchanged(d, LEGACY, "that the inputs of a run are unknown never changes"),
        *ddl.unchanged(d, GENERATIONS, "a generation of plan inputs never changes"),
        *ddl.unchanged(d, INTENTS, "the intent of a merge never changes"),
        *ddl.unchanged(d, COMPLETIONS, "the completion of a merge never changes"),
        *ddl.kept_with_run(d, LEGACY, [("run_id",)], inputs),
        *ddl.kept_with_run(d, HEADS, [("run_id",)], inputs),
        *ddl.kept_with_run(d, GENERATIONS, [("run_id", "plan_id", "generation")], inputs),
        *ddl.kept_with_run(d, INTENTS, [("run_id", "stopped_node_id")], merges),
        *ddl.kept_with_run(
            d,
            COMPLETIONS,
            [("run_id", "stopped_node_id"), ("run_id", "generation"), ("run_id", "merge_node_id")],
            merges,
        ),
        *d.trigger(
            "keiro_plan_input_heads_forward_only",
            "BEFORE UPDATE",
            heads,
            [d.refuse("the head of plan inputs goes forward by one generation and changes in nothing else")],
            when=f"{moved} OR {d.differ('NEW.generation', 'OLD.generation + 1')}",
        ),
        *d.trigger(
            "keiro_plan_input_heads_environment_required",
            "BEFORE INSERT",
            heads,
            [d.refuse("the head of plan inputs names the environment it was observed in")],
            when="NEW.environment_digest IS NULL",
        ),
    ]
    for name, column in (("environment", "environment_digest"), ("merge_version", "merge_state_version")):
        statements += d.trigger(
            f"keiro_plan_input_heads_{name}_immutable",
            "BEFORE UPDATE",
            heads,
            [d.refuse(f"the {column} of plan inputs never changes")],
            when=d.differ(f"NEW.{column}", f"OLD.{column}"),
        )
    if d.name == "sqlite":
        # A client that does not switch foreign keys on deletes no more than the run. A later run of the same key has
        # the same id: it would be held to what the deleted one observed and decided.
        tables = (LEGACY, HEADS, GENERATIONS, COMPLETIONS, INTENTS)
        statements += d.trigger(
            "keiro_runs_forget_plans",
            "AFTER DELETE",
            d.table("keiro_runs"),
            [f"DELETE FROM {d.table(name)} WHERE run_id = OLD.run_id" for name in tables],
        )
    return statements
