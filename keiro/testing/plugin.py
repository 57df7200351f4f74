"""The plugin for pytest: the fixture `keiro_engine`.

It needs a plugin that runs async tests, pytest-asyncio or that of anyio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from keiro.engine import Engine

_fixture: Any = pytest.fixture  # anyio runs the async fixtures of the tests that it runs
try:
    from pytest_asyncio import fixture as _fixture
except ImportError:
    pass

EngineFactory = Callable[..., Awaitable[Engine]]


async def _keiro_engine() -> AsyncIterator[EngineFactory]:
    """Makes open engines: `engine = await keiro_engine(fulfil, ship)`.

    Each has a memory store of its own, is strict, and is closed when the test ends; what is under way then is cut off.
    Keyword arguments are those of `keiro.Engine`, also `url`, `strict` and `grace`.
    """
    async with AsyncExitStack() as opened:

        async def make(*workflows: Any, url: str = "memory://", **options: Any) -> Engine:
            return await opened.enter_async_context(
                Engine(url, workflows=workflows, **{"strict": True, "grace": 0, **options})
            )

        yield make


keiro_engine = _fixture(_keiro_engine)
