"""A failed step's own wish for its next attempt, against the policy it is tried under."""

from datetime import timedelta

import pytest

from keiro import Retry, RetryAfter
from keiro.errors import InvalidCall


def test_a_step_that_asks_for_its_delay_gets_it_past_the_maximum_and_without_jitter() -> None:
    policy = Retry(3, maximum=5, jitter=1.0)
    assert policy.delay(1, RetryAfter(90), 0.9) == 90.0
    assert policy.delay(1, RetryAfter(timedelta(minutes=2)), 0.9) == 120.0


def test_asking_for_a_delay_is_retried_whatever_retry_on_says_but_uses_up_an_attempt() -> None:
    policy = Retry(2, retry_on=OSError)
    assert policy.delay(1, RetryAfter(1), 0.0) == 1.0
    assert policy.delay(2, RetryAfter(1), 0.0) is None


def test_give_up_on_wins_over_an_asked_delay() -> None:
    assert Retry(5, give_up_on=RetryAfter).delay(1, RetryAfter(1), 0.0) is None


def test_its_arguments_build_it_again() -> None:
    error = RetryAfter(timedelta(seconds=3), "busy")
    assert type(error)(*error.args).delay == 3.0
    assert error.args == (3.0, "busy")


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), True, "soon"])
def test_a_delay_that_is_none_is_refused(delay: object) -> None:
    with pytest.raises(InvalidCall, match="number of seconds"):
        RetryAfter(delay)  # type: ignore[arg-type]
