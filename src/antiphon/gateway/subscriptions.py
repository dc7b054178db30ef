"""Subscriptions to the messages of one session: all after a sequence number, then new ones, exactly once.

A session is followed once, however many subscribers it has, and each message is encoded once for all of them.
A subscriber with a sequence number first gets pages of history at its own pace and joins the others when it has
caught up. All of this runs in one event loop, so no message is lost between the last page and joining.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from antiphon import keys
from antiphon.access import READ_SCOPE, Caller
from antiphon.bus import Event, MessageAppended, SessionChanged
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import wire
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import WebSocketConnection
from antiphon.operations import HistoryFilter, Operations

log = logging.getLogger(__name__)

HISTORY_PAGE_ENTRIES = 200
MAX_SUBSCRIPTIONS_PER_CONNECTION = 200
READ_ONLY_CALLER = Caller.operator({READ_SCOPE})

BeforeMessage = Callable[[dict[str, Any], Iterable[WebSocketConnection]], None]
"""Called before a message is sent to these connections, so that none of its text is streamed to them afterwards."""


class FollowedSession:
    """One followed session, under the key that operators see. `seq` is the last number sent live."""

    def __init__(
        self, operations: Operations, announce: BeforeMessage, key: str, session_id: str, seq: int
    ) -> None:
        self.key = key
        self.session_id = session_id
        self.seq = seq
        self.seen_seq: dict[WebSocketConnection, int] = {}
        self.catching_up: dict[WebSocketConnection, object] = {}
        """Connections that are catching up, with a token for the latest attempt; earlier attempts stop."""
        self._operations = operations
        self._before_message = announce
        self.task: asyncio.Task[None] | None = None

    @property
    def has_subscribers(self) -> bool:
        return bool(self.seen_seq or self.catching_up)

    def remove_connection(self, connection: WebSocketConnection) -> None:
        self.seen_seq.pop(connection, None)
        self.catching_up.pop(connection, None)

    async def follow(self) -> None:
        feed = self._operations.follow(READ_ONLY_CALLER, self.key, self.seq, session_id=self.session_id)
        async with aclosing(feed):
            async for event in feed:
                self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, SessionChanged) and event.session_id:
            self.session_id, self.seq = event.session_id, event.seq
            self.seen_seq = dict.fromkeys(self.seen_seq, event.seq)
            self._send_gap(list(self.seen_seq), "reset")
        elif isinstance(event, MessageAppended):
            self.seq = event.seq
            message = wire.format_appended_entry(
                event.body, event.entry, event.seq, event.run_id, internal=event.internal
            )
            text = _encode_message_event(self.key, event.session_id, message)
            readers = [connection for connection, seen in self.seen_seq.items() if event.seq > seen]
            self._before_message(message, readers)
            for connection in readers:
                self.seen_seq[connection] = event.seq
                connection.send_event(text)

    def _send_gap(self, connections: list[WebSocketConnection], reason: str) -> None:
        for connection in connections:
            connection.send_event(encode_gap_event(self.key, self.session_id, reason))


def _encode_message_event(key: str, session_id: str, message: dict[str, Any]) -> str:
    return frames.encode_event(
        "session.message",
        {
            "sessionKey": key,
            "sessionId": session_id,
            "message": message,
            "messageId": message["id"],
            "messageSeq": message["seq"],
        },
    )


def encode_gap_event(key: str, session_id: str, reason: str) -> str:
    """Return an event that tells a subscriber to read the history again: messages do not continue from what it saw."""
    payload = {"sessionKey": key, "sessionId": session_id, "reason": reason}
    return frames.encode_event("session.gap", payload)


class Subscriptions:
    def __init__(self, operations: Operations, announce: BeforeMessage) -> None:
        self._operations = operations
        self._before_message = announce
        self._followed_sessions: dict[str, FollowedSession] = {}
        self._sessions_by_connection: dict[WebSocketConnection, set[FollowedSession]] = {}
        """Sessions by connection, so that removing a connection does not scan all sessions."""
        self._open_lock = asyncio.Lock()

    def is_subscribed(self, connection: WebSocketConnection, key: str) -> bool:
        channel = self._followed_sessions.get(key)
        return channel is not None and (connection in channel.seen_seq or connection in channel.catching_up)

    async def subscribe(
        self, connection: WebSocketConnection, session: str, after: int | None, session_id: str | None
    ) -> dict[str, Any]:
        """Subscribe a connection, and catch up in the background if `after` is given."""
        page = await self._operations.read_history(
            connection.caller, session, HistoryFilter(limit=1, include_tools=True)
        )
        key = keys.display_full_key(page.session_key)
        if (
            not self.is_subscribed(connection, key)
            and len(self._sessions_by_connection.get(connection, ())) >= MAX_SUBSCRIPTIONS_PER_CONNECTION
        ):
            raise InvalidInput(
                f"This connection is subscribed to {MAX_SUBSCRIPTIONS_PER_CONNECTION} sessions already.",
                "Unsubscribe from one.",
                field="key",
            )
        channel = await self._open_session(key)
        channel.remove_connection(connection)
        self._sessions_by_connection.setdefault(connection, set()).add(channel)
        if after is None:
            channel.seen_seq[connection] = channel.seq
        else:
            visit = channel.catching_up[connection] = object()
            connection.start_task(lambda: self._catch_up(channel, connection, visit, after, session_id))
        return {
            "subscribed": True,
            "key": channel.key,
            "sessionId": channel.session_id,
            "lastSeq": channel.seq,
        }

    async def _open_session(self, key: str) -> FollowedSession:
        """Return the followed session with this key; start following it if needed."""
        async with self._open_lock:
            channel = self._followed_sessions.get(key)
            if channel is None:
                page = await self._operations.read_history(
                    READ_ONLY_CALLER, key, HistoryFilter(limit=1, include_tools=True)
                )
                channel = FollowedSession(
                    self._operations, self._before_message, key, page.session_id, page.total
                )
                channel.task = asyncio.create_task(self._run_session(channel))
                self._followed_sessions[key] = channel
            return channel

    async def _run_session(self, channel: FollowedSession) -> None:
        try:
            await channel.follow()
        except AntiphonError as error:
            log.warning("Session %r is not followed any more: %s", channel.key, error)
        except Exception:
            log.exception("Session %r is not followed any more", channel.key)
        finally:
            if self._followed_sessions.get(channel.key) is channel:
                del self._followed_sessions[channel.key]
            for connection in (*channel.seen_seq, *channel.catching_up):
                # The session is gone or the store failed; the client can subscribe again.
                connection.send_event(encode_gap_event(channel.key, channel.session_id, "ended"))
                self._detach(channel, connection)

    async def _catch_up(
        self,
        channel: FollowedSession,
        connection: WebSocketConnection,
        visit: object,
        seq: int,
        session_id: str | None,
    ) -> None:
        """Send the history after `seq` (all of it if `seq` is of another conversation), then join the live feed."""
        known = channel.seq  # text streamed from now on belongs to later entries
        try:
            while True:
                wanted = HistoryFilter(limit=HISTORY_PAGE_ENTRIES, include_tools=True, after=seq)
                page = await self._operations.read_history(connection.caller, channel.key, wanted)
                if channel.catching_up.get(connection) is not visit:
                    return  # unsubscribed, subscribed again, or the session is gone
                if seq > page.total or page.session_id != (session_id or page.session_id):
                    session_id, seq = page.session_id, 0
                    connection.send_event(encode_gap_event(channel.key, session_id, "reset"))
                    continue
                session_id = page.session_id
                for item in page.messages:
                    await connection.wait_for_room()
                    if channel.catching_up.get(connection) is not visit:
                        return
                    seq = item["seq"]
                    self._before_message(item, [connection] if seq > known else [])
                    connection.send_event(
                        _encode_message_event(channel.key, session_id, wire.format_history_item(item))
                    )
                if not page.has_more and channel.session_id == session_id and channel.seq <= seq:
                    channel.remove_connection(connection)
                    channel.seen_seq[connection] = seq
                    return
                await connection.wait_for_room()
        except NotFound:
            connection.send_event(encode_gap_event(channel.key, channel.session_id, "ended"))
        except AntiphonError as error:
            log.warning("A subscription to %r ended: %s", channel.key, error)
            connection.close(1011, "a subscription failed; connect again")
        finally:
            if channel.catching_up.get(connection) is visit:
                self._detach(channel, connection)
            self._stop_if_unused(channel)

    def unsubscribe(self, connection: WebSocketConnection, key: str) -> bool:
        channel = self._followed_sessions.get(key)
        if channel is None:
            return False
        found = self.is_subscribed(connection, key)
        self._detach(channel, connection)
        self._stop_if_unused(channel)
        return found

    def remove_connection(self, connection: WebSocketConnection) -> None:
        for channel in self._sessions_by_connection.pop(connection, ()):
            channel.remove_connection(connection)
            self._stop_if_unused(channel)

    def _detach(self, channel: FollowedSession, connection: WebSocketConnection) -> None:
        channel.remove_connection(connection)
        joined = self._sessions_by_connection.get(connection, set())
        joined.discard(channel)
        if not joined:
            self._sessions_by_connection.pop(connection, None)

    def _stop_if_unused(self, channel: FollowedSession) -> None:
        """Stop following a session without subscribers."""
        if not channel.has_subscribers and self._followed_sessions.get(channel.key) is channel:
            del self._followed_sessions[channel.key]
            if channel.task:
                channel.task.cancel()
