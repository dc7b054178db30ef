"""Frames of the WebSocket protocol: requests, responses and events as JSON texts.

An event is encoded once for all connections; each adds only its own sequence number, so a thousand listeners cost a
thousand concatenations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from antiphon import validation_errors
from antiphon.errors import (
    AntiphonError,
    Forbidden,
    InvalidInput,
    LaneFull,
    StoreError,
    TooManyFailures,
    Unavailable,
)
from antiphon.validation_errors import ValidationIssue, suggest_options

MAX_UNAUTHENTICATED_FRAME_BYTES = 64 * 1024  # received before authentication
MAX_FRAME_BYTES = 8 * 2**20
MAX_BUFFERED_BYTES = 50 * 2**20  # queued for a client before it is disconnected
TICK_INTERVAL_MS = 30_000

T = TypeVar("T", bound=msgspec.Struct)
RETRYABLE_ERRORS = (StoreError, LaneFull, Unavailable, TooManyFailures)
"""Errors that left no effect; the same request may succeed later."""


class Params(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Parameters of a method. Unknown names are rejected."""


SessionReference: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
"""A client's reference to a session: a key or an id, not yet parsed."""
IdempotencyKey: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class RequestFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["req"]  # not a msgspec tag, which a client could omit
    id: str
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")
    traceparent: str | None = None


class _ResponseFrame(msgspec.Struct, frozen=True, tag="res", tag_field="type"):
    id: str
    ok: bool
    payload: Any


class WireError(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    code: str
    message: str
    details: dict[str, Any] | None = None
    retryable: bool = False
    retry_after_ms: int | None = None


class _ErrorFrame(msgspec.Struct, frozen=True, tag="res", tag_field="type", omit_defaults=True):
    id: str
    ok: bool
    error: WireError
    payload: Any = None


_request_decoder = msgspec.json.Decoder(RequestFrame)
_encoder = msgspec.json.Encoder()


def decode_request(text: str | bytes) -> RequestFrame:
    """Decode a request. Raises msgspec.DecodeError for invalid JSON, ValidationError for other JSON."""
    return _request_decoder.decode(text)


def encode_response(request_id: str, payload: Any) -> str:
    return _encoder.encode(_ResponseFrame(request_id, True, payload)).decode()


def encode_error_response(request_id: str, error: WireError, payload: Any = None) -> str:
    return _encoder.encode(_ErrorFrame(request_id, False, error, payload)).decode()


def encode_event(name: str, payload: Any, state_version: Mapping[str, int] | None = None) -> str:
    """Encode an event without its closing brace; `finish_numbered_event` or `finish_unnumbered_event` completes it."""
    text = f'{{"type":"event","event":"{name}","payload":{_encoder.encode(payload).decode()}'
    return f'{text},"stateVersion":{_encoder.encode(state_version).decode()}' if state_version else text


def finish_numbered_event(event_text: str, seq: int) -> str:
    return f'{event_text},"seq":{seq}}}'


def finish_unnumbered_event(event_text: str) -> str:
    return event_text + "}"


def to_wire_error(error: AntiphonError, protocol: int) -> WireError:
    """Return an error as sent to a client; protocol 3 has no FORBIDDEN."""
    code = error.ws
    details: dict[str, Any] = {"type": error.code, "hint": error.hint, **error.data}
    message = str(error)
    if isinstance(error, Forbidden) and "scope" in error.data:
        message = f"missing scope: {error.data['scope']}"
        details |= {"code": "MISSING_SCOPE", "missingScope": error.data["scope"]}
    if code == "FORBIDDEN" and protocol < 4:
        code = "INVALID_REQUEST"
    retry = error.data.get("retryAfterMs")
    return WireError(
        code, message, details, retryable=isinstance(error, RETRYABLE_ERRORS), retry_after_ms=retry
    )


def read_params(method: str, raw: msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(b"{}" if bytes(raw) == b"null" else raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        issue = validation_errors.parse_validation_error(error)
        raise InvalidInput(
            f"invalid {method} params: at {issue.pointer}: {issue.what}.",
            _suggest_parameters(issue, decoder.type),
            field=issue.pointer.strip("/"),
        ) from error


def _suggest_parameters(issue: ValidationIssue, params: type[msgspec.Struct]) -> str:
    if issue.path:
        return "See docs/protocol.md for what is allowed."
    word = issue.name if issue.name and not issue.missing else ""
    return suggest_options(word, params.__struct_encode_fields__, noun="parameters")
