"""Snapshots of what was recorded: a long round goes on without its whole journal, and the same as with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from keiro import history
from keiro.decisions import Stored
from keiro.events import StepRecorded
from keiro.history import Snapshot, check_contiguous, load, past_of, snapshot_of
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine

EVERY = 20
gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())
    monkeypatch.setattr(history, "EVERY", EVERY)


async def held() -> None:
    gate["entered"].set()
    await gate["go"].wait()


@keiro.workflow
async def long(run: keiro.WorkflowRun, n: int) -> int:
    total = 0
    for at in range(n):
        total += int(str(await run.step(note, at)))
    await run.step(held)
    return total


async def snapshots(engine: keiro.Engine, run_id: str) -> list[str]:
    run = await engine.store.run(run_id)
    assert run is not None
    return await engine.store.step_maps(run.run_key)


async def kept(engine: keiro.Engine, handle: keiro.Handle, n: int) -> list[str]:
    """The snapshots of a run, once there are so many."""
    while len(found := await snapshots(engine, handle.run_id)) < n:
        assert not (await handle.run()).terminal
        await asyncio.sleep(0)
    return found


def looks(engine: keiro.Engine) -> list[int]:
    """The versions after which the engine reads histories from now on."""
    read: list[int] = []
    store: Any = engine.store
    reading = store.history

    async def history_of(run_keys: Any, after: int = 0) -> Any:
        read.extend(after for _ in run_keys)
        return await reading(run_keys, after)

    store.history = history_of
    return read


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_long_round_goes_on_without_its_whole_journal(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """A snapshot for every so many events; the next process reads what came after the last; the end drops them."""
    if sealed:
        monkeypatch.setenv("COMPRESSOR_TOPIC", "zlib")
    async with make_engine(long, strict=True) as engine:
        handle = await engine.start(long, 3 * EVERY + 5, id="a")
        await gate["entered"].wait()
        await kept(engine, handle, 3)
        await engine.close(grace=0)
    assert len(calls) == 3 * EVERY + 5
    gate["entered"].clear()
    engine = make_engine(long, strict=True)
    read = looks(engine)
    async with engine:
        await gate["entered"].wait()
        assert read == [3 * EVERY]
        gate["go"].set()
        again = engine.handle(handle.run_id)
        assert await again.result() == sum(range(3 * EVERY + 5))
        assert len(calls) == 3 * EVERY + 5, "nothing runs twice"
        while await snapshots(engine, handle.run_id):
            await asyncio.sleep(0)
        rows = [event async for event in again.events()]
        assert len(rows) == 3 * EVERY + 5 + 3, "the journal keeps it all"


@pytest.mark.parametrize("damage", ["gone", "first gone", "no JSON", "another form", "too short"])
async def test_a_snapshot_is_advisory(make_engine: MakeEngine, damage: str) -> None:
    """One that is missing or cannot be read costs nothing but time."""
    async with make_engine(long, strict=True) as engine:
        handle = await engine.start(long, 3 * EVERY, id="a")
        await gate["entered"].wait()
        texts = await kept(engine, handle, 3)
        run = await handle.run()
        await engine.close(grace=0)
    gate["go"].set()
    async with make_engine(worker=False) as client:
        store = client.store
        match damage:
            case "gone":
                await store.drop_step_maps(run.run_key)
            case "first gone":
                await store.drop_step_maps(run.run_key)
                await store.keep_step_map(run.run_key, 2 * EVERY, texts[1])
            case "no JSON":
                await store.keep_step_map(run.run_key, EVERY, '"no snapshot"')
            case "another form":
                await store.keep_step_map(run.run_key, EVERY, f'[0,{EVERY},[[1,2,"three"]],[]]')
            case _:
                await store.keep_step_map(run.run_key, EVERY, f"[0,{EVERY},[],[]]")
    async with make_engine(long, strict=True) as engine:
        assert await engine.handle(handle.run_id).result() == sum(range(3 * EVERY))
    assert len(calls) == 3 * EVERY


async def test_what_was_retracted_failed_or_timed_is_the_same_with_snapshots(make_engine: MakeEngine) -> None:
    """The past that a replay is told is equal, whether it was read from events or from snapshots."""

    async def fails_once() -> str:
        calls.append("fails")
        if calls.count("fails") == 1:
            raise RuntimeError("once")
        return "ok"

    @keiro.workflow
    async def mixed(run: keiro.WorkflowRun) -> None:
        for at in range(EVERY // 2):
            await run.step(note, at)
        await run.step(fails_once, retry=keiro.Retry(attempts=2, initial=0.001))
        await run.sleep(0.001)
        await run.deferred("d").result()
        for at in range(EVERY):
            await run.step(note, at)
        await run.step(held)

    async with make_engine(mixed) as engine:
        handle = await engine.start(mixed, id="a")
        await engine.complete(handle.run_id, "d", [1, {"two": None}, 'a"b\\c', "ü\u2028\t", "</script>"])
        await gate["entered"].wait()
        await kept(engine, handle, 1)
        run = await handle.run()
        found = await load(engine.store, run.run_key)
        rows = (await engine.store.history([run.run_key]))[run.run_key]
        assert found.snapshots
        assert [row.version for row in found.stored] == list(range(found.snapshots[-1].until + 1, len(rows) + 1))
        assert past_of(run.run_id, found.stored, found.snapshots) == past_of(run.run_id, rows)
        check_contiguous(run.run_id, found.stored, after=found.snapshots[-1].until, until=len(rows))
        gate["go"].set()
        await handle.result()


async def test_commands_in_a_snapshot_are_delivered_where_they_were(make_engine: MakeEngine) -> None:
    """A class workflow is replayed with the commands of its first round trip at the same places."""

    class Counter(keiro.WorkflowRun, name="counter"):
        def __init__(self) -> None:
            self.n = 0

        @keiro.event("Added")
        def add(self, n: int) -> None:
            self.n += n

        async def execute(self, rounds: int) -> list[int]:
            seen = []
            for at in range(rounds):
                await self.apply(Counter.add, at)
                seen.append(self.n)
            await self.step(held)
            return seen

    async with make_engine(Counter, strict=True) as engine:
        handle = await engine.start(Counter, EVERY, id="a")
        await gate["entered"].wait()
        await kept(engine, handle, 2)
        await engine.close(grace=0)
    gate["go"].set()
    async with make_engine(Counter, strict=True) as engine:
        seen = await engine.handle(handle.run_id).result()
    assert seen == [sum(range(at + 1)) for at in range(EVERY)]


async def test_large_results_are_kept_once(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them is what takes the time; and an outage of a snapshot is no fault of the run."""
    monkeypatch.setattr(history, "MOST_BYTES", 100)
    async with make_engine(long) as engine:
        handle = await engine.start(long, 2 * EVERY, id="a")
        await gate["entered"].wait()
        gate["go"].set()
        await handle.result()
        assert await snapshots(engine, handle.run_id) == []


async def test_a_snapshot_that_cannot_be_written_stops_no_run(make_engine: MakeEngine) -> None:
    tried: list[int] = []

    async def refused(run_key: int, after: int, until: int) -> None:
        tried.append(until)
        raise keiro.StoreUnavailable("the disk is full")

    async with make_engine(long) as engine:
        engine.store.snapshot = refused  # type: ignore[method-assign]
        handle = await engine.start(long, 3 * EVERY, id="a")
        await gate["entered"].wait()
        gate["go"].set()
        assert await handle.result() == sum(range(3 * EVERY))
    assert tried == [EVERY], "it is not tried again for this run"


def test_a_snapshot_says_what_the_events_say() -> None:
    import msgspec

    event = StepRecorded(step="a", result=msgspec.Raw(b'{"b":[1,null]}'), inputs_digest="d")
    payload = msgspec.json.encode(event).decode()
    rows = [
        Stored(7, 1, 3, b"x" * 16, "StepRecorded", payload, 11),
        Stored(8, 1, 4, b"y" * 16, "basket:Added", '{"n":1}', 12),
    ]
    found = msgspec.json.decode(snapshot_of(rows), type=Snapshot)
    assert (found.after, found.until) == (2, 4)
    [recorded] = past_of("wf:a-b", [], [found]).steps.values()
    assert (recorded.step, bytes(recorded.result), recorded.version, recorded.at_ms) == ("a", b'{"b":[1,null]}', 3, 11)
    assert recorded.inputs_digest == "d"
    [other] = found.events(1)
    assert (other.version, other.topic, other.payload, other.recorded_at_ms) == (4, "basket:Added", '{"n":1}', 12)
