"""When schedules tick: instants that grow strictly, also where a clock is changed; what cannot tick is refused."""

from __future__ import annotations

import sys
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from keiro.cron import SHORTCUTS, Cron
from keiro.errors import InvalidCall
from keiro.events import ms_of

BERLIN, NEW_YORK, LORD_HOWE, KOLKATA = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"


def ticks(expression: str, zone: str, after: str, count: int = 3) -> list[str]:
    """The next ticks on the wall clock of the zone."""
    cron = Cron(expression, zone)
    start = ms_of(datetime.fromisoformat(after).replace(tzinfo=cron.zone))
    return [cron.shown(at).isoformat(timespec="minutes") for at in islice(cron.ticks(start), count)]


def test_a_time_that_spring_leaves_out_ticks_at_the_end_of_the_gap() -> None:
    assert ticks("30 2 * * *", BERLIN, "2026-03-28T00:00") == [
        "2026-03-28T02:30+01:00",
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:30+02:00",
    ]
    assert ticks("30 2 * * *", NEW_YORK, "2026-03-07T12:00", 2) == ["2026-03-08T03:00-04:00", "2026-03-09T02:30-04:00"]
    # Where the clock is put forward by half an hour, the gap is from 2:00 to 2:30.
    assert ticks("15 2 * * *", LORD_HOWE, "2026-10-03T03:00", 2) == ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]


def test_times_that_fall_together_in_the_gap_tick_once() -> None:
    assert ticks("0,15,30,45 2,3 * * *", BERLIN, "2026-03-29T00:00", 5) == [
        f"2026-03-29T03:{minute}+02:00" for minute in ("00", "15", "30", "45")
    ] + ["2026-03-30T02:00+02:00"]
    assert ticks("*/10 30 2 * * *", BERLIN, "2026-03-29T00:00", 2) == [
        "2026-03-29T03:00+02:00",
        "2026-03-30T02:30+02:00",
    ]


def test_a_time_that_autumn_has_twice_ticks_the_first_time() -> None:
    assert ticks("30 2 * * *", BERLIN, "2026-10-25T00:00", 2) == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert ticks("30 1 * * *", NEW_YORK, "2026-11-01T00:00", 2) == ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"]
    assert ticks("45 1 * * *", LORD_HOWE, "2026-04-05T00:00", 2) == ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]


def test_the_second_pass_of_a_repeated_hour_does_not_give_the_first_one_again() -> None:
    cron = Cron("30 2 * * *", BERLIN)
    second_pass = datetime(2026, 10, 25, 1, 15, tzinfo=UTC)
    assert cron.shown(ms_of(second_pass)).isoformat() == "2026-10-25T02:15:00+01:00"
    assert cron.after(ms_of(second_pass)) == ms_of(datetime(2026, 10, 26, 1, 30, tzinfo=UTC))


def test_a_clock_that_is_put_back_over_midnight_ticks_on_the_day_before_again() -> None:
    cron = Cron("*/15 * * * *", "America/St_Johns")
    after_midnight = datetime(2010, 11, 7, 2, 30, 30, tzinfo=UTC)
    assert cron.shown(ms_of(after_midnight)).isoformat() == "2010-11-07T00:00:30-02:30"
    following = cron.after(ms_of(after_midnight))
    assert following is not None
    assert cron.shown(following).isoformat() == "2010-11-06T23:15:00-03:30"


def test_zones_that_are_half_an_hour_off() -> None:
    assert ticks("0 9 * * *", KOLKATA, "2026-10-03T23:30", 1) == ["2026-10-04T09:00+05:30"]
    assert Cron("0 9 * * *", KOLKATA).after(0) == 3.5 * 3_600_000


CHANGES = [
    (BERLIN, "2026-03-28T20:00"),
    (BERLIN, "2026-10-24T20:00"),
    (NEW_YORK, "2026-03-07T20:00"),
    (NEW_YORK, "2026-10-31T20:00"),
    (LORD_HOWE, "2026-10-03T10:00"),
    (LORD_HOWE, "2026-04-04T10:00"),
    ("Antarctica/Troll", "2026-03-28T20:00"),  # by two hours
    ("Antarctica/Troll", "2026-10-24T20:00"),
    ("America/Havana", "2026-10-31T22:00"),  # put back at 1:00 to 0:00
    ("America/St_Johns", "2010-11-06T20:00"),  # put back at 0:01 to 23:01 of the day before
]
STARRED: dict[str, Callable[[datetime], bool]] = {
    "*/15 * * * *": lambda at: at.minute % 15 == 0,
    "20 * * * *": lambda at: at.minute == 20,
    "45 * * * *": lambda at: at.minute == 45,
    "* 2 * * *": lambda at: at.hour == 2,
    "*/20 1-3 * * *": lambda at: at.minute % 20 == 0 and 1 <= at.hour <= 3,
    "0 */2 * * *": lambda at: at.minute == 0 and at.hour % 2 == 0,
}


@pytest.mark.parametrize(("zone", "start"), CHANGES)
@pytest.mark.parametrize("expression", STARRED)
def test_what_begins_with_a_star_ticks_in_real_time_through_every_change(
    expression: str, zone: str, start: str
) -> None:
    """SC-6: Compared with a look at every minute; and the tick after any instant is the one in the sequence."""
    began = datetime.fromisoformat(start).replace(tzinfo=UTC)
    minutes = [began + timedelta(minutes=n) for n in range(1, 16 * 60)]
    wanted = [ms_of(at) for at in minutes if STARRED[expression](at.astimezone(ZoneInfo(zone)))]
    cron = Cron(expression, zone)
    assert list(islice(cron.ticks(ms_of(began)), len(wanted))) == wanted
    for at in minutes[::7]:
        after = [tick for tick in wanted if tick > ms_of(at)]
        assert not after or cron.after(ms_of(at)) == after[0]


def test_seconds_days_of_the_week_and_shortcuts() -> None:
    assert ticks("30 0 8 * * *", "UTC", "2026-12-01T08:00", 1) == ["2026-12-01T08:00+00:00"]
    assert Cron("*/10 * * * * *").after(25_000) == 30_000
    assert ticks("0 8 * * MON-FRI", "UTC", "2026-12-04T09:00", 1) == ["2026-12-07T08:00+00:00"]
    assert ticks("0 0 L * *", "UTC", "2028-02-01T00:00", 1) == ["2028-02-29T00:00+00:00"]
    for shortcut, expression in SHORTCUTS.items():
        assert ticks(shortcut.upper(), BERLIN, "2026-12-01T08:00") == ticks(expression, BERLIN, "2026-12-01T08:00")


def test_leap_days_come_and_what_never_comes_ends() -> None:
    assert ticks("0 0 29 2 *", "UTC", "2026-12-01T08:00", 2) == ["2028-02-29T00:00+00:00", "2032-02-29T00:00+00:00"]
    assert Cron("0 0 29 2 MON#1").after(0) is not None, "day of month or day of week"
    never = Cron("0 0 * 2 MON#5")  # a fifth Monday in February: 2044, and then 2072
    assert ticks("0 0 * 2 MON#5", "UTC", "2026-12-01T08:00", 1) == ["2044-02-29T00:00+00:00"]
    assert never.after(ms_of(datetime(2072, 3, 1, tzinfo=UTC))) == ms_of(datetime(2112, 2, 29, tzinfo=UTC))
    assert Cron("0 0 */29 2 SUN#5").after(0) is None


def test_the_newest_of_many_are_found_without_counting_all() -> None:
    until = ms_of(datetime(2026, 12, 1, 8, 0, 30, tzinfo=UTC))
    cron = Cron("* * * * *", BERLIN)
    found = cron.newest(0, until, 1000)
    assert len(found) == 1000
    assert found[-1] == until - 30_000
    assert found == sorted(found)
    assert cron.newest(until - 90_000, until, 1000) == [until - 30_000]
    assert cron.newest(until - 90_001, until, 1000) == [until - 90_000, until - 30_000]
    assert cron.newest(until - 90_001, until, 1) == [until - 30_000]
    # Ticks that are dense long ago only.
    december = Cron("* * * 12 *")
    assert len(december.newest(0, ms_of(datetime(2026, 11, 30, tzinfo=UTC)), 1000)) == 1000
    assert Cron("0 0 1 1 *").newest(0, until, 1000)[0] == ms_of(datetime(1971, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    "expression",
    ["", "x", "61 * * * *", "* * * *", "* * * * * * *", "@reboot", "0 0 30 2 *", "*/0 * * * *", "1-0 * * * *", None, 5],
)
def test_an_expression_that_there_is_not_is_refused(expression: str) -> None:
    with pytest.raises(InvalidCall, match=r"cron="):
        Cron(expression)


@pytest.mark.parametrize("zone", ["Nope/Nope", "", "Europe", "/etc/passwd", "../x", "utc", "Europe/Berlin\0", None, 5])
def test_a_zone_that_there_is_not_is_refused(zone: str) -> None:
    with pytest.raises(InvalidCall, match=r"zone=.*Europe/Berlin"):
        Cron("@daily", zone)


@pytest.fixture
def no_zone_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=())
    ZoneInfo.clear_cache()
    for name in {"tzdata", *(name for name in sys.modules if name.startswith("tzdata."))}:
        monkeypatch.setitem(sys.modules, name, None)
    yield
    zoneinfo.reset_tzpath(to=before)
    ZoneInfo.clear_cache()


@pytest.mark.usefixtures("no_zone_data")
def test_without_zone_data_utc_works_and_the_error_of_others_says_what_to_install() -> None:
    assert Cron("@daily", "UTC").after(0) == 86_400_000
    with pytest.raises(InvalidCall, match="pip install tzdata"):
        Cron("@daily", BERLIN)
