"""What is measured: each measure with its unit, its sizes and how one sample of it is taken.

A sample is taken on an empty database of its own, in a process that serves one contestant only. What is dirty
is written out first.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contestant import Place, Store
from benchmarks.entries import ENGINES, IMPORTS, RECORDERS, Entry
from benchmarks.session import ROOT, Failed, Missing, Places, Process

Sample = dict[str, float]

#: The pseudo store of measures that touch no database.
NOWHERE: Store = "memory"


@dataclass(frozen=True)
class Sizes:
    """How much of everything: `full` for figures to quote, `quick` to see that it all runs."""

    rounds: int
    seconds: float
    long_steps: int
    long_steps_peer: int
    queued: int
    stored: int
    recovered: int
    replayed: int
    held: int
    held_peer: int
    finished: int
    endless_steps: int
    imports: int
    wakes: int
    children: int
    clocks: int
    parked: int


FULL = Sizes(5, 1.0, 5000, 500, 1000, 100_000, 1000, 50_000, 1000, 500, 20_000, 200_000, 10, 300, 1000, 10_000, 100_000)
QUICK = Sizes(1, 0.2, 1000, 100, 200, 5_000, 200, 10_000, 500, 50, 2_000, 20_000, 3, 20, 100, 200, 1_000)


@dataclass
class Seat:
    """A contestant at one measure on one store: its process, kept over the rounds."""

    entry: Entry
    store: Store
    sizes: Sizes
    places: Places
    logs: Path
    kept: dict[str, Place] = field(default_factory=dict)
    _process: Process | None = None

    @property
    def process(self) -> Process:
        if self._process is None:
            self._process = self.spawn()
        return self._process

    @property
    def is_peer(self) -> bool:
        return self.entry.role == "peer"

    def spawn(self) -> Process:
        return Process(self.entry.name, self.logs / f"{self.entry.name}.log")

    @contextlib.contextmanager
    def fresh_place(self) -> Iterator[Place]:
        place = self.places.create(self.store)
        try:
            yield place
        finally:
            self.places.discard(place)

    def leave(self) -> None:
        """End the process and drop what was kept."""
        if self._process is not None:
            self._process.end()
            self._process = None
        for place in self.kept.values():
            self.places.discard(place)
        self.kept.clear()

    def throw_out(self) -> None:
        """Kill a process that failed; the next sample gets another."""
        if self._process is not None:
            self._process.kill()
            self._process = None


@dataclass(frozen=True)
class Measure:
    """One line of the plan. `rounds` says how often a contestant is sampled."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    stores: tuple[Store, ...]
    entries: tuple[Entry, ...]
    sample: Callable[[Seat], Sample]
    rounds: Callable[[Sizes, Entry], int] = lambda sizes, _entry: sizes.rounds


def _opened(seat: Seat, place: Place, do: str, **arguments: Any) -> dict[str, Any]:
    """Open on a place, do one thing, close."""
    at = {"store": place.store, "at": place.at}
    seat.places.settle(place)
    seat.process.ask("open", **at)
    reading = seat.process.ask(do, **arguments)
    seat.process.ask("close")
    return reading


def _on_fresh_place(seat: Seat, do: str, **arguments: Any) -> dict[str, Any]:
    with seat.fresh_place() as place:
        if seat.entry in ENGINES:
            seat.process.ask("prepare", store=place.store, at=place.at)
        return _opened(seat, place, do, **arguments)


def _rate(reading: dict[str, Any]) -> Sample:
    count = reading["count"]
    return {
        "value": count / reading["seconds"],
        "cpu_us": reading["cpu"] / count * 1e6,
        "user_us": reading["user"] / count * 1e6,
    }


def _long_run(seat: Seat) -> Sample:
    steps = seat.sizes.long_steps_peer if seat.is_peer else seat.sizes.long_steps
    return _rate(_on_fresh_place(seat, "long_run", steps=steps))


def _in_turn(seat: Seat) -> Sample:
    return _rate(_on_fresh_place(seat, "in_turn", seconds=seat.sizes.seconds, steps=10))


def _at_once(steps: int, bodies: bool) -> Callable[[Seat], Sample]:
    def sample(seat: Seat) -> Sample:
        arguments = {"seconds": seat.sizes.seconds, "runs": 50, "steps": steps, "bodies": bodies}
        return _rate(_on_fresh_place(seat, "at_once", **arguments))

    return sample


def _enqueue(seat: Seat) -> Sample:
    reading = _on_fresh_place(seat, "enqueue", runs=seat.sizes.queued)
    return {"value": reading["seconds"], "cpu_us": reading["cpu"] / reading["count"] * 1e6}


def _enqueue_beside_stored(seat: Seat) -> Sample:
    # Filled once and kept: every round adds a hundredth of what is stored.
    if "stored" not in seat.kept:
        place = seat.places.create(seat.store)
        seat.kept["stored"] = place
        seat.process.ask("fill_finished", store=place.store, at=place.at, runs=seat.sizes.stored)
    runs = seat.sizes.queued
    beside = _opened(seat, seat.kept["stored"], "enqueue", runs=runs)["seconds"]
    # At once after it, because only neighbours can be compared.
    empty = _on_fresh_place(seat, "enqueue", runs=runs)["seconds"]
    return {"value": beside, "empty": empty, "times_empty": beside / empty}


def _killed_while_held(seat: Seat, place: Place, runs: int, steps: int) -> None:
    """Leave `runs` runs standing in a step after `steps` others, and the process killed."""
    at = {"store": place.store, "at": place.at}
    victim = seat.spawn()
    try:
        victim.ask("prepare", **at)
        victim.ask("open", **at, arrivals=runs, shut=True)
        victim.ask("begin_held", runs=runs, steps=steps)
    finally:
        victim.kill()
    seat.places.settle(place)


def _recovery(seat: Seat) -> Sample:
    runs = seat.sizes.recovered
    with seat.fresh_place() as place:
        _killed_while_held(seat, place, runs, 0)
        heir = seat.spawn()
        try:
            heir.send("open", store=place.store, at=place.at, arrivals=runs, shut=False)
            heir.send("finish_held", runs=runs)
            heir.receive()
            seconds = heir.receive()["answered_at"] - heir.started_at
            heir.ask("close")
        finally:
            heir.kill()
    return {"value": seconds}


def _replay(steps: int) -> Callable[[Seat], Sample]:
    def to_gate(seat: Seat, runs: int, steps: int) -> float:
        with seat.fresh_place() as place:
            _killed_while_held(seat, place, runs, steps)
            heir = seat.spawn()
            try:
                heir.ask("open", store=place.store, at=place.at, arrivals=runs, shut=True)
                return float(heir.ask("reach_gate", runs=runs)["seconds"])
            finally:
                heir.kill()

    def sample(seat: Seat) -> Sample:
        runs = 1 if seat.is_peer else max(1, seat.sizes.replayed // steps)
        # The same with no step to replay is what starting costs; the difference is replay, with its reading.
        return {"value": (to_gate(seat, runs, steps) - to_gate(seat, runs, 0)) / (runs * steps) * 1e6}

    return sample


def _memory_held(seat: Seat) -> Sample:
    runs = seat.sizes.held_peer if seat.is_peer else seat.sizes.held
    with seat.fresh_place() as place:
        at = {"store": place.store, "at": place.at}
        process = seat.spawn()
        try:
            process.ask("prepare", **at)
            process.ask("open", **at, arrivals=runs, shut=True)
            return {"value": process.ask("memory_held", runs=runs)["bytes"] / 1024}
        finally:
            process.kill()


def _memory(do: str, size: str) -> Callable[[Seat], Sample]:
    def sample(seat: Seat) -> Sample:
        count = getattr(seat.sizes, size)
        arguments = {"steps" if size == "endless_steps" else "runs": count}
        reading = _on_fresh_place(seat, do, **arguments)
        # A new process each time: what the last sample left in this one would hide what the next adds.
        seat.leave()
        return {"value": reading["bytes"] / 1024}

    return sample


def _latency(given: list[float], went_on: list[float]) -> Sample:
    took = sorted((after - before) * 1000 for before, after in zip(given, went_on, strict=True))
    return {"value": took[len(took) // 2], "p99": took[len(took) * 99 // 100]}


def _wake(seat: Seat) -> Sample:
    runs = seat.sizes.wakes
    with seat.fresh_place() as place:
        at = {"store": place.store, "at": place.at}
        seat.process.ask("prepare", **at)
        seat.process.ask("open", **at)
        seat.process.ask("begin_waits", runs=runs)
        given = seat.process.ask("complete_waits", runs=runs, in_turn=True)["given"]
        went_on = seat.process.ask("end_waits", runs=runs)["went_on"]
        seat.process.ask("close")
    return _latency(given, went_on)


def _wake_elsewhere(seat: Seat) -> Sample:
    runs = seat.sizes.wakes
    with seat.fresh_place() as place:
        at = {"store": place.store, "at": place.at}
        seat.process.ask("prepare", **at)
        seat.process.ask("open", **at)
        seat.process.ask("begin_waits", runs=runs)
        other = seat.spawn()
        try:
            other.ask("open", **at, client=True)
            # The driving process goes on by itself while it is asked to wait for the ends.
            seat.process.send("end_waits", runs=runs)
            given = other.ask("complete_waits", runs=runs, in_turn=False)["given"]
            went_on = seat.process.receive()["went_on"]
            other.ask("close")
        finally:
            other.kill()
        seat.process.ask("close")
    return _latency(given, went_on)


def _family(times: int) -> Callable[[Seat], Sample]:
    def sample(seat: Seat) -> Sample:
        reading = _on_fresh_place(seat, "family", children=seat.sizes.children * times)
        return {"value": reading["seconds"], "cpu_us": reading["cpu"] / reading["count"] * 1e6}

    return sample


def _clocks(seat: Seat) -> Sample:
    runs = seat.sizes.clocks
    return {"value": _on_fresh_place(seat, "clocks", runs=runs, seconds=2 + runs / 800)["seconds"]}


def _parked(seat: Seat) -> Sample:
    """An idle process beside so many parked runs, and beside none."""
    found: dict[int, Sample] = {}
    for runs in (0, seat.sizes.parked):
        with seat.fresh_place() as place:
            at = {"store": place.store, "at": place.at}
            process = seat.spawn()
            try:
                if runs:
                    process.ask("fill_parked", **at, runs=runs)
                    process.kill()
                    process = seat.spawn()
                else:
                    process.ask("prepare", **at)
                process.ask("open", **at)
                idle = process.ask("idle", seconds=5)
                wakes = min(seat.sizes.wakes, 100)
                # Other keys than those that are stored: the first of these is there already.
                process.ask("begin_waits", runs=wakes)
                given = process.ask("complete_waits", runs=wakes, in_turn=True)["given"]
                wake = _latency(given, process.ask("end_waits", runs=wakes)["went_on"])
                found[runs] = {"percent": idle["percent"], "bytes": idle["bytes"], "wake": wake["value"]}
            finally:
                process.kill()
    none, many = found[0], found[seat.sizes.parked]
    return {
        "value": many["percent"],
        "growth_mb": (many["bytes"] - none["bytes"]) / 2**20,
        "wake_times": many["wake"] / none["wake"],
    }


def _save(events: int) -> Callable[[Seat], Sample]:
    def sample(seat: Seat) -> Sample:
        return _rate(_on_fresh_place(seat, "save", seconds=seat.sizes.seconds, events=events))

    return sample


def _import_time(seat: Seat) -> Sample:
    module = IMPORTS[seat.entry.name]
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1]
        raise Missing(last) if "ModuleNotFoundError" in last else Failed(last)
    return {"value": float(done.stdout) * 1000}


def _named(*names: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in ENGINES if entry.name in names)


_FILES: tuple[Store, ...] = ("sqlite-full", "sqlite-normal", "postgres")
_ALL: tuple[Store, ...] = (*_FILES, "memory")
_DURABLE: tuple[Store, ...] = ("sqlite-full", "postgres")
_IMPORTED = tuple(
    Entry(name, "", "", (NOWHERE,), "keiro" if name == "keiro" else "peer", f"import {module}")
    for name, module in IMPORTS.items()
)
_OURS = _named("keiro")
_WORKERS = tuple(entry for entry in ENGINES if entry.name != "floor")


def _few_for_peers(sizes: Sizes, entry: Entry) -> int:
    return min(sizes.rounds, 2) if entry.role == "peer" else sizes.rounds


def _once_for_absurd(sizes: Sizes, entry: Entry) -> int:
    # As shipped a killed worker's claim lasts two minutes, which is the whole of what there is to measure.
    if entry.name == "absurd":
        return 1 if sizes is FULL else 0
    return sizes.rounds


MEASURES: tuple[Measure, ...] = (
    Measure("long-run", "One long run of sequential steps", "steps/s", True, _ALL, ENGINES, _long_run),
    Measure("in-turn", "10-step runs one after another", "steps/s", True, _ALL, ENGINES, _in_turn),
    Measure("at-once", "50 ten-step runs at once, no-op bodies", "steps/s", True, _ALL, ENGINES, _at_once(10, False)),
    Measure(
        "at-once-bodies",
        "50 ten-step runs at once, bodies of 0 to 2 ms",
        "steps/s",
        True,
        _ALL,
        _WORKERS,
        _at_once(10, True),
    ),
    # Ten-step runs count their starts and ends as steps; here these are one in fifty.
    Measure(
        "lockstep",
        "50 runs of 100 steps at once, no-op bodies",
        "steps/s",
        True,
        _DURABLE,
        _named("floor", "keiro"),
        _at_once(100, False),
    ),
    Measure("enqueue", "One-step runs enqueued one by one until all are done", "s", False, _ALL, ENGINES, _enqueue),
    Measure(
        "enqueue-stored",
        "The same beside many finished runs",
        "s",
        False,
        _DURABLE,
        _named("keiro"),
        _enqueue_beside_stored,
    ),
    Measure(
        "recovery",
        "Runs pending after kill -9: process start to all done",
        "s",
        False,
        _FILES,
        _WORKERS,
        _recovery,
        _once_for_absurd,
    ),
    Measure(
        "replay-1000",
        "Replay of runs of 1,000 steps, reading included",
        "µs/step",
        False,
        _DURABLE,
        _WORKERS,
        _replay(1000),
        _few_for_peers,
    ),
    Measure(
        "replay-10000",
        "Replay of runs of 10,000 steps, reading included",
        "µs/step",
        False,
        _DURABLE,
        _WORKERS,
        _replay(10_000),
        lambda sizes, entry: 1 if entry.role == "peer" else sizes.rounds,
    ),
    Measure(
        "memory-resident",
        "Memory of a resident run, standing in a step",
        "KB",
        False,
        _DURABLE,
        _named("keiro", "dbos", "langgraph", "langgraph-tuned"),
        _memory_held,
        _few_for_peers,
    ),
    Measure(
        "memory-finished",
        "Memory left by a finished run",
        "KB",
        False,
        _DURABLE,
        _named("keiro"),
        _memory("memory_finished", "finished"),
        _few_for_peers,
    ),
    Measure(
        "memory-long",
        "Growth of the process over one very long run, after its first fifth",
        "KB",
        False,
        ("sqlite-normal", "postgres"),
        _named("keiro"),
        _memory("memory_long", "endless_steps"),
        lambda sizes, _entry: min(sizes.rounds, 3),
    ),
    Measure("wake", "A value is given until its run goes on, same process", "ms", False, _DURABLE, _OURS, _wake),
    Measure("wake-elsewhere", "The same from another process", "ms", False, _DURABLE, _OURS, _wake_elsewhere),
    Measure("family", "A parent with 1,000 children of one step", "s", False, _DURABLE, _OURS, _family(1)),
    Measure("family-large", "A parent with 10,000 children of one step", "s", False, _DURABLE, _OURS, _family(10)),
    Measure("clocks", "10,000 clocks due at once, until the last has fired", "s", False, _DURABLE, _OURS, _clocks),
    Measure(
        "parked",
        "An idle process beside 100,000 parked runs",
        "% of a core",
        False,
        _DURABLE,
        _OURS,
        _parked,
        lambda sizes, _entry: min(sizes.rounds, 2),
    ),
    Measure("save-1", "Application.save of 1 event", "saves/s", True, _DURABLE, RECORDERS, _save(1)),
    Measure("save-10", "Application.save of 10 events", "saves/s", True, _DURABLE, RECORDERS, _save(10)),
    Measure(
        "import",
        "Import in a fresh process",
        "ms",
        False,
        (NOWHERE,),
        _IMPORTED,
        _import_time,
        lambda sizes, _entry: sizes.imports,
    ),
)
