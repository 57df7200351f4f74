"""A workflow and read models of its runs, for the tests of projections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

import keiro
from keiro.events import Event, WorkflowStarted
from keiro.projections.base import Projection, Row, position_of


@keiro.workflow
async def order(run: keiro.WorkflowRun, customer: str, amount: int = 1) -> int:
    return amount


def input_of(event: Event) -> dict[str, Any]:
    assert isinstance(event, WorkflowStarted)
    found: dict[str, Any] = msgspec.json.decode(event.input)
    return found


def totals(name: str) -> sa.Table:
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("customer", sa.Text, primary_key=True),
        sa.Column("orders", sa.Integer, nullable=False),
        sa.Column("amount", sa.Integer, nullable=False),
    )


class Totals(Projection):
    """Orders and their amount per customer. A negative amount takes the customer's row away."""

    name = "totals"
    table = totals("order_totals")
    topics = ("WorkflowStarted",)

    def keys(self, event: Event) -> Iterable[Any]:
        return [input_of(event)["customer"]]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        amount = input_of(event).get("amount", 1)
        if amount == 666:
            raise ValueError("666 brings bad luck")
        if amount < 0:
            return None
        if row is None:
            return {"orders": 1, "amount": amount}
        return {"orders": row["orders"] + 1, "amount": row["amount"] + amount}


class FollowedTotals(Totals):
    name = "followed_totals"
    table = totals("followed_order_totals")
    mode = "follow"


class RememberedTotals(Totals):
    name = "remembered_totals"
    table = totals("remembered_order_totals")
    store = "memory"


class Ledger(Projection):
    """Every event once, by its place in the journal."""

    name = "ledger"
    table = sa.Table(
        "order_ledger",
        sa.MetaData(),
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
    )
    append_only = True

    def keys(self, event: Event) -> Iterable[Any]:
        return [position_of(event)]

    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        return {"run_id": event.originator_id, "version": event.originator_version}


class FollowedLedger(Ledger):
    name = "followed_ledger"
    table = Ledger.table.to_metadata(sa.MetaData(), name="followed_order_ledger")
    mode = "follow"


def values(rows: list[Any]) -> list[tuple[Any, ...]]:
    """Rows as tuples of their columns."""
    return [msgspec.structs.astuple(row) for row in rows]


async def expected_totals(engine: keiro.Engine) -> list[tuple[str, int, int]]:
    """The rows of `Totals` as the inputs of the engine's runs say them, in the order of their start."""
    found: dict[str, tuple[int, int]] = {}
    for run in reversed(await engine.runs(limit=10_000)):
        given = msgspec.json.decode(run.input_json)
        customer, amount = given["customer"], given.get("amount", 1)
        if amount < 0:
            found.pop(customer, None)
            continue
        orders, sum_ = found.get(customer, (0, 0))
        found[customer] = (orders + 1, sum_ + amount)
    return sorted((customer, *both) for customer, both in found.items())
