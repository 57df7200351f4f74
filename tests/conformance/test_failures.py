"""Failing: retries with durable counters, failures stored and raised again, what is never a failure."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

import keiro
from keiro.events import AttemptFailed, WorkflowRetried
from keiro.threads import MOST
from tests.conformance.test_steps import calls, note, replay, step_names, topics
from tests.conftest import MakeEngine

FAST = keiro.Retry(4, initial=0.001, jitter=0)


class Declined(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def declines(times: int) -> str:
    calls.append("try")
    if len(calls) <= times:
        raise Declined(len(calls), "no")
    return "yes"


async def test_a_failing_step_is_retried_and_every_attempt_is_recorded(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def persistent(run: keiro.WorkflowRun) -> str:
        return await run.step(declines, 2, retry=FAST)

    async with make_engine(persistent) as engine:
        handle = await engine.start(persistent, id="a")
        assert await handle.result() == "yes"
        events = [event async for event in handle.events()]
        attempts = [(e.attempt, e.next_attempt_at_ms is not None) for e in events if isinstance(e, AttemptFailed)]
        assert attempts == [(1, True), (2, True)]
        assert events[3].attempt == 3  # type: ignore[attr-defined]


async def test_a_step_that_fails_for_good_raises_its_own_exception_now_and_on_replay(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def catching(run: keiro.WorkflowRun) -> list[Any]:
        try:
            await run.step(declines, 99, retry=keiro.Retry(2, initial=0.001))
        except Declined as error:
            return [error.code, error.args[1], type(error).__name__]
        return []

    async with make_engine(catching) as engine:
        handle = await engine.start(catching, id="a")
        assert await handle.result() == [2, "no", "Declined"]
        assert calls == ["try", "try"]
        ended = await replay(engine, handle, catching)
        assert msgspec.json.decode(ended.result) == [2, "no", "Declined"]
        assert calls == ["try", "try"]


async def test_retry_on_and_give_up_on_choose_what_is_retried(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def picky(run: keiro.WorkflowRun) -> None:
        await run.step(declines, 99, retry=keiro.Retry(5, initial=0.001, give_up_on=Declined))

    async with make_engine(picky) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(picky, id="a")
        cause = failed.value.__cause__
        assert isinstance(cause, Declined) and cause.code == 1
        assert calls == ["try"]


async def test_wf_68_an_exception_that_leaves_the_body_fails_the_run(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def broken(run: keiro.WorkflowRun) -> None:
        await run.step(note, 1)
        raise ValueError("no such thing")

    async with make_engine(broken) as engine:
        handle = await engine.start(broken, id="a")
        for _ in range(2):
            with pytest.raises(keiro.WorkflowFailed, match="no such thing") as failed:
                await handle.result()
            assert isinstance(failed.value.__cause__, ValueError)
        assert await topics(handle) == ["WorkflowStarted", "StepRecorded", "WorkflowFailed"]
        assert await handle.status() == "failed"


async def test_wf_35_and_68_a_workflow_retries_at_its_own_pace_up_to_its_ceiling(make_engine: MakeEngine) -> None:
    """WF-35, WF-68, F7: paced durably, recorded steps are kept, failed ones get a new chance, then it fails."""

    @keiro.workflow(retry=keiro.Retry(3, initial=0.001))
    async def stubborn(run: keiro.WorkflowRun, times: int) -> str:
        await run.step(note, "once")
        return await run.step(declines, times + 1)

    async with make_engine(stubborn) as engine:
        handle = await engine.start(stubborn, 1, id="a")
        assert await handle.result() == "yes"
        assert calls == ["once", "try", "try"]
        run = await handle.run()
        assert (run.attempts, run.status, run.next_attempt_at_ms) == (1, "completed", None)
        calls.clear()
        ended = await engine.start(stubborn, 99, id="b")
        with pytest.raises(keiro.WorkflowFailed):
            await ended.result()
        assert calls == ["once", "try", "try", "try"]
        retried = [event.attempt async for event in ended.events() if isinstance(event, WorkflowRetried)]
        assert retried == [1, 2]


async def test_a_timeout_counts_from_when_a_thread_is_free(make_engine: MakeEngine) -> None:
    """However many plain functions there are: what has not begun has taken no time."""
    go = threading.Event()

    def takes_a_thread() -> None:
        go.wait(30)

    def quick() -> str:
        calls.append("quick")
        return "quick"

    @keiro.workflow
    async def crowded(run: keiro.WorkflowRun) -> str:
        async with asyncio.TaskGroup() as group:
            for n in range(MOST):
                group.create_task(run.step(takes_a_thread, key=f"before {n}"))
            await asyncio.sleep(0)
            behind = group.create_task(run.step(quick, timeout=0.25))
            await asyncio.sleep(0.5)
            go.set()
        return behind.result()

    async with make_engine(crowded) as engine:
        assert await engine.execute(crowded) == "quick"
        assert calls == ["quick"]


async def test_a_timeout_is_an_attempt_that_failed(make_engine: MakeEngine) -> None:
    async def slow_then_quick() -> str:
        calls.append("try")
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "done"

    @keiro.workflow
    async def timed(run: keiro.WorkflowRun) -> str:
        return await run.step(slow_then_quick, retry=FAST, timeout=0.02)

    async with make_engine(timed) as engine:
        handle = await engine.start(timed, id="a")
        assert await handle.result() == "done"
        failed = [event async for event in handle.events() if isinstance(event, AttemptFailed)]
        assert [event.failure.type for event in failed] == ["builtins:TimeoutError"]


async def test_wf_63_a_poisoned_run_does_not_touch_the_others(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def mixed(run: keiro.WorkflowRun, n: int) -> int:
        if n == 3:
            raise RuntimeError("poison")
        return int(await run.step(note, n))

    async with make_engine(mixed) as engine:
        handles = [await engine.start(mixed, n, id=str(n)) for n in range(6)]
        results = await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
        assert [r for r in results if isinstance(r, int)] == [0, 1, 2, 4, 5]
        assert isinstance(results[3], keiro.WorkflowFailed)


async def test_u15_a_body_cannot_swallow_the_seal(make_engine: MakeEngine) -> None:
    """U15, P5, P6: a broad except in a body neither records after the hand-back nor ends the run."""
    entered = asyncio.Event()
    allowed = [False]

    async def hang() -> str:
        calls.append("hang")
        entered.set()
        if not allowed[0]:
            await asyncio.Event().wait()
        return "done"

    @keiro.workflow
    async def greedy(run: keiro.WorkflowRun) -> str:
        while True:
            try:
                return await run.step(hang)
            except Exception:
                calls.append("swallowed")
            finally:
                try:
                    await run.step(note, "finally")
                except keiro.RunSealed:
                    calls.append("sealed")

    engine = make_engine(greedy, grace=0.0)
    async with engine:
        handle = await engine.start(greedy, id="a")
        await entered.wait()
    assert calls == ["hang", "sealed"]
    allowed[0] = True
    async with make_engine(greedy) as engine:
        again = engine.handle(handle.run_id)
        assert await again.result() == "done"
        assert await step_names(again) == ["hang", "note"]
        assert AttemptFailed not in [type(event) async for event in again.events()]


async def test_a_body_whose_own_task_is_cancelled_by_its_code_fails(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def self_inflicted(run: keiro.WorkflowRun) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    async with make_engine(self_inflicted) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="CancelledError"):
            await engine.execute(self_inflicted, id="a")


async def test_a_body_that_refuses_to_be_cancelled_does_not_hold_up_the_close(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keiro.engine.STUBBORN_S", 0.01)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def refuses() -> None:
        entered.set()
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                calls.append("refused")

    @keiro.workflow
    async def stubborn(run: keiro.WorkflowRun) -> None:
        await run.step(refuses)

    engine = make_engine(stubborn, grace=0.0)
    async with engine:
        handle = await engine.start(stubborn, id="a")
        await entered.wait()
        [task] = engine._tasks
    assert calls == ["refused"]
    async with make_engine(stubborn, worker=False) as other:
        assert await other.handle(handle.run_id).status() == "pending"
    leave.set()
    await asyncio.wait([task])


async def test_attempts_and_their_times_survive_a_restart(make_engine: MakeEngine) -> None:
    """WF-35, WF-74, F7: the next process neither begins to count anew nor tries before it is time."""
    beside = asyncio.Event()

    async def seen() -> None:
        beside.set()

    @keiro.workflow
    async def patient(run: keiro.WorkflowRun) -> list[Any]:
        slow = keiro.Retry(3, initial=3600, maximum=3600, jitter=0)
        return await asyncio.gather(run.step(declines, 99, retry=slow), run.step(seen, key=f"seen-{len(calls)}"))

    async def attempts(engine: keiro.Engine) -> list[tuple[int, int | None]]:
        events = [event async for event in engine.handle("wf:patient-a").events()]
        return [(e.attempt, e.next_attempt_at_ms) for e in events if isinstance(e, AttemptFailed)]

    async with make_engine(patient, grace=0) as engine:
        await engine.start(patient, id="a")
        while len(found := await attempts(engine)) < 1:
            await asyncio.sleep(0)
        due = found[0][1]
        assert due is not None and due - engine.wall_ms() > 3_000_000
    beside.clear()
    async with make_engine(patient, grace=0) as engine:
        await beside.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert calls == ["try"] and await attempts(engine) == found
    engine = make_engine(patient, grace=0)
    async with engine:
        engine.store.now_ms = lambda: due  # type: ignore[method-assign, return-value]
        while len(found := await attempts(engine)) < 2:
            await asyncio.sleep(0)
        assert found == [(1, due), (2, due + 3_600_000)]
        assert calls == ["try", "try"]
