"""`python -m benchmarks`: take every sample, contestants taking turns within a round, and write the report.

Nothing is left out in silence: a contestant that is not installed, does not offer a measure or fails has its
line with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine, report
from benchmarks.contestant import STORES, Store
from benchmarks.entries import ENGINES, RECORDERS
from benchmarks.measures import FULL, MEASURES, QUICK, Measure, Seat, Sizes
from benchmarks.postgres import Postgres, running_postgres
from benchmarks.results import Line, Results
from benchmarks.session import Failed, Missing, Places, Refused
from keiro.testing.postgres import PostgresNotFound


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    # Ended from outside, it still stops the server and the processes it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = QUICK if options.quick else FULL
    plan = _plan(options.only)
    needs_postgres = any(store == "postgres" for _, store in plan)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="keiro-bench-"))
    began = time.monotonic()
    try:
        if needs_postgres:
            try:
                with running_postgres(options.postgres) as postgres:
                    _measure_all(plan, options.only, sizes, scratch, out, postgres, began)
                return 0
            except PostgresNotFound as missing:
                print(f"Postgres is left out (--postgres URL names a server of yours): {missing}", file=sys.stderr)
        _measure_all(plan, options.only, sizes, scratch, out, None, began)
        return 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = [*(m.name for m in MEASURES), *STORES, *(e.name for e in (*ENGINES, *RECORDERS))]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        choices=names,
        help=f"measures, stores and contestants to keep: {', '.join(names)}",
    )
    parser.add_argument("--quick", action="store_true", help="one round of small sizes")
    parser.add_argument("--out", default="bench-results", help="folder of report.md, report.json and logs")
    parser.add_argument("--postgres", metavar="URL", help="a server to use instead of starting one")
    return parser.parse_args(arguments)


def _plan(only: list[str]) -> list[tuple[Measure, Store]]:
    measures = [measure for measure in MEASURES if measure.name in only]
    stores = [store for store in STORES if store in only]
    return [
        (measure, store)
        for measure in measures or MEASURES
        for store in measure.stores
        if not stores or store in stores or measure.name == "import"
    ]


def _measure_all(
    plan: list[tuple[Measure, Store]],
    only: list[str],
    sizes: Sizes,
    scratch: Path,
    out: Path,
    postgres: Postgres | None,
    began: float,
) -> None:
    facts = machine.facts(scratch, postgres)
    results = Results()
    places = Places(scratch, postgres)
    contestants = {entry.name for entry in (*ENGINES, *RECORDERS)} & set(only)
    for measure, store in plan:
        lines = [
            Line(measure, store, entry)
            for entry in measure.entries
            if store in entry.stores and (not contestants or entry.name in contestants)
        ]
        results.lines += lines
        _take_turns(lines, sizes, places, out)
        # After every measure: a run that is stopped leaves what it has.
        report.write(out, facts, results, sizes, (time.monotonic() - began) / 60)
    print(f"written to {out / 'report.md'} and {out / 'report.json'}")


def _take_turns(lines: list[Line], sizes: Sizes, places: Places, logs: Path) -> None:
    seats = [Seat(line.entry, line.store, sizes, places, logs) for line in lines]
    turns = list(zip(lines, seats, strict=True))
    try:
        for number in range(max((line.measure.rounds(sizes, line.entry) for line in lines), default=0)):
            # Whoever comes first has the quietest disk: everyone does once.
            first = number % len(turns)
            for line, seat in turns[first:] + turns[:first]:
                if line.note is None and number < line.measure.rounds(sizes, line.entry):
                    _take_sample(line, seat)
        for line in lines:
            if not line.samples and line.note is None:
                line.note = "left out at this size"
            print(_said(line), flush=True)
    except BaseException:
        # Nobody waits for what a contestant still does.
        for seat in seats:
            seat.throw_out()
        raise
    finally:
        for seat in seats:
            seat.leave()


def _take_sample(line: Line, seat: Seat) -> None:
    try:
        sample = line.measure.sample(seat)
        line.samples.append({**sample, "load": os.getloadavg()[0]})
    except Missing as missing:
        line.note = f"cannot be imported: {missing}"
        seat.throw_out()
    except Refused as refused:
        line.note = f"not offered: {refused}"
        seat.throw_out()
    except Failed as failed:
        line.note = f"failed: {failed}"
        seat.throw_out()


def _said(line: Line) -> str:
    median = line.median()
    value = "–" if median is None else f"{median:,.4g} {line.measure.unit}"
    return f"{line.measure.name:16} {line.store:14} {line.entry.name:16} {value:>22}  {line.note or ''}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
