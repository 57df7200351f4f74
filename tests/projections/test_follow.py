"""Following projections: every event once and in order, through crashes, failures and several processes."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
import sqlalchemy as sa

import keiro
from keiro.errors import ProjectionFailed
from keiro.events import Event
from keiro.follower import BATCH, State
from keiro.projections.base import Projection, Row, position_of
from keiro.testing.crash import CrashPoints
from tests.conftest import MakeEngine
from tests.crash import forks
from tests.projections.orders import (
    FollowedLedger,
    FollowedTotals,
    RememberedTotals,
    Totals,
    expected_totals,
    order,
    totals,
    values,
)


class RememberedFollowed(FollowedTotals):
    name = "remembered_followed"
    store = "memory"


FOLLOWING: list[type[Projection]] = [FollowedTotals, RememberedFollowed]


@pytest.mark.parametrize("projection", FOLLOWING)
async def test_it_reaches_everything_that_was_in_the_journal_at_the_call(
    make_engine: MakeEngine, projection: type[Projection]
) -> None:
    async with make_engine(order, projections=[projection, FollowedLedger]) as engine:
        await asyncio.gather(*(engine.execute(order, name, 2) for name in "abcab"))
        await engine.caught_up(projection, timeout=30)
        await engine.caught_up("followed_ledger", timeout=30)
        assert values(await engine.rows(projection)) == [("a", 2, 4), ("b", 2, 4), ("c", 1, 2)]
        journal = [(one.position, one.run_id, one.version) for one in await engine.store.read(0, 1000)]
        assert values(await engine.rows(FollowedLedger)) == journal
        assert (await engine.rebuild(projection)).differences == 0
        (status, _) = await engine.projections()
        assert (status.name, status.mode, status.state) == (projection.name, "follow", State.CURRENT)
        assert (status.position, status.lag, status.error) == (journal[-1][0], 0, None)


async def test_of_several_followers_of_one_projection_each_event_is_folded_by_one(make_engine: MakeEngine) -> None:
    engines = [make_engine(order, projections=[FollowedTotals, FollowedLedger]) for _ in range(3)]
    async with engines[0], engines[1], engines[2]:
        for _ in range(10):
            await asyncio.gather(*(engine.start(order, name) for engine in engines for name in "aab"))
        for engine in engines:
            await engine.caught_up(FollowedTotals, timeout=30)
            await engine.caught_up(FollowedLedger, timeout=30)
        assert values(await engines[0].rows(FollowedTotals)) == [("a", 60, 60), ("b", 30, 30)]
        assert (await engines[1].rebuild(FollowedLedger)).differences == 0


class Poisoned(FollowedTotals):
    """Cannot fold what it is told not to; notes what it folded, in order."""

    name = "poisoned"
    table = totals("poisoned_totals")
    poison: ClassVar[str] = "poison"
    folded: ClassVar[list[int]] = []

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        if key == self.poison:
            raise ValueError("cannot swallow this")
        self.folded.append(position_of(event))
        return super().fold(key, row, event)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poisoned, "poison", "poison")
    monkeypatch.setattr("keiro.follower.BACKOFF_S", (0.01,))
    Poisoned.folded.clear()


async def test_a_fold_that_raises_stops_its_projection_before_the_event_and_no_other(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(order, projections=[Poisoned, FollowedTotals], worker=False) as engine:
        names = ["a", "b", "a", "poison", "a", "c"]
        for name in names:
            await engine.start(order, name)
        with pytest.raises(ProjectionFailed, match="cannot swallow this"):
            await engine.caught_up(Poisoned, timeout=30)
        await engine.caught_up(FollowedTotals, timeout=30)

        assert values(await engine.rows(Poisoned)) == [("a", 2, 2), ("b", 1, 1)], "folded up to the event that fails"
        assert len(await engine.rows(FollowedTotals)) == 4
        stopped, other = await engine.projections()
        assert (stopped.state, stopped.position, stopped.lag) == (State.FAILED, 3, 3)
        assert "cannot swallow this" in str(stopped.error)
        assert (other.state, other.lag, other.error) == (State.CURRENT, 0, None)
        assert caplog.text.count("cannot swallow this") == 1, "reported once, not at every try"

        monkeypatch.setattr(Poisoned, "poison", "")
        while (await engine.projections())[0].state is not State.CURRENT:
            await asyncio.sleep(0.01)
        assert values(await engine.rows(Poisoned)) == [("a", 3, 3), ("b", 1, 1), ("c", 1, 1), ("poison", 1, 1)]


async def test_a_table_that_refuses_stops_its_projection_where_it_refuses(
    make_engine: MakeEngine, store_url: str
) -> None:
    if store_url.startswith("memory"):
        pytest.skip("dicts refuse nothing")

    class Picky(FollowedTotals):
        name = "picky"
        table = totals("picky_totals")

        def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
            return {"orders": None if key == "nobody" else 1, "amount": 1}

    async with make_engine(order, projections=[Picky], worker=False) as engine:
        for name in ("ada", "bob", "nobody", "eve"):
            await engine.start(order, name)
        with pytest.raises(ProjectionFailed, match="picky_totals refused"):
            await engine.caught_up(Picky, timeout=30)
        assert [row.customer for row in await engine.rows(Picky)] == ["ada", "bob"]


async def test_a_restart_goes_on_behind_the_last_event_that_was_folded(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[Poisoned], worker=False) as engine:
        for name in "aab":
            await engine.start(order, name)
        await engine.caught_up(Poisoned, timeout=30)
    async with make_engine(order, projections=[Poisoned], worker=False) as engine:
        await engine.start(order, "c")
        await engine.caught_up(Poisoned, timeout=30)
        assert len(await engine.rows(Poisoned)) == 3
    assert sorted(Poisoned.folded) == Poisoned.folded
    assert len(Poisoned.folded) == 4, "an event was folded again after the restart"


async def test_a_journal_of_many_batches_is_followed_to_its_end(make_engine: MakeEngine) -> None:
    async with make_engine(order, worker=False) as engine:
        count = 2 * BATCH + 7
        for at in range(0, count, 500):
            await asyncio.gather(*(engine.start(order, f"c{n % 7}") for n in range(at, min(at + 500, count))))
    async with make_engine(order, projections=[FollowedTotals, RememberedTotals], worker=False) as engine:
        await engine.caught_up(FollowedTotals, timeout=60)
        assert sum(row.orders for row in await engine.rows(FollowedTotals)) == count
        assert sum(row.orders for row in await engine.rows(RememberedTotals)) == count


async def test_events_it_does_not_want_cost_no_transaction_and_no_lag(make_engine: MakeEngine) -> None:
    class Unwanted(FollowedTotals):
        name = "unwanted"
        table = totals("unwanted_totals")
        topics = ("WorkflowCancelled",)

    async with make_engine(order, projections=[Unwanted]) as engine:
        await engine.execute(order, "ada")
        await engine.caught_up(Unwanted, timeout=30)
        assert (await engine.projections())[0].lag == 0
        kept = engine._read_models.kept
        if not engine.url.startswith("memory"):
            assert await kept.tracked(engine._read_models._named(Unwanted)) == 0


async def test_waiting_for_a_projection_ends_in_time_or_says_why_not(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[FollowedTotals, Totals], worker=False) as engine:
        await engine.caught_up(Totals)
        await engine.caught_up(FollowedTotals)
        with pytest.raises(keiro.InvalidCall, match="it has: followed_totals, totals"):
            await engine.caught_up(FollowedLedger)
        engine._read_models._followers["followed_totals"]._task.cancel()  # type: ignore[union-attr]
        await engine.start(order, "ada")
        with pytest.raises(TimeoutError):
            await engine.caught_up(FollowedTotals, timeout=0.05)


class Switching(Totals):
    name = "switching"
    table = totals("switching_totals")


class SwitchingFollowed(Switching):
    mode = "follow"


async def test_a_projection_that_changes_its_mode_counts_nothing_twice_and_misses_nothing(
    make_engine: MakeEngine,
) -> None:
    for projection in (Switching, SwitchingFollowed, Switching, SwitchingFollowed, SwitchingFollowed):
        async with make_engine(order, worker=False) as engine:
            await engine.start(order, "ada")  # while nobody projects
        async with make_engine(order, projections=[projection], worker=False) as engine:
            await engine.start(order, "ada")
            await engine.caught_up(projection, timeout=30)
            assert values(await engine.rows(projection)) == await expected_totals(engine)


# Crashes


@pytest.fixture(params=["sqlite", "postgres"])
def durable_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.mark.crash
def test_a_follower_killed_at_any_boundary_of_its_writes_goes_on_exactly(durable_url: str) -> None:
    """Between the tracking and the rows too: a real SIGKILL at each statement, then a start in a new process."""

    def client(**options: Any) -> keiro.Engine:
        return keiro.Engine(durable_url, workflows=[order], worker=False, migrate=True, **options)

    async def fill() -> None:
        async with client() as engine:
            for n in range(12):
                await engine.start(order, "abc"[n % 3], n)

    def following(at: int) -> Any:
        async def program() -> None:
            engine = client(projections=[FollowedTotals, FollowedLedger])
            CrashPoints(engine, at)
            async with engine:
                await engine.start(order, "a", 100 + at)
                await engine.caught_up(FollowedTotals, timeout=30)
                await engine.caught_up(FollowedLedger, timeout=30)

        return program

    async def check() -> None:
        async with client(projections=[FollowedTotals, FollowedLedger]) as engine:
            await engine.caught_up(FollowedTotals, timeout=30)
            await engine.caught_up(FollowedLedger, timeout=30)
            assert values(await engine.rows(FollowedTotals)) == await expected_totals(engine)
            journal = [(one.position, one.run_id, one.version) for one in await engine.store.read(0, 1000)]
            assert values(await engine.rows(FollowedLedger)) == journal

    assert forks.run(fill) == 0
    killed = 0
    for at in range(1, 60):
        code = forks.run(following(at))
        assert code in (0, -signal.SIGKILL), f"boundary {at}: exit {code}"
        killed += code != 0
        assert forks.run(check) == 0, f"after boundary {at}"
        if code == 0:
            break
    assert killed > 8


# Appenders that commit late


class Ordered(Projection):
    """Notes the order in which events were folded, and refuses one that comes too late."""

    name = "ordered"
    mode = "follow"
    topics = ("WorkflowStarted",)
    table = sa.Table(
        "ordered",
        sa.MetaData(),
        sa.Column("one", sa.Integer, primary_key=True),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
    )

    def keys(self, event: Event) -> Iterable[Any]:
        return [1]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        at = position_of(event)
        if row is None:
            return {"last": at, "count": 1}
        if at <= row["last"]:
            raise ValueError(f"position {at} after {row['last']}")
        return {"last": at, "count": row["count"] + 1}


async def test_appenders_that_commit_late_hide_no_event_from_a_follower(postgres_url: str) -> None:
    """marten#4952: positions are given out when events are inserted, and become visible when transactions commit."""
    async with keiro.Engine(
        postgres_url, workflows=[order], projections=[Ordered, FollowedLedger], migrate=True, worker=False
    ) as engine:
        rng = random.Random(7)

        async def appender(name: str) -> None:
            async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
                for n in range(12):
                    await engine.start(order, name, n, connection=connection)
                    await asyncio.sleep(rng.random() * 0.01)  # the journal has the event, nobody sees it yet
                    if n % 4 == 3:
                        await connection.rollback()
                    else:
                        await connection.commit()

        async def ordinary() -> None:
            for n in range(40):
                await engine.start(order, "ordinary", n)

        async def looking() -> None:
            while True:
                await engine.caught_up(Ordered, timeout=30)
                await asyncio.sleep(0)

        look = asyncio.create_task(looking())
        await asyncio.gather(*(appender(f"late-{n}") for n in range(4)), ordinary())
        look.cancel()
        await engine.caught_up(Ordered, timeout=30)
        await engine.caught_up(FollowedLedger, timeout=30)
        journal = [(one.position, one.run_id, one.version) for one in await engine.store.read(0, 1000)]
        assert len(journal) == 40 + 4 * 9
        assert values(await engine.rows(FollowedLedger)) == journal
        ((_, last, count),) = values(await engine.rows(Ordered))
        assert (last, count) == (journal[-1][0], len(journal))


async def test_a_follower_goes_on_when_the_server_comes_back(postgres_server: Any, postgres_url: str) -> None:
    name = postgres_url.rsplit("/", 1)[1]
    async with keiro.Engine(
        postgres_url, workflows=[order], projections=[FollowedTotals], migrate=True, worker=False
    ) as engine:
        await engine.start(order, "ada")
        await engine.caught_up(FollowedTotals, timeout=30)
        postgres_server.terminate_backends(name)
        await engine.start(order, "ada")
        await engine.caught_up(FollowedTotals, timeout=30)
        assert values(await engine.rows(FollowedTotals)) == [("ada", 2, 2)]


async def test_an_error_that_is_not_of_the_projection_is_told_and_outlived(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine(order, projections=[FollowedTotals], worker=False) as engine:
        kept: Any = engine._read_models.kept
        read = kept.read

        async def broken(*arguments: Any) -> Any:
            raise RuntimeError("a row of the journal makes no sense")

        monkeypatch.setattr(kept, "read", broken)
        await engine.start(order, "ada")
        with pytest.raises(ProjectionFailed, match="makes no sense"):
            await engine.caught_up(FollowedTotals, timeout=30)
        monkeypatch.setattr(kept, "read", read)
        while (await engine.projections())[0].state is not State.CURRENT:
            await asyncio.sleep(0.01)
        assert values(await engine.rows(FollowedTotals)) == [("ada", 1, 1)]
        assert caplog.text.count("makes no sense") == 1
