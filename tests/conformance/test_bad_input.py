"""What callers and bodies get wrong: an error of keiro's each, saying what and where; nothing written, nothing retried,
and the engine goes on."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest

import keiro
from keiro.errors import InvalidCall, InvalidName, KeiroError, PayloadRejected, RunNotFound, UnknownWorkflow
from keiro.events import AttemptFailed
from keiro.failures import describe
from tests.conformance.test_steps import replay
from tests.conftest import MakeEngine

effects: list[Any] = []
kept: list[keiro.WorkflowRun] = []
body: list[Callable[[keiro.WorkflowRun], Awaitable[Any]]] = []
gives: list[Any] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for used in (effects, kept, body, gives):
        used.clear()


class Odd:
    """Nothing that JSON has a form for."""


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNSTORABLE: list[tuple[Any, str, str]] = [
    (Odd(), "$", "Odd, which has no JSON form"),
    ([1, {"a": math.nan}], "$[1].a", "is nan"),
    ({"b": (math.inf,)}, "$.b[0]", "is inf"),
    ("a\0b", "$", "holds a NUL character"),
    ({"k": ["\ud800"]}, "$.k[0]", "holds a lone surrogate"),
    ({"\udcff": 1}, "$['\\udcff']", "has a key that holds a lone surrogate"),
    ("x" * 20_000_000, "$", "takes 20,000,002 bytes as JSON, and 8,388,608 are allowed"),
    (nested(3000), "…", "is nested deeper than 500 levels"),
    (circular(), "$[0]", "contains itself"),
    (print, "$", "is of type builtin_function_or_method"),
    ((n for n in range(3)), "$", "is of type generator"),
    (1j, "$", "is of type complex"),
]


@keiro.step
async def effect(value: Any = None) -> Any:
    effects.append(value)
    return value


@keiro.step
async def give() -> Any:
    effects.append("give")
    return gives[0]


@keiro.step
def give_in_thread() -> Any:
    effects.append("give")
    return gives[0]


@keiro.workflow
async def fine(run: keiro.WorkflowRun, value: Any = None) -> Any:
    return await run.step(effect, 1)


@keiro.workflow
async def typed(run: keiro.WorkflowRun, n: int, names: list[str]) -> None: ...


@keiro.workflow
async def any_body(run: keiro.WorkflowRun) -> Any:
    return await body[0](run)


STUBBORN = keiro.Retry(5, initial=0.001)


@keiro.workflow(retry=STUBBORN)
async def gives_step(run: keiro.WorkflowRun, threaded: bool) -> Any:
    return await run.step(give_in_thread if threaded else give, retry=STUBBORN)


@keiro.workflow(retry=STUBBORN)
async def gives_result(run: keiro.WorkflowRun) -> Any:
    effects.append("body")
    return gives[0]


WORKFLOWS = (fine, typed, any_body, gives_step, gives_result)


async def journal(engine: keiro.Engine) -> list[str]:
    return [row.topic for row in await engine.store.read(0, 1000)]


async def goes_on(engine: keiro.Engine) -> None:
    """The engine is none the worse."""
    async with asyncio.timeout(30):
        assert await engine.execute(fine) == 1


# Values


async def test_an_input_that_cannot_be_stored_is_refused(make_engine: MakeEngine) -> None:
    """U-payload lines, field reports cocoindex#933 and OpenArchiver#464: the same on every store."""
    async with make_engine(*WORKFLOWS) as engine:
        for value, path, problem in UNSTORABLE:
            with pytest.raises(PayloadRejected, match="input of workflow 'fine' cannot be stored") as refused:
                await engine.start(fine, value, id="a")
            assert problem.replace(",002", ",012") in str(refused.value)
            assert refused.value.where == "input of workflow 'fine'"
            assert path in refused.value.path.replace("$.value", "$")
        assert await journal(engine) == []
        await goes_on(engine)


async def test_an_input_of_another_type_or_shape_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        for arguments, problem in (
            (("x", []), r"\$\.n does not fit the annotation of 'n': Expected `int`, got `str`"),
            ((1, "a"), r"\$\.names does not fit"),
            ((1, [1]), r"\$\.names\[0\] does not fit"),
            ((True, []), "Expected `int`, got `bool`"),
            ((1,), "parameter 'names' is missing; the arguments are"),
            ((1, [], 2), "3 arguments were given by position, at most 2 are taken"),
        ):
            with pytest.raises(KeiroError, match=problem):
                await engine.start(typed, *arguments)
        with pytest.raises(InvalidCall, match="there is no parameter 'm'"):
            await engine.start(typed, 1, [], m=1)
        assert await journal(engine) == []
        await goes_on(engine)


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_step_result_that_cannot_be_stored_fails_the_step_at_once(
    make_engine: MakeEngine, threaded: bool
) -> None:
    """No retry makes it storable: neither that of the step nor that of the workflow begins."""
    name = "give_in_thread" if threaded else "give"
    async with make_engine(*WORKFLOWS) as engine:
        for n, (value, path, problem) in enumerate(UNSTORABLE):
            gives[:] = [value]
            handle = await engine.start(gives_step, threaded, id=str(n))
            with pytest.raises(keiro.WorkflowFailed) as failed:
                await handle.result(timeout=30)
            cause = failed.value.__cause__
            assert isinstance(cause, PayloadRejected)
            assert cause.where == f"result of step {name!r}"
            assert path in cause.path and problem in str(cause)
            assert [type(event).__name__ async for event in handle.events()] == [
                "WorkflowStarted", "AttemptFailed", "WorkflowFailed"
            ]  # fmt: skip
        assert effects == ["give"] * len(UNSTORABLE)
        await goes_on(engine)


async def test_a_body_may_go_on_without_a_result_that_cannot_be_stored(make_engine: MakeEngine) -> None:
    gives[:] = [math.nan]

    async def catching(run: keiro.WorkflowRun) -> list[str]:
        try:
            await run.step(give)
        except PayloadRejected as error:
            return [error.where, error.path, await run.step(effect, "on")]
        return []

    body[:] = [catching]
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(any_body)
        assert await handle.result() == ["result of step 'give'", "$", "on"]
        ended = await replay(engine, handle, any_body)
        assert bytes(ended.result) == b'["result of step \'give\'","$","on"]'
        assert effects == ["give", "on"]


async def test_a_workflow_result_that_cannot_be_stored_fails_the_run_at_once(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        for n, (value, path, problem) in enumerate(UNSTORABLE):
            gives[:] = [value]
            handle = await engine.start(gives_result, id=str(n))
            with pytest.raises(keiro.WorkflowFailed) as failed:
                await handle.result(timeout=30)
            cause = failed.value.__cause__
            assert isinstance(cause, PayloadRejected) and cause.where == "result of workflow 'gives_result'"
            assert path in cause.path and problem in str(cause)
            assert [type(event).__name__ async for event in handle.events()] == ["WorkflowStarted", "WorkflowFailed"]
        assert effects == ["body"] * len(UNSTORABLE)
        await goes_on(engine)


class Hostile(Exception):
    """Carries anything, and says it badly."""

    def __init__(self, content: Any, extra: int) -> None:
        super().__init__(content)
        self.content = content

    def __str__(self) -> str:
        if isinstance(self.content, str):
            return self.content
        raise RuntimeError("no text either")


async def test_what_an_exception_carries_never_stops_its_record(make_engine: MakeEngine) -> None:
    """Field reports dbos#371, dbos#730: the real error is not masked by one of storing it."""

    async def raising(run: keiro.WorkflowRun) -> None:
        async def boom() -> None:
            error = Hostile(gives[0], 1)
            error.add_note("a\0note \ud800")
            raise error

        await run.step(boom)

    body[:] = [raising]
    async with make_engine(*WORKFLOWS) as engine:
        for n, (value, _, _) in enumerate(UNSTORABLE):
            gives[:] = [value]
            handle = await engine.start(any_body, id=str(n))
            with pytest.raises(keiro.WorkflowFailed) as failed:
                await handle.result(timeout=30)
            assert failed.value.failure is not None
            assert failed.value.failure.type.endswith(":Hostile")
            assert "a\ufffdnote \ufffd" in describe(failed.value.failure)
            (attempt,) = [event async for event in handle.events() if isinstance(event, AttemptFailed)]
            assert len(attempt.failure.message) <= 8_192
        await goes_on(engine)


# Names


HOSTILE_IDS = ["", ":", "a#1", "\0", "a\nb", "\x85", "\ud800", "x" * 513, "ü" * 257, 5, b"x", True, ["x"]]


async def test_hostile_ids_are_refused_and_odd_ones_are_kept(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        for key in HOSTILE_IDS:
            with pytest.raises(InvalidName, match="id of a run"):
                await engine.start(fine, id=key)  # type: ignore[arg-type]
        assert await journal(engine) == []
        for key in (
            "'; DROP TABLE keiro_runs; --",
            "🎉",
            "../..",
            " ",
            "%s{0}$1?",
            "x" * 512,
            "ü" * 256,
            "-",
            "wf",
            "\\",
        ):
            handle = await engine.start(fine, id=key)
            assert await handle.result() == 1
            assert engine.handle(handle.run_id).run_id == f"wf:fine-{key}"
            assert (await handle.run()).key == key
        await goes_on(engine)


async def test_what_is_no_run_id_is_refused(make_engine: MakeEngine) -> None:
    bad = ["", "x", "wf:", "wf:a", "wf:-b", "wf:a-", "wf:a-b#0", "wf:a-b#01", "wf:a-b#x", "wf:a-b#1#2", "wf:a b-c"]
    async with make_engine(*WORKFLOWS) as engine:
        for run_id in [*bad, "wf:a-\0", "wf:\ud800-x", 3, None, b"wf:a-b"]:
            with pytest.raises(InvalidName):
                engine.handle(run_id)  # type: ignore[arg-type]
            with pytest.raises(InvalidName):
                await engine.steps(run_id)  # type: ignore[arg-type]
            with pytest.raises(InvalidName):
                await engine.command(run_id, effect)  # type: ignore[arg-type]
        unknown = engine.handle("wf:fine-none")
        for look in (unknown.result, unknown.run, unknown.status, lambda: engine.steps("wf:fine-none")):
            with pytest.raises(RunNotFound, match=r"there is no run 'wf:fine-none' at .*: start it first"):
                await look()  # type: ignore[operator]
        with pytest.raises(RunNotFound):
            async with aclosing(unknown.events()) as events:  # type: ignore[type-var]
                await anext(events)


async def test_what_is_no_workflow_of_this_engine_is_refused(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def unregistered(run: keiro.WorkflowRun) -> None: ...

    @keiro.workflow(name="fine")
    async def other(run: keiro.WorkflowRun) -> None: ...

    async with make_engine(*WORKFLOWS) as engine:
        for workflow in (None, "fine", effect, 3, Odd, Odd()):
            with pytest.raises(InvalidCall, match=r"is no workflow: pass a function decorated with @keiro\.workflow"):
                await engine.start(workflow)
        with pytest.raises(InvalidCall, match="WorkflowRun has no body"):
            await engine.start(keiro.WorkflowRun)
        for workflow in (unregistered, other):
            with pytest.raises(UnknownWorkflow, match=r"is not one of this engine's: pass it in Engine\(.*workflows="):
                await engine.start(workflow)
        assert await journal(engine) == []
        await goes_on(engine)
    with pytest.raises(InvalidCall, match="two workflows are named 'fine': give one of them another name="):
        make_engine(fine, other)


IN_A_BODY: list[tuple[Callable[[Any], Any], type[KeiroError], str]] = [
    (lambda run: run.step(3), InvalidCall, "a step must be a function or another callable, not 3"),
    (lambda run: run.step(None), InvalidCall, "a step must be a function"),
    (lambda run: run.step("effect"), InvalidCall, "a step must be a function"),
    (lambda run: run.step(effect, key=""), InvalidName, "cannot name a step: it must be a non-empty string"),
    (lambda run: run.step(effect, key="a:b"), InvalidName, "character ':' at 1"),
    (lambda run: run.step(effect, key="a/b"), InvalidName, "character '/' at 1"),
    (lambda run: run.step(effect, key="a#2"), InvalidName, "character '#' at 1"),
    (lambda run: run.step(effect, key="\0"), InvalidName, "is not allowed"),
    (lambda run: run.step(effect, key="\ud800"), InvalidName, "no lone surrogates"),
    (lambda run: run.step(effect, key="__workflow_completed__"), InvalidName, "the engine's own"),
    (lambda run: run.step(effect, key="x" * 513), InvalidName, "at most 512 bytes"),
    (lambda run: run.step(effect, key=3), InvalidName, "3 cannot name a step"),
    (lambda run: run.step(effect, timeout=0), InvalidCall, "timeout of step 'effect' must be a positive, finite"),
    (lambda run: run.step(effect, timeout=-1), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, timeout=math.nan), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, timeout=math.inf), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, timeout=True), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, timeout="1"), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, timeout=timedelta(0)), InvalidCall, "must be a positive"),
    (lambda run: run.step(effect, retry=3), InvalidCall, r"retry of step 'effect' must be a keiro\.Retry"),
    (lambda run: run.step(effect, retry=True), InvalidCall, "must be a keiro"),
    (lambda run: run.scope(""), InvalidName, "cannot name a step"),
    (lambda run: run.scope(3), InvalidName, "cannot name a step"),
    (lambda run: run.map(None, [1]), InvalidCall, "must be an async function, not None"),
    (lambda run: run.map(effect, 3), InvalidCall, "items must be a list or another iterable, not 3"),
    (lambda run: run.map(effect, [1], limit=0), InvalidCall, "limit is a whole number from 1"),
    (lambda run: run.map(effect, [1], key="x"), InvalidCall, "key is a function that names an item"),
    (lambda run: run.map(lambda scope, item: None, [1]), InvalidCall, "must be an async function"),
    (
        lambda run: run.map(effect, [1]),
        InvalidCall,
        "a step, but what is called for each item gets a scope and the item",
    ),
    (
        lambda run: run.map(lambda scope, item: None, [1, 1], key=str),
        InvalidCall,
        "items 0 and 1 have the same key '1'",
    ),
    (lambda run: run.apply(effect), InvalidCall, "is not a command of WorkflowRun"),
]


async def test_what_a_body_calls_wrongly_fails_the_run_and_runs_no_step(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        for call, kind, problem in IN_A_BODY:

            async def wrong(run: keiro.WorkflowRun, call: Callable[[Any], Any] = call) -> Any:
                return await call(run)

            body[:] = [wrong]
            handle = await engine.start(any_body)
            with pytest.raises(keiro.WorkflowFailed) as failed:
                await handle.result(timeout=30)
            cause = failed.value.__cause__
            assert isinstance(cause, kind)
            with pytest.raises(kind, match=problem):
                raise cause
            assert [type(event).__name__ async for event in handle.events()] == ["WorkflowStarted", "WorkflowFailed"]
        assert effects == []
        await goes_on(engine)


def test_definitions_that_could_not_work_are_refused() -> None:
    async def some(run: keiro.WorkflowRun) -> None: ...

    for wrong, problem in (
        (lambda: keiro.step(name="a:b")(some), "cannot name a step"),
        (lambda: keiro.step(retry=3)(some), "retry of step 'some' must be a keiro.Retry"),
        (lambda: keiro.step(timeout=math.nan)(some), "must be a positive, finite number"),
        (lambda: keiro.step(3), "a step must be a function"),
        (lambda: keiro.workflow(name="a b")(some), "cannot name a workflow"),
        (lambda: keiro.workflow(name="x" * 129)(some), "cannot name a workflow"),
        (lambda: keiro.workflow(retry=3)(some), "retry of workflow 'some' must be a keiro.Retry"),
        (lambda: keiro.workflow(version=3)(some), "version of workflow 'some' is a tag"),
        (lambda: keiro.workflow(version="\0")(some), "printable characters"),
        (lambda: keiro.workflow(version="\ud800")(some), "printable characters"),
        (lambda: keiro.workflow(lambda run: None), "must be an async function"),
    ):
        with pytest.raises(KeiroError, match=problem):
            wrong()  # type: ignore[no-untyped-call]


class Basket(keiro.WorkflowRun, name="conformance.basket"):
    def __init__(self) -> None:
        self.items: list[Any] = []

    @keiro.event("Put")
    def put(self, item: Any) -> None:
        self.items.append(item)

    @keiro.event("Named")
    def name(self, text: str) -> None:
        self.items.append(text)

    async def settle(self) -> None: ...

    async def execute(self) -> None:
        await asyncio.Event().wait()


async def test_a_command_that_cannot_be_recorded_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine(Basket, fine, grace=0.0) as engine:
        run_id = (await engine.start(Basket, id="a")).run_id
        for value, path, problem in UNSTORABLE:
            with pytest.raises(PayloadRejected) as refused:
                await engine.command(run_id, Basket.put, value)
            assert problem.replace(",002", ",011") in str(refused.value)
            assert path in refused.value.path.replace("$.item", "$")
        for arguments, kind, wrong in (
            ((Basket.name, 3), PayloadRejected, "text does not fit its annotation"),
            ((Basket.name,), InvalidCall, "missing a required argument: 'text'"),
            ((Basket.name, "a", "b"), InvalidCall, "too many positional arguments"),
            ((print,), InvalidCall, "is not a command of Basket"),
            (("put",), InvalidCall, "'put' is not a command of Basket"),
            ((None,), InvalidCall, "None is not a command of Basket"),
            ((Basket.settle,), InvalidCall, "is async: a command is a plain method"),
        ):
            with pytest.raises(kind, match=wrong):
                await engine.command(run_id, *arguments)
        for hostile in ("", "\ud800", 3, b"x"):
            with pytest.raises(InvalidName, match="cannot be the id of a command"):
                await engine.command(run_id, Basket.put, 1, id=hostile)  # type: ignore[arg-type]
        assert await journal(engine) == ["WorkflowStarted"]
        assert await engine.command(run_id, Basket.put, 1, id="click:1") == 2
        await goes_on(engine)


# Where `run` may be used


async def test_run_is_of_no_use_inside_a_step(make_engine: MakeEngine) -> None:
    """A replay, which does not run the step, would not meet what it records."""

    async def awaited(run: keiro.WorkflowRun) -> Any:
        return await run.step(effect, "inner")

    async def in_a_task(run: keiro.WorkflowRun) -> Any:
        return await asyncio.create_task(awaited(run))

    def plain(run: keiro.WorkflowRun) -> Any:
        return run.now()

    @keiro.workflow
    async def nests(run: keiro.WorkflowRun, n: int, together: bool) -> Any:
        body: Any = (awaited, in_a_task, plain)[n]
        if together:
            await asyncio.gather(run.step(effect, "beside"), run.step(body, run))
        return await run.step(body, run)

    async with make_engine(nests, outer) as engine:
        for n in range(3):
            for together in (False, True):
                handle = await engine.start(nests, n, together)
                said = "inside the step" if n < 2 else "was called (inside|from outside)"
                with pytest.raises(keiro.WorkflowFailed, match=said):
                    await handle.result()
                names = {getattr(event, "step", None) async for event in handle.events()} - {None}
                assert names <= {"effect", "awaited", "in_a_task", "plain"}
        # A step may start another run, and that one's body is none of its own.
        assert await engine.execute(outer) == "inner"


@keiro.workflow
async def inner(run: keiro.WorkflowRun) -> str:
    return str(await run.step(effect, "inner"))


@keiro.step
async def starts_another() -> str:
    async with keiro.Engine("memory://", workflows=[inner]) as engine:
        return str(await engine.execute(inner))


@keiro.workflow
async def outer(run: keiro.WorkflowRun) -> str:
    return str(await run.step(starts_another))


async def test_run_is_of_no_use_outside_its_body(make_engine: MakeEngine) -> None:
    """A step of a caller that no replay meets would be recorded among those of the body."""
    go = asyncio.Event()

    async def waiting(run: keiro.WorkflowRun) -> str:
        kept.append(run)
        await go.wait()
        return "done"

    async def other(run: keiro.WorkflowRun) -> Any:
        return await kept[0].step(effect, "from another run")

    async def foreign() -> Any:
        return await kept[0].step(effect, "from another task")

    def in_thread() -> Any:
        return kept[0].step(effect, "from a thread")

    body[:] = [waiting]
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(any_body)
        while not kept:
            await asyncio.sleep(0)
        outside = r"run\.\* was called from outside its body"
        with pytest.raises(InvalidCall, match=f"{handle.run_id}: {outside}, by task "):
            await foreign()
        with pytest.raises(InvalidCall, match=outside):
            await asyncio.create_task(foreign())
        with pytest.raises(InvalidCall, match=outside):
            await asyncio.to_thread(in_thread)
        for call in (kept[0].now, kept[0].random, kept[0].uuid4):
            with pytest.raises(InvalidCall, match=outside):
                call()
        body[:] = [other]
        with pytest.raises(keiro.WorkflowFailed, match=outside):
            await engine.execute(any_body)
        go.set()
        assert await handle.result() == "done"
        with pytest.raises(InvalidCall, match=outside):
            await foreign()
        assert [type(event).__name__ async for event in handle.events()] == ["WorkflowStarted", "WorkflowCompleted"]
        assert effects == []
        await goes_on(engine)
    with pytest.raises(InvalidCall, match="works only inside a running body"):
        keiro.WorkflowRun().step(effect)


async def test_a_task_that_the_body_left_behind_does_nothing_more(make_engine: MakeEngine) -> None:
    """Its effect would happen and its record be refused."""
    go = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    async def lingering(run: keiro.WorkflowRun) -> str:
        async def later() -> None:
            await go.wait()
            await run.step(effect, "late")

        left.append(asyncio.create_task(later()))
        return "done"

    body[:] = [lingering]
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(any_body)
        assert await handle.result() == "done"
        go.set()
        await asyncio.wait(left)
        assert isinstance(left[0].exception(), keiro.RunSealed)
        assert effects == []
        await goes_on(engine)


async def test_a_forgotten_await_is_said(make_engine: MakeEngine) -> None:
    async def forgetting(run: keiro.WorkflowRun) -> Any:
        return run.step(effect)

    async def through_a_lambda(run: keiro.WorkflowRun) -> Any:
        return await run.step(lambda: effect(1))

    async with make_engine(*WORKFLOWS) as engine:
        for wrong in (forgetting, through_a_lambda):
            body[:] = [wrong]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # Python says it too: "was never awaited"
                with pytest.raises(keiro.WorkflowFailed, match=r"is of type coroutine\. Await it"):
                    await engine.execute(any_body)
                gc.collect()
        assert effects == []
        await goes_on(engine)


# The engine


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workflows": 3}, r"workflows=3: pass a list, workflows=\[\.\.\.\]"),
        ({"workflows": "fine"}, "pass a list"),
        ({"workflows": fine}, "pass a list"),
        ({"workflows": None}, "pass a list"),
        ({"workflows": [3]}, "3 is no workflow"),
        ({"projections": 3}, "pass a list"),
        ({"projections": [3]}, "3 is no projection"),
        ({"worker": "yes"}, "worker is True or False"),
        ({"strict": 1}, "strict is True or False"),
        ({"migrate": "yes"}, "migrate is True or False"),
        ({"durability": "some"}, "durability is 'full' or 'normal', not 'some'"),
        ({"durability": None}, "durability is"),
        ({"grace": -1}, "must be a finite number of seconds from 0"),
        ({"grace": math.nan}, "must be a finite number"),
        ({"grace": "1"}, "must be a finite number"),
        ({"grace": True}, "must be a finite number"),
        ({"concurrency": 0}, "concurrency is a whole number from 1"),
        ({"concurrency": 1.5}, "whole number"),
        ({"concurrency": True}, "whole number"),
        ({"payload_limit": 0}, "payload_limit is a whole number from 1"),
        ({"payload_limit": "8 MiB"}, "whole number"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidCall, match=problem):
        keiro.Engine("memory://", **options)


@pytest.mark.parametrize(
    "url",
    ["", 3, b"memory://", ".", "orders.db", "sqlite://", "sqlite:///", "sqlite://orders.db", "file:x", "sqlite:///a%00b",
     "mysql://me:secret@host/db", "postgresql+psycopg://me:sec@ret/x@host/db", "sqlite//:secret@x"],
)  # fmt: skip
def test_a_url_that_leads_nowhere_is_refused_and_its_password_not_repeated(url: Any) -> None:
    with pytest.raises(InvalidCall, match=r"names no store: use memory://, sqlite:///|names no file") as refused:
        keiro.Engine(url)
    assert "me:sec" not in str(refused.value)


async def test_no_message_shows_the_password(postgres_url: str) -> None:
    url = postgres_url.replace("postgres@", "postgres:secret@")
    async with keiro.Engine(url, workflows=[fine], migrate=True) as engine:
        for look in (engine.handle("wf:fine-none").run(), engine.steps("wf:fine-none"), engine.execute(fine, id=":")):
            with pytest.raises(KeiroError) as raised:
                await look
            assert "secret" not in str(raised.value)


async def test_an_engine_that_is_not_open_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(*WORKFLOWS)
    for opened in (False, True):
        if opened:
            async with engine:
                handle = await engine.start(fine, id="a")
                assert await handle.result() == 1
        handle = engine.handle("wf:fine-a")
        for call in (
            lambda: engine.start(fine),
            lambda: engine.execute(fine),
            lambda: engine.runs(),
            lambda: engine.steps("wf:fine-a"),
            lambda: engine.command("wf:fine-a", effect),
            lambda: engine.rows("runs"),
            lambda: engine.rebuild("runs"),
            lambda: engine.projections(),
            lambda: engine.serve(),
            lambda handle=handle: handle.run(),
            lambda handle=handle: handle.status(),
            lambda handle=handle: handle.result(),
            lambda handle=handle: anext(handle.events()),
        ):
            with pytest.raises(InvalidCall, match="the engine is not open: use it inside `async with engine:`"):
                await call()  # type: ignore[misc]
        await engine.close()  # what is closed may be closed


async def test_an_engine_is_open_once_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine(*WORKFLOWS)
    async with engine:
        workers = len(await engine.store.workers())
        with pytest.raises(InvalidCall, match="the engine is open already"):
            await engine.__aenter__()
        assert len(await engine.store.workers()) == workers
        await goes_on(engine)
        await engine.close()
    for _ in range(2):
        async with engine:
            await goes_on(engine)
    async with make_engine(*WORKFLOWS) as again:
        await goes_on(again)
        assert len(await again.runs()) == 4


async def test_an_engine_belongs_to_one_event_loop(make_engine: MakeEngine) -> None:
    """Awaiting it elsewhere would hang, or corrupt what is not made for two threads."""
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(fine)
        raised: list[BaseException] = []

        async def elsewhere() -> None:
            for call in (lambda: engine.start(fine), lambda: engine.runs(), handle.result, handle.run):
                with pytest.raises(InvalidCall, match="the engine was opened in another event loop") as refused:
                    await call()  # type: ignore[operator]
                raised.append(refused.value)

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        assert len(raised) == 4
        await goes_on(engine)


async def test_an_engine_that_could_not_be_opened_may_be_opened_later(tmp_path: Any) -> None:
    engine = keiro.Engine(f"sqlite:///{tmp_path}/later/keiro.db", workflows=[fine])
    with pytest.raises(keiro.StoreUnavailable):
        await engine.__aenter__()
    (tmp_path / "later").mkdir()
    async with engine:
        await goes_on(engine)


async def test_how_long_to_wait_is_a_number_of_seconds(make_engine: MakeEngine) -> None:
    go = asyncio.Event()

    async def waiting(run: keiro.WorkflowRun) -> str:
        await go.wait()
        return "done"

    body[:] = [waiting]
    async with make_engine(*WORKFLOWS) as engine:
        handle = await engine.start(any_body)
        for wrong in (-1, math.nan, math.inf, -math.inf, True, "1", timedelta(-1)):
            with pytest.raises(InvalidCall, match=r"result\(timeout=\.\.\.\) must be a finite number"):
                await handle.result(timeout=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidCall, match=r"close\(grace=\.\.\.\) must be"):
                await engine.close(grace=wrong)  # type: ignore[arg-type]
        for little in (0, 0.001, timedelta(milliseconds=1)):
            with pytest.raises(TimeoutError):
                await handle.result(timeout=little)  # type: ignore[arg-type]
        go.set()
        assert await handle.result(timeout=30) == "done"
        assert await handle.result(timeout=0) == "done"


async def test_a_listing_takes_what_it_can_use(make_engine: MakeEngine) -> None:
    async with make_engine(*WORKFLOWS) as engine:
        await goes_on(engine)
        for wrong, problem in (
            ({"limit": 0}, "limit is a whole number from 1"),
            ({"limit": -1}, "limit is"),
            ({"limit": "1"}, "limit is"),
            ({"limit": True}, "limit is"),
            ({"limit": 2**63}, "limit is"),
            ({"before": "1"}, "before is a whole number from 1"),
            ({"before": -1}, "before is"),
            ({"status": "finished"}, "'finished' is no status; there are: pending"),
            ({"status": 3}, "is no status"),
            ({"workflow": "\0"}, "cannot name a workflow"),
            ({"workflow": 3}, "cannot name a workflow"),
        ):
            with pytest.raises(KeiroError, match=problem):
                await engine.runs(**wrong)  # type: ignore[arg-type]
        handle = engine.handle((await engine.runs())[0].run_id)
        for after in (-1, "1", True, None):
            with pytest.raises(InvalidCall, match="after is a version"):
                await anext(handle.events(after))  # type: ignore[arg-type]
        assert len(await engine.runs(limit=2**63 - 1)) == 1
