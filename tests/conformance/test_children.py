"""Children: spawned, driven, waited for, settled with their parents in one transaction (CH-01 to 33, CH-50 to 64).

Where it matters whether a parent has left the process meanwhile, the test runs both ways: `parked` at once, and
`resident` for longer than any test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

import keiro
from keiro.decisions import AlreadyPresent, Append, RefusedTerminal, new
from keiro.events import Event, StepRecorded, WorkflowCancelled, WorkflowCompleted, WorkflowFailed
from keiro.failures import capture
from keiro.identity import StepIds
from keiro.projections.base import Projection, Row
from keiro.projections.waits import ChildRow, decode_exit, exit_of
from tests.conformance.test_steps import calls, note, replay, step_names, topics
from tests.conftest import MakeEngine

gate: dict[str, asyncio.Event] = {}
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


async def held(value: Any) -> Any:
    calls.append(value)
    gate["entered"].set()
    await gate["go"].wait()
    return value


async def reached(handle: keiro.Handle, status: str) -> None:
    """Return when the run has this status."""
    async with asyncio.timeout(LIMIT_S):
        while await handle.status() != status:
            await asyncio.sleep(0)


async def results(handle: keiro.Handle) -> dict[str, Any]:
    """What is recorded of each step, by name; the first record counts."""
    found: dict[str, Any] = {}
    async for event in handle.events():
        if isinstance(event, StepRecorded):
            found.setdefault(event.step, msgspec.json.decode(event.result))
    return found


async def only_child(handle: keiro.Handle) -> ChildRow:
    (row,) = await handle.children()
    return row


@keiro.workflow
async def double(run: keiro.WorkflowRun, n: int) -> int:
    return 2 * int(await run.step(held, n))


@keiro.workflow
async def doubles(run: keiro.WorkflowRun, n: int) -> Any:
    kid = await run.spawn(double, n, id=f"{run.key}-kid")
    return await run.step(note, await kid.result())


async def test_ch_10_to_12_a_parent_waits_for_its_child_and_goes_on_with_its_result(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """CH-01, CH-02, CH-10, CH-11, CH-12; WF-04: a run that waits is suspended."""
    async with make_engine(doubles, double) as engine:
        handle = await engine.start(doubles, 21, id="a")
        await gate["entered"].wait()
        await reached(handle, "suspended")
        assert await step_names(handle) == ["child:a-kid"]
        row = await only_child(handle)
        assert (row.child_id, row.child_name, row.parent_id, row.parent_name) == ("a-kid", "double", "a", "doubles")
        assert (row.await_step, row.status, row.result, row.completed_at) == (
            "child:a-kid:result",
            "running",
            None,
            None,
        )
        run = await handle.run()
        assert (run.waiting_reason, run.waiting_token) == ("child", "child:a-kid:result")
        gate["go"].set()
        assert await handle.result(LIMIT_S) == 42
        assert await step_names(handle) == ["child:a-kid", "child:a-kid:result", "note"]
        assert (await results(handle))["child:a-kid:result"] == {"ok": 42}
        assert await topics(engine.handle("wf:double-a-kid")) == [
            "WorkflowStarted",
            "StepRecorded",
            "WorkflowCompleted",
        ]
        row = await only_child(handle)
        assert (row.status, row.result, row.failed, row.completed_at is not None) == ("completed", "42", False, True)
        assert calls == [21, 42]


async def test_ch_13_a_worker_alone_drives_parent_and_child(make_engine: MakeEngine, either_way: None) -> None:
    """The client that starts the parent drives nothing and knows neither of them."""
    gate["go"].set()
    async with make_engine(worker=False) as client, make_engine(doubles, double):
        handle = await client.start(doubles, 4, id="a")
        assert await handle.result(LIMIT_S) == 8
        assert calls == [4, 8]


async def test_ch_14_and_15_discovery_returns_the_child_and_not_the_parked_parent(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    gate["go"].set()
    both = ["doubles", "double"]
    async with make_engine(doubles, double, worker=False) as client:
        assert client._worker is not None
        async with make_engine(doubles) as engine:
            handle = await engine.start(doubles, 4, id="a")
            await reached(handle, "suspended")
        child = client.handle("wf:double-a-kid")
        run = await child.run()
        assert (run.status, run.parent_run_id, run.on_cancel) == ("pending", "wf:doubles-a", "cancel")
        assert await topics(child) == ["WorkflowStarted"]
        taken = await client.store.claim(client._worker.key, both, 10)
        assert [run.run_id for run, _ in taken] == ["wf:double-a-kid"]
        await client.store.release(client._worker.key, [run.run_key for run, _ in taken])
        async with make_engine(double):
            await child.result(LIMIT_S)
        taken = await client.store.claim(client._worker.key, both, 10)
        assert [run.run_id for run, _ in taken] == ["wf:doubles-a"]


async def test_ch_16_a_parent_that_is_driven_again_spawns_nothing_again(
    make_engine: MakeEngine, either_way: None
) -> None:
    """CH-16, CH-02: the process goes away in the middle, and another one goes on."""
    async with make_engine(doubles, double, grace=0) as engine:
        handle = await engine.start(doubles, 4, id="a")
        await gate["entered"].wait()
        before = await only_child(handle)
    gate["go"].set()
    async with make_engine(doubles, double) as engine:
        handle = engine.handle("wf:doubles-a")
        assert await handle.result(LIMIT_S) == 8
        assert await step_names(handle) == ["child:a-kid", "child:a-kid:result", "note"]
        after = await only_child(handle)
        assert (after.created_at, after.status) == (before.created_at, "completed")
        assert calls == [4, 4, 8]


async def test_ch_02_a_spawn_of_the_same_child_is_no_other_child(make_engine: MakeEngine) -> None:
    gate["go"].set()

    @keiro.workflow
    async def twice(run: keiro.WorkflowRun) -> list[int]:
        kids = [await run.spawn(double, 3, id="k"), await run.spawn(double, 3, id="k")]
        return [await kid.result() for kid in kids]

    async with make_engine(twice, double) as engine:
        handle = await engine.start(twice, id="a")
        assert await handle.result(LIMIT_S) == [6, 6]
        assert await step_names(handle) == ["child:k", "child:k:result"]
        assert len(await handle.children()) == 1 and calls == [3]


async def test_ch_03_and_04_a_child_ends_once(make_engine: MakeEngine) -> None:
    """CH-03, CH-04, CH-27, CH-45, U9: whoever ends it again changes neither its row nor what its parent was told."""
    gate["go"].set()
    async with make_engine(doubles, double) as engine:
        handle = await engine.start(doubles, 4, id="a")
        assert await handle.result(LIMIT_S) == 8
        row = await only_child(handle)
        told = await results(handle)
        completed = WorkflowCompleted(result=msgspec.Raw(b"99"))
        ids = StepIds("double", "a-kid", 0)
        again = Append("wf:double-a-kid", (new(completed, ids("__workflow_completed__")),), engine.wall_ms())
        assert isinstance(await engine.store.submit(again), AlreadyPresent)
        failed = WorkflowFailed(failure=capture(ValueError("too late")))
        too_late = Append("wf:double-a-kid", (new(failed, ids("late")),), engine.wall_ms())
        assert await engine.store.submit(too_late) == RefusedTerminal("completed")
        assert await engine.cancel("wf:double-a-kid") is False
        assert (await only_child(handle), await results(handle)) == (row, told)
        with pytest.raises(keiro.RunNotFound):
            await engine.cancel("wf:double-nobody")
        assert await engine.children.of("wf:double-nobody") == []


async def test_ch_05_children_are_listed_oldest_first_and_then_by_id(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate["go"].set()
    monkeypatch.setattr(keiro.Engine, "wall_ms", lambda self: 1_700_000_000_000)

    @keiro.workflow
    async def family(run: keiro.WorkflowRun) -> list[int]:
        kids = [await run.spawn(double, n, id=key) for n, key in enumerate(("z", "a", "ä", "Z"))]
        return [await kid.result() for kid in kids]

    async with make_engine(family, double) as engine:
        handle = await engine.start(family, id="f")
        assert await handle.result(LIMIT_S) == [0, 2, 4, 6]
        rows = await handle.children()
        assert [row.child_id for row in rows] == ["Z", "a", "z", "ä"]
        assert [row.status for row in rows] == ["completed"] * 4
        assert rows == await engine.children.of("wf:family-f")
        assert rows[0].created_at == "2023-11-14T22:13:20.000+00:00"


@pytest.mark.parametrize(
    "event",
    [
        WorkflowCompleted(result=msgspec.Raw(b'{"failed":1}')),
        WorkflowCompleted(result=msgspec.Raw(b"null")),
        WorkflowFailed(failure=capture(ValueError("boom"))),
        WorkflowCancelled(reason="enough"),
        WorkflowCancelled(),
    ],
    ids=["completed", "none", "failed", "cancelled", "cancelled-without-reason"],
)
def test_ch_07_how_a_child_ended_comes_back_as_it_went(event: Event) -> None:
    assert decode_exit(msgspec.json.encode(exit_of(event))) == exit_of(event)


async def test_ch_17_a_child_that_has_ended_before_it_is_waited_for_parks_nobody(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """CH-17, CH-18: and its result may be asked for as often as one likes."""
    gate["go"].set()

    @keiro.workflow
    async def late(run: keiro.WorkflowRun) -> list[int]:
        kid = await run.spawn(double, 4, id="k")
        await run.step(its_end, "wf:double-k")
        return [await kid.result(), await kid.result(), *await asyncio.gather(kid.result(), kid.result())]

    async with make_engine(late, double) as engine:

        async def its_end(run_id: str) -> None:
            await engine.handle(run_id).result(LIMIT_S)

        handle = await engine.start(late, id="a")
        assert await handle.result(LIMIT_S) == [8] * 4
        assert "StateChanged" not in await topics(handle)
        ended = await replay(engine, handle, late)
        assert msgspec.json.decode(ended.result) == [8] * 4


async def test_ch_19_a_fan_out_of_300_children_is_told_of_each_of_them_once(
    make_engine: MakeEngine, either_way: None
) -> None:
    """CH-19: waited for in the reverse order, and driven on by another process in the middle."""

    @keiro.workflow
    async def leaf(run: keiro.WorkflowRun, n: int) -> int:
        if n == 150:
            await run.step(held, n)
        return n

    @keiro.workflow
    async def fan(run: keiro.WorkflowRun) -> int:
        kids = [await run.spawn(leaf, n) for n in range(300)]
        return sum([await kid.result() for kid in reversed(kids)])

    async with make_engine(fan, leaf, grace=0) as engine:
        handle = await engine.start(fan, id="a")
        async with asyncio.timeout(LIMIT_S):
            await gate["entered"].wait()
    gate["go"].set()
    async with make_engine(fan, leaf, concurrency=40) as engine:
        handle = engine.handle("wf:fan-a")
        assert await handle.result(LIMIT_S) == sum(range(300))
        rows = await handle.children()
        assert [row.status for row in rows] == ["completed"] * 300
        places = [(row.created_at, row.child_id) for row in rows]
        assert places == sorted(places)
        names = await step_names(handle)
        assert len(names) == len(set(names)) == 600


class Boom(Exception):
    pass


async def explode(value: Any) -> None:
    calls.append(value)
    raise Boom(f"no {value}")


@keiro.workflow
async def bottom(run: keiro.WorkflowRun, what: str) -> str:
    if what == "failure":
        await run.step(explode, what)
    if what == "wait":
        await run.step(held, what)
    return what


@keiro.workflow
async def middle(run: keiro.WorkflowRun, what: str) -> str:
    return f"<{await run.call(bottom, what)}>"


@keiro.workflow
async def top(run: keiro.WorkflowRun, what: str) -> str:
    return f"<{await run.call(middle, what, id='m')}>"


async def test_ch_20_what_a_grandchild_returns_comes_up_all_the_way(make_engine: MakeEngine, either_way: None) -> None:
    async with make_engine(top, middle, bottom) as engine:
        assert await engine.execute(top, "result", id="a") == "<<result>>"


async def test_ch_20_what_a_grandchild_raises_comes_up_all_the_way(make_engine: MakeEngine, either_way: None) -> None:
    """CH-20, CH-50: each failure names the run below, and the original exception is the last cause."""
    async with make_engine(top, middle, bottom) as engine:
        handle = await engine.start(top, "failure", id="a")
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await handle.result(LIMIT_S)
        chain = [failed.value, *causes(failed.value)]
        assert [type(error).__name__ for error in chain] == ["WorkflowFailed", "ChildFailed", "ChildFailed", "Boom"]
        assert "wf:middle-m failed" in str(chain[1]) and "wf:bottom-m-bottom-1 failed" in str(chain[2])
        assert (await only_child(handle)).status == "failed"
        row = await only_child(engine.handle("wf:middle-m"))
        assert (row.status, row.failed, row.failure_reason, row.result) == ("failed", True, "no failure", None)
        assert calls == ["failure"]


def causes(error: BaseException) -> Iterable[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_u1_the_end_of_a_child_and_the_news_to_its_parent_are_one_transaction(
    make_engine: MakeEngine, either_way: None, end: str
) -> None:
    """U1, F12, F13, CH-29, CH-25: there is no moment at which one is there without the other."""

    @keiro.workflow
    async def ends(run: keiro.WorkflowRun) -> None:
        await run.step(held, 1)
        if end == "failed":
            raise Boom("no")

    @keiro.workflow
    async def waits(run: keiro.WorkflowRun) -> str:
        kid = await run.spawn(ends, id="k")
        try:
            await kid.result()
        except (keiro.ChildFailed, keiro.ChildCancelled) as error:
            return type(error).__name__
        return "result"

    refusing = Refusing()
    async with make_engine(waits, ends, projections=[refusing]) as engine:
        handle = await engine.start(waits, id="a")
        await gate["entered"].wait()
        refusing.refuse = True  # the parent's step cannot be projected: then the child must not end either
        if end == "cancelled":
            with pytest.raises(keiro.ProjectionFailed):
                await engine.cancel("wf:ends-k")
        else:
            gate["go"].set()
            async with asyncio.timeout(LIMIT_S):
                while not refusing.refused:
                    await asyncio.sleep(0)
        assert await engine.handle("wf:ends-k").status() == "running"
        assert (await only_child(handle)).status == "running"
        assert "child:k:result" not in await step_names(handle)
        refusing.refuse = False
        if end == "cancelled":
            assert await engine.cancel("wf:ends-k") is True
        said = {"completed": "result", "failed": "ChildFailed", "cancelled": "ChildCancelled"}[end]
        assert await handle.result(LIMIT_S) == said
        assert (await only_child(handle)).status == end
        journal = await engine.store.read(0, 1000)
        at = next(
            n for n, row in enumerate(journal) if row.run_id == "wf:ends-k" and row.topic == f"Workflow{end.title()}"
        )
        assert (journal[at + 1].run_id, journal[at + 1].topic) == ("wf:waits-a", "StepRecorded")
        assert journal[at + 1].recorded_at_ms == journal[at].recorded_at_ms


class Refusing(Projection):
    """Cannot fold what a parent is told, as long as it is told not to."""

    name = "refusing"
    table = sa.Table("refusing", sa.MetaData(), sa.Column("run_id", sa.Text, primary_key=True))
    topics = ("StepRecorded",)
    refuse = False
    refused = False

    def keys(self, event: Event) -> Iterable[Any]:
        if isinstance(event, StepRecorded) and event.step.endswith(":result") and self.refuse:
            self.refused = True
            raise ValueError("not now")
        return []

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        raise AssertionError


async def test_ch_26_an_end_that_comes_while_the_parent_runs_is_not_overlooked(
    make_engine: MakeEngine, either_way: None
) -> None:
    """CH-26, F21: the child ends while the parent is in a step, and the parent was read before."""

    @keiro.workflow
    async def quick(run: keiro.WorkflowRun) -> str:
        return await run.step(note, "quick")

    @keiro.workflow
    async def busy(run: keiro.WorkflowRun) -> list[Any]:
        kid = await run.spawn(quick, id="k")
        return [await run.step(held, "busy"), await kid.result()]

    async with make_engine(busy) as one:
        handle = await one.start(busy, id="a")
        await gate["entered"].wait()
        async with make_engine(quick) as other:
            assert await other.handle("wf:quick-k").result(LIMIT_S) == "quick"
        gate["go"].set()
        assert await handle.result(LIMIT_S) == ["busy", "quick"]


async def test_ch_28_a_parent_that_has_ended_is_told_nothing(make_engine: MakeEngine) -> None:
    """CH-28, F39: the row of the child is completed, and the parent's journal is closed; whatever its end was."""

    @keiro.workflow
    async def leaves(run: keiro.WorkflowRun, how: str) -> None:
        await run.spawn(double, 1, id=f"{how}-k", on_cancel="detach")
        if how == "failed":
            raise Boom(how)
        if how == "cancelled":
            await asyncio.Event().wait()

    async with make_engine(leaves, double) as engine:
        handles = {}
        for how in ("completed", "failed", "cancelled"):
            handles[how] = await engine.start(leaves, how, id=how)
            async with asyncio.timeout(LIMIT_S):
                while len(calls) < len(handles):
                    await asyncio.sleep(0)
            if how == "cancelled":
                assert await handles[how].cancel()
            await reached(handles[how], how)
        before = {how: await topics(handle) for how, handle in handles.items()}
        gate["go"].set()
        for how, handle in handles.items():
            assert await engine.handle(f"wf:double-{how}-k").result(LIMIT_S) == 2
            row = await only_child(handle)
            assert (row.status, row.result) == ("completed", "2")
            assert (await topics(handle), await handle.status()) == (before[how], how)


async def test_u20_a_child_that_anybody_ends_tells_its_parent(make_engine: MakeEngine) -> None:
    """U20: here by a bare append of its end, without a driver."""
    async with make_engine(doubles) as engine:
        handle = await engine.start(doubles, 4, id="a")
        child = engine.handle("wf:double-a-kid")
        async with asyncio.timeout(LIMIT_S):
            while await handle.children() == []:
                await asyncio.sleep(0)
        event = new(
            WorkflowCompleted(result=msgspec.Raw(b"7")), StepIds("double", "a-kid", 0)("__workflow_completed__")
        )
        await engine.store.submit(Append(child.run_id, (event,), engine.wall_ms()))
        assert await handle.result(LIMIT_S) == 7
        assert (await only_child(handle)).status == "completed"


async def test_ch_30_a_result_of_another_type_is_an_error_that_names_the_step(make_engine: MakeEngine) -> None:
    """CH-30, F18: who drives the child has another version of it, with another type of result."""

    @keiro.workflow(name="typed")
    async def as_it_was(run: keiro.WorkflowRun) -> int:
        return 1

    @keiro.workflow(name="typed")
    async def as_it_is(run: keiro.WorkflowRun) -> str:
        return "one"

    @keiro.workflow
    async def expects(run: keiro.WorkflowRun) -> str:
        kid = await run.spawn(as_it_was, id="k")
        try:
            return str(await kid.result())
        except keiro.DecodeFailed as error:
            return f"{error.where} {error}"

    async with make_engine(expects) as one, make_engine(as_it_is):
        told = await (await one.start(expects, id="a")).result(LIMIT_S)
        assert told.startswith("child:k:result ") and "int" in told


@pytest.mark.parametrize("value", [{"cancelled": True}, {"failed": "x"}, {"ok": 1}, None, [], False], ids=repr)
async def test_ch_31_and_32_an_honest_result_is_delivered_as_it_is(
    make_engine: MakeEngine, either_way: None, value: Any
) -> None:
    """CH-31, CH-32, F17: whatever it looks like, and also if it is None."""

    @keiro.workflow
    async def honest(run: keiro.WorkflowRun) -> Any:
        return value

    @keiro.workflow
    async def asks(run: keiro.WorkflowRun) -> Any:
        return [await run.call(honest, id="k")]

    async with make_engine(asks, honest) as engine:
        handle = await engine.start(asks, id="a")
        assert await handle.result(LIMIT_S) == [value]
        assert (await results(handle))["child:k:result"] == {"ok": value}
        row = await only_child(handle)
        assert row.result is not None and msgspec.json.decode(row.result) == value


async def test_ch_50_a_child_fails_at_its_ceiling_and_says_why(make_engine: MakeEngine) -> None:
    @keiro.workflow(retry=keiro.Retry(attempts=2, initial=0))
    async def fragile(run: keiro.WorkflowRun) -> None:
        await run.step(explode, "x")

    @keiro.workflow
    async def catches(run: keiro.WorkflowRun) -> list[Any]:
        kid = await run.spawn(fragile, id="k")
        try:
            await kid.result()
        except keiro.ChildFailed as error:
            return [str(error), type(error.__cause__).__name__, str(await kid.status())]
        return []

    async with make_engine(catches, fragile) as engine:
        handle = await engine.start(catches, id="a")
        said, cause, status = await handle.result(LIMIT_S)
        assert "wf:fragile-k failed" in said and "no x" in said and (cause, status) == ("Boom", "failed")
        assert calls == ["x", "x"]
        row = await only_child(handle)
        assert (row.status, row.failed, row.failure_reason) == ("failed", True, "no x")


async def test_ch_61_a_child_of_another_parent_is_refused(make_engine: MakeEngine) -> None:
    """CH-61, U5: and the first parent keeps it."""

    @keiro.workflow
    async def takes(run: keiro.WorkflowRun) -> int:
        return int(await run.call(double, 1, id="shared"))

    async with make_engine(takes, double) as engine:
        one = await engine.start(takes, id="one")
        await gate["entered"].wait()
        with pytest.raises(keiro.WorkflowFailed, match="is a child of wf:takes-one"):
            await engine.execute(takes, id="two")
        gate["go"].set()
        assert await one.result(LIMIT_S) == 2
        with pytest.raises(keiro.WorkflowFailed, match="is a child of wf:takes-one"):
            await engine.execute(takes, id="three")
        assert await engine.handle("wf:takes-two").children() == [] and calls == [1]


async def test_ch_62_one_key_for_children_of_two_workflows_is_refused(make_engine: MakeEngine) -> None:
    """CH-62, U6: also at a replay, and in the same words."""
    gate["go"].set()

    @keiro.workflow
    async def confuses(run: keiro.WorkflowRun) -> list[Any]:
        kid = await run.spawn(double, 1, id="k")
        said = []
        for _ in range(2):
            try:
                await run.spawn(bottom, "x", id="k")
            except keiro.RunConflict as error:
                said.append(str(error))
        return [await kid.result(), said]

    async with make_engine(confuses, double, bottom) as engine:
        handle = await engine.start(confuses, id="a")
        value, said = await handle.result(LIMIT_S)
        assert value == 2 and len(said) == 2 and said[0] == said[1]
        assert "wf:double-k" in said[0] and "wf:bottom-k" in said[0]
        assert [row.run_id for row in await handle.children()] == ["wf:double-k"]
        assert await engine.store.run("wf:bottom-k") is None
        ended = await replay(engine, handle, confuses)
        assert msgspec.json.decode(ended.result) == [value, said]


async def test_ch_62_one_key_for_children_of_two_workflows_is_refused_in_a_later_round_too(
    make_engine: MakeEngine,
) -> None:
    """CH-62, U6: the second would be told of the end of the first one, which goes on in the meantime."""

    @keiro.workflow
    async def confuses(run: keiro.WorkflowRun, n: int) -> str:
        if n == 0:
            await run.spawn(double, 1, id="k")
            run.continue_as_new(1)
        try:
            return str(await run.call(bottom, "x", id="k"))
        except keiro.RunConflict as error:
            return str(error)

    async with make_engine(confuses, double, bottom) as engine:
        handle = await engine.start(confuses, 0, id="a")
        await gate["entered"].wait()
        said = await handle.result(LIMIT_S)
        assert "its child 'k' is wf:double-k" in said and "wf:bottom-k" in said
        assert await engine.store.run("wf:bottom-k") is None
        gate["go"].set()
        assert await engine.handle("wf:double-k").result(LIMIT_S) == 2


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
async def test_ch_63_a_run_that_ended_on_its_own_is_attached_to(make_engine: MakeEngine, end: str) -> None:
    """CH-63, U7: its end is told at once, and the row of the child says it."""

    @keiro.workflow
    async def alone(run: keiro.WorkflowRun, n: int) -> int:
        if end == "failed":
            raise Boom("no")
        return int(await run.step(held, n))

    @keiro.workflow
    async def attaches(run: keiro.WorkflowRun) -> Any:
        kid = await run.spawn(alone, 5, id="k")
        try:
            return await kid.result()
        except (keiro.ChildFailed, keiro.ChildCancelled) as error:
            return type(error).__name__

    async with make_engine(attaches, alone) as engine:
        own = await engine.start(alone, 5, id="k")
        if end == "cancelled":
            await gate["entered"].wait()
            assert await own.cancel()
        gate["go"].set()
        await reached(own, end)
        handle = await engine.start(attaches, id="a")
        expected = {"completed": 5, "failed": "ChildFailed", "cancelled": "ChildCancelled"}[end]
        assert await handle.result(LIMIT_S) == expected
        assert (await only_child(handle)).status == end
        ended = await replay(engine, handle, attaches)
        assert msgspec.json.decode(ended.result) == expected
        assert len([n for n in calls if n == 5]) == (end != "failed")


async def test_ch_63_a_run_that_goes_on_by_itself_or_had_other_input_is_refused(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def attaches(run: keiro.WorkflowRun, n: int) -> Any:
        return await run.call(double, n, id="k")

    async with make_engine(attaches, double) as engine:
        own = await engine.start(double, 5, id="k")
        await gate["entered"].wait()
        with pytest.raises(keiro.WorkflowFailed, match="was started on its own"):
            await engine.execute(attaches, 5, id="a")
        gate["go"].set()
        await own.result(LIMIT_S)
        with pytest.raises(keiro.WorkflowFailed, match="another input"):
            await engine.execute(attaches, 6, id="b")


async def test_ch_64_a_run_cannot_be_its_own_child(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def narcissus(run: keiro.WorkflowRun) -> str:
        try:
            await run.spawn(narcissus, id=run.key)
        except keiro.RunConflict as error:
            return str(error)
        return "spawned"

    async with make_engine(narcissus) as engine:
        handle = await engine.start(narcissus, id="a")
        assert "child of itself" in await handle.result(LIMIT_S)
        assert await handle.children() == []


async def test_a_child_is_waited_for_no_longer_than_asked(make_engine: MakeEngine, either_way: None) -> None:
    """U24: the child goes on, and its result may be asked for again."""

    @keiro.workflow
    async def impatient(run: keiro.WorkflowRun) -> list[Any]:
        kid = await run.spawn(double, 4, id="k")
        try:
            await kid.result(timeout=0.01)
        except TimeoutError:
            await run.step(open_gate)
        return [await kid.result(), await kid.result(timeout=0.01)]

    async with make_engine(impatient, double) as engine:

        async def open_gate() -> None:
            await gate["entered"].wait()
            gate["go"].set()

        handle = await engine.start(impatient, id="a")
        assert await handle.result(LIMIT_S) == [8, 8]
        ended = await replay(engine, handle, impatient)
        assert msgspec.json.decode(ended.result) == [8, 8]
