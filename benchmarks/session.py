"""One contestant's process, and the places it is measured in, as the runner sees them."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.contestant import Place, Store
from benchmarks.postgres import Postgres

ROOT = Path(__file__).resolve().parent.parent


class Missing(Exception):
    """The contestant's packages cannot be imported; the message is the import error."""


class Refused(Exception):
    """The contestant does not offer what was asked; the message says why."""


class Failed(Exception):
    """The contestant raised, died or took too long; the message says what happened."""


class Process:
    """A running child. Every command is one line out and one line back."""

    def __init__(self, entry: str, log: Path) -> None:
        self.started_at = time.perf_counter()
        self._log_path = log
        self._log = log.open("a")
        self._buffer = b""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", entry],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._greeted = False

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer. Raises Missing, Refused or Failed."""
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting, also before the process is up."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._greet(60)
            raise Failed(f"the process ended; see {self._log_path.name}") from None

    def receive(self, timeout: float = 600) -> dict[str, Any]:
        """The answer to the oldest command that has none yet."""
        self._greet(timeout)
        answer = self._line(timeout)
        if "not_offered" in answer:
            raise Refused(answer["not_offered"])
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _greet(self, timeout: float) -> None:
        if not self._greeted:
            self._greeted = True
            if missing := self._line(timeout).get("missing"):
                raise Missing(missing)

    def _line(self, timeout: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._child.stdout], [], [], left)[0]:
                self.kill()
                raise Failed(f"no answer within {timeout:.0f} s")
            chunk = os.read(self._child.stdout.fileno(), 65536)
            if not chunk:
                raise Failed(f"the process ended with {self._child.wait()}; see {self._log_path.name}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        answer["answered_at"] = time.perf_counter()
        return answer

    def kill(self) -> None:
        """End it as a crash would: SIGKILL."""
        self._child.kill()
        self._finish()

    def end(self) -> None:
        """Let it end by itself, and make sure that it does."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(15)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._finish()

    def _finish(self) -> None:
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._log.close()


class Places:
    """Makes empty databases and throws them away."""

    def __init__(self, folder: Path, postgres: Postgres | None) -> None:
        self._folder = folder
        self._postgres = postgres

    def create(self, store: Store) -> Place:
        if store == "memory":
            return Place(store)
        if store == "postgres":
            if self._postgres is None:
                raise Refused("no Postgres")
            return Place(store, self._postgres.create_database())
        return Place(store, str(Path(tempfile.mkdtemp(dir=self._folder)) / "bench.db"))

    def settle(self, place: Place) -> None:
        """Write out what is dirty, so that a measurement pays only for its own writes."""
        if place.store == "postgres" and self._postgres is not None:
            self._postgres.checkpoint()
        os.sync()

    def discard(self, place: Place) -> None:
        if place.store == "postgres" and self._postgres is not None:
            self._postgres.drop_database(place.at)
        elif place.is_sqlite:
            shutil.rmtree(Path(place.at).parent, ignore_errors=True)
