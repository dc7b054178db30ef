"""`Operations`: everything a caller can ask for, by subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.operations.agents import AgentOperations
from antiphon.operations.approvals import ApprovalOperations
from antiphon.operations.context import OperationContext
from antiphon.operations.conversations import ConversationOperations
from antiphon.operations.deliveries import DeliveryOperations
from antiphon.operations.exchanges import ExchangeOperations
from antiphon.operations.jobs import JobOperations
from antiphon.operations.messages import MessageOperations
from antiphon.operations.pairings import PairingOperations
from antiphon.operations.posts import PostOperations
from antiphon.operations.runs import RunOperations
from antiphon.operations.search import SearchOperations
from antiphon.operations.sessions import SessionOperations
from antiphon.operations.spawn_rules import SpawnRules
from antiphon.operations.status import StatusOperations
from antiphon.operations.subagents import SubagentOperations
from antiphon.operations.transcripts import TranscriptOperations

if TYPE_CHECKING:
    from antiphon.engine.jobs.scheduler import Scheduler
    from antiphon.operations.inbound import InboundOperations


class Operations:
    def __init__(self, context: OperationContext, scheduler: Scheduler | None = None) -> None:
        self.context = context
        spawn_rules = SpawnRules(context)
        self.runs = RunOperations(context)
        self.transcripts = TranscriptOperations(context)
        self.conversations = ConversationOperations(context, self.runs)
        self.sessions = SessionOperations(context, self.runs, self.transcripts)
        self.messages = MessageOperations(context)
        self.exchanges = ExchangeOperations(context, self.runs)
        self.subagents = SubagentOperations(context, self.sessions, spawn_rules)
        self.agents = AgentOperations(context, spawn_rules)
        self.approvals = ApprovalOperations(context)
        self.pairings = PairingOperations(context)
        self.deliveries = DeliveryOperations(context)
        self.search = SearchOperations(context)
        self.jobs = JobOperations(context, scheduler)
        self.posts = PostOperations(context, scheduler.context.channels if scheduler else ())
        self.status = StatusOperations(context)

    def create_inbound(self) -> InboundOperations:
        """Return the operations on messages from chat services. A gateway without channels does not import them."""
        from antiphon.operations.command_runner import ChatCommandRunner  # noqa: PLC0415
        from antiphon.operations.inbound import InboundOperations  # noqa: PLC0415

        commands = ChatCommandRunner(
            self.messages, self.conversations, self.runs, self.sessions, self.approvals
        )
        return InboundOperations(self.context, self.messages, self.runs, commands)
