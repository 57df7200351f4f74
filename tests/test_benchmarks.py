"""The benchmark's targets: what decides whether keiro is as fast as it has to be must really be looked at."""

from __future__ import annotations

from benchmarks.measures import MEASURES
from benchmarks.results import Line, Results
from benchmarks.targets import verdicts


def _results_in_which_every_figure_is(value: float) -> Results:
    results = Results()
    for measure in MEASURES:
        for store in measure.stores:
            for entry in measure.entries:
                if store in entry.stores:
                    sample = {
                        "value": value,
                        "cpu_us": value,
                        "times_empty": value,
                        "p99": value,
                        "growth_mb": value,
                        "wake_times": value,
                    }
                    results.lines.append(Line(measure, store, entry, [sample]))
    return results


def test_every_target_is_judged_when_everything_was_measured() -> None:
    # A target that names a measure, store or contestant that is not in the plan would stay "not measured".
    assert [verdict for verdict in verdicts(_results_in_which_every_figure_is(1.0)) if verdict.met is None] == []


def test_every_target_is_open_when_nothing_was_measured() -> None:
    assert {verdict.met for verdict in verdicts(Results())} == {None}


def test_processor_time_in_lockstep_is_taken_from_long_runs() -> None:
    # given ten-step runs whose starts and ends cost more than a step may
    results = _results_in_which_every_figure_is(1.0)
    for line in results.lines:
        if line.measure.name == "at-once":
            line.samples[0]["cpu_us"] = 1000.0

    # then the target for steps in lockstep is still met
    assert {verdict.met for verdict in verdicts(results) if "lockstep" in verdict.what} == {True}
