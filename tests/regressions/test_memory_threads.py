"""A named store in memory, shared by the event loops of several threads, some of which end without a word."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

import keiro
from keiro.decisions import Appended, Start, new
from keiro.events import WorkflowStarted
from keiro.stores import memory
from keiro.stores.memory import MemoryStore


@keiro.workflow
async def quick(run: keiro.WorkflowRun) -> int:
    return 1


class Deaf:
    def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None: ...

    def woken(self) -> None: ...


def start(key: str) -> Start:
    started = WorkflowStarted(workflow="order", key=key, input=Raw(b"[]"))
    return Start(f"wf:order-{key}", new(started, key.encode().ljust(16)), 1)


async def opened(name: str) -> MemoryStore:
    store = MemoryStore(name)
    store.listener = Deaf()
    await store.open(migrate=True)
    return store


async def test_two_threads_do_not_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await opened(str(tmp_path)), await opened(str(tmp_path))
    first, second = one.submit(start("a")), two.submit(start("b"))
    decide, other = memory.decide, threading.Thread(target=two._flush)
    before: list[int] = []

    def interrupted(*args: Any) -> Any:
        if not before:
            before.append(one._journal.last)
            other.start()
            other.join(0.2)  # it has to wait for us: what we have loaded must not change before we write
            before.append(one._journal.last)
        return decide(*args)

    monkeypatch.setattr(memory, "decide", interrupted)
    one._flush()
    other.join()
    assert before == [0, 0]
    assert isinstance(await first, Appended) and isinstance(await second, Appended)
    assert [row.position for row in await one.read(0, 10)] == [1, 2]


def test_an_event_loop_that_ended_with_an_open_engine_disturbs_no_other(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"

    async def leave_open() -> None:
        await keiro.Engine(url, worker=False).__aenter__()

    async def go_on() -> Any:
        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with keiro.Engine(url, workflows=[quick]) as engine:
            assert await engine.execute(quick) == 1
        return failures

    asyncio.run(leave_open())
    assert asyncio.run(go_on()) == []
