"""What a caller can ask: rows as agreed, pages that add up, a policy that blocks, conversations that come back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from antiphon.access import Caller
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import (
    Ambiguous,
    Conflict,
    InvalidInput,
    NotFound,
    SendBlocked,
    StoreReadOnly,
    UnknownModel,
)
from antiphon.messages import UserMessage
from antiphon.operations.types import IncomingMessage, ListFilter
from antiphon.runtimes import Prompt
from antiphon.state_access import create_operations
from antiphon.store.statedir import StateDir
from support.app_fixture import MAIN, OPERATOR, make_config, open_app_fixture

pytestmark = pytest.mark.anyio

WORDS = """
    key kind channel displayName label updatedAt sessionId model usedTokens totalTokens thinkingLevel verboseLevel
    systemSent abortedLastRun sendPolicy lastChannel lastTo lastAccountId deliveryContext transcriptPath state
    lastActivityAt agentId parentKey childCount chatType subject inputTokens outputTokens createdAt archived
    modelOverride
"""
ROW = set(WORDS.split())


async def echo(prompt: Prompt) -> str:
    last = prompt.messages[-1]
    assert isinstance(last, UserMessage)
    return f"heard {last.content}"


@pytest.mark.requirement("L3")
async def test_a_row_has_the_agreed_names_and_leaves_out_what_is_unknown(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("hello")
        child = "agent:main:subagent:11111111-1111-1111-1111-111111111111"
        await app.create(child, MAIN)
        app.rows(
            "UPDATE sessions SET label = 'l', display_name = 'd', model = 'm', thinking = 'low', \"verbose\" = 'on', "
            "send_policy = 'allow', last_channel = 'telegram', last_to = '7', last_account = 'a', context_tokens = 5, "
            "chat_type = 'direct', subject = 's' WHERE key = ?",
            child,
        )
        page = await app.operations.sessions.list(OPERATOR, ListFilter())
        rows = {row.key: msgspec.to_builtins(row) for row in page.sessions}
        full, plain = rows.pop(child), rows.pop(MAIN)
        assert not rows
        assert {*full, "transcriptPath"} == ROW  # nothing was said in it, so no file exists
        assert full["usedTokens"] == 5
        assert full["deliveryContext"] == {"channel": "telegram", "to": "7", "accountId": "a"}
        assert full["parentKey"] == MAIN
        assert set(plain) < ROW
        assert "label" not in plain
        assert plain["childCount"] == 1
        assert plain["channel"] == plain["lastChannel"] == "webchat"
        assert page.scope == "all"


@pytest.mark.requirement("H1", "H2")
async def test_history_is_raw_oldest_first_and_by_key_or_session_id(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        for number in range(3):
            await app.ask(f"say {number}")
        page = await app.operations.transcripts.read(OPERATOR, "main", HistoryFilter(limit=2))
        assert [item["role"] for item in page.messages] == ["user", "assistant"]
        assert page.messages[0]["content"] == "say 2"
        assert (page.total, page.has_more, page.next_cursor) == (6, True, "5")
        by_id = await app.operations.transcripts.read(OPERATOR, page.session_id, HistoryFilter(limit=2))
        assert by_id == page
        with pytest.raises(NotFound, match="antiphon sessions list"):
            await app.operations.transcripts.read(
                OPERATOR, "00000000-0000-0000-0000-000000000000", HistoryFilter()
            )


@pytest.mark.requirement("S8")
async def test_a_denied_session_takes_nothing_and_changes_nothing(tmp_path: Path) -> None:
    rules = [{"match": {"chatType": "group"}, "action": "deny"}]
    config = make_config({"session": {"sendPolicy": {"rules": rules}}})
    group = "agent:main:discord:group:1"
    async with open_app_fixture(tmp_path, echo, config=config) as app:
        with pytest.raises(SendBlocked, match="send blocked by session policy"):
            await app.say("hello", group)
        assert app.rows("SELECT * FROM runs") == []
        assert app.rows("SELECT * FROM sessions") == []
        assert (await app.ask("hello")).state == "ok"
        await app.create(group)
        app.rows("UPDATE sessions SET send_policy = 'allow' WHERE key = ?", group)
        assert (await app.ask("hello", group)).state == "ok"


@pytest.mark.requirement("G25")
async def test_a_new_conversation_keeps_the_old_one_readable_and_restorable(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("first")
        old = (await app.operations.sessions.describe(OPERATOR, "main")).session_id
        new = (await app.operations.conversations.renew(OPERATOR, "main")).session_id
        assert new != old
        assert await app.transcript() == []
        assert (await app.transcript(old))[0]["content"] == "first"
        assert [c.session_id for c in await app.operations.conversations.list(OPERATOR, "main")] == [
            new,
            old,
        ]
        with pytest.raises(Conflict, match="Restore it first"):
            await app.say("to the old one", old)
        assert (await app.operations.conversations.restore(OPERATOR, old)).session_id == old
        await app.ask("second")
        entries = await app.transcript()
        assert [entry["seq"] for entry in entries] == [1, 2, 3, 4]
        assert entries[2]["content"] == "second"
    async with open_app_fixture(tmp_path, echo) as app:
        assert (await app.operations.sessions.describe(OPERATOR, "main")).session_id == old


async def test_a_session_that_is_answering_is_not_renewed(tmp_path: Path) -> None:
    async def slow(prompt: Prompt) -> str:
        with pytest.raises(Conflict, match="or stop it"):
            await app.operations.conversations.renew(OPERATOR, "main")
        return "done"

    async with open_app_fixture(tmp_path, slow) as app:
        assert (await app.ask("hello")).state == "ok"


@pytest.mark.requirement("G32", "K2")
async def test_references_that_fit_several_sessions_list_them(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        keys = [f"agent:main:dashboard:{number}" for number in range(2)]
        for key in keys:
            await app.create(key)
        app.rows("UPDATE sessions SET label = 'twin'")
        with pytest.raises(Ambiguous) as caught:
            await app.operations.sessions.describe(OPERATOR, "twin")
        assert sorted(caught.value.data["candidates"]) == keys
        app.rows("UPDATE sessions SET label = 'only' WHERE key = ?", keys[0])
        assert (await app.operations.sessions.describe(OPERATOR, "only")).key == keys[0]


@pytest.mark.requirement("V3", "K2")
async def test_an_agent_sees_its_own_short_keys_and_no_other_sessions(tmp_path: Path) -> None:
    config = make_config({"agents": {"list": [{"id": "main"}, {"id": "other"}]}})
    async with open_app_fixture(tmp_path, echo, config=config) as app:
        await app.ask("hello")
        await app.ask("hello", "agent:other:main")
        caller = Caller.agent("main", MAIN)
        page = await app.operations.sessions.list(caller, ListFilter())
        assert [row.key for row in page.sessions] == ["main"]
        assert page.scope == "tree"
        hidden, absent = "agent:other:main", "agent:other:dashboard:9"
        errors: list[str] = []
        for reference in (hidden, absent):
            with pytest.raises(NotFound) as caught:
                await app.operations.transcripts.read(caller, reference, HistoryFilter())
            errors.append(str(caught.value).replace(reference, "…"))
        assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (IncomingMessage(session="main", content=""), InvalidInput, "message"),
        (IncomingMessage(session="main", content="\ud800"), InvalidInput, "message"),
        (IncomingMessage(session="main", content="x", idempotency_key=""), InvalidInput, "idempotencyKey"),
        (IncomingMessage(session="main", content="x", timeout_seconds=-1), InvalidInput, "timeoutSeconds"),
        (IncomingMessage(session="main", content="x", model="nobody/nothing"), UnknownModel, None),
        (IncomingMessage(session="global", content="x"), InvalidInput, None),
        (IncomingMessage(session="agent:nobody:main", content="x"), NotFound, None),
    ],
)
@pytest.mark.requirement("K3")
async def test_bad_input_names_the_field_and_changes_nothing(
    tmp_path: Path, message: IncomingMessage, error: type[Exception], field: str | None
) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        with pytest.raises(error) as caught:
            await app.operations.messages.submit(OPERATOR, message)
        assert getattr(caught.value, "data", {}).get("field") == field
        assert app.rows("SELECT * FROM sessions") == []


@pytest.mark.requirement("K3")
async def test_with_global_scope_every_main_is_the_one_session(tmp_path: Path) -> None:
    agents = {"list": [{"id": "a", "default": True}, {"id": "b"}]}
    config = make_config({"session": {"scope": "global"}, "agents": agents})
    async with open_app_fixture(tmp_path, echo, config=config) as app:
        await app.ask("one", "main")
        await app.ask("two", "agent:b:main")
        page = await app.operations.sessions.list(OPERATOR, ListFilter())
        assert [row.key for row in page.sessions] == ["main"]
        assert [entry["content"] for entry in await app.transcript("main")][::2] == ["one", "two"]


@pytest.mark.requirement("V1", "L1")
async def test_filtering_by_agent_keeps_what_was_spawned_below_the_caller(tmp_path: Path) -> None:
    config = make_config({"agents": {"list": [{"id": "main"}, {"id": "helper"}]}})
    child = "agent:helper:subagent:22222222-2222-2222-2222-222222222222"
    async with open_app_fixture(tmp_path, echo, config=config) as app:
        await app.create(MAIN)
        await app.create(child, MAIN)
        caller = Caller.agent("main", MAIN)
        for agent_id, expected in (("helper", [child]), ("MAIN", ["main"]), (None, [child, "main"])):
            page = await app.operations.sessions.list(caller, ListFilter(agent_id=agent_id))
            assert sorted(row.key for row in page.sessions) == sorted(expected), agent_id


@pytest.mark.requirement("V3", "G30")
async def test_a_child_is_not_told_of_a_parent_it_may_not_see(tmp_path: Path) -> None:
    parent = "agent:main:telegram:direct:+15550100"
    child = "agent:main:subagent:33333333-3333-3333-3333-333333333333"
    async with open_app_fixture(tmp_path, echo) as app:
        await app.create(parent)
        await app.create(child, parent)
        page = await app.operations.sessions.list(Caller.agent("main", child), ListFilter())
        assert [(row.key, row.parent_key) for row in page.sessions] == [(child, None)]
        page = await app.operations.sessions.list(Caller.agent("main", parent), ListFilter())
        assert {row.key: row.parent_key for row in page.sessions} == {parent: None, child: parent}


async def test_many_agents_can_be_seen_at_once(tmp_path: Path) -> None:
    ids = [f"a{number}" for number in range(120)]
    config = make_config(
        {
            "agents": {"list": [{"id": agent_id} for agent_id in ids]},
            "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True, "allow": ["a*"]}},
        }
    )
    async with open_app_fixture(tmp_path, echo, config=config) as app:
        for agent_id in [*ids, "hidden"]:
            await app.create(f"agent:{agent_id}:main")
        caller = Caller.agent("a0", "agent:a0:main")
        page = await app.operations.sessions.list(caller, ListFilter(limit=200, include_archived=True))
        assert {row.agent_id for row in page.sessions} == set(ids)


async def test_without_an_engine_nothing_is_queued(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("hello")
        lame = create_operations(app.operations.context.config, app.store, StateDir.open_unlocked(tmp_path))
        with pytest.raises(StoreReadOnly):
            await lame.messages.submit(OPERATOR, IncomingMessage(session="main", content="lost?"))
        assert len(app.rows("SELECT * FROM runs")) == 1


@pytest.mark.requirement("H1", "H2")
async def test_a_page_is_bounded_in_bytes_as_well(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.create(MAIN)
        for _ in range(10):
            await app.operations.transcripts.inject(OPERATOR, MAIN, "x" * 1_000_000)
        newest = await app.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter(limit=1000))
        assert [item["seq"] for item in newest.messages] == [7, 8, 9, 10]
        assert (newest.total, newest.has_more, newest.next_cursor) == (10, True, "7")
        oldest = await app.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter(limit=1000, after=0))
        assert [item["seq"] for item in oldest.messages] == [1, 2, 3, 4]
        assert (oldest.has_more, oldest.next_cursor) == (True, "4")
        rest = await app.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter(limit=1000, after=8))
        assert ([item["seq"] for item in rest.messages], rest.next_cursor) == ([9, 10], None)
