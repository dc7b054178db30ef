"""What was said in sessions: pages of it, its last words, what comes next, and what it has cost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from antiphon import access, keys, views
from antiphon.access import Caller
from antiphon.bus import Event, SessionChanged, session_topic
from antiphon.engine import feeds, runs, sessions, transcripts
from antiphon.errors import InvalidInput, NotFound
from antiphon.filters import HISTORY_MOST, HistoryFilter
from antiphon.operations import checks
from antiphon.operations.checks import between
from antiphon.operations.core import Core
from antiphon.store import Row, Tx
from antiphon.views import HistoryPage, Preview, UsageLine

PREVIEWS = 64  # sessions that are looked into at once


class Histories(Core):
    async def history(self, caller: Caller, session: str, wanted: HistoryFilter) -> HistoryPage:
        """A page of a transcript, oldest first: the newest entries, or those before or after a number.

        It has `limit` entries at most, and fewer where they are large or where few of many are wanted, even none:
        `has_more` says whether to go on.
        """
        limit = between(wanted.limit, 1, HISTORY_MOST, "limit")
        return await self._store.read(self._history, caller, session, wanted, limit)

    async def _history(
        self, tx: Tx, caller: Caller, session: str, wanted: HistoryFilter, limit: int
    ) -> HistoryPage:
        row = await self._door.open(tx, caller, "read", session)
        transcript, session_id = sessions.named(row)
        tools = wanted.include_tools
        if wanted.narrow:
            page = await transcripts.page_narrowed(tx, transcript, wanted, limit)
        elif wanted.after is not None:
            page = await transcripts.page_after(tx, transcript, wanted.after, limit, tools=tools)
        else:
            before = transcripts.END if wanted.before is None else wanted.before
            page = await transcripts.page_before(tx, transcript, before, limit, tools=tools)
        return HistoryPage(
            session_key=row["key"] if caller.is_operator else _shown(caller, row),
            session_id=session_id,
            messages=[views.history_item(entry) for entry in page.entries],
            total=await transcripts.last_seq(tx, transcript),
            has_more=page.more,
            next_cursor=None if page.cursor is None else str(page.cursor),
        )

    async def preview(
        self, caller: Caller, references: Sequence[str], limit: int = 12, max_chars: int = 240
    ) -> list[Preview]:
        """The last words of up to 64 sessions at once. What may not be read looks missing."""
        access.require_scope(caller, "read")
        limit, max_chars = between(limit, 1, 50, "limit"), between(max_chars, 20, 2000, "maxChars")
        return await self._store.read(self._previews, caller, references[:PREVIEWS], limit, max_chars)

    async def _previews(
        self, tx: Tx, caller: Caller, references: Sequence[str], limit: int, max_chars: int
    ) -> list[Preview]:
        return [await self._preview(tx, caller, reference, limit, max_chars) for reference in references]

    async def _preview(self, tx: Tx, caller: Caller, reference: str, limit: int, max_chars: int) -> Preview:
        try:
            row = await self._door.open(tx, caller, "read", reference)
        except (NotFound, InvalidInput):
            return Preview(key=reference, status="missing", items=[])
        transcript, _ = sessions.named(row)
        # Of the steps of a long answer most have no words, only calls.
        page = await transcripts.page_before(tx, transcript, transcripts.END, 4 * limit, tools=False)
        items = [
            item
            for entry in page.entries
            if not entry.internal and (item := views.preview_item(entry, max_chars))
        ]
        return Preview(key=reference, status="ok" if items else "empty", items=items[-limit:])

    async def follow(
        self, caller: Caller, session: str, after: int | None = None, *, session_id: str | None = None
    ) -> AsyncGenerator[Event]:
        """Entries after a number (default: from now on) and live events, until the session is gone.

        `session_id` is the conversation that the number counts in: if another one goes on by now, that is said
        first and it is followed from its beginning. Close the generator to stop.
        """
        row, last = await self._store.read(self._place, caller, session)
        start = last if after is None else after
        if session_id is not None and session_id != row["session_id"]:
            start = 0
            yield SessionChanged(session_key=row["key"], reason="renewed", session_id=row["session_id"])
        feed = feeds.follow(self._store, self._bus, session_topic(row["id"]), row, start)
        async with aclosing(feed):  # who stops following is not listened for any longer
            async for event in feed:
                yield event

    async def _place(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, int]:
        row = await self._door.open(tx, caller, "read", session)
        checks.current(row, session)
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


def _shown(caller: Caller, row: Row) -> str:
    return keys.display_text(row["key"], viewer_agent_id=caller.agent_id)
