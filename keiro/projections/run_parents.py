"""The edges between runs: which run is below which others. A run may have any number of parents, and no cycles.

Pure: rows are a fold of events, each of which carries the number that its edge was given. An edge is between lineages,
named by the run ids of their first rounds; the rounds of one lineage are no edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from keiro.events import Event, RunLinked, RunUnlinked, WorkflowStarted
from keiro.projections.waits import Change, Forget, Put

RUN_PARENTS: Final = "keiro_run_parents"
Edge: TypeAlias = tuple[str, str]
"""A child and a parent of it."""


class RunParent(msgspec.Struct, frozen=True):
    """An edge: `child_id` has the parent `parent_id`. `seq` counts the edges of a store in the order of recording."""

    child_id: str
    parent_id: str
    seq: int


def edge_of(event: Event, run_id: str) -> RunParent | None:
    """The edge that an event of a run records, with the number it gives it."""
    if type(event) is WorkflowStarted:
        if event.round or event.parent is None or event.parent_seq is None:
            return None
        return RunParent(run_id, event.parent, event.parent_seq)
    return RunParent(event.child, event.parent, event.seq) if type(event) is RunLinked else None


def changes(event: Event, run_id: str) -> Iterator[Change]:
    """The changes of rows that an event of a run brings about."""
    if (edge := edge_of(event, run_id)) is not None:
        yield Put(RUN_PARENTS, {"child_id": edge.child_id, "parent_id": edge.parent_id}, {"seq": edge.seq})
    elif type(event) is RunUnlinked:
        yield Forget(RUN_PARENTS, {"child_id": event.child, "parent_id": event.parent})


def cycle(child: str, parent: str, above: Sequence[Edge]) -> tuple[str, ...] | None:
    """The path from `child` down to `parent` if there is one, so that an edge from `child` up to `parent` would close a
    cycle. `above` are all edges above `parent`, by their numbers; a cycle among them is not gone round twice.
    """
    if child == parent:
        return (child,)
    parents: dict[str, list[str]] = {}
    for below, over in above:
        parents.setdefault(below, []).append(over)
    # Upwards, the parent that was recorded first before the others. No recursion: a chain may be long.
    trail = [parent]
    seen = {parent}
    ways = [iter(parents.get(parent, ()))]
    while ways:
        one = next(ways[-1], None)
        if one is None:
            ways.pop()
            trail.pop()
        elif one == child:
            return (child, *reversed(trail))
        elif one not in seen:
            seen.add(one)
            trail.append(one)
            ways.append(iter(parents.get(one, ())))
    return None


def closes(path: Sequence[str]) -> str:
    """What to tell of a path that an edge would close."""
    if len(path) == 1:
        return f"{path[0]} cannot be a child of itself: give it another parent"
    return (
        f"{path[0]} cannot have the parent {path[-1]}, which is below it already ({' > '.join(path)}): no run may be "
        "among its own ancestors. Link it to another run, or unlink one of these first"
    )


def effective_parent(parent_run_id: str | None, edges: Iterable[RunParent]) -> str | None:
    """The one parent that a listing shows of a run: who it was born to (of a later round, the round before), else the
    parent of the first of its edges."""
    if parent_run_id is not None:
        return parent_run_id
    first = min(edges, key=lambda edge: (edge.seq, edge.parent_id.encode()), default=None)
    return None if first is None else first.parent_id


TOPICS: Final = frozenset((WorkflowStarted.TOPIC, RunLinked.TOPIC, RunUnlinked.TOPIC))
"""The events that edges are folded from."""


class ComputedRunParents:
    """All edges as the journal says them, folded in the order of its positions. `started` has the position of the first
    event of each run of round 0.

    What was collected is not in the journal any more, and an edge goes with either of its runs: so one counts only if
    both had begun before. A run that has the id of one that was collected inherits none of its edges.
    """

    def __init__(self, started: Mapping[str, int], seqs: Mapping[Edge, int]) -> None:
        self.started = dict(started)
        self.seqs = dict(seqs)

    def fold(self, events: Iterable[Event]) -> set[Edge]:
        """Fold more events, which carry their positions; the edges they are about."""
        touched: set[Edge] = set()
        for event in events:
            run_id = event.originator_id
            if type(event) is RunUnlinked:
                touched.add(edge := (event.child, event.parent))
                self.seqs.pop(edge, None)
                continue
            found = edge_of(event, run_id)
            if type(event) is WorkflowStarted and not event.round:
                position: int = event.__dict__["position"]
                self.started[run_id] = position
                if found is None and event.parent is not None:
                    # Born before edges were numbered: it has the place of this event.
                    found = RunParent(run_id, event.parent, position)
            if found is not None and found.child_id in self.started and found.parent_id in self.started:
                touched.add(edge := (found.child_id, found.parent_id))
                self.seqs[edge] = found.seq
        return touched


def to_edge(values: Sequence[Any]) -> RunParent:
    """A row of the table; a driver may give everything as text."""
    return RunParent(values[0], values[1], int(values[2]))
