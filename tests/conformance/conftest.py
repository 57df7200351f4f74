"""Fixtures of conformance tests: whether a run that only waits stays in the process."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def parks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits leaves the process as soon as it may."""
    monkeypatch.setattr("keiro.waits.PARK_S", 0.0)


@pytest.fixture(params=[0.0, 3600.0], ids=["parked", "resident"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits leaves the process as soon as it may, and in another test never."""
    monkeypatch.setattr("keiro.waits.PARK_S", request.param)


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind that has tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    url: str = request.getfixturevalue("postgres_url")
    return url
