"""The sessions that take part in what goes on between sessions: they are there, or they are an agent's main one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import keys
from antiphon.errors import NotFound

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend


async def ensure_session_exists(desk: Backend, reference: str) -> None:
    """As for an agent: only a main session is founded by being named. Any other that is missing is mistyped.

    Raises:
        NotFound: there is no such session.
    """
    try:
        await desk.describe(reference)
    except NotFound:
        # The agent matters only to short names, and `main` is a main session whoever's it is.
        meant = keys.canonicalise(reference, agent_id="main")
        if not isinstance(meant, keys.SessionKey) or meant.kind != "main":
            raise
        await desk.open(reference)
