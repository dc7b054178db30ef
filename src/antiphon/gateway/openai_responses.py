"""`POST /v1/responses`, at once or as a stream of events. A response is a run: `resp_<runId>`."""

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
from antiphon.errors import InvalidInput, NotFound
from antiphon.gateway import openai_api as openai
from antiphon.gateway.auth import Identity
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.openai_api import Content, Place, Said
from antiphon.gateway.replies import EventStream, Slots, json_reply, read_json, sse
from antiphon.gateway.telling import tell
from antiphon.messages import Image, Text
from antiphon.operations import Message
from antiphon.views import Accepted, RunView

PREFIX = "resp_"


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    image_url: str | None = None


class Item(msgspec.Struct, frozen=True):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at. Everything else that a client may send (sampling, its own tools) has no effect here."""

    model: str
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


async def post_responses(gateway: Gateway, slots: Slots, identity: Identity, request: Request) -> Response:
    config, caller = gateway.house.config, identity.caller()
    wanted = await read_json(request, ResponseRequest, openai.body_limit(config))
    agent_id = openai.agent_named(config, wanted.model)
    place = openai.place_for(config, request, agent_id, wanted.user)
    if wanted.previous_response_id is not None:
        place = await _place_of(gateway, caller, wanted.previous_response_id)
    message = openai.message_of(request, place, _said(wanted.input), wanted.instructions)
    if wanted.stream:
        events = _events(gateway, caller, wanted, message)
        still_known = partial(gateway.guard.still_knows, identity)
        return await EventStream.opened(events, gateway.closing, slots, still_known)
    with slots.take():  # before the run is accepted: without a place it could not be waited for
        view = await openai.run_to_end(gateway, caller, request, message)
    if not openai.answered(view):
        return openai.run_error_reply(view)
    return json_reply(Answer(wanted, view.run_id, view.created_at).ended(view, view.reply or ""))


async def _place_of(gateway: Gateway, caller: Caller, response_id: str) -> Place:
    missing = NotFound(
        f"There is no response {response_id[:240]!r}.",
        "Pass the id of one that was given here.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
    if not response_id.startswith(PREFIX):
        raise missing
    try:
        run = await gateway.house.operations.run(caller, response_id.removeprefix(PREFIX))
    except NotFound:
        raise missing from None
    return Place(run.session_key, fresh=False)


def _said(given: str | list[Item]) -> list[Said]:
    if isinstance(given, str):
        return [Said("user", given)]
    return [
        Said(item.role or "user", _content(item, f"input[{at}]"))
        for at, item in enumerate(given)
        if item.type != "reasoning"  # what a model thought before is its own affair
    ]


def _content(item: Item, where: str) -> Content:
    if item.type != "message":
        raise InvalidInput(
            f"An item of the type {item.type[:40]!r} at {where} is not taken.", "Send messages.", field=where
        )
    if not isinstance(item.content, list):
        return item.content or ""
    return [_block(part, f"{where}.content[{at}]") for at, part in enumerate(item.content)]


def _block(part: Part, where: str) -> Text | Image:
    if part.type in {"input_text", "output_text", "text", "refusal"}:
        return Text(text=part.text or "")
    if part.type == "input_image" and part.image_url is not None:
        return openai.image(part.image_url, where)
    raise InvalidInput(
        f"Content of the type {part.type[:40]!r} at {where} is not taken.",
        "Send text or images.",
        field=where,
    )


class Answer:
    """The response object in each of its states, and its parts."""

    def __init__(self, wanted: ResponseRequest, run_id: str, created_at: int) -> None:
        self._wanted = wanted
        self._run_id = run_id
        self._created = created_at // 1000

    @property
    def item_id(self) -> str:
        return f"msg_{self._run_id}"

    def begun(self) -> dict[str, Any]:
        return self._state("in_progress", [])

    def ended(self, view: RunView, text: str) -> dict[str, Any]:
        read, wrote = (view.usage.input, view.usage.output) if view.usage else (0, 0)
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": wrote,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + wrote,
        }
        if not openai.answered(view):
            error = openai.run_error(view)["error"]
            failure = {"code": error["code"] or "server_error", "message": error["message"]}
            return {**self._state("failed", []), "error": failure, "usage": usage}
        cut = view.state == "incomplete"
        output = [self.item(text, "incomplete" if cut else "completed")]
        body = {**self._state("incomplete" if cut else "completed", output), "usage": usage}
        return {**body, "incomplete_details": {"reason": "max_output_tokens"}} if cut else body

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _state(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{PREFIX}{self._run_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._wanted.instructions,
            "metadata": self._wanted.metadata or {},
            "model": self._wanted.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": self._wanted.previous_response_id,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }


class Numbered:
    """Events with their numbers."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **data: object) -> ServerSentEvent:
        event = sse({"type": kind, "sequence_number": self._next, **data}, event=kind)
        self._next += 1
        return event


async def _events(
    gateway: Gateway, caller: Caller, wanted: ResponseRequest, message: Message
) -> AsyncGenerator[ServerSentEvent]:
    house, event = gateway.house, Numbered()
    text = ""
    telling = tell(house.operations, caller, message, house.config.agents.defaults.timeout_seconds)
    async with aclosing(telling):
        accepted = await anext(telling)
        assert isinstance(accepted, Accepted)
        answer = Answer(wanted, accepted.run_id, house.clock.now())
        at: dict[str, Any] = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
        yield event("response.created", response=answer.begun())
        yield event("response.in_progress", response=answer.begun())
        async for told in telling:
            if isinstance(told, str):
                if not text:
                    yield event(
                        "response.output_item.added", output_index=0, item=answer.item(None, "in_progress")
                    )
                    yield event("response.content_part.added", **at, part=answer.part(""))
                text += told
                yield event("response.output_text.delta", **at, delta=told, logprobs=[])
            elif isinstance(told, RunView):
                for last in _last(event, answer, at, told, text):
                    yield last


def _last(
    event: Numbered, answer: Answer, at: dict[str, Any], view: RunView, text: str
) -> list[ServerSentEvent]:
    response = answer.ended(view, text)
    done: list[ServerSentEvent] = []
    if text:
        status = "completed" if response["status"] == "completed" else "incomplete"
        done = [
            event("response.output_text.done", **at, text=text, logprobs=[]),
            event("response.content_part.done", **at, part=answer.part(text)),
            event("response.output_item.done", output_index=0, item=answer.item(text, status)),
        ]
    return [*done, event(f"response.{response['status']}", response=response)]
