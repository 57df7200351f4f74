"""Who drives a run: claims, leases, fences, takeover, hand-back (WF-30 to 35, 60 to 67, 80 to 82)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

import keiro
from keiro.decisions import Append, FenceLost, new
from keiro.events import StepRecorded
from keiro.stores.base import WorkerRow
from keiro.worker import Worker
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine

gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def held(value: str) -> str:
    calls.append(value)
    gate["entered"].set()
    await gate["go"].wait()
    return value


@keiro.workflow
async def held_workflow(run: keiro.WorkflowRun) -> list[Any]:
    return [await run.step(note, "before"), await run.step(held, "held"), await run.step(note, "after")]


def worker_of(engine: keiro.Engine) -> Worker:
    assert engine._worker is not None
    return engine._worker


async def own_row(engine: keiro.Engine) -> WorkerRow:
    key = worker_of(engine).key
    return next(row for row in await engine.store.workers() if row.worker_key == key)


async def test_wf_60_another_engine_resumes_only_the_tail(make_engine: MakeEngine) -> None:
    """WF-60, WF-81, WF-82, F33: the old owner loses its fence, records nothing more, and counts no attempt."""
    async with make_engine(held_workflow) as old, make_engine(held_workflow) as new_engine:
        handle = await old.start(held_workflow, id="a")
        await gate["entered"].wait()
        driver = old._resident[handle.run_id]
        assert await new_engine.store.bury(await own_row(old))
        assert new_engine._worker is not None
        new_engine._worker.wake()
        while calls.count("held") < 2:
            await asyncio.sleep(0)
        gate["go"].set()
        assert await new_engine.handle(handle.run_id).result() == ["before", "held", "after"]
        assert driver.task is not None
        await asyncio.wait([driver.task])
        assert driver.lost and driver.sealed
        assert calls == ["before", "held", "held", "after"]
        assert await step_names(handle) == ["note", "held", "note#2"]


async def test_u13_a_started_run_is_owned_by_one_worker(make_engine: MakeEngine) -> None:
    """U13, F10, WF-75: while one engine drives it, another that looks for work finds none."""
    async with make_engine(held_workflow) as one, make_engine(held_workflow) as other:
        handle = await one.start(held_workflow, id="a")
        await gate["entered"].wait()
        assert other._worker is not None and one._worker is not None
        assert await other.store.claim(other._worker.key, ["held_workflow"], 10) == []
        found = await other.store.head(handle.run_id)
        assert found is not None and found[1].owner == one._worker.key and found[0].status == "running"
        gate["go"].set()
        await handle.result()
        ended = await other.store.head(handle.run_id)
        assert ended is not None and ended[1].owner is None


async def test_e_12_an_append_of_a_former_owner_is_refused(make_engine: MakeEngine) -> None:
    """E12, L4, trap 5: the fence is checked before anything else, so a zombie never hears of its successor's work."""
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        found = await engine.store.head(handle.run_id)
        assert found is not None
        run, head = found
        recorded = [row for row in (await engine.store.history([run.run_key]))[run.run_key] if row.version == 2]
        event = new(StepRecorded(step="note", result=Raw(b"1")), recorded[0].event_id)
        stale = Append(run.run_id, (event,), engine.wall_ms(), run.run_key, head.owner, head.epoch - 1, head.version)
        assert await engine.store.submit(stale) == FenceLost()
        foreign = Append(run.run_id, (event,), engine.wall_ms(), run.run_key, 987654, head.epoch, head.version)
        assert await engine.store.submit(foreign) == FenceLost()
        gate["go"].set()
        await handle.result()


async def test_a_closed_engine_hands_its_runs_back_for_the_next(make_engine: MakeEngine) -> None:
    """J16: to stop a process cancels nothing."""
    async with make_engine(held_workflow, grace=0.0) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
    gate["go"].set()
    async with make_engine(held_workflow, worker=False) as client:
        found = await client.store.head(handle.run_id)
        assert found is not None and found[0].status == "pending" and found[1].owner is None
        assert [row.worker_key for row in await client.store.workers()] == [client._worker.key]  # type: ignore[union-attr]
    async with make_engine(held_workflow) as engine:
        assert await engine.handle(handle.run_id).result() == ["before", "held", "after"]
        assert calls == ["before", "held", "held", "after"]


async def test_a_drain_lets_the_step_under_way_end_and_begins_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine(held_workflow, grace=30.0)
    async with engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        asyncio.get_running_loop().call_later(0.01, gate["go"].set)
    assert calls == ["before", "held"]
    async with make_engine(held_workflow) as engine:
        assert await engine.handle(handle.run_id).result() == ["before", "held", "after"]
        assert calls == ["before", "held", "after"]


async def test_wf_62_an_unregistered_workflow_waits_and_is_reported(make_engine: MakeEngine) -> None:
    """WF-62, field report studio#4143: the run is untouched, and somebody is told."""

    @keiro.workflow
    async def elsewhere(run: keiro.WorkflowRun) -> int:
        return int(await run.step(note, 1))

    async with make_engine(worker=False) as client:
        handle = await client.start(elsewhere, id="a")
    engine = make_engine(held_workflow)
    reported: list[Any] = []
    engine.report = lambda event, run_id, **fields: reported.append((event, fields))  # type: ignore[method-assign]
    async with engine:
        assert engine._worker is not None
        await engine._worker.report_unregistered()
        assert ("unregistered_workflow", {"workflow": "elsewhere"}) in reported
        assert await engine.handle(handle.run_id).status() == "pending"
        assert await topics(engine.handle(handle.run_id)) == ["WorkflowStarted"]
    async with make_engine(elsewhere) as engine:
        assert await engine.handle(handle.run_id).result() == 1


@keiro.workflow
async def asleep(run: keiro.WorkflowRun, seconds: float) -> str:
    await run.sleep(seconds)
    return "awake"


@keiro.workflow(retry=keiro.Retry(attempts=2, initial=0.05, jitter=0.0))
async def paced(run: keiro.WorkflowRun) -> str:
    if await run.step(note, "tried") and calls == ["tried"]:
        calls.append("failed")
        raise RuntimeError("once")
    return "done"


@keiro.workflow(name="asleep_for_long")
async def asleep_for_long(run: keiro.WorkflowRun) -> None:
    await run.sleep(3600)


@keiro.workflow(name="paced_for_long", retry=keiro.Retry(attempts=2, initial=3600, maximum=3600))
async def paced_for_long(run: keiro.WorkflowRun) -> None:
    raise RuntimeError("every time")


async def test_wf_62_runs_of_unregistered_workflows_are_reported_when_they_are_due(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """WF-62: what is parked or paced is told of once its time has come, and not before."""
    # Given: two runs that go on after an hour, and two that do so at once, and nobody has their workflows any more.
    async with make_engine(asleep, asleep_for_long, paced, paced_for_long) as engine:
        sleeping = await engine.start(asleep, 0.5, id="a")
        retried = await engine.start(paced, id="a")
        long = [await engine.start(asleep_for_long, id="a"), await engine.start(paced_for_long, id="a")]
        while (await long[0].status(), (await long[1].run()).next_attempt_at_ms is None) != ("suspended", False):
            await asyncio.sleep(0.002)
        while (await retried.run()).attempts == 0 or await sleeping.status() != "suspended":
            await asyncio.sleep(0.002)
    # When: an engine without them looks.
    async with make_engine(held_workflow) as other:
        while len(found := await other.store.unregistered(["held_workflow"])) < 2:
            await asyncio.sleep(0.002)
        # Then: those whose time has come are named, as often as it looks, and none that only waits.
        assert found == ["asleep", "paced"]
        assert await other.store.unregistered(["asleep", "paced"]) == []
    async with make_engine(asleep, paced) as engine:
        assert await engine.handle(sleeping.run_id).result() == "awake"
        assert await engine.handle(retried.run_id).result() == "done"


async def test_u12_claims_are_filtered_and_take_the_oldest_first(make_engine: MakeEngine) -> None:
    """U12, WF-31: runs of other workflows, paced, owned and ended ones never stand in the way of the others."""

    @keiro.workflow
    async def foreign(run: keiro.WorkflowRun) -> None: ...

    @keiro.workflow
    async def ours(run: keiro.WorkflowRun, n: int) -> None: ...

    async with make_engine(worker=False) as client:
        for n in range(20):
            await client.start(foreign, id=f"a{n}")
        for n in (3, 1, 2):
            await client.start(ours, n, id=f"z{n}")
        assert client._worker is not None
        first = await client.store.claim(client._worker.key, ["ours"], 2)
        assert [run.key for run, _ in first] == ["z3", "z1"]
        assert all(run.status == "running" and head.owner == client._worker.key for run, head in first)
        second = await client.store.claim(client._worker.key, ["ours"], 2)
        assert [run.key for run, _ in second] == ["z2"]
        assert await client.store.claim(client._worker.key, ["ours"], 2) == []
        await client.store.release(client._worker.key, [run.run_key for run, _ in first])
        again = await client.store.claim(client._worker.key, ["ours"], 9)
        assert [(run.key, head.epoch) for run, head in again] == [("z3", 3), ("z1", 3)]


async def test_a_paced_run_is_not_claimed_before_it_is_due(make_engine: MakeEngine) -> None:
    """WF-35, WF-74."""

    @keiro.workflow(retry=keiro.Retry(2, initial=3600, maximum=3600))
    async def paced(run: keiro.WorkflowRun) -> None:
        raise RuntimeError("later")

    async with make_engine(paced) as engine:
        handle = await engine.start(paced, id="a")
        while (await handle.run()).attempts == 0:
            await asyncio.sleep(0)
        run = await handle.run()
        assert run.status == "pending" and run.next_attempt_at_ms is not None
        assert engine._worker is not None
        assert await engine.store.claim(engine._worker.key, ["paced"], 10) == []
        assert await engine.store.next_due_ms(["paced"]) == run.next_attempt_at_ms


async def test_a_buried_worker_claims_nothing(make_engine: MakeEngine) -> None:
    """A run claimed by a worker that is no longer listed would belong to nobody for ever."""
    async with make_engine(worker=False) as client, make_engine(worker=False) as zombie:
        await client.start(held_workflow, id="a")
        assert zombie._worker is not None
        assert await client.store.bury(await own_row(zombie))
        assert not await client.store.bury(replace(await own_row(client), worker_key=zombie._worker.key))
        assert await zombie.store.claim(zombie._worker.key, ["held_workflow"], 10) == []


async def test_a_renewed_lease_is_not_buried(make_engine: MakeEngine) -> None:
    """Two buriers with a stale list (field report dbos#742): what has moved since is left alone."""
    async with make_engine(worker=False) as one, make_engine(worker=False) as other:
        seen = replace(await own_row(one), lease_expires_at_ms=1)
        assert not await other.store.bury(seen)
        row = await own_row(one)
        assert await other.store.bury(row)
        assert not await other.store.bury(row)


async def test_orphans_are_adopted(make_engine: MakeEngine) -> None:
    """A start that commits after its worker was buried."""
    async with make_engine(held_workflow, grace=0.0) as engine, make_engine(worker=False) as other:
        assert await other.store.bury(await own_row(engine))
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        assert await other.store.adopt_orphans()
        assert not await other.store.adopt_orphans()
        found = await other.store.head(handle.run_id)
        assert found is not None and (found[0].status, found[1].owner, found[1].epoch) == ("pending", None, 2)


async def test_an_engine_that_was_buried_goes_on_as_a_new_incarnation(make_engine: MakeEngine) -> None:
    async with make_engine(held_workflow) as engine, make_engine(worker=False) as other:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        worker = engine._worker
        assert worker is not None
        before = worker.key
        assert await other.store.bury(await own_row(engine))
        assert not await engine.store.renew(worker.key)
        await worker._begin_again()
        assert worker.key != before
        gate["go"].set()
        assert await handle.result() == ["before", "held", "after"]


async def test_what_a_worker_owns_and_does_not_drive_is_handed_back(make_engine: MakeEngine) -> None:
    """A claim whose answer was lost on the way; not at the first look, when it may still be on its way."""
    async with make_engine(worker=False) as client:
        handle = await client.start(held_workflow, id="a")
        worker = client._worker
        assert worker is not None
        assert len(await client.store.claim(worker.key, ["held_workflow"], 1)) == 1
        await worker._release_strays()
        assert await handle.status() == "running"
        await worker._release_strays()
        assert await handle.status() == "pending"


async def test_u18_a_lease_is_judged_by_the_stores_clock(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        row = await own_row(engine)
        assert abs(row.lease_expires_at_ms - 30_000 - engine.store.now_ms()) < 5_000
        assert abs(engine.wall_ms() - engine.store.now_ms()) < 1_000


async def test_wf_64_runs_overlap(make_engine: MakeEngine) -> None:
    inside = [0, 0]

    async def meet() -> None:
        inside[0] += 1
        inside[1] = max(inside)
        while inside[1] < 3:
            await asyncio.sleep(0)
        inside[0] -= 1

    @keiro.workflow
    async def meeting(run: keiro.WorkflowRun) -> None:
        await run.step(meet)

    async with make_engine(meeting) as engine:
        handles = [await engine.start(meeting, id=str(n)) for n in range(3)]
        await asyncio.gather(*(handle.result() for handle in handles))
        assert inside[1] == 3


async def test_no_more_than_concurrency_runs_are_resident(make_engine: MakeEngine) -> None:
    async with make_engine(held_workflow, concurrency=2) as engine:
        handles = [await engine.start(held_workflow, id=str(n)) for n in range(5)]
        while calls.count("held") < 2:
            await asyncio.sleep(0)
        assert len(engine._resident) == 2
        assert sorted([await handle.status() for handle in handles]) == ["pending"] * 3 + ["running"] * 2
        gate["go"].set()
        assert await asyncio.gather(*(handle.result() for handle in handles)) == [["before", "held", "after"]] * 5


async def test_wf_24_runs_are_listed_in_pages_and_filtered(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def quick(run: keiro.WorkflowRun, n: int) -> int:
        if n == 2:
            raise RuntimeError("no")
        return n

    async with make_engine(quick) as engine:
        for n in range(5):
            handle = await engine.start(quick, n, id=str(n))
            await engine.wait_ended(handle.run_id)
        assert [run.key for run in await engine.runs()] == ["4", "3", "2", "1", "0"]
        page = await engine.runs(limit=2)
        rest = await engine.runs(limit=9, before=page[-1].run_key)
        assert [run.key for run in page + rest] == ["4", "3", "2", "1", "0"]
        assert [run.key for run in await engine.runs(status="failed")] == ["2"]
        assert [run.key for run in await engine.runs(status="completed", workflow="quick", limit=1)] == ["4"]
        assert await engine.runs(workflow="other") == []
        with pytest.raises(keiro.InvalidCall, match="no status"):
            await engine.runs(status="finished")


async def test_u11_a_release_touches_only_what_is_still_owned(make_engine: MakeEngine) -> None:
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        gate["go"].set()
        await handle.result()
        run = await handle.run()
        assert engine._worker is not None
        await engine.store.release(engine._worker.key, [run.run_key])
        assert await handle.run() == run
