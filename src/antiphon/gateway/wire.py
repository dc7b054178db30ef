"""Wire format of sessions and messages: the views of `operations` under the names that clients expect."""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon import keys
from antiphon.bus import MessageAppended
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput
from antiphon.operations.types import SessionView, build_history_item

WIRE_KINDS_BY_SESSION_KIND = {"group": "group"}
WIRE_STATUS_BY_STATE = {"running": "running", "idle": "done"}


def format_session_key(key: str) -> str:
    """Return a stored key in full, as operators see it; never the stored name of the global session."""
    return keys.display_stored_key(key, viewer_agent_id=None)


class SessionRow(SessionView, frozen=True):
    """A session as clients see it: its view, and fields derived from it under the names that clients expect.

    Unlike in a view, `kind` is one that clients know and `session_kind` is ours, and `model` is without its provider.
    """

    session_kind: str | None = None
    has_active_run: bool | None = None
    active_run_ids: list[str] | None = None
    status: str | None = None
    is_main: bool | None = None
    model_provider: str | None = None
    spawned_by: str | None = None
    parent_session_key: str | None = None


def build_session_row(view: SessionView) -> SessionRow:
    """Return a row ready to encode. Positional arguments are by far the fastest; a list has hundreds of rows."""
    kind, state, model, parent, run = view.kind, view.state, view.model, view.parent_key, view.active_run_id
    provider = None
    if model:
        provider, _, model = model.rpartition("/")
    # fmt: off
    return SessionRow(
        view.key, WIRE_KINDS_BY_SESSION_KIND.get(kind, "direct"), view.channel, view.agent_id, view.session_id,
        view.updated_at, view.last_activity_at, state, view.display_name, view.label, model,
        view.context_tokens, view.total_tokens,
        view.thinking_level, view.verbose_level, view.system_sent, view.aborted_last_run, view.send_policy,
        view.last_channel, view.last_to, view.last_account_id, view.delivery_context, view.transcript_path,
        parent, view.child_count, view.chat_type, view.subject, view.input_tokens, view.output_tokens,
        view.created_at, view.archived, view.model_override, run, view.used_tokens,
        kind, state == "running", [run] if run else [], WIRE_STATUS_BY_STATE[state], kind == "main",
        provider or None, parent or None, parent or None,
    )
    # fmt: on


def build_session_dict(view: SessionView) -> dict[str, Any]:
    """Return the row as a dict, for callers that add fields."""
    return msgspec.to_builtins(build_session_row(view))


def parse_cursor(text: str) -> int:
    """Return the entry number of a history cursor, `N` or `seq:N`.

    Raises:
        InvalidInput: it is not a cursor.
    """
    number = text.removeprefix("seq:")
    if not (number.isascii() and number.isdecimal() and len(number) < 18):
        raise InvalidInput(
            f"'cursor' is {text[:40]!r}.", "Pass nextCursor unchanged: N or seq:N.", field="cursor"
        )
    return int(number)


def format_http_history_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return a history item as sent over HTTP: the raw entry plus its number where clients look for it."""
    return {**item, "__openclaw": {"id": item["id"], "seq": item["seq"]}}


def format_history_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return a history item: the raw entry plus its number and run id where clients look for them."""
    run_id = item.get("runId")
    marks = {"id": item.get("id"), "seq": item.get("seq")}
    if run_id:
        marks["runId"] = run_id
        if item.get("role") == "user":  # lets a client recognize a message it has already shown
            item = {**item, "idempotencyKey": f"{run_id}:user"}
    return {**item, "__openclaw": marks}


def build_appended_item(event: MessageAppended, *, role_if_damaged: str) -> dict[str, Any]:
    """Return the history item of an appended entry."""
    return build_history_item(
        Entry(event.seq, event.entry, role_if_damaged, event.body, 0, event.run_id, int(not event.internal))
    )


def format_appended_entry(event: MessageAppended) -> dict[str, Any]:
    """Return an appended entry as sent in live events; damaged entries are sent, too."""
    return format_history_item(build_appended_item(event, role_if_damaged="assistant"))


def format_assistant_text(text: str, timestamp: int) -> dict[str, Any]:
    """Return a text as the message of an assistant."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "timestamp": timestamp}
