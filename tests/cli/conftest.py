"""The command line as its users have it: a process of its own in a folder with a module of workflows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keiro.cli.reading import journal
from keiro.errors import RunNotFound
from keiro.stores.migrate import ensure_sqlite

MODULE = """
import asyncio, pathlib, subprocess, sys
import keiro

HERE = pathlib.Path(__file__).parent


def note(what):
    with open(HERE / "effects", "a") as file:
        file.write(f"{what}\\n")


@keiro.step
async def work(n: int, seconds: float = 0.0) -> int:
    note(f"work {n}")
    await asyncio.sleep(seconds)
    return n


@keiro.workflow
async def chain(run: keiro.WorkflowRun, n: int = 3, seconds: float = 0.0) -> int:
    return sum([await run.step(work, i, seconds) for i in range(n)])


@keiro.step
async def slow() -> str:
    note("slow begins")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.01)
    note("slow ends")
    return "done"


@keiro.workflow
async def held(run: keiro.WorkflowRun) -> list:
    return [await run.step(work, 0), await run.step(slow), await run.step(work, 1)]


@keiro.workflow
async def broken(run: keiro.WorkflowRun, what: str = "it") -> int:
    await run.step(work, 1)
    try:
        raise KeyError("deeper")
    except KeyError as error:
        raise ValueError(f"cannot do {what}") from error


@keiro.step
def shout() -> str:
    print("the step prints")
    subprocess.run(["echo", "its program prints"], check=True)
    return "a\\nb"


@keiro.workflow
async def noisy(run: keiro.WorkflowRun) -> str:
    print("the body prints")
    return await run.step(shout)


class Basket(keiro.WorkflowRun, name="basket"):
    def __init__(self) -> None:
        self.items = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self, id: str, connection: str = "") -> list:
        await self.apply(Basket.add, id)
        return [*self.items, connection]


not_one = 3
"""


# By these a terminal, or what stands for one in CI, is told apart from a pipe: a test says itself which it has.
TERMINAL = {
    "CI",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "LINES",
    "NO_COLOR",
    "PY_COLORS",
    "TERMINAL_WIDTH",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
}


class Shell:
    """A folder to run `keiro` in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "orders.py").write_text(MODULE)

    @property
    def effects(self) -> list[str]:
        """What steps have done, in order."""
        path = self.folder / "effects"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start the command."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8", **options}
        environment = {key: value for key, value in os.environ.items() if key not in TERMINAL}
        return subprocess.Popen(
            [sys.executable, "-m", "keiro.cli", *arguments],
            cwd=self.folder,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "", **(env or {})},
            **options,
        )

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *arguments: str, **options: Any) -> Any:
        """What a command that must succeed prints with --json."""
        done = self(*arguments, "--json", **options)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    def run_ids(self, file: str = "keiro.db") -> list[str]:
        """The runs in a journal."""
        with journal(f"sqlite:///{self.folder}/{file}") as found:
            return [run.run_id for run in found.runs(None, None, 10)]

    def payloads(self, run_id: str, file: str = "keiro.db") -> list[str]:
        """What is recorded of the steps of a run; nothing where it does not exist."""
        try:
            with journal(f"sqlite:///{self.folder}/{file}") as found:
                events = found.events(found.run(run_id))
        except RunNotFound:
            return []
        return [event.payload for event in events if event.topic == "StepRecorded"]

    def recorded(self, run_id: str) -> list[str]:
        """The recorded steps of a run in keiro.db."""
        return [json.loads(payload)["step"] for payload in self.payloads(run_id)]


def until(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode}: {process.communicate()}")
        time.sleep(0.005)


@pytest.fixture(scope="session")
def empty_journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is up to date: bringing one there takes longer than all else a command does."""
    path = tmp_path_factory.mktemp("empty") / "keiro.db"
    ensure_sqlite(str(path))
    return path


@pytest.fixture
def keiro(tmp_path: Path, empty_journal: Path) -> Shell:
    shutil.copy(empty_journal, tmp_path)
    return Shell(tmp_path)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A folder with a journal of several runs, for commands that only read."""
    shell = Shell(tmp_path_factory.mktemp("filled"))
    assert shell("run", "orders:chain", "--id", "eins").returncode == 0
    assert shell("run", "orders:broken", "--input", '["\\u001b[31m <b>"]', "--id", "böse 文").returncode == 1
    assert shell("run", "orders:Basket", "--input", '["sku-1"]', "--id", "b" * 100).returncode == 0
    return shell
