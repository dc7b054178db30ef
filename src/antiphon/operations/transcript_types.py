"""Results about transcripts: pages of entries, previews, and entries that a search found."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput
from antiphon.messages import AssistantMessage, TextBlock, UserMessage, decode_message
from antiphon.operations.types import View


class HistoryPage(View, omit_defaults=False, frozen=True):
    """Raw entries, oldest first, each with its `seq` and `id`. `nextCursor` leads to earlier ones."""

    session_key: str
    session_id: str
    messages: list[dict[str, Any]]
    total: int
    has_more: bool
    next_cursor: str | None = None


class ConversationView(View, frozen=True):
    """One transcript of a key; the current one has not ended. `reason` is why it was started."""

    session_id: str
    reason: str
    started_at: int
    ended_at: int | None = None


class CompactView(View, omit_defaults=False, frozen=True):
    """How many entries a prompt can still contain; `reason` says why nothing was left out."""

    compacted: bool
    kept: int
    reason: str | None = None


class InjectedEntry(View, frozen=True):
    """The position of an entry that no run wrote."""

    message_id: str
    seq: int
    session_key: str
    session_id: str


class PreviewItem(View, frozen=True):
    role: str
    text: str


class SessionPreview(View, omit_defaults=False, frozen=True):
    """The last messages of a session, under the name that the caller used for it."""

    key: str
    status: Literal["ok", "empty", "missing"]
    items: list[PreviewItem]


class SearchHit(View, frozen=True):
    """An entry that was found. `score` is its recency: 1 is now, 1/2 a day ago, 1/8 a week ago."""

    session_key: str
    session_id: str
    message_id: str
    seq: int
    role: str
    timestamp: int
    snippet: str
    score: float


class SearchPage(View, frozen=True):
    """Hits, newest first. `indexing`: the latest messages are not all searchable yet; `truncated`: more may exist."""

    results: list[SearchHit]
    indexing: bool = False
    truncated: bool = False


def build_history_item(entry: Entry) -> dict[str, Any]:
    """The raw entry with its number and id, marked if it is internal. A damaged one is shown as such."""
    return build_raw_item(
        entry.body, entry.id, entry.seq, entry.run_id, is_internal=entry.is_internal, damaged_role=entry.role
    )


def build_raw_item(
    body: str, id: str, seq: int, run_id: str | None, *, is_internal: bool, damaged_role: str
) -> dict[str, Any]:
    """An entry as `build_history_item` shows it, for callers that know whether it is internal."""
    try:
        item: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        item = {
            "role": damaged_role,
            "content": [],
            "errorMessage": "This entry is damaged and cannot be shown.",
        }
    run = {"runId": run_id} if run_id else {}
    internal = {"internal": True} if is_internal else {}
    return {**item, "id": id, "seq": seq, **run, **internal}


def build_preview_item(entry: Entry, max_chars: int) -> PreviewItem | None:
    """The text of an entry on one line, cut to fit; None if it has no text."""
    try:
        message = decode_message(entry.body)
    except InvalidInput:
        return None
    if not isinstance(message, UserMessage | AssistantMessage):
        return None
    content = message.content
    texts = [content] if isinstance(content, str) else [b.text for b in content if isinstance(b, TextBlock)]
    words = " ".join(" ".join(texts).split())
    if len(words) > max_chars:
        words = f"{words[: max_chars - 1].rstrip()}…"
    return PreviewItem(role=entry.role, text=words) if words else None
