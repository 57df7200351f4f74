"""What races for a run: a scene with one run (and its parent) in the state one likes, the actors, and what each does.

An actor is a line: the command it sends, as the owner of the run or from outside, and the place the run is in
afterwards. That place is the whole expectation: whatever two actors do to a run, it must look as if one had come after
the other.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

import keiro
from keiro.decisions import (
    Append,
    Appended,
    Cancel,
    Collect,
    Collected,
    Command,
    Deliver,
    Fire,
    New,
    Resurrect,
    Rotate,
    Spawn,
    Start,
    fold,
    new,
)
from keiro.events import (
    Event,
    StateChanged,
    StepRecorded,
    Wait,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowStarted,
)
from keiro.failures import capture
from keiro.identity import StepIds, run_id
from keiro.projections.waits import Exit, Spawned
from keiro.rows import Head, Run
from keiro.stores.base import Incarnation, Store, WorkerRow

GO: Final = "awk:go"
LATE: Final = "timeout:awk:go"
POKED: Final = "racer:Poked"
ENDS: Final = ("WorkflowCompleted", "WorkflowFailed", "WorkflowCancelled")
YEAR_MS: Final = 365 * 86_400_000


class Racer(keiro.WorkflowRun, name="racer"):
    """The run that is raced for: it waits for one thing, and not for ever."""

    def __init__(self) -> None:
        self.pokes = 0

    @keiro.event("Poked")
    def poke(self) -> None:
        self.pokes += 1

    async def execute(self) -> str:
        try:
            return str(await self.deferred("go", str).result(timeout=YEAR_MS / 1000))
        except TimeoutError:
            return "late"


@keiro.workflow
async def above(run: keiro.WorkflowRun) -> str:
    """Its parent."""
    child = await run.spawn(Racer, id=run.key)
    try:
        return str(await child.result())
    except (keiro.ChildFailed, keiro.ChildCancelled) as error:
        return type(error).__name__


class Place(NamedTuple):
    """Where the run is: `driven` by its first owner, `parked`, `free`, in round 1 (`rotated`), ended, or `gone`; and
    what it has been told by others, in order."""

    status: str
    heard: tuple[str, ...] = ()
    rounds: int = 1

    @property
    def woken(self) -> list[str]:
        """What its body waits for, of what it has been told."""
        return [step for step in self.heard if step in (GO, LATE)]

    def hears(self, step: str) -> Place:
        """The place after `step` was recorded from outside."""
        return self._replace(status="free" if self.status == "parked" else self.status, heard=(*self.heard, step))


class Scene:
    """One run, whose worker is of another host, in the state `base`; alone, or the child of a parked parent."""

    def __init__(self, key: str, base: str, *, alone: bool) -> None:
        self.key = key
        self.base = base
        self.alone = alone
        self.run_id = run_id("racer", key)
        self.parent_id = run_id("above", key)
        self.place = Place({"parked": "parked", "failed": "failed"}.get(base, "driven"))
        self.worker: WorkerRow
        self.run: Run
        self.head: Head

    async def build(self, store: Store) -> None:
        """Bring it about, in one batch."""
        worker = await store.register(Incarnation(uuid.uuid4().hex, "elsewhere", 1, ""))
        self.worker = next(row for row in await store.workers() if row.worker_key == worker)
        now = store.now_ms()
        parent = None if self.alone else self.parent_id
        started = self._started("racer", parent=parent, on_cancel=None if self.alone else "cancel")
        start = Start(self.run_id, new(started, uuid.uuid4().bytes), now, worker)
        commands: list[Command] = []
        if self.alone:
            commands.append(start)
        else:
            ids = StepIds("above", self.key, 0)
            spawned = Spawned(run_id=self.run_id, workflow="racer", key=self.key, on_cancel="cancel")
            step = StepRecorded(step=f"child:{self.key}", result=Raw(msgspec.json.encode(spawned)))
            waits = StateChanged(state="suspended", waits=(Wait("child", f"child:{self.key}:result"),))
            upper = Start(self.parent_id, new(self._started("above"), uuid.uuid4().bytes), now, worker)
            spawn = Append(self.parent_id, (new(step, ids(step.step)),), now, owner=worker, epoch=1, alone=False)
            parks = (new(waits, ids("__workflow_suspended__#2")),)
            park = Append(self.parent_id, parks, now, owner=worker, epoch=1, expected=2, exact=True, alone=False)
            commands += [upper, Spawn(spawn, start), park]
        clock = StateChanged(state="clock_scheduled", waits=(Wait("timeout", LATE, now + YEAR_MS),))
        events: list[tuple[Event, str]] = [(clock, f"clock:{LATE}")]
        if self.base == "parked":
            events.append((_parking(now), "__workflow_suspended__#2"))
        if self.base == "failed":
            events.append((WorkflowFailed(failure=capture(RuntimeError("before"))), uuid.uuid4().hex))
        ids = StepIds("racer", self.key, 0)
        news = tuple(new(event, ids(name)) for event, name in events)
        commands += [Append(self.run_id, (one,), now, owner=worker, epoch=1, alone=False) for one in news]
        for sent in [store.submit(command) for command in commands]:
            outcome = await sent
            assert isinstance(outcome, Appended), outcome
        found = await store.head(self.run_id)
        assert found is not None
        self.run, self.head = found

    def _started(self, workflow: str, **fields: Any) -> WorkflowStarted:
        return WorkflowStarted(workflow=workflow, key=self.key, input=Raw(b"{}"), **fields)

    def owned(self, event: Event, name: str, *, exact: bool = False) -> Append:
        """What the owner sends, as it knew the run when the race began."""
        one: New = new(event, StepIds("racer", self.key, 0)(name))
        after = fold(self.run, (one,), self.run.created_at_ms)
        return Append(
            self.run_id,
            (one,),
            self.run.created_at_ms,
            self.run.run_key,
            self.worker.worker_key,
            1,
            self.head.version,
            None if after is self.run else after,
            exact,
            alone=False,
        )

    def rotation(self) -> Rotate:
        """The end of round 0 and the beginning of round 1."""
        following = run_id("racer", self.key, 1)
        ending = self.owned(WorkflowCompleted(handoff=following), "__workflow_completed__")
        on_cancel = None if self.alone else "cancel"
        started = self._started("racer", round=1, lineage=self.run_id, parent=self.run_id, on_cancel=on_cancel)
        return Rotate(ending, Start(following, new(started, StepIds("racer", self.key, 1)("start")), ending.at_ms))


class Actor(NamedTuple):
    """Somebody who wants something of the run. `command` is what is sent; `act` is for what is no command. `after` is
    the place of the run afterwards, None where it is refused and nothing changes."""

    name: str
    after: Callable[[Scene, Place], Place | None]
    command: Callable[[Scene], Command] | None = None
    act: Callable[[Scene, Store], Awaitable[object]] | None = None

    def send(self, scene: Scene, store: Store) -> Awaitable[object]:
        """Do it now: a command is in the queue on return."""
        if self.command is not None:
            return store.submit(self.command(scene))
        assert self.act is not None
        return self.act(scene, store)


def accepted(outcome: object) -> bool:
    """Whether who sent a command is told that it has won."""
    return isinstance(outcome, Appended | Collected)


# Where the run is afterwards


def _owner(status: str) -> Callable[[Scene, Place], Place | None]:
    return lambda scene, at: at._replace(status=status) if at.status == "driven" else None


def _rotate(scene: Scene, at: Place) -> Place | None:
    # A completion is carried over; what the clock of the round said, and its commands, are not.
    heard = tuple(step for step in at.heard if step == GO)
    return Place("rotated", heard, 2) if at.status == "driven" else None


def _park(scene: Scene, at: Place) -> Place | None:
    return at._replace(status="parked") if at.status == "driven" and not at.heard else None


def _time_out(scene: Scene, at: Place) -> Place | None:
    waiting = "parked" if scene.base == "parked" else "driven"
    return at.hears(LATE) if at.status == waiting and not at.heard else None


def _signal(scene: Scene, at: Place) -> Place | None:
    return at.hears(GO) if at.status in _LIVING and GO not in at.heard else None


def _poke(scene: Scene, at: Place) -> Place | None:
    # It wakes nobody, but whoever has not seen it must not decide as if it were not there.
    lives = at.status in _LIVING and at.rounds == 1
    return at._replace(heard=(*at.heard, POKED)) if lives and POKED not in at.heard else None


def _cancel(scene: Scene, at: Place) -> Place | None:
    return at._replace(status="cancelled") if at.status in _LIVING else None


def _let_go(scene: Scene, at: Place) -> Place | None:
    return at._replace(status="free") if at.status == "driven" else at


def _resurrect(scene: Scene, at: Place) -> Place | None:
    return at._replace(status="free") if at.status == "failed" else None


def _collect(scene: Scene, at: Place) -> Place | None:
    return at._replace(status="gone") if at.status in ("completed", "failed", "cancelled") else None


_LIVING: Final = ("driven", "parked", "free", "rotated")


# What they do


def _parking(now: int) -> StateChanged:
    waits = (Wait("deferred", GO), Wait("timeout", LATE, now + YEAR_MS))
    return StateChanged(state="suspended", waits=waits)


def _completes(scene: Scene) -> Command:
    return scene.owned(WorkflowCompleted(result=Raw(b'"done"')), "__workflow_completed__")


def _fails(scene: Scene) -> Command:
    return scene.owned(WorkflowFailed(failure=capture(RuntimeError("raced"))), uuid.uuid4().hex)


def _parks(scene: Scene) -> Command:
    name = f"__workflow_suspended__#{scene.head.version}"
    return scene.owned(_parking(scene.run.created_at_ms), name, exact=True)


def _times_out(scene: Scene) -> Command:
    if scene.base == "parked":
        return Fire(scene.run_id, scene.head.version, scene.run.created_at_ms + 2 * YEAR_MS)
    return scene.owned(StepRecorded(step=LATE, result=Raw(b"null")), LATE, exact=True)


def _signals(scene: Scene) -> Command:
    result = msgspec.json.encode(Exit(ok=Raw(b'"go"')))
    return Deliver(scene.run_id, GO, result, scene.run.created_at_ms)


def _pokes(scene: Scene) -> Command:
    one = New(Racer.Poked(), uuid.uuid4().bytes, "{}")  # type: ignore[attr-defined]
    run = scene.run
    return Append(run.run_id, (one,), run.created_at_ms, run.run_key, expected=scene.head.version)


def _evicts(scene: Scene, store: Store) -> Awaitable[object]:
    return store.release(scene.worker.worker_key, [scene.run.run_key])


def _loses(scene: Scene, store: Store) -> Awaitable[object]:
    return store.bury(scene.worker)


ACTORS: Final = (
    Actor("complete", _owner("completed"), _completes),
    Actor("fail", _owner("failed"), _fails),
    Actor("rotate", _rotate, lambda scene: scene.rotation()),
    Actor("park", _park, _parks),
    Actor("timeout", _time_out, _times_out),
    Actor("signal", _signal, _signals),
    Actor("command", _poke, _pokes),
    Actor("cancel", _cancel, lambda scene: Cancel(scene.run_id, scene.run.created_at_ms)),
    Actor("evict", _let_go, act=_evicts),
    Actor("lease_loss", _let_go, act=_loses),
    Actor("resurrect", _resurrect, lambda scene: Resurrect(scene.run_id, scene.run.created_at_ms)),
    Actor("gc", _collect, lambda scene: Collect(scene.run_id, scene.run.created_at_ms + 2 * YEAR_MS)),
)
NAMES: Final = {actor.name: actor for actor in ACTORS}
BASES: Final = ("driven", "parked", "failed")


def races() -> list[tuple[str, str, str]]:
    """Every pair in each order, in each state of the run in which one of the two at least can have its will."""
    found = []
    for base in BASES:
        scene = Scene("", base, alone=True)
        able = {actor.name for actor in ACTORS if actor.after(scene, scene.place) not in (None, scene.place)}
        found += [(base, one, two) for one in NAMES for two in NAMES if {one, two} & able]
    return found
