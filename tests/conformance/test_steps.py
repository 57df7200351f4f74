"""Steps: recorded once, replayed, raced, refused (WF-01 to WF-11 and the traps that belong to them)."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
import pytest

import keiro
from keiro.decisions import Append, Appended, RefusedTerminal, Start, UnknownRun, new
from keiro.driver import Driver
from keiro.events import Event, StepRecorded, WorkflowCompleted, WorkflowStarted
from keiro.history import History
from keiro.identity import StepIds
from tests.conftest import MakeEngine

calls: list[Any] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def note(value: Any) -> Any:
    calls.append(value)
    return value


def note_in_thread(value: Any) -> Any:
    calls.append(value)
    return value


@keiro.workflow
async def three_steps(run: keiro.WorkflowRun, first: int) -> list[int]:
    return [await run.step(note, first), await run.step(note, first + 1), await run.step(note_in_thread, first + 2)]


async def topics(handle: keiro.Handle) -> list[str]:
    return [type(event).__name__ async for event in handle.events()]


async def step_names(handle: keiro.Handle) -> list[str]:
    return [event.step async for event in handle.events() if isinstance(event, StepRecorded)]


class Replay(Driver):
    """A driver that keeps how the body ended instead of recording it."""

    ended: Event

    async def _settle(self, event: Event) -> None:
        self.ended = event


async def replay(engine: keiro.Engine, handle: keiro.Handle, workflow: keiro.Workflow) -> Any:
    """Run the body again over what is recorded, as a process that takes the run over does."""
    found = await engine.store.head(handle.run_id)
    assert found is not None
    run, head = found
    stored = (await engine.store.history([run.run_key], after=1))[run.run_key]
    stored = [row for row in stored if row.topic != "WorkflowCompleted"]
    head.version = len(stored) + 1
    driver = Replay(engine, workflow, run, head, History((), stored))
    await asyncio.create_task(driver.drive())
    return driver.ended


async def test_wf_01_each_step_is_recorded_once_and_in_order(make_engine: MakeEngine) -> None:
    """WF-01; WF-20: row and journal are written in one transaction."""
    async with make_engine(three_steps) as engine:
        handle = await engine.start(three_steps, 1, id="a")
        assert await handle.result() == [1, 2, 3]
        assert calls == [1, 2, 3]
        assert await topics(handle) == ["WorkflowStarted", *["StepRecorded"] * 3, "WorkflowCompleted"]
        assert await step_names(handle) == ["note", "note#2", "note_in_thread"]
        run = await handle.run()
        assert (run.status, run.finished_at_ms is not None) == ("completed", True)


async def test_wf_02_a_replay_runs_no_step_and_records_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(three_steps) as engine:
        handle = await engine.start(three_steps, 1, id="a")
        await handle.result()
        before = await topics(handle)
        ended = await replay(engine, handle, three_steps)
        assert isinstance(ended, WorkflowCompleted) and msgspec.json.decode(ended.result) == [1, 2, 3]
        assert calls == [1, 2, 3]
        assert await topics(handle) == before


async def test_u17_a_result_is_read_and_not_computed_again(make_engine: MakeEngine) -> None:
    """U17; and U14: the run is found by another engine by its id alone, with the input that was stored."""
    async with make_engine(three_steps) as engine:
        handle = await engine.start(three_steps, 5, id="a")
        await handle.result()
    async with make_engine(three_steps) as engine:
        again = engine.handle(handle.run_id)
        assert await again.result() == [5, 6, 7]
        assert await engine.execute(three_steps, 5, id="a") == [5, 6, 7]
        assert calls == [5, 6, 7]


async def test_wf_03_a_repeated_name_counts_up(make_engine: MakeEngine) -> None:
    """WF-03, F-U23: in this design the second call is a step of its own, `name#2`, so loops replay."""

    @keiro.workflow
    async def loop(run: keiro.WorkflowRun) -> list[int]:
        return [await run.step(note, n) for n in range(3)]

    async with make_engine(loop) as engine:
        handle = await engine.start(loop, id="a")
        assert await handle.result() == [0, 1, 2]
        assert await step_names(handle) == ["note", "note#2", "note#3"]


async def test_u23_a_name_used_by_two_tasks_is_refused_on_the_first_run(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def clash(run: keiro.WorkflowRun) -> None:
        async def helper(n: int) -> None:
            await run.step(note, n)

        await asyncio.gather(helper(1), helper(2))

    async with make_engine(clash) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(clash, id="a")
        assert isinstance(failed.value.__cause__, keiro.StepNameClash)
        assert "key=" in str(failed.value.__cause__)


async def test_gather_task_group_map_and_scope_replay_by_name(make_engine: MakeEngine) -> None:
    """Field report dbos#688: names are reserved at the call, so the order of completion does not matter."""

    async def slow_first(value: int) -> int:
        await asyncio.sleep(0.01 if value == 0 else 0)
        calls.append(value)
        return value

    @keiro.workflow
    async def fan_out(run: keiro.WorkflowRun) -> list[Any]:
        gathered = await asyncio.gather(*(run.step(slow_first, n) for n in range(3)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run.step(note, n, key=f"task-{n}")) for n in range(3)]

        async def one(scope: Any, item: int) -> int:
            return int(await scope.step(note, item)) + int(await scope.step(note, item))

        mapped = await run.map(one, [10, 20], limit=1)
        return [gathered, [task.result() for task in tasks], mapped]

    async with make_engine(fan_out) as engine:
        handle = await engine.start(fan_out, id="a")
        assert await handle.result() == [[0, 1, 2], [0, 1, 2], [20, 40]]
        assert sorted(await step_names(handle)) == sorted(
            "slow_first slow_first#2 slow_first#3 task-0 task-1 task-2".split()  # noqa: SIM905
            + "one-0/note one-0/note#2 one-1/note one-1/note#2".split()  # noqa: SIM905
        )
        count = len(calls)
        ended = await replay(engine, handle, fan_out)
        assert msgspec.json.decode(ended.result) == [[0, 1, 2], [0, 1, 2], [20, 40]]
        assert len(calls) == count


async def test_wf_06_and_07_the_first_writer_of_a_step_wins(make_engine: MakeEngine) -> None:
    """WF-06, WF-07: another writer records the step while its body runs; the body gets the winner's value."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def raced() -> str:
        entered.set()
        await go_on.wait()
        return "mine"

    @keiro.workflow
    async def race(run: keiro.WorkflowRun) -> list[str]:
        return [await run.step(raced), await run.step(note, "after")]

    async with make_engine(race) as engine:
        handle = await engine.start(race, id="a")
        await entered.wait()
        winner = StepRecorded(step="raced", result=msgspec.Raw(b'"theirs"'))
        command = Append(handle.run_id, (new(winner, StepIds("race", "a", 0)("raced")),), engine.wall_ms())
        assert isinstance(await engine.store.submit(command), Appended)
        again = await engine.store.submit(command)
        assert again.stored.payload == command.events[0].payload  # type: ignore[union-attr]
        go_on.set()
        assert await handle.result() == ["theirs", "after"]
        assert await step_names(handle) == ["raced", "note"]


async def test_wf_08_the_body_sees_the_json_round_trip_on_the_first_run(make_engine: MakeEngine) -> None:
    """WF-08, F19: a tuple is a list in JSON, so it is one in the body too, before any replay."""

    @keiro.workflow
    async def lossy(run: keiro.WorkflowRun, value: Any) -> list[str]:
        seen = await run.step(note, (1, 2))
        return [type(value).__name__, type(seen).__name__]

    async with make_engine(lossy) as engine:
        assert await engine.execute(lossy, (1, 2), id="a") == ["list", "list"]


async def test_wf_09_a_result_its_own_annotation_cannot_read_raises_at_once_and_is_recorded(
    make_engine: MakeEngine,
) -> None:
    async def says_int() -> int:
        calls.append("ran")
        return "not a number"  # type: ignore[return-value]

    @keiro.workflow
    async def undecodable(run: keiro.WorkflowRun) -> str:
        try:
            await run.step(says_int)
        except keiro.DecodeFailed as error:
            return error.where
        return "decoded"

    async with make_engine(undecodable) as engine:
        handle = await engine.start(undecodable, id="a")
        assert "says_int" in await handle.result()
        assert await step_names(handle) == ["says_int"]
        await replay(engine, handle, undecodable)
        assert calls == ["ran"]


@pytest.mark.parametrize(
    "key", ["", "a:b", "a#1", "a\x00b", "a\nb", "\ud800", "x" * 513, "\x7f"], ids=lambda key: ascii(key)[:12]
)
async def test_wf_10_a_bad_key_is_refused_and_nothing_is_written(make_engine: MakeEngine, key: str) -> None:
    async with make_engine(three_steps) as engine:
        with pytest.raises(keiro.InvalidName):
            await engine.start(three_steps, 1, id=key)
        assert await engine.runs() == []


@pytest.mark.parametrize("name", ["", "a-b", "a:b", "a#b", "ä", "a b", "x" * 129])
def test_wf_10_a_bad_workflow_name_is_refused(name: str) -> None:
    with pytest.raises(keiro.InvalidName):
        keiro.workflow(name=name)(three_steps.body)


async def test_f35_equal_keys_of_two_workflows_are_two_runs(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def other(run: keiro.WorkflowRun, first: int) -> int:
        return int(await run.step(note, first * 100))

    async with make_engine(three_steps, other) as engine:
        results = await asyncio.gather(engine.execute(three_steps, 1, id="same"), engine.execute(other, 1, id="same"))
        assert results == [[1, 2, 3], 100]


async def test_wf_171_non_ascii_step_names_do_not_collide(make_engine: MakeEngine) -> None:
    """WF-171, F37: these names are equal modulo 256 code point by code point."""

    @keiro.workflow
    async def names(run: keiro.WorkflowRun) -> list[int]:
        return [await run.step(note, 1, key="Ā"), await run.step(note, 2, key="Ȁ"), await run.step(note, 3, key="é")]

    async with make_engine(names) as engine:
        handle = await engine.start(names, id="ключ")
        assert await handle.result() == [1, 2, 3]
        assert await step_names(handle) == ["Ā", "Ȁ", "é"]


async def test_equal_input_finds_the_run_and_other_input_is_a_conflict(make_engine: MakeEngine) -> None:
    async with make_engine(three_steps) as engine:
        first = await engine.start(three_steps, 1, id="a")
        again = await engine.start(three_steps, first=1, id="a")
        assert again.run_id == first.run_id
        with pytest.raises(keiro.RunConflict, match="another input"):
            await engine.start(three_steps, 2, id="a")
        await first.result()
        assert calls == [1, 2, 3]


async def test_equal_input_is_equal_in_value_and_not_in_spelling(make_engine: MakeEngine) -> None:
    """A set encodes in the order of hashes, which differs from process to process; 1 and true are two values."""

    @keiro.workflow
    async def takes(run: keiro.WorkflowRun, tags: set[str], n: Any) -> Any:
        return sorted(tags), n

    async with make_engine(takes) as engine:
        first = StartedWith(engine, takes)
        await first('{"tags":["a","b"],"n":1}')
        assert await engine.execute(takes, {"b", "a"}, 1, id="a") == [["a", "b"], 1]
        with pytest.raises(keiro.RunConflict):
            await engine.start(takes, {"a", "b"}, True, id="a")


class StartedWith:
    """Starts a run with an input exactly as another process may have encoded it."""

    def __init__(self, engine: keiro.Engine, workflow: keiro.Workflow) -> None:
        self._engine = engine
        self._name = workflow.name

    async def __call__(self, text: str) -> None:
        started = WorkflowStarted(workflow=self._name, key="a", input=msgspec.Raw(text.encode()))
        one = new(started, uuid.uuid4().bytes)
        await self._engine.store.submit(Start(f"wf:{self._name}-a", one, self._engine.wall_ms()))


async def test_ten_concurrent_starts_of_one_key_run_the_body_once(make_engine: MakeEngine) -> None:
    """Field report dbos#544."""
    async with make_engine(three_steps) as engine:
        results = await asyncio.gather(*(engine.execute(three_steps, 1, id="a") for _ in range(10)))
        assert results == [[1, 2, 3]] * 10
        assert calls == [1, 2, 3]


async def test_u10_nothing_is_appended_to_a_run_that_does_not_exist(make_engine: MakeEngine) -> None:
    async with make_engine(three_steps) as engine:
        event = new(StepRecorded(step="x", result=msgspec.Raw(b"1")), uuid.uuid4().bytes)
        outcome = await engine.store.submit(Append("wf:three_steps-ghost", (event,), engine.wall_ms()))
        assert outcome == UnknownRun()
        assert await engine.runs() == []
        with pytest.raises(keiro.RunNotFound):
            await engine.handle("wf:three_steps-ghost").result()


async def test_f39_an_ended_run_refuses_every_append(make_engine: MakeEngine) -> None:
    """F39, WF-23 as this design has it: a late append is refused, so the row cannot come back to life."""
    async with make_engine(three_steps) as engine:
        handle = await engine.start(three_steps, 1, id="a")
        await handle.result()
        before = [event async for event in handle.events()]
        event = new(StepRecorded(step="late", result=msgspec.Raw(b"1")), uuid.uuid4().bytes)
        outcome = await engine.store.submit(Append(handle.run_id, (event,), engine.wall_ms()))
        assert outcome == RefusedTerminal("completed")
        assert [event async for event in handle.events()] == before


async def test_p1_none_is_a_result_like_any_other(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def nothing(run: keiro.WorkflowRun) -> None:
        assert await run.step(note, None) is None

    async with make_engine(nothing) as engine:
        handle = await engine.start(nothing, id="a")
        assert await handle.result() is None
        assert (await handle.run()).result_json == "null"
        await replay(engine, handle, nothing)
        assert calls == [None]


async def test_now_random_and_uuid4_replay(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def clocked(run: keiro.WorkflowRun) -> list[Any]:
        values: list[Any] = [run.now(), run.random(), run.uuid4()]
        await run.step(note, 1)
        values += [run.now(), run.random(), run.uuid4()]

        async def helper(n: int) -> list[Any]:
            before = [run.uuid4(), run.random()]
            await run.step(note, n, key=f"k{n}")
            return [*before, run.now(), run.uuid4()]

        return values + list(await asyncio.gather(helper(1), helper(2)))

    async with make_engine(clocked) as engine:
        handle = await engine.start(clocked, id="a")
        first = await handle.result()
        ended = await replay(engine, handle, clocked)
        assert msgspec.json.decode(ended.result) == first
        assert first[6][0] != first[7][0]
        assert first[0] <= first[3]


async def test_other_inputs_on_replay_are_reported_and_strict_mode_refuses_them(make_engine: MakeEngine) -> None:
    factor = [1]

    @keiro.workflow
    async def drifting(run: keiro.WorkflowRun) -> Any:
        return await run.step(note, factor[0])

    async with make_engine(drifting, strict=True) as engine:
        handle = await engine.start(drifting, id="a")
        assert await handle.result() == 1
        factor[0] = 2
        ended = await replay(engine, handle, drifting)
        assert ended.failure.type.endswith("NonDeterminism")
        engine.strict = False
        reported: list[str] = []
        engine.report = lambda event, run_id, **fields: reported.append(event)  # type: ignore[method-assign]
        ended = await replay(engine, handle, drifting)
        assert msgspec.json.decode(ended.result) == 1
        assert reported == ["inputs_differ"]
