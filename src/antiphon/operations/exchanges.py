"""Sending to another session: the request, and waiting for the reply as long as the sender wants to."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Literal

import msgspec

from antiphon import access, keys
from antiphon.access import Action, Caller, Target
from antiphon.bus import SessionChanged, session_topic
from antiphon.engine import chains, exchanges, runs, sessions, words
from antiphon.engine.admissions import Accepted
from antiphon.engine.chains import Link
from antiphon.engine.exchanges import Opening
from antiphon.errors import ChainTooLong, InvalidInput, NotFound, SelfSend
from antiphon.operations import checks
from antiphon.operations.links import Links, Origin
from antiphon.operations.runs import LOOK_AGAIN, Runs
from antiphon.store import Row, Tx
from antiphon.views import DeliveryState, RunView, Sent, SentStatus

log = logging.getLogger(__name__)

TIMEOUT, LONGEST = 30, 3600  # seconds to wait for a reply
TURNS_MOST = 5
NAMESPACE = uuid.UUID("9d7c3f54-6d0e-4a0b-9f43-1f7a6a3d0c55")


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """A message to another session, which is named in one of three ways."""

    message: str
    session: str | None = None
    """Its key or its id."""
    label: str | None = None
    agent_id: str | None = None
    """With a label, whose session it is; alone, that agent's main session."""
    timeout_seconds: float = TIMEOUT
    idempotency_key: str | None = None
    reply_back: int | None = None
    announce: Literal["target", "none"] = "target"


class Exchanges(Runs, Links):
    async def send(
        self, caller: Caller, wanted: Send, origin: Origin | None = None, *, requester: str | None = None
    ) -> Sent:
        """Accepted when it is durable; then the reply, if it comes in time. The exchange goes on by itself.

        An agent sends from its own session; an operator from the one that is named, if any.
        """
        access.require_scope(caller, "send")
        _check(wanted, self.config.store.message_max_bytes)
        engine = self._running()
        origin = origin or Origin()
        run_id = request_id(caller, wanted.idempotency_key, origin)
        try:
            accepted, note, founded = await self._store.tx(
                self._send, caller, wanted, run_id, origin, requester, self._clock.now()
            )
        except ChainTooLong as error:
            self.warn_of_chain(caller, error)
            raise
        for row in founded:
            self._tell(row, "create")
        if note is not None:
            await engine.accepted(note)
        await engine.accepted(accepted)
        if wanted.timeout_seconds <= 0:
            return await self._sent(caller, run_id, "accepted")
        with engine.resting(origin.run_id):
            return await self._answered(caller, run_id, min(wanted.timeout_seconds, LONGEST))

    async def _send(
        self,
        tx: Tx,
        caller: Caller,
        wanted: Send,
        run_id: str,
        origin: Origin,
        acting_for: str | None,
        now: int,
    ) -> tuple[Accepted, Accepted | None, list[Row]]:
        """The first run, the note of it in the requester's transcript, and the main sessions founded for it."""
        founded: list[Row] = []
        requester = await self._acting(tx, caller, "control", acting_for, now, founded)
        target = await self._target(tx, caller, wanted, now, founded)
        if requester is not None and requester["id"] == target["id"]:
            raise SelfSend(
                "A session cannot send to itself.", "Name another session; sessions_list shows them."
            )
        link = Link(run_id, 1)
        sender: int | None = requester["id"] if requester else None
        if not await exchanges.known(tx, run_id, sender, target["id"], wanted.message):
            self._door.check_send(target)
            if requester is not None:
                link = await self._link(tx, origin, requester["id"], run_id)
        opening = msgspec.structs.replace(
            self._opening(run_id, requester, target, wanted, link),
            agent_id=self._addressed(caller, wanted),
            requester_agent=requester and self._door.other_agent(caller, acting_for, requester),
        )
        note = None
        if requester is not None and await chains.under_way(tx, origin.run_id, requester["id"]) is None:
            note = await exchanges.record_sent(tx, opening, now)  # before anything that answers it is queued
        accepted = await exchanges.begin(tx, opening, now)
        if requester is not None and wanted.timeout_seconds > 0:
            await self._wait_for(tx, caller, requester, accepted, origin, wanted.timeout_seconds, now)
        return accepted, note, founded

    def _addressed(self, caller: Caller, wanted: Send) -> str | None:
        if wanted.label is not None:
            return None
        return self._door.spoken_to(caller, wanted.session or f"agent:{wanted.agent_id}:main")

    def _opening(self, id: str, requester: Row | None, target: Row, wanted: Send, link: Link) -> Opening:
        turns = self.config.session.agent_to_agent.max_ping_pong_turns
        return Opening(
            id=id,
            requester=requester,
            target=target,
            message=wanted.message,
            turns=turns if wanted.reply_back is None else min(turns, wanted.reply_back),
            announce=wanted.announce,
            link=link,
            max_queued=self.config.store.lane_max_queued,
        )

    async def _wait_for(
        self,
        tx: Tx,
        caller: Caller,
        requester: Row,
        accepted: Accepted,
        origin: Origin,
        seconds: float,
        now: int,
    ) -> None:
        """Also for a message that was sent before: whoever asks again waits as much as the first time."""
        run = await chains.under_way(tx, origin.run_id, requester["id"])
        if run is None:
            return

        def shown(row: Row) -> str:
            return row["key"] if self._door.knows_of(caller, row) else chains.HIDDEN

        # Who waits is not what kills the process, however often it has been found waiting.
        await tx.do(runs.SQL.progressed, n=run["n"])
        until = now + round(min(seconds, LONGEST) * 1000)
        edge = (run["n"], requester["id"], accepted.run_id, accepted.session)
        await chains.wait(tx, *edge, until, now, shown=shown)

    async def _acting(
        self, tx: Tx, caller: Caller, action: Action, acting_for: str | None, now: int, founded: list[Row]
    ) -> Row | None:
        """The session a request is made from: an agent's own, or the one that an operator names."""
        if caller.session_key is not None:
            own = await tx.one(sessions.SQL.whole_by_key, key=caller.session_key)
            if own is None:  # deleted while its agent was still at it: nobody else's name is lent to it
                raise access.missing(caller.session_key)
            return own
        if acting_for is None:
            return None
        return await self._whole(
            tx, await self._open_or_found_main(tx, caller, action, acting_for, now, founded)
        )

    async def _target(self, tx: Tx, caller: Caller, wanted: Send, now: int, founded: list[Row]) -> Row:
        if wanted.label is not None:
            row = await self._door.open_labelled(tx, caller, "send", wanted.label, wanted.agent_id)
            return await self._whole(tx, row)
        reference = wanted.session
        if reference is None:
            agent_id = keys.checked_agent_id(wanted.agent_id or "")
            reference = f"agent:{agent_id}:main"
        self._check_addressed(caller, reference)
        row = await self._open_or_found_main(tx, caller, "send", reference, now, founded)
        checks.current(row, reference)
        return await self._whole(tx, row)

    def _check_addressed(self, caller: Caller, reference: str) -> None:
        """Reaching the shared main session is not enough to have another agent answer in it."""
        agent_id = self._door.spoken_to(caller, reference)
        if agent_id is None or agent_id == caller.agent_id:
            return
        target = Target(str(keys.main_session(agent_id)), agent_id)
        access.authorize(caller, "send", target, self._door.grants(caller), reference=reference)

    async def _open_or_found_main(
        self, tx: Tx, caller: Caller, action: Action, reference: str, now: int, founded: list[Row]
    ) -> Row:
        """The session; a main session that does not exist yet is created and added to `founded`.

        Any other key must exist: a mistyped one is an error and not a new session.
        """
        if not self._door.is_main(caller, reference):
            return await self._door.open(tx, caller, action, reference)
        row, new = await self._opened_or_founded(tx, caller, action, reference, now)
        if new:
            founded.append(row)
        return row

    @staticmethod
    async def _whole(tx: Tx, row: Row) -> Row:
        whole = await tx.one(sessions.SQL.by_id, id=row["id"])
        assert whole is not None
        return whole

    async def _answered(self, caller: Caller, run_id: str, timeout: float) -> Sent:
        until = asyncio.get_running_loop().time() + timeout
        try:
            view = await self.wait(self.INSIDE, run_id, timeout)
            if view.yielded:
                view = await self._woken(run_id, view, until)
        except NotFound:  # with its session
            exchange = await self._store.read(_exchange_of, run_id)
            view = _unanswered(exchange, "The session was deleted before it answered.")
        if not view.ended or view.yielded:
            return await self._sent(caller, run_id, "timeout", view)
        return await self._sent(caller, run_id, "ok" if view.state == "ok" else "error", view)

    async def _woken(self, exchange_id: str, view: RunView, until: float) -> RunView:
        """The target has ended its turn to wait for others: the reply is that of the run it is woken for, if it is."""
        loop = asyncio.get_running_loop()
        exchange = await self._store.read(_exchange_of, exchange_id)
        async with self._bus.listen(session_topic(exchange["target"])) as events:
            while view.yielded and (left := until - loop.time()) > 0:
                exchange = await self._store.read(_exchange_of, exchange_id)
                answered_by = exchange["answered_by"]
                run_id = answered_by or exchange["current"]
                if run_id != view.run_id:
                    view = await self.wait(self.INSIDE, run_id, left)
                elif answered_by or exchange["phase"] == "settled":
                    return _unanswered(exchange, "The session was stopped before it answered.")
                else:
                    await events.get(min(left, LOOK_AGAIN))
        return view

    async def _sent(
        self, caller: Caller, run_id: str, status: SentStatus, view: RunView | None = None
    ) -> Sent:
        view = view or await self.run(self.INSIDE, run_id)
        error = None
        if status == "timeout":
            error = (
                "There was no reply in time. The message was delivered and its run goes on: "
                "look with sessions_history later instead of sending it again."
            )
        elif status == "error":
            error = view.error or f"The run ended as {view.state!r}."
        return Sent(
            run_id=run_id,
            status=status,
            session_key=keys.display_text(view.session_key, viewer_agent_id=caller.agent_id),
            reply=view.reply if status == "ok" else None,
            error=error,
            delivery=_delivery(view),
        )

    def warn_of_chain(self, caller: Caller, error: ChainTooLong) -> None:
        """Whoever looks after the house hears of it, too."""
        key = caller.session_key or ""
        log.warning("%s", error, extra={"session_key": key, "chain_id": error.data.get("chain_id")})
        self._bus.publish("sessions", SessionChanged(session_key=key, reason="chain_limit"))


async def _exchange_of(tx: Tx, id: str) -> Row:
    row = await tx.one(exchanges.SQL.by_id, id=id)
    assert row is not None
    return row


def _unanswered(exchange: Row, reason: str) -> RunView:
    """A cancelled run in place of the one that would have answered."""
    return RunView(
        run_id=exchange["id"],
        session_key=exchange["target_key"],
        state="cancelled",
        created_at=exchange["created_at"],
        ended_at=exchange["settled_at"],
        error_code="cancelled",
        error=reason,
    )


def request_id(caller: Caller, key: str | None, origin: Origin) -> str:
    """What a request is known by for ever: an operator's own key, or one that nobody else can use."""
    words.check_key(key)
    if caller.is_operator and key is not None:
        return key
    if key is not None:
        return str(uuid.uuid5(NAMESPACE, f"{caller.session_key}\n{key}"))
    return str(uuid.uuid4() if origin.key is None else uuid.uuid5(NAMESPACE, origin.key))


def _delivery(view: RunView) -> DeliveryState:
    status = "queued" if view.state == "queued" else "ended" if view.ended else "started"
    return DeliveryState(
        status=status, queued_ms=view.queued_ms, running_ms=view.running_ms, position=view.position
    )


def _check(wanted: Send, most: int) -> None:
    words.check(wanted.message, most)
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
    if wanted.reply_back is not None and not 0 <= wanted.reply_back <= TURNS_MOST:
        raise InvalidInput(
            f"'replyBack' is {wanted.reply_back}.", f"Use 0 to {TURNS_MOST}.", field="replyBack"
        )
    if not 0 <= wanted.timeout_seconds < float("inf"):
        raise InvalidInput(
            f"'timeoutSeconds' is {wanted.timeout_seconds}.",
            "Use 0 to return at once, or how many seconds to wait.",
            field="timeoutSeconds",
        )
