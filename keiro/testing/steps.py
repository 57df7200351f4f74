"""Steps replaced by name, for tests of a body without its effects.

The body, the journal and the reading of results stay what they are: only the function that runs is another one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

from keiro.definition import Step
from keiro.driver import Driver
from keiro.engine import Engine
from keiro.errors import InvalidCall
from keiro.identity import check_step_name
from keiro.retry import Retry
from keiro.testing.drivers import drive_with

Fake = Callable[..., Any]


def replace_steps(engine: Engine, fakes: Mapping[str, Fake]) -> None:
    """Run these functions in the place of steps, in runs that this engine drives from now on.

    The names are those of the steps (`charge`), or those of single calls as they are recorded, without `#2`
    (`item-3/charge`, or what `key=` says), which go before. A fake is called with the step's arguments, on the event
    loop, and may be async. What it returns is stored, and read by the annotation of the step it stands for; retries
    and timeouts stay too. Called again, it adds to what is replaced.
    """
    for name, fake in fakes.items():
        for part in name.split("/") if isinstance(name, str) else (name,):
            check_step_name(part)
        if not callable(fake):
            raise InvalidCall(f"replace_steps: {name!r} must be replaced by a function, such as `lambda: 7`: {fake!r}")
    drive_with(engine, _Replacing, fakes=dict(fakes))


class _Replacing(Driver):
    fakes: ClassVar[dict[str, Fake]]

    def step(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        retry: Retry | None,
        timeout: float | None,
    ) -> Coroutine[Any, Any, Any]:
        fake = next((fakes[one] for fakes in self._all() for one in (name, step.name) if one in fakes), None)
        if fake is not None:
            step = _standing_in(step, fake)
        return super().step(step, args, kwargs, name=name, retry=retry, timeout=timeout)

    def _all(self) -> list[dict[str, Fake]]:
        """The replacements of all calls, the newest first."""
        return [vars(cls)["fakes"] for cls in type(self).__mro__ if "fakes" in vars(cls)]


def _standing_in(step: Step, fake: Fake) -> Step:
    async def called(*args: Any, **kwargs: Any) -> Any:
        value = fake(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    other = copy.copy(step)
    other.fn, other.is_async, other.transactional = called, True, False
    return other
