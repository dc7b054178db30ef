"""A client of the Telegram Bot API, which tells what was certainly not sent from what may have been.

Long polls have connections of their own, so that they never hold up a message. The token is part of every address and
is kept out of logs and errors. Nothing is retried here.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any, cast

import httpx2
import msgspec

from antiphon.errors import NotSent, RefusalKind, Refused, Unsure

MAX_SEND_CONNECTIONS = 20
MAX_RESPONSE_BYTES = 8 * 1024 * 1024
MAX_UPDATES_PER_POLL = 20  # 400 KB each: 100, the default, of long links would exceed the limit on every try
CONNECT_TIMEOUT_SECONDS = 10.0
POLL_GRACE_SECONDS = 10.0  # for the answer to a long poll, after its time
MAX_RETRY_AFTER_SECONDS = 24 * 3600

_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
"""Errors before a request is written: DNS, TCP, TLS, the proxy, no free connection."""
_REFUSALS: tuple[tuple[str, RefusalKind], ...] = (
    ("can't parse entities", "bad_format"),
    ("unsupported start tag", "bad_format"),
    ("message is too long", "too_long"),
    ("message_too_long", "too_long"),
    ("text must be encoded in utf-8", "bad_format"),
    ("chat not found", "gone"),
    ("thread not found", "gone"),
    ("topic_deleted", "gone"),
    ("topic_closed", "forbidden"),
    ("group chat was deactivated", "gone"),
    ("not enough rights", "forbidden"),
    ("have no rights", "forbidden"),
    ("need administrator rights", "forbidden"),
)
"""Descriptions of errors with the status 400, in lower case."""
_HINTS: dict[RefusalKind, str] = {
    "gone": "Check the id of the chat and of its topic.",
    "forbidden": "Let the bot into the chat, and let it write there.",
    "too_long": "Send a shorter text.",
    "bad_format": "Send the text without markup.",
    "window_closed": "Wait for a message of the person.",
    "moved": "Use the new id.",
    "auth": "Set the token that @BotFather shows for this bot.",
}


class PollConflict(Exception):
    """Another program, or a webhook, receives the updates of this bot."""


class _ResponseParameters(msgspec.Struct):
    retry_after: float | None = None
    migrate_to_chat_id: int | None = None


class _Response(msgspec.Struct):
    ok: bool
    result: Any = None
    error_code: int | None = None
    description: str = ""
    parameters: _ResponseParameters | None = None


_decoder = msgspec.json.Decoder(_Response)


class _MaskToken(logging.Filter):
    """Keeps a token out of the log of the HTTP library, which contains addresses."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self._token in text:
            record.msg, record.args = text.replace(self._token, "***"), ()
        return True


class BotApi:
    def __init__(
        self, token: str, api_root: str, *, timeout_seconds: float, proxy: str | None = None
    ) -> None:
        self._root = api_root.rstrip("/")
        self._token = token
        timeout = httpx2.Timeout(timeout_seconds, connect=min(timeout_seconds, CONNECT_TIMEOUT_SECONDS))
        limits = httpx2.Limits(max_connections=MAX_SEND_CONNECTIONS, keepalive_expiry=30.0)
        self._mask = _MaskToken(token)
        logging.getLogger("httpx2").addFilter(self._mask)
        self._sends = httpx2.AsyncClient(timeout=timeout, limits=limits, proxy=proxy)
        self._polls = httpx2.AsyncClient(
            timeout=timeout, limits=httpx2.Limits(max_connections=1), proxy=proxy
        )

    async def close(self) -> None:
        logging.getLogger("httpx2").removeFilter(self._mask)
        await self._sends.aclose()
        await self._polls.aclose()

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method. Parameters that are None are left out.

        Raises:
            NotSent: the request had certainly no effect.
            Refused: Telegram refused it.
            Unsure: it may have had its effect.
        """
        return await self._post(self._sends, method, parameters, None)

    async def poll(self, offset: int | None, seconds: float, kinds: list[str]) -> list[dict[str, Any]]:
        """Wait for updates from `offset` on, which confirms all earlier ones.

        Raises:
            PollConflict: another program does the same.
        """
        parameters = {
            "offset": offset,
            "limit": MAX_UPDATES_PER_POLL,
            "timeout": round(seconds),
            "allowed_updates": kinds,
        }
        timeout = httpx2.Timeout(seconds + POLL_GRACE_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
        result = await self._post(self._polls, "getUpdates", parameters, timeout)
        return cast("list[dict[str, Any]]", result) if isinstance(result, list) else []

    async def load_file(self, file_id: str, limit: int) -> bytes:
        """Return the content of a file.

        Raises:
            Refused: it has more than `limit` bytes, or is not available.
        """
        found = await self.call("getFile", file_id=file_id)
        path = found.get("file_path") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        size = found.get("file_size") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(path, str) or (isinstance(size, int) and size > limit):
            raise _refuse("too_long", "Telegram does not offer the file, or it is too large")
        content = bytearray()
        try:
            async with self._sends.stream("GET", f"{self._root}/file/bot{self._token}/{path}") as response:
                if response.status_code != HTTPStatus.OK:
                    raise _refuse("gone", f"Telegram answered {response.status_code} for a file")
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > limit:
                        raise _refuse("too_long", "The file is larger than Telegram said")
        except httpx2.InvalidURL:
            raise _refuse("gone", "Telegram gave a file a path that is none") from None
        except httpx2.HTTPError as error:
            raise _translate_transport_error("getFile", error) from None
        return bytes(content)

    async def _post(
        self,
        client: httpx2.AsyncClient,
        method: str,
        parameters: dict[str, Any],
        timeout: httpx2.Timeout | None,
    ) -> Any:
        body = msgspec.json.encode({name: value for name, value in parameters.items() if value is not None})
        try:
            async with client.stream(
                "POST",
                f"{self._root}/bot{self._token}/{method}",
                content=body,
                headers={"content-type": "application/json"},
                timeout=timeout or client.timeout,
            ) as response:
                content = bytearray()
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise _doubt(method, "sent an answer without end")
                status = response.status_code
        except httpx2.HTTPError as error:
            # Without its cause, whose request has the token in its address.
            raise _translate_transport_error(method, error) from None
        return _read_response(method, status, bytes(content))


def _translate_transport_error(method: str, error: httpx2.HTTPError) -> NotSent | Unsure:
    what = f"Telegram could not be reached for {method} ({type(error).__name__})."
    if isinstance(error, _NEVER_SENT):
        return NotSent(what, "It is sent when the connection works again.")
    return _doubt(method, f"did not answer ({type(error).__name__})")


def _read_response(method: str, status: int, content: bytes) -> Any:
    try:
        response = _decoder.decode(content)
    except msgspec.MsgspecError:
        raise _doubt(method, f"answered {status} without JSON") from None
    if response.ok:
        return response.result
    code = response.error_code or status
    described = response.description[:200] or f"error {code}"
    parameters = response.parameters or _ResponseParameters()
    if code == HTTPStatus.TOO_MANY_REQUESTS:
        wait = min(max(parameters.retry_after or 1.0, 0.0), MAX_RETRY_AFTER_SECONDS)
        raise NotSent(
            f"Telegram asks to wait {wait:g} s before {method}.", "It is sent then.", retry_after=wait
        )
    if parameters.migrate_to_chat_id is not None:
        new = str(parameters.migrate_to_chat_id)
        raise _refuse("moved", f"The chat has the id {new} now", to=new)
    if code == HTTPStatus.CONFLICT and method == "getUpdates":
        raise PollConflict(described)
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND):
        raise _refuse("auth", f"Telegram does not accept the token ({described})")
    if code == HTTPStatus.FORBIDDEN:
        raise _refuse("forbidden", f"Telegram refused {method}: {described}")
    if 400 <= code < 500:
        lowered = described.lower()
        kinds: list[RefusalKind] = [kind for text, kind in _REFUSALS if text in lowered]
        raise _refuse(kinds[0] if kinds else "forbidden", f"Telegram refused {method}: {described}")
    raise _doubt(method, f"answered {code}")


def _refuse(kind: RefusalKind, what: str, *, to: str | None = None) -> Refused:
    return Refused(f"{what}.", _HINTS[kind], kind=kind, to=to)


def _doubt(method: str, what: str) -> Unsure:
    return Unsure(
        f"Telegram {what}, so {method} may have had its effect.", "Check the chat before you retry it."
    )
