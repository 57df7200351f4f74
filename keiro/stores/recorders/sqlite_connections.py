"""Connections of the SQLite recorders: turns to write, readers, transactions of callers and of views."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from eventsourcing.persistence import InterfaceError, OperationalError, PersistenceError

from keiro.stores.recorders.common import (
    CallerTransaction,
    Channel,
    UnusableConnection,
    open_transaction,
    remember,
    shared,
    translated,
)

if TYPE_CHECKING:
    import sqlalchemy

T = TypeVar("T")

_IDLE_READERS: Final = 5

_ADVICE: Final = {
    "SQLITE_BUSY": "another connection holds the write lock; keep transactions short or raise SQLITE_LOCK_TIMEOUT",
    "SQLITE_BUSY_SNAPSHOT": "start the transaction with BEGIN IMMEDIATE, so that nobody can write before it does",
    "SQLITE_CANTOPEN": "check that the folder exists and may be written to",
    "SQLITE_FULL": "free some space on the disk; nothing was written",
    "SQLITE_NOTADB": "SQLITE_DBNAME names a file that is not a SQLite database",
    "SQLITE_READONLY": "the file or its folder may not be written to",
}


class _Turn:
    """The turn to write one database, within this process: SQLite itself lets waiting writers starve."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0
        """The thread whose turn it is."""


class SQLiteDatastore:
    """Connections to one database file: one that writes, taking turns, and as many readers as read at once.

    A connection is only ever closed by whoever holds it, also when `close()` is called meanwhile: closing
    one under a running statement ends the process.
    """

    def __init__(
        self,
        db_name: str,
        *,
        lock_timeout: float = 5.0,
        originator_id_type: str = "uuid",
        single_row_tracking: bool = True,
    ) -> None:
        self.db_name = db_name
        self.lock_timeout = lock_timeout
        self.originator_id_type = originator_id_type
        self.single_row_tracking = single_row_tracking
        self._guard = threading.Lock()
        self._closed = False
        self._writing = False
        self._readers: list[sqlite3.Connection] = []
        self._engine: sqlalchemy.Engine | None = None
        self.path = db_name
        writer = self._open()
        self._writer: sqlite3.Connection | None = writer
        self.path = _path_of(writer)
        self.in_memory = not self.path
        # A database in memory is shared with another datastore only under a name of its own.
        self._key = self.path or (db_name if "cache=shared" in db_name else id(self))
        self._turn = shared(_Turn, self._key)

    def channel(self, table: str) -> Channel:
        """What wakes the waiters for a table of this database."""
        return shared(Channel, self._key, table)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` with the writing connection; it begins and commits. Whatever it raises rolls back."""
        connection = self._take_turn()
        try:
            return work(connection)
        except BaseException as error:
            self._roll_back(connection)
            if isinstance(error, sqlite3.Error):
                raise self.translated(error) from error
            raise
        finally:
            self._end_turn()

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """All rows of one query, as of one moment."""
        try:
            if self.in_memory:
                return self._read_in_memory(statement, parameters)
            connection = self._take_reader()
            try:
                return connection.execute(statement, parameters).fetchall()
            finally:
                self._return_reader(connection)
        except sqlite3.Error as error:
            raise self.translated(error) from error

    def _read_in_memory(self, statement: str, parameters: Sequence[Any]) -> list[Any]:
        if self._writing and self._turn.owner == threading.get_ident() and self._writer is not None:
            return self._writer.execute(statement, parameters).fetchall()  # inside a view's transaction()
        connection = self._take_turn()
        try:
            return connection.execute(statement, parameters).fetchall()
        finally:
            self._end_turn()

    @contextmanager
    def connection(self, *, write: bool) -> Iterator[sqlalchemy.Connection]:
        """A transaction as a `sqlalchemy.Connection`, committed at the end unless the block raises."""
        from sqlalchemy.exc import DBAPIError

        takes_turn = write or self.in_memory
        if takes_turn:
            self._take_turn()
        try:
            engine = self._sqlalchemy_engine()
            with engine.connect() as connection:
                connection = connection.execution_options(keiro_begin="BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    transaction = connection.begin()
                except DBAPIError as error:
                    if isinstance(error.orig, sqlite3.Error):
                        raise self.translated(error.orig) from error
                    raise
                with transaction:
                    yield connection
        finally:
            if takes_turn:
                self._end_turn()
            if self._closed:
                self._dispose()

    def join(self, connection: Any) -> CallerTransaction:
        """The transaction a caller has open on this database, by a SQLAlchemy or a sqlite3 connection."""
        raw, transaction = driver_connection(connection)
        if self.in_memory:
            if raw is not self._writer:
                raise UnusableConnection(
                    f"SQLITE_DBNAME '{self.db_name}' is a database in memory, which no other connection can join;"
                    " use a file, or the connection of a view's transaction()"
                )
        elif _path_of(raw) != self.path:
            raise UnusableConnection(
                f"connection= is a connection to {_path_of(raw) or 'a database in memory'}, but this application"
                f" records in {self.path}"
            )
        if not raw.in_transaction:
            if raw.isolation_level is None or getattr(raw, "autocommit", False) is True:
                raise UnusableConnection(
                    "connection= is in autocommit mode and no transaction is open on it, so there is none to join;"
                    " execute BEGIN IMMEDIATE on it first"
                )
            # The driver would begin by itself before an INSERT, but not before a SAVEPOINT: releasing an
            # outermost savepoint is a commit.
            try:
                raw.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as error:
                raise self.translated(error) from error
        joined = open_transaction(self)
        if joined is not None and joined.connection is raw:
            return joined
        if transaction is None:
            return remember(RawTransaction(self, raw))
        return remember(CallerTransaction(self, raw, partial(getattr, transaction, "is_active")))

    def execute_in(self, transaction: CallerTransaction, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` in the caller's transaction; if it raises, what it wrote is undone and the rest
        stays.
        """
        connection: sqlite3.Connection = transaction.connection
        try:
            connection.execute("SAVEPOINT keiro_save")
            try:
                result = work(connection)
            except BaseException:
                connection.execute("ROLLBACK TO keiro_save")
                connection.execute("RELEASE keiro_save")
                raise
            connection.execute("RELEASE keiro_save")
            return result
        except sqlite3.Error as error:
            raise self.translated(error) from error

    def translated(self, error: sqlite3.Error) -> PersistenceError:
        """The library's exception for one of sqlite3, with the file and what to do."""
        name = getattr(error, "sqlite_errorname", "")
        advice = _ADVICE.get(name) or next((_ADVICE[n] for n in _ADVICE if name.startswith(n)), "")
        found = translated(error, f"SQLite database {self._name}")
        return type(found)(f"{found}. {advice[0].upper()}{advice[1:]}") if advice else found

    def close(self) -> None:
        """Close all connections; those in use are closed by who uses them, right after. Does not wait."""
        with self._guard:
            self._closed = True
            readers, self._readers = self._readers, []
            writer = None if self._writing else self._writer
            if writer is not None:
                self._writer = None
        for connection in readers:
            connection.close()
        if self._engine is not None:
            self._dispose()
        if writer is not None:
            writer.close()

    @property
    def _name(self) -> str:
        return self.path or self.db_name

    def __del__(self) -> None:
        if hasattr(self, "_turn"):
            self.close()

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                self.db_name,
                timeout=self.lock_timeout,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        except sqlite3.Error as error:
            raise InterfaceError(
                f"SQLite cannot open '{self.db_name}': {error}. Check SQLITE_DBNAME and that its folder exists"
            ) from error
        try:
            self._use_wal(connection)
            connection.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error as error:
            connection.close()
            raise self.translated(error) from error
        return connection

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        deadline = time.monotonic() + self.lock_timeout
        # Asking first spares the lock that setting it takes.
        while connection.execute("PRAGMA journal_mode").fetchone()[0] not in ("wal", "memory"):
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                # Two processes that open a new file at once: this lock is not waited for.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _take_turn(self) -> sqlite3.Connection:
        turn = self._turn
        if not turn.lock.acquire(blocking=False):
            if turn.owner == threading.get_ident():
                raise OperationalError(
                    f"SQLite database {self._name}: this thread is inside a view's transaction(), so it would wait"
                    " for itself; use the connection that transaction() gives (save takes it as connection=)"
                )
            if not turn.lock.acquire(timeout=self.lock_timeout):
                raise OperationalError(
                    f"SQLite database {self._name}: another thread of this process has been writing for"
                    f" {self.lock_timeout} s; keep transactions short or raise SQLITE_LOCK_TIMEOUT"
                )
        turn.owner = threading.get_ident()
        try:
            with self._guard:
                self._check_open()
                self._writing = True
            if self._writer is None:
                self._writer = self._open()
            return self._writer
        except BaseException:
            self._end_turn()
            raise

    def _end_turn(self) -> None:
        writer = None
        with self._guard:
            self._writing = False
            if self._closed:
                writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self._turn.owner = 0
        self._turn.lock.release()

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            # After an I/O error the state of the connection is unknown; closing it rolls back.
            if not self.in_memory:
                self._writer = None
                connection.close()

    def _take_reader(self) -> sqlite3.Connection:
        with self._guard:
            self._check_open()
            if self._readers:
                return self._readers.pop()
        return self._open()

    def _return_reader(self, connection: sqlite3.Connection) -> None:
        with self._guard:
            if not self._closed and len(self._readers) < _IDLE_READERS:
                self._readers.append(connection)
                return
        connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InterfaceError(f"SQLite database {self._name}: this application has been closed")

    def _sqlalchemy_engine(self) -> sqlalchemy.Engine:
        with self._guard:
            self._check_open()
            if self._engine is None:
                self._engine = self._create_engine()
            return self._engine

    def _create_engine(self) -> sqlalchemy.Engine:
        import sqlalchemy

        if self.in_memory:
            writer = self._writer
            engine = sqlalchemy.create_engine("sqlite://", creator=lambda: writer, poolclass=sqlalchemy.StaticPool)
        else:
            engine = sqlalchemy.create_engine(
                "sqlite://", creator=self._open, poolclass=sqlalchemy.QueuePool, pool_size=_IDLE_READERS
            )

        @sqlalchemy.event.listens_for(engine, "begin")
        def begin(connection: sqlalchemy.Connection) -> None:
            connection.exec_driver_sql(connection.get_execution_options().get("keiro_begin", "BEGIN"))

        return engine

    def _dispose(self) -> None:
        if self._engine is not None and not self.in_memory:
            self._engine.pool.dispose()


def _path_of(connection: sqlite3.Connection) -> str:
    """The database file of a connection, empty for one in memory."""
    for _, name, path in rows_of(connection, "PRAGMA database_list"):
        if name == "main" and path:
            return os.path.realpath(str(path))
    return ""


def rows_of(connection: sqlite3.Connection, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
    cursor = connection.cursor()
    cursor.row_factory = None  # a caller's connection may return rows of another shape
    return cursor.execute(statement, parameters).fetchall()


class RawTransaction(CallerTransaction):
    """A caller's transaction on a connection of the driver, which does not say when one ends and the next begins.

    What was written in it does: it is open while its own connection sees that and no other connection does.
    """

    def __init__(self, datastore: SQLiteDatastore, raw: sqlite3.Connection) -> None:
        super().__init__(datastore, raw, self._is_open)
        self._read = datastore.read
        self.witness: tuple[str, Sequence[Any]] | None = None
        """A query that finds what was written."""

    def _is_open(self) -> bool:
        if self.witness is None:
            return False
        try:
            # The caller's connection last: a look at it starts a snapshot that its next write may find overtaken.
            return (
                self.connection.in_transaction
                and not self._read(*self.witness)
                and bool(rows_of(self.connection, *self.witness))
            )
        except sqlite3.ProgrammingError:
            return False  # closed, or of another thread


def driver_connection(connection: Any) -> tuple[sqlite3.Connection, Any]:
    """The sqlite3 connection, and the transaction if it is one of SQLAlchemy."""
    if isinstance(connection, sqlite3.Connection):
        return connection, None
    sqlalchemy = sys.modules.get("sqlalchemy")
    if sqlalchemy is not None and isinstance(connection, sqlalchemy.Connection):
        raw = connection.connection.driver_connection
        if isinstance(raw, sqlite3.Connection):
            if not connection.in_transaction():
                # Begins as SQLAlchemy does before a first statement, so that its commit() is one.
                connection.exec_driver_sql("SELECT 1").close()
            return raw, connection.get_transaction()
    raise UnusableConnection(
        f"connection= takes a sqlalchemy.Connection (driver sqlite3) or a sqlite3.Connection, not {connection!r}"
    )
