"""Every pair of what can happen to a run, in both orders and at once: one winner, and one story of it everywhere.

The overlap is by construction: a transaction of somebody else holds the lock until both commands, sent through stores
of their own, wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
import pytest
import pytest_asyncio

import keiro
from keiro.decisions import Stored
from keiro.mapper import EventMapper
from keiro.projections.waits import decode_exit
from keiro.rows import Run
from keiro.run import workflow_of
from keiro.stores import open_store
from keiro.stores.base import Store
from keiro.stores.kept import Kept
from keiro.stores.postgres import LOCK_KEY
from tests.conformance.racers import ENDS, GO, LATE, NAMES, POKED, Actor, Place, Racer, Scene, above, accepted, races

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 30
TELLING = ("StepRecorded", "StepRetracted")
HEARD = (GO, LATE, POKED)
SHOWN = {"driven": "running", "parked": "suspended", "free": "pending", "rotated": "pending"}
_numbers = itertools.count(1)


class Nobody:
    """Listens to a store and does nothing about it."""

    def committed(self, changed: Sequence[Run], touched: Sequence[str] = (), taken: object = ()) -> None:
        pass

    def woken(self) -> None:
        pass


class Course:
    """One database: two stores to race through, as two processes would, and an engine that drives what is left over."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = keiro.Engine(url, workflows=[Racer, above], migrate=True)
        self.stores = [open_store(url, durability="full") for _ in range(2)]
        self.kept: Kept
        self.open = False

    async def __aenter__(self) -> Course:
        store: Any = self.engine.store
        claim = store.claim

        async def gated(*args: Any, **options: Any) -> list[Any]:
            return list(await claim(*args, **options)) if self.open else []

        store.claim = gated
        await self.engine.__aenter__()
        for one in self.stores:
            one.listener = Nobody()
            self.kept = one.keep((), EventMapper([workflow_of(Racer), workflow_of(above)]))
            await one.open(migrate=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        for one in self.stores:
            await one.close()
        await self.engine.close()

    @contextmanager
    def locked(self) -> Iterator[Callable[[], int | None]]:
        """Hold the journal's lock; how many wait for it, where that can be seen."""
        if self.url.startswith("sqlite"):
            thief = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)
            thief.execute("BEGIN IMMEDIATE")
            yield lambda: None
            thief.execute("COMMIT")
            thief.close()
            return
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        with psycopg.connect(self.url) as other, psycopg.connect(self.url, autocommit=True) as watcher:
            other.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            yield lambda: int(watcher.execute(waiting).fetchone()[0])  # type: ignore[index]
            other.rollback()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", "sqlite", "postgres"])
async def course(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Course]:
    folder = tmp_path_factory.mktemp("races")
    if request.param == "postgres":
        with request.getfixturevalue("postgres_server").database() as url:
            async with Course(url) as course:
                yield course
        return
    url = f"memory://{folder}" if request.param == "memory" else f"sqlite:///{folder}/keiro.db"
    async with Course(url) as course:
        yield course


@pytest.mark.parametrize(("base", "first", "second"), races())
async def test_two_in_either_order_have_one_winner(course: Course, base: str, first: str, second: str) -> None:
    """In one batch where both are commands, decided on the batch's own state; else one right after the other."""
    scene, actors = await begin(course, base, first, second)
    store = course.stores[0]
    if all(actor.command is not None for actor in actors):
        sent = [actor.send(scene, store) for actor in actors]
        answers = [await one for one in sent]
    else:
        answers = [await actor.send(scene, store) for actor in actors]
    await one_story(course, scene, answers, [expected(scene, actors)])


OVERLAPPING = [(base, one, two) for base, one, two in races() if list(NAMES).index(one) <= list(NAMES).index(two)]


@pytest.mark.parametrize("course", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize(("base", "first", "second"), OVERLAPPING)
async def test_two_at_once_have_one_winner(course: Course, base: str, first: str, second: str) -> None:
    """Through two stores, and both wait at the lock: whoever gets it first has come first. In memory nobody waits."""
    scene, actors = await begin(course, base, first, second)
    with course.locked() as waiting:
        sent = []
        for number, (actor, store) in enumerate(zip(actors, course.stores, strict=True), 1):
            sent.append(asyncio.ensure_future(actor.send(scene, store)))
            for _ in range(5):
                await asyncio.sleep(0)
            while (count := waiting()) is not None and count < number:
                await asyncio.sleep(0)
        assert not any(one.done() for one in sent)
    answers = await asyncio.gather(*sent)
    place, wins = expected(scene, actors[::-1])
    await one_story(course, scene, answers, [expected(scene, actors), (place, wins[::-1])])


async def begin(course: Course, base: str, *names: str) -> tuple[Scene, list[Actor]]:
    # A parent that lives holds its children: what is collected is a run of its own.
    scene = Scene(str(next(_numbers)), base, alone="gc" in names)
    await scene.build(course.stores[0])
    return scene, [NAMES[name] for name in names]


def expected(scene: Scene, actors: Sequence[Actor]) -> tuple[Place, list[bool | None]]:
    """Where the run is after them, one after the other, and which of those that are told are told that they won."""
    place = scene.place
    wins: list[bool | None] = []
    for actor in actors:
        after = actor.after(scene, place)
        wins.append(None if actor.command is None else after is not None)
        place = after or place
    return place, wins


async def one_story(
    course: Course, scene: Scene, answers: Sequence[object], either: list[tuple[Place, list[bool | None]]]
) -> None:
    """The answers, the rows and the journal say the same, and the run and its parent come to the end that they say."""
    given = [accepted(answer) for answer in answers]
    rounds = await rounds_of(course.stores[0], scene)
    fitting = [
        place
        for place, wins in either
        if all(win in (None, one) for one, win in zip(given, wins, strict=True))
        and await looks(course.stores[0], scene, place, rounds)
    ]
    assert fitting, (answers, either, rounds)
    place = fitting[0]
    await journals_agree(course, scene, place, rounds)
    await ends(course, scene, place)


async def rounds_of(store: Store, scene: Scene) -> list[Run]:
    """The rows of all rounds."""
    found = [await store.run(name) for name in (scene.run_id, f"{scene.run_id}#1", f"{scene.run_id}#2")]
    return [run for run in found if run is not None]


async def looks(store: Store, scene: Scene, place: Place, rounds: list[Run]) -> bool:
    """Whether the rows of the run and what it was told are as in this place."""
    if place.status == "gone":
        return rounds == []
    if len(rounds) != place.rounds or rounds[-1].status != SHOWN.get(place.status, place.status):
        return False
    return [name for name in names_of(await journal(store, rounds[-1])) if name in HEARD] == list(place.heard)


async def journal(store: Store, run: Run) -> list[Stored]:
    return (await store.history([run.run_key]))[run.run_key]


def names_of(rows: Sequence[Stored]) -> list[str]:
    """The steps and the commands in a journal."""
    return [msgspec.json.decode(row.payload).get("step", row.topic) for row in rows]


async def journals_agree(course: Course, scene: Scene, place: Place, rounds: list[Run]) -> None:
    """Each round has ended once at most and nothing comes after that; the parent was told of it once; and every row is
    what its journal says."""
    store = course.stores[0]
    for run in rounds:
        topics = [row.topic for row in await journal(store, run)]
        lives = topics[topics.index("WorkflowResurrected") + 1 :] if "WorkflowResurrected" in topics else topics
        assert [topic for topic in lives if topic in ENDS] == lives[-1:] * run.terminal, topics
        assert (run.handoff_run_id is not None) == (run is not rounds[-1])
    if not scene.alone:
        parent = await store.run(scene.parent_id)
        assert parent is not None
        result = f'"step":"child:{scene.key}:result"'
        told = [row for row in await journal(store, parent) if result in row.payload and row.topic in TELLING]
        (child,) = await store.children("above", scene.key)
        assert child.status == (rounds[-1].status if rounds[-1].terminal else "running")
        if rounds[-1].terminal:
            assert told[-1].topic == "StepRecorded" and parent.status == "pending"
            end = decode_exit(msgspec.json.encode(msgspec.json.decode(told[-1].payload)["result"]))
            said = (end.ok is not msgspec.UNSET, end.failed is not msgspec.UNSET)
            assert said == (place.status == "completed", place.status == "failed")
        else:
            assert tuple(row.topic for row in told) in ((), TELLING)
    first = min([run.run_key for run in rounds], default=1)
    assert (await course.kept.examine(first - 2, fix=False))[0] == []


async def ends(course: Course, scene: Scene, place: Place) -> None:
    """Let it be driven. What was told in the race is not told again: a run that waits for it now would do so for
    ever. Only what has not happened is done."""
    store, engine = course.stores[0], course.engine
    if place.status in SHOWN and not place.woken:
        assert accepted(await NAMES["signal"].send(scene, store))
        place = place.hears(GO)
    await store.bury(scene.worker)
    course.open = True
    assert engine._worker is not None
    engine._worker.wake()
    said = "go" if place.woken[:1] == [GO] else "late"
    results = {
        "completed": "done",
        "failed": "WorkflowFailed",
        "cancelled": "WorkflowCancelled",
        "gone": "gone",
    }
    end = results.get(place.status, said)
    try:
        assert await outcome(engine.handle(scene.run_id)) == end
        if not scene.alone:
            assert await outcome(engine.handle(scene.parent_id)) == end.replace("Workflow", "Child")
    finally:
        course.open = False
    first = [run.run_key for run in await rounds_of(store, scene)][:1]
    assert (await course.kept.examine(first[0] - 2 if first else 0, fix=False))[0] == []


async def outcome(handle: keiro.Handle) -> Any:
    try:
        return await handle.result(LIMIT_S)
    except (keiro.WorkflowFailed, keiro.WorkflowCancelled) as error:
        return type(error).__name__
    except keiro.RunNotFound:
        return "gone"


async def test_every_row_is_what_the_journal_says_after_all_that(course: Course) -> None:
    """Rebuilt rows equal kept rows, of all runs that were raced for."""
    assert (await course.engine.rebuild("runs")).differences == 0
    assert await course.engine.reconcile() == []
    assert await course.engine.runs(status="running") == []
