"""What the commands print: text for people, JSON for programs, from the same values.

Results go to standard output and nothing else does; all notes go to standard error. Text is never cut to the width of
the terminal: an id that the terminal wraps can be copied whole, and a pipe gets one row a line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from keiro.cli.demo import Summary
from keiro.cli.operating import Node, Told, waited_for
from keiro.cli.replaying import Findings
from keiro.decisions import Stored
from keiro.events import ms_of
from keiro.executions import Page
from keiro.failures import Failure, describe
from keiro.projections.executions import Execution
from keiro.projections.invariants import Finding
from keiro.projections.steps import StepRow
from keiro.projections.waits import ChildRow
from keiro.retention import Collection
from keiro.rows import PAYLOAD_COLUMNS, Run, Status
from keiro.schedules import ScheduleRow
from keiro.stores import shown as shown_url
from keiro.stores.base import WorkerRow

_STYLES: Final = {"failed": "red", "cancelled": "yellow", "completed": "green", "succeeded": "green"}
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PADDED: Final = 40
"""Columns are padded up to here; what is wider stands out of its column."""

_results = 1


def keep_apart() -> None:
    """From now on what steps and their programs print goes to standard error, results alone to standard output."""
    global _results
    sys.stdout.flush()
    _results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr


# To standard error


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(_plain(text), file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    """The command could not do what it was asked."""
    note(f"keiro: {message}")
    sys.exit(2)


# To standard output


def result(value: Any) -> None:
    """A value as JSON, in UTF-8 wherever it goes."""
    _write(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def lines(rows: Iterable[str | Text]) -> None:
    """Text, with colours on a terminal only."""
    encoding = sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"
    # The console looks whether this is a terminal; what it makes is written below, where a closed pipe is no error.
    with os.fdopen(_results, "w", encoding=encoding, closefd=False) as out:
        console = Console(file=out, highlight=False, markup=False, emoji=False, soft_wrap=True)
        with console.capture() as captured:
            for row in rows:
                console.print(row)
    _write(captured.get().encode(encoding, "backslashreplace"))


def _write(data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(_results, rest) :]
    except BrokenPipeError:
        # Whoever read has all that it wanted, as in `keiro list | head`.
        sys.exit(0)
    except OSError as error:
        fail(f"standard output cannot be written: {error.strerror}")


# Runs


def ended(run: Run, as_json: bool) -> None:
    """How a run ended: its result to standard output, or its failure to standard error."""
    if run.result_json is not None:
        _write(msgspec.json.format(run.result_json.encode()) + b"\n")
        return
    if as_json:
        result({name: value for name, value in _row(run).items() if name in ("run_id", "status", "failure")})
    note(f"keiro: {run.run_id} {'has failed' if run.failure_json else f'is {run.status}'}")
    if run.failure_json is not None:
        note(describe(msgspec.json.decode(run.failure_json, type=Failure)))


def runs(found: list[Run], as_json: bool) -> None:
    """A list of runs. The id comes last: it may be longer than a line."""
    if as_json:
        result([_row(run) for run in found])
    elif not found:
        note("no runs")
    else:
        shown = [(r.status, _time(r.created_at_ms), _took(r.created_at_ms, r.finished_at_ms), r.run_id) for r in found]
        if any(r.version_tag is not None for r in found):
            # What is pending for long may wait for a worker of its version.
            tagged = [(*row[:3], r.version_tag or "", row[3]) for row, r in zip(shown, found, strict=True)]
            lines(_table(("status", "created", "took", "version", "run"), tagged, right=("took",)))
            return
        lines(_table(("status", "created", "took", "run"), shown, right=("took",)))


def page(found: Page, as_json: bool) -> None:
    """A page of the listing."""
    if as_json:
        result({"items": [_execution(one) for one in found.items], "cursor": found.cursor, "revision": found.revision})
        return
    if not found.items:
        note("no runs")
        return
    shown = [
        (one.status, _time(one.created_at_ms), _took(one.created_at_ms, one.finished_at_ms), one.run_id)
        for one in found.items
    ]
    lines(_table(("status", "created", "took", "run"), shown, right=("took",)))
    if found.cursor is not None:
        note(f"there are more: --cursor {found.cursor}")


def _execution(one: Execution) -> dict[str, Any]:
    row = msgspec.structs.asdict(one)
    for name in ("attributes", "failure"):
        del row[f"{name}_json"]
        row[name] = getattr(one, name)
    return row


def counts(found: Mapping[Status, int], as_json: bool) -> None:
    """How many runs have each status."""
    if as_json:
        result({str(status): number for status, number in found.items()})
    else:
        lines(_table(("status", "runs"), [(status, str(number)) for status, number in found.items()], right=("runs",)))


def run(found: Run, steps: list[StepRow], as_json: bool, reason: str | None = None) -> None:
    """A run and its steps; `reason` is why it was cancelled or asked to end."""
    if as_json:
        result({**_row(found), "reason": reason, "steps": steps})
        return
    head = Text.assemble(found.run_id, "  ", (found.status, _STYLES.get(found.status, "")))
    times = f"created {_time(found.created_at_ms)}"
    if found.finished_at_ms is not None:
        times += f", took {_took(found.created_at_ms, found.finished_at_ms)}"
    elif found.next_attempt_at_ms is not None:
        times += f", attempt {found.attempts + 1} at {_time(found.next_attempt_at_ms)}"
    rows: list[str | Text] = [head, times]
    if found.version_tag is not None:
        rows.append(f"version {found.version_tag}")
    if not found.terminal and found.grace_over_ms is not None:
        rows.append(f"asked to end, cancelled at {_time(found.grace_over_ms)} at the latest")
    if reason is not None:
        rows.append(f"reason: {_clip(reason, 500)}")
    if (waits := waited_for(found)) is not None:
        until = "" if found.wake_at_ms is None else f", until {_time(found.wake_at_ms)} at the latest"
        rows.append(f"waits for {waits}{until}")
    for name in ("attributes_json", "input_json", "result_json"):
        value = getattr(found, name)
        if value is not None:
            rows.append(f"{name.removesuffix('_json')}: {_clip(value, 500)}")
    if found.failure_json is not None:
        rows += ["failure:", *(f"  {line}" for line in _failure_lines(found.failure_json))]
    if steps:
        rows += ["", *_step_table(steps)]
    else:
        rows += ["", "no steps"]
    lines(rows)


def _step_table(steps: list[StepRow]) -> Iterable[str | Text]:
    shown = [
        (
            step.status,
            "" if step.started_at_ms is None else _time(step.started_at_ms),
            "" if step.duration_ms is None else _ms(step.duration_ms),
            str(step.attempt),
            step.step,
            _outcome(step),
        )
        for step in steps
    ]
    return _table(("status", "started", "took", "attempt", "step", "result"), shown, right=("took", "attempt"))


def journal(events: list[Stored], as_json: bool) -> None:
    """The events of a run."""
    if not as_json:
        rows = [(str(e.version), _time(e.recorded_at_ms), e.topic, _clip(e.payload, 200)) for e in events]
        lines(_table(("version", "recorded", "event", "payload"), rows, right=("version",)))
        return
    result(
        [
            {
                "position": event.position,
                "version": event.version,
                "event_id": event.event_id.hex(),
                "topic": event.topic,
                "payload": msgspec.Raw(event.payload.encode()),
                "recorded_at_ms": event.recorded_at_ms,
            }
            for event in events
        ]
    )


def replayed(found: Findings, as_json: bool) -> None:
    """What replays have shown."""
    if as_json:
        result(found)
        return
    rows = [(one.kind, broken.run_id, one.message) for broken in found.broken for one in broken.problems]
    if rows:
        lines(_table(("problem", "run", "what would break"), rows))
    for name, count in found.skipped.items():
        note(f"runs of {name!r} left out: {count}, the module has no such workflow")
    note(f"runs replayed: {found.runs}, would break: {len(found.broken)}")


def told(found: Told, as_json: bool, *, yes: bool) -> None:
    """What a command did to runs, or would do."""
    if as_json:
        result(found)
        return
    lines([f"{found.outcome.replace('_', ' ')}: {found.run_id}", *(f"  {name}" for name in found.runs[1:])])
    if found.outcome.startswith("would_") and not yes:
        note("nothing was changed: the same command with --yes does it")


def schedules(found: Sequence[ScheduleRow], as_json: bool) -> None:
    """Schedules, with when they tick next and what they have started last."""
    if as_json:
        result(found)
    elif not found:
        note("no schedules")
    else:

        def at(time: datetime | None) -> str:
            return "" if time is None else _time(ms_of(time))

        rows = [
            (
                one.name,
                one.workflow,
                one.cron,
                one.zone,
                "paused" if one.paused else at(one.next_at),
                at(one.last_at),
                one.last_run_id or "",
            )
            for one in found
        ]
        lines(_table(("name", "workflow", "cron", "zone", "next", "last", "last run"), rows))


def children(found: Sequence[ChildRow], as_json: bool) -> None:
    """The children of a run."""
    if as_json:
        result([{"run_id": row.run_id, **msgspec.structs.asdict(row)} for row in found])
    elif not found:
        note("no children")
    else:
        lines(_table(("status", "created", "run"), [(row.status, row.created_at[:19], row.run_id) for row in found]))


def collected(found: Collection, as_json: bool, *, yes: bool) -> None:
    """What a collection has deleted, or would."""
    if as_json:
        result({"deleted": yes, **msgspec.structs.asdict(found)})
        return
    lines(found.collected)
    for run_id, reason in found.failed:
        note(f"{run_id} could not be deleted: {reason}")
    held = found.scanned - len(found.collected) - len(found.failed)
    note(
        f"{len(found.collected)} {'deleted' if yes else 'would be deleted'}, {found.runs} rounds in all"
        + (f"; {held} are still held by their parents" if held else "")
    )
    if found.shortened:
        rounds = sum(number for _, number in found.shortened)
        note(f"{rounds} old rounds of {len(found.shortened)} runs that stay {'deleted' if yes else 'would be deleted'}")
    if not yes and (found.collected or found.shortened):
        note("nothing was changed: the same command with --yes does it")


def findings(found: Sequence[Finding], as_json: bool) -> None:
    """What is not as the journal says."""
    if as_json:
        result(found)
        return
    if found:
        rows = [(one.kind, "mended" if one.fixed else "wrong", one.run_id, one.what) for one in found]
        lines(_table(("kind", "now", "run", "what"), rows))
    mended = sum(one.fixed for one in found)
    note("everything is as the journal says" if not found else f"{len(found)} found, {mended} mended")
    if found and not mended:
        note("nothing was changed: the same command with --fix mends it")


def steps(found: list[StepRow], as_json: bool) -> None:
    """The steps of a run."""
    if as_json:
        result(found)
    elif found:
        lines(_step_table(found))
    else:
        note("no steps")


def workers(found: Sequence[tuple[WorkerRow, int]], now_ms: int, as_json: bool) -> None:
    """Workers, with how long their leases last, and how many runs they own."""
    if as_json:
        result(
            [
                {**msgspec.structs.asdict(row), "runs": runs, "lease_left_ms": row.lease_expires_at_ms - now_ms}
                for row, runs in found
            ]
        )
    elif not found:
        note("no workers: nobody drives runs here now")
    else:
        rows = [
            (
                row.worker_id[:12],
                str(row.pid),
                str(runs),
                _time(row.started_at_ms),
                _ms(left) if (left := row.lease_expires_at_ms - now_ms) > 0 else "over",
                row.host.partition("|")[0],
            )
            for row, runs in found
        ]
        lines(_table(("worker", "pid", "runs", "started", "lease left", "host"), rows, right=("pid", "runs")))


def tree(root: Node, as_json: bool) -> None:
    """A run and those below it."""
    if as_json:
        result(root)
        return

    def rows(node: Node, indent: str) -> Iterable[str | Text]:
        rounds = f"  {node.rounds} rounds" if node.rounds > 1 else ""
        waits = f"  waits for {node.waiting}" if node.waiting else ""
        again = "  (again)" if node.again else ""
        status = (node.status, _STYLES.get(node.status, ""))
        yield Text.assemble(indent, node.run_id, "  ", status, rounds, waits, again)
        for child in node.children:
            yield from rows(child, indent + "  ")

    lines(rows(root, ""))


def migrated(target: str, revision: str, as_json: bool) -> None:
    """The schema is up to date."""
    if as_json:
        result({"url": target, "revision": revision})
    else:
        lines([f"{target} is at revision {revision}"])


def summary(found: Summary, run_id: str, url: str) -> None:
    """The result of the demonstration."""
    shown = found.groups[:10]
    rows = [(*_figures(g.files, g.size, g.lines, g.compressed), g.suffix) for g in shown]
    if len(found.groups) > len(shown):
        rest = found.groups[len(shown) :]
        sums = [sum(getattr(g, name) for g in rest) for name in ("files", "size", "lines", "compressed")]
        rows.append((*_figures(*sums), f"{len(rest)} more"))
    rows.append((*_figures(found.files, found.size, found.lines, found.compressed), "all"))
    figures = ("files", "bytes", "lines", "compressed", "ratio")
    text: list[str | Text] = [_one_line(found.folder), *_table((*figures, "suffix"), rows, right=figures)]
    if found.unreadable:
        text.append(f"{found.unreadable} could not be read; the journal says why")
    text.append(f"sha256 over all: {found.digest}")
    lines(text)
    if not url.startswith("memory:"):
        note(f"see the steps with: keiro show {run_id} --url {shown_url(url)}")


# Parts


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Iterable[Text]:
    rows = [[_one_line(value) for value in row] for row in rows]
    widths = [min(_PADDED, max(cell_len(value) for value in column)) for column in zip(titles, *rows, strict=True)]
    yield Text(_line(titles, titles, widths, right), "bold")
    for row in rows:
        text = Text(_line(titles, row, widths, right))
        if titles[0] == "status":
            text.stylize(_STYLES.get(row[0], ""), 0, len(row[0]))
        yield text


def _line(titles: Sequence[str], row: Sequence[str], widths: Sequence[int], right: Sequence[str]) -> str:
    cells = []
    for title, value, width in zip(titles, row, widths, strict=True):
        pad = " " * (width - cell_len(value))
        cells.append(pad + value if title in right else value + pad)
    return "  ".join(cells).rstrip()


def _figures(files: int, size: int, lines: int, compressed: int) -> tuple[str, ...]:
    ratio = f"{compressed / size:.2f}" if size else "-"
    return f"{files:,}", f"{size:,}", f"{lines:,}", f"{compressed:,}", ratio


def _outcome(step: StepRow) -> str:
    if step.failure is not None:
        kind = step.failure.type.removeprefix("builtins:")
        return _clip(f"{kind}: {step.failure.message}", 100)
    return "" if step.finished_at_ms is None else _clip(msgspec.json.encode(step.result).decode(), 100)


def _failure_lines(failure_json: str) -> list[str]:
    text = describe(msgspec.json.decode(failure_json, type=Failure))
    return [_plain(line) for line in text.splitlines()]


def _row(run: Run) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__struct_fields__}
    for name in PAYLOAD_COLUMNS:
        value = row.pop(name)
        row[name.removesuffix("_json")] = None if value is None else msgspec.Raw(value.encode())
    return row


def _plain(text: str) -> str:
    """Without what a terminal would obey."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _one_line(text: str) -> str:
    return _plain(text).replace("\n", "\\n")


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _took(begin: int, end: int | None) -> str:
    return "" if end is None else _ms(max(end - begin, 0))


def _ms(ms: int) -> str:
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s"
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"
