"""Replay forced at every await: a sound body ends as ever, another one says what it depends on."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from datetime import timedelta

import pytest

import keiro
from keiro.testing import SkippingClock, force_replay, replace_steps
from keiro.testing.plugin import EngineFactory

bodies: Counter[str] = Counter()
effects: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def fresh() -> None:
    bodies.clear()
    effects.clear()


async def effect(name: str) -> str:
    effects[name] += 1
    await asyncio.sleep(0)
    return name


async def refused(name: str) -> None:
    effects[name] += 1
    raise LookupError(name)


@keiro.workflow
async def child(run: keiro.WorkflowRun, name: str) -> str:
    await run.sleep(60)
    return await run.step(effect, name)


@keiro.workflow
async def sound(run: keiro.WorkflowRun) -> list[str]:
    bodies[run.id] += 1
    found = [await run.step(effect, "a")]
    found += await run.map(lambda scope, item: scope.step(effect, item), ["b", "c", "d"], limit=2)
    found += await asyncio.gather(run.step(effect, "e", key="e"), run.step(effect, "f", key="f"))
    try:
        await run.step(refused, "g")
    except LookupError as error:
        found.append(str(error))
    await run.sleep(timedelta(days=1))
    kid = await run.spawn(child, "h")
    found.append(await kid.result(timeout=600))
    try:
        await run.deferred("never").result(timeout=5)
    except TimeoutError:
        found.append("late")
    first = await run.first(run.sleep(1, key="short"), run.sleep(9, key="long"))
    return [*found, str(first.winner)]


async def test_a_sound_body_ends_the_same_and_its_effects_happen_once(keiro_engine: EngineFactory) -> None:
    plain = await keiro_engine(sound, child)
    SkippingClock(plain)
    expected = await plain.execute(sound)
    once = bodies.copy(), effects.copy()
    fresh_counts = effects.copy()
    bodies.clear()
    effects.clear()

    engine = await keiro_engine(sound, child)
    SkippingClock(engine)
    force_replay(engine, every_step=True)
    handle = await engine.start(sound)

    assert await handle.result() == expected
    assert effects == fresh_counts
    assert once[0].total() < bodies[handle.run_id] > 10


async def test_waits_alone_replay_too(keiro_engine: EngineFactory) -> None:
    @keiro.workflow
    async def waiting(run: keiro.WorkflowRun) -> int:
        bodies["waiting"] += 1
        await run.step(effect, "a")
        await run.step(effect, "b")
        for _ in range(3):
            await run.sleep(60)
        return bodies["waiting"]

    engine = await keiro_engine(waiting)
    SkippingClock(engine)
    force_replay(engine)
    assert await engine.execute(waiting) == 4


@pytest.mark.parametrize("every_step", [False, True])
async def test_a_body_that_asks_for_something_else_fails_and_says_so(
    keiro_engine: EngineFactory, every_step: bool
) -> None:
    @keiro.workflow
    async def restless(run: keiro.WorkflowRun) -> None:
        await run.step(effect, "a", key=f"a-{random.random()}")
        await run.sleep(60)
        await run.step(effect, "b")

    engine = await keiro_engine(restless)
    SkippingClock(engine)
    force_replay(engine, every_step=every_step)

    with pytest.raises(keiro.WorkflowFailed, match=r"asks for '(a-|sleep).*not for what is: a-0") as failed:
        await engine.execute(restless)
    assert isinstance(failed.value.__cause__, keiro.NonDeterminism)


async def test_a_clock_under_another_name_at_each_replay_is_found(keiro_engine: EngineFactory) -> None:
    @keiro.workflow
    async def restless(run: keiro.WorkflowRun) -> None:
        await run.sleep(60, key=f"nap-{random.random()}")

    engine = await keiro_engine(restless)
    SkippingClock(engine)
    force_replay(engine)
    with pytest.raises(keiro.WorkflowFailed, match="not for what is: sleep:nap-0"):
        await engine.execute(restless)


async def test_other_inputs_at_a_replay_are_found_by_a_strict_engine(keiro_engine: EngineFactory) -> None:
    @keiro.workflow
    async def forgetful(run: keiro.WorkflowRun) -> str:
        await run.step(effect, f"{os.urandom(4).hex()}")
        return await run.step(effect, "b")

    engine = await keiro_engine(forgetful)
    force_replay(engine, every_step=True)
    with pytest.raises(keiro.WorkflowFailed, match="recorded with other inputs"):
        await engine.execute(forgetful)


async def test_a_retry_of_the_workflow_may_take_another_way(keiro_engine: EngineFactory) -> None:
    @keiro.workflow(retry=keiro.Retry(attempts=3, initial=0.001))
    async def shaky(run: keiro.WorkflowRun) -> str:
        try:
            await run.step(effect if bodies["failed"] else refused, "x", key="x")
        except LookupError:
            await run.step(effect, "compensation")
            bodies["failed"] += 1
            raise
        return await run.step(effect, "y", key="y")

    engine = await keiro_engine(shaky, strict=False)
    force_replay(engine, every_step=True)
    assert await engine.execute(shaky) == "y"


async def test_forced_replay_and_replaced_steps_go_together(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(sound, child)
    SkippingClock(engine)
    force_replay(engine, every_step=True)
    replace_steps(engine, {"effect": lambda name: name.upper()})
    assert (await engine.execute(sound))[:3] == ["A", "B", "C"]
    assert effects.keys() == {"g"}


async def test_an_engine_that_closes_in_the_middle_hands_its_runs_back(store_url: str) -> None:
    # given a run that is replayed after each of many steps, on each store
    @keiro.workflow
    async def long(run: keiro.WorkflowRun) -> int:
        return len([await run.step(effect, str(n)) for n in range(20)])

    options = {"workflows": [long], "migrate": True, "strict": True}
    async with keiro.Engine(store_url, **options) as engine:
        force_replay(engine, every_step=True)
        handle = await engine.start(long, id="one")
        while effects.total() < 5:
            await asyncio.sleep(0)

    # when it is closed, then another engine goes on, and every effect happens once
    async with keiro.Engine(store_url, **options) as engine:
        force_replay(engine, every_step=True)
        assert await engine.handle(handle.run_id).result() == 20
    assert set(effects.values()) == {1}
