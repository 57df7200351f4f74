"""Rounds and patches: a run that begins anew keeps its name, its children and a short history (WF-22, WF-90 to 96)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import keiro
from keiro.decisions import Appended, Cancel, Command, Deliver, Rotate
from keiro.projections.waits import Exit
from tests.conformance.interleaved import Interleaved, records
from tests.conformance.test_cancel import cancelled
from tests.conformance.test_children import LIMIT_S, Boom, causes, double, gate, held, only_child, reached
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


def is_rotation(command: Command) -> bool:
    return isinstance(command, Rotate)


async def history(engine: keiro.Engine, run_id: str) -> list[str]:
    """The topics of this very round: a handle shows the newest one."""
    run = await engine.store.run(run_id)
    assert run is not None
    return [row.topic for row in (await engine.store.history([run.run_key]))[run.run_key]]


@keiro.workflow
async def counts(run: keiro.WorkflowRun, at: int, until: int) -> int:
    for n in range(at, at + 50):
        await run.step(note, n)
    if at + 50 < until:
        run.continue_as_new(at + 50, until)
    return at + 50


async def test_wf_90_many_steps_in_rounds_run_once_each_and_leave_short_journals(make_engine: MakeEngine) -> None:
    """WF-22, WF-90: the handle of the start follows the run through all rounds."""
    async with make_engine(counts) as engine:
        handle = await engine.start(counts, 0, 300, id="a")
        assert await handle.result(LIMIT_S) == 300
        assert calls == list(range(300))
        for number in range(6):
            name = "wf:counts-a" + (f"#{number}" if number else "")
            assert await history(engine, name) == ["WorkflowStarted", *["StepRecorded"] * 50, "WorkflowCompleted"]
            run = await engine.store.run(name)
            assert run is not None
            assert (run.lineage_id, run.round_ordinal, run.status) == ("wf:counts-a", number, "completed")
            before = {0: None, 1: "wf:counts-a"}.get(number, f"wf:counts-a#{number - 1}")
            assert run.parent_run_id == before
            assert run.handoff_run_id == (f"wf:counts-a#{number + 1}" if number < 5 else None)
            assert await engine.handle(name).result(LIMIT_S) == 300
        assert (await handle.run()).run_id == "wf:counts-a#5"
        assert await engine.store.run("wf:counts-a#6") is None
        again = await engine.start(counts, 0, 300, id="a")
        assert await again.result(LIMIT_S) == 300 and len(calls) == 300


@keiro.workflow
async def two_rounds(run: keiro.WorkflowRun, n: int) -> list[Any]:
    if run.round == 0:
        await run.step(note, "first")
        run.continue_as_new(n + 1)
    return [n, run.round, run.id, await run.step(held, "second")]


async def test_wf_91_a_round_that_has_begun_is_found_and_driven_by_others(make_engine: MakeEngine) -> None:
    """WF-91, F36, F9: what the round before recorded, and its end, are not taken for this one's."""
    async with make_engine(two_rounds, grace=0) as engine:
        handle = await engine.start(two_rounds, 1, id="a")
        await gate["entered"].wait()
        assert await handle.status() == "running"
        assert await topics(handle) == ["WorkflowStarted"]
    gate["go"].set()
    async with make_engine(worker=False) as client:
        handle = client.handle("wf:two_rounds-a")
        assert await handle.status() == "pending"
        waiting = asyncio.create_task(handle.result(LIMIT_S))
        async with make_engine(two_rounds):
            assert await waiting == [2, 1, "wf:two_rounds-a#1", "second"]
    assert calls == ["first", "second", "second"]


async def test_a_handoff_is_not_swallowed(make_engine: MakeEngine) -> None:
    """U15: `except Exception` does not hold it up, and what `finally` does before it is recorded nowhere."""

    @keiro.workflow
    async def tries(run: keiro.WorkflowRun, n: int) -> int:
        if n == 0:
            try:
                run.continue_as_new(1)
            except Exception:
                return -1
        return n

    async with make_engine(tries) as engine:
        assert await engine.execute(tries, 0, id="a") == 1


@pytest.mark.parametrize("how", ["returns", "goes on", "again", "finally", "gather"])
async def test_u15_a_body_that_swallows_the_end_of_its_round_does_not_go_on(
    make_engine: MakeEngine, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """U15: the round has ended where it was said; what the body does then is recorded nowhere, and not done."""

    @keiro.workflow
    async def swallows(run: keiro.WorkflowRun, n: int) -> int:
        async def ends() -> None:
            run.continue_as_new(n + 1)

        if n:
            return n
        if how == "gather":
            await asyncio.gather(ends(), return_exceptions=True)
            return -1
        try:
            run.continue_as_new(1)
        except BaseException:
            if how == "goes on":
                await run.step(note, "after")
            if how == "again":
                run.continue_as_new(2)
            if how == "finally":
                raise
        finally:
            if how == "finally":
                await run.step(note, "after")
        return -1

    async with make_engine(swallows) as engine:
        assert await engine.execute(swallows, 0, id="a") == 1
        assert calls == []
        assert await history(engine, "wf:swallows-a") == ["WorkflowStarted", "WorkflowCompleted"]
        assert ("swallowed what run.continue_as_new raises" in caplog.text) == (how in ("returns", "gather"))


@pytest.mark.parametrize("how", ["gather", "group", "map"])
async def test_a_round_is_ended_by_any_task_of_its_body(make_engine: MakeEngine, how: str) -> None:
    """Also where a task group wraps what ends it; an error beside it is still a failure."""

    @keiro.workflow
    async def tasks(run: keiro.WorkflowRun, n: int, beside: bool) -> int:
        async def ends(scope: Any = run, item: int = 0) -> None:
            scope.continue_as_new(1, beside)

        async def fails() -> None:
            raise Boom("beside")

        async def cleans_up() -> None:
            try:
                await run.sleep(3600)
            finally:
                await run.step(note, "cleaned up")

        if n == 0 and how == "gather":
            await asyncio.gather(ends())
        elif n == 0 and how == "map":
            await run.map(ends, [1])
        elif n == 0:
            async with asyncio.TaskGroup() as group:
                group.create_task(ends())
                group.create_task(fails() if beside else cleans_up())
        return run.round

    async with make_engine(tasks) as engine:
        assert await engine.execute(tasks, 0, False, id="a") == 1
        if how == "group":
            with pytest.raises(keiro.WorkflowFailed, match="TaskGroup"):
                await engine.execute(tasks, 0, True, id="b")


async def test_f2_the_same_waits_in_every_round_are_waits_of_their_own(
    make_engine: MakeEngine, either_way: None
) -> None:
    """F2, F4, F5, F36: a sleep, a deferred and a step of the same names."""

    @keiro.workflow
    async def repeats(run: keiro.WorkflowRun, seen: list[Any]) -> list[Any]:
        await run.sleep(0.01)
        seen = [*seen, await run.step(note, run.round), await run.deferred("more").result()]
        if run.round < 2:
            run.continue_as_new(seen)
        return seen

    async with make_engine(repeats) as engine:
        handle = await engine.start(repeats, [], id="a")
        for number in range(3):
            async with asyncio.timeout(LIMIT_S):
                while len(calls) <= number:
                    await asyncio.sleep(0)
            assert await engine.complete("wf:repeats-a", "more", f"v{number}") is True
        assert await handle.result(LIMIT_S) == [0, "v0", 1, "v1", 2, "v2"]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_wf_96_what_comes_as_a_round_ends_is_for_the_next_one(make_engine: MakeEngine, order: str) -> None:
    """WF-96, F36: a completion that the old round did not take is carried over, or goes to the new round itself."""

    @keiro.workflow(patches=["p"])
    async def takes(run: keiro.WorkflowRun, n: int) -> list[Any]:
        if n == 0:
            await run.deferred("taken").result()
            run.continue_as_new(1)
        return [await run.deferred("left").result(), run.patched("p")]

    async with make_engine(takes) as engine:
        race = Interleaved(
            engine,
            is_rotation,
            order,
            lambda: Deliver(
                "wf:takes-a", "awk:left", msgspec.json.encode(Exit(ok=msgspec.Raw(b'"late"'))), engine.wall_ms()
            ),
        )
        handle = await engine.start(takes, 0, id="a")
        await engine.complete(handle.run_id, "taken", 1)
        assert await handle.result(LIMIT_S) == ["late", True]
        assert isinstance(await race.outcome, Appended)
        assert await step_names(handle) == ["awk:left"]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_cancellation_as_a_round_ends_leaves_no_round_behind(make_engine: MakeEngine, order: str) -> None:
    """WF-27, F36: it is for the lineage: the old round where it comes first, else the new one."""
    async with make_engine(two_rounds) as engine:
        race = Interleaved(engine, is_rotation, order, lambda: Cancel("wf:two_rounds-a", engine.wall_ms()))
        handle = await engine.start(two_rounds, 1, id="a")
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended)
        last = (await handle.run()).run_id
        assert last == ("wf:two_rounds-a" if order == "before" else "wf:two_rounds-a#1")
        assert (await engine.store.run("wf:two_rounds-a#1") is None) == (order == "before")
        assert calls == ["first"]


async def test_a_run_is_cancelled_in_its_newest_round_by_any_of_its_ids(make_engine: MakeEngine) -> None:
    async with make_engine(two_rounds) as engine:
        for key, suffix in (("a", ""), ("b", "#1")):
            gate["entered"].clear()
            handle = await engine.start(two_rounds, 1, id=key)
            await gate["entered"].wait()
            assert await engine.cancel(f"wf:two_rounds-{key}{suffix}") is True
            await cancelled(handle)
            assert await engine.cancel(handle.run_id) is False
            first = await engine.store.run(f"wf:two_rounds-{key}")
            assert first is not None and first.status == "completed"


# Children and rounds


@keiro.workflow
async def same_child(run: keiro.WorkflowRun, seen: list[Any]) -> list[Any]:
    kid = await run.spawn(double, 4, id="k")
    seen = [*seen, await kid.result()]
    if run.round < 2:
        run.continue_as_new(seen)
    return seen


async def test_ch_60_a_later_round_attaches_to_the_child_and_is_told_its_result(
    make_engine: MakeEngine, either_way: None
) -> None:
    gate["go"].set()
    async with make_engine(same_child, double) as engine:
        handle = await engine.start(same_child, [], id="a")
        assert await handle.result(LIMIT_S) == [8, 8, 8]
        assert calls == [4] and len(await handle.children()) == 1
        assert await step_names(handle) == ["child:k", "child:k:result"]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_ch_51_a_later_round_is_told_how_its_child_ended_before(make_engine: MakeEngine, end: str) -> None:
    """CH-51, F22: a round that begins after the child has failed, or was cancelled, still hears why."""

    @keiro.workflow
    async def fails(run: keiro.WorkflowRun) -> None:
        if end == "cancelled":
            await run.step(held, 1)
        raise Boom("why")

    @keiro.workflow
    async def asks(run: keiro.WorkflowRun, said: list[str]) -> list[str]:
        kid = await run.spawn(fails, id="k")
        if end == "cancelled" and run.round == 0:
            await run.step(entered)
            await kid.cancel()
        try:
            await kid.result()
        except (keiro.ChildFailed, keiro.ChildCancelled) as error:
            said = [*said, " ".join([type(error).__name__, *map(str, causes(error))])]
        if run.round < 1:
            run.continue_as_new(said)
        return said

    async def entered() -> None:
        await gate["entered"].wait()

    async with make_engine(asks, fails) as engine:
        handle = await engine.start(asks, [], id="a")
        assert await handle.result(LIMIT_S) == [{"failed": "ChildFailed why", "cancelled": "ChildCancelled"}[end]] * 2
        assert (await only_child(handle)).status == end


@pytest.mark.parametrize("order", ["before", "after"])
async def test_u8_a_child_that_ends_as_its_parents_round_does_is_heard_of_in_the_next_one(
    make_engine: MakeEngine, either_way: None, order: str
) -> None:
    """U8, F22: the round that is told is found in the transaction that tells it."""

    @keiro.workflow
    async def rotates(run: keiro.WorkflowRun, n: int) -> list[int]:
        kid = await run.spawn(double, 4, id="k")
        if n == 0:
            await run.deferred("go").result()
            run.continue_as_new(1)
        return [n, await kid.result()]

    async with make_engine(rotates, double) as engine:
        handle = await engine.start(rotates, 0, id="a")
        await gate["entered"].wait()
        submit = engine.store.submit
        # The end of the child is held until the rotation is sent, and goes in the same batch.
        kept: list[Any] = []

        def hold(command: Command) -> Any:
            if records("wf:double-k", "WorkflowCompleted")(command):
                kept.append((command, asyncio.get_running_loop().create_future()))
                return kept[0][1]
            if not is_rotation(command):
                return submit(command)
            end, told = kept[0]
            if order == "before":
                outcome = submit(end)
            mine = submit(command)
            if order == "after":
                outcome = submit(end)
            outcome.add_done_callback(lambda done: told.set_result(done.result()))
            return mine

        engine.store.submit = hold  # type: ignore[method-assign]
        gate["go"].set()
        async with asyncio.timeout(LIMIT_S):
            while not kept:
                await asyncio.sleep(0)
        assert await engine.complete(handle.run_id, "go", 1)
        assert await handle.result(LIMIT_S) == [1, 8]
        assert (await only_child(handle)).status == "completed"
        assert sorted(await step_names(handle)) == ["child:k", "child:k:result"]


@keiro.workflow
async def child_in_rounds(run: keiro.WorkflowRun, n: int, how: str) -> int:
    await run.step(note, n)
    if n < 2:
        run.continue_as_new(n + 1, how)
    if how == "failed":
        raise Boom("in the last round")
    if how == "cancelled":
        await run.step(held, "last round")
    return n


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_a_child_in_rounds_is_one_child_and_tells_of_its_last_end(
    make_engine: MakeEngine, either_way: None, how: str
) -> None:
    """CH-60, U20: a handoff is no end; the row of the child is open until the last round ends."""

    @keiro.workflow
    async def asks(run: keiro.WorkflowRun) -> Any:
        try:
            return await run.call(child_in_rounds, 0, how, id="k")
        except (keiro.ChildFailed, keiro.ChildCancelled) as error:
            return type(error).__name__

    async with make_engine(asks, child_in_rounds) as engine:
        handle = await engine.start(asks, id="a")
        if how == "cancelled":
            await gate["entered"].wait()
            assert (await only_child(handle)).status == "running"
            assert await engine.cancel("wf:child_in_rounds-k")
        expected = {"completed": 2, "failed": "ChildFailed", "cancelled": "ChildCancelled"}[how]
        assert await handle.result(LIMIT_S) == expected
        row = await only_child(handle)
        assert (row.status, row.run_id) == (how, "wf:child_in_rounds-k")
        assert await step_names(handle) == ["child:k", "child:k:result"]


async def test_ch_47_a_parent_in_rounds_cancels_children_of_all_its_rounds(make_engine: MakeEngine) -> None:
    """CH-47: also one that is in a later round itself."""

    @keiro.workflow
    async def spawns(run: keiro.WorkflowRun, n: int) -> None:
        if n == 0:
            await run.spawn(double, 1, id="early")
            run.continue_as_new(1)
        await run.spawn(child_in_rounds, 0, "cancelled", id="rounds")
        await run.deferred("never").result()

    async with make_engine(spawns, double, child_in_rounds) as engine:
        handle = await engine.start(spawns, 0, id="a")
        async with asyncio.timeout(LIMIT_S):
            while "last round" not in calls or 1 not in calls:
                await asyncio.sleep(0)
        await reached(engine.handle("wf:child_in_rounds-rounds"), "running")
        assert await handle.cancel()
        await cancelled(handle)
        await cancelled(engine.handle("wf:double-early"))
        await cancelled(engine.handle("wf:child_in_rounds-rounds"))
        assert {row.child_id: row.status for row in await handle.children()} == dict.fromkeys(
            ("early", "rounds"), "cancelled"
        )


# Patches


def deployed(*patches: str) -> keiro.Workflow:
    """The workflow as it is deployed with these patches."""

    @keiro.workflow(name="patched", patches=list(patches))
    async def body(run: keiro.WorkflowRun, rounds: int) -> list[Any]:
        seen = [run.patched("p")]
        await run.deferred(f"go-{run.round}").result()
        seen += [run.patched("p"), await run.step(note, "new" if run.patched("p") else "old"), run.patched("q")]
        if run.round < rounds:
            run.continue_as_new(rounds)
        return seen

    return body


async def test_wf_92_to_96_a_round_keeps_the_patches_it_began_with(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """WF-92, WF-93, WF-94, WF-95, WF-96, F20: whenever it is driven, woken or only completed before it was driven."""
    old, new = deployed(), deployed("p")
    async with make_engine(old) as engine:
        parked = await engine.start(old, 0, id="parked")
        rotates = await engine.start(old, 1, id="rotates")
        await reached(parked, "suspended")
        await reached(rotates, "suspended")
    async with make_engine(old, worker=False) as client:
        # Begun before the patch and never driven; and completed before it is.
        early = await client.start(old, 0, id="early")
        await client.complete(early.run_id, "go-0", 1)
    async with make_engine(new) as engine:
        fresh = await engine.start(new, 0, id="fresh")
        for name, number in (("parked", 0), ("rotates", 0), ("rotates", 1), ("fresh", 0)):
            await engine.complete(f"wf:patched-{name}", f"go-{number}", 1)
        assert await engine.handle(parked.run_id).result(LIMIT_S) == [False, False, "old", False]
        assert await engine.handle(early.run_id).result(LIMIT_S) == [False, False, "old", False]
        assert await fresh.result(LIMIT_S) == [True, True, "new", False]
        # The old round went the old way, and the next one began with the patch, though it was completed before.
        assert await engine.handle(rotates.run_id).result(LIMIT_S) == [True, True, "new", False]
        assert sorted(calls) == ["new", "new", "old", "old", "old"]
        assert await topics(fresh) == (await history(engine, fresh.run_id)) and "patch" not in " ".join(
            await step_names(fresh)
        )
        run = await engine.store.run(fresh.run_id)
        assert run is not None
    async with make_engine(old) as engine:
        # Rolled back meanwhile: what began with the patch keeps it.
        assert await engine.execute(old, 0, id="fresh") == [True, True, "new", False]


class Tally(keiro.WorkflowRun, name="tally"):
    """Adds up what it is told, in rounds of two."""

    def __init__(self) -> None:
        self.told: list[int] = []

    @keiro.event("Told")
    def tell(self, n: int) -> None:
        self.told.append(n)

    async def execute(self, before: int) -> int:
        await self.until(lambda: len(self.told) >= 2)
        total = before + sum(self.told)
        if self.round < 2:
            self.continue_as_new(total)
        return total


async def test_commands_reach_the_newest_round_and_are_recorded_once_in_all_of_them(make_engine: MakeEngine) -> None:
    """By the id of any round; sent again with its id, a command is found in the round that has it."""
    async with make_engine(Tally) as engine:
        handle = await engine.start(Tally, 0, id="a")
        for n in range(1, 5):
            await engine.command(handle.run_id, Tally.tell, n, id=f"c{n}")
            if n % 2 == 0:
                while (await handle.run()).round_ordinal < n // 2:
                    await asyncio.sleep(0.001)
            assert await engine.command(handle.run_id, Tally.tell, n, id=f"c{n}")
        await engine.command("wf:tally-a#1", Tally.tell, 5)
        await engine.command(handle.run_id, Tally.tell, 6)
        assert await handle.result(LIMIT_S) == 21
        with pytest.raises(keiro.RunEnded):
            await engine.command(handle.run_id, Tally.tell, 7)
