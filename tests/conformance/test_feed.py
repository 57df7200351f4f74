"""`engine.events.follow`: what was recorded, in order and once, and then what comes."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import keiro
import keiro.feed
from keiro.errors import InvalidCall, SourceChanged
from keiro.events import StepRecorded, WorkflowCompleted, WorkflowStarted
from tests.conftest import MakeEngine


@keiro.step
async def note(n: int) -> int:
    return n


@keiro.workflow
async def steps(run: keiro.WorkflowRun, number: int) -> int:
    for n in range(number):
        await run.step(note, n)
    return number


@keiro.workflow
async def turns(run: keiro.WorkflowRun, n: int = 0) -> int:
    await run.step(note, n)
    if n < 3:
        run.continue_as_new(n + 1)
    return int(await run.deferred("said", int).result())


class Box(keiro.WorkflowRun, name="box"):
    items: int = 0

    @keiro.event("Put")
    def put(self) -> None:
        self.items += 1

    async def execute(self) -> int:
        await self.until(lambda: self.items >= 2)
        return self.items


WORKFLOWS = [steps, turns, Box]


async def whole(engine: keiro.Engine) -> list[tuple[int, str, int, str]]:
    """The journal as the store has it."""
    return [(row.position, row.run_id, row.version, row.topic) for row in await engine.store.read(0, 100_000)]


def told(entry: keiro.JournalEntry) -> tuple[int, str, int, str]:
    return entry.position, entry.run_id, entry.version, entry.event.TOPIC


async def until_ended(engine: keiro.Engine, found: list[Any], runs: int, **options: Any) -> None:
    """Follow until so many runs have completed."""
    feed = engine.events.follow(**options)
    async for entry in feed:
        found.append(told(entry))
        runs -= isinstance(entry.event, WorkflowCompleted)
        if not runs:
            break
    await feed.aclose()


async def test_events_come_in_order_and_once_those_of_before_and_those_of_now(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keiro.feed.BATCH", 7)
    async with make_engine(*WORKFLOWS) as engine:
        await asyncio.gather(*(engine.execute(steps, 3) for _ in range(10)))
        found: list[Any] = []
        following = asyncio.create_task(until_ended(engine, found, 30))
        await asyncio.gather(*(engine.execute(steps, 3) for _ in range(10)))
        while len(found) < 60:
            await asyncio.sleep(0.002)
        await asyncio.gather(*(engine.execute(steps, 3) for _ in range(10)))
        await following

        journal = await whole(engine)
        assert found == journal[: len(found)] and len(found) == 150
        assert [position for position, *_ in journal] == sorted({position for position, *_ in journal})
        again = [told(entry) async for entry in engine.events.follow(after=found[69][0], live=False)]
        assert again == journal[70:]
        assert await engine.events.last() == journal[-1][0]


async def test_what_other_processes_record_comes_too(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS, worker=False) as reader, make_engine(*WORKFLOWS) as one:
        found: list[Any] = []
        following = asyncio.create_task(until_ended(reader, found, 40))
        async with make_engine(*WORKFLOWS) as other:
            await asyncio.gather(*(engine.execute(steps, 3) for _ in range(20) for engine in (one, other)))
            await following
            assert found == (await whole(one))[: len(found)]


async def test_types_and_runs_are_filtered(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keiro.feed.STRETCH", 5)
    async with make_engine(*WORKFLOWS) as engine:
        await asyncio.gather(*(engine.execute(steps, 3, id=f"{n}") for n in range(5)))
        box = await engine.start(Box, id="b")
        await engine.command(box.run_id, Box.put)
        await engine.command(box.run_id, Box.put)
        await box.result()
        journal = await whole(engine)

        async def got(**options: Any) -> list[Any]:
            return [told(entry) async for entry in engine.events.follow(live=False, **options)]

        wanted = [row for row in journal if row[3] in ("StepRecorded", "box:Put")]
        assert await got(types=[StepRecorded, "box:Put"]) == wanted
        assert await got(types=["box:Put"]) == [row for row in journal if row[3] == "box:Put"] != []
        assert await got(types=[]) == []
        assert await got(run="wf:steps-3") == [row for row in journal if row[1] == "wf:steps-3"]
        middle = journal[len(journal) // 2][0]
        assert await got(run="wf:steps-3", types=["StepRecorded"], after=middle) == [
            row for row in journal if row[1:4:2] == ("wf:steps-3", "StepRecorded") and row[0] > middle
        ]


async def test_a_run_is_followed_through_its_rounds(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(turns, id="a")
        found: list[keiro.JournalEntry] = []
        async for entry in engine.events.follow(run=handle.run_id, types=[WorkflowStarted, StepRecorded]):
            found.append(entry)
            if entry.run_id == "wf:turns-a#3" and isinstance(entry.event, StepRecorded):
                if entry.event.step == "note":
                    await engine.complete(handle.run_id, "said", 7)
                else:
                    break
        assert [(one.run_id, one.event.TOPIC) for one in found] == [
            (f"wf:turns-a{round_}", topic)
            for round_ in ("", "#1", "#2", "#3")
            for topic in ("WorkflowStarted", "StepRecorded")
        ] + [("wf:turns-a#3", "StepRecorded")]
        assert {(one.workflow, one.key) for one in found} == {("turns", "a")}


async def test_writers_do_not_wait_for_a_slow_consumer(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        await engine.execute(steps, 2)
        feed = engine.events.follow()
        first = await anext(feed)
        # It deals with that one event for as long as this takes.
        assert await asyncio.gather(*(engine.execute(steps, 2) for _ in range(50))) == [2] * 50
        rest = []
        async for entry in feed:
            rest.append(told(entry))
            if len(rest) == 51 * 4 - 1:
                break
        assert [told(first), *rest] == await whole(engine)


async def test_it_ends_with_the_engine_and_other_followers_go_on(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        await engine.execute(steps, 1)
        found: list[Any] = []

        async def follow() -> None:
            async for entry in engine.events.follow():
                found.append(entry)

        followers = [asyncio.create_task(follow()) for _ in range(3)]
        while len(found) < 9:
            await asyncio.sleep(0)
        followers[0].cancel()
        await engine.execute(steps, 1)
        while len(found) < 9 + 6:
            await asyncio.sleep(0)
    assert await asyncio.gather(*followers[1:]) == [None, None]
    assert not engine._moved - {engine._lister.moved}


async def test_connections_that_are_ended_lose_and_repeat_nothing(postgres_url: str) -> None:
    workflows: Any = WORKFLOWS
    async with keiro.Engine(postgres_url, workflows=workflows, migrate=True) as engine:
        found: list[Any] = []
        following = asyncio.create_task(until_ended(engine, found, 60))
        for _ in range(6):
            runs = asyncio.gather(*(engine.execute(steps, 3) for _ in range(10)))
            with psycopg.connect(postgres_url, autocommit=True) as server:
                server.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            await runs
        await following
        assert found == (await whole(engine))[: len(found)]


async def test_what_cannot_be_followed_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        for options in (
            {"after": -1},
            {"after": True},
            {"after": "1"},
            {"types": "StepRecorded"},
            {"types": ["NoSuch"]},
            {"types": ["box:Lost"]},
            {"types": [7]},
        ):
            with pytest.raises(InvalidCall, match="follow"):
                engine.events.follow(**options)  # type: ignore[arg-type]
        with pytest.raises(keiro.InvalidName):
            engine.events.follow(run="steps-1")
        with pytest.raises(keiro.RunNotFound):
            await anext(engine.events.follow(run="wf:steps-1"))
        with pytest.raises(SourceChanged, match="position 0"):
            await anext(engine.events.follow(after=5))
    with pytest.raises(InvalidCall):
        engine.events.follow()


def test_synchronous_code_follows_too(store_url: str) -> None:
    with keiro.blocking(keiro.Engine(store_url, workflows=WORKFLOWS, migrate=True)) as engine:
        engine.execute(steps, 2)
        found = [entry.event.TOPIC for entry in engine.events.follow(live=False)]
        assert found == ["WorkflowStarted", "StepRecorded", "StepRecorded", "WorkflowCompleted"]
        feed = engine.events.follow(after=engine.events.last())
        engine.execute(steps, 0)
        assert next(feed).event.TOPIC == "WorkflowStarted"
        feed.close()
