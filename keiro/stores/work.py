"""One transaction of the journal in SQL: load what the commands need, decide them in order, write it all at once.

Commands of one batch decide against the batch's running state. What all of them ask first is loaded in one round trip,
and what they write goes in another, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from keiro.decisions import (
    Above,
    Acted,
    Appended,
    Below,
    Command,
    Completions,
    Deciding,
    Decision,
    EndedChildren,
    Existing,
    InputDiffers,
    LastEdge,
    Links,
    Loaded,
    Need,
    Newest,
    Numbered,
    One,
    Outcome,
    Rounds,
    Stored,
    Write,
    decide,
    first_needs,
)
from keiro.identity import RunId, parse_run_id
from keiro.projections.run_parents import edge_of
from keiro.projections.waits import SEALED, TIMESTAMPS, Change, Forget, Put, timestamp
from keiro.projections.waits import Set as SetColumns
from keiro.rows import Head, Run
from keiro.stores.sets import Last, deleted, inserted, updated

if TYPE_CHECKING:
    from keiro.stores.sql import Program, Row, Sql, Statement


def execute(sql: Sql, commands: Sequence[Command]) -> Program[list[Decision]]:
    """Decide and write commands one after the other; the decisions, with the keys that rows of new runs were given."""
    work = _Work(sql)
    if sql.remote and len(commands) > 1:
        yield from work.foresee(commands)
    else:
        yield from work.load([need for command in commands for need in first_needs(command)])
    decisions: list[Decision] = []
    for command in commands:
        deciding = decide(command)
        try:
            need = next(deciding)
            while True:
                if not work.has(need):
                    yield from work.load([need])
                need = deciding.send(work.answer(need))
        except StopIteration as stop:
            decision: Decision = stop.value
        if work.is_gone(decision):
            yield from work.flush()  # a run that was collected in this batch begins anew
        work.apply(decision)
        decisions.append(decision)
    yield from work.flush(final=True)
    return [work.keyed(decision) for decision in decisions]


def consider(sql: Sql, commands: Sequence[Command]) -> Program[list[Outcome]]:
    """What each command would do by itself, with nothing written."""
    outcomes: list[Outcome] = []
    work = _Work(sql)
    yield from work.foresee(commands)
    for command in commands:
        deciding = decide(command)
        try:
            need = next(deciding)
            while True:
                if not work.has(need):
                    yield from work.load([need])
                need = deciding.send(work.answer(need))
        except StopIteration as stop:
            outcomes.append(stop.value.outcome)
    return outcomes


_READ_BACK: Final = (Completions, EndedChildren, Below, Above, Numbered, Acted, Rounds, Links)


class _Work:
    def __init__(self, sql: Sql) -> None:
        self._sql = sql
        self._runs: dict[str, tuple[Run, Head] | None] = {}
        self._newest: dict[str, str | None] = {}
        self._present: dict[tuple[str, bytes], Stored | None] = {}
        self._overtaken: dict[tuple[str, int], bool] = {}
        self._user_events: dict[str, int] = {}  # the version of the newest event of the user's aggregate, of this batch
        self._listed: dict[Need, Any] = {}
        self._last_edge: int | None = None
        self._writes: list[Write] = []
        self._gone: dict[str, Run] = {}  # runs that are to be deleted, newest rounds first
        self._freed: list[str] = []  # those of them that runs which stay refer to
        self._keys: dict[str, int] = {}

    # Loading

    def has(self, need: Need) -> bool:
        """Whether the answer is known."""
        match need:
            case One(run_id, event_id, after):
                if run_id not in self._runs:
                    return False
                if self._runs[run_id] is None:
                    return True
                if event_id is not None and (run_id, event_id) not in self._present:
                    return False
                return after is None or (run_id, after) in self._overtaken
            case Newest(lineage_id):
                return lineage_id in self._newest
            case LastEdge():
                return self._last_edge is not None
        return False

    def foresee(self, commands: Sequence[Command]) -> Program[None]:
        """Load what the decisions will ask for, one question of all commands in each round trip.

        They are tried, on what is there before any of them, and forgotten: those that count are made in order, and ask
        again where an earlier command has changed what they have to know.
        """
        yield from self.load(list(dict.fromkeys(need for command in commands for need in first_needs(command))))
        asking = [(deciding, next(deciding)) for deciding in map(decide, commands)]
        while asking:
            asking = [(deciding, need) for deciding, need in asking if isinstance(need, One | Newest | LastEdge)]
            yield from self.load([need for _, need in asking])
            further: list[tuple[Deciding, Need]] = []
            for deciding, need in asking:
                with suppress(StopIteration):
                    further.append((deciding, deciding.send(self.answer(need))))
            asking = further

    def load(self, needs: Sequence[Need]) -> Program[None]:
        """Load what is not known yet."""
        if any(isinstance(need, _READ_BACK) for need in needs) or (LastEdge() in needs and self._gone):
            yield from self.flush()  # what the batch has written so far is part of the answer
        text = self._sql.text
        runs: dict[str, None] = {}
        events: dict[tuple[str, bytes], None] = {}
        overtaken: dict[tuple[str, int], None] = {}
        newest: dict[str, None] = {}
        listed: dict[Need, Statement] = {}
        for need in needs:
            match need:
                case _ if self.has(need):
                    pass
                case One(run_id, event_id, after):
                    if run_id not in self._runs:
                        runs[run_id] = None
                    if event_id is not None and (run_id, event_id) not in self._present:
                        events[run_id, event_id] = None
                    if after is not None:
                        overtaken[run_id, after] = None
                case Newest(lineage_id):
                    newest[lineage_id] = None
                    if lineage_id not in self._runs:
                        runs[lineage_id] = None
                case Completions(run_id):
                    listed[need] = (text.completions, (run_id,))
                case EndedChildren(lineage_id):
                    of = parse_run_id(lineage_id)
                    listed[need] = (text.ended_children, (of.key, of.workflow))
                case Below(lineage_id):
                    listed[need] = (text.below, (lineage_id,))
                case Above(lineage_id):
                    listed[need] = (text.above, (lineage_id,))
                case Numbered():
                    listed[need] = (text.edge, (need.child_id, need.parent_id))
                case LastEdge():
                    listed[need] = (text.last_edge, ())
                case Rounds(lineage_id, most):
                    listed[need] = (text.rounds, (lineage_id, most))
                case Links(child):
                    listed[need] = (text.links, (child,))
                case Acted(run_id, after):
                    listed[need] = (text.acted, (run_id, after))
        # Equal statements stand together: a store may make one of them.
        statements: list[Statement] = [(text.load, (run_id,)) for run_id in runs]
        statements += [(text.newest, (lineage_id,)) for lineage_id in newest]
        statements += [(text.load_event, key) for key in events]
        statements += [(text.overtaken, key) for key in overtaken]
        statements += listed.values()
        if not statements:
            return
        results = iter((yield statements))
        for run_id in runs:
            self._know(run_id, next(results))
        for lineage_id in newest:
            last = next(results)
            found = lineage_id if self._runs[lineage_id] is not None else None
            if last:
                run, head = self._sql.to_owned(last[0])
                found = run.run_id
                # What the batch has made of the run counts, not what was loaded again.
                self._runs.setdefault(found, (run, head))
            self._newest.setdefault(lineage_id, found)
        for key in events:
            stored = next(results)
            self._present.setdefault(key, self._sql.to_stored(stored[0]) if stored else None)
        for run_id, after in overtaken:
            since = self._user_events.get(run_id, 0) > after
            self._overtaken[run_id, after] = bool(next(results)) or since
        for need in listed:
            if isinstance(need, LastEdge):
                self._last_edge = int(next(results)[0][0])
            else:
                self._listed[need] = self._list(need, next(results))

    def _list(self, need: Need, rows: Sequence[Row]) -> Any:
        match need:
            case Completions():
                return [(row[0], self._sql.unseal(row[1])) for row in rows]
            case Links(child):
                return [(str(RunId(name, child)), str(RunId(*parent))) for name, *parent in rows]
            case EndedChildren() | Below() | Rounds():
                return [self._sql.to_run(row) for row in rows]
            case Above():
                return [(row[0], row[1]) for row in rows]
            case Numbered():
                return int(rows[0][0]) if rows else None
        return bool(rows)

    def _know(self, run_id: str, rows: Sequence[Row]) -> None:
        # What the batch has made of the run counts, not what was loaded again.
        if run_id not in self._runs:
            self._runs[run_id] = self._sql.to_owned(rows[0]) if rows else None

    def answer(self, need: Need) -> Any:
        """What a decision is told."""
        match need:
            case One(run_id, event_id, after):
                return self._of(
                    run_id,
                    None if event_id is None else self._present.get((run_id, event_id)),
                    after is not None and self._overtaken.get((run_id, after), False),
                )
            case Newest(lineage_id):
                newest = self._newest[lineage_id]
                return None if newest is None else self._of(newest, None, False)
            case LastEdge():
                return self._last_edge
        return self._listed.pop(need)

    def _of(self, run_id: str, present: Stored | None, overtaken: bool) -> Loaded | None:
        known = self._runs[run_id]
        return None if known is None else Loaded(known[0], known[1], present, overtaken)

    # Writing

    def is_gone(self, decision: Decision) -> bool:
        """Whether a run that is to be deleted is born again."""
        return any(write.run_id in self._gone for write in decision.writes)

    def apply(self, decision: Decision) -> None:
        """Let the commands that follow see what was decided."""
        for run in decision.gone:
            self._runs[run.run_id] = None
            self._gone[run.run_id] = run
        if decision.gone:
            self._last_edge = None  # it may have gone with one of them
            newest, oldest = decision.gone[0], decision.gone[-1]
            gone = {run.run_id for run in decision.gone}
            if self._newest.get(newest.lineage_id) in gone:
                self._newest[newest.lineage_id] = None
            for name, known in self._runs.items():
                # Else it would be taken for a child of the next run with this id, in this very batch.
                if known is not None and known[0].parent_run_id in gone:
                    self._runs[name] = (replace(known[0], parent_run_id=None), known[1])
            # Whom round 0 has borne refers to it; to the others, only the round after the last of them.
            self._freed.append((newest if oldest.round_ordinal else oldest).run_id)
        for write in decision.writes:
            run_id = write.run_id
            self._runs[run_id] = (write.run, write.head)
            if write.before is None:
                self._newest[write.run.lineage_id] = run_id
            first = write.head.version - len(write.events) + 1
            for version, one in enumerate(write.events, first):
                stored = Stored(
                    0, write.run.run_key, version, one.event_id, one.event.TOPIC, one.payload, write.at_ms, run_id
                )
                self._present[run_id, one.event_id] = stored
                if self._last_edge is not None and (edge := edge_of(one.event, run_id)) is not None:
                    self._last_edge = edge.seq
                if ":" in one.event.TOPIC:
                    self._user_events[run_id] = version
                    self._overtaken = {key: True if key[0] == run_id else seen for key, seen in self._overtaken.items()}
            self._writes.append(write)

    def flush(self, *, final: bool = False) -> Program[None]:
        """Write what was decided since the last time: of each run its events, and once how it stands after them."""
        gone, self._gone = self._gone, {}
        freed, self._freed = self._freed, []
        yield from self._flush(final=final and not gone)
        if gone:
            text = self._sql.text
            # Children that go on do so as if they had been started alone, and a round as if it were the first.
            statements = [(text.free, (name,)) for name in freed]
            yield [*statements, *((text.delete_run, (run.run_key,)) for run in gone.values())]

    def _flush(self, *, final: bool) -> Program[None]:
        writes, self._writes = self._writes, []
        if not writes:
            return
        text, sql = self._sql.text, self._sql
        first: dict[str, Write] = {}
        last: dict[str, Write] = {}
        for write in writes:
            first.setdefault(write.run_id, write)
            last[write.run_id] = write
        births = [run_id for run_id, write in first.items() if write.before is None]
        takes = {write.run_id for write in writes if write.takes}
        known = {
            run_id: last[run_id].run.run_key or self._keys[run_id]
            for run_id, write in first.items()
            if write.before is not None
        }
        # Equal statements stand together: a store may make one of them.
        statements: list[Statement] = [(text.insert_run, sql.run_values(last[run_id].run)) for run_id in births]
        heads = [(run_id, last[run_id].head) for run_id in births]
        statements += [(text.insert_born_head, (name, head.version, head.owner, head.epoch)) for name, head in heads]
        for run_id, key in known.items():
            head = last[run_id].head
            text_of_head = text.take_head if run_id in takes else text.update_head
            statements.append((text_of_head, (head.version, head.owner, key)))
        for run_id, key in known.items():
            if last[run_id].run is not first[run_id].before:
                *values, _ = sql.changed_values(last[run_id].run)
                statements.append((text.update_run, [*values, key]))
        for run_id, key in known.items():
            before, run = first[run_id].before, last[run_id].run
            if before is not None and before.parent_run_id != run.parent_run_id:
                statements.append((text.link_run, (run.parent_run_id, run.on_cancel, key)))
        appended: list[Statement] = []
        born: list[Statement] = []
        for write in writes:
            run_id = write.run_id
            for version, one in enumerate(write.events, write.head.version - len(write.events) + 1):
                event = (version, one.event_id, one.event.TOPIC, sql.seal(one.payload), write.at_ms)
                if run_id in known:
                    appended.append((text.insert_event, (known[run_id], *event)))
                else:
                    born.append((text.insert_born_event, (run_id, *event)))
        statements += appended
        statements += born  # after the events of those who bore them
        statements += self._changes(writes)
        results = yield Last(statements) if final else statements
        for place, run_id in enumerate(births):
            self._keys[run_id] = int(results[place][0][0])

    def _changes(self, writes: Sequence[Write]) -> list[Statement]:
        """The changes of other rows, equal statements together; those of the same rows stay in order."""
        waves: list[tuple[str, list[Statement]]] = []
        latest: dict[tuple[Any, ...], int] = {}
        for write in writes:
            for change in write.changes():
                statement = change_statement(self._sql, change)
                # All clocks of a run are addressed by the first two columns of their key.
                rows = (change.table, *list(change.key.values())[:2])
                after = latest.get(rows, -1)
                for at in range(after + 1, len(waves)):
                    if waves[at][0] == statement[0]:
                        break
                else:
                    at = len(waves)
                    waves.append((statement[0], []))
                waves[at][1].append(statement)
                latest[rows] = at
        return [statement for _, wave in waves for statement in wave]

    def keyed(self, decision: Decision) -> Decision:
        """The decision with the keys of runs that were born, by it or earlier in the batch."""
        if not self._keys:
            return decision
        writes = tuple(
            write if write.run.run_key else replace(write, run=self._keyed(write.run)) for write in decision.writes
        )
        outcome, found = decision.outcome, decision.found
        if isinstance(outcome, Appended | Existing | InputDiffers) and outcome.run is not None:
            outcome = replace(outcome, run=self._keyed(outcome.run))
        return replace(decision, outcome=outcome, writes=writes, found=None if found is None else self._keyed(found))

    def _keyed(self, run: Run) -> Run:
        return run if run.run_key else replace(run, run_key=self._keys[run.run_id])


def change_statement(sql: Sql, change: Change) -> Statement:
    """A change of a row as a statement."""
    keys = tuple(change.key)
    if isinstance(change, Forget):
        return _change_text(sql.schema, "forget", change.table, keys, (), None), tuple(change.key.values())
    columns = tuple(change.values)
    values = [_value(sql, name, value) for name, value in change.values.items()]
    if isinstance(change, Put):
        return _change_text(sql.schema, "put", change.table, keys, columns, None), (*change.key.values(), *values)
    assert isinstance(change, SetColumns)
    statement = _change_text(sql.schema, "set", change.table, keys, columns, change.unless_set)
    return statement, (*values, *change.key.values())


def _value(sql: Sql, name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in SEALED:
        return sql.seal(value)
    return timestamp(value) if name in TIMESTAMPS else value


@lru_cache(maxsize=64)
def _change_text(
    schema: str, verb: str, table: str, keys: tuple[str, ...], columns: tuple[str, ...], unless_set: str | None
) -> str:
    name = f"{schema}{table}"
    where = " AND ".join(f"{column} = ?" for column in keys)
    condition = ""
    if verb == "forget":
        one = f"DELETE FROM {name} WHERE {where}"
    elif verb == "put":
        marks = ", ".join("?" * len((*keys, *columns)))
        one = f"INSERT INTO {name} ({', '.join((*keys, *columns))}) VALUES ({marks}) ON CONFLICT DO NOTHING"
    else:
        condition = "" if unless_set is None else f" AND {{}}{unless_set} IS NULL"
        sets = ", ".join(f"{column} = ?" for column in columns)
        one = f"UPDATE {name} SET {sets} WHERE {where}{condition.format('')}"
    if not schema:
        return one
    match verb:
        case "forget":
            return deleted(one, name, keys)
        case "put":
            return inserted(one, name, (*keys, *columns), " ON CONFLICT DO NOTHING")
    return updated(one, name, columns, keys, condition.format("o."))
