"""The examples run as they are printed, and go on where they were killed."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LIMIT_S = 60
KILLED = """
import runpy, sys
import keiro
from keiro.testing import CrashPoints

at, sys.argv = int(sys.argv[1]), sys.argv[2:]
points, opened = [], keiro.Engine.__init__

def counted(engine, *args, **kwargs):
    opened(engine, *args, **kwargs)
    points.append(CrashPoints(engine, at - sum(one.passed for one in points)))

keiro.Engine.__init__ = counted
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an example and kills it at a boundary of its writes, counted over all engines that it opens."""


def run(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints, run to its end."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def killed_after(name: str, folder: Path, line: str, *arguments: str) -> list[str]:
    """What an example printed until it was killed, when it had printed `line`."""
    process = start(name, folder, *arguments)
    printed: list[str] = []
    assert process.stdout is not None
    for one in process.stdout:
        printed.append(one.rstrip("\n"))
        if printed[-1] == line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    process.wait(LIMIT_S)
    assert printed[-1:] == [line], printed
    return printed


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("order_fulfilment", ["approve"], "result: parcel-lamp"),
        ("saga", [], "cancelling the hotel of Lisbon\ncancelling the flight of Lisbon\nresult:"),
        ("basket", [], "read back: ['lamp', 'desk']"),
        ("transactional", [], "orders: [('1', 'shipped')]\nruns: ['wf:confirm-1']"),
        ("changed_workflow", [], "patched: would go on\nwf:letter-old -> Hello, Ada!"),
        ("anywhere", [], "memory: 285"),
        ("cron_report", [], "every-minute: * * * * * (Europe/Berlin), next at"),
    ],
)
def test_an_example_says_what_it_shows(name: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in run(name, tmp_path, *arguments)
    if name != "anywhere":
        # Once more: the runs are there, and nothing of them happens again.
        assert "result" in run(name, tmp_path, *arguments) or name == "changed_workflow"


@pytest.mark.parametrize(
    ("name", "effects"),
    [
        ("order_fulfilment", ["reserving lamp", "releasing the reservation of lamp"]),
        (
            "saga",
            [
                "booking the flight",
                "booking the hotel",
                "cancelling the hotel of Lisbon",
                "cancelling the flight of Lisbon",
            ],
        ),
        ("polling", [f"asking, time {n}" for n in range(1, 8)]),
        ("basket", ["charging Ada for lamp, desk"]),
        ("transactional", ["mail: order 1 is on its way"]),
        ("changed_workflow", []),
        ("fan_out", []),
    ],
)
def test_an_example_that_is_killed_again_and_again_ends_as_if_it_never_was(
    name: str, effects: list[str], tmp_path: Path
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        (folder / "files").mkdir(parents=True)
        for n in range(40):
            (folder / "files" / f"f{n}.py").write_text("x" * n)
    arguments = ["files"] if name == "fan_out" else []
    expected = run(name, undisturbed, *arguments).splitlines()

    printed: list[str] = []
    kills = 0
    while True:
        # Each goes a little further than the one before, which has spent some of its boundaries on what that left.
        at = 9 + 8 * kills
        command = [sys.executable, "-u", "-c", KILLED, str(at), str(EXAMPLES / f"{name}.py"), *arguments]
        done = subprocess.run(command, cwd=disturbed, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        lines = done.stdout.splitlines()
        happened = [line for line in lines if line in effects]
        if printed[-1:] == happened[:1]:
            happened = happened[1:]  # it was under way at the kill, and not recorded: it alone may happen again
        printed += happened
        if done.returncode != -signal.SIGKILL:
            break
        kills += 1

    assert done.returncode == 0, done.stderr
    assert kills >= 2
    assert printed == effects
    assert lines[-1] == expected[-1]


def test_an_order_that_waits_survives_a_kill(tmp_path: Path) -> None:
    killed_after("order_fulfilment", tmp_path, "reserving lamp")
    printed = run("order_fulfilment", tmp_path)
    assert printed.endswith("result: not approved\n")
    assert printed.count("releasing") == 1


def test_an_order_that_waits_is_approved_from_another_terminal_after_a_kill(tmp_path: Path) -> None:
    killed_after("order_fulfilment", tmp_path, "reserving lamp", "wait")
    said = re.search(r"^    keiro (complete .*)$", (EXAMPLES / "order_fulfilment.py").read_text(), re.MULTILINE)
    assert said is not None
    approve = [sys.executable, "-m", "keiro.cli", *said[1].split()]
    done = subprocess.run(approve, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert run("order_fulfilment", tmp_path, "wait").endswith("result: parcel-lamp\n")


def test_polling_goes_on_in_its_round_after_a_kill(tmp_path: Path) -> None:
    before = killed_after("polling", tmp_path, "asking, time 5")
    after = run("polling", tmp_path).splitlines()
    assert before == [f"asking, time {n}" for n in range(1, 6)]
    # The step that was under way may not have been recorded; none before it is repeated.
    assert after[0] in ("asking, time 5", "asking, time 6")
    assert after[-2:] == ["ready after 7", "rounds: 3, steps of the last: 1"]


def test_a_fan_out_reads_no_file_twice(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for n in range(40):
        (files / f"f{n}.py").write_text("x" * n)
    assert "{'files': 40, 'bytes': 780}" in run("fan_out", tmp_path, str(files))
    for path in files.iterdir():
        path.unlink()  # what is recorded is not read again
    assert "{'files': 40, 'bytes': 780}" in run("fan_out", tmp_path, str(files))


def test_the_same_program_runs_anywhere(tmp_path: Path, postgres_url: str) -> None:
    assert run("anywhere", tmp_path, "--url", f"sqlite:///{tmp_path}/reports.db") == "sqlite: 285\n"
    assert run("anywhere", tmp_path, "--url", postgres_url) == "postgresql: 285\n"


def test_a_review_is_decided_by_its_link_after_a_kill(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first = start("webhook", tmp_path, str(port))
    try:
        asked(f"http://127.0.0.1:{port}/documents/plan", "PUT")
        assert first.stdout is not None
        link = first.stdout.readline().rsplit(" ", 1)[1].strip()
    finally:
        first.kill()
        first.communicate()
    second = start("webhook", tmp_path, str(port))
    try:
        # What is refused does not count: the first answer is for good.
        with pytest.raises(urllib.error.HTTPError, match="400"):
            asked(link, "POST", {"verdict": 5})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(f"http://127.0.0.1:{port}/reviews/guessed", "POST", {"verdict": "bad"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(f"http://127.0.0.1:{port}/documents/unknown", "GET")
        assert asked(link, "POST", {"verdict": "good"}) == {"counted": True}
        assert asked(link, "POST", {"verdict": "bad"}) == {"counted": False}
        until = time.monotonic() + LIMIT_S
        while (found := asked(f"http://127.0.0.1:{port}/documents/plan", "GET"))["status"] != "completed":
            assert time.monotonic() < until
        assert found["result"] == '"plan is good"'
    finally:
        second.kill()
        second.communicate()


def asked(url: str, method: str, body: Any = None) -> Any:
    """The answer to a request, once the server is there."""
    until = time.monotonic() + LIMIT_S
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=LIMIT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() > until:
                raise
