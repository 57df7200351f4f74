"""The steps of a run, folded from its events."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

import keiro
from keiro.events import AttemptFailed, AttemptStarted, Event, StepRecorded, WorkflowCompleted, WorkflowRetried, placed
from keiro.failures import capture
from keiro.projections.steps import StepStatus, steps
from tests.conftest import MakeEngine

BROKEN = capture(ValueError("broken"))


def recorded(*events: tuple[int, Event]) -> list[Event]:
    """Events as they stand in a journal, each recorded at the given milliseconds."""
    return [placed(event, "wf:w-1", version, at_ms) for version, (at_ms, event) in enumerate(events, 2)]


def test_a_step_that_succeeds_says_when_and_how_long_and_what() -> None:
    (row,) = steps(recorded((130, StepRecorded(step="pay", result=Raw(b'{"ok":[1]}'), started_at_ms=100))))
    assert (row.step, row.status, row.attempt) == ("pay", StepStatus.SUCCEEDED, 1)
    assert (row.started_at_ms, row.finished_at_ms, row.duration_ms) == (100, 130, 30)
    assert (row.result, row.failure) == ({"ok": [1]}, None)


def test_a_step_shows_its_newest_attempt() -> None:
    failed = AttemptFailed(step="pay", attempt=1, failure=BROKEN, started_at_ms=100, next_attempt_at_ms=900)
    (row,) = steps(recorded((150, failed)))
    assert (row.status, row.next_attempt_at_ms, row.failure) == (StepStatus.WAITING, 900, BROKEN)

    (row,) = steps(recorded((150, failed), (905, AttemptStarted(step="pay", attempt=2))))
    assert (row.status, row.attempt, row.started_at_ms, row.failure) == (StepStatus.RUNNING, 2, 905, None)

    (row,) = steps(
        recorded(
            (150, failed),
            (905, AttemptStarted(step="pay", attempt=2)),
            (950, StepRecorded(step="pay", result=Raw(b"1"), attempt=2)),
        )
    )
    assert (row.status, row.attempt, row.duration_ms) == (StepStatus.SUCCEEDED, 2, 45)

    (row,) = steps(recorded((150, failed), (950, AttemptFailed(step="pay", attempt=2, failure=BROKEN))))
    assert (row.status, row.next_attempt_at_ms, row.duration_ms) == (StepStatus.FAILED, None, None)


def test_steps_stand_in_the_order_in_which_they_were_first_recorded() -> None:
    rows = steps(
        recorded(
            (1, AttemptFailed(step="b", attempt=1, failure=BROKEN, next_attempt_at_ms=5)),
            (2, StepRecorded(step="a", result=Raw(b"null"))),
            (6, StepRecorded(step="b", result=Raw(b"2"), attempt=2)),
            (7, WorkflowCompleted(result=Raw(b"3"))),
        )
    )
    assert [(row.step, row.result) for row in rows] == [("b", 2), ("a", None)]


def test_a_retry_of_the_workflow_gives_a_failed_step_another_chance_and_keeps_what_succeeded() -> None:
    rows = steps(
        recorded(
            (1, StepRecorded(step="a", result=Raw(b"1"))),
            (2, AttemptFailed(step="b", attempt=1, failure=BROKEN)),
            (3, WorkflowRetried(attempt=1, failure=BROKEN, next_attempt_at_ms=99)),
        )
    )
    assert [(row.step, row.status, row.next_attempt_at_ms) for row in rows] == [
        ("a", StepStatus.SUCCEEDED, None),
        ("b", StepStatus.WAITING, 99),
    ]


def test_a_clock_that_was_set_back_makes_no_negative_duration() -> None:
    (row,) = steps(recorded((90, StepRecorded(step="a", result=Raw(b"1"), started_at_ms=100))))
    assert row.duration_ms == 0


async def double(n: int) -> int:
    return 2 * n


async def break_down() -> None:
    raise ValueError("broken")


@keiro.workflow
async def mixed(run: keiro.WorkflowRun) -> int:
    total = sum([await run.step(double, n) for n in range(2)])
    with pytest.raises(ValueError, match="broken"):
        await run.step(break_down, retry=keiro.Retry(attempts=2, initial=0.001))
    return total


async def test_an_engine_shows_the_steps_of_a_run(make_engine: MakeEngine) -> None:
    async with make_engine(mixed) as engine:
        handle = await engine.start(mixed)
        assert await handle.result() == 2
        rows = await engine.steps(handle.run_id)
        assert [(row.step, row.status, row.attempt, row.result) for row in rows] == [
            ("double", StepStatus.SUCCEEDED, 1, 0),
            ("double#2", StepStatus.SUCCEEDED, 1, 2),
            ("break_down", StepStatus.FAILED, 2, None),
        ]
        assert rows[2].failure is not None
        assert rows[2].failure.message == "broken"
        assert all(row.duration_ms is not None and row.duration_ms >= 0 for row in rows)
        assert msgspec.json.encode(rows)
        with pytest.raises(keiro.RunNotFound):
            await engine.steps("wf:mixed-nobody")
