"""Every method there is. A module registers its methods when it is imported here."""

from antiphon.gateway.methods import agent, chat, cron, deliveries, sessions, subagents, system, tools
from antiphon.gateway.methods.registry import METHODS, Call, Method

__all__ = [
    "METHODS",
    "Call",
    "Method",
    "agent",
    "chat",
    "cron",
    "deliveries",
    "sessions",
    "subagents",
    "system",
    "tools",
]
