"""`keiro replay`: what today's code would make of the runs of a journal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from keiro.testing.postgres import PostgresServer
from tests.cli.conftest import MODULE, Shell


@pytest.fixture
def changed(filled: Shell, tmp_path: Path) -> Shell:
    """The journal of several runs, and a module that is another one than it was."""
    shutil.copy(filled.folder / "keiro.db", tmp_path)
    shell = Shell(tmp_path)
    module = MODULE.replace("async def work(n", "async def labour(n").replace("step(work,", "step(labour,")
    (tmp_path / "orders.py").write_text(module)
    return shell


def test_the_code_that_recorded_runs_replays_them(filled: Shell) -> None:
    effects, before = filled.effects, (filled.folder / "keiro.db").read_bytes()

    done = filled("replay", "orders")

    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "runs replayed: 3, would break: 0\n"
    assert filled.effects == effects
    assert (filled.folder / "keiro.db").read_bytes() == before


def test_what_would_break_is_printed_and_is_an_exit_code(changed: Shell) -> None:
    done = changed("replay", "orders", "--workflow", "chain")

    assert done.returncode == 1
    head, *lines = done.stdout.splitlines()
    assert head.split()[:2] == ["problem", "run"]
    assert [line.split()[:2] for line in lines] == [["never_asked_for", "wf:chain-eins"]] * 3 + [
        ["not_recorded", "wf:chain-eins"]
    ]
    assert lines[-1].endswith("'labour' is asked for and not recorded")
    assert done.stderr == "runs replayed: 1, would break: 1\n"
    assert changed.effects == []


def test_programs_get_the_problems_of_each_run(changed: Shell) -> None:
    done = changed("replay", "orders", "--status", "completed", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["runs"], found["skipped"]) == (2, {})
    (broken,) = found["broken"]
    assert (broken["run_id"], broken["status"]) == ("wf:chain-eins", "completed")
    assert broken["problems"][0] == {
        "kind": "never_asked_for",
        "step": "work",
        "message": "'work' is recorded and not asked for",
    }


def test_runs_of_workflows_that_the_module_does_not_have_are_told_of(changed: Shell) -> None:
    (changed.folder / "other.py").write_text(MODULE.replace("async def chain(", "async def another("))
    done = changed("replay", "other")
    assert done.returncode == 0
    assert done.stderr == (
        "runs of 'chain' left out: 1, the module has no such workflow\nruns replayed: 2, would break: 0\n"
    )


def test_what_bodies_print_is_no_result(filled: Shell) -> None:
    folder = filled.folder
    (folder / "loud.py").write_text(MODULE.replace("    await run.step(work, 1)\n", "    print('loud')\n"))
    done = filled("replay", "loud", "--workflow", "broken", "--json")
    assert done.returncode == 1
    assert '"never_asked_for"' in done.stdout and "loud" not in done.stdout
    assert "loud" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orders", "--workflow", "none"], "module 'orders' has no workflow 'none'; its workflows are: chain, held"),
        (["orders.py"], "'orders.py' names a file: name the module, orders"),
        (["orders:held"], "'orders:held' names a workflow: this command takes all of a module, orders"),
        (["nowhere"], "module 'nowhere' cannot be imported"),
        (["json"], "module 'json' has no workflow"),
        (["orders", "--url", "sqlite:///none.db"], "there is no file"),
    ],
)
def test_what_cannot_be_replayed_is_said(filled: Shell, arguments: list[str], message: str) -> None:
    done = filled("replay", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_runs_on_postgres_are_replayed(keiro: Shell, postgres_server: PostgresServer) -> None:
    with postgres_server.database() as url:
        assert keiro("run", "orders:chain", "--url", url).returncode == 0
        assert keiro("replay", "orders", "--url", url).stderr == "runs replayed: 1, would break: 0\n"
