"""Automatic session resets: which configured rule applies to a session, and whether a reset is due.

Without configuration no reset is ever due. The first message after the due time performs it, in its own commit (see
`operations.messages`).
"""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.keys import SessionKey

if TYPE_CHECKING:
    from antiphon.config.sections import ResetConfig, SessionConfig

CHAT_SHAPES = frozenset({"main", "global", "direct", "group", "channel"})
"""Shapes of sessions in which people chat. All others exist for a piece of work and end with it."""

MILLISECONDS_PER_MINUTE = 60_000

ResetReason = Literal["daily", "idle"]
ChatType = Literal["direct", "group", "thread"]


class ResetRule(msgspec.Struct, frozen=True):
    at_hour: int | None = None
    """Local hour of the daily reset; None for no daily reset."""
    idle_minutes: int | None = None

    def find_due_reason(self, last_use: int, now: int, zone: tzinfo | None = None) -> ResetReason | None:
        if self.at_hour is not None and last_use < find_last_hour_start(self.at_hour, now, zone):
            return "daily"
        if self.idle_minutes is not None and now - last_use > self.idle_minutes * MILLISECONDS_PER_MINUTE:
            return "idle"
        return None


class ResetRules(msgspec.Struct, frozen=True):
    by_type: dict[ChatType, ResetRule]
    by_channel: dict[str, ResetRule]

    def find_rule(self, key: SessionKey, channel: str | None) -> ResetRule | None:
        """Return the rule for a session; None if it is only reset by command."""
        if key.shape not in CHAT_SHAPES:
            return None
        return self.by_channel.get((channel or "").lower()) or self.by_type.get(_get_chat_type(key))


def build_reset_rules(session: SessionConfig) -> ResetRules | None:
    """Build the configured rules; None if the configuration has none."""
    types = session.reset_by_type
    configured: dict[ChatType, ResetConfig | None] = {
        "direct": types.direct or types.dm,
        "group": types.group,
        "thread": types.thread,
    }
    by_type: dict[ChatType, ResetRule] = {
        kind: rule for kind, own in configured.items() if (rule := _build_type_rule(session, own))
    }
    by_channel = {name.lower(): _build_rule(own, None) for name, own in session.reset_by_channel.items()}
    return ResetRules(by_type, by_channel) if by_type or by_channel else None


def find_last_hour_start(hour: int, now: int, zone: tzinfo | None = None) -> int:
    """Return the last time at which this hour began. `zone` defaults to the machine's time zone.

    If a day skips the hour, it is the time at which the hour would have begun; if a day has it twice, the first.
    """
    today = datetime.fromtimestamp(now / 1000, zone).replace(
        hour=hour, minute=0, second=0, microsecond=0, fold=0
    )
    days = (today - timedelta(days=back) for back in range(3))  # a zone may have skipped a whole day
    return next(at for day in days if (at := round(day.timestamp() * 1000)) <= now)


def _get_chat_type(key: SessionKey) -> ChatType:
    if key.thread:
        return "thread"
    return "group" if key.kind == "group" else "direct"


def _build_type_rule(session: SessionConfig, own: ResetConfig | None) -> ResetRule | None:
    """Build the rule of a chat type; values that its entry does not set come from the general rule."""
    reset = session.reset or own
    if reset is None:
        return ResetRule(idle_minutes=session.idle_minutes) if session.idle_minutes else None
    if own is not None:
        reset = reset.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})
    return _build_rule(reset, session.idle_minutes)


def _build_rule(reset: ResetConfig, idle_minutes: int | None) -> ResetRule:
    return ResetRule(reset.at_hour if reset.mode == "daily" else None, reset.idle_minutes or idle_minutes)
