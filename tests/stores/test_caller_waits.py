"""What is asked of waiting runs in a caller's transaction holds with its commit, and never after a rollback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import keiro
from tests.stores.test_caller_transactions import KINDS, Caller

LIMIT_S = 60
Act = Callable[[keiro.Engine, Any], Awaitable[object]]
PARENT, CHILD = "wf:parent-a", "wf:waits-a-kid"


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> str:
    try:
        return str(await run.deferred("word", str).result())
    except keiro.DeferredCancelled:
        return "cancelled"
    except ValueError as error:
        return f"failed: {error}"


@keiro.workflow
async def parent(run: keiro.WorkflowRun) -> str:
    child = await run.spawn(waits, id=f"{run.key}-kid")
    try:
        return str(await child.result())
    except keiro.ChildCancelled:
        return "without"


ACTS: dict[str, tuple[Act, str]] = {
    "complete": (lambda engine, c: engine.complete(CHILD, "word", "yes", connection=c), "yes"),
    "fail": (lambda engine, c: engine.fail(CHILD, "word", ValueError("no"), connection=c), "failed: no"),
    "cancel_deferred": (lambda engine, c: engine.cancel_deferred(CHILD, "word", connection=c), "cancelled"),
    "cancel": (lambda engine, c: engine.cancel(CHILD, connection=c), "without"),
}


@pytest.fixture(params=KINDS, ids=[f"{store}-{kind.__name__}" for store, kind in KINDS])
def kind(request: pytest.FixtureRequest) -> tuple[str, Any]:
    found: tuple[str, Any] = request.param
    return found


@pytest.fixture
def url(kind: tuple[str, Any], tmp_path: Any, request: pytest.FixtureRequest) -> str:
    if kind[0] == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def engine(url: str) -> AsyncIterator[keiro.Engine]:
    async with keiro.Engine(url, workflows=[parent, waits], migrate=True) as opened:
        yield opened


@pytest.fixture
async def caller(kind: tuple[str, Any], url: str, engine: keiro.Engine) -> AsyncIterator[Caller]:
    opened = await kind[1](url)
    yield opened
    await opened.close()


@pytest.mark.parametrize("name", ACTS)
async def test_it_holds_with_the_commit_and_never_after_a_rollback(
    engine: keiro.Engine, caller: Caller, name: str
) -> None:
    """Its rows, its events and what the parent is told are one with the caller's own writes."""
    act, result = ACTS[name]
    handle = await engine.start(parent, id="a")
    while await handle.status() != "suspended" or await engine.handle(CHILD).status() != "suspended":
        await asyncio.sleep(0.005)
    await caller.execute("CREATE TABLE mine (n INTEGER)")
    await caller.commit()
    for last in (False, True):
        await caller.execute("INSERT INTO mine VALUES (1)")  # opens the transaction
        assert await act(engine, caller.connection)
        await (caller.commit() if last else caller.rollback())
        if not last:
            assert await handle.status() == "suspended"
            assert await engine.handle(CHILD).status() == "suspended"
    assert await handle.result(LIMIT_S) == result
    [child] = await handle.children()
    assert child.status == ("cancelled" if name == "cancel" else "completed")
    assert (await engine.rebuild("runs")).differences == 0
    assert not await engine.reconcile()
