"""Tracks requests that get no answer: whether the server can have acted on them."""

from __future__ import annotations

from typing import Any, cast

from antiphon.child_processes.pipes import MAX_LINE_BYTES

MAX_MESSAGE_BYTES = MAX_LINE_BYTES
KEY_META_NAME = "antiphon/idempotencyKey"
"""The name in `_meta` of a call's key: the same key means the same call."""
NOT_SENT_CODE, NO_ANSWER_CODE, NEEDS_LOGIN_CODE = -32098, -32097, -32096
"""Codes of the errors that take the place of a missing answer to a request over HTTP, or ask for a login."""
MAX_RECORDED_REQUESTS = 10_000


class RequestLost(Exception):
    """A request has no answer and will not get one. The text completes "The connection was lost: …"."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class SentRequests:
    """The keys of calls that were written as a whole."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def record(self, message: object) -> None:
        params: object = getattr(message, "params", None)
        meta: object = cast("dict[str, Any]", params).get("_meta") if isinstance(params, dict) else None
        key: object = cast("dict[str, Any]", meta).get(KEY_META_NAME) if isinstance(meta, dict) else None
        if isinstance(key, str):
            self._keys[key] = None
            if len(self._keys) > MAX_RECORDED_REQUESTS:
                del self._keys[next(iter(self._keys))]

    def discard(self, key: str) -> None:
        self._keys.pop(key, None)

    def __contains__(self, key: str) -> bool:
        return key in self._keys
