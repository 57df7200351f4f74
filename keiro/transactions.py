"""The transactions of callers that an engine takes part in, by `connection=` and by `Engine.transact`."""

from __future__ import annotations

import asyncio
import inspect
from asyncio import Task
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from keiro.decisions import Appended, Command, Outcome
from keiro.errors import InvalidCall, StoreBusy, StoreError, StoreUnavailable
from keiro.stores.caller import Joined, sqlalchemy_connection, watched
from keiro.stores.connections import Connections
from keiro.stores.faults import is_conflict_error, is_outage, is_refusal
from keiro.stores.transaction import Callbacks, Gate, compose, patiently
from keiro.threads import ENDS, in_thread

T = TypeVar("T")


class Store(Protocol):
    """What this module needs of a store."""

    def join(self, connection: Any) -> Joined:
        """The journal through a caller's connection. Raises `InvalidCall` for what is none to this store."""

    def connections(self) -> Connections:
        """Connections to the journal's database."""


class Transaction:
    """A transaction that `Engine.transact` opened on a caller's connection. It belongs to the task that opened it."""

    def __init__(self, connection: Any, joined: Joined) -> None:
        self.connection = connection
        self.joined = joined
        self.task: Task[Any] | None = asyncio.current_task()
        self.callbacks = Callbacks()

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the outermost transaction has committed; never, if it or the enclosing
        `Engine.transact` is rolled back. What it raises is logged and undoes nothing."""
        self.callbacks.add(callback)


class _Raised(Exception):
    def __init__(self, error: Exception) -> None:
        self.error = error


class _NotAppended(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


Body = Callable[[Transaction], Awaitable[T] | T]


class Transactions:
    """Joins callers' transactions for one engine."""

    def __init__(
        self,
        store: Store,
        gate: Gate | None,
        tell: Callable[[], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._store = store
        self._gate = gate
        self._tell = tell
        self._failed = failed
        self._open: dict[int, Transaction] = {}

    def joined(self, connection: Any) -> Joined:
        """The journal as a caller's transaction sees it."""
        open_one = self._found(connection)
        return self._store.join(connection) if open_one is None else open_one.joined

    async def submit(self, command: Command, connection: Any) -> Outcome:
        """Execute a command in the caller's transaction. Who waits for it is woken after the commit.

        Commits of SQLAlchemy connections and of `transact` are seen; those of a raw connection are found by the slow
        look that every engine takes at its store.
        """
        open_one = self._found(connection)
        if open_one is not None:
            held = self._gate is not None and self._gate.held
            decision = await open_one.joined.submit(command, memory=held)
            add: Callable[[Callable[[], object]], object] | None = open_one.on_commit
        else:
            # Before the command, so that a savepoint that takes it back is heard of.
            watch = watched(connection, self._failed)
            decision = await self._store.join(connection).submit(command)
            add = None if watch is None else watch.add
        if add is not None and decision.writes:
            add(self._tell)
        return decision.outcome

    async def perform(
        self, call: Callable[[Any], Awaitable[T]], record: Callable[[T], Command], *, is_async: bool
    ) -> tuple[T, Outcome] | Outcome:
        """Call `call` with a connection of ours and execute the command that records what it gave, in one transaction.
        If the command appends nothing the rest is rolled back too, and its outcome is all there is.

        Raises what `call` raised, `StoreError` where the store was busy or away: then it is not known whether the
        commit was the last thing that reached it.
        """

        async def body(transaction: Transaction) -> tuple[T, Outcome]:
            try:
                value = await call(transaction.connection)
            except Exception as error:
                if is_conflict_error(error):
                    raise
                if is_outage(error):
                    raise StoreUnavailable(f"{error} (in the SQL of a step)") from error
                raise _Raised(error) from error
            outcome = await self.submit(record(value), transaction)
            if not isinstance(outcome, Appended):
                raise _NotAppended(outcome)
            return value, outcome

        async with self._store.connections().open(is_async=is_async) as connection:
            try:
                return await self.transact(body, connection)
            except _NotAppended as refused:
                return refused.outcome
            except _Raised as raised:
                raise raised.error from raised.error.__cause__
            except Exception as error:
                # A constraint that is checked at the commit is the step's own failure.
                if isinstance(error, StoreError) or is_refusal(error):
                    raise
                raise StoreUnavailable(f"{error} (around the transaction of a step)") from error

    def _found(self, connection: Any) -> Transaction | None:
        open_one = connection if isinstance(connection, Transaction) else self._open.get(_identity(connection))
        if open_one is None:
            return None
        if self._open.get(_identity(open_one.connection)) is not open_one:
            raise InvalidCall("this transaction has ended: begin another with `engine.transact`")
        if open_one.task is not asyncio.current_task():
            raise InvalidCall(
                "a transaction belongs to the task that opened it: call the engine from the body given to "
                "`engine.transact`, or let the other task open one of its own"
            )
        return open_one

    async def transact(self, body: Body[T], connection: Any) -> T:
        """See `Engine.transact`."""
        outer = self._found(connection)
        if outer is not None:
            return await compose(self._gate, partial(self._nested, outer), partial(_run, body))
        sync, _ = sqlalchemy_connection(connection)
        if sync is None:
            raise InvalidCall(
                f"transact(connection=…) takes a SQLAlchemy connection, not {connection!r}: it has to begin and commit"
            )
        if sync.in_transaction():
            raise InvalidCall(
                "a transaction is open on this connection already: call `transact` before anything else on it, or pass "
                "connection= to the engine's methods and commit yourself"
            )
        try:
            return await patiently(
                lambda: compose(self._gate, partial(self._outermost, connection), partial(_run, body)),
                is_conflict_error,
            )
        except Exception as error:
            if is_conflict_error(error) and not isinstance(error, StoreBusy):
                raise StoreBusy(
                    f"a transaction met others again and again ({error}); nothing was written. Try again later."
                ) from error
            raise

    async def _outermost(self, connection: Any, body: Callable[[Transaction], Awaitable[T]]) -> T:
        joined = self._store.join(connection)
        transaction = Transaction(connection, joined)
        ends = _Ends(connection)
        await ends.begin()
        self._open[_identity(connection)] = transaction
        try:
            await joined.begin()
            value = await body(transaction)
            await ends.commit()
        except BaseException:
            await ends.rollback()
            raise
        finally:
            del self._open[_identity(connection)]
        transaction.callbacks.run(self._failed)
        return value

    async def _nested(self, outer: Transaction, body: Callable[[Transaction], Awaitable[T]]) -> T:
        mark = outer.callbacks.mark()
        ends = _Ends(outer.connection)
        await ends.begin_nested()
        try:
            value = await body(outer)
            await ends.commit()
        except BaseException:
            outer.callbacks.undo(mark)
            await ends.rollback()
            raise
        return value


async def _run(body: Body[T], transaction: Transaction) -> T:
    value = body(transaction)
    if inspect.isawaitable(value):
        awaited: T = await value
        return awaited
    return value


def _identity(connection: Any) -> int:
    sync, _ = sqlalchemy_connection(connection)
    return id(connection if sync is None else sync)


class _Ends:
    """Begins and ends a transaction or a savepoint on a SQLAlchemy connection of either kind."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        _, self._is_async = sqlalchemy_connection(connection)
        self._transaction: Any = None

    async def begin(self) -> None:
        """Begin."""
        self._transaction = await self._call(self._connection.begin)

    async def begin_nested(self) -> None:
        """Begin a savepoint."""
        self._transaction = await self._call(self._connection.begin_nested)

    async def commit(self) -> None:
        """Commit, or release."""
        await self._call(self._transaction.commit)

    async def rollback(self) -> None:
        """Roll back. A connection that is lost has done so."""
        with suppress(Exception):
            await self._call(self._transaction.rollback)

    async def _call(self, method: Callable[[], Any]) -> Any:
        if self._is_async:
            done = method()
            return await done if inspect.isawaitable(done) else done
        if self._connection.dialect.name == "sqlite":
            return method()
        # A server that takes its time to flush must not hold up the loop. Shielded: whoever is cancelled rolls back, on
        # a connection that the thread must have left by then.
        work = asyncio.ensure_future(in_thread(method, (), {}, pool=ENDS))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            raise
