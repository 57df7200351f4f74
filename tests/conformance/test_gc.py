"""Retention: what ended long ago goes whole, what somebody may ask for stays (WF-150 to 155, CH-65, CH-66, U22)."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

import keiro
from keiro import retention
from keiro.decisions import Collect, Collected, Command, Existing, Refused, RefusedTerminal, Resurrect
from keiro.errors import InvalidCall, StoreError
from tests.conformance.parking import reached
from tests.conformance.test_resurrect import breaks, broken, failed
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine

TABLES = (
    "runs",
    "run_heads",
    "journal",
    "snapshots",
    "step_maps",
    "clock_deadlines",
    "deferred_completions",
    "workflow_children",
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    broken.clear()


def left_over(store_url: str, engine: keiro.Engine) -> dict[str, int]:
    """How many rows of runs there are, of those tables that have any."""
    kind = store_url.partition(":")[0]
    if kind == "memory":
        db: Any = engine.store._db  # type: ignore[attr-defined]
        found = {
            "runs": len(db.runs),
            "heads": len(db.heads),
            "journal": len(db.journal.read(0)),
            "by_event": len(db.by_event),
            "by_run": len(db.by_run),
            "rounds": len(db.rounds),
            "under": len(db.under),
            **{name: len(rows) for name, rows in db.rows.items()},
        }
        return {name: n for name, n in found.items() if n}
    count = "SELECT count(*) FROM {}"
    if kind == "sqlite":
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as connection:
            rows = {name: connection.execute(count.format(f"keiro_{name}")).fetchone()[0] for name in TABLES}
    else:
        import psycopg

        with psycopg.connect(store_url) as server:
            rows = {}
            for name in TABLES:
                found_row = server.execute(count.format(f"keiro.keiro_{name}").encode()).fetchone()
                assert found_row is not None
                rows[name] = found_row[0]
    return {name: n for name, n in rows.items() if n}


@keiro.workflow
async def kid(run: keiro.WorkflowRun, n: int) -> int:
    return n if n else await run.deferred("n", int).result()


@keiro.workflow
async def everything(run: keiro.WorkflowRun, rounds: int) -> int:
    await run.step(note, rounds)
    await run.sleep(0.01)
    said = await run.deferred("said", int).result()
    child = await run.spawn(kid, 1, id=f"{run.key}-kid-{rounds}")
    got = said + await child.result()
    if rounds:
        run.continue_as_new(rounds - 1)
    return got


@keiro.workflow
async def has_a_kid(run: keiro.WorkflowRun, n: int, on_cancel: str = "cancel") -> int:
    child = await run.spawn(kid, n, id=f"{run.key}-kid", on_cancel=on_cancel)
    got: int = await child.result()
    return got + await run.deferred("more", int).result()


async def test_wf_150_and_151_what_ended_in_time_goes_with_all_there_is_of_it(
    make_engine: MakeEngine, store_url: str
) -> None:
    """WF-150, WF-151, WF-152, F6: rounds, clocks, deferreds, children; a preview says the same and changes nothing."""
    async with make_engine(everything, kid) as engine:
        handle = await engine.start(everything, 1, id="a")
        for ordinal in range(2):
            while (await handle.run()).round_ordinal < ordinal:
                await asyncio.sleep(0.002)
            await engine.complete(handle.run_id, "said", 6)
        assert await handle.result() == 7
        living = await engine.start(kid, 0, id="lives")

        before = left_over(store_url, engine)
        assert (await engine.gc(3600)).collected == ()
        preview = await engine.gc(0, dry_run=True)
        assert left_over(store_url, engine) == before
        done = await engine.gc(older_than=0)

        kids = tuple(f"wf:kid-a-kid-{n}" for n in (1, 0))
        assert preview == done == retention.Collection(3, 4, done.collected, ())
        assert sorted(done.collected) == sorted((*kids, "wf:everything-a"))
        with pytest.raises(keiro.RunNotFound):
            await handle.run()
        with pytest.raises(keiro.RunNotFound):
            await engine.handle(handle.run_id).result()
        assert await engine.gc(0) == retention.Collection(0, 0, (), ())
        await engine.complete(living.run_id, "n", 3)
        assert await living.result() == 3
        assert (await engine.gc(0)).collected == ("wf:kid-lives",)
        assert left_over(store_url, engine) == {}


async def test_a_key_that_was_collected_begins_anew(make_engine: MakeEngine) -> None:
    """F6: nothing of the run before comes back; those who read the journal go on behind the gap."""
    async with make_engine(kid) as engine:
        assert await engine.execute(kid, 1, id="a") == 1
        [*_, last] = await engine.store.read(0, 100)
        await engine.gc(0)
        assert await engine.store.read(0, 100) == []
        assert await engine.execute(kid, 2, id="a") == 2, "not the result of before, nor a conflict with its input"
        again = await engine.store.read(last.position, 100)
        assert [row.version for row in again] == [1, 2]
        assert (await engine.rebuild("runs")).differences == 0


async def test_ch_65_and_wf_153_a_child_stays_while_its_parent_may_ask_for_it(
    make_engine: MakeEngine, store_url: str
) -> None:
    """CH-65, WF-153: then both go, and no row of a child is left."""
    async with make_engine(has_a_kid, kid) as engine:
        handle = await engine.start(has_a_kid, 1, id="a")
        await reached(handle, "child:a-kid:result")
        assert await engine.gc(0) == retention.Collection(1, 0, (), ())
        assert [child.status for child in await handle.children()] == ["completed"]
        await engine.complete(handle.run_id, "more", 1)
        assert await handle.result() == 2
        assert (await engine.gc(0)).collected in (
            ("wf:kid-a-kid", "wf:has_a_kid-a"),
            ("wf:has_a_kid-a", "wf:kid-a-kid"),  # they ended in the same millisecond
        )
        assert left_over(store_url, engine) == {}


async def test_ch_66_a_child_that_runs_on_is_a_plain_run_when_its_parent_is_gone(make_engine: MakeEngine) -> None:
    """CH-66: also for a rebuild, although its first event names a parent."""
    async with make_engine(has_a_kid, kid) as engine:
        handle = await engine.start(has_a_kid, 0, "detach", id="a")
        child = engine.handle("wf:kid-a-kid")
        while not await handle.children():
            await asyncio.sleep(0.002)
        await handle.cancel()
        assert (await engine.gc(0)).collected == (handle.run_id,)
        assert (await child.run()).parent_run_id is None
        assert (await engine.rebuild("runs")).differences == 0
        await engine.complete(child.run_id, "n", 5)
        assert await child.result() == 5
        assert (await engine.gc(0)).collected == (child.run_id,)


async def test_u22_a_run_that_rotates_for_ever_does_not_keep_the_children_of_its_rounds(
    make_engine: MakeEngine,
) -> None:
    """U22: a child that the newest round and the one before neither have nor were told of."""

    @keiro.workflow
    async def rotates(run: keiro.WorkflowRun, at: int) -> None:
        child = await run.spawn(kid, at + 1, id=f"{run.key}-{at}")
        await child.result()
        if at == 2:
            await run.deferred("end").result()
        run.continue_as_new(at + 1)

    async with make_engine(rotates, kid) as engine:
        handle = await engine.start(rotates, 0, id="a")
        while (await handle.run()).round_ordinal < 2:
            await asyncio.sleep(0.002)
        await reached(handle, "child:a-2:result")
        assert (await engine.gc(0)).collected == ("wf:kid-a-0",)
        assert [child.child_id for child in await handle.children()] == ["a-1", "a-2"]


async def test_a_child_that_a_failed_parent_was_not_told_of_goes_with_it_and_not_before(
    make_engine: MakeEngine,
) -> None:
    """CH-53, U4: resurrected, the parent is told; so its child stays as long as the parent does."""

    @keiro.workflow
    async def fails(run: keiro.WorkflowRun) -> int:
        child = await run.spawn(kid, 0, id="k")
        if "mended" not in calls:
            raise RuntimeError("not yet")
        return int(await child.result())

    @keiro.workflow
    async def top(run: keiro.WorkflowRun) -> None:
        await run.spawn(fails, id="f")
        await run.deferred("end").result()

    async with make_engine(top, fails, kid) as engine:
        over = await engine.start(top, id="t")
        parent = engine.handle("wf:fails-f")
        await reached(over, "child:f:result")
        await engine.complete("wf:kid-k", "n", 4)
        await engine.handle("wf:kid-k").result()
        assert (await engine.gc(0)).collected == (), "the parent is held by its own, and the child by the parent"
        calls.append("mended")
        assert await engine.resurrect(parent.run_id)
        assert await parent.result() == 4
        calls.clear()
        other = await engine.start(fails, id="other")
        await failed(other)
        await engine.complete(over.run_id, "end", None)
        await over.result()
        collected = {"wf:top-t", "wf:fails-f", "wf:kid-k", "wf:fails-other"}
        assert set((await engine.gc(0, dry_run=True)).collected) == collected
        assert set((await engine.gc(0)).collected) == collected


@pytest.mark.parametrize("first", ["gc", "resurrect"])
async def test_a_run_that_is_resurrected_is_not_collected(make_engine: MakeEngine, first: str) -> None:
    """WF-155: in one batch, in either order; the one that comes second is told."""
    broken.add("step")
    async with make_engine(breaks, worker=False) as engine, make_engine(breaks) as driving:
        handle = await driving.start(breaks, id="a")
        await failed(handle)
        broken.clear()
        now = engine.wall_ms()
        sent: list[Command] = [Collect(handle.run_id, now), Resurrect(handle.run_id, now)]
        if first == "resurrect":
            sent.reverse()
        one, other = await asyncio.gather(*map(engine.store.submit, sent))
        if first == "gc":
            assert isinstance(one, Collected)
            assert not isinstance(other, RefusedTerminal)
            with pytest.raises(keiro.RunNotFound):
                await handle.run()
        else:
            assert isinstance(other, Refused)
            assert await handle.result() == ["before", "step", "after"]


@pytest.mark.parametrize("first", ["gc", "start"])
async def test_a_start_of_what_is_collected_finds_it_or_begins_anew(make_engine: MakeEngine, first: str) -> None:
    """WF-155: in one batch with the collection."""
    async with make_engine(kid) as engine:
        assert await engine.execute(kid, 1, id="a") == 1
        start = engine._start_of(kid, (1,), {}, "a", None)
        sent: list[Command] = [Collect("wf:kid-a", engine.wall_ms()), start]
        if first == "start":
            sent.reverse()
        outcomes = await asyncio.gather(*map(engine.store.submit, sent))
        if first == "gc":
            assert await engine.handle("wf:kid-a").result(30) == 1
            assert (await engine.handle("wf:kid-a").run()).run_key > 1
        else:
            assert isinstance(outcomes[0], Existing)
            with pytest.raises(keiro.RunNotFound):
                await engine.handle("wf:kid-a").run()


async def test_wf_154_one_that_cannot_be_deleted_is_told_of_and_the_others_go(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-154, WF-155, F32: isolated, counted truthfully, found again; also after an outage between two transactions."""
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    async with make_engine(kid) as engine:
        for n in range(5):
            await engine.execute(kid, 1, id=str(n))
        submit = engine.store.submit

        def faulty(command: Any) -> Any:
            if isinstance(command, Collect) and command.run_id == "wf:kid-1":
                refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                refused.set_exception(StoreError("a page of the file is damaged"))
                return refused
            if isinstance(command, Collect) and command.run_id == "wf:kid-4" and "away" not in calls:
                calls.append("away")
                refused = asyncio.get_running_loop().create_future()
                refused.set_exception(keiro.StoreUnavailable("away"))
                return refused
            return submit(command)

        engine.store.submit = faulty  # type: ignore[method-assign]
        with pytest.raises(keiro.StoreUnavailable):
            await engine.gc(0)
        engine.store.submit = submit  # type: ignore[method-assign]
        assert [run.key for run in await engine.store.runs(limit=10)] == ["4", "1"]
        calls.clear()
        calls.append("away")
        engine.store.submit = faulty  # type: ignore[method-assign]
        done = await engine.gc(0)
        assert done.collected == ("wf:kid-4",)
        assert done.failed == (("wf:kid-1", "a page of the file is damaged"),)
        assert done.scanned == 2


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1, "30d", True, None])
async def test_f53_an_age_that_is_none_deletes_nothing(make_engine: MakeEngine, age: Any) -> None:
    """F53: NaN once meant "delete everything"."""
    async with make_engine(kid) as engine:
        await engine.execute(kid, 1, id="a")
        with pytest.raises(InvalidCall, match="older_than"):
            await engine.gc(age)
        assert await engine.handle("wf:kid-a").result() == 1
