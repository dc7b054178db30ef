"""Sends messages to other sessions and waits for the reply, up to the sender's timeout.

It also lists exchanges for operators.
"""

from __future__ import annotations

import asyncio
import uuid

import msgspec

from antiphon import access, keys
from antiphon.access import Caller, TargetSession
from antiphon.bus import session_topic
from antiphon.engine import validation
from antiphon.engine.collaboration import chains, exchanges
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.exchanges import NewExchange
from antiphon.engine.outbox.redaction import MAX_EXCERPT_SOURCE_CHARACTERS, redact, redact_excerpt
from antiphon.engine.runs import lifecycle
from antiphon.engine.runs.run_queue import AcceptedRun
from antiphon.engine.sessions import session_rows
from antiphon.engine.validation import parse_row_cursor, require_current_conversation, validate_and_clamp
from antiphon.errors import Ambiguous, ChainTooLong, InvalidInput, NotFound, SelfSend
from antiphon.operations.collaboration_types import (
    DeliveryState,
    ExchangeDetail,
    ExchangePage,
    ExchangeStep,
    ExchangeView,
    ReplyBackState,
    SendResult,
    SendStatus,
)
from antiphon.operations.context import INTERNAL_CALLER, OperationContext
from antiphon.operations.runs import RUN_WAIT_POLL_SECONDS, RunOperations
from antiphon.operations.types import MAX_REPLY_TIMEOUT_SECONDS, RequestOrigin, RunView, SendRequest
from antiphon.store import Row, Tx

MAX_REPLY_BACK_TURNS = 5
DEFAULT_EXCHANGES_PER_PAGE, MAX_EXCHANGES_PER_PAGE = 50, 500
MAX_EXCHANGES_MATCHED_BY_PREFIX = 10_000  # the most recent ones, when only the beginning of an id is given
MAX_AMBIGUOUS_IDS_SHOWN = 5
ALL_SESSIONS_REFUSAL = ("the exchanges of all sessions", "Read your own with sessions_history.")
REQUEST_ID_NAMESPACE = uuid.UUID("9d7c3f54-6d0e-4a0b-9f43-1f7a6a3d0c55")


class ExchangeOperations:
    def __init__(self, context: OperationContext, runs: RunOperations) -> None:
        self._context = context
        self._runs = runs

    async def send(
        self,
        caller: Caller,
        request: SendRequest,
        origin: RequestOrigin | None = None,
        *,
        requester: str | None = None,
    ) -> SendResult:
        """Commit a message to another session and wait for the reply; the exchange continues in the background.

        An agent sends from its own session; an operator from `requester`, if given.
        """
        access.require_scope(caller, "send")
        _validate_send_request(request, self._context.config.store.message_max_bytes)
        worker = self._context.require_worker()
        origin = origin or RequestOrigin()
        run_id = derive_request_id(caller, request.idempotency_key, origin)
        try:
            exchange, accepted, note, created = await self._context.store.tx(
                self._send, caller, request, run_id, origin, requester, self._context.clock.now()
            )
        except ChainTooLong as error:
            self._context.report_chain_limit(caller, error)
            raise
        for row in created:
            self._context.publish_change(row, "create")
        if note is not None:
            await worker.dispatch_accepted_run(note)
        await worker.dispatch_accepted_run(accepted)
        if request.timeout_seconds <= 0:
            return await self._build_send_result(caller, exchange, "accepted")
        with worker.release_lane_slot(origin.run_id):
            return await self._wait_for_reply(
                caller, exchange, min(request.timeout_seconds, MAX_REPLY_TIMEOUT_SECONDS)
            )

    async def _send(
        self,
        tx: Tx,
        caller: Caller,
        request: SendRequest,
        run_id: str,
        origin: RequestOrigin,
        requester_reference: str | None,
        now: int,
    ) -> tuple[Row, AcceptedRun, AcceptedRun | None, list[Row]]:
        """Return the exchange, its first run, the note in the requester's transcript, and the new main sessions."""
        created: list[Row] = []
        requester = await self._context.resolve_requester(
            tx, caller, "control", requester_reference, now, created
        )
        target = await self._resolve_target(tx, caller, request, now, created)
        if requester is not None and requester["id"] == target["id"]:
            raise SelfSend(
                "A session cannot send to itself.", "Name another session; sessions_list shows them."
            )
        link = ChainLink(run_id, 1)
        sender: int | None = requester["id"] if requester else None
        if not await exchanges.check_repeated_exchange(tx, run_id, sender, target["id"], request.message):
            self._context.session_resolver.check_send(target)
            if requester is not None:
                link = await self._context.build_chain_link(tx, origin, requester["id"], run_id)
        new_exchange = msgspec.structs.replace(
            self._build_new_exchange(run_id, requester, target, request, link),
            agent_id=self._find_addressed_agent(caller, request),
            requester_agent=requester
            and self._context.session_resolver.resolve_non_owner_agent(
                caller, requester_reference, requester
            ),
        )
        note = None
        if requester is not None and await chains.load_active_run(tx, origin.run_id, requester["id"]) is None:
            # Queued first, so that it precedes any reply.
            note = await exchanges.record_sent_message(tx, new_exchange, now)
        exchange, accepted = await exchanges.begin_exchange(tx, new_exchange, now)
        if requester is not None and request.timeout_seconds > 0:
            await self._record_wait(tx, caller, requester, accepted, origin, request.timeout_seconds, now)
        return exchange, accepted, note, created

    def _find_addressed_agent(self, caller: Caller, request: SendRequest) -> str | None:
        if request.label is not None:
            return None
        return self._context.session_resolver.find_addressed_agent(
            caller, request.session or f"agent:{request.agent_id}:main"
        )

    def _build_new_exchange(
        self, id: str, requester: Row | None, target: Row, request: SendRequest, link: ChainLink
    ) -> NewExchange:
        max_turns = self._context.config.session.agent_to_agent.max_ping_pong_turns
        return NewExchange(
            id=id,
            requester=requester,
            target=target,
            message=request.message,
            max_turns=max_turns if request.reply_back is None else min(max_turns, request.reply_back),
            announce=request.announce,
            link=link,
            max_queued=self._context.config.store.lane_max_queued,
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
        """Record that the requester's run waits for the reply, even if the message is a retry."""
        run = await chains.load_active_run(tx, origin.run_id, requester["id"])
        if run is None:
            return

        def display_key(row: Row) -> str:
            return (
                row["key"]
                if self._context.session_resolver.can_see(caller, row)
                else chains.HIDDEN_SESSION_TEXT
            )

        # Restarts while the run waits are not crashes, so they must not count as attempts.
        await lifecycle.reset_attempts(tx, run["n"])
        until = now + round(min(seconds, MAX_REPLY_TIMEOUT_SECONDS) * 1000)
        edge = (run["n"], requester["id"], accepted.run_id, accepted.session)
        await chains.record_wait(tx, *edge, until, now, describe=display_key)

    async def _resolve_target(
        self, tx: Tx, caller: Caller, request: SendRequest, now: int, created: list[Row]
    ) -> Row:
        if request.label is not None:
            row = await self._context.session_resolver.open_by_label(
                tx, caller, "send", request.label, request.agent_id
            )
            return await session_rows.load_full_session(tx, row["id"])
        reference = request.session
        if reference is None:
            agent_id = keys.validate_agent_id(request.agent_id or "")
            reference = f"agent:{agent_id}:main"
        self._authorize_addressed_agent(caller, reference)
        row = await self._context.open_or_create_main(tx, caller, "send", reference, now, created)
        require_current_conversation(row, reference)
        return await session_rows.load_full_session(tx, row["id"])

    def _authorize_addressed_agent(self, caller: Caller, reference: str) -> None:
        """Check access to the addressed agent: access to a shared main session does not include other agents."""
        agent_id = self._context.session_resolver.find_addressed_agent(caller, reference)
        if agent_id is None or agent_id == caller.agent_id:
            return
        target = TargetSession(str(keys.main_session_key(agent_id)), agent_id)
        access.authorize(
            caller, "send", target, self._context.session_resolver.get_grants(caller), reference=reference
        )

    async def _wait_for_reply(self, caller: Caller, exchange: Row, timeout: float) -> SendResult:
        run_id: str = exchange["id"]
        until = asyncio.get_running_loop().time() + timeout
        try:
            view = await self._runs.wait(INTERNAL_CALLER, run_id, timeout)
            if view.yielded:
                view = await self._wait_for_woken_reply(run_id, view, until)
        except NotFound:  # the run was deleted with its session
            exchange = await self._context.store.read(_load_exchange, run_id)
            view = _build_cancelled_view(exchange, "The session was deleted before it answered.")
        if not view.has_ended or view.yielded:
            return await self._build_send_result(caller, exchange, "timeout", view)
        return await self._build_send_result(caller, exchange, "ok" if view.state == "ok" else "error", view)

    async def _wait_for_woken_reply(self, exchange_id: str, view: RunView, until: float) -> RunView:
        """Wait for the run that is woken after the target yielded to its sub-agents: that run gives the reply."""
        loop = asyncio.get_running_loop()
        exchange = await self._context.store.read(_load_exchange, exchange_id)
        async with self._context.bus.listen(session_topic(exchange["target"])) as events:
            while view.yielded and (left := until - loop.time()) > 0:
                exchange = await self._context.store.read(_load_exchange, exchange_id)
                answered_by = exchange["answered_by"]
                run_id = answered_by or exchange["current"]
                if run_id != view.run_id:
                    view = await self._runs.wait(INTERNAL_CALLER, run_id, left)
                elif answered_by or exchange["phase"] == "settled":
                    return _build_cancelled_view(exchange, "The session was stopped before it answered.")
                else:
                    await events.get(min(left, RUN_WAIT_POLL_SECONDS))
        return view

    async def _build_send_result(
        self, caller: Caller, exchange: Row, status: SendStatus, view: RunView | None = None
    ) -> SendResult:
        view = view or await self._runs.get(INTERNAL_CALLER, exchange["id"])
        error = None
        if status == "timeout":
            error = (
                "There was no reply in time. The message was delivered and its run continues: "
                "read sessions_history later instead of sending it again."
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

    # --- the log, for operators ---

    async def get(self, caller: Caller, reference: str) -> ExchangeDetail:
        """Return one exchange with its full texts, secrets masked. `reference` is its id or a prefix of it.

        Raises:
            NotFound: no exchange has such an id.
            Ambiguous: several ids begin like this.
        """
        access.require_operator(caller, "read", *ALL_SESSIONS_REFUSAL)
        row, runs = await self._context.store.read(_load_exchange_with_runs, reference)
        return await asyncio.to_thread(_build_exchange_detail, row, runs)

    async def _load_exchange_page(
        self, tx: Tx, caller: Caller, session: str | None, unsettled: bool, before: int, limit: int
    ) -> list[Row]:
        row = None
        if session is not None:
            row = await self._context.session_resolver.open(tx, caller, "read", session)
        return await exchanges.list_exchanges(
            tx,
            row["id"] if row else None,
            unsettled=unsettled,
            before=before,
            limit=limit,
            max_characters=MAX_EXCERPT_SOURCE_CHARACTERS,
        )

    async def list(
        self,
        caller: Caller,
        session: str | None = None,
        *,
        unsettled: bool = False,
        limit: int = DEFAULT_EXCHANGES_PER_PAGE,
        cursor: str | None = None,
    ) -> ExchangePage:
        """Return a page of exchanges; for operators that may read every session.

        `session` matches either side; `unsettled` leaves out exchanges that have ended.
        """
        access.require_operator(caller, "read", *ALL_SESSIONS_REFUSAL)
        page_size = validate_and_clamp(limit, 1, MAX_EXCHANGES_PER_PAGE, "limit")
        before = parse_row_cursor(cursor)
        rows = await self._context.store.read(
            self._load_exchange_page, caller, session, unsettled, before, page_size + 1
        )
        page = rows[:page_size]
        return ExchangePage(
            exchanges=await asyncio.to_thread(lambda: [_build_exchange_view(row) for row in page]),
            next_cursor=str(page[-1]["n"]) if len(rows) > len(page) else None,
        )


async def _load_exchange(tx: Tx, id: str) -> Row:
    row = await exchanges.find_exchange(tx, id)
    assert row is not None
    return row


def _build_cancelled_view(exchange: Row, reason: str) -> RunView:
    """Return a synthetic cancelled view in place of the run that would have answered."""
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
        return ReplyBackState(turns=0, reason=exchanges.get_no_reply_reason(view.state, view.reply))
    return ReplyBackState(turns=exchange["turns"], reason=exchanges.get_no_turns_reason(exchange))


def _validate_send_request(request: SendRequest, max_bytes: int) -> None:
    validation.validate_message_content(request.message, max_bytes)
    if request.session is not None and request.label is not None:
        raise InvalidInput(
            "Both sessionKey and label are given.", "Provide one of them, not both.", field="label"
        )
    if request.session is None and request.label is None and request.agent_id is None:
        raise InvalidInput("No target is given.", "Provide sessionKey, label or agentId.", field="sessionKey")
    if request.session is not None and request.agent_id is not None:
        raise InvalidInput(
            "Both sessionKey and agentId are given.",
            "Leave agentId out: the key already contains the agent.",
            field="agentId",
        )
    if request.reply_back is not None and not 0 <= request.reply_back <= MAX_REPLY_BACK_TURNS:
        raise InvalidInput(
            f"'replyBack' is {request.reply_back}, out of range.",
            f"Use 0 to {MAX_REPLY_BACK_TURNS}.",
            field="replyBack",
        )
    if not 0 <= request.timeout_seconds < float("inf"):
        raise InvalidInput(
            f"'timeoutSeconds' is {request.timeout_seconds}, out of range.",
            "Use 0 to return immediately, or the number of seconds to wait.",
            field="timeoutSeconds",
        )


async def _load_exchange_with_runs(tx: Tx, reference: str) -> tuple[Row, list[tuple[int | None, Row]]]:
    """Load an exchange and the runs that answered in it, each with its turn."""
    row = await exchanges.find_exchange(tx, reference) or await _find_by_id_prefix(tx, reference)
    ids: list[tuple[int | None, str]] = [(0, row["answered_by"] or row["id"])]
    ids += [(turn, f"turn:{row['id']}:{turn}") for turn in range(1, row["turn"] + 1)]
    ids.append((None, f"announce:{row['id']}"))
    found = [(turn, await lifecycle.load_run(tx, run_id, None)) for turn, run_id in ids]
    return row, [(turn, run) for turn, run in found if run is not None]


async def _find_by_id_prefix(tx: Tx, prefix: str) -> Row:
    found = await exchanges.list_ids_with_prefix(
        tx, prefix, recent=MAX_EXCHANGES_MATCHED_BY_PREFIX, limit=MAX_AMBIGUOUS_IDS_SHOWN + 1
    )
    if not found or not prefix:
        raise NotFound(
            f"Exchange {prefix[:80]!r} was not found.", "Use an id that `antiphon exchanges` shows."
        )
    if len(found) > 1:
        candidates = found[:MAX_AMBIGUOUS_IDS_SHOWN]
        raise Ambiguous(
            f"Several exchanges begin with {prefix[:80]!r}: {', '.join(candidates)}.",
            "Use more of the id.",
            candidates=candidates,
        )
    return await _load_exchange(tx, found[0])


def _build_exchange_detail(row: Row, answers: list[tuple[int | None, Row]]) -> ExchangeDetail:
    view = msgspec.structs.replace(
        _build_exchange_view(row),
        message=_mask_secrets(row["message"]),
        latest_reply=_mask_secrets(row["latest_reply"]),
    )
    steps = [
        ExchangeStep(
            run_id=run["id"],
            session_key=keys.display_full_key(run["key"]),
            turn=turn,
            state=run["state"],
            reply=_mask_secrets(run["reply"]),
            error=_mask_secrets(run["error"]),
            at=run["ended_at"] or run["started_at"] or run["created_at"],
        )
        for turn, run in answers
    ]
    return ExchangeDetail(exchange=view, steps=steps)


def _mask_secrets(text: str | None) -> str | None:
    return redact(text) if text else None


def _build_exchange_view(row: Row) -> ExchangeView:
    requester = row["requester_key"]
    return ExchangeView(
        id=row["id"],
        requester_session_key=keys.display_full_key(requester) if requester else None,
        target_session_key=keys.display_full_key(row["target_key"]),
        phase=row["phase"],
        turn=row["turn"],
        turns=row["turns"],
        announced=row["announced"],
        current_run_id=row["current"] if row["settled_at"] is None else None,
        chain_id=row["chain"],
        hop=row["hop"],
        message=redact_excerpt(row["message"] or None),
        latest_reply=redact_excerpt(row["latest_reply"] or None),
        created_at=row["created_at"],
        settled_at=row["settled_at"],
    )
