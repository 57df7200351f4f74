"""A store that is full, locked, moved, away, or not ours, under an engine: an error with advice for callers, patience
for running steps, and no acknowledged step lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import keiro
from keiro import engine as engines
from keiro import worker as workers
from keiro.errors import KeiroError, MigrationRequired, StoreBusy, StoreError, StoreUnavailable
from keiro.stores import migrate
from keiro.stores import postgres as postgres_store
from keiro.stores import sqlite as sqlite_store
from keiro.stores.postgres import PostgresStore
from keiro.stores.pq import ConnectionLost
from keiro.stores.sqlite import SQLiteStore
from keiro.testing.postgres import PostgresServer

effects: Counter[str] = Counter()
acknowledged: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    effects.clear()
    acknowledged.clear()


@keiro.step
async def work(name: str, size: int = 0) -> str:
    effects[name] += 1
    return "x" * size


@keiro.workflow
async def chain(run: keiro.WorkflowRun, n: int, size: int = 0) -> int:
    """Says of every step that it was acknowledged."""
    for i in range(n):
        await run.step(work, f"{run.key}-{i}", size)
        acknowledged.append(f"{run.key}-{i}")
    return n


@keiro.workflow
async def fine(run: keiro.WorkflowRun) -> str:
    return await run.step(work, f"fine {run.key}", 1)


class Counting(keiro.WorkflowRun, name="counting"):
    def __init__(self) -> None:
        self.count = 0

    @keiro.event("Counted")
    def counts(self) -> None:
        self.count += 1

    async def execute(self) -> int:
        await self.step(work, self.key)
        await self.apply(Counting.counts)
        return self.count


async def intact(url: str, n: int) -> None:
    """Every run has ended, every acknowledged step is recorded, and no step ran twice."""
    async with keiro.Engine(url, workflows=[chain, fine], worker=False) as engine:
        runs = [run for run in await engine.runs(limit=1000) if run.workflow == "chain"]
        assert len(runs) == n
        assert {run.status for run in runs} == {"completed"}
        recorded = [f"{run.key}-{i}" for run in runs for i, _ in enumerate(await engine.steps(run.run_id))]
    assert sorted(recorded) == sorted(acknowledged)
    assert set(effects.values()) <= {1}


class Reports:
    """What an engine tells its operators."""

    def __init__(self, engine: keiro.Engine) -> None:
        self.seen: list[tuple[str, str]] = []
        engine.report = self._report  # type: ignore[method-assign]

    def _report(self, event: str, run_id: str, **fields: object) -> None:
        self.seen.append((event, str(fields.get("error", ""))))

    async def until(self, event: str, text: str = "") -> None:
        async with asyncio.timeout(60):
            while not any(event == name and text in error for name, error in self.seen):
                await asyncio.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


# SQLite: files that cannot be opened


@pytest.fixture
def damaged(tmp_path: Path) -> dict[str, tuple[Path, type[KeiroError], str]]:
    """Files that are no journal of this version."""
    paths = {name: tmp_path / f"{name}.db" for name in ("text", "newer", "foreign", "torn")}
    paths["text"].write_text("Dear reader, " * 1000)
    for name in ("newer", "torn"):
        migrate.ensure_sqlite(str(paths[name]))
    with closing(sqlite3.connect(paths["newer"])) as connection:
        connection.execute(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    with closing(sqlite3.connect(paths["foreign"])) as connection:
        connection.execute("CREATE TABLE keiro_runs (a)")
        connection.commit()
    pages = bytearray(paths["torn"].read_bytes())
    pages[100:4096] = b"\xff" * 3996
    paths["torn"].write_bytes(pages)
    return {
        "text": (
            paths["text"],
            StoreUnavailable,
            "is not an SQLite database, or is encrypted. Give the path of another",
        ),
        "newer": (paths["newer"], MigrationRequired, "was written by a newer keiro .*: install the newest"),
        "foreign": (
            paths["foreign"],
            MigrationRequired,
            "is not keiro's: it has keiro_.* tables.*Use another database",
        ),
        "torn": (paths["torn"], StoreUnavailable, "is damaged .*restore a backup"),
        "folder": (tmp_path, StoreUnavailable, "is a folder. Give the path of a file in it"),
        "nowhere": (tmp_path / "none" / "k.db", StoreUnavailable, "there is no folder .*/none. Create it"),
    }


@pytest.mark.parametrize("which", ["text", "newer", "foreign", "torn", "folder", "nowhere"])
async def test_a_file_that_cannot_be_opened_is_said_and_left_alone(
    damaged: dict[str, tuple[Path, type[KeiroError], str]], which: str
) -> None:
    path, kind, advice = damaged[which]
    before = path.read_bytes() if path.is_file() else None
    for worker in (True, False):
        with pytest.raises(kind, match=advice):
            await keiro.Engine(f"sqlite:///{path}", workflows=[fine], worker=worker).__aenter__()
    assert before is None or path.read_bytes() == before
    assert not os.path.exists(f"{path}-wal")


async def test_a_file_that_may_only_be_read_is_no_place_for_an_engine() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name) / "keiro.db"
        migrate.ensure_sqlite(str(path))
        path.chmod(0o444)
        Path(name).chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(StoreUnavailable, match=r"must be writable for this user|may read and write the file"):
                await keiro.Engine(f"sqlite:///{path}", workflows=[fine]).__aenter__()
        finally:
            if root:
                os.seteuid(0)
            Path(name).chmod(0o755)


# SQLite: full, locked, gone


@asynccontextmanager
async def sqlite_engine(path: Path, **options: Any) -> AsyncIterator[tuple[keiro.Engine, SQLiteStore, Reports]]:
    engine = keiro.Engine(f"sqlite:///{path}", workflows=[chain, fine], **options)
    reports = Reports(engine)
    async with engine:
        assert isinstance(engine.store, SQLiteStore)
        yield engine, engine.store, reports


async def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keiro.db"
    async with sqlite_engine(path) as (engine, store, reports):
        handles = [await engine.start(chain, 5, 20_000, id=str(n)) for n in range(8)]
        (pages,) = store._conn.execute("PRAGMA page_count").fetchone()
        store._conn.execute(f"PRAGMA max_page_count = {pages + 40}")
        full = f"no space is left for {path}; nothing was written. Free some, then try again"
        await reports.until("store_away", full)
        assert full in await until_refused(engine)
        before = list(acknowledged)
        assert 0 < len(before) < 40
        store._conn.execute("PRAGMA max_page_count = 1000000")
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [5] * 8
        assert acknowledged[: len(before)] == before
        assert await engine.execute(fine) == "x"
    await intact(engine.url, 8)


async def test_an_outage_is_told_once_however_many_runs_meet_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that is full because of a log must not be filled by it."""
    engine = keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[chain])

    def told() -> list[str]:
        found = [getattr(record, "keiro", {}).get("event") for record in caplog.records]
        return [event for event in found if event in ("store_away", "store_back")]

    async with engine:
        assert isinstance(engine.store, SQLiteStore)
        connection = engine.store._conn
        handles = [await engine.start(chain, 3, 20_000) for _ in range(20)]
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 10}")
        await until(told)
        await asyncio.sleep(0.2)  # time for many more
        connection.execute("PRAGMA max_page_count = 1000000")
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [3] * 20
        assert told() == ["store_away", "store_back"]


async def test_an_engine_on_a_full_disk_can_be_closed(tmp_path: Path) -> None:
    path = tmp_path / "keiro.db"
    async with sqlite_engine(path, grace=0.05) as (engine, store, reports):
        await engine.start(chain, 5, 20_000, id="0")
        store._conn.execute("PRAGMA max_page_count = 1")
        await reports.until("store_away", "no space is left")
    known = list(acknowledged)
    async with sqlite_engine(path) as (engine, store, reports):  # its own worker is provably gone: taken over at once
        assert await engine.handle("wf:chain-0").result(60) == 5
    assert acknowledged[len(known) :] == [f"0-{i}" for i in range(5)]
    assert max(effects.values()) == 2 and sum(effects.values()) == 6  # the one whose record found no room


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    """Takes the write lock of the file as another program does."""
    opened: list[sqlite3.Connection] = []

    def take() -> sqlite3.Connection:
        opened.append(sqlite3.connect(tmp_path / "keiro.db", isolation_level=None, timeout=30))
        opened[-1].execute("BEGIN IMMEDIATE")
        return opened[-1]

    yield take
    for connection in opened:
        connection.close()


async def test_a_file_that_stays_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[], sqlite3.Connection]
) -> None:
    monkeypatch.setattr(sqlite_store, "BUSY_LIMIT_S", 0.05)
    async with sqlite_engine(tmp_path / "keiro.db") as (engine, _, reports):
        handles = [await engine.start(chain, 3, id=str(n)) for n in range(4)]
        other = lock()
        busy = "was locked by another connection for 0.05 s; nothing was written. Find what holds a write transaction"
        with pytest.raises(StoreBusy, match=busy):
            await engine.start(fine)
        await reports.until("store_away", busy)
        assert len(await engine.runs()) >= 4  # reading needs no lock
        other.execute("COMMIT")
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [3] * 4
        assert await engine.execute(fine) == "x"
    await intact(engine.url, 4)


async def test_a_file_that_is_locked_for_a_moment_is_nobodys_error(
    tmp_path: Path, lock: Callable[[], sqlite3.Connection]
) -> None:
    async with sqlite_engine(tmp_path / "keiro.db") as (engine, _, reports):
        other = lock()
        starting = [asyncio.create_task(engine.execute(chain, 3, id="0"))]
        await asyncio.sleep(0.02)  # one batch, then another
        starting += [asyncio.create_task(engine.execute(chain, 3, id=str(n))) for n in range(1, 4)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in starting)
        other.execute("ROLLBACK")
        assert await asyncio.gather(*starting) == [3] * 4
        assert reports.seen == []
    await intact(engine.url, 4)


@pytest.mark.parametrize("how", ["deleted", "replaced", "replaced by another journal"])
async def test_a_file_that_is_moved_away_takes_no_more_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What would be written there nobody would ever find again."""
    monkeypatch.setattr(sqlite_store, "LOOK_S", 0.01)
    path, kept = tmp_path / "keiro.db", tmp_path / "kept.db"
    async with sqlite_engine(path, grace=0.05) as (engine, _, _):
        assert await (await engine.start(chain, 3, id="0")).result(60) == 3
        path.rename(kept)
        if how == "replaced":
            path.write_text("something else")
        elif how != "deleted":
            migrate.ensure_sqlite(str(path))  # which removes the -wal file that it takes for a remnant
        advice = f"{path} was deleted or replaced while it was open.*put back the file and its -wal file"
        assert re.search(advice, await until_refused(engine))
        with pytest.raises(StoreUnavailable, match=advice):
            await engine.runs()
        path.unlink(missing_ok=True)
        kept.rename(path)
        if how == "replaced by another journal":
            # What was in the -wal file is lost with it: the file alone is not what was put away.
            await asyncio.sleep(0.05)
            with pytest.raises(StoreUnavailable, match=advice):
                await engine.start(fine)
            return
        await until_accepted(engine)
    await intact(engine.url, 1)


async def until_refused(engine: keiro.Engine) -> str:
    """Start runs until that is refused; what is said then."""
    async with asyncio.timeout(60):
        with pytest.raises(StoreError) as refused:
            while True:
                await engine.start(fine)
                await asyncio.sleep(0.001)
    return str(refused.value)


async def until_accepted(engine: keiro.Engine) -> None:
    """Run one until that is possible."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await engine.execute(fine) == "x"
                return
            except StoreError:
                await asyncio.sleep(0.001)


# Postgres: not to be reached, not ours, not allowed


async def test_a_server_that_is_not_there_is_said_at_once(restartable_postgres: PostgresServer) -> None:
    url = restartable_postgres.url().replace("postgres@", "me:secret@")
    restartable_postgres.stop()
    engine = keiro.Engine(url, workflows=[fine], migrate=True)
    with pytest.raises(
        StoreUnavailable, match=r"cannot reach postgresql://me@127.0.0.1:.*Check that a server runs"
    ) as said:
        await engine.__aenter__()
    assert "secret" not in str(said.value)
    restartable_postgres.start()
    with pytest.raises(StoreUnavailable, match=r'role "me" does not exist|refused the login'):
        await engine.__aenter__()
    async with keiro.Engine(restartable_postgres.url(), workflows=[fine], migrate=True) as engine:
        assert await engine.execute(fine) == "x"


@pytest.fixture
def role(postgres_server: PostgresServer, postgres_url: str) -> Iterator[str]:
    """The URL of an empty database for a role that may do nothing in it yet, with a password."""
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE clerk LOGIN PASSWORD 'secret'")
    yield f"postgresql://clerk:secret@127.0.0.1:{postgres_server.port}/{name}"
    postgres_server.terminate_backends(name)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY clerk")
        connection.execute("DROP ROLE clerk")


async def test_a_database_without_our_tables_is_left_alone(postgres_url: str) -> None:
    for worker in (True, False):
        with pytest.raises(
            MigrationRequired, match=rf"has no tables of keiro .*: run `keiro migrate --url {postgres_url}`"
        ):
            await keiro.Engine(postgres_url, workflows=[fine], worker=worker).__aenter__()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'keiro'").fetchone() is None


async def test_a_database_that_is_not_there_is_named(postgres_url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r'database "none" does not exist\. Create it \(`createdb`\)'):
        await keiro.Engine(postgres_url.rpartition("/")[0] + "/none", workflows=[fine]).__aenter__()


async def test_a_role_gets_what_it_needs_step_by_step(role: str, postgres_url: str) -> None:
    """Rights that are missing are said, at opening and under way; once they are given, everything goes on."""
    with pytest.raises(StoreUnavailable, match=r"permission denied.*To migrate, the role needs CREATE on the database"):
        await keiro.Engine(role, workflows=[fine], migrate=True).__aenter__()
    migrate.ensure_postgres(postgres_url)
    with pytest.raises(StoreUnavailable, match=r"permission denied.*USAGE on schema keiro and SELECT, INSERT, UPDATE"):
        await keiro.Engine(role, workflows=[fine]).__aenter__()

    def grant(sql: str) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(sql.encode())

    grant("GRANT USAGE ON SCHEMA keiro TO clerk; GRANT SELECT ON ALL TABLES IN SCHEMA keiro TO clerk")
    with pytest.raises(StoreUnavailable, match=r"permission denied for table keiro_workers.*Grant them"):
        await keiro.Engine(role, workflows=[fine]).__aenter__()
    grant("GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA keiro TO clerk")
    engine = keiro.Engine(role, workflows=[chain, fine])
    reports = Reports(engine)
    async with engine:
        assert await engine.execute(fine) == "x"
        grant("REVOKE INSERT ON keiro.keiro_journal FROM clerk")
        with pytest.raises(StoreUnavailable, match="permission denied for table keiro_journal"):
            await engine.start(fine)
        grant("GRANT INSERT ON keiro.keiro_journal TO clerk")
        handle = await engine.start(chain, 200, id="0")
        await until(lambda: acknowledged)
        grant("REVOKE INSERT ON keiro.keiro_journal FROM clerk")
        await reports.until("store_away", "permission denied for table keiro_journal")
        assert "secret" not in str(reports.seen)
        grant("GRANT INSERT ON keiro.keiro_journal TO clerk")
        assert await handle.result(60) == 200
    await intact(role, 1)


# Postgres: connections that end, a server that goes and comes back


@asynccontextmanager
async def postgres_engine(url: str, **options: Any) -> AsyncIterator[tuple[keiro.Engine, PostgresStore, Reports]]:
    engine = keiro.Engine(url, workflows=[chain, fine], migrate=True, **options)
    reports = Reports(engine)
    async with engine:
        assert isinstance(engine.store, PostgresStore)
        yield engine, engine.store, reports


async def terminate(url: str, pid: str) -> None:
    """End one connection, as an administrator or a failing network does."""

    def end() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s, 10000)", (int(pid),))

    await asyncio.to_thread(end)


async def pid_of(connection: Any) -> str:
    ((pid,),) = (await connection.execute("SELECT pg_backend_pid()", ())).rows
    return str(pid)


@pytest.mark.crash
async def test_a_writer_that_is_ended_is_replaced(postgres_url: str) -> None:
    async with postgres_engine(postgres_url) as (engine, store, _):

        async def writer() -> str:
            while True:
                try:
                    return await pid_of(await store._writer_now())
                except ConnectionLost:
                    pass  # the one that was ended last: nobody has used it since

        handles = [await engine.start(chain, 30, id=str(n)) for n in range(10)]
        for n in range(5):
            await until(lambda n=n: len(acknowledged) >= 20 * n)
            await terminate(postgres_url, await store._in_turn(writer))
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [30] * 10
    await intact(postgres_url, 10)


@pytest.mark.crash
async def test_a_connection_that_listens_and_reads_is_replaced(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field reports hull#273, Hangfire.PostgreSql#410: deaf after that, it would find new work at its next look only,
    and here it looks but once an hour."""
    monkeypatch.setattr("keiro.worker.SAFETY_POLL_S", 3600.0)
    monkeypatch.setattr("keiro.worker.RENEW_MS", 3_600_000)
    both = postgres_engine(postgres_url), postgres_engine(postgres_url, worker=False)
    async with both[0] as (engine, store, _), both[1] as (client, _, _):
        assert await (await client.start(fine)).result(60) == "x"
        for _ in range(3):
            async with store._reading:
                reader = store._reader
                pid = await pid_of(reader)
            await terminate(postgres_url, pid)
            await until(lambda reader=reader: store._reader is not reader)
            assert len(await engine.runs()) >= 1
            assert await (await client.start(fine)).result(60) == "x"


async def test_connections_that_are_ended_for_being_idle_are_replaced(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    impatient = "idle_session_timeout = '500ms'"
    try:
        async with postgres_engine(postgres_url) as (engine, store, _):
            assert await engine.execute(fine) == "x"
            # Only now, and for who connects from now on: an engine that is slow to open is told so.
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(f"ALTER DATABASE {name} SET {impatient}".encode())
            async with store._reading:
                await (await store._reader_now()).simple(f"SET {impatient}")

            async def make_the_writer_so() -> None:
                await (await store._writer_now()).simple(f"SET {impatient}")

            await store._in_turn(make_the_writer_so)
            for _ in range(2):
                reader, writer = store._reader, store._writer
                assert writer is not None
                await until(lambda reader=reader: store._reader is not reader)
                await until(lambda writer=writer: writer.closed)
                assert await engine.execute(fine) == "x"
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} RESET ALL".encode())


@pytest.mark.crash
async def test_all_connections_ended_at_once_lose_nothing(postgres_server: PostgresServer, postgres_url: str) -> None:
    async with postgres_engine(postgres_url) as (engine, _, _):
        handles = [await engine.start(chain, 20, id=str(n)) for n in range(10)]
        for n in range(4):
            await until(lambda n=n: len(acknowledged) >= 30 * n)
            await asyncio.to_thread(postgres_server.terminate_backends, postgres_url.rpartition("/")[2])
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [20] * 10
        assert await engine.execute(fine) == "x"
    await intact(postgres_url, 10)


@pytest.mark.crash
@pytest.mark.parametrize("immediate", [True, False])
async def test_a_server_that_goes_away_and_comes_back_is_waited_for(
    restartable_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, immediate: bool
) -> None:
    monkeypatch.setattr(postgres_store, "RECONNECT_S", 0.1)
    url = restartable_postgres.url()
    async with postgres_engine(url) as (engine, _, reports):
        handles = [await engine.start(chain, 30, id=str(n)) for n in range(10)]
        await until(lambda: len(acknowledged) >= 50)
        await asyncio.to_thread(restartable_postgres.stop, immediate=immediate)
        with pytest.raises(
            StoreUnavailable, match=r"cannot reach postgresql://postgres@127.0.0.1:.*Check that a server runs"
        ):
            await engine.start(fine)
        with pytest.raises(StoreUnavailable, match="cannot reach"):
            await engine.runs()
        await reports.until("store_away", "cannot reach")
        await asyncio.to_thread(restartable_postgres.start)
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [30] * 10
        assert await engine.execute(fine) == "x"
    await intact(url, 10)


async def test_an_outage_between_a_record_and_its_delivery_fails_no_body(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8: the body of an aggregate reads what was recorded; the store may be away just then."""
    away = True

    async def history(run_keys: Sequence[int], after: int = 0) -> Any:
        nonlocal away
        away = not away
        if not away:
            raise StoreUnavailable("the server is shutting down")
        return await read(run_keys, after)

    async with keiro.Engine(store_url, workflows=[Counting], migrate=True) as engine:
        reports = Reports(engine)
        read = engine.store.history
        monkeypatch.setattr(engine.store, "history", history)
        assert await engine.execute(Counting, id="a") == 1
        assert effects == {"a": 1}
        assert ("store_away", "the server is shutting down") in reports.seen


@pytest.mark.crash
async def test_an_engine_can_be_closed_while_the_server_is_away(
    restartable_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "RECONNECT_S", 0.1)
    async with postgres_engine(restartable_postgres.url(), grace=0.05) as (engine, _, reports):
        await engine.start(chain, 10_000, id="0")
        await until(lambda: acknowledged)
        await asyncio.to_thread(restartable_postgres.stop, immediate=True)
        await reports.until("store_away")
        async with asyncio.timeout(60):
            await engine.close()
    assert "not_handed_back" in [event for event, _ in reports.seen]


async def test_an_engine_can_be_closed_while_the_server_does_not_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connected, but silent: a stopped server, or a network that lets nothing through any more."""
    monkeypatch.setattr(engines, "FAREWELL_S", 0.1)
    monkeypatch.setattr(workers, "FAREWELL_S", 0.1)
    monkeypatch.setattr(postgres_store, "FAREWELL_S", 0.1)
    async with postgres_engine(postgres_url, grace=0.05) as (engine, _, reports):
        await engine.start(chain, 10_000, id="0")
        await until(lambda: acknowledged)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            backends = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
                " AND pid <> pg_backend_pid() AND datname = current_database()"
            ).fetchall()
        for (pid,) in backends:
            os.kill(pid, signal.SIGSTOP)
        try:
            started = asyncio.create_task(engine.start(fine))
            read = asyncio.create_task(engine.runs())
            await asyncio.sleep(0)
            close = asyncio.create_task(engine.close())
            ended, _ = await asyncio.wait([close, started, read], timeout=30)
        finally:
            for (pid,) in backends:
                os.kill(pid, signal.SIGCONT)
        assert ended == {close, started, read}
        for waiting in (started, read):
            with pytest.raises(StoreUnavailable):
                await waiting
    assert ("not_handed_back", "the store does not answer") in reports.seen


class Network:
    """Between an engine and its server; while it is `down` it accepts connections and lets nothing through."""

    def __init__(self, url: str) -> None:
        options = psycopg.conninfo.conninfo_to_dict(url)
        self._server = str(options["host"]), int(options["port"] or 5432)
        self._options = options
        self.up = asyncio.Event()
        self.up.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> str:
        self._proxy = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._proxy.sockets[0].getsockname()[1]
        return f"postgresql://{self._options['user']}@127.0.0.1:{port}/{self._options['dbname']}"

    async def __aexit__(self, *_: object) -> None:
        self._proxy.close()
        self.up.set()
        for writer in list(self._writers):
            writer.close()
        for writer in list(self._writers):
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self.up.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._server)
        self._writers.add(far_writer)
        await asyncio.gather(self._relay(reader, far_writer), self._relay(far_reader, writer))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.up.wait()
                writer.write(data)
        writer.close()


async def test_a_server_that_falls_silent_is_given_up_and_taken_up_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers are told in bounded time; what was under way is decided by the ids of its events, and nothing is lost."""
    monkeypatch.setattr(postgres_store, "SILENT_S", 0.3)
    monkeypatch.setattr(postgres_store, "RECONNECT_S", 0.1)
    network = Network(postgres_url)
    async with network as url, postgres_engine(url) as (engine, _, reports):
        handles = [await engine.start(chain, 200, id=str(n)) for n in range(4)]
        await until(lambda: acknowledged)
        network.up.clear()
        async with asyncio.timeout(60):
            with pytest.raises(StoreUnavailable, match=r"has not answered for|no answer in"):
                await engine.start(fine, id="lost")
            with pytest.raises(StoreUnavailable, match=r"has not answered for|no answer in"):
                await engine.runs()
            await reports.until("store_away")
        network.up.set()
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [200] * 4
        assert await engine.execute(fine, id="lost") == "x"
    await intact(postgres_url, 4)


async def test_a_statement_that_takes_its_time_is_no_silence(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "SILENT_S", 0.1)
    async with postgres_engine(postgres_url) as (engine, store, reports):
        with psycopg.connect(postgres_url) as other:
            await asyncio.to_thread(other.execute, "SELECT pg_advisory_xact_lock(%s)", (postgres_store.LOCK_KEY,))
            started = asyncio.create_task(engine.start(fine, id="slow"))
            writer = store._writer
            assert writer is not None
            await until(lambda: writer.unanswered_s > 0.5)
        assert await (await started).result(60) == "x"
        assert store._writer is writer
        assert "store_away" not in [event for event, _ in reports.seen]


async def test_a_lock_that_somebody_keeps_is_waited_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of a caller's that holds the journal and is never ended stops nobody for ever without a word."""
    monkeypatch.setattr(postgres_store, "LOCK_LIMIT_S", 0.05)
    monkeypatch.setattr(postgres_store, "RECONNECT_S", 0.1)
    async with postgres_engine(postgres_url) as (engine, _, reports):
        handles = [await engine.start(chain, 200, id=str(n)) for n in range(4)]
        await until(lambda: acknowledged)
        with psycopg.connect(postgres_url) as other:
            await asyncio.to_thread(other.execute, "SELECT pg_advisory_xact_lock(%s)", (postgres_store.LOCK_KEY,))
            locked = "was locked by another session for too long.*find the session that holds a transaction open"
            with pytest.raises(StoreBusy, match=locked):
                await engine.start(fine)
            await reports.until("store_away", "was locked by another session for too long")
            assert len(await engine.runs()) == 4  # reading needs no lock
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [200] * 4
        assert await engine.execute(fine) == "x"
    await intact(postgres_url, 4)


async def test_statements_that_are_cancelled_are_sent_again(postgres_url: str) -> None:
    """An administrator's pg_cancel_backend, or a statement_timeout."""
    async with postgres_engine(postgres_url) as (engine, store, _):
        handles = [await engine.start(chain, 30, id=str(n)) for n in range(4)]

        async def writer() -> str:
            return await pid_of(await store._writer_now())

        pid = await store._in_turn(writer)
        with psycopg.connect(postgres_url, autocommit=True) as other:
            for _ in range(100):
                await asyncio.to_thread(other.execute, "SELECT pg_cancel_backend(%s)", (int(pid),))
        assert await asyncio.gather(*(handle.result(60) for handle in handles)) == [30] * 4
    await intact(postgres_url, 4)


# Postgres: settings of the database and of the role


@pytest.mark.parametrize(
    "setting",
    [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_isolation = 'repeatable read'",
        "default_transaction_deferrable = on",
        "lock_timeout = '20ms'",
        "idle_in_transaction_session_timeout = '2s'",
        "synchronous_commit = off",
        "search_path = pg_catalog",
        "DateStyle = 'German'",
        "TimeZone = 'Pacific/Chatham'",
        "client_encoding = 'LATIN1'",
        "bytea_output = 'escape'",
        "standard_conforming_strings = off",
    ],
)
async def test_settings_of_the_database_change_nothing(postgres_url: str, setting: str) -> None:
    """Two engines share the work: under a stricter isolation each would see the other's commits too late."""
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET {setting}".encode())
    try:
        async with postgres_engine(postgres_url) as (one, store, _), postgres_engine(postgres_url) as (two, _, reports):
            pairs = [(one, two)[n % 2].execute(chain, 5, id=str(n)) for n in range(10)]
            assert await asyncio.gather(*pairs) == [5] * 10
            both = [engine.start(fine, id="the same 文") for engine in (one, two, one, two)]
            handles = await asyncio.gather(*both)
            assert {await handle.result(60) for handle in handles} == {"x"}
            assert len(await two.runs()) == 11
            # One user at a time: the listing is followed on the third.
            async with store._reading, store._following:
                for connection in (store._reader, await store._follower_now()):
                    assert connection is not None
                    assert (await connection.execute("SHOW transaction_isolation", ())).rows == [("read committed",)]
            assert store._writer is not None
            writer = await store._writer.execute("SHOW transaction_isolation", ())
            assert writer.rows == [("read committed",)]
            assert [event for event, _ in reports.seen if event != "worker_buried"] == []
        await intact(postgres_url, 10)
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} RESET ALL".encode())
