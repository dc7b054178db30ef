"""Sends messages to other sessions, and waits for the reply as long as the sender wants."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Literal

import msgspec

from antiphon import access, keys
from antiphon.access import Action, Caller, TargetSession
from antiphon.bus import SessionChanged, session_topic
from antiphon.engine import validation
from antiphon.engine.collaboration import chains, exchanges
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.exchanges import NewExchange
from antiphon.engine.runs import lifecycle
from antiphon.engine.runs.run_queue import AcceptedRun
from antiphon.engine.sessions import session_rows
from antiphon.errors import ChainTooLong, InvalidInput, NotFound, SelfSend
from antiphon.operations import request_validation
from antiphon.operations.request_origin import ChainOperations, RequestOrigin
from antiphon.operations.runs import RUN_WAIT_POLL_SECONDS, RunOperations
from antiphon.store import Row, Tx
from antiphon.views import DeliveryState, ReplyBackState, RunView, SendResult, SendStatus

log = logging.getLogger(__name__)

DEFAULT_REPLY_TIMEOUT_SECONDS, MAX_REPLY_TIMEOUT_SECONDS = 30, 3600
MAX_REPLY_BACK_TURNS = 5
REQUEST_ID_NAMESPACE = uuid.UUID("9d7c3f54-6d0e-4a0b-9f43-1f7a6a3d0c55")


class SendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A message to another session, which is named by `session`, by `label` or by `agent_id`."""

    message: str
    session: str | None = None
    """The target's key or session id."""
    label: str | None = None
    agent_id: str | None = None
    """With a label, the agent whose session it is; alone, the agent whose main session is the target."""
    timeout_seconds: float = DEFAULT_REPLY_TIMEOUT_SECONDS
    idempotency_key: str | None = None
    reply_back: int | None = None
    announce: Literal["target", "none"] = "target"


class ExchangeOperations(RunOperations, ChainOperations):
    async def send(
        self,
        caller: Caller,
        wanted: SendRequest,
        origin: RequestOrigin | None = None,
        *,
        requester: str | None = None,
    ) -> SendResult:
        """Commit a message to another session and wait for the reply; the exchange continues by itself.

        An agent sends from its own session; an operator from `requester`, if given.
        """
        access.require_scope(caller, "send")
        _validate_send_request(wanted, self.config.store.message_max_bytes)
        engine = self._require_engine()
        origin = origin or RequestOrigin()
        run_id = derive_request_id(caller, wanted.idempotency_key, origin)
        try:
            exchange, accepted, note, founded = await self._store.tx(
                self._send, caller, wanted, run_id, origin, requester, self._clock.now()
            )
        except ChainTooLong as error:
            self.report_chain_limit(caller, error)
            raise
        for row in founded:
            self._publish_change(row, "create")
        if note is not None:
            await engine.dispatch_accepted_run(note)
        await engine.dispatch_accepted_run(accepted)
        if wanted.timeout_seconds <= 0:
            return await self._build_send_result(caller, exchange, "accepted")
        with engine.release_lane_slot(origin.run_id):
            return await self._wait_for_reply(
                caller, exchange, min(wanted.timeout_seconds, MAX_REPLY_TIMEOUT_SECONDS)
            )

    async def _send(
        self,
        tx: Tx,
        caller: Caller,
        wanted: SendRequest,
        run_id: str,
        origin: RequestOrigin,
        acting_for: str | None,
        now: int,
    ) -> tuple[Row, AcceptedRun, AcceptedRun | None, list[Row]]:
        """Return the exchange, its first run, the note in the requester's transcript, and the new main sessions."""
        founded: list[Row] = []
        requester = await self._resolve_requester(tx, caller, "control", acting_for, now, founded)
        target = await self._resolve_target(tx, caller, wanted, now, founded)
        if requester is not None and requester["id"] == target["id"]:
            raise SelfSend(
                "A session cannot send to itself.", "Name another session; sessions_list shows them."
            )
        link = ChainLink(run_id, 1)
        sender: int | None = requester["id"] if requester else None
        if not await exchanges.is_known_exchange(tx, run_id, sender, target["id"], wanted.message):
            self._session_resolver.check_send(target)
            if requester is not None:
                link = await self._build_chain_link(tx, origin, requester["id"], run_id)
        opening = msgspec.structs.replace(
            self._build_opening(run_id, requester, target, wanted, link),
            agent_id=self._find_addressed_agent(caller, wanted),
            requester_agent=requester
            and self._session_resolver.resolve_non_owner_agent(caller, acting_for, requester),
        )
        note = None
        if requester is not None and await chains.load_active_run(tx, origin.run_id, requester["id"]) is None:
            # Before anything that answers it is queued.
            note = await exchanges.record_sent_message(tx, opening, now)
        exchange, accepted = await exchanges.begin_exchange(tx, opening, now)
        if requester is not None and wanted.timeout_seconds > 0:
            await self._record_wait(tx, caller, requester, accepted, origin, wanted.timeout_seconds, now)
        return exchange, accepted, note, founded

    def _find_addressed_agent(self, caller: Caller, wanted: SendRequest) -> str | None:
        if wanted.label is not None:
            return None
        return self._session_resolver.find_addressed_agent(
            caller, wanted.session or f"agent:{wanted.agent_id}:main"
        )

    def _build_opening(
        self, id: str, requester: Row | None, target: Row, wanted: SendRequest, link: ChainLink
    ) -> NewExchange:
        turns = self.config.session.agent_to_agent.max_ping_pong_turns
        return NewExchange(
            id=id,
            requester=requester,
            target=target,
            message=wanted.message,
            turns=turns if wanted.reply_back is None else min(turns, wanted.reply_back),
            announce=wanted.announce,
            link=link,
            max_queued=self.config.store.lane_max_queued,
        )

    async def _record_wait(
        self,
        tx: Tx,
        caller: Caller,
        requester: Row,
        accepted: AcceptedRun,
        origin: RequestOrigin,
        seconds: float,
        now: int,
    ) -> None:
        """Record that the requester's run waits for the reply, also if the message is a repeated one."""
        run = await chains.load_active_run(tx, origin.run_id, requester["id"])
        if run is None:
            return

        def shown(row: Row) -> str:
            return row["key"] if self._session_resolver.can_see(caller, row) else chains.HIDDEN_SESSION_TEXT

        # A waiting run does not crash the process, however often a restart has found it waiting.
        await tx.do(lifecycle.SQL.reset_attempts, n=run["n"])
        until = now + round(min(seconds, MAX_REPLY_TIMEOUT_SECONDS) * 1000)
        edge = (run["n"], requester["id"], accepted.run_id, accepted.session)
        await chains.record_wait(tx, *edge, until, now, shown=shown)

    async def _resolve_requester(
        self, tx: Tx, caller: Caller, action: Action, acting_for: str | None, now: int, founded: list[Row]
    ) -> Row | None:
        """Return the session that a request is made from: an agent's own, or the one that an operator names."""
        if caller.session_key is not None:
            own = await tx.one(session_rows.SQL.all_columns_by_key, key=caller.session_key)
            if own is None:  # deleted while its agent was still running
                raise access.build_session_missing_error(caller.session_key)
            return own
        if acting_for is None:
            return None
        return await self._load_full_row(
            tx, await self._open_or_create_main(tx, caller, action, acting_for, now, founded)
        )

    async def _resolve_target(
        self, tx: Tx, caller: Caller, wanted: SendRequest, now: int, founded: list[Row]
    ) -> Row:
        if wanted.label is not None:
            row = await self._session_resolver.open_by_label(
                tx, caller, "send", wanted.label, wanted.agent_id
            )
            return await self._load_full_row(tx, row)
        reference = wanted.session
        if reference is None:
            agent_id = keys.validate_agent_id(wanted.agent_id or "")
            reference = f"agent:{agent_id}:main"
        self._authorize_addressed_agent(caller, reference)
        row = await self._open_or_create_main(tx, caller, "send", reference, now, founded)
        request_validation.require_current_conversation(row, reference)
        return await self._load_full_row(tx, row)

    def _authorize_addressed_agent(self, caller: Caller, reference: str) -> None:
        """Check access to the addressed agent: access to a shared main session does not include other agents."""
        agent_id = self._session_resolver.find_addressed_agent(caller, reference)
        if agent_id is None or agent_id == caller.agent_id:
            return
        target = TargetSession(str(keys.main_session_key(agent_id)), agent_id)
        access.authorize(
            caller, "send", target, self._session_resolver.get_grants(caller), reference=reference
        )

    async def _open_or_create_main(
        self, tx: Tx, caller: Caller, action: Action, reference: str, now: int, founded: list[Row]
    ) -> Row:
        """Return the session; a main session that does not exist yet is created and added to `founded`.

        Any other key must exist: a mistyped one is an error and not a new session.
        """
        if not self._session_resolver.is_main_session(caller, reference):
            return await self._session_resolver.open(tx, caller, action, reference)
        row, new = await self._open_or_create_session(tx, caller, action, reference, now)
        if new:
            founded.append(row)
        return row

    @staticmethod
    async def _load_full_row(tx: Tx, row: Row) -> Row:
        whole = await tx.one(session_rows.SQL.by_id, id=row["id"])
        assert whole is not None
        return whole

    async def _wait_for_reply(self, caller: Caller, exchange: Row, timeout: float) -> SendResult:
        run_id: str = exchange["id"]
        until = asyncio.get_running_loop().time() + timeout
        try:
            view = await self.wait(self.INTERNAL_CALLER, run_id, timeout)
            if view.yielded:
                view = await self._wait_for_woken_reply(run_id, view, until)
        except NotFound:  # the run was deleted with its session
            exchange = await self._store.read(_load_exchange, run_id)
            view = _build_cancelled_view(exchange, "The session was deleted before it answered.")
        if not view.has_ended or view.yielded:
            return await self._build_send_result(caller, exchange, "timeout", view)
        return await self._build_send_result(caller, exchange, "ok" if view.state == "ok" else "error", view)

    async def _wait_for_woken_reply(self, exchange_id: str, view: RunView, until: float) -> RunView:
        """Wait for the run that is woken after the target yielded to its sub-agents: that run gives the reply."""
        loop = asyncio.get_running_loop()
        exchange = await self._store.read(_load_exchange, exchange_id)
        async with self._bus.listen(session_topic(exchange["target"])) as events:
            while view.yielded and (left := until - loop.time()) > 0:
                exchange = await self._store.read(_load_exchange, exchange_id)
                answered_by = exchange["answered_by"]
                run_id = answered_by or exchange["current"]
                if run_id != view.run_id:
                    view = await self.wait(self.INTERNAL_CALLER, run_id, left)
                elif answered_by or exchange["phase"] == "settled":
                    return _build_cancelled_view(exchange, "The session was stopped before it answered.")
                else:
                    await events.get(min(left, RUN_WAIT_POLL_SECONDS))
        return view

    async def _build_send_result(
        self, caller: Caller, exchange: Row, status: SendStatus, view: RunView | None = None
    ) -> SendResult:
        view = view or await self.get_run(self.INTERNAL_CALLER, exchange["id"])
        error = None
        if status == "timeout":
            error = (
                "There was no reply in time. The message was delivered and its run goes on: "
                "look with sessions_history later instead of sending it again."
            )
        elif status == "error":
            error = view.error or f"The run ended as {view.state!r}."
        return SendResult(
            run_id=exchange["id"],
            status=status,
            session_key=keys.display_stored_key(view.session_key, viewer_agent_id=caller.agent_id),
            reply=view.reply if status == "ok" else None,
            error=error,
            delivery=_build_delivery_state(view),
            reply_back=_build_reply_back_state(exchange, view),
        )

    def report_chain_limit(self, caller: Caller, error: ChainTooLong) -> None:
        """Log that a chain reached its limit, and notify operators."""
        key = caller.session_key or ""
        log.warning("%s", error, extra={"session_key": key, "chain_id": error.data.get("chain_id")})
        self._bus.publish("sessions", SessionChanged(session_key=key, reason="chain_limit"))


async def _load_exchange(tx: Tx, id: str) -> Row:
    row = await tx.one(exchanges.SQL.by_id, id=id)
    assert row is not None
    return row


def _build_cancelled_view(exchange: Row, reason: str) -> RunView:
    """Return a cancelled run in place of the one that would have answered."""
    return RunView(
        run_id=exchange["id"],
        session_key=exchange["target_key"],
        state="cancelled",
        created_at=exchange["created_at"],
        ended_at=exchange["settled_at"],
        error_code="cancelled",
        error=reason,
    )


def derive_request_id(caller: Caller, key: str | None, origin: RequestOrigin) -> str:
    """Return the permanent id of a request: an operator's own key, or an id that no other caller can produce."""
    validation.validate_idempotency_key(key)
    if caller.is_operator and key is not None:
        return key
    if key is not None:
        return str(uuid.uuid5(REQUEST_ID_NAMESPACE, f"{caller.session_key}\n{key}"))
    return str(uuid.uuid4() if origin.key is None else uuid.uuid5(REQUEST_ID_NAMESPACE, origin.key))


def _build_delivery_state(view: RunView) -> DeliveryState:
    status = "queued" if view.state == "queued" else "ended" if view.has_ended else "started"
    return DeliveryState(
        status=status, queued_ms=view.queued_ms, running_ms=view.running_ms, position=view.position
    )


def _build_reply_back_state(exchange: Row, view: RunView) -> ReplyBackState:
    if view.has_ended and not view.yielded and view.state != "ok":
        return ReplyBackState(turns=0, reason=exchanges.explain_missing_reply(view.state, view.reply))
    return ReplyBackState(turns=exchange["turns"], reason=exchanges.explain_missing_turns(exchange))


def _validate_send_request(wanted: SendRequest, most: int) -> None:
    validation.validate_message_content(wanted.message, most)
    if wanted.session is not None and wanted.label is not None:
        raise InvalidInput(
            "Both sessionKey and label are given.", "Provide one of them, not both.", field="label"
        )
    if wanted.session is None and wanted.label is None and wanted.agent_id is None:
        raise InvalidInput(
            "No session is named.", "Provide sessionKey, label or agentId.", field="sessionKey"
        )
    if wanted.session is not None and wanted.agent_id is not None:
        raise InvalidInput(
            "Both sessionKey and agentId are given.",
            "Leave agentId out: the key says whose it is.",
            field="agentId",
        )
    if wanted.reply_back is not None and not 0 <= wanted.reply_back <= MAX_REPLY_BACK_TURNS:
        raise InvalidInput(
            f"'replyBack' is {wanted.reply_back}.", f"Use 0 to {MAX_REPLY_BACK_TURNS}.", field="replyBack"
        )
    if not 0 <= wanted.timeout_seconds < float("inf"):
        raise InvalidInput(
            f"'timeoutSeconds' is {wanted.timeout_seconds}.",
            "Use 0 to return at once, or how many seconds to wait.",
            field="timeoutSeconds",
        )
