"""SIGKILL at the boundaries of a transactional step: its rows and its record are there together, and once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import keiro
import keiro.transactions
from tests.crash import forks

pytestmark = pytest.mark.crash

KEYS = ("a", "b", "c")
paid = sa.Table("paid", sa.MetaData(), sa.Column("key", sa.Text), sa.Column("part", sa.Integer))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


def database(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


after_row: Callable[[], object] = bool


@keiro.step
def pay(connection: sa.Connection, key: str, part: int) -> int:
    connection.execute(paid.insert().values(key=key, part=part))
    after_row()
    return part


@keiro.workflow
async def pays(run: keiro.WorkflowRun) -> int:
    return sum([await run.transaction(pay, run.key, part) for part in range(3)])


def at(boundary: str, number: int) -> None:
    """Kill this process when it comes to a boundary for the `number`th time."""
    global after_row
    left = [number]

    def reach() -> None:
        left[0] -= 1
        if not left[0]:
            kill()

    commit, submit = keiro.transactions._Ends.commit, keiro.transactions.Transactions.submit

    async def committed(self: Any) -> None:
        if boundary == "before the commit":
            reach()
        await commit(self)
        if boundary == "after the commit":
            reach()

    async def submitted(self: Any, *args: Any) -> Any:
        outcome = await submit(self, *args)
        if boundary == "after the record":
            reach()
        return outcome

    keiro.transactions._Ends.commit = committed  # type: ignore[method-assign]
    keiro.transactions.Transactions.submit = submitted  # type: ignore[method-assign]
    if boundary == "after the row":
        after_row = reach


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("boundary", ["after the row", "after the record", "before the commit", "after the commit"])
def test_rows_and_record_survive_together(url: str, boundary: str, number: int) -> None:
    tables = database(url)
    paid.metadata.create_all(tables)

    async def work() -> None:
        async with keiro.Engine(url, workflows=[pays], migrate=True) as engine:
            for key in KEYS:
                assert await engine.execute(pays, id=key) == 3

    async def killed() -> None:
        at(boundary, number)
        await work()

    assert forks.run(killed) == -signal.SIGKILL
    assert forks.run(work) == 0

    with tables.connect() as connection:
        rows = connection.execute(sa.select(paid.c.key, paid.c.part).order_by(paid.c.key, paid.c.part)).all()
    assert [tuple(row) for row in rows] == [(key, part) for key in KEYS for part in range(3)]
    tables.dispose()
