"""The process in which one contestant is measured: reads commands as JSON lines and answers each with one.

Every contestant runs in a process of its own, so that the threads, garbage and imports of one never weigh on
another. The clocks are here and the same for all. Started by session.py as `python -m benchmarks.child NAME`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.contestant import GATE, Contestant, NotOffered, Place
from benchmarks.entries import entry_named

Reading = dict[str, Any]


class Child:
    """Carries out commands on one contestant. Each public method is a command."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant

    async def prepare(self, store: Any, at: str) -> Reading:
        await self._contestant.prepare(Place(store, at))
        return {}

    async def fill_finished(self, store: Any, at: str, runs: int) -> Reading:
        await self._contestant.fill_finished(Place(store, at), runs)
        return {}

    async def open(self, store: Any, at: str, arrivals: int = 0, shut: bool = False, client: bool = False) -> Reading:
        self._opened_at = time.perf_counter()
        GATE.expect(arrivals, shut)
        await (self._contestant.open_client if client else self._contestant.open)(Place(store, at))
        return {"seconds": time.perf_counter() - self._opened_at}

    async def close(self) -> Reading:
        await self._contestant.close()
        return {}

    async def long_run(self, steps: int) -> Reading:
        """One run of many steps."""
        await self._contestant.run_one(10)
        return await _timed(0, lambda: self._contestant.run_one(steps), steps)

    async def in_turn(self, seconds: float, steps: int) -> Reading:
        """Short runs one after another, for at least `seconds`."""
        await self._contestant.run_one(steps)
        return await _timed(seconds, lambda: self._contestant.run_one(steps), steps)

    async def at_once(self, seconds: float, runs: int, steps: int, bodies: bool) -> Reading:
        """Waves of runs started together, for at least `seconds`."""
        await self._contestant.run_many(runs, steps, bodies)
        return await _timed(seconds, lambda: self._contestant.run_many(runs, steps, bodies), runs * steps)

    async def enqueue(self, runs: int) -> Reading:
        await self._contestant.enqueue(20)
        return await _timed(0, lambda: self._contestant.enqueue(runs), runs)

    async def begin_waits(self, runs: int) -> Reading:
        await self._contestant.begin_waits(runs)
        return {}

    async def complete_waits(self, runs: int, in_turn: bool) -> Reading:
        return {"given": await self._contestant.complete_waits(runs, in_turn)}

    async def end_waits(self, runs: int) -> Reading:
        return {"went_on": await self._contestant.end_waits(runs)}

    async def family(self, children: int) -> Reading:
        """A parent with children, after a small one."""
        await self._contestant.family(10)
        return await _timed(0, lambda: self._contestant.family(children), children)

    async def clocks(self, runs: int, seconds: float) -> Reading:
        return {"seconds": await self._contestant.clocks(runs, seconds)}

    async def fill_parked(self, store: Any, at: str, runs: int) -> Reading:
        await self._contestant.fill_parked(Place(store, at), runs)
        return {}

    async def idle(self, seconds: float) -> Reading:
        """The share of a core that the process takes while nothing happens, in percent, and its memory."""
        await asyncio.sleep(2)  # what opening has left to do
        usage = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime - usage.ru_utime + after.ru_stime - usage.ru_stime
        return {"percent": cpu / seconds * 100, "bytes": _resident_bytes()}

    async def begin_held(self, runs: int, steps: int) -> Reading:
        await self._contestant.begin_held(runs, steps)
        return {}

    async def finish_held(self, runs: int) -> Reading:
        await self._contestant.finish_held(runs)
        return {}

    async def reach_gate(self, runs: int) -> Reading:
        """Seconds from opening the engine until every held run stands at its gate again."""
        opened = time.perf_counter() - self._opened_at
        began = time.perf_counter()
        waited = await self._contestant.reach_gate(runs)
        if waited:
            return {"seconds": time.perf_counter() - began - waited}
        return {"seconds": opened + time.perf_counter() - began}

    async def memory_held(self, runs: int) -> Reading:
        """Bytes that each resident run adds, standing in a step."""
        await self._contestant.run_many(50, 2, False)
        before = _resident_bytes()
        await self._contestant.begin_held(runs, 1)
        return {"bytes": (_resident_bytes() - before) / runs}

    async def memory_finished(self, runs: int) -> Reading:
        """Bytes that each finished run leaves behind."""
        for _ in range(runs // 50):
            await self._contestant.run_many(50, 1, False)
        before = _resident_bytes()
        for _ in range(runs // 50):
            await self._contestant.run_many(50, 1, False)
        return {"bytes": (_resident_bytes() - before) / runs}

    async def memory_long(self, steps: int) -> Reading:
        """Bytes by which the process grows from the first fifth of one long run to its end."""
        sampled: list[int] = []

        async def sample() -> None:
            while True:
                await asyncio.sleep(0.02)
                sampled.append(_resident_bytes(collect=False))

        sampler = asyncio.create_task(sample())
        await self._contestant.run_one(steps)
        sampler.cancel()
        fifth = sampled[: max(1, len(sampled) // 5)]
        return {"bytes": max(sampled) - max(fifth), "samples": len(sampled)}


async def _timed(seconds: float, once: Callable[[], Awaitable[None]], count_each: int) -> Reading:
    """Repeat `once` until `seconds` have gone by, at least one time."""
    gc.collect()
    usage, count = resource.getrusage(resource.RUSAGE_SELF), 0
    began = time.perf_counter()
    while True:
        await once()
        count += count_each
        elapsed = time.perf_counter() - began
        if elapsed >= seconds:
            break
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - usage.ru_utime, after.ru_stime - usage.ru_stime
    return {"seconds": elapsed, "count": count, "cpu": user + system, "user": user}


def _resident_bytes(collect: bool = True) -> int:
    if collect:
        gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


async def _serve(child: Any, answers: Any) -> None:
    # Reading blocks the loop on purpose: between two commands nothing of the contestant should run.
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = await getattr(child, command.pop("do"))(**command)
        except NotOffered as refusal:
            answer = {"not_offered": str(refusal)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    # What a contestant prints must not be taken for an answer.
    os.dup2(2, 1)
    try:
        contestant = entry_named(name).create()
    except ImportError as missing:
        answers.write(json.dumps({"missing": str(missing)}) + "\n")
        return
    answers.write("{}\n")
    answers.flush()
    asyncio.run(_serve(Child(contestant) if isinstance(contestant, Contestant) else contestant, answers))
    answers.flush()
    # Threads of a contestant that would not end must not keep the benchmark.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
