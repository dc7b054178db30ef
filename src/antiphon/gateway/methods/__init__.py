"""All methods of the protocol. A module registers its methods when it is imported here."""

from antiphon.gateway.methods import (
    agent,
    chat,
    cron,
    deliveries,
    exchanges,
    session_changes,
    session_messages,
    sessions,
    subagents,
    system,
    tools,
)
from antiphon.gateway.methods.registry import METHODS_BY_NAME, Method, MethodCall

__all__ = [
    "METHODS_BY_NAME",
    "Method",
    "MethodCall",
    "agent",
    "chat",
    "cron",
    "deliveries",
    "exchanges",
    "session_changes",
    "session_messages",
    "sessions",
    "subagents",
    "system",
    "tools",
]
