"""Loads one page of sessions for any combination of filters without scanning the table.

A page is the ordered merge of *streams*, each of which an index delivers newest first: one per kind (and per
agent if agents are given), or the one that a label, a parent, a search or the caller's own tree selects.
The remaining filters are tested on the few rows that the merge reads. This module turns a `SessionListQuery` into
one statement and its parameters; access is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from antiphon.errors import StoreDamaged
from antiphon.keys import SessionKind
from antiphon.store import Param, Row, Tx
from antiphon.store.fulltext import FulltextQuery
from antiphon.store.queries import Queries, Query

SQL = Queries("listing")
MAX_SEARCH_MATCHES = 400  # the most recently created ones
MAX_AGENT_STREAMS = 16  # agents with a stream of their own; SQLite merges at most 500 streams
MAX_LISTED_AGENTS = 10_000
SESSION_KINDS = ("main", "group", "cron", "hook", "node", "other")


class SessionListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Filters of a list. `agents` None means every agent; `own_key` and `descendants` add the caller's own tree."""

    limit: int
    kinds: Sequence[str] = SESSION_KINDS
    agents: Sequence[str] | None = None
    own_key: str | None = None
    descendants: bool = False
    label: str | None = None
    parent: str | None = None
    search: str | None = None
    active_since: int | None = None
    archived: bool = False
    only_agent: str | None = None
    cursor: tuple[int, str] | None = None


class SessionListRow(NamedTuple):
    """A session in a list, with the columns of `listing.page` and `sessions.list_row` in their order."""

    id: int
    key: str
    kind: SessionKind
    channel: str | None
    agent_id: str
    session_id: str
    updated_at: int
    state: str
    display_name: str | None
    label: str | None
    model: str | None
    last_model: str | None
    context_tokens: int | None
    total_tokens: int
    thinking: str | None
    verbose: str | None
    system_sent: int
    aborted_last_run: int
    send_policy: str | None
    last_channel: str | None
    last_to: str | None
    last_account: str | None
    last_thread: str | None
    parent_key: str | None
    children: int
    chat_type: str | None
    subject: str | None
    input_tokens: int
    output_tokens: int
    created_at: int
    archived: int
    sandboxed: int


_PAGE_DECODER = msgspec.json.Decoder(list[SessionListRow])
_LENIENT_PAGE_DECODER = msgspec.json.Decoder(list[list[Any]])


async def load_session_page(tx: Tx, query: SessionListQuery) -> list[SessionListRow]:
    """Returns at most `limit` rows, newest first by `updated_at`, then by key."""
    prefix = query.search is not None and not await _has_enough_whole_word_matches(tx, query.search)
    if query.own_key is None:
        return sorted(await _fetch_rows(tx, query, prefix=prefix), key=_sort_key)
    # A session of the caller's own tree may be in another stream as well.
    found = await _fetch_rows(tx, msgspec.structs.replace(query, limit=2 * query.limit), prefix=prefix)
    return sorted({row.id: row for row in found}.values(), key=_sort_key)[: query.limit]


async def _fetch_rows(tx: Tx, query: SessionListQuery, *, prefix: bool) -> list[SessionListRow]:
    statement, params = build_page_query(query, prefix=prefix)
    row = await tx.one(statement, **params)
    assert row is not None
    try:
        return _PAGE_DECODER.decode(row["page"])
    except msgspec.DecodeError:
        return _decode_leniently(row["page"])


def _decode_leniently(page: str) -> list[SessionListRow]:
    """Decodes a page in which a value may have the wrong type; such a value is shown as it is.

    Raises:
        StoreDamaged: a value is unreadable, or one that the order depends on has the wrong type.
    """
    try:
        return sorted((SessionListRow(*row) for row in _LENIENT_PAGE_DECODER.decode(page)), key=_sort_key)
    except (msgspec.DecodeError, TypeError) as error:
        raise StoreDamaged(
            "A session in this list has a value that cannot be read.",
            "Restore a backup of the database; sessions outside this list are not affected.",
        ) from error


def _sort_key(row: SessionListRow) -> tuple[int, str]:
    return -row.updated_at, row.key


async def _has_enough_whole_word_matches(tx: Tx, search: str) -> bool:
    """Whether whole words match enough sessions: they stream from the index, while prefixes must be collected first."""
    row = await tx.one(
        SQL.count_matches, words=build_name_match(search, prefix=False), most=MAX_SEARCH_MATCHES
    )
    return row is not None and row["matches"] >= MAX_SEARCH_MATCHES


async def list_agent_ids(tx: Tx) -> list[str]:
    """Ids of agents that have sessions, at most `MAX_LISTED_AGENTS`."""
    return [row["id"] for row in await tx.all(SQL.agent_ids, most=MAX_LISTED_AGENTS)]


async def load_admitted_agents(tx: Tx, admits: Callable[[str], bool]) -> list[str] | None:
    """The agents that pass, or None if all do; never None if there may be more than `MAX_LISTED_AGENTS`."""
    known = await list_agent_ids(tx)
    admitted = [agent for agent in known if admits(agent)]
    return None if len(admitted) == len(known) < MAX_LISTED_AGENTS else admitted


async def count_hidden_sessions(
    tx: Tx, agents: Sequence[str], own_key: str, *, descendants: bool, max_count: int
) -> int:
    """Number of unarchived sessions of these agents outside the caller's tree, counted up to `max_count`."""
    found = 0
    for agent in agents:
        row = await tx.one(
            SQL.hidden_of_agent,
            agent=agent,
            own_key=own_key,
            descendants=int(descendants),
            most=max_count - found,
        )
        found += row["hidden"] if row else 0
        if found >= max_count:
            break
    return found


async def count_sessions_by_agent(tx: Tx) -> dict[str, int]:
    """Number of unarchived sessions of each agent. Counts every session: not for frequent requests."""
    return {row["agent_id"]: row["sessions"] for row in await tx.all(SQL.count_by_agent)}


async def count_active_runs(tx: Tx) -> Row:
    """Number of `queued` and `running` runs."""
    row = await tx.one(SQL.count_active_runs)
    assert row is not None
    return row


async def load_last_messages(tx: Tx, session: int, limit: int, max_bytes: int) -> list[Row]:
    """The last messages of a session, newest first, without tool results; one longer than `max_bytes` has no body."""
    return await tx.all(SQL.last_messages, session=session, limit=limit, max_bytes=max_bytes)


def build_page_query(query: SessionListQuery, *, prefix: bool = False) -> tuple[Query, dict[str, Param]]:
    params: dict[str, Param] = {"limit": query.limit}
    filters = _build_filters(query, params)
    streams = [
        SQL.stream.text.replace("{rows}", text.replace("{filters}", filters))
        for text in _build_streams(query, params, prefix=prefix)
    ]
    return Query("listing.page", SQL.page.text.replace("{streams}", "\nUNION ALL\n".join(streams))), params


def _build_filters(query: SessionListQuery, params: dict[str, Param]) -> str:
    filters = ["1 = 1"]
    if query.cursor is not None:
        params["cursor_at"], params["cursor_key"] = query.cursor
        filters.append(SQL.filter_cursor.text)
    if query.only_agent is not None:
        params["only_agent"] = query.only_agent
        filters.append(SQL.filter_agent.text)
    if query.active_since is not None:
        params["active_since"] = query.active_since
        filters.append(SQL.filter_active.text)
    return " AND ".join(filters)


def _build_streams(query: SessionListQuery, params: dict[str, Param], *, prefix: bool) -> Iterator[str]:
    narrowest = _build_narrowest_stream(query, params, prefix=prefix)
    if narrowest:
        yield f"{narrowest} AND {_build_remaining_filters(query, params)}"
        return
    has_many_agents = query.agents is not None and len(query.agents) > MAX_AGENT_STREAMS
    agents = [None] if query.agents is None or has_many_agents else query.agents
    for i, (agent, kind, archived) in enumerate(product(agents, query.kinds, range(int(query.archived) + 1))):
        params |= {f"kind_{i}": kind, f"archived_{i}": archived}
        if agent is not None:
            params[f"agent_{i}"] = agent
        stream = (SQL.of_kind if agent is None else SQL.of_agent).text.replace("{i}", str(i))
        yield f"{stream} AND {_build_visibility_filter(query, params)}" if has_many_agents else stream
    if query.own_key is not None and query.agents is not None:
        params["own_key"] = query.own_key
        own = (SQL.of_tree if query.descendants else SQL.of_self).text
        yield f"{own} AND {_build_kind_filter(query, params)}"


def _build_narrowest_stream(query: SessionListQuery, params: dict[str, Param], *, prefix: bool) -> str | None:
    """The stream of the narrowest filter that selects single sessions, or None; the other filters test its rows."""
    found = {
        "label": query.label,
        "parent": query.parent,
        "words": build_name_match(query.search, prefix=prefix) if query.search is not None else None,
    }
    filters = {name: value for name, value in found.items() if value is not None}
    params |= filters
    if query.search is not None:  # a caller that sees few sessions must not lose them among many matches
        params["matches"] = MAX_SEARCH_MATCHES if query.agents is None else 50 * MAX_SEARCH_MATCHES
    streams = {"label": SQL.of_label, "parent": SQL.of_parent, "words": SQL.of_words}
    tests = {"label": SQL.filter_label, "parent": SQL.filter_parent, "words": SQL.filter_words}
    if not filters:
        return None
    first, *others = filters
    return " AND ".join([streams[first].text, *(tests[name].text for name in others)])


def _build_remaining_filters(query: SessionListQuery, params: dict[str, Param]) -> str:
    kinds = _build_kind_filter(query, params)
    return kinds if query.agents is None else f"{kinds} AND {_build_visibility_filter(query, params)}"


def _build_visibility_filter(query: SessionListQuery, params: dict[str, Param]) -> str:
    params["seen"] = msgspec.json.encode(query.agents or ()).decode()
    params |= {"own_key": query.own_key, "descendants": int(query.descendants)}
    return SQL.filter_visible.text


def _build_kind_filter(query: SessionListQuery, params: dict[str, Param]) -> str:
    text = "s.archived <= :with_archived"
    params["with_archived"] = int(query.archived)
    if len(query.kinds) < len(SESSION_KINDS):
        for i, kind in enumerate(query.kinds):
            params[f"only_{i}"] = kind
        text += f" AND s.kind IN ({', '.join(f':only_{i}' for i in range(len(query.kinds)))})"
    return text


def build_name_match(search: str, *, prefix: bool) -> FulltextQuery:
    """Matches sessions with all these words; with `prefix`, the last may be the start of one."""
    return FulltextQuery("names", re.findall(r"\w+", search)[:16], beginning=prefix)
