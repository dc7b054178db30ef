"""Parameter types for numbers and times on the command line."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import click

MILLISECONDS_PER_UNIT = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class IntegerParam(click.IntRange):
    """A whole number between two limits. An error names both."""

    name = "integer"

    def __init__(self, minimum: int, maximum: int) -> None:
        super().__init__(minimum, maximum)
        self._allowed = f"a whole number from {minimum} to {maximum}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{str(value)[:80]!r} is not {self._allowed}.", param, ctx)


class FiniteNumberParam(click.FloatRange):
    """A finite number. Python's float also accepts `inf` and `nan`, which make no sense as a time."""

    def __init__(self, unit: str, minimum: float, maximum: float, *, min_open: bool = False) -> None:
        super().__init__(minimum, maximum, min_open=min_open)
        self.name = unit
        self._allowed = (
            f"a number of {unit} {f'above {minimum:g}' if min_open else f'from {minimum:g}'} to {maximum:.0f}"
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{str(value)[:80]!r} is not {self._allowed}; use for example 90.", param, ctx)
        return number


class IntervalParam(click.ParamType[int]):
    """A positive number with a unit, such as 90s, 10m, 6h or 1d; returned in milliseconds."""

    name = "interval"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        length = _parse_milliseconds(value)
        if length is None:
            self.fail(f"{value!r} is not an interval; use for example 90s, 10m, 6h or 1d.", param, ctx)
        if length == 0:
            self.fail(f"{value!r} is too short; the minimum is 1s.", param, ctx)
        return length


class TimeParam(click.ParamType[int]):
    """A time as an age (10m) or in ISO 8601, local if it has no offset; returned in milliseconds."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from datetime import datetime

        length = _parse_milliseconds(value)
        if length is not None:
            return max(0, int(time.time() * 1000) - length)
        try:
            return max(0, int(datetime.fromisoformat(str(value).strip()).timestamp() * 1000))
        except (ValueError, OverflowError, OSError):
            self.fail(
                f"{value!r} is not a time; use for example 2h, 2026-08-01 or 2026-08-01T09:00.", param, ctx
            )


def _parse_milliseconds(value: Any) -> int | None:
    found = re.fullmatch(r"(\d{1,9})([smhd])", str(value).strip())
    return int(found[1]) * MILLISECONDS_PER_UNIT[found[2]] if found else None
