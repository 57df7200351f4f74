"""`@workflow`, `@step` and their options: what a definition is, before any engine runs it.

A definition only describes; it holds no state and knows no store.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, overload

from keiro.codec import Decoder, InputCodec, input_codec, result_decoder
from keiro.errors import InvalidCall
from keiro.history import IRREVERSIBLE
from keiro.identity import check_step_name, check_workflow_name
from keiro.lanes import lane
from keiro.limits import check_queue_name
from keiro.retry import Retry

P = ParamSpec("P")
T = TypeVar("T")


GRACE_S: Final = 30.0
"""How long a run that is asked to end may take for its cleanup, where its workflow says nothing else."""
LONGEST_GRACE_S: Final = 10**9


def seconds(value: float | timedelta | None, what: str) -> float | None:
    """A duration in seconds as a finite, positive float; raise `InvalidCall` for anything else."""
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < float("inf"):
        raise InvalidCall(f"{what} must be a positive, finite number of seconds or a timedelta, not {value!r}")
    return float(number)


def patience(value: float | timedelta | None, what: str) -> float | None:
    """How long to wait, in seconds: 0 is one look, None without end. Raise `InvalidCall` for anything else."""
    if value is None:
        return None
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
        raise InvalidCall(f"{what} must be a finite number of seconds from 0, a timedelta, or None, not {value!r}")
    return float(number)


def retry_or_none(value: object, what: str) -> Retry | None:
    """A `Retry` or None; raise `InvalidCall` for anything else."""
    if value is not None and not isinstance(value, Retry):
        raise InvalidCall(f"{what} must be a keiro.Retry, such as keiro.Retry(5), not {value!r}")
    return value


class Step:
    """A function as a step: its name, its options and how its result is read back. Call it like the function."""

    __slots__ = (
        "__dict__",
        "__weakref__",
        "cleanup",
        "compensate",
        "decode",
        "fn",
        "idempotency_key",
        "idle_timeout",
        "is_async",
        "name",
        "preimage",
        "restore",
        "retry",
        "tier",
        "timeout",
        "transactional",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        cleanup: bool = False,
        tier: str | None = None,
        idempotency_key: Callable[..., str] | None = None,
        preimage: Callable[..., Any] | None = None,
        restore: Callable[..., Any] | None = None,
        compensate: Callable[..., Any] | None = None,
        idle_timeout: float | timedelta | None = None,
    ) -> None:
        if not callable(fn):
            raise InvalidCall(f"a step must be a function or another callable, not {fn!r}")
        self.fn = fn
        self.name = check_step_name(name if name is not None else _name_of(fn))
        self.is_async = _is_async(fn)
        self.retry = retry_or_none(retry, f"retry of step {self.name!r}")
        self.timeout = seconds(timeout, f"timeout of step {self.name!r}")
        if not isinstance(cleanup, bool):
            raise InvalidCall(f"cleanup of step {self.name!r} is True or False, not {cleanup!r:.300}")
        self.cleanup = cleanup
        self.transactional = False
        self.tier = _tier_of(self.name, tier, idempotency_key, preimage, restore, compensate)
        self.idle_timeout = seconds(idle_timeout, f"idle_timeout of step {self.name!r}")
        self.idempotency_key = idempotency_key
        self.preimage = None if preimage is None else step_of(preimage)
        self.restore = None if restore is None else step_of(restore)
        self.compensate = None if compensate is None else step_of(compensate)
        self.decode: Decoder = result_decoder(fn, where=f"result of step {self.name!r}")
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = copy.copy(self)
        bound.fn = functools.partial(self.fn, instance)
        return bound

    def in_transaction(self) -> Step:
        """The same step, called with a connection first, and recorded in the transaction that is open on it."""
        other = copy.copy(self)
        other.transactional = True
        return other

    def __repr__(self) -> str:
        return f"<step {self.name}>"


SEALED: Final = "sealed"
COMPENSABLE: Final = "compensable"


def _tier_of(
    name: str, tier: str | None, key: object, preimage: object, restore: object, compensate: object
) -> str | None:
    """The tier of a step; raise `InvalidCall` for one that there is not, or options that it does not have."""
    if tier not in (None, SEALED, COMPENSABLE, IRREVERSIBLE):
        raise InvalidCall(
            f"tier of step {name!r} is 'sealed', 'compensable', 'irreversible' or None, not {tier!r:.300}"
        )
    options = {
        "idempotency_key": (key, IRREVERSIBLE),
        "preimage": (preimage, COMPENSABLE),
        "restore": (restore, COMPENSABLE),
        "compensate": (compensate, COMPENSABLE),
    }
    for option, (given, of) in options.items():
        if given is None:
            continue
        if not callable(given):
            raise InvalidCall(f"{option} of step {name!r} is a function, not {given!r:.300}")
        if tier != of:
            raise InvalidCall(f"{option} of step {name!r} belongs to tier={of!r}, and the step has tier={tier!r}")
    if (preimage is None) != (restore is None):
        raise InvalidCall(f"step {name!r} needs both, preimage= to take and restore= to put back, or neither")
    return tier


_MADE: Final = "__keiro_step__"


def step_of(fn: Callable[..., Any]) -> Step:
    """The step a callable stands for: itself, or one made of a plain function, once."""
    if type(fn) is Step:
        return fn
    if type(fn) is not FunctionType:
        if isinstance(fn, Workflow):
            raise InvalidCall(f"{fn.name!r} is a workflow and no step: call its function inside this body, or start it")
        return Step(fn)
    found: Step | None = fn.__dict__.get(_MADE)
    # A decorator that copies attributes, as functools.wraps does, copies this one to another function.
    if found is None or found.fn is not fn:
        found = fn.__dict__[_MADE] = Step(fn)
    return found


@overload
def step(fn: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float | timedelta | None = None,
    cleanup: bool = False,
    tier: str | None = None,
    idempotency_key: Callable[..., str] | None = None,
    preimage: Callable[..., Any] | None = None,
    restore: Callable[..., Any] | None = None,
    compensate: Callable[..., Any] | None = None,
    idle_timeout: float | timedelta | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def step(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: float | timedelta | None = None,
    cleanup: bool = False,
    tier: str | None = None,
    idempotency_key: Callable[..., str] | None = None,
    preimage: Callable[..., Any] | None = None,
    restore: Callable[..., Any] | None = None,
    compensate: Callable[..., Any] | None = None,
    idle_timeout: float | timedelta | None = None,
) -> Any:
    """Give a function the options it has as a step: its name, retries, and a timeout in seconds for each attempt.

    The function may be async or plain; a plain one runs in a thread, and its timeout counts from when one is free for
    it. It stays callable as before. With `cleanup` it may also be called in a run of a workflow with a cleanup that is
    asked to end, and is not interrupted by the request.

    `tier` says what its effect is. `irreversible`: the attempt is recorded before it begins; one that was interrupted
    is not repeated (`EffectUnknown`), unless `idempotency_key`, a function of the step's arguments, gives a text by
    which whoever performs the effect knows it again; retries need one. `compensable`: what `preimage(*args)` returns is
    recorded before the body, and `restore(that, *args)` is called before it is run again; `compensate(result, *args)`
    undoes it, when the body calls `run.compensate()`. `sealed`: nothing outside sees it.

    An attempt that calls `keiro.heartbeat()` less often than every `idle_timeout` seconds raises `TimeoutError`.
    """

    def decorate(fn: Callable[..., Any]) -> Step:
        return Step(
            fn,
            name=name,
            retry=retry,
            timeout=timeout,
            cleanup=cleanup,
            tier=tier,
            idempotency_key=idempotency_key,
            preimage=preimage,
            restore=restore,
            compensate=compensate,
            idle_timeout=idle_timeout,
        )

    return decorate if fn is None else decorate(fn)


class Workflow:
    """A workflow: its name, its body, and how its input and result are stored."""

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        name: str | None = None,
        retry: Retry | None = None,
        version: str | None = None,
        pinned: bool = False,
        patches: Sequence[str] = (),
        queue: str | None = None,
        cleanup: bool = False,
        grace: float | timedelta | None = None,
        aggregate: type[Any] | None = None,
    ) -> None:
        if not inspect.iscoroutinefunction(body):
            raise InvalidCall(f"the body of a workflow must be an async function, {body!r} is not")
        self.body = body
        self.name = check_workflow_name(name if name is not None else _name_of(body))
        self.retry = retry_or_none(retry, f"retry of workflow {self.name!r}")
        if version is not None and (not isinstance(version, str) or not version.isprintable() or len(version) > 256):
            raise InvalidCall(
                f"version of workflow {self.name!r} is a tag of at most 256 printable characters, not {version!r:.300}"
            )
        self.version = version
        if not isinstance(pinned, bool):
            raise InvalidCall(f"pinned of workflow {self.name!r} is True or False, not {pinned!r:.300}")
        if pinned and version is None:
            raise InvalidCall(
                f"workflow {self.name!r} has pinned=True and no version: name the version of this code, for example "
                '@keiro.workflow(version="1", pinned=True)'
            )
        self.pinned = pinned
        self.lane = lane(self.name, version if pinned else None)
        if isinstance(patches, str) or not all(isinstance(patch, str) and patch for patch in patches):
            raise InvalidCall(f"patches of workflow {self.name!r} is a list of names, not {patches!r}")
        self.patches = tuple(patches)
        self.queue = None if queue is None else check_queue_name(queue)
        if not isinstance(cleanup, bool):
            raise InvalidCall(f"cleanup of workflow {self.name!r} is True or False, not {cleanup!r:.300}")
        if grace is not None and not cleanup:
            raise InvalidCall(f"workflow {self.name!r} has a grace and no cleanup=True: it is cancelled at once")
        length = seconds(GRACE_S if grace is None else grace, f"grace of workflow {self.name!r}")
        assert length is not None
        if length > LONGEST_GRACE_S:
            raise InvalidCall(f"grace of workflow {self.name!r} is at most {LONGEST_GRACE_S} seconds, not {grace!r}")
        self.cleanup_ms = round(length * 1000) if cleanup else None
        self.aggregate = aggregate
        self.input: InputCodec = input_codec(body, skip_first=True, where=f"input of workflow {self.name!r}")
        self.decode_result: Decoder = result_decoder(body, where=f"result of workflow {self.name!r}")
        functools.update_wrapper(self, body, updated=())

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return await self.body(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


@overload
def workflow(body: Callable[..., Any], /) -> Workflow: ...
@overload
def workflow(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    version: str | None = None,
    pinned: bool = False,
    patches: Sequence[str] = (),
    queue: str | None = None,
    cleanup: bool = False,
    grace: float | timedelta | None = None,
) -> Callable[[Callable[..., Any]], Workflow]: ...
def workflow(
    body: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry: Retry | None = None,
    version: str | None = None,
    pinned: bool = False,
    patches: Sequence[str] = (),
    queue: str | None = None,
    cleanup: bool = False,
    grace: float | timedelta | None = None,
) -> Any:
    """Make an async function whose first parameter is the run into a workflow.

    `name` (default: the function's) is stored with every run: keep it when the function is renamed. `retry` runs the
    body again after an exception left it (default: the run fails). `version` is a tag stored with each run
    that this code starts; with `pinned` it drives those runs and no others of its name (default: all of its name).
    `patches` are the names that `run.patched(name)` holds for in rounds that begin from now on. `queue` is the name
    of a `keiro.Queue` whose limits its runs keep, with those of all other workflows in it (default: no limits).
    With `cleanup` a run that is cancelled is asked to end: `CancelledError` is raised in its body, which may then call
    steps that are marked as cleanup; when the body has ended, or after `grace` seconds (default: 30), it is cancelled.
    """

    def decorate(body: Callable[..., Any]) -> Workflow:
        return Workflow(
            body,
            name=name,
            retry=retry,
            version=version,
            pinned=pinned,
            patches=patches,
            queue=queue,
            cleanup=cleanup,
            grace=grace,
        )

    return decorate if body is None else decorate(body)


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _is_async(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
