"""What keiro has to reach, as ratios within one run, and whether it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.contestant import Store
from benchmarks.results import Results

_DURABLE: tuple[Store, ...] = ("sqlite-full", "postgres")


@dataclass(frozen=True)
class Verdict:
    """One target: what was wanted, what was measured (None when it was not), and whether that is enough."""

    what: str
    store: Store
    wanted: str
    got: float | None
    unit: str
    met: bool | None


def verdicts(results: Results) -> list[Verdict]:
    return [
        *_against_floor(results),
        *_against_peers(results),
        *_processor_time(results),
        *_absolute(results),
    ]


def _verdict(what: str, store: Store, wanted: float, got: float | None, unit: str, at_least: bool) -> Verdict:
    met = None if got is None else (got >= wanted if at_least else got <= wanted)
    return Verdict(what, store, f"{'≥' if at_least else '≤'} {wanted:g} {unit}", got, unit, met)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _against_floor(results: Results) -> Iterator[Verdict]:
    median = results.median
    wanted: dict[Store, tuple[float, float, float]] = {
        "sqlite-full": (0.75, 0.65, 5),
        "postgres": (0.7, 0.6, 5),
    }
    for store, (long_run, in_turn, at_once) in wanted.items():
        for measure, least, what in (
            ("long-run", long_run, "long run against the floor"),
            ("in-turn", in_turn, "10-step runs in turn against the floor"),
        ):
            got = _ratio(median(measure, store, "keiro"), median(measure, store, "floor"))
            yield _verdict(what, store, least, got, "× floor", True)
        # The floor commits every operation by itself, so it is the same however many runs there are.
        got = _ratio(median("at-once", store, "keiro"), median("at-once", store, "floor"))
        yield _verdict("50 runs at once against the floor", store, at_once, got, "× floor", True)


def _against_peers(results: Results) -> Iterator[Verdict]:
    wanted: dict[Store, tuple[float, float]] = {"sqlite-full": (4, 25), "postgres": (2.5, 20)}
    for store, (in_turn, at_once) in wanted.items():
        for measure, least, what in (
            ("in-turn", in_turn, "10-step runs in turn"),
            ("at-once", at_once, "50 runs at once"),
            ("enqueue", 4.0, "enqueued runs"),
        ):
            for acknowledging in (False, True):
                peer = results.best_peer(measure, store, acknowledging)
                ours = results.median(measure, store, "keiro")
                theirs = peer.median() if peer else None
                got = _ratio(theirs, ours) if measure == "enqueue" else _ratio(ours, theirs)
                kind = "best peer with durable steps" if acknowledging else "best peer"
                name = f" ({peer.entry.name})" if peer else ""
                yield _verdict(f"{what} against the {kind}{name}", store, least, got, "× peer", True)


def _processor_time(results: Results) -> Iterator[Verdict]:
    median = results.median
    for store in _DURABLE:
        ours, floor = (median("long-run", store, name, "cpu_us") for name in ("keiro", "floor"))
        got = ours - floor if ours is not None and floor is not None else None
        yield _verdict("processor time a step, sequential, above the floor", store, 25, got, "µs", False)
        for measure, most, what in (
            ("lockstep", 20, "processor time a step, 50 in lockstep"),
            ("at-once-bodies", 40, "processor time a step, 50 with bodies"),
        ):
            yield _verdict(what, store, most, median(measure, store, "keiro", "cpu_us"), "µs", False)


def _absolute(results: Results) -> Iterator[Verdict]:
    def simple(what: str, measure: str, limits: dict[Store, float], unit: str) -> Iterator[Verdict]:
        for store, most in limits.items():
            yield _verdict(what, store, most, results.median(measure, store, "keiro"), unit, False)

    yield from simple("enqueued runs until done", "enqueue", {"sqlite-full": 0.35, "postgres": 0.5}, "s")
    for store in _DURABLE:
        got = results.median("enqueue-stored", store, "keiro", "times_empty")
        yield _verdict("the same beside finished runs", store, 1.5, got, "× empty", False)
    yield from simple("recovery after kill -9", "recovery", dict.fromkeys(_DURABLE, 0.7), "s")
    yield from simple("replay of 10,000 steps", "replay-10000", {"sqlite-full": 3, "postgres": 4}, "µs/step")
    for store in _DURABLE:
        got = _ratio(results.median("replay-10000", store, "keiro"), results.median("replay-1000", store, "keiro"))
        # Reading that grows with the square of the steps would cost ten times as much, noise some per cent.
        yield _verdict("replay of 10,000 steps against 1,000", store, 1.25, got, "× a step", False)
    yield from simple("a value given until its run goes on, median", "wake", dict.fromkeys(_DURABLE, 1.0), "ms")
    yield from simple("the same from another process, median", "wake-elsewhere", dict.fromkeys(_DURABLE, 5.0), "ms")
    for measure, most, what in (("wake", 5.0, "a value given"), ("wake-elsewhere", 25.0, "the same from elsewhere")):
        for store in _DURABLE:
            yield _verdict(f"{what}, p99", store, most, results.median(measure, store, "keiro", "p99"), "ms", False)
    yield from simple("a parent with 1,000 children", "family", {"sqlite-full": 0.5, "postgres": 1.0}, "s")
    for store in _DURABLE:
        got = _ratio(results.median("family-large", store, "keiro"), results.median("family", store, "keiro"))
        yield _verdict("ten times as many children", store, 15, got, "× the time", False)
    yield from simple("10,000 clocks due at once", "clocks", dict.fromkeys(_DURABLE, 1.0), "s")
    yield from simple("idle beside 100,000 parked runs", "parked", dict.fromkeys(_DURABLE, 1.0), "% of a core")
    for store in _DURABLE:
        grown = results.median("parked", store, "keiro", "growth_mb")
        yield _verdict("memory beside 100,000 parked runs", store, 50, grown, "MB", False)
        slower = results.median("parked", store, "keiro", "wake_times")
        yield _verdict("a wake beside 100,000 parked runs", store, 1.25, slower, "× empty", False)
    yield from simple("memory of a resident run", "memory-resident", dict.fromkeys(_DURABLE, 5.0), "KB")
    # As near to nothing as the pages of a process can show: six bytes a step, a fiftieth of a resident run.
    yield from simple("memory left by a finished run", "memory-finished", dict.fromkeys(_DURABLE, 0.1), "KB")
    long_run: dict[Store, float] = {"sqlite-normal": 1000, "postgres": 1000}
    yield from simple("growth over one very long run", "memory-long", long_run, "KB")
    for measure, what in (("save-1", "save of 1 event"), ("save-10", "save of 10 events")):
        limits: dict[Store, float] = {"sqlite-full": 1.2, "postgres": 1.5}
        for store, least in limits.items():
            got = _ratio(results.median(measure, store, "keiro-recorders"),
                         results.median(measure, store, "eventsourcing"))  # fmt: skip
            yield _verdict(f"{what} against the library", store, least, got, "× library", True)
    yield _verdict("import", "memory", 150, results.median("import", "memory", "keiro"), "ms", False)
