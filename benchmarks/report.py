"""The report of a run: a Markdown page to read and a JSON file to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.contestant import STORES, Store
from benchmarks.entries import ENGINES, RECORDERS
from benchmarks.measures import MEASURES, Measure, Sizes
from benchmarks.results import Line, Results, times_better
from benchmarks.targets import Verdict, verdicts

_STORE_NAMES: dict[Store, str] = {
    "sqlite-full": "SQLite FULL",
    "sqlite-normal": "SQLite NORMAL",
    "postgres": "Postgres",
    "memory": "memory",
}


def write(folder: Path, machine: dict[str, Any], results: Results, sizes: Sizes, minutes: float) -> None:
    """Write report.md and report.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    judged = verdicts(results)
    data = {
        "machine": machine,
        "minutes": round(minutes, 1),
        "sizes": {name: getattr(sizes, name) for name in sizes.__dataclass_fields__},
        "lines": [line.as_json() for line in results.lines],
        "targets": [
            {"what": v.what, "store": v.store, "wanted": v.wanted, "got": v.got, "unit": v.unit, "met": v.met}
            for v in judged
        ],
    }
    (folder / "report.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    (folder / "report.md").write_text("\n".join(_page(machine, results, judged, sizes, minutes)) + "\n")


def _page(
    machine: dict[str, Any], results: Results, judged: list[Verdict], sizes: Sizes, minutes: float
) -> Iterator[str]:
    yield "# Benchmark"
    yield ""
    yield from _machine(machine, sizes, minutes)
    yield "## Targets"
    yield ""
    yield "| target | store | wanted | measured | |"
    yield "| --- | --- | --- | ---: | --- |"
    for verdict in judged:
        mark = {True: "met", False: "**missed**", None: "not measured"}[verdict.met]
        got = "" if verdict.got is None else f"{_number(verdict.got)} {verdict.unit}"
        yield f"| {verdict.what} | {_STORE_NAMES[verdict.store]} | {verdict.wanted} | {got} | {mark} |"
    yield ""
    for measure in MEASURES:
        yield from _measure(measure, results, sizes)
    yield "## Settings"
    yield ""
    for entry in (*ENGINES, *RECORDERS):
        yield f"- **{entry.name}**: {entry.settings}"


def _machine(machine: dict[str, Any], sizes: Sizes, minutes: float) -> Iterator[str]:
    fsync, postgres = machine["fsync_us"], machine["postgres"]
    yield "- " + ", ".join(
        [f"{machine['cores']} cores", machine["processor"], f"{machine['memory_gb']} GB", machine["system"]]
    )
    yield f"- Python {machine['python']}, SQLite {machine['sqlite']}" + (
        f", Postgres {postgres['server_version']} (fsync {postgres['fsync']}, synchronous_commit "
        f"{postgres['synchronous_commit']}, full_page_writes {postgres['full_page_writes']})"
        if postgres
        else ", no Postgres"
    )
    yield f"- 4 KiB append and fdatasync: {fsync['median']} µs median, {fsync['p99']} µs p99"
    yield "- " + ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    if absent := [name for name, version in machine["packages"].items() if version is None]:
        yield f"- not installed: {', '.join(absent)}"
    yield f"- load average at start {machine['load_average']}"
    yield f"- {sizes.rounds} rounds, interleaved; {minutes:.0f} minutes"
    yield ""
    yield (
        "Every contestant has a process and a database of its own. Ratios are of medians, above 1 where the "
        "row is better. CPU is the client process, user and system, for each step or run."
    )
    yield ""


def _measure(measure: Measure, results: Results, sizes: Sizes) -> Iterator[str]:
    stores = [store for store in STORES if results.of(measure.name, store)]
    if not stores:
        return
    yield f"## {measure.title}"
    yield ""
    loads = [load for store in stores for line in results.of(measure.name, store) for load in line.values("load")]
    said = [_size(measure, sizes), f"Load average {min(loads):.1f} to {max(loads):.1f}." if loads else ""]
    yield " ".join(filter(None, said))
    yield ""
    head = ["store", "contestant", "min", f"median ({measure.unit})", "max", "CPU µs (user)"]
    yield "| " + " | ".join([*head, "× floor", "× best peer", ""]) + " |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for store in stores:
        for line in results.of(measure.name, store):
            yield _row(line, results)
    yield ""


def _row(line: Line, results: Results) -> str:
    measure, store, values = line.measure, line.store, line.values()
    median, cpu, user = line.median(), line.median("cpu_us"), line.median("user_us")
    floor = times_better(measure, median, results.median(measure.name, store, "floor"))
    peer = results.best_peer(measure.name, store)
    best = times_better(measure, median, peer.median() if peer else None)
    used = "" if cpu is None else f"{_number(cpu)}" + ("" if user is None else f" ({_number(user)})")
    cells = [
        "" if store == "memory" and measure.name == "import" else _STORE_NAMES[store],
        line.entry.name,
        *(_number(value) if value is not None else "–" for value in
          (min(values, default=None), median, max(values, default=None))),
        used,
        "" if floor is None or line.entry.role == "floor" else _number(floor),
        "" if best is None else _number(best),
        line.note or "",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _size(measure: Measure, sizes: Sizes) -> str:
    said = {
        "long-run": f"{sizes.long_steps:,} steps; peers {sizes.long_steps_peer:,}.",
        "enqueue": f"{sizes.queued:,} runs.",
        "enqueue-stored": f"{sizes.queued:,} runs, {sizes.stored:,} stored.",
        "recovery": f"{sizes.recovered:,} runs.",
        "memory-resident": f"{sizes.held:,} runs; peers {sizes.held_peer:,}.",
        "memory-finished": f"{sizes.finished:,} runs after as many.",
        "memory-long": f"{sizes.endless_steps:,} steps.",
    }
    return said.get(measure.name, "")


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
