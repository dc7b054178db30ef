"""The session tools of agents, as thin adapters over `operations`; one file per tool.

Validation and authorization happen in `operations`; this package decides how an answer is worded and how much of it
fits into a prompt.
"""

from __future__ import annotations

from antiphon.engine.toolbox import Tool
from antiphon.operations.operations import Operations
from antiphon.tools.agents_list import agents_list
from antiphon.tools.session_status import session_status
from antiphon.tools.sessions_history import sessions_history
from antiphon.tools.sessions_list import sessions_list
from antiphon.tools.sessions_search import sessions_search
from antiphon.tools.sessions_send import sessions_send
from antiphon.tools.sessions_spawn import sessions_spawn
from antiphon.tools.sessions_yield import sessions_yield
from antiphon.tools.subagents import subagents

__all__ = ["create_session_tools"]


def create_session_tools(operations: Operations) -> list[Tool]:
    return [
        sessions_list(operations),
        sessions_history(operations),
        sessions_search(operations),
        session_status(operations),
        agents_list(operations),
        sessions_send(operations),
        sessions_spawn(operations),
        sessions_yield(operations),
        subagents(operations),
    ]
