"""Absurd, as shipped and tuned.

Its engine is a set of SQL functions, which the `absurdctl` package carries; a client is one connection, and a
worker finds tasks by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd, AsyncAbsurd

from benchmarks.contestant import GATE, Contestant, NotOffered, Place, body_seconds

_QUEUE = "bench"
_UNFINISHED = "SELECT count(*) FROM absurd.t_bench WHERE state <> 'completed'"
_CLAIMED = "SELECT count(*) FROM absurd.r_bench WHERE state = 'running' AND claim_expires_at > now()"


class AbsurdShipped(Contestant):
    """An asynchronous client and one worker with the defaults of start_worker()."""

    claim_seconds = 120

    async def prepare(self, place: Place) -> None:
        with psycopg.connect(place.at, autocommit=True) as connection:
            connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
        async_client = AsyncAbsurd(place.at, queue_name=_QUEUE)
        await async_client.create_queue()
        await async_client.close()

    async def open(self, place: Place) -> None:
        self._place = place
        self._client = AsyncAbsurd(place.at, queue_name=_QUEUE)
        self._worker_client = AsyncAbsurd(place.at, queue_name=_QUEUE)
        _register(self._worker_client)
        self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        await self._worker_client.start_worker()

    async def close(self) -> None:
        self._worker_client.stop_worker()
        await self._worker
        await self._worker_client.close()
        await self._client.close()

    async def run_one(self, steps: int) -> None:
        spawned = await self._spawn("steps", steps)
        await self._client.await_task_result(spawned["task_id"])

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        for _ in range(runs):
            await self._spawn("bodies" if bodies else "steps", steps)
        await self._all_done()

    async def enqueue(self, runs: int) -> None:
        await self.run_many(runs, 1, False)

    async def begin_held(self, runs: int, steps: int) -> None:
        for _ in range(runs):
            await self._spawn("held", steps)
        # A worker takes what its concurrency allows; the other tasks stay pending.
        while GATE.arrived == 0:
            await asyncio.sleep(0.002)

    async def finish_held(self, runs: int) -> None:
        await self._all_done()

    async def reach_gate(self, runs: int) -> float:
        raise NotOffered("replays as the tuned one does, after claims of two minutes")

    async def _spawn(self, task: str, steps: int) -> Any:
        return await self._client.spawn(task, {"steps": steps}, queue=_QUEUE)

    async def _all_done(self) -> None:
        connection = await psycopg.AsyncConnection.connect(self._place.at, autocommit=True)
        async with connection:
            while True:
                row = await (await connection.execute(_UNFINISHED)).fetchone()
                if row is not None and row[0] == 0:
                    return
                await asyncio.sleep(0.005)


class AbsurdTuned(AbsurdShipped):
    """The synchronous client: in-line batches for single runs, four polling threads for many."""

    claim_seconds = 2

    async def open(self, place: Place) -> None:
        self._place = place
        self._sync = Absurd(place.at, queue_name=_QUEUE)
        _register_sync(self._sync)

    async def close(self) -> None:
        self._sync.close()

    async def run_one(self, steps: int) -> None:
        await asyncio.to_thread(self._run_in_line, steps)

    def _run_in_line(self, steps: int) -> None:
        spawned = self._sync.spawn("steps", {"steps": steps})
        self._sync.work_batch()
        self._sync.fetch_task_result(spawned["task_id"])

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        await asyncio.to_thread(self._spawn_and_work, "bodies" if bodies else "steps", runs, steps)

    def _spawn_and_work(self, task: str, runs: int, steps: int) -> None:
        with self._workers():
            for _ in range(runs):
                self._sync.spawn(task, {"steps": steps})
            self._wait_until_done()

    async def begin_held(self, runs: int, steps: int) -> None:
        for _ in range(runs):
            self._sync.spawn("held", {"steps": steps})
        self._threads = self._workers()
        self._threads.__enter__()
        while GATE.arrived == 0:
            await asyncio.sleep(0.002)

    async def finish_held(self, runs: int) -> None:
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        with self._workers():
            self._wait_until_done()

    def _wait_until_done(self) -> None:
        with psycopg.connect(self._place.at, autocommit=True) as connection:
            while True:
                row = connection.execute(_UNFINISHED).fetchone()
                if row is not None and row[0] == 0:
                    return
                time.sleep(0.005)

    async def reach_gate(self, runs: int) -> float:
        if runs > 4:
            raise NotOffered("four workers run four tasks at a time")
        began = time.perf_counter()
        with psycopg.connect(self._place.at, autocommit=True) as connection:
            while connection.execute(_CLAIMED).fetchone() != (0,):
                time.sleep(0.02)
        # The dead worker's claims are over: what follows is replay.
        waited = time.perf_counter() - began
        self._threads = self._workers()
        self._threads.__enter__()
        while GATE.arrived < runs:
            await asyncio.sleep(0.0005)
        return waited

    @contextlib.contextmanager
    def _workers(self) -> Iterator[None]:
        clients = [Absurd(self._place.at, queue_name=_QUEUE) for _ in range(4)]
        threads = []
        for number, client in enumerate(clients):
            _register_sync(client)
            options = {"worker_id": f"w{number}", "batch_size": 10, "poll_interval": 0.01,
                       "claim_timeout": self.claim_seconds}  # fmt: skip
            threads.append(threading.Thread(target=client.start_worker, kwargs=options, daemon=True))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for client in clients:
                client.stop_worker()
            for thread in threads:
                thread.join()
            for client in clients:
                client.close()


def _register(client: AsyncAbsurd) -> None:
    async def body(index: int) -> int:
        return index

    async def waiting_body(index: int) -> int:
        await asyncio.sleep(body_seconds(index))
        return index

    async def run_steps(function: Any, params: Any, context: Any) -> int:
        for index in range(params["steps"]):
            await context.step("step", lambda index=index: function(index))
        return int(params["steps"])

    @client.register_task(name="steps")
    async def steps(params: Any, context: Any) -> int:
        return await run_steps(body, params, context)

    @client.register_task(name="bodies")
    async def bodies(params: Any, context: Any) -> int:
        return await run_steps(waiting_body, params, context)

    @client.register_task(name="held")
    async def held(params: Any, context: Any) -> int:
        await run_steps(body, params, context)
        return int(await context.step("hold", GATE))


def _register_sync(client: Absurd) -> None:
    counter = itertools.count()

    def waiting_body() -> int:
        index = next(counter)
        time.sleep(body_seconds(index))
        return index

    def hold() -> int:
        GATE.arrived += 1
        while GATE.shut:
            time.sleep(60)
        return 0

    @client.register_task(name="steps")
    def steps(params: Any, context: Any) -> int:
        for _ in range(params["steps"]):
            context.step("step", lambda: 0)
        return int(params["steps"])

    @client.register_task(name="bodies")
    def bodies(params: Any, context: Any) -> int:
        for _ in range(params["steps"]):
            context.step("step", waiting_body)
        return int(params["steps"])

    @client.register_task(name="held")
    def held(params: Any, context: Any) -> int:
        for _ in range(params["steps"]):
            context.step("step", lambda: 0)
        return int(context.step("hold", hold))
