"""Run parents: which run is below which others, in the order in which that was recorded.

The SQL stands here in full, as history; `keiro.stores.schema` says what the tables look like now.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    for statement in _statements(d):
        connection.exec_driver_sql(statement)


def _statements(d: ddl.Dialect) -> list[str]:
    parents, runs, journal = (d.table(name) for name in ("keiro_run_parents", "keiro_runs", "keiro_journal"))
    return [
        f"""CREATE TABLE {parents} (
    child_id {d.id} NOT NULL CHECK (length(child_id) > 0),
    parent_id {d.id} NOT NULL CHECK (length(parent_id) > 0),
    {d.integer("seq")} NOT NULL,
    PRIMARY KEY (child_id, parent_id)
)""",
        # Spawns that no event has numbered: each has the place of the child's first event in the journal. A rebuild
        # gives them the same, and what is numbered from now on comes after them.
        f"INSERT INTO {parents} (child_id, parent_id, seq)"
        f" SELECT r.run_id, r.parent_run_id, j.position FROM {runs} r"
        f" JOIN {journal} j ON j.run_key = r.run_key AND j.version = 1"
        " WHERE r.round_ordinal = 0 AND r.parent_run_id IS NOT NULL",
        f"CREATE INDEX keiro_run_parents_parent_idx ON {parents} (parent_id)",
        f"CREATE INDEX keiro_run_parents_first_idx ON {parents} (child_id, seq, parent_id)",
        f"CREATE INDEX keiro_run_parents_children_idx ON {parents} (parent_id, seq, child_id)",
        # The next number is one above the highest: without this it would be looked for in all rows.
        f"CREATE INDEX keiro_run_parents_seq_idx ON {parents} (seq)",
        # Whoever deletes a run, and however: an edge to a run that is not there would close cycles that are none.
        *d.trigger(
            "keiro_run_parents_gc",
            "AFTER DELETE",
            runs,
            [f"DELETE FROM {parents} WHERE child_id = OLD.run_id OR parent_id = OLD.run_id"],
        ),
    ]
