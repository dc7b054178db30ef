"""Reads transcripts: pages, previews, live feeds, and token usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from itertools import islice

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.bus import Event, SessionChanged, session_topic
from antiphon.engine import idempotency, validation
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.runs import compaction, lifecycle
from antiphon.engine.sessions import feeds, session_rows, transcripts
from antiphon.engine.sessions.transcripts import MAX_HISTORY_ENTRIES, Entry, HistoryFilter
from antiphon.engine.validation import (
    require_current_conversation,
    validate_and_clamp,
    validate_printable_name,
)
from antiphon.errors import Conflict, InvalidInput, NotFound
from antiphon.messages import INJECTED_MODEL, AssistantMessage, TextBlock
from antiphon.operations import transcript_types
from antiphon.operations.context import OperationContext
from antiphon.operations.transcript_types import (
    CompactView,
    HistoryPage,
    InjectedEntry,
    PreviewItem,
    SessionPreview,
)
from antiphon.operations.types import UsageLine
from antiphon.store import Row, Tx

MAX_KEPT_ENTRIES = 1_000_000
MAX_INJECT_LABEL_CHARACTERS = 100
MAX_PREVIEWED_SESSIONS = 64  # in one call
MAX_LATEST_BYTES = 64 * 1024  # of an entry that is read together with those of other sessions


class TranscriptOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def read(self, caller: Caller, session: str, filter: HistoryFilter) -> HistoryPage:
        """Return a page of a transcript, oldest first: the newest entries, or those before or after a number.

        It has at most `limit` entries, and fewer or none if entries are large or most are filtered out: `has_more`
        shows whether to continue.
        """
        limit = validate_and_clamp(filter.limit, 1, MAX_HISTORY_ENTRIES, "limit")
        return await self._context.store.read(self._load_page, caller, session, filter, limit)

    async def _load_page(
        self, tx: Tx, caller: Caller, session: str, filter: HistoryFilter, limit: int
    ) -> HistoryPage:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        transcript, session_id = session_rows.get_named_transcript(row)
        tools = filter.include_tools
        if filter.is_narrow:
            page = await transcripts.read_filtered_page(tx, transcript, filter, limit)
        elif filter.after is not None:
            page = await transcripts.read_page_after(tx, transcript, filter.after, limit, tools=tools)
        else:
            before = transcripts.AFTER_LAST_SEQ if filter.before is None else filter.before
            page = await transcripts.read_page_before(tx, transcript, before, limit, tools=tools)
        entries = page.entries
        if filter.without_internal:
            entries = [transcripts.remove_control_tokens(entry) for entry in entries]
        return HistoryPage(
            session_key=row["key"] if caller.is_operator else _display_session_key(caller, row),
            session_id=session_id,
            messages=[transcript_types.build_history_item(entry) for entry in entries],
            total=await transcripts.load_last_seq(tx, transcript),
            has_more=page.has_more,
            next_cursor=None if page.cursor is None else str(page.cursor),
        )

    async def preview(
        self, caller: Caller, references: Sequence[str], limit: int = 12, max_chars: int = 240
    ) -> list[SessionPreview]:
        """Return the last messages of up to 64 sessions. Unreadable sessions look as if they did not exist."""
        access.require_scope(caller, "read")
        limit, max_chars = (
            validate_and_clamp(limit, 1, 50, "limit"),
            validate_and_clamp(max_chars, 20, 2000, "maxChars"),
        )
        return await self._context.store.read(
            self._load_previews, caller, references[:MAX_PREVIEWED_SESSIONS], limit, max_chars
        )

    async def _load_previews(
        self, tx: Tx, caller: Caller, references: Sequence[str], limit: int, max_chars: int
    ) -> list[SessionPreview]:
        found = {reference: await self._find_transcript(tx, caller, reference) for reference in references}
        readable = [transcript for transcript in found.values() if transcript is not None]
        # The only message of a preview is nearly always the last entry. One query for all is the fastest for those.
        latest = await transcripts.load_latest_entries(tx, readable, MAX_LATEST_BYTES) if limit == 1 else {}
        previews: list[SessionPreview] = []
        for reference in references:
            transcript = found[reference]
            if transcript is None:
                previews.append(SessionPreview(key=reference, status="missing", items=[]))
                continue
            items = _build_preview_items(filter(None, [latest.get(transcript)]), limit, max_chars)
            if not items and (limit > 1 or transcript in latest):
                # Most steps of a long answer contain only tool calls and no text.
                page = await transcripts.read_page_before(
                    tx, transcript, transcripts.AFTER_LAST_SEQ, 4 * limit, tools=False
                )
                items = _build_preview_items(reversed(page.entries), limit, max_chars)
            previews.append(SessionPreview(key=reference, status="ok" if items else "empty", items=items))
        return previews

    async def _find_transcript(self, tx: Tx, caller: Caller, reference: str) -> int | None:
        """Return the transcript that a reference means; None if the caller may not read it or it does not exist."""
        try:
            row = await self._context.session_resolver.open(tx, caller, "read", reference)
        except (NotFound, InvalidInput):
            return None
        return session_rows.get_named_transcript(row)[0]

    async def follow(
        self, caller: Caller, session: str, after: int | None = None, *, session_id: str | None = None
    ) -> AsyncGenerator[Event]:
        """Yield entries after a number (default: from now on) and live events, until the session is gone.

        `session_id` is the conversation that the number belongs to: if another one is current, that is reported first
        and it is followed from its beginning. Close the generator to stop.
        """
        row, last = await self._context.store.read(self._load_follow_position, caller, session)
        start = last if after is None else after
        if session_id is not None and session_id != row["session_id"]:
            start = 0
            yield SessionChanged(session_key=row["key"], reason="renewed", session_id=row["session_id"])
        feed = feeds.follow_session(
            self._context.store, self._context.bus, session_topic(row["id"]), row, start
        )
        async with aclosing(feed):  # stops listening when the caller stops iterating
            async for event in feed:
                yield event

    async def _load_follow_position(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, int]:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        require_current_conversation(row, session)
        return row, await transcripts.load_last_seq(tx, row["transcript"])

    async def get_usage(self, caller: Caller, session: str, *, tree: bool = False) -> list[UsageLine]:
        """Return the token usage of a session, or of everything below its root, by model."""
        return await self._context.store.read(self.load_usage, caller, session, tree)

    async def load_usage(self, tx: Tx, caller: Caller, session: str, tree: bool) -> list[UsageLine]:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        columns = UsageLine.__struct_fields__
        lines = await lifecycle.load_usage_by_model(tx, row["key"], tree=tree)
        return [UsageLine(**{column: line[column] for column in columns}) for line in lines]

    # --- entries outside of runs ---

    async def compact(
        self, caller: Caller, session: str, keep: int = 400, *, key: str | None = None
    ) -> CompactView:
        """Exclude all but about the last `keep` entries from prompts. The transcript keeps them.

        A repeated call with the same key excludes nothing more.
        """
        validation.validate_idempotency_key(key)
        keep = validate_and_clamp(keep, 1, MAX_KEPT_ENTRIES, "keep")
        view, row, entry = await self._context.store.tx(
            self._compact, caller, session, keep, key, self._context.clock.now()
        )
        if entry is not None:
            self._context.publish_entry(row, entry)
            self._context.publish_change(row, "compact")
        return view

    async def _compact(
        self, tx: Tx, caller: Caller, session: str, keep: int, key: str | None, now: int
    ) -> tuple[CompactView, Row, Entry | None]:
        row = await self._context.session_resolver.open(tx, caller, "manage", session)
        command = IdempotentCommand(key, ("compact", row["id"], keep))
        if before := await idempotency.load_recorded_answer(tx, command, CompactView):
            return before, row, None
        require_current_conversation(row, session)
        await session_rows.check_idle(tx, row)
        shortened, kept = await compaction.compact_without_model(tx, row["transcript"], keep, now)
        entry = None
        if shortened is not None:
            await session_rows.clear_context_size(tx, row["id"])
            entry = await session_rows.append_note(tx, row["id"], shortened, now)
        view = _build_compact_view(kept, shorter=entry is not None)
        await idempotency.record_answer(tx, command, view, now)
        return view, row, entry

    async def inject(
        self, caller: Caller, session: str, text: str, label: str | None = None, *, key: str | None = None
    ) -> InjectedEntry:
        """Append a message of the agent to a transcript without running the agent; with a key, only once."""
        validation.validate_idempotency_key(key)
        content = text
        if label is not None:
            name = validate_printable_name(label, MAX_INJECT_LABEL_CHARACTERS, "label")
            content = f"[{name}]\n\n{text}"
        validation.validate_message_content(
            text, self._context.config.store.message_max_bytes, extra_text=label
        )
        injected, row, entry = await self._context.store.tx(
            self._inject, caller, session, content, key, self._context.clock.now()
        )
        if entry is not None:
            self._context.publish_entry(row, entry)
            self._context.publish_to_all_sessions(row["key"], "inject")
        return injected

    async def _inject(
        self, tx: Tx, caller: Caller, session: str, text: str, key: str | None, now: int
    ) -> tuple[InjectedEntry, Row, Entry | None]:
        row = await self._context.session_resolver.open(tx, caller, "manage", session)
        command = IdempotentCommand(key, ("inject", row["id"], text))
        if before := await idempotency.load_recorded_answer(tx, command, InjectedEntry):
            return before, row, None
        require_current_conversation(row, session)
        await _require_no_open_calls(tx, row)
        notice = AssistantMessage(
            content=[TextBlock(text=text)],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model=INJECTED_MODEL,
        )
        entry = await session_rows.append_note(tx, row["id"], notice, now)
        injected = InjectedEntry(
            message_id=entry.id, seq=entry.seq, session_key=row["key"], session_id=row["session_id"]
        )
        await idempotency.record_answer(tx, command, injected, now)
        return injected, row, entry


def _build_preview_items(newest_first: Iterable[Entry], limit: int, max_chars: int) -> list[PreviewItem]:
    """Return the last `limit` texts that people see, oldest first."""
    items = (
        item
        for entry in newest_first
        if not entry.is_internal
        and (item := transcript_types.build_preview_item(transcripts.remove_control_tokens(entry), max_chars))
    )
    return [*islice(items, limit)][::-1]


def _display_session_key(caller: Caller, row: Row) -> str:
    return keys.display_stored_key(row["key"], viewer_agent_id=caller.agent_id)


def _build_compact_view(kept: int, *, shorter: bool) -> CompactView:
    if shorter:
        return CompactView(compacted=True, kept=kept)
    return CompactView(compacted=False, kept=kept, reason="short enough" if kept else "no transcript")


async def _require_no_open_calls(tx: Tx, row: Row) -> None:
    """Refuse an entry between a tool call and its result: the model would see the call as interrupted."""
    active = await lifecycle.find_active_run(tx, row["id"])
    if active and await transcripts.load_open_calls(tx, active["transcript"], active["first_seq"]):
        raise Conflict(
            f"Session {row['key']!r} is waiting for a tool.",
            "Try again when the tool has answered, or stop the run first.",
            run_id=active["id"],
        )
