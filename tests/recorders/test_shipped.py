"""The `eventsourcing` library's own test cases, unchanged, over the recorders of each store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest
import sqlalchemy as sa
from eventsourcing.persistence import InfrastructureFactory, Tracking
from eventsourcing.projection import BaseProjectionRunner
from eventsourcing.tests import application, persistence, projection
from eventsourcing.utils import Environment

from keiro.stores.recorders.common import WaitingTrackingRecorder
from keiro.stores.recorders.memory import (
    MemoryAggregateRecorder,
    MemoryApplicationRecorder,
    MemoryFactory,
    MemoryProcessRecorder,
    MemoryTrackingRecorder,
)
from keiro.stores.recorders.postgres import (
    PostgresAggregateRecorder,
    PostgresApplicationRecorder,
    PostgresFactory,
    PostgresProcessRecorder,
    PostgresTrackingRecorder,
)
from keiro.stores.recorders.sqlite import (
    SQLiteAggregateRecorder,
    SQLiteApplicationRecorder,
    SQLiteFactory,
    SQLiteProcessRecorder,
    SQLiteTrackingRecorder,
)
from tests.recorders.conftest import MEMORY_SETTINGS, postgres_settings, sqlite_settings

# Some of these cases use what the library has deprecated.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a projection has to come up with an event, these cases give it the one second that is the default: too
    little on a machine that is busy. It stays where the wait has to end in vain."""
    if "raises" not in request.node.name:
        monkeypatch.setattr(WaitingTrackingRecorder.wait, "__defaults__", (30.0, None))
        monkeypatch.setattr(BaseProjectionRunner.wait, "__defaults__", (30.0,))


class Memory:
    """Runs a shipped case in memory."""

    @pytest.fixture(autouse=True)
    def prepare(self) -> None:
        self.env = Environment("app", dict(MEMORY_SETTINGS))


class SQLite:
    """Runs a shipped case in a SQLite file."""

    @pytest.fixture(autouse=True)
    def prepare(self, tmp_path: Path) -> None:
        self.env = Environment("app", sqlite_settings(tmp_path / "events.db"))


class SQLiteInMemory:
    """Runs a shipped case in a SQLite database in memory."""

    @pytest.fixture(autouse=True)
    def prepare(self) -> None:
        self.env = Environment(
            "app", {"PERSISTENCE_MODULE": "keiro.stores.recorders.sqlite", "SQLITE_DBNAME": ":memory:"}
        )


class Postgres:
    """Runs a shipped case in a Postgres database."""

    @pytest.fixture(autouse=True)
    def prepare(self, postgres_url: str) -> None:
        self.env = Environment("app", postgres_settings(postgres_url))


class TextIds:
    """Names aggregates by text."""

    env: Environment

    def new_originator_id(self) -> str:
        self.env["ORIGINATOR_ID_TYPE"] = "text"
        return f"account-{uuid4()}"


class Recorders:
    """Gives a shipped case the recorder it asks for."""

    env: Environment
    addCleanup: Callable[..., None]

    def factory(self) -> InfrastructureFactory[Any]:
        if isinstance(self, TextIds):
            self.new_originator_id()
        factory = InfrastructureFactory[Any].construct(self.env)
        self.addCleanup(factory.close)
        return factory


class AggregateCase(Recorders, persistence.AggregateRecorderTestCase):
    __test__ = False

    def create_recorder(self) -> Any:
        return self.factory().aggregate_recorder()


class ApplicationCase(Recorders, persistence.ApplicationRecorderTestCase):
    __test__ = False

    def create_recorder(self) -> Any:
        return self.factory().application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TrackingCase(Recorders, persistence.TrackingRecorderTestCase):
    __test__ = False

    def create_recorder(self) -> Any:
        return self.factory().tracking_recorder()


class ProcessCase(Recorders, persistence.ProcessRecorderTestCase):
    __test__ = False

    def create_recorder(self) -> Any:
        return self.factory().process_recorder()


class NonInterleavingCase(Recorders, persistence.NonInterleavingNotificationIDsBaseCase):
    __test__ = False

    def create_recorder(self) -> Any:
        return self.factory().application_recorder()


class TestAggregateMemory(Memory, AggregateCase):
    __test__ = True


class TestAggregateSQLite(SQLite, AggregateCase):
    __test__ = True


class TestAggregateSQLiteInMemory(SQLiteInMemory, AggregateCase):
    __test__ = True


class TestAggregatePostgres(Postgres, AggregateCase):
    __test__ = True


class TestAggregateTextMemory(TextIds, Memory, AggregateCase):
    __test__ = True


class TestAggregateTextSQLite(TextIds, SQLite, AggregateCase):
    __test__ = True


class TestAggregateTextPostgres(TextIds, Postgres, AggregateCase):
    __test__ = True


class TestApplicationMemory(Memory, ApplicationCase):
    __test__ = True


class TestApplicationSQLite(SQLite, ApplicationCase):
    __test__ = True


class TestApplicationSQLiteInMemory(SQLiteInMemory, ApplicationCase):
    __test__ = True


class TestApplicationPostgres(Postgres, ApplicationCase):
    __test__ = True


class TestApplicationTextMemory(TextIds, Memory, ApplicationCase):
    __test__ = True


class TestApplicationTextSQLite(TextIds, SQLite, ApplicationCase):
    __test__ = True


class TestApplicationTextPostgres(TextIds, Postgres, ApplicationCase):
    __test__ = True


class TestTrackingMemory(Memory, TrackingCase):
    __test__ = True


class TestTrackingSQLite(SQLite, TrackingCase):
    __test__ = True


class TestTrackingSQLiteInMemory(SQLiteInMemory, TrackingCase):
    __test__ = True


class TestTrackingPostgres(Postgres, TrackingCase):
    __test__ = True


class TestProcessMemory(Memory, ProcessCase):
    __test__ = True


class TestProcessSQLite(SQLite, ProcessCase):
    __test__ = True


class TestProcessSQLiteInMemory(SQLiteInMemory, ProcessCase):
    __test__ = True


class TestProcessPostgres(Postgres, ProcessCase):
    __test__ = True


class TestProcessTextSQLite(TextIds, SQLite, ProcessCase):
    __test__ = True


class TestProcessTextPostgres(TextIds, Postgres, ProcessCase):
    __test__ = True


class TestNonInterleavingMemory(Memory, NonInterleavingCase):
    __test__ = True


class TestNonInterleavingSQLite(SQLite, NonInterleavingCase):
    __test__ = True


class TestNonInterleavingPostgres(Postgres, NonInterleavingCase):
    __test__ = True


class TestFactoryMemory(Memory, persistence.InfrastructureFactoryTestCase[MemoryFactory]):
    def expected_factory_class(self) -> type[MemoryFactory]:
        return MemoryFactory

    def expected_aggregate_recorder_class(self) -> type[MemoryAggregateRecorder]:
        return MemoryAggregateRecorder

    def expected_application_recorder_class(self) -> type[MemoryApplicationRecorder]:
        return MemoryApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[MemoryTrackingRecorder]:
        return MemoryTrackingRecorder

    def tracking_recorder_subclass(self) -> type[MemoryTrackingRecorder]:
        return MemoryCounters

    def expected_process_recorder_class(self) -> type[MemoryProcessRecorder]:
        return MemoryProcessRecorder


class TestFactorySQLite(SQLite, persistence.InfrastructureFactoryTestCase[SQLiteFactory]):
    def expected_factory_class(self) -> type[SQLiteFactory]:
        return SQLiteFactory

    def expected_aggregate_recorder_class(self) -> type[SQLiteAggregateRecorder]:
        return SQLiteAggregateRecorder

    def expected_application_recorder_class(self) -> type[SQLiteApplicationRecorder]:
        return SQLiteApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[SQLiteTrackingRecorder]:
        return SQLiteTrackingRecorder

    def tracking_recorder_subclass(self) -> type[SQLiteTrackingRecorder]:
        return SQLiteCounters

    def expected_process_recorder_class(self) -> type[SQLiteProcessRecorder]:
        return SQLiteProcessRecorder


class TestFactoryPostgres(Postgres, persistence.InfrastructureFactoryTestCase[PostgresFactory]):
    def expected_factory_class(self) -> type[PostgresFactory]:
        return PostgresFactory

    def expected_aggregate_recorder_class(self) -> type[PostgresAggregateRecorder]:
        return PostgresAggregateRecorder

    def expected_application_recorder_class(self) -> type[PostgresApplicationRecorder]:
        return PostgresApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[PostgresTrackingRecorder]:
        return PostgresTrackingRecorder

    def tracking_recorder_subclass(self) -> type[PostgresTrackingRecorder]:
        return PostgresCounters

    def expected_process_recorder_class(self) -> type[PostgresProcessRecorder]:
        return PostgresProcessRecorder


class MemoryCounters(MemoryTrackingRecorder, projection.EventCountersView):
    """The view the shipped projection cases ask for, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"created": 0, "subsequent": 0}

    def get_created_event_counter(self) -> int:
        return self.counts["created"]

    def get_subsequent_event_counter(self) -> int:
        return self.counts["subsequent"]

    def incr_created_event_counter(self, tracking: Tracking) -> None:
        self._count("created", tracking)

    def incr_subsequent_event_counter(self, tracking: Tracking) -> None:
        self._count("subsequent", tracking)

    def _count(self, name: str, tracking: Tracking) -> None:
        with self.transaction(tracking):
            self.counts[name] += 1


class Counters(projection.EventCountersView):
    """The same in SQL: one class for both databases, as its base gives it a SQLAlchemy connection."""

    table = sa.Table(
        "event_counters",
        sa.MetaData(),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
    )
    transaction: Callable[..., Any]
    connect: Callable[..., Any]

    def create_table(self) -> None:
        super().create_table()  # type: ignore[misc]
        with self.transaction() as connection:
            self.table.create(connection, checkfirst=True)

    def get_created_event_counter(self) -> int:
        return self._get("created")

    def get_subsequent_event_counter(self) -> int:
        return self._get("subsequent")

    def incr_created_event_counter(self, tracking: Tracking) -> None:
        self._count("created", tracking)

    def incr_subsequent_event_counter(self, tracking: Tracking) -> None:
        self._count("subsequent", tracking)

    def _get(self, name: str) -> int:
        with self.connect() as connection:
            found = connection.scalar(sa.select(self.table.c.count).where(self.table.c.name == name))
        return found or 0

    def _count(self, name: str, tracking: Tracking) -> None:
        table = self.table
        with self.transaction(tracking) as connection:
            done = connection.execute(sa.update(table).where(table.c.name == name).values(count=table.c.count + 1))
            if done.rowcount == 0:
                connection.execute(sa.insert(table).values(name=name, count=1))


class SQLiteCounters(Counters, SQLiteTrackingRecorder):
    """The view over SQLite."""


class PostgresCounters(Counters, PostgresTrackingRecorder):
    """The view over Postgres."""


class ViewCase(Recorders, projection.EventCountersViewTestCase):
    __test__ = False
    view_class: ClassVar[type[Any]]

    def construct_event_counters_view(self) -> Any:
        return self.factory().tracking_recorder(self.view_class)


class TestViewMemory(Memory, ViewCase):
    __test__ = True
    view_class = MemoryCounters


class TestViewSQLite(SQLite, ViewCase):
    __test__ = True
    view_class = SQLiteCounters


class TestViewSQLiteInMemory(SQLiteInMemory, ViewCase):
    __test__ = True
    view_class = SQLiteCounters


class TestViewPostgres(Postgres, ViewCase):
    __test__ = True
    view_class = PostgresCounters


class TestProjectionMemory(Memory, projection.AggregateEventCountersProjectionTestCase):
    view_class = MemoryCounters


class TestProjectionSQLite(SQLite, projection.AggregateEventCountersProjectionTestCase):
    view_class = SQLiteCounters


class TestProjectionPostgres(Postgres, projection.AggregateEventCountersProjectionTestCase):
    view_class = PostgresCounters


class TestEventSourcedProjectionMemory(Memory, projection.EventSourcedProjectionTestCase):
    pass


class TestEventSourcedProjectionPostgres(Postgres, projection.EventSourcedProjectionTestCase):
    pass


class TestEventSourcedProjectionSQLite(SQLite, projection.EventSourcedProjectionTestCase):
    @pytest.fixture(autouse=True)
    def own_file(self, prepare: None, tmp_path: Path) -> None:
        # In one file, both applications would share one event log.
        self.env["COUNTERS_SQLITE_DBNAME"] = str(tmp_path / "counters.db")


class Environmental:
    """Lets a shipped case that takes no settings find them in the process's environment."""

    env: Environment

    @pytest.fixture(autouse=True)
    def export(self, prepare: None, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)


class TestExampleMemory(Memory, Environmental, application.ExampleApplicationTestCase):
    expected_factory_topic = "keiro.stores.recorders.memory:MemoryFactory"


class TestExampleSQLite(SQLite, Environmental, application.ExampleApplicationTestCase):
    expected_factory_topic = "keiro.stores.recorders.sqlite:SQLiteFactory"


class TestExamplePostgres(Postgres, Environmental, application.ExampleApplicationTestCase):
    expected_factory_topic = "keiro.stores.recorders.postgres:PostgresFactory"


class TestAnyApplicationMemory(Memory, Environmental, application.ApplicationTestCase):
    pass


class TestAnyApplicationSQLite(SQLite, Environmental, application.ApplicationTestCase):
    pass


class TestAnyApplicationPostgres(Postgres, Environmental, application.ApplicationTestCase):
    pass
