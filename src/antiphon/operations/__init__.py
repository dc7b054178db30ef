"""Typed operations that every transport calls; independent of any protocol.

The CLI, WebSocket, HTTP and the agent tools pass a `Caller` and get data, or an error from `errors`. Each operation
validates its input, opens the session through `SessionResolver` inside one transaction, commits, and publishes events.
Nothing here knows a wire format or keeps state.
"""

from __future__ import annotations

from antiphon.engine.validation import THINKING_LEVELS
from antiphon.filters import (
    DEFAULT_HISTORY_ENTRIES,
    DEFAULT_LIST_ROWS,
    MAX_HISTORY_ENTRIES,
    MAX_LIST_ROWS,
    HistoryFilter,
    ListFilter,
)
from antiphon.operations.agents import AgentOperations
from antiphon.operations.deliveries import DeliveryOperations
from antiphon.operations.exchange_log import ExchangeLogOperations
from antiphon.operations.exchanges import SendRequest
from antiphon.operations.impersonation import ActingSession, ImpersonationOperations
from antiphon.operations.message_search import SearchOperations
from antiphon.operations.messages import IncomingMessage, MessageOperations
from antiphon.operations.replicas import ReplicaOperations
from antiphon.operations.request_origin import RequestOrigin
from antiphon.operations.runs import RUN_WAIT_POLL_SECONDS, StopView
from antiphon.operations.session_lifecycle import SessionLifecycleOperations
from antiphon.operations.session_status import SessionStatusOperations
from antiphon.operations.sessions import SessionPatch
from antiphon.operations.spawn_rules import SpawnRequest
from antiphon.operations.subagents import SubagentOperations
from antiphon.operations.system_status import SystemStatusOperations

__all__ = [
    "DEFAULT_HISTORY_ENTRIES",
    "DEFAULT_LIST_ROWS",
    "MAX_HISTORY_ENTRIES",
    "MAX_LIST_ROWS",
    "RUN_WAIT_POLL_SECONDS",
    "THINKING_LEVELS",
    "ActingSession",
    "HistoryFilter",
    "IncomingMessage",
    "ListFilter",
    "Operations",
    "RequestOrigin",
    "SendRequest",
    "SessionPatch",
    "SpawnRequest",
    "StopView",
]


class Operations(
    SubagentOperations,
    SessionLifecycleOperations,
    ExchangeLogOperations,
    MessageOperations,
    DeliveryOperations,
    SessionStatusOperations,
    SearchOperations,
    AgentOperations,
    ImpersonationOperations,
    SystemStatusOperations,
    ReplicaOperations,
):
    """All operations, composed from one class per subject."""
