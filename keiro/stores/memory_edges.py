"""The edges between runs, in memory: by child, by parent, and by their numbers.

Numbers only grow, so the last edge of the dict is the one with the highest.
"""

from __future__ import annotations

from collections.abc import Mapping

from keiro.projections.run_parents import Edge, RunParent
from keiro.projections.waits import Change, Forget, Put


class Edges:
    """What a SQL store has in `keiro_run_parents`."""

    def __init__(self) -> None:
        self.seqs: dict[Edge, int] = {}
        self._parents: dict[str, set[str]] = {}
        self._children: dict[str, set[str]] = {}

    @property
    def last(self) -> int:
        """The highest number, 0 if there is none."""
        return next(reversed(self.seqs.values()), 0)

    def change(self, change: Change) -> None:
        """Insert an edge unless it is there, or delete it."""
        child, parent = change.key["child_id"], change.key["parent_id"]
        if isinstance(change, Put):
            if (child, parent) not in self.seqs:
                self.seqs[child, parent] = change.values["seq"]
                self._parents.setdefault(child, set()).add(parent)
                self._children.setdefault(parent, set()).add(child)
        elif isinstance(change, Forget):
            self._remove((child, parent))

    def forget(self, run_id: str) -> None:
        """Delete the edges of a run, up and down."""
        for parent in list(self._parents.get(run_id, ())):
            self._remove((run_id, parent))
        for child in list(self._children.get(run_id, ())):
            self._remove((child, run_id))

    def replace(self, seqs: Mapping[Edge, int]) -> None:
        """Have these edges and no others."""
        self.seqs, self._parents, self._children = {}, {}, {}
        for (child, parent), seq in sorted(seqs.items(), key=lambda one: one[1]):
            self.change(Put("", {"child_id": child, "parent_id": parent}, {"seq": seq}))

    def parents_of(self, run_id: str) -> list[RunParent]:
        """The edges to parents, by number."""
        found = [RunParent(run_id, parent, self.seqs[run_id, parent]) for parent in self._parents.get(run_id, ())]
        return sorted(found, key=lambda edge: (edge.seq, edge.parent_id.encode()))

    def children_of(self, run_id: str) -> list[RunParent]:
        """The edges from children, by number."""
        found = [RunParent(child, run_id, self.seqs[child, run_id]) for child in self._children.get(run_id, ())]
        return sorted(found, key=lambda edge: (edge.seq, edge.child_id.encode()))

    def above(self, run_id: str) -> list[Edge]:
        """All edges above a run, by number."""
        found: dict[Edge, int] = {}
        todo, seen = [run_id], {run_id}
        while todo:
            child = todo.pop()
            for parent in self._parents.get(child, ()):
                found[child, parent] = self.seqs[child, parent]
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return sorted(found, key=lambda edge: (found[edge], edge[1].encode()))

    def _remove(self, edge: Edge) -> None:
        if self.seqs.pop(edge, None) is None:
            return
        child, parent = edge
        for index, one, other in ((self._parents, child, parent), (self._children, parent, child)):
            index[one].discard(other)
            if not index[one]:
                del index[one]
