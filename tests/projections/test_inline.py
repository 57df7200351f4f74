"""Inline projections: rows that change in the transaction that appends the event."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import uuid
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

import keiro
from keiro.errors import ProjectionFailed
from keiro.events import Event, StepRecorded
from keiro.projections.base import Projection, Row
from tests.conftest import MakeEngine
from tests.projections.orders import Ledger, RememberedTotals, Totals, expected_totals, input_of, order, totals, values

INLINE = [Totals, RememberedTotals]


@pytest.mark.parametrize("projection", INLINE)
async def test_rows_are_there_when_the_command_is_acknowledged(
    make_engine: MakeEngine, projection: type[Totals]
) -> None:
    async with make_engine(order, projections=[projection]) as engine:
        await engine.start(order, "ada", 3)
        assert values(await engine.rows(projection)) == [("ada", 1, 3)]
        await engine.start(order, "ada", 4)
        assert values(await engine.rows(projection)) == [("ada", 2, 7)]


@pytest.mark.parametrize("projection", INLINE)
async def test_commands_of_one_tick_fold_onto_the_same_rows_in_order(
    make_engine: MakeEngine, projection: type[Totals]
) -> None:
    async with make_engine(order, projections=[projection]) as engine:
        starts = [engine.start(order, customer, n) for n, customer in enumerate("abcabcaab" * 5)]
        await asyncio.gather(*starts, engine.start(order, "a", -1), engine.start(order, "a", 5))
        assert values(await engine.rows(projection)) == await expected_totals(engine)
        assert values(await engine.rows(projection))[0] == ("a", 1, 5)


@pytest.mark.parametrize("projection", INLINE)
async def test_a_fold_that_raises_rejects_its_command_and_no_other(
    make_engine: MakeEngine, projection: type[Totals]
) -> None:
    """L17."""
    async with make_engine(order, projections=[projection], worker=False) as engine:
        done = await asyncio.gather(
            engine.start(order, "ada", 1, id="before"),
            engine.start(order, "ada", 666, id="bad"),
            engine.start(order, "ada", 2, id="after"),
            engine.start(order, "bob", 666, id="worse"),
            return_exceptions=True,
        )
        errors = [one for one in done if isinstance(one, BaseException)]
        assert [type(one) for one in errors] == [ProjectionFailed, ProjectionFailed]
        assert all(repr(projection.name) in str(one) and "666 brings bad luck" in str(one) for one in errors)
        assert sorted(run.key for run in await engine.runs()) == ["after", "before"]
        assert values(await engine.rows(projection)) == [("ada", 2, 3)]
        assert len(await engine.store.read(0, 100)) == 2, "an event of a rejected command is in the journal"
        assert (await engine.rebuild("runs")).differences == 0


class Choosy(RememberedTotals):
    name = "choosy"
    table = totals("choosy_totals")

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        if key == "eve":
            raise ValueError("not eve")
        return super().fold(key, row, event)


async def test_what_one_projection_rejects_is_in_the_rows_of_no_other(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[Totals, RememberedTotals, Choosy], worker=False) as engine:
        names = ["ada", "eve", "ada", "bob", "eve", "ada"]
        done = await asyncio.gather(*(engine.start(order, name) for name in names), return_exceptions=True)
        assert [isinstance(one, ProjectionFailed) for one in done] == [name == "eve" for name in names]
        for projection in (Totals, RememberedTotals, Choosy):
            assert values(await engine.rows(projection)) == [("ada", 3, 3), ("bob", 1, 1)]
            assert (await engine.rebuild(projection)).differences == 0


class Picky(Totals):
    """The column takes no NULL, which no fold can know."""

    name = "picky"
    table = totals("picky_totals")

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        return {"orders": None if key == "nobody" else 1, "amount": 1}


async def test_rows_a_table_refuses_reject_their_command_and_no_other(make_engine: MakeEngine, store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("dicts refuse nothing")
    async with make_engine(order, projections=[Picky], worker=False) as engine:
        done = await asyncio.gather(
            *(engine.start(order, name) for name in ("ada", "nobody", "bob")), return_exceptions=True
        )
        assert isinstance(done[1], ProjectionFailed)
        assert "picky_totals" in str(done[1])
        assert [row.customer for row in await engine.rows(Picky)] == ["ada", "bob"]
        assert len(await engine.runs()) == 2


class Pair(Projection):
    """Two rows for an event, under a key of two columns."""

    name = "pairs"
    table = sa.Table(
        "pairs",
        sa.MetaData(),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("seen", sa.Integer),
    )
    topics = ("WorkflowStarted",)

    def keys(self, event: Event) -> Iterable[Any]:
        amount = input_of(event)["amount"]
        return [("odd" if amount % 2 else "even", amount), ("all", 0), ("all", 0)]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        return {"seen": 1 if row is None else row["seen"] + 1}


async def test_an_event_may_concern_several_rows_with_keys_of_several_columns(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[Pair]) as engine:
        await asyncio.gather(*(engine.start(order, "ada", n) for n in (1, 2, 1)))
        assert values(await engine.rows(Pair)) == [("all", 0, 3), ("even", 2, 1), ("odd", 1, 2)]
        assert values(await engine.rows(Pair, kind="all")) == [("all", 0, 3)]
        assert values(await engine.rows("pairs", kind="odd", number=2)) == []
        assert (await engine.rebuild(Pair)).differences == 0


class Colour(enum.Enum):
    RED = "red"


class Typed(Projection):
    """A column of each usual type."""

    name = "typed"
    table = sa.Table(
        "typed",
        sa.MetaData(),
        sa.Column("id", sa.Uuid, primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True)),
        sa.Column("day", sa.Date),
        sa.Column("price", sa.Numeric(12, 2)),
        sa.Column("share", sa.Float),
        sa.Column("data", sa.JSON),
        sa.Column("colour", sa.Enum(Colour)),
        sa.Column("raw", sa.LargeBinary),
        sa.Column("yes", sa.Boolean),
        sa.Column("text", sa.Text),
        sa.Column("absent", sa.Text),
    )
    topics = ("WorkflowStarted",)

    def keys(self, event: Event) -> Iterable[Any]:
        return [uuid.uuid5(uuid.NAMESPACE_URL, event.originator_id)]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        return {
            "at": event.timestamp,
            "day": datetime.date(2020, 2, 29),
            "price": decimal.Decimal("12.50"),
            "share": 0.1,
            "data": {"list": [1, {"a": None}], "pair": (1, 2)},
            "colour": Colour.RED,
            "raw": b"\0\xff",
            "yes": True,
            "text": "ä 🐦 ' \" \\ ? %s $1",
        }


@pytest.mark.filterwarnings("ignore:Dialect sqlite.pysqlite does \\*not\\* support Decimal")
async def test_values_of_every_usual_type_come_back_and_compare(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[Typed]) as engine:
        handle = await engine.start(order, "ada")
        (row,) = await engine.rows(Typed)
        assert row.id == uuid.uuid5(uuid.NAMESPACE_URL, handle.run_id)
        assert (row.day, row.price, row.share) == (datetime.date(2020, 2, 29), decimal.Decimal("12.50"), 0.1)
        assert row.data["list"] == [1, {"a": None}]
        assert (row.colour, row.raw, row.yes, row.absent) == (Colour.RED, b"\0\xff", True, None)
        assert row.text == "ä 🐦 ' \" \\ ? %s $1"
        report = await engine.rebuild(Typed)
        assert (report.differences, report.verified) == (0, 1)
        assert len(await engine.rows(Typed, absent=None, colour=Colour.RED)) == 1


class Counted(Totals):
    name = "counted"
    table = totals("counted_totals")
    asked: ClassVar[list[str]] = []

    def keys(self, event: Event) -> Iterable[Any]:
        self.asked.append(event.TOPIC)
        return super().keys(event)


async def test_a_projection_sees_only_topics_it_wants(make_engine: MakeEngine) -> None:
    """L23."""
    Counted.asked.clear()
    async with make_engine(order, projections=[Counted]) as engine:
        await engine.execute(order, "ada")
    assert set(Counted.asked) == {"WorkflowStarted"}


async def test_an_append_only_table_takes_every_event_and_changes_no_row(make_engine: MakeEngine) -> None:
    class Changing(Ledger):
        name = "changing"
        table = Ledger.table.to_metadata(sa.MetaData(), name="changing_ledger")

        def keys(self, event: Event) -> Iterable[Any]:
            return [1]

    async with make_engine(order, projections=[Ledger, Changing], worker=False) as engine:
        first = await engine.start(order, "ada")
        with pytest.raises(ProjectionFailed, match="append-only"):
            await engine.start(order, "bob")
        assert values(await engine.rows(Ledger)) == [(1, first.run_id, 1)]


class Steps(Projection):
    """Steps per name; refuses while it is told to."""

    name = "steps_per_name"
    table = sa.Table(
        "steps_per_name",
        sa.MetaData(),
        sa.Column("step", sa.Text, primary_key=True),
        sa.Column("times", sa.Integer, nullable=False),
    )
    topics = ("StepRecorded",)
    refusing: ClassVar[bool] = False
    refused: ClassVar[asyncio.Event]

    def keys(self, event: Event) -> Iterable[Any]:
        assert isinstance(event, StepRecorded)
        return [event.step]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        if type(self).refusing:
            type(self).refused.set()
            raise ValueError("not now")
        return {"times": 1 if row is None else row["times"] + 1}


charged: list[str] = []


async def charge(customer: str) -> str:
    charged.append(customer)
    return customer


@keiro.workflow
async def charging(run: keiro.WorkflowRun, customer: str) -> str:
    return str(await run.step(charge, customer))


async def test_a_step_whose_record_is_refused_is_recorded_later_and_its_effect_not_repeated(
    make_engine: MakeEngine,
) -> None:
    charged.clear()
    Steps.refusing, Steps.refused = True, asyncio.Event()
    try:
        async with make_engine(charging, projections=[Steps]) as engine:
            handle = await engine.start(charging, "ada")
            await Steps.refused.wait()
            Steps.refusing = False
            assert await handle.result(timeout=30) == "ada"
            assert charged == ["ada"]
            assert values(await engine.rows(Steps)) == [("charge", 1)]
    finally:
        Steps.refusing = False


@pytest.mark.parametrize("projection", INLINE)
async def test_a_projection_new_to_a_journal_has_the_events_of_before(
    make_engine: MakeEngine, projection: type[Totals]
) -> None:
    async with make_engine(order) as engine:
        await asyncio.gather(*(engine.start(order, name) for name in "aab"))
    async with make_engine(order, projections=[projection]) as engine:
        await engine.start(order, "b", 5)
        assert values(await engine.rows(projection)) == [("a", 2, 2), ("b", 2, 6)]
        assert (await engine.rebuild(projection)).differences == 0
    async with make_engine(order, projections=[projection]) as engine:
        assert values(await engine.rows(projection)) == [("a", 2, 2), ("b", 2, 6)]


@pytest.mark.parametrize("projection", INLINE)
async def test_two_engines_on_one_journal_keep_the_same_rows(make_engine: MakeEngine, projection: type[Totals]) -> None:
    one, two = (make_engine(order, projections=[projection]) for _ in range(2))
    async with one, two:
        await asyncio.gather(*(engine.start(order, name, 2) for engine in (one, two) for name in "abcab" * 6))
        await asyncio.gather(one.caught_up(projection, timeout=30), two.caught_up(projection, timeout=30))
        expected = await expected_totals(one)
        assert values(await one.rows(projection)) == values(await two.rows(projection)) == expected
        assert (await two.rebuild(projection)).differences == 0


async def test_rows_are_queried_by_columns_that_exist(make_engine: MakeEngine) -> None:
    async with make_engine(order, projections=[Totals]) as engine:
        await engine.start(order, "ada", 3)
        (row,) = await engine.rows("totals", customer="ada", orders=1)
        with pytest.raises(AttributeError):
            row.orders = 7
        with pytest.raises(keiro.InvalidCall, match="has no column 'client'; it has: customer, orders, amount"):
            await engine.rows(Totals, client="ada")
        with pytest.raises(keiro.InvalidCall, match="no projection of this engine"):
            await engine.rows(Ledger)
        with pytest.raises(keiro.InvalidCall, match="no projection of this engine"):
            await engine.rows("elsewhere")


async def test_a_missing_table_is_refused_where_tables_are_not_created(make_engine: MakeEngine, store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("rows in memory need no table")
    async with make_engine(order):
        pass
    with pytest.raises(keiro.MigrationRequired, match="has no table order_totals"):
        async with make_engine(order, projections=[Totals], migrate=False):
            pass
    async with make_engine(order, projections=[Totals]):
        pass
    async with make_engine(order, projections=[Totals], migrate=False) as engine:
        await engine.start(order, "ada")
        assert values(await engine.rows(Totals)) == [("ada", 1, 1)]

    class Wider(Totals):
        table = totals("order_totals")
        table.append_column(sa.Column("note", sa.Text))

    with pytest.raises(keiro.MigrationRequired, match="lacks note"):
        async with make_engine(order, projections=[Wider]):
            pass


class Wrong(Totals):
    """Changes one attribute in each case."""


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("name", "a b", "name must be"),
        ("name", "inline:x", "name must be"),
        ("table", None, "must be a sqlalchemy.Table"),
        ("table", sa.Table("keyless", sa.MetaData(), sa.Column("a", sa.Text)), "primary key"),
        ("mode", "sometimes", "'inline' or 'follow'"),
        ("store", "disk", "'memory'"),
        ("topics", "WorkflowStarted", "tuple of names"),
        ("topics", ("StepsRecorded",), "no event has the topic 'StepsRecorded'"),
    ],
)
def test_a_projection_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, message: str
) -> None:
    monkeypatch.setattr(Wrong, attribute, value)
    with pytest.raises(keiro.InvalidCall, match=message):
        keiro.Engine("memory://", projections=[Wrong])


def test_two_projections_of_one_name_are_refused() -> None:
    with pytest.raises(keiro.InvalidCall, match="two projections are named 'totals'"):
        keiro.Engine("memory://", projections=[Totals, Totals()])
    with pytest.raises(keiro.InvalidCall, match="is no projection"):
        keiro.Engine("memory://", projections=[object])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("keys", "row", "message"),
    [
        ([None], {}, "neither None nor mutable"),
        ([["list"]], {}, "neither None nor mutable"),
        ([("two", "values")], {}, r"for the primary key \(customer\)"),
        (["ada"], {"customer": "bob"}, "for the key"),
        (["ada"], {"client": 1}, "no column of shapes"),
    ],
)
async def test_keys_and_rows_of_the_wrong_shape_are_refused(keys: list[Any], row: dict[str, Any], message: str) -> None:
    class Shapes(Totals):
        name = "shapes"
        table = totals("shapes")

        def keys(self, event: Event) -> Iterable[Any]:
            return keys

        def fold(self, key: Any, before: Row | None, event: Event) -> Row | None:
            return {"orders": 1, "amount": 1, **row}

    async with keiro.Engine("memory://", workflows=[order], projections=[Shapes]) as engine:
        with pytest.raises(ProjectionFailed, match=message):
            await engine.start(order, "ada")
        assert await engine.runs() == []


async def test_what_a_fold_does_to_the_row_it_is_given_stays_its_own() -> None:
    class Listing(Totals):
        name = "listing"
        table = sa.Table(
            "listing", sa.MetaData(), sa.Column("customer", sa.Text, primary_key=True), sa.Column("all", sa.JSON)
        )

        def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
            listed = [] if row is None else row["all"]
            listed.append(input_of(event)["amount"])
            if listed[-1] == 666:
                raise ValueError("666 brings bad luck")
            return {"all": listed}

    async with keiro.Engine("memory://", workflows=[order], projections=[Listing]) as engine:
        await engine.start(order, "ada", 1)
        with pytest.raises(ProjectionFailed):
            await engine.start(order, "ada", 666)
        await engine.start(order, "ada", 2)
        (row,) = await engine.rows(Listing)
        assert row.all == [1, 2]


async def test_a_key_that_comes_back_as_another_is_an_error_and_not_a_new_row(postgres_url: str) -> None:
    class Loose(Totals):
        """A number is stored as text: what comes back is not what was given."""

        name = "loose"
        table = sa.Table(
            "loose",
            sa.MetaData(),
            sa.Column("customer", sa.Numeric(10, 0), primary_key=True),
            sa.Column("orders", sa.Integer, nullable=False),
        )

        def keys(self, event: Event) -> Iterable[Any]:
            return [input_of(event)["customer"]]

        def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
            return {"orders": 1 if row is None else row["orders"] + 1}

    async with keiro.Engine(postgres_url, workflows=[order], projections=[Loose], migrate=True) as engine:
        await engine.start(order, "7")
        with pytest.raises(ProjectionFailed, match="has a row with the key"):
            await engine.start(order, "7")
