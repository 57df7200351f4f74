"""What a person sees while a run goes on: on a terminal a line that lives, elsewhere its beginning and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from keiro.cli.output import note
from keiro.engine import Engine
from keiro.errors import StoreError
from keiro.events import AttemptFailed, Event, StepRecorded, WorkflowCompleted, WorkflowFailed, ms_of
from keiro.rows import Run

LOOK_S: Final = 0.1


class Seen:
    """What is known of a run from its events. Steps recorded before `since_ms` were not made by this process."""

    def __init__(self, run_id: str, since_ms: int) -> None:
        self.version = 0
        self.ended_before = False
        self._run_id = run_id
        self._since_ms = since_ms
        self._steps = self._before = self._failures = 0
        self._last = ""

    def add(self, event: Event) -> None:
        """Count an event."""
        self.version = event.originator_version
        if isinstance(event, StepRecorded):
            self._steps += 1
            self._before += ms_of(event.timestamp) < self._since_ms
            self._last = event.step
        elif isinstance(event, AttemptFailed):
            self._failures += 1
            self._last = f"{event.step} failed: {event.failure.message}"
        elif isinstance(event, WorkflowCompleted | WorkflowFailed):
            self.ended_before = ms_of(event.timestamp) < self._since_ms

    @property
    def counts(self) -> str:
        """How far the run is."""
        parts = [_many(self._steps, "step")]
        if self._before and not self.ended_before:
            parts[0] += f", {self._before} of them recorded before"
        if self._failures:
            parts.append(_many(self._failures, "failed attempt"))
        return ", ".join(parts)

    @property
    def beginning(self) -> str:
        """The first line."""
        steps = f" after {_many(self._before, 'recorded step')}" if self._before else ""
        return f"{self._run_id} {'goes on' + steps if self._before else 'is started'}"

    @property
    def last(self) -> str:
        """The newest step."""
        return " ".join(self._last.split())


async def watch(engine: Engine, run_id: str, ended: Awaitable[Run], since_ms: int) -> Run:
    """Show how a run comes on until it has ended."""
    seen = Seen(run_id, since_ms)
    result = asyncio.ensure_future(ended)
    console = Console(stderr=True)
    try:
        await _look(engine, seen)
        if not seen.ended_before:
            note(seen.beginning)
        if console.is_terminal and not console.is_dumb_terminal:
            await _live(engine, seen, result, console)
        else:
            await asyncio.wait([result])
        await _look(engine, seen)
        note(f"{run_id} has ended{' before' if seen.ended_before else ''}: {seen.counts}")
        return await result
    finally:
        result.cancel()


async def _live(engine: Engine, seen: Seen, result: asyncio.Future[Run], console: Console) -> None:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        shown = progress.add_task(seen.counts, last="", total=None)
        while not result.done():
            await asyncio.wait([result], timeout=LOOK_S)
            await _look(engine, seen)
            progress.update(shown, description=seen.counts, last=seen.last)


async def _look(engine: Engine, seen: Seen) -> None:
    try:
        async for event in engine.handle(seen._run_id).events(seen.version):
            seen.add(event)
    except StoreError:
        return  # the engine itself says so and goes on; what was missed is seen at the next look


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
