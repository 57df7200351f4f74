"""Limits of queues and priorities: kept to the run, by all workers of a store together."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import keiro
from keiro import waits, worker
from keiro.limits import LOWEST
from keiro.projections.runs import project
from keiro.testing import SkippingClock
from tests.conformance.test_discovery import sent_to, whole_tables
from tests.conformance.test_ownership import worker_of
from tests.conftest import MakeEngine

HOUR = 3600
A_MINUTE = 60_000

held: set[str] = set()
most: list[int] = []
order: list[str] = []
gates: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    held.clear()
    most.clear()
    order.clear()
    gates.clear()
    monkeypatch.setattr(waits, "PARK_S", 0.01)


@pytest.fixture
def no_safety_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not told of is not found."""
    monkeypatch.setattr(worker, "SAFETY_POLL_S", float(HOUR))


async def enter(key: str, yields: int) -> str:
    held.add(key)
    most.append(len(held))
    for _ in range(yields):
        await asyncio.sleep(0)
    held.discard(key)
    return key


@keiro.workflow(queue="mail")
async def mails(run: keiro.WorkflowRun) -> str:
    order.append(run.key)
    return str(await run.step(enter, run.key, 5))


@keiro.workflow(queue="mail")
async def letters(run: keiro.WorkflowRun) -> str:
    order.append(run.key)
    return str(await run.step(enter, run.key, 5))


async def pass_gate(key: str) -> None:
    await gates.setdefault(key, asyncio.Event()).wait()


@keiro.workflow(queue="mail")
async def gated(run: keiro.WorkflowRun) -> None:
    order.append(run.key)
    await run.step(pass_gate, run.key)


@keiro.workflow(queue="mail")
async def asks(run: keiro.WorkflowRun) -> str:
    order.append(run.key)
    return str(await run.deferred("answer", str).result())


@keiro.workflow(queue="mail")
async def rounds(run: keiro.WorkflowRun, left: int) -> int:
    order.append(run.run_id)
    await run.step(enter, run.run_id, 1)
    if left:
        run.continue_as_new(left - 1)
    return run.round


@keiro.workflow
async def free(run: keiro.WorkflowRun) -> str:
    order.append(run.key)
    return run.key


def mail(**limits: Any) -> dict[str, Any]:
    return {"queues": [keiro.Queue("mail", **limits)]}


async def test_no_more_runs_than_the_limit_are_driven_by_all_workers_together(make_engine: MakeEngine) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(make_engine(mails, letters, **mail(concurrency=3))) for _ in range(3)
        ]
        handles = await engines[0].start_many(mails, [()] * 30)
        handles += [await engine.start(letters) for engine in engines for _ in range(10)]
        await asyncio.gather(*(handle.result() for handle in handles))
    assert max(most) == 3
    assert len(most) == 60


async def test_each_worker_keeps_its_own_limit(make_engine: MakeEngine) -> None:
    options = mail(per_worker=2)
    async with make_engine(gated, **options) as one, make_engine(gated, **options) as other:
        await one.start_many(gated, [()] * 9, ids=[str(n) for n in range(9)])
        while len(order) < 4:
            await asyncio.sleep(0.01)
        assert [len(engine._resident) for engine in (one, other)] == [2, 2]
        assert await one.store.claim(worker_of(one).key, ["gated"], 9, one._limits) == []
        for n in range(9):
            gates.setdefault(str(n), asyncio.Event()).set()
        for n in range(9):
            await one.handle(f"wf:gated-{n}").result()
    assert sorted(order) == [str(n) for n in range(9)]


async def test_two_claims_at_once_cannot_both_take_the_last_slot(make_engine: MakeEngine) -> None:
    async with make_engine(gated, worker=False) as one, make_engine(gated, worker=False) as other:
        limits = {"gated": keiro.Queue("mail", concurrency=3)}
        await one.start_many(gated, [()] * 9)
        claims = [engine.store.claim(worker_of(engine).key, ["gated"], 2, limits) for engine in (one, other) * 3]
        taken = await asyncio.gather(*claims)
        assert sum(map(len, taken)) == 3


async def test_a_freed_slot_is_taken_at_once_also_by_another_process(
    make_engine: MakeEngine, no_safety_poll: None
) -> None:
    """By the end of a run, its parking, and its cancellation."""
    options = mail(concurrency=1)
    async with make_engine(gated, asks, **options) as one, make_engine(mails, **options) as other:
        first = await one.start(gated, id="a")
        while order != ["a"]:
            await asyncio.sleep(0.01)
        second = await other.start(mails, id="b")
        gates["a"].set()
        assert await second.result(timeout=20) == "b"
        await first.result()

        parked = await one.start(asks, id="c")
        third = await other.start(mails, id="d")
        assert await third.result(timeout=20) == "d"

        stuck = await one.start(gated, id="e")
        while order[-1] != "e":
            await asyncio.sleep(0.01)
        fourth = await other.start(mails, id="f")
        await stuck.cancel()
        assert await fourth.result(timeout=20) == "f"

        await one.complete(parked.run_id, "answer", "yes")
        assert await parked.result(timeout=20) == "yes"


async def test_a_worker_alone_takes_its_own_freed_slots_at_once(make_engine: MakeEngine, no_safety_poll: None) -> None:
    async with make_engine(mails, **mail(concurrency=1)) as engine:
        handles = await engine.start_many(mails, [()] * 5)
        async with asyncio.timeout(20):
            for handle in handles:
                await handle.result()


async def test_a_parked_run_holds_no_slot_and_queues_again_when_it_is_woken(make_engine: MakeEngine) -> None:
    async with make_engine(gated, asks, **mail(concurrency=1)) as engine:
        parked = await engine.start(asks, id="parked")
        blocking = await engine.start(gated, id="blocking")
        while order != ["parked", "blocking"]:
            await asyncio.sleep(0.01)
        await engine.complete(parked.run_id, "answer", "yes")
        assert await parked.status() == "pending"
        gates["blocking"].set()
        assert await parked.result() == "yes"
        await blocking.result()


async def test_a_full_queue_does_not_hold_up_others(make_engine: MakeEngine) -> None:
    async with make_engine(gated, free, concurrency=5, **mail(concurrency=1)) as engine:
        await engine.start_many(gated, [()] * 1200, ids=[str(n) for n in range(1200)])
        while not order:
            await asyncio.sleep(0.01)
        handles = await engine.start_many(free, [()] * 20)
        for handle in handles:
            await handle.result()
        assert len(order) == 21


async def test_runs_wait_by_priority_and_then_by_age(make_engine: MakeEngine) -> None:
    async with make_engine(mails, letters, **mail(concurrency=1), worker=False) as client:
        await client.start(mails, id="last", priority=7)
        await client.start_many(mails, [()] * 2, ids=["early", "late"])
        await client.start(letters, id="first", priority=-LOWEST)
        await client.start(letters, id="after")
    async with make_engine(mails, letters, **mail(concurrency=1)) as engine:
        assert await engine.handle("wf:mails-last").result() == "last"
    assert order == ["first", "early", "late", "after", "last"]


async def test_priority_holds_without_a_queue_and_through_rounds_and_children(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def spawns(run: keiro.WorkflowRun) -> None:
        await run.spawn(free, id="child", priority=3)

    async with make_engine(free, rounds, spawns, worker=False) as client:
        await client.start(free, id="b", priority=2)
        await client.start(free, id="a", priority=1)
        await client.start(rounds, 1, id="r", priority=5)
    async with make_engine(free, rounds, spawns, concurrency=1, **mail()) as engine:
        await engine.handle("wf:free-b").result()
        assert order[:2] == ["a", "b"]
        await engine.handle("wf:rounds-r").result()
        handle = await engine.start(spawns)
        await handle.result()
        await engine.handle("wf:free-child").result()
        priorities = {run.run_id: run.priority for run in await engine.store.runs(limit=9)}
        for run_id, priority in priorities.items():
            first, *_ = [event async for event in engine.handle(run_id).events()]
            rebuilt = project(None, first, 0)
            assert rebuilt is not None
            assert rebuilt.priority == priority
    assert priorities["wf:rounds-r#1"] == priorities["wf:rounds-r"] == 5
    assert priorities["wf:free-child"] == 3


class Hands:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now


async def claimed(engine: keiro.Engine, limits: dict[str, keiro.Queue], room: int = 99) -> list[str]:
    """What a claim takes, by key."""
    names = sorted(limits)
    return [run.key for run, _ in await engine.store.claim(worker_of(engine).key, names, room, limits)]


async def test_a_rate_counts_first_starts_in_every_stretch_of_time(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, one rate; what goes on takes no token, what was taken outlives who took it."""
    clock = Hands()
    async with make_engine(mails, worker=False) as one, make_engine(mails, worker=False) as other:
        for engine in (one, other):
            monkeypatch.setattr(engine.store, "now_ms", clock)
            await engine.store.renew(worker_of(engine).key)
        queue = keiro.Queue("mail", rate=keiro.Rate(3, per=60))
        limits = {"mails": queue}
        await one.start_many(mails, [()] * 9, ids=[str(n) for n in range(9)])
        assert await claimed(one, limits, 2) == ["0", "1"]
        clock.now += A_MINUTE // 2
        assert await claimed(other, limits) == ["2"]
        assert await claimed(one, limits) == []
        assert await one.store.opens_ms(queue, clock.now) == clock.now + A_MINUTE // 2
        # Handed back and taken again: it began before.
        await one.store.release(worker_of(one).key, list(await one.store.owned(worker_of(one).key)))
        assert await claimed(other, limits) == ["0", "1"]
        clock.now += A_MINUTE // 2 - 1
        assert await claimed(one, limits) == []
        clock.now += 1
        assert await claimed(one, limits) == ["3", "4"]
        clock.now += A_MINUTE // 2
        assert await claimed(other, limits) == ["5"]
        clock.now += A_MINUTE * 60 * 25
        assert await one.store.opens_ms(queue, clock.now) is None
        assert await claimed(one, limits) == ["6", "7", "8"]


async def test_a_rate_that_opens_again_is_looked_at_in_time(make_engine: MakeEngine, no_safety_poll: None) -> None:
    async with make_engine(mails, **mail(rate=keiro.Rate(2, per=0.3))) as engine:
        handles = await engine.start_many(mails, [()] * 5)
        async with asyncio.timeout(20):
            for handle in handles:
                await handle.result()
        started = sorted([run.started_at_ms or 0 for run in await engine.store.runs(limit=9)])
    assert all(later - earlier >= 300 for earlier, later in zip(started, started[2:], strict=False))


@pytest.mark.parametrize("store_url", ["memory", "sqlite"], indirect=True)
async def test_time_that_skips_goes_to_where_a_rate_opens(make_engine: MakeEngine) -> None:
    async with make_engine(mails, **mail(rate=keiro.Rate(2, per=HOUR))) as engine:
        SkippingClock(engine)
        handles = await engine.start_many(mails, [()] * 5)
        handles.append(await engine.start(mails, delay=1))
        for handle in handles:
            await handle.result(timeout=20)
        started = sorted([run.started_at_ms or 0 for run in await engine.store.runs(limit=9)])
    assert all(later - earlier >= HOUR * 1000 for earlier, later in zip(started, started[2:], strict=False))
    assert started[-1] - started[0] < 3 * HOUR * 1000


async def test_what_is_due_in_a_full_queue_does_not_hide_what_will_be_due_elsewhere(make_engine: MakeEngine) -> None:
    async with make_engine(gated, free, worker=False) as engine:
        limits = {"gated": keiro.Queue("mail", concurrency=1)}
        looks = worker.Worker(engine, ["gated", "free"], limits, claims=False)
        began = engine.store.now_ms()
        await engine.start(gated, delay=0.001)
        await engine.start(free, delay=HOUR)
        dues = [due for due in await looks._dues(began + 1000) if due is not None and due > began + 1000]
        assert dues == [await engine.store.next_due_ms(["free"])]


async def test_later_rounds_keep_the_concurrency_and_take_no_token(make_engine: MakeEngine) -> None:
    async with make_engine(rounds, **mail(concurrency=2, rate=keiro.Rate(3, per=HOUR))) as engine:
        handles = [await engine.start(rounds, 4, id=str(n)) for n in range(3)]
        await asyncio.gather(*(handle.result(timeout=20) for handle in handles))
    assert max(most) <= 2
    assert len(order) == 15


async def test_a_queued_run_is_cancelled_and_a_failed_one_resurrected(make_engine: MakeEngine) -> None:
    broken = [True]

    @keiro.workflow(queue="mail")
    async def breaks(run: keiro.WorkflowRun) -> str:
        if broken:
            raise ValueError("broken")
        return "whole"

    limits = mail(concurrency=1, rate=keiro.Rate(2, per=HOUR))
    async with make_engine(breaks, gated, **limits) as engine:
        failed = await engine.start(breaks, id="x")
        with pytest.raises(keiro.WorkflowFailed):
            await failed.result()
        await engine.start(gated, id="a")
        while order != ["a"]:
            await asyncio.sleep(0.01)
        queued = await engine.start(gated, id="b")
        await queued.cancel()
        broken.clear()
        await engine.resurrect(failed.run_id)  # a third start, were it one
        gates.setdefault("a", asyncio.Event()).set()
        assert await failed.result() == "whole"
        with pytest.raises(keiro.WorkflowCancelled):
            await queued.result()
    assert order == ["a"]


KILLED = """
import asyncio, sys
import keiro
from tests.conformance import test_limits

async def main():
    async with keiro.Engine(sys.argv[1], workflows=[test_limits.gated], queues=[keiro.Queue("mail", concurrency=2)]):
        while len(test_limits.order) < 2:
            await asyncio.sleep(0.01)
        print("full", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)
async def test_the_slots_of_a_killed_worker_are_taken_by_others(store_url: str, make_engine: MakeEngine) -> None:
    async with make_engine(gated, worker=False) as client:
        handles = await client.start_many(gated, [()] * 4, ids=list("abcd"))
    process = subprocess.Popen([sys.executable, "-c", KILLED, store_url], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"full\n"
        async with make_engine(gated, **mail(concurrency=2)) as engine:
            assert await engine.store.claim(worker_of(engine).key, ["gated"], 9, engine._limits) == []
            process.send_signal(signal.SIGKILL)
            process.wait()
            await worker_of(engine)._bury_dead()
            for key in "abcd":
                gates.setdefault(key, asyncio.Event()).set()
            async with asyncio.timeout(30):
                for handle in handles:
                    await engine.handle(handle.run_id).result()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: keiro.Rate(0),
        lambda: keiro.Rate(True),
        lambda: keiro.Rate(1, per=0),
        lambda: keiro.Rate(1, per=float("nan")),
        lambda: keiro.Rate(1, per=1e9),
        lambda: keiro.Queue("a b"),
        lambda: keiro.Queue("mail", concurrency=0),
        lambda: keiro.Queue("mail", per_worker=1.5),  # type: ignore[arg-type]
        lambda: keiro.Queue("mail", rate=5),  # type: ignore[arg-type]
        lambda: keiro.workflow(queue="a:b")(free.body),
        lambda: keiro.Engine("memory://", workflows=[mails]),
        lambda: keiro.Engine("memory://", queues=[keiro.Queue("a"), keiro.Queue("a", concurrency=1)]),
        lambda: keiro.Engine("memory://", queues=["mail"]),  # type: ignore[list-item]
    ],
    ids=range(13),
)
def test_a_limit_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(keiro.InvalidCall):
        wrong()


@pytest.mark.parametrize("priority", [True, 1.0, "1", None, LOWEST + 1, -LOWEST - 1])
async def test_a_priority_that_is_none_is_refused_before_anything_is_written(
    make_engine: MakeEngine, priority: Any
) -> None:
    async with make_engine(free) as engine:
        with pytest.raises(keiro.InvalidCall):
            await engine.start(free, priority=priority)
        with pytest.raises(keiro.InvalidCall):
            await engine.start_many(free, [()], priority=priority)
        assert await engine.store.runs(limit=1) == []


async def test_a_claim_reads_neither_what_has_ended_nor_a_long_queue(tmp_path: Path) -> None:
    path = tmp_path / "keiro.db"
    async with make(path) as engine:
        await engine.start_many(mails, [()] * 50)
        with closing(sqlite3.connect(path)) as filling:
            filling.executemany(
                "INSERT INTO keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " finished_at_ms) VALUES ('wf:mails-' || ?1, 'mails', ?1, 'completed', 'wf:mails-' || ?1, '{}', 1, 2)",
                [(f"d{n}",) for n in range(5000)],
            )
            filling.execute(
                "INSERT INTO keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro_runs"
                " WHERE status = 'completed'"
            )
            filling.commit()
        connection: sqlite3.Connection = engine.store._conn  # type: ignore[attr-defined]
        sent: list[str] = []
        connection.set_trace_callback(sent.append)
        limits = {"mails": keiro.Queue("mail", concurrency=5, per_worker=5, rate=keiro.Rate(3, per=60))}
        key = worker_of(engine).key
        assert len(await engine.store.claim(key, ["mails", "free"], 9, limits)) == 3
        assert await engine.store.claim(key, ["mails", "free"], 9, limits) == []
        await engine.store.opens_ms(limits["mails"], engine.store.now_ms())
        connection.set_trace_callback(None)
        plans = {
            sql: [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
            for sql in sent
            if sql.startswith(("SELECT", "UPDATE", "DELETE"))
        }
    used = " ".join(step for plan in plans.values() for step in plan)
    assert "keiro_run_heads_queue_idx (queue=? AND owner" in used
    assert "keiro_runs_pending_idx (workflow=?)" in used
    few = ("SCAN CONSTANT ROW", "SCAN q", "SCAN a", "SCAN dues")
    for sql, plan in plans.items():
        assert [step for step in plan if step.startswith("SCAN") and step not in few] == [], f"{sql}\n{plan}"


async def test_a_claim_reads_by_index_alone_on_postgres(postgres_url: str) -> None:
    limits = {"mails": keiro.Queue("mail", concurrency=5, per_worker=5, rate=keiro.Rate(3, per=60))}
    async with keiro.Engine(postgres_url, workflows=[mails], worker=False, migrate=True) as engine:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            for status, finished, many in (("completed", 2, 20_000), ("pending", None, 5_000)):
                connection.execute(
                    "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, input_json,"
                    " created_at_ms, finished_at_ms) SELECT 'wf:mails-' || %(s)s || n, 'mails', %(s)s || n, %(s)s,"
                    " 'wf:mails-' || %(s)s || n, '{}', 1, %(f)s::bigint FROM generate_series(1, %(m)s) n",
                    {"s": status, "f": finished, "m": many},
                )
            connection.execute(
                "INSERT INTO keiro.keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro.keiro_runs"
            )
            connection.execute("ANALYZE")
        with sent_to(engine) as sent:
            key = worker_of(engine).key
            assert len(await engine.store.claim(key, ["mails", "free"], 9, limits)) == 3
            assert await engine.store.claim(key, ["mails", "free"], 9, limits) == []
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("SET plan_cache_mode = force_generic_plan")
            plans = {}
            for n, sql in enumerate(dict.fromkeys(sent)):
                if sql.startswith(("SELECT", "UPDATE", "DELETE")) and "keiro.keiro_" in sql:
                    connection.execute(f"PREPARE p{n} AS {sql}".encode())
                    count = max([int(found) for found in re.findall(r"\$(\d+)", sql)], default=0)
                    arguments = f"({', '.join(['NULL'] * count)})" if count else ""
                    ((found,),) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE p{n}{arguments}".encode())
                    plans[sql] = found[0]["Plan"]
    assert len(plans) > 5
    for sql, plan in plans.items():
        # What is kept of a rate is one small table: with nothing in it, it is read as it lies.
        assert set(whole_tables(plan)) <= {"keiro_workers", "keiro_queue_starts"}, f"{sql}\n{json.dumps(plan)}"


def make(path: Path) -> keiro.Engine:
    return keiro.Engine(f"sqlite:///{path}", workflows=[mails], worker=False)
