"""A text for a session, from any method: an ordinary message, or one of the few commands that a text can be.

A command that is said again with the same key is not done again. It needs exactly what its own method needs: `/new`
from somebody who may not reset is refused, not sent. `/send` is for `operations.submit`, which every door uses.
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
"""The channels that an answer is delivered to by being in its session."""


def check_channel(field: str, channel: str | None) -> None:
    """Refuse to deliver to a channel that this gateway does not have.

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
    """What became of a text: a run, or a command that is done."""

    session_key: str
    accepted: MessageReceipt | None = None
    done: Literal["reset", "stopped"] | None = None
    run_ids: list[str] = []


async def submit_or_run_command(
    operations: Operations, caller: Caller, message: IncomingMessage
) -> SubmitOutcome:
    # What another session or program says is never a command, whoever brings it.
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
