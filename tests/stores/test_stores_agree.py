"""Memory, SQLite and Postgres driven in lockstep by random commands: equal outcomes, equal rows, equal journals.

The memory store is the model. What databases number for themselves (run keys, positions, worker keys) is compared by
order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from keiro.decisions import (
    Append,
    Cancel,
    Collect,
    Command,
    Deliver,
    EndGrace,
    Fire,
    New,
    Resurrect,
    Retract,
    Rotate,
    Spawn,
    Start,
    Trim,
    fold,
    new,
)
from keiro.events import (
    AttemptFailed,
    Event,
    StateChanged,
    StepRecorded,
    Wait,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowRetried,
    WorkflowStarted,
)
from keiro.failures import capture
from keiro.identity import StepIds, child_result_step, child_step, run_id, suspended_step
from keiro.projections.waits import CHILDREN, CLOCKS, DEFERREDS, Spawned, timestamp
from keiro.rows import Head, Run
from keiro.stores import open_store
from keiro.stores.base import Incarnation, Store

KEYS = ("a", "b", "ключ")
STEPS = ("one", "two", "three")
WORKFLOWS = ("alpha", "beta")
VERSIONS = (None, "1")
CLEANUP = {"alpha": None, "beta": 15_000}
# Of each workflow nothing, all, or what one version started.
LANES = st.tuples(
    *(st.sampled_from(([], [name], [f"{name}@1"], [f"{name}@1", f"{name}@2"])) for name in WORKFLOWS)
).map(lambda lanes: [one for some in lanes for one in some])
FAILURE = capture(ValueError("no"))
FROM_OUTSIDE = (
    "collect", "trim",
    "deliver", "spawn", "spawn", "rotate", "cancel", "cancel", "grace", "resurrect", "retract", "fire", "fire", "end",
    "attributes", "nobody",
)  # fmt: skip
DEFERRED_STEPS = ("awk:a", "awk:b")
WAIT_COLUMNS = {
    DEFERREDS: "flow_name, execution_id, deferred_name, exit_json, metadata_json, completed_at_ms, consumed_at_ms",
    CLOCKS: "flow_name, execution_id, clock_name, deferred_name, due_at_ms, completed_at_ms",
    CHILDREN: "child_id, child_name, parent_id, parent_name, await_step, status, result, failed, failure_reason,"
    " created_at, updated_at, completed_at",
}

Known = dict[str, tuple[Run, Head]]


class Said(Event, frozen=True, kw_only=True, omit_defaults=True):
    """A command of the user's aggregate."""

    TOPIC = "alpha:Said"


class Listening:
    def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None: ...
    def woken(self) -> None: ...


class World:
    """One store with what the commands need to know of it, in terms that are equal in all of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.workers: list[int] = []

    async def known(self) -> Known:
        found: Known = {}
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
        candidates = await self.store.ended_before(2**53, (-1, 0), 1000)
        candidates += await self.store.handed_off_before(2**53, (-1, 0), 1000)
        ended += [repr(replace(one, run_key=order[one.run_key])) for one in candidates]
        return rows, journal, by_run, listed, ended, await self.waits()

    async def waits(self) -> dict[str, list[dict[str, Any]]]:
        """The tables of what runs wait for."""
        store: Any = self.store
        found = {}
        for table, columns in WAIT_COLUMNS.items():
            names = columns.split(", ")
            if type(store).__name__ == "MemoryStore":
                rows = [[row[name] for name in names] for row in store._db.rows.get(table, {}).values()]
            else:
                rows = await store.query(lambda: selected(store, table, columns))  # noqa: B023
            tidied = [{name: tidy(name, value) for name, value in zip(names, row, strict=True)} for row in rows]
            found[table] = sorted(tidied, key=repr)
        return found


def selected(store: Any, table: str, columns: str) -> Any:
    (rows,) = yield [(f"SELECT {columns} FROM {store.sql.schema}{table}", ())]
    return rows


def tidy(name: str, value: Any) -> Any:
    """A value of a table of waits, as it compares whatever the store."""
    if value is None:
        return None
    match name:
        case "result":
            return msgspec.json.decode(value) if isinstance(value, str) else value
        case "failed":
            return {"t": True, "f": False}.get(value, value) in (True, 1)
        case "created_at" | "updated_at" | "completed_at":
            text = timestamp(value) if isinstance(value, int) else value
            return datetime.fromisoformat(text) if isinstance(text, str) else text
    return int(value) if name.endswith("_ms") else value


class Lockstep(RuleBasedStateMachine):
    loop: asyncio.AbstractEventLoop
    worlds: list[World]
    wipe: Callable[[World], Awaitable[None]]

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000
        self.serial = 0
        self.clocked: set[str] = set()  # runs that may have clocks, which end with them: their end is not alone
        for world in self.worlds:
            world.store.now_ms = lambda: self.now  # type: ignore[method-assign]

    @initialize()
    def empty(self) -> None:
        for world in self.worlds:
            self.loop.run_until_complete(type(self).wipe(world))
            world.workers.clear()
        self.register()
        self.register()
        # Most commands are about runs that exist.
        self.start([("alpha", "a", 0, 0), ("alpha", "b", 0, 1), ("beta", "a", 0, None)])

    def everywhere(self, act: Callable[[World], Awaitable[Any]]) -> Any:
        """The same act on all stores; its outcomes, which must be equal."""
        outcomes = [self.loop.run_until_complete(act(world)) for world in self.worlds]
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

    @rule(n=st.integers(0, 5), lanes=LANES, limit=st.integers(1, 3))
    def claim(self, n: int, lanes: list[str], limit: int) -> None:
        async def act(world: World) -> Any:
            taken = await world.store.claim(world.workers[n % len(world.workers)], lanes, limit)
            return [(replace(run, run_key=0), head.version, head.epoch) for run, head in taken]

        self.everywhere(act)

    @rule(n=st.integers(0, 5), which=st.sets(st.integers(0, 5)))
    def release(self, n: int, which: set[int]) -> None:
        async def act(world: World) -> None:
            runs = list(reversed(await world.store.runs(limit=1000)))
            keys = [run.run_key for i, run in enumerate(runs) if i in which]
            await world.store.release(world.workers[n % len(world.workers)], keys)

        self.everywhere(act)

    @rule(wanted=LANES)
    def look(self, wanted: list[str]) -> None:
        async def act(world: World) -> Any:
            due = [tuple(one) for one in await world.store.due(wanted)]
            asked = sorted(await world.store.asked())
            return due, await world.store.next_due_ms(wanted), await world.store.unregistered(wanted), asked

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

    def submitted(self, make: Callable[[World, Known], list[Command]]) -> None:
        async def act(world: World) -> list[Any]:
            commands = make(world, await world.known())
            outcomes = await asyncio.gather(*(world.store.submit(command) for command in commands))
            return [told(outcome) for outcome in outcomes]

        self.everywhere(act)

    def fresh(self) -> bytes:
        """An id that no event has."""
        self.serial += 1
        return self.serial.to_bytes(16)

    @rule(
        births=st.lists(
            st.tuples(
                st.sampled_from(WORKFLOWS), st.sampled_from(KEYS), st.integers(0, 1), st.sampled_from([None, 0, 1])
            ),
            min_size=1,
            max_size=3,
        )
    )
    def start(self, births: list[tuple[str, str, int, int | None]]) -> None:
        ids = [self.fresh() for _ in births]

        def make(world: World, known: Known) -> list[Command]:
            return [
                born(
                    workflow,
                    key,
                    n,
                    event_id,
                    self.now,
                    None if owner is None else world.workers[owner],
                    version=VERSIONS[n],
                )
                for (workflow, key, n, owner), event_id in zip(births, ids, strict=True)
            ]

        self.submitted(make)

    @rule(
        appends=st.lists(
            st.tuples(
                st.sampled_from(WORKFLOWS),
                st.sampled_from(KEYS),
                st.sampled_from(
                    ["step", "failed", "done", "fail", "retry", "cancel", "park", "sleep", "clock", "token", "said"]
                ),
                st.sampled_from(STEPS),
                st.sampled_from(["owner", "owner", "owner", "exact", "late", "stale", "other", "nobody"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def append(self, appends: list[tuple[str, str, str, str, str]]) -> None:
        ids = [self.fresh() for _ in appends]

        def make(world: World, known: Known) -> list[Command]:
            versions: dict[str, int] = {}
            return [
                self.appended(known, versions, newest(known, workflow, key), kind, step, who, event_id)
                for (workflow, key, kind, step, who), event_id in zip(appends, ids, strict=True)
            ]

        self.submitted(make)

    def appended(
        self, known: Known, versions: dict[str, int], of: str, kind: str, step: str, who: str, event_id: bytes
    ) -> Append:
        """An append as a driver, or a stranger, would send it."""
        if of not in known:
            return Append(of, (new(StepRecorded(step=step, result=msgspec.Raw(b"1")), event_id),), self.now)
        run, head = known[of]
        if kind == "clock":
            self.clocked.add(of)
        events = self.made(run, kind, step, event_id, versions.get(of, head.version))
        if who == "nobody" or head.owner is None:
            seen = max(head.version - 1, 0) if kind == "said" else None
            return Append(of, events, self.now, run.run_key, expected=seen)
        expected = versions.get(of, head.version) - (who == "late")
        versions[of] = expected + len(events)
        after = fold(run, events, self.now)
        return Append(
            of,
            events,
            self.now,
            run.run_key,
            head.owner + 1 if who == "other" else head.owner,
            head.epoch - 1 if who == "stale" else head.epoch,
            expected,
            after if after is not run else None,
            exact=who in ("exact", "late"),
            alone=kind not in ("sleep", "clock", "token")
            and not (after.terminal and (run.parent_run_id is not None or of in self.clocked))
            and (after is run or run.cleanup_ms is None),
        )

    def made(self, run: Run, kind: str, step: str, event_id: bytes, version: int = 0) -> tuple[New, ...]:
        ids = StepIds(run.workflow, run.key, run.round_ordinal)
        recorded = {"step": step, "sleep": f"sleep:{step}", "token": "awkid:a"}
        if kind in recorded:
            step = recorded[kind]
            return (new(StepRecorded(step=step, result=msgspec.Raw(b'"secret"')), ids(step)),)
        sleep = Wait(kind="sleep", step=f"sleep:{step}", due_at_ms=self.now + 5_000)
        event: Event
        match kind:
            case "failed":
                event = AttemptFailed(step=step, attempt=1, failure=FAILURE)
            case "done":
                event = WorkflowCompleted(result=msgspec.Raw(b'{"b":[1,null],"a":"ok"}'))
                event_id = ids("__workflow_completed__")
            case "fail":
                event = WorkflowFailed(failure=FAILURE)
            case "retry":
                event = WorkflowRetried(attempt=1, failure=FAILURE, next_attempt_at_ms=self.now + 500)
            case "park":
                listens = (Wait(kind="until", step="until:1"),) if step == "one" else ()
                asleep = (sleep,) if step != "three" else ()
                limit = Wait(kind="timeout", step="timeout:awk:a", due_at_ms=self.now + 2_000)
                waits = (Wait(kind="deferred", step="awk:a"), limit, *asleep, *listens)
                event_id = ids(suspended_step(version))
                event = StateChanged(state="suspended", waits=waits)
            case "clock":
                event = StateChanged(state="clock_scheduled", waits=(sleep,))
            case "said":
                event = Said()
            case _:
                event = WorkflowCancelled(reason="asked")
        return (new(event, event_id),)

    @rule(
        sent=st.lists(
            st.tuples(
                st.sampled_from(WORKFLOWS),
                st.sampled_from(KEYS),
                st.sampled_from(FROM_OUTSIDE),
                st.integers(0, 5),
            ),
            min_size=1,
            max_size=4,
        ),
        who=st.sampled_from(["owner", "owner", "owner", "exact", "late", "stale", "other"]),
    )
    def from_outside(self, sent: list[tuple[str, str, str, int]], who: str) -> None:
        """Commands that must be decided, because they are strangers' or write several runs: they keep their order."""
        ids = [(self.fresh(), self.fresh()) for _ in sent]

        def make(world: World, known: Known) -> list[Command]:
            return [
                self.sent(known, workflow, key, kind, n, who, *event_ids)
                for (workflow, key, kind, n), event_ids in zip(sent, ids, strict=True)
            ]

        self.submitted(make)

    def sent(
        self, known: Known, workflow: str, key: str, kind: str, n: int, who: str, one: bytes, other: bytes
    ) -> Command:
        lineage, last = run_id(workflow, key), newest(known, workflow, key)
        match kind:
            case "deliver":
                secret = (None, None, ("awkid:a", "secret"), ("awkid:a", "wrong"), None, None)[n]
                return Deliver(lineage, DEFERRED_STEPS[n % 2], b'{"ok":%d}' % n, self.now, secret)
            case "cancel":
                return Cancel(lineage, self.now, "asked")
            case "resurrect":
                return Resurrect(lineage, self.now, "mended")
            case "retract":
                steps = (*DEFERRED_STEPS, "one", "sleep:one", child_step("a"), child_result_step("b"))
                return Retract(lineage, steps[n], self.now)
            case "collect":
                parent = (None, None, "wf:alpha-b")[n % 3]
                return Collect(lineage, self.now - (0, 10_000)[n % 2], parent)
            case "trim":
                return Trim(lineage, self.now - (0, 10_000)[n % 2], 1 + n // 2)
            case "attributes":
                return born(workflow, key, n % 2, one, self.now, None, attributes={"n": n})
        if last not in known:
            return Append(last, self.made_by_stranger(one), self.now)
        run, head = known[last]
        owned: dict[str, Any] = {
            "run_key": run.run_key,
            "owner": None if head.owner is None else head.owner + (who == "other"),
            "epoch": head.epoch - (who == "stale"),
            "expected": None if head.owner is None else head.version - (who == "late"),
            "exact": head.owner is not None and who in ("exact", "late"),
            "alone": False,
        }
        ids = StepIds(run.workflow, run.key, run.round_ordinal)
        match kind:
            case "grace":
                return EndGrace(last, self.now)
            case "fire":
                return Fire(last, head.version - (who == "late"), self.now)
            case "spawn":
                name, child = WORKFLOWS[n % 2], KEYS[n // 2]
                policy = "detach" if child == "b" else "cancel"
                link = Spawned(run_id(name, child), name, child, policy)
                event = StepRecorded(step=child_step(child), result=msgspec.Raw(msgspec.json.encode(link)))
                parent = Append(last, (new(event, ids(child_step(child))),), self.now, **owned)
                start = born(name, child, int(who == "exact"), other, self.now, None, parent=lineage, on_cancel=policy)
                return Spawn(parent, start)
            case "rotate":
                following = run_id(workflow, key, run.round_ordinal + 1)
                ending = new(WorkflowCompleted(handoff=following), ids("__workflow_completed__"))
                started = WorkflowStarted(
                    workflow=workflow,
                    key=key,
                    input=msgspec.Raw(b"{}"),
                    round=run.round_ordinal + 1,
                    lineage=lineage,
                    parent=last,
                    cleanup_ms=CLEANUP[workflow],
                )
                start = Start(following, new(started, one), self.now, owned["owner"] if n % 2 else None)
                consumed = frozenset(("a", "b")[: n // 2])
                return Rotate(Append(last, (ending,), self.now, **owned), start, consumed)
            case "end":
                return Append(last, self.made(run, ("done", "fail", "cancel")[n // 2], "one", one), self.now, **owned)
        return Append(last, self.made_by_stranger(one), self.now)

    @rule(workflow=st.sampled_from(WORKFLOWS), key=st.sampled_from(KEYS), times=st.integers(2, 4))
    def rotates(self, workflow: str, key: str, times: int) -> None:
        for _ in range(times):
            ids = (self.fresh(), self.fresh())
            self.submitted(lambda world, known: [self.sent(known, workflow, key, "rotate", 0, "owner", *ids)])  # noqa: B023

    def made_by_stranger(self, event_id: bytes) -> tuple[New, ...]:
        return (new(StepRecorded(step="one", result=msgspec.Raw(b"1")), event_id),)


def newest(known: Known, workflow: str, key: str) -> str:
    """The run id of the newest round there is."""
    lineage = run_id(workflow, key)
    rounds = [run.round_ordinal for run, _ in known.values() if run.lineage_id == lineage]
    return run_id(workflow, key, max(rounds, default=0))


def born(workflow: str, key: str, n: int, event_id: bytes, at_ms: int, owner: int | None, **more: Any) -> Start:
    """The start of a run with the input `n`."""
    input = msgspec.Raw(b'{"n":%d}' % n)
    event = WorkflowStarted(workflow=workflow, key=key, input=input, cleanup_ms=CLEANUP[workflow], **more)
    return Start(run_id(workflow, key), new(event, event_id), at_ms, owner)


def told(outcome: Any) -> Any:
    """An outcome without the numbers the database gives."""
    if getattr(outcome, "run", None) is not None:
        assert outcome.run.run_key > 0, outcome
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
            store._db.journal.__init__()
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
