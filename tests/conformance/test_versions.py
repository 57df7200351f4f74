"""Versions of a workflow: whose code drives which runs, and who is told of those that nobody here may drive (WF-62)."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import keiro
from keiro.stores.base import SAFETY_POLL_S
from keiro.testing import SkippingClock
from tests.conformance.test_discovery import sent_to, whole_tables
from tests.conformance.test_ownership import own_row, worker_of
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine

FOREIGN = 5000


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


@keiro.workflow(name="fulfil")
async def untagged(run: keiro.WorkflowRun, n: int) -> str:
    return f"untagged {await run.step(note, n)} {run.info.version_tag}"


@keiro.workflow(name="fulfil", version="1", pinned=True)
async def first(run: keiro.WorkflowRun, n: int) -> str:
    return f"first {await run.step(note, n)} {run.info.version_tag}"


@keiro.workflow(name="fulfil", version="2", pinned=True)
async def second(run: keiro.WorkflowRun, n: int) -> str:
    return f"second {await run.step(note, n)} {run.info.version_tag}"


@keiro.workflow(name="fulfil", version="3")
async def free(run: keiro.WorkflowRun, n: int) -> str:
    return f"free {await run.step(note, n)} {run.info.version_tag}"


def listening(engine: keiro.Engine) -> list[tuple[str, Any]]:
    """What the engine tells of from now on."""
    reported: list[tuple[str, Any]] = []
    engine.report = lambda event, run_id, **fields: reported.append((event, fields))  # type: ignore[method-assign]
    return reported


async def test_wf_62_a_pinned_worker_leaves_runs_of_other_versions_and_tells_of_them(make_engine: MakeEngine) -> None:
    # Given: runs that were started under another version, and under none.
    async with make_engine(worker=False) as client:
        old = await client.start(first, 1, id="old")
        oldest = await client.start(untagged, 0, id="oldest")
    # When: a worker that is pinned to the next version drives its own run.
    engine = make_engine(second)
    reported = listening(engine)
    async with engine:
        assert await engine.execute(second, 2, id="new") == "second 2 2"
        await worker_of(engine).report_unregistered()
        # Then: the others stay as they were, and each version is told of once.
        assert [await engine.handle(one.run_id).status() for one in (old, oldest)] == ["pending", "pending"]
        assert [(await one.run()).version_tag for one in (engine.handle(old.run_id),)] == ["1"]
    assert sorted(map(str, reported)) == [
        "('unregistered_version', {'workflow': 'fulfil', 'version': '1'})",
        "('unregistered_version', {'workflow': 'fulfil', 'version': None})",
    ]
    # And: whoever has the version goes on with them.
    async with make_engine(first) as engine:
        assert await engine.handle(old.run_id).result() == "first 1 1"
        assert await engine.handle(oldest.run_id).status() == "pending"
    async with make_engine(untagged) as engine:
        assert await engine.handle(oldest.run_id).result() == "untagged 0 None"


async def test_code_that_is_not_pinned_drives_every_version(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as client:
        runs = [await client.start(one, n, id=str(n)) for n, one in enumerate((untagged, first, second, free))]
    async with make_engine(free) as engine:
        assert [await engine.handle(run.run_id).result() for run in runs] == [
            "free 0 None",
            "free 1 1",
            "free 2 2",
            "free 3 3",
        ]


async def test_one_engine_drives_each_run_with_the_code_of_its_version(make_engine: MakeEngine) -> None:
    """Also runs that others started, and after they are handed back; each result is read by its version's types."""

    @keiro.workflow(name="totals", version="1", pinned=True)
    async def in_cents(run: keiro.WorkflowRun, n: int) -> tuple[int, ...]:
        return (int(await run.step(note, n)),)

    @keiro.workflow(name="totals", version="2", pinned=True)
    async def in_words(run: keiro.WorkflowRun, n: int) -> set[str]:
        return {str(await run.step(note, n))}

    async with make_engine(worker=False) as client:
        await client.start(in_cents, 1, id="1")
        await client.start(in_words, 2, id="2")
    async with make_engine(in_cents, in_words) as engine:
        assert await engine.handle("wf:totals-1").result() == (1,)
        assert await engine.handle("wf:totals-2").result() == {"2"}
        assert await engine.execute(in_cents, 3) == (3,)
        assert await engine.execute(in_words, 4) == {"4"}
        # A start that finds a run of another version has that run.
        assert await engine.execute(in_words, 1, id="1") == (1,)


async def test_rounds_and_children_carry_the_version_of_the_code_that_begins_them(make_engine: MakeEngine) -> None:
    @keiro.workflow(name="rounds", version="1", pinned=True)
    async def rounds(run: keiro.WorkflowRun, n: int) -> list[str]:
        if n:
            return run.continue_as_new(n - 1)
        return [await run.call(first, 1, id="c1"), await run.call(second, 2, id="c2"), str(run.info.version_tag)]

    async with make_engine(rounds, first, second) as engine:
        handle = await engine.start(rounds, 2, id="a")
        assert await handle.result() == ["first 1 1", "second 2 2", "1"]
        assert {run.run_id: run.version_tag for run in await engine.runs()} == {
            "wf:rounds-a": "1",
            "wf:rounds-a#1": "1",
            "wf:rounds-a#2": "1",
            "wf:fulfil-c1": "1",
            "wf:fulfil-c2": "2",
        }


async def test_a_parent_waits_for_a_child_that_only_another_worker_may_drive(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> str:
        return str(await run.call(first, 1, id="c"))

    async with make_engine(parent, first, worker=False) as client:
        handle = await client.start(parent, id="p")
    # `first` is not among this worker's: it knows the code to spawn, and is pinned to another version.
    async with make_engine(parent, second) as one, make_engine(first) as other:
        assert await one.handle(handle.run_id).result(timeout=20) == "first 1 1"
        assert (await other.handle("wf:fulfil-c").run()).version_tag == "1"


def sleeper(version: str, *, seconds: float) -> keiro.Workflow:
    @keiro.workflow(name="sleeper", version=version, pinned=True, retry=keiro.Retry(2, initial=seconds, jitter=0))
    async def body(run: keiro.WorkflowRun, how: str) -> str:
        if how == "paced" and await run.step(note, "tried") and calls == ["tried"]:
            calls.append("failed")
            raise RuntimeError("once")
        if how == "parked":
            await run.sleep(seconds)
        return f"{how} {version}"

    return body


@pytest.mark.parametrize("how", ["parked", "paced"])
async def test_no_clock_of_another_version_is_fired_or_waited_for(
    make_engine: MakeEngine, parks_at_once: None, how: str
) -> None:
    """The clock of a run nobody here may drive is nothing to do: neither fired, nor asked for again and again."""
    # Given: a run that waits, and a worker that has another version only.
    old, new = sleeper("1", seconds=0.2), sleeper("2", seconds=0.2)
    async with make_engine(old) as engine:
        handle = await engine.start(old, how, id="a")
        while (await handle.run()).wake_at_ms is None and (await handle.run()).next_attempt_at_ms is None:
            await asyncio.sleep(0.002)
        waiting = await handle.run()
    due = waiting.wake_at_ms or waiting.next_attempt_at_ms
    assert due is not None
    engine = make_engine(new)
    reported = listening(engine)
    async with engine:
        store, worker = engine.store, worker_of(engine)
        # Then: it is due for its own version alone, before its time and after.
        assert await store.next_due_ms(["sleeper@1"]) == await store.next_due_ms(["sleeper"]) == due
        assert await store.next_due_ms(["sleeper@2"]) is None
        while store.now_ms() < due:
            await asyncio.sleep(0.01)
        assert await worker._claim_all() == SAFETY_POLL_S
        assert await store.due(["sleeper@2"]) == []
        assert [name for name, _ in await store.due(["sleeper@1"])] == ([handle.run_id] if how == "parked" else [])
        await worker.report_unregistered()
        assert reported == [("unregistered_version", {"workflow": "sleeper", "version": "1"})]
        assert await engine.handle(handle.run_id).run() == waiting
    async with make_engine(old) as engine:
        assert await engine.handle(handle.run_id).result() == f"{how} 1"


@pytest.mark.parametrize("store_url", ["memory", "sqlite"], indirect=True)
async def test_time_that_skips_does_not_stop_at_runs_of_another_version(make_engine: MakeEngine) -> None:
    old, new = sleeper("1", seconds=3600), sleeper("2", seconds=3600)
    async with make_engine(worker=False) as client:
        await client.start(old, "parked", id="old")
    async with make_engine(new) as engine:
        SkippingClock(engine)
        handle = await engine.start(new, "parked", id="new")
        assert await handle.result(timeout=20) == "parked 2"
        assert await engine.handle("wf:sleeper-old").status() == "pending"


async def test_runs_of_a_dead_worker_wait_for_their_version(make_engine: MakeEngine) -> None:
    async with make_engine(first, worker=False) as dead:
        handle = await dead.start(first, 1, id="a")
        assert await dead.store.claim(worker_of(dead).key, ["fulfil@2"], 10) == []
        ((run, _),) = await dead.store.claim(worker_of(dead).key, ["fulfil@1"], 10)
        assert run.run_id == handle.run_id
        async with make_engine(second) as other:
            assert await other.store.bury(await own_row(dead))
            assert await worker_of(other)._claim_all() == SAFETY_POLL_S
            assert await other.handle(handle.run_id).status() == "pending"
        async with make_engine(second, first) as both:
            assert await both.handle(handle.run_id).result() == "first 1 1"


async def test_versions_of_a_workflow_share_the_limits_of_their_queue(make_engine: MakeEngine) -> None:
    async def body(run: keiro.WorkflowRun) -> None: ...

    one = keiro.workflow(name="mails", version="1", pinned=True, queue="mail")(body)
    two = keiro.workflow(name="mails", version="2", pinned=True, queue="mail")(body)
    async with make_engine(one, two, worker=False, queues=[keiro.Queue("mail", concurrency=3)]) as engine:
        for version in (one, two):
            await engine.start_many(version, [()] * 2)
        key, lanes = worker_of(engine).key, ["mails@1", "mails@2"]
        assert set(engine._limits) == set(lanes)
        taken = await engine.store.claim(key, ["mails@2"], 9, {"mails@2": engine._limits["mails@2"]})
        assert [run.version_tag for run, _ in taken] == ["2", "2"]
        taken = await engine.store.claim(key, lanes, 9, engine._limits)
        assert [run.version_tag for run, _ in taken] == ["1"]
        assert await engine.store.claim(key, lanes, 9, engine._limits) == []


async def test_what_is_stuck_behind_runs_of_ones_own_is_told_of_once_these_are_gone(make_engine: MakeEngine) -> None:
    """Only the front of a long queue is looked at."""
    async with make_engine(first, second, worker=False) as engine:
        await engine.start_many(second, [(n,) for n in range(200)], priority=-1)
        await engine.start(first, 1)
        assert await engine.store.unregistered(["fulfil@1", "fulfil@2"]) == []
        found = await engine.store.unregistered(["fulfil@2"])
        assert found in ([], ["fulfil@1"])  # memory holds all it has anyway
        await engine.store.claim(worker_of(engine).key, ["fulfil@2"], 200)
        assert await engine.store.unregistered(["fulfil@2"]) == ["fulfil@1"]
        assert await engine.store.unregistered([]) == ["fulfil"]


def classes() -> Iterator[Any]:
    for version in ("1", "2"):

        class Basket(keiro.WorkflowRun, name="basket_of_versions", version=version, pinned=True):
            async def execute(self) -> str:
                return str(self.info.version_tag)

        yield Basket


async def test_a_class_may_be_pinned(make_engine: MakeEngine) -> None:
    one, two = classes()
    async with make_engine(two, worker=False) as client:
        await client.start(two, id="2")
    async with make_engine(one) as engine:
        assert await engine.execute(one, id="1") == "1"
        assert await engine.handle("wf:basket_of_versions-2").status() == "pending"


def test_what_would_drive_a_run_twice_or_never_is_refused() -> None:
    async def body(run: keiro.WorkflowRun) -> None: ...

    def of(**options: Any) -> Any:
        return keiro.workflow(name="w", **options)(body)

    with pytest.raises(keiro.InvalidCall, match="no version"):
        of(pinned=True)
    with pytest.raises(keiro.InvalidCall, match="True or False"):
        of(version="1", pinned="yes")
    one, two = of(version="1", pinned=True), of(version="2", pinned=True)
    keiro.Engine("memory://", workflows=[one, two, one])
    for clash in ([one, of()], [of(version="2"), one], [one, of(version="1", pinned=True)], [of(), of(version="2")]):
        with pytest.raises(keiro.InvalidCall, match=r"version= and pinned=True"):
            keiro.Engine("memory://", workflows=clash)
    with pytest.raises(keiro.InvalidCall, match="classes"):
        keiro.Engine("memory://", workflows=[*classes()])


async def test_a_version_that_is_not_the_engines_cannot_be_started_on_it(make_engine: MakeEngine) -> None:
    async with make_engine(second) as engine:
        with pytest.raises(keiro.UnknownWorkflow, match="version '1' of workflow 'fulfil'"):
            await engine.start(first, 1)
        assert await engine.store.runs(limit=1) == []


async def look(engine: keiro.Engine) -> None:
    """Everything a pinned worker asks of its store."""
    store, lanes = engine.store, ["fulfil@1", "fulfil@2", "other"]
    assert len(await store.claim(worker_of(engine).key, lanes, 9)) == 5
    assert await store.claim(worker_of(engine).key, lanes, 9) == []
    assert await store.due(lanes) == []
    await store.next_due_ms(lanes)
    assert await store.unregistered(lanes) == ["fulfil@0"]


async def test_a_pinned_claim_does_not_read_a_long_queue_of_another_version_on_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "keiro.db"
    async with keiro.Engine(f"sqlite:///{path}", worker=False) as engine:
        with closing(sqlite3.connect(path)) as filling:
            filling.executemany(
                "INSERT INTO keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " version_tag) VALUES ('wf:fulfil-' || ?1, 'fulfil', ?1, 'pending', 'wf:fulfil-' || ?1, '{}', 1, '0')",
                [(f"d{n}",) for n in range(FOREIGN)],
            )
            filling.execute("INSERT INTO keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro_runs")
            filling.commit()
        for n in range(5):
            await engine.start(second, n, id=str(n))
        connection: sqlite3.Connection = engine.store._conn  # type: ignore[attr-defined]
        sent: list[str] = []
        connection.set_trace_callback(sent.append)
        await look(engine)
        connection.set_trace_callback(None)
        plans = {
            sql: [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
            for sql in sent
            if sql.startswith("SELECT") and "version_tag = '" in sql
        }
    assert len(plans) > 3
    few = ("SCAN CONSTANT ROW", "SCAN q", "SCAN a", "SCAN dues")
    for sql, plan in plans.items():
        assert [step for step in plan if step.startswith("SCAN") and step not in few] == [], f"{sql}\n{plan}"
        used = [
            re.findall(r"INDEX (\w+) \((.*)\)", step) for step in plan if " r USING " in step and "workflow" in step
        ]
        of_versions = [name for found in used for name, by in found if "version_tag=?" in by]
        # Three or fewer queues for each of two versions, each by an index of versions.
        assert len(of_versions) >= 2 and all(name.endswith("_version_idx") for name in of_versions), f"{sql}\n{plan}"
        assert len(of_versions) == sql.count("version_tag = '"), f"{sql}\n{plan}"


def looks_at_versions(plan: dict[str, Any]) -> Iterator[str]:
    """How a plan finds runs of one version."""
    if "version_tag" in str(plan.get("Index Cond", "")) + str(plan.get("Filter", "")):
        yield plan.get("Index Name", plan["Node Type"]) if "Filter" not in plan else f"filter {plan['Filter']}"
    for below in plan.get("Plans", ()):
        yield from looks_at_versions(below)


async def test_a_pinned_claim_does_not_read_a_long_queue_of_another_version_on_postgres(postgres_url: str) -> None:
    async with keiro.Engine(postgres_url, worker=False, migrate=True) as engine:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " version_tag) SELECT 'wf:fulfil-d' || n, 'fulfil', n, 'pending', 'wf:fulfil-d' || n, '{}', 1, '0'"
                f" FROM generate_series(1, {FOREIGN}) n"
            )
            connection.execute(
                "INSERT INTO keiro.keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro.keiro_runs"
            )
            connection.execute("ANALYZE")
            for n in range(5):
                await engine.start(second, n, id=str(n))
            with sent_to(engine) as sent:
                await look(engine)
            connection.execute("SET plan_cache_mode = force_generic_plan")
            plans = {}
            for n, sql in enumerate(dict.fromkeys(sent)):
                if sql.startswith("SELECT") and "version_tag = $" in sql:
                    connection.execute(f"PREPARE p{n} AS {sql}".encode())
                    count = max(int(found) for found in re.findall(r"\$(\d+)", sql))
                    ((found,),) = connection.execute(
                        f"EXPLAIN (FORMAT JSON) EXECUTE p{n}({', '.join(['NULL'] * count)})".encode()
                    )
                    plans[sql] = found[0]["Plan"]
    assert len(plans) > 3
    for sql, plan in plans.items():
        shown = f"{sql}\n{json.dumps(plan, indent=1)}"
        found = list(looks_at_versions(plan))
        assert len(found) == sql.count("version_tag = $"), shown
        assert all(name.endswith("_version_idx") for name in found), shown
        assert set(whole_tables(plan)) <= {"keiro_workers"}, shown
