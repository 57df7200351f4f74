"""Faults that users of durable engines have reported, where no other test shows that they do not happen here."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import keiro
from keiro.testing import force_replay
from tests.conformance.parking import evicted, parked
from tests.conftest import MakeEngine

LIMIT_S = 30


@keiro.step
async def note(value: Any) -> Any:
    return value


@keiro.workflow
async def asks(run: keiro.WorkflowRun) -> int:
    return int(await run.deferred("said", int).result())


async def test_a_deferred_that_is_completed_at_any_moment_around_parking_is_found(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """effect#6318: before, while and after the run is parked, in steps of one turn of the event loop."""
    async with make_engine(asks) as engine:

        async def one(turns: int) -> int:
            handle = await engine.start(asks)
            for _ in range(turns):
                await asyncio.sleep(0)
            await engine.complete(handle.run_id, "said", turns)
            return int(await handle.result(LIMIT_S))

        for first in range(0, 330, 11):
            moments = range(first, first + 11)
            assert await asyncio.gather(*(one(turns % 66) for turns in moments)) == [turns % 66 for turns in moments]


async def test_what_ends_one_task_of_a_body_is_not_parked_away_from_the_one_that_waits_for_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    """vercel#3183: the run looks idle while what has come is on its way from one task of the body to another."""

    @keiro.workflow
    async def family(run: keiro.WorkflowRun) -> int:
        async def inner() -> int:
            return int(await run.deferred("inner", int).result())

        other = asyncio.create_task(_result(run.deferred("other", int)))
        found = await asyncio.create_task(inner())
        recorded: int = await run.step(note, found)
        return recorded + await other

    async with make_engine(family) as engine:
        for turns in range(12):
            held = False
            history = engine.store.history

            async def late(keys: Any, after: int = 0, *, turns: int = turns, history: Any = history) -> Any:
                nonlocal held
                driver = engine._resident.get(f"wf:family-{turns}")
                if driver is not None and driver.parking is not None and not held:
                    held = True
                    # The answer to this read is late: what came meanwhile has been read by somebody else.
                    await engine.complete(f"wf:family-{turns}", "inner", turns)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                return await history(keys, after)

            monkeypatch.setattr(engine.store, "history", late)
            handle = await engine.start(family, id=f"{turns}")
            while not held:
                await asyncio.sleep(0)
            while "note" not in {step.step for step in await engine.steps(handle.run_id)}:
                run = await handle.run()
                waits = engine._resident.get(handle.run_id)
                assert waits is not None or run.status != "suspended" or run.waiting_token != "awk:other", turns
                await asyncio.sleep(0)
            await engine.complete(handle.run_id, "other", 1)
            assert await handle.result(LIMIT_S) == turns + 1
            monkeypatch.setattr(engine.store, "history", history)


async def _result(deferred: Any) -> int:
    return int(await deferred.result())


async def test_patches_asked_for_in_parallel_tasks_are_the_same_at_every_replay(make_engine: MakeEngine) -> None:
    """dbos-transact-py#714, #688: patches and steps do not depend on the order in which tasks happen to run."""

    @keiro.workflow(patches=["known"])
    async def parallel(run: keiro.WorkflowRun) -> list[str]:
        async def one(scope: keiro.ScopedRun, n: int) -> str:
            await scope.sleep(0.001 * (n % 3))
            known, unknown = scope.patched("known"), scope.patched("unknown")
            found: str = await scope.step(note, f"{n} {known} {unknown}")
            return found

        return await run.map(one, range(20))

    async with make_engine(parallel, strict=True) as engine:
        force_replay(engine, every_step=True)
        assert await engine.execute(parallel) == [f"{n} True False" for n in range(20)]


@pytest.mark.parametrize(("before", "now"), [(0, 3600), (3600, 0)])
async def test_a_sleep_of_nothing_is_recorded_as_any_other(make_engine: MakeEngine, before: float, now: float) -> None:
    """sdk-java#1579: a change between no time and some time is no other history."""
    length = [before]

    @keiro.workflow
    async def naps(run: keiro.WorkflowRun) -> int:
        await run.sleep(length[0])
        return int(await run.deferred("said", int).result())

    async with make_engine(naps, strict=True) as engine:
        handle = await engine.start(naps, id="a")
        await parked(handle)
        if before:
            assert (await handle.run()).waiting_reason == "sleep"
    length[0] = now
    async with make_engine(naps, strict=True) as engine:
        handle = engine.handle("wf:naps-a")
        await engine.complete(handle.run_id, "said", 1)
        if before:
            # Its time was set when it was reached, and stays.
            await parked(handle)
            assert (await handle.run()).waiting_reason == "sleep"
        else:
            assert await handle.result(LIMIT_S) == 1


async def test_timeouts_take_no_threads(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """dbos-transact-py#619."""
    monkeypatch.setattr("keiro.waits.PARK_S", 3600.0)

    @keiro.workflow
    async def patient(run: keiro.WorkflowRun) -> int:
        return int(await run.deferred("said", int).result(timeout=3600))

    @keiro.step(timeout=3600)
    async def slow(freed: asyncio.Event) -> None:
        await freed.wait()

    freed = asyncio.Event()

    @keiro.workflow
    async def steps(run: keiro.WorkflowRun) -> None:
        await run.step(slow, freed)

    async with make_engine(patient, steps) as engine:
        before = threading.active_count()
        await engine.start_many(patient, [()] * 100)
        await engine.start_many(steps, [()] * 100)
        while sum(one.busy for one in engine._resident.values()) < 100 or len(engine._resident) < 200:
            await asyncio.sleep(0.002)
        assert threading.active_count() <= before
        freed.set()


async def test_many_queues_ask_the_store_nothing_while_idle(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dbos-transact-ts#1294: there is no loop for each queue."""
    monkeypatch.setattr("keiro.worker.SAFETY_POLL_S", 3600.0)

    def of(queue: keiro.Queue) -> Any:
        @keiro.workflow(name=queue.name, queue=queue.name)
        async def queued(run: keiro.WorkflowRun) -> str:
            return queue.name

        return queued

    queues = [keiro.Queue(f"q{n}", concurrency=1) for n in range(35)]
    workflows = [of(queue) for queue in queues]
    async with make_engine(*workflows, queues=queues) as engine:
        assert await engine.execute(workflows[0]) == "q0"
        while engine._resident:
            await asyncio.sleep(0)
        asked: list[str] = []
        claim = engine.store.claim

        async def counted(*args: Any, **kwargs: Any) -> Any:
            asked.append("claim")
            return await claim(*args, **kwargs)

        monkeypatch.setattr(engine.store, "claim", counted)
        await asyncio.sleep(0.3)
        assert len(asked) <= 1  # what the end of the first run has asked for may come late
        asked.clear()
        assert await engine.execute(workflows[-1]) == "q34"


async def test_a_run_whose_code_was_changed_meanwhile_goes_on_with_it(make_engine: MakeEngine) -> None:
    """studio#4143, druks#619: an edit of a workflow strands no parked run."""

    def code(version: str | None, answer: str) -> Any:
        @keiro.workflow(name="edited", version=version)
        async def edited(run: keiro.WorkflowRun) -> str:
            await run.deferred("said").result()
            return answer

        return edited

    old, new = code(None, "old"), code(None, "new")
    async with make_engine(old) as engine:
        await evicted(engine, await engine.start(old, id="free"))
    async with make_engine(new) as engine:
        await engine.complete("wf:edited-free", "said", None)
        assert await engine.handle("wf:edited-free").result(LIMIT_S) == "new"
