"""An incarnation that ends while something is under way in its name: nothing is driven for it, and nothing is lost."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

import keiro
from keiro.decisions import Start, new
from keiro.events import WorkflowStarted
from keiro.stores.postgres import PostgresStore
from keiro.worker import Worker
from tests.conftest import MakeEngine

calls: list[str] = []
gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def note(value: str) -> str:
    calls.append(value)
    return value


async def held(value: str) -> str:
    calls.append(value)
    gate["entered"].set()
    await gate["go"].wait()
    return value


@keiro.workflow
async def once(run: keiro.WorkflowRun) -> str:
    return await run.step(note, "once")


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> str:
    return await run.step(held, "held")


@keiro.workflow
async def stubborn(run: keiro.WorkflowRun) -> str:
    try:
        return await run.step(held, "held")
    except BaseException:
        await gate["entered"].wait()  # it will not be told to stop
        await asyncio.Event().wait()
        raise


def worker_of(engine: keiro.Engine) -> Worker:
    assert engine._worker is not None
    return engine._worker


async def test_what_an_ended_incarnation_claimed_is_not_driven_for_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(once) as engine, make_engine(worker=False) as client:
        worker, history = worker_of(engine), engine.store.history

        async def late(run_keys: Any, after: int = 0) -> Any:
            monkeypatch.undo()
            await worker._begin_again()
            return await history(run_keys, after)

        monkeypatch.setattr(engine.store, "history", late)
        handle = await client.start(once, id="a")
        worker.wake()
        assert await handle.result(20) == "once"
        assert calls == ["once"]


async def test_a_start_under_way_when_the_incarnation_ends_is_driven_once(make_engine: MakeEngine) -> None:
    async with make_engine(once) as engine:
        starting = asyncio.create_task(engine.start(once, id="a"))
        ending = asyncio.create_task(worker_of(engine)._begin_again())
        handle = await starting
        await ending
        assert await handle.result(20) == "once"
        assert calls == ["once"]


async def test_a_start_that_was_cancelled_leaves_its_run_driven_and_no_slot_taken(make_engine: MakeEngine) -> None:
    async with make_engine(once) as engine:
        starting = asyncio.create_task(engine.start(once, id="a"))
        await asyncio.sleep(0)  # the command is queued
        starting.cancel()
        await asyncio.wait([starting])
        assert await (await engine.start(once, id="a")).result(20) == "once"
        assert calls == ["once"] and not engine._births


async def test_a_result_is_heard_of_while_the_old_body_refuses_to_stop(make_engine: MakeEngine) -> None:
    async with make_engine(stubborn) as old, make_engine(stubborn) as other:
        handle = await old.start(stubborn, id="a")
        waiter = asyncio.create_task(handle.result(20))
        await gate["entered"].wait()
        worker_of(old)._claims = False  # the other engine takes the run over
        await worker_of(old)._begin_again()
        gate["go"].set()
        assert await other.handle(handle.run_id).result(20) == "held"
        assert await waiter == "held"
        (left,) = old._tasks
        left.cancel()


async def test_a_full_worker_does_not_ask_again_and_again_for_what_is_due(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(waits, concurrency=1) as engine:
        await engine.start(waits, id="a")
        await gate["entered"].wait()

        async def overdue(workflows: Any) -> int:
            return engine.store.now_ms() - 1000

        monkeypatch.setattr(engine.store, "next_due_ms", overdue)
        assert await worker_of(engine)._claim_all() == 1.0
        gate["go"].set()


async def test_a_lease_is_renewed_under_a_load_that_never_pauses(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch commits while the next one is queued already: what is not a command has its turn all the same."""
    async with keiro.Engine(postgres_url, migrate=True) as engine:
        store = engine.store
        assert isinstance(store, PostgresStore)
        commit, batches = store._commit, 0

        def one_more() -> None:
            started = WorkflowStarted(workflow="nobody", key=uuid.uuid4().hex, input=keiro_input())
            store.submit(Start(f"wf:nobody-{started.key}", new(started, uuid.uuid4().bytes), 1))

        async def loaded(batch: Any) -> None:
            nonlocal batches
            batches += 1
            if batches < 50 and not renewed.done():
                one_more()
            await commit(batch)

        monkeypatch.setattr(store, "_commit", loaded)
        one_more()
        renewed = asyncio.create_task(store.adopt_orphans())
        await renewed
        assert batches < 50


def keiro_input() -> Any:
    from msgspec import Raw

    return Raw(b"[]")
