"""A report every minute, started by a durable schedule: one run for each tick, however many processes there are.

    python examples/cron_report.py            # starts one now, by hand, and shows the schedule
    python examples/cron_report.py serve      # goes on until Ctrl-C; start it twice, each tick is one run

The schedule is a run itself: it survives a kill, and costs nothing between two ticks.
"""

import asyncio
import sys
from datetime import datetime

import keiro


@keiro.step
async def count_sales(until: datetime) -> int:
    return until.minute * 7


@keiro.workflow
async def sales_report(run: keiro.WorkflowRun, at: datetime) -> str:
    total = await run.step(count_sales, at)
    line = f"{at:%H:%M %Z}: {total} sold"
    print(line, flush=True)
    return line


async def main() -> None:
    async with keiro.Engine("sqlite:///sales.db", workflows=[sales_report]) as engine:
        await engine.schedules.put("every-minute", sales_report, keiro.TICK, cron="* * * * *", zone="Europe/Berlin")
        if "serve" in sys.argv[1:]:
            await engine.serve()
            return
        report = await engine.schedules.trigger("every-minute")
        print("result:", await report.result())
        [schedule] = await engine.schedules.list()
        print(f"{schedule.name}: {schedule.cron} ({schedule.zone}), next at {schedule.next_at}")


asyncio.run(main())
