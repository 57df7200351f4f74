"""Connections of the Postgres recorders: a pool, patience with lost connections, transactions of callers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from eventsourcing.persistence import InterfaceError, OperationalError, PersistenceError
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from keiro.stores.recorders.common import (
    CallerTransaction,
    Channel,
    UnusableConnection,
    open_transaction,
    remember,
    shared,
    translated,
)
from keiro.stores.recorders.courier import Courier

if TYPE_CHECKING:
    import sqlalchemy

T = TypeVar("T")
Row = tuple[Any, ...]
Driver = psycopg.Connection[Any]

_RECONNECT_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 1.6)
"""Pauses between attempts to reach a server that was there before: about five seconds, enough for a
restart.
"""

_RESTARTS: Final = 3
"""How often a statement that lost a deadlock or a serialization conflict is run again."""


class ConnectionLost(OperationalError):
    """The server cannot be reached, or ended the connection under a statement (which may have committed)."""

    def __init__(self, message: str, *, connecting: bool = False) -> None:
        super().__init__(message)
        self.connecting = connecting
        """Whether there was no connection to begin with."""


class Attempt:
    """What happened on the way to an answer."""

    lost = False
    """Whether a connection was lost under the statement, so that an earlier run of it may have committed."""


class PostgresDatastore:
    """A pool of connections to one database. They are in autocommit mode; a view's transaction sends BEGIN.

    Times are in seconds. `get_password` is called for every new connection.
    """

    def __init__(
        self,
        *,
        dbname: str,
        host: str,
        user: str,
        port: str = "5432",
        password: str = "",
        get_password: Callable[[], str] | None = None,
        connect_timeout: float = 30.0,
        idle_in_transaction_session_timeout: float = 5.0,
        lock_timeout: float = 0.0,
        pool_size: int = 5,
        max_overflow: int = 10,
        max_waiting: int = 0,
        conn_max_age: float = 3600.0,
        pre_ping: bool = False,
        schema: str = "public",
        originator_id_type: str = "uuid",
        single_row_tracking: bool = True,
    ) -> None:
        import sqlalchemy  # here, because an engine that imports this module may never need it

        self.schema = schema
        self.originator_id_type = originator_id_type
        self.single_row_tracking = single_row_tracking
        self.name = f"{dbname} at {host}:{port}"
        # Nothing the pool keeps may refer to the datastore: it closes when nobody refers to it any more.
        connect = partial(
            _connect,
            make_conninfo(
                dbname=dbname,
                host=host,
                port=port,
                user=user,
                connect_timeout=max(round(connect_timeout), 2),
            ),
            get_password or partial(str, password),
            f"SET idle_in_transaction_session_timeout = {round(idle_in_transaction_session_timeout * 1000)};"
            f" SET lock_timeout = {round(lock_timeout * 1000)}",
        )
        kept = max(pool_size, 1)
        self._capacity = max(pool_size + max_overflow, 1)
        self._max_waiting = max_waiting
        self._requests = 0
        self._guard = threading.Lock()
        self._closed = False
        self._has_connected = False
        self._engine = sqlalchemy.create_engine(
            "postgresql+psycopg://",
            creator=connect,
            pool_size=kept,
            max_overflow=self._capacity - kept,
            pool_timeout=connect_timeout,
            pool_recycle=round(conn_max_age),
            pool_pre_ping=pre_ping,
            use_native_hstore=False,  # spares a query per connection
        )
        sqlalchemy.event.listen(self._engine, "begin", _begin)
        self._pool = self._engine.pool
        self._identity: Row | None = None
        self._known_connections: weakref.WeakSet[Driver] = weakref.WeakSet()
        self.courier = Courier(connect)
        # At exit too, so that the last commits of a short program are announced.
        self._finalizer = weakref.finalize(self, _close, self.courier, self._pool)

    def channel(self, table: str) -> Channel:
        """What wakes the waiters of this process for a table of this database."""
        return shared(Channel, self.name, self.schema, table)

    def execute(self, statement: bytes, parameters: Sequence[Any] = (), attempt: Attempt | None = None) -> list[Row]:
        """Run one statement in a transaction of its own and return its rows.

        Runs it again after a deadlock, and for about five seconds after a lost connection: `attempt` then
        tells that an earlier run may have committed. Raises the library's exceptions, `ConnectionLost`
        among them.
        """
        return self._patiently(lambda connection: _run(connection, statement, parameters), attempt)

    def transact(self, work: Callable[[Driver], T]) -> T:
        """Call `work` in a transaction, and again as `execute` does: it must bear being run twice."""

        def in_transaction(connection: Driver) -> T:
            with connection.transaction():
                return work(connection)

        return self._patiently(in_transaction, None)

    @contextmanager
    def connection(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction as a `sqlalchemy.Connection`, committed at the end unless the block raises."""
        self._enter()
        try:
            with self._begun() as connection:
                transaction = connection.get_transaction()
                assert transaction is not None
                with transaction:
                    yield connection
        finally:
            self._leave()

    def join(self, connection: Any) -> CallerTransaction:
        """The transaction a caller has open on this database, by a SQLAlchemy or a psycopg connection."""
        raw, transaction = _driver_connection(connection)
        try:
            if raw.autocommit and raw.info.transaction_status == TransactionStatus.IDLE:
                raise UnusableConnection(
                    "connection= is in autocommit mode and no transaction is open on it, so there is none to join;"
                    " open one, for example by `with connection.transaction():`"
                )
            self._check_same_database(raw)
            joined = open_transaction(self)
            if joined is not None and joined.connection is raw:
                return joined
            if transaction is not None:
                is_open = partial(getattr, transaction, "is_active")
            else:
                # Also begins the transaction, which a savepoint alone would not: leaving it would then
                # commit.
                is_open = partial(_is_open, raw, _one(raw, b"SELECT txid_current()")[0])
        except psycopg.Error as error:
            raise self.translated(error) from error
        return remember(CallerTransaction(self, raw, is_open))

    def execute_in(self, transaction: CallerTransaction, work: Callable[[Driver], T]) -> T:
        """Call `work` in the caller's transaction; if it raises, what it wrote is undone and the rest
        stays.
        """
        raw: Driver = transaction.connection
        try:
            with raw.transaction():
                return work(raw)
        except psycopg.Error as error:
            raise self.translated(error) from error

    def translated(self, error: psycopg.Error) -> PersistenceError:
        """The library's exception for one of psycopg, with the database."""
        found = translated(error, f"Postgres database {self.name}")
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return type(found)(f"{found}. Another writer holds the lock; keep transactions short or raise the timeout")
        if isinstance(error, psycopg.errors.UndefinedTable):
            return type(found)(f"{found}. Let CREATE_TABLE be on once, or check POSTGRES_SCHEMA")
        return found

    def close(self) -> None:
        """Announce the last commits and close all connections; those in use are closed when they come back."""
        self._closed = True
        self._finalizer()

    # Patience

    def _patiently(self, work: Callable[[Driver], T], attempt: Attempt | None) -> T:
        losses = restarts = 0
        pauses = iter(_RECONNECT_S)
        while True:
            try:
                return self._once(work)
            except ConnectionLost as error:
                losses += 1
                if not error.connecting:
                    if attempt is not None:
                        attempt.lost = True
                    # Connections that died idle in the pool are found one by one; only the server is waited
                    # for.
                    if losses <= self._capacity:
                        continue
                pause = next(pauses, None)
                if pause is None or not self._has_connected:
                    raise
                time.sleep(pause)
            except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected) as error:
                restarts += 1
                if restarts > _RESTARTS:
                    raise self.translated(error) from error
            except psycopg.Error as error:
                raise self.translated(error) from error

    def _once(self, work: Callable[[Driver], T]) -> T:
        self._enter()
        try:
            borrowed = self._borrow()
            connection: Driver = borrowed.driver_connection  # type: ignore[assignment]
            try:
                return work(connection)
            except psycopg.Error as error:
                if _is_lost(connection, error):
                    raise ConnectionLost(f"Postgres database {self.name}: {error}") from error
                raise
            finally:
                if connection.info.transaction_status == TransactionStatus.IDLE:
                    borrowed.close()
                else:
                    borrowed.invalidate()
        finally:
            self._leave()

    def _borrow(self) -> sqlalchemy.PoolProxiedConnection:
        try:
            borrowed = self._pool.connect()
        except psycopg.Error as error:
            raise ConnectionLost(f"Postgres database {self.name}: {error}", connecting=True) from error
        except Exception as error:
            from sqlalchemy.exc import TimeoutError

            if isinstance(error, TimeoutError):
                raise self._exhausted() from error
            raise
        self._has_connected = True
        return borrowed

    def _begun(self) -> sqlalchemy.Connection:
        from sqlalchemy import exc

        pauses = iter(_RECONNECT_S)
        while True:
            connection: sqlalchemy.Connection | None = None
            try:
                connection = self._engine.connect()
                connection.begin()
                self._has_connected = True
                return connection
            except exc.TimeoutError as error:
                raise self._exhausted() from error
            except exc.DBAPIError as error:
                # Nothing has been done yet, so a connection that died idle in the pool is simply replaced.
                pause = next(pauses, None)
                lost = connection is None or error.connection_invalidated
                if not (lost and self._has_connected and pause is not None):
                    raise ConnectionLost(f"Postgres database {self.name}: {error.orig}") from error
            if connection is not None:
                connection.close()
            else:
                time.sleep(pause)

    def _enter(self) -> None:
        with self._guard:
            if self._closed:
                raise InterfaceError(f"Postgres database {self.name}: this application has been closed")
            if self._max_waiting and self._requests >= self._capacity + self._max_waiting:
                raise self._exhausted()
            self._requests += 1

    def _leave(self) -> None:
        with self._guard:
            self._requests -= 1
        if self._closed:
            self._pool.dispose()

    def _exhausted(self) -> OperationalError:
        return OperationalError(
            f"Postgres database {self.name}: all {self._capacity} connections of this application are in use; raise"
            " POSTGRES_POOL_SIZE or POSTGRES_MAX_OVERFLOW, or keep transactions short"
        )

    def _check_same_database(self, raw: Driver) -> None:
        if raw in self._known_connections:
            return
        # The start time tells servers apart however their hosts are spelled, and whatever stands before them.
        query = b"SELECT current_database(), pg_postmaster_start_time()"
        theirs = _one(raw, query)
        if theirs != self._identity:
            self._identity = self.execute(query)[0]  # anew: the server may have been restarted
        if theirs != self._identity:
            raise UnusableConnection(
                f"connection= is a connection to database '{theirs[0]}' of a server started {theirs[1]}, but this"
                f" application records in {self.name}"
            )
        self._known_connections.add(raw)


def _connect(conninfo: str, get_password: Callable[[], str], setup: str) -> Driver:
    connection = psycopg.connect(conninfo, password=get_password(), autocommit=True)
    try:
        connection.execute(setup.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _close(courier: Courier, pool: sqlalchemy.Pool) -> None:
    courier.close()
    pool.dispose()


def _begin(connection: sqlalchemy.Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _run(connection: Driver, statement: bytes, parameters: Sequence[Any]) -> list[Row]:
    cursor = connection.execute(statement, parameters, prepare=True, binary=True)
    return cursor.fetchall() if cursor.description else []


def run_in(connection: Driver, statement: bytes, parameters: Sequence[Any] = ()) -> list[Row]:
    """Run a statement on a caller's connection, whatever kinds of cursors and rows that makes by itself."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.format = psycopg.pq.Format.BINARY
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


def _one(connection: Driver, statement: bytes) -> Row:
    return run_in(connection, statement)[0]


def _is_lost(connection: Driver, error: psycopg.Error) -> bool:
    # 57P01 to 57P03: the server shuts down or starts; class 08: the connection failed.
    state = error.sqlstate or ""
    return connection.closed or state.startswith(("57P", "08"))


def _is_open(connection: Driver, transaction_id: int) -> bool:
    if connection.closed or connection.info.transaction_status != TransactionStatus.INTRANS:
        return False
    return bool(_one(connection, b"SELECT txid_current_if_assigned()")[0] == transaction_id)


def _driver_connection(connection: Any) -> tuple[Driver, sqlalchemy.Transaction | None]:
    """The psycopg connection, and the transaction if it is one of SQLAlchemy."""
    import sqlalchemy

    if isinstance(connection, psycopg.Connection):
        return connection, None
    if isinstance(connection, sqlalchemy.Connection):
        raw = connection.connection.driver_connection
        if isinstance(raw, psycopg.Connection):
            if not connection.in_transaction():
                # Begins as SQLAlchemy does before a first statement, so that its commit() is one.
                connection.exec_driver_sql("SELECT 1").close()
            return raw, connection.get_transaction()
    raise UnusableConnection(
        f"connection= takes a sqlalchemy.Connection (driver psycopg) or a psycopg.Connection, not {connection!r}"
    )
