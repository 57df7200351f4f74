"""What operations on runs tell: values that are printed as text and as JSON."""

from __future__ import annotations

import msgspec

from keiro.rows import Run


class Told(msgspec.Struct, frozen=True):
    """What a command did, or would do."""

    run_id: str
    outcome: str
    """`would_cancel`, `cancelled`, `asked_to_end`, `already_completed`, ...: stable words for programs."""
    runs: tuple[str, ...] = ()
    """The runs that are concerned, the one that was named first."""


class Node(msgspec.Struct, frozen=True):
    """A run in a tree: its newest round, how many rounds it had, and what is below it. With `again` it has several
    parents, and what is below it is shown where it came first."""

    run_id: str
    status: str
    rounds: int
    waiting: str | None
    children: tuple[Node, ...]
    again: bool = False


def waited_for(run: Run) -> str | None:
    """What a parked run waits for, in the words in which commands take it: a deferred by its name, as `keiro complete`
    does, and not by the step that will record it."""
    if run.waiting_reason is None:
        return None
    return f"{run.waiting_reason} {(run.waiting_token or '').removeprefix('awk:')}"
