"""Runs the revisions on the connection that `keiro.stores.migrate` hands over, in the transaction it has
begun.

That one transaction holds everything, the version table included: a database is migrated whole or not at all.
"""

from __future__ import annotations

from alembic import context

from keiro.stores import ddl, migrate, schema

connection = context.config.attributes["connection"]

context.configure(
    connection=connection,
    target_metadata=schema.metadata,
    version_table=migrate.VERSION_TABLE,
    version_table_schema=ddl.SCHEMA if connection.dialect.name == "postgresql" else None,
)
context.run_migrations()
