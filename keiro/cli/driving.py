"""Runs one workflow to its result in this process, with a live progress display."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from keiro.definition import Workflow
from keiro.engine import Engine, Handle
from keiro.errors import InvalidCall
from keiro.events import AttemptFailed, StepRecorded
from keiro.rows import Run, Status
from keiro.run import WorkflowRun, workflow_of


def load_workflow(spec: str) -> tuple[list[Workflow], Workflow]:
    """The workflows of a module, and the one that `MODULE:WORKFLOW` names."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise InvalidCall(f"{spec!r} names no workflow: write MODULE:WORKFLOW, for example orders:fulfil")
    # As with `python -m`: what lies in the current folder can be imported.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidCall(
            f"module {module_name!r} cannot be imported ({type(error).__name__}: {error}): run the command in the folder "
            "the module lies in, and check that `python -c 'import ...'` works there"
        ) from error
    workflows = _workflows(vars(module).values())
    wanted = getattr(module, name, None)
    if wanted is None:
        names = ", ".join(workflow.name for workflow in workflows) or "none"
        raise InvalidCall(f"module {module_name!r} has no {name!r}; its workflows are: {names}")
    return workflows, workflow_of(wanted)


def _workflows(values: Any) -> list[Workflow]:
    found: dict[int, Workflow] = {}
    for value in values:
        is_class = inspect.isclass(value) and issubclass(value, WorkflowRun) and "_keiro_workflow" in vars(value)
        if isinstance(value, Workflow) or is_class:
            workflow = workflow_of(value)
            found[id(workflow)] = workflow
    return list(found.values())


def parse_input(text: str) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments that a JSON text stands for."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidCall(f"--input is not JSON ({error}): {text[:100]!r}") from error
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, list) else [value]), {}


async def drive(
    engine: Engine, workflow: Workflow, args: Sequence[Any], kwargs: dict[str, Any], id: str | None, *, quiet: bool
) -> Any:
    """Start the run, or go on with an unfinished equal one, and show its progress until it has a result.

    SIGTERM ends it like an interrupt: steps under way are recorded, the run is handed back.
    """
    async with engine:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        before = await _unfinished(engine, workflow, args, kwargs) if id is None else None
        handle = await engine.start(workflow, *args, id=id or before, **kwargs)
        if quiet:
            return await handle.result()
        return await _watched(handle)


async def _unfinished(
    engine: Engine, workflow: Workflow, args: Sequence[Any], kwargs: dict[str, Any]
) -> str | None:
    wanted = workflow.input.encode(tuple(args), kwargs, limit=engine.payload_limit)
    for status in (Status.RUNNING, Status.PENDING, Status.SUSPENDED):
        for run in await engine.runs(status=status, workflow=workflow.name, limit=1000):
            if workflow.input.same(run.input_json.encode(), wanted):
                return run.key
    return None


async def _watched(handle: Handle) -> Any:
    console = Console(stderr=True)
    run = await handle.run()
    result = asyncio.ensure_future(handle.result())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=not console.is_terminal) as progress:
        shown = progress.add_task(handle.run_id)
        seen = _Seen(run)
        while True:
            await asyncio.wait([result], timeout=0.1)
            async for event in handle.events(seen.version):
                seen.add(event)
            progress.update(shown, description=seen.line(handle.run_id))
            if result.done():
                break
    if not console.is_terminal:
        console.print(seen.line(handle.run_id), highlight=False)
    return await result


class _Seen:
    """What the progress line says."""

    def __init__(self, run: Run) -> None:
        self.version = 0
        self._steps = 0
        self._failures = 0
        self._last = ""
        self._before: int | None = None
        self._continued = run.status != Status.RUNNING or run.started_at_ms != run.created_at_ms

    def add(self, event: Any) -> None:
        self.version = event.originator_version
        if isinstance(event, StepRecorded):
            self._steps += 1
            self._last = event.step
        elif isinstance(event, AttemptFailed):
            self._failures += 1
            self._last = f"{event.step} failed: {event.failure.message}"

    def line(self, run_id: str) -> str:
        if self._before is None:
            self._before = self._steps if self._continued else 0
        parts = [f"{run_id}: {self._steps} steps"]
        if self._before:
            parts.append(f"{self._before} of them recorded before")
        if self._failures:
            parts.append(f"{self._failures} failed attempts")
        if self._last:
            parts.append(self._last[:60])
        return ", ".join(parts)
