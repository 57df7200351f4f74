"""The replayer: what today's body would make of recorded runs, found without doing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import keiro
from keiro.events import Event
from keiro.testing import Replayed, SkippingClock, dump_history, force_replay, load_history, replay
from keiro.testing.plugin import EngineFactory

effects: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    effects.clear()


def work(name: str) -> str:
    effects.append(name)
    return name


def refused(name: str) -> None:
    effects.append(name)
    raise LookupError(name)


@keiro.workflow
async def child(run: keiro.WorkflowRun, name: str) -> str:
    return await run.step(work, name)


class Basket(keiro.WorkflowRun, name="replayed_basket"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self) -> list[str]:
        await self.apply(Basket.add, "first")
        await self.until(lambda: len(self.items) >= 2)
        return self.items


@keiro.workflow(patches=["new-way"])
async def everything(run: keiro.WorkflowRun) -> list[Any]:
    found: list[Any] = [await run.step(work, "a"), run.random(), str(run.now()), run.patched("new-way")]
    found += await run.map(lambda scope, item: scope.step(work, item), ["b", "c"])
    try:
        await run.step(refused, "d")
    except LookupError as error:
        found.append(str(error))
    await run.sleep(timedelta(days=1))
    kid = await run.spawn(child, "e", id="kid")
    found.append(await kid.result(timeout=600))
    try:
        await run.deferred("never").result(timeout=5)
    except TimeoutError:
        found.append("late")
    token = await run.deferred("hook").token()
    found.append(len(token) > 10)
    first = await run.first(run.sleep(1, key="short"), run.step(work, "f"))
    return [*found, first.winner, str(await kid.status())]


@dataclass
class Parcel:
    grams: int


Body = Callable[..., Awaitable[Any]]


def flow(body: Body, **options: Any) -> keiro.Workflow:
    """A version of the workflow `flow`."""
    made: keiro.Workflow = keiro.workflow(name="flow", **options)(body)
    return made


async def recorded(engine: keiro.Engine, handle: keiro.Handle) -> list[Event]:
    return [event async for event in handle.events()]


Record = Callable[..., Awaitable[list[Event]]]


@pytest.fixture
def record(keiro_engine: EngineFactory) -> Record:
    """Runs a body to its end, or until it is parked, and gives its history."""

    async def make(body: Body, *args: Any, **options: Any) -> list[Event]:
        workflow = flow(body, **options)
        engine = await keiro_engine(workflow, child, strict=False)
        force_replay(engine)  # parks at once
        handle = await engine.start(workflow, *args)
        while not (run := await handle.run()).terminal and run.status != keiro.Status.SUSPENDED:
            await asyncio.sleep(0.001)
        history = await recorded(engine, handle)
        effects.clear()
        return history

    return make


def kinds(found: Replayed) -> list[tuple[str, str | None]]:
    return [(problem.kind, problem.step) for problem in found.problems]


# Sound


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "every beginning"])
async def test_the_same_body_replays_whole_and_from_every_beginning(keiro_engine: EngineFactory, cut: bool) -> None:
    engine = await keiro_engine(everything, child)
    SkippingClock(engine)
    handle = await engine.start(everything)
    await handle.result()
    history = await recorded(engine, handle)
    effects.clear()

    for end in range(1, len(history)) if cut else [len(history)]:
        found = await replay(history[:end], everything)
        assert found.ok, (end, found.problems)
        found.check()
    assert effects == []
    assert len(await recorded(engine, handle)) == len(history)


async def test_an_aggregate_replays_with_its_commands(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(Basket)
    handle = await engine.start(Basket)
    await engine.command(handle.run_id, Basket.add, "second")
    assert sorted(await handle.result()) == ["first", "second"]
    history = await recorded(engine, handle)
    for end in range(1, len(history) + 1):
        assert (await replay(history[:end], Basket)).ok


async def test_a_history_survives_as_json(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(Basket)
    handle = await engine.start(Basket)
    await engine.command(handle.run_id, Basket.add, "second")
    await handle.result()
    history = await recorded(engine, handle)

    again = load_history(dump_history(history))

    assert dump_history(again) == dump_history(history)
    assert [event.timestamp for event in again] == [event.timestamp for event in history]
    assert isinstance(again[2], type(history[2]))
    assert (await replay(again, Basket)) == Replayed(handle.run_id, "completed", ())


async def test_rounds_replay_each_by_itself(keiro_engine: EngineFactory) -> None:
    async def body(run: keiro.WorkflowRun, left: int) -> int:
        await run.step(work, str(left))
        if left:
            run.continue_as_new(left - 1)
        return left

    workflow = flow(body)
    engine = await keiro_engine(workflow)
    handle = await engine.start(workflow, 2)
    assert await handle.result() == 0
    for run in await engine.runs():
        history = [
            engine.mapper.decode_row(row, run.run_id)
            for row in (await engine.store.history([run.run_key]))[run.run_key]
        ]
        assert (await replay(history, workflow)).ok

    async def endless(run: keiro.WorkflowRun, left: int) -> int:
        await run.step(work, str(left))
        return left

    found = await replay([event for event in history if run.round_ordinal == 0], flow(endless))
    assert kinds(found) == [("other_result", None)]


async def test_a_set_in_another_order_is_the_same_result(record: Record) -> None:
    async def first(run: keiro.WorkflowRun) -> list[str]:
        return ["a", "b"]

    async def other(run: keiro.WorkflowRun) -> set[str]:
        return {"a", "b"}

    history = await record(first)
    assert (await replay(history, flow(other))).ok


async def test_a_failed_run_replays_and_so_does_one_that_was_tried_again(record: Record) -> None:
    async def failing(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")
        await run.step(refused, "b")

    assert (await replay(await record(failing), flow(failing))).ok

    tries: list[int] = []

    async def shaky(run: keiro.WorkflowRun) -> str:
        tries.append(1)
        try:
            await run.step(refused if len(tries) == 1 else work, "x", key="x")
        except LookupError:
            await run.step(work, "compensation", key="compensation")
            raise
        return await run.step(work, "y", key="y")

    history = await record(shaky, retry=keiro.Retry(attempts=2, initial=0.001))
    assert (await replay(history, flow(shaky))).ok


async def test_a_failed_run_may_go_on_in_a_better_body(record: Record) -> None:
    async def failing(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")
        raise ValueError

    async def better(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")
        await run.step(work, "b", key="b")

    assert (await replay(await record(failing), flow(better))).ok


# What would break


async def two_steps(run: keiro.WorkflowRun, name: str = "a") -> str:
    return await run.step(work, name, key="one") + await run.step(work, "b", key="two")


async def test_a_renamed_step_is_asked_for_and_not_recorded(record: Record) -> None:
    async def renamed(run: keiro.WorkflowRun, name: str = "a") -> str:
        return await run.step(work, name, key="uno") + await run.step(work, "b", key="two")

    found = await replay(await record(two_steps), flow(renamed))

    assert kinds(found) == [("never_asked_for", "one"), ("never_asked_for", "two"), ("not_recorded", "uno")]
    assert effects == []
    with pytest.raises(keiro.NonDeterminism, match=r"wf:flow-.*'uno' is asked for and not recorded"):
        found.check()


async def test_a_removed_step_is_never_asked_for(record: Record) -> None:
    async def shorter(run: keiro.WorkflowRun, name: str = "a") -> str:
        return await run.step(work, name, key="one") + "b"

    assert kinds(await replay(await record(two_steps), flow(shorter))) == [("never_asked_for", "two")]


async def test_an_added_step_breaks_a_completed_run_and_not_one_at_its_end(record: Record) -> None:
    async def longer(run: keiro.WorkflowRun, name: str = "a") -> str:
        found = await two_steps(run, name)
        await run.sleep(5)
        return found

    history = await record(two_steps)
    assert kinds(await replay(history, flow(longer))) == [("not_recorded", "sleep:sleep")]
    assert (await replay(history[:-1], flow(longer))).ok
    assert (await replay(history[:2], flow(longer))).ok


async def test_other_inputs_of_a_step(record: Record) -> None:
    async def other(run: keiro.WorkflowRun, name: str = "a") -> str:
        return await run.step(work, name * 2, key="one") + await run.step(work, "b", key="two")

    assert kinds(await replay(await record(two_steps), flow(other))) == [("inputs_differ", "one")]


async def test_another_result_of_a_completed_run(record: Record) -> None:
    async def other(run: keiro.WorkflowRun, name: str = "a") -> str:
        return (await two_steps(run, name)).upper()

    found = await replay(await record(two_steps), flow(other))
    assert kinds(found) == [("other_result", None)]
    assert '"AB"' in found.problems[0].message and '"ab"' in found.problems[0].message


async def test_values_that_cannot_be_read_any_more(record: Record) -> None:
    def weigh(name: str) -> Parcel:
        raise AssertionError

    async def other_step(run: keiro.WorkflowRun, name: str = "a") -> str:
        parcel = await run.step(weigh, name, key="one")
        return str(parcel.grams)

    async def other_input(run: keiro.WorkflowRun, name: int = 3) -> str:
        raise AssertionError

    history = await record(two_steps, "a")
    assert [kind for kind, _ in kinds(await replay(history, flow(other_step)))] == ["decode_failed"]
    assert [kind for kind, _ in kinds(await replay(history, flow(other_input)))] == ["decode_failed"]


async def test_a_body_that_raises_where_it_had_not(record: Record) -> None:
    async def raising(run: keiro.WorkflowRun, name: str = "a") -> str:
        await run.step(work, name, key="one")
        raise ZeroDivisionError("oh")

    found = await replay((await record(two_steps))[:3], flow(raising))
    assert kinds(found) == [("fails", None), ("never_asked_for", "two")]
    assert "ZeroDivisionError: oh" in found.problems[0].message


async def test_what_a_run_is_parked_for_is_to_be_waited_for(record: Record) -> None:
    async def waiting(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")
        await run.deferred("approved").result(timeout=60)

    async def another(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")
        await run.deferred("allowed").result(timeout=60)

    async def no_more(run: keiro.WorkflowRun) -> None:
        await run.step(work, "a")

    history = await record(waiting)
    assert (await replay(history, flow(waiting))).ok
    assert kinds(await replay(history, flow(another))) == [("never_asked_for", "awk:approved")]
    assert kinds(await replay(history, flow(no_more))) == [("never_asked_for", "awk:approved")]


async def test_a_child_that_is_spawned_no_more(record: Record) -> None:
    async def parent(run: keiro.WorkflowRun) -> None:
        await (await run.spawn(child, "a", id="kid")).result()

    async def alone(run: keiro.WorkflowRun) -> None:
        pass

    history = await record(parent)
    assert ("never_asked_for", "child:kid") in kinds(await replay(history, flow(alone)))


async def test_tasks_are_let_go_on_before_something_is_missed(record: Record) -> None:
    async def concurrent(run: keiro.WorkflowRun) -> list[str]:
        async def later() -> str:
            await asyncio.sleep(0.02)  # what is no step takes its time at a replay too
            return await run.step(work, "b", key="b") + await run.step(work, "c", key="c")

        return list(await asyncio.gather(run.step(work, "a", key="a"), later()))

    history = await record(concurrent)
    for end in range(1, len(history) + 1):
        assert (await replay(history[:end], flow(concurrent))).ok


async def test_a_body_that_awaits_something_else_for_ever_is_given_up(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hanging(run: keiro.WorkflowRun, name: str = "a") -> str:
        await asyncio.Event().wait()
        return name

    monkeypatch.setattr("keiro.testing.replayer.STUCK_S", 0.05)
    found = await replay((await record(two_steps))[:1], flow(hanging))
    assert kinds(found) == [("stuck", None)]


async def test_what_is_no_history_of_the_workflow_is_refused(record: Record) -> None:
    history = await record(two_steps)
    with pytest.raises(keiro.InvalidCall, match="run of 'flow' and cannot be replayed by 'child'"):
        await replay(history, child)
    with pytest.raises(keiro.InvalidCall, match="begins with the first event"):
        await replay(history[1:], flow(two_steps))
    with pytest.raises(keiro.InvalidCall, match="begins with the first event"):
        await replay([], flow(two_steps))
    with pytest.raises(keiro.DecodeFailed, match="no history of a run"):
        load_history("{}")
    with pytest.raises(keiro.DecodeFailed, match="no history of a run"):
        load_history('[{"version": 1, "topic": "WorkflowStarted", "payload": 3, "recorded_at_ms": 0}]')


async def test_a_gap_in_a_history_is_told(record: Record) -> None:
    history = await record(two_steps)
    found = await replay([history[0], *history[2:]], flow(two_steps))
    assert kinds(found) == [("incomplete", None)]
