"""Cancellation: of runs in every state, here and elsewhere, with children, and against everything that may come first.

WF-25 to WF-27, CH-40 to CH-47 and the field reports on cancellation.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import keiro
from keiro.decisions import Appended, Cancel, RefusedTerminal, Spawn
from keiro.events import WorkflowCancelled
from tests.conformance.interleaved import Interleaved, records
from tests.conformance.test_children import (
    LIMIT_S,
    bottom,
    gate,
    held,
    middle,
    only_child,
    reached,
    results,
    top,
)
from tests.conformance.test_steps import calls, note, replay, step_names, topics
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


@keiro.workflow
async def works(run: keiro.WorkflowRun) -> str:
    await run.step(held, "under way")
    return await run.step(note, "after")


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> str:
    await run.deferred("never").result()
    return await run.step(note, "after")


async def cancelled(handle: keiro.Handle) -> None:
    """The run has ended as cancelled, with one marker, and everybody is told so."""
    with pytest.raises(keiro.WorkflowCancelled):
        await handle.result(LIMIT_S)
    ends = [topic for topic in await topics(handle) if topic.startswith("Workflow") and topic != "WorkflowStarted"]
    run = await handle.run()
    assert (ends, run.status, run.finished_at_ms is not None) == (["WorkflowCancelled"], "cancelled", True)
    assert (run.waiting_reason, run.waiting_token, run.wake_at_ms) == (None, None, None)
    found = await handle._engine.store.head(run.run_id)
    assert found is not None and found[1].owner is None


async def left(engine: keiro.Engine) -> None:
    """Return when the engine drives nothing."""
    async with asyncio.timeout(LIMIT_S):
        while engine._resident:
            await asyncio.sleep(0)


async def test_wf_25_a_cancellation_counts_once(make_engine: MakeEngine) -> None:
    """WF-25: of a run that is unknown it creates nothing, and of one that has ended it changes nothing."""
    async with make_engine(works) as engine:
        handle = await engine.start(works, id="a")
        await gate["entered"].wait()
        assert await handle.cancel(reason="enough") is True
        assert await handle.cancel(reason="more") is False
        await cancelled(handle)
        with pytest.raises(keiro.WorkflowCancelled, match=r"wf:works-a was cancelled: enough$"):
            await engine.handle(handle.run_id).result()
        (event,) = [one async for one in handle.events() if isinstance(one, WorkflowCancelled)]
        assert event.reason == "enough"
        with pytest.raises(keiro.RunNotFound):
            await engine.cancel("wf:works-nobody")
        assert len(await engine.runs()) == 1
        gate["go"].set()
        done = await engine.start(works, id="b")
        await done.result(LIMIT_S)
        assert await done.cancel() is False and await done.status() == "completed"
        assert calls == ["under way", "under way", "after"]


async def test_wf_26_a_suspended_run_that_was_cancelled_is_found_no_more(
    make_engine: MakeEngine,
    parks_at_once: None,
) -> None:
    """WF-26, F9, J14: nor does it take what it was waiting for."""

    @keiro.workflow
    async def naps(run: keiro.WorkflowRun) -> None:
        await run.sleep(3600)

    async with make_engine(waits, naps) as engine:
        one, other = await engine.start(waits, id="a"), await engine.start(naps, id="a")
        await reached(one, "suspended")
        await reached(other, "suspended")
        assert await one.cancel() and await other.cancel()
        assert engine._worker is not None
        assert await engine.store.claim(engine._worker.key, ["waits", "naps"], 10) == []
        assert await engine.store.next_due_ms(["waits", "naps"]) is None
        with pytest.raises(keiro.RunEnded):
            await engine.complete(one.run_id, "never", 1)
        await cancelled(one)
        await cancelled(other)
        assert calls == []


@pytest.mark.parametrize("order", ["before", "after"])
async def test_wf_27_of_a_cancellation_and_an_end_the_first_one_counts(
    make_engine: MakeEngine,
    either_way: None,
    order: str,
) -> None:
    """WF-27, CH-46, F16, F24, J15, U9: the run, the row of the child and what the parent is told agree."""

    @keiro.workflow
    async def child(run: keiro.WorkflowRun) -> str:
        return await run.step(held, "child")

    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> str:
        kid = await run.spawn(child, id="k")
        try:
            return await kid.result()
        except keiro.ChildCancelled:
            return "cancelled"

    async with make_engine(parent, child) as engine:
        handle = await engine.start(parent, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine,
            records("wf:child-k", "WorkflowCompleted"),
            order,
            lambda: Cancel("wf:child-k", engine.wall_ms()),
        )
        gate["go"].set()
        told = await handle.result(LIMIT_S)
        outcome = await race.outcome
        ends = [topic for topic in await topics(engine.handle("wf:child-k")) if topic.startswith("WorkflowC")]
        row = await only_child(handle)
        if order == "before":
            assert (told, ends, row.status) == ("cancelled", ["WorkflowCancelled"], "cancelled")
            assert (await results(handle))["child:k:result"] == {"cancelled": None}
            assert isinstance(outcome, Appended) and row.result is None
        else:
            assert (told, ends, row.status) == ("child", ["WorkflowCompleted"], "completed")
            assert (await results(handle))["child:k:result"] == {"ok": "child"}
            assert outcome == RefusedTerminal("completed") and row.result == '"child"'


@pytest.mark.parametrize("order", ["before", "after"])
async def test_ch_44_a_step_that_ends_as_its_run_is_cancelled_does_not_hide_it(
    make_engine: MakeEngine, order: str
) -> None:
    """CH-44, F14, F15; field report temporal#620: recorded or not, it is the last thing that happens."""
    async with make_engine(works) as engine:
        handle = await engine.start(works, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine,
            records(handle.run_id, "StepRecorded", "held"),
            order,
            lambda: Cancel(handle.run_id, engine.wall_ms()),
        )
        gate["go"].set()
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended)
        await left(engine)
        if order == "before":
            assert await step_names(handle) == [] and calls == ["under way"]
        else:
            assert (await step_names(handle))[:1] == ["held"]


async def test_ch_44_a_step_that_will_not_stop_is_not_recorded(make_engine: MakeEngine) -> None:
    """CH-44; field report temporal#700: `wait` returns when the body is over."""

    async def stubborn() -> str:
        calls.append("began")
        gate["entered"].set()
        try:
            await gate["go"].wait()
        except asyncio.CancelledError:
            calls.append("ended")
        return "all the same"

    @keiro.workflow
    async def will_not(run: keiro.WorkflowRun) -> str:
        try:
            await run.step(stubborn)
            return await run.step(note, "later")
        finally:
            calls.append("finally")

    async with make_engine(will_not) as engine:
        handle = await engine.start(will_not, id="a")
        await gate["entered"].wait()
        assert await handle.cancel(wait=True)
        assert calls == ["began", "ended", "finally"]
        assert await step_names(handle) == []
        await cancelled(handle)


async def test_u15_a_body_cannot_swallow_its_cancellation(make_engine: MakeEngine, either_way: None) -> None:
    """U15, F14: neither with `except Exception` nor with `except BaseException`, nor in a task of its own."""

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> str:
        async def other() -> None:
            while True:
                try:
                    await run.step(held, "other", key="other")
                except BaseException:
                    calls.append("other swallowed")
                    return

        task = asyncio.create_task(other())
        for _ in range(3):
            try:
                await run.deferred("never").result()
            except Exception:
                calls.append("wrong")
            except BaseException:
                calls.append("swallowed")
        await asyncio.wait([task], timeout=1)
        return "done"

    async with make_engine(greedy) as engine:
        handle = await engine.start(greedy, id="a")
        await gate["entered"].wait()
        assert await handle.cancel(wait=True)
        gate["go"].set()
        await cancelled(handle)
        assert "wrong" not in calls and calls.count("swallowed") == 3
        assert await step_names(handle) == []


async def test_ch_40_a_child_that_was_cancelled_before_it_began_runs_no_step(make_engine: MakeEngine) -> None:
    """CH-15, CH-40, CH-43: its parent is told by a typed error that says which child and why."""

    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> str:
        try:
            return str(await run.call(works, id="k"))
        except keiro.ChildCancelled as error:
            return str(error)

    async with make_engine(parent) as engine:
        handle = await engine.start(parent, id="a")
        async with asyncio.timeout(LIMIT_S):
            while await handle.children() == []:
                await asyncio.sleep(0)
        child = engine.handle("wf:works-k")
        assert await child.status() == "pending"
        assert await child.cancel(reason="no need")
        assert await handle.result(LIMIT_S) == "wf:works-k was cancelled: no need"
    async with make_engine(parent, works) as engine:
        child = engine.handle("wf:works-k")
        await cancelled(child)
        assert await topics(child) == ["WorkflowStarted", "WorkflowCancelled"] and calls == []
        row = await only_child(engine.handle("wf:parent-a"))
        assert (row.status, row.result, row.completed_at is not None) == ("cancelled", None, True)


@keiro.workflow
async def family(run: keiro.WorkflowRun) -> Any:
    finished = await run.spawn(bottom, "finished", id="finished")
    await finished.result()
    await run.spawn(waits, id="parked")
    await run.spawn(works, id="running")
    await run.spawn(waits, id="detached", on_cancel="detach")
    await run.spawn(top, "wait", id="deep")
    await run.deferred("never").result()


FAMILY = (family, works, waits, top, middle, bottom)


@pytest.mark.parametrize("who", ["here", "client", "other"])
async def test_ch_47_with_a_parent_its_children_are_cancelled_all_the_way_down(
    make_engine: MakeEngine,
    parks_at_once: None,
    who: str,
) -> None:
    """CH-47: running and parked ones, here or in another process, in one transaction; not those that have ended, and
    not those that were detached."""
    async with make_engine(*FAMILY) as engine, make_engine(*FAMILY, worker=who == "other") as second:
        handle = await engine.start(family, id="a")
        deepest = engine.handle("wf:bottom-m-bottom-1")
        await reached(handle, "suspended")
        for name in ("wf:waits-parked", "wf:waits-detached", "wf:top-deep", "wf:middle-m"):
            await reached(engine.handle(name), "suspended")
        async with asyncio.timeout(LIMIT_S):
            while calls.count("under way") + calls.count("wait") < 2:
                await asyncio.sleep(0)
        canceller = engine if who == "here" else second
        before = (await engine.store.read(0, 1000))[-1].position
        assert await canceller.cancel(handle.run_id)
        below = ["wf:waits-parked", "wf:works-running", "wf:top-deep", "wf:middle-m", deepest.run_id]
        for name in (handle.run_id, *below):
            await cancelled(canceller.handle(name))
        written = [row for row in await engine.store.read(before, 1000) if row.topic == "WorkflowCancelled"]
        assert {row.run_id for row in written} == {handle.run_id, *below}
        assert len({row.recorded_at_ms for row in written}) == 1
        assert [row.position for row in written] == list(range(before + 1, before + 1 + len(written)))
        assert await canceller.handle("wf:waits-detached").status() == "suspended"
        statuses = {row.child_id: row.status for row in await canceller.children.of(handle.run_id)}
        assert statuses == {
            "finished": "completed",
            "parked": "cancelled",
            "running": "cancelled",
            "detached": "running",
            "deep": "cancelled",
        }
        await left(engine)
        await left(second)
        gate["go"].set()
        assert await canceller.complete("wf:waits-detached", "never", 1)
        assert await canceller.handle("wf:waits-detached").result(LIMIT_S) == "after"
        assert calls.count("after") == 1


@pytest.mark.parametrize("order", ["before", "after"])
async def test_ch_47_a_child_that_is_spawned_as_its_parent_is_cancelled_is_not_left_alone(
    make_engine: MakeEngine, order: str
) -> None:
    """In one batch: a child spawned before the cancellation is cancelled with it, after it none is spawned."""

    @keiro.workflow
    async def spawns(run: keiro.WorkflowRun) -> None:
        await run.spawn(works, id="k")
        await asyncio.Event().wait()

    async with make_engine(spawns, works) as engine:
        race = Interleaved(
            engine,
            lambda command: isinstance(command, Spawn),
            order,
            lambda: Cancel("wf:spawns-a", engine.wall_ms()),
        )
        handle = await engine.start(spawns, id="a")
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended)
        await left(engine)
        if order == "before":
            assert await handle.children() == [] and await engine.store.run("wf:works-k") is None
        else:
            await cancelled(engine.handle("wf:works-k"))
            assert (await only_child(handle)).status == "cancelled"
        assert "after" not in calls


async def test_a_run_that_ends_well_or_fails_cancels_no_child(make_engine: MakeEngine) -> None:
    """CH-47: completion and failure never do."""

    @keiro.workflow
    async def leaves(run: keiro.WorkflowRun, well: bool) -> None:
        await run.spawn(works, id=f"{run.key}-k")
        if not well:
            raise ValueError("not well")

    async with make_engine(leaves, works) as engine:
        for well in (True, False):
            handle = await engine.start(leaves, well, id=str(well))
            await reached(handle, "completed" if well else "failed")
        gate["go"].set()
        for well in (True, False):
            assert await engine.handle(f"wf:works-{well}-k").result(LIMIT_S) == "after"


async def test_u21_what_a_body_does_to_its_children_is_recorded(make_engine: MakeEngine, either_way: None) -> None:
    """U21: a replay is told what the first run was told, and cancels nothing again."""

    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> list[Any]:
        kid = await run.spawn(works, id="k")
        await run.step(entered)
        told = [str(await kid.status()), await kid.cancel(), await kid.cancel(), str(await kid.status())]
        try:
            await kid.result()
        except keiro.ChildCancelled as error:
            told.append(type(error).__name__)
        return told

    async def entered() -> None:
        await gate["entered"].wait()

    async with make_engine(parent, works) as engine:
        handle = await engine.start(parent, id="a")
        told = ["running", True, False, "cancelled", "ChildCancelled"]
        assert await handle.result(LIMIT_S) == told
        ended = await replay(engine, handle, parent)
        assert msgspec.json.decode(ended.result) == told
        assert calls == ["under way"]


async def test_a_run_that_is_cancelled_elsewhere_stops_here(make_engine: MakeEngine, either_way: None) -> None:
    """CH-44, F14, J14: its body is interrupted, and a record on its way is refused."""
    async with make_engine(works) as engine, make_engine(worker=False) as client:
        handle = await engine.start(works, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
        assert await client.cancel(handle.run_id)
        await left(engine)
        assert driver.sealed and driver.task is not None and driver.task.done()
        await cancelled(handle)
        await cancelled(client.handle(handle.run_id))
        assert await step_names(handle) == [] and calls == ["under way"]


async def test_a_cancelled_run_refuses_the_record_of_who_has_not_heard_of_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F14, F15: the news is lost, so the append is what finds out."""
    async with make_engine(works) as engine, make_engine(worker=False) as client:
        handle = await engine.start(works, id="a")
        await gate["entered"].wait()
        monkeypatch.setattr(engine, "woken", lambda: None)
        monkeypatch.setattr(engine, "look_at", lambda keys, versions: None)
        driver = engine._resident[handle.run_id]
        assert await client.cancel(handle.run_id)
        gate["go"].set()
        await left(engine)
        assert driver.lost
        assert await step_names(client.handle(handle.run_id)) == [] and calls == ["under way"]
        await cancelled(client.handle(handle.run_id))


async def test_a_cancelled_run_is_left_by_a_process_that_went_away(make_engine: MakeEngine) -> None:
    """CH-42: cancelled between two processes, parent and child are both not driven by the next one."""
    async with make_engine(*FAMILY, grace=0) as engine:
        handle = await engine.start(top, "wait", id="a")
        await gate["entered"].wait()
    async with make_engine(worker=False) as client:
        assert await client.handle(handle.run_id).status() == "pending"
        assert await client.cancel(handle.run_id)
    gate["go"].set()
    async with make_engine(*FAMILY) as engine:
        for name in (handle.run_id, "wf:middle-m", "wf:bottom-m-bottom-1"):
            await cancelled(engine.handle(name))
        assert calls == ["wait"]
