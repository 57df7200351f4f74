"""`keiro list`, `show`, `journal`, `migrate`: what people and programs read, and from where."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import sqlite3
import struct
import subprocess
import tempfile
import termios
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from keiro.cli.reading import journal
from keiro.errors import StoreUnavailable
from keiro.stores import migrate
from keiro.stores.migrate import HEAD
from keiro.testing.postgres import PostgresServer
from tests.cli.conftest import Shell

LONG = "wf:basket-" + "b" * 100
ODD = "wf:broken-böse 文"
REOPEN = "UPDATE keiro_runs SET status = 'pending', result_json = NULL, finished_at_ms = NULL WHERE key = 'eins'"


# For people


def test_list_has_one_line_a_run_and_the_whole_id(filled: Shell) -> None:
    done = filled("list")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["status", "created", "took", "run"]
    assert [line.split()[0] for line in lines] == ["completed", "failed", "completed"]
    assert [line[line.index("wf:") :] for line in lines] == [LONG, ODD, "wf:chain-eins"]
    assert len({line.index("wf:") for line in lines}) == 1
    assert re.match(r"completed  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", lines[0])


def test_a_list_that_is_cut_says_so(filled: Shell) -> None:
    done = filled("list", "--limit", "2")
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == "these are the newest 2: --limit N shows more\n"
    assert filled("list", "--limit", "3").stderr == ""
    assert len(filled.json("list", "--limit", "2")) == 2


def test_times_are_local_for_people_and_milliseconds_for_programs(filled: Shell) -> None:
    (run,) = filled.json("list", "--limit", "1")
    assert isinstance(run["created_at_ms"], int)
    there = filled("list", "--limit", "1", env={"TZ": "Etc/GMT-14"}).stdout
    here = filled("list", "--limit", "1", env={"TZ": "UTC"}).stdout
    assert there != here


def test_show_has_the_state_and_the_steps_with_their_durations(filled: Shell) -> None:
    lines = filled("show", "wf:chain-eins").stdout.splitlines()
    assert lines[0] == "wf:chain-eins  completed"
    assert re.fullmatch(r"created \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, took \d+(\.\d\d)? m?s", lines[1])
    assert lines[2:5] == ["input: {}", "result: 3", ""]
    assert lines[5].split() == ["status", "started", "took", "attempt", "step", "result"]
    assert [re.sub(r"  .*\d m?s ", " ", line).split() for line in lines[6:]] == [
        ["succeeded", "1", name, result] for name, result in (("work", "0"), ("work#2", "1"), ("work#3", "2"))
    ]


def test_show_of_a_failed_run_has_the_traceback(filled: Shell) -> None:
    text = filled("show", ODD).stdout
    assert "failure:\n  Traceback (innermost last):\n" in text
    assert "  ValueError: cannot do " in text


def test_journal_has_a_line_an_event(filled: Shell) -> None:
    lines = filled("journal", LONG).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["version", "1", "2", "3", "4"]
    assert [re.split(r"  +", line)[-2] for line in lines[1:]] == [
        "WorkflowStarted", "basket:ItemAdded", "StepRecorded", "WorkflowCompleted"
    ]  # fmt: skip


def test_no_data_can_command_the_terminal(filled: Shell) -> None:
    """The failure's message holds an escape sequence and markup."""
    for command in ("show", "journal"):
        done = filled(command, ODD)
        assert "\x1b" not in done.stdout
        assert "[31m <b>" in done.stdout
    assert "\\x1b[31m <b>" in filled("run", "orders:broken", "--input", '["\\u001b[31m <b>"]', "--id", "böse 文").stderr


def on_terminal(shell: Shell, *arguments: str, columns: int) -> str:
    """What a terminal of this width is sent."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {"TERM": "xterm-256color", "COLUMNS": "", "CI": ""}
    process = shell.start(*arguments, stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    shown = b""
    try:
        while data := os.read(leader, 65536):
            shown += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize("columns", [20, 200])
def test_ids_can_be_copied_whole_from_any_terminal(filled: Shell, columns: int) -> None:
    shown = on_terminal(filled, "list", columns=columns)
    assert LONG in shown
    assert ODD in shown
    assert "…" not in shown
    assert "\x1b[32mcompleted" in shown
    assert LONG in on_terminal(filled, "show", LONG, columns=columns)


def test_progress_lives_on_a_terminal_and_leaves_two_lines(keiro: Shell) -> None:
    shown = on_terminal(keiro, "run", "orders:chain", "--input", "[3, 0.1]", "--id", "a", columns=40)
    assert "\x1b[?25l" in shown and "\x1b[?25h" in shown  # the cursor is hidden, and comes back
    assert shown.startswith("wf:chain-a is started\r\n")
    assert shown.endswith("wf:chain-a has ended: 3 steps\r\n3\r\n")


def test_a_reader_that_has_enough_is_no_error(filled: Shell) -> None:
    for command in (["list"], ["journal", "wf:chain-eins", "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        process = filled.start(*command, stdout=writer)
        os.close(writer)
        _, err = process.communicate()
        assert (process.returncode, err) == (0, "")


def test_a_standard_output_that_is_full_is_said(filled: Shell) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = filled("list", stdout=full)
    assert (done.returncode, done.stderr) == (2, "keiro: standard output cannot be written: No space left on device\n")


def test_closed_streams_do_not_get_in_the_way(keiro: Shell) -> None:
    """What is opened next must not take the place of standard output."""
    script = f"exec {json.dumps(os.sys.executable)} -m keiro.cli run orders:noisy --id a <&- >&- 2>&-"  # type: ignore[attr-defined]
    done = subprocess.run(["sh", "-c", script], cwd=keiro.folder, check=False)
    assert done.returncode == 0
    assert keiro.json("show", "wf:noisy-a")["result"] == "a\nb"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_the_terminal_will_do(filled: Shell, encoding: str) -> None:
    done = filled("list", env={"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert done.returncode == 0
    assert ODD.encode(encoding, "backslashreplace").decode(encoding) in done.stdout
    assert json.loads(filled("list", "--json", env={"PYTHONIOENCODING": encoding}).stdout)[1]["run_id"] == ODD


@pytest.mark.parametrize("command", ["", "run", "demo", "list", "show", "journal", "migrate"])
def test_help_is_readable(keiro: Shell, command: str) -> None:
    done = keiro(*command.split(), "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: keiro {command}".rstrip() in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    if command:
        assert "--url" in done.stdout and "--json" in done.stdout
        assert ("KEIRO_URL" in done.stdout) == (command != "demo")
    else:
        assert "Exit codes" in done.stdout


# For programs


def test_list_as_json(filled: Shell) -> None:
    found = filled.json("list")
    assert [run["run_id"] for run in found] == [LONG, ODD, "wf:chain-eins"]
    assert (found[2]["input"], found[2]["result"], found[2]["failure"]) == ({}, 3, None)
    assert found[1]["failure"]["type"] == "builtins:ValueError"
    assert [run["key"] for run in filled.json("list", "--status", "completed", "--workflow", "chain")] == ["eins"]
    assert [run["run_id"] for run in filled.json("list", "--limit", "1")] == [LONG]
    assert filled.json("list", "--workflow", "nope") == []


def test_show_and_journal_as_json(filled: Shell) -> None:
    shown = filled.json("show", "wf:chain-eins")
    assert (shown["status"], shown["result"]) == ("completed", 3)
    steps = shown["steps"]
    assert [(step["step"], step["result"], step["attempt"]) for step in steps] == [
        ("work", 0, 1), ("work#2", 1, 1), ("work#3", 2, 1)
    ]  # fmt: skip
    for step in steps:
        assert step["duration_ms"] == step["finished_at_ms"] - step["started_at_ms"] >= 0
    events = filled.json("journal", "wf:chain-eins")
    assert [event["version"] for event in events] == [1, 2, 3, 4, 5]
    assert events[1]["payload"]["step"] == "work"
    assert all(re.fullmatch("[0-9a-f]{32}", event["event_id"]) for event in events)
    assert isinstance(events[0]["recorded_at_ms"], int)


@pytest.mark.parametrize("command", ["show", "journal"])
@pytest.mark.parametrize(
    ("run_id", "message"),
    [
        ("wf:chain-zwei", "there is no run 'wf:chain-zwei' here: `keiro list` shows those that exist"),
        ("chain-eins", "'chain-eins' is not a run id: it must read wf:<workflow>-<key>"),
        ("chain-eins", ". Was 'wf:chain-eins' meant?"),
        ("wf:chain-a#01", "is not a run id"),
        ("wf:chain-\udcff", "is not allowed"),
        ("", "'' is not a run id"),
    ],
)
def test_an_id_of_no_run(filled: Shell, command: str, run_id: str, message: str) -> None:
    done = filled(command, run_id)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keiro: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_status_that_does_not_exist(filled: Shell) -> None:
    done = filled("list", "--status", "finished")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'finished' is not one of" in done.stderr and "'suspended'" in done.stderr


# Where there is nothing to read


def test_what_is_no_journal_is_said_and_left_alone(keiro: Shell) -> None:
    (keiro.folder / "other.db").touch()
    with closing(sqlite3.connect(keiro.folder / "foreign.db")) as foreign:
        foreign.execute("CREATE TABLE keiro_runs (a)")
    (keiro.folder / "text.db").write_text("no database at all, but long enough to look like one" * 100)
    with closing(sqlite3.connect(keiro.folder / "keiro.db")) as newer:
        shutil.copy(keiro.folder / "keiro.db", keiro.folder / "newer.db")
    with closing(sqlite3.connect(keiro.folder / "newer.db")) as newer:
        newer.execute(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'")
        newer.commit()
    before = {path: path.read_bytes() for path in keiro.folder.glob("*.db*")}
    for url, message in (
        ("sqlite:///none.db", "there is no file none.db: check --url and $KEIRO_URL"),
        ("sqlite:////nowhere/none.db", "there is no file /nowhere/none.db"),
        ("sqlite:///.", ". is a folder. Give the path of a file in it"),
        ("sqlite:///other.db", f"has no tables of keiro and this keiro needs revision {HEAD}: run `keiro migrate"),
        ("sqlite:///foreign.db", "is not keiro's: it has keiro_* tables"),
        ("sqlite:///newer.db", "was written by a newer keiro (revision 9999"),
        ("sqlite:///text.db", "text.db is not an SQLite database"),
        ("sqlite:///a%00b", "a path has no NUL character"),
        ("memory://", "a memory:// journal ends with its process"),
        ("keiro.db", "'keiro.db' names no store: use memory://, sqlite:///relative.db"),
        ("postgresql://me:secret@[/x", "the address of the Postgres database is not understood"),
        ("postgresql://me:secret@127.0.0.1:1/x", "cannot reach postgresql://me@127.0.0.1:1/x"),
    ):
        done = keiro("list", "--url", url)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("keiro: ") and message in done.stderr
        assert "secret" not in done.stderr and "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in keiro.folder.glob("*.db*")} == before


def test_a_file_is_migrated(keiro: Shell) -> None:
    url = ("--url", "sqlite:///new.db")
    behind = keiro("migrate", "--check", *url)
    assert (behind.returncode, behind.stdout) == (2, "")
    assert "run `keiro migrate --url sqlite:///new.db`" in behind.stderr
    assert not (keiro.folder / "new.db").exists()
    done = keiro("migrate", *url)
    assert (done.returncode, done.stdout) == (0, f"sqlite:///new.db is at revision {HEAD}\n")
    assert keiro.json("migrate", "--check", *url) == {"url": "sqlite:///new.db", "revision": HEAD}
    assert keiro("list", *url).stderr == "no runs\n"
    assert "memory:// has no schema" in keiro("migrate", "--url", "memory://").stderr


def test_a_postgres_database_is_read_and_migrated(
    keiro: Shell, postgres_url: str, postgres_server: PostgresServer
) -> None:
    secret = postgres_url.replace("postgres@", "postgres:secret@")
    behind = keiro("list", "--url", secret)
    assert (behind.returncode, behind.stdout) == (2, "")
    assert f"run `keiro migrate --url {postgres_url}`" in behind.stderr
    assert keiro.json("migrate", "--url", secret) == {"url": postgres_url, "revision": HEAD}
    assert keiro.json("run", "orders:chain", "--id", "a", "--url", secret) == 3
    # As on a standby: nothing may be written, not even by listening.
    readonly = f"{postgres_url}?options=-c%20default_transaction_read_only%3Don"
    assert [run["run_id"] for run in keiro.json("list", "--url", readonly)] == ["wf:chain-a"]
    assert [step["step"] for step in keiro.json("show", "wf:chain-a", "--url", readonly)["steps"]] == [
        "work", "work#2", "work#3"
    ]  # fmt: skip
    assert [len(event["event_id"]) for event in keiro.json("journal", "wf:chain-a", "--url", readonly)] == [32] * 5
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE keiro.keiro_runs SET attempts = 7")  # reading waits for nobody
        assert [run["attempts"] for run in keiro.json("list", "--url", postgres_url)] == [0]
        connection.rollback()


# Who may only read


@pytest.fixture
def others_folder(filled: Shell) -> Iterator[Path]:
    """A folder with a journal that the user, as whom the test goes on, may read and not write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        shutil.copy(filled.folder / "keiro.db", folder)
        folder.chmod(0o755)
        (folder / "keiro.db").chmod(0o444)
        if os.geteuid() != 0:
            folder.chmod(0o555)
            yield folder
            folder.chmod(0o755)
            return
        yield folder


class Other:
    """Root may write everywhere, so who is root reads as another user."""

    def __enter__(self) -> None:
        self.root = os.geteuid() == 0
        if self.root:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        if self.root:
            os.seteuid(0)


def test_a_journal_that_may_only_be_read_can_be_read(others_folder: Path) -> None:
    with Other(), journal(f"sqlite:///{others_folder}/keiro.db") as found:
        assert len(found.runs(None, None, 10)) == 3
    assert [path.name for path in others_folder.iterdir()] == ["keiro.db"]


def test_nothing_is_left_beside_a_file_of_another_user(others_folder: Path) -> None:
    """Its owner could not write what this user had made there, and would find its own journal read-only."""
    others_folder.chmod(0o777)
    with Other(), journal(f"sqlite:///{others_folder}/keiro.db") as found:
        assert len(found.runs(None, None, 10)) == 3
    assert [path.name for path in others_folder.iterdir()] == ["keiro.db"]


def test_a_journal_that_somebody_writes_can_be_read(others_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs two users")
    with closing(sqlite3.connect(others_folder / "keiro.db", isolation_level=None)) as writer:
        writer.execute(REOPEN)
        with Other(), journal(f"sqlite:///{others_folder}/keiro.db") as found:
            assert found.run("wf:chain-eins").status == "pending"


def test_a_journal_that_was_left_in_a_crash_is_not_read_without_its_newest_part(others_folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs two users")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        copy = Path(name)
        copy.chmod(0o755)
        with closing(sqlite3.connect(others_folder / "keiro.db", isolation_level=None)) as writer:
            writer.execute(REOPEN)
            for end in ("", "-wal"):
                shutil.copy(others_folder / f"keiro.db{end}", copy)
        unreadable = pytest.raises(StoreUnavailable, match="cannot be opened")
        with unreadable, Other(), journal(f"sqlite:///{copy}/keiro.db") as found:
            found.runs(None, None, 10)
