"""The listing of executions: pages, cursors, observations and changes (Q1 to Q13)."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

import keiro
from keiro.errors import InvalidCall, InvalidCursor, InvalidOptions, SourceChanged, StoreError
from keiro.events import WorkflowCancelled, WorkflowFailed
from keiro.executions import Missing, Observed, is_newer
from keiro.failures import capture
from keiro.rows import Status
from keiro.stores.listing_sql import SqlListing
from tests.conformance.listed import (
    BASE,
    all_runs,
    change,
    pages,
    populate,
    ranges,
    record,
    reference,
    subsets,
)
from tests.conformance.retained import execute
from tests.conformance.test_ownership import worker_of
from tests.conftest import MakeEngine


@keiro.workflow
async def plain(run: keiro.WorkflowRun, n: int = 0) -> int:
    return n


@keiro.workflow
async def breaks(run: keiro.WorkflowRun, text: str) -> None:
    raise ValueError(text)


async def hold_to_reference(engine: keiro.Engine, number: int) -> None:
    rng = random.Random(number)
    await populate(engine, number)
    runs = await all_runs(engine)
    for filters in subsets(runs, rng):
        for bounds in ranges(rng, number // 3):
            newest = rng.random() < 0.3
            wanted = reference(runs, newest=newest, **filters, **bounds)
            # Pages of all lengths, and few of them: the longer the list, the longer the pages.
            limit = min(200, max(1, len(wanted) // rng.randrange(1, 6) + rng.randrange(3)))
            assert await pages(engine, **filters, **bounds, newest=newest, limit=limit) == wanted


@pytest.mark.parametrize("number", [100, 1000])
async def test_q1_every_subset_of_filters_pages_exactly_the_reference(make_engine: MakeEngine, number: int) -> None:
    async with make_engine(worker=False) as engine:
        await hold_to_reference(engine, number)


@pytest.mark.soak
async def test_q1_every_subset_of_filters_pages_exactly_the_reference_of_5000(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await hold_to_reference(engine, 5000)


async def test_q1_times_may_be_datetimes_and_both_bounds_are_inclusive(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 60)
        at = BASE + 7
        moment = datetime.fromtimestamp(at / 1000, UTC)

        found = await pages(engine, created_after=moment, created_before=moment)

        assert found == reference(await all_runs(engine), created_after=at, created_before=at) != []


def sqlite_of(engine: keiro.Engine) -> sqlite3.Connection:
    connection: sqlite3.Connection = engine.store._conn  # type: ignore[attr-defined]
    return connection


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The rows that are decoded from here on."""
    decoded: list[object] = []
    decode = SqlListing._execution

    def counting(self: SqlListing, row: Any) -> Any:
        decoded.append(row)
        return decode(self, row)

    monkeypatch.setattr(SqlListing, "_execution", counting)
    return decoded


async def test_q2_a_page_is_one_statement_over_the_index_of_its_filters_on_sqlite(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", worker=False) as engine:
        await populate(engine, 300)
        runs = await all_runs(engine)
        await engine.executions.list()
        connection = sqlite_of(engine)
        decoded = count_decoded(monkeypatch)
        for mask, filters in enumerate(subsets(runs, random.Random(1))):
            for bounds in ({}, {"created_after": BASE, "created_before": BASE + 90}, {"newest": True}):
                cursor = None
                for _ in range(2):
                    decoded.clear()
                    sent: list[str] = []
                    connection.set_trace_callback(sent.append)
                    page = await engine.executions.list(**filters, **bounds, limit=2, cursor=cursor)
                    connection.set_trace_callback(None)
                    assert len(sent) == 1
                    assert len(decoded) <= 3
                    plan = [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sent[0]}")]
                    told = "\n".join(plan)
                    assert f"INDEX keiro_executions_listing_{mask} " in f"{told} ".replace("\n", " "), told
                    assert "TEMP B-TREE" not in told, told
                    kind = "SEARCH" if mask or bounds.get("created_after") or cursor else "SCAN"
                    assert any(step.startswith(f"{kind} e USING INDEX") for step in plan), told
                    cursor = page.cursor
                    if cursor is None:
                        break


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for below in plan.get("Plans", ()) for node in nodes(below))]


async def test_q2_a_page_is_one_statement_over_the_index_of_its_filters_on_postgres(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keiro.Engine(postgres_url, worker=False, migrate=True) as engine:
        await populate(engine, 1500)
        runs = await all_runs(engine)
        await engine.executions.list()
        decoded = count_decoded(monkeypatch)
        store: Any = engine.store
        sent: list[tuple[str, Any]] = []
        send = store._reader.pipeline

        async def listening(statements: Any) -> Any:
            sent.extend(statements)
            return await send(statements)

        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("ANALYZE keiro.keiro_executions")
            for mask, filters in enumerate(subsets(runs, random.Random(1))):
                for bounds in ({}, {"created_after": BASE, "created_before": BASE + 400}, {"newest": True}):
                    cursor = None
                    for _ in range(2):
                        sent.clear()
                        decoded.clear()
                        store._reader.pipeline = listening
                        page = await engine.executions.list(**filters, **bounds, limit=2, cursor=cursor)
                        del store._reader.pipeline
                        (statement,) = [one for one in sent if one[0].startswith("SELECT")]
                        assert len(sent) <= 4
                        assert len(decoded) <= 3
                        text, values = statement
                        literal = await _explained(connection, text, values)
                        found = nodes(literal)
                        assert not [node for node in found if "Sort" in node["Node Type"]], literal
                        of_rows = [node for node in found if node.get("Alias") == "e"]
                        assert [node["Index Name"] for node in of_rows] == [f"keiro_executions_listing_{mask}"], literal
                        cursor = page.cursor
                        if cursor is None:
                            break


async def _explained(connection: psycopg.Connection[Any], text: str, values: Any) -> dict[str, Any]:
    """The plan that a prepared statement has for any values."""
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute(f"PREPARE asked AS {text}".encode())
    literal = ", ".join(psycopg.sql.Literal(str(value)).as_string(connection) for value in values)
    row = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE asked({literal})".encode()).fetchone()
    connection.execute("DEALLOCATE asked")
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


async def test_q3_what_comes_before_the_cursor_is_missed_and_what_comes_behind_it_is_seen(
    make_engine: MakeEngine,
) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 90)
        first = await engine.executions.list(limit=30, waiting=None)
        last = first.items[-1]

        await populate(engine, 60, seed=1)
        rng = random.Random(5)
        for run in await all_runs(engine):
            if run.status == Status.PENDING and rng.random() < 0.5:
                await record(engine, run.run_id, change(rng), BASE + 100)
        await engine.gc(0)
        rest = await engine.executions.list(limit=200, waiting=None, cursor=first.cursor)

        runs = await all_runs(engine)
        behind = [
            run for run in runs if (run.created_at_ms, run.run_id.encode()) > (last.created_at_ms, last.run_id.encode())
        ]
        assert [row.run_id for row in rest.items] == reference(behind, waiting=None)
        assert len(rest.items) > 1


async def test_q3_the_listing_stays_the_reference_while_runs_come_change_and_go(make_engine: MakeEngine) -> None:
    rng = random.Random(11)
    async with make_engine(worker=False) as engine:
        for seed in range(4):
            await populate(engine, 40, seed=seed)
            for run in await all_runs(engine):
                if not run.terminal and run.status != Status.RUNNING and rng.random() < 0.3:
                    await record(engine, run.run_id, change(rng), BASE + 100 + seed)
            if seed % 2:
                await engine.gc(0)
            runs = await all_runs(engine)
            for filters in subsets(runs, rng):
                assert await pages(engine, **filters, limit=25) == reference(runs, **filters)


async def test_q3_a_claim_and_a_release_are_seen_although_no_event_tells_of_them(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        handle = await engine.start(plain, id="one")
        assert await pages(engine, status="pending") == [handle.run_id]

        [(run, _)] = await engine.store.claim(worker_of(engine).key, ["plain"], 5)
        assert (await pages(engine, status="running"), await pages(engine, status="pending")) == ([handle.run_id], [])

        await engine.store.release(worker_of(engine).key, [run.run_key])
        assert (await pages(engine, status="running"), await pages(engine, status="pending")) == ([], [handle.run_id])


async def test_who_writes_reads_its_own_writes(make_engine: MakeEngine) -> None:
    async with make_engine(plain, breaks) as engine:
        for n in range(20):
            handle = await engine.start(plain, n, id=f"n{n}")
            assert handle.run_id in await pages(engine, workflow="plain")
            await handle.result()
            assert handle.run_id in await pages(engine, status="completed")


async def test_two_engines_on_one_store_list_the_same(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as one, make_engine(worker=False) as other:
        await asyncio.gather(populate(one, 60), populate(other, 60, seed=1))

        listed, again = await asyncio.gather(pages(one, limit=11), pages(other, limit=13))

        assert listed == again == reference(await all_runs(one))


async def a_cursor(engine: keiro.Engine, **options: Any) -> str:
    page = await engine.executions.list(**options, limit=5)
    assert page.cursor is not None
    return page.cursor


async def test_q4_a_cursor_may_be_padded_up_to_its_longest(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 20)
        cursor = await a_cursor(engine)
        wanted = (await engine.executions.list(cursor=cursor)).items

        for length in (65_535, 65_536):
            assert (await engine.executions.list(cursor=cursor.ljust(length))).items == wanted
        with pytest.raises(InvalidCursor, match="longer than 65536"):
            await engine.executions.list(cursor=cursor.ljust(65_537))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cursor: "",
        lambda cursor: "100",
        lambda cursor: cursor[:-1],
        lambda cursor: cursor + "x",
        lambda cursor: json.dumps([cursor]),
        lambda cursor: json.dumps({**json.loads(cursor), "version": 2}),
        lambda cursor: json.dumps({**json.loads(cursor), "more": 1}),
        lambda cursor: json.dumps({**json.loads(cursor), "created_at_ms": "1"}),
        lambda cursor: json.dumps({**json.loads(cursor), "created_at_ms": -1}),
        lambda cursor: json.dumps({**json.loads(cursor), "run_id": ""}),
        lambda cursor: json.dumps({"version": 1}),
        lambda cursor: 5,
        lambda cursor: b"{}",
    ],
    ids=(
        "empty",
        "number",
        "cut",
        "longer",
        "listed",
        "version",
        "more",
        "type",
        "negative",
        "nowhere",
        "little",
        "integer",
        "bytes",
    ),
)
async def test_q4_what_is_no_cursor_is_refused(spoil: Callable[[str], Any]) -> None:
    async with keiro.Engine("memory://", worker=False) as engine:
        await populate(engine, 20)
        cursor = await a_cursor(engine)
        with pytest.raises(InvalidCursor) as refused:
            await engine.executions.list(cursor=spoil(cursor))
        assert refused.value.code == "invalid_cursor"


async def test_q4_a_cursor_belongs_to_its_options_whatever_their_order_and_its_length(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 120)
        cursor = await a_cursor(engine, workflow="alpha", parent=None)

        page = await engine.executions.list(parent=None, workflow="alpha", cursor=cursor, limit=9)

        assert len(page.items) == 9
        others: list[dict[str, Any]] = [
            {},
            {"workflow": "alpha"},
            {"workflow": "beta", "parent": None},
            {"workflow": "alpha", "parent": "wf:alpha-x"},
            {"workflow": "alpha", "parent": None, "waiting": None},
            {"workflow": "alpha", "parent": None, "created_after": 0},
            {"workflow": "alpha", "parent": None, "newest": True},
            {"workflow": "alpha", "parent": None, "id_prefix": "wf:"},
            {"workflow": "alpha", "parent": None, "attributes": {"a": 1}},
        ]
        for options in others:
            with pytest.raises(InvalidCursor, match="other options"):
                await engine.executions.list(**options, cursor=cursor)


async def test_q4_a_cursor_of_another_database_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine, keiro.Engine("memory://", worker=False) as other:
        await populate(engine, 20)
        await populate(other, 20)
        with pytest.raises(SourceChanged) as refused:
            await engine.executions.list(cursor=await a_cursor(other))
        assert refused.value.code == "source_changed"


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": 201},
        {"limit": 1.5},
        {"limit": True},
        {"limit": "5"},
        {"offset": 5},
        {"run_id": "x"},
        {"newest": 1},
        {"status": "waiting"},
        {"status": None},
        {"workflow": None},
        {"workflow": 5},
        {"workflow": ""},
        {"lineage": None},
        {"parent": 5},
        {"waiting": "a\0b"},
        {"lineage": "x" * 1025},
        {"created_after": 1.5},
        {"created_after": -1},
        {"created_before": 2**53},
        {"created_before": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"attributes": ["a"]},
        {"attributes": {"a": None}},
        {"attributes": {"a": [1]}},
        {"id_prefix": ""},
        {"failure": " - "},
    ],
    ids=str,
)
async def test_q5_options_it_does_not_have_are_refused(options: dict[str, Any]) -> None:
    async with keiro.Engine("memory://", worker=False) as engine:
        with pytest.raises(InvalidOptions) as refused:
            await engine.executions.list(**options)
        assert refused.value.code == "invalid_options"
        assert isinstance(refused.value, InvalidCall)


async def test_q5_pages_may_be_of_1_to_200_runs(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 230)
        sizes = [len((await engine.executions.list(limit=limit)).items) for limit in (1, 200)]
        assert [*sizes, len((await engine.executions.list()).items)] == [1, 200, 100]


async def test_q6_an_error_of_the_store_is_told_and_leaves_nothing_open(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], migrate=True) as engine:
        await populate(engine, 20)
        await engine.executions.list()
        schema = "keiro." if sql_url.startswith("postgres") else ""
        await asyncio.to_thread(execute, sql_url, f"ALTER TABLE {schema}keiro_executions RENAME TO away")

        with pytest.raises(StoreError):
            await engine.executions.list()

        assert await engine.execute(plain, 5) == 5
        await asyncio.to_thread(execute, sql_url, f"ALTER TABLE {schema}away RENAME TO keiro_executions")
        assert await pages(engine) == reference(await all_runs(engine))


async def test_q6_an_interrupted_listing_leaves_nothing_open(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 150)
        for turns in range(8):
            await populate(engine, 10, seed=turns + 1)
            asked = asyncio.ensure_future(pages(engine, limit=7))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.cancel()
            with suppress(asyncio.CancelledError):  # where it had not come to its end
                await asked

        assert await pages(engine, limit=50) == reference(await all_runs(engine))


async def test_q7_observations_keep_order_and_duplicates_and_tell_what_was_deleted(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        for name in ("a", "b"):
            await engine.execute(plain, id=name)
        stays = await engine.start(plain, id="c", delay=3600)
        await engine.executions.list()
        await engine.gc(0)

        names = ["wf:plain-c", "wf:plain-a", "wf:plain-never", "wf:plain-c", "wf:plain-b"]
        seen = await engine.executions.observe(names)

        assert [one.run_id for one in seen] == names
        assert [one.deleted if isinstance(one, Missing) else None for one in seen] == [None, True, False, None, True]
        assert isinstance(seen[0], Observed)
        assert (seen[0], seen[0].execution.run_id) == (seen[3], stays.run_id)
        assert len({one.source for one in seen}) == 1


async def test_q7_a_run_that_came_and_went_before_anybody_listed_it_was_deleted(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        await engine.execute(plain, id="short")
        await engine.gc(0)
        (seen,) = await engine.executions.observe(["wf:plain-short"])
        assert isinstance(seen, Missing)
        assert seen.deleted

        await engine.execute(plain, id="short")
        (again,) = await engine.executions.observe(["wf:plain-short"])
        assert isinstance(again, Observed)
        assert is_newer(again, seen)


async def test_q7_at_most_200_runs_are_observed_at_once(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        assert len(await engine.executions.observe(["wf:plain-a"] * 200)) == 200
        assert await engine.executions.observe([]) == ()
        for bad in (["wf:plain-a"] * 201, "wf:plain-a", 5, [5], [""], ["x" * 1025]):
            with pytest.raises(InvalidOptions):
                await engine.executions.observe(bad)  # type: ignore[arg-type]


async def test_q8_an_observation_is_one_statement(sql_url: str) -> None:
    """So all of it is of one moment, whatever a peer commits meanwhile."""
    async with keiro.Engine(sql_url, worker=False, migrate=True) as engine:
        names = await populate(engine, 30)
        await engine.executions.list()
        sent: list[Any] = []
        query = engine.store.query  # type: ignore[attr-defined]

        async def listening(program: Any) -> Any:
            def watched() -> Any:
                running = program()
                statements = next(running)
                while True:
                    sent.extend(statements)
                    try:
                        statements = running.send((yield statements))
                    except StopIteration as stop:
                        return stop.value

            return await query(watched)

        engine.store.query = listening  # type: ignore[attr-defined]
        await engine.executions.observe(names)
        await engine.executions.list(limit=7)
        await engine.executions.changes_since(3)
        assert len(sent) == 3


async def test_q9_an_older_end_is_not_newer_than_the_resurrection(make_engine: MakeEngine) -> None:
    async with make_engine(breaks, worker=False) as engine, keiro.Engine("memory://", worker=False) as other:
        name = (await engine.start(breaks, "x", id="a")).run_id
        await record(engine, name, WorkflowFailed(failure=capture(ValueError("x"))), engine.wall_ms())
        (ended,) = await engine.executions.observe([name])
        await engine.resurrect(name)
        (going,) = await engine.executions.observe([name])

        assert isinstance(ended, Observed) and ended.execution.status == "failed"
        assert isinstance(going, Observed) and going.execution.status == "pending"
        assert (is_newer(going, ended), is_newer(ended, going), is_newer(going, going)) == (True, False, False)

        await other.start(breaks, "x", id="a")
        (elsewhere,) = await other.executions.observe([name])
        assert (is_newer(elsewhere, ended), is_newer(ended, elsewhere)) == (False, False)


async def test_q10_changes_are_told_once_a_run_in_order_and_in_pages(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        names = await populate(engine, 50)
        page = await engine.executions.list(limit=1)
        nothing = await engine.executions.changes_since(page.revision, source=page.source)
        assert (nothing.items, nothing.revision, nothing.more) == ((), page.revision, False)

        everything = await engine.executions.changes_since()
        assert {one.run_id for one in everything.items} == set(names)
        revisions = [one.revision for one in everything.items]
        assert revisions == sorted(set(revisions))

        found: list[str] = []
        revision = 0
        while True:
            some = await engine.executions.changes_since(revision, source=page.source, limit=7)
            assert len(some.items) <= 7
            found += [one.run_id for one in some.items]
            revision = some.revision
            if not some.more:
                break
        assert found == [one.run_id for one in everything.items]


async def test_q10_a_run_that_changes_again_is_told_again_as_it_is(make_engine: MakeEngine) -> None:
    async with make_engine(plain, worker=False) as engine:
        one = (await engine.start(plain, id="one")).run_id
        other = (await engine.start(plain, id="other")).run_id
        before = await engine.executions.changes_since()
        assert sorted(change.run_id for change in before.items) == [one, other]

        await engine.cancel(one)
        after = await engine.executions.changes_since(before.revision, source=before.source)

        (change_,) = after.items
        assert isinstance(change_, Observed)
        assert (change_.run_id, change_.execution.status) == (one, "cancelled")


async def test_q10_what_was_deleted_stays_known_after_the_store_was_closed(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        await engine.execute(plain, id="gone")
        await engine.execute(plain, id="gone2")
        before = await engine.executions.changes_since()
        await engine.gc(0)
        await engine.executions.list()
    async with make_engine(plain) as engine:
        after = await engine.executions.changes_since(before.revision, source=before.source)

        assert [(one.run_id, isinstance(one, Missing) and one.deleted) for one in after.items] == [
            ("wf:plain-gone", True),
            ("wf:plain-gone2", True),
        ]
        everything = await engine.executions.changes_since()
        assert {one.run_id for one in everything.items} >= {"wf:plain-gone", "wf:plain-gone2"}


async def test_q10_a_revision_of_elsewhere_or_of_the_future_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 5)
        page = await engine.executions.list()
        with pytest.raises(SourceChanged, match="another database"):
            await engine.executions.changes_since(1, source="0" * 32)
        with pytest.raises(SourceChanged, match="was set back"):
            await engine.executions.changes_since(page.revision + 1)
        for options in ({"limit": 0}, {"limit": 1001}, {"revision": -1}, {"revision": 1.0}, {"source": 5}):
            with pytest.raises(InvalidOptions):
                await engine.executions.changes_since(**options)  # type: ignore[arg-type]


async def test_q11_without_numbers_nothing_is_listed_and_nothing_written(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], migrate=True) as engine:
        await populate(engine, 10)
        schema = "keiro." if sql_url.startswith("postgres") else ""
        ((source, revision),) = execute(sql_url, f"SELECT source, revision FROM {schema}keiro_run_source")
        execute(sql_url, f"DELETE FROM {schema}keiro_run_source")

        with pytest.raises(StoreError, match="keiro_run_source has no row"):
            await engine.executions.list()

        assert await engine.execute(plain, 5) == 5  # only the listing stands still
        execute(
            sql_url,
            f"INSERT INTO {schema}keiro_run_source (one, source, revision) VALUES (1, '{source}', {revision})",
        )
        assert await pages(engine) == reference(await all_runs(engine))


async def test_q12_the_parent_is_that_of_the_row_and_follows_it(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], worker=False, migrate=True) as engine:
        above = (await engine.start(plain, id="above")).run_id
        below = (await engine.start(plain, id="below")).run_id
        assert await pages(engine, parent=None) == [above, below]

        schema = "keiro." if sql_url.startswith("postgres") else ""
        execute(sql_url, f"UPDATE {schema}keiro_runs SET parent_run_id = '{above}' WHERE run_id = '{below}'")

        assert await pages(engine, parent=above) == [below]
        assert await pages(engine, parent=None) == [above]


@keiro.workflow
async def has_children(run: keiro.WorkflowRun, number: int) -> None:
    for n in range(number):
        await run.spawn(waits, id=f"{run.key}-{n}")
    await run.deferred("said").result()


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> None:
    await run.deferred("said").result()


async def test_q12_a_run_that_was_started_alone_is_below_the_first_run_it_is_linked_to(make_engine: MakeEngine) -> None:
    async def parent_of(engine: keiro.Engine, run_id: str) -> str | None:
        (seen,) = await engine.executions.observe([run_id])
        assert isinstance(seen, Observed)
        parent = seen.execution.execution_parent_id
        assert run_id in [one.run_id for one in (await engine.executions.list(parent=parent)).items]
        return parent

    async with make_engine(waits, has_children) as engine:
        await engine.start_many(waits, [()] * 4, ids=["a", "b", "c", "d"])
        await engine.start(has_children, 1, id="p")
        await engine.run_parents.link("wf:waits-a", "wf:waits-b")
        assert await parent_of(engine, "wf:waits-a") == "wf:waits-b"
        await engine.run_parents.link("wf:waits-a", "wf:waits-c")
        assert await parent_of(engine, "wf:waits-a") == "wf:waits-b"
        await engine.run_parents.unlink("wf:waits-a", "wf:waits-b")
        assert await parent_of(engine, "wf:waits-a") == "wf:waits-c"
        assert (await engine.rebuild("executions")).differences == 0
        # With its parent the edge goes.
        await engine.complete("wf:waits-c", "said", None)
        await engine.handle("wf:waits-c").result()
        await engine.gc(older_than=0)
        assert await parent_of(engine, "wf:waits-a") is None

        while await engine.store.run("wf:waits-p-0") is None:
            await asyncio.sleep(0.002)
        await engine.run_parents.link("wf:waits-p-0", "wf:waits-b")
        assert await parent_of(engine, "wf:waits-p-0") == "wf:has_children-p"
        assert (await engine.rebuild("executions")).differences == 0


async def test_a_child_is_listed_for_its_start_and_marked_for_nothing_more(
    sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that writers do not pay for the edges of their children."""
    monkeypatch.setattr("keiro.lister.Lister.start", lambda self: None)
    async with keiro.Engine(sql_url, workflows=[waits, has_children], migrate=True) as engine:
        await engine.start(has_children, 20, id="p")
        while await engine.store.run("wf:waits-p-19") is None:
            await asyncio.sleep(0.002)
        marks = "keiro.keiro_execution_marks" if sql_url.startswith("postgres") else "keiro_execution_marks"
        marked = [name for (name,) in execute(sql_url, f"SELECT run_id FROM {marks}")]
        assert [name for name in marked if name.startswith("wf:waits-p-")] == []
        await engine.run_parents.link("wf:has_children-p", (await engine.start(waits, id="above")).run_id)
        assert "wf:has_children-p" in [name for (name,) in execute(sql_url, f"SELECT run_id FROM {marks}")]


async def test_q13_time_and_id_of_a_listed_run_never_change(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], worker=False, migrate=True) as engine:
        await engine.start(plain, id="one")
        await engine.executions.list()
        table = "keiro.keiro_executions" if sql_url.startswith("postgres") else "keiro_executions"
        for change_ in ("created_at_ms = created_at_ms + 1", "run_id = 'wf:plain-two'"):
            with pytest.raises((sqlite3.IntegrityError, psycopg.errors.RestrictViolation), match="never change"):
                execute(sql_url, f"UPDATE {table} SET {change_}")
        execute(sql_url, f"UPDATE {table} SET attempts = 3")


async def test_r11_times_of_a_listed_run_are_checked(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], worker=False, migrate=True) as engine:
        await engine.start(plain, id="one")
        await engine.executions.list()
        table = "keiro.keiro_executions" if sql_url.startswith("postgres") else "keiro_executions"
        for column in ("started_at_ms", "finished_at_ms", "next_attempt_at_ms", "wake_at_ms", "cancel_requested_at_ms"):
            for value in ("-1", "9007199254740992"):
                with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
                    execute(sql_url, f"UPDATE {table} SET {column} = {value}")
        with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
            execute(sql_url, f"UPDATE {table} SET status = 'waiting'")


async def test_a_prefix_finds_runs_by_their_ids(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 120)
        runs = await all_runs(engine)
        for prefix in ("wf:", "wf:alpha-", "wf:beta-é", "wf:gamma-\U0001d4b3", "wf:alpha-z0.1", "x"):
            for filters in ({}, {"status": "failed"}, {"parent": None, "waiting": None}):
                wanted = [name for name in reference(runs, **filters) if name.startswith(prefix)]
                assert await pages(engine, id_prefix=prefix, **filters, limit=7) == wanted


async def test_a_prefix_that_many_have_is_looked_up_in_the_order_of_the_listing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keiro.stores.listing_sql.FEW", 10)
    async with make_engine(worker=False) as engine:
        await populate(engine, 120)
        wanted = [name for name in reference(await all_runs(engine)) if name.startswith("wf:alpha-")]
        assert await pages(engine, id_prefix="wf:alpha-", limit=7) == wanted


async def test_failures_are_found_by_their_words(make_engine: MakeEngine) -> None:
    async with make_engine(breaks, worker=False) as engine:
        names = [
            (await engine.start(breaks, text, id=f"n{n}")).run_id
            for n, text in enumerate(
                ("the card was declined", "Card expired: ORDER-17", "no such SKU", "declined card")
            )
        ]
        texts = ("the card was declined", "Card expired: ORDER-17", "no such SKU", "declined card")
        for name, text in zip(names, texts, strict=True):
            await record(engine, name, WorkflowFailed(failure=capture(ValueError(text))), engine.wall_ms())

        async def found(text: str, **options: Any) -> list[int]:
            listed = await pages(engine, failure=text, limit=1, **options)
            return [names.index(one) for one in listed]

        assert await found("card") == [0, 1, 3]
        assert await found("CARD declined") == [0, 3]
        assert await found("declined card", newest=True) == [3, 0]
        assert await found("order-17") == [1]
        assert await found("valueerror") == [0, 1, 2, 3]
        assert await found("car") == []
        assert await found("card", status="completed") == []
        assert (await engine.executions.counts(failure="card"))[Status.FAILED] == 3

        await engine.resurrect(names[0])
        assert await found("card") == [1, 3]
        row = (await engine.executions.list(failure="sku")).items[0]
        assert row.failure == "ValueError: no such SKU"


async def test_counts_are_those_of_the_reference(make_engine: MakeEngine) -> None:
    rng = random.Random(3)
    async with make_engine(worker=False) as engine:
        await populate(engine, 150)
        for seed in (1, 2):
            runs = await all_runs(engine)
            for filters in subsets(runs, rng):
                for bounds in ranges(rng, 50):
                    wanted = set(reference(runs, **filters, **bounds))
                    counts = dict.fromkeys(Status, 0)
                    for run in runs:
                        counts[Status(run.status)] += run.run_id in wanted
                    assert await engine.executions.counts(**filters, **bounds) == counts  # type: ignore[arg-type]
            await populate(engine, 20, seed=seed)
            await engine.gc(0)


async def test_a_rebuild_changes_nothing_of_what_was_kept(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 200)
        await engine.gc(0)
        await engine.executions.list()
        before = await engine.executions.changes_since()

        report = await engine.rebuild("executions")

        assert (report.differences, report.verified) == (0, len(await all_runs(engine)))
        assert await engine.executions.changes_since() == before


async def test_a_rebuild_mends_what_was_changed_behind_the_back_of_the_listing(sql_url: str) -> None:
    async with keiro.Engine(sql_url, worker=False, migrate=True) as engine:
        await populate(engine, 100)
        runs = await all_runs(engine)
        failed = await pages(engine, failure="declined")
        counts = await engine.executions.counts()
        schema = "keiro." if sql_url.startswith("postgres") else ""
        gone, ghost, wrong = (run.run_id for run in runs[:3])
        execute(
            sql_url,
            f"DELETE FROM {schema}keiro_executions WHERE run_id = '{gone}'",
            f"DELETE FROM {schema}keiro_execution_words",
            f"DELETE FROM {schema}keiro_execution_counts",
            f"UPDATE {schema}keiro_executions SET waiting_reason = 'nothing', attempts = 7 WHERE run_id = '{wrong}'",
            f"INSERT INTO {schema}keiro_executions (run_id, status, execution_flow, execution_lineage, round_ordinal,"
            f" attempts, created_at_ms) VALUES ('wf:ghost-1', 'failed', 'ghost', '{ghost}', 0, 0, 5)",
        )

        report = await engine.rebuild("executions")

        assert (report.inserted, report.updated, report.deleted) == (1, 1, 1)
        assert await pages(engine) == reference(runs)
        assert await pages(engine, failure="declined") == failed != []
        assert await engine.executions.counts() == counts
        assert (await engine.rebuild("executions")).differences == 0


async def test_rows_are_those_of_the_runs_column_by_column(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        await populate(engine, 100)
        runs = {run.run_id: run for run in await all_runs(engine)}
        for row in (await engine.executions.list(limit=200)).items:
            run = runs[row.run_id]
            assert (row.workflow, row.key, row.execution_lineage) == (run.workflow, run.key, run.lineage_id)
            for name in ("status", "round_ordinal", "attempts", "started_at_ms", "finished_at_ms", "wake_at_ms"):
                assert getattr(row, name) == getattr(run, name)
            assert (row.waiting_reason, row.waiting_token) == (run.waiting_reason, run.waiting_token)


async def test_a_listing_that_was_never_followed_is_built_from_the_whole_journal(sql_url: str) -> None:
    """As in a database that was made before there was a listing."""
    async with keiro.Engine(sql_url, worker=False, migrate=True) as engine:
        await populate(engine, 50)
    schema = "keiro." if sql_url.startswith("postgres") else ""
    execute(
        sql_url,
        f"DELETE FROM {schema}keiro_executions",
        f"DELETE FROM {schema}keiro_execution_counts",
        f"DELETE FROM {schema}keiro_execution_marks",
        f"DELETE FROM {schema}keiro_projection_tracking",
    )
    async with keiro.Engine(sql_url, worker=False, migrate=True) as engine:
        assert await pages(engine) == reference(await all_runs(engine))


async def test_rows_follow_although_nobody_asks(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], migrate=True) as engine:
        await engine.execute(plain, id="one")
        schema = "keiro." if sql_url.startswith("postgres") else ""
        async with asyncio.timeout(10):
            while not execute(sql_url, f"SELECT 1 FROM {schema}keiro_executions WHERE status = 'completed'"):
                await asyncio.sleep(0.01)


async def test_cancelled_children_are_listed_below_their_parent(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        names = await populate(engine, 40)
        runs = {run.run_id: run for run in await all_runs(engine)}
        parent = next(run.parent_run_id for run in runs.values() if run.parent_run_id and not run.round_ordinal)
        below = [run for run in runs.values() if run.parent_run_id == parent and not run.terminal]
        for run in below:
            if run.status != Status.RUNNING:
                await record(engine, run.run_id, WorkflowCancelled(), engine.wall_ms())
        assert await pages(engine, parent=parent) == reference(await all_runs(engine), parent=parent)
        assert names


async def test_a_follower_that_is_refused_by_its_store_goes_on_later(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain], migrate=True) as engine:
        schema = "keiro." if sql_url.startswith("postgres") else ""
        await asyncio.to_thread(execute, sql_url, f"ALTER TABLE {schema}keiro_execution_counts RENAME TO away")
        await engine.execute(plain, id="one")
        with pytest.raises(StoreError):
            await engine.executions.list()
        await asyncio.to_thread(execute, sql_url, f"ALTER TABLE {schema}away RENAME TO keiro_execution_counts")
        assert [one.run_id for one in (await engine.executions.list()).items] == ["wf:plain-one"]
