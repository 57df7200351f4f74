"""Replays the runs of a journal, one after the other, with the workflows of a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from keiro.cli.reading import Journal
from keiro.definition import Workflow
from keiro.errors import InvalidCall
from keiro.lanes import lane, lane_in
from keiro.run import workflow_of
from keiro.schedule import SCHEDULE, ScheduleRun
from keiro.testing.replayer import Replayed, replay_stored

PAGE: Final = 100


class Findings(msgspec.Struct):
    """What came of it: how many runs were replayed, those that would break, and how many runs of which workflows the
    module does not have."""

    runs: int
    broken: list[Replayed]
    skipped: dict[str, int]


async def replay_all(
    journal: Journal, module: str, workflows: Sequence[Workflow], only: str | None, status: str | None
) -> Findings:
    """Replay the runs of these workflows. Raises `InvalidCall` for a workflow that the module does not have."""
    by_name = {workflow.name: workflow for workflow in workflows}
    by_lane = {workflow.lane: workflow for workflow in workflows}
    if not by_name or (only is not None and only not in by_name):
        names = ", ".join(by_name) or "none"
        raise InvalidCall(f"module {module!r} has no workflow {only or ''!r}; its workflows are: {names}")
    by_lane.setdefault(SCHEDULE, workflow_of(ScheduleRun))
    replayed, broken, skipped, before = 0, [], Counter[str](), None
    while runs := journal.runs(status, only, PAGE, before):
        for run in runs:
            own = lane_in(by_lane, run)
            if own is None:
                # Maybe of a version that none of these is pinned to: this code will never drive it.
                skipped[lane(run.workflow, run.version_tag) if run.workflow in by_name else run.workflow] += 1
                continue
            found = await replay_stored(journal.events(run), by_lane[own])
            replayed += 1
            if not found.ok:
                broken.append(found)
        before = runs[-1].run_key
    return Findings(replayed, broken, dict(skipped))
