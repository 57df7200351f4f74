"""Fixtures of conformance tests: whether a run that only waits stays in the process."""

from __future__ import annotations

import pytest


@pytest.fixture
def parks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits leaves the process as soon as it may."""
    monkeypatch.setattr("keiro.waits.PARK_S", 0.0)


@pytest.fixture(params=[0.0, 3600.0], ids=["parked", "resident"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits leaves the process as soon as it may, and in another test never."""
    monkeypatch.setattr("keiro.waits.PARK_S", request.param)
