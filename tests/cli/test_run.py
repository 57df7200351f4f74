"""`keiro run`: results, continuing after kills, signals, failures, and what stands on which stream."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess

import pytest

from keiro.cli import driving
from keiro.errors import StoreBusy, StoreUnavailable
from keiro.testing.postgres import PostgresServer
from tests.cli.conftest import Shell, until


def test_a_result_is_json_on_standard_output_and_progress_is_not(keiro: Shell) -> None:
    done = keiro("run", "orders:chain", "--input", '{"n": 4}', "--id", "a")
    assert (done.returncode, done.stdout) == (0, "6\n")
    assert done.stderr == "wf:chain-a is started\nwf:chain-a has ended: 4 steps\n"


@pytest.mark.parametrize(
    ("given", "result"), [('{"n": 4}', 6), ("[4]", 6), ("4", 6), ("[]", 3), ("{}", 3), ('{"seconds": 0.0}', 3)]
)
def test_input_is_by_name_by_place_or_the_only_argument(keiro: Shell, given: str, result: int) -> None:
    assert keiro.json("run", "orders:chain", "--input", given) == result


def test_parameters_may_be_called_like_keywords_of_start(keiro: Shell) -> None:
    """The run's key is --id; a parameter `id` of the workflow is another thing."""
    assert keiro.json("run", "orders:Basket", "--input", '{"connection": "c", "id": "i"}', "--id", "a") == ["i", "c"]
    refused = keiro("run", "orders:Basket", "--input", '{"connection": "c"}')
    assert refused.returncode == 2
    assert "'connection' cannot be given by name" in refused.stderr


def test_what_steps_and_their_programs_print_does_not_mix_with_the_result(keiro: Shell) -> None:
    done = keiro("run", "orders:noisy", "--json")
    assert (done.returncode, done.stdout) == (0, '"a\\nb"\n')
    assert done.stderr.splitlines() == ["the body prints", "the step prints", "its program prints"]


def test_a_run_that_has_ended_gives_its_result_again(keiro: Shell) -> None:
    for _ in range(2):
        assert keiro.json("run", "orders:chain", "--id", "a") == 3
    assert keiro("run", "orders:chain", "--id", "a").stderr == "wf:chain-a has ended before: 3 steps\n"
    assert keiro.effects == ["work 0", "work 1", "work 2"]
    assert keiro.json("run", "orders:chain", "--input", "1") == 0  # without an id: a new one
    conflict = keiro("run", "orders:chain", "--id", "a", "--input", "[5]")
    assert (conflict.returncode, conflict.stdout) == (2, "")
    assert "wf:chain-a exists and was started with another input" in conflict.stderr


def test_a_failed_run_shows_type_message_and_traceback(keiro: Shell) -> None:
    done = keiro("run", "orders:broken", "--id", "a")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[:3] == ["wf:broken-a is started", "wf:broken-a has ended: 1 step", "keiro: wf:broken-a has failed"]
    assert "ValueError: cannot do it" in lines
    assert "KeyError: 'deeper'" in lines
    assert '    raise ValueError(f"cannot do {what}") from error' in lines
    assert not any("/keiro/" in line for line in lines)  # no frames of ours

    again = keiro("run", "orders:broken", "--id", "a", "--json")
    found = json.loads(again.stdout)
    assert (again.returncode, found["run_id"], found["status"]) == (1, "wf:broken-a", "failed")
    assert (found["failure"]["type"], found["failure"]["message"]) == ("builtins:ValueError", "cannot do it")
    assert keiro.effects == ["work 1"]


# Kills


@pytest.mark.crash
@pytest.mark.parametrize("named", [True, False])
def test_killed_at_random_moments_it_goes_on_and_repeats_no_recorded_step(keiro: Shell, named: bool) -> None:
    # Far more steps than the kills leave time for: it must not end before the last of them.
    command = ("run", "orders:chain", "--input", '{"n": 60, "seconds": 0.02}', *(("--id", "a") if named else ()))
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    run_id = "wf:chain-a"
    for _ in range(4):
        recorded, effects = keiro.recorded(run_id), len(keiro.effects)
        process = keiro.start(*command)
        more = chance.randint(0, 3)
        until(lambda: len(keiro.effects) >= effects + more, process)  # noqa: B023
        try:
            process.wait(chance.random() * 0.06)
        except subprocess.TimeoutExpired:
            process.kill()
        out, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, (seed, out)
        run_ids = keiro.run_ids()
        assert len(run_ids) <= 1, seed
        run_id = run_ids[0] if run_ids else run_id
        repeated = {f"work {recorded.index(step)}" for step in recorded} & set(keiro.effects[effects:])
        assert not repeated, seed
    recorded, effects = keiro.recorded(run_id), len(keiro.effects)
    done = keiro(*command)
    assert (done.returncode, done.stdout) == (0, "1770\n"), seed
    if recorded:
        assert f"{run_id} goes on after {len(recorded)} recorded step" in done.stderr
        assert f"has ended: 60 steps, {len(recorded)} of them recorded before" in done.stderr
    assert keiro.effects[effects:] == [f"work {n}" for n in range(len(recorded), 60)], seed


@pytest.mark.crash
def test_it_goes_on_after_a_kill_on_postgres(keiro: Shell, postgres_url: str) -> None:
    command = ("run", "orders:held", "--url", postgres_url)
    process = keiro.start(*command)
    until(lambda: "slow begins" in keiro.effects, process)
    process.kill()
    process.communicate()
    (keiro.folder / "go").touch()
    done = keiro(*command)
    assert (done.returncode, json.loads(done.stdout)) == (0, [0, "done", 1])
    assert keiro.effects == ["work 0", "slow begins", "slow begins", "slow ends", "work 1"]
    (run,) = keiro.json("list", "--url", postgres_url)
    assert (run["status"], run["result"]) == ("completed", [0, "done", 1])


@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_under_way_end_and_hands_the_run_back(keiro: Shell, number: signal.Signals) -> None:
    process = keiro.start("run", "orders:held", "--id", "a")
    until(lambda: "slow begins" in keiro.effects, process)
    assert process.stderr is not None
    assert process.stderr.readline() == "wf:held-a is started\n"
    process.send_signal(number)
    assert process.stderr.readline() == "stopping: steps under way get 10 s to end, a second signal stops them now\n"
    (keiro.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted: start the same command again to go on\n")
    shown = keiro.json("show", "wf:held-a")
    assert (shown["status"], [step["step"] for step in shown["steps"]]) == ("pending", ["work", "slow"])
    assert keiro.json("run", "orders:held", "--id", "a") == [0, "done", 1]
    assert keiro.effects == ["work 0", "slow begins", "slow ends", "work 1"]


@pytest.mark.crash
def test_a_second_signal_does_not_wait_for_the_step(keiro: Shell) -> None:
    process = keiro.start("run", "orders:held", "--id", "a")
    until(lambda: "slow begins" in keiro.effects, process)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "wf:held-a is started\n"
    assert process.stderr.readline().startswith("stopping")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=driving.GRACE_S - 1)  # else it has waited for all of it
    assert (process.returncode, out, err) == (130, "", "interrupted: start the same command again to go on\n")
    assert keiro.json("show", "wf:held-a")["status"] == "pending"
    assert keiro.effects == ["work 0", "slow begins"]


def test_a_result_is_printed_although_runs_of_others_hold_the_engine_up(keiro: Shell) -> None:
    """The engine of `run` also drives what others left behind, and closing it gives their steps grace."""
    process = keiro.start("run", "orders:held", "--id", "left")
    until(lambda: "slow begins" in keiro.effects, process)
    process.kill()
    process.communicate()
    process = keiro.start("run", "orders:chain")
    assert process.stdout is not None
    assert process.stdout.readline() == "3\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert keiro.json("show", "wf:held-left")["status"] == "pending"


# Bad calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orders"], "'orders' names no workflow: write MODULE:WORKFLOW"),
        ([":chain"], "':chain' names no workflow"),
        (["nowhere:chain"], "module 'nowhere' cannot be imported (ModuleNotFoundError"),
        (["orders:nope"], "module 'orders' has no 'nope'; its workflows are: chain, held, broken, noisy, basket"),
        (["orders:not_one"], "3 is no workflow: pass a function decorated with @keiro.workflow"),
        (["orders:work"], "is no workflow"),
        (["orders.py:chain"], "'orders.py:chain' names a file: name the module, orders:chain"),
        (["./shop/orders.py:chain"], "name the module, shop.orders:chain"),
        (["exits:chain"], "module 'exits' cannot be imported (SystemExit: 7)"),
        (["raises:chain"], "module 'raises' cannot be imported (RuntimeError: at import)"),
        (["orders:chain", "--input", '{"n":'], "--input is not JSON (Input data was truncated)"),
        (["orders:chain", "--input", "{'n': 1}"], "Strings need double quotes"),
        (["orders:chain", "--input", '{"n": NaN}'], "--input is not JSON"),
        (["orders:chain", "--input", os.fsdecode(b'"\xff"')], "--input is not JSON ('utf-8' codec can't encode"),
        (["orders:chain", "--input", "[" * 3000 + "]" * 3000], "--input is not JSON (maximum recursion depth"),
        (["orders:chain", "--input", '{"m": 1}'], "there is no parameter 'm'; the arguments are (n=3, seconds=0.0)"),
        (
            ["orders:chain", "--input", '{"n": "x"}'],
            "$.n does not fit the annotation of 'n': Expected `int`, got `str`",
        ),
        (["orders:chain", "--input", "[1, 2.0, 3]"], "3 arguments were given by position, at most 2 are taken"),
        (["orders:Basket"], "parameter 'id' is missing; the arguments are (id, connection='')"),
        (["orders:Basket", "--input", '["\\u0000"]'], "$.id holds a NUL character"),
        (["orders:chain", "--id", ""], "'' cannot be the id of a run: it must be a non-empty string"),
        (["orders:chain", "--id", "a:b"], "character ':' at 1 is not allowed"),
        (["orders:chain", "--id", os.fsdecode(b"\xff")], "is not allowed"),
        (["orders:chain", "--url", "mysql://me:secret@host/db"], "'mysql://…@host/db' names no store: use memory://"),
        (["orders:chain", "--url", "sqlite:////nowhere/a.db"], "there is no folder /nowhere. Create it"),
        (["orders:chain", "--url", "sqlite:////tmp"], "/tmp is a folder"),
        (["orders:chain", "--url", "sqlite:///orders.py"], "orders.py is not an SQLite database"),
        (
            ["orders:chain", "--url", "postgresql://me:secret@127.0.0.1:1/x"],
            "cannot reach postgresql://me@127.0.0.1:1/x",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_said_and_nothing_happens(keiro: Shell, arguments: list[str], message: str) -> None:
    (keiro.folder / "exits.py").write_text("raise SystemExit(7)\n")
    (keiro.folder / "raises.py").write_text("def f():\n    raise RuntimeError('at import')\n\nf()\n")
    before = (keiro.folder / "orders.py").read_bytes()
    done = keiro("run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    *above, last = done.stderr.splitlines()
    assert last.startswith("keiro: ")
    assert message in last
    assert "secret" not in done.stderr
    # Where the user's own code is at fault, and only there, its frames are shown.
    assert ("Traceback" in done.stderr) == (arguments[0].split(":")[0] in ("exits", "raises"))
    assert not any("importlib" in line or "/cli/" in line for line in above)
    assert keiro.effects == []
    assert (keiro.folder / "orders.py").read_bytes() == before
    assert keiro.run_ids() == []


def test_wrong_options_are_a_usage_error(keiro: Shell) -> None:
    for arguments in (["run"], ["run", "orders:chain", "--inputs", "1"], ["nothing"], ["run", "a:b", "c:d"]):
        done = keiro(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Usage: keiro" in done.stderr


def test_a_memory_journal_is_enough_for_one_run(keiro: Shell) -> None:
    assert keiro.json("run", "orders:chain", "--url", "memory://") == 3
    assert keiro.run_ids() == []


def test_keiro_url_says_where(keiro: Shell) -> None:
    env = {"KEIRO_URL": "sqlite:///elsewhere.db"}
    assert keiro.json("run", "orders:chain", env=env) == 3
    assert len(keiro.json("list", env=env)) == 1
    assert keiro.run_ids() == []
    assert keiro.json("run", "orders:chain", "--url", "sqlite:///named.db", env=env) == 3  # an option comes first
    assert keiro.json("run", "orders:chain", env={"KEIRO_URL": ""}) == 3
    assert len(keiro.run_ids()) == 1
    assert sorted(path.name for path in keiro.folder.glob("*.db")) == ["elsewhere.db", "keiro.db", "named.db"]


async def test_a_store_that_is_away_at_the_first_look_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on meanwhile, here or in another process: the command must not end before it."""
    monkeypatch.setattr(driving, "RETRY_S", 0.0)
    answers = [StoreUnavailable("gone"), StoreBusy("locked"), "the row"]
    told = []

    class Away:
        async def wait_ended(self, run_id: str) -> object:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def report(self, event: str, run_id: str, **fields: object) -> None:
            told.append((event, fields["error"]))

    assert await driving._ended(Away(), "wf:a-b") == "the row"  # type: ignore[arg-type]
    assert told == [("store_away", "gone"), ("store_away", "locked")]


@pytest.mark.crash
def test_a_server_that_goes_away_and_comes_back_is_waited_for(
    keiro: Shell, restartable_postgres: PostgresServer
) -> None:
    url = restartable_postgres.url("postgres")
    process = keiro.start("run", "orders:held", "--url", url)
    until(lambda: "slow begins" in keiro.effects, process)
    restartable_postgres.stop(immediate=True)
    (keiro.folder / "go").touch()
    until(lambda: "slow ends" in keiro.effects, process)
    restartable_postgres.start()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)) == (0, [0, "done", 1])
    assert "Traceback" not in err
    assert keiro.effects == ["work 0", "slow begins", "slow ends", "work 1"]
