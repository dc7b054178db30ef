"""Pages of sessions equal a brute-force reference, for every combination of filters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon import keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import AntiphonError, NotFound, StoreDamaged
from antiphon.operations.types import ListFilter
from antiphon.runtimes import Prompt
from antiphon.store import Row, Tx, listing
from antiphon.store.listing import SESSION_KINDS, SessionListQuery
from antiphon.store.queries import Query
from support.app_fixture import DATABASE, OPERATOR, make_config, open_app_fixture
from support.databases import open_test_database

AGENTS = ("main", "helper", "writer")
TOUCH = Query("test.touch", "UPDATE sessions SET updated_at = :at, archived = :archived WHERE id = :id")
# Every kind there is, as a key of an agent.
SHAPES: tuple[Callable[[str, int], str], ...] = (
    lambda agent, _: f"agent:{agent}:main",
    lambda agent, n: f"agent:{agent}:telegram:group:{n}",
    lambda agent, n: f"agent:{agent}:cron:{n}",
    lambda agent, n: f"agent:{agent}:hook:{n}",
    lambda agent, n: f"agent:{agent}:node-{n}",
    lambda agent, n: f"agent:{agent}:direct:{n}",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A session as the reference knows it."""

    key: str
    agent: str
    kind: str
    at: int
    archived: bool
    label: str | None
    parent: str | None
    ancestors: frozenset[str]

    def called(self, search: str) -> bool:
        """It has every word of the search; the last may be the beginning of one."""
        names = re.findall(r"\w+", f"{keys.parse(self.key).id or ''} {self.label or ''}".lower())
        *whole, beginning = search.split()
        return set(whole) <= set(names) and any(name.startswith(beginning) for name in names)


@st.composite
def worlds(draw: st.DrawFn) -> list[Fact]:
    """Up to two dozen sessions in random trees; times repeat, so that the key decides too."""
    facts: dict[str, Fact] = {}
    for number in range(draw(st.integers(0, 24))):
        agent = draw(st.sampled_from(AGENTS))
        key = draw(st.sampled_from(SHAPES))(agent, number)
        if key in facts:
            continue
        parent = draw(st.none() | st.sampled_from(sorted(facts))) if facts else None
        facts[key] = Fact(
            key=key,
            agent=agent,
            kind=keys.parse(key).kind,
            at=draw(st.integers(1, 6)),
            archived=draw(st.integers(0, 4)) == 0,
            label=draw(st.sampled_from([None, None, "red", "blue"])),
            parent=parent,
            ancestors=frozenset({parent}) | facts[parent].ancestors if parent else frozenset(),
        )
    return list(facts.values())


async def _build(tx: Tx, facts: list[Fact]) -> None:
    rows: dict[str, Row] = {}
    for fact in facts:
        birth = NewSession(label=fact.label, parent=rows[fact.parent]["id"] if fact.parent else None)
        rows[fact.key] = await session_rows.create_session(tx, keys.parse(fact.key), fact.at, birth)
        await tx.do(TOUCH, id=rows[fact.key]["id"], at=fact.at, archived=int(fact.archived))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filters, and whose reach they are narrowed to."""

    kinds: tuple[str, ...]
    agents: tuple[str, ...] | None
    own_key: str | None
    descendants: bool
    label: str | None
    parent: str | None
    search: str | None
    active_since: int | None
    archived: bool
    limit: int

    def admits(self, fact: Fact) -> bool:
        seen = self.agents is None or fact.agent in self.agents or fact.key == self.own_key
        seen = seen or (self.descendants and self.own_key in fact.ancestors)
        return (
            seen
            and fact.kind in self.kinds
            and (self.archived or not fact.archived)
            and (self.label is None or fact.label == self.label)
            and (self.parent is None or fact.parent == self.parent)
            and (self.search is None or fact.called(self.search))
            and (self.active_since is None or fact.at >= self.active_since)
        )

    def wish(self, cursor: tuple[int, str] | None) -> SessionListQuery:
        return SessionListQuery(
            limit=self.limit,
            kinds=self.kinds,
            agents=self.agents,
            own_key=self.own_key,
            descendants=self.descendants,
            label=self.label,
            parent=self.parent,
            search=self.search,
            active_since=self.active_since,
            archived=self.archived,
            cursor=cursor,
        )


@st.composite
def wishes(draw: st.DrawFn, facts: list[Fact]) -> Wanted:
    some_key = st.sampled_from([fact.key for fact in facts] or ["agent:main:main"])
    agents = draw(st.none() | st.lists(st.sampled_from(AGENTS), unique=True).map(tuple))
    own = draw(st.none() | some_key) if agents is not None else None
    return Wanted(
        kinds=draw(
            st.just(SESSION_KINDS)
            | st.lists(st.sampled_from(SESSION_KINDS), min_size=1, unique=True).map(tuple)
        ),
        agents=agents,
        own_key=own,
        descendants=draw(st.booleans()) if own else False,
        label=draw(st.sampled_from([None, None, "red"])),
        parent=draw(st.none() | st.none() | some_key),
        search=draw(st.sampled_from([None, None, None, "red", "bl", "1", "re 1", "red 1", "nothing"])),
        active_since=draw(st.none() | st.integers(1, 7)),
        archived=draw(st.booleans()),
        limit=draw(st.integers(1, 7)),
    )


async def _pages(tx: Tx, wanted: Wanted) -> list[str]:
    """Everything, page by page, along the cursors."""
    if wanted.agents == () and wanted.own_key is None:
        return []  # the caller of `page` knows that nothing can be left
    found: list[str] = []
    cursor: tuple[int, str] | None = None
    while True:
        rows = await listing.load_session_page(tx, wanted.wish(cursor))
        found += [row.key for row in rows]
        if len(rows) < wanted.limit:
            return found
        cursor = rows[-1].updated_at, rows[-1].key


@pytest.mark.requirement("L1", "L2", "G22")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), facts=worlds())
def test_pages_equal_the_reference(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, facts: list[Fact]
) -> None:
    wanted = [data.draw(wishes(facts)) for _ in range(20)]
    apart = data.draw(st.sampled_from([1, listing.MAX_AGENT_STREAMS]), "agents that get streams of their own")

    async def run(path: Path) -> list[list[str]]:
        store = await open_test_database(path / DATABASE, synchronous="normal")
        await store.tx(_build, facts)
        pages = [await store.read(_pages, one) for one in wanted]
        await store.close()
        return pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "MAX_AGENT_STREAMS", apart)
        pages = asyncio.run(run(tmp_path_factory.mktemp("list")))
    for one, found in zip(wanted, pages, strict=True):
        reference = sorted(
            (fact for fact in facts if one.admits(fact)), key=lambda fact: (-fact.at, fact.key)
        )
        assert found == [fact.key for fact in reference], one


ODD = 'a "quoted" \\ line\nand another\t\x7f \u2028 Ångström 🦜'
SET_ALL = Query(
    "test.set_all",
    "UPDATE sessions SET channel = 'c' || :odd, state = 'running', display_name = 'n' || :odd, label = 'l' || :odd,"
    " model = 'm' || :odd, last_model = 'lm', context_tokens = 9007199254740993, total_tokens = 1, thinking = 'high',"
    " \"verbose\" = 'full', system_sent = 1, aborted_last_run = 1, send_policy = 'deny', last_channel = 'lc',"
    " last_to = 'to' || :odd, last_account = 'la', last_thread = 'lt', parent_key = 'p', children = 2,"
    " chat_type = 'group', subject = 's' || :odd, input_tokens = 3, output_tokens = 4, archived = 1 WHERE id = :id",
)


@pytest.mark.anyio
@pytest.mark.requirement("L1")
async def test_a_row_of_a_page_is_the_session_as_it_is_described_alone(tmp_path: Path) -> None:
    """Column by column, none mistaken for its neighbour, and every text as it was stored."""
    store = await open_test_database(tmp_path / DATABASE, synchronous="normal")

    async def described(tx: Tx, id: int) -> Row | None:
        return await tx.one(session_rows.SQL.list_row, id=id)

    async def made(tx: Tx) -> int:
        row = await session_rows.create_session(
            tx, keys.parse("agent:main:telegram:group:1"), 5, NewSession()
        )
        await tx.do(SET_ALL, id=row["id"], odd=ODD)
        return row["id"]

    alone = await store.read(described, await store.tx(made))
    assert alone is not None
    (listed,) = await store.read(listing.load_session_page, SessionListQuery(limit=5, archived=True))
    assert listed == tuple(alone)
    assert all(value == alone[column] for column, value in listed._asdict().items())
    assert (listed.subject, listed.context_tokens) == (f"s{ODD}", 9007199254740993)
    await store.close()


@pytest.mark.anyio
@pytest.mark.sqlite_only
@pytest.mark.requirement("L1", "G21")
async def test_a_value_of_the_wrong_kind_costs_no_session_its_place(tmp_path: Path) -> None:
    """As a damaged file may have it; PostgreSQL takes none."""
    store = await open_test_database(tmp_path / DATABASE, synchronous="normal")

    async def made(tx: Tx) -> None:
        for number in range(3):
            await session_rows.create_session(
                tx, keys.parse(f"agent:main:dashboard:{number}"), 5, NewSession()
            )
        await tx.do(Query("test.odd", "UPDATE sessions SET total_tokens = 'many' WHERE id = 2"))

    await store.tx(made)
    rows = await store.read(listing.load_session_page, SessionListQuery(limit=5))
    assert sorted(str(row.total_tokens) for row in rows) == ["0", "0", "many"]
    await store.close()


@pytest.mark.anyio
@pytest.mark.sqlite_only
@pytest.mark.requirement("G21")
@pytest.mark.parametrize(
    "damage",
    ["subject = CAST(x'61ff62' AS TEXT)", "subject = x'6162'", "total_tokens = 9e999", "updated_at = 'x'"],
)
async def test_a_list_with_a_value_that_cannot_be_read_says_so(tmp_path: Path, damage: str) -> None:
    store = await open_test_database(tmp_path / DATABASE, synchronous="normal")

    async def made(tx: Tx) -> None:
        for name in ("secret", "other"):
            await session_rows.create_session(tx, keys.parse(f"agent:main:dashboard:{name}"), 5, NewSession())
        await tx.do(Query("test.odd", f"UPDATE sessions SET {damage} WHERE id = 2"))  # noqa: S608

    await store.tx(made)
    with pytest.raises(StoreDamaged, match=r"cannot be read.* Restore a backup") as raised:
        await store.read(listing.load_session_page, SessionListQuery(limit=5))
    assert "secret" not in str(raised.value)
    await store.close()


VISIBILITY = st.sampled_from(["self", "tree", "agent", "all"])


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, Any]:
    """What an operator may have configured for what agents see of each other."""
    a2a: dict[str, Any] = {"enabled": draw(st.booleans())}
    if draw(st.booleans()):
        a2a["allow"] = draw(st.lists(st.sampled_from([*AGENTS, "*", "h*"]), unique=True, max_size=2))
    return {
        "agents": {"list": [{"id": agent} for agent in AGENTS]},
        "tools": {"sessions": {"visibility": draw(VISIBILITY)}, "agentToAgent": a2a},
    }


@pytest.mark.requirement("V1", "V3", "G30")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), facts=worlds(), given_settings=settings_of())
def test_a_session_is_listed_if_and_only_if_it_may_be_read(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    facts: list[Fact],
    given_settings: dict[str, Any],
) -> None:
    config = make_config(given_settings)
    places = [fact for fact in facts if not fact.archived]
    callers: list[Caller] = [OPERATOR]
    for _ in range(3):
        if places:
            place = data.draw(st.sampled_from(places))
            callers.append(Caller.agent(place.agent, place.key, sandboxed=data.draw(st.booleans())))
    limit = data.draw(st.integers(1, 5))
    outcome = asyncio.run(_compared(tmp_path_factory.mktemp("door"), config, facts, callers, limit))
    for caller, listed, readable in outcome:
        assert listed == readable, caller


async def silent(prompt: Prompt) -> str:
    raise AssertionError("no runtime is used here")


async def _compared(
    path: Path, config: Config, facts: list[Fact], callers: list[Caller], limit: int
) -> list[tuple[Caller, set[str], set[str]]]:
    door = SessionResolver(config)

    async def readable(tx: Tx, caller: Caller) -> set[str]:
        passed: set[str] = set()
        for fact in facts:
            try:
                passed.add((await door.open(tx, caller, "read", fact.key))["key"])
            except NotFound as refused:
                assert fact.key in str(refused)
        return passed

    outcome: list[tuple[Caller, set[str], set[str]]] = []
    async with open_app_fixture(path, silent, config=config) as app:
        await app.store.tx(_build, facts)
        for caller in callers:
            listed: list[str] = []
            cursor: str | None = None
            while True:
                page = await app.operations.sessions.list(
                    caller, ListFilter(limit=limit, include_archived=True, cursor=cursor)
                )
                # Short names are the caller's own; the row behind one is found by asking for it.
                listed += [str(door.canonicalize(caller, row.key)) for row in page.sessions]
                if page.next_cursor is None:
                    break
                cursor = page.next_cursor
            assert len(listed) == len(set(listed))
            outcome.append((caller, set(listed), await app.store.read(readable, caller)))
    return outcome


@pytest.mark.anyio
@pytest.mark.requirement("V3", "G30")
async def test_agents_beyond_the_listed_ones_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That every known agent may be seen says nothing of those that there was no room to know."""
    config = make_config(
        {
            "tools": {
                "sessions": {"visibility": "all"},
                "agentToAgent": {"enabled": True, "allow": ["a*", "main"]},
            }
        }
    )
    async with open_app_fixture(tmp_path, silent, config=config) as app:
        for agent in ("a1", "a2", "main", "secret"):
            await app.create(f"agent:{agent}:main")
        caller = Caller.agent("main", "agent:main:main")
        for most in (2, 3, 4, 5):
            monkeypatch.setattr(listing, "MAX_LISTED_AGENTS", most)
            page = await app.operations.sessions.list(caller, ListFilter(limit=9))
            assert {row.agent_id for row in page.sessions} == {"a1", "a2", "main"}, most


@pytest.mark.anyio
@pytest.mark.requirement("V3", "G22")
async def test_the_statement_does_not_grow_with_the_agents(tmp_path: Path) -> None:
    agents = [f"a{n}" for n in range(listing.MAX_LISTED_AGENTS)]
    texts = [
        listing.build_page_query(listing.SessionListQuery(limit=5, agents=some, own_key="k", search=search))[
            0
        ].text
        for some in (agents, agents[: listing.MAX_AGENT_STREAMS + 1])
        for search in (None, "word")
    ]
    assert texts[:2] == texts[2:]
    async with open_app_fixture(tmp_path, silent) as app:
        for agent in ("a9", "a9999", "secret"):
            await app.create(f"agent:{agent}:main")
        rows = await app.store.read(
            listing.load_session_page, listing.SessionListQuery(limit=5, agents=agents)
        )
        assert {row.agent_id for row in rows} == {"a9", "a9999"}


@pytest.mark.anyio
@pytest.mark.requirement("L1", "L3", "G32")
async def test_filters_an_operator_can_give(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, silent) as app:
        await app.create("agent:main:main")
        await app.create("agent:main:direct:Ångström", "agent:main:main")
        await app.create("agent:main:cron:nightly")

        async def found(**filters: Any) -> list[str]:
            page = await app.operations.sessions.list(OPERATOR, ListFilter(**filters))
            assert page.count == len(page.sessions)
            return sorted(row.key for row in page.sessions)

        assert len(await found()) == 3
        assert await found(kinds=["cron"]) == ["agent:main:cron:nightly"]
        assert await found(search="night") == ["agent:main:cron:nightly"]
        assert await found(search="ångs") == await found(search="ANGS") == ["agent:main:direct:Ångström"]
        assert await found(search='" OR *') == []  # nothing in it is special
        assert await found(spawned_by="main") == ["agent:main:direct:Ångström"]
        assert await found(agent_id="MAIN") == await found()
        assert len(await found(active_minutes=1)) == 3
        assert len(await found(limit=100_000)) == 3
        for wrong in (
            {"kinds": ["mains"]},
            {"limit": 0},
            {"cursor": "x"},
            {"cursor": "1|"},
            {"spawned_by": "nobody"},
        ):
            with pytest.raises(AntiphonError):
                await found(**wrong)
