"""Words on their way into a session."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec

from antiphon import access, keys, policy
from antiphon.access import Caller
from antiphon.bus import RunChanged, run_topic, session_topic
from antiphon.engine import admissions, resets, runs, sessions, tasks, words
from antiphon.engine.admissions import Submission
from antiphon.engine.chains import Link
from antiphon.engine.run_options import RunOptions
from antiphon.engine.words import THINKING
from antiphon.errors import InvalidInput
from antiphon.messages import Image, Provenance, Text, ToolResult, User
from antiphon.operations import checks
from antiphon.operations.links import Links, Origin
from antiphon.store import Row, Tx
from antiphon.views import Accepted


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Words for a session. `idempotency_key` becomes the run's id: saying it again changes nothing."""

    session: str
    content: str | list[Text | Image] | ToolResult
    """Words, or the result of a client-side tool that an earlier run of the session called."""
    idempotency_key: str | None = None
    origin: str = "chat"
    model: str | None = None
    thinking: str | None = None
    instructions: str | None = None
    options: RunOptions | None = None
    timeout_seconds: float | None = None
    provenance: Provenance | None = None
    literal: bool = False
    """Whether the content is only text, even if it looks like a command."""


class _Place(NamedTuple):
    """What a message goes on with: the task it is for, until when, and the chain that it is a link of."""

    task: int | None = None
    deadline: int | None = None
    link: Link | None = None


class Submissions(Links):
    async def submit(self, caller: Caller, message: Message) -> Accepted:
        """Put words into a session. They are durable when this returns; their run starts by itself.

        A standalone `/send on|off|inherit` is no words: it is done when this returns, and has an answer as a run has.
        """
        self._check(message)
        engine = self._running()
        now = self._clock.now()
        run_id = message.idempotency_key or admissions.new_id(now)
        if (wanted := _send_command(caller, message)) is not None:
            return await self._command(caller, message.session, wanted, run_id, now)
        accepted, row, news = await self._store.tx(self._submit, caller, message, run_id, now)
        if news == "create":
            self._tell(row, news)
        elif news:
            self._tell_one(row, "renewed")
            self._tell_all(row, news)
        await engine.accepted(accepted)
        return _receipt(accepted, row)

    async def _command(
        self, caller: Caller, session: str, wanted: policy.SendCommand, run_id: str, now: int
    ) -> Accepted:
        done = await self._store.tx(self._switch_sending, caller, session, wanted, run_id, now)
        accepted, row, reply, founded = done
        if founded:
            self._tell(row, "create")
        if accepted.new:
            if reply is not None:
                self._tell(row, "patch")
            ended = RunChanged(session_key=row["key"], run_id=run_id, state="ok", reply=reply, ended_at=now)
            for topic in (run_topic(run_id), session_topic(row["id"])):
                self._bus.publish(topic, ended)
        return _receipt(accepted, row)

    async def _switch_sending(
        self, tx: Tx, caller: Caller, session: str, wanted: policy.SendCommand, run_id: str, now: int
    ) -> tuple[admissions.Accepted, Row, str | None, bool]:
        """Run the owner's `/send` command, even if the send policy blocks messages. From others it has no effect."""
        row, founded = await self._opened_or_founded(tx, caller, "send", session, now)
        checks.current(row, session)
        reply = _SWITCHED[wanted] if access.ADMIN in caller.scopes else None
        new = await admissions.record_command(tx, run_id, row["id"], f"send {wanted}", now, reply)
        if new and reply is not None:
            setting = None if wanted == "inherit" else wanted
            await sessions.patch(tx, row["id"], {"send_policy": setting}, now)
        return admissions.Accepted(run_id, row["id"], row["key"], "ok", new=new), row, reply, founded

    async def steer(
        self, caller: Caller, message: Message, origin: Origin | None = None
    ) -> tuple[Accepted, list[str]]:
        """Stop what a session is doing and say this instead, both or neither; and which runs were stopped.

        A message that was said before stops nothing.
        """
        self._check(message)
        engine = self._running()
        now = self._clock.now()
        run_id = message.idempotency_key or admissions.new_id(now)
        stopped, accepted, row = await self._store.tx(
            self._steer, caller, message, run_id, origin or Origin(), now
        )
        await engine.stopping(stopped)
        await engine.accepted(accepted)
        run_ids = [*(ended.run_id for ended in stopped.ended), *stopped.asked]
        if run_ids:
            self._tell(row, "abort")
        return _receipt(accepted, row), run_ids

    async def _steer(
        self, tx: Tx, caller: Caller, message: Message, run_id: str, origin: Origin, now: int
    ) -> tuple[runs.Stopped, admissions.Accepted, Row]:
        session = await self._door.open(tx, caller, "control", message.session)
        stopped, place = runs.Stopped([], []), _Place()
        if await tx.one(runs.SQL.accepted_before, id=run_id) is None:
            place = await self._place_of(tx, caller, session, run_id, origin)
            stopped = await runs.cancel(tx, session["id"], None, now)
        accepted, row, _ = await self._submit(tx, caller, message, run_id, now, place)
        return stopped, accepted, row

    async def _place_of(self, tx: Tx, caller: Caller, session: Row, run_id: str, origin: Origin) -> _Place:
        """What a sub-agent is to do now is its task: the end of what it did before is not the task's."""
        link = None
        if own := await tx.one(sessions.SQL.whole_by_key, key=caller.session_key):
            link = await self._link(tx, origin, own["id"], run_id)
        task, deadline = await tasks.redirect(tx, session["key"], run_id)
        return _Place(task, deadline, link)

    async def _submit(
        self,
        tx: Tx,
        caller: Caller,
        message: Message,
        run_id: str,
        now: int,
        place: _Place | None = None,
    ) -> tuple[admissions.Accepted, Row, str | None]:
        """Also what became of the session: why it began or began anew, if it did."""
        row, founded = await self._opened_or_founded(tx, caller, "send", message.session, now)
        checks.current(row, message.session)
        said_on = keys.WEBCHAT if caller.is_operator and message.provenance is None else None
        self._door.check_send(row, said_on)
        if said_on and not (row["channel"] or row["last_channel"]):  # once in the life of a session
            await tx.do(sessions.SQL.record_channel, id=row["id"], channel=said_on, to=row["key"])
        news = "create" if founded else None
        if self._resets and place is None and not founded:
            news = await self._due(tx, caller, message, row, run_id, now)
            row = await _renewed(tx, caller, row, news, now) if news else row
        timeout = message.timeout_seconds
        task, deadline, link = place or _Place()
        submission = Submission(
            run_id=run_id,
            session=row["id"],
            session_key=row["key"],
            origin=message.origin,
            message=_entry(message, now),
            options=message.options,
            instructions=message.instructions,
            model=message.model,
            thinking=message.thinking,
            deadline_at=deadline if timeout is None else now + round(timeout * 1000),
            max_queued=self.config.store.lane_max_queued,
            task=task,
            chain=link.chain if link else None,
            hop=link.hop if link else 0,
            agent_id=self._door.spoken_to(caller, message.session),
        )
        return await admissions.submit(tx, submission, now), row, news

    @cached_property
    def _resets(self) -> resets.Rules | None:
        return resets.rules(self.config.session)

    async def _due(
        self, tx: Tx, caller: Caller, message: Message, row: Row, run_id: str, now: int
    ) -> resets.Reason | None:
        """Why these words begin another conversation, if they do: only a person's, and only in an idle session.

        Who names the conversation itself wants that one.
        """
        if not caller.is_operator or message.provenance or message.session.strip() == row["session_id"]:
            return None
        channel = row["channel"] or row["last_channel"]
        rule = self._resets.rule(keys.parse(row["key"]), channel) if self._resets else None
        if rule is None:
            return None
        use = await tx.one(sessions.SQL.last_use, id=row["id"])
        reason = rule.due(use["updated_at"], now) if use and use["last_seq"] else None
        if reason is None or await tx.one(sessions.SQL.at_work, id=row["id"]):
            return None
        if await tx.one(sessions.SQL.awaits, id=row["id"]):
            return None
        return reason if await tx.one(runs.SQL.accepted_before, id=run_id) is None else None

    def _check(self, message: Message) -> None:
        """Everything about the words that can be refused without looking anything up."""
        most = self.config.store.message_max_bytes
        if isinstance(message.content, ToolResult):
            words.check_size(message.content.content, most, beside=message.instructions)
        else:
            words.check(message.content, most, beside=message.instructions)
        for earlier in message.options.earlier if message.options else ():
            said = earlier.content
            shown = said if isinstance(said, str) else [it for it in said if isinstance(it, Text | Image)]
            words.check_size(shown, most, field="messages")
        words.check_key(message.idempotency_key)
        if message.timeout_seconds is not None and not 0 < message.timeout_seconds <= 366 * 86_400:
            raise InvalidInput(
                "The timeout must be more than 0 seconds and at most a year.",
                "Leave it out.",
                field="timeoutSeconds",
            )
        if message.thinking is not None and message.thinking not in THINKING:
            raise InvalidInput(
                f"There is no thinking level {message.thinking!r}.",
                f"Use one of {', '.join(THINKING)}.",
                field="thinking",
            )
        if message.model is not None:
            self.config.find_model(message.model)


_SWITCHED: dict[policy.SendCommand, str] = {
    "allow": "Send policy set to on.",
    "deny": "Send policy set to off.",
    "inherit": "Send policy set to inherit.",
}


def _send_command(caller: Caller, message: Message) -> policy.SendCommand | None:
    """What a person's words command, if they are a command: never those of another session or program."""
    text = message.content
    if (
        message.literal
        or message.provenance is not None
        or not caller.is_operator
        or not isinstance(text, str)
    ):
        return None
    return policy.parse_send_command(text) if text.lstrip()[:5].lower() == "/send" else None


def _entry(message: Message, now: int) -> User | ToolResult:
    if isinstance(message.content, ToolResult):
        return msgspec.structs.replace(message.content, timestamp=now)
    return User(content=message.content, timestamp=now, provenance=message.provenance)


async def _renewed(tx: Tx, caller: Caller, row: Row, reason: str, now: int) -> Row:
    """The session with another conversation, as after `/new`."""
    await sessions.renew(tx, row, reason, now)
    renewed = await sessions.find(tx, keys.parse(row["key"]), caller.session_key)
    assert renewed is not None
    return renewed


def _receipt(accepted: admissions.Accepted, row: Row) -> Accepted:
    return Accepted(
        run_id=accepted.run_id,
        session_key=row["key"],
        session_id=row["session_id"],
        state=accepted.state,
        new=accepted.new,
    )
