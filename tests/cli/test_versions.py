"""What the command line shows of the versions of runs, and which of them a module drives and replays."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.cli.conftest import Shell

VERSIONS = """
import keiro

@keiro.workflow(name="fulfil", version="1", pinned=True)
async def first(run: keiro.WorkflowRun) -> str:
    return "first"

@keiro.workflow(name="fulfil", version="2", pinned=True)
async def second(run: keiro.WorkflowRun) -> str:
    return "second"
"""
ONLY_SECOND = "import keiro\n\n@keiro.workflow" + VERSIONS.rpartition("@keiro.workflow")[2]


def test_a_run_that_waits_for_another_version_is_shown_and_not_driven(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(VERSIONS)
    (tmp_path / "new.py").write_text(ONLY_SECOND)
    shell = Shell(tmp_path)
    shell("migrate")
    assert shell("start", "both:first", "--id", "old").returncode == 0
    worker = shell.start("worker", "new")
    assert worker.stderr is not None
    told = worker.stderr.readline()
    assert "started under the version '1' wait here" in told
    assert "driving fulfil@2" in worker.stderr.readline()
    assert shell("start", "both:second", "--id", "new").returncode == 0
    while shell.json("show", "wf:fulfil-new")["status"] != "completed":
        pass
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)

    head, new, old = shell("list").stdout.splitlines()
    assert head.split() == ["status", "created", "took", "version", "run"]
    assert (new.split()[0], *new.split()[-2:]) == ("completed", "2", "wf:fulfil-new")
    assert (old.split()[0], *old.split()[-2:]) == ("pending", "1", "wf:fulfil-old")
    assert "version 1" in shell("show", "wf:fulfil-old").stdout.splitlines()
    replayed = shell("replay", "new")
    assert (replayed.returncode, "runs replayed: 1, would break: 0" in replayed.stderr) == (0, True)
    assert "'fulfil@1' left out: 1" in replayed.stderr
    assert shell("replay", "both").stderr == "runs replayed: 2, would break: 0\n"
