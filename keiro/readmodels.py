"""The projections of one engine: their rows, how they stand, and their rebuilding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keiro.errors import InvalidCall
from keiro.follower import Follower, ProjectionStatus, State
from keiro.mapper import EventMapper
from keiro.projections.base import Projection, ReadModel
from keiro.stores.kept import Kept, Report

Named = Projection | type[Projection] | str


class Store(Protocol):
    """What this module needs of a store."""

    def keep(self, models: Sequence[ReadModel], mapper: EventMapper) -> Kept:
        """Keep the rows of these projections from now on."""


class Reporter(Protocol):
    """Where operators are told."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class ReadModels:
    """Opens, queries and rebuilds projections for an engine."""

    def __init__(
        self, given: Sequence[Projection | type[Projection]], store: Store, mapper: EventMapper, reporter: Reporter
    ) -> None:
        self._models: dict[str, ReadModel] = {}
        for one in given:
            model = ReadModel(one)
            if model.name in self._models:
                raise InvalidCall(f"two projections are named {model.name!r}: give one of them another name")
            for topic in sorted(model.topics or ()):
                if not mapper.can_occur(topic):
                    raise InvalidCall(
                        f"projection {model.name!r}: no event has the topic {topic!r}. There are those of keiro.events "
                        "(`StepRecorded`) and those of a workflow's own class (`basket:ItemAdded`)"
                    )
            self._models[model.name] = model
        self.kept = store.keep(list(self._models.values()), mapper)
        # Rows in this process are inline for its own commits, and follow those of others.
        self._followers = {
            model.name: Follower(model, self.kept, reporter)
            for model in self._models.values()
            if model.mode == "follow" or model.in_memory
        }

    async def open(self, *, create: bool, moved: set[asyncio.Event]) -> None:
        """Create or check tables, build what never was, and begin to follow. `moved` are set when events arrive."""
        await self.kept.setup(create=create)
        for follower in self._followers.values():
            moved.add(follower.moved)
            follower.start()

    async def close(self) -> None:
        """Follow no more."""
        for follower in self._followers.values():
            await follower.stop()

    def has(self, name: str) -> bool:
        """Whether a projection of the user's own has this name."""
        return name in self._models

    def _named(self, projection: Named) -> ReadModel:
        name = projection if isinstance(projection, str) else getattr(projection, "name", projection)
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            have = ", ".join(self._models) or "none"
            raise InvalidCall(
                f"{projection!r} is no projection of this engine (it has: {have}): pass it in Engine(projections=[...])"
            )
        return model

    async def rows(self, projection: Named, equals: Mapping[str, Any]) -> list[Any]:
        """See `Engine.rows`."""
        model = self._named(projection)
        for column in equals:
            if column not in model.columns:
                raise InvalidCall(
                    f"projection {model.name!r} has no column {column!r}; it has: {', '.join(model.columns)}"
                )
        rows = await self.kept.select(model, equals)
        try:
            # The same order on every store, whatever its collation.
            rows.sort(key=model.key_of)
        except TypeError:
            rows.sort(key=lambda row: str(model.key_of(row)))
        return [model.record(row) for row in rows]

    async def status(self) -> list[ProjectionStatus]:
        """See `Engine.projections`."""
        head = await self.kept.head()
        found: list[ProjectionStatus] = []
        for name, model in self._models.items():
            follower = self._followers.get(name)
            if follower is None:
                position, state, error = head, State.CURRENT, None
            else:
                durable = await self.kept.tracked(model) or 0
                position, state, error = max(follower.position, durable), follower.state, follower.error
                if state is State.CURRENT and position < head:
                    state = State.BEHIND
            found.append(
                ProjectionStatus(
                    name=name,
                    mode=model.mode,
                    state=state,
                    position=position,
                    lag=max(head - position, 0),
                    error=None if error is None else str(error),
                )
            )
        return found

    async def caught_up(self, projection: Named, timeout: float | None) -> None:
        """See `Engine.caught_up`."""
        follower = self._followers.get(self._named(projection).name)
        if follower is not None:
            await follower.caught_up(await self.kept.head(), timeout)

    async def rebuild(self, projection: Named) -> Report:
        """See `Engine.rebuild`."""
        if projection == "runs" and "runs" not in self._models:
            return await self.kept.rebuild_runs()
        if projection == "run_parents" and "run_parents" not in self._models:
            return await self.kept.rebuild_run_parents()
        model = self._named(projection)
        report = await self.kept.rebuild(model)
        follower = self._followers.get(model.name)
        if follower is not None:
            follower.moved.set()
        return report
