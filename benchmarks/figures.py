"""What every benchmark prints: figures with their targets, and the machine's load around them."""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from antiphon import event_loop


class Figure(NamedTuple):
    what: str
    value: float
    unit: str
    target: str
    good: bool


Part = Callable[[dict[str, int]], Coroutine[Any, Any, list[Figure]]]


def at_most(what: str, value: float, unit: str, most: float) -> Figure:
    return Figure(what, value, unit, f"< {most:g}", value < most)


def at_least(what: str, value: float, unit: str, least: float) -> Figure:
    return Figure(what, value, unit, f"≥ {least:g}", value >= least)


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


async def timed(once: Callable[[], Awaitable[object]], calls: int) -> list[float]:
    """Milliseconds of each of so many calls."""
    times: list[float] = []
    for _ in range(calls):
        began = perf_counter()
        await once()
        times.append((perf_counter() - began) * 1000)
    return times


async def typical_p95(once: Callable[[], Awaitable[object]], repeats: int = 7, calls: int = 40) -> float:
    """The median over repeats of the 95th percentile of a series of calls, in milliseconds."""
    return statistics.median([p95(await timed(once, calls)) for _ in range(repeats)])


def load() -> str:
    return f"load {' '.join(f'{value:.2f}' for value in os.getloadavg())} on {os.cpu_count()} cores"


def main(about: str | None, parts: Mapping[str, Part], counts: dict[str, int], quick: dict[str, int]) -> None:
    """The whole program: chosen parts, printed as they are done; it fails when a target is missed."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "parts", nargs="*", metavar="part", help=f"of {', '.join(parts)}; all if none is given"
    )
    options.add_argument("--quick", action="store_true", help="small sizes")
    given = options.parse_args()
    if unknown := set(given.parts) - set(parts):
        options.error(f"there is no part {sorted(unknown)[0]!r}; the parts are {', '.join(parts)}")
    print(f"{load()}; Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}")
    missed = 0
    for part in given.parts or parts:
        for figure in event_loop.run(parts[part](quick if given.quick else counts)):
            missed += not figure.good
            mark = "ok  " if figure.good else "MISS"
            print(
                f"{mark} {figure.what:52} {figure.value:12,.2f} {figure.unit:3} (target {figure.target})",
                flush=True,
            )
    print(load())
    sys.exit(1 if missed else 0)
