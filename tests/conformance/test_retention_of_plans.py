"""Retention of what plans keep beside the journal: it goes with its run, and what was learned stays."""

from __future__ import annotations

import pytest

import keiro
from tests.conformance.retained import execute, rows_left
from tests.conftest import MakeEngine
from tests.stores import test_guards_of_plans as plans


@keiro.workflow
async def planned(run: keiro.WorkflowRun, rounds: int) -> int:
    if rounds < 0:
        end: int = await run.deferred("end", int).result()
        return end
    if rounds:
        run.continue_as_new(rounds - 1)
    return 1


def insert(url: str, table: str, row: dict[str, object]) -> None:
    schema = "keiro." if url.startswith("postgres") else ""
    values = ", ".join(f"'{value}'" for value in row.values())
    execute(url, f"INSERT INTO {schema}{table} ({', '.join(row)}) VALUES ({values})")


def of_plans(engine: keiro.Engine) -> dict[str, int]:
    """How many rows of plans there are in each table that has any."""
    return {name: count for name, count in rows_left(engine).items() if name.startswith("keiro_plan")}


@pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)
async def test_r2_the_plan_of_each_round_goes_with_its_run(make_engine: MakeEngine, store_url: str) -> None:
    async with make_engine(planned) as engine:
        assert await engine.execute(planned, 2, id="ended") == 1
        await engine.start(planned, -1, id="lives")
        rounds = ["wf:planned-ended", "wf:planned-ended#1", "wf:planned-ended#2", "wf:planned-lives"]
        for run_id in rounds:
            for table, row in plans.OF_RUNS.items():
                insert(store_url, table, row | {"run_id": run_id})
        insert(store_url, "keiro_selection_suspected_edges", plans.EDGE)

        await engine.gc(0, dry_run=True)
        assert of_plans(engine) == dict.fromkeys(plans.OF_RUNS, 4)
        done = await engine.gc(0)

        assert (done.collected, done.runs, done.failed) == (("wf:planned-ended",), 3, ())
        assert of_plans(engine) == dict.fromkeys(plans.OF_RUNS, 1)
        assert rows_left(engine)["keiro_selection_suspected_edges"] == 1
        # The key is free, and nothing that was observed or decided holds the next run to it.
        await engine.execute(planned, 0, id="ended")
        assert of_plans(engine) == dict.fromkeys(plans.OF_RUNS, 1)
        for table, row in plans.OF_RUNS.items():
            insert(store_url, table, row | {"run_id": "wf:planned-ended"})
