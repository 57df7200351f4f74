"""The tables as they are now, as SQLAlchemy knows them, for queries that are not the hot append.

Keys, types and indexes stand here; checks, triggers and storage parameters only in the revisions. A test
compares these tables with what the revisions made. SQLite has no schemas: see `EXECUTION_OPTIONS`.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from sqlalchemy import (
    REAL,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from keiro.stores import ddl
from keiro.stores.ddl import SCHEMA

metadata: Final = MetaData(schema=SCHEMA)

EXECUTION_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "sqlite": {"schema_translate_map": {SCHEMA: None}},
    "postgresql": {},
}
"""What an SQLAlchemy engine or connection of each dialect needs, so that these tables are found."""


class EventId(TypeDecorator[uuid.UUID]):
    """A `uuid.UUID`: 16 bytes on SQLite, uuid on Postgres."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type of the column in this dialect."""
        return dialect.type_descriptor(Uuid() if dialect.name == "postgresql" else LargeBinary(16))

    def process_bind_param(self, value: uuid.UUID | None, dialect: Dialect) -> Any:
        """To the driver."""
        return value if value is None or dialect.name == "postgresql" else value.bytes

    def process_result_value(self, value: Any, dialect: Dialect) -> uuid.UUID | None:
        """From the driver."""
        return value if value is None or dialect.name == "postgresql" else uuid.UUID(bytes=value)


class _Now(ColumnElement[str]):
    """The time now, as the default of a column."""

    inherit_cache = True


@compiles(_Now)
def _now(element: _Now, compiler: Any, **options: Any) -> str:
    return ddl.dialect(compiler.dialect.name).now


# A key that counts up must be exactly INTEGER on SQLite.
_BIGINT: Final = BigInteger().with_variant(Integer(), "sqlite")
_TIMESTAMP: Final = Text().with_variant(DateTime(timezone=True), "postgresql")
# Ids sort and compare by their bytes on every store, so that cursors mean the same.
_ID: Final = Text().with_variant(Text(collation="C"), "postgresql")


LISTING_FILTERS: Final = ("status", "execution_flow", "execution_parent_id", "execution_lineage", "waiting_reason")
"""The columns that the listing is filtered by, in the order of its indexes."""
_REAL: Final[TypeEngine[float]] = Double().with_variant(REAL(), "sqlite")


def _key(name: str) -> Column[int]:
    return Column(name, _BIGINT, Identity(always=True, cache=1), primary_key=True)


def _of_run() -> Column[str]:
    """The run that a row is of, and goes with."""
    return Column("run_id", _ID, ForeignKey(f"{SCHEMA}.keiro_runs.run_id", ondelete="CASCADE"), primary_key=True)


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


runs: Final = Table(
    "keiro_runs",
    metadata,
    _key("run_key"),
    Column("run_id", _ID, nullable=False),
    Column("workflow", _ID, nullable=False),
    Column("key", _ID, nullable=False),
    Column("status", Text, nullable=False),
    Column("lineage_id", _ID, nullable=False),
    Column("round_ordinal", Integer, nullable=False, server_default=text("0")),
    Column("parent_run_id", _ID, ForeignKey(f"{SCHEMA}.keiro_runs.run_id", name="keiro_runs_parent_fkey")),
    Column("on_cancel", Text),
    Column("version_tag", Text),
    Column("attributes_json", Text),
    Column("input_json", Text, nullable=False),
    Column("result_json", Text),
    Column("failure_json", Text),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("created_at_ms", _BIGINT, nullable=False),
    Column("started_at_ms", _BIGINT),
    Column("finished_at_ms", _BIGINT),
    Column("next_attempt_at_ms", _BIGINT),
    Column("wake_at_ms", _BIGINT),
    Column("waiting_reason", Text),
    Column("waiting_token", _ID),
    Column("deadline_at_ms", _BIGINT),
    Column("cancel_requested_at_ms", _BIGINT),
    Column("handoff_run_id", _ID),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("cleanup_ms", _BIGINT),
    UniqueConstraint("run_id", name="keiro_runs_run_id_key"),
    _partial(
        "keiro_runs_pending_idx",
        "workflow",
        "priority",
        "created_at_ms",
        "run_key",
        where="status = 'pending' AND next_attempt_at_ms IS NULL",
    ),
    _partial(
        "keiro_runs_paced_idx",
        "workflow",
        "next_attempt_at_ms",
        where="status = 'pending' AND next_attempt_at_ms IS NOT NULL",
    ),
    _partial(
        "keiro_runs_wake_idx",
        "workflow",
        "wake_at_ms",
        where="status = 'suspended' AND wake_at_ms IS NOT NULL",
    ),
    # Of runs with a version, once more for each version: what a pinned workflow asks for. Others are in none of them.
    _partial(
        "keiro_runs_pending_version_idx",
        "workflow",
        "version_tag",
        "priority",
        "created_at_ms",
        "run_key",
        where="status = 'pending' AND next_attempt_at_ms IS NULL AND version_tag IS NOT NULL",
    ),
    _partial(
        "keiro_runs_paced_version_idx",
        "workflow",
        "version_tag",
        "next_attempt_at_ms",
        where="status = 'pending' AND next_attempt_at_ms IS NOT NULL AND version_tag IS NOT NULL",
    ),
    _partial(
        "keiro_runs_wake_version_idx",
        "workflow",
        "version_tag",
        "wake_at_ms",
        where="status = 'suspended' AND wake_at_ms IS NOT NULL AND version_tag IS NOT NULL",
    ),
    _partial(
        "keiro_runs_finished_idx",
        "finished_at_ms",
        "run_key",
        where="finished_at_ms IS NOT NULL AND handoff_run_id IS NULL",
    ),
    _partial(
        "keiro_runs_handed_off_idx",
        "finished_at_ms",
        "run_key",
        where="handoff_run_id IS NOT NULL AND round_ordinal > 0",
    ),
    _partial(
        "keiro_runs_asked_idx",
        "cancel_requested_at_ms",
        where="cancel_requested_at_ms IS NOT NULL AND finished_at_ms IS NULL",
    ),
    _partial("keiro_runs_parent_idx", "parent_run_id", where="parent_run_id IS NOT NULL"),
    _partial("keiro_runs_lineage_idx", "lineage_id", "round_ordinal", where="round_ordinal > 0", unique=True),
    sqlite_autoincrement=True,
)
"""One row a run: what it is and how it stands. It changes with the state of the run, never for a step."""

run_heads: Final = Table(
    "keiro_run_heads",
    metadata,
    Column("run_key", _BIGINT, primary_key=True, autoincrement=False),
    Column("version", Integer, nullable=False),
    Column("owner", _BIGINT),
    Column("epoch", _BIGINT, nullable=False, server_default=text("0")),
    Column("queue", _ID),
    _partial("keiro_run_heads_owner_idx", "owner", where="owner IS NOT NULL"),
    _partial("keiro_run_heads_queue_idx", "queue", "owner", where="queue IS NOT NULL AND owner IS NOT NULL"),
)
"""The version of a run's newest event, and who may append: the worker `owner` in its `epoch`, which holds a slot of
`queue` as long."""

queue_starts: Final = Table(
    "keiro_queue_starts",
    metadata,
    Column("queue", _ID, primary_key=True),
    Column("at_ms", _BIGINT, primary_key=True, autoincrement=False),
    Column("started", Integer, nullable=False),
)
"""How many runs of a queue with a rate were first started when; what no rate counts any more goes."""

journal: Final = Table(
    "keiro_journal",
    metadata,
    _key("position"),
    Column("run_key", _BIGINT, nullable=False),
    Column("version", Integer, nullable=False),
    Column("event_id", EventId, nullable=False),
    Column("topic", Text, nullable=False),
    Column("payload", Text, nullable=False),
    Column("recorded_at_ms", _BIGINT, nullable=False),
    UniqueConstraint("run_key", "version", name="keiro_journal_version_key"),
    UniqueConstraint("run_key", "event_id", name="keiro_journal_event_key"),
    sqlite_autoincrement=True,
)
"""All events of all runs. Append-only: rows go only with their run."""

workers: Final = Table(
    "keiro_workers",
    metadata,
    _key("worker_key"),
    Column("worker_id", _ID, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", _BIGINT, nullable=False),
    Column("process_started", Text, nullable=False),
    Column("address", Text),
    Column("started_at_ms", _BIGINT, nullable=False),
    Column("lease_expires_at_ms", _BIGINT, nullable=False),
    UniqueConstraint("worker_id", name="keiro_workers_worker_id_key"),
    Index("keiro_workers_lease_idx", "lease_expires_at_ms"),
    sqlite_autoincrement=True,
)
"""The processes that drive runs, and until when each is taken for alive."""

projection_tracking: Final = Table(
    "keiro_projection_tracking",
    metadata,
    Column("name", _ID, primary_key=True),
    Column("position", _BIGINT, nullable=False),
)
"""How far each following projection has read the journal."""

snapshots: Final = Table(
    "keiro_snapshots",
    metadata,
    Column("originator_id", _ID, primary_key=True),
    Column("originator_version", Integer, primary_key=True, autoincrement=False),
    Column("topic", Text, nullable=False),
    Column("state", Text, nullable=False),
)
"""User state of a run at a version, as a repository takes it. Goes with its run."""

deferred_completions: Final = Table(
    "keiro_deferred_completions",
    metadata,
    Column("flow_name", _ID, primary_key=True),
    Column("execution_id", _ID, ForeignKey(f"{SCHEMA}.keiro_runs.run_id"), primary_key=True),
    Column("deferred_name", _ID, primary_key=True),
    Column("exit_json", Text, nullable=False),
    Column("metadata_json", Text),
    Column("completed_at_ms", _BIGINT, nullable=False),
    Column("consumed_at_ms", _BIGINT),
    Index("keiro_deferred_completions_execution_idx", "execution_id"),
)
"""What deferreds of a round were completed with."""

clock_deadlines: Final = Table(
    "keiro_clock_deadlines",
    metadata,
    Column("flow_name", _ID, primary_key=True),
    Column("execution_id", _ID, ForeignKey(f"{SCHEMA}.keiro_runs.run_id"), primary_key=True),
    Column("clock_name", _ID, primary_key=True),
    Column("deferred_name", _ID, nullable=False),
    Column("due_at_ms", _BIGINT, nullable=False),
    Column("completed_at_ms", _BIGINT),
    Index("keiro_clock_deadlines_pending_idx", "completed_at_ms", "due_at_ms"),
    Index("keiro_clock_deadlines_execution_idx", "execution_id"),
)
"""The clocks of a round: when each is due, and when it was done with."""

workflow_children: Final = Table(
    "keiro_workflow_children",
    metadata,
    Column("child_id", _ID, primary_key=True),
    Column("child_name", _ID, primary_key=True),
    Column("parent_id", _ID, nullable=False),
    Column("parent_name", _ID, nullable=False),
    Column("await_step", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'running'")),
    Column("result", Text().with_variant(JSONB(), "postgresql")),
    Column("failed", Boolean, nullable=False, server_default=text("false")),
    Column("failure_reason", Text),
    Column("created_at", _TIMESTAMP, nullable=False, server_default=_Now()),
    Column("updated_at", _TIMESTAMP, nullable=False, server_default=_Now()),
    Column("completed_at", _TIMESTAMP),
    Index("keiro_workflow_children_parent_idx", "parent_id", "parent_name"),
    _partial("keiro_workflow_children_running_idx", "status", where="status = 'running'"),
)
"""Which run has which other as a child, and how the child ended."""

run_parents: Final = Table(
    "keiro_run_parents",
    metadata,
    Column("child_id", _ID, primary_key=True),
    Column("parent_id", _ID, primary_key=True),
    Column("seq", _BIGINT, nullable=False),
    Index("keiro_run_parents_parent_idx", "parent_id"),
    Index("keiro_run_parents_first_idx", "child_id", "seq", "parent_id"),
    Index("keiro_run_parents_children_idx", "parent_id", "seq", "child_id"),
    Index("keiro_run_parents_seq_idx", "seq"),
)
"""Which lineage is below which others, by the run ids of their first rounds; `seq` counts the edges of the store."""

step_maps: Final = Table(
    "keiro_step_maps",
    metadata,
    Column("run_key", _BIGINT, primary_key=True, autoincrement=False),
    Column("until_version", Integer, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
)
"""Snapshots of the histories of long runs."""

executions: Final = Table(
    "keiro_executions",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("status", Text, nullable=False),
    Column("execution_flow", _ID, nullable=False),
    Column("execution_parent_id", _ID),
    Column("execution_lineage", _ID, nullable=False),
    Column("waiting_reason", Text),
    Column("round_ordinal", Integer, nullable=False),
    Column("version_tag", Text),
    Column("attempts", Integer, nullable=False),
    Column("created_at_ms", _BIGINT, nullable=False),
    Column("started_at_ms", _BIGINT),
    Column("finished_at_ms", _BIGINT),
    Column("next_attempt_at_ms", _BIGINT),
    Column("wake_at_ms", _BIGINT),
    Column("waiting_token", _ID),
    Column("cancel_requested_at_ms", _BIGINT),
    Column("attributes_json", Text),
    Column("failure_json", Text),
    *(
        Index(f"keiro_executions_listing_{mask}", *columns, "created_at_ms", "run_id")
        for mask in range(32)
        for columns in [[name for n, name in enumerate(LISTING_FILTERS) if mask & 1 << n]]
    ),
    Index("keiro_executions_round_page_idx", "execution_lineage", "round_ordinal", "run_id"),
    sqlite_with_rowid=False,
)
"""The listing: one row a run, which follows the journal and `keiro_runs`. Bit n of an index's name is filter n."""

execution_attributes: Final = Table(
    "keiro_execution_attributes",
    metadata,
    Column("run_id", _ID, ForeignKey(f"{SCHEMA}.keiro_executions.run_id", ondelete="CASCADE"), primary_key=True),
    Column("name", _ID, primary_key=True),
    Column("value", _ID, nullable=False),
    Column("created_at_ms", _BIGINT, nullable=False),
    Index("keiro_execution_attributes_idx", "name", "value", "created_at_ms", "run_id"),
    sqlite_with_rowid=False,
)
"""The attributes of listed runs, to find runs by them."""

execution_words: Final = Table(
    "keiro_execution_words",
    metadata,
    Column("run_id", _ID, ForeignKey(f"{SCHEMA}.keiro_executions.run_id", ondelete="CASCADE"), primary_key=True),
    Column("word", _ID, primary_key=True),
    Column("created_at_ms", _BIGINT, nullable=False),
    Index("keiro_execution_words_idx", "word", "created_at_ms", "run_id"),
    sqlite_with_rowid=False,
)
"""The words of the failures of listed runs, to find runs by them. None where payloads are encrypted."""

execution_counts: Final = Table(
    "keiro_execution_counts",
    metadata,
    Column("execution_flow", _ID, primary_key=True),
    Column("status", Text, primary_key=True),
    Column("runs", _BIGINT, nullable=False),
    sqlite_with_rowid=False,
)
"""How many listed runs of each workflow stand where."""

execution_marks: Final = Table(
    "keiro_execution_marks",
    metadata,
    _key("mark"),
    Column("run_id", _ID, nullable=False),
    sqlite_autoincrement=True,
)
"""Runs that the listing must look at although their journal says nothing new."""

run_source: Final = Table(
    "keiro_run_source",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("source", Text, nullable=False),
    Column("revision", _BIGINT, nullable=False),
)
"""Which database this is, and the number of the newest change of the listing."""

run_changes: Final = Table(
    "keiro_run_changes",
    metadata,
    Column("run_id", _ID, primary_key=True),
    Column("revision", _BIGINT, nullable=False),
    Column("deleted", Boolean, nullable=False, server_default=text("false")),
    UniqueConstraint("revision", name="keiro_run_changes_revision_key"),
)
"""The newest change of each run in the listing; of deleted ones for ever."""
suspected_edges: Final = Table(
    "keiro_selection_suspected_edges",
    metadata,
    Column("scope", _ID, primary_key=True),
    Column("affects", _ID, primary_key=True),
    Column("confidence", _REAL, nullable=False),
    Column("valid_from_ms", _BIGINT, nullable=False),
    Column("evidence_json", Text, nullable=False),
)
"""Which changed files are suspected of affecting what, and how strongly. Of no run: it outlives them."""

plan_input_legacy_runs: Final = Table("keiro_plan_input_legacy_runs", metadata, _of_run())
"""The runs whose steps ran before inputs of plans were observed: what their inputs were nobody knows."""

plan_input_heads: Final = Table(
    "keiro_plan_input_heads",
    metadata,
    _of_run(),
    Column("plan_id", _ID, primary_key=True),
    Column("base_digest", _ID, nullable=False),
    Column("generation", _BIGINT, nullable=False),
    Column("environment_digest", _ID),
    Column("merge_state_version", _BIGINT),
    Index("keiro_plan_input_heads_run_idx", "run_id", unique=True),
)
"""The one plan of a run, and its newest generation of inputs: it goes forward by one and changes in nothing else."""

plan_input_generations: Final = Table(
    "keiro_plan_input_generations",
    metadata,
    _of_run(),
    Column("plan_id", _ID, primary_key=True),
    Column("generation", _BIGINT, primary_key=True, autoincrement=False),
    Column("snapshot_json", Text, nullable=False),
    Column("checksum", Text, nullable=False),
)
"""What the inputs of a plan were when a generation of its actions began. `checksum` is of the very text beside it."""

plan_merge_intents: Final = Table(
    "keiro_plan_merge_intents",
    metadata,
    _of_run(),
    Column("stopped_node_id", _ID, primary_key=True),
    Column("intent_json", Text, nullable=False),
    Column("checksum", Text, nullable=False),
)
"""Actions that were stopped by a conflict, to be merged with those they conflict with."""

plan_merge_completions: Final = Table(
    "keiro_plan_merge_completions",
    metadata,
    _of_run(),
    Column("stopped_node_id", _ID, primary_key=True),
    Column("generation", _BIGINT, nullable=False),
    Column("merge_node_id", _ID, nullable=False),
    Column("completion_json", Text, nullable=False),
    Column("checksum", Text, nullable=False),
    UniqueConstraint("run_id", "generation"),
    UniqueConstraint("run_id", "merge_node_id"),
    ForeignKeyConstraint(
        ["run_id", "stopped_node_id"],
        [f"{SCHEMA}.keiro_plan_merge_intents.run_id", f"{SCHEMA}.keiro_plan_merge_intents.stopped_node_id"],
        ondelete="CASCADE",
    ),
)
"""The merges that were added to a plan, each as the generation it made."""
