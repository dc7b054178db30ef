"""Executes the commands that people enter in chat services, and returns what they are answered."""

from __future__ import annotations

import msgspec

from antiphon.operations import chat_commands
from antiphon.operations.approvals import ApprovalOperations
from antiphon.operations.chat_commands import EnteredCommand
from antiphon.operations.conversations import ConversationOperations
from antiphon.operations.messages import CHAT_CALLER, MessageOperations
from antiphon.operations.runs import RunOperations
from antiphon.operations.sessions import SessionOperations
from antiphon.operations.types import IncomingMessage


class CommandSender(msgspec.Struct, frozen=True, kw_only=True):
    """Who entered a command, and where. A command with the same key has its effect once."""

    id: str
    channel: str
    is_owner: bool
    session: str
    idempotency_key: str


class ChatCommandRunner:
    def __init__(
        self,
        messages: MessageOperations,
        conversations: ConversationOperations,
        runs: RunOperations,
        sessions: SessionOperations,
        approvals: ApprovalOperations,
    ) -> None:
        self._messages = messages
        self._conversations = conversations
        self._runs = runs
        self._sessions = sessions
        self._approvals = approvals
        self._handlers = {
            "help": self._show_help,
            "whoami": self._show_sender,
            "status": self._show_session,
            "stop": self._stop,
            "new": self._renew,
            "reset": self._renew,
            "send": self._set_send_policy,
            "approve": self._approve,
        }

    async def run(self, entered: EnteredCommand, sender: CommandSender) -> str:
        """Execute a command and return the answer.

        Raises:
            AntiphonError: it failed; its text is for the person.
        """
        name = entered.command.name
        if entered.command.is_for_owner and not sender.is_owner:
            return f"Only the owner may use /{name}."
        return await self._handlers[name](entered, sender)

    async def _show_help(self, _: EnteredCommand, sender: CommandSender) -> str:
        return chat_commands.format_help(is_owner=sender.is_owner)

    async def _show_sender(self, _: EnteredCommand, sender: CommandSender) -> str:
        role = "the owner" if sender.is_owner else "allowed to write"
        return f"Your id on {sender.channel} is {sender.id}, and you are {role}.\nSession: {sender.session}"

    async def _show_session(self, _: EnteredCommand, sender: CommandSender) -> str:
        view = await self._sessions.describe(CHAT_CALLER, sender.session, with_file=False)
        return f"Session: {view.key}\nModel: {view.model or 'none'}\nState: {view.state}"

    async def _stop(self, _: EnteredCommand, sender: CommandSender) -> str:
        stopped = await self._runs.stop(CHAT_CALLER, sender.session, key=sender.idempotency_key)
        return "Stopped." if stopped.run_ids else "Nothing is running."

    async def _renew(self, entered: EnteredCommand, sender: CommandSender) -> str:
        reason = "new" if entered.command.name == "new" else "reset"
        await self._conversations.reset(CHAT_CALLER, sender.session, reason, key=sender.idempotency_key)
        return "A new conversation begins."

    async def _set_send_policy(self, entered: EnteredCommand, sender: CommandSender) -> str:
        message = IncomingMessage(
            session=sender.session,
            content=f"/send {entered.argument}",
            idempotency_key=sender.idempotency_key,
        )
        if not self._messages.is_send_command(message):
            return "Use /send on, /send off or /send inherit."
        receipt = await self._messages.submit(CHAT_CALLER, message)
        return (await self._runs.get(CHAT_CALLER, receipt.run_id)).reply or "Done."

    async def _approve(self, entered: EnteredCommand, sender: CommandSender) -> str:
        approval_id, _, decision = entered.argument.partition(" ")
        if not decision.strip():
            return "Use /approve ID allow-once, /approve ID allow-always or /approve ID deny."
        name = f"{sender.channel}:{sender.id}"
        view = await self._approvals.resolve(CHAT_CALLER, approval_id, decision.strip().lower(), name)
        return f"The call is {view.state}."
