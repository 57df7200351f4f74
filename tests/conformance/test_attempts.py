"""Attempts that are known before they end: tiers, compensation, heartbeats and checkpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw

import keiro
from keiro.decisions import Stored, new
from keiro.events import AttemptFailed, AttemptProgressed, AttemptStarted, StepRecorded
from keiro.failures import capture
from keiro.history import past_of
from tests.conftest import MakeEngine

LIMIT_S = 30
calls: list[Any] = []
hold: asyncio.Event
world: dict[str, Any] = {}


@pytest.fixture(autouse=True)
async def forgets() -> None:
    global hold
    hold = asyncio.Event()
    calls.clear()
    world.clear()


async def events_of(engine: keiro.Engine, run_id: str, *kinds: type[Any]) -> list[Any]:
    return [event async for event in engine.handle(run_id).events() if isinstance(event, kinds)]


async def interrupted(engine: keiro.Engine, calls_made: int) -> None:
    """Stop an engine as a deploy does, in the middle of a step."""
    while len(calls) < calls_made:
        await asyncio.sleep(0.002)
    await engine.close(grace=0)


# Irreversible


@keiro.step(tier="irreversible")
async def launch(rocket: str) -> str:
    calls.append(rocket)
    if rocket == "broken":
        raise ValueError("no fuel")
    if rocket == "slow":
        await hold.wait()
    return f"{rocket} is in orbit"


@keiro.workflow
async def launches(run: keiro.WorkflowRun, rocket: str) -> str:
    said: str = await run.step(launch, rocket)
    return said


@keiro.workflow
async def asks_when_in_doubt(run: keiro.WorkflowRun, rocket: str) -> str:
    try:
        said: str = await run.step(launch, rocket)
    except keiro.EffectUnknown:
        return f"somebody saw {rocket}: {await run.deferred('seen', bool).result()}"
    return said


async def test_g16_an_irreversible_effect_is_intended_before_it_and_succeeded_after_it(make_engine: MakeEngine) -> None:
    async with make_engine(launches) as engine:
        assert await engine.execute(launches, "one", id="a") == "one is in orbit"
        started, recorded = await events_of(engine, "wf:launches-a", AttemptStarted, StepRecorded)
        assert (started.step, started.attempt, started.tier) == ("launch", 1, "irreversible")
        assert (recorded.step, recorded.attempt) == ("launch", 1)
        (row,) = await engine.attempts("wf:launches-a")
        assert (row.state, row.effect, row.tier, row.attempt) == ("succeeded", "succeeded", "irreversible", 1)


async def test_g16_one_that_raises_leaves_its_effect_unknown(make_engine: MakeEngine) -> None:
    async with make_engine(launches) as engine:
        with pytest.raises(keiro.WorkflowFailed):
            await engine.execute(launches, "broken", id="a")
        (row,) = await engine.attempts("wf:launches-a")
        assert (row.state, row.effect, row.failure.message) == ("failed", "unknown", "no fuel")  # type: ignore[union-attr]
        assert calls == ["broken"]


async def test_g12_retries_without_an_idempotency_key_are_refused_before_any_effect(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def insists(run: keiro.WorkflowRun) -> None:
        await run.step(launch, "one", retry=keiro.Retry(attempts=3))

    async with make_engine(insists) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="idempotency_key"):
            await engine.execute(insists)
    assert calls == []


@pytest.mark.parametrize("workflow", [launches, asks_when_in_doubt])
async def test_one_that_was_interrupted_is_not_repeated(make_engine: MakeEngine, workflow: Any) -> None:
    """Nobody knows whether it happened: not the engine, and it must not find out by doing it again."""
    async with make_engine(workflow) as engine:
        handle = await engine.start(workflow, "slow", id="a")
        await interrupted(engine, 1)
    hold.set()
    for _ in range(2):  # the second time from what is recorded
        async with make_engine(workflow) as engine:
            handle = engine.handle(handle.run_id)
            if workflow is launches:
                with pytest.raises(keiro.WorkflowFailed, match="nobody knows whether"):
                    await handle.result(LIMIT_S)
            else:
                await engine.complete(handle.run_id, "seen", True)
                assert await handle.result(LIMIT_S) == "somebody saw slow: True"
    assert calls == ["slow"]


async def test_a_workflow_that_is_retried_or_resurrected_does_not_repeat_it_either(make_engine: MakeEngine) -> None:
    @keiro.workflow(retry=keiro.Retry(attempts=2, initial=0.001))
    async def tries(run: keiro.WorkflowRun) -> str:
        said: str = await run.step(launch, "broken")
        return said

    async with make_engine(tries) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="nobody knows whether"):
            await engine.execute(tries, id="a")
        await engine.resurrect("wf:tries-a")
        with pytest.raises(keiro.WorkflowFailed, match="nobody knows whether"):
            await engine.handle("wf:tries-a").result(LIMIT_S)
    assert calls == ["broken"]


async def test_an_operator_who_has_found_out_allows_another_attempt(make_engine: MakeEngine) -> None:
    async with make_engine(launches) as engine:
        handle = await engine.start(launches, "slow", id="a")
        await interrupted(engine, 1)
    hold.set()
    async with make_engine(launches) as engine:
        with pytest.raises(keiro.WorkflowFailed):
            await engine.handle(handle.run_id).result(LIMIT_S)
        await engine.retract_step(handle.run_id, "launch")
        await engine.resurrect(handle.run_id)
        assert await engine.handle(handle.run_id).result(LIMIT_S) == "slow is in orbit"
        assert calls == ["slow", "slow"]
        old, new = await engine.attempts(handle.run_id)
        assert (old.retracted, old.effect, new.effect) == (True, "unknown", "succeeded")


@keiro.step(tier="irreversible", idempotency_key=lambda order: f"pay-{order}", retry=keiro.Retry(3, initial=0.001))
async def pay(order: str) -> str:
    this = keiro.attempt()
    calls.append((this.number, this.idempotency_key))
    if order == "slow" and len(calls) == 1:
        await hold.wait()
    if order == "flaky" and len(calls) < 3:
        raise ConnectionError("no answer")
    return f"{order} is paid"


@keiro.workflow
async def pays(run: keiro.WorkflowRun, order: str) -> str:
    said: str = await run.step(pay, order)
    return said


async def test_g6_with_a_key_an_interrupted_attempt_is_repeated_under_its_own_number(make_engine: MakeEngine) -> None:
    async with make_engine(pays) as engine:
        handle = await engine.start(pays, "slow", id="a")
        await interrupted(engine, 1)
    async with make_engine(pays) as engine:
        assert await engine.handle(handle.run_id).result(LIMIT_S) == "slow is paid"
        assert calls == [(1, "pay-slow")] * 2
        assert len(await events_of(engine, handle.run_id, AttemptStarted)) == 1
        (row,) = await engine.attempts(handle.run_id)
        assert (row.attempt, row.effect, row.idempotency_key) == (1, "succeeded", "pay-slow")


async def test_with_a_key_it_is_retried_and_the_key_stays(make_engine: MakeEngine) -> None:
    async with make_engine(pays) as engine:
        assert await engine.execute(pays, "flaky", id="a") == "flaky is paid"
        assert calls == [(n, "pay-flaky") for n in (1, 2, 3)]
        rows = await engine.attempts("wf:pays-a")
        assert [(row.attempt, row.effect) for row in rows] == [(1, "unknown"), (2, "unknown"), (3, "succeeded")]


# Compensable


@keiro.step(
    tier="compensable",
    preimage=lambda name, value: world.get(name),
    restore=lambda before, name, value: (calls.append(("restore", before)), world.update({name: before})),
    retry=keiro.Retry(3, initial=0.001),
)
async def write(name: str, value: str) -> str:
    calls.append(("write", world.get(name)))
    world[name] = f"half of {value}"
    if value == "slow" and calls.count(("write", "old")) == 1:
        await hold.wait()
    if value == "flaky" and calls.count(("write", "old")) < 3:
        raise ConnectionError("cut")
    world[name] = value
    return value


@keiro.workflow
async def writes(run: keiro.WorkflowRun, value: str) -> str:
    said: str = await run.step(write, "page", value)
    return said


async def test_g13_what_was_there_before_is_put_back_before_a_retry(make_engine: MakeEngine) -> None:
    world["page"] = "old"
    async with make_engine(writes) as engine:
        assert await engine.execute(writes, "flaky", id="a") == "flaky"
        assert calls == [("write", "old"), ("restore", "old")] * 2 + [("write", "old")]
        started = await events_of(engine, "wf:writes-a", AttemptStarted)
        assert [(one.attempt, bytes(one.preimage)) for one in started] == [(n, b'"old"') for n in (1, 2, 3)]


async def test_g10_an_interrupted_attempt_is_put_back_too_from_what_was_kept_before_it(make_engine: MakeEngine) -> None:
    world["page"] = "old"
    async with make_engine(writes) as engine:
        handle = await engine.start(writes, "slow", id="a")
        await interrupted(engine, 1)
    assert world["page"] == "half of slow"
    async with make_engine(writes) as engine:
        assert await engine.handle(handle.run_id).result(LIMIT_S) == "slow"
        assert calls == [("write", "old"), ("restore", "old"), ("write", "old")]
        assert len(await events_of(engine, handle.run_id, AttemptStarted)) == 1


@keiro.step
async def undo(result: str, what: str) -> str:
    calls.append(("undo", result, what))
    if world.get("undoing") == what:
        await hold.wait()
    return what


@keiro.step(tier="compensable", compensate=undo)
async def book(what: str) -> str:
    calls.append(("book", what))
    return f"{what} booked"


@keiro.workflow
async def trip(run: keiro.WorkflowRun, stops: list[str]) -> str:
    try:
        for stop in stops:
            if stop == "nowhere":
                raise LookupError("there is no hotel")
            await run.scope(stop).step(book, stop)
    except LookupError:
        await run.compensate()
        await run.compensate()  # there is nothing left to undo
        raise
    return "booked"


async def test_what_was_done_is_undone_from_the_newest_on(make_engine: MakeEngine) -> None:
    async with make_engine(trip, strict=True) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="there is no hotel"):
            await engine.execute(trip, ["Rome", "Oslo", "nowhere"], id="a")
        assert calls == [
            ("book", "Rome"), ("book", "Oslo"), ("undo", "Oslo booked", "Oslo"), ("undo", "Rome booked", "Rome"),
        ]  # fmt: skip
        steps = [step.step for step in await engine.steps("wf:trip-a")]
        assert steps == ["Rome/book", "Oslo/book", "compensate:Oslo/book", "compensate:Rome/book"]


async def test_what_is_being_undone_goes_on_after_an_interruption(make_engine: MakeEngine) -> None:
    world["undoing"] = "Rome"
    async with make_engine(trip) as engine:
        handle = await engine.start(trip, ["Rome", "Oslo", "nowhere"], id="a")
        await interrupted(engine, 4)
    world.clear()
    async with make_engine(trip, strict=True) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="there is no hotel"):
            await engine.handle(handle.run_id).result(LIMIT_S)
    assert [call for call in calls if call[0] == "undo"] == [
        ("undo", "Oslo booked", "Oslo"), ("undo", "Rome booked", "Rome"), ("undo", "Rome booked", "Rome"),
    ]  # fmt: skip


async def test_a_run_that_is_asked_to_end_undoes_what_it_did(make_engine: MakeEngine) -> None:
    @keiro.workflow(cleanup=True)
    async def tidy(run: keiro.WorkflowRun) -> None:
        await run.step(book, "Rome")
        try:
            await run.deferred("never").result()
        except asyncio.CancelledError:
            await run.compensate()
            raise

    async with make_engine(tidy) as engine:
        handle = await engine.start(tidy)
        while (await handle.run()).status != "suspended":
            await asyncio.sleep(0.002)
        await handle.cancel(wait=True)
        assert await handle.status() == "cancelled"
    assert calls == [("book", "Rome"), ("undo", "Rome booked", "Rome")]


# Heartbeats


@keiro.step(retry=keiro.Retry(3, initial=0.001))
async def copies(pages: int) -> int:
    at = keiro.attempt().checkpoint or 0
    calls.append(("from", at, keiro.attempt().number))
    for page in range(at + 1, pages + 1):
        keiro.heartbeat(page)
        if page == world.get("stops at"):
            await hold.wait()
        if page == world.get("fails at") and len(calls) == 1:
            while "recorded" not in world:
                await asyncio.sleep(0.002)
            raise ConnectionError("cut")
    return pages


@keiro.workflow
async def copying(run: keiro.WorkflowRun, pages: int) -> int:
    return int(await run.step(copies, pages))


async def checkpoint_of(engine: keiro.Engine, run_id: str) -> Any:
    rows = await engine.attempts(run_id)
    return rows[-1].checkpoint if rows else None


async def test_a_long_step_that_was_interrupted_goes_on_from_its_checkpoint(make_engine: MakeEngine) -> None:
    world["stops at"] = 7
    async with make_engine(copying) as engine:
        handle = await engine.start(copying, 10, id="a")
        while await checkpoint_of(engine, handle.run_id) != 7:
            await asyncio.sleep(0.002)
        await engine.close(grace=0)
    world.clear()
    async with make_engine(copying) as engine:
        assert await engine.handle(handle.run_id).result(LIMIT_S) == 10
        assert calls == [("from", 0, 1), ("from", 7, 1)]
        # Of those that came at once the newest is recorded, not each of them.
        assert len(await events_of(engine, handle.run_id, AttemptProgressed)) <= 5


async def test_the_next_attempt_goes_on_from_the_checkpoint_of_the_one_that_failed(make_engine: MakeEngine) -> None:
    world["fails at"] = 4
    async with make_engine(copying) as engine:
        handle = await engine.start(copying, 6, id="a")
        while await checkpoint_of(engine, handle.run_id) != 4:
            await asyncio.sleep(0.002)
        world["recorded"] = True
        assert await handle.result(LIMIT_S) == 6
        assert calls == [("from", 0, 1), ("from", 4, 2)]
        (failed,) = await events_of(engine, handle.run_id, AttemptFailed)
        assert failed.attempt == 1


async def test_a_plain_function_beats_from_its_thread(make_engine: MakeEngine) -> None:
    @keiro.step
    def plain() -> int:
        keiro.heartbeat({"row": 3})
        keiro.heartbeat()
        return keiro.attempt().number

    @keiro.workflow
    async def threaded(run: keiro.WorkflowRun) -> int:
        return int(await run.step(plain))

    async with make_engine(threaded) as engine:
        assert await engine.execute(threaded, id="a") == 1


async def test_an_attempt_that_falls_silent_is_interrupted(make_engine: MakeEngine) -> None:
    @keiro.step(idle_timeout=0.05)
    async def silent() -> None:
        await hold.wait()

    @keiro.workflow
    async def waits(run: keiro.WorkflowRun) -> None:
        await run.step(silent)

    async with make_engine(waits) as engine:
        with pytest.raises(keiro.WorkflowFailed, match=r"sent no heartbeat for 0\.05 s") as failed:
            await engine.execute(waits)
        assert isinstance(failed.value.__cause__, TimeoutError)


async def test_an_attempt_that_beats_is_not_interrupted() -> None:
    @keiro.step(idle_timeout=0.5)
    async def alive() -> str:
        for _ in range(12):
            await asyncio.sleep(0.1)
            keiro.heartbeat()
        return "alive"

    @keiro.workflow
    async def waits(run: keiro.WorkflowRun) -> str:
        return str(await run.step(alive))

    async with keiro.Engine("memory://", workflows=[waits]) as engine:
        assert await engine.execute(waits) == "alive"


async def test_f7_a_checkpoint_has_at_most_1_mib(make_engine: MakeEngine) -> None:
    @keiro.step
    async def much() -> None:
        keiro.heartbeat("x" * (1 << 20))

    @keiro.workflow
    async def beats(run: keiro.WorkflowRun) -> None:
        await run.step(much)

    async with make_engine(beats) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(beats)
        assert isinstance(failed.value.__cause__, keiro.PayloadRejected)


def test_a_checkpoint_that_comes_after_the_end_of_its_attempt_changes_nothing_else() -> None:
    """It is recorded beside the step, and may come last."""
    failed = AttemptFailed(step="s", attempt=1, failure=capture(ValueError("cut")), next_attempt_at_ms=5)
    late = AttemptProgressed(step="s", attempt=1, checkpoint=Raw(b"7"))
    begun = AttemptStarted(step="s", attempt=1, tier="irreversible", idempotency_key="k")

    def past(*events: Any) -> Any:
        stored = [Stored(n, 1, n, b"", event.TOPIC, new(event, b"").payload, 1) for n, event in enumerate(events, 1)]
        return past_of("wf:a-b", stored)

    found = past(begun, failed, late).begun["s"]
    assert (found.attempt, found.failed, found.key, bytes(found.checkpoint)) == (1, True, "k", b"7")
    assert past(begun, StepRecorded(step="s", result=Raw(b"1")), late).begun == {}
    again = past(begun, failed, late, AttemptProgressed(step="s", attempt=2, checkpoint=Raw(b"8"))).begun["s"]
    assert (again.attempt, again.failed) == (2, False)


def test_outside_a_step_there_is_no_attempt() -> None:
    for call in (keiro.attempt, keiro.heartbeat):
        with pytest.raises(keiro.InvalidCall, match="outside a step"):
            call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tier": "magic"}, "'sealed', 'compensable', 'irreversible' or None"),
        ({"idempotency_key": str}, "belongs to tier='irreversible'"),
        ({"tier": "irreversible", "compensate": str}, "belongs to tier='compensable'"),
        ({"tier": "compensable", "compensate": 7}, "is a function"),
        ({"tier": "compensable", "preimage": str}, "needs both"),
        ({"idle_timeout": 0}, "positive"),
    ],
)
def test_f13_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(keiro.InvalidCall, match=said):
        keiro.step(**options)(lambda: None)
