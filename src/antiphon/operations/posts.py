"""Posting a text to the chat of a session without a run of its model: the `message` tool.

The text becomes an entry of that session's transcript, and goes to its chat through the outbox.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine import validation
from antiphon.engine.outbox import delivery_rows, sanitize
from antiphon.engine.outbox.delivery_rows import WEBCHAT_CHANNEL, Destination, NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.run_queue import NOTE_ORIGIN, AcceptedRun, Submission
from antiphon.engine.sessions import session_rows
from antiphon.errors import InvalidInput
from antiphon.messages import INJECTED_MODEL, AssistantMessage, Provenance, TextBlock
from antiphon.operations.context import OperationContext
from antiphon.store import Row, Tx

POST_KIND = "message"


class PostView(msgspec.Struct, frozen=True, rename="camel"):
    """A text that is on its way to the chat of a session."""

    status: str
    session_key: str
    channel: str
    delivery_key: str


class PostOperations:
    def __init__(self, context: OperationContext, channels: Collection[str]) -> None:
        self._context = context
        self._channels = {WEBCHAT_CHANNEL, *channels}

    async def post(
        self, caller: Caller, text: str, key: str, target: str = "current", channel: str | None = None
    ) -> PostView:
        """Post a text to the chat of a session that the caller may send to. The same `key` posts it once.

        Raises:
            SendBlocked: the send policy denies it.
        """
        validation.validate_message_content(
            text, self._context.config.store.message_max_bytes, field="message"
        )
        worker = self._context.require_worker()
        view, note = await self._context.store.tx(
            self._post, caller, text, key, target, channel, self._context.clock.now()
        )
        if note is not None:
            await worker.dispatch_accepted_run(note)
        worker.wake_outbox()
        return view

    async def post_to_chat(
        self, caller: Caller, text: str, key: str, destination: Destination, session: str = "main"
    ) -> PostView:
        """Post a text to a chat of a channel, in the name of a session, which records it. Only operators can.

        Raises:
            InvalidInput: this gateway does not have the channel.
            SendBlocked: the send policy denies it.
        """
        access.require_operator(caller, "send", "chats by their address", "Post to a session.")
        validation.validate_message_content(
            text, self._context.config.store.message_max_bytes, field="message"
        )
        validation.validate_idempotency_key(key)
        self._check_channel(destination.channel, destination.channel)
        worker = self._context.require_worker()
        view, note = await self._context.store.tx(
            self._post, caller, text, key, session, None, self._context.clock.now(), destination
        )
        if note is not None:
            await worker.dispatch_accepted_run(note)
        worker.wake_outbox()
        return view

    async def _post(
        self,
        tx: Tx,
        caller: Caller,
        text: str,
        key: str,
        target: str,
        channel: str | None,
        now: int,
        destination: Destination | None = None,
    ) -> tuple[PostView, AcceptedRun | None]:
        resolver = self._context.session_resolver
        if destination is None:
            row = await resolver.open(tx, caller, "send", target)
            resolver.check_send(row)
            destination = delivery_rows.resolve_session_destination(
                await session_rows.load_full_session(tx, row["id"])
            )
            self._check_channel(destination.channel, channel)
        else:
            row, _ = await self._context.open_or_create_session(tx, caller, "send", target, now)
            resolver.check_send(row, destination.channel)
        body = sanitize.sanitize_for_agents(text)
        if not body:
            raise InvalidInput("The message has no text to send.", "Write one.", field="message")
        note = await run_queue.submit_follow_up(tx, _build_note(caller, row, body, key, now), now)
        delivery_key = f"message:{key}"
        delivery = NewDelivery(
            key=delivery_key,
            kind=POST_KIND,
            session=row["id"],
            session_key=row["key"],
            destination=destination,
            body=body,
            entry_run=_build_note_id(key),
        )
        await delivery_rows.enqueue_delivery(tx, delivery, now)
        shown_key = keys.display_stored_key(row["key"], viewer_agent_id=caller.agent_id)
        return PostView("queued", shown_key, destination.channel, delivery_key), note

    def _check_channel(self, actual: str, wanted: str | None) -> None:
        if actual not in self._channels or wanted not in (None, actual):
            named = wanted if wanted not in (None, actual) else actual
            raise InvalidInput(
                f"That chat cannot be reached through the channel {named!r}.",
                "Leave the channel out."
                if actual in self._channels
                else "The operator has to configure that channel.",
                field="channel",
            )


def _build_note_id(key: str) -> str:
    return f"note:message:{key}"


def _build_note(caller: Caller, row: Row, body: str, key: str, now: int) -> Submission:
    """Build the note that adds the text to the transcript, after whatever runs there now."""
    message = AssistantMessage(
        content=[TextBlock(text=body)],
        timestamp=now,
        stop_reason="stop",
        provider="antiphon",
        model=INJECTED_MODEL,
        provenance=Provenance(
            kind=POST_KIND,
            source_session_key=caller.session_key and keys.display_full_key(caller.session_key),
        ),
    )
    return Submission(
        run_id=_build_note_id(key),
        session=row["id"],
        session_key=row["key"],
        origin=NOTE_ORIGIN,
        message=message,
    )
