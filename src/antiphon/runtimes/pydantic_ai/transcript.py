"""Converts transcripts to pydantic-ai's messages, and responses to transcript blocks.

Provider-specific data is kept in a block's `native`: `id` (an item's id, or the field reasoning came in), `details`
(opaque data to send back) and `provider` (the issuer, where that is not the configured name). Thinking goes back
only to the provider that wrote it; another would ignore or reject it.

The result is always a conversation that strict providers accept: it begins and ends with a request, requests
and responses alternate, tool results come first in the request after their calls, and no text is blank.
The prompt guarantees that every call has its result.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_core import to_jsonable_python

from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.runtimes.model import INVALID_ARGUMENTS_KEY, Api
from antiphon.runtimes.text import (
    CONTINUE_PROMPT,
    EMPTY_MESSAGE_TEXT,
    OPENING_PROMPT,
    SUMMARY_PREFIX,
    UNREADABLE_IMAGE_TEXT,
    format_result,
    is_json_object,
    repair_surrogates,
)
from antiphon.runtimes.tool_calls import MAX_KEPT_TOOL_CALLS, build_tool_call, make_sendable_id

_RequestPart = UserPromptPart | ToolReturnPart


class Dialect(msgspec.Struct, frozen=True):
    """The model that a conversation is built for."""

    api: Api
    provider: str
    """The name it is configured under."""
    system: str
    """The name pydantic-ai knows it by; the library compares it to decide what may be sent back."""


def build_conversation(messages: Iterable[Message], dialect: Dialect) -> list[ModelMessage]:
    """The messages to send, merged so that requests and responses alternate."""
    turns = [(isinstance(message, AssistantMessage), _build_parts(message, dialect)) for message in messages]
    sent: list[ModelMessage] = []
    for answered, group in groupby((turn for turn in turns if turn[1]), key=lambda turn: turn[0]):
        parts = list(chain.from_iterable(parts for _, parts in group))
        if answered:
            sent.append(ModelResponse(parts=parts, provider_name=dialect.system))
        else:
            sent.append(ModelRequest(parts=_build_request_parts(parts)))
    if not sent or isinstance(sent[0], ModelResponse):
        sent.insert(0, ModelRequest(parts=[UserPromptPart(OPENING_PROMPT)]))
    if isinstance(sent[-1], ModelResponse):
        sent.append(ModelRequest(parts=[UserPromptPart(CONTINUE_PROMPT)]))
    return sent


def build_blocks(
    parts: Sequence[ModelResponsePart], dialect: Dialect, taken: set[str]
) -> list[TextBlock | ThinkingBlock | ToolCall]:
    """The transcript blocks of a response, with at most `MAX_KEPT_TOOL_CALLS` calls.

    `taken` are the call ids already in use.
    """
    content: list[TextBlock | ThinkingBlock | ToolCall] = []
    calls = 0
    for part in parts:
        if isinstance(part, TextPart):
            content.append(TextBlock(text=part.content, native=_extract_native(part, dialect)))
        elif isinstance(part, ThinkingPart):
            content.append(
                ThinkingBlock(
                    thinking=part.content,
                    thinking_signature=part.signature,
                    native=_extract_native(part, dialect),
                )
            )
        elif isinstance(part, ToolCallPart) and (calls := calls + 1) <= MAX_KEPT_TOOL_CALLS:
            content.append(_convert_tool_call(part, dialect, taken))
    return content


def extract_message_native(response: ModelResponse) -> dict[str, Any] | None:
    """Provider data about the whole message; the provider's support asks for its id."""
    details = {
        key: value
        for key, value in (response.provider_details or {}).items()
        if key not in ("timestamp", "finish_reason")
    }
    return _drop_empty(id=response.provider_response_id, details=details)


def _build_parts(message: Message, dialect: Dialect) -> list[Any]:
    match message:
        case UserMessage():
            return [UserPromptPart(_build_user_content(message.content))]
        case CompactionEntry():
            return [UserPromptPart(SUMMARY_PREFIX + message.summary)]
        case ToolResult():
            return [_build_tool_return(message, dialect)]
        case AssistantMessage():
            return _build_response_parts(message, dialect)


def _build_request_parts(parts: Sequence[_RequestPart]) -> list[_RequestPart]:
    """Tool results first, as providers demand, then a single prompt: some chat templates refuse two in a row."""
    results = [part for part in parts if isinstance(part, ToolReturnPart)]
    prompts = [part.content for part in parts if isinstance(part, UserPromptPart)]
    if not prompts:
        return [*results]
    texts = [content for content in prompts if isinstance(content, str)]
    if len(texts) == len(prompts):
        return [*results, UserPromptPart("\n\n".join(texts))]
    items = chain.from_iterable([content] if isinstance(content, str) else content for content in prompts)
    return [*results, UserPromptPart(list(items))]


def _build_user_content(content: str | list[TextBlock | ImageBlock]) -> str | list[str | BinaryContent]:
    if isinstance(content, str):
        return content if content.strip() else EMPTY_MESSAGE_TEXT
    items = [
        _build_item(block) for block in content if not isinstance(block, TextBlock) or block.text.strip()
    ]
    if all(isinstance(item, str) for item in items):
        return "\n\n".join(str(item) for item in items) or EMPTY_MESSAGE_TEXT
    return items


def _build_item(block: TextBlock | ImageBlock) -> str | BinaryContent:
    if isinstance(block, TextBlock):
        return block.text
    try:
        return BinaryContent(base64.b64decode(block.data), media_type=block.mime_type)
    except binascii.Error:
        return UNREADABLE_IMAGE_TEXT


def _build_tool_return(result: ToolResult, dialect: Dialect) -> ToolReturnPart:
    text = format_result(result)
    images = [_build_item(block) for block in result.content if isinstance(block, ImageBlock)]
    is_data = not images and is_json_object(text)
    content: Any = [text, *images] if images else text
    if is_data and dialect.api == "google-generative-ai":  # takes objects, and would wrap a text in one
        content = msgspec.json.decode(text)
    failed = result.is_error and not (
        is_data and dialect.api != "anthropic-messages"
    )  # the only API with a flag for it
    return ToolReturnPart(
        tool_name=result.tool_name,
        content=content,
        tool_call_id=make_sendable_id(result.tool_call_id, dialect.api),
        outcome="failed" if failed else "interrupted" if result.interrupted else "success",
    )


def _build_response_parts(message: AssistantMessage, dialect: Dialect) -> list[ModelResponsePart]:
    """The parts of a response; empty for a message that failed or was stopped before it had any content."""
    broken = message.stop_reason in ("error", "aborted")
    parts: list[ModelResponsePart] = []
    for block in message.content:
        native = block.native or {}
        provider = native.get("provider") or _get_system_name(message.provider, dialect)
        kept: dict[str, Any] = {}
        if provider == dialect.system:
            kept = {
                "id": native.get("id"),
                "provider_name": provider,
                "provider_details": native.get("details"),
            }
        match block:
            case TextBlock():
                if block.text.strip():
                    parts.append(TextPart(block.text, **kept))
            case ToolCall():
                arguments = native.get(INVALID_ARGUMENTS_KEY, block.arguments)
                call_id = make_sendable_id(block.id, dialect.api)
                parts.append(ToolCallPart(block.name, arguments, call_id, **kept))
            case ThinkingBlock():
                if kept and not broken and (block.thinking_signature or dialect.api != "anthropic-messages"):
                    parts.append(ThinkingPart(block.thinking, signature=block.thinking_signature, **kept))
    spoken = any(not isinstance(part, ThinkingPart) for part in parts)
    return parts if spoken else []


def _get_system_name(provider: str | None, dialect: Dialect) -> str | None:
    return dialect.system if provider == dialect.provider else provider


def _convert_tool_call(part: ToolCallPart, dialect: Dialect, taken: set[str]) -> ToolCall:
    native = _extract_native(part, dialect)
    written = repair_surrogates(part.args) if isinstance(part.args, str) else part.args
    return build_tool_call(part.tool_call_id, part.tool_name, written, native=native, taken=taken)


def _extract_native(part: TextPart | ThinkingPart | ToolCallPart, dialect: Dialect) -> dict[str, Any] | None:
    foreign = part.provider_name if part.provider_name != dialect.provider else None
    return _drop_empty(id=part.id, details=part.provider_details, provider=foreign)


def _drop_empty(**fields: Any) -> dict[str, Any] | None:
    return {key: to_jsonable_python(value, fallback=str) for key, value in fields.items() if value} or None
