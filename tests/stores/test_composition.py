"""One transaction over rows in memory and a journal in a database: gate first, then journal, then commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import keiro
from keiro.errors import ProjectionFailed, StoreBusy
from keiro.stores.faults import is_conflict_error
from keiro.stores.transaction import RETRY_CAP_S, Callbacks, Gate, compose, delays, patiently
from keiro.transactions import Transaction
from tests.projections.orders import RememberedTotals, Totals, order, values


class Cell:
    """A value in memory."""

    def __init__(self) -> None:
        self.value = 0
        self._kept: list[int] = []

    def begin(self) -> None:
        self._kept.append(self.value)

    def release(self) -> None:
        self._kept.pop()

    def rollback(self) -> None:
        self.value = self._kept.pop()


class Journal:
    """A journal with one lock, which notes what happens and calls back after its commits."""

    def __init__(self, gate: Gate, log: list[str]) -> None:
        self.gate = gate
        self.log = log
        self.lock = asyncio.Lock()
        self.refuse: Exception | None = None
        self.callbacks = Callbacks()

    def on_commit(self, callback: Callable[[], object]) -> None:
        self.callbacks.add(callback)

    async def transact(self, body: Callable[[Journal], Awaitable[Any]]) -> Any:
        async with self.lock:
            self.log.append("begin with the gate" if self.gate.held else "begin without the gate")
            self.callbacks = Callbacks()
            try:
                value = await body(self)
                if self.refuse is not None:
                    raise self.refuse
            except BaseException:
                self.log.append("rollback")
                raise
            self.log.append("commit")
        self.callbacks.run(lambda error: self.log.append(f"failed: {error}"))
        return value

    async def nested(self, body: Callable[[Journal], Awaitable[Any]]) -> Any:
        mark = self.callbacks.mark()
        try:
            return await body(self)
        except BaseException:
            self.callbacks.undo(mark)
            raise


class Pair:
    """A cell in memory and a journal, with the composition of both."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.gate = Gate([self.cell])
        self.log: list[str] = []
        self.journal = Journal(self.gate, self.log)

    async def transact(self, body: Callable[[Journal], Awaitable[Any]]) -> Any:
        return await compose(self.gate, self.journal.transact, body)

    async def savepoint(self, body: Callable[[Journal], Awaitable[Any]]) -> Any:
        return await compose(self.gate, self.journal.nested, body)

    @property
    def free(self) -> bool:
        return not self.gate._permit.locked()


@pytest.fixture
async def pair() -> Pair:
    return Pair()


async def test_the_gate_is_taken_first_and_free_again_when_callbacks_run(pair: Pair) -> None:
    """L12."""
    seen: list[tuple[int, bool, bool]] = []

    async def body(journal: Journal) -> str:
        journal.on_commit(lambda: seen.append((pair.cell.value, pair.free, pair.journal.lock.locked())))
        pair.cell.value = 7
        return "done"

    assert await pair.transact(body) == "done"
    assert pair.log == ["begin with the gate", "commit"]
    assert seen == [(7, True, False)], "both are released when published work begins"


async def test_memory_is_accepted_at_the_commit_and_not_before(pair: Pair) -> None:
    async def body(journal: Journal) -> None:
        pair.cell.value = 7
        journal.refuse = OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        await pair.transact(body)
    assert (pair.cell.value, pair.log, pair.free) == (0, ["begin with the gate", "rollback"], True)


@pytest.mark.parametrize("error", [ValueError("no"), asyncio.CancelledError()])
async def test_a_body_that_fails_restores_memory_and_journal(pair: Pair, error: BaseException) -> None:
    called: list[int] = []

    async def body(journal: Journal) -> None:
        journal.on_commit(lambda: called.append(1))
        pair.cell.value = 7
        raise error

    with pytest.raises(type(error)):
        await pair.transact(body)
    assert (pair.cell.value, pair.free, called, pair.log[-1]) == (0, True, [], "rollback")


async def test_published_work_that_fails_undoes_nothing_and_stops_no_other(pair: Pair) -> None:
    def broken() -> None:
        raise RuntimeError("nobody listens")

    called: list[int] = []

    async def body(journal: Journal) -> None:
        journal.on_commit(broken)
        journal.on_commit(lambda: called.append(1))
        pair.cell.value = 7

    await pair.transact(body)
    assert (pair.cell.value, called, pair.log[-1]) == (7, [1], "failed: nobody listens")


async def test_a_nested_transaction_is_a_savepoint_of_both(pair: Pair) -> None:
    """L10, L12."""
    called: list[str] = []

    async def inner(journal: Journal) -> None:
        journal.on_commit(lambda: called.append("inner"))
        pair.cell.value += 10

    async def failing(journal: Journal) -> None:
        journal.on_commit(lambda: called.append("failing"))
        pair.cell.value += 100
        raise ValueError("no")

    async def outer(journal: Journal) -> None:
        pair.cell.value += 1
        await pair.savepoint(inner)
        with pytest.raises(ValueError, match="no"):
            await pair.savepoint(failing)
        assert (pair.cell.value, pair.free, called) == (11, False, []), "accepted or released before the commit"
        journal.on_commit(lambda: called.append("outer"))

    await pair.transact(outer)
    assert (pair.cell.value, called) == (11, ["inner", "outer"])

    async def late(journal: Journal) -> None:
        await pair.savepoint(inner)
        raise ValueError("after all")

    with pytest.raises(ValueError, match="after all"):
        await pair.transact(late)
    assert pair.cell.value == 11, "what a savepoint kept goes with the transaction around it"


async def test_waiting_for_the_gate_can_be_cancelled_and_nothing_has_happened(pair: Pair) -> None:
    async def body(journal: Journal) -> None:
        pair.cell.value += 1

    async with pair.gate.transaction() as snapshot:
        waiting = asyncio.create_task(pair.transact(body))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        snapshot.accept()
    assert (pair.cell.value, pair.log, pair.free) == (0, [], True)
    await pair.transact(body)
    assert pair.cell.value == 1


async def test_a_child_task_does_not_inherit_the_gate(pair: Pair) -> None:
    """The child has its parent's context: what says "holding" must not be in it."""
    other = Journal(pair.gate, [])

    async def child(journal: Journal) -> None:
        pair.cell.value += 10

    async def parent(journal: Journal) -> asyncio.Task[Any]:
        task = asyncio.create_task(compose(pair.gate, other.transact, child))
        for _ in range(5):
            await asyncio.sleep(0)
        assert other.log == [], "the child changes memory in its parent's transaction"
        pair.cell.value = 1
        return task

    await (await pair.transact(parent))
    assert other.log == ["begin with the gate", "commit"]
    assert pair.cell.value == 11


async def test_who_only_writes_the_journal_never_waits_for_the_gate(pair: Pair) -> None:
    async def body(journal: Journal) -> str:
        return "written"

    async with pair.gate.transaction():
        other = asyncio.create_task(compose(None, pair.journal.transact, body))
        async with asyncio.timeout(30):
            assert await other == "written"
    assert pair.log == ["begin without the gate", "commit"]


async def test_every_try_begins_from_the_memory_of_before(pair: Pair) -> None:
    seen: list[int] = []

    async def body(journal: Journal) -> int:
        seen.append(pair.cell.value)
        pair.cell.value += 1
        if len(seen) < 3:
            raise StoreBusy("again")
        return pair.cell.value

    async def impatient(_: float) -> None:
        """No time passes."""

    result = await patiently(lambda: pair.transact(body), lambda error: isinstance(error, StoreBusy), sleep=impatient)
    assert (seen, result, pair.cell.value) == ([0, 0, 0], 1, 1)


async def test_a_journal_that_tries_again_by_itself_finds_the_memory_of_before(pair: Pair) -> None:
    seen: list[int] = []

    async def body(journal: Journal) -> None:
        seen.append(pair.cell.value)
        pair.cell.value += 1

    async def twice(write: Callable[[Journal], Awaitable[None]]) -> None:
        pair.journal.refuse = StoreBusy("again")
        with pytest.raises(StoreBusy):
            await pair.journal.transact(write)
        pair.journal.refuse = None
        await pair.journal.transact(write)

    await compose(pair.gate, twice, body)
    assert (seen, pair.cell.value, pair.free) == ([0, 0], 1, True)


async def test_only_the_outermost_transaction_is_tried_again() -> None:
    """R9."""
    tries: list[str] = []

    async def attempt() -> None:
        tries.append("try")
        raise StoreBusy("taken")

    async def impatient(_: float) -> None:
        """No time passes."""

    with pytest.raises(StoreBusy):
        await patiently(attempt, lambda _: True, outermost=False, sleep=impatient)
    assert len(tries) == 1
    with pytest.raises(StoreBusy):
        await patiently(attempt, lambda _: True, sleep=impatient)
    assert len(tries) == 1 + 10
    with pytest.raises(StoreBusy):
        await patiently(attempt, lambda _: False, sleep=impatient)
    assert len(tries) == 1 + 10 + 1, "what another try cannot mend is not tried again"


def test_pauses_grow_and_the_cap_holds_after_the_jitter() -> None:
    """R10."""
    longest = list(delays(lambda low, high: high))
    assert len(longest) == 9
    assert longest[:3] == pytest.approx([0.075, 0.15, 0.3])
    assert max(longest) == RETRY_CAP_S
    assert longest == sorted(longest)


def test_a_conflict_is_recognised_behind_wrappers_and_causes() -> None:
    """Trap 56."""

    class Conflict(Exception):
        sqlstate = "40001"

    class Wrapper(Exception):
        def __init__(self, orig: Exception) -> None:
            self.orig = orig

    caused = RuntimeError("outer")
    caused.__cause__ = Wrapper(Conflict())
    assert is_conflict_error(caused)
    assert is_conflict_error(Conflict())
    assert not is_conflict_error(RuntimeError("other"))
    Conflict.sqlstate = "23505"
    assert not is_conflict_error(caused), "a violated constraint is never tried again"


# The user of the composition: rows of a projection in memory, beside a journal in a database


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def database(url: str) -> Any:
    """A SQLAlchemy engine on the database of the journal, with a table of the application's."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS application (id INTEGER)")
    yield engine
    engine.dispose()


def applied(database: sa.Engine) -> list[int]:
    with database.connect() as connection:
        return [row[0] for row in connection.exec_driver_sql("SELECT id FROM application ORDER BY id")]


def engine_at(url: str, **options: Any) -> keiro.Engine:
    return keiro.Engine(
        url, **{"workflows": [order], "projections": [RememberedTotals, Totals], "migrate": True, **options}
    )


async def test_rows_in_memory_change_with_the_commit_of_a_body(url: str, database: sa.Engine) -> None:
    async with engine_at(url) as engine:
        await engine.start(order, "ada", 1)
        during: list[Any] = []
        afterwards: list[Any] = []
        gate = engine._read_models.kept.gate
        assert gate is not None

        async def body(transaction: Transaction) -> keiro.Handle:
            transaction.connection.exec_driver_sql("INSERT INTO application VALUES (1)")
            handle = await engine.start(order, "ada", 5, connection=transaction)
            during.extend(values(await engine.rows(RememberedTotals)))
            transaction.on_commit(lambda: afterwards.append((gate._permit.locked(), applied(database))))
            return handle

        with database.connect() as connection:
            handle = await engine.transact(body, connection=connection)
        assert during == [("ada", 1, 1)], "a reader saw what was not committed"
        assert afterwards == [(False, [1])]
        assert values(await engine.rows(RememberedTotals)) == values(await engine.rows(Totals)) == [("ada", 2, 6)]
        assert await handle.result(timeout=30) == 5
        assert (await engine.rebuild(RememberedTotals)).differences == 0


async def test_a_body_that_raises_leaves_neither_rows_nor_events(url: str, database: sa.Engine) -> None:
    async with engine_at(url) as engine:
        called: list[int] = []

        async def body(transaction: Transaction) -> None:
            transaction.connection.exec_driver_sql("INSERT INTO application VALUES (1)")
            await engine.start(order, "ada", 5, connection=transaction)
            transaction.on_commit(lambda: called.append(1))
            raise ValueError("after all")

        with database.connect() as connection, pytest.raises(ValueError, match="after all"):
            await engine.transact(body, connection=connection)
        assert (applied(database), called, await engine.runs()) == ([], [], [])
        assert await engine.rows(RememberedTotals) == await engine.rows(Totals) == []
        await engine.start(order, "ada", 1)
        assert values(await engine.rows(RememberedTotals)) == [("ada", 1, 1)]


@pytest.mark.parametrize("projection", [RememberedTotals, Totals])
async def test_a_command_that_a_projection_rejects_leaves_the_rest_of_the_body(
    url: str, database: sa.Engine, projection: type[Totals]
) -> None:
    async with engine_at(url, projections=[projection]) as engine:

        async def body(transaction: Transaction) -> None:
            await engine.start(order, "ada", 1, connection=transaction)
            with pytest.raises(ProjectionFailed, match="666 brings bad luck"):
                await engine.start(order, "ada", 666, connection=transaction)
            await engine.start(order, "ada", 2, connection=transaction)

        with database.connect() as connection:
            await engine.transact(body, connection=connection)
        assert values(await engine.rows(projection)) == [("ada", 2, 3)]
        assert len(await engine.runs()) == 2


async def test_a_body_within_a_body_is_a_savepoint(url: str, database: sa.Engine) -> None:
    async with engine_at(url, worker=False) as engine:
        called: list[str] = []

        async def inner(transaction: Transaction) -> None:
            transaction.connection.exec_driver_sql("INSERT INTO application VALUES (2)")
            await engine.start(order, "inner", connection=transaction)
            transaction.on_commit(lambda: called.append("inner"))

        async def failing(transaction: Transaction) -> None:
            await inner(transaction)
            raise ValueError("no")

        async def outer(transaction: Transaction) -> None:
            transaction.connection.exec_driver_sql("INSERT INTO application VALUES (1)")
            await engine.start(order, "outer", connection=transaction)
            with pytest.raises(ValueError, match="no"):
                await engine.transact(failing, connection=transaction.connection)
            await engine.transact(inner, connection=transaction)
            assert called == []

        with database.connect() as connection:
            await engine.transact(outer, connection=connection)
        assert (applied(database), called) == ([1, 2], ["inner"])
        assert values(await engine.rows(RememberedTotals)) == [("inner", 1, 1), ("outer", 1, 1)]
        assert len(await engine.runs()) == 2


async def test_steps_and_other_projections_do_not_wait_for_the_gate(url: str) -> None:
    async with engine_at(url, projections=[RememberedTotals]) as engine:
        handle = await engine.start(order, "ada")
        gate = engine._read_models.kept.gate
        assert gate is not None
        async with gate.transaction() as snapshot:
            assert await handle.result(timeout=30) == 1  # the end of a run is no event the projection wants
            waiting = asyncio.create_task(engine.start(order, "bob"))
            doomed = asyncio.create_task(engine.start(order, "eve"))
            assert (await engine.rebuild("runs")).verified == 1
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert not waiting.done()
            snapshot.accept()
        await waiting
        assert [row.customer for row in await engine.rows(RememberedTotals)] == ["ada", "bob"]


async def test_everybody_at_once_does_not_deadlock(url: str, database: sa.Engine) -> None:
    """Trap 55: bodies that hold the gate and wait for the journal, beside commands that need either or both."""
    async with engine_at(url) as engine:

        async def caller(n: int) -> None:
            async def body(transaction: Transaction) -> None:
                transaction.connection.exec_driver_sql(f"INSERT INTO application VALUES ({n})")
                await asyncio.sleep(0)
                await engine.start(order, "caller", connection=transaction)
                await asyncio.sleep(0)

            with database.connect() as connection:
                await engine.transact(body, connection=connection)

        async with asyncio.timeout(60):
            callers = [caller(n) for n in range(8)]
            await asyncio.gather(*callers, *(engine.execute(order, f"c{n % 3}") for n in range(40)))
        assert applied(database) == list(range(8))
        (row,) = await engine.rows(RememberedTotals, customer="caller")
        assert row.orders == 8
        for projection in (RememberedTotals, Totals, "runs"):
            assert (await engine.rebuild(projection)).differences == 0


async def test_a_conflict_runs_the_body_again_and_no_update_is_lost(postgres_url: str) -> None:
    """R8, R9: two bodies read a row and write what they made of it; the second's transaction cannot be serialized."""
    database = sa.create_engine(
        postgres_url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="SERIALIZABLE"
    )
    with database.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE counter (n INTEGER)")
        connection.exec_driver_sql("INSERT INTO counter VALUES (0)")
    async with engine_at(postgres_url, projections=[Totals], worker=False) as engine:
        both_have_read = asyncio.Barrier(2)
        tries: list[int] = []

        async def add(who: int) -> None:
            async def body(transaction: Transaction) -> None:
                tries.append(who)
                connection = transaction.connection

                def read() -> int:
                    return int(connection.exec_driver_sql("SELECT n FROM counter").scalar_one())

                n = await asyncio.to_thread(read)
                if tries.count(who) == 1:
                    await both_have_read.wait()
                await asyncio.to_thread(connection.exec_driver_sql, f"UPDATE counter SET n = {n + 1}")
                await engine.start(order, f"c{who}", n, connection=transaction)

            with database.connect() as connection:
                await engine.transact(body, connection=connection)

        await asyncio.gather(add(1), add(2))
        with database.connect() as connection:
            assert connection.exec_driver_sql("SELECT n FROM counter").scalar_one() == 2
        assert len(tries) > 2
        assert [row.orders for row in await engine.rows(Totals)] == [1, 1], "a lost try left rows behind"
        assert len(await engine.runs()) == 2
    database.dispose()
