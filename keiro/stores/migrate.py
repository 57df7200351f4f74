"""Brings a database to the schema this version of keiro needs, or says why that cannot be.

A database is migrated whole or not at all, by one process at a time, and never over something that is not
keiro's. One that is up to date is recognised with plain SQL: SQLAlchemy and Alembic are imported only to
upgrade.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from keiro.errors import MigrationRequired, StoreBusy, StoreUnavailable
from keiro.stores.ddl import SCHEMA
from keiro.stores.faults import is_busy, postgres_fault, postgres_target, sqlite_error, sqlite_fault

if TYPE_CHECKING:
    from psycopg import ConnectionInfo
    from sqlalchemy import Connection

Mode = Literal["migrate", "verify"]
"""What to do with a database that is behind: upgrade it, or raise `MigrationRequired`."""

REVISIONS: Final = ("0001", "0002", "0003", "0004", "0005", "0006")
"""The revisions this version knows, oldest first. A database at any other comes from a newer keiro."""

HEAD: Final[str] = REVISIONS[-1]
"""The revision this version of keiro needs."""

VERSION_TABLE: Final = "keiro_alembic_version"
"""Alembic's own table, under a name that leaves `alembic_version` to the application."""

MIN_SQLITE: Final = (3, 38, 0)
MIN_POSTGRES: Final = 15

MIGRATION_LOCK: Final = 0x6B6569726F4D
"""The key of the advisory lock that serialises migrators on Postgres."""


@dataclass(frozen=True)
class Current:
    """The database has the schema this version needs."""


@dataclass(frozen=True)
class Behind:
    """The database has nothing of keiro (`revision` None) or an older schema: it can be upgraded."""

    revision: str | None


@dataclass(frozen=True)
class Newer:
    """The database is at a revision this version does not know."""

    revision: str


@dataclass(frozen=True)
class Foreign:
    """There are keiro_* tables that no revision of keiro made, or their version is lost."""


State = Current | Behind | Newer | Foreign


def classify(revision: str | None, has_keiro_tables: bool) -> State:
    """What a database is, by the revision it names and whether it holds any `keiro_*` table."""
    if revision is None:
        return Foreign() if has_keiro_tables else Behind(None)
    if revision == HEAD:
        return Current()
    return Behind(revision) if revision in REVISIONS else Newer(revision)


@dataclass(frozen=True)
class Probe:
    """The SQL that shows where a database stands. `revision` can be read only where `VERSION_TABLE` is among
    the `tables`."""

    tables: str
    revision: str

    def state(self, rows: Callable[[str], Sequence[Any]]) -> State:
        """Classify the database that `rows` queries."""
        tables = {name for (name,) in rows(self.tables)}
        found = rows(self.revision) if VERSION_TABLE in tables else []
        return classify(found[0][0] if found else None, bool(tables))


SQLITE: Final = Probe(
    tables="SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB 'keiro_*'",
    revision=f"SELECT version_num FROM {VERSION_TABLE}",
)
# The catalog may be read without any right on the schema, and says the same to every role.
POSTGRES: Final = Probe(
    tables="SELECT relname::text FROM pg_catalog.pg_class WHERE relkind IN ('r', 'p')"
    " AND left(relname, 6) = 'keiro_'"
    f" AND relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = '{SCHEMA}')",
    revision=f"SELECT version_num FROM {SCHEMA}.{VERSION_TABLE}",
)


def must_upgrade(state: State, target: str, mode: Mode) -> bool:
    """Whether the database `target` (a URL without password) is to be upgraded now.

    Raises MigrationRequired where it cannot be used as it is and must not be changed.
    """
    match state:
        case Current():
            return False
        case Newer(revision):
            raise MigrationRequired(
                f"{target} was written by a newer keiro (revision {revision}, this one knows up to {HEAD}): "
                "install the newest keiro-durable. Nothing was changed."
            )
        case Foreign():
            raise MigrationRequired(
                f"{target} is not keiro's: it has keiro_* tables, but no revision in {VERSION_TABLE}. Use "
                "another database, or restore this one whole from its backup. Nothing was changed."
            )
        case Behind(revision) if mode == "verify":
            found = "has no tables of keiro" if revision is None else f"is at revision {revision}"
            raise MigrationRequired(
                f"{target} {found} and this keiro needs revision {HEAD}: run `keiro migrate --url {target}`, or "
                "open it once with Engine(..., migrate=True)."
            )
        case Behind():
            return True


def ensure_sqlite(path: str, *, mode: Mode = "migrate", timeout: float = 30.0) -> None:
    """Bring the SQLite file `path` up to date, creating it; with `verify` only check it.

    Blocks while another process migrates or locks the file, at most `timeout` seconds. After an upgrade the
    file is in WAL mode and the schema durable. Raises MigrationRequired, StoreBusy or StoreUnavailable.
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        needed = ".".join(map(str, MIN_SQLITE))
        raise StoreUnavailable(
            f"this Python has SQLite {sqlite3.sqlite_version} and keiro needs {needed}: use a newer Python."
        )
    if path in ("", ":memory:"):
        raise StoreUnavailable("an SQLite database without a file has one connection: give a path, or memory://.")
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        try:
            _ensure_sqlite(path, mode)
            return
        except Exception as error:
            if sqlite_error(error) is None:
                raise
            if not is_busy(error):
                raise sqlite_fault(error, path) from error
            if time.monotonic() > deadline:
                raise StoreBusy(
                    f"{path} was locked by another connection for {timeout:g} s; nothing was written. Find "
                    "the process that holds a transaction open, then try again."
                ) from error
        # Not SQLite's own busy handler: the change to WAL mode ignores it.
        time.sleep(random.uniform(pause / 2, pause))
        pause = min(pause * 2, 0.05)


def _ensure_sqlite(path: str, mode: Mode) -> None:
    target = f"sqlite:///{path}"
    if mode == "verify" and not os.path.exists(path):
        must_upgrade(Behind(None), target, mode)
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        if not must_upgrade(SQLITE.state(lambda sql: connection.execute(sql).fetchall()), target, mode):
            return
        (journal_mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if journal_mode != "wal":
            raise StoreUnavailable(
                f"{path} cannot be put in WAL mode (it stays in {journal_mode}): its file system lacks "
                "shared memory. Put the file on a local disk."
            )
        _upgrade("sqlite://", lambda: connection, ["BEGIN IMMEDIATE"], SQLITE, target)


def ensure_postgres(conninfo: str, *, mode: Mode = "migrate", timeout: float = 30.0) -> None:
    """Bring the database at `conninfo` (a URL or libpq string) up to date; with `verify` only check it.

    Blocks while another process migrates or uses a table that is to change, at most `timeout` seconds a lock.
    On return the schema is committed. Raises MigrationRequired, StoreBusy or StoreUnavailable.
    """
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict, make_conninfo
    except ImportError as error:
        raise StoreUnavailable(f"Postgres needs psycopg ({error}): pip install 'keiro-durable[postgres]'.") from error

    target = postgres_target(conninfo)
    if not conninfo_to_dict(conninfo).get("connect_timeout"):
        # A host that swallows packets would hold the caller for minutes.
        conninfo = make_conninfo(conninfo, connect_timeout=10)
    try:
        with closing(psycopg.connect(conninfo)) as connection:
            _check_server(connection.info, target)
            state = POSTGRES.state(lambda sql: connection.execute(sql.encode()).fetchall())
            if not must_upgrade(state, target, mode):
                return
            connection.rollback()
            lock = [
                # Whatever the default: a snapshot taken while waiting for the lock would not show what the
                # process that had it has migrated.
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
                f"SET LOCAL lock_timeout = {max(1, round(timeout * 1000))}",
                f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})",
            ]
            _upgrade("postgresql+psycopg://", lambda: connection, lock, POSTGRES, target)
    except Exception as error:
        found = getattr(error, "orig", error)
        if not isinstance(found, psycopg.Error):
            raise
        raise postgres_fault(found.sqlstate, str(found), target) from error


def script_location() -> Path:
    """The folder of the revisions: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise MigrationRequired(f"{package / 'migrations'} is missing: install keiro-durable again.")


def _check_server(server: ConnectionInfo, target: str) -> None:
    if server.server_version < MIN_POSTGRES * 10_000:
        found = server.server_version // 10_000
        raise StoreUnavailable(f"{target} is PostgreSQL {found} and keiro needs {MIN_POSTGRES} or newer.")
    encoding = server.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise StoreUnavailable(
            f"{target} has the encoding {encoding}, which cannot hold every text: use a database made with "
            "ENCODING 'UTF8'."
        )


# Alembic keeps the migration under way in globals: two threads at once would run each other's statements.
_ALEMBIC: Final = threading.Lock()


def _upgrade(url: str, creator: Callable[[], Any], lock: Sequence[str], probe: Probe, target: str) -> None:
    """Run what is missing in one transaction, which the statements of `lock` open."""
    import sqlalchemy
    from sqlalchemy.pool import StaticPool

    engine = sqlalchemy.create_engine(url, creator=creator, poolclass=StaticPool)
    with _ALEMBIC, engine.connect() as connection:
        for statement in lock:
            connection.exec_driver_sql(statement)
        # Looked at again, because another process may have migrated before this one had the lock.
        if must_upgrade(probe.state(lambda sql: connection.exec_driver_sql(sql).all()), target, "migrate"):
            if connection.dialect.name == "postgresql":
                _create_schema(connection)
            _run_revisions(connection)
            connection.commit()


def _create_schema(connection: Connection) -> None:
    # IF NOT EXISTS asks for the right to create even where an administrator has made the schema beforehand.
    found = connection.exec_driver_sql(f"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = '{SCHEMA}'")
    if found.first() is None:
        connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA}")


def _run_revisions(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    command.upgrade(config, HEAD)
