"""A run as one step of an exchange or task: its outcome, and the work that follows from it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from antiphon.engine.runs.run_queue import AcceptedRun

RunOutcome = Literal["ok", "error", "timeout", "cancelled", "interrupted", "incomplete"]

REPLY_BACK_ORIGIN = "reply-back"
ANNOUNCE_ORIGIN = "announce"
WAKE_ORIGIN = "wake"
QUIET_ORIGINS = frozenset({REPLY_BACK_ORIGIN, ANNOUNCE_ORIGIN})
"""Origins of runs whose text is meant for other sessions or the outbox and is not streamed to the chat."""
SANITIZED_ORIGINS = frozenset({"sessions_send", "sessions_spawn", WAKE_ORIGIN, "steer", "cron", "hook"})
"""Origins of runs that are streamed to viewers who did not request them, so their text is sanitized."""


class CompletedStep(NamedTuple):
    """The outcome of a run, as needed by the exchange or task that it belongs to."""

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
    """Whether the run ended its turn to wait for sub-agents; the wake run answers in its place."""

    @property
    def usable_reply(self) -> str | None:
        """The reply, if the run succeeded and the reply is not blank."""
        return self.reply if self.state == "ok" and self.reply and self.reply.strip() else None


class FollowUp(msgspec.Struct, frozen=True):
    """Runs queued and deliveries posted by a commit, for waking lanes and the outbox afterwards."""

    runs: tuple[AcceptedRun, ...] = ()
    posted: bool = False

    def __add__(self, other: FollowUp) -> FollowUp:
        return FollowUp(self.runs + other.runs, self.posted or other.posted)


NO_FOLLOW_UP = FollowUp()


def build_follow_up(accepted: AcceptedRun | None) -> FollowUp:
    return FollowUp((accepted,)) if accepted else NO_FOLLOW_UP
