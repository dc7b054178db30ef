"""The protocol-blind middle: what a caller can ask of Antiphon, typed in and out.

Every door (the CLI now, WebSocket, HTTP and agent tools on top of the same calls) says who is asking and gets
data or an error from `errors`. Each operation is one straight line: check the input, open the session through
`Door` inside one transaction, commit, tell. No wire format is known here, and nothing here keeps state.
"""

from __future__ import annotations

from antiphon.engine.words import THINKING
from antiphon.filters import HISTORY_LIMIT, HISTORY_MOST, LIST_LIMIT, LIST_MOST, HistoryFilter, ListFilter
from antiphon.operations.acting import Acting, Actings
from antiphon.operations.agents import Agents
from antiphon.operations.conversations import Conversations
from antiphon.operations.correspondence import Correspondence
from antiphon.operations.deliveries import Deliveries
from antiphon.operations.exchanges import Send
from antiphon.operations.links import Origin
from antiphon.operations.replicas import Replicas
from antiphon.operations.runs import LOOK_AGAIN, StopView
from antiphon.operations.searches import Searches
from antiphon.operations.sessions import Patch
from antiphon.operations.spawns import Spawn
from antiphon.operations.standings import Standings
from antiphon.operations.statuses import Statuses
from antiphon.operations.submissions import Message, Submissions
from antiphon.operations.tasks import Tasks

__all__ = [
    "HISTORY_LIMIT",
    "HISTORY_MOST",
    "LIST_LIMIT",
    "LIST_MOST",
    "LOOK_AGAIN",
    "THINKING",
    "Acting",
    "HistoryFilter",
    "ListFilter",
    "Message",
    "Operations",
    "Origin",
    "Patch",
    "Send",
    "Spawn",
    "StopView",
]


class Operations(
    Tasks,
    Conversations,
    Correspondence,
    Submissions,
    Deliveries,
    Statuses,
    Searches,
    Agents,
    Actings,
    Standings,
    Replicas,
):
    """Everything that can be asked, from the parts that each know one thing."""
