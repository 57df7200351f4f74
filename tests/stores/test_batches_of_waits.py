"""Commands of one batch that write several runs: what one of them has done, those after it find, on every store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import Raw

from keiro.decisions import Append, Appended, Cancel, Deliver, Existing, InputDiffers, Rotate, Start, new
from keiro.events import Event, WorkflowCompleted, WorkflowStarted
from keiro.identity import parse_run_id
from keiro.stores import open_store
from keiro.stores.base import Store


class Listening:
    def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None: ...
    def woken(self) -> None: ...


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    store = open_store(store_url, durability="normal")
    store.listener = Listening()
    await store.open(migrate=True)
    yield store
    await store.close()


def start(name: str, n: int = 0, **more: Any) -> Start:
    parts = parse_run_id(name)
    event = WorkflowStarted(workflow=parts.workflow, key=parts.key, input=Raw(b'{"n":%d}' % n), **more)
    return Start(name, new(event, name.encode()[-15:].rjust(15) + bytes([n])), 1)


def append(name: str, event: Event) -> Append:
    return Append(name, (new(event, b"0123456789abcdef"),), 2)


async def sent(store: Store, *commands: Any) -> list[Any]:
    """The outcomes of commands that go in one batch."""
    return await asyncio.gather(*(store.submit(command) for command in commands))


async def test_a_run_that_is_born_in_a_batch_ends_in_it_though_others_are_looked_up_between(store: Store) -> None:
    await sent(store, start("wf:order-b"))

    outcomes = await sent(
        store,
        start("wf:order-a", attributes={"n": 1}),
        Cancel("wf:order-b", 2),  # looks for children: what the batch has decided so far is written before
        append("wf:order-a", WorkflowCompleted(result=Raw(b"1"))),
    )

    assert [type(outcome) for outcome in outcomes] == [Appended] * 3
    found = await store.head("wf:order-a")
    assert found is not None
    run, head = found
    assert (run.status, run.result_json, head.version) == ("completed", "1", 2)


async def test_who_finds_a_run_that_was_born_in_the_same_batch_is_told_its_key(store: Store) -> None:
    first, same, other = await sent(
        store,
        start("wf:order-a", attributes={"n": 1}),
        Start("wf:order-a", new(start("wf:order-a").started.event, b"another event id"), 1),
        start("wf:order-a", 1),
    )

    assert [type(outcome) for outcome in (first, same, other)] == [Appended, Existing, InputDiffers]
    run = await store.run("wf:order-a")
    assert run is not None
    assert run.run_key == first.run.run_key == same.run.run_key == other.run.run_key


async def test_completions_are_carried_over_in_one_order(store: Store) -> None:
    await sent(store, start("wf:order-a"))
    await sent(store, *(Deliver("wf:order-a", f"awk:{name}", b"{}", at) for name, at in (("c", 5), ("b", 4), ("a", 5))))
    following = start("wf:order-a#1", round=1, lineage="wf:order-a", parent="wf:order-a")
    ending = append("wf:order-a", WorkflowCompleted(handoff="wf:order-a#1"))

    (outcome,) = await sent(store, Rotate(ending, following))

    key = outcome.run.run_key
    rows = (await store.history([key]))[key]
    assert [row.payload.partition('"awk:')[2][:1] for row in rows[1:]] == ["b", "a", "c"]
