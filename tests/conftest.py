"""Fixtures every test may ask for: stores by URL, PostgreSQL servers, and how long a soak test runs.

A test that needs PostgreSQL fails where there is none. Tests marked `soak` run only with `--soak SECONDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from keiro.engine import Engine
from keiro.testing.postgres import PostgresServer

# The same examples everywhere, however slow the machine is: what fails here must fail for who looks into it, and what
# passes here must not fail elsewhere. `--hypothesis-profile default` tries others.
hypothesis.settings.register_profile(
    "keiro", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("keiro")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=float, metavar="SECONDS", help="run the soak tests too, and each long test for so long"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak") is None:
        soak = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in soak]
        config.hook.pytest_deselected(items=soak)


@pytest.fixture(autouse=True)
def no_keiro_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own store is no place for tests: an engine without a URL would open it."""
    monkeypatch.delenv("KEIRO_URL", raising=False)


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    """How long a soak test goes on."""
    seconds: float = request.config.getoption("--soak")
    return seconds


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for the whole session. Who restarts one takes `restartable_postgres`."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty PostgreSQL database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def restartable_postgres() -> Iterator[PostgresServer]:
    """A server of this test alone: `url()`, `restart(immediate=True)`, `stop()`, `terminate_backends()`."""
    with PostgresServer() as server:
        yield server


def spelled(value: object) -> str:
    """A value in the name of a test, which is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(store_url: str) -> MakeEngine:
    """Makes engines over one store, which is migrated when the first of them opens."""

    def make(*workflows: object, **options: Any) -> Engine:
        return Engine(store_url, workflows=workflows, **{"migrate": True, **options})

    return make


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind, which several engines may open, so that one test says the same of all three."""
    match request.param:
        case "memory":
            return f"memory://{tmp_path}"
        case "sqlite":
            return f"sqlite:///{tmp_path}/keiro.db"
        case _:
            url: str = request.getfixturevalue("postgres_url")
            return url
