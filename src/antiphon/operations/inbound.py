"""Takes messages from chat services: who may write, which session it is for, what is queued or answered.

What a message leads to is one transaction, together with the record that the event was taken: the channel acknowledges
it to the service afterwards, and a repetition changes nothing.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from antiphon import keys
from antiphon.channel_manifest import ChannelManifest
from antiphon.clock import MILLISECONDS_PER_DAY
from antiphon.config.channels import (
    ChannelAccount,
    ChannelDefaults,
    GroupRules,
    TopicConfig,
    has_nested_repeat,
)
from antiphon.engine.collaboration import framing
from antiphon.engine.inbound import inbound_rows, pairing_rows, routing
from antiphon.engine.inbound.admission import (
    ANYONE,
    Admission,
    AdmissionFacts,
    AdmissionRules,
    GroupPolicy,
    decide_admission,
)
from antiphon.engine.inbound.events import Inbound, InboundMedia
from antiphon.engine.outbox import delivery_rows
from antiphon.engine.outbox.delivery_rows import Destination, NewDelivery
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.run_queue import CHANNEL_ORIGIN, NOTE_ORIGIN, AcceptedRun, Submission
from antiphon.engine.sessions import session_rows
from antiphon.errors import AntiphonError, NotFound, StoreError
from antiphon.keys import SessionKey
from antiphon.messages import ImageBlock, Provenance, TextBlock, UserMessage
from antiphon.operations import chat_commands
from antiphon.operations.chat_commands import EnteredCommand
from antiphon.operations.command_runner import ChatCommandRunner, CommandSender
from antiphon.operations.context import OperationContext
from antiphon.operations.messages import CHAT_CALLER, AcceptedFromChat, MessageOperations
from antiphon.operations.runs import RunOperations
from antiphon.operations.types import IncomingMessage
from antiphon.store import Row, Tx

log = logging.getLogger(__name__)

MAX_FAILED_ATTEMPTS = 5
"""Of one event; then it is given up, and stays visible."""
EVENT_MEMORY_MS = 7 * MILLISECONDS_PER_DAY
MAX_CONTEXT_CHARACTERS = 2000
MAX_NAME_CHARACTERS = 80
IMAGE_SIGNATURES = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
Fetch = Callable[[InboundMedia, int], Awaitable[bytes]]
"""Loads a file of a message, of at most so many bytes."""
InboundOutcome = Literal["run", "command", "context", "challenge", "ignored", "repeated"]


class InboundReceipt(msgspec.Struct, frozen=True):
    """What a message led to."""

    outcome: InboundOutcome
    reason: str
    run_id: str | None = None
    destination: Destination | None = None


class _Route(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that configuration and pairings say about a message."""

    admission: Admission
    key: SessionKey
    destination: Destination
    is_owner: bool
    moves_route: bool
    """Whether later announces of a main session go where this message came from."""
    system_prompt: str | None
    command: EnteredCommand | None
    history_limit: int


class InboundOperations:
    def __init__(
        self,
        context: OperationContext,
        messages: MessageOperations,
        runs: RunOperations,
        commands: ChatCommandRunner,
    ) -> None:
        self._context = context
        self._messages = messages
        self._runs = runs
        self._commands = commands

    async def take(self, manifest: ChannelManifest, inbound: Inbound, fetch: Fetch) -> InboundReceipt:
        """Take a message. When this returns, it is stored what it led to, and the service can be told.

        Raises:
            StoreError: nothing was stored, so the service must not be told.
        """
        route = await self._context.store.read(self._find_route, manifest, inbound)
        if route is None:
            return InboundReceipt("repeated", "taken before")
        log.info(
            "Message %s of %s account %r: %s (%s)",
            inbound.event_id,
            manifest.name,
            inbound.account,
            route.admission.outcome,
            route.admission.reason,
            extra={"session_key": str(route.key)},
        )
        if route.admission.outcome == "admit" and route.command is not None:
            return await self._take_command(manifest, inbound, route, route.command)
        if route.admission.outcome == "ignore":
            return InboundReceipt("ignored", route.admission.reason)
        content = await self._build_content(manifest, inbound, route, fetch)
        return await self._commit(manifest, inbound, content)

    async def has_ended(self, run_id: str) -> bool:
        try:
            return (await self._runs.get(CHAT_CALLER, run_id)).has_ended
        except NotFound:
            return True

    async def record_failure(
        self, manifest: ChannelManifest, account: str, event_id: str, error: str
    ) -> bool:
        """Count a failed attempt at an event. Returns whether it was given up, so that the service can be told."""
        now = self._context.clock.now()
        is_given_up = await self._context.store.tx(
            inbound_rows.record_failure,
            manifest.name,
            account,
            event_id,
            error,
            now,
            expires_at=now + EVENT_MEMORY_MS,
            most=MAX_FAILED_ATTEMPTS,
        )
        if is_given_up:
            log.error("Gave up message %s of %s account %r: %s", event_id, manifest.name, account, error)
        return is_given_up

    # --- decisions ---

    async def _find_route(self, tx: Tx, manifest: ChannelManifest, inbound: Inbound) -> _Route | None:
        """Return what is to happen to a message, or None if that was decided before."""
        before = await inbound_rows.find_event(tx, manifest.name, inbound)
        if before is not None and before["state"] != "failing":
            return None
        section = self._context.config.channel_sections[manifest.name]
        account = section.list_accounts()[inbound.account]
        rules, topic = self._find_group_rules(account, inbound)
        agent_id, is_bound = self._select_agent(manifest.name, inbound, topic)
        is_paired, is_paired_owner = False, False
        if inbound.chat.kind == "direct":
            is_paired, is_paired_owner = await pairing_rows.load_grant(
                tx, manifest.name, inbound.account, inbound.sender.id
            )
        session = self._context.config.session
        senders = {manifest.strip_prefix(entry) for entry in account.allow_from}
        command = chat_commands.parse_command(inbound.text) if not inbound.media else None
        facts = AdmissionFacts(
            chat_kind=inbound.chat.kind,
            sender_id=inbound.sender.id,
            is_self=inbound.sender.is_self,
            is_bot=inbound.sender.is_bot,
            is_edited=inbound.is_edited,
            is_empty=not inbound.text.strip() and not inbound.media,
            is_paired=is_paired,
            is_mentioned=inbound.is_mentioned or inbound.is_reply_to_self,
            is_command=command is not None,
        )
        admission = await self._decide(
            tx, manifest, inbound, self._build_rules(manifest, account, rules, inbound), facts, agent_id
        )
        is_owner = is_paired_owner or inbound.sender.id in senders
        return _Route(
            admission=admission,
            key=routing.build_session_key(
                agent_id,
                manifest.name,
                inbound,
                dm_scope=session.dm_scope,
                identity_links=session.identity_links,
                scope=session.scope,
                is_bound=is_bound,
                thread_word=manifest.thread_word,
            ),
            destination=Destination(
                channel=manifest.name,
                to=inbound.chat.id,
                account_id=inbound.account,
                thread_id=inbound.thread_id,
            ),
            is_owner=is_owner,
            moves_route=inbound.chat.kind != "direct"
            or len(senders - {ANYONE}) != 1
            or inbound.sender.id in senders,
            system_prompt=next((rule.system_prompt for rule in rules if rule.system_prompt), None),
            command=command,
            history_limit=self._find_history_limit(account),
        )

    async def _decide(
        self,
        tx: Tx,
        manifest: ChannelManifest,
        inbound: Inbound,
        rules: AdmissionRules,
        facts: AdmissionFacts,
        agent_id: str,
    ) -> Admission:
        """Return the admission with what only patterns of mentions and earlier pairing requests can tell."""
        admission = decide_admission(rules, facts)
        # Patterns are only for people who may write: matching can take long, and a stranger chooses the text.
        if admission.outcome == "context" and self._matches_pattern(agent_id, inbound.text):
            return decide_admission(rules, msgspec.structs.replace(facts, is_mentioned=True))
        if admission.outcome == "challenge" and not await pairing_rows.can_request_pairing(
            tx, manifest.name, inbound.account, inbound.sender.id, self._context.clock.now()
        ):
            return Admission("ignore", "waits for its pairing, or too many others do")
        return admission

    def _find_group_rules(
        self, account: ChannelAccount, inbound: Inbound
    ) -> tuple[list[GroupRules], TopicConfig | None]:
        """Return the settings of the topic, the group and `*`, as far as there are any; the first one wins."""
        groups = account.group_rules
        if inbound.chat.kind == "direct" or not groups:
            return [], None
        found = [groups[key] for key in (inbound.chat.id, "*") if key in groups]
        topics = [group.topics[inbound.thread_id] for group in found if inbound.thread_id in group.topics]
        return [*topics, *found], topics[0] if topics else None

    def _build_rules(
        self,
        manifest: ChannelManifest,
        account: ChannelAccount,
        rules: Sequence[GroupRules],
        inbound: Inbound,
    ) -> AdmissionRules:
        shared = self._context.config.channels.get("defaults")
        default_policy: GroupPolicy = (
            shared.group_policy if isinstance(shared, ChannelDefaults) else "allowlist"
        )
        people = account.allow_from if account.group_allow_from is None else account.group_allow_from
        own_senders = next((rule.allow_from for rule in rules if rule.allow_from is not None), None)
        listed = people if own_senders is None else own_senders
        groups = account.group_rules
        own_policies: list[GroupPolicy] = [
            rule.group_policy for rule in rules if rule.group_policy is not None
        ]
        return AdmissionRules(
            dm_policy=account.dm_policy,
            allow_from=frozenset(map(manifest.strip_prefix, account.allow_from)),
            group_policy=own_policies[0] if own_policies else account.group_policy or default_policy,
            group_allow_from=frozenset(map(manifest.strip_prefix, listed)),
            has_own_senders=own_senders is not None,
            has_group_list=groups is not None,
            is_group_listed=groups is not None and bool(groups.keys() & {inbound.chat.id, "*"}),
            is_group_enabled=all(rule.enabled is not False for rule in rules),
            requires_mention=next(
                (rule.require_mention for rule in rules if rule.require_mention is not None), True
            ),
        )

    def _select_agent(self, channel: str, inbound: Inbound, topic: TopicConfig | None) -> tuple[str, bool]:
        config = self._context.config
        if topic is not None and topic.agent_id in config.agent_ids:
            return topic.agent_id, True
        return routing.select_agent(
            config.bindings, channel, inbound, config.agent_ids, config.default_agent_id
        )

    def _matches_pattern(self, agent_id: str, text: str) -> bool:
        config = self._context.config
        entry = next((entry for entry in config.agents.list if entry.id == agent_id), None)
        own = entry.group_chat.mention_patterns if entry else None
        patterns = config.messages.group_chat.mention_patterns if own is None else own
        return any(pattern.search(text) for pattern in _compile_patterns(patterns or ()))

    def _find_history_limit(self, account: ChannelAccount) -> int:
        shared = self._context.config.messages.group_chat.history_limit
        default = account.DEFAULT_HISTORY_LIMIT if shared is None else shared
        return default if account.history_limit is None else account.history_limit

    # --- content ---

    async def _build_content(
        self, manifest: ChannelManifest, inbound: Inbound, route: _Route, fetch: Fetch
    ) -> str | list[TextBlock | ImageBlock]:
        """Return what the agent is shown. Files are loaded only for messages that reach it."""
        text = inbound.text
        if inbound.chat.kind != "direct":
            text = f"[{_clean_name(inbound.sender.name) or inbound.sender.id}] {text}"
        if route.admission.outcome != "admit" or not inbound.media:
            return text
        images: list[ImageBlock] = []
        left_out: list[str] = []
        room = self._context.config.store.message_max_bytes * 3 // 4 - len(text.encode()) - 1024
        for media in inbound.media:
            image, reason = await self._load_image(manifest, media, route, fetch, room)
            if image is None:
                left_out.append(f"[left out: {_describe_media(media)}: {reason}]")
            else:
                images.append(image)
                room -= len(image.data) * 3 // 4
        text = "\n".join(filter(None, [text.strip(), *left_out]))
        return [*([TextBlock(text=text)] if text else []), *images] if images else text

    async def _load_image(
        self, manifest: ChannelManifest, media: InboundMedia, route: _Route, fetch: Fetch, room: int
    ) -> tuple[ImageBlock | None, str]:
        section = self._context.config.channel_sections[manifest.name]
        account = section.list_accounts()[route.destination.account_id or keys.DEFAULT_ACCOUNT]
        limit = min(room, manifest.limits.download_bytes)
        if account.media_max_mb is not None:
            limit = min(limit, round(account.media_max_mb * 1024 * 1024))
        if not (media.kind == "image" or (media.mime_type or "").startswith("image/")):
            return None, "only images are read"
        if limit <= 0 or (media.size or 0) > limit:
            return None, "it is too large"
        try:
            content = await fetch(media, limit)
        except AntiphonError as error:
            log.warning("A file of %s was not loaded: %s", manifest.name, error)
            return None, "it could not be loaded"
        mime_type = next((kind for sign, kind in IMAGE_SIGNATURES.items() if content.startswith(sign)), None)
        if mime_type is None:
            return None, "it is not a JPEG, PNG, GIF or WebP image"
        return ImageBlock(data=base64.b64encode(content).decode(), mime_type=mime_type), ""

    # --- the accepting transaction ---

    async def _commit(
        self, manifest: ChannelManifest, inbound: Inbound, content: str | list[TextBlock | ImageBlock]
    ) -> InboundReceipt:
        now = self._context.clock.now()
        run_id = run_queue.new_run_id(now)
        receipt, note, accepted = await self._context.store.tx(
            self._accept, manifest, inbound, content, run_id, now
        )
        worker = self._context.require_worker()
        if note is not None:
            await worker.dispatch_accepted_run(note)
        if accepted is not None:
            await self._messages.announce_acceptance(accepted)
        if receipt.outcome == "challenge":
            worker.wake_outbox()
        return receipt

    async def _accept(
        self,
        tx: Tx,
        manifest: ChannelManifest,
        inbound: Inbound,
        content: str | list[TextBlock | ImageBlock],
        run_id: str,
        now: int,
    ) -> tuple[InboundReceipt, AcceptedRun | None, AcceptedFromChat | None]:
        route = await self._find_route(tx, manifest, inbound)
        if route is None:
            return InboundReceipt("repeated", "taken before"), None, None
        outcome, note, accepted = "ignored", None, None
        match route.admission.outcome:
            case "admit":
                outcome = "run"
                note, accepted = await self._submit(tx, inbound, route, content, run_id, now)
            case "context":
                outcome = "context"
                await self._keep_context(tx, inbound, route)
            case "challenge":
                outcome = "challenge"
                await self._challenge(tx, manifest, inbound, route, now)
            case "ignore":
                pass
        receipt = InboundReceipt(
            outcome, route.admission.reason, run_id if accepted else None, route.destination
        )
        await self._record(tx, manifest, inbound, receipt, route, now)
        return receipt, note, accepted

    async def _record(
        self,
        tx: Tx,
        manifest: ChannelManifest,
        inbound: Inbound,
        receipt: InboundReceipt,
        route: _Route,
        now: int,
    ) -> bool:
        memory = max(EVENT_MEMORY_MS, 2000 * manifest.limits.redelivery_seconds)
        return await inbound_rows.record_event(
            tx,
            manifest.name,
            inbound,
            receipt.outcome,
            receipt.reason,
            now,
            expires_at=now + memory,
            run_id=receipt.run_id,
            session_key=str(route.key) if receipt.run_id else None,
        )

    async def _submit(
        self,
        tx: Tx,
        inbound: Inbound,
        route: _Route,
        content: str | list[TextBlock | ImageBlock],
        run_id: str,
        now: int,
    ) -> tuple[AcceptedRun | None, AcceptedFromChat]:
        """Queue a message for its session, after what the group said before it."""
        row, created = await self._context.open_or_create_session(
            tx, CHAT_CALLER, "send", str(route.key), now
        )
        if created and inbound.chat.kind != "direct" and (title := _clean_name(inbound.chat.title or "")):
            await session_rows.patch_session(tx, row["id"], {"display_name": title}, now)
        note = await self._submit_context(tx, route, row, run_id, now)
        message = IncomingMessage(
            session=row["key"], content=content, origin=CHANNEL_ORIGIN, instructions=route.system_prompt
        )
        accepted = await self._messages.submit_from_chat(tx, message, run_id, route.destination, now)
        if route.moves_route or route.key.kind != "main":
            await inbound_rows.set_route(tx, row["id"], route.destination)
        return note, accepted._replace(news="create") if created else accepted

    async def _submit_context(
        self, tx: Tx, route: _Route, row: Row, run_id: str, now: int
    ) -> AcceptedRun | None:
        said = await inbound_rows.take_context(tx, delivery_rows.build_place(route.destination))
        if not said:
            return None
        message = UserMessage(
            content="\n".join(f"[{line['sender']}] {line['text']}" for line in said),
            timestamp=now,
            provenance=Provenance(kind="group_context", source_channel=route.destination.channel),
        )
        note = Submission(
            run_id=f"note:context:{run_id}",
            session=row["id"],
            session_key=row["key"],
            origin=NOTE_ORIGIN,
            message=message,
        )
        return await run_queue.submit_follow_up(tx, note, now)

    async def _keep_context(self, tx: Tx, inbound: Inbound, route: _Route) -> None:
        if not route.history_limit:
            return
        files = [f"[{_describe_media(media)}]" for media in inbound.media]
        said = inbound.text.strip()[:MAX_CONTEXT_CHARACTERS].replace("\0", "")  # which PostgreSQL refuses
        text = " ".join(filter(None, [said, *files]))
        await inbound_rows.add_context(
            tx,
            delivery_rows.build_place(route.destination),
            _clean_name(inbound.sender.name) or inbound.sender.id,
            text,
            inbound.sent_at,
            route.history_limit,
        )

    async def _challenge(
        self, tx: Tx, manifest: ChannelManifest, inbound: Inbound, route: _Route, now: int
    ) -> None:
        """Answer a stranger's first message with a pairing code; later ones get nothing while it is valid."""
        code = await pairing_rows.request_pairing(
            tx, manifest.name, inbound.account, inbound.sender.id, _clean_name(inbound.sender.name), now
        )
        if code is None:
            return
        account = "" if inbound.account == keys.DEFAULT_ACCOUNT else f" --account {inbound.account}"
        text = (
            f"You are not paired with this bot yet. Your id is {inbound.sender.id}, and your pairing code is"
            f" {code}.\nIts owner can admit you within an hour:"
            f" antiphon pairing approve {manifest.name} {code}{account}"
        )
        key = f"pairing:{manifest.name}:{inbound.account}:{inbound.event_id}"
        await _enqueue(tx, key, "pairing", route, 0, text, now, now + pairing_rows.CODE_LIFETIME_MS)

    # --- commands ---

    async def _take_command(
        self, manifest: ChannelManifest, inbound: Inbound, route: _Route, entered: EnteredCommand
    ) -> InboundReceipt:
        """Run a command under a key of its event, and store the answer; a repetition in between has no effect."""
        digest = hashlib.sha256(f"{manifest.name}\n{inbound.account}\n{inbound.event_id}".encode())
        sender = CommandSender(
            id=inbound.sender.id,
            channel=manifest.name,
            is_owner=route.is_owner,
            session=str(route.key),
            idempotency_key=f"chat-{digest.hexdigest()[:32]}",
        )
        try:
            reply = await self._commands.run(entered, sender)
        except StoreError:
            raise  # it is for operators, and the service reports the command again
        except NotFound as error:
            reply = error.what
        except AntiphonError as error:
            reply = str(error)
        receipt = InboundReceipt("command", f"/{entered.command.name}", None, route.destination)
        await self._context.store.tx(
            self._answer_command, manifest, inbound, receipt, route, reply, self._context.clock.now()
        )
        self._context.require_worker().wake_outbox()
        return receipt

    async def _answer_command(
        self,
        tx: Tx,
        manifest: ChannelManifest,
        inbound: Inbound,
        receipt: InboundReceipt,
        route: _Route,
        reply: str,
        now: int,
    ) -> None:
        if await self._record(tx, manifest, inbound, receipt, route, now):
            row = await session_rows.find_by_key(tx, str(route.key))
            key = f"command:{manifest.name}:{inbound.account}:{inbound.event_id}"
            await _enqueue(tx, key, "command", route, row["id"] if row else 0, reply, now)


async def _enqueue(
    tx: Tx,
    key: str,
    kind: str,
    route: _Route,
    session: int,
    text: str,
    now: int,
    expires_at: int | None = None,
) -> None:
    delivery = NewDelivery(
        key=key,
        kind=kind,
        session=session,
        session_key=str(route.key),
        destination=route.destination,
        body=text,
        expires_at=expires_at,
    )
    await delivery_rows.enqueue_delivery(tx, delivery, now)


@lru_cache(maxsize=64)
def _compile_patterns(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns if not has_nested_repeat(pattern))


def _clean_name(name: str) -> str:
    """Return a name that a person chose, on one line and without brackets and control characters."""
    visible = framing.strip_control_characters(name).replace("[", "(").replace("]", ")")
    return " ".join(visible.split())[:MAX_NAME_CHARACTERS]


def _describe_media(media: InboundMedia) -> str:
    named = f" {_clean_name(media.name)!r}" if media.name else ""
    return f"{media.kind}{named}"
