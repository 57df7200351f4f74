"""What operators do to schedules: the same calls as `engine.schedules`, by an engine that drives nothing."""

from __future__ import annotations

from keiro.cli.driving import load_workflow, parse_input
from keiro.cli.operating import Told
from keiro.cli.operations import client
from keiro.engine import Engine
from keiro.errors import RunNotFound
from keiro.schedules import TICK, ScheduleRow


async def rows(url: str) -> list[ScheduleRow]:
    """All schedules."""
    async with client(url) as engine:
        return await engine.schedules.list()


async def put(
    url: str, name: str, target: str, text: str, tick: str | None, *, cron: str, zone: str, overlap: str, backfill: bool
) -> Told:
    """Define a schedule, or change it; `tick` is the argument that gets the time of the tick."""
    workflows, definition = load_workflow(target)
    args, kwargs = parse_input(text, definition)
    if tick is not None:
        kwargs = {**kwargs, tick: TICK}
    async with Engine(url, workflows=workflows, worker=False) as engine:
        changed = await engine.schedules.define(
            name, definition, tuple(args), kwargs, cron=cron, zone=zone, overlap=overlap, backfill=backfill
        )
    return Told(name, "put" if changed else "was_so_before")


async def pause(url: str, name: str) -> Told:
    """Let no tick start a run."""
    async with client(url) as engine:
        return Told(name, "paused" if await engine.schedules.pause(name) else "was_paused_before")


async def resume(url: str, name: str) -> Told:
    """Let it tick again."""
    async with client(url) as engine:
        return Told(name, "resumed" if await engine.schedules.resume(name) else "was_not_paused")


async def trigger(url: str, name: str) -> Told:
    """Start a run now."""
    async with client(url) as engine:
        handle = await engine.schedules.trigger(name)
    return Told(handle.run_id, "triggered", (handle.run_id,))


async def delete(url: str, name: str, *, yes: bool) -> Told:
    """Delete a schedule, or say whether it would be."""
    async with client(url) as engine:
        if name not in {row.name for row in await engine.schedules.list()}:
            raise RunNotFound(f"there is no schedule {name!r} here: `keiro schedules list` shows those that exist")
        if yes:
            await engine.schedules.delete(name)
    return Told(name, "deleted" if yes else "would_delete")
