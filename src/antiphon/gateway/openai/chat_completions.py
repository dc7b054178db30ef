"""`POST /v1/chat/completions`, as one response or a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from antiphon.access import Caller
from antiphon.engine.runs.run_queue import RunOptions
from antiphon.errors import InvalidInput
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.http.responses import (
    StreamSlots,
    build_sse_event,
    read_json,
)
from antiphon.gateway.http.run_stream import stream_run
from antiphon.gateway.openai import common as openai
from antiphon.gateway.openai.common import (
    ConversationMessage,
    MessageContent,
    RequestConversation,
    RequestSession,
)
from antiphon.gateway.state import GatewayState
from antiphon.messages import ImageBlock, TextBlock, ToolCall, UserMessage
from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView
from antiphon.runtimes import Sampling


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: openai.ImageDataUrl
    detail: str | None = None


class ChatContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["text", "refusal", "image_url"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None


class ChatFunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: ChatFunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    # Part of this API's answers, which clients send back unchanged.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ChatFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: ChatFunction
    type: Literal["function"] = "function"


class ChatFunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ChatToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: ChatFunctionChoice
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class ChatRequest(openai.AgentRequest, frozen=True):
    """Supported fields, fields without effect here, and fields that are rejected by name."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=10_000)]
    stream_options: StreamOptions | None = None
    max_tokens: openai.PositiveInt | None = None
    max_completion_tokens: openai.PositiveInt | None = None
    stop: openai.StopSequences | None = None
    seed: openai.Int64 | None = None
    presence_penalty: openai.Penalty | None = None
    frequency_penalty: openai.Penalty | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=openai.MAX_TOOLS_PER_REQUEST)] | None = None
    tool_choice: str | ChatToolChoice | None = None
    reasoning_effort: str | None = None
    # See `UNSUPPORTED_FIELDS`.
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    store: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None


UNSUPPORTED_FIELDS: dict[str, list[object]] = {
    "n": [1],
    "logprobs": [False],
    "top_logprobs": [0],
    "logit_bias": [{}],
    "store": [False],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "verbosity": ["medium"],
    "web_search_options": [],
    "functions": [[]],
    "function_call": [],
}
"""Unsupported fields, with the values that have no effect and are therefore accepted."""


async def post_chat_completions(
    gateway: GatewayState, slots: StreamSlots, identity: ClientIdentity, request: Request
) -> Response:
    config, caller = gateway.app.config, identity.to_caller()
    body = await read_json(
        request, ChatRequest, openai.get_max_body_bytes(config), hint=openai.format_fields_hint(ChatRequest)
    )
    openai.refuse_unsupported(body, UNSUPPORTED_FIELDS)
    openai.check_message_count(body.messages, "messages")
    session = openai.choose_session(config, request, openai.resolve_agent_id(config, body.model), body.user)
    message = msgspec.structs.replace(
        openai.build_message(
            request, session, _parse_conversation(body, session), None, _build_options(gateway, body)
        ),
        thinking=openai.parse_thinking_level(body.reasoning_effort, "reasoning_effort"),
    )
    events = _stream_chunks(gateway, caller, body, message) if body.stream else None
    return await openai.respond(
        gateway, slots, identity, request, message, events, partial(_format_completion, body)
    )


def _build_options(gateway: GatewayState, body: ChatRequest) -> RunOptions:
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise InvalidInput(
            "'max_tokens' and 'max_completion_tokens' are the same limit and differ.",
            "Send one of them.",
            field="max_tokens",
        )
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or None,
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        response_format=openai.parse_response_format(body.response_format, "response_format"),
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
    )
    requested = [
        openai.RequestedTool(where=f"tools[{index}]", **msgspec.structs.asdict(tool.function))
        for index, tool in enumerate(body.tools or [])
    ]
    choice = body.tool_choice
    chosen = f"={choice.function.name}" if isinstance(choice, ChatToolChoice) else choice
    return openai.build_run_options(sampling, openai.build_client_tools(gateway, requested), chosen)


def _parse_conversation(body: ChatRequest, session: RequestSession) -> RequestConversation:
    instructions: list[str] = []
    messages: list[ConversationMessage] = []
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        content = _parse_content(message, where)
        if message.name is not None and message.role != "tool":
            raise InvalidInput(
                f"{where}.name is not supported here.", "Put it into the text.", field=f"{where}.name"
            )
        if message.annotations:
            raise InvalidInput(
                f"{where}.annotations is not supported here.", "Leave it out.", field=f"{where}.annotations"
            )
        if message.role == "tool":
            messages.append(openai.build_tool_result(messages, message.tool_call_id, content, session, where))
        elif message.role == "assistant":
            calls = [
                openai.build_tool_call(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or []
            ]
            messages.append(
                openai.build_assistant_message(openai.join_text(content) or message.refusal or "", calls)
            )
        elif message.role == "user":
            messages.append(UserMessage(content=content, timestamp=0))
        else:
            instructions.append(openai.join_text(content))
    return RequestConversation(instructions, messages)


def _parse_content(message: ChatMessage, where: str) -> MessageContent:
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("refusal", "assistant")):
        if getattr(message, field) is not None and message.role != role:
            raise InvalidInput(
                f"{where}.{field} belongs to a message of the role {role!r}.",
                "Leave it out.",
                field=f"{where}.{field}",
            )
    if not isinstance(message.content, list):
        return message.content or ""
    blocks = [_parse_part(part, f"{where}.content[{index}]") for index, part in enumerate(message.content)]
    if message.role in {"system", "developer", "assistant"} and any(
        isinstance(b, ImageBlock) for b in blocks
    ):
        raise InvalidInput(
            f"An image at {where} is not accepted: only users and tools send images.",
            "Send it with a message of the user.",
            field=where,
        )
    return blocks


def _parse_part(part: ChatContentPart, where: str) -> TextBlock | ImageBlock:
    if part.type in {"text", "refusal"}:
        return TextBlock(text=part.text or part.refusal or "")
    if part.type == "image_url" and part.image_url is not None:
        openai.check_image_detail(part.image_url.detail, where)
        return openai.parse_image_url(part.image_url.url, where)
    raise openai.build_content_error(part.type, where)


def _format_completion(body: ChatRequest, view: RunView, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": view.reply or ("" if not calls else None)}
    message |= {"refusal": None} | (
        {"tool_calls": [_format_tool_call(call) for call in calls]} if calls else {}
    )
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": _get_finish_reason(view, calls),
    }
    return {
        "id": f"chatcmpl-{view.run_id}",
        "object": "chat.completion",
        "created": view.created_at // 1000,
        "model": body.model,
        "choices": [choice],
        "usage": _format_usage(view),
    }


def _format_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": openai.format_arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _get_finish_reason(view: RunView, calls: Sequence[ToolCall]) -> str:
    if calls:
        return "tool_calls"
    return "stop" if view.state == "ok" else "length"


def _format_usage(view: RunView) -> dict[str, int]:
    input, output = (view.usage.input, view.usage.output) if view.usage else (0, 0)
    return {"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output}


async def _stream_chunks(
    gateway: GatewayState, caller: Caller, body: ChatRequest, message: IncomingMessage
) -> AsyncGenerator[ServerSentEvent]:
    app = gateway.app
    usage = bool(body.stream_options and body.stream_options.include_usage)
    base: dict[str, Any] = {"created": app.clock.now() // 1000, "model": body.model}
    stream = stream_run(app.operations, caller, message, app.config.agents.defaults.timeout_seconds)
    async with aclosing(stream):
        async for item in stream:
            if isinstance(item, MessageReceipt):
                base = {"id": f"chatcmpl-{item.run_id}", "object": "chat.completion.chunk", **base}
                base |= {"usage": None} if usage else {}
                yield _format_chunk(base, {"role": "assistant", "content": ""})
            elif isinstance(item, str):
                yield _format_chunk(base, {"content": item})
            elif not openai.has_answer(item):
                yield build_sse_event(openai.build_run_error(item))
            else:
                calls = await openai.load_client_calls(gateway, caller, message, item)
                if calls:
                    pieces = [{"index": index, **_format_tool_call(call)} for index, call in enumerate(calls)]
                    yield _format_chunk(base, {"tool_calls": pieces})
                yield _format_chunk(base, {}, _get_finish_reason(item, calls))
                if usage:
                    yield build_sse_event({**base, "choices": [], "usage": _format_usage(item)})
    yield ServerSentEvent("[DONE]", sep="\n")


def _format_chunk(base: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> ServerSentEvent:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return build_sse_event({**base, "choices": [choice]})
