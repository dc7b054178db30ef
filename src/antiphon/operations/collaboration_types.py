"""Results about sessions that work together: messages between them, sub-agents, and what is posted to chats."""

from __future__ import annotations

from typing import Literal

import msgspec

from antiphon import keys
from antiphon.engine.collaboration.attachments import AttachmentReceipt
from antiphon.operations.types import View
from antiphon.store import Row


class DeliveryState(View, frozen=True):
    """The state of a message, independent of its reply."""

    status: Literal["queued", "started", "ended"]
    queued_ms: int | None = None
    running_ms: int | None = None
    position: int | None = None


class ReplyBackState(View, frozen=True):
    """How many reply turns the two sessions may take after the first reply; for none, the reason."""

    turns: int
    reason: str | None = None


SendStatus = Literal["accepted", "ok", "timeout", "error"]


class SendResult(View, frozen=True):
    """The outcome of a message to another session. `ok` says nothing about what was posted in its chat."""

    run_id: str
    status: SendStatus
    session_key: str
    reply: str | None = None
    error: str | None = None
    delivery: DeliveryState | None = None
    reply_back: ReplyBackState | None = None


class SpawnResult(View, omit_defaults=False, frozen=True, kw_only=True):
    status: Literal["accepted"] = "accepted"
    run_id: str
    child_session_key: str
    mode: str
    attachments: AttachmentReceipt | msgspec.UnsetType | None = msgspec.UNSET


class TaskView(View, frozen=True, kw_only=True):
    """A task given to a sub-agent; long texts are cut. `announced` is the outcome of the report."""

    run_id: str
    child_session_key: str
    agent_id: str
    label: str | None = None
    task: str
    phase: str
    status: str | None = None
    result: str | None = None
    error: str | None = None
    announced: str | None = None
    model: str | None = None
    created_at: int
    started_at: int | None = None
    ended_at: int | None = None
    total_tokens: int | None = None
    last_activity_at: int | None = None

    @property
    def name(self) -> str:
        return self.label or self.child_session_key


class KillResult(msgspec.Struct, frozen=True, kw_only=True):
    """The sub-agents that were stopped; `finished` names the chosen one if it had already ended."""

    keys: list[str]
    names: list[str]
    finished: str | None = None


class DeliveryView(View, frozen=True, kw_only=True):
    """A message on its way to people."""

    key: str
    kind: str
    session_key: str
    channel: str
    to: str | None = None
    state: str
    text: str
    attempts: int = 0
    error: str | None = None
    message_id: str | None = None
    created_at: int
    next_at: int | None = None
    expires_at: int | None = None
    parts: int | None = None
    """How many messages of the chat service it was split into, once that is known."""
    parts_sent: int | None = None
    settled_at: int | None = None


class DeliveryPage(View, frozen=True):
    """Deliveries, newest first. `count_by_state` covers all of them; `capped`: more may have been delivered."""

    deliveries: list[DeliveryView]
    count_by_state: dict[str, int] = msgspec.field(name="standing")
    capped: bool = False
    next_cursor: str | None = None


class ExchangeView(View, frozen=True, kw_only=True):
    """One message from a session to another, and its progress. Long texts are cut; expired ones are gone.

    `announced` is the outcome of the announcement. Without a requester, an operator sent it.
    """

    id: str
    requester_session_key: str | None = None
    target_session_key: str
    phase: str
    turn: int
    turns: int
    announced: str | None = None
    current_run_id: str | None = None
    chain_id: str
    hop: int
    message: str | None = None
    latest_reply: str | None = None
    created_at: int
    settled_at: int | None = None


class ExchangePage(View, frozen=True):
    """Exchanges, newest first."""

    exchanges: list[ExchangeView]
    next_cursor: str | None = None


class ExchangeStep(View, frozen=True, kw_only=True):
    """One answer within an exchange. `turn` is 0 for the first one, and absent for the announcement."""

    run_id: str
    session_key: str
    turn: int | None = None
    state: str
    reply: str | None = None
    error: str | None = None
    at: int


class ExchangeDetail(View, frozen=True, kw_only=True):
    """An exchange with its full texts and every answer in it that is still stored."""

    exchange: ExchangeView
    steps: list[ExchangeStep]


def build_task_view(row: Row, viewer_agent_id: str | None) -> TaskView:
    return TaskView(
        run_id=row["id"],
        child_session_key=keys.display_stored_key(row["child_key"], viewer_agent_id=viewer_agent_id),
        agent_id=row["agent_id"],
        label=row["label"],
        task=row["task"],
        phase=row["phase"],
        status=row["outcome"],
        result=row["result"],
        error=row["error"],
        announced=row["announced"],
        model=row["model"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        total_tokens=row["total_tokens"],
        last_activity_at=row["child_updated_at"],
    )
