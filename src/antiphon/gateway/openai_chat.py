"""`POST /v1/chat/completions`, at once or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from antiphon.access import Caller
from antiphon.errors import InvalidInput
from antiphon.gateway import openai_api as openai
from antiphon.gateway.auth import Identity
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.openai_api import Content, Said
from antiphon.gateway.replies import EventStream, Slots, json_reply, read_json, sse
from antiphon.gateway.telling import tell
from antiphon.messages import Image, Text
from antiphon.operations import Message
from antiphon.views import Accepted, RunView


class ImageUrl(msgspec.Struct, frozen=True):
    url: str


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at. Everything else that a client may send (sampling, its own tools) has no effect here."""

    model: str
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=10_000)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


async def post_chat(gateway: Gateway, slots: Slots, identity: Identity, request: Request) -> Response:
    config, caller = gateway.house.config, identity.caller()
    wanted = await read_json(request, ChatRequest, openai.body_limit(config))
    place = openai.place_for(config, request, openai.agent_named(config, wanted.model), wanted.user)
    said = [Said(one.role, _content(one, f"messages[{at}]")) for at, one in enumerate(wanted.messages)]
    message = openai.message_of(request, place, said, None)
    if wanted.stream:
        events = _chunks(gateway, caller, wanted, message)
        still_known = partial(gateway.guard.still_knows, identity)
        return await EventStream.opened(events, gateway.closing, slots, still_known)
    with slots.take():  # before the run is accepted: without a place it could not be waited for
        view = await openai.run_to_end(gateway, caller, request, message)
    return json_reply(_completion(wanted, view)) if openai.answered(view) else openai.run_error_reply(view)


def _content(message: ChatMessage, where: str) -> Content:
    if not isinstance(message.content, list):
        return message.content or ""
    return [_block(part, f"{where}.content[{at}]") for at, part in enumerate(message.content)]


def _block(part: Part, where: str) -> Text | Image:
    if part.type in {"text", "refusal"}:
        return Text(text=part.text or "")
    if part.type == "image_url" and part.image_url is not None:
        return openai.image(part.image_url.url, where)
    raise InvalidInput(
        f"Content of the type {part.type[:40]!r} at {where} is not taken.",
        "Send text or images.",
        field=where,
    )


def _completion(wanted: ChatRequest, view: RunView) -> dict[str, Any]:
    message = {"role": "assistant", "content": view.reply, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(view)}
    return {
        "id": f"chatcmpl-{view.run_id}",
        "object": "chat.completion",
        "created": view.created_at // 1000,
        "model": wanted.model,
        "choices": [choice],
        "usage": _usage(view),
    }


def _finish(view: RunView) -> str:
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
                yield _chunk(base, {}, _finish(told))
                if usage:
                    yield sse({**base, "choices": [], "usage": _usage(told)})
    yield ServerSentEvent("[DONE]", sep="\n")


def _chunk(base: dict[str, Any], delta: dict[str, str], finish: str | None = None) -> ServerSentEvent:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return sse({**base, "choices": [choice]})
