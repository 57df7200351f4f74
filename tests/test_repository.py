"""Runs through the library's own repository, and snapshots. The journal is a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any

import msgspec
import pytest
from eventsourcing.application import AggregateNotFoundError, Repository
from eventsourcing.persistence import EventStore
from msgspec import Raw

from keiro.commands import event
from keiro.decisions import Stored
from keiro.errors import InvalidCall, RunNotFound, StoreError
from keiro.events import Event, StepRecorded, WorkflowStarted
from keiro.mapper import EventMapper
from keiro.repository import MemorySnapshots, RunRepository, SnapshotRow, repository
from keiro.run import WorkflowRun, new_events, workflow_of
from keiro.snapshots import RunSnapshot
from tests.aggregates import AT_MS, RUN, Basket, history
from tests.conftest import spelled


class Journal:
    """The events of one run as stored rows, and what was read of them."""

    def __init__(self, mapper: EventMapper, run_id: str = RUN) -> None:
        self.mapper = mapper
        self.run_id = run_id
        self.rows: list[Stored] = []
        self.reads: list[tuple[Any, ...]] = []
        workflow = run_id.removeprefix("wf:").split("-")[0]
        self.append(WorkflowStarted(workflow=workflow, key="7", input=Raw(b"{}")))

    def append(self, *events: Event) -> None:
        for one in events:
            version = len(self.rows) + 1
            topic, payload = self.mapper.encode(one)
            self.rows.append(Stored(version, 1, version, b"", topic, payload, AT_MS + version))

    def read(self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None) -> Sequence[Stored]:
        self.reads.append((run_id, gt, lte, desc, limit))
        rows = self.rows if run_id == self.run_id else []
        found = [row for row in rows if row.version > (gt or 0) and (lte is None or row.version <= lte)]
        return (found[::-1] if desc else found)[:limit]


def add(sku: str) -> Event:
    added: Event = Basket.ItemAdded(sku=sku)  # type: ignore[attr-defined]
    return added


@pytest.fixture
def mapper() -> EventMapper:
    return EventMapper([workflow_of(Basket)])


@pytest.fixture
def journal(mapper: EventMapper) -> Journal:
    return Journal(mapper)


@pytest.fixture
def snapshots() -> MemorySnapshots:
    return MemorySnapshots()


@pytest.fixture
def baskets(mapper: EventMapper, journal: Journal, snapshots: MemorySnapshots) -> RunRepository:
    return repository(journal.read, mapper, snapshots)


def test_the_repository_folds_the_journal(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"), StepRecorded(step="s", result=Raw(b"1")), add("b"))

    basket = baskets.get(RUN)

    assert isinstance(baskets, Repository)
    assert type(basket) is Basket
    assert (basket.items, basket.version, basket.id) == (["a", "b"], 4, RUN)
    assert basket.modified_on == datetime(2023, 11, 14, 22, 13, 20, 4000, tzinfo=UTC)
    assert RUN in baskets


def test_the_repository_folds_up_to_a_version(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"), add("b"))

    assert [baskets.get(RUN, version=version).items for version in (1, 2, 3)] == [[], ["a"], ["a", "b"]]


def test_a_run_that_is_not_there_is_not_found(baskets: RunRepository) -> None:
    with pytest.raises(RunNotFound, match="there is no run 'wf:basket-8'") as caught:
        baskets.get("wf:basket-8")

    assert isinstance(caught.value, AggregateNotFoundError)
    assert "wf:basket-8" not in baskets


def test_commands_may_be_called_on_what_the_repository_gives(baskets: RunRepository) -> None:
    basket = baskets.get(RUN)

    basket.add("a")

    [added] = basket.collect_events()
    assert (added.originator_id, added.originator_version, added.sku) == (RUN, 2, "a")


def test_a_journal_with_a_gap_is_not_folded(baskets: RunRepository, journal: Journal) -> None:
    """F50."""
    journal.append(add("a"), add("b"))
    del journal.rows[1]

    with pytest.raises(StoreError, match="nothing is folded"):
        baskets.get(RUN)


def test_a_journal_without_its_beginning_is_not_folded(baskets: RunRepository, journal: Journal) -> None:
    """F50."""
    journal.append(add("a"))
    del journal.rows[0]

    with pytest.raises(StoreError, match="nothing is folded"):
        baskets.get(RUN)


def test_another_projector_gets_the_events(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"))

    topics = baskets.get(RUN, projector_func=lambda _, events: [one.TOPIC for one in events])

    assert topics == ["WorkflowStarted", "basket:ItemAdded"]


def test_the_librarys_own_event_store_and_projector_read_the_same(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"), StepRecorded(step="s", result=Raw(b"1")))
    store = EventStore(baskets.event_store.mapper, baskets.event_store.recorder)

    assert Repository(store).get(RUN) == baskets.get(RUN)
    assert list(store.get(RUN)) == list(baskets.event_store.get(RUN))
    assert [one.originator_version for one in store.get(RUN, gt=1, lte=3, desc=True, limit=1)] == [3]


def test_the_journal_is_not_written_through_the_repository(baskets: RunRepository) -> None:
    with pytest.raises(InvalidCall, match=r"engine\.command"):
        baskets.event_store.put(history()[:1])


def test_a_run_of_a_function_or_of_an_unknown_class_has_no_state(journal: Journal) -> None:
    mapper = EventMapper()
    journal = Journal(mapper, "wf:unknown-7")
    journal.rows.append(Stored(2, 1, 2, b"", "unknown:Moved", "{}", AT_MS))
    snapshots = MemorySnapshots()
    runs = repository(journal.read, mapper, snapshots)
    snapshots.insert([SnapshotRow("wf:unknown-7", 2, "unknown", stored_state({"x": 1}))])

    for run in (runs.get("wf:unknown-7"), runs.get("wf:unknown-7", version=1)):
        assert (type(run), vars(run)) == (WorkflowRun, {})


# Snapshots


def stored_state(state: dict[str, Any], **fields: Any) -> str:
    times = {"created_at_ms": AT_MS, "modified_at_ms": AT_MS, "taken_at_ms": AT_MS}
    return json.dumps({"state": state, **times, **fields})


def test_a_fold_begins_at_the_newest_snapshot(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"), add("b"))
    taken = baskets.take_snapshot(RUN)
    journal.append(add("c"))
    before = baskets.get(RUN, version=2)
    journal.reads.clear()

    basket = baskets.get(RUN)

    assert isinstance(taken, RunSnapshot)
    assert journal.reads == [(RUN, 3, None, False, None)]
    assert (basket.items, basket.version) == (["a", "b", "c"], 4)
    assert (before.items, before.version) == (["a"], 2)
    assert basket == repository(journal.read, journal.mapper).get(RUN)


def test_a_snapshot_keeps_what_a_run_is(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"))
    whole = baskets.get(RUN)

    baskets.take_snapshot(RUN)
    restored = baskets.get(RUN)

    assert restored == whole
    assert (restored.id, restored.version) == (whole.id, whole.version)
    assert (restored.created_on, restored.modified_on) == (whole.created_on, whole.modified_on)
    restored.add("b")
    assert baskets.get(RUN).items == ["a"]


def test_a_snapshot_is_readable_json_of_the_users_fields(
    baskets: RunRepository, journal: Journal, snapshots: MemorySnapshots
) -> None:
    journal.append(add("a"))

    baskets.take_snapshot(RUN)

    [row] = snapshots.select(RUN, None, None, True, None)
    assert (row.originator_id, row.originator_version, row.topic) == (RUN, 2, "basket")
    document = json.loads(row.state)
    assert document.pop("taken_at_ms") > AT_MS
    assert document == {"state": {"items": ["a"]}, "created_at_ms": AT_MS + 1, "modified_at_ms": AT_MS + 2}


def test_a_snapshot_of_an_older_version_may_be_taken(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"), add("b"))

    baskets.take_snapshot(RUN, version=2)

    assert baskets.get(RUN).items == ["a", "b"]
    assert journal.reads[-1][1] == 2


def test_the_same_snapshot_may_be_taken_again(baskets: RunRepository, snapshots: MemorySnapshots) -> None:
    for _ in range(2):
        baskets.take_snapshot(RUN)

    assert len(snapshots.select(RUN, None, None, False, None)) == 1


def test_snapshots_are_selected_by_version(snapshots: MemorySnapshots) -> None:
    snapshots.insert([SnapshotRow(RUN, version, "basket", "{}") for version in (3, 1, 2)])

    def versions(*args: Any) -> list[int]:
        return [row.originator_version for row in snapshots.select(RUN, *args)]

    assert versions(None, None, False, None) == [1, 2, 3]
    assert versions(1, 2, False, None) == [2]
    assert versions(None, 2, True, 1) == [2]
    assert snapshots.select("wf:basket-8", None, None, False, None) == []


def test_the_mechanism_of_the_library_takes_and_puts_snapshots_too(baskets: RunRepository, journal: Journal) -> None:
    journal.append(add("a"))
    basket = baskets.get(RUN)
    assert baskets.snapshot_store is not None

    baskets.snapshot_store.put([type(basket).Snapshot.take(basket)])

    [found] = baskets.snapshot_store.get(RUN, desc=True, limit=1)
    one, other = found.mutate(None), found.mutate(None)  # type: ignore[attr-defined]
    one.add("b")
    assert other == basket
    with pytest.raises(InvalidCall, match="not a snapshot of a run"):
        baskets.snapshot_store.put([add("a")])


def test_without_a_place_for_snapshots_none_is_taken(mapper: EventMapper, journal: Journal) -> None:
    with pytest.raises(InvalidCall, match="no place for snapshots"):
        repository(journal.read, mapper).take_snapshot(RUN)


@pytest.mark.parametrize(
    "unusable",
    [
        "",
        "{",
        "[]",
        stored_state({}),
        stored_state({"other": 1}),
        stored_state({"items": ["x"]}, class_version=2),
        '{"state":{"items":["x"]}}',
    ],
    ids=["empty", "cut off", "no object", "no field", "another field", "newer class", "no times"],
)
def test_a_snapshot_that_does_not_fit_the_code_of_today_is_passed_over(
    unusable: str, baskets: RunRepository, journal: Journal, snapshots: MemorySnapshots
) -> None:
    journal.append(add("a"))
    snapshots.insert([SnapshotRow(RUN, 2, "basket", unusable)])

    assert baskets.get(RUN).items == ["a"]


class Colour(Enum):
    """A value without a JSON form of its own."""

    RED = "red"


class Level(StrEnum):
    """A value that equals its JSON form."""

    HIGH = "high"


class Point(msgspec.Struct):
    """A value with a JSON form that is no longer of its type."""

    x: int


@dataclass
class Pair:
    """The same."""

    left: int


class Rich(WorkflowRun, name="rich"):
    """State of many types, declared in the class."""

    total: Decimal = Decimal(0)
    when: datetime | None = None
    tags: set[str] = set()  # noqa: RUF012
    points: dict[int, Point] = {}  # noqa: RUF012
    pairs: tuple[Pair, ...] = ()
    colour: Colour = Colour.RED
    level: Level = Level.HIGH
    raw: bytes = b""
    nested: Inner | None = None

    class Inner(msgspec.Struct):
        """A class that only the class around it names."""

        y: int

    def __init__(self) -> None:
        self.undeclared = {"n": [1, 2.5, None, True, "x"]}

    @event("Filled")
    def fill(self, when: datetime) -> None:
        self.total = Decimal("1.50")
        self.when = when
        self.tags = {"b", "a"}
        self.points = {3: Point(4)}
        self.pairs = (Pair(1),)
        self.raw = b"\x00\xff"
        self.nested = self.Inner(5)

    async def execute(self) -> None: ...


def rich_repository() -> tuple[RunRepository, Journal]:
    mapper = EventMapper([workflow_of(Rich)])
    journal = Journal(mapper, "wf:rich-7")
    journal.append(*new_events(Rich(), Rich.fill, (datetime(2024, 1, 1, tzinfo=UTC),), {}))
    return repository(journal.read, mapper, MemorySnapshots()), journal


def test_declared_fields_are_restored_by_their_annotation() -> None:
    runs, journal = rich_repository()
    whole = runs.get("wf:rich-7")

    runs.take_snapshot("wf:rich-7")
    restored = runs.get("wf:rich-7")

    assert journal.reads[-1][1] == 2
    assert restored == whole
    assert [type(value) for value in vars(restored).values()] == [type(value) for value in vars(whole).values()]


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        {1},
        {1: "a"},
        {"a": (1,)},
        {Level.HIGH: 1},
        [Level.HIGH],
        Level.HIGH,
        Colour.RED,
        Decimal(1),
        datetime(2024, 1, 1, tzinfo=UTC),
        Point(1),
        Pair(1),
        b"x",
        float("nan"),
        object(),
        "a\0b",
    ],
    ids=spelled,
)
def test_a_state_that_would_not_be_restored_exactly_is_not_taken(value: Any) -> None:
    class Loose(WorkflowRun, name="loosely"):
        def __init__(self) -> None:
            self.thing = value

        async def execute(self) -> None: ...

    with pytest.raises(InvalidCall, match=r"no snapshot of this .*Loose: field 'thing'.*declare its type"):
        RunSnapshot.take(Loose())


class Migrated(WorkflowRun, name="migrated"):
    """An aggregate class whose state has changed twice."""

    class_version = 3

    amounts: list[Decimal] = []  # noqa: RUF012

    @staticmethod
    def upcast_v1_v2(state: dict[str, Any]) -> None:
        state["amounts"] = [state.pop("amount")]

    @staticmethod
    def upcast_v2_v3(state: dict[str, Any]) -> None:
        state["amounts"] = [f"{amount}.5" for amount in state["amounts"]]

    async def execute(self) -> None: ...


@pytest.mark.parametrize(
    ("state", "version", "amounts"),
    [
        ({"amount": 1}, None, [Decimal("1.5")]),
        ({"amounts": [1, 2]}, 2, [Decimal("1.5"), Decimal("2.5")]),
        ({"amounts": ["3"]}, 3, [Decimal(3)]),
        ({"amounts": ["3"]}, 1, []),
        ({"amounts": ["no number"]}, 3, []),
    ],
    ids=["first", "second", "third", "upcast fails", "does not fit"],
)
def test_the_snapshot_of_an_older_class_is_upcast_or_passed_over(
    state: dict[str, Any], version: int | None, amounts: list[Decimal]
) -> None:
    mapper = EventMapper([workflow_of(Migrated)])
    snapshots = MemorySnapshots()
    fields = {} if version is None else {"class_version": version}
    snapshots.insert([SnapshotRow("wf:migrated-7", 1, "migrated", stored_state(state, **fields))])

    runs = repository(Journal(mapper, "wf:migrated-7").read, mapper, snapshots)

    assert runs.get("wf:migrated-7").amounts == amounts


def test_a_snapshot_is_restored_by_the_engines_own_class() -> None:
    def define() -> type[WorkflowRun]:
        class Twice(WorkflowRun, name="twice"):
            async def execute(self) -> None: ...

        return Twice

    own, newer = define(), define()
    mapper = EventMapper([workflow_of(own)])
    runs = repository(Journal(mapper, "wf:twice-7").read, mapper, MemorySnapshots())

    assert type(runs.get("wf:twice-7")) is own
    runs.take_snapshot("wf:twice-7")
    assert type(runs.get("wf:twice-7")) is own
    assert EventMapper().aggregate("twice") is newer


def test_a_snapshot_says_the_version_of_its_class() -> None:
    mapper = EventMapper([workflow_of(Migrated)])
    snapshots = MemorySnapshots()
    runs = repository(Journal(mapper, "wf:migrated-7").read, mapper, snapshots)

    runs.take_snapshot("wf:migrated-7")

    [row] = snapshots.select("wf:migrated-7", None, None, False, None)
    assert json.loads(row.state)["class_version"] == 3


def test_a_snapshot_cannot_take_what_an_aggregate_does_not_own_with_it(baskets: RunRepository) -> None:
    basket = baskets.get(RUN)
    taken = RunSnapshot.take(basket)

    basket.add("later")

    assert taken.state == {"items": []}
