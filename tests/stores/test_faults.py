"""What cannot be opened or written: each an error of keiro's, with advice; which faults are worth a retry."""

from __future__ import annotations

import os
import resource
import socket
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy

from keiro.errors import KeiroError, MigrationRequired, StoreBusy, StoreError, StoreUnavailable
from keiro.stores import migrate
from keiro.stores.faults import (
    is_busy,
    is_conflict,
    is_disconnect,
    is_transient,
    postgres_fault,
    postgres_target,
    sqlite_fault,
)
from keiro.testing.postgres import PostgresServer

# SQLite files


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"is a folder\. Give the path of a file in it"):
        migrate.ensure_sqlite(str(tmp_path))


@pytest.mark.parametrize("mode", ["migrate", "verify"])
def test_a_folder_that_does_not_exist_is_named(tmp_path: Path, mode: migrate.Mode) -> None:
    path = tmp_path / "none" / "runs.db"

    with pytest.raises(KeiroError) as raised:
        migrate.ensure_sqlite(str(path), mode=mode)

    assert str(path.parent) in str(raised.value)


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_database_without_a_file_is_refused(path: str) -> None:
    with pytest.raises(StoreUnavailable, match="memory://"):
        migrate.ensure_sqlite(path)


@pytest.mark.parametrize("mode", ["migrate", "verify"])
def test_another_kind_of_file_is_left_as_it_is(tmp_path: Path, mode: migrate.Mode) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 1000)

    with pytest.raises(StoreUnavailable, match="is not an SQLite database"):
        migrate.ensure_sqlite(str(path), mode=mode)

    assert path.read_text() == "Dear reader, " * 1000


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    migrate.ensure_sqlite(str(path))
    pages = bytearray(path.read_bytes())
    pages[100:4096] = b"\xff" * 3996
    path.write_bytes(pages)

    with pytest.raises(StoreUnavailable, match=r"is damaged.*restore a backup"):
        migrate.ensure_sqlite(str(path))


@pytest.fixture
def ordinary_folder() -> Iterator[Path]:
    """A folder of an ordinary user, as whom the test goes on: root may write everywhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder
            return
        import alembic.command  # noqa: F401 - the other user may not be able to read this environment

        os.chown(folder, 65534, -1)
        os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(0)


def test_a_read_only_file_is_not_migrated(ordinary_folder: Path) -> None:
    path = ordinary_folder / "runs.db"
    path.touch()
    path.chmod(0o444)
    ordinary_folder.chmod(0o555)

    with pytest.raises(StoreUnavailable, match=r"cannot be written.*must be writable"):
        migrate.ensure_sqlite(str(path))

    ordinary_folder.chmod(0o755)


def test_a_file_that_may_not_be_read_is_not_opened(ordinary_folder: Path) -> None:
    path = ordinary_folder / "runs.db"
    path.touch()
    path.chmod(0)

    with pytest.raises(StoreUnavailable, match="may read and write the file"):
        migrate.ensure_sqlite(str(path))


def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.db"
    connect = sqlite3.connect

    def connect_to_a_small_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 8")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect_to_a_small_disk)
        with pytest.raises(StoreUnavailable, match="no space is left"):
            migrate.ensure_sqlite(str(path))

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    migrate.ensure_sqlite(str(path))


def test_a_write_that_fails_leaves_nothing_half_made(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, unlimited[1]))
    try:
        with pytest.raises(StoreUnavailable, match=r"failed \(disk I/O error, SQLITE_IOERR_WRITE\).*limits"):
            migrate.ensure_sqlite(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a file that another connection has locked."""
    path = tmp_path / "locked.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        closing(sqlite3.connect(path, timeout=0)) as connection,
    ):
        other.execute("BEGIN EXCLUSIVE")
        yield connection


def test_a_lock_is_recognised_through_what_wraps_it(locked: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError) as direct:
        locked.execute("BEGIN IMMEDIATE")

    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: locked, poolclass=sqlalchemy.StaticPool)
    with engine.connect() as connection, pytest.raises(sqlalchemy.exc.OperationalError) as wrapped:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    caused = RuntimeError("the flush failed")
    caused.__cause__ = wrapped.value

    for error in (direct.value, wrapped.value, caused):
        assert is_busy(error)
        assert isinstance(sqlite_fault(error, "runs.db"), StoreBusy)


def test_a_begin_that_was_refused_is_busy_though_its_rollback_failed(locked: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no transaction is active") as raised:
        try:
            locked.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            locked.execute("ROLLBACK")

    assert is_busy(raised.value)


def test_a_snapshot_that_grew_old_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    migrate.ensure_sqlite(str(path))
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
        closing(sqlite3.connect(path, isolation_level=None)) as writer,
    ):
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM keiro_workers").fetchall()
        writer.execute("INSERT INTO keiro_projection_tracking VALUES ('steps', 0)")
        with pytest.raises(sqlite3.OperationalError) as raised:
            reader.execute("DELETE FROM keiro_projection_tracking")

    assert raised.value.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
    assert is_busy(raised.value)


def test_other_faults_are_not_busy(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
        with pytest.raises(sqlite3.OperationalError) as syntax:
            connection.execute("SELEKT")
        with pytest.raises(sqlite3.OperationalError) as rollback:
            connection.execute("ROLLBACK")

    for error in (syntax.value, rollback.value, ValueError("x"), sqlite3.ProgrammingError("closed")):
        assert not is_busy(error)
    fault = sqlite_fault(syntax.value, "runs.db")
    assert type(fault) is StoreError
    assert "SELEKT" in str(fault)


def test_an_error_met_while_handling_a_lock_is_not_taken_for_one(locked: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="SELEKT") as raised:
        try:
            locked.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            locked.execute("SELEKT")

    assert not is_busy(raised.value)


# Postgres


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_server_that_is_not_there_is_named() -> None:
    url = f"postgresql://postgres:hunter2@127.0.0.1:{free_port()}/runs"

    with pytest.raises(StoreUnavailable, match=r"cannot reach postgresql://postgres@127\.0\.0\.1") as raised:
        migrate.ensure_postgres(url)

    assert "hunter2" not in str(raised.value)


def test_a_database_that_is_not_there_is_named(postgres_server: PostgresServer) -> None:
    with pytest.raises(StoreUnavailable, match="createdb"):
        migrate.ensure_postgres(postgres_server.url("no_such_database"))


def test_a_wrong_password_is_named_but_not_shown(restartable_postgres: PostgresServer) -> None:
    url = restartable_postgres.url()
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("CREATE ROLE clerk LOGIN PASSWORD 'right'")
        ((rules,),) = admin.execute("SHOW hba_file").fetchall()
        admin.execute(
            "COPY (SELECT * FROM (VALUES ('host all clerk 127.0.0.1/32 scram-sha-256'),"
            f" ('host all postgres 127.0.0.1/32 trust')) AS rules) TO '{rules}'"
        )
        admin.execute("SELECT pg_reload_conf()")

    for login in ("clerk:hunter2@", "clerk@", "stranger@"):
        with pytest.raises(StoreUnavailable, match=r"refused the login.*pg_hba\.conf") as raised:
            migrate.ensure_postgres(url.replace("postgres@", login))
        assert "hunter2" not in str(raised.value)


@pytest.fixture
def clerk(postgres_server: PostgresServer, postgres_url: str) -> Iterator[str]:
    """The URL of an empty database for a role that owns nothing."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute("CREATE ROLE clerk LOGIN")
    yield postgres_url.replace("postgres@", "clerk@")
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("DROP OWNED BY clerk CASCADE")
        admin.execute("DROP ROLE clerk")


def test_a_role_that_may_not_create_the_schema_is_told_what_it_needs(clerk: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"permission denied.*CREATE on the database.*keiro migrate --url"):
        migrate.ensure_postgres(clerk)


def test_a_schema_made_for_the_role_is_enough(clerk: str, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA keiro AUTHORIZATION clerk")

    migrate.ensure_postgres(clerk)

    migrate.ensure_postgres(clerk, mode="verify")


def test_a_role_without_rights_on_the_tables_is_told_what_it_needs(clerk: str, postgres_url: str) -> None:
    migrate.ensure_postgres(postgres_url)

    with pytest.raises(StoreUnavailable, match="USAGE on schema keiro"):
        migrate.ensure_postgres(clerk, mode="verify")


def test_a_server_that_takes_no_writes_is_named(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"takes no writes.*primary"):
        migrate.ensure_postgres(f"{postgres_url}?options=-c%20default_transaction_read_only%3Don")


@pytest.mark.parametrize("address", ["postgresql://u:hunter2@h/db?hunter2=1", "hunter2 and more", "host='hunter2"])
def test_an_address_that_is_not_understood_is_not_repeated(address: str) -> None:
    with pytest.raises(StoreUnavailable, match="must read postgresql://") as raised:
        migrate.ensure_postgres(address)

    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("conninfo", "target"),
    [
        ("postgresql://anna:secret@db.example:5433/runs", "postgresql://anna@db.example:5433/runs"),
        ("host=db.example dbname=runs password=secret", "postgresql://db.example/runs"),
        ("postgresql:///runs", "postgresql:///runs"),
        ("", "postgresql:///"),
    ],
)
def test_messages_name_a_database_without_its_password(conninfo: str, target: str) -> None:
    assert postgres_target(conninfo) == target


@pytest.mark.parametrize(
    ("sqlstate", "conflict", "disconnect"),
    [
        ("40001", True, False),
        ("40P01", True, False),
        ("55P03", True, False),
        ("08000", False, True),
        ("08006", False, True),
        ("57P01", False, True),
        ("57P02", False, True),
        ("57P03", False, True),
        (None, False, True),
        ("23505", False, False),
        ("57014", False, False),
        ("42P01", False, False),
        ("22P02", False, False),
        ("", False, False),
    ],
)
def test_only_conflicts_and_lost_connections_are_worth_another_try(
    sqlstate: str | None, conflict: bool, disconnect: bool
) -> None:
    assert is_conflict(sqlstate) is conflict
    assert is_disconnect(sqlstate) is disconnect
    assert is_transient(sqlstate) is (conflict or disconnect)


@pytest.mark.parametrize(
    ("sqlstate", "error", "advice"),
    [
        ("40001", StoreBusy, "Try again"),
        ("55P03", StoreBusy, "find the session that holds a transaction open"),
        ("57014", StoreUnavailable, "raise statement_timeout for this role"),
        ("08006", StoreUnavailable, "Check that a server runs there"),
        ("57P01", StoreUnavailable, "Check that a server runs there"),
        (None, StoreUnavailable, "Check that a server runs there"),
        ("28P01", StoreUnavailable, "Check the user, the password"),
        ("28000", StoreUnavailable, "Check the user, the password"),
        ("3D000", StoreUnavailable, "createdb"),
        ("42501", StoreUnavailable, "Grant them"),
        ("3F000", MigrationRequired, "keiro migrate --url postgresql://db/runs"),
        ("42P01", MigrationRequired, "keiro migrate --url postgresql://db/runs"),
        ("42703", MigrationRequired, "keiro migrate --url postgresql://db/runs"),
        ("25006", StoreUnavailable, "primary"),
        ("53100", StoreUnavailable, "Free some"),
        ("53300", StoreUnavailable, "max_connections"),
        ("XX000", StoreError, "refused a statement (XX000)"),
    ],
)
def test_a_fault_of_postgres_says_what_and_where_and_what_to_do(
    sqlstate: str | None, error: type[KeiroError], advice: str
) -> None:
    fault = postgres_fault(sqlstate, "it\n  failed?\n", "postgresql://db/runs")

    assert type(fault) is error
    for part in ("it failed", "postgresql://db/runs", advice):
        assert part in str(fault)
    assert "?" not in str(fault)
