"""A subscription yields every event once and in order, survives what its store goes through, and can be
stopped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from eventsourcing.persistence import ApplicationRecorder, InfrastructureFactory, PersistenceError

from keiro.stores.recorders import postgres
from keiro.stores.recorders.courier import Courier
from tests.recorders.accounts import Accounts, stored, tailing, wait_for_listener
from tests.recorders.conftest import Settings, closing_factory, postgres_settings


@pytest.fixture
def recorder(factory: InfrastructureFactory) -> ApplicationRecorder:
    return factory.application_recorder()


@pytest.fixture
def only_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the safety poll, nothing but a notification wakes."""
    monkeypatch.setattr(postgres, "_POLL_INTERVAL_S", 3600.0)


def only_direct_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither polls nor notifications."""
    for module in ("memory", "sqlite", "postgres"):
        monkeypatch.setattr(f"keiro.stores.recorders.{module}._POLL_INTERVAL_S", 3600.0)
    for method in ("send", "listen"):
        monkeypatch.setattr(Courier, method, lambda *_: None)


def test_events_recorded_before_and_after_subscribing_arrive_in_order(recorder: ApplicationRecorder) -> None:
    recorder.insert_events(stored(3))
    with tailing(recorder, gt=1) as tail:
        tail.wait_for(lambda ids: ids == [2, 3])
        recorder.insert_events(stored(2))
        tail.wait_for(lambda ids: ids == [2, 3, 4, 5])


def test_a_commit_in_the_same_process_wakes_without_a_poll(
    factory: InfrastructureFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_direct_wakes(monkeypatch)
    recorder = factory.application_recorder()
    recorder.insert_events(stored())
    with tailing(recorder) as tail:
        tail.wait_for(lambda ids: ids == [1])
        recorder.insert_events(stored())
        tail.wait_for(lambda ids: ids == [1, 2])


def test_another_factory_of_the_same_process_wakes_too(sql_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    only_direct_wakes(monkeypatch)
    with (
        closing_factory(sql_settings) as reading,
        closing_factory(sql_settings) as writing,
        tailing(reading.application_recorder()) as tail,
    ):
        recorder = writing.application_recorder()
        recorder.insert_events(stored())
        tail.wait_for(lambda ids: ids == [1])


def test_topics_are_filtered_and_what_does_not_match_is_read_once(
    recorder: ApplicationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    select = recorder.select_notifications

    def recording(start: int | None, *args: Any, **kwargs: Any) -> Any:
        starts.append(start)
        return select(start, *args, **kwargs)

    monkeypatch.setattr(recorder, "select_notifications", recording)
    recorder.insert_events(stored(topic="wanted"))
    recorder.insert_events(stored(5, topic="other"))
    with tailing(recorder, topics=["wanted"]) as tail:
        tail.wait_for(lambda ids: ids == [1])
        recorder.insert_events(stored(topic="wanted"))
        tail.wait_for(lambda ids: ids == [1, 7])
    assert starts[0] == 0
    assert all(start >= 6 for start in starts[1:])


def test_more_events_than_one_batch_arrive_once_each(recorder: ApplicationRecorder) -> None:
    for _ in range(3):
        recorder.insert_events(stored(700))
    with tailing(recorder) as tail:
        tail.wait_for(lambda ids: len(ids) == 2100)
        assert tail.ids == list(range(1, 2101))


def test_stop_ends_a_waiting_iteration_from_another_thread_and_may_come_twice(
    recorder: ApplicationRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_direct_wakes(monkeypatch)
    with tailing(recorder) as tail:
        pass
    tail.subscription.stop()
    assert tail.error is None
    assert list(tail.subscription) == []


def test_stop_inside_the_iteration_drops_what_was_read_ahead(recorder: ApplicationRecorder) -> None:
    recorder.insert_events(stored(10))
    seen = []
    with recorder.subscribe() as subscription:
        for notification in subscription:
            seen.append(notification.id)
            subscription.stop()
    assert seen == [1]


def test_an_error_of_the_store_reaches_the_iterating_thread(
    sql_settings: Settings, request: pytest.FixtureRequest
) -> None:
    with closing_factory(sql_settings) as factory:
        recorder: Any = factory.application_recorder()
        subscription = recorder.subscribe()
        if "SQLITE_DBNAME" in sql_settings:
            recorder.datastore.write(lambda c: c.execute("DROP TABLE stored_events"))
        else:
            recorder.datastore.execute(b"DROP TABLE stored_events")
        with pytest.raises(PersistenceError, match="stored_events"):
            next(subscription)


WRITER = """
import sys
from uuid import UUID
from tests.recorders.accounts import Accounts
app = Accounts(dict(pair.split("=", 1) for pair in sys.argv[2:]))
for number in range(int(sys.argv[1])):
    app.open(f"owner {number}")
"""

FORGETFUL = """
import sys, threading
from uuid import UUID
from eventsourcing.application import Application
from tests.recorders.accounts import Accounts
from tests.recorders.test_views import Seen, view_class
from eventsourcing.projection import ProjectionRunner

settings = dict(pair.split("=", 1) for pair in sys.argv[1:])
app = Accounts(settings)
app.open("somebody")
subscription = app.recorder.subscribe()
arrived = threading.Event()

def follow():
    for notification in subscription:
        arrived.set()

threading.Thread(target=follow).start()
runner = ProjectionRunner(
    application_class=Accounts, projection_class=Seen, view_class=view_class(settings), env=settings
)
assert arrived.wait(30)
print("done", flush=True)
"""


def run_python(script: str, *arguments: str) -> str:
    """The output of a script in a process of its own, which has to end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_arguments(settings: Settings) -> Iterator[str]:
    return (f"{name}={value}" for name, value in settings.items())


def test_events_of_another_process_arrive(sql_settings: Settings) -> None:
    app = Accounts(sql_settings)
    with tailing(app.recorder) as tail:
        app.open("somebody")
        tail.wait_for(lambda ids: ids == [1])
        run_python(WRITER, "3", *as_arguments(sql_settings))
        tail.wait_for(lambda ids: ids == [1, 2, 3, 4])
    app.close()


def test_what_a_program_forgot_to_stop_does_not_keep_it_from_ending(settings: Settings) -> None:
    assert run_python(FORGETFUL, *as_arguments(settings)) == "done\n"


def test_postgres_announces_the_commits_of_a_process_that_ends_at_once(
    postgres_url: str, only_notifications: None
) -> None:
    settings = postgres_settings(postgres_url)
    app = Accounts(settings)
    with tailing(app.recorder) as tail:
        app.open("somebody")
        tail.wait_for(lambda ids: ids == [1])
        wait_for_listener(postgres_url)
        run_python(WRITER, "1", *as_arguments(settings))
        tail.wait_for(lambda ids: ids == [1, 2])
    app.close()


def insert_unannounced(url: str, count: int = 1) -> None:
    """What another process has committed but whose notification was lost."""
    with psycopg.connect(url) as connection:
        for event in stored(count):
            connection.execute(
                "INSERT INTO accounts_events (originator_id, originator_version, topic, state) VALUES (%s, %s, %s, %s)",
                (event.originator_id, event.originator_version, event.topic, event.state),
            )


def test_an_event_whose_notification_is_lost_arrives_all_the_same(postgres_url: str) -> None:
    app = Accounts(postgres_settings(postgres_url))
    with tailing(app.recorder) as tail:
        app.open("somebody")
        tail.wait_for(lambda ids: ids == [1])
        insert_unannounced(postgres_url)
        tail.wait_for(lambda ids: ids == [1, 2])
    app.close()


def test_what_was_committed_while_the_listening_connection_was_down_arrives_when_it_is_back(
    postgres_url: str, only_notifications: None, terminate_backends: Callable[..., int]
) -> None:
    app = Accounts(postgres_settings(postgres_url))
    with tailing(app.recorder) as tail:
        app.open("somebody")
        tail.wait_for(lambda ids: ids == [1])
        wait_for_listener(postgres_url)
        assert terminate_backends("keiro courier") == 1
        insert_unannounced(postgres_url)
        tail.wait_for(lambda ids: ids == [1, 2])
        # It listens again: a notification alone wakes it.
        wait_for_listener(postgres_url)
        insert_unannounced(postgres_url)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("NOTIFY accounts_events")
        tail.wait_for(lambda ids: ids == [1, 2, 3])
    app.close()


def test_a_subscription_outlives_the_loss_of_every_connection(
    postgres_url: str, terminate_backends: Callable[..., int]
) -> None:
    app = Accounts(postgres_settings(postgres_url))
    with tailing(app.recorder) as tail:
        for number in range(1, 6):
            app.open("somebody")
            tail.wait_for(lambda ids, number=number: len(ids) == number)  # type: ignore[misc]
            assert terminate_backends() >= 1
        assert tail.ids == [1, 2, 3, 4, 5]
    app.close()
