"""The raw transcript format: one JSON object per entry of a session.

Roles are `user`, `assistant` and `toolResult`; `compaction` is the summary entry that stands for everything
before `firstKeptSeq` when a prompt is built. Field names on disk and on the wire are camelCase and belong to
the format; history and exports contain the same bytes. `native` keeps provider-specific data (encrypted
reasoning, item ids, signatures of parts) so that a replay is exact.

This module knows nothing of storage, prompts or providers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec

from antiphon.errors import InvalidInput

T = TypeVar("T")

ThinkingLevel = Literal["off", "minimal", "low", "medium", "high", "xhigh"]
THINKING_LEVELS: tuple[str, ...] = get_args(ThinkingLevel)
Locale = Literal["en", "pt"]
"""Languages of the reports of sub-agents."""
AnnounceMode = Literal["target", "none"]
"""Whether an exchange between two sessions ends with an announcement in the target's chat."""
StopReason = Literal["stop", "length", "toolUse", "error", "aborted"]
INJECTED_MODEL = "gateway-injected"  # the model of entries that were added without asking one
CLIENT_PROVIDER = "client"  # the provider of earlier answers that a client supplies


class _FormatStruct(msgspec.Struct, kw_only=True, rename="camel", omit_defaults=True, frozen=True):
    """Fields are camelCase on disk; absent means default, so the same value always gives the same bytes."""


class TextBlock(_FormatStruct, tag_field="type", tag="text", frozen=True):
    text: str
    native: dict[str, Any] | None = None


class ThinkingBlock(_FormatStruct, tag_field="type", tag="thinking", frozen=True):
    thinking: str
    thinking_signature: str | None = None
    native: dict[str, Any] | None = None


class ToolCall(_FormatStruct, tag_field="type", tag="toolCall", frozen=True):
    id: str
    name: str
    arguments: dict[str, Any]
    native: dict[str, Any] | None = None


class ImageBlock(_FormatStruct, tag_field="type", tag="image", frozen=True):
    data: str
    """Base64."""
    mime_type: str


class Provenance(_FormatStruct, frozen=True):
    """Where a message that no human typed into this session came from."""

    kind: str
    origin_session_id: str | None = None
    source_session_key: str | None = None
    source_channel: str | None = None
    source_tool: str | None = None
    exchange_id: str | None = None
    chain_id: str | None = None
    hop: int | None = None


class Cost(_FormatStruct, omit_defaults=False, frozen=True):
    """US dollars. Only `total` is always set; the parts are absent where a provider's price has none."""

    total: float
    input: float | None = None
    output: float | None = None
    cache_read: float | None = None
    cache_write: float | None = None


class TokenUsage(_FormatStruct, omit_defaults=False, frozen=True):
    """Tokens of one model call. `cost` is null if the price is not known, never 0."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    total_tokens: int = 0
    cost: Cost | None = None


class UserMessage(_FormatStruct, tag_field="role", tag="user", frozen=True):
    content: str | list[TextBlock | ImageBlock]
    timestamp: int
    provenance: Provenance | None = None


class AssistantMessage(_FormatStruct, tag_field="role", tag="assistant", frozen=True):
    content: list[TextBlock | ThinkingBlock | ToolCall]
    timestamp: int
    stop_reason: StopReason | None = None
    """Absent only in imported transcripts that never had one."""
    api: str | None = None
    provider: str | None = None
    model: str | None = None
    usage: TokenUsage | None = None
    error_message: str | None = None
    provenance: Provenance | None = None
    """Set for text that was added for people to read and that no model wrote in this session."""
    native: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [block for block in self.content if isinstance(block, ToolCall)]


class ToolResult(_FormatStruct, tag_field="role", tag="toolResult", frozen=True):
    tool_call_id: str
    tool_name: str
    content: list[TextBlock | ImageBlock]
    timestamp: int
    is_error: bool = False
    interrupted: bool = False
    """The call may or may not have happened: the process died, or the run was stopped, while it ran."""
    details: Any = None

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))


class CompactionEntry(_FormatStruct, tag_field="role", tag="compaction", frozen=True):
    summary: str
    first_kept_seq: int
    tokens_before: int
    timestamp: int


Message: TypeAlias = UserMessage | AssistantMessage | ToolResult | CompactionEntry

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def collect_call_ids(messages: Iterable[Message]) -> set[str]:
    """Ids of all tool calls in the messages."""
    return {
        call.id
        for message in messages
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls
    }


class _OutcomeFields(msgspec.Struct, rename="camel", frozen=True):
    """The fields that show whether an entry failed, also in entries of other writers that are no `Message`."""

    stop_reason: Any = None
    error_message: Any = None
    is_error: Any = None


class _ToolFields(msgspec.Struct, rename="camel", frozen=True):
    """The fields that show which tools an entry is about; also for entries of other writers."""

    tool_name: Any = None
    content: Any = None


_outcome_decoder, _tool_decoder = msgspec.json.Decoder(_OutcomeFields), msgspec.json.Decoder(_ToolFields)
_PLAIN_NAME_PATTERN = re.compile(r"[\w.:-]+")
_FAILURE_MARKERS = ("isError", "errorMessage", '"error"', '"aborted"')


def is_failed_entry(role: str, body: str) -> bool:
    """Whether an entry is an answer that failed or was aborted, or a tool's error. Decodes only if it must."""
    if role not in ("assistant", "toolResult") or not any(word in body for word in _FAILURE_MARKERS):
        return False
    found = _decode_or_none(_outcome_decoder, body)
    if found is None:
        return False
    if role == "toolResult":
        return found.is_error is True
    return found.stop_reason in ("error", "aborted") or bool(found.error_message)


def is_tool_entry(tool: str, role: str, body: str) -> bool:
    """Whether an entry is an answer that called this tool, or the tool's result."""
    # A plain name can only be spelled differently with escapes.
    absent = tool not in body and "\\u" not in body and _PLAIN_NAME_PATTERN.fullmatch(tool)
    if role not in ("assistant", "toolResult") or absent:
        return False
    found = _decode_or_none(_tool_decoder, body)
    if found is None:
        return False
    if role == "toolResult":
        return found.tool_name == tool
    content: object = found.content
    blocks = cast("list[object]", content) if isinstance(content, list) else []
    named = (cast("dict[str, object]", block) for block in blocks if isinstance(block, dict))
    return any((block.get("type"), block.get("name")) == ("toolCall", tool) for block in named)


def _decode_or_none(decoder: msgspec.json.Decoder[T], body: str) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def encode_message(message: Message) -> str:
    """The JSON text that is stored."""
    return _encoder.encode(message).decode()


def get_role(message: Message) -> str:
    return str(message.__struct_config__.tag)


def decode_message(body: str | bytes) -> Message:
    """Decodes one stored entry. Fields of newer writers are ignored here and stay in the stored text."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidInput(
            f"A transcript entry could not be read: {error}.",
            "Run `antiphon doctor` to see which one; the rest of the transcript is not affected.",
        ) from error
