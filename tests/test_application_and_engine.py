"""An eventsourcing application beside an engine, in one database and in one transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from eventsourcing.application import AggregateNotFoundError, Application
from eventsourcing.domain import Aggregate, event

import keiro


class Order(Aggregate):
    @event("Placed")
    def __init__(self, customer: str) -> None:
        self.customer = customer


class Orders(Application[Any]):
    pass


@keiro.workflow
async def fulfil(run: keiro.WorkflowRun, order: str) -> str:
    return order


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/orders.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def orders(database: str) -> Iterator[Orders]:
    """Switched to keiro's stores by its environment alone."""
    if database.startswith("sqlite"):
        env = {"PERSISTENCE_MODULE": "keiro.stores.sqlite", "SQLITE_DBNAME": database.removeprefix("sqlite:///")}
    else:
        url = sa.make_url(database)
        env = {
            "PERSISTENCE_MODULE": "keiro.stores.postgres",
            "POSTGRES_DBNAME": str(url.database),
            "POSTGRES_HOST": str(url.host),
            "POSTGRES_PORT": str(url.port),
            "POSTGRES_USER": str(url.username),
            "POSTGRES_PASSWORD": url.password or "",
        }
    app = Orders(env=env)
    yield app
    app.close()


@pytest.fixture
def sql(database: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database)
    if database.startswith("sqlite"):
        # As SQLAlchemy's documentation advises for transactions that hold what they promise.
        sa.event.listen(engine, "connect", lambda conn, _: setattr(conn, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda conn: conn.exec_driver_sql("BEGIN IMMEDIATE"))
    yield engine
    engine.dispose()


async def test_an_aggregate_and_a_run_are_written_in_one_transaction(
    database: str, orders: Orders, sql: sa.Engine
) -> None:
    async with keiro.Engine(database, workflows=[fulfil], migrate=True) as engine:
        order = Order("ada")
        with sql.begin() as connection:
            orders.save(order, connection=connection)
            handle = await engine.start(fulfil, str(order.id), id=str(order.id), connection=connection)
        assert await handle.result(timeout=30) == str(order.id)
        assert orders.repository.get(order.id).customer == "ada"


async def test_a_rollback_takes_both_back(database: str, orders: Orders, sql: sa.Engine) -> None:
    async with keiro.Engine(database, workflows=[fulfil], migrate=True) as engine:
        order = Order("ada")
        with sql.connect() as connection:
            transaction = connection.begin()
            orders.save(order, connection=connection)
            handle = await engine.start(fulfil, str(order.id), id=str(order.id), connection=connection)
            transaction.rollback()
        with pytest.raises(AggregateNotFoundError):
            orders.repository.get(order.id)
        with pytest.raises(keiro.RunNotFound):
            await handle.status()
