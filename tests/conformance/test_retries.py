"""Retries: what a step asks for, what uses up an attempt and what does not, and what a restart keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from keiro.events import AttemptFailed, WorkflowRetried
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine

gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def asks_for_an_hour(first: float) -> str:
    calls.append("asked")
    raise keiro.RetryAfter(first, "busy")


@keiro.workflow
async def limited(run: keiro.WorkflowRun, delay: float) -> str:
    return await run.step(asks_for_an_hour, delay, retry=keiro.Retry(2, initial=0.001, maximum=0.001))


async def failures(handle: keiro.Handle) -> list[AttemptFailed]:
    return [event async for event in handle.events() if isinstance(event, AttemptFailed)]


async def test_a_step_asks_for_its_next_delay_and_a_restart_keeps_it(make_engine: MakeEngine) -> None:
    """In place of the policy's pace; durable, so that a restart waits for the same time and not for another hour."""
    async with make_engine(limited) as engine:
        handle = await engine.start(limited, 3600, id="a")
        while not (found := await failures(handle)):
            await asyncio.sleep(0.002)
    [failed] = found
    again_at = failed.next_attempt_at_ms
    assert again_at is not None
    assert 0 <= again_at - 3_600_000 - (failed.started_at_ms or 0) < 60_000
    async with make_engine(limited, strict=True) as engine:
        handle = engine.handle(handle.run_id)
        while (run := await handle.run()).status != "suspended":
            await asyncio.sleep(0.002)
        assert run.wake_at_ms == again_at
        assert calls == ["asked"]


async def test_what_a_step_asks_for_uses_up_an_attempt(make_engine: MakeEngine) -> None:
    """So that it has a ceiling; the caller sees the exception as it was raised."""
    async with make_engine(limited) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(limited, 0.001, id="a")
        cause = failed.value.__cause__
        assert isinstance(cause, keiro.RetryAfter)
        assert (cause.delay, cause.args) == (0.001, (0.001, "busy"))
        assert calls == ["asked"] * 2


async def test_a_body_asks_for_its_next_delay_too(make_engine: MakeEngine) -> None:
    """An exception that leaves the body, under the workflow's own policy."""

    @keiro.workflow(retry=keiro.Retry(3, initial=0.001))
    async def asks(run: keiro.WorkflowRun) -> None:
        raise keiro.RetryAfter(3600)

    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        while (run := await handle.run()).next_attempt_at_ms is None:
            await asyncio.sleep(0.002)
        [retried] = [event async for event in handle.events() if isinstance(event, WorkflowRetried)]
        assert retried.next_attempt_at_ms == run.next_attempt_at_ms
        assert 0 <= run.next_attempt_at_ms - run.created_at_ms - 3_600_000 < 60_000


@pytest.mark.parametrize("how", ["close", "burial"])
async def test_what_is_interrupted_uses_up_no_attempt(make_engine: MakeEngine, how: str) -> None:
    """A deployment or a lost lease in the middle of an attempt: it runs again, under the same number."""

    async def interrupted() -> str:
        calls.append("begins")
        if calls == ["begins"]:
            gate["entered"].set()
            await gate["go"].wait()
        if len(calls) == 2:
            raise RuntimeError("the only failure")
        return "done"

    @keiro.workflow
    async def works(run: keiro.WorkflowRun) -> Any:
        await run.step(note, "before")
        calls.clear()
        return await run.step(interrupted, retry=keiro.Retry(2, initial=0.001))

    engine = make_engine(works)
    await engine.__aenter__()
    handle = await engine.start(works, id="a")
    await gate["entered"].wait()
    if how == "close":
        await engine.close(grace=0)
    else:
        [row] = await engine.store.workers()
        assert await engine.store.bury(row)
    calls[:] = ["begins"]

    @keiro.workflow(name="works")
    async def works_on(run: keiro.WorkflowRun) -> Any:
        await run.step(note, "before")
        return await run.step(interrupted, retry=keiro.Retry(2, initial=0.001))

    async with make_engine(works_on) as other:
        handle = other.handle(handle.run_id)
        assert await handle.result() == "done"
        assert [failed.attempt for failed in await failures(handle)] == [1]
    assert calls == ["begins"] * 3
    if how == "burial":
        gate["go"].set()
        await engine.close(grace=0)
