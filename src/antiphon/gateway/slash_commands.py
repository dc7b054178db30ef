"""Slash commands in message texts: `/new`, `/reset` and `/stop` instead of an ordinary message.

A command repeated with the same idempotency key has no further effect. It needs the scope of its own method: `/new`
from a caller who may not reset is rejected, not sent as text. `/send` is handled by `operations.submit`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from antiphon.access import Caller
from antiphon.errors import InvalidInput
from antiphon.operations import IncomingMessage, Operations
from antiphon.views import MessageReceipt

_RESET_PATTERN = re.compile(r"/(new|reset)", re.IGNORECASE)
STOP_COMMANDS = frozenset({"/stop", "/abort", "stop", "abort"})


CHANNELS_SHOWN_IN_SESSION = frozenset({"webchat", "last"})
"""Channels that show the session itself, so that answers need no separate delivery."""


def check_channel(field: str, channel: str | None) -> None:
    """Reject a channel that this gateway does not have.

    Raises:
        InvalidInput: naming the field.
    """
    if channel and channel.lower() not in CHANNELS_SHOWN_IN_SESSION:
        raise InvalidInput(
            f"{field!r} is {channel[:80]!r}, a channel that this gateway does not have.",
            "Leave it out, or pass 'webchat': the answer is shown in the session.",
            field=field,
        )


class SubmitOutcome(msgspec.Struct, frozen=True):
    """The result of a text: an accepted run, or a completed command."""

    session_key: str
    accepted: MessageReceipt | None = None
    done: Literal["reset", "stopped"] | None = None
    run_ids: list[str] = []


async def submit_or_run_command(
    operations: Operations, caller: Caller, message: IncomingMessage
) -> SubmitOutcome:
    # A text with a provenance, from another session or program, is never a command.
    commanding = isinstance(message.content, str) and message.provenance is None
    text = message.content.strip() if commanding and isinstance(message.content, str) else ""
    if text.lower() in STOP_COMMANDS:
        stopped = await operations.stop(caller, message.session, key=message.idempotency_key)
        return SubmitOutcome(message.session, done="stopped", run_ids=stopped.run_ids)
    if match := _RESET_PATTERN.fullmatch(text):
        reason = "new" if match[1].lower() == "new" else "reset"
        view = await operations.reset(caller, message.session, reason, key=message.idempotency_key)
        return SubmitOutcome(view.key, done="reset")
    accepted = await operations.submit(caller, message)
    return SubmitOutcome(accepted.session_key, accepted=accepted)
