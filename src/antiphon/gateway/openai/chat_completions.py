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
from antiphon.engine.runs.run_options import RunOptions
from antiphon.errors import InvalidInput
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.http.responses import (
    EventStream,
    StreamSlots,
    build_json_response,
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
from antiphon.operations import IncomingMessage
from antiphon.runtimes import Sampling
from antiphon.views import MessageReceipt, RunView


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None


class ChatContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
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


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is honoured, what asks for nothing here, and what is refused by name."""

    model: str
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=10_000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    temperature: openai.Temperature | None = None
    top_p: openai.Probability | None = None
    max_tokens: openai.PositiveInt | None = None
    max_completion_tokens: openai.PositiveInt | None = None
    stop: openai.StopSequences | None = None
    seed: openai.Int64 | None = None
    presence_penalty: openai.Penalty | None = None
    frequency_penalty: openai.Penalty | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=openai.MAX_TOOLS_PER_REQUEST)] | None = None
    tool_choice: str | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Labels and hints for OpenAI's own service; they do not affect answers.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # See `UNSUPPORTED_FIELDS`.
    n: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    logit_bias: Any = None
    store: Any = None
    service_tier: Any = None
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
    wanted = await read_json(
        request, ChatRequest, openai.get_max_body_bytes(config), hint=openai.format_fields_hint(ChatRequest)
    )
    openai.refuse_unsupported(wanted, UNSUPPORTED_FIELDS)
    openai.check_message_count(wanted.messages, "messages")
    place = openai.choose_session(config, request, openai.resolve_agent_id(config, wanted.model), wanted.user)
    message = msgspec.structs.replace(
        openai.build_message(
            request, place, _parse_conversation(wanted, place), None, _build_options(gateway, wanted)
        ),
        thinking=openai.parse_thinking_level(wanted.reasoning_effort, "reasoning_effort"),
    )
    if wanted.stream:
        events = _stream_chunks(gateway, caller, wanted, message)
        still_known = partial(gateway.authenticator.is_still_valid, identity)
        return await EventStream.open(events, gateway.closing, slots, still_known)
    with slots.hold_slot():  # before the run is accepted, which could not be waited for without a slot
        view = await openai.run_to_end(gateway, caller, request, message)
    if not openai.has_answer(view):
        return openai.build_run_error_response(view)
    return build_json_response(
        _format_completion(wanted, view, await openai.load_client_calls(gateway, caller, message, view))
    )


def _build_options(gateway: GatewayState, wanted: ChatRequest) -> RunOptions:
    if (
        wanted.max_tokens
        and wanted.max_completion_tokens
        and wanted.max_tokens != wanted.max_completion_tokens
    ):
        raise InvalidInput(
            "'max_tokens' and 'max_completion_tokens' are the same limit and differ.",
            "Send one of them.",
            field="max_tokens",
        )
    sampling = Sampling(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        max_tokens=wanted.max_completion_tokens or wanted.max_tokens,
        stop=[wanted.stop] if isinstance(wanted.stop, str) else wanted.stop or None,
        seed=wanted.seed,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        response_format=openai.parse_response_format(wanted.response_format, "response_format"),
        parallel_tool_calls=wanted.parallel_tool_calls if wanted.tools else None,
    )
    wishes = [
        openai.RequestedTool(where=f"tools[{at}]", **msgspec.structs.asdict(tool.function))
        for at, tool in enumerate(wanted.tools or [])
    ]
    choice = wanted.tool_choice
    chosen = f"={choice.function.name}" if isinstance(choice, ChatToolChoice) else choice
    return openai.build_run_options(sampling, openai.build_client_tools(gateway, wishes), chosen)


def _parse_conversation(wanted: ChatRequest, place: RequestSession) -> RequestConversation:
    rules: list[str] = []
    messages: list[ConversationMessage] = []
    for at, one in enumerate(wanted.messages):
        where = f"messages[{at}]"
        content = _parse_content(one, where)
        if one.name is not None and one.role != "tool":
            raise InvalidInput(
                f"{where}.name is not supported here.", "Put it into the text.", field=f"{where}.name"
            )
        if one.annotations:
            raise InvalidInput(
                f"{where}.annotations is not supported here.", "Leave it out.", field=f"{where}.annotations"
            )
        if one.role == "tool":
            messages.append(openai.build_tool_result(messages, one.tool_call_id, content, place, where))
        elif one.role == "assistant":
            calls = [
                openai.build_tool_call(it.id, it.function.name, it.function.arguments)
                for it in one.tool_calls or []
            ]
            messages.append(
                openai.build_assistant_message(openai.join_text(content) or one.refusal or "", calls)
            )
        elif one.role == "user":
            messages.append(UserMessage(content=content, timestamp=0))
        else:
            rules.append(openai.join_text(content))
    return RequestConversation(rules, messages)


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
    blocks = [_parse_part(part, f"{where}.content[{at}]") for at, part in enumerate(message.content)]
    if message.role in {"system", "developer", "assistant"} and any(
        isinstance(b, ImageBlock) for b in blocks
    ):
        raise InvalidInput(
            f"An image at {where} is not taken: only users and tools send them.",
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
    raise InvalidInput(
        f"Content of the type {part.type[:40]!r} at {where} is not taken.",
        "Send text or images.",
        field=where,
    )


def _format_completion(wanted: ChatRequest, view: RunView, calls: Sequence[ToolCall]) -> dict[str, Any]:
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
        "model": wanted.model,
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
    read, wrote = (view.usage.input, view.usage.output) if view.usage else (0, 0)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


async def _stream_chunks(
    gateway: GatewayState, caller: Caller, wanted: ChatRequest, message: IncomingMessage
) -> AsyncGenerator[ServerSentEvent]:
    app = gateway.app
    usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
    base: dict[str, Any] = {"created": app.clock.now() // 1000, "model": wanted.model}
    telling = stream_run(app.operations, caller, message, app.config.agents.defaults.timeout_seconds)
    async with aclosing(telling):
        async for told in telling:
            if isinstance(told, MessageReceipt):
                base = {"id": f"chatcmpl-{told.run_id}", "object": "chat.completion.chunk", **base}
                base |= {"usage": None} if usage else {}
                yield _format_chunk(base, {"role": "assistant", "content": ""})
            elif isinstance(told, str):
                yield _format_chunk(base, {"content": told})
            elif not openai.has_answer(told):
                yield build_sse_event(openai.build_run_error(told))
            else:
                calls = await openai.load_client_calls(gateway, caller, message, told)
                if calls:
                    pieces = [{"index": at, **_format_tool_call(call)} for at, call in enumerate(calls)]
                    yield _format_chunk(base, {"tool_calls": pieces})
                yield _format_chunk(base, {}, _get_finish_reason(told, calls))
                if usage:
                    yield build_sse_event({**base, "choices": [], "usage": _format_usage(told)})
    yield ServerSentEvent("[DONE]", sep="\n")


def _format_chunk(base: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> ServerSentEvent:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return build_sse_event({**base, "choices": [choice]})
