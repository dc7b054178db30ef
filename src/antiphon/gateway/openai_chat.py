"""`POST /v1/chat/completions`, at once or as a stream of chunks."""

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
from antiphon.engine.run_options import RunOptions
from antiphon.errors import InvalidInput
from antiphon.gateway import openai_api as openai
from antiphon.gateway.auth import Identity
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.openai_api import Content, Conversation, Place, Said
from antiphon.gateway.replies import EventStream, Slots, json_reply, read_json, sse
from antiphon.gateway.telling import tell
from antiphon.messages import Image, Text, ToolCall, User
from antiphon.operations import Message
from antiphon.runtimes import Sampling
from antiphon.views import Accepted, RunView


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str
    detail: str | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    # An answer of this API has these, and clients send it back as it is.
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"] = "function"


class ChosenName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: ChosenName
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
    top_p: openai.Share | None = None
    max_tokens: openai.Count | None = None
    max_completion_tokens: openai.Count | None = None
    stop: openai.Stop | None = None
    seed: openai.Whole | None = None
    presence_penalty: openai.Penalty | None = None
    frequency_penalty: openai.Penalty | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[ChatTool], msgspec.Meta(max_length=openai.MAX_TOOLS_PER_REQUEST)] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Labels and hints for OpenAI's own service, which change no answer.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # See `UNSUPPORTED`.
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


UNSUPPORTED: dict[str, list[object]] = {
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
"""Fields that are taken only with a value that asks for nothing."""


async def post_chat(gateway: Gateway, slots: Slots, identity: Identity, request: Request) -> Response:
    config, caller = gateway.house.config, identity.caller()
    wanted = await read_json(
        request, ChatRequest, openai.body_limit(config), hint=openai.fields_hint(ChatRequest)
    )
    openai.refuse_unsupported(wanted, UNSUPPORTED)
    openai.check_count(wanted.messages, "messages")
    place = openai.place_for(config, request, openai.agent_named(config, wanted.model), wanted.user)
    message = msgspec.structs.replace(
        openai.message_of(request, place, _conversation(wanted, place), None, _options(gateway, wanted)),
        thinking=openai.thinking_level(wanted.reasoning_effort, "reasoning_effort"),
    )
    if wanted.stream:
        events = _chunks(gateway, caller, wanted, message)
        still_known = partial(gateway.guard.still_knows, identity)
        return await EventStream.opened(events, gateway.closing, slots, still_known)
    with slots.take():  # before the run is accepted: without a place it could not be waited for
        view = await openai.run_to_end(gateway, caller, request, message)
    if not openai.answered(view):
        return openai.run_error_reply(view)
    return json_reply(_completion(wanted, view, await openai.calls_of(gateway, caller, message, view)))


def _options(gateway: Gateway, wanted: ChatRequest) -> RunOptions:
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
        response_format=openai.response_format(wanted.response_format, "response_format"),
        parallel_tool_calls=wanted.parallel_tool_calls if wanted.tools else None,
    )
    wishes = [
        openai.ToolWish(where=f"tools[{at}]", **msgspec.structs.asdict(tool.function))
        for at, tool in enumerate(wanted.tools or [])
    ]
    choice = wanted.tool_choice
    chosen = f"={choice.function.name}" if isinstance(choice, ChosenTool) else choice
    return openai.run_options(sampling, openai.client_tools(gateway, wishes), chosen)


def _conversation(wanted: ChatRequest, place: Place) -> Conversation:
    rules: list[str] = []
    messages: list[Said] = []
    for at, one in enumerate(wanted.messages):
        where = f"messages[{at}]"
        content = _content(one, where)
        if one.name is not None and one.role != "tool":
            raise InvalidInput(
                f"{where}.name is not supported here.", "Put it into the text.", field=f"{where}.name"
            )
        if one.annotations:
            raise InvalidInput(
                f"{where}.annotations is not supported here.", "Leave it out.", field=f"{where}.annotations"
            )
        if one.role == "tool":
            messages.append(openai.tool_result(messages, one.tool_call_id, content, place, where))
        elif one.role == "assistant":
            calls = [
                openai.tool_call(it.id, it.function.name, it.function.arguments)
                for it in one.tool_calls or []
            ]
            messages.append(openai.assistant(openai.text_of(content) or one.refusal or "", calls))
        elif one.role == "user":
            messages.append(User(content=content, timestamp=0))
        else:
            rules.append(openai.text_of(content))
    return Conversation(rules, messages)


def _content(message: ChatMessage, where: str) -> Content:
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("refusal", "assistant")):
        if getattr(message, field) is not None and message.role != role:
            raise InvalidInput(
                f"{where}.{field} belongs to a message of the role {role!r}.",
                "Leave it out.",
                field=f"{where}.{field}",
            )
    if not isinstance(message.content, list):
        return message.content or ""
    blocks = [_block(part, f"{where}.content[{at}]") for at, part in enumerate(message.content)]
    if message.role in {"system", "developer", "assistant"} and any(isinstance(b, Image) for b in blocks):
        raise InvalidInput(
            f"An image at {where} is not taken: only users and tools send them.",
            "Send it with a message of the user.",
            field=where,
        )
    return blocks


def _block(part: Part, where: str) -> Text | Image:
    if part.type in {"text", "refusal"}:
        return Text(text=part.text or part.refusal or "")
    if part.type == "image_url" and part.image_url is not None:
        openai.check_detail(part.image_url.detail, where)
        return openai.image(part.image_url.url, where)
    raise InvalidInput(
        f"Content of the type {part.type[:40]!r} at {where} is not taken.",
        "Send text or images.",
        field=where,
    )


def _completion(wanted: ChatRequest, view: RunView, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": view.reply or ("" if not calls else None)}
    message |= {"refusal": None} | ({"tool_calls": [_called(call) for call in calls]} if calls else {})
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(view, calls)}
    return {
        "id": f"chatcmpl-{view.run_id}",
        "object": "chat.completion",
        "created": view.created_at // 1000,
        "model": wanted.model,
        "choices": [choice],
        "usage": _usage(view),
    }


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": openai.written_arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def _finish(view: RunView, calls: Sequence[ToolCall]) -> str:
    if calls:
        return "tool_calls"
    return "stop" if view.state == "ok" else "length"


def _usage(view: RunView) -> dict[str, int]:
    read, wrote = (view.usage.input, view.usage.output) if view.usage else (0, 0)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


async def _chunks(
    gateway: Gateway, caller: Caller, wanted: ChatRequest, message: Message
) -> AsyncGenerator[ServerSentEvent]:
    house = gateway.house
    usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
    base: dict[str, Any] = {"created": house.clock.now() // 1000, "model": wanted.model}
    telling = tell(house.operations, caller, message, house.config.agents.defaults.timeout_seconds)
    async with aclosing(telling):
        async for told in telling:
            if isinstance(told, Accepted):
                base = {"id": f"chatcmpl-{told.run_id}", "object": "chat.completion.chunk", **base}
                base |= {"usage": None} if usage else {}
                yield _chunk(base, {"role": "assistant", "content": ""})
            elif isinstance(told, str):
                yield _chunk(base, {"content": told})
            elif not openai.answered(told):
                yield sse(openai.run_error(told))
            else:
                calls = await openai.calls_of(gateway, caller, message, told)
                if calls:
                    pieces = [{"index": at, **_called(call)} for at, call in enumerate(calls)]
                    yield _chunk(base, {"tool_calls": pieces})
                yield _chunk(base, {}, _finish(told, calls))
                if usage:
                    yield sse({**base, "choices": [], "usage": _usage(told)})
    yield ServerSentEvent("[DONE]", sep="\n")


def _chunk(base: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> ServerSentEvent:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return sse({**base, "choices": [choice]})
