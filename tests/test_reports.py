"""What an engine tells: sentences in the log, and doubts about a body that does not fit its journal."""

from __future__ import annotations

import asyncio
import logging
import string

import pytest

import keiro
from keiro.reports import SENTENCES, report
from tests.conformance.test_steps import note, replay
from tests.conftest import MakeEngine

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.keiro["event"] for record in caplog.records if hasattr(record, "keiro")]


def test_every_sentence_can_be_said() -> None:
    for event, (_, sentence) in SENTENCES.items():
        names = {name for _, name, _, _ in string.Formatter().parse(sentence) if name} - {"run_id"}
        report(event, "wf:a-b", dict.fromkeys(names, 1))


async def test_failed_attempts_and_failed_runs_are_logged(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise ConnectionError("no answer")

    @keiro.workflow
    async def doomed(run: keiro.WorkflowRun) -> None:
        await run.step(broken, retry=keiro.Retry(2, initial=0.001))

    with caplog.at_level(logging.INFO, "keiro"):
        async with make_engine(doomed) as engine:
            with pytest.raises(keiro.WorkflowFailed, match="failed: ConnectionError: no answer"):
                await engine.execute(doomed, id="a")
    assert told(caplog) == ["attempt_failed", "attempt_failed", "run_failed"]
    assert (
        "step 'broken' of wf:doomed-a failed at attempt 1: ConnectionError: no answer; it is tried again" in caplog.text
    )


async def test_a_timeout_names_its_step(make_engine: MakeEngine) -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    @keiro.workflow
    async def limited(run: keiro.WorkflowRun) -> None:
        await run.step(slow, timeout=0.01)

    async with make_engine(limited) as engine:
        with pytest.raises(keiro.WorkflowFailed, match=r"step 'slow' took longer than its timeout of 0\.01 s"):
            await engine.execute(limited, id="a")


async def test_a_step_that_is_called_and_never_awaited_is_told_of(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    @keiro.workflow
    async def forgetful(run: keiro.WorkflowRun) -> str:
        run.step(note, 1)
        return "done"

    async with make_engine(forgetful) as engine:
        assert await engine.execute(forgetful, id="a") == "done"
    assert told(caplog) == ["never_awaited"]
    async with make_engine(forgetful, strict=True) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="never awaited"):
            await engine.execute(forgetful, id="b")


async def test_recorded_steps_that_a_replay_does_not_ask_for_are_told_of(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that was renamed or removed, or a body that depends on something that is no step."""
    asks = [True]

    @keiro.workflow
    async def changed(run: keiro.WorkflowRun) -> int:
        return int(await run.step(note, 1)) if asks[0] else 1

    async with make_engine(changed) as engine:
        handle = await engine.start(changed, id="a")
        await handle.result()
        await replay(engine, handle, changed)
        assert told(caplog) == []
        asks[0] = False
        await replay(engine, handle, changed)
        assert told(caplog) == ["never_asked_for"]
        engine.strict = True
        ended = await replay(engine, handle, changed)
        assert "without asking for steps that are recorded: note" in ended.failure.message


async def test_a_result_that_its_annotation_cannot_read_fails_the_run(make_engine: MakeEngine) -> None:
    """Completed with a value that nobody can read would be an error at every look, for ever."""

    @keiro.workflow
    async def mistyped(run: keiro.WorkflowRun) -> int:
        return {"not": "a number"}  # type: ignore[return-value]

    async with make_engine(mistyped) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(mistyped, id="a")
        assert isinstance(failed.value.__cause__, keiro.DecodeFailed)


async def test_a_workflow_is_no_step(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def inner(run: keiro.WorkflowRun) -> None: ...

    @keiro.workflow
    async def outer(run: keiro.WorkflowRun) -> None:
        await run.step(inner)

    async with make_engine(inner, outer) as engine:
        with pytest.raises(keiro.WorkflowFailed, match="is a workflow and no step"):
            await engine.execute(outer, id="a")
