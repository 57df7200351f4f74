"""What operations on runs tell: values that are printed as text and as JSON."""

from __future__ import annotations

import msgspec


class Told(msgspec.Struct, frozen=True):
    """What a command did, or would do."""

    run_id: str
    outcome: str
    """`would_cancel`, `cancelled`, `already_completed`, ...: stable words for programs."""
    runs: tuple[str, ...] = ()
    """The runs that are concerned, the one that was named first."""


class Node(msgspec.Struct, frozen=True):
    """A run in a tree: its newest round, how many rounds it had, and its children."""

    run_id: str
    status: str
    rounds: int
    waiting: str | None
    children: tuple[Node, ...]
