"""Full-text search in every session that the caller may read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import msgspec

from antiphon import access, keys
from antiphon.access import Caller, TargetSession
from antiphon.clock import MILLISECONDS_PER_DAY
from antiphon.engine.sessions import search, session_rows
from antiphon.engine.sessions.search import SearchQuery, SearchResult
from antiphon.engine.validation import validate_and_clamp
from antiphon.errors import Ambiguous, InvalidInput, NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.transcript_types import SearchHit, SearchPage
from antiphon.store import Row, Tx, listing
from antiphon.store.fulltext import FulltextQuery

DEFAULT_SEARCH_RESULTS, MAX_SEARCH_RESULTS = 20, 50
MAX_SEARCHED_SESSIONS = 200  # sessions that one search may name
MASKING_BUDGET_SECONDS = 0.25  # after this time no further entry is masked


class _SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    limit: int
    agent_id: str | None
    session: str | None
    sessions: Sequence[str] | None
    include_tools: bool
    masking: _MaskedMatches | None


class _MaskedMatches:
    """Masks the entries that a search finds, each once, and remembers which of them still match.

    The search in the store treats every entry as a match until it was checked here, in a thread of its own.
    """

    def __init__(self, mask: Callable[[str], str]) -> None:
        self._mask = mask
        self._seconds_left = MASKING_BUDGET_SECONDS
        self._texts: dict[int, str] = {}
        self._verdicts: dict[tuple[int, str], bool] = {}

    def get_text(self, row: Row) -> str:
        return self._texts[row["id"]]

    def can_match(self, row: Row, match: FulltextQuery) -> bool:
        return self._verdicts.get((row["id"], match.to_fts5()), True)

    def keep_matching(self, found: SearchResult) -> SearchResult:
        """Keep the rows that also match in masked form: otherwise a secret could be guessed letter by letter."""
        query, until = found.match.to_fts5(), monotonic() + self._seconds_left
        rows: list[Row] = []
        try:
            for number, row in enumerate(found.rows):
                if number and monotonic() > until:
                    return found._replace(rows=rows, complete=False)
                at = (row["id"], query)
                if at not in self._verdicts:
                    self._verdicts[at] = self._matches(row, found.match)
                if self._verdicts[at]:
                    rows.append(row)
            return found._replace(rows=rows)
        finally:
            self._seconds_left = until - monotonic()

    def _matches(self, row: Row, match: FulltextQuery) -> bool:
        masked = self._texts.get(row["id"])
        if masked is None:
            masked = self._texts[row["id"]] = self._mask(row["words"])
        return masked == row["words"] or match.matches(masked)


class SearchOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def find(
        self,
        caller: Caller,
        query: str,
        *,
        limit: int = DEFAULT_SEARCH_RESULTS,
        agent_id: str | None = None,
        session: str | None = None,
        sessions: Sequence[str] | None = None,
        include_tools: bool = True,
        mask: Callable[[str], str] | None = None,
    ) -> SearchPage:
        """Find entries with all these words, newest first, including archived and past conversations.

        Quotes make a phrase, and the last word may be a prefix. `session` must be readable; of `sessions`, unreadable
        ones are left out. `mask` gets whole texts, before a snippet is cut from them: half a secret would not be
        recognized.
        """
        access.require_scope(caller, "read")
        request = _SearchRequest(
            query=_validate_query(query),
            limit=validate_and_clamp(limit, 1, MAX_SEARCH_RESULTS, "limit"),
            agent_id=None if agent_id is None else keys.validate_agent_id(agent_id),
            session=session,
            sessions=_validate_session_count(sessions),
            include_tools=include_tools,
            masking=None if mask is None else _MaskedMatches(mask),
        )
        indexing = await self._is_indexing()
        rows, in_time, match = await self._search_masked(caller, request)
        hits = partial(
            _build_hits, caller, rows[: request.limit], match, self._context.clock.now(), request.masking
        )
        return SearchPage(
            results=await asyncio.to_thread(hits) if rows else [],
            indexing=indexing,
            truncated=len(rows) > request.limit or not in_time,
        )

    async def _is_indexing(self) -> bool:
        """Whether earlier entries are still missing from the index; if only a few are, they are indexed now."""
        last, head = await self._context.store.read(search.load_index_position)
        if last < head <= last + search.MAX_ENTRIES_INDEXED_BY_SEARCH and self._context.worker is not None:
            last = await self._context.store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES)
            if last < head:
                last = await self._context.store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES)
        return last < head

    async def _search_masked(self, caller: Caller, request: _SearchRequest) -> SearchResult:
        """Search the index; matches that disappear by masking are replaced by further ones."""
        while True:
            found = await self._context.store.read(self._search_index, caller, request)
            if request.masking is None:
                return found
            seen = await asyncio.to_thread(request.masking.keep_matching, found)
            if len(seen.rows) == len(found.rows) or not seen.complete:
                return seen

    async def _search_index(self, tx: Tx, caller: Caller, request: _SearchRequest) -> SearchResult:
        scopes = await self._resolve_scopes(tx, caller, request)
        query = SearchQuery(
            query=request.query,
            limit=request.limit + 1,
            scopes=scopes,
            viewer=caller.session_key,
            can_match=None if request.masking is None else request.masking.can_match,
        )
        found = await search.find_entries(tx, query)
        reach = access.compute_reach(caller, self._context.session_resolver.get_grants(caller))
        # The index has already filtered by reach; access is still decided for each row.
        return found._replace(rows=[row for row in found.rows if reach.covers(_build_target(row))])

    async def _resolve_scopes(self, tx: Tx, caller: Caller, request: _SearchRequest) -> list[list[str]]:
        scopes = [await self._resolve_reach_terms(tx, caller)]
        if request.agent_id is not None:
            scopes.append([search.make_agent_scope(request.agent_id)])
        if request.session is not None:
            row = await self._context.session_resolver.open(tx, caller, "read", request.session)
            scopes.append([search.make_session_scope(row["id"])])
        if request.sessions is not None:
            scopes.append(await self._resolve_readable_sessions(tx, caller, request.sessions))
        if not request.include_tools:
            scopes.append([search.MESSAGE_SCOPE])
        return [scope for scope in scopes if scope is not None]

    async def _resolve_reach_terms(self, tx: Tx, caller: Caller) -> list[str] | None:
        """Return the caller's reach as terms of the index; None if it is unrestricted."""
        reach = access.compute_reach(caller, self._context.session_resolver.get_grants(caller))
        agents = None if reach.everything else await listing.load_admitted_agents(tx, reach.admits_agent)
        if agents is None:
            return None
        words = [search.make_agent_scope(agent) for agent in agents]
        own = None if reach.own_key is None else await session_rows.find_by_key(tx, reach.own_key)
        if own is not None:
            words.append(search.make_session_scope(own["id"]))
            words += [search.make_descendants_scope(own["id"])] if reach.descendants else []
        return words

    async def _resolve_readable_sessions(
        self, tx: Tx, caller: Caller, references: Sequence[str]
    ) -> list[str]:
        found: list[str] = []
        for reference in references:
            try:
                row = await self._context.session_resolver.open(tx, caller, "read", reference)
            except (NotFound, Ambiguous, InvalidInput):
                continue
            found.append(search.make_session_scope(row["id"]))
        return found


def _validate_query(query: str) -> str:
    if not query.strip():
        raise InvalidInput("The query is empty.", "Pass at least one word to search for.", field="query")
    return query


def _validate_session_count(references: Sequence[str] | None) -> Sequence[str] | None:
    if references is not None and len(references) > MAX_SEARCHED_SESSIONS:
        raise InvalidInput(
            f"{len(references)} sessions are named; at most {MAX_SEARCHED_SESSIONS} can be.",
            "Name fewer, or none to search all.",
            field="sessions",
        )
    return references


def _build_target(row: Row) -> TargetSession:
    return TargetSession(row["key"], row["agent_id"], bool(row["descendant"]))


def _build_hits(
    caller: Caller, rows: Sequence[Row], match: FulltextQuery, now: int, masking: _MaskedMatches | None
) -> list[SearchHit]:
    return [
        _build_hit(caller, row, match, now, row["words"] if masking is None else masking.get_text(row))
        for row in rows
    ]


def _build_hit(caller: Caller, row: Row, match: FulltextQuery, now: int, text: str) -> SearchHit:
    return SearchHit(
        session_key=keys.display_stored_key(row["key"], viewer_agent_id=caller.agent_id),
        session_id=row["session_id"],
        message_id=row["entry"],
        seq=row["seq"],
        role=row["role"],
        timestamp=row["created_at"],
        snippet=search.cut_snippet(text, match.find_position(text)),
        score=round(1 / (1 + max(0, now - row["created_at"]) / MILLISECONDS_PER_DAY), 4),
    )
