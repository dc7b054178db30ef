"""The HTTP surface as an OpenAPI 3.1 document, written by hand next to what it describes.

It describes every route, also those that the configuration has switched off (they answer 404).
"""

from __future__ import annotations

from typing import Any

from antiphon import __version__

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1}
_FLAG: Schema = {"type": "boolean"}
_WHOLE: Schema = {"type": "integer"}
_ANY: Schema = {}


def document() -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Antiphon",
            "version": __version__,
            "description": "Sessions of agents over HTTP. A token is sent as `Authorization: Bearer <token>`.",
        },
        "security": [{"bearer": []}],
        "paths": {
            "/": {"get": _public("What this is.", _object(name=_TEXT, version=_TEXT, docs=_TEXT))},
            "/healthz": {"get": _public("Whether it lives.", _object(ok=_FLAG, status=_TEXT))},
            "/readyz": {"get": _ready()},
            "/metrics": {"get": _metrics()},
            "/openapi.json": {"get": _operation("This document.", {"type": "object"}, [403])},
            "/sessions/{key}/history": {"get": _history()},
            "/sessions/{key}/kill": {"post": _kill()},
            "/tools/invoke": {"post": _invoke()},
            "/v1/models": {"get": _operation("The agents.", {"type": "object"}, [403, 404])},
            "/v1/chat/completions": {"post": _completions(_CHAT)},
            "/v1/responses": {"post": _completions(_RESPONSES)},
            "/hooks/agent": {"post": _hook("Start a run.", _AGENT_HOOK)},
            "/hooks/wake": {"post": _hook("Wake the main session.", _WAKE_HOOK)},
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def _object(
    shared: Schema | None = None, *, required: list[str] | None = None, closed: bool = False, **own: Schema
) -> Schema:
    properties = {**(shared or {}), **own}
    schema: Schema = {"type": "object", "properties": properties}
    schema |= {"required": list(properties) if required is None else required}
    return {**schema, "additionalProperties": False} if closed else schema


_ERROR = _object(
    ok=_FLAG,
    error=_object(
        type=_TEXT, message=_TEXT, details={"description": "What a tool said."}, required=["type", "message"]
    ),
    required=["error"],
)
_WORDS: dict[int, str] = {
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


def _errors(*statuses: int) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": _WORDS[status], "content": content} for status in statuses}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _public(summary: str, schema: Schema) -> Schema:
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": "OK", "content": _json(schema)}},
    }


def _operation(summary: str, schema: Schema, errors: list[int], **more: Any) -> Schema:
    ok: Schema = {"200": {"description": "OK", "content": _json(schema)}}
    return {
        "summary": summary,
        "responses": {**ok, **_errors(*sorted({*errors, 400, 401, 429, 503}))},
        **more,
    }


def _ready() -> Schema:
    ready = _public("Whether it can take work.", _object(ready=_FLAG))
    failing = _object(ready=_FLAG, failing={"type": "array", "items": _TEXT})
    ready["responses"]["503"] = {"description": _WORDS[503], "content": _json(failing)}
    return ready


def _metrics() -> Schema:
    operation = _operation("Figures for Prometheus; needs operator.read.", _ANY, [403])
    operation["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    return operation


_KEY: Schema = {
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


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _history() -> Schema:
    switch = {"enum": ["0", "1", "true", "false"]}
    entries = {"type": "array", "items": {"type": "object"}}
    page = _object(
        sessionKey=_TEXT, sessionId=_TEXT, items=entries, messages=entries, hasMore=_FLAG, total=_WHOLE
    )
    operation = _operation(
        "A page of a transcript, or with follow=1 the same as a stream of server-sent events.",
        page,
        [403, 404, 409],
        parameters=[
            _KEY,
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "How many entries."),
            _query(
                "cursor", {"type": "string", "pattern": "^(seq:)?[0-9]{1,17}$"}, "Entries before that one."
            ),
            _query("includeTools", switch, "Also what tools answered."),
            _query("follow", switch, "Stream what is appended."),
        ],
    )
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    return operation


def _kill() -> Schema:
    return _operation(
        "Stop what runs and waits in a session and below it; needs operator.write.",
        _object(ok=_FLAG, killed=_FLAG),
        [403, 404],
        parameters=[_KEY],
    )


def _body(schema: Schema) -> Schema:
    return {"requestBody": {"required": True, "content": _json(schema)}}


def _invoke() -> Schema:
    body = _object(
        tool=_NAME,
        name=_NAME,
        args={"type": "object"},
        action=_TEXT,
        sessionKey=_TEXT,
        agentId=_TEXT,
        dryRun=_FLAG,
        required=[],
        closed=True,
    ) | {"anyOf": [{"required": ["tool"]}, {"required": ["name"]}]}
    result = _object(ok=_FLAG, result=_object(content={"type": "array"}, details=_ANY))
    return _operation(
        "Call a tool as a session; needs operator.write.",
        result,
        [403, 404, 409, 413, 500, 504],
        **_body(body),
    )


def _messages(*parts: Schema) -> Schema:
    roles = {"enum": ["system", "developer", "user", "assistant", "tool"]}
    content = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": parts}}]}
    return {"type": "array", "items": _object(role=roles, content=content), "minItems": 1}


def _part(kind: str, **more: Schema) -> Schema:
    return _object(required=["type", *more], closed=False, type={"const": kind}, **more)


_IMAGE: Schema = {
    "type": "string",
    "description": "A data: URL of a PNG, JPEG, GIF or WebP; none is fetched.",
}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SAMPLING: dict[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "tools": {"type": "array", "items": {"type": "object"}, "maxItems": 128},
    "tool_choice": {"anyOf": [_TEXT, {"type": "object"}]},
    "parallel_tool_calls": _FLAG,
}
_CHAT = _object(
    _SAMPLING,
    model=_TEXT,
    messages=_messages(_part("text", text=_TEXT), _part("image_url", image_url=_object(url=_IMAGE))),
    stream=_FLAG,
    stream_options=_object(include_usage=_FLAG),
    user=_TEXT,
    max_tokens=_COUNT,
    max_completion_tokens=_COUNT,
    stop={"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}]},
    seed={"type": "integer"},
    presence_penalty={"type": "number"},
    frequency_penalty={"type": "number"},
    response_format={"type": "object"},
    reasoning_effort=_TEXT,
    required=["model", "messages"],
)
_RESPONSES = _object(
    _SAMPLING,
    model=_TEXT,
    input={
        "anyOf": [
            _TEXT,
            _messages(_part("input_text", text=_TEXT), _part("input_image", image_url=_IMAGE)),
        ]
    },
    instructions=_TEXT,
    previous_response_id=_TEXT,
    stream=_FLAG,
    user=_TEXT,
    max_output_tokens=_COUNT,
    text=_object(required=[], format={"type": "object"}),
    reasoning=_object(required=[], effort=_TEXT),
    required=["model", "input"],
)


def _completions(body: Schema) -> Schema:
    operation = _operation(
        "An answer of an agent, as OpenAI's API gives it; needs operator.write.",
        {"type": "object"},
        [403, 404, 409, 413, 500, 502, 504],
        **_body(body),
    )
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    return operation


_AGENT_HOOK = _object(
    message=_TEXT,
    name={"type": "string", "maxLength": 200},
    agentId=_TEXT,
    sessionKey=_TEXT,
    wakeMode={"enum": ["now", "next-heartbeat"]},
    deliver=_FLAG,
    channel=_TEXT,
    to=_TEXT,
    model=_TEXT,
    thinking=_TEXT,
    timeoutSeconds={"type": "number"},
    required=["message"],
    closed=True,
)
_WAKE_HOOK = _object(text=_TEXT, mode={"enum": ["now", "next-heartbeat"]}, required=["text"], closed=True)


def _hook(summary: str, body: Schema) -> Schema:
    answer = _object(ok=_FLAG, runId=_TEXT, sessionKey=_TEXT, required=["ok", "runId"])
    words = f"{summary} Needs the token of hooks."
    return _operation(words, answer, [403, 404, 409, 413], **_body(body))
