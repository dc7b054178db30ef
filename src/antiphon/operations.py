"""The protocol-blind middle: what a caller can ask of Antiphon, typed in and out.

Every door (the CLI now, WebSocket, HTTP and agent tools on top of the same calls) says who is asking and gets
data or an error from `errors`. Each operation is one straight line: check the input, open the session through
`Door` inside one transaction, commit, tell. No wire format is known here, and nothing here keeps state.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon import access, keys, policy, views
from antiphon.access import Caller
from antiphon.bus import Event, EventBus, RunChanged, SessionChanged, run_topic, session_topic
from antiphon.clock import Clock
from antiphon.engine import feeds, runs, sessions, transcripts
from antiphon.engine.door import Door
from antiphon.engine.runs import Submission
from antiphon.errors import Conflict, InvalidInput, NotFound, SendBlocked, StoreReadOnly, TooLarge
from antiphon.messages import Image, Provenance, Text, User
from antiphon.store import Row, Store, Tx, listing
from antiphon.store.listing import KINDS, Wish
from antiphon.views import Accepted, Conversation, HistoryPage, RunView, SessionPage, SessionView, UsageLine

if TYPE_CHECKING:  # a command that only reads is over before these would be imported
    from antiphon.config import Config
    from antiphon.engine.engine import Engine

LIST_LIMIT, LIST_MOST = 50, 200
HISTORY_LIMIT, HISTORY_MOST = 50, 1000
_CHAT_TYPES: dict[str, keys.ChatType] = {"direct": "direct", "group": "group", "channel": "channel"}
THINKING = ("off", "minimal", "low", "medium", "high", "xhigh")
LOOK_AGAIN = 2.0  # seconds after which a wait reads the row though no event came


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Words for a session. `idempotency_key` becomes the run's id: saying it again changes nothing."""

    session: str
    content: str | list[Text | Image]
    idempotency_key: str | None = None
    origin: str = "chat"
    model: str | None = None
    thinking: str | None = None
    instructions: str | None = None
    timeout_seconds: float | None = None
    provenance: Provenance | None = None


class ListFilter(msgspec.Struct, frozen=True, kw_only=True):
    kinds: Sequence[str] | None = None
    limit: int = LIST_LIMIT
    active_minutes: float | None = None
    agent_id: str | None = None
    label: str | None = None
    search: str | None = None
    spawned_by: str | None = None
    include_archived: bool = False
    cursor: str | None = None


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    limit: int = HISTORY_LIMIT
    include_tools: bool = False
    before: int | None = None
    after: int | None = None


class StopView(msgspec.Struct, frozen=True):
    """Runs that were ended or told to end."""

    run_ids: list[str]


class Operations:
    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        bus: EventBus,
        clock: Clock,
        door: Door,
        engine: Engine | None,
        transcripts_dir: Path,
    ) -> None:
        self.config = config
        self._store = store
        self._bus = bus
        self._clock = clock
        self._door = door
        self._engine = engine
        self._transcripts = str(transcripts_dir)

    @cached_property
    def _policy(self) -> policy.SendPolicy:
        return _send_policy(self.config)

    # --- speaking ---

    async def submit(self, caller: Caller, message: Message) -> Accepted:
        """Put words into a session. They are durable when this returns; their run starts by itself."""
        self._check(message)
        engine = self._running()
        run_id = message.idempotency_key or uuid.uuid4().hex
        accepted, row = await self._store.tx(self._submit, caller, message, run_id, self._clock.now())
        await engine.accepted(accepted)
        return Accepted(
            run_id=accepted.run_id,
            session_key=row["key"],
            session_id=row["session_id"],
            state=accepted.state,
        )

    async def _submit(
        self, tx: Tx, caller: Caller, message: Message, run_id: str, now: int
    ) -> tuple[runs.Accepted, Row]:
        row = await self._door.open(tx, caller, "send", message.session, found_at=now)
        _check_current(row, message.session)
        self._check_policy(row)
        timeout = message.timeout_seconds
        submission = Submission(
            run_id=run_id,
            session=row["id"],
            session_key=row["key"],
            origin=message.origin,
            message=User(content=message.content, timestamp=now, provenance=message.provenance),
            instructions=message.instructions,
            model=message.model,
            thinking=message.thinking,
            deadline_at=None if timeout is None else now + round(timeout * 1000),
            max_queued=self.config.store.lane_max_queued,
        )
        return await runs.submit(tx, submission, now), row

    def _check(self, message: Message) -> None:
        """Everything about the words that can be refused without looking anything up."""
        most = self.config.store.message_max_bytes
        size = _bytes(message.content) + len((message.instructions or "").encode(errors="replace"))
        if not _says_something(message.content):
            raise InvalidInput("The message is empty.", "Say something.", field="message")
        if size > most:
            raise TooLarge(
                f"The message has {size} bytes; at most {most} are taken.",
                "Shorten it, or raise store.messageMaxBytes.",
                field="message",
                bytes=size,
                max=most,
            )
        key = message.idempotency_key
        if key is not None and not (0 < len(key) <= 200 and key.isprintable()):
            raise InvalidInput(
                "The idempotency key must be 1 to 200 printable characters.",
                "Use a UUID.",
                field="idempotencyKey",
            )
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

    def _check_policy(self, row: Row) -> None:
        decision = policy.decide(
            self._policy,
            override=row["send_policy"],
            channel=row["channel"] or row["last_channel"],
            chat_type=row["chat_type"],
            key=row["key"],
        )
        if decision == "deny":
            raise SendBlocked(
                f"send blocked by session policy: nothing may be sent to {row['key']!r}.",
                "Change session.sendPolicy, or the session's own sendPolicy.",
                key=row["key"],
            )

    # --- runs ---

    async def run(self, caller: Caller, run_id: str) -> RunView:
        """Where a run is."""
        return await self._store.read(self._run, caller, run_id)

    async def wait(self, caller: Caller, run_id: str, timeout: float) -> RunView:
        """Until the run has ended or `timeout` seconds are over; look at `ended` to see which.

        A wait holds nothing: it can be dropped and repeated from anywhere, before and after the end.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        async with self._bus.listen(run_topic(run_id)) as events:
            while True:
                view = await self._store.read(self._run, caller, run_id)
                left = until - loop.time()
                if view.ended or left <= 0:
                    return view
                event = await events.get(min(left, LOOK_AGAIN))
                if isinstance(event, RunChanged) and event.ended_at is not None:
                    return views.ended_view(view, event)

    async def _run(self, tx: Tx, caller: Caller, run_id: str) -> RunView:
        row = await tx.one(runs.SQL.by_id, id=run_id, viewer=caller.session_key)
        missing = NotFound(
            f"Run {run_id!r} was not found.", "Check the id; it is given when a message is accepted."
        )
        if row is None:
            raise missing
        try:
            self._door.admit(caller, "read", row, run_id)
        except NotFound:
            raise missing from None
        spent = await tx.one(runs.SQL.spent, id=run_id) if row["ended_at"] else None
        return views.run_view(row, spent, self._clock.now())

    async def unfinished(self, caller: Caller, session: str) -> list[str]:
        """Ids of the runs that play or wait in a session, in their order."""
        return await self._store.read(self._unfinished, caller, session)

    async def _unfinished(self, tx: Tx, caller: Caller, session: str) -> list[str]:
        row = await self._door.open(tx, caller, "read", session)
        active = await tx.all(runs.SQL.active_in, session=row["id"])
        queued = await tx.all(runs.SQL.queued_in, session=row["id"])
        return [run["id"] for run in [*active, *queued]]

    async def stop(self, caller: Caller, session: str, run_id: str | None = None) -> StopView:
        """Stop what runs or waits in a session, and everything below it in its tree."""
        engine = self._running()
        stopped = await self._store.tx(self._stop, caller, session, run_id, self._clock.now())
        engine.stopping(stopped)
        return StopView([*(ended.run_id for ended in stopped.ended), *stopped.asked])

    async def _stop(self, tx: Tx, caller: Caller, session: str, run_id: str | None, now: int) -> runs.Stopped:
        row = await self._door.open(tx, caller, "control", session)
        return await runs.cancel(tx, row["id"], run_id, now)

    # --- reading ---

    async def list(self, caller: Caller, wanted: ListFilter) -> SessionPage:
        """Sessions the caller may read, newest first."""
        access.require_scope(caller, "list")
        limit = _between(wanted.limit, 1, LIST_MOST, "limit")
        rows = await self._store.read(self._list, caller, wanted, limit + 1)
        shown = rows[:limit]
        more = len(rows) > limit
        return SessionPage(
            count=len(shown),
            sessions=[self._session_view(caller, row) for row in shown],
            scope="all" if caller.is_operator else self._door.grants(caller).read,
            next_cursor=f"{shown[-1]['updated_at']}|{shown[-1]['key']}" if more else None,
        )

    async def _list(self, tx: Tx, caller: Caller, wanted: ListFilter, limit: int) -> list[Row]:
        wish = await self._wish(tx, caller, wanted, limit)
        return await listing.page(tx, wish) if wish else []

    async def _wish(self, tx: Tx, caller: Caller, wanted: ListFilter, limit: int) -> Wish | None:
        """The caller's filters narrowed to the caller's reach; None when nothing can be left."""
        reach = access.reach(caller, self._door.grants(caller))
        agents = None
        if not reach.everything:
            known = await listing.agent_ids(tx)
            agents = [agent for agent in known if reach.admits_agent(agent)]
            agents = None if len(agents) == len(known) else agents
        only = None if wanted.agent_id is None else keys.checked_agent_id(wanted.agent_id)
        if only is not None:
            agents = [only] if agents is None or only in agents else []
        parent = None
        if wanted.spawned_by is not None:
            parent = (await self._door.open(tx, caller, "list", wanted.spawned_by))["key"]
        if agents == [] and reach.own_key is None:
            return None
        active = wanted.active_minutes
        return Wish(
            limit=limit,
            kinds=_kinds(wanted.kinds),
            agents=agents,
            own_key=reach.own_key,
            descendants=reach.descendants,
            only_agent=only,
            label=wanted.label,
            parent=parent,
            search=wanted.search,
            active_since=None if active is None else self._clock.now() - round(active * 60_000),
            archived=wanted.include_archived,
            cursor=_cursor(wanted.cursor),
        )

    async def describe(self, caller: Caller, session: str) -> SessionView:
        """One session as a list row."""
        return self._session_view(caller, await self._store.read(self._describe, caller, session))

    async def _describe(self, tx: Tx, caller: Caller, session: str) -> Row:
        row = await self._door.open(tx, caller, "read", session)
        return await self._described(tx, row["id"])

    async def history(self, caller: Caller, session: str, wanted: HistoryFilter) -> HistoryPage:
        """A page of a transcript, oldest first: the newest entries, or those before or after a number."""
        limit = _between(wanted.limit, 1, HISTORY_MOST, "limit")
        return await self._store.read(self._history, caller, session, wanted, limit)

    async def _history(
        self, tx: Tx, caller: Caller, session: str, wanted: HistoryFilter, limit: int
    ) -> HistoryPage:
        row = await self._door.open(tx, caller, "read", session)
        transcript, session_id = sessions.named(row)
        tools = wanted.include_tools
        if wanted.after is not None:
            entries = await transcripts.after(tx, transcript, wanted.after, limit + 1, tools=tools)
            page, more = entries[:limit], len(entries) > limit
            cursor = page[-1].seq if page else None
        else:
            before = transcripts.END if wanted.before is None else wanted.before
            entries = await transcripts.before(tx, transcript, before, limit + 1, tools=tools)
            page, more = entries[-limit:], len(entries) > limit
            cursor = page[0].seq if page else None
        return HistoryPage(
            session_key=row["key"],
            session_id=session_id,
            messages=[views.history_item(entry) for entry in page],
            total=await transcripts.last_seq(tx, transcript),
            has_more=more,
            next_cursor=str(cursor) if more and cursor is not None else None,
        )

    async def follow(self, caller: Caller, session: str, after: int | None = None) -> AsyncGenerator[Event]:
        """Entries after a number (default: from now on) and live events. Close the generator to stop."""
        row, last = await self._store.read(self._place, caller, session)
        start = last if after is None else after
        feed = feeds.follow(self._store, self._bus, session_topic(row["id"]), row, start)
        async with aclosing(feed):  # who stops following is not listened for any longer
            async for event in feed:
                yield event

    async def _place(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, int]:
        row = await self._door.open(tx, caller, "read", session)
        _check_current(row, session)
        return row, await transcripts.last_seq(tx, row["transcript"])

    async def usage(self, caller: Caller, session: str, *, tree: bool = False) -> list[UsageLine]:
        """What a session, or everything below its root, has cost by model."""
        return await self._store.read(self._usage, caller, session, tree)

    async def _usage(self, tx: Tx, caller: Caller, session: str, tree: bool) -> list[UsageLine]:
        row = await self._door.open(tx, caller, "read", session)
        query = runs.SQL.usage_by_tree if tree else runs.SQL.usage_by_model
        columns = UsageLine.__struct_fields__
        lines = await tx.all(query, key=row["key"])
        return [UsageLine(**{column: line[column] for column in columns}) for line in lines]

    # --- changing ---

    async def open(self, caller: Caller, session: str) -> SessionView:
        """The session, founded if it is not there yet."""
        row = await self._store.tx(self._open, caller, session, self._clock.now())
        return self._session_view(caller, row)

    async def _open(self, tx: Tx, caller: Caller, session: str, now: int) -> Row:
        row = await self._door.open(tx, caller, "send", session, found_at=now)
        _check_current(row, session)
        return await self._described(tx, row["id"])

    async def conversations(self, caller: Caller, session: str) -> list[Conversation]:
        """The conversations a key has had, newest first; each is readable by its session id."""
        rows = await self._store.read(self._conversations, caller, session)
        return [
            Conversation(
                session_id=row["session_id"],
                reason=row["reason"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
            )
            for row in rows
        ]

    async def _conversations(self, tx: Tx, caller: Caller, session: str) -> list[Row]:
        return await sessions.conversations(tx, await self._door.open(tx, caller, "read", session))

    async def renew(
        self, caller: Caller, session: str, reason: Literal["new", "reset"] = "new"
    ) -> SessionView:
        """Begin a new conversation under the same key. The old one stays readable, and can be restored."""

        async def change(tx: Tx, row: Row, now: int) -> None:
            await sessions.renew(tx, row, reason, now)

        return await self._change(caller, session, change)

    async def restore(self, caller: Caller, session_id: str) -> SessionView:
        """Make an older conversation of a key its current one again."""
        return await self._change(caller, session_id, sessions.restore)

    async def _change(
        self, caller: Caller, session: str, change: Callable[[Tx, Row, int], Awaitable[None]]
    ) -> SessionView:
        row = await self._store.tx(self._changed, caller, session, change, self._clock.now())
        event = SessionChanged(session_key=row["key"], reason="renewed")
        self._bus.publish(session_topic(row["id"]), event)
        self._bus.publish("sessions", event)
        return self._session_view(caller, row)

    async def _changed(
        self,
        tx: Tx,
        caller: Caller,
        session: str,
        change: Callable[[Tx, Row, int], Awaitable[None]],
        now: int,
    ) -> Row:
        row = await self._door.open(tx, caller, "control", session)
        await change(tx, row, now)
        return await self._described(tx, row["id"])

    @staticmethod
    async def _described(tx: Tx, session: int) -> Row:
        row = await tx.one(sessions.SQL.described, id=session)
        assert row is not None
        return row

    def _session_view(self, caller: Caller, row: Row) -> SessionView:
        shown = keys.display_text(row["key"], viewer_agent_id=caller.agent_id)
        view = views.session_view(row, shown, f"{self._transcripts}/{row['session_id']}.jsonl")
        return view if caller.is_operator else self._discreet(caller, view, row["key"])

    def _discreet(self, caller: Caller, view: SessionView, key: str) -> SessionView:
        """Without a parent that the caller may not know of, and without counting children it may not see."""
        reach = access.reach(caller, self._door.grants(caller))
        parent = view.parent_key
        if parent is not None and parent != reach.own_key and not reach.admits_agent(_agent_of(parent)):
            # A session seen only because it was spawned below the caller has a parent that was, too.
            below = reach.descendants and key != reach.own_key and not reach.admits_agent(_agent_of(key))
            parent = parent if below else None
        children = view.child_count if reach.descendants else None
        return msgspec.structs.replace(view, parent_key=parent, child_count=children)

    def _running(self) -> Engine:
        if self._engine is None:
            raise StoreReadOnly(
                "This view of the store is for reading.", "Start Antiphon on this state directory."
            )
        return self._engine


def _check_current(row: Row, reference: str) -> None:
    """For what is done to the conversation that goes on: an id that names an earlier one must not mean another."""
    if row["named_transcript"] != row["transcript"]:
        raise Conflict(
            f"The conversation {reference!r} has ended.", "Restore it first, or name its session by the key."
        )


def _agent_of(key: str) -> str:
    return keys.parse(key).agent_id


def _send_policy(config: Config) -> policy.SendPolicy:
    configured = config.session.send_policy
    rules = tuple(
        policy.SendRule(
            action=rule.action,
            channel=rule.match.channel_name,
            chat_type=_CHAT_TYPES.get(rule.match.chat_type or ""),
            key_prefix=rule.match.key_prefix,
            raw_key_prefix=rule.match.raw_key_prefix,
        )
        for rule in configured.rules
    )
    return policy.SendPolicy(rules, configured.default)


def _says_something(content: str | Sequence[Text | Image]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(isinstance(block, Image) or block.text.strip() for block in content)


def _bytes(content: str | Sequence[Text | Image]) -> int:
    texts = (
        [content]
        if isinstance(content, str)
        else [b.text if isinstance(b, Text) else b.data for b in content]
    )
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        raise InvalidInput(
            "The message contains half of a surrogate pair, which is not text.",
            "Send valid Unicode.",
            field="message",
        ) from error


def _between(value: int, least: int, most: int, field: str) -> int:
    if value < least:
        raise InvalidInput(
            f"{field!r} is {value}; it must be at least {least}.", f"Use {least} to {most}.", field=field
        )
    return min(value, most)


def _kinds(wanted: Sequence[str] | None) -> Sequence[str]:
    unknown = set(wanted or ()) - set(KINDS)
    if unknown:
        raise InvalidInput(
            f"There is no kind {sorted(unknown)[0]!r}.", f"The kinds are {', '.join(KINDS)}.", field="kinds"
        )
    return tuple(dict.fromkeys(wanted)) if wanted else KINDS


def _cursor(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    at, _, key = text.partition("|")
    if not (at.isdecimal() and len(at) < 18 and key):
        raise InvalidInput(
            f"The cursor {text[:80]!r} is not one of ours.",
            "Pass nextCursor as it was given.",
            field="cursor",
        )
    return int(at), key
