"""The protocol-blind middle: what a caller can ask of Antiphon, typed in and out.

Every door (the CLI now, WebSocket, HTTP and agent tools on top of the same calls) says who is asking and gets
data or an error from `errors`. Each operation is one straight line: check the input, open the session through
`Door` inside one transaction, commit, tell. No wire format is known here, and nothing here keeps state.
"""

from __future__ import annotations

from antiphon.operations.checks import THINKING
from antiphon.operations.conversations import Conversations
from antiphon.operations.histories import HISTORY_LIMIT, HISTORY_MOST, Histories, HistoryFilter
from antiphon.operations.lists import LIST_LIMIT, LIST_MOST, ListFilter, Lists
from antiphon.operations.runs import LOOK_AGAIN, StopView
from antiphon.operations.searches import Searches
from antiphon.operations.sessions import Patch, Sessions
from antiphon.operations.submissions import Message, Submissions

__all__ = [
    "HISTORY_LIMIT",
    "HISTORY_MOST",
    "LIST_LIMIT",
    "LIST_MOST",
    "LOOK_AGAIN",
    "THINKING",
    "HistoryFilter",
    "ListFilter",
    "Message",
    "Operations",
    "Patch",
    "StopView",
]


class Operations(Submissions, Lists, Histories, Searches, Sessions, Conversations):
    """Everything that can be asked, from the parts that each know one thing."""
