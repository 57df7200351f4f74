"""When a failed attempt is tried again: a value, and a pure function of it."""

from __future__ import annotations

from datetime import timedelta

from keiro.errors import InvalidCall


class RetryAfter(Exception):
    """Raised by a step that knows when to try again (a rate limit's answer): the next attempt is after `delay` seconds.

    It takes the place of the policy's pacing, past `maximum` and without jitter, and is retried whatever `retry_on`
    says. It uses up an attempt like every failure, so `attempts` stays the ceiling, and a step without a policy fails.
    The time of the next attempt is durable. Raises `InvalidCall` for a delay that is not a number from 0.
    """

    def __init__(self, delay: float | timedelta, *details: object) -> None:
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 <= seconds <= 1e9:
            raise InvalidCall(f"RetryAfter({delay!r}): the delay is a number of seconds from 0 to 1e+09")
        # The arguments are what a failure keeps: the exception can be built from them again after a restart.
        super().__init__(float(seconds), *details)
        self.delay = float(seconds)


class Retry:
    """How often and how soon a failed attempt is repeated.

    `attempts` counts the first one. The n-th retry waits `initial * factor ** (n - 1)` seconds, at most `maximum`, of
    which a random share of up to `jitter` (0 to 1) is taken off. Only exceptions that are instances of `retry_on` and
    not of `give_up_on` are retried.
    """

    __slots__ = ("attempts", "factor", "give_up_on", "initial", "jitter", "maximum", "retry_on")

    def __init__(
        self,
        attempts: int = 5,
        *,
        initial: float | timedelta = 1.0,
        factor: float = 2.0,
        maximum: float | timedelta = 64.0,
        jitter: float = 0.1,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        give_up_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> None:
        first = initial.total_seconds() if isinstance(initial, timedelta) else initial
        longest = maximum.total_seconds() if isinstance(maximum, timedelta) else maximum
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise InvalidCall(f"Retry(attempts={attempts!r}): attempts is a whole number from 1; it counts the first")
        for name, value, low, high in (
            ("initial", first, 0.0, 1e9),
            ("maximum", longest, 0.0, 1e9),
            ("factor", factor, 1.0, 1e9),
            ("jitter", jitter, 0.0, 1.0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidCall(f"Retry({name}={value!r}): {name} is a number from {low:g} to {high:g}")
        self.attempts = attempts
        self.initial = float(first)
        self.factor = float(factor)
        self.maximum = float(longest)
        self.jitter = float(jitter)
        self.retry_on = _exceptions("retry_on", retry_on)
        self.give_up_on = _exceptions("give_up_on", give_up_on)

    def delay(self, attempt: int, error: BaseException, chance: float) -> float | None:
        """Seconds to wait after failed `attempt` (from 1), or None to give up; `chance` in [0, 1) draws the jitter."""
        if attempt >= self.attempts or isinstance(error, self.give_up_on):
            return None
        if isinstance(error, RetryAfter):
            return error.delay
        if not isinstance(error, self.retry_on):
            return None
        # The exponent is capped: 2.0 ** 1024 overflows, and `maximum` has won long before.
        wait = min(self.initial * self.factor ** min(attempt - 1, 64), self.maximum)
        return wait * (1.0 - self.jitter * chance)

    def __repr__(self) -> str:
        return f"Retry({self.attempts}, initial={self.initial:g}, factor={self.factor:g}, maximum={self.maximum:g})"


def _exceptions(name: str, given: object) -> tuple[type[BaseException], ...]:
    found = given if isinstance(given, tuple) else (given,)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise InvalidCall(f"Retry({name}={given!r}): {name} is an exception class or a tuple of them")
    return found
