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
MAX_SEARCH_MATCHES = 400  # search matches that are considered, the most recently created first
MAX_AGENT_STREAMS = 16  # agents with a stream of their own; SQLite merges at most 500 streams
MAX_LISTED_AGENTS = 10_000  # agents that are told apart
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


_PAGE_DECODER = msgspec.json.Decoder(list[SessionListRow])
_LENIENT_PAGE_DECODER = msgspec.json.Decoder(list[list[Any]])


async def load_session_page(tx: Tx, wish: SessionListQuery) -> list[SessionListRow]:
    """Returns at most `limit` rows, newest first by `updated_at`, then by key."""
    prefix = wish.search is not None and not await _has_enough_whole_word_matches(tx, wish.search)
    if wish.own_key is None:
        return sorted(await _fetch_rows(tx, wish, prefix=prefix), key=_sort_key)
    # A session of the caller's own tree may be in another stream as well.
    found = await _fetch_rows(tx, msgspec.structs.replace(wish, limit=2 * wish.limit), prefix=prefix)
    return sorted({row.id: row for row in found}.values(), key=_sort_key)[: wish.limit]


async def _fetch_rows(tx: Tx, wish: SessionListQuery, *, prefix: bool) -> list[SessionListRow]:
    query, params = build_page_query(wish, prefix=prefix)
    row = await tx.one(query, **params)
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
            "A session of this list has a value that cannot be read.",
            "Restore a backup of the database; the sessions that are not in this list can be read as before.",
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
    passed = [agent for agent in known if admits(agent)]
    return None if len(passed) == len(known) < MAX_LISTED_AGENTS else passed


async def count_hidden_sessions(
    tx: Tx, agents: Sequence[str], own_key: str, *, descendants: bool, most: int
) -> int:
    """Number of unarchived sessions of these agents outside the caller's tree, counted up to `most`."""
    found = 0
    for agent in agents:
        row = await tx.one(
            SQL.hidden_of_agent,
            agent=agent,
            own_key=own_key,
            descendants=int(descendants),
            most=most - found,
        )
        found += row["hidden"] if row else 0
        if found >= most:
            break
    return found


async def load_last_messages(tx: Tx, session: int, limit: int, room: int) -> list[Row]:
    """The last messages of a session, newest first, without tool results; one longer than `room` has no body."""
    return await tx.all(SQL.last_messages, session=session, limit=limit, room=room)


def build_page_query(wish: SessionListQuery, *, prefix: bool = False) -> tuple[Query, dict[str, Param]]:
    params: dict[str, Param] = {"limit": wish.limit}
    filters = _build_filters(wish, params)
    streams = [
        SQL.stream.text.replace("{rows}", text.replace("{filters}", filters))
        for text in _build_streams(wish, params, prefix=prefix)
    ]
    return Query("listing.page", SQL.page.text.replace("{streams}", "\nUNION ALL\n".join(streams))), params


def _build_filters(wish: SessionListQuery, params: dict[str, Param]) -> str:
    filters = ["1 = 1"]
    if wish.cursor is not None:
        params["cursor_at"], params["cursor_key"] = wish.cursor
        filters.append(SQL.filter_cursor.text)
    if wish.only_agent is not None:
        params["only_agent"] = wish.only_agent
        filters.append(SQL.filter_agent.text)
    if wish.active_since is not None:
        params["active_since"] = wish.active_since
        filters.append(SQL.filter_active.text)
    return " AND ".join(filters)


def _build_streams(wish: SessionListQuery, params: dict[str, Param], *, prefix: bool) -> Iterator[str]:
    chosen = _build_narrowest_stream(wish, params, prefix=prefix)
    if chosen:
        yield f"{chosen} AND {_build_remaining_filters(wish, params)}"
        return
    crowded = wish.agents is not None and len(wish.agents) > MAX_AGENT_STREAMS
    agents = [None] if wish.agents is None or crowded else wish.agents
    for i, (agent, kind, archived) in enumerate(product(agents, wish.kinds, range(int(wish.archived) + 1))):
        params |= {f"kind_{i}": kind, f"archived_{i}": archived}
        if agent is not None:
            params[f"agent_{i}"] = agent
        stream = (SQL.of_kind if agent is None else SQL.of_agent).text.replace("{i}", str(i))
        yield f"{stream} AND {_build_visibility_filter(wish, params)}" if crowded else stream
    if wish.own_key is not None and wish.agents is not None:
        params["own_key"] = wish.own_key
        own = (SQL.of_tree if wish.descendants else SQL.of_self).text
        yield f"{own} AND {_build_kind_filter(wish, params)}"


def _build_narrowest_stream(wish: SessionListQuery, params: dict[str, Param], *, prefix: bool) -> str | None:
    """The stream of the narrowest filter that selects single sessions, or None; the other filters test its rows."""
    found = {
        "label": wish.label,
        "parent": wish.parent,
        "words": build_name_match(wish.search, prefix=prefix) if wish.search is not None else None,
    }
    given = {name: value for name, value in found.items() if value is not None}
    params |= given
    if wish.search is not None:  # a caller that sees few sessions must not lose them among many matches
        params["matches"] = MAX_SEARCH_MATCHES if wish.agents is None else 50 * MAX_SEARCH_MATCHES
    streams = {"label": SQL.of_label, "parent": SQL.of_parent, "words": SQL.of_words}
    tests = {"label": SQL.filter_label, "parent": SQL.filter_parent, "words": SQL.filter_words}
    if not given:
        return None
    first, *others = given
    return " AND ".join([streams[first].text, *(tests[name].text for name in others)])


def _build_remaining_filters(wish: SessionListQuery, params: dict[str, Param]) -> str:
    kinds = _build_kind_filter(wish, params)
    return kinds if wish.agents is None else f"{kinds} AND {_build_visibility_filter(wish, params)}"


def _build_visibility_filter(wish: SessionListQuery, params: dict[str, Param]) -> str:
    params["seen"] = msgspec.json.encode(wish.agents or ()).decode()
    params |= {"own_key": wish.own_key, "descendants": int(wish.descendants)}
    return SQL.filter_visible.text


def _build_kind_filter(wish: SessionListQuery, params: dict[str, Param]) -> str:
    text = "s.archived <= :with_archived"
    params["with_archived"] = int(wish.archived)
    if len(wish.kinds) < len(SESSION_KINDS):
        for i, kind in enumerate(wish.kinds):
            params[f"only_{i}"] = kind
        text += f" AND s.kind IN ({', '.join(f':only_{i}' for i in range(len(wish.kinds)))})"
    return text


def build_name_match(search: str, *, prefix: bool) -> FulltextQuery:
    """Matches sessions with all these words; with `prefix`, the last may be the start of one."""
    return FulltextQuery("names", re.findall(r"\w+", search)[:16], beginning=prefix)
