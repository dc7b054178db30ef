"""Every method there is. A module registers its methods when it is imported here."""

from antiphon.gateway.methods import (
    agent,
    changes,
    chat,
    cron,
    deliveries,
    exchanges,
    sends,
    sessions,
    subagents,
    system,
    tools,
)
from antiphon.gateway.methods.registry import METHODS, Call, Method

__all__ = [
    "METHODS",
    "Call",
    "Method",
    "agent",
    "changes",
    "chat",
    "cron",
    "deliveries",
    "exchanges",
    "sends",
    "sessions",
    "subagents",
    "system",
    "tools",
]
