"""`keiro doctor`: what is wrong, whether it was mended, and the exit codes."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.cli.conftest import Shell


def test_doctor_finds_leaves_and_mends(keiro: Shell) -> None:
    assert keiro("run", "orders:chain", "--id", "a").returncode == 0
    clean = keiro("doctor")
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "everything is as the journal says\n")
    with closing(sqlite3.connect(keiro.folder / "keiro.db")) as connection:
        connection.execute("UPDATE keiro_run_heads SET version = 1")
        connection.commit()
    found = keiro("doctor")
    assert found.returncode == 1
    assert found.stdout.splitlines()[1].split()[:3] == ["head", "wrong", "wf:chain-a"]
    assert found.stderr == "1 found, 0 mended\nnothing was changed: the same command with --fix mends it\n"
    assert [(one["kind"], one["fixed"]) for one in keiro.json("doctor", "--fix")] == [("head", True)]
    assert keiro.json("doctor") == []
