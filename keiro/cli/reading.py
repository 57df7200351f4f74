"""Reading a journal without becoming a part of it: one connection that can write nothing, no worker, no lock.

So the reading commands work beside any number of engines, on a standby, and on a file or in a folder that this user may
only read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote

from keiro.decisions import Stored
from keiro.errors import InvalidCall, RunNotFound, StoreUnavailable
from keiro.identity import parse_run_id
from keiro.rows import Run
from keiro.stores import open_store
from keiro.stores.base import WorkerRow
from keiro.stores.faults import postgres_fault, postgres_target, sqlite_fault
from keiro.stores.memory import MemoryStore
from keiro.stores.migrate import POSTGRES, SQLITE, must_upgrade
from keiro.stores.sql import Sql, Statement
from keiro.stores.sqlite import SQLiteStore

Rows = Callable[[str, Sequence[Any]], list[Any]]


class Journal:
    """What is recorded, as it was when the journal was opened for reading."""

    def __init__(self, sql: Sql, rows: Rows) -> None:
        self._sql = sql
        self._rows = rows

    def runs(self, status: str | None, workflow: str | None, limit: int, before: int | None = None) -> list[Run]:
        """Runs, newest first; `before` is the run_key to go on from."""
        return [self._sql.to_run(row) for row in self._rows(*self._sql.list_runs(status, workflow, before, limit))]

    def workers(self) -> list[tuple[WorkerRow, int]]:
        """The workers of this journal, and how many runs each owns."""
        workers = self._sql.to_workers(self._rows(self._sql.text.list_workers, ()))
        return [(one, len(self._rows(self._sql.text.owned, (one.worker_key,)))) for one in workers]

    def run(self, run_id: str) -> Run:
        """A run by its id. Raises `RunNotFound`, `InvalidName`."""
        parse_run_id(run_id)
        rows = self._rows(self._sql.text.load_keys, (run_id,))
        if not rows:
            raise RunNotFound(f"there is no run {run_id!r} here: `keiro list` shows those that exist")
        return self._sql.to_run(rows[0])

    def events(self, run: Run) -> list[Stored]:
        """The events of a run, in order."""
        statement: Statement = self._sql.text.history, (run.run_key, 0)
        return [self._sql.to_stored(row) for row in self._rows(*statement)]


@contextmanager
def journal(url: str) -> Iterator[Journal]:
    """The journal at `url`, for reading. Raises `MigrationRequired` or `StoreUnavailable`, and `InvalidCall` for a URL
    that leads nowhere."""
    match open_store(url):
        case SQLiteStore() as store:
            target = f"sqlite:///{store.path}"
            try:
                with closing(_open_file(store.path)) as connection:
                    # One transaction: what is read last belongs to what was read first.
                    connection.execute("BEGIN")
                    must_upgrade(SQLITE.state(lambda sql: connection.execute(sql).fetchall()), target, "verify")
                    yield Journal(store.sql, lambda sql, values: connection.execute(sql, values).fetchall())
            except sqlite3.Error as error:
                raise sqlite_fault(error, store.path) from error
        case MemoryStore():
            raise InvalidCall("a memory:// journal ends with its process: there is nothing to read from outside")
        case other:
            with _postgres(url, other.sql) as found:  # type: ignore[attr-defined]
                yield found


def must_exist(url: str) -> None:
    """Raise `StoreUnavailable` where `url` names a file that does not exist."""
    store = open_store(url)
    if isinstance(store, SQLiteStore):
        _check_file(store.path)


def _check_file(path: str) -> None:
    if not os.path.exists(path):
        raise StoreUnavailable(
            f"there is no file {path}: check --url and $KEIRO_URL, and the folder the command is run in. "
            "`keiro run` and `keiro migrate` create it"
        )
    if os.path.isdir(path):
        raise StoreUnavailable(f"{path} is a folder. Give the path of a file in it")


def _open_file(path: str) -> sqlite3.Connection:
    _check_file(path)
    # A file in WAL mode needs two more beside it. Who may not write would leave them behind, and the engine's user
    # could not write those; without them nobody has the file open, so it can be read as one that does not change.
    if all(_may_write(one) for one in (path, os.path.dirname(os.path.abspath(path)))):
        mode = "rw"
    else:
        mode = "ro" if os.path.exists(f"{path}-wal") else "ro&immutable=1"
    address = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=5, isolation_level=None)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _may_write(path: str) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


@contextmanager
def _postgres(url: str, sql: Sql) -> Iterator[Journal]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        # What a host swallows would hold the command for minutes.
        patient = url if conninfo_to_dict(url).get("connect_timeout") else make_conninfo(url, connect_timeout=10)
        with closing(psycopg.connect(patient)) as connection:
            connection.read_only = True
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

            def rows(text: str, values: Sequence[Any] = ()) -> list[Any]:
                return connection.execute(text.replace("?", "%s").encode(), values or None).fetchall()

            must_upgrade(POSTGRES.state(rows), postgres_target(url), "verify")
            yield Journal(sql, rows)
    except psycopg.Error as error:
        raise postgres_fault(error.sqlstate, str(error), postgres_target(url)) from error
