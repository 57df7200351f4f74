"""When a cron expression ticks, as instants in milliseconds: pure, and the only module that knows the cron library.

Ticks grow strictly: an hour that a clock change leaves out or repeats never gives the same one twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import MAXYEAR, UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from keiro.errors import InvalidCall
from keiro.events import ms_of, time_of

SHORTCUTS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_HOUR_MS: Final = 3_600_000
_DAY: Final = timedelta(days=1)
_YEARS: Final = 50


class Cron:
    """An expression of five fields, or six with seconds first, on the wall clock of a zone.

    Where hour and minute are both given (`30 2 * * *`), a time that a clock change leaves out ticks at the end of the
    gap, and one that comes twice ticks the first time, as with Debian's cron. Where one of them begins with a star,
    real time counts: what is left out does not tick, what comes twice ticks twice. Raises `InvalidCall` for an
    expression or a zone that there is not.
    """

    __slots__ = ("_fixed", "_matcher", "_uneven", "zone")

    def __init__(self, expression: str, zone: str = "UTC") -> None:
        if not isinstance(expression, str) or not expression.strip():
            raise InvalidCall(f"cron={expression!r}: give an expression such as '0 8 * * *', or '@daily'")
        from cronsim import CronSim, CronSimError  # who has no schedules need not load it

        fields = SHORTCUTS.get(expression.strip().lower(), expression)
        self.zone = _zone(zone)
        try:
            self._matcher = CronSim(fields, datetime.now(UTC))
        except (CronSimError, ValueError, TypeError, AssertionError) as error:
            known = ", ".join(SHORTCUTS)
            raise InvalidCall(
                f"cron={expression!r}: {error or 'no cron expression'}. Write minute, hour, day of month, month and "
                f"day of week, such as '0 8 * * MON-FRI', with seconds before them if need be; or one of {known}"
            ) from None
        self._fixed = not any(field.startswith("*") for field in self._matcher.parts[1:3])
        self._uneven: tuple[list[date], list[int]] = ([], [])

    def ticks(self, after_ms: int) -> Iterator[int]:
        """The ticks after an instant. It ends where none comes for 50 years.

        The library reads the expression and knows its days; the walk is done here, because its own loses ticks where a
        clock is changed by half an hour.
        """
        local = self.shown(after_ms).replace(tzinfo=None)
        last, day = after_ms, local.date() - _DAY  # a clock may be put back over midnight
        end = day.replace(year=min(day.year + _YEARS, MAXYEAR - 1), day=1)
        while day < end:
            if day.month not in self._matcher.months:
                day = (day.replace(day=1) + 32 * _DAY).replace(day=1)
                continue
            days = [day]
            while not self._even(days[-1]):  # a change over midnight makes two days uneven, which belong together
                days.append(days[-1] + _DAY)
            for at_ms in self._even_ticks(day, last) if len(days) == 1 else self._uneven_ticks(days[:-1]):
                if at_ms > last:
                    last = at_ms
                    yield at_ms
            day = days[-1] if len(days) > 1 else day + _DAY

    def _even(self, day: date) -> bool:
        """Whether the clock goes through the day without a change."""
        return len({self._offset(at, fold) for at in (day, day + _DAY) for fold in (0, 1)}) == 1

    def _offset(self, day: date, fold: int) -> timedelta | None:
        return datetime.combine(day, time(fold=fold), self.zone).utcoffset()

    def _even_ticks(self, day: date, after_ms: int) -> Iterator[int]:
        if not self._matcher.match_day(day):
            return
        midnight = ms_of(datetime.combine(day, time(), self.zone))
        for hour in sorted(self._matcher.hours):
            start = midnight + hour * _HOUR_MS
            if start + _HOUR_MS <= after_ms:
                continue
            for minute in sorted(self._matcher.minutes):
                for second in sorted(self._matcher.seconds):
                    yield start + minute * 60_000 + second * 1000

    def _uneven_ticks(self, days: list[date]) -> list[int]:
        if self._uneven[0] == days:
            return self._uneven[1]  # with seconds there are many, and each is asked for by itself
        found: set[int] = set()
        for day in days:
            if day.month not in self._matcher.months or not self._matcher.match_day(day):
                continue
            for hour in self._matcher.hours:
                for minute in self._matcher.minutes:
                    for second in self._matcher.seconds:
                        found.update(self._instants(datetime.combine(day, time(hour, minute, second))))
        self._uneven = (days, sorted(found))
        return self._uneven[1]

    def _instants(self, local: datetime) -> Iterator[int]:
        """When the clock of the zone shows this."""
        if self._fixed:
            while not self._is_shown(local, 0):
                local = local.replace(second=0) + timedelta(minutes=1)
            yield ms_of(local.replace(tzinfo=self.zone))
            return
        for fold in (0, 1):
            if self._is_shown(local, fold):
                yield ms_of(local.replace(tzinfo=self.zone, fold=fold))

    def _is_shown(self, local: datetime, fold: int) -> bool:
        there = local.replace(tzinfo=self.zone, fold=fold).astimezone(UTC)
        return there.astimezone(self.zone).replace(tzinfo=None, fold=0) == local

    def after(self, at_ms: int) -> int | None:
        """The first tick after an instant; None if there is none for 50 years."""
        return next(self.ticks(at_ms), None)

    def newest(self, after_ms: int, until_ms: int, most: int) -> list[int]:
        """The newest ticks after one instant and until another, at most `most`, oldest first."""
        span = _HOUR_MS
        while True:
            # Not from the beginning: it may be years ago, and only the end of it is asked for.
            start = max(after_ms, until_ms - span)
            found: deque[int] = deque(maxlen=most)
            for at_ms in self.ticks(start):
                if at_ms > until_ms:
                    break
                found.append(at_ms)
            if len(found) == most or start == after_ms:
                return list(found)
            span *= 4

    def shown(self, at_ms: int) -> datetime:
        """An instant on the wall clock of the zone."""
        return time_of(at_ms).astimezone(self.zone)


@lru_cache(256)
def cron_of(expression: str, zone: str) -> Cron:
    """The `Cron` of these, made once."""
    return Cron(expression, zone)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC  # known on machines without zone data too
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):
        raise InvalidCall(
            f"zone={name!r}: there is no such time zone here. Zones have names like 'Europe/Berlin' or 'UTC'; where "
            "the machine has no zone data, `pip install tzdata` brings it"
        ) from None
