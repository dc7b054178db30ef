"""Client of a gateway: the methods of `Operations` as calls over its WebSocket.

A lost connection is re-established with jittered exponential backoff for a bounded time. Requests that are safe to
repeat are then sent again: messages carry an idempotency key, waits and reads have no side effects, and a feed
resumes after the last sequence number it has yielded.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from antiphon.bus import Event, RunChanged, SessionChanged
from antiphon.client import parsing
from antiphon.client.connection import (
    RESPONSE_TIMEOUT_SECONDS,
    GatewayConnection,
    GatewayUnreachable,
    Json,
    ReceivedEvent,
    Site,
)
from antiphon.client.feed import FeedPosition, is_feed_ended
from antiphon.errors import InvalidInput, NotFound, TooLarge
from antiphon.operations.collaboration_types import (
    DeliveryPage,
    DeliveryView,
    ExchangeDetail,
    ExchangePage,
    SendResult,
    SpawnResult,
    TaskView,
)
from antiphon.operations.transcript_types import ConversationView, HistoryPage, SearchPage
from antiphon.operations.types import (
    AgentSummary,
    ApprovalView,
    GrantView,
    MessageReceipt,
    PairingView,
    ReplicaView,
    RunView,
    SessionPage,
    SessionView,
    build_run_ended_event,
)
from antiphon.send_policy import parse_send_command

if TYPE_CHECKING:  # not imported at run time: short commands would pay for it
    from antiphon.engine.sessions.transcripts import HistoryFilter
    from antiphon.operations.types import IncomingMessage, ListFilter, SendRequest, SpawnRequest, StopView

__all__ = ["Client", "GatewayUnreachable", "ReplicaRotation", "Site"]

RECONNECT_TIMEOUT_SECONDS = 60.0  # how long reconnecting is attempted
FIRST_RECONNECT_DELAY_SECONDS, MAX_RECONNECT_DELAY_SECONDS = 0.1, 3.0  # between two attempts
MAX_MESSAGE_LAG_SECONDS = 2.0  # how long a run's messages may arrive after its end
RECENT_ENTRIES_CHECKED = 8  # entries searched for the last one of a run that has just ended
CHAT_ORIGINS = ("chat", "agent")  # origins of a person's messages; a gateway treats them alike


def _ignore_change(_: str) -> None: ...


class ReplicaRotation:
    """The addresses of a cluster's replicas, tried in rotation."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = [*sites]
        self._next = 0

    async def get_next_site(self) -> Site:
        site = self.sites[self._next % len(self.sites)]
        self._next += 1
        return site

    def add_replicas(self, known: Site, addresses: Sequence[str]) -> None:
        """Add the replicas that a known one lists, skipping those where the secret would be less protected.

        A replica reached over TLS adds only replicas with TLS; one on this machine also adds others on this machine.
        """
        protection = _rate_protection(known.url)
        urls = {site.url.rstrip("/") for site in self.sites}
        self.sites += [
            Site(url, known.secret)
            for url in addresses
            if url.rstrip("/") not in urls and _rate_protection(url) >= protection
        ]


def _rate_protection(url: str) -> int:
    """Return how well a secret is protected in transit: 2 by TLS, 1 on this machine only, 0 not at all."""
    from ipaddress import ip_address  # noqa: PLC0415 - only for a client of replicas
    from urllib.parse import urlsplit  # noqa: PLC0415

    try:
        parts = urlsplit(url)
        if parts.scheme == "wss":
            return 2
        host = parts.hostname or ""
        return int(host == "localhost" or ip_address(host).is_loopback)
    except ValueError:  # a host name, which may belong to any machine
        return 0


class Client:
    """Client of a gateway. Use it as a context manager; entering it connects."""

    def __init__(
        self, find_site: Callable[[], Awaitable[Site]], on_change: Callable[[str], None] = _ignore_change
    ) -> None:
        """Create a client that is not connected yet.

        `find_site` is called before every connection attempt, because a gateway may come back at another address.
        `on_change` is called with a message when the connection is lost and when it is back.
        """
        self._find_site = find_site
        self._on_change = on_change
        self._connection: GatewayConnection | None = None
        self._connect_lock = asyncio.Lock()
        self._reconnect_until: float | None = None
        self._replicas: ReplicaRotation | None = None

    @classmethod
    def of_replicas(cls, sites: Sequence[Site], on_change: Callable[[str], None] = _ignore_change) -> Self:
        """Return a client that connects to the first of several replicas that answers."""
        replicas = ReplicaRotation(sites)
        client = cls(replicas.get_next_site, on_change)
        client._replicas = replicas
        return client

    async def __aenter__(self) -> Self:
        left = len(self._replicas.sites) if self._replicas else 1
        while self._connection is None:
            left -= 1
            try:
                self._connection = await GatewayConnection.open(await self._find_site())
            except GatewayUnreachable:
                if not left:
                    raise
        return self

    async def remember_replicas(self) -> None:
        """Fetch the addresses of the other replicas, to fail over to one of them."""
        if self._replicas:
            found = msgspec.convert((await self.call("status")).get("replicas") or [], list[ReplicaView])
            addresses = [replica.address for replica in found if replica.alive and replica.address]
            self._replicas.add_replicas(self.site, addresses)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection:
            await self._connection.close()

    @property
    def site(self) -> Site:
        assert self._connection is not None
        return self._connection.site

    @property
    def reconnect_deadline(self) -> float | None:
        """Loop time until which reconnecting is attempted; None while connected."""
        return self._reconnect_until

    async def call(
        self,
        method: str,
        params: Json | None = None,
        *,
        seconds: float = RESPONSE_TIMEOUT_SECONDS,
        retry: bool = True,
    ) -> Any:
        """Send a request and return its response; if the connection is lost, send it again unless `retry` is False."""
        loop = asyncio.get_running_loop()
        until = loop.time() + RECONNECT_TIMEOUT_SECONDS + seconds
        while True:
            connection = await self._get_connection()
            try:
                return await connection.request(method, params or {}, seconds)
            except GatewayUnreachable:
                if not retry or loop.time() > until:
                    raise
                await connection.close()  # it may still be open: the gateway does not answer, or is stopping

    async def _get_connection(self) -> GatewayConnection:
        """Return the connection, after reconnecting if it was lost."""
        async with self._connect_lock:
            assert self._connection is not None
            if self._connection.lost.is_set():
                if self._reconnect_until is None:  # one deadline for all concurrent callers
                    self._reconnect_until = asyncio.get_running_loop().time() + RECONNECT_TIMEOUT_SECONDS
                    self._on_change("Lost the connection to the gateway; reconnecting…")
                await self._connection.close()
                self._connection = await self._reconnect(self._reconnect_until)
                self._reconnect_until = None
                self._on_change("Reconnected.")
            return self._connection

    async def _reconnect(self, until: float) -> GatewayConnection:
        loop = asyncio.get_running_loop()
        pause = FIRST_RECONNECT_DELAY_SECONDS
        while True:
            try:
                return await GatewayConnection.open(await self._find_site())
            except GatewayUnreachable:
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - so that not all come at once
            pause = min(pause * 2, MAX_RECONNECT_DELAY_SECONDS)

    # --- messages and runs ---

    async def submit(self, message: IncomingMessage) -> MessageReceipt:
        _check_sendable(message)
        params: Json = {
            "sessionKey": message.session,
            "message": message.content,
            "idempotencyKey": _get_or_create_key(message.idempotency_key),
            "suppressCommandInterpretation": parse_send_command(str(message.content)) is None,
        }
        if message.thinking is not None:
            params["thinking"] = message.thinking
        if message.timeout_seconds is not None:
            params["timeoutMs"] = max(1, round(message.timeout_seconds * 1000))
        done = await self.call("chat.send", params)
        return MessageReceipt(
            run_id=done["runId"],
            session_key=done["sessionKey"],
            session_id=done["sessionId"],
            state=done["state"],
            new=done["status"] == "started",
        )

    async def wait(self, run_id: str, timeout: float) -> RunView:
        params = {"runId": run_id, "timeoutMs": round(timeout * 1000)}
        return parsing.parse_run_view(
            await self.call("agent.wait", params, seconds=timeout + RESPONSE_TIMEOUT_SECONDS)
        )

    async def get_run(self, run_id: str) -> RunView:
        return await self.wait(run_id, 0)

    async def list_unfinished(self, session: str) -> list[str]:
        return (await self._load_session_row(session))["activeRunIds"]

    async def stop(self, session: str, run_id: str | None = None) -> StopView:
        from antiphon.operations.types import StopView  # noqa: PLC0415 - see above

        params: Json = {"sessionKey": session, **({"runId": run_id} if run_id else {})}
        done = await self.call("chat.abort", params, retry=run_id is not None)
        return StopView(done["runIds"])

    # --- exchanges between sessions ---

    async def send(self, request: SendRequest, requester: str) -> SendResult:
        """Send a message from one session to another; the gateway waits for the reply."""
        params: Json = {
            "key": request.session,
            "message": request.message,
            "fromSessionKey": requester,
            "timeoutSeconds": request.timeout_seconds,
            "replyBack": request.reply_back,
            "announce": request.announce,
            "idempotencyKey": _get_or_create_key(request.idempotency_key),
        }
        seconds = request.timeout_seconds + RESPONSE_TIMEOUT_SECONDS
        return msgspec.convert(
            await self.call("sessions.send", _drop_none(params), seconds=seconds), SendResult
        )

    async def spawn(self, request: SpawnRequest, requester: str) -> SpawnResult:
        params: Json = {
            "task": request.task,
            "requesterSessionKey": requester,
            "label": request.label,
            "agentId": request.agent_id,
            "model": request.model,
            "thinking": request.thinking,
            "runTimeoutSeconds": request.run_timeout_seconds,
            "cleanup": request.cleanup,
            "attachments": msgspec.to_builtins(request.attachments),
            "announce": request.announce,
            "idempotencyKey": _get_or_create_key(request.idempotency_key),
        }
        return msgspec.convert(await self.call("sessions.spawn", _drop_none(params)), SpawnResult)

    async def list_subagents(self, session: str) -> list[TaskView]:
        found = await self.call("subagents.list", {"sessionKey": session})
        return msgspec.convert(found["subagents"], list[TaskView])

    async def get_report(self, run_id: str) -> str | None:
        return (await self.call("subagents.report", {"runId": run_id}))["report"]

    async def list_agents(self) -> list[AgentSummary]:
        return msgspec.convert((await self.call("agents.spawnable"))["agents"], list[AgentSummary])

    async def list_exchanges(
        self, session: str | None, *, unsettled: bool, limit: int, cursor: str | None = None
    ) -> ExchangePage:
        params: Json = {"sessionKey": session, "unsettled": unsettled, "limit": limit, "cursor": cursor}
        return msgspec.convert(await self.call("exchanges.list", _drop_none(params)), ExchangePage)

    async def get_exchange(self, reference: str) -> ExchangeDetail:
        return msgspec.convert(await self.call("exchanges.get", {"id": reference}), ExchangeDetail)

    async def list_approvals(self, session: str | None = None) -> list[ApprovalView]:
        found = await self.call("exec.approval.list", _drop_none({"sessionKey": session}))
        return [parsing.parse_approval_view(each) for each in found]

    async def resolve_approval(self, approval_id: str, decision: str) -> ApprovalView:
        params = {"id": approval_id, "decision": decision}
        return parsing.parse_approval_view(await self.call("exec.approval.resolve", params))

    async def list_grants(self) -> list[GrantView]:
        return msgspec.convert((await self.call("exec.approval.grants", {}))["grants"], list[GrantView])

    async def revoke_grant(self, grant_id: str) -> None:
        await self.call("exec.approval.revoke", {"id": grant_id}, retry=False)

    async def list_pairings(self) -> list[PairingView]:
        return msgspec.convert((await self.call("pairing.list", {}))["pairings"], list[PairingView])

    async def approve_pairing(self, channel: str, code: str, account: str | None = None) -> PairingView:
        params = _drop_none({"channel": channel, "code": code, "accountId": account})
        return msgspec.convert(
            (await self.call("pairing.approve", params, retry=False))["pairing"], PairingView
        )

    async def revoke_pairing(self, channel: str, sender: str, account: str | None = None) -> None:
        params = _drop_none({"channel": channel, "sender": sender, "accountId": account})
        await self.call("pairing.revoke", params, retry=False)

    async def list_deliveries(self, state: str | None, limit: int, cursor: str | None = None) -> DeliveryPage:
        page = await self.call(
            "deliveries.list", _drop_none({"state": state, "limit": limit, "cursor": cursor})
        )
        return msgspec.convert(page, DeliveryPage)

    async def retry_delivery(self, key: str) -> DeliveryView:
        return msgspec.convert(await self.call("deliveries.retry", {"key": key}, retry=False), DeliveryView)

    # --- sessions ---

    async def list_sessions(self, filters: ListFilter) -> SessionPage:
        params: Json = {
            "kinds": filters.kinds,
            "limit": filters.limit,
            "activeMinutes": filters.active_minutes,
            "agentId": filters.agent_id,
            "label": filters.label,
            "search": filters.search,
            "spawnedBy": filters.spawned_by,
            "archived": filters.include_archived,
            "cursor": filters.cursor,
        }
        page = await self.call("sessions.list", _drop_none(params))
        found = [parsing.parse_session_view(row) for row in page["sessions"]]
        return SessionPage(count=len(found), sessions=found, scope="all", next_cursor=page["nextCursor"])

    async def describe(self, session: str) -> SessionView:
        return parsing.parse_session_view(await self._load_session_row(session))

    async def _load_session_row(self, session: str) -> Json:
        row = (await self.call("sessions.describe", {"key": session}))["session"]
        if row is None:
            raise NotFound(
                f"Session {session!r} was not found.", "See `antiphon sessions list`.", reference=session
            )
        return row

    async def open(self, session: str) -> SessionView:
        """Return the session; create it if it does not exist."""
        return parsing.parse_session_view((await self.call("sessions.create", {"key": session}))["entry"])

    async def renew(self, session: str, expected: str | None = None) -> SessionView:
        params: Json = {
            "key": session,
            "reason": "new",
            "ifIdle": True,
            "expectedSessionId": expected,
            "idempotencyKey": uuid.uuid4().hex,
        }
        done = await self.call("sessions.reset", _drop_none(params))
        return parsing.parse_session_view(done["entry"])

    async def read_history(self, session: str, filters: HistoryFilter) -> HistoryPage:
        params: Json = {
            "key": session,
            "limit": filters.limit,
            "includeTools": filters.include_tools,
            "before": filters.before,
            "after": filters.after,
            "roles": filters.roles,
            "since": filters.since,
            "errors": filters.errors or None,
            "tool": filters.tool,
            "withoutInternal": filters.without_internal or None,
        }
        page = await self.call("sessions.history", _drop_none(params))
        return msgspec.convert(page, HistoryPage)

    async def list_conversations(self, session: str) -> list[ConversationView]:
        found = await self.call("sessions.conversations", {"key": session})
        return msgspec.convert(found["conversations"], list[ConversationView])

    async def search(
        self, query: str, *, session: str | None, agent_id: str | None, limit: int
    ) -> SearchPage:
        params: Json = {
            "query": query,
            "limit": limit,
            "agentId": agent_id,
            "sessionKeys": None if session is None else [session],
        }
        page = await self.call("sessions.search", _drop_none(params))
        for hit in page["results"]:
            hit["seq"] = hit.pop("messageSeq")
        return msgspec.convert(page, SearchPage)

    async def set_label(self, session: str, text: str | None) -> SessionView:
        done = await self.call("sessions.patch", {"key": session, "label": text})
        return parsing.parse_session_view(done["entry"])

    async def delete(self, session: str, expected: str) -> bool:
        params: Json = {
            "key": session,
            "expectedSessionId": expected,
            "idempotencyKey": uuid.uuid4().hex,
        }
        done = await self.call("sessions.delete", params)
        return done["deleted"]

    async def restore(self, session_id: str) -> SessionView:
        done = await self.call("sessions.restore", {"sessionId": session_id}, retry=False)
        return parsing.parse_session_view(done["entry"])

    # --- events ---

    async def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]:
        """Yield the entries after a sequence number (default: only new ones) and live events, each exactly once.

        Continues across lost connections.
        """
        position = FeedPosition(session, after)
        while True:
            connection = await self._get_connection()
            try:
                with connection.listen() as received:
                    position.apply_subscription(
                        await connection.request("sessions.messages.subscribe", position.subscribe_params)
                    )
                    async with aclosing(self._receive_events(received, position)) as events:
                        async for event in events:
                            yield event
                if not connection.lost.is_set():
                    await self.describe(position.key)
                elif isinstance(connection.close_error, TooLarge):
                    raise connection.close_error  # reconnecting would fail at the same event
            except NotFound:
                yield SessionChanged(session_key=position.key, reason="delete")
                return
            except GatewayUnreachable:
                await connection.close()

    async def _receive_events(
        self, received: asyncio.Queue[ReceivedEvent | None], position: FeedPosition
    ) -> AsyncGenerator[Event]:
        """Yield events until the connection is lost or the gateway stops following the session."""
        await self._check_active_runs(position)
        while True:
            try:
                async with asyncio.timeout(MAX_MESSAGE_LAG_SECONDS if position.is_waiting else None):
                    got = await received.get()
            except TimeoutError:
                for end in position.take_due_ends(all_of_them=True):
                    yield end
                await self._check_active_runs(position)
                continue
            if got is None or is_feed_ended(*got, position.key):
                return
            event = position.handle_event(*got)
            if isinstance(event, RunChanged) and event.state != "running":
                await self._record_run_end(event, position)
            elif event:
                yield event
            for end in position.take_due_ends():
                yield end

    async def _check_active_runs(self, position: FeedPosition) -> None:
        """Record the ends of runs whose event was missed: events are hints and are lost with a connection."""
        for run_id in list(position.active_runs):
            view = await self.get_run(run_id)
            if view.has_ended:
                await self._record_run_end(build_run_ended_event(position.key, view), position)

    async def _record_run_end(self, end: RunChanged, position: FeedPosition) -> None:
        """Hold back the end of a run until its messages, which arrive separately, have been yielded."""
        if end.state != "ok":  # the event of a failed run has few details
            end = build_run_ended_event(position.key, await self.get_run(end.run_id))
        page = await self.call(
            "sessions.history", {"key": position.key, "limit": RECENT_ENTRIES_CHECKED, "includeTools": True}
        )
        # The next run may have started: do not wait for its entries.
        own = [entry["seq"] for entry in page["messages"] if entry.get("runId") == end.run_id]
        last = max(own, default=page["total"])
        position.add_run_end(end, last if page["sessionId"] == position.session_id else 0)


def _get_or_create_key(key: str | None) -> str:
    """Return the given idempotency key, or a new one. An empty key is passed on, for the gateway to reject."""
    return uuid.uuid4().hex if key is None else key


def _drop_none(params: Json) -> Json:
    return {name: it for name, it in params.items() if it is not None}


def _check_sendable(message: IncomingMessage) -> None:
    """Reject a message that `chat.send` cannot carry in full; dropping a part would change its meaning."""
    carried = {
        "content": isinstance(message.content, str),
        "origin": message.origin in CHAT_ORIGINS,
        "model": message.model is None,
        "instructions": message.instructions is None,
        "provenance": message.provenance is None,
    }
    for field, fits in carried.items():
        if not fits:
            raise InvalidInput(
                f"The {field} of this message cannot be sent over a gateway's chat.",
                "Send plain text without it, or ask the gateway's `agent` method.",
                field=field,
            )
