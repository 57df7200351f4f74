"""Wake-ups: in the process, between processes, and the nets under them; each path alone, with the others cut."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import keiro
from keiro import worker as workers
from tests.conformance.test_ownership import gate, held, worker_of
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine

A_DAY = 86_400.0


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the store unless it was woken."""
    monkeypatch.setattr(workers, "SAFETY_POLL_S", A_DAY)


def without_data_version(engine: keiro.Engine) -> None:
    poll = getattr(engine.store, "_poll", None)
    if poll is not None:
        poll.cancel()


def deaf(engine: keiro.Engine) -> None:
    """Cut every wake-up that comes from outside this engine's own commits."""
    without_data_version(engine)
    store: Any = engine.store
    engine.woken = lambda: None  # type: ignore[method-assign]
    if hasattr(store, "_wake"):
        store._woken = store._wake._woken = lambda: None


@keiro.workflow
async def noted(run: keiro.WorkflowRun, n: int) -> int:
    return int(await run.step(note, n))


@keiro.workflow
async def waiting(run: keiro.WorkflowRun) -> str:
    return str(await run.step(held, "held"))


async def settled(engine: keiro.Engine) -> None:
    """Until the engine's claim loop waits for a wake-up."""
    wake = worker_of(engine)._wake
    while wake.is_set() or not wake._waiters:  # type: ignore[attr-defined]
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_polls")
async def test_what_becomes_pending_here_is_claimed_at_once(make_engine: MakeEngine) -> None:
    """WF-160, WF-161: in the process itself the commit is the wake-up. A start beyond the free slots, and a run handed
    back by the workflow's own retry, are claimed as soon as there is room."""

    @keiro.workflow(retry=keiro.Retry(3, initial=0.0, jitter=0))
    async def again(run: keiro.WorkflowRun) -> int:
        if run.info.attempt < 3:
            raise ValueError("not yet")
        return run.info.attempt

    async with make_engine(noted, again, concurrency=1) as engine:
        deaf(engine)
        await settled(engine)
        handles = [await engine.start(noted, n, id=str(n)) for n in range(3)]
        handles.append(await engine.start(again, id="a"))
        async with asyncio.timeout(60):
            assert [await handle.result() for handle in handles] == [0, 1, 2, 3]


@pytest.mark.usefixtures("no_polls")
async def test_a_commit_wakes_the_workers_and_the_waiters_of_other_engines(make_engine: MakeEngine) -> None:
    """Notifications on Postgres, a datagram on SQLite, a call in memory; both ways, with nothing else left to do it."""
    async with make_engine(noted) as engine, make_engine(worker=False) as client:
        # Each learns of the other when it registers or renews.
        await worker_of(engine)._renew()
        await worker_of(client)._renew()
        for one in (engine, client):
            without_data_version(one)
        for n in range(3):
            await settled(engine)
            handle = await client.start(noted, n, id=str(n))
            async with asyncio.timeout(60):
                assert await handle.result() == n


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("no_polls")
async def test_who_came_later_is_woken_before_anybody_renews(make_engine: MakeEngine) -> None:
    """A newcomer says that it is there; else the older ones would wake it only after they have renewed."""
    async with make_engine(worker=False) as client, make_engine(noted) as engine:
        store: Any = client.store
        for one in (engine, client):
            without_data_version(one)
        async with asyncio.timeout(60):
            while not store._wake._peers:
                await asyncio.sleep(0)
        await settled(engine)
        handle = await client.start(noted, 1, id="a")
        async with asyncio.timeout(60):
            assert await handle.result() == 1


@pytest.mark.parametrize("handed_back_by", ["release", "bury"])
@pytest.mark.usefixtures("no_polls")
async def test_a_run_that_is_handed_back_wakes_the_others(make_engine: MakeEngine, handed_back_by: str) -> None:
    """A drain on one machine is a start on the next. A worker that buries another is awake itself, and looks."""
    async with make_engine(noted) as engine, make_engine(worker=False) as owner:
        await worker_of(engine)._renew()
        await worker_of(owner)._renew()
        without_data_version(engine)
        await worker_of(engine).stop_claiming()
        handle = await owner.start(noted, 1, id="a")
        ((run, _),) = await owner.store.claim(worker_of(owner).key, ["noted"], 1)
        worker = worker_of(engine)
        worker._claims = True
        worker._tasks.append(asyncio.create_task(worker._claim_for_ever()))
        await settled(engine)
        if handed_back_by == "release":
            await owner.store.release(worker_of(owner).key, [run.run_key])
        else:
            row = next(row for row in await engine.store.workers() if row.worker_key == worker_of(owner).key)
            now = row.lease_expires_at_ms
            engine.store.now_ms = lambda: now  # type: ignore[method-assign]
            await worker._bury_dead()
        async with asyncio.timeout(60):
            assert await engine.handle(handle.run_id).result() == 1


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("no_polls")
async def test_a_datagram_that_is_lost_is_made_up_for_by_data_version(make_engine: MakeEngine) -> None:
    async with make_engine(noted) as engine, make_engine(worker=False) as client:
        store: Any = engine.store
        store._wake._woken = lambda: None
        await settled(engine)
        handle = await client.start(noted, 1, id="a")
        async with asyncio.timeout(60):
            await engine.handle(handle.run_id).result()


async def test_where_every_wake_up_is_lost_a_slow_look_finds_the_work_and_the_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safety poll, of a worker and of who waits for a result."""
    monkeypatch.setattr(workers, "SAFETY_POLL_S", 0.01)
    async with make_engine(noted) as engine, make_engine(worker=False) as client:
        deaf(engine)
        deaf(client)
        handle = await client.start(noted, 1, id="a")
        async with asyncio.timeout(60):
            assert await handle.result() == 1


@pytest.mark.usefixtures("no_polls")
async def test_a_listener_whose_connection_is_dropped_listens_again_and_looks(postgres_url: str) -> None:
    """Field reports hull#273, Hangfire.PostgreSql#410: neither deaf nor busy; what came meanwhile is found."""
    looked: list[str] = []
    async with (
        keiro.Engine(postgres_url, workflows=[noted], migrate=True) as engine,
        keiro.Engine(postgres_url, worker=False) as client,
    ):
        await worker_of(engine)._renew()
        await worker_of(client)._renew()
        await settled(engine)
        woken = engine.woken
        engine.woken = lambda: (looked.append("woken"), woken())  # type: ignore[method-assign, func-returns-value]
        store: Any = engine.store
        reader = store._reader
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as admin:
            await admin.execute("SELECT pg_terminate_backend(%s)", (reader._pgconn.backend_pid,))
        while store._reader is reader or store._reader.closed or not looked:
            await asyncio.sleep(0)
        handle = await client.start(noted, 1, id="a")
        async with asyncio.timeout(60):
            assert await handle.result() == 1


@pytest.mark.usefixtures("no_polls")
async def test_an_end_between_the_look_and_the_wait_is_not_missed(make_engine: MakeEngine) -> None:
    """Who waits is registered first and looks then: the other way round an end in between wakes nobody."""
    async with make_engine(waiting) as engine:
        deaf(engine)
        handle = await engine.start(waiting, id="a")
        await gate["entered"].wait()
        driver = engine._resident.pop(handle.run_id)
        read = engine.store.run

        async def stale(run_id: str) -> Any:
            run = await read(run_id)
            gate["go"].set()
            assert driver.task is not None
            await asyncio.wait([driver.task])
            return run

        engine.store.run = stale  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            assert (await engine.wait_ended(handle.run_id)).status == "completed"


async def test_who_waits_for_a_result_is_told_when_the_engine_closes(make_engine: MakeEngine) -> None:
    async with make_engine(waiting, grace=0) as engine:
        handle = await engine.start(waiting, id="a")
        result = asyncio.create_task(handle.result())
        await gate["entered"].wait()
    with pytest.raises(keiro.StoreUnavailable, match="closed"):
        await result


async def test_a_wait_that_times_out_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    async with make_engine(waiting, grace=0) as engine:
        handle = await engine.start(waiting, id="a")
        await gate["entered"].wait()
        with pytest.raises(TimeoutError, match=f"{handle.run_id} has not ended within 0.001 s"):
            await handle.result(timeout=0.001)
        with pytest.raises(keiro.RunNotFound):
            await engine.handle("wf:waiting-none").result()
        assert engine._waiting == {}


@pytest.mark.usefixtures("no_polls")
async def test_a_paced_run_is_claimed_when_it_is_due_though_nothing_else_happens(make_engine: MakeEngine) -> None:
    @keiro.workflow(retry=keiro.Retry(2, initial=0.05, jitter=0))
    async def again(run: keiro.WorkflowRun) -> int:
        if run.info.attempt == 1:
            raise ValueError("not yet")
        return run.info.attempt

    async with make_engine(again) as engine:
        deaf(engine)
        async with asyncio.timeout(60):
            assert await engine.execute(again, id="a") == 2
