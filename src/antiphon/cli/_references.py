"""Resolves names given on the command line: sessions, jobs, sub-agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from antiphon import keys
from antiphon.errors import Ambiguous, NotFound

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend

T = TypeVar("T")
MAX_CANDIDATES = 10


def find_by_name(
    target: str, found: Sequence[T], names: Callable[[T], Sequence[str]], what: str, hint: str
) -> T:
    """Return the item with exactly this name, or else the only one with a name that begins with it.

    `names` gives the names of an item. The first one must be unique: the error for an ambiguous target lists it.

    Raises:
        NotFound: no item has this name; the most similar one is suggested.
        Ambiguous: several items match.
    """
    fitting = [it for it in found if target in names(it)]
    if not fitting and target:
        fitting = [it for it in found if any(name.startswith(target) for name in names(it))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        candidates = [names(it)[0] for it in fitting]
        raise Ambiguous(
            f"{len(fitting)} {what}s match {target[:80]!r}: {', '.join(candidates[:MAX_CANDIDATES])}.",
            "Use the id of one of them.",
            candidates=candidates[:MAX_CANDIDATES],
        )
    from difflib import get_close_matches

    close = get_close_matches(target, [name for it in found for name in names(it)], n=1)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    raise NotFound(f"No {what} is called {target[:80]!r}.", f"{meant}{hint}")


async def find_approval_id(backend: Backend, reference: str) -> str:
    """Return the id of the only waiting call whose id begins like this; else the reference, such as a decided one's id.

    Raises:
        Ambiguous: several waiting calls match.
    """
    waiting = await backend.list_approvals()
    if reference and any(approval.id.startswith(reference) for approval in waiting):
        return find_by_name(reference, waiting, lambda approval: (approval.id,), "approval", "").id
    return reference


async def ensure_session_exists(backend: Backend, reference: str) -> None:
    """Create a main session if it does not exist. Any other missing session counts as mistyped, as it does for agents.

    Raises:
        NotFound: no such session exists.
    """
    try:
        await backend.describe(reference)
    except NotFound:
        # The agent matters only to short names, and `main` is the main session of any agent.
        meant = keys.canonicalize(reference, agent_id="main")
        if not isinstance(meant, keys.SessionKey) or meant.kind != "main":
            raise
        await backend.open(reference)
