"""Resurrection and retraction: a failed run goes on, alone or with its parent, and nothing recorded runs again.

WF-69, WF-70, WF-143, CH-52, CH-53 and the traps F34 and U4.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import keiro
from keiro.events import StepRetracted, WorkflowFailed, WorkflowResurrected
from tests.conformance.test_cancel import works
from tests.conformance.test_children import LIMIT_S, Boom, gate, held, only_child, reached
from tests.conformance.test_steps import calls, note, replay, step_names, topics
from tests.conftest import MakeEngine

broken: set[str] = set()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    broken.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def fragile(what: str) -> str:
    calls.append(what)
    if what in broken:
        raise Boom(f"{what} is broken")
    return what


@keiro.workflow
async def breaks(run: keiro.WorkflowRun) -> list[str]:
    before = await run.step(note, "before")
    return [before, await run.step(fragile, "step"), await run.step(note, "after")]


async def failed(handle: keiro.Handle) -> None:
    with pytest.raises(keiro.WorkflowFailed):
        await handle.result(LIMIT_S)


async def test_wf_69_a_resurrected_run_goes_on_where_it_failed(make_engine: MakeEngine) -> None:
    """WF-69, F34: what was recorded does not run again, and the row looks as if nothing had happened."""
    broken.add("step")
    async with make_engine(breaks) as engine:
        handle = await engine.start(breaks, id="a")
        await failed(handle)
        broken.clear()
        assert await engine.resurrect(handle.run_id, reason="repaired") is True
        assert await handle.result(LIMIT_S) == ["before", "step", "after"]
        assert calls == ["before", "step", "step", "after"]
        run = await handle.run()
        assert (run.status, run.failure_json, run.attempts) == ("completed", None, 0)
        (event,) = [one async for one in handle.events() if isinstance(one, WorkflowResurrected)]
        assert event.reason == "repaired"


async def test_wf_70_a_run_may_fail_again_and_again(make_engine: MakeEngine) -> None:
    """WF-70, F34, F16: each failure is an event of its own, in the same round."""
    broken.add("step")
    async with make_engine(breaks) as engine:
        handle = await engine.start(breaks, id="a")
        for _ in range(2):
            await failed(handle)
            assert await engine.resurrect(handle.run_id)
        await failed(handle)
        run = await handle.run()
        rows = (await engine.store.history([run.run_key]))[run.run_key]
        ends = [row for row in rows if row.topic == "WorkflowFailed"]
        assert len({row.event_id for row in ends}) == 3 and run.round_ordinal == 0
        assert calls == ["before", *["step"] * 3]
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == ["before", "step", "after"]


async def test_wf_143_a_failed_run_takes_nothing_until_it_is_resurrected(make_engine: MakeEngine) -> None:
    """WF-143; F39: what came too late was refused and is not there afterwards either."""

    @keiro.workflow
    async def takes(run: keiro.WorkflowRun) -> Any:
        await run.step(fragile, "step")
        return await run.deferred("d").result()

    broken.add("step")
    async with make_engine(takes) as engine:
        handle = await engine.start(takes, id="a")
        await failed(handle)
        with pytest.raises(keiro.RunEnded):
            await engine.complete(handle.run_id, "d", "too early")
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await engine.complete(handle.run_id, "d", "now") is True
        assert await handle.result(LIMIT_S) == "now"


async def test_only_what_has_failed_is_resurrected(make_engine: MakeEngine) -> None:
    """CH-52: a run that runs, was cancelled or has completed has not; one that is unknown is not found."""
    async with make_engine(works) as engine:
        running = await engine.start(works, id="a")
        await gate["entered"].wait()
        assert await engine.resurrect(running.run_id) is False
        assert await running.cancel() and await engine.resurrect(running.run_id) is False
        gate["go"].set()
        done = await engine.start(works, id="b")
        await done.result(LIMIT_S)
        before = await topics(done)
        assert await engine.resurrect(done.run_id) is False
        with pytest.raises(keiro.RunNotFound):
            await engine.resurrect("wf:works-nobody")
        assert await topics(done) == before and await running.status() == "cancelled"


@keiro.workflow
async def kid(run: keiro.WorkflowRun) -> str:
    return await run.step(fragile, "kid")


@keiro.workflow
async def parent(run: keiro.WorkflowRun) -> list[str]:
    before = await run.step(note, "before")
    return [before, await run.call(kid, id="k")]


@pytest.mark.parametrize("first", ["child", "parent"])
async def test_ch_53_a_child_and_its_parent_are_resurrected_in_either_order(
    make_engine: MakeEngine, either_way: None, first: str
) -> None:
    """CH-52, CH-53, U4: what the parent was told is superseded, and both end well."""
    broken.add("kid")
    async with make_engine(parent, kid) as engine:
        handle = await engine.start(parent, id="a")
        await failed(handle)
        child = engine.handle("wf:kid-k")
        row = await only_child(handle)
        assert (row.status, row.failed, row.failure_reason) == ("failed", True, "kid is broken")
        broken.clear()
    async with make_engine(parent, kid, worker=False) as client:
        for name in (child.run_id, handle.run_id) if first == "child" else (handle.run_id, child.run_id):
            assert await client.resurrect(name) is True
        row = await only_child(client.handle(handle.run_id))
        assert (row.status, row.failed, row.failure_reason, row.completed_at) == ("running", False, None, None)
    async with make_engine(parent, kid) as engine:
        again = engine.handle(handle.run_id)
        assert await again.result(LIMIT_S) == ["before", "kid"]
        assert calls == ["before", "kid", "kid"]
        row = await only_child(again)
        assert (row.status, row.failed, row.result) == ("completed", False, '"kid"')
        assert len([1 async for one in again.events() if isinstance(one, StepRetracted)]) == 1
        assert len([1 async for one in again.events() if isinstance(one, WorkflowFailed)]) == 1
        ended = await replay(engine, again, parent)
        assert msgspec.json.decode(ended.result) == ["before", "kid"]


async def test_ch_53_a_child_may_fail_and_be_resurrected_many_times(make_engine: MakeEngine) -> None:
    """CH-53, U4: each time the parent is told anew, under an id of its own."""
    broken.add("kid")
    async with make_engine(parent, kid) as engine:
        handle = await engine.start(parent, id="a")
        for number in range(3):
            await failed(handle)
            if number == 2:
                broken.clear()
            assert await engine.resurrect("wf:kid-k")
            await reached(engine.handle("wf:kid-k"), "completed" if number == 2 else "failed")
            assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == ["before", "kid"]
        assert calls == ["before", *["kid"] * 4]


async def test_u4_a_parent_that_was_told_and_has_not_asked_yet_hears_the_new_end(make_engine: MakeEngine) -> None:
    """U4: the parent has read of the failure, and is busy with other things while its child is resurrected."""

    @keiro.workflow
    async def busy(run: keiro.WorkflowRun) -> list[str]:
        child = await run.spawn(kid, id="k")

        async def waits() -> None:
            await run.deferred("d").result()

        task = asyncio.create_task(waits())
        await run.step(held, "busy")
        try:
            return [await child.result()]
        finally:
            await task

    broken.add("kid")
    async with make_engine(busy, kid) as engine:
        handle = await engine.start(busy, id="a")
        driver = engine._resident[handle.run_id]
        child = engine.handle("wf:kid-k")
        async with asyncio.timeout(LIMIT_S):
            while not driver.is_recorded("child:k:result"):
                await asyncio.sleep(0)
        # It is to be resurrected and not to end yet: the parent asks while its child has no end at all.
        kid_body, gate["again"] = kid.body, asyncio.Event()

        async def slowly(run: keiro.WorkflowRun) -> str:
            await gate["again"].wait()
            broken.clear()
            return str(await kid_body(run))

        kid.body = slowly
        try:
            assert await engine.resurrect(child.run_id)
            async with asyncio.timeout(LIMIT_S):
                while driver.is_recorded("child:k:result"):
                    await asyncio.sleep(0)
            gate["go"].set()
            gate["again"].set()
            await engine.complete(handle.run_id, "d", 1)
            assert await handle.result(LIMIT_S) == ["kid"]
        finally:
            kid.body = kid_body


async def test_a_step_that_is_retracted_runs_again(make_engine: MakeEngine) -> None:
    """U4: the operators' way out; of what is not recorded, is being driven or has ended nothing is taken back."""
    broken.add("step")
    async with make_engine(breaks, works) as engine:
        handle = await engine.start(breaks, id="a")
        await failed(handle)
        with pytest.raises(keiro.RunConflict, match="no step 'nothing'"):
            await engine.retract_step(handle.run_id, "nothing")
        assert await engine.retract_step(handle.run_id, "note", reason="wrong") is True
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == ["before", "step", "after"]
        assert calls == ["before", "step", "before", "step", "after"]
        assert await step_names(handle) == ["note", "note", "fragile", "note#2"]
        with pytest.raises(keiro.RunEnded):
            await engine.retract_step(handle.run_id, "note")
        with pytest.raises(keiro.RunNotFound):
            await engine.retract_step("wf:breaks-nobody", "note")
        driven = await engine.start(works, id="a")
        await gate["entered"].wait()
        with pytest.raises(keiro.RunConflict, match="a worker drives the run"):
            await engine.retract_step(driven.run_id, "held")
        gate["go"].set()
        await driven.result(LIMIT_S)


async def test_wf_69_a_run_in_a_later_round_is_resurrected_there(make_engine: MakeEngine) -> None:
    """WF-69, F36: by the id of its start; the rounds before are not touched."""

    @keiro.workflow
    async def rotates(run: keiro.WorkflowRun, n: int) -> list[Any]:
        if n == 0:
            await run.step(note, "first")
            run.continue_as_new(1)
        return [n, await run.step(fragile, "step")]

    broken.add("step")
    async with make_engine(rotates) as engine:
        handle = await engine.start(rotates, 0, id="a")
        await failed(handle)
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == [1, "step"]
        assert calls == ["first", "step", "step"]


async def test_ch_53_a_child_in_a_later_round_is_resurrected_for_its_parent(make_engine: MakeEngine) -> None:
    """CH-53: the row of the child, too, is that of its lineage."""

    @keiro.workflow
    async def rotates(run: keiro.WorkflowRun, n: int) -> str:
        if n == 0:
            run.continue_as_new(1)
        return await run.step(fragile, "kid")

    @keiro.workflow
    async def asks(run: keiro.WorkflowRun) -> str:
        return str(await run.call(rotates, 0, id="k"))

    broken.add("kid")
    async with make_engine(asks, rotates) as engine:
        handle = await engine.start(asks, id="a")
        await failed(handle)
        assert (await only_child(handle)).status == "failed"
        broken.clear()
        assert await engine.resurrect("wf:rotates-k")
        assert await engine.handle("wf:rotates-k").result(LIMIT_S) == "kid"
        assert (await only_child(handle)).status == "completed"
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == "kid"


@pytest.mark.parametrize("rounds", [0, 1])
async def test_ch_53_a_run_that_was_attached_to_after_its_end_is_resurrected_for_its_parent(
    make_engine: MakeEngine, rounds: int
) -> None:
    """CH-53, CH-63, U4, U7: from then on it is a child as any other, and its parent hears of its new end."""

    @keiro.workflow
    async def alone(run: keiro.WorkflowRun, left: int) -> str:
        if left:
            run.continue_as_new(left - 1)
        return await run.step(fragile, "kid")

    @keiro.workflow
    async def attaches(run: keiro.WorkflowRun) -> str:
        return str(await run.call(alone, rounds, id="k"))

    broken.add("kid")
    async with make_engine(attaches, alone) as engine:
        await failed(await engine.start(alone, rounds, id="k"))
        handle = await engine.start(attaches, id="a")
        await failed(handle)
        other = await engine.start(attaches, id="b")
        with pytest.raises(keiro.WorkflowFailed, match="is a child of wf:attaches-a"):
            await other.result(LIMIT_S)
        assert (await only_child(handle)).status == "failed"
        assert await engine.resurrect("wf:alone-k")
        await failed(engine.handle("wf:alone-k"))
        assert (await only_child(handle)).status == "failed"
        broken.clear()
        assert await engine.resurrect("wf:alone-k")
        assert await engine.handle("wf:alone-k").result(LIMIT_S) == "kid"
        row = await only_child(handle)
        assert (row.status, row.failed, row.result) == ("completed", False, '"kid"')
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == "kid"
        assert calls == ["kid"] * 3
        assert await engine.reconcile() == [] and (await engine.rebuild("runs")).differences == 0


@pytest.mark.parametrize("on_cancel", ["cancel", "detach"])
async def test_ch_47_a_run_that_was_attached_to_and_resurrected_is_cancelled_as_its_parent_said(
    make_engine: MakeEngine, on_cancel: str
) -> None:
    """CH-47: a child that is linked later inherits the cancellation, unless it was attached to be detached."""

    @keiro.workflow
    async def alone(run: keiro.WorkflowRun) -> str:
        await run.step(fragile, "kid")
        return str(await run.deferred("d").result())

    @keiro.workflow
    async def attaches(run: keiro.WorkflowRun) -> None:
        await run.spawn(alone, id="k", on_cancel=on_cancel)
        await run.deferred("never").result()

    broken.add("kid")
    async with make_engine(attaches, alone) as engine:
        child = await engine.start(alone, id="k")
        await failed(child)
        handle = await engine.start(attaches, id="a")
        while not await handle.children():
            await asyncio.sleep(0)
        broken.clear()
        assert await engine.resurrect(child.run_id)
        await handle.cancel()
        assert ((await child.status()) == "cancelled") == (on_cancel == "cancel")


@pytest.mark.parametrize("status", ["suspended", "failed"])
async def test_u4_a_retracted_end_of_a_child_is_told_anew_as_it_is_now(
    make_engine: MakeEngine, parks_at_once: None, status: str
) -> None:
    """U4: a child that has ended tells of it once; who waits for that anew would wait for ever."""

    @keiro.workflow
    async def acts(run: keiro.WorkflowRun) -> list[Any]:
        child = await run.spawn(kid, id="k")
        said = []
        try:
            said.append(await child.result())
        except keiro.ChildFailed:
            said.append(await run.step(note, "failed"))
        await run.step(fragile, "parent")
        return [*said, await run.deferred("d").result()]

    broken.add("kid")
    if status == "failed":
        broken.add("parent")
    async with make_engine(acts, kid) as engine:
        handle = await engine.start(acts, id="a")
        if status == "failed":
            await failed(handle)
        else:
            await reached(handle, status)
    broken.clear()
    async with make_engine(kid) as engine:
        assert await engine.resurrect("wf:kid-k")
        assert await engine.handle("wf:kid-k").result(LIMIT_S) == "kid"
    async with make_engine(worker=False) as client:
        assert await client.retract_step(handle.run_id, "child:k:result")
        if status == "failed":
            assert await client.resurrect(handle.run_id)
    async with make_engine(acts, kid) as engine:
        await engine.complete(handle.run_id, "d", 1)
        assert await engine.handle(handle.run_id).result(LIMIT_S) == ["kid", 1]
