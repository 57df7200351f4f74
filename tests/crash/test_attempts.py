"""SIGKILL at every write boundary of steps with dangerous effects: an irreversible one happens at most once, one with
an idempotency key at least once and by one key, and what was done is undone to the last."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import keiro
from keiro.testing.crash import CrashPoints
from tests.crash import forks, workload

pytestmark = pytest.mark.crash


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@keiro.step(tier="irreversible")
async def launch() -> str:
    workload.note("launched", "once")
    return "up"


@keiro.step(tier="irreversible", idempotency_key=lambda: "the key", retry=keiro.Retry(2, initial=0.001))
async def pay() -> str:
    workload.note("paid", keiro.attempt().idempotency_key)
    return "paid"


@keiro.step
async def unbook(result: str, what: str) -> str:
    workload.note("unbooked", what)
    return what


@keiro.step(tier="compensable", compensate=unbook)
async def book(what: str) -> str:
    workload.note("booked", what)
    return what


@keiro.workflow
async def voyage(run: keiro.WorkflowRun) -> str:
    for what in ("ship", "cabin"):
        await run.scope(what).step(book, what)
    await run.step(pay)
    try:
        said: str = await run.step(launch)
    except keiro.EffectUnknown:
        said = "unknown"
    await run.compensate()
    return said


def test_effects_survive_a_kill_at_any_boundary_as_their_tier_says(url: str, tmp_path: Path) -> None:
    said = set()

    def sailing(at: int, key: str) -> forks.Program:
        async def program() -> None:
            workload.use_log(folder)
            engine = keiro.Engine(url, workflows=[voyage], migrate=True)
            points = CrashPoints(engine, 0)
            async with engine:
                points.passed, points.at = 0, at
                result = await engine.execute(voyage, id=key)
                workload.note("passed", str(points.passed))
                workload.note("said", result)

        return program

    folder = tmp_path / "0"
    folder.mkdir()
    assert forks.run(sailing(0, "0")) == 0
    boundaries = int(workload.notes(folder, "passed")[-1])
    assert boundaries > 15
    for at in range(1, boundaries):
        folder = tmp_path / str(at)
        folder.mkdir()
        killed = forks.run(sailing(at, str(at)))
        assert killed == -signal.SIGKILL or at > boundaries * 3 // 4
        assert forks.run(sailing(0, str(at))) == 0
        launched, (result,) = workload.notes(folder, "launched"), set(workload.notes(folder, "said"))
        said.add(result)
        assert len(launched) <= 1, f"boundary {at}"
        assert result == "unknown" or launched, f"boundary {at}"
        assert set(workload.notes(folder, "paid")) == {"the key"}
        undone = workload.notes(folder, "unbooked")
        assert list(dict.fromkeys(undone)) == ["cabin", "ship"], f"boundary {at}"
        assert list(dict.fromkeys(workload.notes(folder, "booked"))) == ["ship", "cabin"]
    assert said == {"up", "unknown"}
