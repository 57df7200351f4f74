"""A parked run that is made to go on by an engine which has room for it goes on there without a claim."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from keiro.decisions import AlreadyPresent, Append, Deliver, new
from keiro.events import StepRecorded
from tests.conformance.parking import evicted
from tests.conformance.test_ownership import worker_of
from tests.conftest import MakeEngine

LIMIT_S = 30


@keiro.workflow
async def asks(run: keiro.WorkflowRun) -> list[Any]:
    first = await run.deferred("first").result()
    return [first, await run.deferred("second").result()]


@keiro.workflow(queue="narrow")
async def queued(run: keiro.WorkflowRun) -> Any:
    return await run.deferred("first").result()


def count_claims(engine: keiro.Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each claim of this engine brings."""
    found: list[int] = []
    claim = engine.store.claim

    async def counted(*args: Any, **kwargs: Any) -> Any:
        taken = await claim(*args, **kwargs)
        found.append(len(taken))
        return taken

    monkeypatch.setattr(engine.store, "claim", counted)
    return found


async def head_of(engine: keiro.Engine, run_id: str) -> Any:
    found = await engine.store.head(run_id)
    assert found is not None
    return found


async def test_it_goes_on_without_a_claim_and_under_a_new_epoch(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        claims = count_claims(engine, monkeypatch)
        epochs = []
        for name in ("first", "second"):
            before = (await head_of(engine, handle.run_id))[1]
            assert before.owner is None
            await engine.complete(handle.run_id, name, name)
            run, head = await head_of(engine, handle.run_id)
            if not run.terminal:
                epochs.append(head.epoch - before.epoch)
            if name == "first":
                await evicted(engine, handle)
        assert await handle.result(LIMIT_S) == ["first", "second"]
        assert sum(claims) == 0
        assert epochs == [1] * len(epochs)
        assert await engine.reconcile() == []


async def test_many_go_on_at_once_and_no_more_than_there_is_room_for(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    async with make_engine(asks, concurrency=5) as engine:
        most = 0
        adopt = engine.adopt

        def adopted(*args: Any) -> None:
            nonlocal most
            adopt(*args)
            most = max(most, len(engine._resident))

        monkeypatch.setattr(engine, "adopt", adopted)
        handles = await engine.start_many(asks, [()] * 40)
        for handle in handles:
            await evicted(engine, handle)
        for name in ("first", "second"):
            await asyncio.gather(*(engine.complete(handle.run_id, name, 1) for handle in handles))
        assert [await handle.result(LIMIT_S) for handle in handles] == [[1, 1]] * 40
        assert most <= 5


async def test_runs_of_a_queue_are_claimed_because_its_limits_are_counted_there(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    async with make_engine(queued, queues=[keiro.Queue("narrow", concurrency=1)]) as engine:
        handle = await engine.start(queued, id="a")
        await evicted(engine, handle)
        claims = count_claims(engine, monkeypatch)
        await engine.complete(handle.run_id, "first", 1)
        assert await handle.result(LIMIT_S) == 1
        assert sum(claims) == 1


async def test_a_client_leaves_it_to_the_workers(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(asks, worker=False) as client, make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        await client.complete(handle.run_id, "first", 1)
        await client.complete(handle.run_id, "second", 2)
        assert await client.handle(handle.run_id).result(LIMIT_S) == [1, 2]


async def test_a_history_that_cannot_be_read_hands_it_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        history = engine.store.history
        fails = [keiro.StoreUnavailable("away")]

        async def failing(*args: Any) -> Any:
            if fails:
                raise fails.pop()
            return await history(*args)

        monkeypatch.setattr(engine.store, "history", failing)
        await engine.complete(handle.run_id, "first", 1)
        await engine.complete(handle.run_id, "second", 2)
        assert await handle.result(LIMIT_S) == [1, 2]
        assert not fails


async def test_one_whose_answer_was_lost_is_driven_when_the_command_comes_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    """It is the sender's already, and nobody else would take it from a worker that lives."""
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        command = Deliver("wf:asks-a", "awk:first", b'{"ok":1}', engine.wall_ms(), owner=worker_of(engine).key)
        committed = engine.committed
        monkeypatch.setattr(engine, "committed", lambda *told: None)
        await engine.store.submit(command)
        run, head = await head_of(engine, handle.run_id)
        assert (run.status, head.owner) == ("running", worker_of(engine).key)
        assert handle.run_id not in engine._resident
        monkeypatch.setattr(engine, "committed", committed)

        assert isinstance(await engine.store.submit(command), AlreadyPresent)
        await evicted(engine, handle)
        # Once more, when there is nothing to make up for: it is parked, and stays so.
        assert isinstance(await engine.store.submit(command), AlreadyPresent)
        await engine.complete(handle.run_id, "second", 2)
        assert await handle.result(LIMIT_S) == [1, 2]


async def test_a_former_owner_is_fenced_off(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        run, head = await head_of(engine, handle.run_id)
        await engine.complete(handle.run_id, "first", 1)
        step = new(StepRecorded(step="late", result=keiro.events.Raw(b"1")), b"x" * 16)  # type: ignore[attr-defined]
        stale = Append(run.run_id, (step,), 1, run.run_key, worker_of(engine).key, head.epoch, head.version)
        assert type(await engine.store.submit(stale)).__name__ == "FenceLost"
        await engine.complete(handle.run_id, "second", 2)
        assert await handle.result(LIMIT_S) == [1, 2]
