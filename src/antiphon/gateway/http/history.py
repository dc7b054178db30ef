"""Transcripts over HTTP: a page as JSON or a live stream of server-sent events. Also stops sessions.

Every event of a stream has the id `<sessionId>:<seq>`, so that a client that reconnects gets the entries after the last
one it saw, each once and in order. Where that is not possible, it gets an `event: gap`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import msgspec
from sse_starlette import ServerSentEvent
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from antiphon import access
from antiphon.access import Caller
from antiphon.bus import MessageAppended, SessionChanged
from antiphon.engine.sessions.transcripts import DEFAULT_HISTORY_ENTRIES, MAX_HISTORY_ENTRIES, HistoryFilter
from antiphon.errors import Conflict, InvalidInput, InvalidKey
from antiphon.gateway import wire
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.http.responses import EventStream, StreamSlots, build_json_response, build_sse_event
from antiphon.gateway.state import GatewayState
from antiphon.operations.operations import Operations
from antiphon.operations.transcript_types import HistoryPage

CLIENT_RETRY_DELAY_MS = 1000  # before a disconnected client reconnects
_BOOLEANS_BY_TEXT = {"1": True, "true": True, "0": False, "false": False, "": False}


class StreamPosition(msgspec.Struct, frozen=True):
    """A point in a conversation."""

    session_id: str
    seq: int

    def __str__(self) -> str:
        return f"{self.session_id}:{self.seq}"


class HistoryResponse(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A page of a transcript, oldest entry first. `items` and `messages` are the same."""

    session_key: str
    session_id: str
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    has_more: bool
    total: int
    next_cursor: str | None = None


class KillResponse(msgspec.Struct, frozen=True):
    ok: bool
    killed: bool


async def get_history(
    gateway: GatewayState, slots: StreamSlots, identity: ClientIdentity, request: Request
) -> Response:
    session = read_session_from_path(request, "/history")
    filter = _parse_filter(request.query_params)
    operations, caller = gateway.app.operations, identity.to_caller()
    _check_session_key(operations, caller, session)
    if not _is_stream(request):
        return build_json_response(
            format_history_page(await operations.transcripts.read(caller, session, filter))
        )
    stream = HistoryStream(operations, caller, session, filter)
    events = stream.stream_events(request.headers.get("last-event-id"))
    return await EventStream.open(events, gateway, slots, identity)


async def post_kill(gateway: GatewayState, caller: Caller, request: Request) -> Response:
    """Stop the running and queued runs of a session; nothing is deleted."""
    stopped = await gateway.app.operations.runs.stop(caller, read_session_from_path(request, "/kill"))
    return build_json_response(KillResponse(ok=True, killed=bool(stopped.run_ids)))


def read_session_from_path(request: Request, suffix: str) -> str:
    """Return the session named in the path between `/sessions/` and `suffix`, decoded exactly once.

    Reads the raw path: the matched path is already decoded, so an id that contains `%` would be decoded twice.
    """
    path: bytes = request.scope.get("raw_path") or b""
    text = path.decode("ascii", "replace")
    try:
        is_session_path = text.startswith("/sessions/") and text.endswith(suffix)
        session = unquote(text[len("/sessions/") : -len(suffix)], errors="strict") if is_session_path else ""
    except UnicodeDecodeError:
        session = ""
    if not session.strip():
        raise InvalidInput(
            "The path names no session.", f"Write /sessions/<key, percent-encoded>{suffix}.", field="key"
        )
    return session


def _check_session_key(operations: Operations, caller: Caller, session: str) -> None:
    """Answer an invalid session key with 404, like the key of a session that does not exist."""
    try:
        operations.sessions.is_main(caller, session)
    except InvalidKey:
        access.require_scope(caller, "read")
        raise access.build_session_missing_error(session) from None


def format_history_page(page: HistoryPage) -> HistoryResponse:
    messages = [wire.format_http_history_item(item) for item in page.messages]
    return HistoryResponse(
        page.session_key, page.session_id, messages, messages, page.has_more, page.total, page.next_cursor
    )


class HistoryStream:
    """The event stream of one session for one reader."""

    def __init__(self, operations: Operations, caller: Caller, session: str, filter: HistoryFilter) -> None:
        self._operations = operations
        self._caller = caller
        self._session = session
        self._key = session
        self._history_filter = filter

    async def stream_events(self, last_event_id: str | None) -> AsyncGenerator[ServerSentEvent]:
        page = await self._load_page()
        yield ServerSentEvent(retry=CLIENT_RETRY_DELAY_MS, sep="\n")
        position = StreamPosition(page.session_id, page.total)
        if last_event_id is not None and (resumed := _find_resume_position(last_event_id, position)):
            position = resumed
        else:
            if last_event_id is not None:
                yield self._format_gap_event(page.session_id, _explain_gap(last_event_id, position))
            yield build_sse_event(format_history_page(page), event="history", id=str(position))
        while True:
            try:
                async with aclosing(self._follow(position)) as live:
                    async for event in live:
                        yield event
                return
            except Conflict:  # the conversation ended before following began
                page = await self._load_page()
                position = StreamPosition(page.session_id, page.total)
                yield self._format_gap_event(page.session_id, "reset")
                yield build_sse_event(format_history_page(page), event="history", id=str(position))

    async def _load_page(self) -> HistoryPage:
        page = await self._operations.transcripts.read(self._caller, self._session, self._history_filter)
        self._key = page.session_key
        return page

    async def _follow(self, position: StreamPosition) -> AsyncGenerator[ServerSentEvent]:
        """Follow by conversation id, not by session key: a number is only valid within its conversation."""
        feed = self._operations.transcripts.follow(self._caller, position.session_id, position.seq)
        async with aclosing(feed):
            async for event in feed:
                if isinstance(event, MessageAppended):
                    if (formatted := self._format_message_event(event)) is not None:
                        yield formatted
                elif isinstance(event, SessionChanged) and event.reason == "renewed":
                    yield self._format_gap_event(event.session_id, "reset")
                elif isinstance(event, SessionChanged) and event.reason == "delete":
                    yield self._format_gap_event(position.session_id, "deleted")

    def _format_message_event(self, event: MessageAppended) -> ServerSentEvent | None:
        item = wire.build_appended_item(event, role_if_damaged="unknown")
        if item["role"] == "toolResult" and not self._history_filter.include_tools:
            return None
        data = {
            "sessionKey": event.session_key,
            "sessionId": event.session_id,
            "message": wire.format_http_history_item(item),
            "messageId": event.entry,
            "messageSeq": event.seq,
        }
        return build_sse_event(data, event="message", id=str(StreamPosition(event.session_id, event.seq)))

    def _format_gap_event(self, session_id: str | None, reason: str) -> ServerSentEvent:
        data = {"sessionKey": self._key, "sessionId": session_id, "reason": reason}
        return build_sse_event(data, event="gap")


def _find_resume_position(last_event_id: str, end: StreamPosition) -> StreamPosition | None:
    """Return where the client stopped; None if that is not a position in the current conversation."""
    session_id, _, seq = last_event_id.strip().rpartition(":")
    if session_id != end.session_id or (number := _parse_number(seq)) is None or number > end.seq:
        return None
    return StreamPosition(session_id, number)


def _explain_gap(last_event_id: str, end: StreamPosition) -> str:
    return "ahead" if last_event_id.startswith(f"{end.session_id}:") else "reset"


# --- query parameters ---


def _is_stream(request: Request) -> bool:
    if request.method == "HEAD":
        return False  # a HEAD response has no body
    return _parse_flag(request.query_params, "follow") or "text/event-stream" in request.headers.get(
        "accept", ""
    )


def _parse_filter(query: QueryParams) -> HistoryFilter:
    cursor = query.get("cursor")
    return HistoryFilter(
        limit=_parse_limit(query.get("limit")),
        before=None if cursor is None else wire.parse_cursor(cursor),
        include_tools=_parse_flag(query, "includeTools"),
    )


def _parse_limit(text: str | None) -> int:
    number = (
        DEFAULT_HISTORY_ENTRIES if text is None else _parse_number(text[:17])
    )  # 17 digits are enough for any limit
    if number is None or number < 1:
        raise InvalidInput(
            f"'limit' is {(text or '')[:40]!r}.",
            f"Use a whole number from 1; anything above {MAX_HISTORY_ENTRIES} counts as {MAX_HISTORY_ENTRIES}.",
            field="limit",
        )
    return min(number, MAX_HISTORY_ENTRIES)


def _parse_flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "")
    if text.lower() not in _BOOLEANS_BY_TEXT:
        raise InvalidInput(f"{name!r} is {text[:40]!r}.", "Use 1 or 0.", field=name)
    return _BOOLEANS_BY_TEXT[text.lower()]


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else None
