"""Commands on runs with many events: the state begins at the newest snapshot, and nothing else is different."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from tests.conftest import MakeEngine

EVERY = 10


class Tally(keiro.WorkflowRun, name="tally"):
    total: int = 0
    odd: Any = None

    @keiro.event("Added")
    def add(self, n: int) -> None:
        if n < 0:
            raise ValueError("not below 0")
        self.total += n

    @keiro.event("Spoiled")
    def spoil(self) -> None:
        self.odd = object()  # no snapshot could restore it

    async def execute(self) -> int:
        await self.until(lambda: self.total >= 1000)
        return self.total


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keiro.engine.SNAPSHOT_EVERY", EVERY)


def count_reads(engine: keiro.Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events each command has read: its own, and those of the repository behind the newest snapshot."""
    read: list[int] = []
    history = engine.store.history

    async def counted(keys: Any, after: int = 0) -> Any:
        found = await history(keys, after)
        read.append(sum(len(rows) for rows in found.values()))
        return found

    monkeypatch.setattr(engine.store, "history", counted)
    recorder = engine.repository.event_store.recorder
    select = recorder.read  # type: ignore[attr-defined]

    def selected(*args: Any) -> Any:
        rows = select(*args)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(recorder, "read", selected)
    return read


async def test_a_command_reads_no_more_than_the_events_since_the_newest_snapshot(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(Tally, worker=False) as engine:
        handle = await engine.start(Tally, id="a")
        versions = [await engine.command(handle.run_id, Tally.add, 1) for _ in range(8 * EVERY)]
        read = count_reads(engine, monkeypatch)
        versions.append(await engine.command(handle.run_id, Tally.add, 1))

        assert versions == [*range(2, 8 * EVERY + 3)]
        assert sum(read) <= EVERY
        assert (await asyncio.to_thread(engine.repository.get, handle.run_id)).total == 8 * EVERY + 1
        with pytest.raises(ValueError, match="not below 0"):
            await engine.command(handle.run_id, Tally.add, -1)


async def test_a_command_with_an_id_is_found_however_long_ago_it_was_sent(make_engine: MakeEngine) -> None:
    async with make_engine(Tally) as engine:
        handle = await engine.start(Tally, id="a")
        first = await engine.command(handle.run_id, Tally.add, 1, id="click-1")
        for _ in range(3 * EVERY):
            await engine.command(handle.run_id, Tally.add, 1)
        assert await engine.command(handle.run_id, Tally.add, 1, id="click-1") == first
        await engine.command(handle.run_id, Tally.add, 1000)
        assert await handle.result() == 3 * EVERY + 1001
        assert await engine.command(handle.run_id, Tally.add, 1, id="click-1") == first
        with pytest.raises(keiro.RunEnded):
            await engine.command(handle.run_id, Tally.add, 1, id="click-2")


async def test_a_state_that_no_snapshot_restores_is_folded_from_its_beginning(make_engine: MakeEngine) -> None:
    async with make_engine(Tally, worker=False) as engine:
        handle = await engine.start(Tally, id="a")
        await engine.command(handle.run_id, Tally.spoil)
        for n in range(2 * EVERY):
            assert await engine.command(handle.run_id, Tally.add, 1) == n + 3


async def test_many_commands_at_once_are_each_recorded_once(make_engine: MakeEngine) -> None:
    async with make_engine(Tally, worker=False) as engine:
        handle = await engine.start(Tally, id="a")
        for _ in range(2 * EVERY):
            await engine.command(handle.run_id, Tally.add, 1)
        versions = await asyncio.gather(*(engine.command(handle.run_id, Tally.add, 1) for _ in range(10)))
        assert sorted(versions) == [*range(2 * EVERY + 2, 2 * EVERY + 12)]
