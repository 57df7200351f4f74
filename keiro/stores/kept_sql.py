"""Rows of projections in a SQL store: programs over the user's tables, the tracking and the journal.

As everything in a SQL store they are written once, as programs that somebody else runs on a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from keiro.decisions import Append, Command, Start
from keiro.errors import ProjectionFailed
from keiro.events import Event
from keiro.mapper import EventMapper
from keiro.projections.base import Key, ReadModel
from keiro.projections.invariants import COLUMNS, Diagnosis, Examined, Finding, diagnose
from keiro.projections.rebuilt import FOLDED_COLUMNS, ComputedRuns, mended, same_identity
from keiro.projections.run_parents import RUN_PARENTS, TOPICS, ComputedRunParents, Edge
from keiro.projections.waits import CHILDREN, CLOCKS, DEFERREDS, ChildRow
from keiro.rows import RUN_COLUMNS, Run
from keiro.stores.faults import is_refusal
from keiro.stores.kept import BITE, Computed, Differences, MemoryRows, Report, decoded
from keiro.stores.sql import Program, Sql, Statement
from keiro.stores.transaction import Gate
from keiro.stores.work import change_statement

if TYPE_CHECKING:
    from keiro.stores.tables import RowStatements

T = TypeVar("T")

PAGE: Final = 500
"""How many events are read at once."""
_ALL: Final = 2**31 - 1
BUILT: Final = "inline:"
"""Prefix of the tracking row that says that the rows of an inline projection were built up to there."""


class SqlStore(Protocol):
    """What the rows of projections need of a SQL store. A program may be run more than once."""

    sql: Sql
    dialect: str
    """As SQLAlchemy calls it."""

    async def transact(self, program: Callable[[], Program[T]], *, locked: bool) -> T:
        """Run a program in a transaction, under the lock of the journal or without it."""

    async def query(self, program: Callable[[], Program[T]]) -> T:
        """Run a program that only reads, outside any transaction."""

    async def create_tables(self, models: Sequence[ReadModel], *, create: bool) -> None:
        """Create the tables of projections, or raise `MigrationRequired` where they are not as they must be."""


class Text:
    """SQL text over the journal and the tracking."""

    def __init__(self, sql: Sql) -> None:
        text = sql.text
        tracking = text.journal.replace("keiro_journal", "keiro_projection_tracking")
        self.head = f"SELECT coalesce(max(position), 0) FROM {text.journal}"
        self.slice = (
            "SELECT j.position, j.run_key, j.version, j.event_id, j.topic, j.payload, j.recorded_at_ms, r.run_id"
            f" FROM {text.journal} j JOIN {text.runs} r ON r.run_key = j.run_key"
            " WHERE j.position > ? AND j.position <= ?{topics} ORDER BY j.position LIMIT ?"
        )
        self.tracked = f"SELECT position FROM {tracking} WHERE name = ?"
        self.track = (
            f"INSERT INTO {tracking} (name, position) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET position = excluded.position"
        )
        self.untrack = f"DELETE FROM {tracking} WHERE name = ?"
        # Taken first: who finds the tracking where it expects it holds its row until the commit.
        self.advance = f"UPDATE {tracking} SET position = ? WHERE name = ? AND position = ? RETURNING name"
        run = ", ".join(f"r.{name}" for name in RUN_COLUMNS)
        owned = (
            f"SELECT {run}, h.version, h.owner, h.epoch FROM {text.runs} r JOIN {text.heads} h ON h.run_key = r.run_key"
        )
        self.runs_after = f"{owned} WHERE r.run_key > ? ORDER BY r.run_key LIMIT ?"
        self.runs_named = f"{owned} WHERE r.run_id IN ({{names}})"
        self.of_runs = (
            self.slice.partition(" WHERE ")[0] + " WHERE j.run_key IN ({names}) ORDER BY j.run_key, j.version"
        )
        self.worker_keys = f"SELECT worker_key FROM {text.workers}"
        self.clocks_of, self.deferreds_of = (
            f"SELECT execution_id, {', '.join(columns)} FROM {text.journal.replace('keiro_journal', table)}"
            " WHERE execution_id IN ({names})"
            for table, columns in COLUMNS.items()
        )
        as_child = (
            f"CAST(c.{name} AS TEXT)" if name == "result" else f"c.{name}" for name in ChildRow.__struct_fields__
        )
        self.as_children = (
            f"SELECT r.run_id, f.parent_run_id, {', '.join(as_child)}"
            f" FROM {text.runs} r LEFT JOIN {text.runs} f ON f.run_id = r.lineage_id"
            f" LEFT JOIN {text.journal.replace('keiro_journal', CHILDREN)} c"
            " ON c.child_id = r.key AND c.child_name = r.workflow"
            " WHERE r.handoff_run_id IS NULL AND r.run_id IN ({names})"
        )
        edges = text.journal.replace("keiro_journal", RUN_PARENTS)
        self.edges_after = (
            f"SELECT child_id, parent_id, seq FROM {edges} WHERE (child_id, parent_id) > (?, ?)"
            " ORDER BY child_id, parent_id LIMIT ?"
        )
        self.begun = (
            f"SELECT r.run_id, j.position FROM {text.runs} r JOIN {text.journal} j"
            " ON j.run_key = r.run_key AND j.version = 1 WHERE r.run_id IN ({names})"
        )
        self.insert_edge = f"INSERT INTO {edges} (child_id, parent_id, seq) VALUES (?, ?, ?)"
        self.renumber_edge = f"UPDATE {edges} SET seq = ? WHERE child_id = ? AND parent_id = ?"
        self.delete_edge = f"DELETE FROM {edges} WHERE child_id = ? AND parent_id = ?"
        self.mend_head = f"UPDATE {text.heads} SET version = ? WHERE run_key = ?"
        self.mend_run = (
            f"UPDATE {text.runs} SET {', '.join(f'{name} = ?' for name in FOLDED_COLUMNS)} WHERE run_key = ?"
        )


class Journal:
    """Programs that read the journal as events."""

    def __init__(self, sql: Sql, mapper: EventMapper) -> None:
        self.sql = sql
        self.text = Text(sql)
        self.mapper = mapper

    def head(self) -> Program[int]:
        """The position of the newest event."""
        ((row,),) = yield [(self.text.head, ())]
        return int(row[0])

    def read(self, after: int, until: int, topics: frozenset[str] | None, limit: int) -> Program[list[Event]]:
        """Events with `after` < position <= `until`."""
        wanted = () if topics is None else tuple(sorted(topics))
        clause = "" if topics is None else f" AND j.topic IN ({', '.join('?' * len(wanted)) or 'NULL'})"
        (rows,) = yield [(self.text.slice.replace("{topics}", clause), (after, until, *wanted, limit))]
        return decoded(self.mapper, map(self.sql.to_stored, rows))

    def rest(self, after: int, topics: frozenset[str] | None) -> Program[list[Event]]:
        """All events after a position, for a transaction that holds the lock."""
        events: list[Event] = []
        while True:
            page = yield from self.read(after, 2**53 - 1, topics, PAGE)
            events += page
            if len(page) < PAGE:
                return events
            after = page[-1].__dict__["position"]

    def tracked(self, name: str) -> Program[int | None]:
        """The tracking of a name."""
        (rows,) = yield [(self.text.tracked, (name,))]
        return int(rows[0][0]) if rows else None


class TableRows:
    """Programs over the rows of one projection."""

    def __init__(self, model: ReadModel, statements: RowStatements) -> None:
        self.model = model
        self.statements = statements

    def apply(self, events: Sequence[Event]) -> Program[None]:
        """Load the rows the events concern, fold, and write what changed. Raises `ProjectionFailed`."""
        touched = self.model.touched(events)
        keys = list(dict.fromkeys(key for _, some in touched for key in some))
        if not keys:
            return
        rows = yield from self.load(keys)
        changes = self.model.fold(touched, rows)
        yield from self.write(
            [row for row in changes.values() if row is not None],
            [key for key, row in changes.items() if row is None],
        )

    def load(self, keys: Sequence[Key]) -> Program[dict[Key, dict[str, Any]]]:
        """The rows of these keys, as far as there are any."""
        found = yield from self._run(self.statements.select_keys(keys))
        rows: dict[Key, dict[str, Any]] = {}
        asked = set(keys)
        for row in self.statements.rows(found):
            key = self.model.key_of(row)
            if key not in asked:
                # Folding on as if there were no row would silently start it anew.
                raise ProjectionFailed(
                    f"projection {self.model.name!r}: table {self.model.table.name} has a row with the key {key!r}, "
                    "which is not what keys() gave for it. Let keys() give values as the columns' types return them",
                    projection=self.model.name,
                )
            rows[key] = row
        return rows

    def write(self, rows: Sequence[dict[str, Any]], deleted: Sequence[Key]) -> Program[None]:
        """Write rows and delete others."""
        try:
            statements = [*self.statements.put(rows), *self.statements.delete(deleted)]
        except Exception as error:  # a value its column's type cannot send
            raise self.model.refused(error) from error
        if statements:
            yield from self._run(statements)

    def select(self, equals: Mapping[str, Any]) -> Program[list[dict[str, Any]]]:
        """The rows whose columns have these values."""
        found = yield from self._run([self.statements.select(equals)])
        return self.statements.rows(found)

    def empty(self) -> Program[bool]:
        """Whether there are no rows."""
        return not (yield from self._run([self.statements.any_row()]))

    def _run(self, statements: list[Statement]) -> Program[list[Any]]:
        try:
            results = yield statements
        except Exception as error:
            if is_refusal(error):
                raise self.model.refused(error) from error
            raise
        return [row for rows in results for row in rows]


class Inline:
    """The inline projections of one store: programs that transactions run after they have appended.

    They read back what the transaction itself appended, so they see every event, whoever decided it.
    """

    def __init__(self, journal: Journal, tables: Sequence[TableRows], memory: Sequence[MemoryRows]) -> None:
        self._journal = journal
        self._tables = list(tables)
        self._memory = list(memory)
        self._topics = _union(rows.model for rows in tables)
        self._gated = _union(rows.model for rows in memory)
        self.gate = Gate(memory) if memory else None
        self.head = journal.head
        self.head_sql = journal.text.head
        self._likes: dict[type[Any], list[TableRows]] = {}

    def like(self, dialect: Any) -> Inline:
        """The same projections, with statements as the driver of a caller's SQLAlchemy connection takes them."""
        from keiro.stores.tables import RowStatements, like_dialect

        kind = type(dialect)
        if kind not in self._likes:
            theirs = like_dialect(dialect)
            self._likes[kind] = [TableRows(rows.model, RowStatements(rows.model, theirs)) for rows in self._tables]
        same = copy(self)
        same._tables = self._likes[kind]
        return same

    def wants(self, commands: Iterable[Command]) -> bool:
        """Whether rows in tables may change with these commands."""
        return _any_wanted(self._topics, commands)

    def gates(self, command: Command) -> bool:
        """Whether rows in memory may change with this command, so that the gate must be taken first."""
        return self.gate is not None and _any_wanted(self._gated, (command,))

    def project(self, after: int, *, memory: bool) -> Program[None]:
        """Fold what this transaction appended after the position `after`; with `memory`, the gate is held and rows in
        memory are folded too. Raises `ProjectionFailed`."""
        if self._tables:
            events = yield from self._journal.rest(after, self._topics)
            for rows in self._tables:
                yield from rows.apply(events)
        if memory and self.gate is not None:
            # From where each stands and not from `after`: others may have appended since it last looked.
            first = min(rows.position for rows in self._memory)
            events = yield from self._journal.rest(first, self._gated)
            if events:
                with self.gate.savepoint():
                    for kept in self._memory:
                        kept.apply(events, events[-1].__dict__["position"])

    @property
    def memory(self) -> bool:
        """Whether the current task holds the gate."""
        return self.gate is not None and self.gate.held


def _union(models: Iterable[ReadModel]) -> frozenset[str] | None:
    topics: set[str] = set()
    for model in models:
        if model.topics is None:
            return None
        topics |= model.topics
    return frozenset(topics)


def _any_wanted(topics: frozenset[str] | None, commands: Iterable[Command]) -> bool:
    if topics is None:
        return True
    for command in commands:
        if isinstance(command, Append) and command.alone:
            events = command.events
        elif isinstance(command, Start):
            events = (command.started,)
        else:
            return True  # what it writes is not known before it is decided
        if any(one.event.TOPIC in topics for one in events):
            return True
    return False


class SqlKept:
    """`Kept` in a SQL store. Projections with `store="memory"` have their rows in this process."""

    def __init__(self, store: SqlStore, models: Sequence[ReadModel], mapper: EventMapper) -> None:
        self._store = store
        self.journal = Journal(store.sql, mapper)
        self._tables: dict[str, TableRows] = {}
        self._memory: dict[str, MemoryRows] = {}
        for model in models:
            if model.in_memory:
                self._memory[model.name] = MemoryRows(model)
            else:
                from keiro.stores.tables import RowStatements, own_dialect

                self._tables[model.name] = TableRows(model, RowStatements(model, own_dialect(store.dialect)))
        tables = [rows for rows in self._tables.values() if rows.model.mode == "inline"]
        memory = [rows for rows in self._memory.values() if rows.model.mode == "inline"]
        self.inline = Inline(self.journal, tables, memory) if tables or memory else None
        self.gate = None if self.inline is None else self.inline.gate

    # Kept

    async def setup(self, *, create: bool) -> None:
        """See `Kept`."""
        if self._tables:
            await self._store.create_tables([rows.model for rows in self._tables.values()], create=create)
        for rows in self._tables.values():
            if rows.model.mode == "inline":
                if await self._tracked(BUILT + rows.model.name) is None:
                    await self._rebuild(rows)
            elif await self._tracked(rows.model.name) is None:
                await self._begin_following(rows)
        for kept in self._memory.values():
            if kept.model.mode == "inline":
                await self._build(kept)

    async def _begin_following(self, rows: TableRows) -> None:
        name = rows.model.name

        def begin() -> Program[bool]:
            empty = yield from rows.empty()
            built = yield from self.journal.tracked(BUILT + name)
            if not empty or built is not None:
                return False
            if (yield from self.journal.tracked(name)) is None:
                yield [(self.journal.text.track, (name, 0))]
            return True

        if not await self._store.transact(begin, locked=True):
            # Rows that were kept inline, or whose tracking is lost: folding all events onto them would count twice.
            await self._rebuild(rows)

    async def _build(self, kept: MemoryRows) -> None:
        while (at := kept.position) < (head := await self.head()):
            events = await self.read(at, head, kept.model.topics, PAGE)
            until = events[-1].__dict__["position"] if len(events) == PAGE else head
            await self.advance(kept.model, at, until, events)
            await asyncio.sleep(0)

    async def head(self) -> int:
        """See `Kept`."""
        return await self._store.query(lambda: self.journal.head())

    async def read(self, after: int, until: int, topics: frozenset[str] | None, limit: int) -> list[Event]:
        """See `Kept`."""
        return await self._store.query(lambda: self.journal.read(after, until, topics, limit))

    async def tracked(self, model: ReadModel) -> int | None:
        """See `Kept`."""
        if model.in_memory:
            return self._memory[model.name].committed_position
        return await self._tracked(model.name)

    async def _tracked(self, name: str) -> int | None:
        return await self._store.query(lambda: self.journal.tracked(name))

    async def advance(self, model: ReadModel, tracked: int, until: int, events: Sequence[Event]) -> bool:
        """See `Kept`."""
        if model.in_memory:
            return await self._advance_memory(self._memory[model.name], tracked, until, events)
        rows = self._tables[model.name]

        def program() -> Program[bool]:
            (moved,) = yield [(self.journal.text.advance, (until, model.name, tracked))]
            if moved:
                yield from rows.apply(events)
            return bool(moved)

        return await self._store.transact(program, locked=False)

    async def _advance_memory(self, kept: MemoryRows, tracked: int, until: int, events: Sequence[Event]) -> bool:
        gate = self.gate if kept.model.mode == "inline" else None
        if gate is None:
            if kept.position != tracked:
                return False
            kept.apply(events, until)
            return True
        async with gate.transaction() as snapshot:
            if kept.position != tracked:
                return False
            kept.apply(events, until)
            snapshot.accept()
        return True

    async def select(self, model: ReadModel, equals: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Kept`."""
        if model.in_memory:
            return self._memory[model.name].select(equals)
        return await self._store.query(lambda: self._tables[model.name].select(equals))

    # Rebuilding

    async def rebuild(self, model: ReadModel) -> Report:
        """See `Kept`."""
        if model.in_memory:
            return await self._rebuild_memory(self._memory[model.name])
        return await self._rebuild(self._tables[model.name])

    async def _rebuild(self, rows: TableRows) -> Report:
        model = rows.model
        follows = model.mode == "follow"
        # A follower's rows stand where its tracking does; inline ones at the journal's head.
        tracked = await self._tracked(model.name) if follows else None
        head = await self.head() if tracked is None else tracked
        bulk = Computed(model)
        await self._fold_bulk(head, model.topics, bulk.fold)
        # Compared a first time while others write: then the lock is held only for what differed or changed since.
        same = rows.statements.same
        # On the connection of the followers: the engine's own reads do not wait for a whole table.
        all_rows = await self._store.transact(lambda: rows.select({}), locked=False)
        kept = {model.key_of(row): row for row in all_rows}
        suspects = [key for key in {**kept, **bulk.rows} if not same(bulk.rows.get(key), kept.get(key))]

        def finish() -> Program[Report]:
            computed = Computed(model, bulk.rows)
            if tracked is None:
                events = yield from self.journal.rest(head, model.topics)
                at = yield from self.journal.head()
            else:
                at = max(head, (yield from self._hold_tracking(model.name)))
                events = yield from self.journal.read(head, at, model.topics, _ALL)
            again = list(dict.fromkeys([*suspects, *computed.fold(events)]))
            now = yield from rows.load(again)
            found = Differences(model, same)
            for key in again:
                found.compare(key, computed.rows.get(key), now.get(key))
            yield from rows.write(found.put, found.delete)
            own, other = (model.name, BUILT + model.name)[:: 1 if follows else -1]
            yield [(self.journal.text.untrack, (other,)), (self.journal.text.track, (own, at))]
            return found.report(len(computed.rows))

        return await self._store.transact(finish, locked=tracked is None)

    def _hold_tracking(self, name: str) -> Program[int]:
        """Where a follower stands; until the commit it goes no further."""
        while True:
            at = yield from self.journal.tracked(name)
            if at is None:
                return 0
            (held,) = yield [(self.journal.text.advance, (at, name, at))]
            if held:
                return at

    async def _rebuild_memory(self, kept: MemoryRows) -> Report:
        while True:
            computed = Computed(kept.model)
            until = kept.committed_position
            await self._fold_bulk(until, kept.model.topics, computed.fold)
            gate = self.gate if kept.model.mode == "inline" else None
            if gate is None:
                if kept.committed_position == until:
                    return kept.mend(computed.rows)
                continue
            async with gate.transaction() as snapshot:
                computed.fold(await self.read(until, kept.committed_position, kept.model.topics, _ALL))
                snapshot.accept()
                return kept.mend(computed.rows)

    async def _fold_bulk(
        self, until: int, topics: frozenset[str] | None, fold: Callable[[Sequence[Event]], object]
    ) -> None:
        """Fold the journal up to a position, page by page, letting others run in between."""
        at = 0
        while at < until:
            events = await self.read(at, until, topics, PAGE)
            fold(events)
            at = events[-1].__dict__["position"] if len(events) == PAGE else until
            await asyncio.sleep(0)

    async def rebuild_runs(self) -> Report:
        """See `Kept`."""
        head = await self.head()
        bulk = ComputedRuns({})
        await self._fold_bulk(head, None, bulk.fold)
        suspects: list[str] = []
        at = 0
        while page := await self._store.query(partial(self._runs_after, at)):
            suspects += [run.run_id for run, owned in page if mended(run, bulk.runs.get(run.run_id), owned) != run]
            at = page[-1][0].run_key

        def finish() -> Program[Report]:
            computed = ComputedRuns(bulk.runs)
            changed = computed.fold((yield from self.journal.rest(head, None)))
            again = list(dict.fromkeys([*suspects, *changed]))
            updated = unmended = 0
            for start in range(0, len(again), PAGE):
                names = again[start : start + PAGE]
                (found,) = yield [self.journal.sql.named(self.journal.text.runs_named, names)]
                writes: list[Statement] = []
                for row in found:
                    run, run_head = self.journal.sql.to_owned(row)
                    folded = computed.runs.get(run.run_id)
                    should_be = mended(run, folded, run_head.owner is not None)
                    if folded is None or not same_identity(run, folded):
                        unmended += 1
                    elif should_be != run:
                        updated += 1
                        writes.append((self.journal.text.mend_run, self._mending_values(should_be)))
                if writes:
                    yield writes
            return Report(updated=updated, unmended=unmended, verified=len(computed.runs) - updated - unmended)

        return await self._store.transact(finish, locked=True)

    async def rebuild_run_parents(self) -> Report:
        """See `Kept`."""
        head = await self.head()
        bulk = ComputedRunParents({}, {})
        await self._fold_bulk(head, TOPICS, bulk.fold)
        # Compared a first time while others write: then the lock is held only for what differed or changed since.
        kept: dict[Edge, int] = {}
        after: Edge = ("", "")
        while page := await self._store.query(partial(self._edges_after, after)):
            kept |= page
            after = next(reversed(page))
        suspects = [edge for edge in {**kept, **bulk.seqs} if kept.get(edge) != bulk.seqs.get(edge)]

        def finish() -> Program[Report]:
            computed = ComputedRunParents(bulk.started, bulk.seqs)
            changed = computed.fold((yield from self.journal.rest(head, TOPICS)))
            again = list(dict.fromkeys([*suspects, *changed]))
            inserted = updated = deleted = 0
            for start in range(0, len(again), PAGE):
                some = again[start : start + PAGE]
                text, sql = self.journal.text, self.journal.sql
                names = list(dict.fromkeys(name for edge in some for name in edge))
                (begun, *numbers) = yield [sql.named(text.begun, names), *((sql.text.edge, edge) for edge in some)]
                # Those that were collected since they were read are in no journal any more.
                there = {name for name, position in begun if computed.started.get(name) == int(position)}
                writes: list[Statement] = []
                for edge, rows in zip(some, numbers, strict=True):
                    seq = computed.seqs.get(edge) if there.issuperset(edge) else None
                    if seq is None and rows:
                        deleted += 1
                        writes.append((text.delete_edge, edge))
                    elif seq is not None and not rows:
                        inserted += 1
                        writes.append((text.insert_edge, (*edge, seq)))
                    elif seq is not None and int(rows[0][0]) != seq:
                        updated += 1
                        writes.append((text.renumber_edge, (seq, *edge)))
                if writes:
                    yield writes
            verified = max(len(computed.seqs) - inserted - updated, 0)
            return Report(inserted=inserted, updated=updated, deleted=deleted, verified=verified)

        return await self._store.transact(finish, locked=True)

    def _edges_after(self, edge: Edge) -> Program[dict[Edge, int]]:
        (rows,) = yield [(self.journal.text.edges_after, (*edge, PAGE))]
        return {(child, parent): int(seq) for child, parent, seq in rows}

    # Examining

    async def examine(self, after: int, *, fix: bool) -> tuple[list[Finding], int | None]:
        """See `Kept`."""
        text = self.journal.text

        def look() -> Program[tuple[list[str], int, int]]:
            (rows,) = yield [(text.runs_after, (after, BITE))]
            diagnoses = yield from self._diagnoses(rows)
            last = diagnoses[-1][0].run_key if diagnoses else after
            return [run.run_id for run, one in diagnoses if one.findings], len(diagnoses), last

        def examine(names: list[str]) -> Program[list[Finding]]:
            (rows,) = yield [self.journal.sql.named(text.runs_named, names)]
            found: list[Finding] = []
            writes: list[Statement] = []
            for run, diagnosis in (yield from self._diagnoses(rows)):
                found += diagnosis.findings
                if diagnosis.run is not None:
                    writes.append((text.mend_run, self._mending_values(diagnosis.run)))
                if diagnosis.version is not None:
                    writes.append((text.mend_head, (diagnosis.version, run.run_key)))
                writes += [change_statement(self.journal.sql, change) for change in diagnosis.changes]
            if fix and writes:
                yield writes
            return found

        suspects, count, last = await self._store.query(look)
        # What was read without the lock may have been written to in between: only what is still so under it counts.
        found = await self._store.transact(lambda: examine(suspects), locked=True) if suspects else []
        return found, last if count == BITE else None

    def _diagnoses(self, rows: Sequence[Any]) -> Program[list[tuple[Run, Diagnosis]]]:
        sql, text = self.journal.sql, self.journal.text
        owned = [sql.to_owned(row) for row in rows]
        if not owned:
            return []
        keys, names = [run.run_key for run, _ in owned], [run.run_id for run, _ in owned]
        workers, children, journal, clocks, deferreds = yield [
            (text.worker_keys, ()),
            sql.named(text.as_children, names),
            sql.named(text.of_runs, keys),
            sql.named(text.clocks_of, names),
            sql.named(text.deferreds_of, names),
        ]
        listed = {int(row[0]) for row in workers}
        parents = {name: parent for name, parent, *_ in children}
        as_children = {name: sql.to_child(tuple(row)) for name, _, *row in children if row[0] is not None}
        events: dict[str, list[Event]] = {name: [] for name in names}
        for event in decoded(self.journal.mapper, map(sql.to_stored, journal)):
            events[event.originator_id].append(event)
        kept: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
            table: {name: {} for name in names} for table in COLUMNS
        }
        for table, found in ((CLOCKS, clocks), (DEFERREDS, deferreds)):
            for name, first, *values in found:
                row = dict(zip(COLUMNS[table][1:], values, strict=True))
                for column, value in row.items():
                    if value is not None:
                        row[column] = int(value) if column.endswith("_ms") else value
                if table == DEFERREDS:
                    row["exit_json"] = sql.unseal(row["exit_json"])
                kept[table][name][first] = row
        return [
            (
                run,
                diagnose(
                    Examined(
                        run,
                        head,
                        head.owner is None or head.owner in listed,
                        events[run.run_id],
                        kept[CLOCKS][run.run_id],
                        kept[DEFERREDS][run.run_id],
                        parents.get(run.run_id),
                        as_children.get(run.run_id),
                    )
                ),
            )
            for run, head in owned
        ]

    def _runs_after(self, run_key: int) -> Program[list[tuple[Run, bool]]]:
        (rows,) = yield [(self.journal.text.runs_after, (run_key, PAGE))]
        owned = map(self.journal.sql.to_owned, rows)
        return [(run, head.owner is not None) for run, head in owned]

    def _mending_values(self, run: Run) -> list[Any]:
        values = dict(zip(RUN_COLUMNS[1:], self.journal.sql.run_values(run), strict=True))
        return [*(values[name] for name in FOLDED_COLUMNS), run.run_key]
