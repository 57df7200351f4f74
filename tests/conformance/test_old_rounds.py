"""Old rounds of runs that stay: they go, in small parts, and nobody who asks for the run notices (U22, WF-150)."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
import pytest
from msgspec import Raw

import keiro
from keiro import retention
from keiro.decisions import (
    Append,
    Appended,
    Cancel,
    Collect,
    Collected,
    Command,
    Deliver,
    Existing,
    Refused,
    Resurrect,
    Rotate,
    Spawn,
    Start,
    Trim,
    UnknownRun,
    new,
    spent,
)
from keiro.errors import StoreUnavailable
from keiro.events import StepRecorded, WorkflowCompleted, WorkflowStarted
from keiro.identity import StepIds, run_id
from keiro.projections.waits import Exit, Spawned
from keiro.retention import Collection, portions
from keiro.rows import Head, Run
from keiro.stores.base import Candidate
from tests.conformance.parking import parked
from tests.conformance.retained import gc_later, rows_left
from tests.conformance.test_retention import LIMIT_S, allow_to_delete, refuse_to_delete, until, until_known
from tests.conftest import MakeEngine

FOR_EVER = 2**53 - 1
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
async def kid(run: keiro.WorkflowRun, n: int = 0) -> Any:
    return n or await run.deferred("said").result()


@keiro.workflow
async def turns(run: keiro.WorkflowRun, n: int, until: int) -> Any:
    """Begins round after round, and waits in round `until`: for True, with which it goes on, or for its result."""
    await run.step(work, n)
    if n == until and (said := await run.deferred("said").result()) is not True:
        return await run.step(work, said)
    run.continue_as_new(n + 1, max(until, n + 1))


@keiro.workflow
async def busy(run: keiro.WorkflowRun, n: int, until: int) -> Any:
    """As `turns`, with a clock, a deferred, and a child that ends in each round, and one of round 0 that goes on."""
    await run.sleep(0.001)
    if n == 0:
        await run.spawn(kid, id=f"{run.key}-lives")
    await run.call(kid, n + 1, id=f"{run.key}-{n}")
    if n == until:
        child = await run.spawn(kid, id=f"{run.key}-lives")
        return await child.result()
    await run.deferred("next").result()
    run.continue_as_new(n + 1, until)


class Basket(keiro.WorkflowRun, name="rounds_basket"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self, n: int) -> list[str]:
        if n:
            self.continue_as_new(n - 1)
        await self.until(lambda: "last" in self.items)
        return self.items


async def waiting(engine: keiro.Engine, until: int, key: str = "a") -> keiro.Handle:
    """A run of `turns` that waits in this round."""
    handle = await engine.start(turns, 0, until, id=key)
    await in_round(engine, handle, until)
    return handle


async def in_round(engine: keiro.Engine, handle: keiro.Handle, ordinal: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await handle.run()).round_ordinal < ordinal:
            await asyncio.sleep(0.001)
    await parked(handle)


async def ordinals(engine: keiro.Engine, lineage: str = "wf:turns-a") -> list[int]:
    """The rounds of a run that there are."""
    return sorted(run.round_ordinal for run in await engine.runs(limit=1000) if run.lineage_id == lineage)


async def all_is_well(engine: keiro.Engine) -> None:
    """The kept rows are those of the journal, which is whole for each run there is."""
    assert await engine.reconcile() == []
    assert (await engine.rebuild("runs")).differences == 0
    for run in await engine.runs(limit=1000):
        versions = [row.version for row in (await engine.store.history([run.run_key]))[run.run_key]]
        assert versions and versions == list(range(1, len(versions) + 1))


async def test_rounds_go_but_the_first_and_the_two_newest(make_engine: MakeEngine, parks_at_once: None) -> None:
    """U22, WF-90: the run goes on, has its key and its input, and is found by every handle; at its end all goes."""
    async with make_engine(turns) as engine:
        handle = await waiting(engine, 6)
        before = rows_left(engine)
        assert await gc_later(engine, 29.9) == Collection(0, 0, (), ())
        preview = await gc_later(engine, 30.1, dry_run=True)
        assert rows_left(engine) == before
        found = await gc_later(engine, 30.1)

        assert found == preview == Collection(0, 0, (), (), ((handle.run_id, 4),))
        assert await ordinals(engine) == [0, 5, 6]
        assert await gc_later(engine, 31) == Collection(0, 0, (), ())
        parents = [(await engine.store.run(f"wf:turns-a#{n}")).parent_run_id for n in (5, 6)]  # type: ignore[union-attr]
        assert parents == [None, "wf:turns-a#5"]
        await all_is_well(engine)

        assert (await engine.start(turns, 0, 6, id="a")).run_id == handle.run_id
        with pytest.raises(keiro.RunConflict):
            await engine.start(turns, 0, 7, id="a")
        for name in (handle.run_id, "wf:turns-a#3", "wf:turns-a#6"):
            assert (await engine.handle(name).run()).run_id == "wf:turns-a#6"
        with pytest.raises(keiro.RunNotFound):
            await engine.handle("wf:turns-a#7").run()

        assert await engine.complete(handle.run_id, "said", True)
        await in_round(engine, handle, 7)
        assert (await engine.gc(older_than=0)).shortened == ((handle.run_id, 1),)
        assert await ordinals(engine) == [0, 6, 7]
        assert await engine.complete("wf:turns-a#2", "said", "yes")
        assert await handle.result(LIMIT_S) == await engine.handle("wf:turns-a#2").result(LIMIT_S) == "yes"
        await all_is_well(engine)
        assert await engine.gc(older_than=0) == Collection(1, 3, (handle.run_id,), ())
        assert rows_left(engine) == {}


async def test_a_run_that_ended_goes_round_by_round_and_counts_as_one(make_engine: MakeEngine) -> None:
    """WF-150: a preview says the same, also of a run that ended too late to go itself."""
    async with make_engine(turns) as engine:
        handles = [await waiting(engine, 5, key) for key in ("a", "b")]
        await engine.complete(handles[0].run_id, "said", "yes")
        await handles[0].result(LIMIT_S)
        preview = await engine.gc(older_than=0, dry_run=True)
        found = await engine.gc(older_than=0)
        assert found == preview == Collection(1, 6, ("wf:turns-a",), (), (("wf:turns-b", 3),))
        assert await ordinals(engine, "wf:turns-b") == [0, 4, 5]


async def test_a_run_without_old_rounds_is_left_alone(make_engine: MakeEngine) -> None:
    async with make_engine(turns) as engine:
        for until_round in range(3):
            await waiting(engine, until_round, str(until_round))
        before = rows_left(engine)
        assert await engine.gc(older_than=0) == Collection(0, 0, (), ())
        assert rows_left(engine) == before


async def test_children_clocks_and_deferreds_of_old_rounds_are_missed_by_nobody(
    make_engine: MakeEngine, either_way: None
) -> None:
    """U22, CH-60: a child of a round that is gone tells the newest one how it ended."""
    async with make_engine(busy, kid) as engine:
        handle = await engine.start(busy, 0, 5, id="a")
        for n in range(5):
            await (await until_known(engine, f"wf:kid-a-{n}")).result(LIMIT_S)
            await engine.complete(handle.run_id, "next", None)
            async with asyncio.timeout(LIMIT_S):
                while (await handle.run()).round_ordinal <= n:
                    await asyncio.sleep(0.001)
        await (await until_known(engine, "wf:kid-a-5")).result(LIMIT_S)
        await until(handle, "running", "suspended")
        found = await engine.gc(older_than=0)
        assert found.shortened == ((handle.run_id, 3),)
        assert sorted(found.collected) == [f"wf:kid-a-{n}" for n in range(4)]
        rows = rows_left(engine)
        clocks = next(n for name, n in rows.items() if name.endswith("clock_deadlines"))
        deferreds = next(n for name, n in rows.items() if name.endswith("deferred_completions"))
        assert clocks <= 3 and deferreds <= 3
        assert sorted(child.child_id for child in await handle.children()) == ["a-4", "a-5", "a-lives"]
        await all_is_well(engine)
        await engine.complete("wf:kid-a-lives", "said", "told")
        assert await handle.result(LIMIT_S) == "told"
        await engine.gc(older_than=0)
        assert rows_left(engine) == {}


async def test_a_cancellation_reaches_the_children_of_rounds_that_are_gone(make_engine: MakeEngine) -> None:
    """CH-40: they are the lineage's, not the round's."""

    @keiro.workflow
    async def leaves_one(run: keiro.WorkflowRun, n: int) -> None:
        if n == 1:
            await run.spawn(kid, id="k")
        if n == 4:
            await run.deferred("end").result()
        run.continue_as_new(n + 1)

    async with make_engine(leaves_one, kid) as engine:
        handle = await engine.start(leaves_one, 0, id="a")
        await in_round(engine, handle, 4)
        assert (await engine.gc(older_than=0)).shortened == ((handle.run_id, 2),)
        assert (await engine.store.run("wf:kid-k")).parent_run_id == handle.run_id  # type: ignore[union-attr]
        assert await handle.cancel()
        assert await engine.handle("wf:kid-k").status() == "cancelled"


async def test_commands_find_the_run_across_rounds_that_are_gone(make_engine: MakeEngine) -> None:
    """With an id too, which is looked for in each round that there is; and by the id of a round that is gone."""
    async with make_engine(Basket) as engine:
        handle = await engine.start(Basket, 5, id="a")
        await in_round(engine, handle, 5)
        await engine.gc(older_than=0)
        version = await engine.command(handle.run_id, Basket.add, "one", id="1")
        assert await engine.command("wf:rounds_basket-a#2", Basket.add, "one", id="1") == version
        await engine.command("wf:rounds_basket-a#2", Basket.add, "two")
        with pytest.raises(keiro.RunNotFound):
            await engine.command("wf:rounds_basket-a#9", Basket.add, "no", id="2")
        await engine.command(handle.run_id, Basket.add, "last")
        assert await handle.result(LIMIT_S) == ["one", "two", "last"]


async def test_a_command_whose_round_goes_while_it_is_sent_is_for_the_newest(make_engine: MakeEngine) -> None:
    """It was decided on a round that rotated twice and was deleted before it came to the journal."""
    async with make_engine(turns, Basket, worker=False) as engine:
        store: Any = engine.store
        await engine.start(Basket, 0, id="a")
        for n in range(1, 3):
            await store.submit(await rotation(engine, run_id("rounds_basket", "a", n - 1)))
        submit, late = store.submit, "wf:rounds_basket-a#2"

        def overtaken(command: Command) -> Any:
            if isinstance(command, Append) and command.run_id == late:
                store.submit = submit

                async def after_others() -> Any:
                    for n in range(3, 5):
                        await submit(await rotation(engine, run_id("rounds_basket", "a", n - 1)))
                    assert isinstance(await submit(Trim("wf:rounds_basket-a", FOR_EVER, 9)), Collected)
                    outcome = await submit(command)
                    assert isinstance(outcome, UnknownRun)
                    return outcome

                return asyncio.ensure_future(after_others())
            return submit(command)

        store.submit = overtaken
        await engine.command("wf:rounds_basket-a", Basket.add, "one", id="1")
        run = await engine.store.run("wf:rounds_basket-a#4")
        assert run is not None
        topics = [row.topic for row in (await store.history([run.run_key]))[run.run_key]]
        assert topics == ["WorkflowStarted", "rounds_basket:ItemAdded"]


async def test_a_run_of_many_rounds_that_failed_can_be_resurrected_whatever_went(make_engine: MakeEngine) -> None:
    """WF-155: what is left of it is all that it needs."""
    async with make_engine(turns) as engine:
        handle = await waiting(engine, 5)
        broken.add("bad")
        await engine.complete(handle.run_id, "said", "bad")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)
        assert isinstance(await engine.store.submit(Trim(handle.run_id, engine.wall_ms() + 1, 99)), Collected)
        assert await ordinals(engine) == [0, 4, 5]
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == "bad"


# In small parts


@pytest.mark.parametrize(
    ("ordinal", "newest", "handed_off", "ended_at", "gone"),
    [
        (1, 3, True, 5, True),
        (2, 4, True, 5, True),
        (0, 9, True, 5, False),
        (2, 3, True, 5, False),
        (3, 3, True, 5, False),
        (1, 3, True, 6, False),
        (1, 3, False, 5, False),
        (1, 3, True, None, False),
    ],
)
def test_the_rule(ordinal: int, newest: int, handed_off: bool, ended_at: int | None, gone: bool) -> None:
    def row(n: int, **more: Any) -> Run:
        name = run_id("turns", "a", n)
        fixed = {"run_id": name, "workflow": "turns", "key": "a", "lineage_id": "wf:turns-a", "input_json": "{}"}
        return Run(**fixed, status="completed", created_at_ms=1, round_ordinal=n, **more)

    one = row(ordinal, finished_at_ms=ended_at, handoff_run_id="next" if handed_off else None)
    assert spent(one, row(newest), 5) is gone


def test_a_page_is_cut_before_a_transaction_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 3)
    monkeypatch.setattr(retention, "MOST_EVENTS", 10)

    def sizes(*page: tuple[int, int]) -> list[int]:
        return [len(some) for some in portions([Candidate("", 0, 0, *size, None) for size in page])]

    assert sizes() == []
    assert sizes(*[(1, 1)] * 7) == [3, 3, 1]
    assert sizes((1, 5), (1, 5), (1, 1)) == [2, 1]
    assert sizes((1, 1), (1, 99), (1, 1), (9, 1), (1, 1)) == [1, 1, 1, 1, 1]


async def test_no_transaction_deletes_more_than_it_may(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One huge lineage, many small ones, and pages that end anywhere: each transaction is small, and all goes."""
    monkeypatch.setattr(retention, "AT_ONCE", 3)
    monkeypatch.setattr(retention, "BITE", 7)
    sent: list[list[Command]] = []
    decided = retention._decided

    async def noted(store: Any, commands: Sequence[Command], dry_run: bool) -> Any:
        sent.append(list(commands))
        return await decided(store, commands, dry_run)

    async with make_engine(turns) as engine:
        handles = [await waiting(engine, until_round, str(until_round)) for until_round in (3, 20, 4, 0)]
        live = await waiting(engine, 9, "lives")
        for handle in handles:
            await engine.complete(handle.run_id, "said", "yes")
            await handle.result(LIMIT_S)
        monkeypatch.setattr(retention, "_decided", noted)
        preview = await engine.gc(older_than=0, dry_run=True)
        sent.clear()
        found = await engine.gc(older_than=0)
        assert found == preview
        assert (found.scanned, found.runs, found.failed) == (4, 4 + 21 + 5 + 1, ())
        assert found.shortened == ((live.run_id, 7),)
        trims = [[one for one in some if isinstance(one, Trim)] for some in sent]
        assert max(sum(one.most for one in some) for some in trims) == 3
        assert max(len(some) for some in sent) <= 3
        assert await ordinals(engine, live.run_id) == [0, 8, 9]
        await engine.complete(live.run_id, "said", "yes")
        await live.result(LIMIT_S)
        await engine.gc(older_than=0)
        assert rows_left(engine) == {}


async def test_a_lineage_that_is_too_large_is_not_deleted_at_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends the command; who deletes a run deletes its old rounds first."""
    monkeypatch.setattr("keiro.decisions.MOST_ROUNDS", 4)
    async with make_engine(turns) as engine:
        handle = await waiting(engine, 8)
        await engine.complete(handle.run_id, "said", "yes")
        await handle.result(LIMIT_S)
        outcome = await engine.store.submit(Collect(handle.run_id, FOR_EVER))
        assert isinstance(outcome, Refused) and "trim" in outcome.reason
        assert await ordinals(engine) == list(range(9))
        assert await retention.remove(engine.store, handle.run_id) == Collected(3)
        assert rows_left(engine) == {}


@pytest.mark.parametrize("after", range(5))
async def test_an_outage_between_any_two_parts_leaves_a_run_that_is_whole(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """WF-153, WF-155: its end can be asked for, its key is taken, and the next collection goes on."""
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    async with make_engine(turns) as engine:
        handle = await waiting(engine, 9)
        await engine.complete(handle.run_id, "said", "yes")
        await handle.result(LIMIT_S)
        submit = engine.store.submit
        number = itertools.count()

        def away(command: Command) -> Any:
            if isinstance(command, Trim | Collect) and next(number) >= after:
                raise StoreUnavailable("away")
            return submit(command)

        engine.store.submit = away  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await engine.gc(older_than=0)
        engine.store.submit = submit  # type: ignore[method-assign]
        left = [0, *range(1 + 2 * min(after, 4) - (after == 4), 10)] if after < 4 else [0, 8, 9]
        assert await ordinals(engine) == left
        await all_is_well(engine)
        assert await engine.handle(handle.run_id).result(LIMIT_S) == "yes"
        assert (await engine.start(turns, 0, 9, id="a")).run_id == handle.run_id
        assert await engine.gc(older_than=0) == Collection(1, len(left), (handle.run_id,), ())
        assert rows_left(engine) == {}


async def test_a_round_that_cannot_be_deleted_stops_no_other_run(
    make_engine: MakeEngine, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-154, F32."""
    async with make_engine(turns) as engine:
        for key in ("a", "b"):
            await waiting(engine, 5, key)
        with monkeypatch.context() as patch:
            name = "wf:turns-a" if store_url.startswith("memory") else "wf:turns-a#2"
            await asyncio.to_thread(refuse_to_delete, store_url, name, patch)
            found = await engine.gc(older_than=0)
        assert found.shortened == (("wf:turns-b", 3),)
        (one,) = found.failed
        assert one[0] == "wf:turns-a" and "not this one" in one[1]
        assert await ordinals(engine) == list(range(6))
        await asyncio.to_thread(allow_to_delete, store_url)
        assert (await engine.gc(older_than=0)).shortened == (("wf:turns-a", 3),)
        await all_is_well(engine)


async def test_a_child_does_not_go_before_a_failed_parent_that_cannot_be_deleted(
    make_engine: MakeEngine, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CH-65, CH-53: else the parent, resurrected, would wait for a child for ever."""

    @keiro.workflow
    async def fails(run: keiro.WorkflowRun) -> Any:
        child = await run.spawn(kid, id="k")
        await run.step(work, "bad")
        return await child.result()

    broken.add("bad")
    async with make_engine(fails, kid) as engine:
        handle = await engine.start(fails, id="f")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)
        await engine.complete("wf:kid-k", "said", "yes")
        await engine.handle("wf:kid-k").result(LIMIT_S)
        with monkeypatch.context() as patch:
            await asyncio.to_thread(refuse_to_delete, store_url, handle.run_id, patch)
            found = await engine.gc(older_than=0)
        await asyncio.to_thread(allow_to_delete, store_url)
        assert (found.collected, [name for name, _ in found.failed]) == ((), [handle.run_id])
        broken.clear()
        assert await engine.resurrect(handle.run_id)
        assert await handle.result(LIMIT_S) == "yes"
        assert len((await engine.gc(older_than=0)).collected) == 2


# Races


async def newest_of(engine: keiro.Engine, name: str) -> tuple[Run, Head]:
    found = await engine.store.head((await engine.handle(name).run()).run_id)
    assert found is not None
    return found


async def rotation(engine: keiro.Engine, last: str, n: int = 6) -> Rotate:
    """The end of a round that nobody drives, and the beginning of the next."""
    found = await engine.store.run(last)
    assert found is not None
    ordinal, now = found.round_ordinal + 1, engine.wall_ms()
    following = run_id(found.workflow, found.key, ordinal)
    ids, next_ids = StepIds(found.workflow, found.key, ordinal - 1), StepIds(found.workflow, found.key, ordinal)
    started = WorkflowStarted(
        workflow=found.workflow,
        key=found.key,
        input=Raw(msgspec.json.encode({"n": n, "until": n})),
        round=ordinal,
        lineage=found.lineage_id,
        parent=last,
    )
    ending = new(WorkflowCompleted(handoff=following), ids("__workflow_completed__"))
    return Rotate(Append(last, (ending,), now), Start(following, new(started, next_ids("start")), now))


async def spawning(engine: keiro.Engine, name: str) -> Spawn:
    run, _ = await newest_of(engine, name)
    spawned = Spawned(run_id="wf:kid-k", workflow="kid", key="k", on_cancel="cancel")
    ids, now = StepIds(run.workflow, run.key, run.round_ordinal), engine.wall_ms()
    step = new(StepRecorded(step="child:k", result=Raw(msgspec.json.encode(spawned))), ids("child:k"))
    started = WorkflowStarted(workflow="kid", key="k", input=Raw(b'{"n":1}'), parent=run.lineage_id, on_cancel="cancel")
    return Spawn(Append(run.run_id, (step,), now), Start("wf:kid-k", new(started, uuid.uuid4().bytes), now))


@pytest.mark.parametrize("other", ["rotate", "cancel", "signal", "start", "spawn", "resurrect", "collect", "trim"])
@pytest.mark.parametrize("first", ["trim", "other"])
@pytest.mark.parametrize("apart", [False, True], ids=["one_transaction", "two"])
async def test_a_collection_of_rounds_that_meets_another_command(
    make_engine: MakeEngine, parks_at_once: None, other: str, first: str, apart: bool
) -> None:
    """In one transaction or two, in either order: both have their will, as if one had come after the other."""
    name = "wf:turns-a"
    async with make_engine(turns, kid) as engine:
        handle = await waiting(engine, 5)
        if other in ("resurrect", "collect"):
            broken.add("bad")
            await engine.complete(name, "said", "bad")
            with pytest.raises(keiro.WorkflowFailed):
                await handle.result(LIMIT_S)
            broken.clear()
    async with make_engine(turns, kid, worker=False) as client:
        now = client.wall_ms() + 1
        deliver = Deliver(name, "awk:said", msgspec.json.encode(Exit(ok=Raw(b'"yes"'))), now)
        others: dict[str, Command] = {
            "rotate": await rotation(client, f"{name}#5"),
            "cancel": Cancel(name, now),
            "signal": deliver,
            "start": client._start_of(turns, (0, 5), {}, "a", None),
            "spawn": await spawning(client, name),
            "resurrect": Resurrect(name, now),
            "collect": Collect(name, now),
            "trim": Trim(name, now, 2),
        }
        commands: list[Command] = [Trim(name, now, 9), others[other]]
        if first == "other":
            commands.reverse()
        sent: list[Any] = []
        for command in commands:
            sent.append(client.store.submit(command))
            if apart:
                await sent[-1]
        outcomes = await asyncio.gather(*sent)
        trimmed, answer = outcomes if first == "trim" else outcomes[::-1]

        rotated = other == "rotate"
        if other == "collect":
            gone = (Collected(3), Collected(3)) if first == "trim" else (UnknownRun(), Collected(6))
            assert (trimmed, answer) == gone
            assert rows_left(client) == {}
            return
        if other == "trim":
            assert isinstance(answer, Refused) if first == "trim" else answer == Collected(2)
            assert trimmed == Collected(3 if first == "trim" else 1)
        else:
            assert isinstance(answer, Existing if other == "start" else Appended), answer
            assert trimmed == Collected(4 if rotated and first == "other" else 3)
        left = [0, *([] if rotated and first == "other" else [4]), 5, *([6] if rotated else [])]
        assert await ordinals(client) == left
        await all_is_well(client)
    async with make_engine(turns, kid) as engine:
        handle = engine.handle(name)
        if other == "cancel":
            with pytest.raises(keiro.WorkflowCancelled):
                await handle.result(LIMIT_S)
        else:
            if other not in ("signal", "resurrect"):
                await engine.complete(name, "said", "yes")
            assert await handle.result(LIMIT_S) == ("bad" if other == "resurrect" else "yes")
        if other == "spawn":
            assert await engine.handle("wf:kid-k").result(LIMIT_S) == 1
            assert [child.status for child in await handle.children()] == ["completed"]
        await all_is_well(engine)
        await engine.gc(older_than=0)
        assert rows_left(engine) == {}


@pytest.mark.parametrize("how", ["rotated", "resurrected", "collected"])
async def test_a_listing_of_rounds_that_is_old_by_now_deletes_nothing_that_is_needed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Rounds are listed without a lock; what counts is what is there in the transaction that deletes."""
    async with make_engine(turns) as engine:
        handle = await waiting(engine, 5)
        store: Any = engine.store
        listed = store.handed_off_before
        calls: list[str] = []

        async def overtaken(*args: Any) -> Any:
            page = await listed(*args)
            if not page or calls:
                return page
            calls.append(how)
            if how == "rotated":
                await engine.complete(handle.run_id, "said", True)
                await in_round(engine, handle, 6)
            else:
                await handle.cancel()
                assert isinstance(await retention.remove(store, handle.run_id), Collected)
                if how == "resurrected":
                    await waiting(engine, 2)
            return page

        monkeypatch.setattr(store, "handed_off_before", overtaken)
        found = await engine.gc(older_than=0)
        if how == "rotated":
            # The next page has the one that was needed when the first was listed.
            assert (found.shortened, await ordinals(engine)) == (((handle.run_id, 4),), [0, 5, 6])
        else:
            assert found.shortened == ()
            assert await ordinals(engine) == ([0, 1, 2] if how == "resurrected" else [])


# What it costs


async def test_old_rounds_are_found_by_an_index_on_sqlite(tmp_path: Any) -> None:
    """Where nothing is old enough, nothing is read."""
    async with keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[turns]) as engine:
        store: Any = engine.store
        sql, values = store._sql.handed_off_before(10, (5, 6), 1000)
        plan = [row[3] for row in store._conn.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
        assert "keiro_runs_handed_off_idx (" in plan[0] and not any("SCAN" in one or "TEMP" in one for one in plan)


async def test_old_rounds_are_found_by_an_index_on_postgres(postgres_url: str) -> None:
    """Where nothing is old enough, nothing is read; and a deletion reads what it deletes."""
    async with keiro.Engine(postgres_url, workflows=[turns], migrate=True) as engine:
        text = (engine.store).sql.text  # type: ignore[attr-defined]
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, round_ordinal, input_json,"
                " created_at_ms, finished_at_ms, handoff_run_id) SELECT 'wf:turns-' || n / 20 || '#' || n % 20 + 1,"
                " 'turns', n / 20, 'completed', 'wf:turns-' || n / 20, n % 20 + 1, '{}', 1, n, 'next'"
                " FROM generate_series(0, 19999) n"
            )
            connection.execute(
                "INSERT INTO keiro.keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro.keiro_runs"
            )
            connection.execute("ANALYZE")
            connection.execute("SET plan_cache_mode = force_generic_plan")
            for n, sql in enumerate((text.handed_off_before, text.rounds)):
                count = sql.count("?")
                for i in range(count):
                    sql = sql.replace("?", f"${i + 1}", 1)
                connection.execute(f"PREPARE r{n} AS {sql}".encode())
                values = ", ".join(["NULL"] * count)
                ((found,),) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE r{n}({values})".encode())
                plan = json.dumps(found[0]["Plan"])
                assert '"Seq Scan"' not in plan and '"Sort"' not in plan, plan
                if n == 0:
                    assert "keiro_runs_handed_off_idx" in plan
            for sql, values in ((text.delete_run.many, [list(range(1, 101))]),):
                ((found,),) = connection.execute(f"EXPLAIN (FORMAT JSON) {sql.replace('$1', '%s')}".encode(), values)
                assert '"keiro_runs", "Alias"' not in json.dumps(found) or '"Seq Scan"' not in json.dumps(found), found
