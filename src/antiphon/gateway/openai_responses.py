"""`POST /v1/responses`, at once or as a stream of events. A response is a run: `resp_<runId>`."""

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
from antiphon.errors import InvalidInput, NotFound
from antiphon.gateway import openai_api as openai
from antiphon.gateway.auth import Identity
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.openai_api import Content, Conversation, Place, Said
from antiphon.gateway.replies import EventStream, Slots, json_reply, read_json, sse
from antiphon.gateway.telling import tell
from antiphon.messages import Assistant, Image, Text, ToolCall, User
from antiphon.operations import Message
from antiphon.runtimes import Sampling
from antiphon.views import Accepted, RunView

PREFIX = "resp_"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    # An answer of this API has these, and clients send it back as it is.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a call of a client-side tool, or its result. Ids and states of items are the client's own affair."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: None = None


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is honoured, what asks for nothing here, and what is refused by name."""

    model: str
    input: str | Annotated[list[Item], msgspec.Meta(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    user: str | None = None
    temperature: openai.Temperature | None = None
    top_p: openai.Share | None = None
    max_output_tokens: openai.Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=openai.MAX_TOOLS_PER_REQUEST)] | None = None
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    # Labels and hints for OpenAI's own service, which change no answer; a response is always kept here.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # See `UNSUPPORTED`.
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    service_tier: Any = None
    stream_options: Any = None
    top_logprobs: Any = None
    truncation: Any = None


UNSUPPORTED: dict[str, list[object]] = {
    "background": [False],
    "conversation": [],
    "include": [[], ["reasoning.encrypted_content"]],
    "max_tool_calls": [],
    "prompt": [],
    "service_tier": ["auto", "default"],
    "stream_options": [{"include_obfuscation": False}],
    "top_logprobs": [0],
    "truncation": ["auto", "disabled"],
}
"""Fields that are taken only with a value that asks for nothing."""


async def post_responses(gateway: Gateway, slots: Slots, identity: Identity, request: Request) -> Response:
    config, caller = gateway.house.config, identity.caller()
    wanted = await read_json(
        request, ResponseRequest, openai.body_limit(config), hint=openai.fields_hint(ResponseRequest)
    )
    openai.refuse_unsupported(wanted, UNSUPPORTED)
    if not isinstance(wanted.input, str):
        openai.check_count(wanted.input, "input")
    agent_id = openai.agent_named(config, wanted.model)
    place = openai.place_for(config, request, agent_id, wanted.user)
    if wanted.previous_response_id is not None:
        place = await _place_of(gateway, caller, wanted.previous_response_id)
    said, options = _conversation(wanted.input, place), _options(gateway, wanted)
    message = msgspec.structs.replace(
        openai.message_of(request, place, said, wanted.instructions, options),
        thinking=openai.thinking_level(
            wanted.reasoning.effort if wanted.reasoning else None, "reasoning.effort"
        ),
    )
    if wanted.stream:
        events = _events(gateway, caller, wanted, message)
        still_known = partial(gateway.guard.still_knows, identity)
        return await EventStream.opened(events, gateway.closing, slots, still_known)
    with slots.take():  # before the run is accepted: without a place it could not be waited for
        view = await openai.run_to_end(gateway, caller, request, message)
    if not openai.answered(view):
        return openai.run_error_reply(view)
    calls = await openai.calls_of(gateway, caller, message, view)
    return json_reply(Answer(wanted, view.run_id, view.created_at).ended(view, view.reply or "", calls))


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


def _options(gateway: Gateway, wanted: ResponseRequest) -> RunOptions:
    sampling = Sampling(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        max_tokens=wanted.max_output_tokens,
        response_format=_response_format(wanted.text.format if wanted.text else None),
        parallel_tool_calls=wanted.parallel_tool_calls if wanted.tools else None,
    )
    wishes = [
        openai.ToolWish(
            name=tool.name,
            where=f"tools[{at}]",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for at, tool in enumerate(wanted.tools or [])
    ]
    choice = wanted.tool_choice
    chosen = f"={choice.name}" if isinstance(choice, ChosenTool) else choice
    return openai.run_options(sampling, openai.client_tools(gateway, wishes), chosen)


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """As chat completions have it: there the schema is below its type, not beside it."""
    if wanted is not None and wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        wanted = {"type": "json_schema", "json_schema": schema}
    return openai.response_format(wanted, "text.format")


def _conversation(given: str | list[Item], place: Place) -> Conversation:
    if isinstance(given, str):
        return Conversation([], [User(content=given, timestamp=0)])
    rules: list[str] = []
    messages: list[Said] = []
    for at, item in enumerate(given):
        where = f"input[{at}]"
        if item.type == "reasoning":
            continue  # what a model thought is its provider's, and the transcript has it
        if item.type == "function_call":
            _add_call(messages, item, where)
        elif item.type == "function_call_output":
            output = _content(item.output, f"{where}.output")
            messages.append(openai.tool_result(messages, item.call_id, output, place, where))
        elif item.type != "message":
            raise InvalidInput(
                f"An item of the type {item.type[:40]!r} at {where} is not taken.",
                "Send messages, function calls and their outputs.",
                field=where,
            )
        elif item.role in {"system", "developer"}:
            rules.append(openai.text_of(_content(item.content, where)))
        elif item.role == "assistant":
            messages.append(openai.assistant(openai.text_of(_content(item.content, where)), []))
        else:
            messages.append(User(content=_content(item.content, where), timestamp=0))
    return Conversation(rules, messages)


def _add_call(messages: list[Said], item: Item, where: str) -> None:
    """Calls are items of their own here; in a transcript they belong to the answer that makes them."""
    if not item.call_id or not item.name:
        raise InvalidInput(f"The call at {where} has no 'call_id' or no 'name'.", "Send both.", field=where)
    call = openai.tool_call(item.call_id, item.name, item.arguments or "{}")
    last = messages[-1] if messages else None
    if isinstance(last, Assistant):
        messages[-1] = msgspec.structs.replace(last, content=[*last.content, call], stop_reason="toolUse")
    else:
        messages.append(openai.assistant("", [call]))


def _content(content: str | list[Part] | None, where: str) -> Content:
    if not isinstance(content, list):
        return content or ""
    return [_block(part, f"{where}.content[{at}]") for at, part in enumerate(content)]


def _block(part: Part, where: str) -> Text | Image:
    if part.type in {"input_text", "output_text", "text", "refusal"}:
        return Text(text=part.text or part.refusal or "")
    if part.type == "input_image" and part.image_url is not None:
        openai.check_detail(part.detail, where)
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

    def ended(self, view: RunView, text: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
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
        output = [self.item(text, "incomplete" if cut else "completed")] if text or not calls else []
        output += [self.call_item(number, call) for number, call in enumerate(calls)]
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

    def call_item(self, number: int, call: ToolCall, status: str = "completed") -> dict[str, Any]:
        return {
            "id": f"fc_{self._run_id}_{number}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": openai.written_arguments(call) if status == "completed" else "",
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
            "max_output_tokens": self._wanted.max_output_tokens,
            "parallel_tool_calls": self._wanted.parallel_tool_calls is not False,
            "previous_response_id": self._wanted.previous_response_id,
            "temperature": self._wanted.temperature,
            "text": {"format": (self._wanted.text and self._wanted.text.format) or {"type": "text"}},
            "tool_choice": self._wanted.tool_choice or "auto",
            "tools": self._wanted.tools or [],
            "top_p": self._wanted.top_p,
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
                calls = await openai.calls_of(gateway, caller, message, told)
                for last in _last(event, answer, at, told, text, calls):
                    yield last


def _last(
    event: Numbered, answer: Answer, at: dict[str, Any], view: RunView, text: str, calls: Sequence[ToolCall]
) -> list[ServerSentEvent]:
    response = answer.ended(view, text, calls)
    done: list[ServerSentEvent] = []
    if text:
        status = "completed" if response["status"] == "completed" else "incomplete"
        done = [
            event("response.output_text.done", **at, text=text, logprobs=[]),
            event("response.content_part.done", **at, part=answer.part(text)),
            event("response.output_item.done", output_index=0, item=answer.item(text, status)),
        ]
    for number, call in enumerate(calls):
        item, arguments = answer.call_item(number, call), openai.written_arguments(call)
        place = {"item_id": item["id"], "output_index": number + bool(text)}
        begun = answer.call_item(number, call, "in_progress")
        done += [
            event("response.output_item.added", output_index=place["output_index"], item=begun),
            event("response.function_call_arguments.delta", **place, delta=arguments),
            event("response.function_call_arguments.done", **place, name=call.name, arguments=arguments),
            event("response.output_item.done", output_index=place["output_index"], item=item),
        ]
    return [*done, event(f"response.{response['status']}", response=response)]
