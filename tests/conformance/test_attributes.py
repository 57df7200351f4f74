"""Attributes: values that runs are found by, set at the start and by the body, once however often it is replayed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

import keiro
from keiro.errors import InvalidCall
from keiro.events import StepRecorded
from keiro.executions import Missing
from tests.conformance.listed import pages
from tests.conformance.retained import execute
from tests.conftest import MakeEngine

sets: list[int] = []


@pytest.fixture(autouse=True)
def _none() -> None:
    sets.clear()


@keiro.workflow
async def tagged(run: keiro.WorkflowRun, region: str) -> None:
    await run.set_attributes(region=region, stage="begun")
    sets.append(1)
    await run.deferred("go", bool).result()
    await run.set_attributes(stage="done", region=None, items=3)


@keiro.workflow
async def plain(run: keiro.WorkflowRun) -> None:
    return None


@keiro.workflow
async def rounds(run: keiro.WorkflowRun, left: int) -> int:
    await run.set_attributes(left=left)
    if left:
        run.continue_as_new(left - 1)
    return left


@keiro.workflow
async def sets_given(run: keiro.WorkflowRun, values: dict[str, Any]) -> str:
    try:
        await run.set_attributes(**values)
    except InvalidCall as error:
        return str(error)
    return "set"


async def with_attributes(engine: keiro.Engine, **attributes: Any) -> list[str]:
    return await pages(engine, attributes=attributes)


async def attributes_of(engine: keiro.Engine, run_id: str) -> dict[str, Any]:
    (seen,) = await engine.executions.observe([run_id])
    assert not isinstance(seen, Missing)
    return seen.execution.attributes


async def test_runs_are_found_by_what_they_were_started_with(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        moment = datetime(2026, 5, 1, 12, tzinfo=UTC)
        await engine.start(plain, id="a", attributes={"customer": "acme", "total": 5, "vip": True, "at": moment})
        await engine.start(plain, id="b", attributes={"customer": "acme", "total": 5.5, "vip": False})
        await engine.start(plain, id="c", attributes={"customer": "acme ", "total": "5"})
        await engine.start(plain, id="d")

        assert await with_attributes(engine, customer="acme") == ["wf:plain-a", "wf:plain-b"]
        assert await with_attributes(engine, customer="acme", total=5.5) == ["wf:plain-b"]
        assert await with_attributes(engine, total=5) == ["wf:plain-a"]
        assert await with_attributes(engine, total=5.0) == ["wf:plain-a"]
        assert await with_attributes(engine, total="5") == ["wf:plain-c"]
        assert await with_attributes(engine, vip=True) == ["wf:plain-a"]
        assert await with_attributes(engine, vip=1) == []
        other_zone = moment.astimezone(timezone(timedelta(hours=3)))
        assert await with_attributes(engine, at=other_zone) == ["wf:plain-a"]
        assert await with_attributes(engine, nothing="acme") == []
        assert await pages(engine, attributes={"customer": "acme"}, newest=True, limit=1) == [
            "wf:plain-b",
            "wf:plain-a",
        ]
        assert await pages(engine, attributes={"customer": "acme"}, id_prefix="wf:plain-b") == ["wf:plain-b"]
        assert await pages(engine, attributes={"customer": "acme"}, status="failed") == []
        assert await attributes_of(engine, "wf:plain-a") == {
            "customer": "acme",
            "total": 5,
            "vip": True,
            "at": "2026-05-01T12:00:00Z",
        }


async def test_many_runs_may_be_started_with_the_same_attributes(make_engine: MakeEngine) -> None:
    async with make_engine(plain) as engine:
        await engine.start_many(plain, [(), ()], ids=["a", "b"], attributes={"batch": 7})
        assert await with_attributes(engine, batch=7) == ["wf:plain-a", "wf:plain-b"]


async def test_a_body_sets_changes_and_takes_away_attributes(make_engine: MakeEngine, either_way: None) -> None:
    async with make_engine(tagged) as engine:
        handle = await engine.start(tagged, "eu", id="a", attributes={"customer": "acme"})
        async with asyncio.timeout(20):
            while not await with_attributes(engine, stage="begun"):
                await asyncio.sleep(0.01)
        assert await with_attributes(engine, region="eu", customer="acme") == [handle.run_id]

        await engine.complete(handle.run_id, "go", True)
        await handle.result()

        assert await attributes_of(engine, handle.run_id) == {"customer": "acme", "stage": "done", "items": 3}
        assert await with_attributes(engine, region="eu") == []
        assert await with_attributes(engine, items=3) == [handle.run_id]


async def test_a_replay_sets_nothing_again(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(tagged) as engine:
        handle = await engine.start(tagged, "eu", id="a")
        async with asyncio.timeout(20):
            while await handle.status() != "suspended":
                await asyncio.sleep(0.01)
    async with make_engine(tagged) as engine:
        await engine.complete(handle.run_id, "go", True)
        await engine.handle(handle.run_id).result()

        steps = [event.step async for event in engine.handle(handle.run_id).events() if isinstance(event, StepRecorded)]
        assert [step for step in steps if step.startswith("attributes:")] == ["attributes:set", "attributes:set#2"]
        assert len(sets) == 2


async def test_the_next_round_begins_with_the_attributes_of_the_one_before(make_engine: MakeEngine) -> None:
    async with make_engine(rounds) as engine:
        handle = await engine.start(rounds, 2, id="a", attributes={"customer": "acme"})
        assert await handle.result() == 0

        assert await with_attributes(engine, customer="acme") == [
            "wf:rounds-a",
            "wf:rounds-a#1",
            "wf:rounds-a#2",
        ]
        assert await with_attributes(engine, left=1) == ["wf:rounds-a#1"]
        assert await with_attributes(engine, customer="acme", left=0) == ["wf:rounds-a#2"]


@pytest.mark.parametrize(
    "attributes",
    [
        ["a"],
        {"": 1},
        {5: 1},
        {"x" * 129: 1},
        {"a": None},
        {"a": [1]},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"a": "x" * 1023},
        {"a": "a\0b"},
        {"a": "\ud800"},
        {str(n): n for n in range(65)},
    ],
    ids=lambda attributes: f"{attributes!r:.24}",
)
async def test_what_is_no_attribute_is_refused_and_nothing_is_started(attributes: Any) -> None:
    async with keiro.Engine("memory://", workflows=[plain]) as engine:
        with pytest.raises(InvalidCall):
            await engine.start(plain, id="a", attributes=attributes)
        assert await engine.runs() == []


async def test_a_body_is_told_what_is_no_attribute(make_engine: MakeEngine) -> None:
    async with make_engine(sets_given) as engine:
        assert "neither text" in await engine.execute(sets_given, {"a": [1]}, id="a")
        assert await engine.execute(sets_given, {"a": None}, id="b") == "set"
        full = {f"n{n}": n for n in range(64)}
        handle = await engine.start(sets_given, {"one more": 1}, id="c", attributes=full)
        assert "more than 64" in await handle.result()
        handle = await engine.start(sets_given, {"n5": "other"}, id="d", attributes=full)
        assert await handle.result() == "set"


async def test_attributes_are_rebuilt_from_the_journal(sql_url: str) -> None:
    async with keiro.Engine(sql_url, workflows=[plain, rounds], migrate=True) as engine:
        await engine.execute(rounds, 1, id="a")
        await engine.start(plain, id="b", attributes={"left": 1})
        before = await with_attributes(engine, left=1)
        schema = "keiro." if sql_url.startswith("postgres") else ""
        execute(sql_url, f"DELETE FROM {schema}keiro_execution_attributes")
        execute(sql_url, f"UPDATE {schema}keiro_runs SET attributes_json = NULL WHERE run_id = 'wf:plain-b'")
        assert await with_attributes(engine, left=1) == []

        assert (await engine.rebuild("runs")).updated == 1
        await engine.rebuild("executions")

        assert await with_attributes(engine, left=1) == before == ["wf:rounds-a", "wf:plain-b"]
        (run,) = await engine.runs(workflow="plain")
        assert run.attributes_json is not None
        assert msgspec.json.decode(run.attributes_json) == {"left": 1}
