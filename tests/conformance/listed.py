"""Runs of all kinds for the tests of the listing, and what a listing of them must be, by the rows of the runs."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Raw

import keiro
from keiro.decisions import Append, Appended, Start, new
from keiro.events import (
    Event,
    StateChanged,
    Wait,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowStarted,
)
from keiro.failures import capture
from keiro.identity import run_id
from keiro.rows import Run
from tests.conformance.test_ownership import worker_of

BASE = 1_700_000_000_000
FLOWS = ("alpha", "beta", "gamma")
ODD = ("é", "\U0001d4b3", "\uffee", "z", "Z", "_", "-")  # their bytes sort otherwise than their UTF-16 code units


async def start_runs(engine: keiro.Engine, starts: Iterable[tuple[WorkflowStarted, int]]) -> list[str]:
    """Start runs at given times; their ids."""
    commands = [Start(run_id(one.workflow, one.key, one.round), new(one, uuid.uuid4().bytes), at) for one, at in starts]
    for outcome in await asyncio.gather(*map(engine.store.submit, commands)):
        assert isinstance(outcome, Appended), outcome
    return [command.run_id for command in commands]


async def record(engine: keiro.Engine, name: str, event: Event, at_ms: int) -> None:
    """Append an event to a run that nobody owns."""
    command = Append(name, (new(event, uuid.uuid4().bytes),), at_ms)
    outcome = await engine.store.submit(command)
    assert isinstance(outcome, Appended), outcome


def change(rng: random.Random) -> Event:
    """Something that changes where a run stands."""
    match rng.randrange(6):
        case 0:
            return WorkflowCompleted()
        case 1:
            return WorkflowFailed(failure=capture(ValueError(f"card {rng.randrange(5)} was declined")))
        case 2:
            return WorkflowCancelled()
        case 3:
            return StateChanged(state="suspended", waits=(Wait("sleep", "sleep:x", BASE * 2),))
        case 4:
            return StateChanged(state="suspended", waits=(Wait("deferred", "awk:ok"),))
        case _:
            return StateChanged(state="suspended", waits=(Wait("child", "child:c:result"),))


async def populate(engine: keiro.Engine, number: int, seed: int = 0) -> list[str]:
    """Runs of several workflows, many at the same time, some with parents, some with rounds, in every status."""
    rng = random.Random(seed)
    span = max(4, number // 3)
    roots = [
        WorkflowStarted(workflow=rng.choice(FLOWS), key=f"{rng.choice(ODD)}{seed}.{n}", input=Raw(b"{}"))
        for n in range(number * 6 // 10)
    ]
    names = await start_runs(engine, [(one, BASE + rng.randrange(span)) for one in roots])
    few = names[: max(2, number // 25)]
    below = [
        WorkflowStarted(
            workflow=rng.choice(FLOWS), key=f"{rng.choice(ODD)}{seed}.b{n}", input=Raw(b"{}"), parent=rng.choice(few)
        )
        for n in range(number * 3 // 10)
    ]
    names += await start_runs(engine, [(one, BASE + rng.randrange(span)) for one in below])
    later = []
    for n in range(number - len(roots) - len(below)):
        first = roots[n % len(few)]
        round_, lineage = 1 + n // len(few), run_id(first.workflow, first.key)
        before = run_id(first.workflow, first.key, round_ - 1)
        later.append(
            WorkflowStarted(
                workflow=first.workflow,
                key=first.key,
                input=Raw(b"{}"),
                round=round_,
                lineage=lineage,
                parent=before,
            )
        )
    names += await start_runs(engine, [(one, BASE + rng.randrange(span)) for one in later])
    changed = [name for name in names if rng.random() < 0.75]
    await asyncio.gather(*(record(engine, name, change(rng), BASE + span) for name in changed))
    await engine.store.claim(worker_of(engine).key, ["alpha"], max(1, number // 50))
    return names


async def all_runs(engine: keiro.Engine) -> list[Run]:
    """The rows of all runs."""
    return await engine.store.runs(limit=10**6)


NAMES = ("status", "workflow", "parent", "lineage", "waiting")
OF_ROW = ("status", "workflow", "parent_run_id", "lineage_id", "waiting_reason")


def reference(runs: Sequence[Run], *, newest: bool = False, **filters: Any) -> list[str]:
    """The ids that a listing has to give, by brute force."""
    after, before = filters.pop("created_after", 0), filters.pop("created_before", 2**60)
    columns = dict(zip(NAMES, OF_ROW, strict=True))
    kept = [
        run
        for run in runs
        if after <= run.created_at_ms <= before
        and all(getattr(run, columns[name]) == wanted for name, wanted in filters.items())
    ]
    kept.sort(key=lambda run: (run.created_at_ms, run.run_id.encode()), reverse=newest)
    return [run.run_id for run in kept]


def subsets(runs: Sequence[Run], rng: random.Random) -> Iterable[dict[str, Any]]:
    """Each subset of the filters, with values that some run has."""
    for mask in range(32):
        run = rng.choice(runs)
        yield {
            name: getattr(run, column)
            for bit, (name, column) in enumerate(zip(NAMES, OF_ROW, strict=True))
            if mask >> bit & 1
        }


def ranges(rng: random.Random, span: int) -> Iterable[dict[str, int]]:
    """No bounds, each of them, and both."""
    one, other = sorted((BASE + rng.randrange(span), BASE + rng.randrange(span)))
    yield from ({}, {"created_after": one}, {"created_before": other}, {"created_after": one, "created_before": other})


async def pages(engine: keiro.Engine, **options: Any) -> list[str]:
    """The ids of all pages of a listing."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = await engine.executions.list(**options, cursor=cursor)
        assert len(page.items) <= options.get("limit", 100)
        found += [row.run_id for row in page.items]
        cursor = page.cursor
        if cursor is None:
            return found
