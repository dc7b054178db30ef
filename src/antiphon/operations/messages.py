"""Accepts messages to a session: validates them, queues their run, and applies send policy and resets."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec

from antiphon import access, keys, send_policy
from antiphon.access import Caller
from antiphon.bus import RunChanged, run_topic, session_topic
from antiphon.engine import validation
from antiphon.engine.collaboration import task_rows
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.engine.runs import endings, lifecycle, run_queue
from antiphon.engine.runs.completion import ReplyTarget
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.runs.run_queue import Submission
from antiphon.engine.sessions import resets, session_rows
from antiphon.engine.validation import require_current_conversation
from antiphon.errors import InvalidInput
from antiphon.messages import THINKING_LEVELS, ImageBlock, TextBlock, ToolResult, UserMessage
from antiphon.operations.context import OperationContext
from antiphon.operations.types import IncomingMessage, MessageReceipt, RequestOrigin
from antiphon.store import Row, Tx


class _TaskPlacement(NamedTuple):
    """The task that a message belongs to, the task's deadline, and the message's place in a chain."""

    task: int | None = None
    deadline: int | None = None
    link: ChainLink | None = None


class AcceptedFromChat(NamedTuple):
    """A message of a chat service that was queued in a transaction."""

    run: run_queue.AcceptedRun
    row: Row
    news: str | None
    """Why the session or its conversation is new, if it is."""


CHAT_CALLER = Caller.operator()
"""The caller of messages and commands from chats, which admission has decided about."""


class MessageOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def submit(self, caller: Caller, message: IncomingMessage) -> MessageReceipt:
        """Submit a message to a session. It is durable when this returns; its run starts by itself.

        A standalone `/send on|off|inherit` starts no run: it is applied when this returns, and has an answer as a run
        has.
        """
        self._validate_message(message)
        worker = self._context.require_worker()
        now = self._context.clock.now()
        run_id = message.idempotency_key or run_queue.new_run_id(now)
        if (command := _parse_send_command(caller, message)) is not None:
            return await self._run_send_command(caller, message.session, command, run_id, now)
        accepted, row, news = await self._context.store.tx(self._submit, caller, message, run_id, now)
        self._publish_news(row, news)
        await worker.dispatch_accepted_run(accepted)
        return _build_receipt(accepted, row)

    async def _run_send_command(
        self, caller: Caller, session: str, command: send_policy.SendCommand, run_id: str, now: int
    ) -> MessageReceipt:
        done = await self._context.store.tx(self._set_send_policy, caller, session, command, run_id, now)
        accepted, row, reply, created = done
        if created:
            self._context.publish_change(row, "create")
        if accepted.new:
            if reply is not None:
                self._context.publish_change(row, "patch")
            ended = RunChanged(session_key=row["key"], run_id=run_id, state="ok", reply=reply, ended_at=now)
            for topic in (run_topic(run_id), session_topic(row["id"])):
                self._context.bus.publish(topic, ended)
        return _build_receipt(accepted, row)

    async def _set_send_policy(
        self, tx: Tx, caller: Caller, session: str, command: send_policy.SendCommand, run_id: str, now: int
    ) -> tuple[run_queue.AcceptedRun, Row, str | None, bool]:
        """Run the owner's `/send` command, even if the send policy blocks messages. From others it has no effect."""
        row, created = await self._context.open_or_create_session(tx, caller, "send", session, now)
        require_current_conversation(row, session)
        reply = _SEND_COMMAND_REPLIES[command] if access.ADMIN_SCOPE in caller.scopes else None
        new = await run_queue.record_command(tx, run_id, row["id"], f"send {command}", now, reply)
        if new and reply is not None:
            setting = None if command == "inherit" else command
            await session_rows.patch_session(tx, row["id"], {"send_policy": setting}, now)
        return run_queue.AcceptedRun(run_id, row["id"], row["key"], "ok", new=new), row, reply, created

    async def steer(
        self, caller: Caller, message: IncomingMessage, origin: RequestOrigin | None = None
    ) -> tuple[MessageReceipt, list[str]]:
        """Stop what a session is doing and submit this message instead, atomically; also return the stopped runs.

        A repeated message stops nothing.
        """
        self._validate_message(message)
        worker = self._context.require_worker()
        now = self._context.clock.now()
        run_id = message.idempotency_key or run_queue.new_run_id(now)
        stopped, accepted, row = await self._context.store.tx(
            self._steer, caller, message, run_id, origin or RequestOrigin(), now
        )
        await worker.apply_effects(stopped)
        await worker.dispatch_accepted_run(accepted)
        run_ids = stopped.stopped_run_ids
        if run_ids:
            self._context.publish_change(row, "abort")
        return _build_receipt(accepted, row), run_ids

    async def _steer(
        self, tx: Tx, caller: Caller, message: IncomingMessage, run_id: str, origin: RequestOrigin, now: int
    ) -> tuple[Effects, run_queue.AcceptedRun, Row]:
        session = await self._context.session_resolver.open(tx, caller, "control", message.session)
        stopped, place = NO_EFFECTS, _TaskPlacement()
        if not await lifecycle.was_accepted(tx, run_id):
            place = await self._resolve_placement(tx, caller, session, run_id, origin)
            if place.task is not None and (text := _extract_text(message)):
                await task_rows.replace_task_text(tx, place.task, text)
            stopped = await endings.cancel_runs(tx, session["id"], None, now)
        accepted, row, _ = await self._submit(tx, caller, message, run_id, now, place)
        return stopped, accepted, row

    async def _resolve_placement(
        self, tx: Tx, caller: Caller, session: Row, run_id: str, origin: RequestOrigin
    ) -> _TaskPlacement:
        """Attach the message to the sub-agent's task: the new run, not the stopped one, gives the task's result."""
        link = None
        if caller.session_key and (own := await session_rows.find_by_key(tx, caller.session_key)):
            link = await self._context.build_chain_link(tx, origin, own["id"], run_id)
        task = await task_rows.continue_task(tx, session["key"], run_id, even_announcing=True)
        return _TaskPlacement(task.n, task.deadline_at, link)

    async def _submit(
        self,
        tx: Tx,
        caller: Caller,
        message: IncomingMessage,
        run_id: str,
        now: int,
        place: _TaskPlacement | None = None,
        destination: Destination | None = None,
    ) -> tuple[run_queue.AcceptedRun, Row, str | None]:
        """Return the accepted run, the session, and why the session or its conversation is new, if it is."""
        row, created = await self._context.open_or_create_session(tx, caller, "send", message.session, now)
        require_current_conversation(row, message.session)
        if destination is None:
            await self._record_webchat(tx, caller, message, row)
        news = "create" if created else None
        if self._reset_rules and place is None and not created:
            news = await self._find_reset_reason(tx, caller, message, row, run_id, now)
            row = await _renew_conversation(tx, caller, row, news, now) if news else row
        timeout = message.timeout_seconds
        task, deadline, link = place or _TaskPlacement()
        submission = Submission(
            run_id=run_id,
            session=row["id"],
            session_key=row["key"],
            origin=message.origin,
            message=_build_entry(message, now),
            options=message.options,
            instructions=message.instructions,
            model=message.model,
            thinking=message.thinking,
            deadline_at=deadline if timeout is None else now + round(timeout * 1000),
            max_queued=self._context.config.store.lane_max_queued,
            task=task,
            chain=link.chain if link else None,
            hop=link.hop if link else 0,
            agent_id=self._context.session_resolver.find_addressed_agent(caller, message.session),
            reply_target_json=destination and _build_reply_target(row, destination),
        )
        return await run_queue.submit(tx, submission, now), row, news

    async def _record_webchat(self, tx: Tx, caller: Caller, message: IncomingMessage, row: Row) -> None:
        """Check the send policy of a session that is written to over the gateway, and record its channel once."""
        channel = keys.WEBCHAT_CHANNEL if caller.is_operator and message.provenance is None else None
        self._context.session_resolver.check_send(row, channel)
        if channel and not (row["channel"] or row["last_channel"]):
            await session_rows.record_channel(tx, row["id"], channel, row["key"])

    async def submit_from_chat(
        self, tx: Tx, message: IncomingMessage, run_id: str, destination: Destination, now: int
    ) -> AcceptedFromChat:
        """Queue the message of a person in a chat service, whose answer goes to `destination`.

        The send policy decides about the answer, not about the message.
        """
        self._validate_message(message)
        accepted, row, news = await self._submit(
            tx, CHAT_CALLER, message, run_id, now, destination=destination
        )
        return AcceptedFromChat(accepted, row, news)

    def is_send_command(self, message: IncomingMessage) -> bool:
        """Whether the message is a `/send` command with a valid argument."""
        return _parse_send_command(CHAT_CALLER, message) is not None

    async def announce_acceptance(self, accepted: AcceptedFromChat) -> None:
        """Publish an accepted message and wake its lane; called after the commit."""
        self._publish_news(accepted.row, accepted.news)
        await self._context.require_worker().dispatch_accepted_run(accepted.run)

    def _publish_news(self, row: Row, news: str | None) -> None:
        if news == "create":
            self._context.publish_change(row, news)
        elif news:
            self._context.publish_to_session(row, "renewed")
            self._context.publish_to_all_sessions(row["key"], news)

    @cached_property
    def _reset_rules(self) -> resets.ResetRules | None:
        return resets.build_reset_rules(self._context.config.session)

    async def _find_reset_reason(
        self, tx: Tx, caller: Caller, message: IncomingMessage, row: Row, run_id: str, now: int
    ) -> resets.ResetReason | None:
        """Return why this message starts a new conversation, or None. Only people's messages to idle sessions do.

        A message that names the conversation by its session id never starts a new one.
        """
        if not caller.is_operator or message.provenance or message.session.strip() == row["session_id"]:
            return None
        channel = row["channel"] or row["last_channel"]
        rule = self._reset_rules.find_rule(keys.parse(row["key"]), channel) if self._reset_rules else None
        if rule is None:
            return None
        last_use = await session_rows.load_last_activity(tx, row["id"])
        reason = None if last_use is None else rule.find_due_reason(last_use, now)
        if reason is None or await session_rows.find_unfinished_run(tx, row["id"]):
            return None
        if await session_rows.has_unsettled_work(tx, row["id"]):
            return None
        return None if await lifecycle.was_accepted(tx, run_id) else reason

    def _validate_message(self, message: IncomingMessage) -> None:
        """Check everything about a message that needs no lookup."""
        max_bytes = self._context.config.store.message_max_bytes
        if isinstance(message.content, ToolResult):
            validation.validate_message_size(
                message.content.content, max_bytes, extra_text=message.instructions
            )
        else:
            validation.validate_message_content(message.content, max_bytes, extra_text=message.instructions)
        for earlier in message.options.earlier if message.options else ():
            content = earlier.content
            if not isinstance(content, str):
                content = [block for block in content if isinstance(block, TextBlock | ImageBlock)]
            validation.validate_message_size(content, max_bytes, field="messages")
        validation.validate_idempotency_key(message.idempotency_key)
        if message.timeout_seconds is not None and not 0 < message.timeout_seconds <= 366 * 86_400:
            raise InvalidInput(
                "The timeout must be more than 0 seconds and at most a year.",
                "Leave it out.",
                field="timeoutSeconds",
            )
        if message.thinking is not None and message.thinking not in THINKING_LEVELS:
            raise InvalidInput(
                f"There is no thinking level {message.thinking!r}.",
                f"Use one of {', '.join(THINKING_LEVELS)}.",
                field="thinking",
            )
        if message.model is not None:
            self._context.config.find_model(message.model)


_SEND_COMMAND_REPLIES: dict[send_policy.SendCommand, str] = {
    "allow": "Send policy set to on.",
    "deny": "Send policy set to off.",
    "inherit": "Send policy set to inherit.",
}


def _parse_send_command(caller: Caller, message: IncomingMessage) -> send_policy.SendCommand | None:
    """Return the command in a person's message, if it is one; messages of sessions and programs are never commands."""
    text = message.content
    if (
        message.literal
        or message.provenance is not None
        or not caller.is_operator
        or not isinstance(text, str)
    ):
        return None
    return send_policy.parse_send_command(text) if text.lstrip()[:5].lower() == "/send" else None


def _build_entry(message: IncomingMessage, now: int) -> UserMessage | ToolResult:
    if isinstance(message.content, ToolResult):
        return msgspec.structs.replace(message.content, timestamp=now)
    return UserMessage(content=message.content, timestamp=now, provenance=message.provenance)


def _extract_text(message: IncomingMessage) -> str:
    """Return what a person or an agent wrote, without images."""
    if isinstance(message.content, ToolResult):
        return ""
    blocks = message.content
    return (
        blocks
        if isinstance(blocks, str)
        else "\n".join(it.text for it in blocks if isinstance(it, TextBlock))
    )


async def _renew_conversation(tx: Tx, caller: Caller, row: Row, reason: str, now: int) -> Row:
    """Start a new conversation in the session, as `/new` does."""
    await session_rows.start_new_transcript(tx, row, reason, now)
    renewed = await session_rows.find_session(tx, keys.parse(row["key"]), caller.session_key)
    assert renewed is not None
    return renewed


def _build_reply_target(row: Row, destination: Destination) -> str:
    return ReplyTarget(session=row["id"], session_key=row["key"], destination=destination).json_text


def _build_receipt(accepted: run_queue.AcceptedRun, row: Row) -> MessageReceipt:
    return MessageReceipt(
        run_id=accepted.run_id,
        session_key=row["key"],
        session_id=row["session_id"],
        state=accepted.state,
        new=accepted.new,
    )
