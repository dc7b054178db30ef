"""The OpenAPI 3.1 document of the HTTP API.

Schemas are generated from the structs that the routes read and return. The document has every route, including those
disabled in the configuration (they answer 404), except `/mcp`, which another specification describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from antiphon import __version__
from antiphon.gateway.http.history import HistoryResponse, KillResponse
from antiphon.gateway.http.hooks import AgentHook, HookReceipt, WakeHook
from antiphon.gateway.http.responses import ErrorResponse
from antiphon.gateway.http.routes import GatewayInfo, Liveness
from antiphon.gateway.openai import chat_completions, responses
from antiphon.gateway.openai.chat_completions import ChatRequest
from antiphon.gateway.openai.common import ModelList
from antiphon.gateway.openai.responses import ResponseRequest
from antiphon.gateway.tool_invocations import InvocationResponse, ToolInvocation
from antiphon.operations.types import Readiness

JsonSchema = dict[str, Any]

JSON_MEDIA_TYPE, EVENT_STREAM_MEDIA_TYPE = "application/json", "text/event-stream"
SCHEMA_REFERENCE_TEMPLATE = "#/components/schemas/{name}"
COMMON_ERROR_STATUSES = (400, 401, 429, 503)
STATUS_DESCRIPTIONS = {
    400: "The request is invalid.",
    401: "Credentials are missing or wrong.",
    403: "The token lacks a scope, or the origin of the page is not allowed.",
    404: "Not found, or disabled in the configuration.",
    409: "The request conflicts with something that was accepted before.",
    413: "The body is too large.",
    429: "Too many wrong credentials, or too many messages waiting.",
    500: "Internal error.",
    502: "The run gave no answer.",
    503: "Temporarily unavailable.",
    504: "The run or tool timed out.",
}
SESSION_KEY_PARAMETER: JsonSchema = {
    "name": "key",
    "in": "path",
    "required": True,
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 512,
        "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f]+$",
    },
    "description": "A session key, session id or label, percent-encoded once.",
}
_FLAG_SCHEMA: JsonSchema = {"enum": ["0", "1", "true", "false"]}
HISTORY_PARAMETERS: list[JsonSchema] = [
    SESSION_KEY_PARAMETER,
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
        "description": "Maximum number of entries.",
    },
    {
        "name": "cursor",
        "in": "query",
        "schema": {"type": "string", "pattern": "^(seq:)?[0-9]{1,17}$"},
        "description": "Return the entries before this one.",
    },
    {
        "name": "includeTools",
        "in": "query",
        "schema": _FLAG_SCHEMA,
        "description": "Include tool results.",
    },
    {
        "name": "follow",
        "in": "query",
        "schema": _FLAG_SCHEMA,
        "description": "Stream entries as they are appended.",
    },
]
_HOOK_ERRORS = (403, 404, 409, 413)
_COMPLETION_ERRORS = (403, 404, 409, 413, 500, 502, 504)


class Operation(msgspec.Struct, frozen=True):
    """A route in the document. `body` and `response` are the types that are read and returned."""

    method: str
    path: str
    summary: str
    response: Any
    errors: Sequence[int] = ()
    """Statuses besides the common ones. Public operations have none but these."""
    body: Any = None
    parameters: Sequence[JsonSchema] = ()
    is_public: bool = False
    can_stream: bool = False
    media_type: str = JSON_MEDIA_TYPE


DOCUMENTED_OPERATIONS = (
    Operation("get", "/", "Name and version of the gateway.", GatewayInfo, is_public=True),
    Operation("get", "/healthz", "Liveness.", Liveness, is_public=True),
    Operation("get", "/readyz", "Readiness: whether work is accepted.", Readiness, is_public=True),
    Operation(
        "get",
        "/metrics",
        "Metrics for Prometheus; needs operator.read.",
        str,
        (403,),
        media_type="text/plain",
    ),
    Operation("get", "/openapi.json", "This document.", dict[str, Any], (403,)),
    Operation(
        "get",
        "/sessions/{key}/history",
        "A page of a transcript, or with follow=1 the same as a stream of server-sent events.",
        HistoryResponse,
        (403, 404, 409),
        parameters=HISTORY_PARAMETERS,
        can_stream=True,
    ),
    Operation(
        "post",
        "/sessions/{key}/kill",
        "Stop the running and queued runs of a session and of its sub-agents; needs operator.write.",
        KillResponse,
        (403, 404),
        parameters=[SESSION_KEY_PARAMETER],
    ),
    Operation(
        "post",
        "/tools/invoke",
        "Invoke a tool on behalf of a session; needs operator.write.",
        InvocationResponse,
        (403, 404, 409, 413, 500, 504),
        ToolInvocation,
    ),
    Operation("get", "/v1/models", "The agents, as models.", ModelList, (403, 404)),
    *(
        Operation(
            "post",
            path,
            "An agent's answer in the format of OpenAI's API; needs operator.write.",
            dict[str, Any],
            _COMPLETION_ERRORS,
            body,
            can_stream=True,
        )
        for path, body in (("/v1/chat/completions", ChatRequest), ("/v1/responses", ResponseRequest))
    ),
    Operation(
        "post", "/hooks/agent", "Start a run. Needs the hook token.", HookReceipt, _HOOK_ERRORS, AgentHook
    ),
    Operation(
        "post",
        "/hooks/wake",
        "Send a text to the main session. Needs the hook token.",
        HookReceipt,
        _HOOK_ERRORS,
        WakeHook,
    ),
)


@cache
def build_document() -> JsonSchema:
    """Return the document. It is built once: generating the schemas takes longer than serving a request may."""
    types = [
        type for operation in DOCUMENTED_OPERATIONS for type in (operation.body, operation.response) if type
    ]
    found, components = msgspec.json.schema_components(
        [*types, ErrorResponse], ref_template=SCHEMA_REFERENCE_TEMPLATE
    )
    schemas = dict(zip([*types, ErrorResponse], found, strict=True))
    _restrict_fields(components["ChatRequest"], chat_completions.UNSUPPORTED_FIELDS)
    _restrict_fields(components["ResponseRequest"], responses.UNSUPPORTED_FIELDS)
    components["ToolInvocation"]["anyOf"] = [{"required": ["tool"]}, {"required": ["name"]}]
    paths: JsonSchema = {}
    for operation in DOCUMENTED_OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe_operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Antiphon",
            "version": __version__,
            "description": "Sessions of agents over HTTP. A token is sent as `Authorization: Bearer <token>`.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": components,
        },
    }


def _restrict_fields(schema: JsonSchema, allowed: Mapping[str, Sequence[object]]) -> None:
    """Limit unsupported fields to the values that have no effect, which are all that is accepted."""
    for name, values in allowed.items():
        schema["properties"][name] = {"enum": [None, *values], "default": None}


def _describe_operation(operation: Operation, schemas: Mapping[Any, JsonSchema]) -> JsonSchema:
    content: JsonSchema = {operation.media_type: {"schema": schemas[operation.response]}}
    if operation.can_stream:
        content[EVENT_STREAM_MEDIA_TYPE] = {"schema": {"type": "string"}}
    answers: JsonSchema = {"200": {"description": "OK", "content": content}}
    described: JsonSchema = {"summary": operation.summary, "responses": answers}
    if operation.is_public:
        described["security"] = []
    else:
        error = {JSON_MEDIA_TYPE: {"schema": schemas[ErrorResponse]}}
        for status in sorted({*operation.errors, *COMMON_ERROR_STATUSES}):
            answers[str(status)] = {"description": STATUS_DESCRIPTIONS[status], "content": error}
    if operation.response is Readiness:
        answers["503"] = {"description": STATUS_DESCRIPTIONS[503], "content": content}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body:
        body = {JSON_MEDIA_TYPE: {"schema": schemas[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    return described
