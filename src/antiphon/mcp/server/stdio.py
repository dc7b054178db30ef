"""Carries MCP between standard input and output and the `/mcp` of a gateway.

Messages pass unchanged in both directions; only the headers that HTTP requires are added. So a program that starts
`antiphon mcp serve` gets what the gateway offers, in either generation of the specification, and the gateway may be
restarted meanwhile. Nothing of MCP is imported here, so it starts fast.

A request that may have reached the gateway is never sent again.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import quote

import httpx2
import msgspec

from antiphon.errors import AntiphonError, Unavailable
from antiphon.mcp.server import SESSION_KEY_HEADER
from antiphon.standard_streams import LineWriter, read_lines

MAX_LINE_BYTES = 8 * 2**20  # of one message; the gateway accepts no larger ones
MAX_OPEN_REQUESTS = 100
EOF_GRACE_SECONDS = 5.0  # for requests to be answered after the end of the input
CONNECT_TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 60.0  # after which a gateway counts as gone; it sends something every 15 s
KEEPALIVE_SECONDS = 3.0  # for idle connections; the gateway closes them after 5

PARSE_ERROR_CODE, INVALID_REQUEST_CODE, INTERNAL_ERROR_CODE = -32700, -32600, -32603
VERSION_META_KEY = "io.modelcontextprotocol/protocolVersion"
NAME_PARAMETER_BY_METHOD = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""The parameter that a request repeats in the header `Mcp-Name`."""

_PLAIN_HEADER_PATTERN = re.compile(r"(?!=\?base64\?)[!-~]([ -~]*[!-~])?")

Json = dict[str, Any]
RequestId = str | int


class Endpoint(msgspec.Struct, frozen=True):
    """The address of a gateway's `/mcp`, and the secret to authenticate with. `repr` leaves the secret out."""

    url: str
    secret: str | None

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r})"


FindEndpoints = Callable[[], Sequence[Endpoint]]
"""Returns the gateways to try in order. An error says how to start one."""


class StdioBridge:
    """Serves one client on file descriptors until the end of its input."""

    def __init__(
        self,
        find_endpoints: FindEndpoints,
        *,
        session_key: str | None,
        report: Callable[[AntiphonError], None],
        input_fd: int = 0,
        output_fd: int = 1,
    ) -> None:
        """`report` is called with each failure to reach a gateway, which clients often do not show."""
        self._find_endpoints = find_endpoints
        self._endpoints: Sequence[Endpoint] = ()
        self._identity = {} if session_key is None else {SESSION_KEY_HEADER: quote(session_key, safe=":@")}
        self._report = report
        self._input_fd, self._output = input_fd, LineWriter(output_fd)
        self._negotiated_version: str | None = None
        self._requests: dict[RequestId, asyncio.Task[None]] = {}
        self._http: httpx2.AsyncClient
        self.has_reached_gateway = False

    async def run(self) -> None:
        try:
            self._endpoints = self._find_endpoints()
        except AntiphonError as error:
            self._report(error)
        async with httpx2.AsyncClient(
            timeout=httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_TIMEOUT_SECONDS),
            limits=httpx2.Limits(max_connections=MAX_OPEN_REQUESTS + 1, keepalive_expiry=KEEPALIVE_SECONDS),
            trust_env=False,
        ) as self._http:
            try:
                async for line in read_lines(self._input_fd, MAX_LINE_BYTES):
                    await self._receive(line)
                if self._requests:
                    await asyncio.wait(self._requests.values(), timeout=EOF_GRACE_SECONDS)
            finally:
                pending = list(self._requests.values())
                for task in pending:
                    task.cancel()
                await asyncio.gather(*pending, return_exceptions=True)

    async def _receive(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            message = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            await self._write_error(None, PARSE_ERROR_CODE, "The line is not JSON.")
            return
        if not isinstance(message, dict):
            await self._write_error(None, INVALID_REQUEST_CODE, "The message is not a JSON object.")
            return
        message = cast("Json", message)
        method, id = message.get("method"), message.get("id")
        if method is None:
            return  # an answer, although the server asks no questions
        if "id" not in message:
            self._handle_notification(message)
        elif not isinstance(method, str) or not isinstance(id, str | int) or id in self._requests:
            await self._write_error(
                None, INVALID_REQUEST_CODE, "The request needs a method and an id that is not in use."
            )
        elif len(self._requests) >= MAX_OPEN_REQUESTS:
            await self._write_error(
                id, INTERNAL_ERROR_CODE, f"{MAX_OPEN_REQUESTS} requests are open. Try later."
            )
        elif method == "initialize":
            await self._handle_request(id, message)  # first: later requests name the version that it settles
        else:
            task = asyncio.create_task(self._handle_request(id, message))
            self._requests[id] = task
            task.add_done_callback(lambda _: self._requests.pop(id, None))

    def _handle_notification(self, message: Json) -> None:
        """Drop a wait that the client gives up. The gateway needs no other notification."""
        params = message.get("params")
        if message["method"] == "notifications/cancelled" and isinstance(params, dict):
            id = cast("Json", params).get("requestId")
            request = self._requests.get(id) if isinstance(id, str | int) else None
            if request is not None:
                request.cancel()

    async def _handle_request(self, id: RequestId, message: Json) -> None:
        is_answered = False
        try:
            async for text in self._exchange(message):
                answer = cast("Json", msgspec.json.decode(text))
                if "method" not in answer:
                    is_answered = True
                    self._record_version(message, answer)
                    if answer.get("id") != id:  # the gateway refused the request without reading it
                        answer["id"] = id
                        text = msgspec.json.encode(answer)  # noqa: PLW2901 - everything else passes unchanged
                await self._write(text)
            if not is_answered:
                raise _build_lost_error("the answer ended early")
        except AntiphonError as error:
            self._report(error)
            await self._write_error(id, INTERNAL_ERROR_CODE, str(error))
        except (httpx2.HTTPError, ValueError) as error:
            lost = _build_lost_error(error)
            self._report(lost)
            await self._write_error(id, INTERNAL_ERROR_CODE, str(lost))

    def _record_version(self, request: Json, answer: Json) -> None:
        result = answer.get("result")
        if request["method"] == "initialize" and isinstance(result, dict):
            self._negotiated_version = cast("Json", result).get("protocolVersion")

    async def _exchange(self, message: Json) -> AsyncGenerator[bytes]:
        """Send a request and yield the messages that answer it."""
        response = await self._post(msgspec.json.encode(message), self._build_headers(message))
        try:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for line in _read_lines(response):
                    if line.startswith(b"data:"):
                        yield line.removeprefix(b"data:").strip()
            else:
                yield _parse_plain_answer(response.status_code, await response.aread())
        finally:
            await response.aclose()

    async def _post(self, content: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """Send a request to a gateway that can be reached. Changed addresses and tokens are looked up again."""
        used = self._endpoints
        for endpoint in used:
            with suppress(httpx2.ConnectError, httpx2.ConnectTimeout):
                response = await self._send(endpoint, content, headers)
                self.has_reached_gateway = True
                if response.status_code != 401:
                    return response
                await response.aclose()
        self._endpoints = self._find_endpoints()
        reason: object = "no address is known"
        for endpoint in self._endpoints:
            try:
                response = await self._send(endpoint, content, headers)
                self.has_reached_gateway = True
                return response
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                reason = error
        self._endpoints = ()
        raise Unavailable(
            f"The gateway cannot be reached ({reason}).",
            "Check the address, or start one with `antiphon up`.",
        )

    async def _send(self, endpoint: Endpoint, content: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        secret = {} if endpoint.secret is None else {"Authorization": f"Bearer {endpoint.secret}"}
        request = self._http.build_request(
            "POST", endpoint.url, content=content, headers={**headers, **self._identity, **secret}
        )
        return await self._http.send(request, stream=True)

    def _build_headers(self, message: Json) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        params = message.get("params")
        params = cast("Json", params) if isinstance(params, dict) else {}
        meta = params.get("_meta")
        version = cast("Json", meta).get(VERSION_META_KEY) if isinstance(meta, dict) else None
        if isinstance(version, str):
            headers["Mcp-Method"] = _encode_header(message["method"])
            name = params.get(NAME_PARAMETER_BY_METHOD.get(message["method"], ""))
            if isinstance(name, str):
                headers["Mcp-Name"] = _encode_header(name)
        else:
            version = None if message["method"] == "initialize" else self._negotiated_version
        if version is not None:
            headers["MCP-Protocol-Version"] = _encode_header(version)
        return headers

    async def _write_error(self, id: RequestId | None, code: int, text: str) -> None:
        await self._write(
            msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})
        )

    async def _write(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # the client is gone; the end of its input follows
            await self._output.write(message)


async def _read_lines(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """Yield the lines of an event stream. `aiter_lines` would also split at characters that a message may contain."""
    begun: list[bytes] = []
    async for chunk in response.aiter_bytes():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun.clear()
        begun.append(rest)


def _build_lost_error(reason: object) -> Unavailable:
    return Unavailable(
        f"The connection to the gateway was lost ({reason or type(reason).__name__}).",
        "The request may have taken effect: check before you repeat it, or repeat it with the same idempotencyKey.",
    )


def _parse_plain_answer(status: int, body: bytes) -> bytes:
    """Return the JSON-RPC message in a response, or one with the error that the gateway gave instead."""
    try:
        answer = msgspec.json.decode(body)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "jsonrpc" in answer:
        return msgspec.json.encode(answer)
    error = cast("Json", answer).get("error") if isinstance(answer, dict) else None
    text = cast("Json", error).get("message") if isinstance(error, dict) else None
    failure = {"code": INTERNAL_ERROR_CODE, "message": text or f"The gateway answered with HTTP {status}."}
    return msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": failure})


def _encode_header(value: str) -> str:
    """Return a value as MCP writes it into a header: in base64 unless it is plain text."""
    if _PLAIN_HEADER_PATTERN.fullmatch(value):
        return value
    return f"=?base64?{base64.b64encode(value.encode(errors='replace')).decode()}?="
