"""When a session begins anew by itself: which rule of the configuration holds for it, and whether it is due.

Nothing is due unless it is configured. Carried out by the first message after it, in that message's commit: see
`operations.submissions`.
"""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.keys import SessionKey

if TYPE_CHECKING:
    from antiphon.config.sections import Reset, Session

CHATS = frozenset({"main", "global", "direct", "group", "channel"})
"""Shapes of what people talk in. Every other session is somebody's work, and ends with it."""

MINUTE = 60_000

Reason = Literal["daily", "idle"]
ChatType = Literal["direct", "group", "thread"]


class Rule(msgspec.Struct, frozen=True):
    at_hour: int | None = None
    """Local hour of the daily reset; None: there is none."""
    idle_minutes: int | None = None

    def due(self, last_use: int, now: int, zone: tzinfo | None = None) -> Reason | None:
        if self.at_hour is not None and last_use < last_hour(self.at_hour, now, zone):
            return "daily"
        if self.idle_minutes is not None and now - last_use > self.idle_minutes * MINUTE:
            return "idle"
        return None


class Rules(msgspec.Struct, frozen=True):
    by_type: dict[ChatType, Rule]
    by_channel: dict[str, Rule]

    def rule(self, key: SessionKey, channel: str | None) -> Rule | None:
        """The one that holds for a session; None when it only begins anew by command."""
        if key.shape not in CHATS:
            return None
        return self.by_channel.get((channel or "").lower()) or self.by_type.get(_chat_type(key))


def rules(session: Session) -> Rules | None:
    """What the configuration says; None when that is nothing."""
    types = session.reset_by_type
    said: dict[ChatType, Reset | None] = {
        "direct": types.direct or types.dm,
        "group": types.group,
        "thread": types.thread,
    }
    by_type: dict[ChatType, Rule] = {
        kind: rule for kind, own in said.items() if (rule := _of_type(session, own))
    }
    by_channel = {name.lower(): _rule(own, None) for name, own in session.reset_by_channel.items()}
    return Rules(by_type, by_channel) if by_type or by_channel else None


def last_hour(hour: int, now: int, zone: tzinfo | None = None) -> int:
    """When the clocks last began this hour. `zone` is the machine's own unless it is given.

    On a day that leaves the hour out, it is where the hour would have been; on one that has it twice, the first.
    """
    today = datetime.fromtimestamp(now / 1000, zone).replace(
        hour=hour, minute=0, second=0, microsecond=0, fold=0
    )
    days = (today - timedelta(days=back) for back in range(3))  # a zone may have left out a whole day
    return next(at for day in days if (at := round(day.timestamp() * 1000)) <= now)


def _chat_type(key: SessionKey) -> ChatType:
    if key.thread:
        return "thread"
    return "group" if key.kind == "group" else "direct"


def _of_type(session: Session, own: Reset | None) -> Rule | None:
    """What a type's own entry leaves unsaid is as for every session."""
    reset = session.reset or own
    if reset is None:
        return Rule(idle_minutes=session.idle_minutes) if session.idle_minutes else None
    if own is not None:
        reset = reset.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})
    return _rule(reset, session.idle_minutes)


def _rule(reset: Reset, idle_minutes: int | None) -> Rule:
    return Rule(reset.at_hour if reset.mode == "daily" else None, reset.idle_minutes or idle_minutes)
