"""Parameter types for numbers and times on the command line."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import click

MILLISECONDS_PER_UNIT = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class FiniteNumberParam(click.FloatRange):
    """A finite number. Python's float also accepts `inf` and `nan`, which make no sense as a time."""

    def __init__(self, unit: str, least: float, most: float, *, min_open: bool = False) -> None:
        super().__init__(least, most, min_open=min_open)
        self.name = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number of {self.name}; use for example 90.", param, ctx)
        return super().convert(number, param, ctx)


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
