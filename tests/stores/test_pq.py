"""The connection that drives libpq: what it answers, and that nothing that goes wrong desynchronises it."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import IntEnum, StrEnum

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keiro.stores.pq import Connection, ConnectionLost, Param, StatementError, array
from keiro.testing.postgres import PostgresServer

Connect = Callable[..., Awaitable[Connection]]

with_one_connection = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

storable = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
bigints = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture
async def connect(postgres_url: str) -> AsyncIterator[Connect]:
    """Opens connections to one empty database, and closes them after the test."""
    opened: list[Connection] = []

    async def connect(**options: object) -> Connection:
        opened.append(await Connection.connect(postgres_url, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield connect
    for connection in opened:
        await connection.close()


@pytest.fixture
async def connection(connect: Connect) -> Connection:
    return await connect()


@pytest.fixture
async def other(connect: Connect) -> Connection:
    """A second session on the same database: somebody else."""
    return await connect()


async def value(connection: Connection, sql: str, *params: Param) -> str | None:
    return (await connection.execute(sql, params)).rows[0][0]


async def backend(connection: Connection) -> int:
    return int(await value(connection, "SELECT pg_backend_pid()") or 0)


async def answered(connection: Connection) -> None:
    """Return when the answer to the call under way has come, but the loop has not woken the caller yet."""
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while connection._waiter is not None:
            await asyncio.sleep(0)


class Holder:
    """Somebody who holds an advisory lock: a statement of another session lasts until it is released."""

    take = "SELECT pg_advisory_xact_lock(7)"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def hold(self) -> None:
        await self.connection.simple("SELECT pg_advisory_lock(7)")

    async def release(self) -> None:
        await self.connection.simple("SELECT pg_advisory_unlock(7)")

    async def blocks(self, pid: int) -> None:
        """Return once that backend waits for the lock."""
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = $1"
        async with asyncio.timeout(30):
            while await value(self.connection, waiting, pid) != "1":
                pass


@pytest.fixture
async def holder(connect: Connect) -> Holder:
    holder = Holder(await connect())
    await holder.hold()
    return holder


class Proxy:
    """Stands between a connection and its server, and can say to the connection what the server did not."""

    def __init__(self) -> None:
        self.to_client: list[asyncio.StreamWriter] = []

    async def serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter, port: int) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", port)
        self.to_client.append(to_client)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(client, to_server), pump(server, to_client))

    def say(self, data: bytes) -> None:
        self.to_client[-1].write(data)


@pytest.fixture
async def proxy(postgres_server: PostgresServer) -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy()
    server = await asyncio.start_server(lambda r, w: proxy.serve(r, w, postgres_server.port), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield proxy, f"postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=disable&gssencmode=disable"
    server.close()


# Statements


async def test_rows_are_text_and_null_is_none(connection: Connection) -> None:
    result = await connection.execute("SELECT 1::bigint, 'é', NULL, '', true FROM generate_series(1, 2)")

    assert result.rows == [("1", "é", None, "", "t")] * 2
    assert result.rowcount == 2


async def test_rowcount_counts_changed_rows_and_is_zero_for_commands_without_rows(
    connection: Connection,
) -> None:
    created = await connection.execute("CREATE TABLE item (id bigint)")
    inserted = await connection.execute("INSERT INTO item SELECT generate_series(1, 3)")
    missed = await connection.execute("UPDATE item SET id = 0 WHERE id = $1", (9,))

    assert (created.rowcount, inserted.rowcount, missed.rowcount) == (0, 3, 0)
    assert created.rows == inserted.rows == []


async def test_a_statement_is_committed_when_execute_returns(connection: Connection, other: Connection) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")

    await connection.execute("INSERT INTO item VALUES ($1)", (1,))

    assert not connection.in_transaction
    assert await value(other, "SELECT count(*) FROM item") == "1"


async def test_a_statement_is_prepared_once(connection: Connection) -> None:
    for number in range(3):
        await connection.execute("SELECT $1::int + 1", (number,))

    prepared = await connection.execute(
        "SELECT name, generic_plans + custom_plans FROM pg_prepared_statements WHERE statement LIKE '%+ 1'"
    )
    assert [times for _, times in prepared.rows] == ["3"]


async def test_a_statement_longer_than_an_identifier_is_told_from_another_with_the_same_start(
    connection: Connection,
) -> None:
    start = "SELECT " + "1 + " * 50
    assert await value(connection, start + "1") == "51"
    assert await value(connection, start + "2") == "52"


async def test_prepared_statements_do_not_pile_up_without_bound(connection: Connection) -> None:
    for number in range(600):
        assert await value(connection, f"SELECT {number}") == str(number)

    assert int(await value(connection, "SELECT count(*) FROM pg_prepared_statements") or 0) <= 256


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


async def test_a_plan_made_for_an_empty_table_is_not_kept_while_it_fills(connection: Connection) -> None:
    """The server keeps a prepared statement's plan until it has looked at the table, which it does once a minute."""
    notes = ", ".join(f"note{n} text" for n in range(12))
    await connection.execute(
        f"CREATE TEMP TABLE filled (id text, kind text, done bool, {notes}, PRIMARY KEY (id, kind))"
    )
    update = (
        "UPDATE filled f SET done = true FROM unnest($1::text[], $2::text[]) AS t(id, kind)"
        " WHERE f.id = t.id AND f.kind = t.kind AND f.done IS NULL"
    )
    for _ in range(8):
        await connection.execute(update, [array(["1"]), array(["a"])])
    for at in range(0, 20_000, 500):
        rows = array([str(number) for number in range(at, at + 500)])
        await connection.execute("INSERT INTO filled SELECT unnest($1::text[]), 'a', NULL, $2", [rows, "x" * 20])
        for _ in range(6):  # so many until it settles for a plan
            await connection.execute(update, [array([str(at)]), array(["a"])])
    name = await value(connection, "SELECT name FROM pg_prepared_statements WHERE statement = $1", update)
    plan = await connection.execute(f"EXPLAIN (COSTS OFF) EXECUTE {name}('{{1,2}}', '{{a,a}}')")
    assert not any("Seq Scan on filled" in str(line) for line in plan.rows), plan.rows


async def test_parameters_reach_the_server_as_they_are(connection: Connection) -> None:
    row = await connection.execute(
        "SELECT $1::text, $2::bigint, $3::boolean, $4::text, $5::text, $6::int, $7::text",
        ("ü'\\", -(2**63), True, None, Colour.RED, Level.HIGH, ""),
    )
    assert row.rows == [("ü'\\", str(-(2**63)), "t", None, "red", "3", "")]


@with_one_connection
@given(data=st.binary())
async def test_bytes_are_the_value_of_a_bytea_parameter(connection: Connection, data: bytes) -> None:
    assert await value(connection, "SELECT encode($1::bytea, 'hex')", data) == data.hex()


async def test_bytes_are_the_utf8_of_a_text_or_json_parameter(connection: Connection) -> None:
    text = '{"a": "\\u00e9 é"}'

    row = await connection.execute("SELECT $1::text, $2::json, $3::int", (text.encode(), text.encode(), 1))

    assert row.rows == [(text, text, "1")]


@pytest.mark.parametrize(
    ("param", "error"),
    [("a\0b", ValueError), ("\ud800", ValueError), (array(["a\0b", None]), ValueError), (1.5, TypeError)],
)
async def test_what_postgres_cannot_hold_is_refused_before_anything_is_sent(
    connection: Connection, param: Param, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await connection.pipeline([("BEGIN", ()), ("SELECT $1::text", (param,))])

    assert not connection.in_transaction
    assert await value(connection, "SELECT 1") == "1"


async def test_a_script_runs_all_its_statements_as_one_transaction(connection: Connection) -> None:
    with pytest.raises(StatementError) as refused:
        await connection.simple("CREATE TABLE a (); CREATE TABLE b (); SELECT 1/0; CREATE TABLE c ()")
    assert refused.value.position == 2

    await connection.simple("CREATE TABLE a (); CREATE TABLE b ()")

    assert await value(connection, "SELECT count(*) FROM pg_tables WHERE tablename IN ('a', 'b', 'c')") == "2"


async def test_a_refusal_carries_what_the_server_said(connection: Connection) -> None:
    await connection.simple("CREATE TABLE item (id bigint CONSTRAINT item_key PRIMARY KEY)")
    await connection.execute("INSERT INTO item VALUES ($1)", (1,))

    with pytest.raises(StatementError) as refused:
        await connection.execute("INSERT INTO item VALUES ($1)", (1,))

    error = refused.value
    assert (error.sqlstate, error.constraint, error.position) == ("23505", "item_key", 0)
    assert "item_key" in error.message
    assert error.detail == "Key (id)=(1) already exists."
    assert await value(connection, "SELECT 1") == "1"


async def test_a_statement_that_cannot_be_prepared_is_refused_and_can_be_sent_again(
    connection: Connection,
) -> None:
    for _ in range(2):
        with pytest.raises(StatementError, match="42P01"):
            await connection.execute("SELECT * FROM item")

    await connection.simple("CREATE TABLE item (id bigint)")

    assert (await connection.execute("SELECT * FROM item")).rows == []


# Arrays


@with_one_connection
@given(values=st.lists(storable | st.none()) | st.lists(storable))
async def test_arrays_of_text_come_back_as_they_went(connection: Connection, values: list[str | None]) -> None:
    result = await connection.execute("SELECT unnest($1::text[])", (array(values),))
    assert result.rows == [(each,) for each in values]


@with_one_connection
@given(values=st.lists(bigints | st.none()) | st.lists(bigints))
async def test_arrays_of_numbers_come_back_as_they_went(connection: Connection, values: list[int | None]) -> None:
    result = await connection.execute("SELECT unnest($1::bigint[])", (array(values),))
    assert result.rows == [(None if each is None else str(each),) for each in values]


@with_one_connection
@given(values=st.lists(st.binary() | st.none()))
async def test_arrays_of_bytes_come_back_as_they_went(connection: Connection, values: list[bytes | None]) -> None:
    result = await connection.execute("SELECT encode(unnest($1::bytea[]), 'hex')", (array(values),))
    assert result.rows == [(None if each is None else each.hex(),) for each in values]


@with_one_connection
@given(values=st.lists(st.booleans() | st.none()))
async def test_arrays_of_booleans_come_back_as_they_went(connection: Connection, values: list[bool | None]) -> None:
    result = await connection.execute("SELECT unnest($1::boolean[])", (array(values),))
    assert result.rows == [({True: "t", False: "f", None: None}[each],) for each in values]


@pytest.mark.parametrize(
    "values",
    [
        ["NULL", "null", "", " ", "{}", "a,b", '"', "\\", '\\"', "\\x41", "\n\t\r", "'", "é漢😀"],
        ["", None, "NULL", "{"],
        [""],
        [None],
        [],
        [Colour.RED, "blue"],
        [Colour.RED],
    ],
)
async def test_text_that_looks_like_array_syntax_stays_text(connection: Connection, values: list[str | None]) -> None:
    result = await connection.execute("SELECT unnest($1::text[])", (array(values),))
    assert result.rows == [(each,) for each in values]


async def test_subclasses_of_int_are_numbers_in_arrays(connection: Connection) -> None:
    assert await value(connection, "SELECT $1::bigint[]", array([Level.HIGH, 4])) == "{3,4}"


@pytest.mark.parametrize("values", [["a\0b"], ["a", "b\0"], ["\0", "", "a"]])
def test_arrays_refuse_nul(values: list[str]) -> None:
    with pytest.raises(ValueError, match="NUL"):
        array(values)


def test_arrays_refuse_types_they_cannot_write() -> None:
    with pytest.raises(TypeError, match="float"):
        array([1, 1.5])  # type: ignore[list-item]


# Large payloads


async def test_twenty_megabytes_go_and_come_back(connection: Connection) -> None:
    text = "0123456789é" * 1_800_000

    async with asyncio.timeout(60):
        assert await value(connection, "SELECT $1::text", text) == text

    watched_for_writing = asyncio.get_running_loop().remove_writer(connection._socket)
    assert not watched_for_writing


async def test_a_pipeline_larger_than_all_buffers_does_not_deadlock(connection: Connection) -> None:
    text = "x" * 2_000_000

    async with asyncio.timeout(60):
        results = await connection.pipeline([("SELECT $1::text", (text,))] * 10)

    assert [result.rows for result in results] == [[(text,)]] * 10


# Pipelines and transactions


async def test_a_pipeline_answers_each_statement_in_order(connection: Connection) -> None:
    await connection.execute("SELECT $1::text", ("prepared before",))

    results = await connection.pipeline(
        [("SELECT $1::text", ("a",)), ("SELECT $1::int", (1,)), ("SELECT $1::text", ("b",))]
    )

    assert [result.rows for result in results] == [[("a",)], [("1",)], [("b",)]]
    assert await connection.pipeline([]) == []


async def test_a_pipeline_may_create_what_its_later_statements_use(connection: Connection) -> None:
    *_, read = await connection.pipeline(
        [
            ("CREATE TABLE item (id bigint)", ()),
            ("INSERT INTO item VALUES ($1)", (5,)),
            ("SELECT id FROM item", ()),
        ]
    )
    assert read.rows == [("5",)]


@pytest.mark.parametrize(("before", "after"), [([], []), ([("BEGIN", ())], [("COMMIT", ())])])
@pytest.mark.parametrize(("bad", "sqlstate"), [("SELECT 1/0", "22012"), ("SELECT nothing", "42703")])
async def test_the_first_failure_in_a_pipeline_undoes_all_of_it(
    connection: Connection,
    before: list[tuple[str, tuple[Param, ...]]],
    after: list[tuple[str, tuple[Param, ...]]],
    bad: str,
    sqlstate: str,
) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")
    insert = "INSERT INTO item VALUES ($1)"
    calls = [*before, (insert, (1,)), (bad, ()), (insert, (2,)), ("SELECT 'never prepared'", ()), *after]

    with pytest.raises(StatementError) as refused:
        await connection.pipeline(calls)

    assert (refused.value.sqlstate, refused.value.position) == (sqlstate, len(before) + 1)
    assert not connection.in_transaction
    assert await value(connection, "SELECT count(*) FROM item") == "0"
    assert await value(connection, "SELECT 'never prepared'") == "never prepared"
    assert (await connection.pipeline([(insert, (3,)), (insert, (4,))]))[1].rowcount == 1


async def test_a_transaction_may_span_calls(connection: Connection, other: Connection) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")

    await connection.pipeline([("BEGIN", ()), ("INSERT INTO item VALUES (1)", ())])
    assert connection.in_transaction
    assert await value(other, "SELECT count(*) FROM item") == "0"

    await connection.pipeline([("INSERT INTO item VALUES (2)", ()), ("COMMIT", ())])
    assert not connection.in_transaction
    assert await value(other, "SELECT count(*) FROM item") == "2"


async def test_a_failed_statement_leaves_no_failed_transaction_behind(connection: Connection) -> None:
    for run in (connection.execute, connection.simple):
        await connection.simple("BEGIN; CREATE TABLE item (id bigint)")

        with pytest.raises(StatementError):
            await run("SELECT 1/0")

        assert not connection.in_transaction
        assert await value(connection, "SELECT to_regclass('item')") is None


# Changes made by others


async def test_a_statement_survives_a_changed_column(connection: Connection, other: Connection) -> None:
    await other.simple("CREATE TABLE item (id int); INSERT INTO item VALUES (1)")
    await connection.execute("SELECT * FROM item")

    await other.simple("ALTER TABLE item ADD COLUMN name text DEFAULT 'x'")

    assert (await connection.execute("SELECT * FROM item")).rows == [("1", "x")]


async def test_statements_survive_being_deallocated(connection: Connection) -> None:
    await connection.execute("SELECT $1::int", (1,))
    await connection.execute("SELECT $1::text", ("a",))

    await connection.simple("DISCARD ALL")

    assert await value(connection, "SELECT $1::int", 2) == "2"
    assert await value(connection, "SELECT $1::text", "b") == "b"


async def test_statements_prepared_anew_leave_no_old_ones_on_the_server(
    connection: Connection, other: Connection
) -> None:
    await other.simple("CREATE TABLE item (id int)")
    await connection.execute("SELECT * FROM item")
    await other.simple("ALTER TABLE item ADD COLUMN name text")
    await connection.execute("SELECT * FROM item")

    prepared = await value(
        connection, "SELECT count(*) FROM pg_prepared_statements WHERE statement = 'SELECT * FROM item'"
    )
    assert prepared == "1"


async def test_a_pipeline_is_sent_again_as_a_whole_and_takes_effect_once(
    connection: Connection, other: Connection
) -> None:
    await other.simple("CREATE TABLE item (id int); CREATE TABLE log (id int)")
    calls = [("BEGIN", ()), ("INSERT INTO log VALUES (1)", ()), ("SELECT * FROM item", ()), ("COMMIT", ())]
    await connection.pipeline(calls)

    await other.simple("ALTER TABLE item ADD COLUMN name text")
    await connection.pipeline(calls)

    assert await value(connection, "SELECT count(*) FROM log") == "2"


async def test_a_pipeline_that_has_committed_something_is_not_sent_again(
    connection: Connection, other: Connection
) -> None:
    await other.simple("CREATE TABLE item (id int); CREATE TABLE log (id int)")
    calls = [("BEGIN", ()), ("INSERT INTO log VALUES (1)", ()), ("COMMIT", ()), ("SELECT * FROM item", ())]
    await connection.pipeline(calls)
    await other.simple("ALTER TABLE item ADD COLUMN name text")

    with pytest.raises(StatementError, match="0A000"):
        await connection.pipeline(calls)

    assert await value(connection, "SELECT count(*) FROM log") == "2"
    assert len(await connection.pipeline(calls)) == 4


async def test_a_stale_statement_inside_an_open_transaction_is_refused_once(
    connection: Connection, other: Connection
) -> None:
    await other.simple("CREATE TABLE item (id int)")
    await connection.execute("SELECT * FROM item")
    await other.simple("ALTER TABLE item ADD COLUMN name text")

    await connection.simple("BEGIN")
    with pytest.raises(StatementError, match="0A000"):
        await connection.execute("SELECT * FROM item")

    assert not connection.in_transaction
    assert (await connection.execute("SELECT * FROM item")).rows == []


async def test_a_feature_that_is_really_not_supported_is_refused(connection: Connection) -> None:
    await connection.simple("CREATE TABLE item (id int)")
    for _ in range(2):
        with pytest.raises(StatementError, match="0A000"):
            await connection.execute("SELECT count(*) FROM item FOR UPDATE")


# One user at a time


async def test_a_second_call_while_one_is_under_way_is_refused(connection: Connection, holder: Holder) -> None:
    pid = await backend(connection)
    first = asyncio.create_task(connection.execute(holder.take))
    await holder.blocks(pid)

    async with asyncio.timeout(30):
        for second in (
            connection.execute("SELECT 1"),
            connection.pipeline([]),
            connection.simple("SELECT 1"),
        ):
            with pytest.raises(RuntimeError, match="one task"):
                await second

    await holder.release()
    assert (await first).rowcount == 1
    assert await value(connection, "SELECT 1") == "1"


async def test_a_second_call_is_refused_while_the_first_waits_for_an_abandoned_statement(
    connection: Connection, holder: Holder
) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)
    first = asyncio.create_task(value(connection, "SELECT 1"))
    await asyncio.sleep(0)

    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="one task"):
            await connection.execute("SELECT 2")

    await holder.release()
    assert await first == "1"


# Cancellation


async def cancel_under_way(call: Awaitable[object], holder: Holder, pid: int) -> None:
    """Cancel a call while its statement waits for the holder's lock."""
    task = asyncio.ensure_future(call)
    await holder.blocks(pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_call_after_a_cancelled_one_gets_its_own_answer(connection: Connection, holder: Holder) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute("SELECT 'old', pg_advisory_xact_lock(7)"), holder, pid)

    following = asyncio.create_task(connection.execute("SELECT 'new'"))
    await asyncio.sleep(0)
    assert not following.done()
    await holder.release()

    assert (await following).rows == [("new",)]


async def test_a_cancelled_statement_runs_to_its_end(connection: Connection, holder: Holder) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")
    pid = await backend(connection)
    insert = "WITH lock AS MATERIALIZED (SELECT pg_advisory_xact_lock(7)) INSERT INTO item SELECT 1 FROM lock"
    await cancel_under_way(connection.execute(insert), holder, pid)

    await holder.release()

    assert await value(connection, "SELECT count(*) FROM item") == "1"


async def test_a_script_waits_for_an_abandoned_statement_too(connection: Connection, holder: Holder) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)

    following = asyncio.create_task(connection.simple("SELECT 1"))
    await asyncio.sleep(0)
    await holder.release()

    await following
    assert await value(connection, "SELECT 2") == "2"


async def test_an_abandoned_statement_may_end_in_the_tick_that_cancels_who_waits_for_it(
    connection: Connection, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as blocking:
        holder = Holder(connection)
        blocking.execute("SELECT pg_advisory_lock(7)")
        pid = await backend(connection)
        abandoned = asyncio.create_task(connection.execute(holder.take))
        await asyncio.sleep(0)
        abandoned.cancel()
        waiting = asyncio.create_task(connection.execute("SELECT 1"))
        await asyncio.sleep(0)
        blocking.execute("SELECT pg_advisory_unlock(7)")
    select.select([connection._socket], [], [], 30)

    waiting.cancel()
    connection._readable()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await backend(connection) == pid


async def test_who_waits_for_an_abandoned_statement_may_be_cancelled_too(
    connection: Connection, holder: Holder
) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)
    await cancel_under_way(connection.execute("SELECT 'never sent'"), holder, pid)

    await holder.release()

    assert await value(connection, "SELECT 1") == "1"


async def test_a_transaction_left_open_by_a_cancelled_call_is_rolled_back_at_once(
    connection: Connection, holder: Holder, other: Connection
) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")
    pid = await backend(connection)
    calls = [("BEGIN", ()), ("INSERT INTO item VALUES (1)", ()), (holder.take, ())]
    await cancel_under_way(connection.pipeline(calls), holder, pid)

    await holder.release()

    async with asyncio.timeout(30):  # nobody uses the connection, and yet the lock is free again
        await other.execute(holder.take)
    assert await value(connection, "SELECT count(*) FROM item") == "0"
    assert not connection.in_transaction


async def test_a_transaction_is_rolled_back_when_its_answer_and_the_cancellation_come_together(
    connection: Connection, other: Connection
) -> None:
    await connection.simple("CREATE TABLE item (id bigint)")
    task = asyncio.create_task(connection.pipeline([("BEGIN", ()), ("INSERT INTO item VALUES (1)", ())]))
    await answered(connection)
    assert not task.done()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async with asyncio.timeout(30):
        await other.simple("BEGIN; LOCK TABLE item; COMMIT")
    assert await value(connection, "SELECT count(*) FROM item") == "0"
    assert not connection.in_transaction


async def test_statements_that_a_cancelled_call_prepared_do_not_stay_on_the_server(
    connection: Connection, holder: Holder
) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)
    await holder.release()
    await connection.execute(holder.take)

    prepared = await connection.execute(
        "SELECT count(*) FROM pg_prepared_statements WHERE statement = $1", (holder.take,)
    )
    assert prepared.rows == [("1",)]


async def test_a_large_statement_may_be_cancelled_while_it_is_being_sent(connection: Connection) -> None:
    text = "x" * 20_000_000
    task = asyncio.create_task(connection.execute("SELECT length($1::text)", (text,)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async with asyncio.timeout(60):
        assert await value(connection, "SELECT 1") == "1"


# Notifications


async def test_a_notification_arrives_while_idle(connect: Connect, other: Connection) -> None:
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = await connect(on_notify=lambda *notification: heard.put_nowait(notification))
    await listener.simple('LISTEN "runs é"')

    await other.execute("SELECT pg_notify('runs é', 'one ü')")
    await other.execute("SELECT pg_notify('runs é', '')")

    async with asyncio.timeout(30):
        assert [await heard.get(), await heard.get()] == [("runs é", "one ü"), ("runs é", "")]


async def test_a_notification_arrives_with_an_answer(connect: Connect) -> None:
    heard: list[tuple[str, str]] = []
    listener = await connect(on_notify=lambda *notification: heard.append(notification))
    await listener.simple("LISTEN runs")

    await listener.execute("SELECT pg_notify('runs', 'own')")
    assert heard == [("runs", "own")]

    await listener.pipeline([("SELECT pg_notify('runs', 'first')", ()), ("SELECT 1", ())])
    assert heard == [("runs", "own"), ("runs", "first")]


async def test_a_notification_sent_while_a_statement_is_under_way_arrives(
    connect: Connect, holder: Holder, other: Connection
) -> None:
    heard: list[tuple[str, str]] = []
    listener = await connect(on_notify=lambda *notification: heard.append(notification))
    await listener.simple("LISTEN runs")
    pid = await backend(listener)
    under_way = asyncio.create_task(listener.execute("SELECT 'answer', pg_advisory_xact_lock(7)"))
    await holder.blocks(pid)

    await other.execute("SELECT pg_notify('runs', 'meanwhile')")
    await holder.release()

    assert (await under_way).rows[0][0] == "answer"
    assert heard == [("runs", "meanwhile")]


async def test_a_callback_that_fails_does_not_harm_the_connection(connect: Connect) -> None:
    def fail(channel: str, payload: str) -> None:
        raise RuntimeError("a fault of the application")

    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context["exception"])))
    listener = await connect(on_notify=fail)
    await listener.simple("LISTEN runs")

    await listener.execute("SELECT pg_notify('runs', '')")

    assert await value(listener, "SELECT 1") == "1"
    assert faults == ["a fault of the application"]


async def test_notifications_without_a_callback_are_dropped(connection: Connection) -> None:
    await connection.simple("LISTEN runs; NOTIFY runs")
    assert await value(connection, "SELECT 1") == "1"


# Losing the connection


async def terminate(other: Connection, pid: int) -> None:
    assert await value(other, "SELECT pg_terminate_backend($1)", pid) == "t"


async def test_a_backend_terminated_under_way_fails_that_call_and_all_later_ones(
    connection: Connection, holder: Holder, other: Connection
) -> None:
    pid = await backend(connection)
    under_way = asyncio.create_task(connection.execute(holder.take))
    await holder.blocks(pid)

    await terminate(other, pid)

    with pytest.raises(ConnectionLost, match="administrator command"):
        await under_way
    assert connection.closed
    assert not connection.in_transaction
    for call in (connection.execute("SELECT 1"), connection.pipeline([]), connection.simple("SELECT 1")):
        with pytest.raises(ConnectionLost, match="administrator command"):
            await call


async def test_a_backend_terminated_while_idle_is_told_to_the_owner_at_once(
    connect: Connect, other: Connection
) -> None:
    lost: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
    idle = await connect(on_lost=lost.set_result)

    await terminate(other, await backend(idle))

    async with asyncio.timeout(30):
        assert "administrator command" in str(await lost)
    assert idle.closed
    with pytest.raises(ConnectionLost):
        await idle.execute("SELECT 1")


async def test_a_backend_terminated_under_an_abandoned_statement_fails_who_waits_for_it(
    connection: Connection, holder: Holder, other: Connection
) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)
    waiting = asyncio.create_task(connection.execute("SELECT 1"))
    await asyncio.sleep(0)

    await terminate(other, pid)

    with pytest.raises(ConnectionLost):
        await waiting


async def test_a_backend_that_ends_itself_is_a_lost_connection(connection: Connection) -> None:
    with pytest.raises(ConnectionLost):
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


async def test_a_server_that_crashes_is_a_lost_connection(restartable_postgres: PostgresServer) -> None:
    lost: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
    connection = await Connection.connect(restartable_postgres.url(), on_lost=lost.set_result)

    await asyncio.to_thread(restartable_postgres.restart, immediate=True)

    async with asyncio.timeout(30):
        await lost
    again = await Connection.connect(restartable_postgres.url())
    assert await value(again, "SELECT 1") == "1"
    await again.close()
    with pytest.raises(ConnectionLost):
        await connection.execute("SELECT 1")


async def test_a_socket_that_breaks_while_a_large_statement_is_sent_is_a_lost_connection(
    connection: Connection,
) -> None:
    under_way = asyncio.create_task(connection.execute("SELECT length($1)", ("x" * 50_000_000,)))
    await asyncio.sleep(0)

    connection._socket.shutdown(socket.SHUT_RDWR)

    async with asyncio.timeout(30):
        with pytest.raises(ConnectionLost):
            await under_way


async def test_an_answer_that_arrived_before_the_loss_is_delivered(connection: Connection) -> None:
    task = asyncio.create_task(connection.execute("SELECT 'answered'"))
    await answered(connection)

    connection._lose("cut between the answer and its delivery")

    assert (await task).rows == [("answered",)]


async def test_a_loss_right_after_an_abandoned_statement_fails_who_waited_for_it(
    connection: Connection, holder: Holder
) -> None:
    pid = await backend(connection)
    await cancel_under_way(connection.execute(holder.take), holder, pid)
    waiting = asyncio.create_task(connection.execute("SELECT 1"))
    await asyncio.sleep(0)
    release = asyncio.create_task(holder.release())
    await answered(connection)

    connection._lose("cut before the next statement is sent")

    async with asyncio.timeout(30):
        with pytest.raises(ConnectionLost):
            await waiting
    await release


NONSENSE = b"Z\x00\x00\x00\x00"  # a message whose length is impossible


async def test_a_server_that_talks_nonsense_while_idle_is_a_lost_connection(proxy: tuple[Proxy, str]) -> None:
    between, url = proxy
    lost: asyncio.Future[ConnectionLost] = asyncio.get_running_loop().create_future()
    connection = await Connection.connect(url, on_lost=lost.set_result)

    between.say(NONSENSE)

    async with asyncio.timeout(30):
        assert "synchron" in str(await lost)
    assert connection.closed


async def test_a_server_that_answers_nonsense_is_a_lost_connection(proxy: tuple[Proxy, str], holder: Holder) -> None:
    between, url = proxy
    connection = await Connection.connect(url)
    await connection.execute("SELECT 1")
    under_way = asyncio.create_task(connection.simple("SELECT pg_sleep(60)"))
    await asyncio.sleep(0)

    between.say(NONSENSE)

    async with asyncio.timeout(30):
        with pytest.raises(ConnectionLost, match="synchron"):
            await under_way


async def test_copy_is_refused_instead_of_blocking_the_loop(connect: Connect) -> None:
    for copy in ("COPY (SELECT 1) TO STDOUT", "CREATE TEMP TABLE item (id int); COPY item FROM STDIN"):
        connection = await connect()
        with pytest.raises(ConnectionLost, match="COPY"):
            await connection.simple(copy)


# Opening and closing


async def test_closing_fails_the_call_under_way_and_is_not_a_loss(connect: Connect, holder: Holder) -> None:
    lost: list[ConnectionLost] = []
    connection = await connect(on_lost=lost.append)
    pid = await backend(connection)
    under_way = asyncio.create_task(connection.execute(holder.take))
    await holder.blocks(pid)

    await connection.close()
    await connection.close()

    with pytest.raises(ConnectionLost, match="closed"):
        await under_way
    with pytest.raises(ConnectionLost, match="closed"):
        await connection.execute("SELECT 1")
    assert connection.closed
    assert lost == []


async def test_connecting_says_what_was_wrong(postgres_server: PostgresServer) -> None:
    for conninfo, reason in [
        (postgres_server.url("no_such_database"), "no_such_database"),
        ("postgresql://127.0.0.1:1/x", "refused"),
        ("nonsense", "nonsense"),
        ("host=no-such-host.invalid", "no-such-host.invalid"),
        ("host=a,b port=1,2,3", "port"),
    ]:
        with pytest.raises(ConnectionLost, match=reason):
            await Connection.connect(conninfo)


async def test_a_server_that_does_not_answer_is_given_up(postgres_server: PostgresServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        with pytest.raises(ConnectionLost, match="no answer"):
            await Connection.connect(f"host=127.0.0.1 port={port}", connect_timeout=0.05)


async def test_the_next_host_is_tried_when_one_fails(postgres_server: PostgresServer) -> None:
    port = postgres_server.port

    for where in (
        f"127.0.0.1:1,localhost:{port}",
        f"no-such-host.invalid,127.0.0.1:{port}".replace(",", f":{port},"),
    ):
        connection = await Connection.connect(f"postgresql://postgres@{where}/postgres")
        assert await value(connection, "SELECT 1") == "1"
        await connection.close()


async def test_host_names_are_looked_up_by_the_event_loop_and_each_address_is_tried(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "database.invalid"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (at, 0)) for at in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    url = f"postgresql://postgres@database.invalid:{postgres_server.port}/postgres"

    connection = await Connection.connect(url)

    assert await value(connection, "SELECT 1") == "1"
    await connection.close()


async def test_text_is_utf8_whatever_the_environment_says(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    connection = await Connection.connect(postgres_url)

    assert await value(connection, "SELECT $1 || chr(233)", "é漢") == "é漢é"
    await connection.close()
