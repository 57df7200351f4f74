"""The commands and their options. What they print is made in `keiro.cli.output`.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the run failed or was
cancelled, 2 the command could not do what it was asked (the message says why), 130 interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from keiro.cli import output
from keiro.cli.driving import drive, load_workflow, parse_input
from keiro.engine import DEFAULT_URL, Engine
from keiro.errors import InvalidCall, KeiroError, RunNotFound, WorkflowCancelled, WorkflowFailed
from keiro.identity import parse_run_id
from keiro.mapper import EventMapper
from keiro.rows import Run
from keiro.stores import open_store
from keiro.stores.base import Store

T = TypeVar("T")

app = typer.Typer(
    name="keiro",
    help="Durable workflows over a journal in SQLite or Postgres.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Url = Annotated[
    str,
    typer.Option(envvar="KEIRO_URL", help="Where the journal is: sqlite:///file.db or postgresql://host/database."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(metavar="MODULE:WORKFLOW", help="For example orders:fulfil.")],
    input: Annotated[
        str, typer.Option(help="JSON: an object is the arguments by name, an array by place, anything else the only one.")
    ] = "{}",
    id: Annotated[str | None, typer.Option(help="The run's id; without it an unfinished equal run goes on.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Run a workflow to its result; started again after a kill, it goes on where it stopped."""

    async def work() -> Any:
        module, definition = load_workflow(workflow)
        args, kwargs = parse_input(input)
        engine = Engine(url, workflows=module, migrate=True)
        return await drive(engine, definition, args, kwargs, id, quiet=as_json)

    output.result(_run(work()))


@app.command()
def demo(
    folder: Annotated[Path | None, typer.Argument(help="What to measure (default: Python's standard library).")] = None,
    url: Annotated[str, typer.Option(help="Where the journal is.")] = "sqlite:///keiro-demo.db",
    as_json: AsJson = False,
) -> None:
    """Measure every file of a folder in durable steps. Kill it whenever you like and start it again."""
    from keiro.cli import demo as demonstration

    async def work() -> demonstration.Summary:
        root = demonstration.root(folder)
        engine = Engine(url, workflows=[demonstration.measure_folder], migrate=True)
        found = await drive(engine, demonstration.measure_folder, (str(root),), {}, None, quiet=as_json)
        assert isinstance(found, demonstration.Summary)
        return found

    summary = _run(work())
    if as_json:
        output.result(summary)
    else:
        output.summary(summary, url)


@app.command("list")
def list_runs(
    status: Annotated[str | None, typer.Option(help="Only runs with this status.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Only runs of this workflow.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    from keiro.rows import Status

    if status is not None and status not in set(Status):
        _fail(f"{status!r} is no status; there are: {', '.join(Status)}")

    async def read(store: Store) -> list[Run]:
        return await store.runs(status=status, workflow=workflow, limit=limit)

    output.runs(_read(url, read), as_json)


@app.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, wf:<workflow>-<key>.")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a run: its state, and its steps with their durations."""
    from keiro.projections.steps import steps

    async def read(store: Store) -> tuple[Run, Any]:
        run = await _found(store, run_id)
        rows = (await store.history([run.run_key]))[run.run_key]
        mapper = EventMapper()
        return run, steps([mapper.decode_row(row, run_id) for row in rows])

    found, rows = _read(url, read)
    output.run(found, rows, as_json)


@app.command()
def journal(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, wf:<workflow>-<key>.")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Print the events of a run."""

    async def read(store: Store) -> Any:
        run = await _found(store, run_id)
        return (await store.history([run.run_key]))[run.run_key]

    output.journal(_read(url, read), as_json)


@app.command()
def migrate(
    url: Url = DEFAULT_URL,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the schema is up to date.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schema of a database up to date."""
    from keiro.stores.migrate import HEAD

    async def work() -> None:
        store = open_store(url)
        store.listener = output.Deaf()
        await store.open(migrate=not check)
        await store.close()

    _run(work())
    output.migrated(url, HEAD, as_json)


async def _found(store: Store, run_id: str) -> Run:
    parse_run_id(run_id)
    run = await store.run(run_id)
    if run is None:
        raise RunNotFound(f"there is no run {run_id!r} here: `keiro list` shows those that exist")
    return run


def _read(url: str, read: Any) -> Any:
    """Read from the journal without becoming a worker: nothing is written."""

    async def work() -> Any:
        if url.startswith("memory:"):
            raise InvalidCall("a memory:// journal ends with its process; there is nothing to read from outside")
        store = open_store(url)
        store.listener = output.Deaf()
        await store.open(migrate=False)
        try:
            return await read(store)
        finally:
            await store.close()

    return _run(work())


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (WorkflowFailed, WorkflowCancelled) as error:
        output.failed(error)
        sys.exit(1)
    except KeiroError as error:
        _fail(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        output.note("interrupted: the run is handed back, start the same command again to go on")
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    output.note(f"keiro: {message}")
    sys.exit(2)
