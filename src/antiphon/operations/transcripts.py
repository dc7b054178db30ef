"""Reads transcripts: pages, previews, live feeds, and token usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from antiphon import access, keys, views
from antiphon.access import Caller
from antiphon.bus import Event, SessionChanged, session_topic
from antiphon.engine.runs import lifecycle
from antiphon.engine.sessions import feeds, session_rows, transcripts
from antiphon.errors import InvalidInput, NotFound
from antiphon.filters import MAX_HISTORY_ENTRIES, HistoryFilter
from antiphon.operations import request_validation
from antiphon.operations.context import OperationContext
from antiphon.operations.request_validation import validate_and_clamp
from antiphon.store import Row, Tx
from antiphon.views import HistoryPage, SessionPreview, UsageLine

MAX_PREVIEWED_SESSIONS = 64  # in one call


class TranscriptOperations(OperationContext):
    async def read_history(self, caller: Caller, session: str, wanted: HistoryFilter) -> HistoryPage:
        """Return a page of a transcript, oldest first: the newest entries, or those before or after a number.

        It has at most `limit` entries, and fewer or none if entries are large or most are filtered out: `has_more`
        tells whether to continue.
        """
        limit = validate_and_clamp(wanted.limit, 1, MAX_HISTORY_ENTRIES, "limit")
        return await self._store.read(self._load_history, caller, session, wanted, limit)

    async def _load_history(
        self, tx: Tx, caller: Caller, session: str, wanted: HistoryFilter, limit: int
    ) -> HistoryPage:
        row = await self._session_resolver.open(tx, caller, "read", session)
        transcript, session_id = session_rows.get_named_transcript(row)
        tools = wanted.include_tools
        if wanted.is_narrow:
            page = await transcripts.read_filtered_page(tx, transcript, wanted, limit)
        elif wanted.after is not None:
            page = await transcripts.read_page_after(tx, transcript, wanted.after, limit, tools=tools)
        else:
            before = transcripts.AFTER_LAST_SEQ if wanted.before is None else wanted.before
            page = await transcripts.read_page_before(tx, transcript, before, limit, tools=tools)
        return HistoryPage(
            session_key=row["key"] if caller.is_operator else _display_session_key(caller, row),
            session_id=session_id,
            messages=[views.build_history_item(entry) for entry in page.entries],
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
        return await self._store.read(
            self._load_previews, caller, references[:MAX_PREVIEWED_SESSIONS], limit, max_chars
        )

    async def _load_previews(
        self, tx: Tx, caller: Caller, references: Sequence[str], limit: int, max_chars: int
    ) -> list[SessionPreview]:
        return [await self._load_preview(tx, caller, reference, limit, max_chars) for reference in references]

    async def _load_preview(
        self, tx: Tx, caller: Caller, reference: str, limit: int, max_chars: int
    ) -> SessionPreview:
        try:
            row = await self._session_resolver.open(tx, caller, "read", reference)
        except (NotFound, InvalidInput):
            return SessionPreview(key=reference, status="missing", items=[])
        transcript, _ = session_rows.get_named_transcript(row)
        # Most steps of a long answer contain only tool calls and no text.
        page = await transcripts.read_page_before(
            tx, transcript, transcripts.AFTER_LAST_SEQ, 4 * limit, tools=False
        )
        items = [
            item
            for entry in page.entries
            if not entry.is_internal and (item := views.build_preview_item(entry, max_chars))
        ]
        return SessionPreview(key=reference, status="ok" if items else "empty", items=items[-limit:])

    async def follow(
        self, caller: Caller, session: str, after: int | None = None, *, session_id: str | None = None
    ) -> AsyncGenerator[Event]:
        """Yield entries after a number (default: from now on) and live events, until the session is gone.

        `session_id` is the conversation that the number belongs to: if another one is current, that is reported first
        and it is followed from its beginning. Close the generator to stop.
        """
        row, last = await self._store.read(self._load_follow_position, caller, session)
        start = last if after is None else after
        if session_id is not None and session_id != row["session_id"]:
            start = 0
            yield SessionChanged(session_key=row["key"], reason="renewed", session_id=row["session_id"])
        feed = feeds.follow_session(self._store, self._bus, session_topic(row["id"]), row, start)
        async with aclosing(feed):  # stops listening when the caller stops iterating
            async for event in feed:
                yield event

    async def _load_follow_position(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, int]:
        row = await self._session_resolver.open(tx, caller, "read", session)
        request_validation.require_current_conversation(row, session)
        return row, await transcripts.load_last_seq(tx, row["transcript"])

    async def get_usage(self, caller: Caller, session: str, *, tree: bool = False) -> list[UsageLine]:
        """Return the token usage of a session, or of everything below its root, by model."""
        return await self._store.read(self._load_usage, caller, session, tree)

    async def _load_usage(self, tx: Tx, caller: Caller, session: str, tree: bool) -> list[UsageLine]:
        row = await self._session_resolver.open(tx, caller, "read", session)
        query = lifecycle.SQL.usage_by_tree if tree else lifecycle.SQL.usage_by_model
        columns = UsageLine.__struct_fields__
        lines = await tx.all(query, key=row["key"])
        return [UsageLine(**{column: line[column] for column in columns}) for line in lines]


def _display_session_key(caller: Caller, row: Row) -> str:
    return keys.display_stored_key(row["key"], viewer_agent_id=caller.agent_id)
