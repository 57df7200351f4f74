"""`engine.run_parents`: which run is below which others.

A run has the parent that has spawned it, and may be linked to others. What may be linked is decided by
`keiro.decisions`, under the journal's lock; here it is asked for and shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keiro.decisions import Appended, Cyclic, Link, Linked, NotLinked, Outcome, Refused, Unlink
from keiro.errors import RunConflict, RunNotFound, RunParentCycle
from keiro.identity import lineage_of, parse_run_id
from keiro.projections.run_parents import RunParent, closes

if TYPE_CHECKING:
    from keiro.engine import Engine


class RunParents:
    """The edges between runs. All runs are meant with all of their rounds; what is given back has the run ids of the
    first ones."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def of(self, run_id: str) -> list[RunParent]:
        """The edges from a run to its parents, in the order in which they were recorded: who has spawned it, and those
        it was linked to. Raises `InvalidName` for what is no run id."""
        self._engine._opened()
        parse_run_id(run_id)
        return await self._engine.store.parents_of(lineage_of(run_id))

    async def children(self, run_id: str) -> list[RunParent]:
        """The edges from the runs that have this one as a parent, spawned and linked, in the order in which they were
        recorded. Raises `InvalidName` for what is no run id."""
        self._engine._opened()
        parse_run_id(run_id)
        return await self._engine.store.children_of(lineage_of(run_id))

    async def link(self, child: str, parent: str, *, connection: Any = None) -> RunParent:
        """Let a run have a further parent; the edge, durable on return. Linked again, it is the one from before.

        From then on a cancellation of the parent takes the child along, unless that was spawned to be left alone; of a
        parent that has been cancelled or asked to end the child inherits that at once, with all that is below it. The
        parent is not told how the child ends. `connection` is as for `Engine.start`.

        Raises `RunParentCycle` (with its `path`) if the child is above the parent already, `RunNotFound`, and
        `RunConflict` where both have ended.
        """
        outcome = await self._submit(Link, child, parent, connection)
        assert isinstance(outcome, Linked)
        return RunParent(lineage_of(child), lineage_of(parent), outcome.seq)

    async def unlink(self, child: str, parent: str, *, connection: Any = None) -> bool:
        """Take back a link; whether there was one. Linked again later, it comes last.

        Raises `RunNotFound`, and `RunConflict` where the parent has spawned the child, or both have ended.
        """
        return isinstance(await self._submit(Unlink, child, parent, connection), Appended)

    async def _submit(self, kind: type[Link | Unlink], child: str, parent: str, connection: Any) -> Outcome:
        engine = self._engine
        engine._opened()
        for run_id in (child, parent):
            parse_run_id(run_id)
        command = kind(lineage_of(child), lineage_of(parent), engine.wall_ms())
        outcome = await engine._submit(command, connection)
        match outcome:
            case Linked() | NotLinked() | Appended():
                return outcome
            case Cyclic(path):
                raise RunParentCycle(closes(path), path)
            case Refused(reason):
                raise RunConflict(f"{child} and its parent {parent}: {reason}")
        there = await engine.store.existing([command.run_id, command.parent_id])
        missing = " or ".join(repr(one) for one in (command.run_id, command.parent_id) if one not in there)
        raise RunNotFound(f"there is no run {missing} at {engine._shown_url}: start it first, or check its id")
