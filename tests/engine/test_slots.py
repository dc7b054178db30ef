"""When jobs are due: slots are a fixed set of moments, which no request for the next one changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.jobs import schedule as slots
from antiphon.engine.jobs.schedule import (
    AtSchedule,
    CronSchedule,
    EverySchedule,
    Schedule,
    find_latest_slot,
    find_next_slot,
)
from antiphon.errors import InvalidInput

pytestmark = pytest.mark.requirement("W5")

DAY = 86_400_000
BERLIN = ZoneInfo("Europe/Berlin")
EXPRESSIONS = [
    "* * * * *", "*/7 * * * *", "30 2 * * *", "0,30 2 * * *", "0 2,3 * * *", "*/5 2 * * *", "0 0 * * *",
    "15 1-3 * * 0", "0 8 * * 1-5", "0 12 L * *", "0 0 29 2 *", "0 4 1 */3 *", "*/20 30 2 * * *", "10 0 9 * * FRI#2",
]  # fmt: skip
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "America/Havana", "Asia/Kathmandu", "Pacific/Auckland"]

moments = st.integers(1_500_000_000_000, 2_000_000_000_000)
# Half of the moments are near a change of the clocks, where everything that can go wrong does.
CHANGES = [
    datetime(2026, 3, 29, 1, tzinfo=UTC),
    datetime(2026, 10, 25, 1, tzinfo=UTC),
    datetime(2027, 3, 14, 5, tzinfo=UTC),
]


def _at(moment: int) -> Schedule:
    return AtSchedule(at_ms=moment)


def _every(every: int, anchor: int) -> Schedule:
    return EverySchedule(every_ms=every, anchor_ms=anchor)


def _cron(expr: str, tz: str) -> Schedule:
    return CronSchedule(expr=expr, tz=tz)


def _near(change: datetime, offset: int) -> int:
    return int(change.timestamp() * 1000) + offset


times = moments | st.builds(_near, st.sampled_from(CHANGES), st.integers(-2 * DAY, 2 * DAY))
schedules = st.one_of(
    st.builds(_at, times),
    st.builds(_every, st.integers(1000, 40 * DAY), times),
    st.builds(_cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES)),
)


def ms(*when: int, tz: ZoneInfo = BERLIN) -> int:
    year, month, day, *clock = when
    return int(datetime(year, month, day, *clock, tzinfo=tz).timestamp() * 1000)


@settings(max_examples=300, deadline=None)
@given(schedule=schedules, after=times, later=st.floats(0, 1, exclude_max=True))
def test_the_next_slot_is_later_and_the_same_for_all_who_ask_before_it(
    schedule: Schedule, after: int, later: float
) -> None:
    slot = find_next_slot(schedule, after)
    if slot is None:
        assert isinstance(schedule, AtSchedule)
        return
    assert slot > after
    between = after + int((slot - after) * later)
    assert find_next_slot(schedule, between) == slot
    assert find_next_slot(schedule, slot - 1) == slot


@settings(max_examples=300, deadline=None)
@given(schedule=schedules, one=times, other=times)
def test_who_asks_later_gets_no_earlier_slot(schedule: Schedule, one: int, other: int) -> None:
    first, second = (find_next_slot(schedule, at) for at in sorted((one, other)))
    assert second is None or (first is not None and first <= second)


@settings(max_examples=100, deadline=None)
@given(schedule=schedules, start=times, count=st.integers(0, 12), rest=st.floats(0, 1, exclude_max=True))
def test_of_the_missed_slots_the_latest_is_found(
    schedule: Schedule, start: int, count: int, rest: float
) -> None:
    slots = [slot] if (slot := find_next_slot(schedule, start)) else []
    while slots and len(slots) < count + 2 and (slot := find_next_slot(schedule, slots[-1])):
        slots.append(slot)
    for seen, following in pairwise(slots):
        now = seen + int((following - seen) * rest)
        assert find_latest_slot(schedule, slots[0], now) == seen
    if slots:
        assert find_latest_slot(schedule, slots[-1], slots[-1]) == slots[-1]


def test_a_year_of_missed_minutes_is_looked_through_in_no_time() -> None:
    schedule = CronSchedule(expr="* * * * *", tz="Europe/Berlin")
    first = ms(2026, 1, 1)
    assert find_latest_slot(schedule, first, first + 366 * DAY + 59_000) == first + 366 * DAY


@pytest.mark.parametrize("zone", ZONES)
def test_a_daily_job_fires_once_on_every_day_also_when_the_clocks_change(zone: str) -> None:
    schedule = CronSchedule(expr="30 2 * * *", tz=zone)
    tz = ZoneInfo(zone)
    at = ms(2026, 1, 1, tz=tz)
    days: list[datetime] = []
    while (at := find_next_slot(schedule, at) or 0) < ms(2028, 1, 1, tz=tz):
        days.append(datetime.fromtimestamp(at / 1000, tz))
    assert [day.date() for day in days] == [
        (datetime(2026, 1, 1) + timedelta(days=n)).date() for n in range(730)
    ]
    assert all((day.hour, day.minute) in {(2, 30), (3, 0)} for day in days)


def test_the_hour_that_does_not_exist_and_the_hour_that_comes_twice() -> None:
    schedule = CronSchedule(expr="30 2 * * *", tz="Europe/Berlin")
    assert find_next_slot(schedule, ms(2026, 3, 28, 12)) == ms(2026, 3, 29, 3)
    assert find_next_slot(schedule, ms(2026, 3, 29, 3)) == ms(2026, 3, 30, 2, 30)
    once = ms(2026, 10, 25, 2, 30)
    assert find_next_slot(schedule, ms(2026, 10, 24, 12)) == once
    for later in (once, once + 50 * 60_000, once + 70 * 60_000):  # the clock shows 02:20 again in between
        assert find_next_slot(schedule, later) == ms(2026, 10, 26, 2, 30)


def test_at_is_a_time_with_its_offset_or_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_next_slot(AtSchedule(at="2030-01-31T08:00:00+01:00"), 0) == ms(2030, 1, 31, 8)
    assert find_next_slot(AtSchedule(at="2030-01-31T07:00:00Z"), 0) == ms(2030, 1, 31, 8)
    monkeypatch.setenv("TZ", "America/New_York")
    assert find_next_slot(AtSchedule(at="2030-01-31T02:00"), 0) == ms(2030, 1, 31, 8)
    assert find_next_slot(AtSchedule(at_ms=5), 4) == 5
    assert find_next_slot(AtSchedule(at_ms=5), 5) is None


def test_every_is_counted_from_its_anchor() -> None:
    assert find_next_slot(EverySchedule(every_ms=1000, anchor_ms=10_500), 3) == 10_500
    assert find_next_slot(EverySchedule(every_ms=1000, anchor_ms=10_500), 10_500) == 11_500
    assert find_next_slot(EverySchedule(every_ms=1000, anchor_ms=10_500), 99_999) == 100_500


def test_the_machines_zone_is_told_or_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, told in [("Europe/Berlin", "Europe/Berlin"), (":Asia/Kathmandu", "Asia/Kathmandu")]:
        monkeypatch.setenv("TZ", name)
        assert slots.get_local_zone_name() == told
        assert find_next_slot(CronSchedule(expr="0 0 * * *"), ms(2026, 6, 1)) == find_next_slot(
            CronSchedule(expr="0 0 * * *", tz=told), ms(2026, 6, 1)
        )
    monkeypatch.setattr(slots.os.path, "realpath", str)
    for unclear in ("CET-1CEST,M3.5.0,M10.5.0/3", "/etc/passwd", "../../etc/passwd", "Europe", ""):
        monkeypatch.setenv("TZ", unclear)
        assert slots.get_local_zone_name() == "UTC"


@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        (AtSchedule(), "schedule.at"),
        (AtSchedule(at="2030-01-31", at_ms=1), "schedule.at"),
        (AtSchedule(at="tomorrow"), "schedule.at"),
        (AtSchedule(at=""), "schedule.at"),
        (CronSchedule(expr="0 8 * *"), "schedule.expr"),
        (CronSchedule(expr="61 8 * * *"), "schedule.expr"),
        (CronSchedule(expr="0 0 30 2 *"), "schedule.expr"),
        (CronSchedule(expr=""), "schedule.expr"),
        (CronSchedule(expr="0 8 * * *", tz="Europe/Bielefeld"), "schedule.tz"),
        (CronSchedule(expr="0 8 * * *", tz="../../etc/passwd"), "schedule.tz"),
        (CronSchedule(expr="0 8 * * *", tz="\ud800"), "schedule.tz"),
    ],
)
def test_what_is_no_time_is_named(schedule: Schedule, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        find_next_slot(schedule, 0)
    assert refused.value.data["field"] == field


@settings(max_examples=500, deadline=None)
@given(expr=st.text(max_size=30) | st.text("0123456789*/,-#LW ", max_size=30), zone=st.sampled_from(ZONES))
def test_any_text_is_an_expression_or_is_refused(expr: str, zone: str) -> None:
    try:
        slot = find_next_slot(CronSchedule(expr=expr, tz=zone), ms(2026, 1, 1))
    except InvalidInput as refused:
        assert refused.data["field"] == "schedule.expr"
    else:
        assert slot is None or slot > ms(2026, 1, 1)


def test_a_day_that_never_comes_has_no_slot() -> None:
    assert find_next_slot(CronSchedule(expr="0 0 29 2 *", tz="UTC"), ms(2026, 1, 1)) == ms(
        2028, 2, 29, tz=ZoneInfo("UTC")
    )
    assert (
        find_next_slot(CronSchedule(expr="0 0 1 2 *", tz="UTC"), slots.MAX_TIMESTAMP_MS) is None
    )  # the calendar is over
