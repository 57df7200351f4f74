"""Commands on a connection of the caller's: their transaction, their commit.

The user's SQL comes first and the journal's lock and append last, in a savepoint, so that a command that is refused
leaves nothing behind whatever the caller does next. Nothing is committed and nothing tried again here: that is for
whoever began the transaction. What must wait for a lock never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from keiro.decisions import Command, Decision, Link, Stored
from keiro.errors import InvalidCall, KeiroError, StoreBusy
from keiro.rows import Head, Run
from keiro.stores.faults import is_busy, postgres_fault, sqlite_fault
from keiro.stores.kept_sql import Inline
from keiro.stores.sql import Program, Sql, Statement
from keiro.stores.transaction import Callbacks
from keiro.threads import CONNECTIONS, ENDS, in_thread

if TYPE_CHECKING:
    import sqlalchemy
    from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")
Execute = Callable[[str, Sequence[Any]], list[Any]]

BUSY_RETRY_S: Final = 0.001
BUSY_LIMIT_S: Final = 30.0
_SAVEPOINT: Final[Statement] = ("SAVEPOINT keiro_command", ())
_RELEASE: Final[Statement] = ("RELEASE SAVEPOINT keiro_command", ())
_UNDO: Final[tuple[Statement, ...]] = (("ROLLBACK TO SAVEPOINT keiro_command", ()), _RELEASE)


def drive(execute: Execute, program: Program[T]) -> T:
    """Run a program's statements one after the other; what one raises is raised in the program."""
    try:
        statements = next(program)
        while True:
            try:
                results = [execute(sql, values) for sql, values in statements]
            except Exception as error:
                statements = program.throw(error)
            else:
                statements = program.send(results)
    except StopIteration as stop:
        result: T = stop.value
        return result


class Caller(Protocol):
    """A caller's connection, as something programs can be run on."""

    connection: Any
    """What the caller gave us."""

    async def run(self, program: Program[T]) -> T:
        """Run a program in the caller's transaction."""


class InLoop:
    """A connection whose calls return at once, used on the thread of the event loop: sqlite3."""

    def __init__(self, connection: Any, execute: Execute) -> None:
        self.connection = connection
        self._execute = execute

    async def run(self, program: Program[T]) -> T:
        """See `Caller`."""
        return drive(self._execute, program)


class InThread:
    """A connection whose calls wait for a server. Our own writer, on the event loop, may be who it waits for."""

    def __init__(self, connection: Any, execute: Execute, driver: Any) -> None:
        self.connection = connection
        self._execute = execute
        self._driver = driver

    async def run(self, program: Program[T]) -> T:
        """See `Caller`."""
        # Shielded: a connection that a thread still uses must not go back to its owner when we are cancelled. The
        # server is asked to give up what it waits for.
        work = asyncio.ensure_future(in_thread(drive, (self._execute, program), {}, pool=CONNECTIONS))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            with suppress(Exception):
                await in_thread(self._driver.cancel, (), {}, pool=ENDS)
            with suppress(Exception):
                await work
            raise


class InGreenlet:
    """An `AsyncConnection` of SQLAlchemy."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection

    async def run(self, program: Program[T]) -> T:
        """See `Caller`."""
        return await self.connection.run_sync(lambda connection: drive(execute_of(connection), program))


class AsyncPsycopg:
    """A `psycopg.AsyncConnection`."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, program: Program[T]) -> T:
        """See `Caller`."""
        try:
            statements = next(program)
            while True:
                try:
                    results = [await self._execute(sql, values) for sql, values in statements]
                except Exception as error:
                    statements = program.throw(error)
                else:
                    statements = program.send(results)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _execute(self, sql: str, values: Sequence[Any]) -> list[Any]:
        async with self.connection.cursor(row_factory=tuple_row()) as cursor:
            await cursor.execute(styled(sql, "pyformat"), values or None)
            return list(await cursor.fetchall()) if cursor.description else []


def tuple_row() -> Any:
    """psycopg's plain rows, whatever row factory the connection has."""
    from psycopg.rows import tuple_row

    return tuple_row


def execute_of(connection: sqlalchemy.Connection) -> Execute:
    """Run our statements on a SQLAlchemy connection, in the parameter style of its driver."""
    style = connection.dialect.paramstyle

    def execute(sql: str, values: Sequence[Any]) -> list[Any]:
        cursor = connection.exec_driver_sql(styled(sql, style), tuple(values) if values else None)
        return [tuple(row) for row in cursor.fetchall()] if cursor.returns_rows else []

    return execute


def execute_of_psycopg(connection: Any) -> Execute:
    """Run our statements on a psycopg connection."""

    def execute(sql: str, values: Sequence[Any]) -> list[Any]:
        with connection.cursor(row_factory=tuple_row()) as cursor:
            cursor.execute(styled(sql, "pyformat"), values or None)
            return list(cursor.fetchall()) if cursor.description else []

    return execute


def execute_of_sqlite(connection: sqlite3.Connection) -> Execute:
    """Run our statements on a sqlite3 connection."""

    def execute(sql: str, values: Sequence[Any]) -> list[Any]:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(sql, values).fetchall()

    return execute


def styled(sql: str, style: str) -> str:
    """Our `?` placeholders in another parameter style."""
    if style == "qmark":
        return sql
    parts = sql.split("?")
    if style == "numeric_dollar":
        return "".join(part + (f"${i}" if i < len(parts) else "") for i, part in enumerate(parts, 1))
    return "%s".join(part.replace("%", "%%") if len(parts) > 1 else part for part in parts)


def sqlalchemy_connection(connection: Any) -> tuple[sqlalchemy.Connection | None, bool]:
    """The synchronous SQLAlchemy connection in `connection`, and whether it was an `AsyncConnection`."""
    sa = sys.modules.get("sqlalchemy")
    if sa is not None and isinstance(connection, sa.Connection):
        return connection, False
    aio = sys.modules.get("sqlalchemy.ext.asyncio")
    if aio is not None and isinstance(connection, aio.AsyncConnection):
        return connection.sync_connection, True
    return None, False


def in_savepoint(program: Program[T]) -> Program[T]:
    """A program that leaves nothing behind when it fails, in a transaction that goes on."""
    yield [_SAVEPOINT]
    try:
        result = yield from program
    except Exception:
        yield list(_UNDO)
        raise
    yield [_RELEASE]
    return result


def command_program(
    sql: Sql, command: Command, lock: Statement | None, inline: Inline | None, *, memory: bool, hexed: bool
) -> Program[Decision]:
    """Take the journal's lock, execute the command and project."""
    after = 0
    if lock is not None:
        yield [lock]
    if lock is not None and isinstance(command, Link):
        (((isolation,),),) = yield [_ISOLATION]
        if isolation != "read committed":
            # Its snapshot is older than the lock: an edge that was committed since may close a cycle with this one.
            raise InvalidCall(
                f"connection= has the isolation level {isolation.upper()}, which does not see what others have linked "
                "meanwhile: link runs in a transaction of READ COMMITTED, or without connection="
            )
    if inline is not None:
        after = yield from inline.head()
    executing = sql.execute([command])
    (decision,) = yield from (_hexed(executing) if hexed else executing)
    if inline is not None and decision.writes:
        yield from inline.project(after, memory=memory)
    return decision


_ISOLATION: Final[Statement] = ("SELECT current_setting('transaction_isolation')", ())


def _hexed(program: Program[T]) -> Program[T]:
    # Ids of events are 16 bytes to us and uuid to Postgres, which takes text for it from every driver.
    try:
        statements = next(program)
        while True:
            try:
                results = yield [
                    (sql, [value.hex() if type(value) is bytes else value for value in values])
                    for sql, values in statements
                ]
            except Exception as error:
                statements = program.throw(error)
            else:
                statements = program.send(results)
    except StopIteration as stop:
        result: T = stop.value
        return result


# SQLite: the write lock, without waiting for it on the event loop


async def lock_sqlite(caller: Caller, path: str, statement: str) -> None:
    """Take SQLite's write lock by `statement`, asking again while another connection holds it."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BUSY_LIMIT_S
    while True:
        held = await caller.run(_take_lock(statement))
        if held is None:
            return
        if held == sqlite3.SQLITE_BUSY_SNAPSHOT:
            raise StoreBusy(
                f"the caller's transaction on {path} has read what another connection has changed since, so it can "
                "write nothing any more: roll it back, and begin with BEGIN IMMEDIATE or with the first write"
            )
        if loop.time() > deadline:
            raise StoreBusy(
                f"{path} was locked by another connection for {BUSY_LIMIT_S:g} s; nothing was written. Find the "
                "process that holds a transaction open, then try again."
            )
        await asyncio.sleep(BUSY_RETRY_S)


def _take_lock(statement: str) -> Program[int | None]:
    """Try once; the SQLite error code that says who has the lock, None when it is ours."""
    (((patience,),),) = yield [("PRAGMA busy_timeout", ())]
    yield [("PRAGMA busy_timeout = 0", ())]
    refused: int | None = None
    try:
        yield [(statement, ())]
    except Exception as error:
        if not is_busy(error):
            raise
        found = getattr(error, "orig", None) or error
        refused = getattr(found, "sqlite_errorcode", sqlite3.SQLITE_BUSY)
    finally:
        yield [(f"PRAGMA busy_timeout = {int(patience)}", ())]
    return refused


class Joined:
    """The journal as seen and written through a caller's transaction."""

    def __init__(
        self,
        caller: Caller,
        sql: Sql,
        prepare: Callable[[Caller], Awaitable[None]],
        program: Callable[[Command, bool], Program[Decision]],
        fault: Callable[[Exception], KeiroError],
    ) -> None:
        self.caller = caller
        self._sql = sql
        self._prepare = prepare
        self._program = program
        self._fault = fault

    async def begin(self) -> None:
        """Check that the connection is one to this store; on SQLite take the write lock, which a transaction must have
        before it reads what it will change."""
        await self._guarded(self._prepare(self.caller))

    async def submit(self, command: Command, *, memory: bool = False) -> Decision:
        """Execute a command; with `memory`, the gate of memory rows is held and they are folded too. What is decided
        holds when the caller commits."""
        await self.begin()
        return await self._guarded(self.caller.run(in_savepoint(self._program(command, memory))))

    async def head(self, run_id: str) -> tuple[Run, Head] | None:
        """The row and the head of a run, with what the transaction has done to it."""
        (rows,) = await self._guarded(self.caller.run(_select([(self._sql.text.load, (run_id,))])))
        return self._sql.to_owned(rows[0]) if rows else None

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs, with those of the transaction."""
        statements: list[Statement] = [(self._sql.text.history, (key, after)) for key in run_keys]
        results = await self._guarded(self.caller.run(_select(statements)))
        return {key: [self._sql.to_stored(row) for row in rows] for key, rows in zip(run_keys, results, strict=True)}

    async def _guarded(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except KeiroError:
            raise
        except Exception as error:
            raise self._fault(error) from error


def _select(statements: Sequence[Statement]) -> Program[list[list[Any]]]:
    return (yield list(statements))


class Watch:
    """What is to happen when the transaction open on a SQLAlchemy connection commits; see `watched`.

    SQLAlchemy announces a commit before it sends it, maybe on another thread. So what is done here waits for the end
    of that transaction, and must itself look at the journal for what became of it.
    """

    def __init__(self, loop: AbstractEventLoop, failed: Callable[[BaseException], object]) -> None:
        self.callbacks = Callbacks()
        self._loop = loop
        self._failed = failed
        self._marks: list[int] = []

    def listen(self, connection: sqlalchemy.Connection) -> None:
        """Hear of the transaction's end and of its savepoints."""
        from sqlalchemy import event

        event.listen(connection, "commit", self._commit)
        event.listen(connection, "rollback", self._rollback)
        event.listen(connection, "savepoint", self._savepoint)
        event.listen(connection, "rollback_savepoint", self._rollback_savepoint)
        event.listen(connection, "release_savepoint", self._release_savepoint)

    def add(self, callback: Callable[[], object]) -> None:
        """Call `callback` after the commit."""
        self.callbacks.add(callback)

    def _savepoint(self, connection: Any, name: str | None) -> None:
        self._marks.append(self.callbacks.mark())

    def _rollback_savepoint(self, connection: Any, name: str, context: object) -> None:
        # One from before we listened: everything was added in it.
        self.callbacks.undo(self._marks.pop() if self._marks else 0)

    def _release_savepoint(self, connection: Any, name: str, context: object) -> None:
        if self._marks:
            self._marks.pop()

    def _rollback(self, connection: Any) -> None:
        self._marks.clear()
        self.callbacks.undo()

    def _commit(self, connection: sqlalchemy.Connection) -> None:
        self._marks.clear()
        if not self.callbacks.mark():
            return
        committing, self.callbacks = self.callbacks, Callbacks()
        with suppress(RuntimeError):  # the engine's loop has ended: nobody is left to be told
            self._loop.call_soon_threadsafe(self._ended, committing, connection.get_transaction(), 0.0005)

    def _ended(self, callbacks: Callbacks, transaction: Any, pause: float) -> None:
        if transaction is not None and transaction.is_active:
            self._loop.call_later(pause, self._ended, callbacks, transaction, min(2 * pause, 0.05))
            return
        callbacks.run(self._failed)


_watches: weakref.WeakKeyDictionary[Any, dict[AbstractEventLoop, Watch]] = weakref.WeakKeyDictionary()


def watched(connection: Any, failed: Callable[[BaseException], object]) -> Watch | None:
    """The watch of a caller's connection; None for one whose commit cannot be seen."""
    sync, _ = sqlalchemy_connection(connection)
    if sync is None:
        return None
    loop = asyncio.get_running_loop()
    mine = _watches.setdefault(sync, {})
    if loop not in mine:
        mine[loop] = Watch(loop, failed)
        mine[loop].listen(sync)
    return mine[loop]


def not_a_connection(connection: Any, takes: str) -> InvalidCall:
    """The error for something that is no connection to this store."""
    return InvalidCall(f"connection= takes {takes} on the engine's own database, not {connection!r}")


def join_sqlite(connection: Any, path: str, sql: Sql, inline: Inline | None) -> Joined:
    """The journal in the SQLite file `path` through a caller's connection."""
    caller, raw = _sqlite_caller(connection)
    inline = _inline_for(connection, inline)

    async def prepare(caller: Caller) -> None:
        # The second is how Python 3.12 says the same.
        autocommit = raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        if autocommit and not raw.in_transaction:
            raise InvalidCall(
                "no transaction is open on this connection, which is in autocommit mode: execute BEGIN IMMEDIATE before"
            )
        for _, name, file in (await caller.run(_select([("PRAGMA database_list", ())])))[0]:
            if name == "main" and not _same_file(file, path):
                raise InvalidCall(f"connection= is open on {file or 'a database in memory'}, and the journal is {path}")
        no_write = _NO_WRITE.format(heads=sql.text.heads)
        await lock_sqlite(caller, path, no_write if raw.in_transaction else "BEGIN IMMEDIATE")

    def program(command: Command, memory: bool) -> Program[Decision]:
        return command_program(sql, command, None, inline, memory=memory, hexed=False)

    def fault(error: Exception) -> KeiroError:
        if isinstance(error, sqlite3.ProgrammingError) and "thread" in str(error):
            return InvalidCall(
                f"{error}. The engine uses connection= on the thread of its event loop: open it with "
                "check_same_thread=False, or with SQLAlchemy"
            )
        return sqlite_fault(error, path)

    return Joined(caller, sql, prepare, program, fault)


def _inline_for(connection: Any, inline: Inline | None) -> Inline | None:
    sync, _ = sqlalchemy_connection(connection)
    return inline if inline is None or sync is None else inline.like(sync.dialect)


_NO_WRITE: Final = "UPDATE {heads} SET version = version WHERE run_key IS NULL"
"""Takes the write lock and changes nothing."""


def _sqlite_caller(connection: Any) -> tuple[Caller, Any]:
    """How to use a connection, and what its driver says about its transaction."""
    if isinstance(connection, sqlite3.Connection):
        return InLoop(connection, execute_of_sqlite(connection)), connection
    sync, is_async = sqlalchemy_connection(connection)
    if sync is None or sync.dialect.name != "sqlite":
        raise not_a_connection(connection, "a SQLAlchemy or sqlite3 connection")
    if is_async:
        return InGreenlet(connection), sync.connection.driver_connection
    return InLoop(connection, execute_of(sync)), sync.connection.driver_connection


def _same_file(file: str, path: str) -> bool:
    with suppress(OSError):
        return bool(file) and os.path.samefile(file, path)
    return False


def join_postgres(
    connection: Any,
    own_database: Callable[[], Awaitable[tuple[Any, ...]]],
    target: str,
    sql: Sql,
    inline: Inline | None,
    lock_key: int,
) -> Joined:
    """The journal in the Postgres database `target` through a caller's connection."""
    caller = _postgres_caller(connection)
    inline = _inline_for(connection, inline)

    async def prepare(caller: Caller) -> None:
        theirs = tuple((await caller.run(which_database()))[0][0])
        if theirs != tuple(await own_database()):
            raise InvalidCall(
                f"connection= leads to another database ({theirs[0]!r}) or server than the journal, which is {target}"
            )

    def program(command: Command, memory: bool) -> Program[Decision]:
        lock: Statement = (f"SELECT pg_advisory_xact_lock({lock_key})", ())
        return command_program(sql, command, lock, inline, memory=memory, hexed=True)

    def fault(error: Exception) -> KeiroError:
        sqlstate = getattr(getattr(error, "orig", None) or error, "sqlstate", None)
        if sqlstate == _NO_TRANSACTION:
            return InvalidCall(
                "no transaction is open on this connection, which is in autocommit mode: begin one before, for example "
                "by `with connection.transaction():`"
            )
        if sqlstate == _UNIQUE:
            return StoreBusy(
                "another transaction wrote to this run after the caller's had taken its snapshot; nothing was written. "
                "Roll back and try again, or use the isolation level READ COMMITTED"
            )
        return postgres_fault(sqlstate, str(error), target)

    return Joined(caller, sql, prepare, program, fault)


_NO_TRANSACTION: Final = "25P01"
_UNIQUE: Final = "23505"


def which_database() -> Program[list[list[Any]]]:
    """What tells the database of a connection from every other."""
    # The moment the server started is as good as an id: two servers do not share it to the microsecond.
    return _select(
        [
            (
                "SELECT current_database()::text, (SELECT oid FROM pg_database WHERE datname ="
                " current_database())::bigint, (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint",
                (),
            )
        ]
    )


def _postgres_caller(connection: Any) -> Caller:
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        return AsyncPsycopg(connection)
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return InThread(connection, execute_of_psycopg(connection), connection)
    sync, is_async = sqlalchemy_connection(connection)
    if sync is None or sync.dialect.name != "postgresql":
        raise not_a_connection(connection, "a SQLAlchemy or psycopg connection")
    if is_async:
        return InGreenlet(connection)
    return InThread(connection, execute_of(sync), sync.connection.driver_connection)
