"""Connections of SQLAlchemy to a store's database, for the SQL of transactional steps.

They are made when the first step asks for one, and kept in a pool. The journal's own connections are others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from keiro.errors import InvalidCall
from keiro.threads import CONNECTIONS, ENDS, in_thread

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine

MOST: Final = 8
"""How many transactions of steps one engine has open at once on Postgres; more wait. On SQLite it is one."""


class Connections:
    """The pools of one store: plain connections for plain functions, `AsyncConnection`s for async ones."""

    def __init__(self, plain: Callable[[], sa.Engine], awaited: Callable[[], AsyncEngine], most: int) -> None:
        self._make_plain = plain
        self._make_awaited = awaited
        self._remote = most > 1
        self._turn = asyncio.Semaphore(most)
        self._plain: sa.Engine | None = None
        self._awaited: AsyncEngine | None = None

    @asynccontextmanager
    async def open(self, *, is_async: bool) -> AsyncIterator[Any]:
        """A connection without a transaction. Raises `InvalidCall` where a package for async ones is missing."""
        async with self._turn:
            if is_async:
                if self._awaited is None:
                    self._awaited = self._make_awaited()
                async with self._awaited.connect() as awaited:
                    yield awaited
                return
            if self._plain is None:
                self._plain = self._make_plain()
            # In a thread where a server may take its time to answer.
            connection = await self._call(self._plain.connect)
            try:
                yield connection
            finally:
                with suppress(Exception):  # one that is lost is replaced by the pool
                    await self._call(connection.close)

    async def _call(self, method: Callable[[], Any]) -> Any:
        return await in_thread(method, (), {}, pool=ENDS) if self._remote else method()

    async def close(self) -> None:
        """Close what no transaction uses."""
        plain, awaited = self._plain, self._awaited
        self._plain = self._awaited = None
        if plain is not None:
            await in_thread(plain.dispose, (), {}, pool=ENDS)
        if awaited is not None:
            await awaited.dispose()


async def to_the_end(
    connection: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begins: Callable[[], object] | None = None,
) -> Any:
    """Call a plain function that uses `connection` in a thread. When the await is cancelled its SQL is interrupted and
    its end awaited: until then the connection is not ours to roll back."""
    work = asyncio.ensure_future(in_thread(fn, args, kwargs, begins, CONNECTIONS))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with suppress(Exception):
            driver = connection.connection.driver_connection
            await in_thread(driver.interrupt if hasattr(driver, "interrupt") else driver.cancel, (), {}, pool=ENDS)
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        with suppress(BaseException):
            work.result()  # nobody else asks for what it raised
        raise


def on_sqlite(path: str, synchronous: str) -> Connections:
    """Connections to a SQLite file, which sync as those of the journal do."""
    address = f"sqlite:///{path}"

    def plain() -> sa.Engine:
        import sqlalchemy

        engine = sqlalchemy.create_engine(
            # Used by the thread of a step and, when that has ended, by the event loop's: never by both at once.
            sqlalchemy.make_url("sqlite://").set(database=path),
            connect_args={"check_same_thread": False},
            pool_size=1,
        )
        sqlalchemy.event.listen(engine, "connect", partial(_set_up, synchronous))
        return engine

    def awaited() -> AsyncEngine:
        import sqlalchemy

        try:
            import aiosqlite as aiosqlite
            from sqlalchemy.ext.asyncio import create_async_engine

            engine = create_async_engine(sqlalchemy.make_url("sqlite+aiosqlite://").set(database=path), pool_size=1)
        except ImportError as error:
            raise _missing(error, address, "aiosqlite greenlet") from error
        sqlalchemy.event.listen(engine.sync_engine, "connect", partial(_set_up, synchronous))
        return engine

    return Connections(plain, awaited, 1)


def _set_up(synchronous: str, connection: Any, record: object) -> None:
    cursor = connection.cursor()
    for pragma in (f"synchronous={synchronous}", "foreign_keys=ON", "recursive_triggers=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def on_postgres(conninfo: str, target: str) -> Connections:
    """Connections to a Postgres database."""
    options: dict[str, Any] = {"pool_size": MOST, "pool_pre_ping": True, "use_native_hstore": False}

    def plain() -> sa.Engine:
        import psycopg
        import sqlalchemy

        return sqlalchemy.create_engine("postgresql+psycopg://", creator=partial(psycopg.connect, conninfo), **options)

    def awaited() -> AsyncEngine:
        import psycopg

        try:
            from sqlalchemy.ext.asyncio import create_async_engine

            connect = partial(psycopg.AsyncConnection.connect, conninfo)
            return create_async_engine("postgresql+psycopg://", async_creator=connect, **options)
        except ImportError as error:
            raise _missing(error, target, "greenlet") from error

    return Connections(plain, awaited, MOST)


def _missing(error: ImportError, address: str, packages: str) -> InvalidCall:
    return InvalidCall(
        f"an async function as a transaction on {address} needs packages that are not installed ({error}): "
        f"pip install {packages}, or make it a plain function, which runs in a thread"
    )
