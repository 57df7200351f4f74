"""The socket that wakes other processes is a help and no condition."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

import keiro
from keiro.stores import wake


@keiro.workflow
async def quick(run: keiro.WorkflowRun) -> int:
    return 1


class NoLoopback(socket.socket):
    def bind(self, address: Any, /) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "cannot assign requested address")


async def test_an_engine_works_where_there_is_no_ipv4_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake.socket, "socket", NoLoopback)
    async with keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[quick]) as engine:
        assert [row.address for row in await engine.store.workers()] == [None]
        assert await engine.execute(quick) == 1
