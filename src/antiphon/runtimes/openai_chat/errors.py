"""Builds the `ProviderError` for a failed chat completion.

The reader itself rejects a complete response that contains no answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx2
import msgspec

from antiphon.errors import ProviderError
from antiphon.runtimes.model import (
    MAX_RETRY_AFTER_SECONDS,
    FailureKind,
    ModelSpec,
    build_provider_error,
    classify_status,
    extract_reason,
)

_Json = dict[str, Any]


def build_connection_error(spec: ModelSpec, error: httpx2.HTTPError) -> ProviderError:
    """The error for a failed connection. The library's text is left out: it may quote a header or an address."""
    if isinstance(error, httpx2.TimeoutException):
        unopened = isinstance(error, httpx2.ConnectTimeout)
        return build_provider_error(spec, "unreachable" if unopened else "silent", reason="timed out")
    if isinstance(error, httpx2.ConnectError):
        return build_provider_error(spec, "unreachable")
    if isinstance(error, httpx2.LocalProtocolError):
        return build_unsendable_error(spec)
    return build_provider_error(spec, "brokenOff", reason="the connection failed")


def build_unsendable_error(spec: ModelSpec) -> ProviderError:
    """The error for a request that HTTP does not allow, so that it never left this process."""
    reason = "the API key or a configured header contains a character that HTTP does not allow"
    return build_provider_error(spec, "rejected", reason=reason)


async def build_status_error(spec: ModelSpec, response: httpx2.Response) -> ProviderError:
    """The error for a response with an error status."""
    body = (await response.aread()).strip()  # bounded by the client
    try:
        error: object = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        error = body.decode(errors="replace")
    if isinstance(error, dict):
        error = cast(_Json, error).get("error", cast(_Json, error))
    return _build_reported_error(
        spec, response.status_code, error, retry_after=_parse_retry_after(response.headers)
    )


def build_stream_error(spec: ModelSpec, error: object) -> ProviderError:
    """The error for an error object inside a stream."""
    return _build_reported_error(
        spec, _get_status(error), error, otherwise="an error in the middle of the stream"
    )


def _build_reported_error(
    spec: ModelSpec,
    status: int | None,
    error: object,
    *,
    otherwise: str = "",
    retry_after: float | None = None,
) -> ProviderError:
    codes = _get_codes(error)
    reason = extract_reason(error) or otherwise
    kind = _classify_error(status, codes, reason)
    if kind is None:
        kind = "brokenOff" if status is None else classify_status(status, f"{reason} {' '.join(codes)}")
    return build_provider_error(spec, kind, status=status, reason=reason, retry_after=retry_after)


_NO_CREDIT_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_hard_limit_reached",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
    }
)
_KIND_BY_CODE: dict[str, FailureKind] = {
    **dict.fromkeys(_NO_CREDIT_CODES, "quota"),
    "context_length_exceeded": "overflow",
    "model_not_found": "unknownModel",
    "invalid_api_key": "credentials",
}
_KIND_BY_STATUS: dict[int | None, FailureKind] = {
    401: "credentials",
    402: "quota",
    403: "credentials",
    404: "unknownModel",
    429: "rateLimit",
}
_STATUS_BY_CODE = {
    **dict.fromkeys(_NO_CREDIT_CODES, 429),
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "context_length_exceeded": 400,
    "service_unavailable": 503,
    "service_unavailable_error": 503,
    "server_is_overloaded": 503,
    "overloaded": 503,
    "server_error": 500,
}
"""The HTTP status that an error would have before the stream begins, by its code or type."""


def _get_codes(error: object) -> tuple[str, str]:
    """The code and type of an error; empty where it has none."""
    fields = cast(_Json, error) if isinstance(error, dict) else {}
    code, kind = fields.get("code"), fields.get("type")
    return str(code) if isinstance(code, str | int) else "", kind if isinstance(kind, str) else ""


def _get_status(error: object) -> int | None:
    """The HTTP status of an error inside a stream; gateways send the number itself as the code."""
    code, kind = _get_codes(error)
    if re.fullmatch(r"[45]\d\d", code, re.ASCII):
        return int(code)
    return _STATUS_BY_CODE.get(code) or _STATUS_BY_CODE.get(kind)


def _classify_error(status: int | None, codes: tuple[str, str], reason: str) -> FailureKind | None:
    """The failure kind by explicit codes, which take precedence over the error's message."""
    code, kind = codes
    if kind in _NO_CREDIT_CODES:
        return "quota"
    if "maximum context length" in reason.lower() or "reduce the length of the messages" in reason.lower():
        return "overflow"
    return _KIND_BY_CODE.get(code) or _KIND_BY_STATUS.get(status)


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from a header in milliseconds, in seconds or as a date."""
    try:
        milliseconds = float(headers.get("retry-after-ms", ""))
    except ValueError:
        milliseconds = -1.0
    if 0 <= milliseconds < float("inf"):
        return milliseconds / 1000
    raw = headers.get("retry-after", "")
    try:
        seconds = float(int(raw))
    except OverflowError:
        return MAX_RETRY_AFTER_SECONDS
    except ValueError:
        return _parse_retry_date(raw)
    return seconds if seconds >= 0 else None


def _parse_retry_date(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None
