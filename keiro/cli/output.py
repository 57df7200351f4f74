"""What the commands print: tables for people, JSON for programs, from the same values."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keiro.cli.demo import Summary
from keiro.decisions import Stored
from keiro.errors import KeiroError, WorkflowFailed
from keiro.rows import PAYLOAD_COLUMNS, Run

_out = Console(highlight=False)


class Deaf:
    """The listener of a store that is only read."""

    def committed(self, changed: Sequence[Run]) -> None:
        """Nothing is committed."""

    def woken(self) -> None:
        """Nobody waits."""


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr)


def result(value: Any) -> None:
    """A result, as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def failed(error: KeiroError) -> None:
    """How a run ended, with what is known of its cause."""
    note(f"keiro: {error}")
    if isinstance(error, WorkflowFailed) and error.failure is not None and error.failure.traceback:
        note(error.failure.traceback.rstrip())
    elif error.__cause__ is not None:
        note("".join(traceback.format_exception_only(error.__cause__)).rstrip())


def runs(found: list[Run], as_json: bool) -> None:
    """A list of runs."""
    if as_json:
        result([_row(run) for run in found])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("status", "created", "took"):
        table.add_column(name, no_wrap=True)
    for run in found:
        table.add_row(escape(run.run_id), run.status, _time(run.created_at_ms), _span(run.created_at_ms, run.finished_at_ms))
    _out.print(table if found else "no runs")


def run(found: Run, steps: list[Any], as_json: bool) -> None:
    """A run and its steps."""
    if as_json:
        result({**_row(found), "steps": steps})
        return
    _out.print(f"[bold]{escape(found.run_id)}[/bold]  {found.status}")
    _out.print(f"created {_time(found.created_at_ms)}, took {_span(found.created_at_ms, found.finished_at_ms)}")
    for name in PAYLOAD_COLUMNS:
        value = getattr(found, name)
        if value is not None:
            _out.print(f"{name.removesuffix('_json')}: {escape(_clip(value))}")
    table = Table("step", "status", "attempt", "ms", "result", box=None, pad_edge=False)
    for step in steps:
        shown = step.result if step.result is not None else step.failure
        table.add_row(
            escape(step.step),
            step.status,
            str(step.attempt),
            "" if step.duration_ms is None else str(step.duration_ms),
            escape(_clip(_json(shown), 60)),
        )
    _out.print(table)


def journal(events: list[Stored], as_json: bool) -> None:
    """The events of a run."""
    if as_json:
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
        return
    table = Table("version", "recorded", "event", "payload", box=None, pad_edge=False)
    for event in events:
        table.add_row(
            str(event.version), _time(event.recorded_at_ms), escape(event.topic), escape(_clip(event.payload, 100))
        )
    _out.print(table)


def migrated(url: str, revision: str, as_json: bool) -> None:
    """The schema is up to date."""
    if as_json:
        result({"url": url, "revision": revision})
    else:
        print(f"{url} is at revision {revision}")


def summary(found: Summary, url: str) -> None:
    """The result of the demonstration."""
    table = Table("suffix", title=escape(found.folder), title_justify="left", box=None, pad_edge=False)
    for name in ("files", "bytes", "lines", "compressed", "ratio"):
        table.add_column(name, justify="right")
    shown = found.groups[:10]
    for group in shown:
        table.add_row(escape(group.suffix), *_figures(group.files, group.size, group.lines, group.compressed))
    if len(found.groups) > len(shown):
        table.add_row(f"{len(found.groups) - len(shown)} more")
    table.add_row("all", *_figures(found.files, found.size, found.lines, found.compressed), style="bold")
    _out.print(table)
    if found.unreadable:
        print(f"{found.unreadable} files could not be read; the journal says why")
    print(f"sha256 over all: {found.digest}")
    print(f"keiro list --url {url} shows the run, keiro show RUN --url {url} its steps")


def _figures(files: int, size: int, lines: int, compressed: int) -> list[str]:
    ratio = f"{compressed / size:.2f}" if size else "-"
    return [f"{files:,}", f"{size:,}", f"{lines:,}", f"{compressed:,}", ratio]


def _row(run: Run) -> dict[str, Any]:
    row = {name: getattr(run, name) for name in run.__struct_fields__}
    for name in PAYLOAD_COLUMNS:
        value = row.pop(name)
        row[name.removesuffix("_json")] = None if value is None else msgspec.Raw(value.encode())
    return row


def _json(value: Any) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()


def _clip(text: str, width: int = 200) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _span(begin: int, end: int | None) -> str:
    return "" if end is None else f"{(end - begin) / 1000:.2f} s"
