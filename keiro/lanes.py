"""Lanes: which runs a worker's code may drive.

A free workflow drives all runs of its name, whatever version they carry; a pinned one those that were started under its
own version and no other. A lane says which, as one string: `fulfil` or `fulfil@2`. No workflow has an `@` in its name.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from keiro.rows import Run


def lane(workflow: str, version: str | None) -> str:
    """The lane of the runs of one version."""
    return workflow if version is None else f"{workflow}@{version}"


def split(lane: str) -> tuple[str, str | None]:
    """The workflow of a lane and its version, None for runs of every version."""
    workflow, at, version = lane.partition("@")
    return workflow, version if at else None


def lane_in(lanes: Container[str], run: Run) -> str | None:
    """Which of these lanes a run is in. None if it is in none: no code here may drive it."""
    if run.workflow in lanes:
        return run.workflow
    own = lane(run.workflow, run.version_tag)
    return own if own in lanes else None


def pinned(lanes: Iterable[str]) -> list[str]:
    """The workflows among these lanes that are pinned, each once."""
    return list(dict.fromkeys(workflow for workflow, version in map(split, lanes) if version is not None))
