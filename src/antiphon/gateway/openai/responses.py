"""`POST /v1/responses`, as one response or a stream of events. A response is a run: `resp_<runId>`."""

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
from antiphon.errors import InvalidInput, NotFound
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
from antiphon.messages import AssistantMessage, ImageBlock, TextBlock, ToolCall, UserMessage
from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView
from antiphon.runtimes import Sampling

RESPONSE_ID_PREFIX = "resp_"
TEXT_PART_TYPES = ["input_text", "output_text", "text", "refusal"]
CONTENT_PART_TYPES = [*TEXT_PART_TYPES, "input_image"]


class ResponseContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": CONTENT_PART_TYPES})]
    text: str | None = None
    refusal: str | None = None
    image_url: openai.ImageDataUrl | None = None
    detail: str | None = None
    # Part of this API's answers, which clients send back unchanged.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseInputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a call of a client-side tool, or its result. Ids and states of items are ignored."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponseContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponseContentPart] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: None = None


class ResponseRequest(openai.AgentRequest, frozen=True):
    """Supported fields, fields without effect here, and fields that are rejected by name."""

    input: str | Annotated[list[ResponseInputItem], msgspec.Meta(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: openai.PositiveInt | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=openai.MAX_TOOLS_PER_REQUEST)] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    """Without effect: responses are always stored."""
    # See `UNSUPPORTED_FIELDS`.
    background: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    stream_options: Any = None
    truncation: Any = None


UNSUPPORTED_FIELDS: dict[str, list[object]] = {
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
"""Unsupported fields, with the values that have no effect and are therefore accepted."""


async def post_responses(
    gateway: GatewayState, slots: StreamSlots, identity: ClientIdentity, request: Request
) -> Response:
    config, caller = gateway.app.config, identity.to_caller()
    body = await read_json(
        request,
        ResponseRequest,
        openai.get_max_body_bytes(config),
        hint=openai.format_fields_hint(ResponseRequest),
    )
    openai.refuse_unsupported(body, UNSUPPORTED_FIELDS)
    if not isinstance(body.input, str):
        openai.check_message_count(body.input, "input")
    agent_id = openai.resolve_agent_id(config, body.model)
    session = openai.choose_session(config, request, agent_id, body.user)
    if body.previous_response_id is not None:
        session = await _find_response_session(gateway, caller, body.previous_response_id)
    conversation, options = _parse_conversation(body.input, session), _build_options(gateway, body)
    message = msgspec.structs.replace(
        openai.build_message(request, session, conversation, body.instructions, options),
        thinking=openai.parse_thinking_level(
            body.reasoning.effort if body.reasoning else None, "reasoning.effort"
        ),
    )
    events = _stream_events(gateway, caller, body, message) if body.stream else None
    return await openai.respond(
        gateway, slots, identity, request, message, events, partial(_format_response, body)
    )


def _format_response(body: ResponseRequest, view: RunView, calls: Sequence[ToolCall]) -> dict[str, Any]:
    return ResponseBuilder(body, view.run_id, view.created_at).build_ended(view, view.reply or "", calls)


async def _find_response_session(gateway: GatewayState, caller: Caller, response_id: str) -> RequestSession:
    missing = NotFound(
        f"Response {response_id[:240]!r} does not exist.",
        "Pass the id of a response of this gateway.",
        code="previous_response_not_found",
        param="previous_response_id",
    )
    if not response_id.startswith(RESPONSE_ID_PREFIX):
        raise missing
    try:
        run = await gateway.app.operations.runs.get(caller, response_id.removeprefix(RESPONSE_ID_PREFIX))
    except NotFound:
        raise missing from None
    return RequestSession(run.session_key, is_fresh=False)


def _build_options(gateway: GatewayState, body: ResponseRequest) -> RunOptions:
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_output_tokens,
        response_format=_parse_response_format(body.text.format if body.text else None),
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
    )
    requested = [
        openai.RequestedTool(
            name=tool.name,
            where=f"tools[{index}]",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for index, tool in enumerate(body.tools or [])
    ]
    choice = body.tool_choice
    chosen = f"={choice.name}" if isinstance(choice, ResponseToolChoice) else choice
    return openai.build_run_options(sampling, openai.build_client_tools(gateway, requested), chosen)


def _parse_response_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the format as chat completions have it, with the schema nested under its type."""
    if format is not None and format.get("type") == "json_schema":
        schema = {name: value for name, value in format.items() if name != "type"}
        format = {"type": "json_schema", "json_schema": schema}
    return openai.parse_response_format(format, "text.format")


def _parse_conversation(input: str | list[ResponseInputItem], session: RequestSession) -> RequestConversation:
    if isinstance(input, str):
        return RequestConversation([], [UserMessage(content=input, timestamp=0)])
    instructions: list[str] = []
    messages: list[ConversationMessage] = []
    for index, item in enumerate(input):
        where = f"input[{index}]"
        if item.type == "reasoning":
            continue  # reasoning is provider-specific, and the transcript has it
        if item.type == "function_call":
            _add_call(messages, item, where)
        elif item.type == "function_call_output":
            output = _parse_content(item.output, f"{where}.output")
            messages.append(openai.build_tool_result(messages, item.call_id, output, session, where))
        elif item.type != "message":
            raise InvalidInput(
                f"An item of the type {item.type[:40]!r} at {where} is not supported.",
                "Send messages, function calls and their outputs.",
                field=where,
            )
        elif item.role in {"system", "developer"}:
            instructions.append(openai.join_text(_parse_content(item.content, where)))
        elif item.role == "assistant":
            messages.append(
                openai.build_assistant_message(openai.join_text(_parse_content(item.content, where)), [])
            )
        else:
            messages.append(UserMessage(content=_parse_content(item.content, where), timestamp=0))
    return RequestConversation(instructions, messages)


def _add_call(messages: list[ConversationMessage], item: ResponseInputItem, where: str) -> None:
    """Add a call to the preceding assistant message: calls are separate items here, but not in a transcript."""
    if not item.call_id or not item.name:
        raise InvalidInput(f"The call at {where} has no 'call_id' or no 'name'.", "Send both.", field=where)
    call = openai.build_tool_call(item.call_id, item.name, item.arguments or "{}")
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage):
        messages[-1] = msgspec.structs.replace(last, content=[*last.content, call], stop_reason="toolUse")
    else:
        messages.append(openai.build_assistant_message("", [call]))


def _parse_content(content: str | list[ResponseContentPart] | None, where: str) -> MessageContent:
    if not isinstance(content, list):
        return content or ""
    return [_parse_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _parse_part(part: ResponseContentPart, where: str) -> TextBlock | ImageBlock:
    if part.type in TEXT_PART_TYPES:
        return TextBlock(text=part.text or part.refusal or "")
    if part.type == "input_image" and part.image_url is not None:
        openai.check_image_detail(part.detail, where)
        return openai.parse_image_url(part.image_url, where)
    raise openai.build_content_error(part.type, where)


class ResponseBuilder:
    """Builds the response object in each of its states, and its parts."""

    def __init__(self, body: ResponseRequest, run_id: str, created_at: int) -> None:
        self._request = body
        self._run_id = run_id
        self._created = created_at // 1000

    @property
    def item_id(self) -> str:
        return f"msg_{self._run_id}"

    def build_in_progress(self) -> dict[str, Any]:
        return self._build_response("in_progress", [])

    def build_ended(self, view: RunView, text: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        input, output = (view.usage.input, view.usage.output) if view.usage else (0, 0)
        usage = {
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input + output,
        }
        if not openai.has_answer(view):
            error = openai.build_run_error(view)["error"]
            failure = {"code": error["code"] or "server_error", "message": error["message"]}
            return {**self._build_response("failed", []), "error": failure, "usage": usage}
        is_incomplete = view.state == "incomplete"
        output = (
            [self.build_message_item(text, "incomplete" if is_incomplete else "completed")]
            if text or not calls
            else []
        )
        output += [self.build_call_item(number, call) for number, call in enumerate(calls)]
        body = {
            **self._build_response("incomplete" if is_incomplete else "completed", output),
            "usage": usage,
        }
        return {**body, "incomplete_details": {"reason": "max_output_tokens"}} if is_incomplete else body

    def build_message_item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self.build_text_part(text)]
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def build_call_item(self, number: int, call: ToolCall, status: str = "completed") -> dict[str, Any]:
        return {
            "id": f"fc_{self._run_id}_{number}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": openai.format_arguments(call) if status == "completed" else "",
        }

    @staticmethod
    def build_text_part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _build_response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{RESPONSE_ID_PREFIX}{self._run_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": self._request.instructions,
            "metadata": self._request.metadata or {},
            "model": self._request.model,
            "output": output,
            "max_output_tokens": self._request.max_output_tokens,
            "parallel_tool_calls": self._request.parallel_tool_calls is not False,
            "previous_response_id": self._request.previous_response_id,
            "temperature": self._request.temperature,
            "text": {"format": (self._request.text and self._request.text.format) or {"type": "text"}},
            "tool_choice": self._request.tool_choice or "auto",
            "tools": self._request.tools or [],
            "top_p": self._request.top_p,
            "usage": None,
        }


class EventSequence:
    """Builds numbered events."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, **data: object) -> ServerSentEvent:
        event = build_sse_event({"type": kind, "sequence_number": self._next, **data}, event=kind)
        self._next += 1
        return event


async def _stream_events(
    gateway: GatewayState, caller: Caller, body: ResponseRequest, message: IncomingMessage
) -> AsyncGenerator[ServerSentEvent]:
    app, event = gateway.app, EventSequence()
    text = ""
    stream = stream_run(app.operations, caller, message, app.config.agents.defaults.timeout_seconds)
    async with aclosing(stream):
        accepted = await anext(stream)
        assert isinstance(accepted, MessageReceipt)
        answer = ResponseBuilder(body, accepted.run_id, app.clock.now())
        at: dict[str, Any] = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
        yield event("response.created", response=answer.build_in_progress())
        yield event("response.in_progress", response=answer.build_in_progress())
        async for item in stream:
            if isinstance(item, str):
                if not text:
                    yield event(
                        "response.output_item.added",
                        output_index=0,
                        item=answer.build_message_item(None, "in_progress"),
                    )
                    yield event("response.content_part.added", **at, part=answer.build_text_part(""))
                text += item
                yield event("response.output_text.delta", **at, delta=item, logprobs=[])
            elif isinstance(item, RunView):
                calls = await openai.load_client_calls(gateway, caller, message, item)
                for last in _build_final_events(event, answer, at, item, text, calls):
                    yield last


def _build_final_events(
    event: EventSequence,
    answer: ResponseBuilder,
    at: dict[str, Any],
    view: RunView,
    text: str,
    calls: Sequence[ToolCall],
) -> list[ServerSentEvent]:
    response = answer.build_ended(view, text, calls)
    done: list[ServerSentEvent] = []
    if text:
        status = "completed" if response["status"] == "completed" else "incomplete"
        done = [
            event("response.output_text.done", **at, text=text, logprobs=[]),
            event("response.content_part.done", **at, part=answer.build_text_part(text)),
            event("response.output_item.done", output_index=0, item=answer.build_message_item(text, status)),
        ]
    for number, call in enumerate(calls):
        item, arguments = answer.build_call_item(number, call), openai.format_arguments(call)
        position = {"item_id": item["id"], "output_index": number + bool(text)}
        begun = answer.build_call_item(number, call, "in_progress")
        done += [
            event("response.output_item.added", output_index=position["output_index"], item=begun),
            event("response.function_call_arguments.delta", **position, delta=arguments),
            event("response.function_call_arguments.done", **position, name=call.name, arguments=arguments),
            event("response.output_item.done", output_index=position["output_index"], item=item),
        ]
    return [*done, event(f"response.{response['status']}", response=response)]
