"""`keiro demo`: any folder, measured file by file, killed and continued."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keiro.cli import demo
from keiro.errors import InvalidCall
from tests.cli.conftest import Shell, until
from tests.cli.test_reading import Other


@pytest.fixture
def tree() -> Iterator[Path]:
    """A folder with all that folders can hold."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / "ünï 文\n"
        (folder / "sub" / "deeper").mkdir(parents=True)
        (folder / "empty folder").mkdir()
        (folder / "plain.txt").write_text("one\ntwo\nthree")
        (folder / "with space.txt").write_text("\n" * 1000)
        (folder / "new\nline.txt").write_text("a\n")
        (folder / "tab\tand\x1b[31mcolour").write_text("b\n")
        (folder / "ünïcödé 文.md").write_text("ü" * 100)
        (folder / "ideographic\u3000space").write_text("c")
        (folder / "%41//x".replace("/", "_")).write_text("percent")
        (folder / ".hidden").write_text("h")
        (folder / "empty").touch()
        (folder / "binary.bin").write_bytes(random.Random(1).randbytes(3_000_000))
        (folder / "sub" / "deeper" / "code.py").write_text("pass\n" * 10)
        (folder / "sub" / "__pycache__").mkdir()
        (folder / "sub" / "__pycache__" / "code.pyc").write_bytes(b"\0")
        (folder / "to a file").symlink_to("plain.txt")
        (folder / "to a folder").symlink_to("sub")
        (folder / "to nothing").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(folder / "socket"))
        Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("latin\n")
        yield folder


PROBLEMS = {"to nothing", "loop", "pipe", "socket"}


def computed(folder: Path) -> dict[str, Any]:
    """What the demonstration has to say of a folder, by other means."""
    groups: dict[str, dict[str, Any]] = {}
    lines = {}
    unreadable = 0
    for where, _, names in os.walk(os.fsencode(folder)):
        for raw in names:
            path = os.path.join(where, raw)
            relative = os.path.relpath(path, os.fsencode(folder))
            try:
                shown = relative.decode()
            except UnicodeDecodeError:
                shown = "//" + "".join(
                    chr(c) if (chr(c).isalnum() and c < 128) or c in b"._-~/" else f"%{c:02X}" for c in relative
                )
            readable = os.path.isfile(path)
            content = Path(os.fsdecode(path)).read_bytes() if readable else b""
            unreadable += not readable
            lines[shown] = f"{shown}\0{hashlib.sha256(content).hexdigest() if readable else ''}\n"
            suffix = Path(shown).suffix or "(none)"
            group = groups.setdefault(suffix, {"suffix": suffix, "files": 0, "size": 0, "lines": 0, "compressed": 0})
            group["files"] += 1
            group["size"] += len(content)
            group["lines"] += content.count(b"\n")
            group["compressed"] += len(zlib.compress(content)) if readable else 0
    return {
        "folder": str(folder),
        "files": len(lines),
        **{name: sum(g[name] for g in groups.values()) for name in ("size", "lines", "compressed")},
        "unreadable": unreadable,
        "digest": hashlib.sha256("".join(lines[path] for path in sorted(lines)).encode()).hexdigest(),
        "groups": sorted(groups.values(), key=lambda g: (-g["size"], g["suffix"])),
    }


def test_every_file_is_measured_whatever_its_name(keiro: Shell, tree: Path) -> None:
    found = keiro.json("demo", str(tree))
    assert found == computed(tree)
    assert found["unreadable"] == len(PROBLEMS)
    (run,) = keiro.json("list", "--url", "sqlite:///keiro-demo.db")
    (scan, *batches) = keiro.json("show", run["run_id"], "--url", "sqlite:///keiro-demo.db")["steps"]
    assert scan["step"] == "scan" and scan["result"] == [[facts["path"] for facts in b["result"]] for b in batches]
    assert {facts["path"] for batch in batches for facts in batch["result"] if facts["problem"]} == PROBLEMS


def test_the_summary_is_a_table(keiro: Shell, tree: Path) -> None:
    done = keiro("demo", str(tree))
    assert done.returncode == 0
    folder, head, *rows, unreadable, digest = done.stdout.splitlines()
    assert folder == str(tree).replace("\n", "\\n")
    assert head.split() == ["files", "bytes", "lines", "compressed", "ratio", "suffix"]
    assert rows[0].split()[:2] == ["1", "3,000,000"] and rows[0].endswith(" .bin")
    assert rows[-1].split()[0] == str(computed(tree)["files"]) and rows[-1].endswith(" all")
    assert unreadable == "4 could not be read; the journal says why"
    assert digest == f"sha256 over all: {computed(tree)['digest']}"
    assert "see the steps with: keiro show wf:keiro.demo-" in done.stderr


@pytest.mark.crash
def test_killed_it_goes_on_and_measures_no_recorded_file_again(keiro: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    chance = random.Random(2)
    for n in range(400):  # enough for a kill to strike long before the end
        (folder / f"{n:03}.bin").write_bytes(chance.randbytes(150_000))
    expected = computed(folder)
    shutil.copy(keiro.folder / "keiro.db", keiro.folder / "keiro-demo.db")
    known: set[str] = set()
    for kill in range(3):
        process = keiro.start("demo", str(folder))
        enough = len(known) + 1
        until(lambda: len(_measured(keiro)) >= enough, process)  # noqa: B023
        process.kill()
        process.communicate()
        known = _measured(keiro)
        assert len(known) < 400, f"it had ended before kill {kill}"
        for name in known:  # measured again, they would be seen to be others
            (folder / name).write_bytes(b"other")
    done = keiro("demo", str(folder))
    assert done.returncode == 0
    assert f"sha256 over all: {expected['digest']}" in done.stdout
    assert f"{1 + len(known) // demo.BATCH} of them recorded before" in done.stderr
    (run,) = keiro.json("list", "--url", "sqlite:///keiro-demo.db")
    assert run["result"] == expected


def _measured(keiro: Shell) -> set[str]:
    try:
        runs = keiro.run_ids("keiro-demo.db")
    except Exception:  # not there yet
        return set()
    steps = [json.loads(payload) for payload in keiro.payloads(runs[0], "keiro-demo.db")] if runs else []
    return {facts["path"] for step in steps if "measure" in step.get("step", "") for facts in step["result"]}


def test_the_journals_own_files_are_left_alone(keiro: Shell) -> None:
    """Opening and closing them would drop the locks that the process holds on them."""
    (keiro.folder / "also").symlink_to("keiro-demo.db")
    found = keiro.json("demo", ".")
    assert found["files"] == 2
    assert {group["suffix"] for group in found["groups"]} == {".py", ".db"}


@pytest.mark.parametrize("folder", ["nowhere", "orders.py"])
def test_what_is_no_folder(keiro: Shell, folder: str) -> None:
    done = keiro("demo", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a folder: give the path of one that exists" in done.stderr
    assert not (keiro.folder / "keiro-demo.db").exists()


def test_the_default_is_the_standard_library_without_what_changes_or_is_not_of_it() -> None:
    (folder, own, skipped), _ = demo.arguments(None, "memory://")
    assert folder == str(Path(sysconfig.get_paths()["stdlib"]).resolve())
    assert (own, skipped) == ([], ["__pycache__", "site-packages", "dist-packages"])
    with pytest.raises(InvalidCall):
        demo.arguments(Path("/nowhere"), "memory://")


def test_what_may_not_be_read_is_said(tree: Path) -> None:
    (tree / "secret.txt").write_text("secret")
    (tree / "closed").mkdir()
    (tree / "secret.txt").chmod(0)
    (tree / "closed").chmod(0)
    for path in (tree.parent, tree):
        path.chmod(0o755)
    with Other():
        paths = [path for batch in demo.scan(str(tree), [], []) for path in batch]
        assert {"secret.txt", "closed"} <= set(paths)
        facts = {one.path: one for one in demo.measure(str(tree), paths)}
    assert facts["secret.txt"].problem == "PermissionError: Permission denied"
    assert facts["closed"].problem == "PermissionError: Permission denied"
    assert facts["pipe"].problem == "no regular file"
    assert facts["plain.txt"].problem is None
    (tree / "closed").chmod(0o700)
