"""Lists sessions, and describes single ones as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.engine.runs import lifecycle
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import InvalidInput
from antiphon.filters import MAX_LIST_ROWS, ListFilter
from antiphon.operations.context import OperationContext
from antiphon.operations.request_validation import validate_and_clamp
from antiphon.store import Row, Tx, listing
from antiphon.store.listing import SESSION_KINDS, SessionListQuery, SessionListRow
from antiphon.views import SessionOverview, SessionPage, SessionsSummary, SessionView

MAX_MESSAGES_PER_SESSION = 20  # of each session in an overview
# Hidden sessions beyond this number are not counted; the exact number does not matter.
MAX_HIDDEN_COUNTED = 1000
MAX_MESSAGE_BYTES = 256 * 1024  # of one message in an overview


class MessageBudget(NamedTuple):
    """Size limits for the messages in an overview: in total, per message, and the overhead of a row."""

    total_bytes: int = 4 * 2**20
    message_bytes: int = MAX_MESSAGE_BYTES
    row_bytes: int = 0


DEFAULT_MESSAGE_BUDGET = MessageBudget()


class SessionListOperations(OperationContext):
    async def list(self, caller: Caller, wanted: ListFilter) -> SessionPage:
        """Return the sessions that the caller may read, newest first."""
        access.require_scope(caller, "list")
        limit = validate_and_clamp(wanted.limit, 1, MAX_LIST_ROWS, "limit")
        rows = await self._store.read(self._load_list, caller, wanted, limit + 1)
        return await self._build_session_page(caller, rows, limit)

    async def _build_session_page(
        self, caller: Caller, rows: Sequence[SessionListRow], limit: int
    ) -> SessionPage:
        """Build a page from up to `limit` + 1 rows; the extra row only shows that more follow."""
        shown = rows[:limit]
        await self._find_transcript_files((row.session_id, row.key) for row in shown)
        return SessionPage(
            count=len(shown),
            sessions=[self._build_listed_view(caller, row) for row in shown],
            scope="all" if caller.is_operator else self._session_resolver.get_grants(caller).read,
            next_cursor=_format_cursor(shown[-1]) if len(rows) > limit else None,
        )

    async def get_overview(
        self,
        caller: Caller,
        wanted: ListFilter,
        messages: int = 0,
        *,
        room: MessageBudget = DEFAULT_MESSAGE_BUDGET,
    ) -> SessionOverview:
        """Return `list` with the last messages of each session and the number of hidden ones, in one snapshot.

        Messages are read for the first rows only, until `room` is used up.
        """
        access.require_scope(caller, "list")
        limit = validate_and_clamp(wanted.limit, 1, MAX_LIST_ROWS, "limit")
        messages = validate_and_clamp(messages, 0, MAX_MESSAGES_PER_SESSION, "messages")
        rows, said, hidden = await self._store.read(
            self._load_overview, caller, wanted, limit + 1, messages, room
        )
        return SessionOverview(
            page=await self._build_session_page(caller, rows, limit),
            cursors=[_format_cursor(row) for row in rows[:limit]],
            said=said,
            hidden=hidden,
            hint=self._build_visibility_hint(caller, hidden),
        )

    def _build_visibility_hint(self, caller: Caller, hidden: int) -> str | None:
        """Return which settings restrict what an agent is shown; None if nothing is hidden."""
        if caller.is_operator:
            return None
        scope = self._session_resolver.get_grants(caller).read
        if scope == "all":
            if not hidden:
                return None
            return (
                "Sessions of other agents are shown where tools.agentToAgent.enabled is true and "
                "tools.agentToAgent.allow names both agents."
            )
        boxed = " or agents.defaults.sandbox.sessionToolsVisibility" if caller.sandboxed else ""
        return (
            f"Only what visibility {scope!r} admits is shown. The operator can widen it with "
            f"tools.sessions.visibility{boxed}; sessions of other agents need tools.agentToAgent, too."
        )

    async def _load_overview(
        self, tx: Tx, caller: Caller, wanted: ListFilter, limit: int, messages: int, room: MessageBudget
    ) -> tuple[Sequence[SessionListRow], Sequence[Sequence[Entry]], int]:
        rows = await self._load_list(tx, caller, wanted, limit)
        asked = rows[: limit - 1] if messages else ()
        return (
            rows,
            await _load_last_messages(tx, asked, messages, room),
            await self._count_hidden(tx, caller),
        )

    async def _count_hidden(self, tx: Tx, caller: Caller) -> int:
        """Count the sessions hidden from this caller, up to `MAX_HIDDEN_COUNTED`."""
        reach = access.compute_reach(caller, self._session_resolver.get_grants(caller))
        if reach.own_key is None:
            return 0
        agents = [agent for agent in await listing.list_agent_ids(tx) if not reach.admits_agent(agent)]
        return await listing.count_hidden_sessions(
            tx, agents, reach.own_key, descendants=reach.descendants, most=MAX_HIDDEN_COUNTED
        )

    async def _load_list(
        self, tx: Tx, caller: Caller, wanted: ListFilter, limit: int
    ) -> list[SessionListRow]:
        wish = await self._build_list_query(tx, caller, wanted, limit)
        return await listing.load_session_page(tx, wish) if wish else []

    async def _build_list_query(
        self, tx: Tx, caller: Caller, wanted: ListFilter, limit: int
    ) -> SessionListQuery | None:
        """Build the query from the caller's filters and reach; None if it cannot match anything."""
        reach = access.compute_reach(caller, self._session_resolver.get_grants(caller))
        agents = None if reach.everything else await listing.load_admitted_agents(tx, reach.admits_agent)
        only = None if wanted.agent_id is None else keys.validate_agent_id(wanted.agent_id)
        if only is not None:
            agents = [only] if agents is None or only in agents else []
        parent = None
        if wanted.spawned_by is not None:
            parent = (await self._session_resolver.open(tx, caller, "list", wanted.spawned_by))["key"]
        if agents == [] and reach.own_key is None:
            return None
        active = wanted.active_minutes
        return SessionListQuery(
            limit=limit,
            kinds=_validate_kinds(wanted.kinds),
            agents=agents,
            own_key=reach.own_key,
            descendants=reach.descendants,
            only_agent=only,
            label=wanted.label,
            parent=parent,
            search=wanted.search,
            active_since=None if active is None else self._clock.now() - round(active * 60_000),
            archived=wanted.include_archived,
            cursor=_parse_cursor(wanted.cursor),
        )

    async def get_summary(self, caller: Caller) -> SessionsSummary:
        """Return counts over all sessions; for operators that may read every session."""
        access.require_operator(caller, "list")
        return await self._store.read(_load_summary)

    async def describe(self, caller: Caller, session: str, *, with_file: bool = True) -> SessionView:
        """Return one session as a list row, with its active run; `with_file` also looks for its transcript file."""
        row, active = await self._store.read(self._load_session_and_run, caller, session)
        if with_file:
            await self._find_transcript_files([(row["session_id"], row["key"])])
        view = self._build_session_view(caller, row)
        return msgspec.structs.replace(view, active_run_id=active["id"]) if active else view

    async def _load_session_and_run(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, Row | None]:
        row = await self._session_resolver.open(tx, caller, "read", session)
        return await self._load_described_session(tx, row["id"]), await tx.one(
            lifecycle.SQL.active_in_session, session=row["id"]
        )


def _validate_kinds(wanted: Sequence[str] | None) -> Sequence[str]:
    unknown = set(wanted or ()) - set(SESSION_KINDS)
    if unknown:
        raise InvalidInput(
            f"There is no kind {sorted(unknown)[0]!r}.",
            f"The kinds are {', '.join(SESSION_KINDS)}.",
            field="kinds",
        )
    return tuple(dict.fromkeys(wanted)) if wanted else SESSION_KINDS


def _parse_cursor(text: str | None) -> tuple[int, str] | None:
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


def _format_cursor(row: SessionListRow) -> str:
    return f"{row.updated_at}|{row.key}"


async def _load_last_messages(
    tx: Tx, rows: Sequence[SessionListRow], limit: int, room: MessageBudget
) -> Sequence[Sequence[Entry]]:
    """Load the last messages of each row, oldest first, for as many rows as the budget allows."""
    left = room.total_bytes
    said: list[Sequence[Entry]] = []
    for row in rows:
        found = await listing.load_last_messages(tx, row.id, limit, MAX_MESSAGE_BYTES)
        entries = [Entry(*entry) for entry in reversed(found)]
        said.append(entries)
        left -= room.row_bytes + sum(min(len(entry.body), room.message_bytes) for entry in entries)
        if left < 0:
            break
    return said


async def _load_summary(tx: Tx) -> SessionsSummary:
    counted = await tx.all(listing.SQL.count_by_agent)
    going_on = await tx.one(listing.SQL.count_active_runs)
    assert going_on is not None
    agents = {row["agent_id"]: row["sessions"] for row in counted}
    return SessionsSummary(
        sessions=sum(agents.values()), queued=going_on["queued"], running=going_on["running"], agents=agents
    )
