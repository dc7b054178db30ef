"""Schedules of jobs, and the times (slots) at which they are due.

The slots of a schedule are a fixed set, independent of when they are computed. Nothing here waits (see `scheduler`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from datetime import datetime
from typing import Annotated, TypeAlias
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from msgspec import Meta, Struct

from antiphon.errors import InvalidInput

ONE_TIME_JOB_GRACE_MS = 60_000  # a one-time job may be this late when it is added; it then fires at once
MAX_TIMESTAMP_MS = 253_402_300_799_000  # the end of the year 9999

TimestampMs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TIMESTAMP_MS)]


class StrictStruct(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """A part of what people write about a job: a field that is not known is refused."""


class AtSchedule(StrictStruct, frozen=True, tag_field="kind", tag="at"):
    """Once. Exactly one of the two is given; a time without an offset is the machine's."""

    at: str | None = None
    at_ms: TimestampMs | None = None


class EverySchedule(StrictStruct, frozen=True, tag_field="kind", tag="every"):
    """At the anchor and every so often after it."""

    every_ms: Annotated[int, Meta(ge=1000, le=MAX_TIMESTAMP_MS)]
    anchor_ms: TimestampMs | None = None


class CronSchedule(StrictStruct, frozen=True, tag_field="kind", tag="cron"):
    """By a cron expression of five fields, or six with seconds, in a time zone."""

    expr: Annotated[str, Meta(max_length=200)]
    tz: Annotated[str, Meta(max_length=100)] | None = None


Schedule: TypeAlias = AtSchedule | EverySchedule | CronSchedule


def find_next_slot(schedule: Schedule, after_ms: int) -> int | None:
    """Return the first slot after that time, or None if no slot is left.

    Raises:
        InvalidInput: the schedule is invalid; `field` names the part.
    """
    match schedule:
        case AtSchedule():
            slot = _parse_at_time(schedule)
            return slot if slot > after_ms else None
        case EverySchedule(every_ms=every, anchor_ms=anchor):
            start = anchor or 0
            return start + max(0, (after_ms - start) // every + 1) * every
        case CronSchedule():
            return _find_next_match(schedule, after_ms)


def find_latest_slot(schedule: Schedule, first: int, now: int) -> int:
    """Return the last slot that is not after `now`; `first` is such a slot.

    Uses bisection, so years of missed slots cost no more than an hour of them.
    """
    due = bisect_right(range(first, now), now, key=lambda after: find_next_slot(schedule, after) or now + 1)
    return (find_next_slot(schedule, first + due - 1) if due else None) or first


def find_first_slot(schedule: Schedule, now: int) -> int:
    """Return the first slot of a job that is added or enabled now.

    Raises:
        InvalidInput: the schedule has no future slot or is invalid.
    """
    slot = find_next_slot(schedule, now - ONE_TIME_JOB_GRACE_MS if isinstance(schedule, AtSchedule) else now)
    if slot is None:
        raise InvalidInput(
            "The schedule has no time that is still to come.", "Give it a later one.", field="schedule"
        )
    return slot


def pin_schedule(schedule: Schedule, now: int) -> Schedule:
    """Return the schedule with anchor, time zone and offset set, so that it means the same later and elsewhere."""
    match schedule:
        case EverySchedule(anchor_ms=None):
            return EverySchedule(every_ms=schedule.every_ms, anchor_ms=now)
        case CronSchedule(tz=None):
            return CronSchedule(expr=schedule.expr, tz=get_local_zone_name())
        case AtSchedule(at=str(text), at_ms=None):
            return AtSchedule(at=_add_local_offset(text))
        case _:
            return schedule


def get_local_zone_name() -> str:
    """Return the name of the machine's time zone, or UTC if it is unknown."""
    linked = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    names = (os.environ.get("TZ", "").removeprefix(":"), linked)
    return next((name for name in names if name and _load_zone(name)), "UTC")


def _load_zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def _find_next_match(schedule: CronSchedule, after_ms: int) -> int | None:
    zone = _load_zone(schedule.tz or get_local_zone_name())
    if zone is None:
        raise InvalidInput(
            f"There is no time zone {schedule.tz!r}.", "Use a name like 'Europe/Berlin'.", field="schedule.tz"
        )
    try:
        matches = CronSim(schedule.expr, datetime.fromtimestamp(after_ms // 1000, zone))
    except CronSimError as error:
        raise InvalidInput(
            f"The cron expression {schedule.expr!r} is not valid: {str(error).lower()}.",
            "Write five fields such as '0 8 * * 1-5': minute, hour, day, month, weekday.",
            field="schedule.expr",
        ) from error
    # In the hour that clocks repeat, a match by local time may lie before `after_ms`.
    slots = (round(match.timestamp() * 1000) for match in matches)
    try:
        return next((slot for slot in slots if slot > after_ms), None)
    except OverflowError:  # the calendar ends before the next match
        return None


def _parse_at_time(schedule: AtSchedule) -> int:
    if (schedule.at is None) == (schedule.at_ms is None):
        raise InvalidInput(
            "A schedule of kind 'at' needs one time.", "Give either 'at' or 'atMs'.", field="schedule.at"
        )
    if schedule.at_ms is not None:
        return schedule.at_ms
    return round(datetime.fromisoformat(_add_local_offset(schedule.at or "")).timestamp() * 1000)


def _add_local_offset(text: str) -> str:
    """Return the time as written, or with the machine's offset if it has none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text[:80]!r} is not a time.",
            "Write it in ISO 8601, such as '2030-01-31T08:00:00+01:00'.",
            field="schedule.at",
        ) from error
    return text if time.tzinfo else time.replace(tzinfo=ZoneInfo(get_local_zone_name())).isoformat()
