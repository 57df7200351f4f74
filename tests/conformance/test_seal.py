"""The seal: once a run is given up here, nothing of it begins and nothing is recorded, whatever its body does."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import keiro
from keiro.driver import Driver
from keiro.events import AttemptFailed
from tests.conformance.test_ownership import gate, held, own_row
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


Body = Callable[[Any], Awaitable[Any]]


async def sealed_while_it_waits(make_engine: MakeEngine, body: Body) -> tuple[Driver, keiro.Engine, Any]:
    """Drive `body` until it has set `entered`, close the engine without grace, and give the driver."""

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> Any:
        return await body(run)

    engine = make_engine(greedy, grace=0)
    async with engine:
        handle = await engine.start(greedy, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
    assert driver.sealed and driver.task is not None and driver.task.done()
    return driver, engine, greedy


async def pending_with(make_engine: MakeEngine, *steps: str) -> None:
    """The run was handed back with these steps recorded, and no failure."""
    async with make_engine(worker=False) as client:
        handle = client.handle("wf:greedy-a")
        found = await client.store.head(handle.run_id)
        assert found is not None and (found[0].status, found[1].owner) == ("pending", None)
        assert await step_names(handle) == list(steps)
        assert set(await topics(handle)) <= {"WorkflowStarted", "StepRecorded"}


async def wait_sealed() -> None:
    """What a body awaits that ignores being cancelled."""
    gate["entered"].set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        calls.append("cancelled")


async def test_a_call_raises_at_once(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """U15: at the call, not at the await, whether the step would run or is recorded already."""
    again = False

    async def body(run: keiro.WorkflowRun) -> str:
        if not again:
            await run.step(note, "recorded")
        await wait_sealed()
        for call in (lambda: run.step(note, "recorded"), lambda: run.step(note, "new", key="new"), run.now):
            with pytest.raises(keiro.RunSealed):
                call()
            calls.append("refused")
        return "swallowed"

    await sealed_while_it_waits(make_engine, body)
    assert calls == ["recorded", "cancelled", *["refused"] * 3]
    await pending_with(make_engine, "note")
    # The same with a history: a replay of what is recorded is given no further either.
    again = True
    calls.clear()
    gate["entered"].clear()
    await sealed_while_it_waits(make_engine, body)
    assert calls == ["cancelled", *["refused"] * 3]
    await pending_with(make_engine, "note")
    assert caplog.text == ""


async def test_a_command_raises_at_once(make_engine: MakeEngine) -> None:
    class Box(keiro.WorkflowRun, name="greedy"):
        def __init__(self) -> None:
            self.items: list[int] = []

        @keiro.event("Put")
        def put(self, item: int) -> None:
            self.items.append(item)

        async def execute(self) -> str:
            await wait_sealed()
            with pytest.raises(keiro.RunSealed):
                self.apply(Box.put, 1)
            calls.append("refused")
            return "swallowed"

    async with make_engine(Box, grace=0) as engine:
        await engine.start(Box, id="a")
        await gate["entered"].wait()
    assert calls == ["cancelled", "refused"]
    await pending_with(make_engine)


async def test_a_step_that_was_called_before_does_not_begin(make_engine: MakeEngine) -> None:
    """WF-81: between the call and the await the run may be lost."""

    async def body(run: keiro.WorkflowRun) -> str:
        step = run.step(note, "late")
        await wait_sealed()
        with pytest.raises(keiro.RunSealed):
            await step
        calls.append("refused")
        return "swallowed"

    await sealed_while_it_waits(make_engine, body)
    assert calls == ["cancelled", "refused"]
    await pending_with(make_engine)


async def test_a_step_that_ignores_its_cancellation_is_not_recorded(make_engine: MakeEngine) -> None:
    """P5: it was given up when the run was: its result comes too late, its failure is no attempt."""

    async def stubborn(fails: bool) -> str:
        await wait_sealed()
        if fails:
            raise ValueError("too late")
        return "too late"

    for fails in (False, True):
        calls.clear()
        gate["entered"].clear()

        async def body(run: keiro.WorkflowRun, fails: bool = fails) -> str:
            return str(await run.step(stubborn, fails, retry=keiro.Retry(5, initial=0.001)))

        await sealed_while_it_waits(make_engine, body)
        assert calls == ["cancelled"]
        await pending_with(make_engine)


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_a_body_that_swallows_the_seal_ends_nothing(
    make_engine: MakeEngine, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """U15, P6: whatever it returns or raises is not the run's, and nobody is alarmed."""

    async def body(run: keiro.WorkflowRun) -> str:
        try:
            await run.step(held, "held")
        except BaseException:
            calls.append("swallowed")
        if ending == "raises":
            raise ValueError("as if it had failed")
        return "as if it had ended"

    await sealed_while_it_waits(make_engine, body)
    assert calls == ["held", "swallowed"]
    await pending_with(make_engine)
    assert caplog.text == ""


async def test_a_body_is_stopped_wherever_it_waits(make_engine: MakeEngine) -> None:
    """It may wait for something that is not the engine's: the cancellation reaches it there, in all its tasks."""

    async def body(run: keiro.WorkflowRun) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(asyncio.Event().wait())
                calls.append(n)
            gate["entered"].set()

    async with asyncio.timeout(60):
        await sealed_while_it_waits(make_engine, body)
    assert calls == [0, 1, 2]
    await pending_with(make_engine)


async def test_a_run_that_is_sealed_before_its_first_tick_does_not_begin(make_engine: MakeEngine) -> None:
    async def body(run: keiro.WorkflowRun) -> None:
        calls.append("begun")

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> Any:
        return await body(run)

    async with make_engine(greedy, grace=0) as engine:
        adopt = engine.adopt

        def adopt_and_seal(*args: Any) -> None:
            adopt(*args)
            engine.seal_all()

        engine.adopt = adopt_and_seal  # type: ignore[method-assign]
        await engine.start(greedy, id="a")
        while engine._resident or engine._tasks:
            await asyncio.sleep(0)
    assert calls == []


async def test_a_lost_fence_stops_every_task_of_the_run(make_engine: MakeEngine) -> None:
    """WF-81, WF-82, F33: the first append that is refused ends the others before their next effect."""

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> Any:
        async def chain() -> None:
            for n in itertools.count():
                await run.step(note, n, key=f"n{n}")
                await asyncio.sleep(0)

        return await asyncio.gather(run.step(held, "held"), chain())

    async with make_engine(greedy) as engine, make_engine(worker=False) as operator:
        handle = await engine.start(greedy, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
        while "n3" not in await step_names(handle):
            await asyncio.sleep(0)
        assert await operator.store.bury(await own_row(engine))
        assert driver.task is not None
        await asyncio.wait([driver.task])
        recorded = await step_names(handle)
        effects = [call for call in calls if call != "held"]
        assert driver.lost and len(effects) - len(recorded) in (0, 1), "at most the one step that was under way"
        for _ in range(20):
            await asyncio.sleep(0)
        assert [call for call in calls if call != "held"] == effects
        assert not [e async for e in handle.events() if isinstance(e, AttemptFailed)]


async def test_p5_a_run_whose_task_is_cancelled_from_outside_has_not_failed(make_engine: MakeEngine) -> None:
    """P5: as at the end of the event loop, or by a library that cancels all tasks: it is handed back."""

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> Any:
        return await run.step(held, "held")

    async with make_engine(greedy, grace=0) as engine:
        handle = await engine.start(greedy, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
        assert driver.task is not None
        driver.task.cancel()
        await asyncio.wait([driver.task])
        assert driver.sealed
        assert await topics(handle) == ["WorkflowStarted"]


async def test_a_task_left_behind_by_a_failed_body_ends_quietly_with_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The run has ended, so its record is worth nothing: a store that is closed is no outage to wait for."""
    left: list[asyncio.Task[None]] = []

    async def lingers() -> None:
        task = asyncio.current_task()
        assert task is not None
        left.append(task)
        await gate["go"].wait()

    async def fails() -> None:
        raise ValueError("the first of two")

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> None:
        await asyncio.gather(run.step(lingers), run.step(fails))

    async with make_engine(greedy) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="the first of two"):
            await engine.execute(greedy, id="a")
    gate["go"].set()

    async with asyncio.timeout(20):
        [outcome] = await asyncio.gather(*left, return_exceptions=True)
    assert isinstance(outcome, keiro.RunSealed)
    assert "does not answer" not in caplog.text


async def test_a_task_left_behind_by_a_failed_body_is_not_taken_for_a_takeover(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[asyncio.Task[None]] = []

    async def lingers() -> None:
        task = asyncio.current_task()
        assert task is not None
        left.append(task)
        await gate["go"].wait()

    async def fails() -> None:
        raise ValueError("the first of two")

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> None:
        await asyncio.gather(run.step(lingers), run.step(fails))

    caplog.set_level("INFO", logger="keiro")
    async with make_engine(greedy) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="the first of two"):
            await engine.execute(greedy, id="a")
        gate["go"].set()
        async with asyncio.timeout(20):
            [outcome] = await asyncio.gather(*left, return_exceptions=True)
    assert isinstance(outcome, keiro.RunSealed)
    assert "driven by another worker" not in caplog.text
