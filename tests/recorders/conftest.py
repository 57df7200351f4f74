"""Settings of each store, as an application of the `eventsourcing` library reads them from its environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from eventsourcing.persistence import InfrastructureFactory
from psycopg.conninfo import conninfo_to_dict

Settings = dict[str, str]


def postgres_settings(url: str) -> Settings:
    """The settings for a database."""
    parts = conninfo_to_dict(url)
    return {
        "PERSISTENCE_MODULE": "keiro.stores.recorders.postgres",
        "POSTGRES_DBNAME": str(parts["dbname"]),
        "POSTGRES_HOST": str(parts["host"]),
        "POSTGRES_PORT": str(parts["port"]),
        "POSTGRES_USER": str(parts["user"]),
        "POSTGRES_PASSWORD": str(parts.get("password", "")),
    }


def sqlite_settings(path: Path) -> Settings:
    """The settings for a database file."""
    return {"PERSISTENCE_MODULE": "keiro.stores.recorders.sqlite", "SQLITE_DBNAME": str(path)}


MEMORY_SETTINGS: Settings = {"PERSISTENCE_MODULE": "keiro.stores.recorders.memory"}


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """The settings of each store in turn, over an empty database."""
    match request.param:
        case "memory":
            return dict(MEMORY_SETTINGS)
        case "sqlite":
            return sqlite_settings(tmp_path / "events.db")
        case _:
            return postgres_settings(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["sqlite", "postgres"])
def sql_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """The settings of each store that has a database."""
    if request.param == "sqlite":
        return sqlite_settings(tmp_path / "events.db")
    return postgres_settings(request.getfixturevalue("postgres_url"))


@pytest.fixture
def factory(settings: Settings) -> Iterator[InfrastructureFactory]:
    """A factory of each store in turn."""
    with closing_factory(settings) as factory:
        yield factory


class closing_factory:
    """A factory that is closed at the end of the block."""

    def __init__(self, settings: Settings) -> None:
        self.factory: InfrastructureFactory = InfrastructureFactory.construct(settings)

    def __enter__(self) -> InfrastructureFactory:
        return self.factory

    def __exit__(self, *_: object) -> None:
        self.factory.close()


@pytest.fixture
def terminate_backends(postgres_url: str) -> Callable[..., int]:
    """Ends connections to the database; returns how many."""

    def terminate(application: str = "%") -> int:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            found = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE %s",
                (application,),
            )
            return len(found.fetchall())

    return terminate
