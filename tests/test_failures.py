"""Failures: any exception can be stored, and comes back as its own type wherever that can say the same again."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from keiro.errors import ChildFailed, DecodeFailed, PayloadRejected, StepFailed, WorkflowFailed
from keiro.failures import (
    MAX_CHAIN,
    MAX_EXCEPTIONS,
    MAX_TEXT,
    MAX_TRACEBACK,
    Failure,
    capture,
    describe,
    revive,
    summary,
)


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    id: str
    total: Decimal


class Declined(Exception):
    """Its arguments are not those of its constructor."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


class Prefixed(Exception):
    """Built from its own arguments it would say something else."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class OutOfStock(Exception):
    def __init__(self, *, sku: str, wanted: Decimal) -> None:
        self.sku = sku
        self.wanted = wanted

    def __str__(self) -> str:
        return f"{self.wanted} of {self.sku}"


@dataclass(frozen=True)
class Frozen(Exception):
    order: Order


class Slotted(Exception):
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"value {self.value}"


class SelfDescribing(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left + right)
        self.parts: tuple[int, int] = (left, right)

    def __reduce__(self) -> Any:
        return SelfDescribing, self.parts


class PickyNew(Exception):
    def __new__(cls, left: int, right: int) -> PickyNew:
        return super().__new__(cls)

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left)
        self.right = right


class Holding(Exception):
    def __init__(self, connection: object) -> None:
        super().__init__("lost")
        self.connection = connection
        self.attempts = 3


class Computed(Exception):
    @property
    def size(self) -> int:
        return 5


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Hostile(Exception):
    @property
    def args(self) -> Any:
        raise RuntimeError("no arguments")

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("no attributes")


class Strange(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not to be described")


def raised(fn: Callable[[], Any]) -> BaseException:
    try:
        fn()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def stored(error: BaseException) -> Failure:
    """As it comes out of a journal."""
    return msgspec.json.decode(msgspec.json.encode(capture(error)), type=Failure)


class Model(pydantic.BaseModel):
    a: int


# The original type


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 1, None, True, 1.5),
        ValueError(),
        KeyError("k"),
        LookupError((1, "a"), [{"b": {"c"}}], {1: (2,)}, {"$type": "tuple"}, frozenset({1})),
        ValueError(Decimal("1.50"), UUID(int=1), datetime(2024, 1, 1, tzinfo=UTC), Colour.RED, b"\0\xff"),
        ValueError(Order("o-1", Decimal("1.5")), {"orders": [Order("o-2", Decimal(2))]}),
        ValueError(float("inf"), 10**3000),
        RuntimeError(KeyError("inner")),
        Declined(5, "no money"),
        Prefixed(3),
        OutOfStock(sku="a", wanted=Decimal(2)),
        Frozen(Order("o-1", Decimal("1.5"))),
        Slotted(3),
        SelfDescribing(1, 2),
        PickyNew(1, 2),
        Strange("s", 1),
        FileNotFoundError(errno.ENOENT, "No such file", "a.txt"),
        OSError("plain"),
        ImportError("no", name="n", path="p"),
        StopIteration(3),
        TimeoutError(),
        asyncio.QueueFull(),
        subprocess.CalledProcessError(3, ["ls"], b"out", None),
        raised(lambda: json.loads("{bad")),
        raised(lambda: b"\xff".decode()),
        raised(lambda: {}["absent"]),  # type: ignore[dict-item]
        raised(lambda: compile("a b", "f", "exec")),
        PayloadRejected("refused", where="step 'a'", path="$.a"),
        DecodeFailed("unreadable", where="step 'a'"),
        StepFailed("a user's own"),
    ],
    ids=lambda error: f"{type(error).__name__}{str(error.args)[:40]!a}" if type(error) is not Hostile else "Hostile",
)
def test_an_exception_comes_back_as_its_type_saying_the_same(error: Exception) -> None:
    revived = revive(stored(error))

    assert type(revived) is type(error)
    assert str(revived) == str(error)
    assert repr(revived.args) == repr(error.args)
    assert repr({k: v for k, v in vars(revived).items() if not k.startswith("__")}) == repr(vars(error))
    for name in ("errno", "filename", "name", "path", "value", "lineno", "right", "reason"):
        assert getattr(revived, name, None) == getattr(error, name, None)
    assert capture(revived) == stored(error)


def test_arguments_and_attributes_keep_their_types() -> None:
    error = ValueError((Decimal(1), [Colour.RED]), {"tags": {1}})
    error.order = Order("o-1", Decimal("1.5"))  # type: ignore[attr-defined]

    revived = revive(stored(error))

    assert revived.args == ((Decimal(1), [Colour.RED]), {"tags": {1}})
    assert revived.order == Order("o-1", Decimal("1.5"))  # type: ignore[attr-defined]


def test_an_attribute_without_a_json_form_is_left_out_and_the_type_stays() -> None:
    revived = revive(stored(Holding(object())))

    assert type(revived) is Holding
    assert str(revived) == "lost"
    assert revived.attempts == 3
    assert not hasattr(revived, "connection")


def test_an_attribute_behind_a_property_is_kept_behind_it() -> None:
    error = Computed()
    vars(error)["size"] = 7

    assert vars(revive(stored(error)))["size"] == 7


def test_a_class_inside_a_function_is_found_by_its_latest_definition() -> None:
    def define() -> type[Exception]:
        class Local(Exception):
            pass

        return Local

    older, newer = define(), define()

    assert type(revive(stored(newer("x")))) is newer
    assert older is not newer


def test_building_an_exception_again_does_not_run_its_constructor() -> None:
    calls = []

    class Reporting(Exception):
        def __init__(self, text: str) -> None:
            calls.append(text)
            super().__init__(text)

    failure = stored(Reporting("sent to the pager"))

    assert type(revive(failure)) is Reporting
    assert calls == ["sent to the pager"]


# Standing in


@pytest.mark.parametrize(
    "error",
    [
        raised(lambda: Model(a="x")),  # type: ignore[arg-type]
        ValueError(object()),
        KeyboardInterrupt(),
        asyncio.CancelledError("stop"),
        BaseExceptionGroup("many", [KeyboardInterrupt()]),
        Hostile("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_be_built_again_is_a_step_failure_with_everything_readable(error: BaseException) -> None:
    error.add_note("a hint")
    failure = stored(error)

    revived = revive(failure)

    assert type(revived) is StepFailed
    assert revived.failure == failure
    assert type(error).__name__ in str(revived)
    assert type(error) is Hostile or str(error) in str(revived)
    assert capture(revived) == failure


def test_the_stand_in_shows_the_original_traceback_and_notes() -> None:
    def fails() -> None:
        raise ValueError(object())

    error = raised(fails)
    error.add_note("a hint")

    notes = revive(stored(error)).__notes__

    assert notes[0] == "a hint"
    assert "raise ValueError(object())" in notes[1]


@pytest.mark.parametrize(
    "failure",
    [
        Failure(type="no.such.module:Boom", message="x", args=("x",)),
        Failure(type="builtins:NoSuchError", message="x", args=("x",)),
        Failure(type="builtins:int", message="x", args=("x",)),
        Failure(type="builtins:print", message="x", args=("x",)),
        Failure(type="subprocess:Popen", message="x", args=(["true"],)),
        Failure(type="os:environ.get", message="x", args=("x",)),
        Failure(type="builtins:SystemExit", message="x", args=("x",)),
        Failure(type="", message="x", args=()),
        Failure(type="builtins:ValueError", message="x", args=({"$type": "tuple"},)),
        Failure(type="builtins:ValueError", message="x", args=({"$type": "no.such:Type", "$value": 1},)),
        Failure(type="builtins:ValueError", message="x", args=({"$type": "subprocess:Popen", "$value": ["true"]},)),
        Failure(type="builtins:ValueError", message="says something else", args=("x",)),
        Failure(type="tests.test_failures:Slotted", message="value x", args=(1, 2, 3)),
    ],
    ids=lambda failure: f"{failure.type} {failure.args}",
)
def test_what_a_journal_names_is_only_used_if_it_is_an_exception_that_says_the_same(failure: Failure) -> None:
    revived = revive(failure)

    assert type(revived) is StepFailed
    assert revived.failure == failure


def test_reading_a_failure_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "not_loaded_yet.py").write_text("class Boom(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    asked = []
    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign, assignment]
    monkeypatch.setitem(sys.modules, "lazy", lazy)

    for name in ("not_loaded_yet:Boom", "lazy:Boom"):
        assert type(revive(Failure(type=name, message="x", args=("x",)))) is StepFailed

    assert "not_loaded_yet" not in sys.modules
    assert asked == []


# Text


PROGRAM = """
import sys
from keiro.failures import Failure, capture, revive
import msgspec

class Refused(Exception):
    pass

def outside():
    class Inner(Exception):
        pass
    return Inner

if __name__ == "__main__":
    kinds = (Refused, outside())
    if sys.argv[1:]:
        stored = msgspec.json.decode(sys.argv[1], type=list[Failure])
        assert [type(revive(one)) for one in stored] == list(kinds), stored
    sys.stdout.write(msgspec.json.encode([capture(kind("no")) for kind in kinds]).decode())
"""


@pytest.mark.parametrize("way", [["refusing.py"], ["-m", "refusing"]], ids=["file", "module"])
def test_an_exception_of_the_started_program_is_the_same_class_wherever_that_is_imported(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refusing.py").write_text(PROGRAM)

    def started(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, *way, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    # Stored by the program, and revived where it is imported.
    stored = msgspec.json.decode(started(), type=list[Failure])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("refusing")
    try:
        inner = module.outside()
        assert [type(revive(one)) for one in stored] == [module.Refused, inner]
        # Stored where it is imported, and revived in the program.
        started(msgspec.json.encode([capture(kind("no")) for kind in (module.Refused, inner)]).decode())
    finally:
        del sys.modules["refusing"]


def test_a_program_that_is_loaded_twice_keeps_its_two_classes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    main, again = types.ModuleType("__main__"), types.ModuleType("refusing")
    main.__file__ = "/somewhere/refusing.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "refusing", again)
    for module in (main, again):
        kind = type("Refused", (Exception,), {"__module__": module.__name__})
        vars(module)["Refused"] = kind
    for module in (main, again):
        assert type(revive(capture(module.Refused("no")))) is module.Refused


def test_text_a_database_refuses_is_replaced() -> None:
    error = ValueError("a\0b\ud800c")
    error.add_note("n\0")
    error.detail = {"k": "\udfff", "bad\0key": 1}  # type: ignore[attr-defined]
    vars(error)["bad\0name"] = 1

    failure = stored(error)

    assert "\\u0000" not in msgspec.json.encode(failure).decode()
    assert failure.message == "a\ufffdb\ufffdc"
    assert failure.notes == ("n\ufffd",)
    assert type(revive(failure)) is ValueError
    assert capture(revive(failure)) == failure


@pytest.mark.parametrize("args", [("x" * 100_000,), ("x" * 100_000, 2)], ids=["alone", "among others"])
def test_long_text_is_cut_and_the_type_stays(args: tuple[Any, ...]) -> None:
    error = ValueError(*args)
    error.add_note("y" * 100_000)

    failure = stored(error)

    assert len(failure.message) == MAX_TEXT
    assert len(msgspec.json.encode(failure)) < 4 * MAX_TEXT
    assert type(revive(failure)) is ValueError
    assert capture(revive(failure)) == failure


def test_arguments_without_end_are_left_out() -> None:
    endless: list[Any] = []
    endless.append(endless)

    for value in (endless, list(range(5000)), ["x" * MAX_TEXT] * 100):
        assert capture(ValueError(value)).args is None


def test_a_text_that_cannot_be_had_says_so() -> None:
    failure = stored(Mute("x"))

    assert "__str__ raised RuntimeError" in failure.message
    assert type(revive(failure)) is Mute


# Traceback


def test_the_traceback_is_the_code_that_failed_and_survives_being_raised_again() -> None:
    def fails() -> None:
        raise ValueError("here")

    failure = stored(raised(fails))

    assert 'raise ValueError("here")' in failure.traceback
    assert failure.traceback.index("in raised") < failure.traceback.index("in fails")

    revived = revive(failure)
    assert revived.__traceback__ is None

    def again() -> None:
        raise revived

    assert capture(raised(again)) == failure


def test_a_long_traceback_keeps_its_end() -> None:
    names: dict[str, Any] = {}
    source = "def ping(n):\n pong(n - 1) if n else 1 / 0\ndef pong(n):\n ping(n - 1)"
    exec(compile(source, "a/long/way/" * 20 + "down.py", "exec"), names)

    failure = stored(raised(lambda: names["ping"](400)))

    assert len(failure.traceback) == MAX_TRACEBACK
    assert "in raised" not in failure.traceback
    assert failure.traceback.rstrip().endswith("line 2, in ping")


def test_frames_of_the_engine_before_the_users_code_are_left_out() -> None:
    step = types.ModuleType("step")
    exec("def charge():\n    raise ValueError('x')", step.__dict__)
    engine: dict[str, Any] = {"charge": step.charge}
    exec(compile("def drive():\n    charge()", str(Path(revive.__code__.co_filename)), "exec"), engine)
    error = raised(engine["drive"])
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]

    assert "in drive" not in capture(error).traceback
    assert "in charge" in capture(error).traceback


# Chains


def test_causes_and_contexts_come_back() -> None:
    def handles() -> None:
        try:
            {}["k"]  # type: ignore[dict-item]
        except KeyError:
            raise ValueError("while handling") from None
        finally:
            pass

    def chains() -> None:
        try:
            try:
                raise OSError("root")
            except OSError:
                raise KeyError("handling")  # noqa: B904
        except KeyError as error:
            raise Declined(1, "top") from error

    top = revive(stored(raised(chains)))
    assert type(top) is Declined
    assert type(top.__cause__) is KeyError
    assert type(top.__cause__.__context__) is OSError
    assert top.__suppress_context__

    alone = revive(stored(raised(handles)))
    assert (alone.__cause__, alone.__context__) == (None, None)


def test_a_circular_chain_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    first.args = ("a", second)

    failure = capture(first)

    assert failure.cause is not None
    assert failure.cause.cause is None
    assert describe(failure).count("direct cause") == 1


def test_a_long_chain_is_cut() -> None:
    error = ValueError(0)
    for number in range(1000):
        after = ValueError(number)
        after.__cause__ = error
        error = after

    failure: Failure | None = stored(error)

    levels = 0
    while failure is not None:
        levels, failure = levels + 1, failure.cause
    assert levels == MAX_CHAIN


def test_a_group_comes_back_with_its_members() -> None:
    group = ExceptionGroup("many", [ValueError(1), ExceptionGroup("inner", [Declined(2, "no"), ValueError(object())])])

    revived = revive(stored(group))

    assert type(revived) is ExceptionGroup
    assert str(revived) == str(group)
    first, inner = revived.exceptions
    assert (type(first), first.args) == (ValueError, (1,))
    assert isinstance(inner, ExceptionGroup)
    assert [type(member) for member in inner.exceptions] == [Declined, StepFailed]
    assert capture(revived) == stored(group)


def test_the_summary_of_a_group_names_its_first_member() -> None:
    group = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("deep"), KeyError(1)])

    assert summary(capture(group)) == (
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): ValueError: deep"
    )


def test_a_huge_group_keeps_its_type_and_as_many_members_as_there_is_room_for() -> None:
    group = ExceptionGroup("many", [ValueError(number) for number in range(MAX_EXCEPTIONS * 2)])

    failure = stored(group)

    assert len(failure.members) == MAX_EXCEPTIONS - 1
    matched, rest = revive(failure).split(ValueError)  # type: ignore[attr-defined]
    assert matched is not None
    assert rest is None


def test_a_failed_run_as_a_failure_does_not_store_its_cause_twice() -> None:
    inner = stored(ValueError("root"))
    for level in range(8):
        error = ChildFailed(f"child {level} failed", inner)
        error.__cause__ = revive(inner)
        inner = stored(error)

    assert len(msgspec.json.encode(inner)) < 5_000
    revived = revive(inner)
    assert type(revived) is ChildFailed
    assert revived.failure == inner.cause
    assert isinstance(revived, WorkflowFailed)


def test_a_description_reads_like_a_python_traceback() -> None:
    def fails() -> None:
        try:
            raise OSError("root")
        except OSError as error:
            group = ExceptionGroup("both", [ValueError("a"), KeyError("b")])
            group.add_note("a hint")
            raise group from error

    text = describe(stored(raised(fails)))

    assert text.index('raise OSError("root")') < text.index("OSError: root") < text.index("ExceptionGroup: both")
    assert "a hint" in text
    assert "  | ValueError: a\n" in text


# Properties

_DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
    | st.sampled_from(Colour),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.just("$type"), inner, max_size=3)
        | st.frozensets(st.text(max_size=5) | st.integers(), max_size=3)
    ),
    max_leaves=10,
)
_TYPES = st.sampled_from([ValueError, KeyError, LookupError, Strange, RuntimeError])


@example(kind=ValueError, args=[None, "\0"], attributes={}, notes=[])
@given(
    kind=_TYPES,
    args=st.lists(_DATA, max_size=3),
    attributes=st.dictionaries(st.sampled_from(["code", "detail", "order"]), _DATA),
    notes=st.lists(st.text(), max_size=2),
)
def test_an_exception_of_plain_data_comes_back_equal(
    kind: type[Exception], args: list[Any], attributes: dict[str, Any], notes: list[str]
) -> None:
    error = kind(*args)
    vars(error).update(attributes)
    for note in notes:
        error.add_note(note)

    failure = stored(error)
    revived = revive(failure)

    again = capture(revived)
    # Its message may show a set in another order, and replaced text in another way.
    assert replace(again, message="") == replace(failure, message="")
    assert type(revived) is kind
    if "\0" not in str((args, attributes, notes)) and "\\x00" not in str((args, attributes, notes)):
        assert sorted(again.message) == sorted(failure.message)
        assert revived.args == tuple(args)
        assert {k: v for k, v in vars(revived).items() if not k.startswith("__")} == attributes
        assert getattr(revived, "__notes__", []) == notes


@given(
    st.builds(
        Failure,
        type=st.text() | st.sampled_from(["builtins:ValueError", "builtins:OSError", "tests.test_failures:Frozen"]),
        message=st.text(),
        args=st.none() | st.lists(st.from_type(type(None)) | st.text() | st.integers(), max_size=3).map(tuple),
        attributes=st.dictionaries(
            st.text() | st.sampled_from(["args", "__class__", "__cause__"]), st.text(), max_size=2
        ),
    )
)
def test_no_stored_failure_breaks_reviving(failure: Failure) -> None:
    assert isinstance(revive(failure), Exception)
    assert isinstance(describe(failure), str)
