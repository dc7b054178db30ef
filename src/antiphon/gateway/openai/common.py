"""Shared parts of the OpenAI-compatible endpoints: agents, sessions, messages, run options and errors.

A model of this API is an agent here. With a session key or a `user`, the session is persistent: earlier messages of the
request that it lacks are added to it. Without either, every request is a new conversation that starts with them.
Run options (sampling, client-side tools) are stored with the run. Unsupported fields are rejected by name; nothing is
dropped silently.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine.runs.run_queue import RunOptions
from antiphon.engine.sessions.transcripts import find_unanswered_calls
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import wire
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.http.responses import (
    MAX_BODY_BYTES,
    UNEXPECTED_ERROR_MESSAGE,
    EventStream,
    StreamSlots,
    build_error_headers,
    build_json_response,
    get_error_type,
    wait_while_connected,
)
from antiphon.gateway.state import GatewayState
from antiphon.messages import (
    CLIENT_PROVIDER,
    INJECTED_MODEL,
    THINKING_LEVELS,
    AssistantMessage,
    ImageBlock,
    TextBlock,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.operations.types import IncomingMessage, RunView
from antiphon.runtimes import Sampling, ToolSpec
from antiphon.runtimes.model import INVALID_ARGUMENTS_KEY
from antiphon.runtimes.tool_calls import parse_arguments

DEFAULT_MODEL_NAME = "antiphon"
_MODEL_PATTERN = re.compile(
    r"(?:(?:antiphon|openclaw)(?:[/:](.+))?|agent:(.+)|(.+))", re.IGNORECASE | re.DOTALL
)
_DATA_URL_PATTERN = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,(.*)", re.IGNORECASE | re.DOTALL)
_SESSION_NAMESPACE = uuid.UUID("5b0e6d43-6c8f-4f0a-9f0e-5f0d7c1f3a11")
_HTTP_STATUS_BY_RUN_STATE = {"timeout": 504, "cancelled": 409}  # without an answer; other states: 502

TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
UNKNOWN_TOOL_NAME = "client_tool"  # for a result whose call is not in the request
MAX_TOOLS_PER_REQUEST = 128
MAX_MESSAGES_PER_REQUEST = 500
"""All of them are added in one commit, which delays other writers."""

MessageContent = str | list[TextBlock | ImageBlock]
ImageDataUrl = Annotated[
    str, msgspec.Meta(description="A data: URL of a PNG, JPEG, GIF or WebP image. Other URLs are rejected.")
]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopSequence = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
StopSequences = StopSequence | Annotated[list[StopSequence], msgspec.Meta(max_length=4)]


ConversationMessage = UserMessage | AssistantMessage | ToolResult
FormatAnswer = Callable[[RunView, Sequence[ToolCall]], object]
"""Builds the response of an endpoint from an ended run and its calls of client-side tools."""


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both endpoints have."""

    model: str
    stream: bool | None = None
    user: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    parallel_tool_calls: bool | None = None
    # Labels and hints for OpenAI's own service; they do not affect answers.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Any = None
    """Rejected by name, see `refuse_unsupported`."""
    top_logprobs: Any = None
    """Rejected by name, see `refuse_unsupported`."""


class RequestConversation(msgspec.Struct, frozen=True):
    """The messages of a request; `instructions` are its system and developer messages."""

    instructions: list[str]
    messages: list[ConversationMessage]


class RequestedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A client-side tool as a request describes it."""

    name: str
    where: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class RequestSession(msgspec.Struct, frozen=True):
    """The session that answers a request. A fresh one has nothing in it yet."""

    reference: str
    is_fresh: bool


# --- agents ---


class ModelInfo(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Seconds."""
    owned_by: str = DEFAULT_MODEL_NAME


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelInfo]


def resolve_agent_id(config: Config, model: str) -> str:
    """Return the agent for a model name; `antiphon` and `…/default` are the default agent."""
    found = _MODEL_PATTERN.fullmatch(model.strip())
    name = next(filter(None, found.groups()), "default").lower() if found else ""
    if name == "default":
        return config.default_agent_id
    if name not in config.agent_ids:
        raise NotFound(
            f"Model {model[:80]!r} does not exist.",
            "See GET /v1/models.",
            code="model_not_found",
            param="model",
        )
    return name


async def get_models(gateway: GatewayState, caller: Caller, request: Request) -> Response:
    access.require_scope(caller, "list")
    config = gateway.app.config
    names = [DEFAULT_MODEL_NAME, *(f"{DEFAULT_MODEL_NAME}/{agent_id}" for agent_id in config.agent_ids)]
    created = gateway.started_at // 1000
    return build_json_response(ModelList("list", [ModelInfo(name, "model", created) for name in names]))


# --- sessions ---


def choose_session(config: Config, request: Request, agent_id: str, user: str | None) -> RequestSession:
    headers = request.headers
    named = headers.get("x-antiphon-session-key") or headers.get("x-openclaw-session-key")
    if named:
        return RequestSession(_resolve_named_session(config, named, agent_id), is_fresh=False)
    if user:
        return RequestSession(str(keys.owned_key(agent_id, "openai-user", user)), is_fresh=False)
    # A retry with the same idempotency key must use the same session, or it would be another request.
    idempotency_key = headers.get("idempotency-key")
    unique = uuid.uuid5(_SESSION_NAMESPACE, idempotency_key) if idempotency_key else uuid.uuid4()
    return RequestSession(str(keys.owned_key(agent_id, "openai", str(unique))), is_fresh=True)


def _resolve_named_session(config: Config, reference: str, agent_id: str) -> str:
    session = config.session
    key = keys.canonicalize(reference, agent_id=agent_id, main_key=session.main_key, scope=session.scope)
    if isinstance(key, keys.SessionIdRef):
        return key.value
    if key.shape == "global":
        return f"agent:{agent_id}:main"
    if key.agent_id != agent_id:
        raise InvalidInput(
            f"Session {str(key)!r} does not belong to the agent {agent_id!r}, which 'model' names.",
            f"Use the model {DEFAULT_MODEL_NAME}/{key.agent_id}.",
            field="model",
        )
    return str(key)


# --- messages ---


def check_message_count(messages: Sequence[object], field: str) -> None:
    if len(messages) > MAX_MESSAGES_PER_REQUEST:
        raise InvalidInput(
            f"{field!r} has {len(messages)} messages, and at most {MAX_MESSAGES_PER_REQUEST} are accepted.",
            "Send the latest ones; a session (header or 'user') remembers the others.",
            field=field,
        )


def build_message(
    request: Request,
    session: RequestSession,
    conversation: RequestConversation,
    instructions: str | None,
    options: RunOptions,
) -> IncomingMessage:
    """Return the last message for the session, along with the earlier messages, instructions and options."""
    *earlier, last = conversation.messages or [None]
    if last is None or isinstance(last, AssistantMessage):
        raise InvalidInput(
            "The last message is neither from the user nor the result of a tool.",
            "Send one of them last.",
            field="messages",
        )
    if session.is_fresh and (open_calls := find_unanswered_calls(conversation.messages)):
        raise InvalidInput(
            f"The tool call {open_calls[0].id[:80]!r} has no result.",
            "Send a message with its result, or leave the call out.",
            field="messages",
        )
    chosen = msgspec.structs.replace(options, earlier=[message for message in earlier if message])
    return IncomingMessage(
        session=session.reference,
        content=last if isinstance(last, ToolResult) else last.content,
        idempotency_key=request.headers.get("idempotency-key"),
        origin="openai",
        instructions="\n\n".join(filter(None, [instructions, *conversation.instructions])) or None,
        # Without options, the input of a run is taken for a user message, which a tool result is not.
        options=chosen if isinstance(last, ToolResult) or chosen != RunOptions() else None,
    )


def join_text(content: MessageContent) -> str:
    return (
        content
        if isinstance(content, str)
        else "\n".join(b.text for b in content if isinstance(b, TextBlock))
    )


def build_assistant_message(text: str, calls: Sequence[ToolCall]) -> AssistantMessage:
    """Return an earlier answer as sent by the client."""
    return AssistantMessage(
        content=[*([TextBlock(text=text)] if text else []), *calls],
        timestamp=0,
        stop_reason="toolUse" if calls else "stop",
        provider=CLIENT_PROVIDER,
        model=INJECTED_MODEL,
    )


def build_tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    read = parse_arguments(arguments)
    native = {INVALID_ARGUMENTS_KEY: arguments} if read is None else None
    return ToolCall(id=call_id, name=name, arguments=read or {}, native=native)


def format_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as the model wrote them."""
    raw = (call.native or {}).get(INVALID_ARGUMENTS_KEY)
    return raw if isinstance(raw, str) else msgspec.json.encode(call.arguments).decode()


def build_tool_result(
    messages: Sequence[ConversationMessage],
    call_id: str | None,
    content: MessageContent,
    session: RequestSession,
    where: str,
) -> ToolResult:
    """Return the result of a tool call from the earlier messages, or from an earlier run of the session."""
    calls = [
        call for message in messages if isinstance(message, AssistantMessage) for call in message.tool_calls
    ]
    name = next((call.name for call in calls if call.id == call_id), None)
    if not call_id or (name is None and session.is_fresh):
        raise InvalidInput(
            f"The result at {where} belongs to no tool call before it.",
            "Send the assistant's message with the call as well, and name the call's id.",
            field=where,
        )
    blocks: list[TextBlock | ImageBlock] = [TextBlock(text=content)] if isinstance(content, str) else content
    return ToolResult(
        tool_call_id=call_id, tool_name=name or UNKNOWN_TOOL_NAME, content=blocks, timestamp=0, details=None
    )


def parse_image_url(url: str, where: str) -> ImageBlock:
    """Return the image of a data URL. Other URLs are rejected: fetching arbitrary addresses would be unsafe."""
    found = _DATA_URL_PATTERN.fullmatch(url)
    if not found:
        raise InvalidInput(
            f"The image at {where} is not a data: URL.",
            "Send the image itself, as data:<type>;base64,<data>.",
            field=where,
        )
    return wire.parse_image(found[2], found[1].lower(), where)


def check_image_detail(detail: str | None, where: str) -> None:
    if detail not in {None, "auto"}:
        raise InvalidInput(
            f"The detail of the image at {where} is not supported.", "Leave it out.", field=f"{where}.detail"
        )


def get_max_body_bytes(config: Config) -> int:
    """Return the maximum body size: twice the longest message that the store accepts, since JSON escapes need room."""
    return max(MAX_BODY_BYTES, 2 * config.store.message_max_bytes)


# --- run options ---


def refuse_unsupported(body: msgspec.Struct, allowed: Mapping[str, Sequence[object]]) -> None:
    """Reject unsupported fields by name, unless their value has no effect."""
    for field, values in allowed.items():
        value = getattr(body, field)
        if value is None or any(type(value) is type(one) and value == one for one in values):
            continue
        accepted = ", ".join(msgspec.json.encode(one).decode() for one in values)
        raise InvalidInput(
            f"{field!r} is not supported here.",
            f"Leave it out, or send {accepted}." if accepted else "Leave it out.",
            field=field,
        )


def format_fields_hint(shape: type[msgspec.Struct]) -> str:
    return (
        f"Leave out what is not among the fields of this route: {', '.join(shape.__struct_encode_fields__)}."
    )


def build_client_tools(gateway: GatewayState, requested: Sequence[RequestedTool]) -> list[ToolSpec]:
    taken = set(gateway.app.toolbox.names)
    tools: list[ToolSpec] = []
    for tool in requested:
        if not TOOL_NAME_PATTERN.fullmatch(tool.name):
            raise InvalidInput(
                f"{tool.name[:80]!r} is not a valid tool name.",
                "Use 1 to 64 letters, digits, '_' or '-'.",
                field=tool.where,
            )
        if tool.name in taken:
            raise InvalidInput(
                f"A tool named {tool.name!r} already exists.",
                "Choose another name: the agents here have tools of their own.",
                field=tool.where,
            )
        taken.add(tool.name)
        tools.append(
            ToolSpec(
                name=tool.name,
                description=tool.description or "",
                parameters=tool.parameters or {"type": "object", "properties": {}},
                strict=bool(tool.strict),
            )
        )
    return tools


def build_run_options(sampling: Sampling, tools: list[ToolSpec], choice: str | None) -> RunOptions:
    """Return the options of a run. `choice` is `auto`, `none`, `required`, or `=` plus the name of a required tool."""
    if choice == "required" or (choice or "").startswith("="):
        name = choice[1:] if choice and choice.startswith("=") else None
        if not tools or (name is not None and all(tool.name != name for tool in tools)):
            raise InvalidInput(
                "'tool_choice' requires a tool that is not in 'tools'.",
                "Send the tool, or choose 'auto'.",
                field="tool_choice",
            )
        sampling = msgspec.structs.replace(sampling, tool_required=True, tool_name=name)
    elif choice not in {None, "auto", "none"}:
        raise InvalidInput(
            "'tool_choice' has an unknown value.",
            "Use 'auto', 'none', 'required' or a function with its name.",
            field="tool_choice",
        )
    return RunOptions(
        sampling=sampling if sampling != Sampling() else None, tools=[] if choice == "none" else tools
    )


def parse_response_format(format: Mapping[str, Any] | None, where: str) -> dict[str, Any] | None:
    kind = format.get("type") if format else None
    if format is None or kind == "text":
        return None
    named = format.get("json_schema")
    if kind == "json_object" or (
        kind == "json_schema" and isinstance(named, dict) and cast("dict[str, Any]", named).get("name")
    ):
        return dict(format)
    raise InvalidInput(
        f"{where!r} has an unknown type.",
        "Use text, json_object, or json_schema with a name and a schema.",
        field=where,
    )


def parse_thinking_level(effort: str | None, where: str) -> str | None:
    if effort is None:
        return None
    level = "off" if effort == "none" else effort
    if level not in THINKING_LEVELS:
        raise InvalidInput(
            f"{effort[:40]!r} is not a known effort.",
            f"Use none or one of {', '.join(THINKING_LEVELS)}.",
            field=where,
        )
    return level


def build_content_error(kind: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"Content of the type {kind[:40]!r} at {where} is not supported.", "Send text or images.", field=where
    )


# --- results ---


async def respond(
    gateway: GatewayState,
    slots: StreamSlots,
    identity: ClientIdentity,
    request: Request,
    message: IncomingMessage,
    events: AsyncGenerator[ServerSentEvent] | None,
    format_answer: FormatAnswer,
) -> Response:
    """Answer a message: with a stream of `events`, or with one response when its run has ended."""
    if events is not None:
        return await EventStream.open(events, gateway, slots, identity)
    caller = identity.to_caller()
    with slots.hold_slot():  # before the run is accepted, which could not be waited for without a slot
        view = await run_to_end(gateway, caller, request, message)
    if not has_answer(view):
        return build_run_error_response(view)
    return build_json_response(format_answer(view, await load_client_calls(gateway, caller, message, view)))


async def load_client_calls(
    gateway: GatewayState, caller: Caller, message: IncomingMessage, view: RunView
) -> list[ToolCall]:
    """Return the calls of client-side tools that the run ended with."""
    if message.options is None or not message.options.tools or view.state != "ok":
        return []
    return await gateway.app.operations.runs.list_client_calls(caller, view.run_id)


async def run_to_end(
    gateway: GatewayState, caller: Caller, request: Request, message: IncomingMessage
) -> RunView:
    """Submit a message and wait for its run. The run continues if the client disconnects."""
    operations, timeout = gateway.app.operations, gateway.app.config.agents.defaults.timeout_seconds
    accepted = await operations.messages.submit(caller, message)
    return await wait_while_connected(
        request, gateway.closing, operations.runs.wait(caller, accepted.run_id, timeout)
    )


def has_answer(view: RunView) -> bool:
    """Return whether the run has an answer, possibly one cut off at the model's limit."""
    return view.state == "ok" or (view.state == "incomplete" and bool(view.reply))


def build_run_error(view: RunView) -> dict[str, Any]:
    if not view.has_ended:
        message = f"The run {view.run_id!r} has not ended yet. Send the request again with the same Idempotency-Key."
        return build_error_body(message, "timeout", "timeout")
    return build_error_body(view.error or "The run gave no answer.", "server_error", view.error_code)


def build_run_error_response(view: RunView) -> Response:
    # The run took place; a client that retries automatically would start another.
    status = _HTTP_STATUS_BY_RUN_STATE.get(view.state, 502) if view.has_ended else 504
    if view.error_code == InvalidInput.code:
        status = 400
    return build_json_response(build_run_error(view), status, {"x-should-retry": "false"})


def build_error_body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def build_error_response(error: AntiphonError) -> Response:
    data: Mapping[str, Any] = error.data
    param = data.get("param") or data.get("field")
    kind = "invalid_request_error" if error.http in {400, 404, 413} else get_error_type(error)
    code = data.get("code") or error.code
    return build_json_response(
        build_error_body(str(error), kind, code, param), error.http, build_error_headers(error)
    )


def build_unexpected_error_response() -> Response:
    return build_json_response(build_error_body(UNEXPECTED_ERROR_MESSAGE, "server_error", "internal"), 500)
