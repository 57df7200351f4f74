"""Ends that must be reached: of runs whatever their body raises, of engines however they are closed, of waits."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import pytest

import keiro
from keiro import worker as workers
from keiro.errors import KeiroError, StoreUnavailable
from keiro.stores.postgres import PostgresStore
from tests.conftest import MakeEngine

gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def held() -> None:
    gate["entered"].set()
    await gate["go"].wait()


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> None:
    await run.step(held)


@keiro.workflow
async def quick(run: keiro.WorkflowRun) -> int:
    return 1


class Odd(BaseException):
    """What frameworks raise past `except Exception`."""


@keiro.workflow
async def raises_odd(run: keiro.WorkflowRun) -> None:
    raise Odd("not an Exception")


class NeverMade(keiro.WorkflowRun, name="never_made"):
    def __init__(self) -> None:
        raise ValueError("no state")

    async def execute(self) -> None: ...


async def test_a_body_that_raises_no_exception_fails_its_run(make_engine: MakeEngine) -> None:
    async with make_engine(raises_odd) as engine:
        handle = await engine.start(raises_odd, id="a")
        with pytest.raises(keiro.WorkflowFailed, match="not an Exception"):
            await handle.result(20)


async def test_an_aggregate_that_cannot_be_made_fails_its_run(make_engine: MakeEngine) -> None:
    async with make_engine(NeverMade) as engine:
        handle = await engine.start(NeverMade, id="a")
        with pytest.raises(keiro.WorkflowFailed, match="no state"):
            await handle.result(20)


async def test_who_begins_to_wait_while_the_engine_closes_is_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(waits)
    await engine.__aenter__()
    handle = await engine.start(waits, id="a")
    await gate["entered"].wait()
    close, waiters = engine.store.close, []

    async def close_late() -> None:
        waiters.append(asyncio.create_task(handle.result()))
        await asyncio.wait(waiters, timeout=5)
        await close()

    monkeypatch.setattr(engine.store, "close", close_late)
    await engine.close(grace=0)
    (waiter,) = waiters
    assert waiter.done()
    with pytest.raises(KeiroError):
        await waiter


async def test_a_close_that_is_cancelled_closes_all_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(waits)
    await engine.__aenter__()
    handle = await engine.start(waits, id="a")
    await gate["entered"].wait()
    closing = asyncio.create_task(engine.close(grace=3600))
    while not engine._resident[handle.run_id].draining:
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled() and engine._loop is None
    async with make_engine(worker=False) as client:
        assert await client.handle(handle.run_id).status() == "pending"


async def test_two_that_close_an_engine_both_return_when_it_is_closed(make_engine: MakeEngine) -> None:
    engine = make_engine(waits)
    await engine.__aenter__()
    await engine.start(waits, id="a")
    await gate["entered"].wait()

    async def close() -> bool:
        await engine.close(grace=0)
        return engine._loop is None

    assert await asyncio.gather(close(), close()) == [True, True]


def test_an_engine_opens_again_in_another_event_loop(make_engine: MakeEngine) -> None:
    engine = make_engine(quick)

    async def once() -> Any:
        async with engine:
            return await engine.execute(quick)

    assert asyncio.run(once()) == 1
    assert asyncio.run(once()) == 1


def test_a_lease_is_not_renewed_for_an_event_loop_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine was never closed and drives nothing any more: the runs are for others when the lease ends."""
    monkeypatch.setattr(workers, "BLOCKED_S", 0.05)
    before = set(threading.enumerate())

    async def leave_open() -> set[threading.Thread]:
        await keiro.Engine("memory://", workflows=[quick]).__aenter__()
        return {thread for thread in threading.enumerate() if thread.name == "keiro lease"} - before

    (standing_in,) = asyncio.run(leave_open())
    standing_in.join(30)
    assert not standing_in.is_alive()


async def test_a_closed_store_does_not_connect_again(postgres_url: str) -> None:
    async with keiro.Engine(postgres_url, workflows=[quick], migrate=True) as engine:
        await engine.execute(quick, id="a")
    assert isinstance(engine.store, PostgresStore)
    with pytest.raises(StoreUnavailable, match="closed"):
        await engine.store.run("wf:quick-a")
    assert engine.store._reader is not None and engine.store._reader.closed


async def test_a_connection_that_is_cancelled_before_it_listens_is_closed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keiro.stores.pq import Connection

    async with keiro.Engine(postgres_url, workflows=[quick], migrate=True) as engine:
        store = engine.store
        assert isinstance(store, PostgresStore)
        made: list[Connection] = []
        listening = asyncio.Event()

        async def hang(self: Connection, sql: str) -> None:
            made.append(self)
            listening.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(Connection, "simple", hang)
        connecting = asyncio.create_task(store._connect(listen=True))
        await listening.wait()
        connecting.cancel()
        await asyncio.wait([connecting])
        monkeypatch.undo()
        assert connecting.cancelled() and made[0].closed


async def test_a_new_incarnation_asks_postgres_for_the_time(postgres_url: str) -> None:
    """The monotonic clock may have stood still for hours: a lease counted from it would have ended already."""
    async with keiro.Engine(postgres_url, migrate=True) as engine:
        store, worker = engine.store, engine._worker
        assert isinstance(store, PostgresStore) and worker is not None
        store._offset_ms -= 3_600_000
        await worker._begin_again()
        (row,) = [row for row in await store.workers() if row.worker_key == worker.key]
        ((now,),) = await store._select("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint", ())
        assert row.lease_expires_at_ms > int(now)


async def test_a_lease_renewed_for_a_blocked_loop_is_counted_by_the_time_of_postgres(postgres_url: str) -> None:
    """The process's clock may have stood still for hours: the lease would have ended already, and the worker go on."""
    async with keiro.Engine(postgres_url, migrate=True) as engine:
        store, worker = engine.store, engine._worker
        assert isinstance(store, PostgresStore) and worker is not None
        store._offset_ms -= 3_600_000
        with closing(store.run_tables()) as tables:
            assert tables.renew(worker.key, store.now_ms())
        (row,) = await store.workers()
        ((now,),) = await store._select("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint", ())
        assert row.lease_expires_at_ms > int(now)


async def test_who_joins_during_the_look_around_is_not_overlooked(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keiro.Engine(postgres_url, migrate=True) as engine:
        store, worker = engine.store, engine._worker
        assert isinstance(store, PostgresStore) and worker is not None
        workers = store.workers

        async def answered_before_they_came() -> Any:
            rows = await workers()
            store._heard("keiro", "somebody else")
            return rows

        monkeypatch.setattr(store, "workers", answered_before_they_came)
        await store.renew(worker.key)
        assert not store._alone
