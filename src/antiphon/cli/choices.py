"""Choosing one of several things by what a person calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from antiphon.errors import Ambiguous, NotFound

T = TypeVar("T")
MAX_CANDIDATES = 10


def choose(target: str, found: Sequence[T], names: Callable[[T], Sequence[str]], what: str, hint: str) -> T:
    """The one that is called exactly this, or else the only one with a name that begins with it.

    The first of its names tells two of them apart, and is what an ambiguous one is answered with.

    Raises:
        NotFound: nothing is called this; the nearest name is suggested.
        Ambiguous: several are.
    """
    fitting = [it for it in found if target in names(it)]
    if not fitting and target:
        fitting = [it for it in found if any(name.startswith(target) for name in names(it))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        candidates = [names(it)[0] for it in fitting]
        raise Ambiguous(
            f"{len(fitting)} {what}s fit {target[:80]!r}: {', '.join(candidates[:MAX_CANDIDATES])}.",
            "Name one of them by its id.",
            candidates=candidates[:MAX_CANDIDATES],
        )
    from difflib import get_close_matches

    close = get_close_matches(target, [name for it in found for name in names(it)], n=1)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    raise NotFound(f"No {what} is called {target[:80]!r}.", f"{meant}{hint}")
