"""Run parents: numbered edges without cycles, spawned and linked, and what a cancellation takes along (list J).

Runs here wait for ever, so that nothing but what a test does happens to them; `a`, `b`, ... are their keys.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import keiro
from keiro.decisions import Collect, Collected, Fire, Link, Linked, UnknownRun
from keiro.events import RunLinked, StateChanged, WorkflowCancelled, WorkflowStarted
from keiro.projections.base import Projection, Row
from keiro.projections.waits import Put
from tests.conformance.test_races import Course
from tests.conformance.test_steps import topics
from tests.conftest import MakeEngine

LIMIT_S = 60
ROOT = Path(__file__).parent.parent.parent


@keiro.workflow
async def node(run: keiro.WorkflowRun) -> str:
    return str(await run.deferred("done", str).result())


@keiro.workflow
async def parent(run: keiro.WorkflowRun, children: list[str], on_cancel: str = "cancel") -> str:
    """Spawns nodes, and then waits."""
    for child in children:
        await run.spawn(node, id=child, on_cancel=on_cancel)
    return str(await run.deferred("done", str).result())


@keiro.workflow(cleanup=True, grace=600)
async def careful(run: keiro.WorkflowRun) -> str:
    return str(await run.deferred("done", str).result())


def named(key: str) -> str:
    return f"wf:node-{key}"


async def nodes(engine: keiro.Engine, keys: str) -> None:
    for key in keys:
        await engine.start(node, id=key)


async def link(engine: keiro.Engine, *edges: str) -> list[int]:
    """Link `ba`: b below a; the numbers of the edges."""
    return [(await engine.run_parents.link(named(child), named(above))).seq for child, above in edges]


async def up(engine: keiro.Engine, key: str) -> list[str]:
    return [edge.parent_id.removeprefix("wf:node-") for edge in await engine.run_parents.of(named(key))]


async def down(engine: keiro.Engine, key: str) -> list[str]:
    return [edge.child_id.removeprefix("wf:node-") for edge in await engine.run_parents.children(named(key))]


async def table(engine: keiro.Engine) -> list[tuple[str, str, int]]:
    """All edges, by number."""
    runs = {run.lineage_id for run in await engine.runs(limit=1000)}
    edges = [edge for run_id in runs for edge in await engine.run_parents.children(run_id)]
    return sorted(((edge.child_id, edge.parent_id, edge.seq) for edge in edges), key=lambda row: row[2])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.005)


async def refused(engine: keiro.Engine, edge: str) -> str:
    """The path for which an edge is refused."""
    with pytest.raises(keiro.RunParentCycle) as caught:
        await link(engine, edge)
    return "".join(one.removeprefix("wf:node-") for one in caught.value.path)


async def put_rows(engine: keiro.Engine, edges: str) -> None:
    """Write edges past every rule, as somebody with a database client can."""
    for seq, (child, above) in enumerate(edges.split(), 1000):
        change = Put("keiro_run_parents", {"child_id": named(child), "parent_id": named(above)}, {"seq": seq})
        values = f"('{named(child)}', '{named(above)}', {seq})"
        sql = f"INSERT INTO {{}} (child_id, parent_id, seq) VALUES {values}"
        await raw(engine, sql, lambda edges, change=change: edges.change(change))  # type: ignore[misc]


async def raw(engine: keiro.Engine, sql: str, in_memory: Callable[[Any], object]) -> None:
    """Run plain SQL, `{}` for the table of edges, in a connection of its own."""
    if engine.url.startswith("memory"):
        in_memory(engine.store._db.edges)  # type: ignore[attr-defined]
    elif engine.url.startswith("sqlite"):
        with closing(sqlite3.connect(engine.url.removeprefix("sqlite:///"), timeout=30)) as connection, connection:
            connection.execute(sql.format("keiro_run_parents"))
    else:
        with psycopg.connect(engine.url, autocommit=True) as client:
            client.execute(sql.format("keiro.keiro_run_parents").encode())


# Numbers


async def test_j1_edges_are_numbered_through_the_store_and_the_first_record_of_one_counts(
    make_engine: MakeEngine,
) -> None:
    """J1."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcd")

        assert await link(engine, "ba", "ca", "cb", "da") == [1, 2, 3, 4]
        assert await link(engine, "ca", "da", "ba") == [2, 4, 1]

        assert await up(engine, "c") == ["a", "b"]
        assert await engine.run_parents.of(named("c")) == [
            keiro.RunParent(named("c"), named("a"), 2),
            keiro.RunParent(named("c"), named("b"), 3),
        ]
        assert [topic for topic in await topics(engine.handle(named("c"))) if topic == "RunLinked"] == ["RunLinked"] * 2


async def test_j1_an_edge_that_was_removed_and_is_recorded_again_comes_last(make_engine: MakeEngine) -> None:
    """J1: whether it was taken back or somebody has deleted its row."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcd")
        await link(engine, "ca", "cb", "da")

        assert await engine.run_parents.unlink(named("c"), named("a"))
        assert not await engine.run_parents.unlink(named("c"), named("a"))
        assert (await up(engine, "c"), await down(engine, "a")) == (["b"], ["d"])
        assert await link(engine, "ca") == [4]
        assert await up(engine, "c") == ["b", "a"]

        await raw(engine, f"DELETE FROM {{}} WHERE parent_id = '{named('b')}'", lambda edges: edges.forget(named("b")))
        assert await link(engine, "cb") == [5]
        assert await up(engine, "c") == ["a", "b"]


async def test_j8_children_come_in_the_order_in_which_they_were_recorded(make_engine: MakeEngine) -> None:
    """J8: spawned and linked ones in one order, and the rounds of a run are none of its children."""
    async with make_engine(node, parent) as engine:
        await nodes(engine, "y")
        handle = await engine.start(parent, ["z", "b", "a"], id="p")
        await until(lambda: has_children(engine, handle, 3))
        await engine.run_parents.link(named("y"), handle.run_id)

        assert await down_of(engine, handle) == ["z", "b", "a", "y"]
        # Only those that it has spawned tell it how they end.
        assert {row.child_id for row in await handle.children()} == set("zba")
        assert [edge.seq for edge in await engine.run_parents.children(handle.run_id)] == [1, 2, 3, 4]


async def down_of(engine: keiro.Engine, handle: keiro.Handle) -> list[str]:
    return [edge.child_id.removeprefix("wf:node-") for edge in await engine.run_parents.children(handle.run_id)]


async def has_children(engine: keiro.Engine, handle: keiro.Handle, number: int) -> bool:
    return len(await down_of(engine, handle)) == number


async def test_many_spawns_of_one_commit_are_numbered_one_by_one(make_engine: MakeEngine) -> None:
    async with make_engine(node, family) as engine:
        handle = await engine.start(family, 40, id="p")
        await until(lambda: has_children(engine, handle, 40))

        assert [edge.seq for edge in await engine.run_parents.children(handle.run_id)] == list(range(1, 41))


@keiro.workflow
async def family(run: keiro.WorkflowRun, size: int) -> None:
    await asyncio.gather(*(run.spawn(node, id=str(n)) for n in range(size)))
    await run.deferred("done").result()


# Cycles


async def test_j2_a_cycle_is_refused_with_its_path_and_leaves_no_trace(make_engine: MakeEngine) -> None:
    """J2: of one run, of two, of three, and one that closes a diamond."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcdxy")
        assert await refused(engine, "aa") == "a"

        await link(engine, "ba")
        assert await refused(engine, "ab") == "ab"
        await link(engine, "cb")
        assert await refused(engine, "ac") == "abc"

        await link(engine, "xa", "dx", "dc")
        assert await refused(engine, "ad") == "axd"  # over the parent that was recorded first
        await link(engine, "yd")

        assert await up(engine, "a") == []
        assert await topics(engine.handle(named("a"))) == ["WorkflowStarted"]
        assert [seq for *_, seq in await table(engine)] == [1, 2, 3, 4, 5, 6]


async def test_a_refusal_says_what_is_wrong_and_what_to_do(make_engine: MakeEngine) -> None:
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "ab")
        await link(engine, "ba")

        with pytest.raises(keiro.RunParentCycle, match=r"wf:node-a > wf:node-b\).*unlink one of these"):
            await link(engine, "ab")
        with pytest.raises(keiro.RunParentCycle, match="cannot be a child of itself"):
            await link(engine, "aa")
        with pytest.raises(keiro.RunNotFound, match="'wf:node-none'"):
            await engine.run_parents.link(named("none"), named("a"))
        with pytest.raises(keiro.RunNotFound, match="'wf:node-none' or 'wf:node-nor'"):
            await engine.run_parents.link(named("none"), named("nor"))
        with pytest.raises(keiro.InvalidName):
            await engine.run_parents.link("b", named("a"))


@pytest.mark.parametrize("order", [0, 1])
async def test_j3_of_two_that_close_a_cycle_at_once_one_fails(make_engine: MakeEngine, order: int) -> None:
    """J3: sent to one batch, in either order, and through two engines."""
    async with make_engine(node, worker=False) as one, make_engine(node, worker=False) as other:
        await nodes(one, "abcdef")
        await link(one, "cb", "ed")
        now = one.wall_ms()
        commands = [Link(named("a"), named("c"), now), Link(named("b"), named("a"), now)]
        outcomes = [
            type(await done).__name__ for done in [one.store.submit(each) for each in commands[:: 1 - 2 * order]]
        ]
        assert outcomes == ["Linked", "Cyclic"]

        engines = (one, other)[:: 1 - 2 * order]
        racing = [link(engines[0], "fe"), link(engines[1], "df")]
        done = await asyncio.gather(*racing, return_exceptions=True)
        assert sorted(type(each).__name__ for each in done) == ["RunParentCycle", "list"]


async def test_j3_a_chord_is_never_refused(make_engine: MakeEngine) -> None:
    """J3: edges at once that look alike and close nothing."""
    async with make_engine(node, worker=False) as one, make_engine(node, worker=False) as other:
        await nodes(one, "abcde")
        chords = ["ba", "cb", "dc", "ed", "ca", "da", "ea", "db", "eb", "ec"]

        await asyncio.gather(*(link((one, other)[n % 2], edge) for n, edge in enumerate(chords)))

        assert len(await table(one)) == len(chords)
        assert await refused(other, "ae") is not None


async def at_the_lock(url: str, *calls: Awaitable[Any]) -> list[Any]:
    """What the calls come to when all of them have waited for the lock, which somebody else held."""
    with Course(url).locked() as waiting:
        sent: list[asyncio.Future[Any]] = []
        for number, call in enumerate(calls, 1):
            sent.append(asyncio.ensure_future(call))
            for _ in range(5):
                await asyncio.sleep(0)
            while (count := waiting()) is not None and count < number:
                await asyncio.sleep(0)
        assert not any(one.done() for one in sent)
    return await asyncio.gather(*sent, return_exceptions=True)


SQL = pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)


@SQL
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    ("there", "racing", "refusals"),
    [("", "ab ba", 1), ("cb", "ac ba", 1), ("cb de", "db ec", 0), ("cb de ba", "ca da", 0), ("", "ba ba", 0)],
)
async def test_j3_two_that_wait_at_the_lock_see_each_other(
    make_engine: MakeEngine, store_url: str, there: str, racing: str, refusals: int, order: int
) -> None:
    """J3: the second one looks for cycles after the first has committed, and only what closes one is refused."""
    async with make_engine(node, worker=False) as one, make_engine(node, worker=False) as other:
        await nodes(one, "abcde")
        await link(one, *there.split())
        engines = (one, other)

        calls = [link(engine, edge) for engine, edge in zip(engines, racing.split()[:: 1 - 2 * order], strict=True)]
        done = await at_the_lock(store_url, *calls)

        assert [type(each).__name__ for each in done].count("RunParentCycle") == refusals
        edges = await table(one)
        assert [seq for *_, seq in edges] == list(range(1, len(edges) + 1))
        assert (await one.rebuild("run_parents")).differences == 0


@SQL
@pytest.mark.parametrize("order", [0, 1])
async def test_j11_a_link_and_a_cancellation_that_wait_at_the_lock(
    make_engine: MakeEngine, store_url: str, order: int
) -> None:
    """J11: through two engines, as from two processes."""
    async with make_engine(node, worker=False) as one, make_engine(node, worker=False) as other:
        await nodes(one, "abc")
        await link(one, "cb")
        calls = [link(one, "ba"), other.cancel(named("a"))]

        assert True in await at_the_lock(store_url, *calls[:: 1 - 2 * order])

        assert [await marks(one, key) for key in "abc"] == [1, 1, 1]


@SQL
@pytest.mark.parametrize("order", [0, 1])
async def test_a_link_and_the_collection_of_the_parent_leave_no_edge_to_nobody(
    make_engine: MakeEngine, store_url: str, order: int
) -> None:
    """J7: an edge to a run that is gone would close cycles with the next one of its name."""
    async with make_engine(node, worker=False) as one, make_engine(node, worker=False) as other:
        await nodes(one, "ab")
        await one.cancel(named("a"))
        calls: list[Awaitable[Any]] = [link(one, "ba"), other.store.submit(Collect(named("a"), 2**52))]

        done = await at_the_lock(store_url, *calls[:: 1 - 2 * order])

        assert Collected(1) in done
        assert await one.run_parents.of(named("b")) == []
        await nodes(one, "a")
        assert await link(one, "ab") == [1]


async def test_numbers_go_on_above_the_highest_also_within_a_batch(make_engine: MakeEngine) -> None:
    """J1: a run that is collected in between takes the highest number with it."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcdef")
        await engine.cancel(named("a"))
        now = engine.wall_ms()
        commands = [
            Link(named("c"), named("b"), now),
            Link(named("d"), named("a"), now),
            Collect(named("a"), 2**52),
            Link(named("e"), named("a"), now),
            Link(named("f"), named("b"), now),
        ]

        outcomes = [await done for done in [engine.store.submit(command) for command in commands]]

        assert outcomes == [Linked(1, True), Linked(2, True), Collected(1), UnknownRun(), Linked(2, True)]
        assert await table(engine) == [(named("c"), named("b"), 1), (named("f"), named("b"), 2)]
        assert (await engine.rebuild("run_parents")).differences == 0


RACER = """
import asyncio, sys
import keiro

async def main(url, turned, rounds):
    async with keiro.Engine(url, worker=False, migrate=False) as engine:
        print("ready", flush=True)
        sys.stdin.readline()
        failed = 0
        for n in range(int(rounds)):
            pair = [f"wf:node-a{n}", f"wf:node-b{n}"]
            if turned == "1":
                pair.reverse()
            try:
                await engine.run_parents.link(*pair)
            except keiro.RunParentCycle as cycle:
                assert cycle.path == tuple(pair), cycle.path
                failed += 1
        print(failed, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_j3_of_two_processes_that_close_cycles_exactly_one_fails_each_time(
    make_engine: MakeEngine, store_url: str
) -> None:
    """J3."""
    if store_url.startswith("memory"):
        pytest.skip("one process is all that has it")
    rounds = 60
    async with make_engine(node, worker=False) as engine:
        await engine.start_many(node, [()] * rounds, ids=[f"a{n}" for n in range(rounds)])
        await engine.start_many(node, [()] * rounds, ids=[f"b{n}" for n in range(rounds)])
        racers = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", RACER, store_url, turned, str(rounds), cwd=ROOT,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )
            for turned in ("0", "1")
        ]  # fmt: skip
        async with asyncio.timeout(LIMIT_S):
            for racer in racers:
                assert racer.stdout is not None and await racer.stdout.readline() == b"ready\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(b"go\n")
            told = [int((await racer.communicate())[0]) for racer in racers]

        assert sum(told) == rounds
        edges = await table(engine)
        assert len(edges) == rounds
        assert sorted(seq for *_, seq in edges) == list(range(1, rounds + 1))
        assert {frozenset(edge[:2]) for edge in edges} == {
            frozenset((named(f"a{n}"), named(f"b{n}"))) for n in range(rounds)
        }


async def test_j4_a_diamond_is_admitted(make_engine: MakeEngine) -> None:
    """J4."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "gpqdx")

        await link(engine, "pg", "qg", "dp", "dq", "xd")

        assert (await up(engine, "d"), await down(engine, "g")) == (["p", "q"], ["p", "q"])


async def test_j4_rows_that_are_a_cycle_end_no_walk(make_engine: MakeEngine) -> None:
    """J4: neither the one that looks for cycles nor a cancellation."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcx")
        await put_rows(engine, "ab bc ca aa")

        async with asyncio.timeout(LIMIT_S):
            assert await link(engine, "xa") == [1004]
            assert await refused(engine, "bx") is not None
            assert await engine.cancel(named("c"))
        assert {run.status for run in await engine.runs()} == {"cancelled"}


async def test_a_spawn_that_attaches_to_an_ancestor_is_refused(make_engine: MakeEngine) -> None:
    """The one spawn that can close a cycle: of a run that has ended, above the one that attaches to it."""
    async with make_engine(node, attaches, starter) as engine:
        first = await engine.start(starter, id="s")
        assert await first.result(LIMIT_S) == "started"

        await engine.complete("wf:attaches-t", "go", None)

        assert await engine.handle("wf:attaches-t").result(LIMIT_S) == ["wf:starter-s", "wf:attaches-t"]
        assert [row.child_id for row in await engine.children.of("wf:attaches-t")] == []
        assert await engine.run_parents.of("wf:starter-s") == []


@keiro.workflow
async def starter(run: keiro.WorkflowRun) -> str:
    await run.spawn(attaches, id="t")
    return "started"


@keiro.workflow
async def attaches(run: keiro.WorkflowRun) -> list[str]:
    await run.deferred("go").result()
    try:
        await run.spawn(starter, id="s")
    except keiro.RunParentCycle as cycle:
        return list(cycle.path)
    return []


async def test_a_spawn_that_attaches_records_its_edge(make_engine: MakeEngine) -> None:
    async with make_engine(quick, adopts) as engine:
        await engine.execute(quick, id="q")
        assert await engine.run_parents.of("wf:quick-q") == []

        assert await engine.execute(adopts, id="p") == "quick"

        (edge,) = await engine.run_parents.of("wf:quick-q")
        assert edge == keiro.RunParent("wf:quick-q", "wf:adopts-p", 1)
        with pytest.raises(keiro.RunConflict, match="has spawned it"):
            await engine.run_parents.unlink(edge.child_id, edge.parent_id)
        assert (await engine.rebuild("run_parents")).differences == 0


@keiro.workflow
async def quick(run: keiro.WorkflowRun) -> str:
    return "quick"


@keiro.workflow
async def adopts(run: keiro.WorkflowRun) -> str:
    return str(await run.call(quick, id="q"))


# What is durable


async def test_j5_edges_survive_a_restart_and_are_seen_by_others(make_engine: MakeEngine, store_url: str) -> None:
    """J5."""
    async with make_engine(node, worker=False) as engine, make_engine(node, worker=False) as other:
        await nodes(engine, "abc")
        await link(engine, "ba")
        assert await refused(other, "ab") == "ab"
        await link(other, "cb")
    async with make_engine(node, worker=False) as engine:
        assert await refused(engine, "ac") == "abc"
        assert [seq for *_, seq in await table(engine)] == [1, 2]


async def test_j6_a_child_and_its_edge_are_there_together_or_not_at_all(
    make_engine: MakeEngine, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """J6: a table that refuses the edge lets nothing of the spawn or of the link through."""
    if store_url.startswith("memory"):
        pytest.skip("dicts refuse nothing")
    async with make_engine(node, parent) as engine:
        await nodes(engine, "abxy")
        await raw(
            engine,
            f"INSERT INTO {{}} (child_id, parent_id, seq) VALUES ('{named('x')}', '{named('y')}', {2**53 - 1})",
            lambda edges: None,
        )
        with pytest.raises(keiro.StoreError):
            await link(engine, "ba")
        assert "RunLinked" not in await topics(engine.handle(named("b")))

        handle = await engine.start(parent, ["c"], id="p")
        await until(lambda: told(caplog, "store_away"))
        assert (await topics(handle), await handle.children()) == (["WorkflowStarted"], [])
        with pytest.raises(keiro.RunNotFound):
            await engine.handle(named("c")).run()

        await raw(engine, "DELETE FROM {}", lambda edges: None)
        await until(lambda: has_children(engine, handle, 1))
        assert [edge.seq for edge in await engine.run_parents.children(handle.run_id)] == [1]


async def told(caplog: pytest.LogCaptureFixture, what: str) -> bool:
    return any(what in record.getMessage() or what in str(vars(record)) for record in caplog.records)


async def test_j7_edges_go_with_a_run_that_is_collected(make_engine: MakeEngine) -> None:
    """J7: and the next run with its id has none of them, also after a rebuild."""
    async with make_engine(node, quick) as engine:
        await nodes(engine, "abc")
        for child, above in ("ba", "cb", "ca"):
            await link(engine, child + above)
        await engine.cancel(named("c"))
        await engine.complete(named("b"), "done", "b")
        await engine.handle(named("b")).result(LIMIT_S)

        assert set((await engine.gc(0)).collected) == {named("b"), named("c")}

        assert await table(engine) == []
        await nodes(engine, "bc")
        assert await table(engine) == []
        assert (await engine.rebuild("run_parents")).differences == 0
        assert await link(engine, "cb", "ca") == [1, 2]  # one above the highest there is
        assert (await engine.rebuild("run_parents")).differences == 0


async def test_a_link_is_in_the_callers_transaction(make_engine: MakeEngine, store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("no connection leads there")
    url = store_url.replace("postgresql://", "postgresql+psycopg://")
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "ab")
        database = sa.create_engine(url, poolclass=sa.NullPool)
        with database.connect() as connection:
            connection.execute(sa.text("SELECT 1"))
            await engine.run_parents.link(named("b"), named("a"), connection=connection)
            connection.rollback()
            assert await up(engine, "b") == []
            edge = await engine.run_parents.link(named("b"), named("a"), connection=connection)
            assert await up(engine, "b") == []
            connection.commit()
        assert await engine.run_parents.of(named("b")) == [edge]


async def test_a_snapshot_from_before_the_lock_links_nothing(postgres_url: str) -> None:
    """It would not see the edge that closes the cycle."""
    async with keiro.Engine(postgres_url, workflows=[node], worker=False, migrate=True) as engine:
        await nodes(engine, "ab")
        with psycopg.connect(postgres_url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.execute("SELECT 1")
            await link(engine, "ba")
            with pytest.raises(keiro.InvalidCall, match="READ COMMITTED"):
                await engine.run_parents.link(named("a"), named("b"), connection=connection)
        assert await up(engine, "a") == []


async def test_a_rebuild_gives_the_rows_that_were_kept(make_engine: MakeEngine) -> None:
    """Edges of spawns and links, taken back and linked again, with what was collected in between."""
    async with make_engine(node, parent, quick) as engine:
        await nodes(engine, "abcdxyz")
        handle = await engine.start(parent, ["k", "l"], id="p")
        await until(lambda: has_children(engine, handle, 2))
        await link(engine, "ba", "cb", "xy", "ca", "dc")
        await engine.run_parents.unlink(named("c"), named("b"))
        await engine.cancel(named("y"))
        await engine.gc(0)
        await link(engine, "cb", "za")
        kept = await table(engine)
        assert len(kept) == 7

        report = await engine.rebuild("run_parents")
        assert (report.differences, report.verified) == (0, 7)

        await raw(engine, f"DELETE FROM {{}} WHERE child_id = '{named('c')}'", lambda edges: edges.forget(named("c")))
        await put_rows(engine, "ad")
        report = await engine.rebuild("run_parents")
        assert (await table(engine), report.deleted) == (kept, 1)
        assert report.inserted in (2, 3)  # in memory what was below `c` had gone too


async def test_a_parked_run_that_is_linked_wakes_in_time(make_engine: MakeEngine, parks_at_once: None) -> None:
    """The event that links comes after the one that parked it."""
    async with make_engine(sleeper, node) as engine:
        await nodes(engine, "a")
        handle = await engine.start(sleeper, id="s")
        await until(lambda: is_parked(handle))
        await engine.run_parents.link(handle.run_id, named("a"))

        assert await handle.status() == "suspended"
        assert await handle.result(LIMIT_S) == "slept"


@keiro.workflow
async def sleeper(run: keiro.WorkflowRun) -> str:
    await run.sleep(0.3)
    return "slept"


async def is_parked(handle: keiro.Handle) -> bool:
    return await handle.status() == "suspended"


async def test_a_run_that_is_driven_is_linked_and_goes_on(make_engine: MakeEngine) -> None:
    """Its owner's next record meets the event, and every other one after it."""
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    @keiro.workflow(name="driven")
    async def driven(run: keiro.WorkflowRun) -> int:
        await run.step(wait, key="wait")
        return sum([await run.step(lambda n=n: n, key=f"s{n}") for n in range(5)])

    async with make_engine(driven, node) as engine:
        await nodes(engine, "ab")
        handle = await engine.start(driven, id="d")
        await engine.run_parents.link(handle.run_id, named("a"))
        await engine.run_parents.link(handle.run_id, named("b"))
        gate.set()

        assert await handle.result(LIMIT_S) == 10


async def test_who_has_ended_may_be_linked_to_who_has_not(make_engine: MakeEngine) -> None:
    """Then it stands in the journal of the parent, and nothing follows the end of a run."""
    async with make_engine(node, quick) as engine:
        await nodes(engine, "ab")
        await engine.execute(quick, id="q")
        edge = await engine.run_parents.link("wf:quick-q", named("a"))
        assert (await topics(engine.handle(named("a"))))[-1] == "RunLinked"
        assert (await topics(engine.handle("wf:quick-q")))[-1] == "WorkflowCompleted"
        assert (await engine.rebuild("run_parents")).differences == 0
        await engine.cancel(named("a"))

        with pytest.raises(keiro.RunConflict, match="so has the parent"):
            await engine.run_parents.unlink("wf:quick-q", named("a"))
        await engine.cancel(named("b"))
        with pytest.raises(keiro.RunConflict, match="so has the parent"):
            await engine.run_parents.link("wf:quick-q", named("b"))
        assert await engine.run_parents.of("wf:quick-q") == [edge]


async def test_rounds_are_no_edges_and_edges_are_of_all_rounds(make_engine: MakeEngine) -> None:
    async with make_engine(rotates, node) as engine:
        await nodes(engine, "a")
        handle = await engine.start(rotates, 0, id="r")
        await until(lambda: is_round(handle, 2))

        edge = await engine.run_parents.link(f"{handle.run_id}#1", named("a"))

        assert edge == keiro.RunParent(handle.run_id, named("a"), 1)
        assert await engine.run_parents.of(f"{handle.run_id}#2") == [edge]
        assert await engine.run_parents.children(handle.run_id) == []
        assert await engine.cancel(named("a"))
        assert await handle.status() == "cancelled"
        assert (await engine.rebuild("run_parents")).differences == 0


@keiro.workflow
async def rotates(run: keiro.WorkflowRun, n: int) -> None:
    if n < 2:
        run.continue_as_new(n + 1)
    await run.deferred("done").result()


async def is_round(handle: keiro.Handle, number: int) -> bool:
    return (await handle.run()).round_ordinal == number


# Cancellation


async def marks(engine: keiro.Engine, key: str) -> int:
    return (await topics(engine.handle(named(key)))).count("WorkflowCancelled")


async def test_j9_a_cancellation_reaches_everything_below_once(make_engine: MakeEngine) -> None:
    """J9: over spawned and linked edges, through a diamond, across engines, and a second time it does nothing."""
    async with make_engine(node, parent) as engine, make_engine(node) as other:
        handle = await engine.start(parent, ["p", "q"], id="top")
        await until(lambda: has_children(engine, handle, 2))
        await nodes(other, "dex")
        await link(other, "dp", "dq", "ed", "xd", "xq")

        assert await other.cancel(handle.run_id, reason="enough")
        assert not await engine.cancel(handle.run_id)

        for key in "pqdex":
            run = await engine.handle(named(key)).run()
            assert (run.status, await marks(engine, key)) == ("cancelled", 1), key
        with pytest.raises(keiro.WorkflowCancelled, match="enough"):
            await engine.handle(named("e")).result(LIMIT_S)


async def test_j9_who_was_spawned_to_be_left_alone_is_left_alone_by_all_parents(make_engine: MakeEngine) -> None:
    """J9: with what is below it; so is what is below a run that has ended."""
    async with make_engine(node, parent) as engine:
        handle = await engine.start(parent, ["k"], "detach", id="p")
        await until(lambda: has_children(engine, handle, 1))
        await nodes(engine, "abcd")
        await link(engine, "ka", "bk", "ca", "dc")
        await engine.complete(named("c"), "done", "c")
        await engine.handle(named("c")).result(LIMIT_S)

        assert await engine.cancel(named("a"))

        statuses = {key: str(await engine.handle(named(key)).status()) for key in "kbcd"}
        assert statuses["c"] == "completed"
        assert not {statuses[key] for key in "kbd"} & {"cancelled", "completed"}


async def test_who_has_spawned_a_run_is_told_when_another_parent_takes_it_along(make_engine: MakeEngine) -> None:
    async with make_engine(node, calls) as engine:
        handle = await engine.start(calls, id="c")
        await until(lambda: has_children(engine, handle, 1))
        await nodes(engine, "ab")
        await link(engine, "ka", "ba")

        assert await engine.cancel(named("a"), reason="no more")

        assert await handle.result(LIMIT_S) == "wf:node-k was cancelled: no more"


@keiro.workflow
async def calls(run: keiro.WorkflowRun) -> str:
    try:
        return str(await run.call(node, id="k"))
    except keiro.ChildCancelled as cancelled:
        return str(cancelled)


async def test_j10_an_end_that_is_no_cancellation_takes_nobody_along(make_engine: MakeEngine) -> None:
    """J10."""
    async with make_engine(node, fails) as engine:
        await nodes(engine, "abc")
        await link(engine, "ba")
        await engine.complete(named("a"), "done", "a")
        assert await engine.handle(named("a")).result(LIMIT_S) == "a"
        handle = await engine.start(fails, id="f")
        await engine.run_parents.link(named("c"), handle.run_id)
        await engine.complete(handle.run_id, "go", None)
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result(LIMIT_S)

        assert not {await engine.handle(named(key)).status() for key in "bc"} & {"cancelled", "failed", "completed"}
        assert await link(engine, "ca")  # to one that has completed: it inherits nothing
        assert await engine.handle(named("c")).status() != "cancelled"


@keiro.workflow
async def fails(run: keiro.WorkflowRun) -> None:
    await run.deferred("go").result()
    raise ValueError("no")


async def test_j11_a_child_that_comes_late_is_cancelled_with_all_that_is_below_it(make_engine: MakeEngine) -> None:
    """J11: from a cancelled parent, at the time of the link, for the parent's reason."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abcd")
        await link(engine, "cb", "dc")
        await engine.cancel(named("a"), reason="enough")
        before = engine.wall_ms()

        edge = await engine.run_parents.link(named("b"), named("a"))

        assert edge.seq == 3
        for key in "bcd":
            run = await engine.handle(named(key)).run()
            assert run.status == "cancelled" and run.finished_at_ms is not None and run.finished_at_ms >= before
            with pytest.raises(keiro.WorkflowCancelled, match="enough"):
                await engine.handle(named(key)).result(LIMIT_S)
        assert (await topics(engine.handle(named("b"))))[-2:] == ["RunLinked", "WorkflowCancelled"]
        assert (await engine.run_parents.link(named("b"), named("a"))) == edge


async def test_j11_a_late_child_is_asked_to_end_when_its_parent_was(make_engine: MakeEngine) -> None:
    """J11: with the time of the parent's request, all the way down; one without a cleanup ends at once."""
    async with make_engine(node, careful, worker=False) as engine:
        for key in ("p", "c", "g"):
            await engine.start(careful, id=key)
        await nodes(engine, "n")
        await engine.run_parents.link("wf:careful-g", "wf:careful-c")
        await engine.run_parents.link(named("n"), "wf:careful-g")
        await engine.cancel("wf:careful-p", reason="enough")
        asked_at = (await engine.handle("wf:careful-p").run()).cancel_requested_at_ms
        await until(lambda: later(engine, asked_at))

        await engine.run_parents.link("wf:careful-c", "wf:careful-p")

        for key in ("c", "g"):
            handle = engine.handle(f"wf:careful-{key}")
            run = await handle.run()
            assert (run.status, run.cancel_requested_at_ms) == ("pending", asked_at)
            (asked,) = [event async for event in handle.events() if isinstance(event, StateChanged)]
            assert (asked.state, asked.reason, asked.requested_at_ms) == ("cancel_requested", "enough", asked_at)
        assert await engine.handle(named("n")).status() == "cancelled"
        assert (await engine.rebuild("runs")).differences == 0


async def later(engine: keiro.Engine, than_ms: int | None) -> bool:
    assert than_ms is not None
    return engine.wall_ms() > than_ms


async def test_j11_a_request_that_is_inherited_is_carried_out(make_engine: MakeEngine) -> None:
    """J11: the row of a run that is driven keeps the time of the parent's request."""
    async with make_engine(node, careful) as engine:
        parent_, child = await engine.start(careful, id="p"), await engine.start(careful, id="c")
        await engine.run_parents.link(child.run_id, parent_.run_id)
        await engine.cancel(parent_.run_id)
        for handle in (parent_, child):
            with pytest.raises(keiro.WorkflowCancelled):
                await handle.result(LIMIT_S)
        times = {(await handle.run()).cancel_requested_at_ms for handle in (parent_, child)}
        assert len(times) == 1


async def test_j11_a_detached_child_and_a_missing_parent_inherit_nothing(make_engine: MakeEngine) -> None:
    """J11."""
    async with make_engine(node, parent) as engine:
        handle = await engine.start(parent, ["k"], "detach", id="p")
        await until(lambda: has_children(engine, handle, 1))
        await nodes(engine, "ab")
        await engine.cancel(named("a"))

        await link(engine, "ka")
        with pytest.raises(keiro.RunNotFound):
            await link(engine, "bz")

        assert not {await engine.handle(named(key)).status() for key in "kb"} & {"cancelled"}


@pytest.mark.parametrize("order", ["link first", "cancel first"])
async def test_j11_a_link_and_a_cancellation_at_once_leave_nobody_behind(make_engine: MakeEngine, order: str) -> None:
    """J11: in one batch, in either order."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "abc")
        await link(engine, "cb")
        sent = [engine.run_parents.link(named("b"), named("a")), engine.cancel(named("a"))]

        await asyncio.gather(*(sent if order == "link first" else reversed(sent)))

        assert [await marks(engine, key) for key in "abc"] == [1, 1, 1]


async def test_j12_the_mark_of_the_run_itself_comes_before_those_below(make_engine: MakeEngine) -> None:
    """J12."""
    async with make_engine(node, worker=False) as engine:
        await nodes(engine, "cba")
        await link(engine, "ba", "ca")
        await engine.cancel(named("a"))

        stored = await engine.store.read(0, 1000)
        assert [row.run_id for row in stored if row.topic == WorkflowCancelled.TOPIC] == [*map(named, "abc")]


class Refuses(Projection):
    """Does not take that `c` is cancelled."""

    name = "refuses"
    table = sa.Table("refuses", sa.MetaData(), sa.Column("id", sa.Text, primary_key=True))
    topics = ("WorkflowCancelled",)

    def keys(self, event: Any) -> list[str]:
        if event.originator_id == named("c"):
            raise ValueError("not this one")
        return []

    def fold(self, key: Any, row: Row | None, event: Any) -> Row | None:
        return row


async def test_j13_a_cancellation_that_fails_is_told_and_takes_nobody_along(make_engine: MakeEngine) -> None:
    """J13: nothing is cancelled and nothing interrupted, the run itself included."""
    async with make_engine(node, projections=[Refuses]) as engine:
        await nodes(engine, "abc")
        await link(engine, "ba", "cb")

        with pytest.raises(keiro.ProjectionFailed, match="not this one"):
            await engine.cancel(named("a"))

        assert [await marks(engine, key) for key in "abc"] == [0, 0, 0]
        for key in "abc":
            await engine.complete(named(key), "done", key)
            assert await engine.handle(named(key)).result(LIMIT_S) == key


async def test_j17_nothing_moves_the_end_of_a_parked_run_that_was_cancelled(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """J17: neither its clock, nor what it waited for, nor an edge."""
    async with make_engine(sleeper, node) as engine:
        await nodes(engine, "ab")
        handle = await engine.start(sleeper, id="s")
        await until(lambda: is_parked(handle))
        found = await engine.store.head(handle.run_id)
        assert found is not None and await handle.cancel()
        ended_at = (await handle.run()).finished_at_ms
        await until(lambda: later(engine, ended_at))

        assert not await handle.cancel()
        assert (
            type(await engine.store.submit(Fire(handle.run_id, found[1].version, 2**52))).__name__ == "VersionConflict"
        )
        await engine.run_parents.link(handle.run_id, named("a"))
        await engine.cancel(named("a"))

        run = await handle.run()
        assert (run.status, run.finished_at_ms) == ("cancelled", ended_at)


async def test_what_is_recorded_of_an_edge_comes_back_from_the_journal(make_engine: MakeEngine) -> None:
    async with make_engine(node, parent) as engine:
        handle = await engine.start(parent, ["k"], id="p")
        await until(lambda: has_children(engine, handle, 1))
        await nodes(engine, "a")
        await link(engine, "ka")

        started, linked = [event async for event in engine.handle(named("k")).events()][:2]
        assert isinstance(started, WorkflowStarted) and isinstance(linked, RunLinked)
        assert (started.parent, started.parent_seq) == (handle.run_id, 1)
        assert (linked.child, linked.parent, linked.seq) == (named("k"), named("a"), 2)


def test_synchronous_code_links_too(tmp_path: Path) -> None:
    with keiro.blocking(keiro.Engine(f"sqlite:///{tmp_path}/k.db", workflows=[node], worker=False)) as engine:
        for key in "ab":
            engine.start(node, id=key)
        edge = engine.run_parents.link(named("b"), named("a"))
        assert engine.run_parents.of(named("b")) == engine.run_parents.children(named("a")) == [edge]
        assert engine.run_parents.unlink(named("b"), named("a"))
