"""Subscriptions to the messages of one session: all after a sequence number, then new ones, exactly once.

A session is followed once, however many subscribers it has, and each message is encoded once for all of them.
A subscriber with a sequence number first gets pages of history at its own pace and joins the others when it has
caught up. All of this runs in one event loop, so no message is lost between the last page and joining.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from typing import Any

from antiphon import keys
from antiphon.bus import Event, MessageAppended, SessionChanged
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import wire
from antiphon.gateway.state import READ_ONLY_CALLER
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.connection import WebSocketConnection
from antiphon.operations.operations import Operations

log = logging.getLogger(__name__)

HISTORY_PAGE_ENTRIES = 200
MAX_SUBSCRIPTIONS_PER_CONNECTION = 200

BeforeMessage = Callable[[dict[str, Any], Iterable[WebSocketConnection]], None]
"""Called before a message is sent to these connections, so that none of its text is streamed to them afterwards."""


class FollowedSession:
    """One followed session, under the key that operators see. `seq` is the last number sent live."""

    def __init__(
        self, operations: Operations, before_message: BeforeMessage, key: str, session_id: str, seq: int
    ) -> None:
        self.key = key
        self.session_id = session_id
        self.seq = seq
        self.seen_seq: dict[WebSocketConnection, int] = {}
        self.catching_up: dict[WebSocketConnection, object] = {}
        """Connections that are catching up, with a token for the latest attempt; earlier attempts stop."""
        self._operations = operations
        self._before_message = before_message
        self.task: asyncio.Task[None] | None = None

    @property
    def has_subscribers(self) -> bool:
        return bool(self.seen_seq or self.catching_up)

    def remove_connection(self, connection: WebSocketConnection) -> None:
        self.seen_seq.pop(connection, None)
        self.catching_up.pop(connection, None)

    async def follow(self) -> None:
        feed = self._operations.transcripts.follow(
            READ_ONLY_CALLER, self.key, self.seq, session_id=self.session_id
        )
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
            message = wire.format_appended_entry(event)
            text = encode_message_event(self.key, event.session_id, message)
            readers = [connection for connection, seen in self.seen_seq.items() if event.seq > seen]
            self._before_message(message, readers)
            for connection in readers:
                self.seen_seq[connection] = event.seq
                connection.send_event(text)

    def _send_gap(self, connections: list[WebSocketConnection], reason: str) -> None:
        for connection in connections:
            connection.send_event(encode_gap_event(self.key, self.session_id, reason))


def encode_message_event(key: str, session_id: str, message: dict[str, Any]) -> str:
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
    def __init__(self, operations: Operations, before_message: BeforeMessage) -> None:
        self._operations = operations
        self._before_message = before_message
        self._followed_sessions: dict[str, FollowedSession] = {}
        self._sessions_by_connection: dict[WebSocketConnection, set[FollowedSession]] = {}
        """Sessions by connection, so that removing a connection does not scan all sessions."""
        self._open_lock = asyncio.Lock()

    def get_subscribers(self, key: str) -> AbstractSet[WebSocketConnection]:
        followed = self._followed_sessions.get(key)
        return followed.seen_seq.keys() | followed.catching_up.keys() if followed else frozenset()

    def is_subscribed(self, connection: WebSocketConnection, key: str) -> bool:
        followed = self._followed_sessions.get(key)
        return followed is not None and (
            connection in followed.seen_seq or connection in followed.catching_up
        )

    async def subscribe(
        self, connection: WebSocketConnection, session: str, after: int | None, session_id: str | None
    ) -> dict[str, Any]:
        """Subscribe a connection, and catch up in the background if `after` is given."""
        page = await self._operations.transcripts.read(
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
        followed = await self._open_session(key)
        followed.remove_connection(connection)
        self._sessions_by_connection.setdefault(connection, set()).add(followed)
        if after is None:
            followed.seen_seq[connection] = followed.seq
        else:
            attempt = followed.catching_up[connection] = object()
            connection.start_task(self._catch_up(followed, connection, attempt, after, session_id))
        return {
            "subscribed": True,
            "key": followed.key,
            "sessionId": followed.session_id,
            "lastSeq": followed.seq,
        }

    async def _open_session(self, key: str) -> FollowedSession:
        """Return the followed session with this key; start following it if needed."""
        async with self._open_lock:
            followed = self._followed_sessions.get(key)
            if followed is None:
                page = await self._operations.transcripts.read(
                    READ_ONLY_CALLER, key, HistoryFilter(limit=1, include_tools=True)
                )
                followed = FollowedSession(
                    self._operations, self._before_message, key, page.session_id, page.total
                )
                followed.task = asyncio.create_task(self._run_session(followed))
                self._followed_sessions[key] = followed
            return followed

    async def _run_session(self, followed: FollowedSession) -> None:
        try:
            await followed.follow()
        except AntiphonError as error:
            log.warning("Stopped following session %r: %s", followed.key, error)
        except Exception:
            log.exception("Stopped following session %r", followed.key)
        finally:
            if self._followed_sessions.get(followed.key) is followed:
                del self._followed_sessions[followed.key]
            for connection in (*followed.seen_seq, *followed.catching_up):
                # The session is gone or the store failed; the client can subscribe again.
                connection.send_event(encode_gap_event(followed.key, followed.session_id, "ended"))
                self._detach(followed, connection)

    async def _catch_up(
        self,
        followed: FollowedSession,
        connection: WebSocketConnection,
        attempt: object,
        seq: int,
        session_id: str | None,
    ) -> None:
        """Send the history after `seq` (all of it if `seq` is of another conversation), then join the live feed."""
        known = followed.seq  # text streamed from now on belongs to later entries
        try:
            while True:
                filter = HistoryFilter(limit=HISTORY_PAGE_ENTRIES, include_tools=True, after=seq)
                page = await self._operations.transcripts.read(connection.caller, followed.key, filter)
                if followed.catching_up.get(connection) is not attempt:
                    return  # unsubscribed, subscribed again, or the session is gone
                if seq > page.total or page.session_id != (session_id or page.session_id):
                    session_id, seq = page.session_id, 0
                    connection.send_event(encode_gap_event(followed.key, session_id, "reset"))
                    continue
                session_id = page.session_id
                for item in page.messages:
                    await connection.wait_for_room()
                    if followed.catching_up.get(connection) is not attempt:
                        return
                    seq = item["seq"]
                    self._before_message(item, [connection] if seq > known else [])
                    connection.send_event(
                        encode_message_event(followed.key, session_id, wire.format_history_item(item))
                    )
                if not page.has_more and followed.session_id == session_id and followed.seq <= seq:
                    followed.remove_connection(connection)
                    followed.seen_seq[connection] = seq
                    return
                await connection.wait_for_room()
        except NotFound:
            connection.send_event(encode_gap_event(followed.key, followed.session_id, "ended"))
        except AntiphonError as error:
            log.warning("Subscription to %r failed: %s", followed.key, error)
            connection.close(1011, "a subscription failed; connect again")
        finally:
            if followed.catching_up.get(connection) is attempt:
                self._detach(followed, connection)
            self._stop_if_unused(followed)

    def unsubscribe(self, connection: WebSocketConnection, key: str) -> bool:
        followed = self._followed_sessions.get(key)
        if followed is None:
            return False
        found = self.is_subscribed(connection, key)
        self._detach(followed, connection)
        self._stop_if_unused(followed)
        return found

    def remove_connection(self, connection: WebSocketConnection) -> None:
        for followed in self._sessions_by_connection.pop(connection, ()):
            followed.remove_connection(connection)
            self._stop_if_unused(followed)

    def _detach(self, followed: FollowedSession, connection: WebSocketConnection) -> None:
        followed.remove_connection(connection)
        joined = self._sessions_by_connection.get(connection, set())
        joined.discard(followed)
        if not joined:
            self._sessions_by_connection.pop(connection, None)

    def _stop_if_unused(self, followed: FollowedSession) -> None:
        """Stop following a session without subscribers."""
        if not followed.has_subscribers and self._followed_sessions.get(followed.key) is followed:
            del self._followed_sessions[followed.key]
            if followed.task:
                followed.task.cancel()
