"""What the crash tests run: every kind of write, with every effect and every acknowledgement noted outside."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import keiro
from keiro import waits
from keiro.decisions import Stored
from keiro.events import StepRecorded
from keiro.history import past_of

_log: list[Path] = []


def use_log(folder: Path) -> None:
    """Where this process notes its effects and what it was told."""
    _log[:] = [folder]


def note(file: str, line: str) -> None:
    """Append a line in one write: a kill leaves whole lines."""
    with open(_log[0] / file, "ab", buffering=0) as out:
        out.write(line.encode() + b"\n")


def notes(folder: Path, file: str) -> list[str]:
    """What was noted."""
    path = folder / file
    return path.read_text().splitlines() if path.exists() else []


async def effect(run_id: str, name: str) -> str:
    note("effects", f"{os.getpid()} {run_id} {name}")
    return name


def effect_in_thread(run_id: str, name: str) -> str:
    note("effects", f"{os.getpid()} {run_id} {name}")
    return name


async def fails_once(run_id: str, name: str) -> str:
    note("effects", f"{os.getpid()} {run_id} {name}")
    if sum(line.endswith(f" {run_id} {name}") for line in notes(_log[0], "effects")) == 1:
        raise RuntimeError("the first attempt fails")
    return name


class Basket(keiro.WorkflowRun, name="crash_basket"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self, n: int) -> list[str]:
        for i in range(n):
            await self.apply(Basket.add, f"sku-{i}")
            await self.step(effect, self.id, f"after-{i}", key=f"after-{i}")
        return self.items


@keiro.workflow
async def sequence(run: keiro.WorkflowRun, n: int) -> list[str]:
    done = [await run.step(effect, run.id, f"s{i}", key=f"s{i}") for i in range(n)]
    done += await asyncio.gather(*(run.step(effect, run.id, f"g{i}", key=f"g{i}") for i in range(2)))
    done.append(await run.step(effect_in_thread, run.id, "thread", key="thread"))
    done.append(await run.step(fails_once, run.id, "flaky", key="flaky", retry=keiro.Retry(3, initial=0.001)))
    return done


@keiro.workflow(retry=keiro.Retry(2, initial=0.001))
async def doomed(run: keiro.WorkflowRun) -> None:
    await run.step(effect, run.id, "before the end", key="before the end")
    raise ValueError("as intended")


@keiro.workflow
async def kid(run: keiro.WorkflowRun, n: int) -> str:
    await run.sleep(0.003)
    return await run.step(effect, run.id, f"kid-{n}", key=f"kid-{n}")


@keiro.workflow
async def family(run: keiro.WorkflowRun, last: int) -> list[str]:
    """A child, a sleep, a deferred with a timeout, a race, in two rounds."""
    child = await run.spawn(kid, run.round, id=f"{run.key}-kid-{run.round}")
    said = await run.deferred("said", str).result(timeout=600)
    done = [said, await child.result()]
    _, quick = await run.first(run.step(effect, run.id, "quick", key="quick"), run.sleep(600))
    done.append(quick)
    if run.round < last:
        run.continue_as_new(last)
    return done


@keiro.workflow
async def parked(run: keiro.WorkflowRun) -> None:
    """Waits with its child for what never comes, until both are cancelled."""
    await run.spawn(parked_kid, id=f"{run.key}-kid")
    await run.deferred("never").result()


@keiro.workflow
async def parked_kid(run: keiro.WorkflowRun) -> None:
    await run.sleep(3600)


WORKFLOWS = (Basket, sequence, doomed, kid, family, parked, parked_kid)
CANCELLED = object()
EXPECTED: dict[str, Any] = {
    "wf:crash_basket-1": ["sku-0", "sku-1"],
    "wf:sequence-1": ["s0", "s1", "g0", "g1", "thread", "flaky"],
    "wf:sequence-2": ["s0", "g0", "g1", "thread", "flaky"],
    "wf:doomed-1": None,
    "wf:family-1": ["yes", "kid-1", "quick"],
    "wf:kid-1-kid-0": "kid-0",
    "wf:kid-1-kid-1": "kid-1",
    "wf:parked-1": CANCELLED,
    "wf:parked_kid-1-kid": CANCELLED,
}


async def start_all(engine: keiro.Engine) -> None:
    """Start every run (or find it) and note what was acknowledged; wait for all ends."""
    waits.PARK_S = 0.001
    handles = []
    births: tuple[tuple[Any, tuple[Any, ...], str], ...] = (
        (sequence, (2,), "1"),
        (Basket, (2,), "1"),
        (doomed, (), "1"),
        (sequence, (1,), "2"),
        (family, (1,), "1"),
        (parked, (), "1"),
    )
    for workflow, args, key in births:
        handle = await engine.start(workflow, *args, id=key)
        note("acknowledged", handle.run_id)
        handles.append(handle)
    answering = asyncio.create_task(_answer(engine))
    await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
    await answering


async def _answer(engine: keiro.Engine) -> None:
    """Say what `family` asks for in each round, and cancel `parked` once its child is parked."""
    with suppress(keiro.RunEnded):
        while await _lives(engine, "wf:family-1"):
            await engine.complete("wf:family-1", "said", "yes")
            await asyncio.sleep(0.002)
    while not (children := await engine.children.of("wf:parked-1")) and await _lives(engine, "wf:parked-1"):
        await asyncio.sleep(0.002)
    for child in children:
        while await engine.handle(child.run_id).status() in ("pending", "running"):
            await asyncio.sleep(0.002)
    await engine.cancel("wf:parked-1")


async def _lives(engine: keiro.Engine, run_id: str) -> bool:
    return not (await engine.handle(run_id).run()).terminal


async def recorded(engine: keiro.Engine) -> dict[str, set[str]]:
    """The steps of each run that are recorded."""
    found: dict[str, set[str]] = {}
    for run in await engine.runs(limit=10_000):
        rows = (await engine.store.history([run.run_key]))[run.run_key]
        found[run.run_id] = {name for name, one in past_of(run.run_id, rows).steps.items() if one.failed is None}
        assert [row.version for row in rows] == list(range(1, len(rows) + 1)), f"{run.run_id} has a gap"
    return found


async def all_events(engine: keiro.Engine) -> list[Stored]:
    """Every event of the store by position."""
    events: list[Stored] = []
    while page := await engine.store.read(events[-1].position if events else 0, 1000):
        events += page
    return events


async def check_ended(engine: keiro.Engine) -> None:
    """Every run has the result it must have, and each of its steps was recorded once."""
    for run_id, expected in EXPECTED.items():
        run = await engine.handle(run_id).run()
        wanted = "failed" if expected is None else "cancelled" if expected is CANCELLED else "completed"
        assert run.status == wanted, run
        if wanted == "completed":
            assert run.result_json is not None and msgspec.json.decode(run.result_json) == expected
        steps = [event.step async for event in engine.handle(run_id).events() if isinstance(event, StepRecorded)]
        assert len(steps) == len(set(steps)), f"{run_id} recorded a step twice: {steps}"
        head = await engine.store.head(run.run_id)
        assert head is not None and head[1].owner is None


async def paced_effect(run_id: str, name: str) -> str:
    await asyncio.sleep(0.002)
    note("effects", f"{os.getpid()} {run_id} {name} {time.monotonic_ns()}")
    return name


@keiro.workflow
async def chain(run: keiro.WorkflowRun, n: int) -> int:
    """Steps one after the other, each long enough for a kill to hit it."""
    for i in range(n):
        await run.step(paced_effect, run.id, f"s{i}", key=f"s{i}")
    return n
