"""`keiro start`, `worker`, `complete`, `cancel`, `resurrect`, `children`, `tree`: on runs that a worker drives."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import keiro
from tests.cli.conftest import Shell

WAITING = """
import keiro

@keiro.step
def fragile() -> str:
    import pathlib
    if not pathlib.Path("mended").exists():
        raise ValueError("not mended")
    return "mended"

@keiro.workflow
async def breaks(run: keiro.WorkflowRun) -> str:
    return await run.step(fragile)

@keiro.workflow
async def leaf(run: keiro.WorkflowRun) -> int:
    return await run.deferred("more", int).result()

@keiro.step(cleanup=True)
async def undo() -> None:
    import asyncio, pathlib
    while not pathlib.Path("undone").exists():
        await asyncio.sleep(0.01)

@keiro.workflow(cleanup=True)
async def tidy(run: keiro.WorkflowRun) -> None:
    import asyncio
    try:
        await run.deferred("more", int).result()
    except asyncio.CancelledError:
        await run.step(undo)
        raise

@keiro.workflow
async def family(run: keiro.WorkflowRun) -> list:
    child = await run.spawn(leaf, id=f"{run.key}-leaf")
    other = await run.spawn(leaf, id=f"{run.key}-other", on_cancel="detach")
    return [await child.result(), await run.deferred("said", str).result()]
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A folder with a module, and a worker for it."""
    (tmp_path / "waiting.py").write_text(WAITING)
    found = Shell(tmp_path)
    found("migrate")
    worker = found.start("worker", "waiting")
    assert worker.stderr is not None
    assert "driving breaks, family, leaf, tidy" in worker.stderr.readline()
    yield found
    worker.send_signal(signal.SIGTERM)
    _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0, said


def until(shell: Shell, run_id: str, status: str) -> None:
    while shell.json("show", run_id)["status"] != status:
        pass


def test_a_run_is_started_answered_and_read_from_the_command_line(shell: Shell) -> None:
    assert shell("start", "waiting:family", "--id", "a").stdout == "started: wf:family-a\n"
    until(shell, "wf:leaf-a-leaf", "suspended")
    assert "waits for deferred more" in shell("show", "wf:leaf-a-leaf").stdout
    assert [one["run_id"] for one in shell.json("children", "wf:family-a")] == ["wf:leaf-a-leaf", "wf:leaf-a-other"]

    assert shell.json("complete", "wf:leaf-a-leaf", "more", "--value", "7")["outcome"] == "completed"
    assert shell.json("complete", "wf:leaf-a-leaf", "more", "--value", "8")["outcome"] == "was_completed_before"
    shell("complete", "wf:family-a", "said", "--value", '"yes"')
    until(shell, "wf:family-a", "completed")

    assert shell.json("show", "wf:family-a")["result"] == [7, "yes"]
    tree = shell.json("tree", "wf:family-a")
    assert [child["status"] for child in tree["children"]] == ["completed", "suspended"]
    assert "  wf:leaf-a-other  suspended  waits for deferred more" in shell("tree", "wf:family-a").stdout


def test_a_cancellation_is_shown_first_and_takes_the_children_along(shell: Shell) -> None:
    shell("start", "waiting:family", "--id", "a")
    until(shell, "wf:leaf-a-other", "suspended")
    until(shell, "wf:family-a", "suspended")

    preview = shell("cancel", "wf:family-a")
    assert preview.stdout == "would cancel: wf:family-a\n  wf:leaf-a-leaf\n"
    assert "nothing was changed" in preview.stderr
    assert shell.json("show", "wf:family-a")["status"] == "suspended"

    done = shell.json("cancel", "wf:family-a", "--yes", "--reason", "too late")
    assert done == {"run_id": "wf:family-a", "outcome": "cancelled", "runs": ["wf:family-a", "wf:leaf-a-leaf"]}
    assert shell.json("cancel", "wf:family-a", "--yes")["outcome"] == "already_cancelled"
    statuses = {name: shell.json("show", name)["status"] for name in ("wf:leaf-a-leaf", "wf:leaf-a-other")}
    assert statuses == {"wf:leaf-a-leaf": "cancelled", "wf:leaf-a-other": "suspended"}


def test_a_run_with_a_cleanup_is_said_to_be_asked_and_not_cancelled_until_it_has_ended(shell: Shell) -> None:
    shell("start", "waiting:tidy", "--id", "a")
    until(shell, "wf:tidy-a", "suspended")

    assert shell("cancel", "wf:tidy-a", "--yes", "--reason", "too late").stdout == "asked to end: wf:tidy-a\n"
    assert shell.json("cancel", "wf:tidy-a", "--yes")["outcome"] == "already_asked_to_end"
    shown = shell("show", "wf:tidy-a").stdout
    assert "asked to end, cancelled at " in shown
    assert "reason: too late" in shown

    (shell.folder / "undone").touch()
    until(shell, "wf:tidy-a", "cancelled")
    shown = shell("show", "wf:tidy-a").stdout
    assert "asked to end" not in shown
    assert "reason: too late" in shown
    assert shell.json("show", "wf:tidy-a")["reason"] == "too late"


def test_runs_that_are_linked_are_in_the_tree_and_go_along(shell: Shell) -> None:
    for key in "abc":
        shell("start", "waiting:leaf", "--id", key)
        until(shell, f"wf:leaf-{key}", "suspended")

    async def linked() -> None:
        async with keiro.Engine(f"sqlite:///{shell.folder}/keiro.db", worker=False) as engine:
            for child, parent in ("ba", "cb", "ca"):
                await engine.run_parents.link(f"wf:leaf-{child}", f"wf:leaf-{parent}")

    asyncio.run(linked())

    tree = shell("tree", "wf:leaf-a").stdout.replace("  waits for deferred more", "")
    assert tree.splitlines() == [
        "wf:leaf-a  suspended",
        "  wf:leaf-b  suspended",
        "    wf:leaf-c  suspended",
        "  wf:leaf-c  suspended  (again)",
    ]
    assert shell("cancel", "wf:leaf-a").stdout == "would cancel: wf:leaf-a\n  wf:leaf-b\n  wf:leaf-c\n"


def test_a_failed_run_goes_on_when_it_is_resurrected(shell: Shell) -> None:
    shell("start", "waiting:breaks", "--id", "a")
    until(shell, "wf:breaks-a", "failed")
    (shell.folder / "mended").touch()

    assert shell.json("resurrect", "wf:breaks-a")["outcome"] == "would_resurrect"
    assert shell.json("show", "wf:breaks-a")["status"] == "failed"
    assert shell.json("resurrect", "wf:breaks-a", "--yes")["outcome"] == "resurrected"
    until(shell, "wf:breaks-a", "completed")
    assert shell.json("resurrect", "wf:breaks-a", "--yes")["outcome"] == "not_failed"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["cancel", "wf:family-none"], "there is no run 'wf:family-none'"),
        (["complete", "wf:family-none", "said"], "there is no run 'wf:family-none'"),
        (["complete"], "give the run id and the name of the deferred, or token="),
        (["complete", "--token", "x"], "'x' is no token of a deferred"),
        (["complete", "wf:a-b", "c", "--value", "yes"], "--value 'yes' is no JSON"),
        (["children", "nothing"], "'nothing' is not a run id"),
        (["worker", "os"], "there is no workflow in it"),
    ],
)
def test_what_cannot_be_done_says_why(tmp_path: Path, command: list[str], message: str) -> None:
    found = Shell(tmp_path)
    found("migrate")
    done = found(*command)
    assert done.returncode == 2
    assert message in done.stderr
    assert os.listdir(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        ["children", "wf:leaf-a"],
        ["tree", "wf:leaf-a"],
        ["cancel", "wf:leaf-a", "--yes"],
        ["resurrect", "wf:leaf-a"],
        ["complete", "wf:leaf-a", "more"],
        ["gc", "--older-than", "1d"],
        ["doctor"],
        ["schedules", "list"],
    ],
)
def test_a_mistaken_url_makes_no_new_file(tmp_path: Path, command: list[str]) -> None:
    done = Shell(tmp_path)(*command, "--url", "sqlite:///none.db")
    assert done.returncode == 2
    assert "there is no file none.db" in done.stderr
    assert not (tmp_path / "none.db").exists()


def test_what_ended_is_listed_first_and_then_deleted(shell: Shell) -> None:
    shell("start", "waiting:leaf", "--id", "a")
    shell("complete", "wf:leaf-a", "more", "--value", "7")
    until(shell, "wf:leaf-a", "completed")
    [step] = shell.json("steps", "wf:leaf-a")
    assert (step["step"], step["status"]) == ("awk:more", "succeeded")
    assert "awk:more" in shell("steps", "wf:leaf-a").stdout

    assert shell.json("gc", "--older-than", "1h")["collected"] == []
    preview = shell("gc", "--older-than", "0")
    assert preview.stdout == "wf:leaf-a\n"
    assert "nothing was changed" in preview.stderr
    assert shell.json("gc", "--older-than", "0s", "--yes")["collected"] == ["wf:leaf-a"]
    assert "there is no run" in shell("show", "wf:leaf-a").stderr
    refused = shell("gc", "--older-than", "a month", "--yes")
    assert refused.returncode == 2
    assert "'a month' is no duration" in refused.stderr


def test_workers_are_listed_with_what_they_drive(shell: Shell) -> None:
    [worker] = shell.json("workers")
    assert worker["runs"] == 0
    assert 0 < worker["lease_left_ms"] <= 30_000
    assert str(worker["pid"]) in shell("workers").stdout


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert Shell(tmp_path)("--version").stdout == f"keiro {keiro.__version__}\n"
