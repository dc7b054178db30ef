"""The OpenAPI 3.1 document of the HTTP API, written by hand.

It describes every route, including those disabled in the configuration (they answer 404).
"""

from __future__ import annotations

from typing import Any

from antiphon import __version__

JsonSchema = dict[str, Any]

_TEXT_SCHEMA: JsonSchema = {"type": "string"}
_NAME_SCHEMA: JsonSchema = {"type": "string", "minLength": 1}
_BOOLEAN_SCHEMA: JsonSchema = {"type": "boolean"}
_INTEGER_SCHEMA: JsonSchema = {"type": "integer"}
_ANY_SCHEMA: JsonSchema = {}


def build_document() -> JsonSchema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Antiphon",
            "version": __version__,
            "description": "Sessions of agents over HTTP. A token is sent as `Authorization: Bearer <token>`.",
        },
        "security": [{"bearer": []}],
        "paths": {
            "/": {
                "get": _describe_public_operation(
                    "What this is.",
                    _build_object_schema(name=_TEXT_SCHEMA, version=_TEXT_SCHEMA, docs=_TEXT_SCHEMA),
                )
            },
            "/healthz": {
                "get": _describe_public_operation(
                    "Whether it lives.", _build_object_schema(ok=_BOOLEAN_SCHEMA, status=_TEXT_SCHEMA)
                )
            },
            "/readyz": {"get": _describe_readiness()},
            "/metrics": {"get": _describe_metrics()},
            "/openapi.json": {"get": _describe_operation("This document.", {"type": "object"}, [403])},
            "/sessions/{key}/history": {"get": _describe_history()},
            "/sessions/{key}/kill": {"post": _describe_kill()},
            "/tools/invoke": {"post": _describe_tool_invocation()},
            "/v1/models": {"get": _describe_operation("The agents.", {"type": "object"}, [403, 404])},
            "/v1/chat/completions": {"post": _describe_completions(_CHAT_COMPLETIONS_SCHEMA)},
            "/v1/responses": {"post": _describe_completions(_RESPONSES_SCHEMA)},
            "/hooks/agent": {"post": _describe_hook("Start a run.", _AGENT_HOOK_SCHEMA)},
            "/hooks/wake": {"post": _describe_hook("Wake the main session.", _WAKE_HOOK_SCHEMA)},
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR_SCHEMA},
        },
    }


def _build_object_schema(
    shared: JsonSchema | None = None,
    *,
    required: list[str] | None = None,
    closed: bool = False,
    **own: JsonSchema,
) -> JsonSchema:
    properties = {**(shared or {}), **own}
    schema: JsonSchema = {"type": "object", "properties": properties}
    schema |= {"required": list(properties) if required is None else required}
    return {**schema, "additionalProperties": False} if closed else schema


_ERROR_SCHEMA = _build_object_schema(
    ok=_BOOLEAN_SCHEMA,
    error=_build_object_schema(
        type=_TEXT_SCHEMA,
        message=_TEXT_SCHEMA,
        details={"description": "What a tool said."},
        required=["type", "message"],
    ),
    required=["error"],
)
_STATUS_DESCRIPTIONS: dict[int, str] = {
    400: "What was sent cannot be accepted.",
    401: "No credentials, or wrong ones.",
    403: "The token lacks a scope, or a page of another origin asks.",
    404: "There is no such thing, or it is switched off.",
    409: "It contradicts something that was accepted before.",
    413: "The body is too large.",
    429: "Too many wrong credentials, or too many messages waiting.",
    500: "It failed.",
    502: "The run gave no answer.",
    503: "Not now.",
    504: "It took too long.",
}


def _describe_errors(*statuses: int) -> JsonSchema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": _STATUS_DESCRIPTIONS[status], "content": content} for status in statuses
    }


def _build_json_content(schema: JsonSchema) -> JsonSchema:
    return {"application/json": {"schema": schema}}


def _describe_public_operation(summary: str, schema: JsonSchema) -> JsonSchema:
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": "OK", "content": _build_json_content(schema)}},
    }


def _describe_operation(summary: str, schema: JsonSchema, errors: list[int], **more: Any) -> JsonSchema:
    ok: JsonSchema = {"200": {"description": "OK", "content": _build_json_content(schema)}}
    return {
        "summary": summary,
        "responses": {**ok, **_describe_errors(*sorted({*errors, 400, 401, 429, 503}))},
        **more,
    }


def _describe_readiness() -> JsonSchema:
    ready = _describe_public_operation(
        "Whether it can take work.", _build_object_schema(ready=_BOOLEAN_SCHEMA)
    )
    failing = _build_object_schema(ready=_BOOLEAN_SCHEMA, failing={"type": "array", "items": _TEXT_SCHEMA})
    ready["responses"]["503"] = {
        "description": _STATUS_DESCRIPTIONS[503],
        "content": _build_json_content(failing),
    }
    return ready


def _describe_metrics() -> JsonSchema:
    operation = _describe_operation("Figures for Prometheus; needs operator.read.", _ANY_SCHEMA, [403])
    operation["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT_SCHEMA}}
    return operation


_SESSION_KEY_PARAMETER: JsonSchema = {
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


def _describe_query_parameter(name: str, schema: JsonSchema, description: str) -> JsonSchema:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _describe_history() -> JsonSchema:
    switch = {"enum": ["0", "1", "true", "false"]}
    entries = {"type": "array", "items": {"type": "object"}}
    page = _build_object_schema(
        sessionKey=_TEXT_SCHEMA,
        sessionId=_TEXT_SCHEMA,
        items=entries,
        messages=entries,
        hasMore=_BOOLEAN_SCHEMA,
        total=_INTEGER_SCHEMA,
    )
    operation = _describe_operation(
        "A page of a transcript, or with follow=1 the same as a stream of server-sent events.",
        page,
        [403, 404, 409],
        parameters=[
            _SESSION_KEY_PARAMETER,
            _describe_query_parameter(
                "limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "How many entries."
            ),
            _describe_query_parameter(
                "cursor", {"type": "string", "pattern": "^(seq:)?[0-9]{1,17}$"}, "Entries before that one."
            ),
            _describe_query_parameter("includeTools", switch, "Also what tools answered."),
            _describe_query_parameter("follow", switch, "Stream what is appended."),
        ],
    )
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT_SCHEMA}
    return operation


def _describe_kill() -> JsonSchema:
    return _describe_operation(
        "Stop what runs and waits in a session and below it; needs operator.write.",
        _build_object_schema(ok=_BOOLEAN_SCHEMA, killed=_BOOLEAN_SCHEMA),
        [403, 404],
        parameters=[_SESSION_KEY_PARAMETER],
    )


def _describe_body(schema: JsonSchema) -> JsonSchema:
    return {"requestBody": {"required": True, "content": _build_json_content(schema)}}


def _describe_tool_invocation() -> JsonSchema:
    body = _build_object_schema(
        tool=_NAME_SCHEMA,
        name=_NAME_SCHEMA,
        args={"type": "object"},
        action=_TEXT_SCHEMA,
        sessionKey=_TEXT_SCHEMA,
        agentId=_TEXT_SCHEMA,
        dryRun=_BOOLEAN_SCHEMA,
        required=[],
        closed=True,
    ) | {"anyOf": [{"required": ["tool"]}, {"required": ["name"]}]}
    result = _build_object_schema(
        ok=_BOOLEAN_SCHEMA, result=_build_object_schema(content={"type": "array"}, details=_ANY_SCHEMA)
    )
    return _describe_operation(
        "Call a tool as a session; needs operator.write.",
        result,
        [403, 404, 409, 413, 500, 504],
        **_describe_body(body),
    )


def _build_messages_schema(*parts: JsonSchema) -> JsonSchema:
    roles = {"enum": ["system", "developer", "user", "assistant", "tool"]}
    content = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": {"anyOf": parts}}]}
    return {"type": "array", "items": _build_object_schema(role=roles, content=content), "minItems": 1}


def _build_part_schema(kind: str, **more: JsonSchema) -> JsonSchema:
    return _build_object_schema(required=["type", *more], closed=False, type={"const": kind}, **more)


_IMAGE_URL_SCHEMA: JsonSchema = {
    "type": "string",
    "description": "A data: URL of a PNG, JPEG, GIF or WebP; none is fetched.",
}
_POSITIVE_INTEGER_SCHEMA: JsonSchema = {"type": "integer", "minimum": 1}
_SAMPLING_SCHEMAS: dict[str, JsonSchema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "tools": {"type": "array", "items": {"type": "object"}, "maxItems": 128},
    "tool_choice": {"anyOf": [_TEXT_SCHEMA, {"type": "object"}]},
    "parallel_tool_calls": _BOOLEAN_SCHEMA,
}
_CHAT_COMPLETIONS_SCHEMA = _build_object_schema(
    _SAMPLING_SCHEMAS,
    model=_TEXT_SCHEMA,
    messages=_build_messages_schema(
        _build_part_schema("text", text=_TEXT_SCHEMA),
        _build_part_schema("image_url", image_url=_build_object_schema(url=_IMAGE_URL_SCHEMA)),
    ),
    stream=_BOOLEAN_SCHEMA,
    stream_options=_build_object_schema(include_usage=_BOOLEAN_SCHEMA),
    user=_TEXT_SCHEMA,
    max_tokens=_POSITIVE_INTEGER_SCHEMA,
    max_completion_tokens=_POSITIVE_INTEGER_SCHEMA,
    stop={"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "maxItems": 4}]},
    seed={"type": "integer"},
    presence_penalty={"type": "number"},
    frequency_penalty={"type": "number"},
    response_format={"type": "object"},
    reasoning_effort=_TEXT_SCHEMA,
    required=["model", "messages"],
)
_RESPONSES_SCHEMA = _build_object_schema(
    _SAMPLING_SCHEMAS,
    model=_TEXT_SCHEMA,
    input={
        "anyOf": [
            _TEXT_SCHEMA,
            _build_messages_schema(
                _build_part_schema("input_text", text=_TEXT_SCHEMA),
                _build_part_schema("input_image", image_url=_IMAGE_URL_SCHEMA),
            ),
        ]
    },
    instructions=_TEXT_SCHEMA,
    previous_response_id=_TEXT_SCHEMA,
    stream=_BOOLEAN_SCHEMA,
    user=_TEXT_SCHEMA,
    max_output_tokens=_POSITIVE_INTEGER_SCHEMA,
    text=_build_object_schema(required=[], format={"type": "object"}),
    reasoning=_build_object_schema(required=[], effort=_TEXT_SCHEMA),
    required=["model", "input"],
)


def _describe_completions(body: JsonSchema) -> JsonSchema:
    operation = _describe_operation(
        "An answer of an agent, as OpenAI's API gives it; needs operator.write.",
        {"type": "object"},
        [403, 404, 409, 413, 500, 502, 504],
        **_describe_body(body),
    )
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT_SCHEMA}
    return operation


_AGENT_HOOK_SCHEMA = _build_object_schema(
    message=_TEXT_SCHEMA,
    name={"type": "string", "maxLength": 200},
    agentId=_TEXT_SCHEMA,
    sessionKey=_TEXT_SCHEMA,
    wakeMode={"enum": ["now", "next-heartbeat"]},
    deliver=_BOOLEAN_SCHEMA,
    channel=_TEXT_SCHEMA,
    to=_TEXT_SCHEMA,
    model=_TEXT_SCHEMA,
    thinking=_TEXT_SCHEMA,
    timeoutSeconds={"type": "number"},
    required=["message"],
    closed=True,
)
_WAKE_HOOK_SCHEMA = _build_object_schema(
    text=_TEXT_SCHEMA, mode={"enum": ["now", "next-heartbeat"]}, required=["text"], closed=True
)


def _describe_hook(summary: str, body: JsonSchema) -> JsonSchema:
    answer = _build_object_schema(
        ok=_BOOLEAN_SCHEMA, runId=_TEXT_SCHEMA, sessionKey=_TEXT_SCHEMA, required=["ok", "runId"]
    )
    words = f"{summary} Needs the token of hooks."
    return _describe_operation(words, answer, [403, 404, 409, 413], **_describe_body(body))
