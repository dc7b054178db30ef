"""One page of sessions, by any combination of filters, without ever scanning the table.

A page is the ordered merge of *streams*, each of which an index delivers newest first: one per kind (and per
agent where agents are asked for), or the one that a label, a parent, a search or the caller's own tree selects.
What remains of the filters is tested on the few rows that the merge looks at. This module turns a wish into one
statement and its parameters; it decides nothing about who may wish it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from antiphon.errors import StoreDamaged
from antiphon.keys import Kind
from antiphon.store import Param, Row, Tx
from antiphon.store.queries import Queries, Query
from antiphon.store.words import Match

SQL = Queries("listing")
MATCHES = 400  # of a search that are looked at, the most recently created ones
AGENTS = 16  # that get streams of their own; SQLite merges at most 500
MOST_AGENTS = 10_000  # that are told apart
KINDS = ("main", "group", "cron", "hook", "node", "other")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to list. `agents` None means every agent; `own_key` and `descendants` add the caller's own tree."""

    limit: int
    kinds: Sequence[str] = KINDS
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


class Listed(NamedTuple):
    """A session as a row of a list, in the order of the columns of `listing.page` and `sessions.described`."""

    id: int
    key: str
    kind: Kind
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


_PAGE = msgspec.json.Decoder(list[Listed])
_ODD_PAGE = msgspec.json.Decoder(list[list[Any]])


async def page(tx: Tx, wish: Wish) -> list[Listed]:
    """At most `limit` rows, newest first by `updated_at`, then by key."""
    prefix = wish.search is not None and not await _common(tx, wish.search)
    if wish.own_key is None:
        return sorted(await _found(tx, wish, prefix=prefix), key=_place)
    # A session of the own tree may be in another stream, too.
    found = await _found(tx, msgspec.structs.replace(wish, limit=2 * wish.limit), prefix=prefix)
    return sorted({row.id: row for row in found}.values(), key=_place)[: wish.limit]


async def _found(tx: Tx, wish: Wish, *, prefix: bool) -> list[Listed]:
    query, params = statement(wish, prefix=prefix)
    row = await tx.one(query, **params)
    assert row is not None
    try:
        return _PAGE.decode(row["page"])
    except msgspec.DecodeError:
        return _odd(row["page"])


def _odd(page: str) -> list[Listed]:
    """A value of another kind is shown as it is, and costs no other row its place, unless it decides about that.

    Raises:
        StoreDamaged: where a value is none that can be read at all, or no time to be listed by.
    """
    try:
        return sorted((Listed(*row) for row in _ODD_PAGE.decode(page)), key=_place)
    except (msgspec.DecodeError, TypeError) as error:
        raise StoreDamaged(
            "A session of this list has a value that cannot be read.",
            "Restore a backup of the database; the sessions that are not in this list can be read as before.",
        ) from error


def _place(row: Listed) -> tuple[int, str]:
    return -row.updated_at, row.key


async def _common(tx: Tx, search: str) -> bool:
    """Whether whole words find enough: they are streamed from the index, beginnings have to be gathered first."""
    row = await tx.one(SQL.matches, words=words(search, prefix=False), most=MATCHES)
    return row is not None and row["matches"] >= MATCHES


async def agent_ids(tx: Tx) -> list[str]:
    """Those that have sessions, `MOST_AGENTS` at most."""
    return [row["id"] for row in await tx.all(SQL.agent_ids, most=MOST_AGENTS)]


async def admitted(tx: Tx, admits: Callable[[str], bool]) -> list[str] | None:
    """The agents that pass, or None if every one does, which cannot be said where there may be more of them."""
    known = await agent_ids(tx)
    passed = [agent for agent in known if admits(agent)]
    return None if len(passed) == len(known) < MOST_AGENTS else passed


async def hidden(tx: Tx, agents: Sequence[str], own_key: str, *, descendants: bool, most: int) -> int:
    """How many sessions of these agents are not in the caller's tree, archived ones not counted; `most` at most."""
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


async def last_said(tx: Tx, session: int, limit: int, room: int) -> list[Row]:
    """The last messages of a session, newest first, without tool results; one longer than `room` has no body."""
    return await tx.all(SQL.last_said, session=session, limit=limit, room=room)


def statement(wish: Wish, *, prefix: bool = False) -> tuple[Query, dict[str, Param]]:
    params: dict[str, Param] = {"limit": wish.limit}
    filters = _filters(wish, params)
    streams = [
        SQL.stream.text.replace("{rows}", text.replace("{filters}", filters))
        for text in _streams(wish, params, prefix=prefix)
    ]
    return Query("listing.page", SQL.page.text.replace("{streams}", "\nUNION ALL\n".join(streams))), params


def _filters(wish: Wish, params: dict[str, Param]) -> str:
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


def _streams(wish: Wish, params: dict[str, Param], *, prefix: bool) -> Iterator[str]:
    chosen = _chosen(wish, params, prefix=prefix)
    if chosen:
        yield f"{chosen} AND {_residue(wish, params)}"
        return
    crowded = wish.agents is not None and len(wish.agents) > AGENTS
    agents = [None] if wish.agents is None or crowded else wish.agents
    for i, (agent, kind, archived) in enumerate(product(agents, wish.kinds, range(int(wish.archived) + 1))):
        params |= {f"kind_{i}": kind, f"archived_{i}": archived}
        if agent is not None:
            params[f"agent_{i}"] = agent
        stream = (SQL.of_kind if agent is None else SQL.of_agent).text.replace("{i}", str(i))
        yield f"{stream} AND {_visible(wish, params)}" if crowded else stream
    if wish.own_key is not None and wish.agents is not None:
        params["own_key"] = wish.own_key
        own = (SQL.of_tree if wish.descendants else SQL.of_self).text
        yield f"{own} AND {_kinds(wish, params)}"


def _chosen(wish: Wish, params: dict[str, Param], *, prefix: bool) -> str | None:
    """The stream of the narrowest filter where one of those that pick single sessions is given, tested by the rest."""
    found = {
        "label": wish.label,
        "parent": wish.parent,
        "words": words(wish.search, prefix=prefix) if wish.search is not None else None,
    }
    given = {name: value for name, value in found.items() if value is not None}
    params |= given
    if wish.search is not None:  # who sees few sessions must not lose them among the many that match
        params["matches"] = MATCHES if wish.agents is None else 50 * MATCHES
    streams = {"label": SQL.of_label, "parent": SQL.of_parent, "words": SQL.of_words}
    tests = {"label": SQL.filter_label, "parent": SQL.filter_parent, "words": SQL.filter_words}
    if not given:
        return None
    first, *others = given
    return " AND ".join([streams[first].text, *(tests[name].text for name in others)])


def _residue(wish: Wish, params: dict[str, Param]) -> str:
    kinds = _kinds(wish, params)
    return kinds if wish.agents is None else f"{kinds} AND {_visible(wish, params)}"


def _visible(wish: Wish, params: dict[str, Param]) -> str:
    params["seen"] = msgspec.json.encode(wish.agents or ()).decode()
    params |= {"own_key": wish.own_key, "descendants": int(wish.descendants)}
    return SQL.filter_visible.text


def _kinds(wish: Wish, params: dict[str, Param]) -> str:
    text = "s.archived <= :with_archived"
    params["with_archived"] = int(wish.archived)
    if len(wish.kinds) < len(KINDS):
        for i, kind in enumerate(wish.kinds):
            params[f"only_{i}"] = kind
        text += f" AND s.kind IN ({', '.join(f':only_{i}' for i in range(len(wish.kinds)))})"
    return text


def words(search: str, *, prefix: bool) -> Match:
    """Sessions that have all these words; the last may be the beginning of one."""
    return Match("names", re.findall(r"\w+", search)[:16], beginning=prefix)
