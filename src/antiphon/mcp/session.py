"""One connection to a server: a task that opens it, keeps its list of tools up to date, and closes it.

The library closes a broken connection by cancelling the task that opened it. That task belongs to the connection alone;
calls are made by others, and a cancellation that they did not ask for becomes an error of the call. This module imports
the library, which takes a second, so it is itself imported in a thread when the first server is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import mcp_types
from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from antiphon import __version__
from antiphon.child_processes.text import clean_text
from antiphon.errors import AntiphonError
from antiphon.mcp.http import HttpTransport
from antiphon.mcp.listings import (
    MAX_LIST_PAGES,
    MAX_REASON_CHARACTERS,
    MAX_TOOLS_PER_SERVER,
    Listing,
    RawTool,
    build_listing,
)
from antiphon.mcp.requests import (
    KEY_META_NAME,
    NEEDS_LOGIN_CODE,
    NO_ANSWER_CODE,
    NOT_SENT_CODE,
    RequestLost,
    SentRequests,
)
from antiphon.mcp.stdio import StdioTransport

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)

LIST_TIMEOUT_SECONDS = 20.0
CLOSE_TIMEOUT_SECONDS = 8.0
CANCEL_GRACE_SECONDS = 1.0
REFRESH_INTERVAL_SECONDS = 1.0  # between two lists of tools, however often the server reports a change
REFRESH_PAUSE_FACTOR = 20.0  # times as long as the list took, since a huge one holds up the gateway
MAX_REFRESH_PAUSE_SECONDS = 60.0
SUBSCRIBE_RETRY_SECONDS = 5.0
SESSION_ENDED_TEXT = "Session terminated"  # the library's text if the server has forgotten the session


class ConnectionFailed(Exception):
    """A connection could not be made. The text completes "The MCP server … cannot be used: …"."""

    def __init__(self, reason: str, *, needs_login: bool = False) -> None:
        super().__init__(reason)
        self.needs_login = needs_login


class CallFailed(Exception):
    """The server has answered a call with an error of the protocol. The text is the server's."""


class CallTimedOut(Exception):
    """The server has not answered a call in time."""


class ServerSession:
    """A connection to a server. `on_listing` is called when the tools have changed, `on_closed` when it has ended."""

    def __init__(
        self,
        transport: StdioTransport | HttpTransport,
        sent: SentRequests,
        *,
        is_legacy: bool,
        on_listing: Callable[[Listing], None] | None = None,
        on_closed: Callable[[ServerSession, str], None] | None = None,
    ) -> None:
        self._transport = transport
        self._sent = sent
        self._is_legacy = is_legacy
        self._on_listing = on_listing
        self._on_closed = on_closed
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listing: asyncio.Future[Listing] = asyncio.get_running_loop().create_future()
        self._is_closed_by_us = False

    @property
    def is_open(self) -> bool:
        return self._client is not None and not self._transport.closed.is_set()

    async def open(self) -> Listing:
        """Connect, and return what the server offers.

        Raises:
            ConnectionFailed: it cannot be used.
        """
        self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._listing)

    async def close(self) -> None:
        """End the connection, and with it the process of a stdio server."""
        self._is_closed_by_us = True
        self._closing.set()
        if self._task is not None and not self._task.done():
            if not self._listing.done():
                self._task.cancel()
            _, running = await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_SECONDS)
            if running:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_SECONDS)

    # --- the task of the connection ---

    async def _run(self) -> None:
        reason, needs_login = "the connection was closed", False
        try:
            async with Client(
                self._transport.open(),
                client_info=mcp_types.Implementation(name="antiphon", version=__version__),
                mode="legacy" if self._is_legacy else "auto",
                message_handler=self._handle_message,
                cache=None,
                read_timeout_seconds=LIST_TIMEOUT_SECONDS,
            ) as client:
                listing = await _list_tools(client)
                self._client = client
                self._listing.set_result(listing)
                await self._keep_listing(client)
        except asyncio.CancelledError:
            pass  # asked for, or the library's way to say that the connection broke
        except BaseException as error:
            reason, needs_login = describe_failure(error)
            log.debug("A connection to an MCP server broke", exc_info=error)
        finally:
            self._client = None
            if isinstance(self._transport, StdioTransport):
                reason = _describe_stdio_end(self._transport, reason)
            if not self._listing.done():
                self._listing.set_exception(ConnectionFailed(reason, needs_login=needs_login))
                self._listing.exception()  # it may be that nothing waits for it any more
            elif self._on_closed is not None and not self._is_closed_by_us:
                self._on_closed(self, reason)

    async def _keep_listing(self, client: Client) -> None:
        """Wait until the connection ends; list the tools again whenever they have changed."""
        subscription: asyncio.Task[None] | None = None
        capability = client.server_capabilities.tools
        if client.protocol_version in MODERN_PROTOCOL_VERSIONS and capability and capability.list_changed:
            subscription = asyncio.create_task(self._subscribe(client))
        try:
            while not await self._wait_for_change():
                began = time.monotonic()
                try:
                    listing = await _list_tools(client)
                    if self._on_listing is not None:
                        self._on_listing(listing)
                except (MCPError, ValidationError) as error:
                    log.debug("The tools of an MCP server could not be listed again", exc_info=error)
                pause = min(REFRESH_PAUSE_FACTOR * (time.monotonic() - began), MAX_REFRESH_PAUSE_SECONDS)
                await _wait_for_any(
                    (self._closing, self._transport.closed), max(REFRESH_INTERVAL_SECONDS, pause)
                )
        finally:
            if subscription is not None:
                subscription.cancel()
                await asyncio.wait([subscription])

    async def _wait_for_change(self) -> bool:
        """Wait until the tools have changed. True if the connection is to end."""
        await _wait_for_any((self._closing, self._transport.closed, self._changed))
        self._changed.clear()
        return self._closing.is_set() or self._transport.closed.is_set()

    async def _subscribe(self, client: Client) -> None:
        """Subscribe to changes, which a server of the current specification sends as a stream of events."""
        while not self._closing.is_set():
            try:
                async with client.listen(tools_list_changed=True) as events:
                    async for _ in events:
                        self._changed.set()
            except ListenNotSupportedError:
                return
            except (MCPError, SubscriptionLost, TimeoutError):
                pass
            await _wait_for(self._closing, SUBSCRIBE_RETRY_SECONDS)
            self._changed.set()  # a change may have been missed meanwhile

    async def _handle_message(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._changed.set()

    # --- requests ---

    async def call_tool(
        self, name: str, arguments: dict[str, Any], *, key: str, timeout: float
    ) -> mcp_types.CallToolResult:
        """Call a tool. Errors are those of `_request`."""
        request = mcp_types.CallToolRequest(
            params=mcp_types.CallToolRequestParams(name=name, arguments=arguments, _meta={KEY_META_NAME: key})
        )
        return await self._request(request, mcp_types.CallToolResult, key, timeout)

    async def list_resources(
        self, cursor: str | None, *, key: str, timeout: float
    ) -> mcp_types.ListResourcesResult:
        params = mcp_types.PaginatedRequestParams(cursor=cursor, _meta={KEY_META_NAME: key})
        request = mcp_types.ListResourcesRequest(params=params)
        return await self._request(request, mcp_types.ListResourcesResult, key, timeout)

    async def read_resource(self, uri: str, *, key: str, timeout: float) -> mcp_types.ReadResourceResult:
        params = mcp_types.ReadResourceRequestParams(uri=uri, _meta={KEY_META_NAME: key})
        request = mcp_types.ReadResourceRequest(params=params)
        return await self._request(request, mcp_types.ReadResourceResult, key, timeout)

    async def list_templates(self, *, key: str) -> Sequence[mcp_types.ResourceTemplate]:
        """Return the templates of resource addresses; none if the server does not list them."""
        params = mcp_types.PaginatedRequestParams(_meta={KEY_META_NAME: key})
        request = mcp_types.ListResourceTemplatesRequest(params=params)
        try:
            listed = await self._request(
                request, mcp_types.ListResourceTemplatesResult, key, LIST_TIMEOUT_SECONDS
            )
        except (CallFailed, CallTimedOut):
            return ()
        return listed.resource_templates

    async def list_prompts(
        self, cursor: str | None, *, key: str, timeout: float
    ) -> mcp_types.ListPromptsResult:
        params = mcp_types.PaginatedRequestParams(cursor=cursor, _meta={KEY_META_NAME: key})
        request = mcp_types.ListPromptsRequest(params=params)
        return await self._request(request, mcp_types.ListPromptsResult, key, timeout)

    async def get_prompt(
        self, name: str, arguments: dict[str, str], *, key: str, timeout: float
    ) -> mcp_types.GetPromptResult:
        params = mcp_types.GetPromptRequestParams(name=name, arguments=arguments, _meta={KEY_META_NAME: key})
        request = mcp_types.GetPromptRequest(params=params)
        return await self._request(request, mcp_types.GetPromptResult, key, timeout)

    async def _request(
        self, request: mcp_types.Request[Any, Any], result_type: type[R], key: str, timeout: float
    ) -> R:
        """Send a request and return its result.

        It does not go through `Client.call_tool`, which would check the result against a schema that the server has
        written, with all its regular expressions, in the event loop.

        Raises:
            RequestLost: there is no answer, and there will be none.
            CallTimedOut: the server has not answered in time.
            CallFailed: the server has answered with an error, or with an invalid result.
        """
        client = self._client
        if client is None or not self.is_open:
            raise RequestLost("the connection was closed", was_sent=False)
        try:
            return await _contain_cancellation(client.session.send_request(request, result_type, timeout))
        except asyncio.CancelledError:
            raise
        except _Abandoned:
            raise RequestLost("the connection was closed", was_sent=self._was_sent(key)) from None
        except MCPError as error:
            raise self._translate(error, key) from error
        except (ValidationError, ValueError) as error:
            raise CallFailed("its answer is not a result of the protocol") from error
        except Exception as error:
            raise RequestLost(describe_failure(error)[0], was_sent=self._was_sent(key)) from error
        finally:
            self._sent.discard(key)

    def _was_sent(self, key: str) -> bool:
        return key in self._sent if isinstance(self._transport, StdioTransport) else True

    def _translate(self, error: MCPError, key: str) -> Exception:
        text = clean_text(error.error.message, MAX_REASON_CHARACTERS)
        match error.error.code:
            case mcp_types.REQUEST_TIMEOUT:
                return CallTimedOut()
            case code if code in (NOT_SENT_CODE, NEEDS_LOGIN_CODE):
                return RequestLost(text, was_sent=False)
            case code if code == NO_ANSWER_CODE:
                return RequestLost(text, was_sent=True)
            case mcp_types.CONNECTION_CLOSED:
                return RequestLost(text, was_sent=self._was_sent(key))
            case mcp_types.INVALID_REQUEST if text == SESSION_ENDED_TEXT:
                return RequestLost("the server has forgotten the session", was_sent=False)
            case _:
                return CallFailed(text)


class _Abandoned(Exception):
    """Work was cancelled, but not by its caller."""


async def _contain_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Await work in a task of its own, so that only our own caller can cancel us."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_GRACE_SECONDS)
        raise
    if task.cancelled():
        raise _Abandoned
    return task.result()


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    waiting: Awaitable[Any] = event.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(waiting, seconds)


async def _wait_for_any(events: Iterable[asyncio.Event], seconds: float | None = None) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _list_tools(client: Client) -> Listing:
    """List what a server offers, up to a number of pages."""
    raw: list[RawTool] = []
    notes: list[str] = []
    cursor: str | None = None
    if client.server_capabilities.tools is not None:
        for _ in range(MAX_LIST_PAGES):
            page = await client.session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
            raw += map(_read_tool, page.tools)
            cursor = page.next_cursor
            if cursor is None or len(raw) > MAX_TOOLS_PER_SERVER:
                break
        else:
            notes.append(f"Its list has more than {MAX_LIST_PAGES} pages; the others are left out.")
    return build_listing(
        raw,
        instructions=client.instructions,
        has_resources=client.server_capabilities.resources is not None,
        has_prompts=client.server_capabilities.prompts is not None,
        notes=notes,
    )


def _read_tool(tool: mcp_types.Tool) -> RawTool:
    claims = tool.annotations
    return RawTool(
        name=tool.name,
        description=tool.description or tool.title,
        schema=tool.input_schema,
        only_reads=claims is not None and claims.read_only_hint is True,
        is_idempotent=claims is not None and claims.idempotent_hint is True,
    )


def _describe_stdio_end(transport: StdioTransport, reason: str) -> str:
    """Return why a stdio server cannot be used, with the line of its error output that names the error."""
    if transport.fault is not None:
        return transport.fault
    said = transport.errors.telling_line
    return f"{reason}; it printed: {said}".rstrip(".") if said else reason


def describe_failure(error: BaseException) -> tuple[str, bool]:
    """Return why a connection failed, and whether a login is needed. Errors may be in nested groups."""
    leaves = list(_list_leaves(error))
    described = [(_describe_error(leaf), leaf) for leaf in leaves]
    for reason, leaf in described:
        if reason is not None:
            return reason, isinstance(leaf, MCPError) and leaf.error.code == NEEDS_LOGIN_CODE
    return "the connection broke", False


def _describe_error(error: BaseException) -> str | None:
    reason: str | None = None
    match error:
        case AntiphonError():
            reason = f"{error.what} {error.hint}".rstrip(".")
        case MCPError() if error.error.code == mcp_types.CONNECTION_CLOSED:
            reason = "it ended, or closed the connection"
        case MCPError():
            reason = clean_text(error.error.message, MAX_REASON_CHARACTERS).rstrip(".")
        case TimeoutError():
            reason = "it did not answer in time"
        case ValidationError():
            reason = "what it says does not follow the protocol"
        case _:
            pass
    return reason


def _list_leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _list_leaves(inner)
    else:
        yield error
