"""`engine.repository`: the runs of an engine as aggregates of the eventsourcing library."""

from __future__ import annotations

import asyncio

import pytest

import keiro
from tests.conftest import MakeEngine


class Cart(keiro.WorkflowRun, name="cart"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        if sku in self.items:
            raise ValueError(f"{sku} is in the cart")
        self.items.append(sku)

    async def execute(self, n: int) -> list[str]:
        for i in range(n):
            await self.apply(Cart.add, f"sku-{i}")
        return self.items


class Open(keiro.WorkflowRun, name="open"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        if sku in self.items:
            raise ValueError(f"{sku} is in the cart")
        self.items.append(sku)

    async def execute(self) -> None:
        await asyncio.Event().wait()


async def test_the_repository_folds_the_same_events_the_body_saw(make_engine: MakeEngine) -> None:
    async with make_engine(Cart) as engine:
        handle = await engine.start(Cart, 3, id="a")
        seen = await handle.result()
        cart = await asyncio.to_thread(engine.repository.get, handle.run_id)
        assert cart.items == seen == ["sku-0", "sku-1", "sku-2"]
        assert cart.version == len([event async for event in handle.events()])
        assert engine.repository.get(handle.run_id, version=2).items == ["sku-0"]
        with pytest.raises(keiro.RunNotFound):
            engine.repository.get("wf:cart-ghost")


async def test_a_snapshot_is_where_the_next_fold_begins(make_engine: MakeEngine) -> None:
    async with make_engine(Open, grace=0) as engine:
        handle = await engine.start(Open, id="a")
        await engine.command(handle.run_id, Open.add, "one")
        with pytest.raises(keiro.InvalidCall, match="pass its run_id"):
            await engine.command(handle, Open.add, "one")  # type: ignore[arg-type]
        taken = engine.repository.take_snapshot(handle.run_id)
        await engine.command(handle.run_id, Open.add, "two")
        assert engine.repository.get(handle.run_id).items == ["one", "two"]
        assert engine.repository.snapshot_store is not None
        assert [s.originator_version for s in engine.repository.snapshot_store.get(handle.run_id)] == [
            taken.originator_version
        ]


async def test_commands_from_outside_are_recorded_once_by_id_and_refused_when_they_raise(
    make_engine: MakeEngine,
) -> None:
    async with make_engine(Open, grace=0) as engine:
        handle = await engine.start(Open, id="a")
        first = await engine.command(handle.run_id, Open.add, "one", id="click-1")
        assert await engine.command(handle.run_id, Open.add, "one", id="click-1") == first
        with pytest.raises(ValueError, match="is in the cart"):
            await engine.command(handle.run_id, Open.add, "one")
        assert engine.repository.get(handle.run_id).items == ["one"]


async def test_concurrent_commands_are_decided_one_after_the_other(make_engine: MakeEngine) -> None:
    """Each sees the state the others left: of ten equal ones nine are refused."""
    async with make_engine(Open, grace=0) as engine:
        handle = await engine.start(Open, id="a")
        outcomes = await asyncio.gather(
            *(engine.command(handle.run_id, Open.add, "one") for _ in range(10)),
            *(engine.command(handle.run_id, Open.add, f"other-{n}") for n in range(5)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, ValueError) for outcome in outcomes) == 9
        items = engine.repository.get(handle.run_id).items
        assert sorted(items) == ["one", *(f"other-{n}" for n in range(5))]


async def test_a_command_to_an_ended_or_unknown_run_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(Cart) as engine:
        handle = await engine.start(Cart, 1, id="a")
        await handle.result()
        with pytest.raises(keiro.RunEnded, match="completed"):
            await engine.command(handle.run_id, Cart.add, "late")
        with pytest.raises(keiro.RunNotFound):
            await engine.command("wf:cart-ghost", Cart.add, "x")
        with pytest.raises(keiro.InvalidCall, match=r"'nowhere' is no workflow class .* Engine\(\.\.\., workflows="):
            await engine.command("wf:nowhere-a", Cart.add, "x")
