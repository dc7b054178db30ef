"""Subscriptions to the messages of one session: everything after a number, then everything new, exactly once.

A session that somebody subscribes to is followed once, however many subscribers it has; each message is encoded once
and handed to all. A subscriber that comes with a number first reads pages of history by itself, at the speed at which
it takes them, and joins the others when it has caught up. Since everything here runs in one event loop, between the
look at the last page and the joining nothing can slip through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from antiphon import keys
from antiphon.access import READ, Caller
from antiphon.bus import Event, MessageAppended, SessionChanged
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import frames, rows
from antiphon.gateway.connection import Connection
from antiphon.operations import HistoryFilter, Operations

log = logging.getLogger(__name__)

PAGE = 200
MOST = 200  # sessions that one connection may subscribe to
READER = Caller.operator({READ})

Announce = Callable[[dict[str, Any], Iterable[Connection]], None]
"""Called before a message is sent to these connections, so that none of its text is streamed to them afterwards."""


class Channel:
    """One followed session, under the key that operators see. `seq` is the last number handed out live."""

    def __init__(
        self, operations: Operations, announce: Announce, key: str, session_id: str, seq: int
    ) -> None:
        self.key = key
        self.session_id = session_id
        self.seq = seq
        self.seen: dict[Connection, int] = {}
        self.arriving: dict[Connection, object] = {}
        """Who is catching up, and the one visit of it that counts."""
        self._operations = operations
        self._announce = announce
        self.task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        return bool(self.seen or self.arriving)

    def drop(self, connection: Connection) -> None:
        self.seen.pop(connection, None)
        self.arriving.pop(connection, None)

    async def follow(self) -> None:
        feed = self._operations.follow(READER, self.key, self.seq, session_id=self.session_id)
        async with aclosing(feed):
            async for event in feed:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        if isinstance(event, SessionChanged) and event.session_id:
            self.session_id, self.seq = event.session_id, event.seq
            self.seen = dict.fromkeys(self.seen, event.seq)
            self._gap(list(self.seen), "reset")
        elif isinstance(event, MessageAppended):
            self.seq = event.seq
            message = rows.appended(event.body, event.entry, event.seq, event.run_id, internal=event.internal)
            text = _message(self.key, event.session_id, message)
            readers = [connection for connection, seen in self.seen.items() if event.seq > seen]
            self._announce(message, readers)
            for connection in readers:
                self.seen[connection] = event.seq
                connection.event(text)

    def _gap(self, connections: list[Connection], reason: str) -> None:
        for connection in connections:
            connection.event(gap(self.key, self.session_id, reason))


def _message(key: str, session_id: str, message: dict[str, Any]) -> str:
    return frames.event(
        "session.message",
        {
            "sessionKey": key,
            "sessionId": session_id,
            "message": message,
            "messageId": message["id"],
            "messageSeq": message["seq"],
        },
    )


def gap(key: str, session_id: str, reason: str) -> str:
    """What a subscriber saw before is not what this goes on from: read the history again."""
    payload = {"sessionKey": key, "sessionId": session_id, "reason": reason}
    return frames.event("session.gap", payload)


class Subscriptions:
    def __init__(self, operations: Operations, announce: Announce) -> None:
        self._operations = operations
        self._announce = announce
        self._channels: dict[str, Channel] = {}
        self._joined: dict[Connection, set[Channel]] = {}
        """What each connection is subscribed to; without it, who leaves would be looked for everywhere."""
        self._opening = asyncio.Lock()

    def subscribed(self, connection: Connection, key: str) -> bool:
        channel = self._channels.get(key)
        return channel is not None and (connection in channel.seen or connection in channel.arriving)

    async def add(
        self, connection: Connection, session: str, after: int | None, session_id: str | None
    ) -> dict[str, Any]:
        """Subscribe, and catch up in the background if a number was given."""
        page = await self._operations.history(
            connection.caller, session, HistoryFilter(limit=1, include_tools=True)
        )
        key = keys.spoken(page.session_key)
        if not self.subscribed(connection, key) and len(self._joined.get(connection, ())) >= MOST:
            raise InvalidInput(
                f"This connection is subscribed to {MOST} sessions already.",
                "Unsubscribe from one.",
                field="key",
            )
        channel = await self._channel(key)
        channel.drop(connection)
        self._joined.setdefault(connection, set()).add(channel)
        if after is None:
            channel.seen[connection] = channel.seq
        else:
            visit = channel.arriving[connection] = object()
            connection.start(lambda: self._catch_up(channel, connection, visit, after, session_id))
        return {
            "subscribed": True,
            "key": channel.key,
            "sessionId": channel.session_id,
            "lastSeq": channel.seq,
        }

    async def _channel(self, key: str) -> Channel:
        """The channel of a session, opened by whoever asks first."""
        async with self._opening:
            channel = self._channels.get(key)
            if channel is None:
                page = await self._operations.history(READER, key, HistoryFilter(limit=1, include_tools=True))
                channel = Channel(self._operations, self._announce, key, page.session_id, page.total)
                channel.task = asyncio.create_task(self._keep(channel))
                self._channels[key] = channel
            return channel

    async def _keep(self, channel: Channel) -> None:
        try:
            await channel.follow()
        except AntiphonError as error:
            log.warning("Session %r is not followed any more: %s", channel.key, error)
        except Exception:
            log.exception("Session %r is not followed any more", channel.key)
        finally:
            if self._channels.get(channel.key) is channel:
                del self._channels[channel.key]
            for connection in (*channel.seen, *channel.arriving):
                # A session that is gone, or a store that failed: it can be asked again.
                connection.event(gap(channel.key, channel.session_id, "ended"))
                self._part(channel, connection)

    async def _catch_up(
        self, channel: Channel, connection: Connection, visit: object, seq: int, session_id: str | None
    ) -> None:
        """After that number, or from the beginning if it is a number of another conversation."""
        known = channel.seq  # what is streamed now comes after it
        try:
            while True:
                wanted = HistoryFilter(limit=PAGE, include_tools=True, after=seq)
                page = await self._operations.history(connection.caller, channel.key, wanted)
                if channel.arriving.get(connection) is not visit:
                    return  # it has unsubscribed, or subscribed again, or the session is gone
                if seq > page.total or page.session_id != (session_id or page.session_id):
                    session_id, seq = page.session_id, 0
                    connection.event(gap(channel.key, session_id, "reset"))
                    continue
                session_id = page.session_id
                for item in page.messages:
                    await connection.room()
                    if channel.arriving.get(connection) is not visit:
                        return
                    seq = item["seq"]
                    self._announce(item, [connection] if seq > known else [])
                    connection.event(_message(channel.key, session_id, rows.message(item)))
                if not page.has_more and channel.session_id == session_id and channel.seq <= seq:
                    channel.drop(connection)
                    channel.seen[connection] = seq
                    return
                await connection.room()
        except NotFound:
            connection.event(gap(channel.key, channel.session_id, "ended"))
        except AntiphonError as error:
            log.warning("A subscription to %r ended: %s", channel.key, error)
            connection.close(1011, "a subscription failed; connect again")
        finally:
            if channel.arriving.get(connection) is visit:
                self._part(channel, connection)
            self._sweep(channel)

    def remove(self, connection: Connection, key: str) -> bool:
        channel = self._channels.get(key)
        if channel is None:
            return False
        found = self.subscribed(connection, key)
        self._part(channel, connection)
        self._sweep(channel)
        return found

    def leave(self, connection: Connection) -> None:
        for channel in self._joined.pop(connection, ()):
            channel.drop(connection)
            self._sweep(channel)

    def _part(self, channel: Channel, connection: Connection) -> None:
        channel.drop(connection)
        joined = self._joined.get(connection, set())
        joined.discard(channel)
        if not joined:
            self._joined.pop(connection, None)

    def _sweep(self, channel: Channel) -> None:
        """A session that nobody wants is not followed."""
        if not channel.wanted and self._channels.get(channel.key) is channel:
            del self._channels[channel.key]
            if channel.task:
                channel.task.cancel()
