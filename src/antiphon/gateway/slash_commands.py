"""Slash commands in messages of the methods `chat.send`, `sessions.send` and `agent`.

`/new`, `/reset`, `/stop` and `/approve` are executed here instead of a message, also `/abort` and the bare words `stop`
and `abort`. `/send` is handled by `operations`; the terminal chat has commands of its own (`cli/chat/controller.py`).

A command repeated with the same idempotency key has no further effect. It needs the scope of its own method: `/new`
from a caller who may not reset is rejected, not sent as text.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from antiphon.access import Caller
from antiphon.errors import InvalidInput
from antiphon.operations.chat_commands import CHAT_COMMANDS
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, MessageReceipt

STOP_COMMANDS = frozenset({"/stop", "/abort", "stop", "abort"})
_APPROVE_PATTERN = re.compile(r"/approve(?:\s+(\S+)\s+(\S+)|\s+\S+)?", re.IGNORECASE)
_RESET_PATTERN = re.compile(r"/(new|reset)", re.IGNORECASE)


SLASH_COMMANDS = tuple(command for command in CHAT_COMMANDS if not command.is_for_services)


class SubmitOutcome(msgspec.Struct, frozen=True):
    """The result of a message: an accepted run, or a completed command."""

    session_key: str
    accepted: MessageReceipt | None = None
    done: Literal["reset", "stopped", "approval"] | None = None
    run_ids: list[str] = []


async def submit_or_run_command(
    operations: Operations, caller: Caller, message: IncomingMessage, caller_name: str
) -> SubmitOutcome:
    """Submit a message, or run the slash command that it is. `caller_name` is recorded with a decision."""
    # A text with a provenance, from another session or program, is never a command.
    can_be_command = isinstance(message.content, str) and message.provenance is None and not message.literal
    text = message.content.strip() if can_be_command and isinstance(message.content, str) else ""
    if text.lower() in STOP_COMMANDS:
        stopped = await operations.runs.stop(caller, message.session, key=message.idempotency_key)
        return SubmitOutcome(message.session, done="stopped", run_ids=stopped.run_ids)
    if match := _RESET_PATTERN.fullmatch(text):
        reason = "new" if match[1].lower() == "new" else "reset"
        view = await operations.conversations.reset(
            caller, message.session, reason, key=message.idempotency_key
        )
        return SubmitOutcome(view.key, done="reset")
    if match := _APPROVE_PATTERN.fullmatch(text):
        approval_id, decision = match[1], match[2]
        if approval_id is None:
            raise InvalidInput(
                "/approve needs a call and a decision.",
                "Use: /approve ID allow-once, /approve ID allow-always or /approve ID deny.",
            )
        await operations.approvals.resolve(caller, approval_id, decision.lower(), caller_name)
        return SubmitOutcome(message.session, done="approval")
    accepted = await operations.messages.submit(caller, message)
    return SubmitOutcome(accepted.session_key, accepted=accepted)
