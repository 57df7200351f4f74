"""Positions of the journal are gap-free to a reader: what was read up to one never gains an event at or below it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import psycopg
import pytest

import keiro
from keiro.decisions import Append, Command, Start, Stored, fold, new
from keiro.events import StepRecorded, WorkflowCompleted, WorkflowStarted
from keiro.stores import open_store
from keiro.stores.base import Store
from keiro.stores.postgres import FEW, LOCK_KEY
from tests.conftest import MakeEngine

HELD = 424242
"""The advisory lock that keeps one chosen transaction from committing after it has drawn its positions."""


BATCH = FEW + 1
"""So many commands at once that they are written by the statement for batches."""


class Deaf:
    def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None: ...
    def woken(self) -> None: ...


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    store.listener = Deaf()
    await store.open(migrate=True)
    try:
        yield store
    finally:
        await store.close()


class Writer:
    """One process's store with a worker and a run of its own, and the commands it sends."""

    def __init__(self, store: Store, name: str, worker: int) -> None:
        self.store = store
        self.name = name
        self.worker = worker
        self.ids = iter(range(1, 250))
        self.version = 1
        self.run: Any = None

    def event_id(self) -> bytes:
        return (self.name * 16)[:15].encode() + bytes([next(self.ids)])

    def birth(self) -> Start:
        key = f"{self.name}{next(self.ids)}"
        event = WorkflowStarted(workflow="w", key=key, input=msgspec.Raw(b"{}"))
        return Start(f"wf:w-{key}", new(event, self.event_id()), 1, self.worker)

    async def begin(self) -> None:
        outcome: Any = await self.store.submit(self.birth())
        self.run = outcome.run

    def append(self, *, known: bool = True, end: bool = False) -> Append:
        event = WorkflowCompleted(result=msgspec.Raw(b"1")) if end else StepRecorded(step="s", result=msgspec.Raw(b"1"))
        one = new(event, self.event_id())
        self.version += 1
        row = fold(self.run, (one,), 2) if end else None
        owner = self.worker if known else None
        expected = self.version - 1 if known else None
        return Append(self.run.run_id, (one,), 2, self.run.run_key, owner, 1 if known else 0, expected, row)

    def commands(self, shape: str) -> list[Command]:
        match shape:
            case "start":
                return [self.birth()]
            case "step":
                return [self.append()]
            case "end":
                return [self.append(end=True)]
            case "batch":
                return [self.append() for _ in range(BATCH)]
            case _:
                return [self.append(known=False)]

    def send(self, shape: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(asyncio.gather(*(self.store.submit(command) for command in self.commands(shape))))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def watcher(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def waits_for(watcher: psycopg.Connection[Any], key: int) -> int:
    """How many connections wait for an advisory lock."""
    sql = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    return int(watcher.execute(sql, (key,)).fetchone()[0])  # type: ignore[index]


@pytest.mark.parametrize("later", ["start", "step", "end", "batch", "decided"])
@pytest.mark.parametrize("first", ["start", "step", "end", "batch", "decided"])
async def test_a_later_commit_waits_for_an_earlier_one(
    postgres_url: str, watcher: psycopg.Connection[Any], first: str, later: str
) -> None:
    """L5, field reports marten#4952 and marten#1629: every kind of append takes the journal's lock before it draws a
    position, so no reader passes over an event that is still being committed."""
    async with opened(postgres_url) as slow_store, opened(postgres_url) as quick_store:
        slow = Writer(slow_store, "slow", 1)
        quick = Writer(quick_store, "quick", 2)
        await slow.begin()
        await quick.begin()
        watcher.execute(
            "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.event_id::text LIKE"
            f" '{b'slow'.hex()}%' THEN PERFORM pg_advisory_xact_lock({HELD}); END IF; RETURN NULL; END $$"
        )
        watcher.execute(
            "CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON keiro.keiro_journal DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION hold()"
        )
        read: list[Stored] = await quick_store.read(0, 100)
        with psycopg.connect(postgres_url) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(%s)", (HELD,))
            committing = slow.send(first)
            await until(lambda: waits_for(watcher, HELD) == 1)
            following = quick.send(later)
            await until(lambda: following.done() or waits_for(watcher, LOCK_KEY) == 1)
            read += await quick_store.read(read[-1].position, 100)
            holder.rollback()
        outcomes = await asyncio.gather(committing, following)
        assert {type(outcome).__name__ for some in outcomes for outcome in some} == {"Appended"}
        read += await quick_store.read(read[-1].position, 100)
        everything = await quick_store.read(0, 100)
        assert read == everything
        assert len(everything) == 2 + sum(BATCH if shape == "batch" else 1 for shape in (first, later))
        watcher.execute("DROP FUNCTION hold() CASCADE")


@pytest.mark.parametrize("later", ["start", "step", "end", "batch", "decided"])
async def test_a_commit_waits_for_a_caller_who_has_appended_and_not_committed(
    postgres_url: str, watcher: psycopg.Connection[Any], later: str
) -> None:
    """A command on a caller's connection holds the journal from its append to the caller's commit."""
    async with opened(postgres_url) as slow_store, opened(postgres_url) as quick_store:
        slow = Writer(slow_store, "slow", 1)
        quick = Writer(quick_store, "quick", 2)
        await slow.begin()
        await quick.begin()
        read = await quick_store.read(0, 100)
        with psycopg.connect(postgres_url) as caller:
            await slow_store.join(caller).submit(slow.append(known=False))
            following = quick.send(later)
            await until(lambda: following.done() or waits_for(watcher, LOCK_KEY) == 1)
            read += await quick_store.read(read[-1].position, 100)
            caller.commit()
        await following
        read += await quick_store.read(read[-1].position, 100)
        assert read == await quick_store.read(0, 100)
        assert [event.run_id for event in read[2:3]] == [slow.run.run_id]


async def test_a_tailing_reader_sees_every_event_once_and_in_order(make_engine: MakeEngine) -> None:
    """L5, L8, E25: two engines append at once, a third reads by position all the while, in small pages."""

    async def nothing(n: int) -> int:
        return n

    @keiro.workflow
    async def chatty(run: keiro.WorkflowRun, n: int) -> int:
        for i in range(10):
            await run.step(nothing, i)
        return n

    read: list[Stored] = []

    async def tail(engine: keiro.Engine) -> None:
        while True:
            while page := await engine.store.read(read[-1].position if read else 0, 7):
                read.extend(page)
            await asyncio.sleep(0)

    async with make_engine(chatty) as one, make_engine(chatty) as other, make_engine(worker=False) as reader:
        tailing = asyncio.create_task(tail(reader))
        await asyncio.gather(
            *(
                engine.execute(chatty, n, id=f"{name}{n}")
                for name, engine in (("a", one), ("b", other))
                for n in range(20)
            )
        )
        tailing.cancel()
        await asyncio.wait([tailing])
        while page := await reader.store.read(read[-1].position, 7):
            read.extend(page)
        assert read == await reader.store.read(0, 10_000)
        assert len(read) == 40 * 12
        by_run: dict[str, list[int]] = {}
        for event in read:
            by_run.setdefault(event.run_id, []).append(event.version)
        assert set(map(tuple, by_run.values())) == {tuple(range(1, 13))}
