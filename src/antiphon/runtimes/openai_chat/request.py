"""Builds the body of a chat completions request from a prompt.

`native` is used as in `pydantic_ai.transcript`: `id` is the field that thinking came in, `details` is opaque data
to send back. Nothing is sent from here.
"""

from __future__ import annotations

import base64
import binascii
import html
from collections.abc import Iterable, Sequence
from hashlib import sha1
from itertools import chain, groupby
from typing import Any, cast

import msgspec

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
from antiphon.runtimes import Prompt, Sampling, ToolSpec
from antiphon.runtimes.model import INVALID_ARGUMENTS_KEY, ModelSpec, get_max_answer_tokens
from antiphon.runtimes.openai_chat.answer import THINKING_FIELDS, THINKING_TAGS
from antiphon.runtimes.text import (
    CONTINUE_PROMPT,
    EMPTY_MESSAGE_TEXT,
    OPENING_PROMPT,
    SUMMARY_PREFIX,
    UNREADABLE_IMAGE_TEXT,
    format_result,
    is_json_object,
)
from antiphon.runtimes.tool_calls import make_sendable_id, parse_arguments

_Json = dict[str, Any]


def build_request_body(spec: ModelSpec, prompt: Prompt, effort: str | None) -> bytes:
    system = [{"role": "system", "content": prompt.instructions}] if prompt.instructions else []
    body: _Json = {
        "model": spec.model,
        "messages": [*system, *_encode_conversation(prompt.messages, spec.provider)],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.tools:
        body["tools"] = [_encode_tool(tool) for tool in prompt.tools]
        body["tool_choice"] = "auto"
    if prompt.sampling is not None:
        body |= _encode_sampling(prompt.sampling)
    if (most := get_max_answer_tokens(spec, prompt)) is not None:
        # Every compatible server reads the older name.
        body["max_completion_tokens" if spec.provider == "openai" else "max_tokens"] = most
    if effort is not None:
        body["reasoning_effort"] = effort
    return msgspec.json.encode(body)


def _encode_sampling(chosen: Sampling) -> _Json:
    """The sampling settings, whose names are the same in this API."""
    sent: _Json = {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "stop": chosen.stop,
        "seed": chosen.seed,
        "presence_penalty": chosen.presence_penalty,
        "frequency_penalty": chosen.frequency_penalty,
        "response_format": chosen.response_format,
        "parallel_tool_calls": chosen.parallel_tool_calls,
    }
    if chosen.tool_name is not None:
        sent["tool_choice"] = {"type": "function", "function": {"name": chosen.tool_name}}
    elif chosen.tool_required:
        sent["tool_choice"] = "required"
    return {name: value for name, value in sent.items() if value is not None}


def _encode_tool(tool: ToolSpec) -> _Json:
    """A tool definition with its schema unchanged; strict mode would have the provider rewrite it."""
    described: _Json = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    described |= {"strict": True} if tool.strict else {}
    return {"type": "function", "function": described}


def _encode_conversation(messages: Iterable[Message], provider: str) -> list[_Json]:
    """Messages that strict providers accept: the user comes first and last, turns alternate, no text is blank."""
    sendable = (
        message for message in messages if not isinstance(message, AssistantMessage) or _has_spoken(message)
    )
    sent: list[_Json] = []
    for answered, group in groupby(sendable, key=lambda message: isinstance(message, AssistantMessage)):
        turn = list(group)
        if answered:
            sent.append(_encode_answers(cast(list[AssistantMessage], turn), provider))
        else:
            sent.extend(_encode_requests(turn))
    if not sent or sent[0]["role"] == "assistant":
        sent.insert(0, {"role": "user", "content": OPENING_PROMPT})
    if sent[-1]["role"] == "assistant":
        sent.append({"role": "user", "content": CONTINUE_PROMPT})
    _fill_thinking(sent)
    return sent


def _has_spoken(message: AssistantMessage) -> bool:
    """False for a message that failed or was stopped before it had any content."""
    return any(
        isinstance(block, ToolCall) or (isinstance(block, TextBlock) and block.text.strip())
        for block in message.content
    )


def _encode_answers(messages: Sequence[AssistantMessage], provider: str) -> _Json:
    texts: list[str] = []
    thoughts: dict[str, list[str]] = {}
    calls: list[_Json] = []
    for message in messages:
        for block in message.content:
            own = ((block.native or {}).get("provider") or message.provider) == provider
            match block:
                case TextBlock():
                    texts.extend([block.text] if block.text.strip() else [])
                case ToolCall():
                    calls.append(_encode_call(block, own))
                case ThinkingBlock():
                    # Useless to another provider, and incomplete after an error or abort.
                    if own and message.stop_reason not in ("error", "aborted"):
                        _replay_thinking(block, texts, thoughts)
    sent: _Json = {"role": "assistant"} | {name: "\n\n".join(thought) for name, thought in thoughts.items()}
    sent["content"] = "\n\n".join(texts) if texts else None
    return sent | ({"tool_calls": calls} if calls else {})


def _replay_thinking(block: ThinkingBlock, texts: list[str], thoughts: dict[str, list[str]]) -> None:
    """Sends thinking back the way it came: in its field, or between tags in the text."""
    origin = (block.native or {}).get("id")
    if origin in THINKING_FIELDS:
        thoughts.setdefault(origin, []).append(block.thinking)
    elif origin in (None, "content"):
        texts.append("\n".join((THINKING_TAGS[0], block.thinking, THINKING_TAGS[1])))


def _encode_call(call: ToolCall, own: bool) -> _Json:
    native = call.native or {}
    arguments = msgspec.json.encode(
        _encode_arguments(native.get(INVALID_ARGUMENTS_KEY, call.arguments))
    ).decode()
    function = {"name": call.name, "arguments": arguments}
    sent: _Json = {"id": _make_chat_call_id(call.id), "type": "function", "function": function}
    details: _Json = native.get("details") or {}
    extra = details.get("extra_content")
    return sent | ({"extra_content": extra} if extra and own else {})


def _make_chat_call_id(call_id: str) -> str:
    return make_sendable_id(call_id, "openai-completions")


def _encode_arguments(written: str | _Json) -> _Json:
    """The arguments as an object, since strict providers accept nothing else."""
    if not isinstance(written, str):
        return written
    read = parse_arguments(written)
    return {"INVALID_JSON": written} if read is None else read


def _encode_requests(messages: Iterable[Message]) -> list[_Json]:
    """Tool results first, as providers demand, then a single prompt: some chat templates refuse two in a row."""
    sent: list[_Json] = []
    prompts: list[str | list[_Json]] = []
    shown: list[_Json] = []
    for message in messages:
        match message:
            case ToolResult():
                sent.append(_encode_result(message, shown))
            case CompactionEntry():
                prompts.append(SUMMARY_PREFIX + message.summary)
            case UserMessage():
                prompts.append(_encode_user_content(message.content))
            case AssistantMessage():  # does not occur within a turn
                pass
    if prompts:
        sent.append({"role": "user", "content": _join_prompts(prompts)})
    if shown:
        sent.append({"role": "user", "content": shown})
    return sent


def _join_prompts(prompts: list[str | list[_Json]]) -> str | list[_Json]:
    texts = [content for content in prompts if isinstance(content, str)]
    if len(texts) == len(prompts):
        return "\n\n".join(texts)
    return list(chain.from_iterable([_encode_text(it)] if isinstance(it, str) else it for it in prompts))


def _encode_user_content(content: str | list[TextBlock | ImageBlock]) -> str | list[_Json]:
    if isinstance(content, str):
        return content if content.strip() else EMPTY_MESSAGE_TEXT
    items = [
        _encode_block(block) for block in content if not isinstance(block, TextBlock) or block.text.strip()
    ]
    if all(item["type"] == "text" for item in items):
        return "\n\n".join(item["text"] for item in items) or EMPTY_MESSAGE_TEXT
    return items


def _encode_block(block: TextBlock | ImageBlock) -> _Json:
    if isinstance(block, TextBlock):
        return _encode_text(block.text)
    data = _decode_image(block)
    return _encode_text(UNREADABLE_IMAGE_TEXT) if data is None else _encode_image(data, block.mime_type)


def _encode_text(text: str) -> _Json:
    return {"type": "text", "text": text}


def _encode_image(data: bytes, mime_type: str) -> _Json:
    url = f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _decode_image(image: ImageBlock) -> bytes | None:
    try:
        return base64.b64decode(image.data) if image.mime_type.startswith("image/") else None
    except binascii.Error:
        return None


def _encode_result(result: ToolResult, shown: list[_Json]) -> _Json:
    """A tool result as text; its images are named there and added to `shown` for a user message that follows."""
    parts: list[str] = [format_result(result)]
    names: list[str] = []
    for image in (block for block in result.content if isinstance(block, ImageBlock)):
        data = _decode_image(image)
        if data is None:
            parts.append(UNREADABLE_IMAGE_TEXT)
            continue
        name = sha1(data, usedforsecurity=False).hexdigest()[:6]
        parts.append(f"See file {name}.")
        names.append(parts[-1])
        shown.extend(
            (
                _encode_text(_format_result_tag(result, name)),
                _encode_image(data, image.mime_type),
                _encode_text("</tool_result>"),
            )
        )
    content = _join_result_parts(parts, names, failed=result.is_error)
    return {"role": "tool", "tool_call_id": _make_chat_call_id(result.tool_call_id), "content": content}


def _format_result_tag(result: ToolResult, name: str) -> str:
    """Marks the following content as a tool's output, so that it does not pass for the user's."""
    marks = {
        "tool_name": result.tool_name,
        "tool_call_id": _make_chat_call_id(result.tool_call_id),
        "file_id": name,
    }
    written = (f'{key}="{html.escape(value)}"' for key, value in marks.items())
    return f"<tool_result {' '.join(written)}>"


def _join_result_parts(parts: list[str], names: list[str], *, failed: bool) -> str:
    """Plain text for plain text, JSON for mixed parts, and `{"error": …}` for a failure that is not a JSON object."""
    if not failed or (len(parts) == 1 and is_json_object(parts[0])):
        return parts[0] if len(parts) == 1 else _encode_json(parts)
    words = [part for part in parts if part not in names] if names else parts
    error = {"error": words[0] if len(words) == 1 else _encode_json(words)}
    return _encode_json([error, *names] if names else error)


def _encode_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _fill_thinking(sent: list[_Json]) -> None:
    """Adds an empty thinking field to calls since the last user message: servers that use one require it."""
    used = {name for message in sent for name in THINKING_FIELDS if name in message}
    if len(used) != 1:
        return
    for message in reversed(sent):
        if message["role"] == "user":
            return
        if message.get("tool_calls"):
            message.setdefault(next(iter(used)), "")
