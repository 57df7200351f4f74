"""`keiro find`: runs by what they have in common, from the listing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import keiro
from tests.cli.conftest import Shell


@keiro.workflow
async def tagged(run: keiro.WorkflowRun) -> None:
    await run.set_attributes(paid=True)


def ids(page: dict[str, list[dict[str, str]]]) -> list[str]:
    return [one["run_id"] for one in page["items"]]


def test_runs_are_found_by_what_they_have_in_common(filled: Shell) -> None:
    failed = filled.json("find", "--status", "failed")
    assert len(failed["items"]) == 1 and failed["cursor"] is None
    (one,) = failed["items"]
    assert one["failure"] and one["attributes"] == {}
    word = one["failure"].split(":")[0]
    assert ids(filled.json("find", "--failure", word.upper())) == ids(failed)
    assert ids(filled.json("find", "--workflow", "chain", "--parent", "none", "--waiting", "none")) == ["wf:chain-eins"]
    assert ids(filled.json("find", "--id-prefix", "wf:chain-", "--lineage", "wf:chain-eins")) == ["wf:chain-eins"]
    assert ids(filled.json("find", "--after", "2100-01-01")) == []
    assert len(ids(filled.json("find", "--before", "2100-01-01T00:00:00"))) == 3
    assert filled("find", "--after", "2100-01-01").stderr == "no runs\n"


def test_pages_follow_each_other(filled: Shell) -> None:
    whole = ids(filled.json("find"))
    found, cursor = [], None
    while True:
        page = filled.json("find", "--limit", "1", *([] if cursor is None else ["--cursor", cursor]))
        found += ids(page)
        cursor = page["cursor"]
        if cursor is None:
            break
    assert found == whole and len(whole) == 3

    shown = filled("find", "--limit", "1")
    assert shown.stdout.splitlines()[0].split() == ["status", "created", "took", "run"]
    assert shown.stderr.startswith("there are more: --cursor ")


def test_counts_have_every_status(filled: Shell) -> None:
    assert filled.json("find", "--counts") == {
        "pending": 0, "running": 0, "suspended": 0, "completed": 2, "failed": 1, "cancelled": 0,
    }  # fmt: skip
    assert filled("find", "--counts", "--workflow", "chain").stdout.splitlines()[4].split() == ["completed", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attribute", "customer"], "write NAME=VALUE"),
        (["--limit", "201"], "1 to 200 runs"),
        (["--cursor", "?"], "cursor"),
        (["--failure", "!"], "there is no word in it"),
    ],
)
def test_what_cannot_be_asked_is_said(filled: Shell, arguments: list[str], said: str) -> None:
    done = filled("find", *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_runs_are_found_by_their_attributes(tmp_path: Path) -> None:
    shell = Shell(tmp_path)

    async def add() -> None:
        async with keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[tagged]) as engine:
            handle = await engine.start(tagged, id="t", attributes={"customer": "ada", "cents": 7})
            await handle.result()

    asyncio.run(add())
    options = ["--attribute", "customer=ada", "--attribute", "cents=7", "--attribute", "paid=true"]
    assert ids(shell.json("find", *options)) == ["wf:tagged-t"]
    assert ids(shell.json("find", "--attribute", 'cents="7"')) == []
