"""${message}

Additive only: SQLite cannot alter a table in place, and Alembic's batch mode would make it anew without its triggers.
"""

from __future__ import annotations

from alembic import op

from keiro.stores import ddl

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    connection = op.get_bind()
    d = ddl.dialect(connection.dialect.name)
    statements: list[str] = []
    for statement in statements:
        connection.exec_driver_sql(statement)
