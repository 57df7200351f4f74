"""Retention: what ended long ago goes, with all that is its own; what anybody may still ask for stays.

WF-150 to WF-155, CH-65, CH-66 and the traps U22, F6, F32, F49 and F53.
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import keiro
from keiro.decisions import Cancel, Collect, Collected, Refused, Resurrect
from keiro.errors import InvalidCall, StoreError
from keiro.stores.memory import Database
from tests.conformance.retained import execute, gc_later, ids, later, rows_left
from tests.conftest import MakeEngine
from tests.projections.orders import FollowedTotals, order, values

LIMIT_S = 60
broken: set[str] = set()


@pytest.fixture(autouse=True)
def _whole() -> None:
    broken.clear()


@keiro.step
async def work(value: Any) -> Any:
    if value in broken:
        raise ValueError(f"{value} is broken")
    return value


@keiro.workflow
async def plain(run: keiro.WorkflowRun, value: Any = 1) -> Any:
    return await run.step(work, value)


@keiro.workflow
async def sleeper(run: keiro.WorkflowRun) -> None:
    await run.sleep(3600)


@keiro.workflow
async def waiter(run: keiro.WorkflowRun) -> Any:
    return await run.deferred("said").result()


@keiro.workflow
async def parent(run: keiro.WorkflowRun) -> Any:
    """Has one child that has ended, and waits itself."""
    child = await run.call(plain, 2, id=f"{run.key}-kid")
    return [child, await run.deferred("said").result()]


@keiro.workflow
async def leaves(run: keiro.WorkflowRun) -> None:
    """Ends before its child does."""
    await run.spawn(waiter, id=f"{run.key}-kid")


@keiro.workflow
async def rotor(run: keiro.WorkflowRun, n: int) -> None:
    """One child in each round, for ever."""
    await run.call(plain, n, id=f"{run.key}-{n}")
    if await run.deferred("next").result():
        run.continue_as_new(n + 1)


@keiro.workflow
async def rounds(run: keiro.WorkflowRun, n: int) -> int:
    if n:
        run.continue_as_new(n - 1)
    return await run.step(work, 7)


@keiro.workflow
async def waits_or_fails(run: keiro.WorkflowRun) -> Any:
    await run.step(work, "bad")
    return await run.deferred("said").result()


class Basket(keiro.WorkflowRun, name="gc_basket"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self) -> int:
        await self.apply(Basket.add, "sku")
        return len(self.items)


ALL = (plain, sleeper, waiter, parent, leaves, rotor, rounds, Basket)


async def until(handle: keiro.Handle, *statuses: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await handle.status() not in statuses:
            await asyncio.sleep(0.001)


async def until_known(engine: keiro.Engine, run_id: str) -> keiro.Handle:
    async with asyncio.timeout(LIMIT_S):
        while await engine.store.run(run_id) is None:
            await asyncio.sleep(0.001)
    return engine.handle(run_id)


async def gone(engine: keiro.Engine, run_id: str) -> bool:
    return await engine.store.run(run_id) is None


async def test_wf_150_all_of_a_run_goes_after_its_time_and_nothing_before(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """WF-150, F6: however it ended, with rounds, clocks, deferreds, children and snapshots."""
    broken.add("bad")
    async with make_engine(*ALL) as engine:
        handles = [
            await engine.start(plain, 1, id="done"),
            await engine.start(plain, "bad", id="bad"),
            await engine.start(rounds, 3, id="r"),
            await engine.start(Basket, id="b"),
            await engine.start(parent, id="p"),
            await engine.start(waiter, id="w"),
        ]
        stopped = await engine.start(sleeper, id="s")
        for handle in (handles[-1], handles[-2]):
            await engine.complete(handle.run_id, "said", "yes")
        await asyncio.gather(*(handle.result(LIMIT_S) for handle in handles), return_exceptions=True)
        await until(stopped, "suspended")
        await stopped.cancel()
        await asyncio.to_thread(engine.repository.take_snapshot, "wf:gc_basket-b")
        before = rows_left(engine)

        early = await gc_later(engine, 29.9)
        assert (early.scanned, early.collected, rows_left(engine)) == (0, (), before)

        found = await gc_later(engine, 30.1)
        every = [*(handle.run_id for handle in handles), stopped.run_id, "wf:plain-p-kid"]
        assert ids(found.collected) == ids(every)
        assert (found.scanned, found.failed) == (len(every), ())
        assert rows_left(engine) == {}
        assert await engine.store.read(0, 100) == []
        for handle in handles:
            with pytest.raises(keiro.RunNotFound):
                await handle.result(LIMIT_S)
            with pytest.raises(keiro.RunNotFound):
                await engine.handle(handle.run_id).run()
        assert (await gc_later(engine, 400)).scanned == 0


async def test_wf_151_and_f6_what_slept_when_it_was_cancelled_never_comes_back(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """WF-151, WF-152, F6: its clock is done with when it ends and goes with it, so that nothing fires later."""
    async with make_engine(sleeper) as engine:
        handle = await engine.start(sleeper, id="s")
        await until(handle, "suspended")
        await handle.cancel()
        assert await engine.store.next_due_ms(["sleeper"]) is None
        assert (await engine.gc(older_than=0)).collected == ("wf:sleeper-s",)
        assert rows_left(engine) == {}
        with later(engine, 7200):
            worker = engine._worker
            assert worker is not None
            assert await engine.store.claim(worker.key, ["sleeper"], 10) == []
        assert rows_left(engine) == {}


async def test_wf_153_and_ch_65_a_child_stays_while_its_parent_lives(make_engine: MakeEngine) -> None:
    """WF-153, CH-65: and both go once the parent has ended long ago; no row of the child is left."""
    async with make_engine(parent, plain) as engine:
        handle = await engine.start(parent, id="p")
        child = await until_known(engine, "wf:plain-p-kid")
        await child.result(LIMIT_S)
        await until(handle, "running", "suspended")
        found = await gc_later(engine, 31)
        assert (found.scanned, found.collected) == (1, ())
        assert await child.result(LIMIT_S) == 2
        await engine.complete(handle.run_id, "said", "yes")
        assert await handle.result(LIMIT_S) == [2, "yes"]
        found = await gc_later(engine, 31)
        assert ids(found.collected) == ["wf:parent-p", "wf:plain-p-kid"]
        assert rows_left(engine) == {}


async def test_ch_65_the_child_of_a_completed_parent_goes_before_it(make_engine: MakeEngine) -> None:
    """CH-65: in a collection between the two ends' times; the parent follows when it is its time."""
    async with make_engine(parent, plain) as engine:
        handle = await engine.start(parent, id="p")
        await (await until_known(engine, "wf:plain-p-kid")).result(LIMIT_S)
        with later(engine, 86400):
            await engine.complete(handle.run_id, "said", "yes")
            await handle.result(LIMIT_S)
        assert (await gc_later(engine, 30.5)).collected == ("wf:plain-p-kid",)
        assert await handle.result(LIMIT_S) == [2, "yes"] and await handle.children() == []
        assert (await gc_later(engine, 31.5)).collected == ("wf:parent-p",)
        assert rows_left(engine) == {}


async def test_ch_65_a_failed_parent_keeps_the_children_that_it_would_ask_for_again(make_engine: MakeEngine) -> None:
    """CH-65: resurrected, it has their results; too old itself, it goes with them."""

    @keiro.workflow
    async def fails(run: keiro.WorkflowRun) -> Any:
        child = await run.spawn(waiter, id="kid")
        await run.step(work, "bad")
        return await child.result()

    broken.add("bad")
    async with make_engine(fails, waiter) as engine:
        handle = await engine.start(fails, id="f")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)
        await engine.complete("wf:waiter-kid", "said", "yes")
        assert await engine.handle("wf:waiter-kid").result(LIMIT_S) == "yes"
        first = await handle.run()
        assert first.finished_at_ms is not None
        # The child is old enough and the parent is not: as it looks where the clocks of processes differ.
        outcome = await engine.store.submit(Collect("wf:waiter-kid", first.finished_at_ms - 1))
        assert isinstance(outcome, Refused)
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == "yes"
        assert ids((await engine.gc(older_than=0)).collected) == ["wf:fails-f", "wf:waiter-kid"]
        assert rows_left(engine) == {}


async def test_a_failed_family_goes_as_a_whole(make_engine: MakeEngine) -> None:
    """CH-65: the child of a failed parent is not kept for a parent that goes in the same collection."""
    broken.add(2)
    async with make_engine(parent, plain) as engine:
        handle = await engine.start(parent, id="p")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)
        preview = await engine.gc(older_than=0, dry_run=True)
        found = await engine.gc(older_than=0)
        assert ids(found.collected) == ids(preview.collected) == ["wf:parent-p", "wf:plain-p-kid"]
        assert rows_left(engine) == {}


async def test_ch_66_children_that_run_on_lose_a_parent_that_is_collected(
    make_engine: MakeEngine, either_way: None
) -> None:
    """CH-66: they end as plain runs, and go in their own time; a new run with the parent's id has no child."""
    async with make_engine(leaves, waiter) as engine:
        handle = await engine.start(leaves, id="p")
        await handle.result(LIMIT_S)
        child = engine.handle("wf:waiter-p-kid")
        assert (await gc_later(engine, 31)).collected == ("wf:leaves-p",)
        row = await child.run()
        assert row.parent_run_id is None and not row.terminal
        again = await engine.start(leaves, id="p")
        with pytest.raises(keiro.WorkflowFailed):
            await again.result(LIMIT_S)  # who has become a run of its own, and runs, is nobody's child
        assert await handle.children() == []
        assert (await engine.rebuild("runs")).updated == 0
        await engine.complete(child.run_id, "said", "yes")
        assert await child.result(LIMIT_S) == "yes"
        assert [type(event).__name__ async for event in again.events()] == ["WorkflowStarted", "WorkflowFailed"]
        assert ids((await gc_later(engine, 31)).collected) == ["wf:leaves-p", "wf:waiter-p-kid"]
        assert rows_left(engine) == {}


async def test_u22_a_parent_that_rotates_for_ever_keeps_the_children_of_its_last_two_rounds(
    make_engine: MakeEngine,
) -> None:
    """U22: what rounds before those had is not asked for any more."""
    async with make_engine(rotor, plain) as engine:
        handle = await engine.start(rotor, 0, id="r")
        for n in range(4):
            await (await until_known(engine, f"wf:plain-r-{n}")).result(LIMIT_S)
            if n < 3:
                await engine.complete(handle.run_id, "next", True)
        async with asyncio.timeout(LIMIT_S):
            while (await handle.run()).round_ordinal < 3:
                await asyncio.sleep(0.001)
        preview = await gc_later(engine, 31, dry_run=True)
        found = await gc_later(engine, 31)
        assert ids(found.collected) == ids(preview.collected) == ["wf:plain-r-0", "wf:plain-r-1"]
        assert found.scanned == 4
        assert [row.child_id for row in await handle.children()] == ["r-2", "r-3"]
        await engine.complete(handle.run_id, "next", False)
        await handle.result(LIMIT_S)
        await gc_later(engine, 31)
        assert rows_left(engine) == {}


async def test_a_run_that_was_attached_stays_while_the_round_lives(make_engine: MakeEngine) -> None:
    """WF-153: also where it was started on its own, before its parent asked for it."""
    async with make_engine(parent, plain) as engine:
        await engine.execute(plain, 2, id="p-kid")
        handle = await engine.start(parent, id="p")
        async with asyncio.timeout(LIMIT_S):
            while not await handle.children():
                await asyncio.sleep(0.001)
        assert (await gc_later(engine, 31)).collected == ()
        await engine.complete(handle.run_id, "said", "yes")
        await handle.result(LIMIT_S)
        assert ids((await gc_later(engine, 31)).collected) == ["wf:parent-p", "wf:plain-p-kid"]
        assert rows_left(engine) == {}


async def test_wf_154_and_wf_155_one_that_cannot_be_deleted_stops_no_other(
    make_engine: MakeEngine, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-154, WF-155, F32: it is told truthfully, stays whole, and goes with the next collection."""
    async with make_engine(plain) as engine:
        for n in range(5):
            await engine.execute(plain, n, id=str(n))
        with monkeypatch.context() as patch:
            await asyncio.to_thread(refuse_to_delete, store_url, "wf:plain-2", patch)
            found = await engine.gc(older_than=0)
        assert ids(found.collected) == [f"wf:plain-{n}" for n in (0, 1, 3, 4)]
        assert found.scanned == 5
        (one,) = found.failed
        assert one[0] == "wf:plain-2" and "not this one" in one[1]
        assert await engine.handle("wf:plain-2").result(LIMIT_S) == 2
        assert await engine.execute(plain, 9, id="9") == 9
        await asyncio.to_thread(allow_to_delete, store_url)
        assert ids((await engine.gc(older_than=0)).collected) == ["wf:plain-2", "wf:plain-9"]
        assert rows_left(engine) == {}


def refuse_to_delete(url: str, run_id: str, patch: pytest.MonkeyPatch) -> None:
    if url.startswith("memory"):
        forget = Database.forget

        def refusing(self: Database, what: Any) -> None:
            if what[0].lineage_id == run_id:
                raise StoreError("not this one")
            forget(self, what)

        patch.setattr(Database, "forget", refusing)
    elif url.startswith("sqlite"):
        execute(
            url,
            f"CREATE TRIGGER stubborn BEFORE DELETE ON keiro_runs WHEN OLD.run_id = '{run_id}'"
            " BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        )
    else:
        execute(
            url,
            "CREATE FUNCTION stubborn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF OLD.run_id = '{run_id}' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN OLD; END $$",
            "CREATE TRIGGER stubborn BEFORE DELETE ON keiro.keiro_runs FOR EACH ROW EXECUTE FUNCTION stubborn()",
        )


def allow_to_delete(url: str) -> None:
    if not url.startswith("memory"):
        execute(url, f"DROP TRIGGER stubborn{' ON keiro.keiro_runs' if url.startswith('postgres') else ''}")


@pytest.mark.parametrize(
    "age", [float("nan"), float("inf"), float("-inf"), -1, -0.001, timedelta(-1), "0", "30d", None, True, [], 0j]
)
async def test_f53_an_age_that_is_none_deletes_nothing(make_engine: MakeEngine, age: Any) -> None:
    """F53: a number that was misread must not mean "all"."""
    async with make_engine(plain) as engine:
        handle = await engine.start(plain, id="a")
        await handle.result(LIMIT_S)
        with pytest.raises(InvalidCall, match="older_than"):
            await engine.gc(older_than=age)
        assert await handle.result(LIMIT_S) == 1


async def test_an_age_beyond_all_time_deletes_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        await engine.execute(plain, id="a")
        for age in (10**400, 1e300, timedelta.max):
            assert (await engine.gc(older_than=age)).scanned == 0
        with pytest.raises(InvalidCall, match="dry_run"):
            await engine.gc(older_than=0, dry_run="no")  # type: ignore[arg-type]
        assert (await engine.gc(older_than=timedelta(0))).collected == ("wf:plain-a",)


async def test_a_preview_changes_nothing_and_says_what_the_collection_does(make_engine: MakeEngine) -> None:
    """Nothing but the flag differs, for runs with and without rounds, parents and children."""
    broken.add(3)
    async with make_engine(*ALL) as engine:
        await asyncio.gather(*(engine.execute(plain, n, id=str(n)) for n in range(5)), return_exceptions=True)
        await engine.execute(rounds, 4, id="r")
        await engine.start(parent, id="p")
        await (await until_known(engine, "wf:plain-p-kid")).result(LIMIT_S)
        before = rows_left(engine)
        preview = await engine.gc(older_than=0, dry_run=True)
        assert rows_left(engine) == before
        found = await engine.gc(older_than=0)
        assert found == preview
        assert len(found.collected) == 6 and found.scanned == 7


@pytest.mark.parametrize("first", ["gc", "resurrect"])
async def test_a_collection_that_meets_a_resurrection_deletes_nothing_that_lives(
    make_engine: MakeEngine, first: str
) -> None:
    """In one transaction or in two, in either order: what was resurrected before is there, after is not found."""
    broken.add("bad")
    for apart in (False, True):
        async with make_engine(plain) as engine:
            handle = await engine.start(plain, "bad", id="a")
            with pytest.raises(keiro.WorkflowFailed):
                await handle.result(LIMIT_S)
            now = engine.wall_ms() + 1
            commands: list[Any] = [Collect(handle.run_id, now), Resurrect(handle.run_id, now)]
            if first == "resurrect":
                commands.reverse()
                broken.clear()
            sent = [engine.store.submit(commands[0])]
            if apart:
                await sent[0]
            sent.append(engine.store.submit(commands[1]))
            outcomes = await asyncio.gather(*sent)
            if first == "gc":
                assert outcomes[0] is not None and type(outcomes[1]).__name__ == "UnknownRun"
                assert rows_left(engine) == {}
            else:
                assert isinstance(outcomes[1], Refused) or apart
                assert await handle.result(LIMIT_S) == "bad"
                assert (await engine.gc(older_than=0)).collected == (handle.run_id,)
                broken.add("bad")


async def test_a_listing_that_is_old_by_now_deletes_nothing_that_was_resurrected(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidates are listed without a lock; what counts is what is there in the transaction that deletes."""
    broken.add("bad")
    async with make_engine(waits_or_fails) as engine:
        handle = await engine.start(waits_or_fails, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)
        store: Any = engine.store
        listed = store.ended_before

        async def overtaken(*args: Any) -> Any:
            page = await listed(*args)
            if page:
                broken.clear()
                assert await engine.resurrect(handle.run_id)
            return page

        monkeypatch.setattr(store, "ended_before", overtaken)
        found = await engine.gc(older_than=0)
        assert (found.scanned, found.collected) == (1, ())
        await engine.complete(handle.run_id, "said", "yes")
        assert await handle.result(LIMIT_S) == "yes"


@pytest.mark.parametrize("first", ["gc", "start"])
@pytest.mark.parametrize("apart", [False, True], ids=["one_transaction", "two"])
async def test_a_collection_that_meets_a_start_of_the_same_key(
    make_engine: MakeEngine, first: str, apart: bool
) -> None:
    """A start before finds the run that ended; one after begins a new one, which is driven to its own end."""
    async with make_engine(plain) as engine:
        handle = await engine.start(plain, 1, id="a")
        await handle.result(LIMIT_S)
        old = (await handle.run()).run_key
        collect = Collect(handle.run_id, engine.wall_ms() + 1)
        if first == "gc":
            collecting = engine.store.submit(collect)
            if apart:
                await collecting
            again = await engine.start(plain, 1, id="a")
            assert isinstance(await collecting, Collected)
            assert await engine.handle(again.run_id).result(LIMIT_S) == 1
            assert (await again.run()).run_key > old
            events = [type(event).__name__ async for event in again.events()]
            assert events == ["WorkflowStarted", "StepRecorded", "WorkflowCompleted"]
        else:
            starting = asyncio.ensure_future(engine.start(plain, 1, id="a"))
            if apart:
                await starting
            else:
                await asyncio.sleep(0)
            assert isinstance(await engine.store.submit(collect), Collected)
            assert (await starting).run_id == handle.run_id
            assert rows_left(engine) == {}


async def test_the_child_of_a_collected_run_is_no_child_of_the_next_run_with_its_id(make_engine: MakeEngine) -> None:
    """Not even where all three are written at once: the deletion, the start, and the end of the child."""
    async with make_engine(leaves, waiter) as engine:
        await engine.execute(leaves, id="p")
        await until(engine.handle("wf:waiter-p-kid"), "running", "suspended")
    async with make_engine(leaves, waiter, worker=False) as client:
        now = client.wall_ms() + 1
        outcomes = await asyncio.gather(
            client.store.submit(Collect("wf:leaves-p", now)),
            client.store.submit(client._start_of(leaves, (), {}, "p", None)),
            client.store.submit(Cancel("wf:waiter-p-kid", now)),
        )
        assert isinstance(outcomes[0], Collected)
        again = client.handle("wf:leaves-p")
        assert [type(event).__name__ async for event in again.events()] == ["WorkflowStarted"]
        assert await client.handle("wf:waiter-p-kid").status() == "cancelled"


async def test_a_key_whose_run_was_collected_is_free(make_engine: MakeEngine) -> None:
    """With another input, too: nothing remembers the run that had it."""
    async with make_engine(plain, rounds) as engine:
        for value in (1, "other", None):
            assert await engine.execute(plain, value, id="a") == value
            assert await engine.execute(rounds, 2, id="a") == 7
            assert len((await engine.gc(older_than=0)).collected) == 2
        assert rows_left(engine) == {}


async def test_who_waits_for_a_run_that_is_collected_is_told(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process that collects, and in another one that never saw the end."""
    async with make_engine(waiter) as engine, make_engine(worker=False) as client:
        handle = await engine.start(waiter, id="w")
        client_store: Any = client.store

        async def blind(names: Any) -> list[Any]:
            return []

        monkeypatch.setattr(client_store, "ended", blind)
        waiting = asyncio.ensure_future(client.handle(handle.run_id).result())
        async with asyncio.timeout(LIMIT_S):
            while not client._waiting:
                await asyncio.sleep(0)
            await engine.complete(handle.run_id, "said", "yes")
            assert await handle.result() == "yes"
            assert (await engine.gc(older_than=0)).collected == (handle.run_id,)
            with pytest.raises(keiro.RunNotFound, match="deleted while it was waited for"):
                await waiting
        with pytest.raises(keiro.RunNotFound):
            await handle.result(LIMIT_S)
        with pytest.raises(keiro.RunNotFound):
            await engine.cancel(handle.run_id)
        with pytest.raises(keiro.RunNotFound):
            await engine.resurrect(handle.run_id)
        with pytest.raises(keiro.RunNotFound):
            await engine.complete(handle.run_id, "said", "no")


async def test_more_than_one_batch_and_more_than_one_page(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run is passed over where a page ends, though many end in the same millisecond."""
    monkeypatch.setattr("keiro.retention.BITE", 7)
    monkeypatch.setattr("keiro.retention.AT_ONCE", 3)
    async with make_engine(plain) as engine:
        await asyncio.gather(*(engine.execute(plain, n, id=str(n)) for n in range(40)))
        found = await engine.gc(older_than=0)
        assert ids(found.collected) == ids([f"wf:plain-{n}" for n in range(40)])
        assert len(set(found.collected)) == found.scanned == 40
        assert rows_left(engine) == {}


async def test_readers_of_the_journal_survive_positions_that_are_gone(make_engine: MakeEngine) -> None:
    """F49: pages are in order without what was deleted, positions are not given again, and reading goes on."""
    async with make_engine(plain) as engine:
        for n in range(12):
            await engine.execute(plain, n, id=str(n))
        last = (await engine.store.read(0, 1000))[-1].position
        keep = await engine.handle("wf:plain-5").run()
        now = engine.wall_ms() + 1
        for n in (0, 1, 3, 4, 6, 7, 8, 9, 11):
            assert isinstance(await engine.store.submit(Collect(f"wf:plain-{n}", now)), Collected)
        read: list[Any] = []
        while page := await engine.store.read(read[-1].position if read else 0, 2):
            read += page
        assert [row.position for row in read] == sorted({row.position for row in read})
        assert [row.run_id for row in read] == [f"wf:plain-{n}" for n in (2, 5, 10) for _ in range(3)]
        assert [row.version for row in (await engine.store.history([keep.run_key]))[keep.run_key]] == [1, 2, 3]
        await engine.execute(plain, 1, id="new")
        fresh = [row for row in await engine.store.read(0, 1000) if row.run_id == "wf:plain-new"]
        assert fresh[0].position > last
        assert await engine.store.read(fresh[-1].position, 10) == []


async def test_f49_who_waits_for_a_projection_at_a_head_that_was_deleted_is_told(make_engine: MakeEngine) -> None:
    """F49: the newest events went before a follower came to them; it is current, and goes on with what comes."""
    async with make_engine(order, projections=[FollowedTotals]) as engine:
        await engine.execute(order, "a", 1)
        await engine.caught_up(FollowedTotals, timeout=LIMIT_S)
        follower = engine._read_models._followers[FollowedTotals.name]
        head = await engine._read_models.kept.head()
        await follower.caught_up(head + 1000, LIMIT_S)
        assert len((await engine.gc(older_than=0)).collected) == 1
        await engine.caught_up(FollowedTotals, timeout=LIMIT_S)
        await engine.execute(order, "c", 1)
        await engine.caught_up(FollowedTotals, timeout=LIMIT_S)
        assert values(await engine.rows(FollowedTotals)) == [("a", 1, 1), ("c", 1, 1)]


FINISHED = 20_000


async def test_what_has_ended_is_found_by_an_index_on_sqlite(tmp_path: Any) -> None:
    """Where nothing is old enough, nothing is read."""
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[plain]) as engine:
        store: Any = engine.store
        sql, values = store._sql.ended_before(10, (5, 6), 1000)
        plan = [row[3] for row in store._conn.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        assert "keiro_runs_finished_idx (" in plan[0] and not any("SCAN" in one or "TEMP" in one for one in plan)
        for sql, values in (
            (store._sql.text.free, ("a",)),
            (store._sql.text.delete_run, (1,)),
            (store._sql.text.rounds, ("a", 7)),
        ):
            plan = [row[3] for row in store._conn.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
            assert not any("SCAN" in one for one in plan), (sql, plan)


async def test_what_has_ended_is_found_by_an_index_on_postgres(postgres_url: str) -> None:
    """Where nothing is old enough, nothing is read."""
    async with keiro.Engine(postgres_url, workflows=[plain], migrate=True) as engine:
        text = (engine.store).sql.text  # type: ignore[attr-defined]
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " finished_at_ms) SELECT 'wf:plain-d' || n, 'plain', 'd' || n, 'completed', 'wf:plain-d' || n, '{}', 1,"
                f" n FROM generate_series(1, {FINISHED}) n"
            )
            connection.execute(
                "INSERT INTO keiro.keiro_workflow_children (child_id, child_name, parent_id, parent_name, await_step)"
                f" SELECT 'd' || n, 'other', 'p', 'parent', 'child:' || n FROM generate_series(1, {FINISHED}) n"
            )
            connection.execute(
                "INSERT INTO keiro.keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro.keiro_runs"
            )
            connection.execute("ANALYZE")
            connection.execute("SET plan_cache_mode = force_generic_plan")
            statements = (
                text.ended_before,
                text.free,
                text.delete_run,
            )
            for n, sql in enumerate(statements):
                count = sql.count("?")
                for i in range(count):
                    sql = sql.replace("?", f"${i + 1}", 1)
                connection.execute(f"PREPARE p{n} AS {sql}".encode())
                ((found,),) = connection.execute(
                    f"EXPLAIN (FORMAT JSON) EXECUTE p{n}({', '.join(['NULL'] * count)})".encode()
                )
                plan = json.dumps(found[0]["Plan"])
                assert '"Seq Scan"' not in plan and '"Sort"' not in plan, plan
                if n == 0:
                    assert "keiro_runs_finished_idx" in plan


def test_it_is_there_for_synchronous_code(store_url: str) -> None:
    with keiro.blocking(keiro.Engine(store_url, workflows=[plain], migrate=True)) as engine:
        assert engine.execute(plain, 1, id="a") == 1
        assert engine.gc(older_than=0, dry_run=True).collected == ("wf:plain-a",)
        assert engine.gc(older_than=timedelta(0)).collected == ("wf:plain-a",)
        with pytest.raises(keiro.RunNotFound):
            engine.handle("wf:plain-a").result()
