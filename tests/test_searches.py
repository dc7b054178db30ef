"""`Operations.search`: what is found, by whom, and what it looks like."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect

from antiphon import keys
from antiphon.access import WRITE_SCOPE, Caller
from antiphon.app import open_operations_readonly
from antiphon.clock import ManualClock
from antiphon.config import Config
from antiphon.engine.sessions import search, session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import Forbidden, InvalidInput, NotFound
from antiphon.gateway.server import serve_gateway
from antiphon.messages import TextBlock, ToolResult, UserMessage
from antiphon.operations import search as message_search
from antiphon.operations.operations import Operations
from antiphon.operations.transcript_types import SearchHit, SearchPage
from antiphon.operations.types import SessionPatch
from antiphon.runtimes import Prompt
from antiphon.store import Tx
from support.app_fixture import BOUND, MAIN, OPERATOR, AppFixture, make_config, open_app_fixture

AGENTS = ("main", "helper", "writer")
QUIET = EngineTimings(lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=3600)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is looked at here, not how fast this machine is just now: that is engine/test_search_time.py."""
    monkeypatch.setattr(search, "SEARCH_BUDGET_SECONDS", 60.0)


async def echo(prompt: Prompt) -> str:
    return "an echo"


async def note(tx: Tx, session: int, text: str, now: int = 1) -> None:
    await session_rows.append_note(tx, session, UserMessage(content=text, timestamp=now), now)


def shown(page: SearchPage) -> list[str]:
    return [hit.snippet for hit in page.results]


# --- who finds what ---


@dataclass(frozen=True, slots=True)
class Place:
    """A session of the world: whose, below which other one, and how many conversations it has had."""

    key: str
    parent: int | None
    conversations: int
    archived: bool

    @property
    def agent(self) -> str:
        return keys.parse(self.key).agent_id


@st.composite
def worlds(draw: st.DrawFn) -> list[Place]:
    places: list[Place] = []
    for number in range(draw(st.integers(1, 10))):
        agent = draw(st.sampled_from(AGENTS))
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        key = f"agent:{agent}:{'cron' if draw(st.booleans()) else 'direct'}:{number}"
        places.append(Place(key, parent, draw(st.integers(1, 2)), draw(st.booleans())))
    return places


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    a2a: dict[str, Any] = {"enabled": draw(st.booleans())}
    if draw(st.booleans()):
        a2a["allow"] = draw(st.lists(st.sampled_from([*AGENTS, "*", "h*"]), unique=True, max_size=2))
    visibility = draw(st.sampled_from(["self", "tree", "agent", "all"]))
    return {
        "agents": {"list": [{"id": agent} for agent in AGENTS]},
        "tools": {"sessions": {"visibility": visibility}, "agentToAgent": a2a},
    }


async def _build(tx: Tx, places: list[Place], crowd: int) -> list[str]:
    """Every conversation has the word; the session ids. Only operators may see sessions of the crowd."""
    ids: list[int] = []
    conversations: list[str] = []
    for place in places:
        birth = NewSession(parent=None if place.parent is None else ids[place.parent])
        row = await session_rows.create_session(tx, keys.parse(place.key), 1, birth)
        ids.append(row["id"])
        for number in range(place.conversations):
            if number:
                found = await session_rows.find_session(tx, keys.parse(place.key), None)
                assert found is not None
                await session_rows.start_new_transcript(tx, found, "new", 1)
            await note(tx, row["id"], f"the word in {place.key}")
        conversations += [row["session_id"] for row in await session_rows.list_transcripts(tx, row)]
        if place.archived:
            await session_rows.patch_session(tx, row["id"], {"archived": 1}, 1)
    for number in range(crowd):
        row = await session_rows.create_session(tx, keys.parse(f"agent:hidden:direct:{number}"), 1)
        await note(tx, row["id"], "the word, hidden")
    return conversations


async def _readable(operations: Operations, caller: Caller, conversations: list[str]) -> set[str]:
    read: set[str] = set()
    for session_id in conversations:
        try:
            page = await operations.transcripts.read(caller, session_id, HistoryFilter())
        except NotFound:
            continue
        assert page.session_id == session_id
        read.add(session_id)
    return read


@pytest.mark.requirement("V1", "V3", "G30", "W2")
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), places=worlds(), given_rules=rules())
def test_a_hit_is_returned_if_and_only_if_its_session_may_be_read(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    places: list[Place],
    given_rules: dict[str, Any],
) -> None:
    callers = [OPERATOR]
    for _ in range(3):
        place = data.draw(st.sampled_from(places))
        callers.append(Caller.agent(place.agent, place.key, sandboxed=data.draw(st.booleans())))
    asyncio.run(_compared(tmp_path_factory.mktemp("world"), make_config(given_rules), places, callers))


async def _compared(path: Path, config: Config, places: list[Place], callers: list[Caller]) -> None:
    async with open_app_fixture(path, echo, config=config, timings=QUIET) as app:
        conversations = await app.store.tx(_build, places, 25)
        for caller in callers:
            readable = await _readable(app.operations, caller, conversations)
            page = await app.operations.search.find(caller, "word", limit=50)
            assert not page.indexing and not page.truncated
            found = {hit.session_id for hit in page.results if not hit.snippet.endswith("hidden")}
            assert found == readable, caller
            if caller is not OPERATOR and len(found) < len(page.results):
                # Agents that are not named anywhere are admitted by `*` alone, in lists and here.
                assert (
                    await app.operations.sessions.describe(caller, "agent:hidden:direct:1")
                ).agent_id == "hidden"
            for place in places:  # and each of them alone
                await _alone(app.operations, caller, place, conversations, readable)


async def _alone(
    operations: Operations, caller: Caller, place: Place, conversations: list[str], readable: set[str]
) -> None:
    several = await operations.search.find(
        caller, "word", limit=50, sessions=[place.key, "agent:main:direct:none"]
    )
    try:
        one = await operations.search.find(caller, "word", limit=50, session=place.key)
    except NotFound:
        assert several.results == []
        return
    assert several.results == one.results
    assert len(one.results) == place.conversations
    assert {hit.session_id for hit in one.results} <= readable & set(conversations)
    whose = await operations.search.find(caller, "word", limit=50, agent_id=place.agent.upper())
    agents = {keys.parse(hit.snippet.removeprefix("the word in ")).agent_id for hit in whose.results}
    assert agents == {place.agent}


@pytest.mark.anyio
@pytest.mark.requirement("W2")
async def test_few_visible_hits_are_found_behind_many_newer_ones_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 10)

    async def build(tx: Tx) -> None:
        own = await session_rows.create_session(tx, keys.parse(MAIN), 1)
        child = await session_rows.create_session(
            tx, keys.parse("agent:helper:subagent:1"), 1, NewSession(parent=own["id"])
        )
        other = await session_rows.create_session(tx, keys.parse("agent:helper:main"), 1)
        await note(tx, own["id"], "word of my own")
        await note(tx, child["id"], "word of a child")
        for n in range(400):
            await note(tx, other["id"], f"word {n} of another")

    async with open_app_fixture(tmp_path, echo) as app:
        await app.store.tx(build)
        await search.catch_up_index(app.store)
        page = await app.operations.search.find(Caller.agent("main", MAIN), "word", limit=5)
        assert shown(page) == ["word of a child", "word of my own"]
        assert [hit.session_key for hit in page.results] == ["agent:helper:subagent:1", "main"]
        assert not page.truncated
        everything = await app.operations.search.find(OPERATOR, "word", limit=5)
        assert shown(everything) == [f"word {n} of another" for n in range(399, 394, -1)]
        assert everything.truncated
        nobody = Caller.agent("main", "agent:main:direct:gone")
        assert shown(await app.operations.search.find(nobody, "word")) == []


# --- what is found ---


async def _hits(app: AppFixture, query: str, **options: Any) -> list[SearchHit]:
    return (await app.operations.search.find(OPERATOR, query, **options)).results


@pytest.mark.anyio
@pytest.mark.requirement("W2")
async def test_a_hit_says_where_it_is(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, clock=clock, timings=QUIET) as app:
        await app.ask("where is the needle?")
        await app.operations.conversations.renew(OPERATOR, MAIN)
        await app.ask("the needle is here")
        clock.advance(days=7)
        new, old = await _hits(app, "needle")
        assert (new.session_key, new.role, new.seq, new.snippet) == (MAIN, "user", 1, "the needle is here")
        assert old.session_id != new.session_id
        assert (new.score, old.timestamp) == (0.125, clock.now() - 7 * 86_400_000)
        for hit in (new, old):  # by its session id a past conversation is read, and the entry is in it
            (first, *_) = (
                await app.operations.transcripts.read(OPERATOR, hit.session_id, HistoryFilter(after=0))
            ).messages
            assert (first["id"], first["seq"]) == (hit.message_id, hit.seq)
        assert [hit.role for hit in await _hits(app, "echo")] == ["assistant", "assistant"]


@pytest.mark.anyio
async def test_results_of_tools_can_be_left_out(tmp_path: Path) -> None:
    result = ToolResult(
        tool_call_id="1", tool_name="t", content=[TextBlock(text="found by a tool")], timestamp=1
    )
    async with open_app_fixture(tmp_path, echo) as app:
        row = await app.create(MAIN)
        await app.store.tx(note, row["id"], "found by somebody")
        await app.store.tx(session_rows.append_note, row["id"], result, 2)
        assert [hit.role for hit in await _hits(app, "found")] == ["toolResult", "user"]
        assert [hit.role for hit in await _hits(app, "found", include_tools=False)] == ["user"]


@pytest.mark.anyio
@pytest.mark.requirement("G28")
async def test_what_is_forgotten_is_not_found(tmp_path: Path, base: str) -> None:
    there = "message_words MATCH 'gone'" if base == "sqlite" else "vector @@ to_tsquery('simple', 'gone')"
    index = f"SELECT rowid FROM message_words WHERE {there}"  # noqa: S608
    async with open_app_fixture(tmp_path, echo) as app:
        for peer in ("gone", "here"):
            await app.ask(f"secret of {peer}", f"agent:main:direct:{peer}")
        assert len(await _hits(app, "secret")) == 2
        assert len(app.rows(index)) == 1
        await app.ask("late secret of gone", "agent:main:direct:gone")  # not indexed when it is removed
        await app.operations.sessions.patch(OPERATOR, "agent:main:direct:here", SessionPatch(archived=True))
        assert await app.operations.sessions.delete(OPERATOR, "agent:main:direct:gone")
        assert [hit.snippet for hit in await _hits(app, "secret")] == ["secret of here"]
        assert app.rows(index) == []
        # The key founded anew has nothing of the old words.
        await app.ask("hello", "agent:main:direct:gone")
        assert await _hits(app, "secret", session="agent:main:direct:gone") == []


@pytest.mark.anyio
@pytest.mark.requirement("W2")
async def test_a_search_indexes_a_little_and_says_when_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "INDEX_INTERVAL_SECONDS", 3600)
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        row = await app.create(MAIN)

        async def fill(tx: Tx) -> None:
            for n in range(search.MAX_ENTRIES_INDEXED_BY_SEARCH):
                await note(tx, row["id"], f"word {n}")

        await app.store.tx(fill)
        page = await app.operations.search.find(OPERATOR, "word", limit=1)
        assert (shown(page), page.indexing) == ([f"word {search.MAX_ENTRIES_INDEXED_BY_SEARCH - 1}"], False)
        await app.store.tx(fill)
        await app.store.tx(note, row["id"], "the last word")
        page = await app.operations.search.find(OPERATOR, "last")
        assert (shown(page), page.indexing) == ([], True)
        await search.catch_up_index(app.store)
        page = await app.operations.search.find(OPERATOR, "last")
        assert (shown(page), page.indexing) == (["the last word"], False)
        await app.store.tx(note, row["id"], "the very last word")
    async with open_operations_readonly(Config(), tmp_path) as operations:  # who only reads cannot index
        page = await operations.search.find(OPERATOR, "last")
        assert (shown(page), page.indexing) == (["the last word"], True)


@pytest.mark.anyio
async def test_what_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 2)
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("hello")
        ask = app.operations.search.find
        for query in ("", "  \n"):
            with pytest.raises(InvalidInput) as refused:
                await ask(OPERATOR, query)
            assert refused.value.data["field"] == "query"
        wrongs: list[dict[str, Any]] = [{"limit": 0}, {"agent_id": "?"}, {"sessions": ["main"] * 201}]
        for wrong in wrongs:
            with pytest.raises(InvalidInput):
                await ask(OPERATOR, "hello", **wrong)
        with pytest.raises(NotFound):
            await ask(OPERATOR, "hello", session="agent:main:direct:nobody")
        with pytest.raises(Forbidden):
            await ask(Caller.operator(["none"]), "hello")
        assert shown(await ask(OPERATOR, "hello", limit=1000, sessions=["main"] * 200)) == ["hello"]
        assert shown(await ask(OPERATOR, "hello", sessions=["::", "nobody"])) == []
        assert shown(await ask(OPERATOR, "hello", sessions=[])) == []
        assert shown(await ask(Caller.operator([WRITE_SCOPE]), "— !")) == []
        monkeypatch.setattr(search, "SEARCH_BUDGET_SECONDS", -1)
        page = await ask(OPERATOR, "hello")
        assert (shown(page), page.truncated) == ([], True)


# --- over the wire ---


@pytest.mark.anyio
@pytest.mark.requirement("W2")
async def test_the_method(tmp_path: Path) -> None:
    async with (
        serve_gateway(Config(), tmp_path, port=0) as gateway,
        connect(gateway.url, proxy=None) as socket,
    ):
        token = json.loads((tmp_path / "tokens.json").read_text())["tokens"][0]["token"]

        async def ask(method: str, **params: object) -> dict[str, Any]:
            await socket.send(json.dumps({"type": "req", "id": method, "method": method, "params": params}))
            async with asyncio.timeout(BOUND):
                while True:
                    frame = json.loads(await socket.recv())
                    if frame["type"] == "res":
                        return frame

        client = {"id": "gateway-client", "version": "1", "platform": "test", "mode": "backend"}
        await ask("connect", minProtocol=3, maxProtocol=4, client=client, auth={"token": token})
        await ask("chat.send", sessionKey="main", message="say a needle", idempotencyKey="one")
        assert (await ask("agent.wait", runId="one"))["payload"]["status"] == "ok"
        found = (await ask("sessions.search", query="needle"))["payload"]
        assert found.keys() == {"results"}
        answer, question = found["results"]
        assert question.keys() == {
            "sessionKey", "sessionId", "messageId", "messageSeq", "role", "timestamp", "snippet", "score",
        }  # fmt: skip
        assert (question["sessionKey"], question["messageSeq"], answer["messageSeq"]) == (MAIN, 1, 2)
        one = await ask("sessions.search", query="needle", limit=1, agentId="main", sessionKeys=["main"])
        assert one["payload"] == {"results": [answer], "truncated": True}
        for wrong in ({}, {"query": ""}, {"query": "x" * 4097}, {"query": "x", "limit": 26}):
            assert (await ask("sessions.search", **wrong))["error"]["code"] == "INVALID_REQUEST"
        for keys_ in ([], ["main"] * 201):
            refused = await ask("sessions.search", query="x", sessionKeys=keys_)
            assert refused["error"]["code"] == "INVALID_REQUEST"


# --- what callers are shown masked ---


@pytest.mark.anyio
async def test_each_text_is_masked_once_and_not_in_the_event_loop(tmp_path: Path) -> None:
    masked: list[str] = []
    threads: set[int] = set()

    def mask(text: str) -> str:
        masked.append(text)
        threads.add(threading.get_ident())
        return text.replace("hunter2", "***")

    async with open_app_fixture(tmp_path, echo) as app:
        for text in ("the password is hunter2", "a passwordless word", "my password"):
            await app.ask(text)
        page = await app.operations.search.find(OPERATOR, "password", mask=mask)
        assert shown(page) == ["my password", "a passwordless word", "the password is ***"]
        assert sorted(masked) == sorted(set(masked)), (
            "by whole words, then by beginnings, then for the snippet"
        )
        assert threading.get_ident() not in threads
        assert shown(await app.operations.search.find(OPERATOR, "hunter2", mask=mask)) == []


@pytest.mark.anyio
async def test_a_mask_that_takes_long_ends_the_search_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def mask(text: str) -> str:
        nonlocal now
        now += message_search.MASKING_BUDGET_SECONDS * 0.6
        return text

    monkeypatch.setattr(message_search, "monotonic", lambda: now)
    async with open_app_fixture(tmp_path, echo) as app:
        for number in range(6):
            await app.ask(f"number {number}")
        page = await app.operations.search.find(OPERATOR, "number", mask=mask)
        assert (shown(page), page.truncated) == (["number 5", "number 4"], True)
