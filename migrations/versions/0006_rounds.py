"""Old rounds of runs that go on: found in the order of their ends.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    """Create the index. See `keiro.stores.schema` for what it is for."""
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    # Retention begins with the oldest, and looks at nothing that is younger. A run that never rotates is not in it.
    connection.exec_driver_sql(
        f"CREATE INDEX keiro_runs_handed_off_idx ON {d.table('keiro_runs')} (finished_at_ms, run_key)"
        " WHERE handoff_run_id IS NOT NULL AND round_ordinal > 0"
    )
