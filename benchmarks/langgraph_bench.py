"""LangGraph with its SQLite, Postgres and in-memory checkpointers, as shipped and tuned.

The library has no queue and no worker: a run is an invocation, and whoever started it must start it again
after a crash. Only a graph with durability "sync" has a step written before the next begins; the shipped
setting and the functional API go on while the write is under way, which no other contestant does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypedDict

from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph

from benchmarks.contestant import GATE, Contestant, NotOffered, Place, body_seconds


class _State(TypedDict):
    left: int
    bodies: bool
    hold: bool


class LangGraphShipped(Contestant):
    """A graph of one node that goes round once for every step, written in the background."""

    durability = "async"

    async def open(self, place: Place) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._saver = await self._stack.enter_async_context(_saver(place))
        self._flow = self._build()
        self._threads = itertools.count()

    def _build(self) -> Any:
        async def step(state: _State) -> dict[str, int]:
            if state["bodies"]:
                await asyncio.sleep(body_seconds(state["left"]))
            if state["left"] == 0 and state["hold"]:
                await GATE()
            return {"left": state["left"] - 1}

        def onward(state: _State) -> str:
            last = -1 if state["hold"] else 0
            return "step" if state["left"] > last else END

        graph = StateGraph(_State)
        graph.add_node("step", step)
        graph.add_edge(START, "step")
        graph.add_conditional_edges("step", onward)
        return graph.compile(checkpointer=self._saver)

    async def close(self) -> None:
        await self._stack.aclose()

    async def _invoke(self, steps: int, bodies: bool = False, hold: bool = False, thread: int | None = None) -> None:
        number = next(self._threads) if thread is None else thread
        await self._flow.ainvoke(
            {"left": steps, "bodies": bodies, "hold": hold},
            _config(number, steps),
            durability=self.durability,
        )

    async def run_one(self, steps: int) -> None:
        await self._invoke(steps)

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        await asyncio.gather(*(self._invoke(steps, bodies) for _ in range(runs)))

    async def enqueue(self, runs: int) -> None:
        raise NotOffered("no queue: an invocation is not accepted before it is run")

    async def begin_held(self, runs: int, steps: int) -> None:
        self._held = [asyncio.create_task(self._invoke(steps, hold=True, thread=n)) for n in range(runs)]
        await GATE.all_arrived()
        # A body runs before its input is written: a run killed now would be lost, which is not what is measured.
        for number in range(runs):
            while await self._saver.aget_tuple(_config(number, steps)) is None:
                await asyncio.sleep(0.01)

    async def finish_held(self, runs: int) -> None:
        # There is no discovery: this knows from elsewhere which threads were running.
        await asyncio.gather(*(self._resume(number) for number in range(runs)))

    async def reach_gate(self, runs: int) -> float:
        self._held = [asyncio.create_task(self._resume(number)) for number in range(runs)]
        await GATE.all_arrived()
        return 0.0

    async def _resume(self, number: int) -> None:
        await self._flow.ainvoke(None, _config(number, 20_000), durability=self.durability)


class LangGraphSync(LangGraphShipped):
    """The same graph, whose next step waits for the checkpoint of the last."""

    durability = "sync"


class LangGraphTuned(LangGraphShipped):
    """The functional API, whose steps need one write and no checkpoint each; nothing waits for that write."""

    durability = "sync"

    async def open(self, place: Place) -> None:
        await super().open(place)
        self._blocking = None
        if place.is_sqlite:
            # Single runs are faster through the blocking checkpointer: no thread lies between.
            self._blocking = self._build_blocking(self._stack.enter_context(_blocking_saver(place)))

    async def run_one(self, steps: int) -> None:
        if self._blocking is None:
            await super().run_one(steps)
        else:
            arguments = {"left": steps, "bodies": False, "hold": False}
            config = _config(next(self._threads), steps)
            await asyncio.to_thread(self._blocking.invoke, arguments, config, durability=self.durability)

    def _build_blocking(self, saver: Any) -> Any:
        @task
        def step(index: int) -> int:
            return index

        @entrypoint(checkpointer=saver)
        def flow(arguments: _State) -> int:
            for index in range(arguments["left"]):
                step(index).result()
            return arguments["left"]

        return flow

    def _build(self) -> Any:
        @task
        async def step(index: int, bodies: bool) -> int:
            if bodies:
                await asyncio.sleep(body_seconds(index))
            return index

        @task
        async def hold() -> int:
            return await GATE()

        @entrypoint(checkpointer=self._saver)
        async def flow(arguments: _State) -> int:
            for index in range(arguments["left"]):
                await step(index, arguments["bodies"])
            if arguments["hold"]:
                await hold()
            return arguments["left"]

        return flow


def _config(thread: int, steps: int) -> Any:
    return {"configurable": {"thread_id": f"thread-{thread}"}, "recursion_limit": steps + 10}


@contextlib.contextmanager
def _blocking_saver(place: Place) -> Iterator[Any]:
    import sqlite3

    from langgraph.checkpoint.sqlite import SqliteSaver

    with contextlib.closing(sqlite3.connect(place.at, check_same_thread=False)) as connection:
        connection.execute(_synchronous(place))
        saver = SqliteSaver(connection)
        saver.setup()
        yield saver


def _synchronous(place: Place) -> str:
    return f"PRAGMA synchronous={'FULL' if place.store == 'sqlite-full' else 'NORMAL'}"


@contextlib.asynccontextmanager
async def _saver(place: Place) -> AsyncIterator[Any]:
    if place.store == "memory":
        from langgraph.checkpoint.memory import InMemorySaver

        yield InMemorySaver()
    elif place.store == "postgres":
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

        async with AsyncPostgresSaver.from_conn_string(place.at) as saver:
            await saver.setup()
            yield saver
    else:
        import aiosqlite
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        async with aiosqlite.connect(place.at) as connection:
            await connection.execute(_synchronous(place))
            file_saver = AsyncSqliteSaver(connection)
            await file_saver.setup()
            yield file_saver
