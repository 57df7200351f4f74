"""The commands and their options. What they print is made in `keiro.cli.output`.

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 the run failed or was
cancelled, a replay would break or the doctor has found something, 2 the command could not do what it was asked (the
message says why), 130 interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

import keiro
from keiro.cli import operations, output, scheduling
from keiro.cli.driving import GRACE_S, described_queues, driven, load_module, load_workflow, parse_input
from keiro.cli.operating import Told
from keiro.cli.reading import journal as reading
from keiro.cli.replaying import replay_all
from keiro.engine import DEFAULT_URL, Engine
from keiro.errors import InvalidCall, KeiroError
from keiro.events import Event, StateChanged, WorkflowCancelled
from keiro.mapper import EventMapper
from keiro.projections.steps import steps
from keiro.rows import Status
from keiro.stores.base import wall_ms

app = typer.Typer(
    name="keiro",
    help="Durable workflows over a journal in SQLite or Postgres.",
    epilog="Exit codes: 0 done, 1 the run failed or was cancelled or a replay would break, 2 the command could not do "
    "it, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

schedules = typer.Typer(name="schedules", help="Runs that are started by the clock.", no_args_is_help=True)
app.add_typer(schedules)

Url = Annotated[
    str,
    typer.Option(
        envvar="KEIRO_URL", metavar="URL", help="Where the journal is: sqlite:///file.db or postgresql://host/database."
    ),
]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, wf:<workflow>-<key>.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without, nothing is changed.")]
Schedule = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"keiro {keiro.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[_ToStandardError()])


class _ToStandardError(logging.Handler):
    """Writes where standard error leads at the moment: while progress is shown, above it."""

    def emit(self, record: logging.LogRecord) -> None:
        told: dict[str, object] = getattr(record, "keiro", {})
        # The command ends with how its run failed or what was mended, and it is no worker that ought to have every
        # workflow.
        if told.get("event") not in ("run_failed", "unregistered_workflow", "run_mended"):
            output.note(f"{record.levelname.lower()}: {self.format(record)}")


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(metavar="MODULE:WORKFLOW", help="For example orders:fulfil.")],
    input: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="The arguments: an object has them by name, an array by place, else it is the only one.",
        ),
    ] = "{}",
    id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The run's key. Without it an unfinished run with equal input goes on."),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only: no progress, and a failure too.")] = False,
) -> None:
    """Run a workflow to its result. Started again after a kill, it goes on where it stopped.

    The result is printed as JSON. What steps print goes to standard error.
    """
    output.keep_apart()

    async def work() -> bool:
        workflows, definition = load_workflow(workflow)
        arguments = parse_input(input, definition)
        engine = Engine(url, workflows=workflows, queues=described_queues(workflows), migrate=True, grace=GRACE_S)
        async with driven(engine, definition, arguments, id, quiet=as_json) as ended:
            output.ended(ended, as_json)
        return ended.status == Status.COMPLETED

    if not _run(work()):
        sys.exit(1)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="What to measure (default: Python's standard library).")
    ] = None,
    url: Annotated[str, typer.Option(metavar="URL", help="Where the journal is.")] = "sqlite:///keiro-demo.db",
    as_json: AsJson = False,
) -> None:
    """Measure every file of a folder in durable steps. Kill it whenever you like and start it again."""
    from keiro.cli import demo as demonstration

    output.keep_apart()

    async def work() -> bool:
        arguments = demonstration.arguments(folder, url)
        engine = Engine(
            url,
            workflows=[demonstration.measure_folder],
            migrate=True,
            grace=GRACE_S,
            payload_limit=demonstration.PAYLOAD_LIMIT,
        )
        async with driven(engine, demonstration.measure_folder, arguments, None, quiet=as_json) as ended:
            if as_json or ended.result_json is None:
                output.ended(ended, as_json)
            else:
                output.summary(demonstration.summary_of(ended.result_json), ended.run_id, url)
        return ended.status == Status.COMPLETED

    if not _run(work()):
        sys.exit(1)


@app.command("list")
def list_runs(
    status: Annotated[Status | None, typer.Option(help="Only runs with this status.")] = None,
    workflow: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="At most so many.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with _reporting(), reading(url) as journal:
        found = journal.runs(status, workflow, limit + 1)
    output.runs(found[:limit], as_json)
    if len(found) > limit and not as_json:
        output.note(f"these are the newest {limit}: --limit N shows more")


@app.command()
def find(
    status: Annotated[Status | None, typer.Option(help="Only runs with this status.")] = None,
    workflow: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="RUN", help="Only runs below this one; `none`: alone.")] = None,
    lineage: Annotated[str | None, typer.Option(metavar="RUN", help="Only the rounds of this run.")] = None,
    waiting: Annotated[str | None, typer.Option(metavar="KIND", help="Only runs that wait for such; `none`.")] = None,
    attribute: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only with this; repeat.")] = None,
    id_prefix: Annotated[str | None, typer.Option(metavar="TEXT", help="Only ids that begin so.")] = None,
    failure: Annotated[str | None, typer.Option(metavar="WORDS", help="Only failures with these words.")] = None,
    after: Annotated[datetime | None, typer.Option(help="Only runs created then (UTC) or later.")] = None,
    before: Annotated[datetime | None, typer.Option(help="Only runs created then (UTC) or earlier.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many, up to 200.")] = 100,
    cursor: Annotated[str | None, typer.Option(metavar="TEXT", help="Go on behind a page, with its options.")] = None,
    counts: Annotated[bool, typer.Option("--counts", help="Only how many have each status.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Find runs in the listing, newest first, by what they have in common; pages of any length cost the same."""
    with _reporting():
        filters = operations.filters(
            {"status": status, "workflow": workflow, "lineage": lineage, "id_prefix": id_prefix, "failure": failure},
            {"parent": parent, "waiting": waiting},
            {"created_after": after, "created_before": before},
            attribute or [],
        )
        if counts:
            output.counts(asyncio.run(operations.counts(url, filters)), as_json)
        else:
            output.page(asyncio.run(operations.find(url, filters, limit, cursor)), as_json)


@app.command()
def show(run_id: RunId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a run: its state, and its steps with their durations."""
    with _reporting(), reading(url) as journal:
        found = journal.run(run_id)
        mapper = EventMapper()
        events = [mapper.decode_row(event, run_id) for event in journal.events(found)]
    output.run(found, steps(events), as_json, _why_it_ends(events))


def _why_it_ends(events: Sequence[Event]) -> str | None:
    """The reason that somebody gave for the cancellation of a run, or for asking it to end."""
    for event in reversed(events):
        match event:
            case WorkflowCancelled(reason=str(reason)) | StateChanged(state="cancel_requested", reason=str(reason)):
                return reason
    return None


@app.command("steps")
def list_steps(run_id: RunId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the steps of a run, with their attempts and durations."""
    with _reporting(), reading(url) as journal:
        mapper = EventMapper()
        rows = steps(mapper.decode_row(event, run_id) for event in journal.events(journal.run(run_id)))
    output.steps(rows, as_json)


@app.command()
def workers(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the engines that are open on this journal, with their leases and how many runs each drives."""
    with _reporting(), reading(url) as journal:
        found = journal.workers()
    output.workers(found, wall_ms(), as_json)


@app.command()
def journal(run_id: RunId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Print the events of a run."""
    with _reporting(), reading(url) as opened:
        events = opened.events(opened.run(run_id))
    output.journal(events, as_json)


@app.command()
def children(run_id: RunId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the children of a run."""
    with _reporting():
        found = asyncio.run(operations.children(url, run_id))
    output.children(found, as_json)


@app.command()
def tree(run_id: RunId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a run and everything below it, with what each waits for."""
    with _reporting():
        found = asyncio.run(operations.tree(url, run_id))
    output.tree(found, as_json)


@app.command()
def start(
    workflow: Annotated[str, typer.Argument(metavar="MODULE:WORKFLOW", help="For example orders:fulfil.")],
    input: Annotated[str, typer.Option(metavar="JSON", help="The arguments, as for `keiro run`.")] = "{}",
    id: Annotated[str | None, typer.Option(metavar="ID", help="The run's key (default: a random one).")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Start a run for workers to drive, and print its id."""
    output.keep_apart()
    with _reporting():
        started = asyncio.run(operations.start(url, workflow, input, id))
    output.told(Told(started, "started", (started,)), as_json, yes=True)


@app.command()
def worker(
    modules: Annotated[list[str], typer.Argument(metavar="MODULE...", help="Whose workflows are driven.")],
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="So many runs at once.")] = 1000,
    url: Url = DEFAULT_URL,
) -> None:
    """Drive runs until SIGTERM or Ctrl-C; steps under way then get their time, and all runs are handed back."""
    output.keep_apart()
    with _reporting():
        asyncio.run(operations.work(url, modules, concurrency))


@app.command()
def complete(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="The run's id.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The deferred's name.")] = None,
    value: Annotated[str, typer.Option(metavar="JSON", help="What it is completed with.")] = "null",
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="In place of RUN and NAME.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Complete a deferred of a run. The first completion counts."""
    with _reporting():
        done = asyncio.run(operations.complete(url, run_id, name, value, token))
    output.told(done, as_json, yes=True)


@app.command()
def cancel(
    run_id: RunId,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Cancel a run and its children. Without --yes only show which runs would be cancelled."""
    with _reporting():
        done = asyncio.run(operations.cancel(url, run_id, reason, yes=yes))
    output.told(done, as_json, yes=yes)


@app.command()
def resurrect(
    run_id: RunId,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; it is recorded.")] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Let a failed run go on where it failed. Without --yes only show whether it would."""
    with _reporting():
        done = asyncio.run(operations.resurrect(url, run_id, reason, yes=yes))
    output.told(done, as_json, yes=yes)


@schedules.command("list")
def list_schedules(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the schedules, with when they tick next and what they have started last."""
    with _reporting():
        found = asyncio.run(scheduling.rows(url))
    output.schedules(found, as_json)


@schedules.command()
def put(
    name: Schedule,
    workflow: Annotated[str, typer.Argument(metavar="MODULE:WORKFLOW", help="For example orders:report.")],
    cron: Annotated[str, typer.Option(metavar="CRON", help="For example '0 8 * * MON-FRI', or @daily.")],
    zone: Annotated[str, typer.Option(metavar="ZONE", help="Whose clock counts, for example Europe/Berlin.")] = "UTC",
    overlap: Annotated[str, typer.Option(metavar="skip|allow", help="While the run before goes on.")] = "skip",
    backfill: Annotated[bool, typer.Option("--backfill", help="Make up for missed ticks.")] = False,
    input: Annotated[str, typer.Option(metavar="JSON", help="The arguments, as for `keiro run`.")] = "{}",
    tick: Annotated[str | None, typer.Option(metavar="NAME", help="The argument that gets the tick's time.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Define a schedule, or change it. The same again changes nothing."""
    output.keep_apart()
    with _reporting():
        done = asyncio.run(
            scheduling.put(url, name, workflow, input, tick, cron=cron, zone=zone, overlap=overlap, backfill=backfill)
        )
    output.told(done, as_json, yes=True)


@schedules.command()
def pause(name: Schedule, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let no tick start a run, until it is resumed."""
    with _reporting():
        done = asyncio.run(scheduling.pause(url, name))
    output.told(done, as_json, yes=True)


@schedules.command()
def resume(name: Schedule, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let a paused schedule tick again."""
    with _reporting():
        done = asyncio.run(scheduling.resume(url, name))
    output.told(done, as_json, yes=True)


@schedules.command()
def trigger(name: Schedule, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Start a run of a schedule now, and print its id."""
    with _reporting():
        done = asyncio.run(scheduling.trigger(url, name))
    output.told(done, as_json, yes=True)


@schedules.command()
def delete(name: Schedule, yes: Yes = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a schedule; the runs that it has started stay. Without --yes only show whether there is one."""
    with _reporting():
        done = asyncio.run(scheduling.delete(url, name, yes=yes))
    output.told(done, as_json, yes=yes)


@app.command()
def gc(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Since their end: 90s, 15m, 12h, 30d or 8w.")],
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Delete runs that ended long ago, with all there is of them. Without --yes only list them."""
    with _reporting():
        found = asyncio.run(operations.gc(url, older_than, yes=yes))
    output.collected(found, as_json, yes=yes)
    if found.failed:
        sys.exit(1)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Mend it; without, nothing is changed.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Compare the rows of all runs with their journal. The exit code is 1 if something is wrong and was not mended."""
    with _reporting():
        found = asyncio.run(operations.reconcile(url, fix=fix))
    output.findings(found, as_json)
    if not all(one.fixed for one in found):
        sys.exit(1)


@app.command()
def replay(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="Whose workflows replay their runs.")],
    workflow: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this workflow.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only runs with this status.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Replay recorded runs with today's code and print what would break. No step is run and nothing is written.

    The exit code is 1 if something would break.
    """
    output.keep_apart()
    with _reporting():
        _, workflows = load_module(module)
        with reading(url) as journal:
            found = asyncio.run(replay_all(journal, module, workflows, workflow, status))
    output.replayed(found, as_json)
    if found.broken:
        sys.exit(1)


@app.command()
def migrate(
    url: Url = DEFAULT_URL,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the schema is up to date.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schema of a database up to date."""
    from keiro.stores import open_store
    from keiro.stores.faults import postgres_target
    from keiro.stores.migrate import HEAD, ensure_postgres, ensure_sqlite
    from keiro.stores.sqlite import SQLiteStore

    with _reporting():
        store = open_store(url)
        if url.startswith("memory:"):
            raise InvalidCall("memory:// has no schema: give --url sqlite:///file.db or postgresql://host/database")
        if isinstance(store, SQLiteStore):
            target = f"sqlite:///{store.path}"
            ensure_sqlite(store.path, mode="verify" if check else "migrate")
        else:
            target = postgres_target(url)
            ensure_postgres(url, mode="verify" if check else "migrate")
    output.migrated(target, HEAD, as_json)


def _run(work: Coroutine[Any, Any, bool]) -> bool:
    with _reporting():
        return asyncio.run(work)


@contextmanager
def _reporting() -> Iterator[None]:
    """Turn errors into messages and exit codes."""
    try:
        yield
    except KeiroError as error:
        output.fail(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        output.note("interrupted: start the same command again to go on")
        sys.exit(130)
    except Exception:
        # Not a failed run, whose exit code is 1: keiro itself has failed.
        traceback.print_exc()
        sys.exit(2)
