"""Memory, SQLite and Postgres driven in lockstep by random commands: equal outcomes, equal rows, equal journals.

The memory store is the model. What databases number for themselves (run keys, positions, worker keys) is compared by
order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from keiro.decisions import Append, Command, New, Start, fold, new
from keiro.events import (
    AttemptFailed,
    Event,
    StepRecorded,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowRetried,
    WorkflowStarted,
)
from keiro.failures import capture
from keiro.identity import StepIds
from keiro.rows import Run
from keiro.stores import open_store
from keiro.stores.base import Incarnation, Store

KEYS = ("a", "b", "ключ")
STEPS = ("one", "two", "three")
WORKFLOWS = ("alpha", "beta")
FAILURE = capture(ValueError("no"))


class Listening:
    def committed(self, changed: Any, touched: Any = ()) -> None: ...
    def woken(self) -> None: ...


class World:
    """One store with what the commands need to know of it, in terms that are equal in all of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.workers: list[int] = []

    async def known(self) -> dict[str, tuple[Run, Any]]:
        found = {}
        for run in await self.store.runs(limit=1000):
            pair = await self.store.head(run.run_id)
            assert pair is not None
            found[run.run_id] = pair
        return found

    async def snapshot(self) -> Any:
        """Everything that can be read, without the numbers the database gives."""
        runs = list(reversed(await self.store.runs(limit=1000)))
        order = {run.run_key: n for n, run in enumerate(runs)}
        worker = {key: n for n, key in enumerate(self.workers)}
        rows = []
        for run in runs:
            pair = await self.store.head(run.run_id)
            assert pair is not None
            _, head = pair
            owner = None if head.owner is None else worker[head.owner]
            rows.append((replace(run, run_key=order[run.run_key]), head.version, owner, head.epoch))
        events = await self.store.read(0, 10_000)
        assert [e.position for e in events] == sorted({e.position for e in events})
        # In which order the runs of one batch take their positions is not promised; within a run it is.
        journal = sorted(
            (order[e.run_key], e.version, e.event_id, e.topic, e.payload, e.recorded_at_ms) for e in events
        )
        for run in runs:
            versions = [event.version for event in events if event.run_key == run.run_key]
            assert versions == list(range(1, len(versions) + 1))
        histories = await self.store.history([run.run_key for run in runs])
        by_run = [[(row.version, row.topic, row.payload) for row in histories[run.run_key]] for run in runs]
        listed = [worker[row.worker_key] for row in await self.store.workers()]
        ended = sorted(run.run_id for run in await self.store.ended([run.run_id for run in runs]))
        return rows, journal, by_run, listed, ended


class Lockstep(RuleBasedStateMachine):
    loop: asyncio.AbstractEventLoop
    worlds: list[World]
    wipe: Callable[[World], Awaitable[None]]

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000
        for world in self.worlds:
            world.store.now_ms = lambda: self.now  # type: ignore[method-assign]

    @initialize()
    def empty(self) -> None:
        for world in self.worlds:
            self.loop.run_until_complete(type(self).wipe(world))
            world.workers.clear()
        self.register()
        self.register()

    def everywhere(self, act: Callable[[World], Awaitable[Any]]) -> Any:
        """The same act on all stores; its outcomes, which must be equal."""
        outcomes = [self.loop.run_until_complete(act(world)) for world in self.worlds]  # type: ignore[arg-type]
        assert outcomes[1:] == outcomes[:-1], outcomes
        return outcomes[0]

    @invariant()
    def the_same_rows_everywhere(self) -> None:
        self.everywhere(lambda world: world.snapshot())

    @rule(ms=st.integers(0, 40_000))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    # Workers

    @rule()
    def register(self) -> None:
        async def act(world: World) -> None:
            n = len(world.workers)
            world.workers.append(await world.store.register(Incarnation(f"w{n}", "host", n, "0")))

        self.everywhere(act)

    @rule(n=st.integers(0, 5))
    def renew(self, n: int) -> None:
        async def act(world: World) -> bool:
            return await world.store.renew(world.workers[n % len(world.workers)])

        self.everywhere(act)

    @rule(n=st.integers(0, 5), stale=st.booleans())
    def bury(self, n: int, stale: bool) -> None:
        async def act(world: World) -> bool | None:
            key = world.workers[n % len(world.workers)]
            rows = [row for row in await world.store.workers() if row.worker_key == key]
            if not rows:
                return None
            seen = replace(rows[0], lease_expires_at_ms=rows[0].lease_expires_at_ms - 1) if stale else rows[0]
            return await world.store.bury(seen)

        self.everywhere(act)

    @rule()
    def adopt_orphans(self) -> None:
        self.everywhere(lambda world: world.store.adopt_orphans())

    @rule(n=st.integers(0, 5), names=st.sets(st.sampled_from(WORKFLOWS)), limit=st.integers(1, 3))
    def claim(self, n: int, names: set[str], limit: int) -> None:
        async def act(world: World) -> Any:
            taken = await world.store.claim(world.workers[n % len(world.workers)], sorted(names), limit)
            return [(replace(run, run_key=0), head.version, head.epoch) for run, head in taken]

        self.everywhere(act)

    @rule(n=st.integers(0, 5), which=st.sets(st.integers(0, 5)))
    def release(self, n: int, which: set[int]) -> None:
        async def act(world: World) -> None:
            runs = list(reversed(await world.store.runs(limit=1000)))
            keys = [run.run_key for i, run in enumerate(runs) if i in which]
            await world.store.release(world.workers[n % len(world.workers)], keys)

        self.everywhere(act)

    @rule(names=st.sets(st.sampled_from(WORKFLOWS)))
    def look(self, names: set[str]) -> None:
        async def act(world: World) -> Any:
            wanted = sorted(names)
            return await world.store.next_due_ms(wanted), await world.store.unregistered(wanted)

        self.everywhere(act)

    @rule(
        status=st.sampled_from([None, "pending", "running", "completed"]),
        workflow=st.sampled_from([None, *WORKFLOWS]),
        limit=st.integers(1, 3),
    )
    def list_runs(self, status: str | None, workflow: str | None, limit: int) -> None:
        async def act(world: World) -> list[str]:
            found = await world.store.runs(status=status, workflow=workflow, limit=limit)
            more = await world.store.runs(before=found[-1].run_key, limit=limit) if found else []
            return [run.run_id for run in found + more]

        self.everywhere(act)

    # Commands

    def submitted(self, make: Callable[[World, dict[str, tuple[Run, Any]]], list[Command]]) -> None:
        async def act(world: World) -> list[Any]:
            commands = make(world, await world.known())
            outcomes = await asyncio.gather(*(world.store.submit(command) for command in commands))
            return [told(outcome) for outcome in outcomes]

        self.everywhere(act)

    @rule(
        births=st.lists(
            st.tuples(
                st.sampled_from(WORKFLOWS), st.sampled_from(KEYS), st.integers(0, 1), st.sampled_from([None, 0, 1])
            ),
            min_size=1,
            max_size=3,
        ),
        data=st.data(),
    )
    def start(self, births: list[tuple[str, str, int, int | None]], data: st.DataObject) -> None:
        ids = [data.draw(st.binary(min_size=16, max_size=16)) for _ in births]

        def make(world: World, known: dict[str, tuple[Run, Any]]) -> list[Command]:
            commands: list[Command] = []
            for (workflow, key, n, owner), event_id in zip(births, ids, strict=True):
                event = WorkflowStarted(workflow=workflow, key=key, input=msgspec.Raw(b'{"n":%d}' % n))
                worker = None if owner is None else world.workers[owner]
                commands.append(Start(f"wf:{workflow}-{key}", new(event, event_id), self.now, worker))
            return commands

        self.submitted(make)

    @rule(
        appends=st.lists(
            st.tuples(
                st.sampled_from(WORKFLOWS),
                st.sampled_from(KEYS),
                st.sampled_from(["step", "failed", "done", "fail", "retry", "cancel"]),
                st.sampled_from(STEPS),
                st.sampled_from(["owner", "owner", "owner", "stale", "other", "nobody"]),
            ),
            min_size=1,
            max_size=4,
        ),
        data=st.data(),
    )
    def append(self, appends: list[tuple[str, str, str, str, str]], data: st.DataObject) -> None:
        fresh = [data.draw(st.binary(min_size=16, max_size=16)) for _ in appends]

        def make(world: World, known: dict[str, tuple[Run, Any]]) -> list[Command]:
            commands: list[Command] = []
            versions: dict[str, int] = {}
            for (workflow, key, kind, step, who), event_id in zip(appends, fresh, strict=True):
                run_id = f"wf:{workflow}-{key}"
                one = self.made(workflow, key, kind, step, event_id)
                if run_id not in known:
                    commands.append(Append(run_id, (one,), self.now))
                    continue
                run, head = known[run_id]
                if who == "nobody" or head.owner is None:
                    commands.append(Append(run_id, (one,), self.now, run.run_key))
                    continue
                expected = versions.get(run_id, head.version)
                versions[run_id] = expected + 1
                owner = head.owner + 1 if who == "other" else head.owner
                epoch = head.epoch - 1 if who == "stale" else head.epoch
                after = fold(run, (one,), self.now)
                commands.append(
                    Append(
                        run_id,
                        (one,),
                        self.now,
                        run.run_key,
                        owner,
                        epoch,
                        expected,
                        after if after is not run else None,
                    )
                )
            return commands

        self.submitted(make)

    def made(self, workflow: str, key: str, kind: str, step: str, event_id: bytes) -> New:
        event: Event
        match kind:
            case "step":
                return new(StepRecorded(step=step, result=msgspec.Raw(b"1")), StepIds(workflow, key, 0)(step))
            case "failed":
                event = AttemptFailed(step=step, attempt=1, failure=FAILURE)
            case "done":
                event = WorkflowCompleted(result=msgspec.Raw(b'"ok"'))
                event_id = StepIds(workflow, key, 0)("__workflow_completed__")
            case "fail":
                event = WorkflowFailed(failure=FAILURE)
            case "retry":
                event = WorkflowRetried(attempt=1, failure=FAILURE, next_attempt_at_ms=self.now + 500)
            case _:
                event = WorkflowCancelled(reason="asked")
        return new(event, event_id)


def told(outcome: Any) -> Any:
    """An outcome without the numbers the database gives."""
    if getattr(outcome, "run", None) is not None:
        outcome = replace(outcome, run=replace(outcome.run, run_key=0))
    if getattr(outcome, "stored", None) is not None:
        outcome = replace(outcome, stored=replace(outcome.stored, position=0, run_key=0))
    return outcome


async def wipe(world: World) -> None:
    """Empty a store without closing it."""
    store: Any = world.store
    match type(store).__name__:
        case "MemoryStore":
            for table in vars(store._db).values():
                if isinstance(table, dict | list | set) and table is not store._db.open_stores:
                    table.clear()
        case "SQLiteStore":
            store._conn.execute("DELETE FROM keiro_runs")
            store._conn.execute("DELETE FROM keiro_workers")
        case _:
            await store._writer.simple("DELETE FROM keiro.keiro_runs; DELETE FROM keiro.keiro_workers")


@pytest.fixture
def lockstep(tmp_path: Path, postgres_url: str) -> Iterator[type[Lockstep]]:
    loop = asyncio.new_event_loop()
    worlds = []
    for url in ("memory://", f"sqlite:///{tmp_path}/keiro.db", postgres_url):
        store = open_store(url, durability="normal")
        store.listener = Listening()
        loop.run_until_complete(store.open(migrate=True))
        worlds.append(World(store))
    yield type("LockstepStores", (Lockstep,), {"loop": loop, "worlds": worlds, "wipe": staticmethod(wipe)})
    for world in worlds:
        with contextlib.suppress(Exception):
            loop.run_until_complete(world.store.close())
    loop.close()


def test_three_stores_agree_on_every_outcome_and_row(lockstep: type[Lockstep]) -> None:
    """WF-20, E1 to E14, L1, L2, L4: whatever is sent in whatever order, three stores tell and hold the same."""
    run_state_machine_as_test(
        lockstep,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
        ),
    )
