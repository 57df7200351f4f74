"""The fence: owner, epoch and version, in every statement that appends; and each line of defence without the others."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

import keiro
from keiro.decisions import (
    AlreadyPresent,
    Append,
    Appended,
    Existing,
    FenceLost,
    New,
    RefusedTerminal,
    Start,
    fold,
    new,
)
from keiro.events import WorkflowCompleted, WorkflowStarted
from keiro.rows import Head, Run
from keiro.stores import postgres
from keiro.stores.base import Incarnation
from tests.conformance.test_journal import on_sql, step_event
from tests.conformance.test_ownership import own_row, worker_of
from tests.conftest import MakeEngine

SHAPES = {"step": 1, "end": 1, "few": 2, "batch": postgres.FEW + 1}
"""What an owner sends in one tick: a step, an end, a few steps, or so many that Postgres gets them as arrays."""


@keiro.workflow
async def owned(run: keiro.WorkflowRun) -> None: ...


async def claimed(engine: keiro.Engine, key: str = "a") -> tuple[Run, Head]:
    """A run that this engine's worker owns and does not drive, with two events."""
    handle = await engine.start(owned, id=key)
    await engine.store.submit(Append(handle.run_id, (step_event("owned", key, "first"),), 1))
    ((run, head),) = await engine.store.claim(worker_of(engine).key, ["owned"], 1)
    return run, head


def append(run: Run, head: Head, one: New, expected: int) -> Append:
    after = fold(run, (one,), 2)
    changed = after if after is not run else None
    return Append(run.run_id, (one,), 2, run.run_key, head.owner, head.epoch, expected, changed)


def appends(run: Run, head: Head, shape: str) -> list[Append]:
    if shape == "end":
        ended = new(WorkflowCompleted(result=Raw(b"1")), uuid.uuid4().bytes)
        return [append(run, head, ended, head.version)]
    steps = [step_event(run.workflow, run.key, f"s{n}") for n in range(SHAPES[shape])]
    return [append(run, head, one, head.version + n) for n, one in enumerate(steps)]


async def send(engine: keiro.Engine, commands: list[Append]) -> list[Any]:
    return list(await asyncio.gather(*map(engine.store.submit, commands)))


WRONG: dict[str, Callable[[Head], Head]] = {
    "owner": lambda head: replace(head, owner=(head.owner or 0) + 1),
    "epoch": lambda head: replace(head, epoch=head.epoch - 1),
    "a later epoch": lambda head: replace(head, epoch=head.epoch + 1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("shape", SHAPES)
async def test_l4_an_append_of_who_does_not_own_the_run_is_refused(
    make_engine: MakeEngine, shape: str, wrong: str
) -> None:
    """L4, E12, F10: one of owner and epoch is not enough, whichever statement the append is written by."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        before = await engine.store.read(0, 10)
        assert await send(engine, appends(run, WRONG[wrong](head), shape)) == [FenceLost()] * SHAPES[shape]
        assert await engine.store.read(0, 10) == before
        assert await engine.store.head(run.run_id) == (run, head)


@pytest.mark.parametrize("seen", [-1, 1, 3])
@pytest.mark.parametrize("shape", SHAPES)
async def test_l1_an_append_that_expected_another_version_is_decided_anew(
    make_engine: MakeEngine, shape: str, seen: int
) -> None:
    """L1: the version an owner expects is a hint. Wrong in either direction, the events follow the last one."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        commands = appends(run, replace(head, version=head.version + seen), shape)
        outcomes = await send(engine, commands)
        assert sorted(outcomes, key=str) == [Appended(3 + n) for n in range(len(commands))]
        rows = await engine.store.read(0, 100)
        assert [row.version for row in rows] == list(range(1, len(commands) + 3))
        found = await engine.store.head(run.run_id)
        assert found is not None and found[1].version == len(commands) + 2
        assert found[1].owner == (None if shape == "end" else head.owner)
        assert found[0].status == ("completed" if shape == "end" else "running")


@pytest.mark.parametrize("many", [3, postgres.FEW + 3])
@pytest.mark.parametrize("shape", ["step", "end"])
async def test_in_one_batch_only_what_is_fenced_in_is_written(make_engine: MakeEngine, shape: str, many: int) -> None:
    """L4: of several runs in one transaction, each by its own fence, with its events and its row or without both."""
    async with make_engine(worker=False) as engine:
        runs = [await claimed(engine, f"r{n}") for n in range(many)]
        stale = [head if n != 1 else replace(head, epoch=head.epoch - 1) for n, (_, head) in enumerate(runs)]
        sent = [appends(run, head, shape)[0] for (run, _), head in zip(runs, stale, strict=True)]
        assert await send(engine, sent) == [Appended(3), FenceLost(), *[Appended(3)] * (many - 2)]
        for n, (run, head) in enumerate(runs):
            written = n != 1
            found = await engine.store.head(run.run_id)
            assert found is not None and found[1].version == head.version + written
            assert found[0].terminal == (written and shape == "end")
            history = (await engine.store.history([run.run_key]))[run.run_key]
            assert [row.version for row in history] == list(range(1, head.version + written + 1))


async def test_two_owners_of_one_run_in_one_batch_are_told_apart(make_engine: MakeEngine) -> None:
    """L4: the second is fenced by its own owner and epoch, not by those of the first."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        others = [await claimed(engine, f"r{n}") for n in range(postgres.FEW)]
        for n, wrong in enumerate((replace(head, owner=(head.owner or 0) + 1), replace(head, epoch=head.epoch - 1))):
            mine = append(run, head, step_event("owned", "a", f"mine{n}"), 2 + n)
            theirs = append(run, wrong, step_event("owned", "a", f"theirs{n}"), 3 + n)
            beside = [append(*other, step_event("owned", other[0].key, f"s{n}"), 2 + n) for other in others]
            outcomes = await send(engine, [mine, theirs, *beside])
            assert outcomes == [Appended(3 + n), FenceLost(), *[Appended(3 + n)] * len(others)]


async def test_appends_that_do_not_follow_each_other_are_decided_one_by_one(make_engine: MakeEngine) -> None:
    """L1: in one batch, what expects another version than the one before it leaves behind."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        ahead = (0, 1, 7, 3, 3, 20)
        sent = [append(run, head, step_event("owned", "a", f"s{n}"), head.version + by) for n, by in enumerate(ahead)]
        assert len(sent) > postgres.FEW
        assert sorted(await send(engine, sent), key=lambda one: one.version) == [Appended(3 + n) for n in range(6)]
        assert [row.version for row in await engine.store.read(0, 10)] == list(range(1, 9))


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
@pytest.mark.parametrize("many", [1, postgres.FEW + 1])
async def test_a_start_that_finds_its_run_is_no_error_of_the_database(
    make_engine: MakeEngine, many: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch of starts of which one exists is not undone for it."""
    caplog.set_level(logging.INFO)
    async with make_engine(worker=False) as engine:
        await engine.start(owned, id="0")
        outcomes = await asyncio.gather(*(engine.start(owned, id=str(n)) for n in range(many)))
        assert len(outcomes) == many and len(await engine.runs()) == many
    assert "one by one" not in caplog.text


async def test_equal_input_is_equal_in_any_order_and_of_any_spelling(make_engine: MakeEngine) -> None:
    """A key that exists is found with the same values, however their JSON is written, and with no others."""
    async with make_engine(worker=False) as engine:

        async def started(value: bytes) -> str:
            event = WorkflowStarted(workflow="owned", key="a", input=Raw(value))
            outcome = await engine.store.submit(Start("wf:owned-a", new(event, uuid.uuid4().bytes), 1, None))
            return type(outcome).__name__

        assert await started(b'{"a":1,"b":{"c":"\xc3\xa9","d":null}}') == "Appended"
        assert await started(b'{"b" : {"d":null, "c":"\\u00e9"}, "a":1}') == "Existing"
        for other in (
            b'{"a":1.0,"b":{"c":"\xc3\xa9","d":null}}',
            b'{"a":true,"b":{"c":"\xc3\xa9","d":null}}',
            b'{"a":1}',
        ):
            assert await started(other) == "InputDiffers"


CONDITIONS = [
    (shape, condition, seen) for shape in SHAPES for condition, seen in (("owner", 0), ("epoch", 0), ("version", 3))
]


@pytest.mark.parametrize(("shape", "condition", "seen"), CONDITIONS)
@pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)
async def test_f55_each_condition_of_each_statement_refuses_by_itself(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, shape: str, condition: str, seen: int
) -> None:
    """F55: with that one condition switched off, what it refuses is written. So nothing else refuses it, and the tests
    above test the statement and not a line before it."""

    def off(sql: str) -> str:
        switched = sql
        for form in (f"AND {condition} = ?", f"h.{condition} = t.{condition}"):
            switched = switched.replace(form, "AND ? IS NOT NULL" if "?" in form else "TRUE")
        for n in ("$2", "$3", "$4"):
            switched = switched.replace(f"h.{condition} = {n}", f"{n}::bigint IS NOT NULL")
        return switched

    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        text = engine.store.sql.text  # type: ignore[attr-defined]
        monkeypatch.setattr(text, "advance", off(text.advance))
        monkeypatch.setattr(text, "advance_and_release", off(text.advance_and_release))
        batch_sql = postgres._batch_sql
        monkeypatch.setattr(postgres, "_STEP", off(postgres._STEP))
        monkeypatch.setattr(postgres, "_END", off(postgres._END))
        monkeypatch.setattr(postgres, "_batch_sql", lambda *kind: off(batch_sql(*kind)))
        wrong = WRONG[condition](head) if condition in WRONG else replace(head, version=head.version + seen)
        outcomes = await send(engine, appends(run, wrong, shape))
        rows = (await engine.store.history([run.run_key]))[run.run_key]
        assert len(rows) == 2 + len(outcomes), "written, though it must not be"
        if condition == "version" and engine.url.startswith("sqlite"):
            assert [row.version for row in rows] != list(range(1, len(rows) + 1))
        elif condition != "version":
            assert outcomes == [Appended(3 + n) for n in range(len(outcomes))]


async def test_every_change_of_owner_is_a_new_epoch(make_engine: MakeEngine) -> None:
    """E8, L4: by claim, release, burial and adoption, each by itself: what an owner still has under way can never match
    again, not even when the same worker owns the run again."""

    async def epoch() -> tuple[int | None, int]:
        found = await engine.store.head("wf:owned-a")
        assert found is not None
        return found[1].owner, found[1].epoch

    async with make_engine(worker=False) as engine:
        store, mine = engine.store, worker_of(engine).key
        engine.committed = lambda changed, *others: None  # type: ignore[method-assign]
        await engine.start(owned, id="a")
        assert await epoch() == (None, 0)
        ((run, head),) = await store.claim(mine, ["owned"], 1)
        assert await epoch() == (mine, 1) and head.epoch == 1
        await store.release(mine, [run.run_key])
        assert await epoch() == (None, 2)
        other = await store.register(Incarnation("other", "host", 1, "1"))
        await store.claim(other, ["owned"], 1)
        assert await epoch() == (other, 3)
        row = next(row for row in await store.workers() if row.worker_key == other)
        assert await store.bury(row)
        assert await epoch() == (None, 4)
        # Owned by nobody who is listed, as after a start that commits behind the burial of its worker.
        event = WorkflowStarted(workflow="owned", key="b", input=Raw(b"{}"))
        await store.submit(Start("wf:owned-b", new(event, uuid.uuid4().bytes), 1, other))
        assert await store.adopt_orphans()
        found = await store.head("wf:owned-b")
        assert found is not None and (found[0].status, found[1].owner, found[1].epoch) == ("pending", None, 2)


async def test_e13_who_ends_a_run_or_waits_for_its_next_attempt_owns_it_no_more(make_engine: MakeEngine) -> None:
    """E13, E14: the event, the row and the owner change in one transaction."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        assert await send(engine, appends(run, head, "end")) == [Appended(3)]
        found = await engine.store.head(run.run_id)
        assert found is not None and (found[0].status, found[1].owner, found[1].epoch) == ("completed", None, 1)
        # From outside it is the same, and its owner learns that it has lost the run.
        run, head = await claimed(engine, "b")
        ended = new(keiro.events.WorkflowCancelled(), uuid.uuid4().bytes)
        assert await engine.store.submit(Append(run.run_id, (ended,), 1)) == Appended(3)
        found = await engine.store.head(run.run_id)
        assert found is not None and (found[0].status, found[1].owner) == ("cancelled", None)
        assert await send(engine, appends(run, head, "step")) == [FenceLost()]


async def test_the_order_of_refusals(make_engine: MakeEngine) -> None:
    """L4, WF-06, F39, trap 5: the fence first, then what is there already, then the end of the run."""
    async with make_engine(worker=False) as engine:
        run, head = await claimed(engine)
        recorded = step_event("owned", "a", "first")
        assert await engine.store.submit(append(run, replace(head, epoch=9), recorded, 2)) == FenceLost()
        assert isinstance(await engine.store.submit(append(run, head, recorded, 2)), AlreadyPresent)
        await send(engine, appends(run, head, "end"))
        assert await engine.store.submit(append(run, head, recorded, 3)) == FenceLost()
        assert isinstance(await engine.store.submit(Append(run.run_id, (recorded,), 1)), AlreadyPresent)
        fresh = step_event("owned", "a", "late")
        assert await engine.store.submit(Append(run.run_id, (fresh,), 1)) == RefusedTerminal("completed")


@on_sql
async def test_a_start_that_is_sent_again_is_told_again_and_only_its_own_is_driven(make_engine: MakeEngine) -> None:
    """A start whose answer was lost is sent again with the same event. The engine hears of the run, and so drives it,
    if it is still its own: in the first epoch, of this worker."""
    async with make_engine(worker=False) as engine:
        told: list[Any] = []
        engine.committed = lambda changed, *others: told.extend(run.run_id for run in changed)  # type: ignore[method-assign]
        store, mine = engine.store, worker_of(engine).key
        other = await store.register(Incarnation("other", "host", 1, "1"))
        event = WorkflowStarted(workflow="owned", key="a", input=Raw(b'{"n":1}'))
        start = Start("wf:owned-a", new(event, uuid.uuid4().bytes), 1, mine)
        first = await store.submit(start)
        again = await store.submit(start)
        assert isinstance(first, Appended) and again == first
        assert told == ["wf:owned-a", "wf:owned-a"]
        # Of another worker, or one who is no owner: the answer is the same, and nobody begins to drive.
        for owner in (other, None):
            told.clear()
            assert isinstance(await store.submit(replace(start, owner=owner)), Appended)
            assert told == []
        row = await own_row(engine)
        assert await store.bury(row)
        told.clear()
        assert isinstance(await store.submit(start), Appended)
        assert told == [], "it was taken over meanwhile"
        # A start of its own by somebody else finds the run.
        rival = Start("wf:owned-a", new(event, uuid.uuid4().bytes), 1, mine)
        assert isinstance(await store.submit(rival), Existing)
        assert len(await store.read(0, 10)) == 1
