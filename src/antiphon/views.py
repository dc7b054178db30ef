"""What operations return: plain typed data with the names that every wire uses.

Absent means unknown. Nothing here reads anything; rows of the store are turned into these and that is all.
"""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon import keys
from antiphon.engine.transcripts import Entry
from antiphon.keys import SessionKey
from antiphon.store import Row


class _View(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    pass


class Accepted(_View, frozen=True):
    """A message is durable. `state` is `queued`, or where its run is already if the key was used before."""

    run_id: str
    session_key: str
    session_id: str
    state: str


class Spent(_View, omit_defaults=False, frozen=True):
    """Tokens and US dollars; a cost that is not known is null."""

    input: int
    output: int
    cost: float | None


class RunView(_View, frozen=True):
    run_id: str
    session_key: str
    state: str
    created_at: int
    started_at: int | None = None
    ended_at: int | None = None
    queued_ms: int | None = None
    running_ms: int | None = None
    position: int | None = None
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model: str | None = None
    usage: Spent | None = None

    @property
    def ended(self) -> bool:
        return self.state not in {"queued", "running"}


class Route(_View, frozen=True):
    channel: str | None = None
    to: str | None = None
    account_id: str | None = None
    thread_id: str | None = None


class SessionView(_View, frozen=True):
    """A row of a session list."""

    key: str
    kind: str
    channel: str
    agent_id: str | None
    session_id: str
    updated_at: int
    last_activity_at: int
    state: str
    display_name: str | None = None
    label: str | None = None
    model: str | None = None
    context_tokens: int | None = None
    total_tokens: int | None = None
    thinking_level: str | None = None
    verbose_level: str | None = None
    system_sent: bool | None = None
    aborted_last_run: bool | None = None
    send_policy: str | None = None
    last_channel: str | None = None
    last_to: str | None = None
    last_account_id: str | None = None
    delivery_context: Route | None = None
    transcript_path: str | None = None
    parent_key: str | None = None
    child_count: int | None = None


class SessionPage(_View, frozen=True):
    """`scope` says whose sessions these are: `all`, or what the caller's visibility narrows it to."""

    count: int
    sessions: list[SessionView]
    scope: str
    next_cursor: str | None = None


class HistoryPage(_View, omit_defaults=False, frozen=True):
    """Raw entries, oldest first, each with its `seq` and `id`. `nextCursor` leads to what came before."""

    session_key: str
    session_id: str
    messages: list[dict[str, Any]]
    total: int
    has_more: bool
    next_cursor: str | None = None


class UsageLine(_View, omit_defaults=False, frozen=True):
    provider: str | None
    model: str | None
    calls: int
    input: int
    output: int
    cache_read: int
    cache_write: int
    cost: float | None


def run_view(row: Row, spent: Row, key: str, now: int) -> RunView:
    started, ended = row["started_at"], row["ended_at"]
    return RunView(
        run_id=row["id"],
        session_key=key,
        state=row["state"],
        created_at=row["created_at"],
        started_at=started,
        ended_at=ended,
        queued_ms=(started or ended or now) - row["created_at"],
        running_ms=(ended or now) - started if started else None,
        position=row["ahead"] + 1 if row["state"] == "queued" else None,
        reply=row["reply"],
        error_code=row["error_code"],
        error=row["error"],
        model=row["model_answered"],
        usage=Spent(input=spent["input"], output=spent["output"], cost=spent["cost"]),
    )


def session_view(row: Row, key: SessionKey, shown: str, transcript_path: str) -> SessionView:
    route = Route(
        channel=row["last_channel"],
        to=row["last_to"],
        account_id=row["last_account"],
        thread_id=row["last_thread"],
    )
    return SessionView(
        key=shown,
        kind=row["kind"],
        channel=keys.channel_of(key.kind, row["channel"], row["last_channel"]),
        agent_id=row["agent_id"] or None,
        session_id=row["session_id"],
        updated_at=row["updated_at"],
        last_activity_at=row["updated_at"],
        state=row["state"],
        display_name=row["display_name"],
        label=row["label"],
        model=row["model"] or row["last_model"],
        context_tokens=row["context_tokens"],
        total_tokens=row["total_tokens"],
        thinking_level=row["thinking"],
        verbose_level=row["verbose"],
        system_sent=bool(row["system_sent"]),
        aborted_last_run=bool(row["aborted_last_run"]),
        send_policy=row["send_policy"],
        last_channel=row["last_channel"],
        last_to=row["last_to"],
        last_account_id=row["last_account"],
        delivery_context=route if route.channel else None,
        transcript_path=transcript_path,
        parent_key=row["parent_key"],
        child_count=row["child_count"],
    )


def history_item(entry: Entry) -> dict[str, Any]:
    """The raw entry with its number and id. One that cannot be read is shown as such, not hidden."""
    try:
        item: dict[str, Any] = msgspec.json.decode(entry.body, type=dict[str, Any])
    except msgspec.MsgspecError:
        item = {
            "role": entry.role,
            "content": [],
            "errorMessage": "This entry is damaged and cannot be shown.",
        }
    return {**item, "id": entry.id, "seq": entry.seq}
