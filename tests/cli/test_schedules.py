"""`keiro schedules`: put, list, pause, resume, trigger and delete, as text and as JSON."""

from __future__ import annotations

from tests.cli.conftest import Shell

PUT = ("schedules", "put", "nightly", "orders:chain", "--cron", "0 2 * * *", "--zone", "Europe/Berlin", "--input")


def test_a_schedule_is_put_listed_changed_and_deleted(keiro: Shell) -> None:
    assert keiro("schedules", "list").stderr == "no schedules\n"
    assert keiro.json(*PUT, "[2]") == {"run_id": "nightly", "outcome": "put", "runs": []}
    assert keiro(*PUT, '{"n": 2}').stdout == "was so before: nightly\n"
    [row] = keiro.json("schedules", "list")
    assert (row["name"], row["workflow"], row["cron"], row["zone"]) == (
        "nightly",
        "chain",
        "0 2 * * *",
        "Europe/Berlin",
    )
    assert (row["overlap"], row["backfill"], row["paused"], row["last_run_id"]) == ("skip", False, False, None)
    assert keiro(*PUT, "[3]", "--overlap", "allow", "--backfill").stdout == "put: nightly\n"
    [row] = keiro.json("schedules", "list")
    assert (row["overlap"], row["backfill"]) == ("allow", True)

    assert keiro("schedules", "pause", "nightly").stdout == "paused: nightly\n"
    assert keiro("schedules", "pause", "nightly").stdout == "was paused before: nightly\n"
    assert "paused" in keiro("schedules", "list").stdout
    assert keiro("schedules", "resume", "nightly").stdout == "resumed: nightly\n"

    done = keiro.json("schedules", "trigger", "nightly")
    assert done["outcome"] == "triggered"
    assert keiro.json("show", done["run_id"])["status"] == "pending"

    preview = keiro("schedules", "delete", "nightly")
    assert preview.stdout == "would delete: nightly\n"
    assert "--yes" in preview.stderr
    assert len(keiro.json("schedules", "list")) == 1
    assert keiro("schedules", "delete", "nightly", "--yes").stdout == "deleted: nightly\n"
    assert keiro.json("schedules", "list") == []
    gone = keiro("schedules", "delete", "nightly", "--yes")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "there is no schedule 'nightly'" in gone.stderr


def test_the_argument_for_the_tick_is_named(keiro: Shell) -> None:
    (keiro.folder / "days.py").write_text(
        "import datetime, keiro\n\n"
        "@keiro.workflow\nasync def day(run: keiro.WorkflowRun, at: datetime.datetime, to: str) -> str:\n"
        "    return f'{at.isoformat()} {to}'\n"
    )
    put = ("schedules", "put", "a", "days:day", "--cron", "@daily", "--input", '{"to": "ada"}')
    refused = keiro(*put)
    assert refused.returncode == 2 and "parameter 'at' is missing" in refused.stderr
    assert keiro(*put, "--tick", "at").returncode == 0
    run_id = keiro.json("schedules", "trigger", "a")["run_id"]
    assert keiro.json("show", run_id)["input"]["at"].endswith("Z")


def test_what_cannot_be_scheduled_is_refused(keiro: Shell) -> None:
    for wrong, said in (
        (("--cron", "never"), "cron='never'"),
        (("--cron", "@daily", "--zone", "Mars"), "zone='Mars'"),
        (("--cron", "@daily", "--overlap", "queue"), "overlap='queue'"),
        (("--cron", "@daily", "--input", "[1, 2, 3, 4]"), "4 arguments"),
    ):
        done = keiro("schedules", "put", "a", "orders:chain", *wrong)
        assert done.returncode == 2 and done.stdout == "", wrong
        assert said in done.stderr
    assert keiro.run_ids() == []
    assert keiro("schedules", "pause", "a").returncode == 2


def test_the_run_that_is_a_schedule_is_shown_and_replayed_as_any_other(keiro: Shell) -> None:
    keiro(*PUT, "[2]")
    assert keiro.run_ids() == ["wf:keiro.schedule-nightly"]
    assert "wf:keiro.schedule-nightly" in keiro("list").stdout
    assert "keiro.schedule:Defined" in keiro("journal", "wf:keiro.schedule-nightly").stdout
    replayed = keiro("replay", "orders")
    assert replayed.returncode == 0
    assert "keiro.schedule" not in replayed.stderr, "it is not left out as unknown"
