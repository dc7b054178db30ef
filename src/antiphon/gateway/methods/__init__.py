"""All methods of the protocol. A module registers its methods when it is imported here."""

from antiphon.gateway.methods import (
    agent,
    approvals,
    channels,
    chat,
    collaboration,
    cron,
    mcp,
    session_lifecycle,
    session_messages,
    sessions,
    system,
    tools,
)
from antiphon.gateway.methods.registry import METHODS_BY_NAME, Method, MethodCall

__all__ = [
    "METHODS_BY_NAME",
    "Method",
    "MethodCall",
    "agent",
    "approvals",
    "channels",
    "chat",
    "collaboration",
    "cron",
    "mcp",
    "session_lifecycle",
    "session_messages",
    "sessions",
    "system",
    "tools",
]
