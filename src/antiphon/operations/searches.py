"""Finding what was said, in every session that the caller may read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import msgspec

from antiphon import access, keys
from antiphon.access import Caller, Target
from antiphon.engine import search, sessions
from antiphon.engine.search import Found, Wish
from antiphon.errors import Ambiguous, InvalidInput, NotFound
from antiphon.operations.checks import between
from antiphon.operations.core import Core
from antiphon.store import Row, Tx, listing
from antiphon.store.words import Match
from antiphon.views import SearchHit, SearchPage

SEARCH_LIMIT, SEARCH_MOST = 20, 50
SEARCH_SESSIONS = 200  # that can be searched by name
MASKING_SECONDS = 0.25  # after which no other entry is masked
DAY = 86_400_000  # milliseconds


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    limit: int
    agent_id: str | None
    session: str | None
    sessions: Sequence[str] | None
    include_tools: bool
    masking: _Masking | None


class _Masking:
    """The masked texts of what a search has found, each masked once, and which of them still match.

    A script of the store takes every entry to match until it was looked at here, in a thread of its own.
    """

    def __init__(self, mask: Callable[[str], str]) -> None:
        self._mask = mask
        self._seconds_left = MASKING_SECONDS
        self._texts: dict[int, str] = {}
        self._verdicts: dict[tuple[int, str], bool] = {}

    def text(self, row: Row) -> str:
        return self._texts[row["id"]]

    def may_match(self, row: Row, match: Match) -> bool:
        return self._verdicts.get((row["id"], match.fts5()), True)

    def look(self, found: Found) -> Found:
        """What also matches as the caller is shown it: else a secret could be guessed letter by letter."""
        asked, until = found.match.fts5(), monotonic() + self._seconds_left
        rows: list[Row] = []
        try:
            for number, row in enumerate(found.rows):
                if number and monotonic() > until:
                    return found._replace(rows=rows, complete=False)
                at = (row["id"], asked)
                if at not in self._verdicts:
                    self._verdicts[at] = self._matches(row, found.match)
                if self._verdicts[at]:
                    rows.append(row)
            return found._replace(rows=rows)
        finally:
            self._seconds_left = until - monotonic()

    def _matches(self, row: Row, match: Match) -> bool:
        masked = self._texts.get(row["id"])
        if masked is None:
            masked = self._texts[row["id"]] = self._mask(row["words"])
        return masked == row["words"] or match.matches(masked)


class Searches(Core):
    async def search(
        self,
        caller: Caller,
        query: str,
        *,
        limit: int = SEARCH_LIMIT,
        agent_id: str | None = None,
        session: str | None = None,
        sessions: Sequence[str] | None = None,
        include_tools: bool = True,
        mask: Callable[[str], str] | None = None,
    ) -> SearchPage:
        """What was said with all these words in it, the latest first, archived and past conversations included.

        Quotes make a phrase, and the last word may be the beginning of one. `session` must be readable; of
        `sessions`, those that are not are left out. `mask` is given whole texts, before a snippet is cut from them:
        half a secret would not be recognised.
        """
        access.require_scope(caller, "read")
        asked = _Asked(
            query=_query(query),
            limit=between(limit, 1, SEARCH_MOST, "limit"),
            agent_id=None if agent_id is None else keys.checked_agent_id(agent_id),
            session=session,
            sessions=_few(sessions),
            include_tools=include_tools,
            masking=None if mask is None else _Masking(mask),
        )
        indexing = await self._indexing()
        rows, in_time, match = await self._find(caller, asked)
        hits = partial(_hits, caller, rows[: asked.limit], match, self._clock.now(), asked.masking)
        return SearchPage(
            results=await asyncio.to_thread(hits) if rows else [],
            indexing=indexing,
            truncated=len(rows) > asked.limit or not in_time,
        )

    async def _indexing(self) -> bool:
        """Whether what had been said when the search began is not all indexed; if little is missing, it is now."""
        last, head = await self._store.read(search.place)
        if last < head <= last + search.LITTLE and self._engine is not None:
            last = await self._store.tx(search.index, search.BATCH)
            if last < head:
                last = await self._store.tx(search.index, search.BATCH)
        return last < head

    async def _find(self, caller: Caller, asked: _Asked) -> Found:
        """What the index has, without what does not match once it is masked; others take its place."""
        while True:
            found = await self._store.read(self._search, caller, asked)
            if asked.masking is None:
                return found
            seen = await asyncio.to_thread(asked.masking.look, found)
            if len(seen.rows) == len(found.rows) or not seen.complete:
                return seen

    async def _search(self, tx: Tx, caller: Caller, asked: _Asked) -> Found:
        scopes = await self._scopes(tx, caller, asked)
        wish = Wish(
            query=asked.query,
            limit=asked.limit + 1,
            scopes=scopes,
            viewer=caller.session_key,
            keep=None if asked.masking is None else asked.masking.may_match,
        )
        found = await search.find(tx, wish)
        reach = access.reach(caller, self._door.grants(caller))
        # The index has passed over what is out of reach; who may read a row is decided by the row nevertheless.
        return found._replace(rows=[row for row in found.rows if reach.covers(_target(row))])

    async def _scopes(self, tx: Tx, caller: Caller, asked: _Asked) -> list[list[str]]:
        scopes = [await self._reached(tx, caller)]
        if asked.agent_id is not None:
            scopes.append([search.of_agent(asked.agent_id)])
        if asked.session is not None:
            row = await self._door.open(tx, caller, "read", asked.session)
            scopes.append([search.of_session(row["id"])])
        if asked.sessions is not None:
            scopes.append(await self._readable(tx, caller, asked.sessions))
        if not asked.include_tools:
            scopes.append([search.SAID])
        return [scope for scope in scopes if scope is not None]

    async def _reached(self, tx: Tx, caller: Caller) -> list[str] | None:
        """The caller's reach in words of the index; None where nothing is out of it."""
        reach = access.reach(caller, self._door.grants(caller))
        agents = None if reach.everything else await listing.admitted(tx, reach.admits_agent)
        if agents is None:
            return None
        words = [search.of_agent(agent) for agent in agents]
        own = await tx.one(sessions.SQL.by_key, key=reach.own_key, viewer=None)
        if own is not None:
            words.append(search.of_session(own["id"]))
            words += [search.below_session(own["id"])] if reach.descendants else []
        return words

    async def _readable(self, tx: Tx, caller: Caller, references: Sequence[str]) -> list[str]:
        found: list[str] = []
        for reference in references:
            try:
                row = await self._door.open(tx, caller, "read", reference)
            except (NotFound, Ambiguous, InvalidInput):
                continue
            found.append(search.of_session(row["id"]))
        return found


def _query(query: str) -> str:
    if not query.strip():
        raise InvalidInput("The query is empty.", "Give at least one word to look for.", field="query")
    return query


def _few(references: Sequence[str] | None) -> Sequence[str] | None:
    if references is not None and len(references) > SEARCH_SESSIONS:
        raise InvalidInput(
            f"{len(references)} sessions are named; at most {SEARCH_SESSIONS} can be.",
            "Name fewer, or none to search all.",
            field="sessions",
        )
    return references


def _target(row: Row) -> Target:
    return Target(row["key"], row["agent_id"], bool(row["descendant"]))


def _hits(
    caller: Caller, rows: Sequence[Row], match: Match, now: int, masking: _Masking | None
) -> list[SearchHit]:
    return [
        _hit(caller, row, match, now, row["words"] if masking is None else masking.text(row)) for row in rows
    ]


def _hit(caller: Caller, row: Row, match: Match, now: int, text: str) -> SearchHit:
    return SearchHit(
        session_key=keys.display_text(row["key"], viewer_agent_id=caller.agent_id),
        session_id=row["session_id"],
        message_id=row["entry"],
        seq=row["seq"],
        role=row["role"],
        timestamp=row["created_at"],
        snippet=search.snippet(text, match.found_in(text)),
        score=round(1 / (1 + max(0, now - row["created_at"]) / DAY), 4),
    )
