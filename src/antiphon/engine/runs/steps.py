"""A run as a step of something larger: what is known of it when it ends, and what its end leads to."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from antiphon.engine.runs.run_queue import AcceptedRun

RunOutcome = Literal["ok", "error", "timeout", "cancelled", "interrupted", "incomplete"]

REPLY_BACK_ORIGIN = "reply-back"
ANNOUNCE_ORIGIN = "announce"
WAKE_ORIGIN = "wake"
QUIET_ORIGINS = frozenset({REPLY_BACK_ORIGIN, ANNOUNCE_ORIGIN})
"""Origins of runs whose words are meant for other sessions or for the gate, not for whoever watches the chat."""
SANITIZED_ORIGINS = frozenset({"sessions_send", "sessions_spawn", WAKE_ORIGIN, "steer", "cron", "hook"})
"""Origins of runs that may be watched, but were not asked for by whoever watches: what they say passes the gate."""


class CompletedStep(NamedTuple):
    """A run that ends, as far as others go on from it."""

    n: int
    run_id: str
    session: int
    session_key: str
    origin: str
    target: str | None
    exchange: int | None
    task: int | None
    state: RunOutcome
    reply: str | None
    error: str | None
    model: str | None
    yielded: bool = False
    """It ended its turn to wait; whoever is woken for it answers in its place."""

    @property
    def usable_reply(self) -> str | None:
        """The reply, if the run came to one."""
        return self.reply if self.state == "ok" and self.reply and self.reply.strip() else None


class FollowUp(msgspec.Struct, frozen=True):
    """What a commit has led to, for whoever wakes lanes after it."""

    runs: tuple[AcceptedRun, ...] = ()
    posted: bool = False

    def __add__(self, other: FollowUp) -> FollowUp:
        return FollowUp(self.runs + other.runs, self.posted or other.posted)


NO_FOLLOW_UP = FollowUp()


def build_follow_up(accepted: AcceptedRun | None) -> FollowUp:
    return FollowUp((accepted,)) if accepted else NO_FOLLOW_UP
