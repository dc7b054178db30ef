"""A run as a step of something larger: what is known of it when it ends, and what its end leads to."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from antiphon.engine.admissions import Accepted

Outcome = Literal["ok", "error", "timeout", "cancelled", "interrupted", "incomplete"]

REPLY_BACK = "reply-back"
ANNOUNCE = "announce"
WAKE = "wake"
QUIET = frozenset({REPLY_BACK, ANNOUNCE})
"""Origins of runs whose words are meant for other sessions or for the gate, not for whoever watches the chat."""
GATED = frozenset({"sessions_send", "sessions_spawn", WAKE, "steer", "cron", "hook"})
"""Origins of runs that may be watched, but were not asked for by whoever watches: what they say passes the gate."""


class Step(NamedTuple):
    """A run that ends, as far as others go on from it."""

    n: int
    run_id: str
    session: int
    session_key: str
    origin: str
    target: str | None
    exchange: int | None
    task: int | None
    state: Outcome
    reply: str | None
    error: str | None
    model: str | None
    yielded: bool = False
    """It ended its turn to wait; whoever is woken for it answers in its place."""

    @property
    def said(self) -> str | None:
        """The reply, if the run came to one."""
        return self.reply if self.state == "ok" and self.reply and self.reply.strip() else None


class Sequel(msgspec.Struct, frozen=True):
    """What a commit has led to, for whoever wakes lanes after it."""

    runs: tuple[Accepted, ...] = ()
    posted: bool = False

    def __add__(self, other: Sequel) -> Sequel:
        return Sequel(self.runs + other.runs, self.posted or other.posted)


NOTHING = Sequel()


def queued(accepted: Accepted | None) -> Sequel:
    return Sequel((accepted,)) if accepted else NOTHING
