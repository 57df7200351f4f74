"""The listing of executions: rows that follow the journal, their indexes, and the numbers of their changes.

The SQL stands here in full, as history; `keiro.stores.schema` says what the tables look like now.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

FILTERS = ("status", "execution_flow", "execution_parent_id", "execution_lineage", "waiting_reason")


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    for statement in [*_tables(d), *_indexes(d), *_of_executions(d), *_of_runs(d), *_of_parents(d)]:
        connection.exec_driver_sql(statement)


def _tables(d: ddl.Dialect) -> list[str]:
    # Rows are looked up by their text key and nothing else: a second, hidden key would be in all indexes once more.
    keyed = " WITHOUT ROWID" if d.name == "sqlite" else ""
    executions, source = d.table("keiro_executions"), d.table("keiro_run_source")
    new_source = "lower(hex(randomblob(16)))" if d.name == "sqlite" else "replace(gen_random_uuid()::text, '-', '')"
    return [
        f"""CREATE TABLE {executions} (
    run_id {d.id} NOT NULL PRIMARY KEY,
    status TEXT NOT NULL CONSTRAINT keiro_executions_status_chk
        CHECK (status IN ('pending', 'running', 'suspended', 'completed', 'failed', 'cancelled')),
    execution_flow {d.id} NOT NULL,
    execution_parent_id {d.id},
    execution_lineage {d.id} NOT NULL,
    waiting_reason TEXT,
    {d.count("round_ordinal")} NOT NULL,
    version_tag TEXT,
    {d.count("attempts")} NOT NULL,
    {d.integer("created_at_ms")} NOT NULL,
    {d.integer("started_at_ms")},
    {d.integer("finished_at_ms")},
    {d.integer("next_attempt_at_ms")},
    {d.integer("wake_at_ms")},
    waiting_token {d.id},
    {d.integer("cancel_requested_at_ms")},
    {d.json("attributes_json")},
    {d.json("failure_json")}
){keyed}""",
        f"""CREATE TABLE {d.table("keiro_execution_attributes")} (
    run_id {d.id} NOT NULL REFERENCES {executions} (run_id) ON DELETE CASCADE,
    name {d.id} NOT NULL CHECK (length(name) > 0),
    value {d.id} NOT NULL,
    {d.integer("created_at_ms")} NOT NULL,
    PRIMARY KEY (run_id, name)
){keyed}""",
        f"""CREATE TABLE {d.table("keiro_execution_words")} (
    run_id {d.id} NOT NULL REFERENCES {executions} (run_id) ON DELETE CASCADE,
    word {d.id} NOT NULL CHECK (length(word) > 0),
    {d.integer("created_at_ms")} NOT NULL,
    PRIMARY KEY (run_id, word)
){keyed}""",
        f"""CREATE TABLE {d.table("keiro_execution_counts")} (
    execution_flow {d.id} NOT NULL,
    status TEXT NOT NULL,
    {d.integer("runs")} NOT NULL,
    PRIMARY KEY (execution_flow, status)
){keyed}""",
        # Runs whose row changed, or went, although their journal says nothing of it.
        f"""CREATE TABLE {d.table("keiro_execution_marks")} (
    mark {d.identity},
    run_id {d.id} NOT NULL
)""",
        f"""CREATE TABLE {source} (
    one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    source TEXT NOT NULL CHECK (length(source) = 32),
    {d.integer("revision")} NOT NULL
)""",
        f"INSERT INTO {source} (one, source, revision) VALUES (1, {new_source}, 0)",
        # No reference to the run: what is known of one that was deleted is that it was, and that stays.
        f"""CREATE TABLE {d.table("keiro_run_changes")} (
    run_id {d.id} NOT NULL PRIMARY KEY,
    {d.integer("revision", 1)} NOT NULL CONSTRAINT keiro_run_changes_revision_key UNIQUE,
    deleted BOOLEAN NOT NULL DEFAULT false CHECK (deleted IN (false, true))
)""",
    ]


def _indexes(d: ddl.Dialect) -> list[str]:
    executions = d.table("keiro_executions")
    # Every subset of the filters has its own, with the order of the listing behind it: whatever is asked for is read
    # from where it begins, and nothing else.
    listing = [
        f"CREATE INDEX keiro_executions_listing_{mask} ON {executions}"
        f" ({', '.join([*(name for n, name in enumerate(FILTERS) if mask & 1 << n), 'created_at_ms', 'run_id'])})"
        for mask in range(32)
    ]
    return [
        *listing,
        f"CREATE INDEX keiro_executions_round_page_idx ON {executions} (execution_lineage, round_ordinal, run_id)",
        f"CREATE INDEX keiro_execution_attributes_idx ON {d.table('keiro_execution_attributes')}"
        " (name, value, created_at_ms, run_id)",
        f"CREATE INDEX keiro_execution_words_idx ON {d.table('keiro_execution_words')} (word, created_at_ms, run_id)",
    ]


def _of_executions(d: ddl.Dialect) -> list[str]:
    return d.trigger(
        "keiro_executions_creation_immutable",
        "BEFORE UPDATE OF run_id, created_at_ms",
        d.table("keiro_executions"),
        [d.refuse("run_id and created_at_ms of an execution never change: they are its place in the listing")],
        when="NEW.run_id <> OLD.run_id OR NEW.created_at_ms <> OLD.created_at_ms",
    )


def _of_runs(d: ddl.Dialect) -> list[str]:
    runs, marks = d.table("keiro_runs"), d.table("keiro_execution_marks")
    # What an event of the run itself comes with every time is found by that event, and costs the writer nothing here:
    # how a run ends, is parked, and is woken.
    told = (
        "(OLD.status = 'running' AND NEW.status NOT IN ('running', 'pending'))"
        " OR (OLD.status = 'suspended' AND NEW.status = 'pending')"
    )
    shown = (
        "status", "parent_run_id", "lineage_id", "round_ordinal", "workflow", "version_tag", "attempts",
        "started_at_ms", "finished_at_ms", "next_attempt_at_ms", "wake_at_ms", "waiting_reason", "waiting_token",
        "cancel_requested_at_ms", "attributes_json",
    )  # fmt: skip
    differs = "IS NOT" if d.name == "sqlite" else "IS DISTINCT FROM"
    changed = " OR ".join(f"OLD.{name} {differs} NEW.{name}" for name in shown)
    deleted = d.trigger(
        "keiro_runs_mark_deleted", "AFTER DELETE", runs, [f"INSERT INTO {marks} (run_id) VALUES (OLD.run_id)"]
    )
    mark = f"INSERT INTO {marks} (run_id) VALUES (NEW.run_id)"
    if d.name == "sqlite":
        return [
            *deleted,
            *d.trigger("keiro_runs_mark", "AFTER UPDATE", runs, [mark], when=f"NOT ({told}) AND ({changed})"),
        ]
    return [
        *deleted,
        f"CREATE FUNCTION {ddl.SCHEMA}.keiro_runs_mark() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {mark}; RETURN NULL; END $$",
        # The condition stands outside the function, which is not called then.
        f"CREATE TRIGGER keiro_runs_mark AFTER UPDATE ON {runs} FOR EACH ROW WHEN (NOT ({told}) AND ({changed}))"
        f" EXECUTE FUNCTION {ddl.SCHEMA}.keiro_runs_mark()",
    ]


def _of_parents(d: ddl.Dialect) -> list[str]:
    parents, runs, marks = (d.table(f"keiro_{name}") for name in ("run_parents", "runs", "execution_marks"))
    # A run that was spawned is listed for its start, with its parent: only other edges are marked.
    spawned = f"SELECT 1 FROM {runs} WHERE run_id = NEW.child_id AND parent_run_id IS NOT NULL"
    added = f"INSERT INTO {marks} (run_id) SELECT NEW.child_id WHERE NOT EXISTS ({spawned})"
    removed = f"INSERT INTO {marks} (run_id) VALUES (OLD.child_id)"
    return [
        *d.trigger("keiro_run_parents_mark_inserted", "AFTER INSERT", parents, [added]),
        *d.trigger("keiro_run_parents_mark_updated", "AFTER UPDATE", parents, [removed, added]),
        *d.trigger("keiro_run_parents_mark_deleted", "AFTER DELETE", parents, [removed]),
    ]
