"""A worker process whose clock is wrong: `python -m tests.crash.skewed URL FOLDER NAME SECONDS`, until told to stop.

What it drives writes its effects to FOLDER/effects, each with the NAME of the process.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    _skew = float(sys.argv[4])
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _skew
    time.time_ns = lambda: _time_ns() + int(_skew * 1e9)

import keiro

NAME, FOLDER = "", Path()


def note(what: str) -> None:
    with (FOLDER / "effects").open("a") as file:
        file.write(f"{NAME} {what}\n")


async def begins(key: str) -> None:
    note(f"{key} begins")


async def holds(key: str) -> None:
    """Until the test lets it go."""
    note(f"{key} holds")
    while not (FOLDER / "go").exists():
        await asyncio.sleep(0.01)


async def ends(key: str) -> str:
    note(f"{key} ends")
    return "done"


async def fails_once(key: str) -> None:
    first = FOLDER / f"{key}.failed"
    if not first.exists():
        first.touch()
        raise RuntimeError("once")
    note(f"{key} succeeds")


@keiro.workflow
async def kid(run: keiro.WorkflowRun) -> str:
    return str(await run.deferred("word", str).result())


@keiro.workflow
async def held(run: keiro.WorkflowRun) -> list[str]:
    await run.step(begins, run.key)
    child = await run.spawn(kid, id=f"{run.key}-kid")
    await run.step(holds, run.key)
    return [await child.result(), await run.step(ends, run.key)]


@keiro.workflow
async def timed(run: keiro.WorkflowRun) -> str:
    await run.step(begins, run.key)
    await run.sleep(0.3)
    try:
        await run.deferred("never").result(timeout=0.3)
    except TimeoutError:
        await run.step(fails_once, run.key, retry=keiro.Retry(2, initial=0.2, jitter=0))
    return str(await run.step(ends, run.key))


WORKFLOWS = [held, kid, timed]


async def main(url: str) -> None:
    async with keiro.Engine(url, workflows=WORKFLOWS, grace=1) as engine:
        note("is ready")
        await engine.serve()


if __name__ == "__main__":
    FOLDER, NAME = Path(sys.argv[2]), sys.argv[3]
    logging.basicConfig(filename=FOLDER / f"{NAME}.log", level=logging.INFO)
    asyncio.run(main(sys.argv[1]))
