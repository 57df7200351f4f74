"""What operators do to runs: start, complete, cancel, resurrect; and worker processes.

What ends or revives a run is only shown, with nothing changed, until `--yes` is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from keiro.cli import output
from keiro.cli.driving import described_queues, load_module, load_workflow, parse_input
from keiro.cli.operating import Node, Told, waited_for
from keiro.cli.reading import must_exist
from keiro.engine import Engine
from keiro.errors import InvalidCall
from keiro.executions import Page
from keiro.projections.invariants import Finding
from keiro.retention import Collection
from keiro.rows import Run, Status


@asynccontextmanager
async def client(url: str) -> AsyncIterator[Engine]:
    """An engine that drives nothing, on a journal that exists: a mistaken URL makes no new one, and a look at an older
    one does not upgrade it under the processes that use it."""
    must_exist(url)
    async with Engine(url, worker=False, migrate=False) as engine:
        yield engine


def filters(
    given: Mapping[str, str | None],
    nullable: Mapping[str, str | None],
    times: Mapping[str, datetime | None],
    attributes: Sequence[str],
) -> dict[str, Any]:
    """The options of a listing from those of a command line; `none` is what has no such thing. Raises `InvalidCall`."""
    found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    found |= {name: None if value == "none" else value for name, value in nullable.items() if value is not None}
    found |= {name: value.replace(tzinfo=value.tzinfo or UTC) for name, value in times.items() if value is not None}
    for one in attributes:
        name, equals, value = one.partition("=")
        if not equals:
            raise InvalidCall(f"--attribute {one!r}: write NAME=VALUE, such as customer=ada or paid=true")
        try:
            decoded = msgspec.json.decode(value)
        except msgspec.DecodeError:
            decoded = value  # text needs no quotes
        found.setdefault("attributes", {})[name] = decoded
    return found


async def find(url: str, filters: dict[str, Any], limit: int, cursor: str | None) -> Page:
    """A page of the listing, newest first."""
    async with client(url) as engine:
        return await engine.executions.list(**filters, newest=True, limit=limit, cursor=cursor)


async def counts(url: str, filters: dict[str, Any]) -> dict[Status, int]:
    """How many runs have each status."""
    async with client(url) as engine:
        return await engine.executions.counts(**filters)


async def start(url: str, target: str, text: str, key: str | None) -> str:
    """Start a run for workers to drive; its id."""
    workflows, definition = load_workflow(target)
    args, kwargs = parse_input(text, definition)
    async with Engine(url, workflows=workflows, worker=False) as engine:
        return (await engine.start(definition, *args, id=key, **kwargs)).run_id


async def complete(url: str, run_id: str | None, name: str | None, value: str, token: str | None) -> Told:
    """Complete a deferred."""
    try:
        decoded: Any = msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidCall(
            f"--value {value!r} is no JSON ({error}): write for example '\"yes\"', 'true' or '{{}}'"
        ) from None
    async with client(url) as engine:
        done = await engine.complete(run_id, name, decoded, token=token)
    return Told(run_id or "", "completed" if done else "was_completed_before")


async def cancel(url: str, run_id: str, reason: str | None, *, yes: bool) -> Told:
    """Cancel a run and those of its children that go with it, or say which these would be."""
    async with client(url) as engine:
        run = await engine.handle(run_id).run()
        if run.terminal:
            return Told(run_id, f"already_{run.status}")
        concerned = tuple([one async for one in _below(engine, run)])
        if not yes:
            return Told(run_id, "would_cancel", concerned)
        done = await engine.cancel(run_id, reason=reason)
        now = await engine.handle(run_id).run()
    if not now.terminal:  # it has a cleanup, which any worker performs: by this call, or by one before
        return Told(run_id, "asked_to_end" if done else "already_asked_to_end", concerned if done else ())
    return Told(run_id, "cancelled" if done else f"already_{now.status}", concerned if done else ())


async def _below(engine: Engine, top: Run) -> AsyncIterator[str]:
    todo, seen = [top], {top.lineage_id}
    while todo:
        run = todo.pop(0)
        yield run.run_id
        for edge in await engine.run_parents.children(run.run_id):
            if edge.child_id in seen:
                continue
            seen.add(edge.child_id)
            row = await engine.handle(edge.child_id).run()
            first = await engine.store.run(edge.child_id)
            if not row.terminal and first is not None and first.on_cancel != "detach":
                todo.append(row)


async def resurrect(url: str, run_id: str, reason: str | None, *, yes: bool) -> Told:
    """Let a failed run go on, or say whether it would."""
    async with client(url) as engine:
        run = await engine.handle(run_id).run()
        if run.status != Status.FAILED:
            return Told(run_id, "not_failed")
        if not yes:
            return Told(run_id, "would_resurrect", (run.run_id,))
        done = await engine.resurrect(run_id, reason=reason)
    return Told(run_id, "resurrected" if done else "not_failed", (run.run_id,) if done else ())


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def age(text: str) -> float:
    """A duration in seconds: `90`, `90s`, `15m`, `12h`, `30d` or `8w`. Raises `InvalidCall`."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        return float(number) * _UNITS[unit]
    except ValueError:
        raise InvalidCall(f"{text!r} is no duration: write for example 90s, 15m, 12h, 30d or 8w") from None


async def gc(url: str, older_than: str, *, yes: bool) -> Collection:
    """Delete runs that ended long ago, or list those that would be deleted."""
    seconds = age(older_than)
    async with client(url) as engine:
        return await engine.gc(seconds, dry_run=not yes)


async def reconcile(url: str, *, fix: bool) -> list[Finding]:
    """What of the rows is not as the journal says."""
    async with client(url) as engine:
        return await engine.reconcile(fix=fix)


async def tree(url: str, run_id: str) -> Node:
    """A run and everything below it."""
    async with client(url) as engine:
        return await _node(engine, run_id, set())


async def _node(engine: Engine, run_id: str, shown: set[str]) -> Node:
    run = await engine.handle(run_id).run()
    again = run.lineage_id in shown
    shown.add(run.lineage_id)
    below = [] if again else await engine.run_parents.children(run_id)
    children = [await _node(engine, edge.child_id, shown) for edge in below]
    return Node(run.run_id, run.status, run.round_ordinal + 1, waited_for(run), tuple(children), again)


async def children(url: str, run_id: str) -> Sequence[Any]:
    """The children of a run."""
    async with client(url) as engine:
        await engine.handle(run_id).run()
        return await engine.children.of(run_id)


async def work(url: str, modules: Sequence[str], concurrency: int) -> None:
    """Drive runs of all workflows of the modules until the process is told to stop."""
    workflows: dict[str, Any] = {}
    for module in modules:
        _, found = load_module(module)
        for workflow in found:
            workflows.setdefault(workflow.lane, workflow)
    if not workflows:
        raise InvalidCall(
            f"{', '.join(modules)}: there is no workflow in it. A worker drives the workflows of its modules"
        )
    known = list(workflows.values())
    async with Engine(url, workflows=known, queues=described_queues(known), concurrency=concurrency) as engine:
        output.note(f"driving {', '.join(sorted(workflows))}; stop it with SIGTERM or Ctrl-C")
        await engine.serve()
