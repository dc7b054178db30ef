"""How a run ends, and what a commit leads to: values that transaction scripts return and `Worker` applies.

A script only describes its effects. They are applied after its commit, so a rolled back script has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from antiphon.bus import ApprovalChanged, CommandStopRequested, StopRequested
from antiphon.engine.runs.run_queue import AcceptedRun
from antiphon.engine.sessions.transcripts import Entry
from antiphon.messages import Message
from antiphon.store import Row

RunOutcome = Literal["ok", "error", "timeout", "cancelled", "interrupted", "incomplete"]


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A run, its session, and the reply target, exchange and task it belongs to."""

    n: int
    run_id: str
    session: int
    session_key: str
    session_id: str
    origin: str
    reply_target_json: str | None
    exchange: int | None
    task: int | None


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, according to the runtime only."""

    state: RunOutcome
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model_answered: str | None = None
    messages: Sequence[Message] = ()
    yielded: bool = False
    """Whether a tool ended the turn; the answer comes when the session is woken."""
    has_usage: bool = True
    """False if no step of the run reported usage."""


class CompletedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run, as needed by the exchange or task that it belongs to."""

    run_id: str
    session: int
    session_key: str
    origin: str
    reply_target_json: str | None
    exchange: int | None
    task: int | None
    state: RunOutcome
    reply: str | None
    error: str | None
    model: str | None
    yielded: bool
    """Whether the run ended its turn to wait for sub-agents; the wake run answers in its place."""

    @property
    def usable_reply(self) -> str | None:
        """The reply, if the run succeeded and the reply is not blank."""
        return self.reply if self.state == "ok" and self.reply and self.reply.strip() else None


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended in this commit, with the entries it added."""

    run: RunIdentity
    ending: RunEnding
    entries: Sequence[Entry] = ()
    ended_at: int
    started_at: int | None = None
    """None if the run ended without having been executed here."""
    usage: Row | None = None


class ExpiredApproval(msgspec.Struct, frozen=True):
    """An approval that expired when its run ended."""

    session: int
    event: ApprovalChanged


class Effects(msgspec.Struct, frozen=True):
    """What a commit leads to, in the order in which it is published. Combined with `+`, in loops with `combine`."""

    items: tuple[EndedRun | AcceptedRun | StopRequested | CommandStopRequested | ExpiredApproval, ...] = ()
    """Runs that ended, runs that were queued, active runs whose owner must stop them, commands whose host must end
    their processes, and approvals that expired."""
    has_deliveries: bool = False
    """Whether the outbox has something to send."""

    @classmethod
    def queue(cls, accepted: AcceptedRun | None) -> Effects:
        """Return the effects of queueing a run; None if its session no longer exists."""
        return cls((accepted,)) if accepted else NO_EFFECTS

    @classmethod
    def combine(cls, parts: Iterable[Effects]) -> Effects:
        """Return the effects of all parts. Use it for loops: adding one by one copies everything before."""
        parts = list(parts)
        return cls(
            tuple(item for part in parts for item in part.items), any(part.has_deliveries for part in parts)
        )

    def __add__(self, other: Effects) -> Effects:
        return Effects(self.items + other.items, self.has_deliveries or other.has_deliveries)

    @property
    def ended_runs(self) -> list[EndedRun]:
        return [item for item in self.items if isinstance(item, EndedRun)]

    @property
    def stop_requests(self) -> list[str]:
        """Ids of the runs whose owner must stop them."""
        return [item.run_id for item in self.items if isinstance(item, StopRequested)]

    @property
    def stopped_run_ids(self) -> list[str]:
        """Ids of the runs that have ended, then of those that are to stop."""
        return [*(ended.run.run_id for ended in self.ended_runs), *self.stop_requests]


NO_EFFECTS = Effects()
DELIVERIES_DUE = Effects(has_deliveries=True)
