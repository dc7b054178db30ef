"""Wire format of sessions and messages.

Views of `operations` are sent under the names that clients expect; texts and images from clients become the content of
a message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon import keys
from antiphon.bus import MessageAppended
from antiphon.errors import InvalidInput
from antiphon.messages import ImageBlock, TextBlock
from antiphon.operations.transcript_types import build_raw_item
from antiphon.operations.types import ApprovalView, SessionView

WIRE_KINDS_BY_SESSION_KIND = {"group": "group"}
WIRE_STATUS_BY_STATE = {"running": "running", "idle": "done"}
COMMAND_TOOL = "exec"
IMAGE_MIME_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MAX_ATTACHMENTS_PER_MESSAGE = 20
CHANNELS_SHOWN_IN_SESSION = frozenset({"webchat", "last"})
"""Channels that show the session itself, so that answers need no separate delivery."""


def format_session_key(key: str) -> str:
    """Return a stored key in full, as operators see it; never the stored name of the global session."""
    return keys.display_stored_key(key, viewer_agent_id=None)


def format_approval(approval: ApprovalView) -> dict[str, Any]:
    """Return an approval under the names that clients of this protocol expect.

    Other clients show only `command`, so it names the tool, unless the call is a command line.
    """
    key = format_session_key(approval.session_key)
    return {
        "id": approval.id,
        "sessionKey": key,
        "request": {
            "command": approval.text if approval.tool == COMMAND_TOOL else f"{approval.tool} {approval.text}",
            "tool": approval.tool,
            "text": approval.text,
            "agentId": approval.agent_id,
            "sessionKey": key,
            "runId": approval.run_id,
            "allowedDecisions": approval.allowed_decisions,
        },
        "state": approval.state,
        "decision": approval.decision,
        "resolvedBy": approval.decided_by,
        "createdAtMs": approval.created_at,
        "expiresAtMs": approval.expires_at,
        "resolvedAtMs": approval.decided_at,
    }


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
    last_message_preview: str | None = None
    derived_title: str | None = None


def build_session_row(
    view: SessionView, last_message: str | None = None, title: str | None = None
) -> SessionRow:
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
        view.created_at, view.archived, view.model_override, run, view.used_tokens, view.sandboxed,
        kind, state == "running", [run] if run else [], WIRE_STATUS_BY_STATE[state], kind == "main",
        provider or None, parent or None, parent or None, last_message, title,
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
    return build_raw_item(
        event.body,
        event.entry,
        event.seq,
        event.run_id,
        is_internal=event.internal,
        damaged_role=role_if_damaged,
    )


def format_appended_entry(event: MessageAppended) -> dict[str, Any]:
    """Return an appended entry as sent in live events; damaged entries are sent, too."""
    return format_history_item(build_appended_item(event, role_if_damaged="assistant"))


def format_assistant_text(text: str, timestamp: int) -> dict[str, Any]:
    """Return a text as the message of an assistant."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "timestamp": timestamp}


# --- messages from clients ---


class ImageAttachment(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An image attached to a message. Other fields that clients add are ignored."""

    content: Any = None
    mime_type: str | None = None
    type: str | None = None
    file_name: str | None = None


def build_message_content(
    text: str, attachments: Sequence[ImageAttachment]
) -> str | list[TextBlock | ImageBlock]:
    """Return the content of a message: plain text, or blocks if images are attached."""
    if not attachments:
        return text
    if len(attachments) > MAX_ATTACHMENTS_PER_MESSAGE:
        raise InvalidInput(
            f"At most {MAX_ATTACHMENTS_PER_MESSAGE} attachments are accepted.",
            "Send fewer.",
            field="attachments",
        )
    images = [_parse_attachment(number, attachment) for number, attachment in enumerate(attachments)]
    return [*([TextBlock(text=text)] if text.strip() else []), *images]


def _parse_attachment(number: int, attachment: ImageAttachment) -> ImageBlock:
    data = attachment.content if isinstance(attachment.content, str) else ""
    kind = attachment.mime_type or ""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        kind = head[5:].partition(";")[0] or kind
    return parse_image(data, kind, f"attachments/{number}")


def parse_image(data: str, kind: str, field: str) -> ImageBlock:
    """Return an image block. The image must be of a type that models accept, and in base64."""
    if kind not in IMAGE_MIME_TYPES:
        raise InvalidInput(
            f"Images of type {kind[:80]!r} are not supported.",
            f"Send one of {', '.join(IMAGE_MIME_TYPES)}.",
            field=field,
        )
    try:
        base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        data = ""
    if not data:
        raise InvalidInput("An image is not valid base64.", "Send the file itself in base64.", field=field)
    return ImageBlock(data=data, mime_type=kind)


def check_channel(field: str, channel: str | None) -> None:
    """Reject a channel that this gateway does not have.

    Raises:
        InvalidInput: naming the field.
    """
    if channel and channel.lower() not in CHANNELS_SHOWN_IN_SESSION:
        raise InvalidInput(
            f"{field!r} is {channel[:80]!r}, a channel that answers are not delivered to from here.",
            "Leave it out, or pass 'webchat': the answer is shown in the session.",
            field=field,
        )
