"""Checks that a session named on the command line exists, or creates it if it is an agent's main session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import keys
from antiphon.errors import NotFound

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend


async def ensure_session_exists(desk: Backend, reference: str) -> None:
    """Create a main session if it does not exist. Any other missing session counts as mistyped, as it does for agents.

    Raises:
        NotFound: no such session exists.
    """
    try:
        await desk.describe(reference)
    except NotFound:
        # The agent matters only to short names, and `main` is the main session of any agent.
        meant = keys.canonicalise(reference, agent_id="main")
        if not isinstance(meant, keys.SessionKey) or meant.kind != "main":
            raise
        await desk.open(reference)
