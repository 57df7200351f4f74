"""The samples of a run, and what is asked of them: medians and ratios within one run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.contestant import Store
from benchmarks.entries import Entry
from benchmarks.measures import Measure, Sample


@dataclass
class Line:
    """What one contestant did at one measure on one store; `note` says why there is nothing, or less."""

    measure: Measure
    store: Store
    entry: Entry
    samples: list[Sample] = field(default_factory=list)
    note: str | None = None

    def values(self, key: str = "value") -> list[float]:
        return [sample[key] for sample in self.samples if key in sample]

    def median(self, key: str = "value") -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None

    def as_json(self) -> dict[str, object]:
        values = self.values()
        return {
            "measure": self.measure.name,
            "title": self.measure.title,
            "store": self.store,
            "contestant": self.entry.name,
            "unit": self.measure.unit,
            "higher_is_better": self.measure.higher_is_better,
            "samples": self.samples,
            "min": min(values, default=None),
            "median": self.median(),
            "max": max(values, default=None),
            "cpu_us": self.median("cpu_us"),
            "user_us": self.median("user_us"),
            "note": self.note,
        }


class Results:
    """All lines of a run."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def of(self, measure: str, store: Store) -> list[Line]:
        return [line for line in self.lines if line.measure.name == measure and line.store == store]

    def median(self, measure: str, store: Store, contestant: str, key: str = "value") -> float | None:
        for line in self.of(measure, store):
            if line.entry.name == contestant:
                return line.median(key)
        return None

    def best_peer(self, measure: str, store: Store, acknowledging: bool = False) -> Line | None:
        """The peer with the best median, of all or only of those whose steps are durable at once."""
        lines = [
            line
            for line in self.of(measure, store)
            if line.entry.role == "peer" and line.samples and (line.entry.acknowledges or not acknowledging)
        ]
        if not lines:
            return None
        better = max if lines[0].measure.higher_is_better else min
        return better(lines, key=lambda line: line.median() or 0.0)


def times_better(measure: Measure, ours: float | None, theirs: float | None) -> float | None:
    """How many times better `ours` is: above 1 when it is better, whichever way the measure points."""
    if ours is None or theirs is None or ours <= 0 or theirs <= 0:
        return None
    return ours / theirs if measure.higher_is_better else theirs / ours
