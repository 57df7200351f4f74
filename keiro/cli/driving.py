"""Runs one workflow to its end in this process."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, Final

import msgspec

from keiro.cli.output import note
from keiro.cli.progress import watch
from keiro.definition import Workflow
from keiro.engine import Engine
from keiro.errors import InvalidCall, StoreBusy, StoreUnavailable
from keiro.limits import Queue
from keiro.rows import Run, Status
from keiro.run import WorkflowRun, workflow_of

Arguments = tuple[Sequence[Any], dict[str, Any]]

GRACE_S: Final = 10.0
RETRY_S: Final = 1.0
PAGE: Final = 1000


def load_workflow(spec: str) -> tuple[list[Workflow], Workflow]:
    """The workflows of a module, and the one that `MODULE:WORKFLOW` names. Raises `InvalidCall`."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise InvalidCall(f"{spec!r} names no workflow: write MODULE:WORKFLOW, for example orders:fulfil")
    if module_name.endswith(".py"):
        raise InvalidCall(f"{spec!r} names a file: name the module, {_dotted(module_name)}:{name}")
    module, workflows = load_module(module_name)
    names = ", ".join(workflow.name for workflow in workflows) or "none"
    wanted: Any = module
    for part in name.split("."):
        try:
            wanted = getattr(wanted, part)
        except Exception as error:
            raise InvalidCall(f"module {module_name!r} has no {name!r}; its workflows are: {names}") from error
    try:
        workflow = workflow_of(wanted)
    except InvalidCall as error:
        raise InvalidCall(f"{spec}: {error}; the workflows of {module_name!r} are: {names}") from error
    return [*workflows, *([] if workflow in workflows else [workflow])], workflow


def load_module(name: str) -> tuple[ModuleType, list[Workflow]]:
    """A module and its workflows. Raises `InvalidCall`."""
    if name.endswith(".py"):
        raise InvalidCall(f"{name!r} names a file: name the module, {_dotted(name)}")
    if ":" in name:
        raise InvalidCall(f"{name!r} names a workflow: this command takes all of a module, {name.partition(':')[0]}")
    # As with `python -m`: what lies in the current folder can be imported.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(name)
    return module, _workflows(vars(module).values())


def _dotted(file: str) -> str:
    return file.removeprefix("./").removesuffix(".py").replace("/", ".")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a module that exits
        if not (isinstance(error, ModuleNotFoundError) and _leads_to(error.name, name)):
            _show_frames(error)
        said = "".join(traceback.format_exception_only(error)).strip()
        raise InvalidCall(
            f"module {name!r} cannot be imported ({said}): run the command in the folder the module lies in, and check "
            f"that `python -c 'import {name}'` works there"
        ) from error


def _leads_to(missing: str | None, name: str) -> bool:
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def _show_frames(error: BaseException) -> None:
    """Where in the user's module it went wrong, without the frames of the import."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    theirs = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<frozen ")]
    if theirs:
        note("Traceback (most recent call last):\n" + "".join(traceback.format_list(theirs)).rstrip())


def _workflows(values: Iterable[Any]) -> list[Workflow]:
    found: dict[int, Workflow] = {}
    for value in values:
        if inspect.isclass(value) and issubclass(value, WorkflowRun):
            value = value._keiro_workflow
        if isinstance(value, Workflow):
            found[id(value)] = value
    return list(found.values())


def described_queues(workflows: Iterable[Workflow]) -> list[Queue]:
    """The queues that the modules of these workflows describe: each `keiro.Queue` at their top level, by itself or in a
    list."""
    found: list[Queue] = []
    for name in dict.fromkeys(workflow.body.__module__ for workflow in workflows):
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            found += [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Queue)]
    return found


def parse_input(text: str, workflow: Workflow) -> Arguments:
    """The arguments that a JSON text stands for. Raises `InvalidCall`."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        shown = text if len(text) <= 100 else f"{text[:99]}…"
        raise InvalidCall(
            f"--input is not JSON ({error}): {shown!r}. Strings need double quotes, so quote the whole for the shell: "
            """--input '{"name": "value"}'"""
        ) from error
    if not isinstance(value, dict):
        return (value if isinstance(value, list) else [value]), {}
    # By place as far as the names are the first ones: `start` has keywords of its own.
    args = []
    for parameter in list(inspect.signature(workflow.body).parameters.values())[1:]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in value:
            break
        args.append(value.pop(parameter.name))
    if taken := {"id", "connection"} & value.keys():
        raise InvalidCall(
            f"--input: argument {min(taken)!r} cannot be given by name: give all arguments by place, as a JSON array"
        )
    return args, value


@asynccontextmanager
async def driven(
    engine: Engine, workflow: Workflow, arguments: Arguments, id: str | None, *, quiet: bool
) -> AsyncIterator[Run]:
    """Start the run, or go on with an unfinished equal one, and show its progress; the block gets the run once it has
    ended. The engine is closed after the block, which may take the grace that runs of others get.

    SIGTERM and SIGINT raise `CancelledError`: steps under way are recorded, the run is handed back.
    """
    args, kwargs = arguments
    async with engine:
        since_ms = engine.wall_ms()
        signals = Signals(engine)
        key = id if id is not None else await _unfinished(engine, workflow, arguments)
        handle = await engine.start(workflow, *args, id=key, **kwargs)
        ended = _ended(engine, handle.run_id)
        run = await (ended if quiet else watch(engine, handle.run_id, ended, since_ms))
        signals.closing = True
        yield run


class Signals:
    """The first signal ends the run in this process with grace, the second without, a third the process itself."""

    def __init__(self, engine: Engine) -> None:
        self.closing = False
        self._engine = engine
        self._task = asyncio.current_task()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._caught)
        self._sealed = False

    def _caught(self) -> None:
        if self._sealed:
            os._exit(130)
        if self.closing:
            self._sealed = True
            self._engine.seal_all()
            return
        self.closing = True
        note(f"stopping: steps under way get {GRACE_S:g} s to end, a second signal stops them now")
        assert self._task is not None
        self._task.cancel()


async def _ended(engine: Engine, run_id: str) -> Run:
    while True:
        try:
            return await engine.wait_ended(run_id)
        except (StoreBusy, StoreUnavailable) as error:
            engine.report("store_away", run_id, error=str(error))
            await asyncio.sleep(RETRY_S)


async def _unfinished(engine: Engine, workflow: Workflow, arguments: Arguments) -> str | None:
    """The key of the newest run of this workflow with this input that has not ended."""
    wanted = workflow.input.encode(tuple(arguments[0]), arguments[1], limit=engine.payload_limit)
    # Twice, because a run that is claimed or handed back between two looks would be in neither.
    for status in (Status.PENDING, Status.SUSPENDED, Status.RUNNING, Status.PENDING, Status.SUSPENDED):
        before = None
        while found := await engine.runs(status=status, workflow=workflow.name, before=before, limit=PAGE):
            for run in found:
                if run.round_ordinal == 0 and workflow.input.same(run.input_json.encode(), wanted):
                    return run.key
            before = found[-1].run_key
    return None
