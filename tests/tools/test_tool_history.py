"""sessions_history: bounded and masked on the way out, exact by its cursors, and silent about what may not be known."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.access import Caller
from antiphon.messages import (
    AssistantMessage,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.tools._bounds import MAX_HISTORY_RESULT_BYTES, bound_entry
from support.app_fixture import MAIN, OPERATOR, AppFixture, make_config, open_app_fixture
from support.tool_calls import (
    MAIN_AGENT,
    NOW,
    OPEN_ACCESS,
    answer_briefly,
    append_messages,
    call_refused_tool,
    call_tool,
    make_assistant_message,
    make_tool_result,
    make_user_message,
)

pytestmark = pytest.mark.anyio

KEY = "sk-abcdefghijklmnopqrstuvwxyz0123456789"
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RESULT = set(
    [
        "sessionKey",
        "sessionId",
        "messages",
        "truncated",
        "droppedMessages",
        "contentTruncated",
        "contentRedacted",
        "bytes",
        "total",
        "hasMore",
        "nextCursor",
    ]
)


@pytest.mark.requirement("H1", "H2", "H3", "K2", "003-history-no-tool-results", "003-history-raw")
async def test_a_page_is_raw_and_says_everything_about_itself(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        await append_messages(
            app,
            row,
            make_user_message("one"),
            make_assistant_message("two"),
            make_tool_result("three"),
            make_assistant_message("four"),
        )
        page = await call_tool(app, "sessions_history", sessionKey="main")
        assert set(page) == RESULT
        assert [(item["seq"], item["role"]) for item in page["messages"]] == [
            (1, "user"), (2, "assistant"), (4, "assistant")
        ]  # fmt: skip
        stored = await app.transcript()
        assert page["messages"] == [item for item in stored if item["role"] != "toolResult"]
        assert (page["sessionKey"], page["total"]) == ("main", 4)
        assert (page["hasMore"], page["nextCursor"]) == (False, None)
        assert (page["truncated"], page["droppedMessages"]) == (False, 0)
        assert (page["contentTruncated"], page["contentRedacted"]) == (False, False)
        compact = json.dumps(page["messages"], ensure_ascii=False, separators=(",", ":"))
        assert page["bytes"] == len(compact.encode())
        with_tools = await call_tool(app, "sessions_history", sessionKey=page["sessionId"], includeTools=True)
        assert [item["seq"] for item in with_tools["messages"]] == [1, 2, 3, 4]
        assert (await call_tool(app, "sessions_history", sessionKey="current")) == page
        operator = await call_tool(app, "sessions_history", OPERATOR, sessionKey="main")
        assert operator == {**page, "sessionKey": MAIN}


@pytest.mark.requirement("H1")
async def test_limits_are_clamped_and_places_exclude_each_other(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        await append_messages(app, row, *(make_user_message(str(number)) for number in range(1, 251)))

        async def seqs(**arguments: Any) -> list[int]:
            page = await call_tool(app, "sessions_history", sessionKey="main", **arguments)
            return [item["seq"] for item in page["messages"]]

        assert await seqs() == list(range(201, 251))
        assert await seqs(limit=0) == [250]
        assert await seqs(limit="9999") == list(range(51, 251))
        assert await seqs(before=3) == [1, 2]
        assert await seqs(after=248) == [249, 250]
        assert await seqs(after=0, limit=2) == [1, 2]
        assert await seqs(cursor="3") == [1, 2]
        assert await seqs(cursor="after:3", limit=1) == [4]
        assert await seqs(before=0) == []
        for wrong in ({"before": 1, "after": 2}, {"cursor": "1", "before": 2}):
            assert (
                "only one"
                in (await call_refused_tool(app, "sessions_history", sessionKey="main", **wrong))["error"]
            )
        for cursor in ("x", "-1", "1e3", "after:", "9" * 40, "٣"):
            wrong = {"sessionKey": "main", "cursor": cursor}
            assert "nextCursor" in (await call_refused_tool(app, "sessions_history", **wrong))["error"]
        assert (
            "'before'"
            in (await call_refused_tool(app, "sessions_history", sessionKey="main", before=2**70))["error"]
        )


@pytest.mark.requirement("H3", "003-history-raw")
async def test_texts_are_cut_and_what_is_not_for_models_is_left_out(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        steps = AssistantMessage(
            content=[
                ThinkingBlock(thinking="t" * 5000, thinking_signature="s", native={"a": 1}),
                TextBlock(text="short", native={"a": 1}),
                ToolCall(id="c1", name="write", arguments={"details": {"body": "b" * 5000}, "native": 1}),
            ],
            timestamp=NOW,
            native={"a": 1},
        )
        result = ToolResult(
            tool_call_id="c1",
            tool_name="write",
            content=[ImageBlock(data="QUJD", mime_type="image/png")],
            timestamp=NOW,
            details={"a": 1},
        )
        await append_messages(app, row, steps, result)
        page = await call_tool(app, "sessions_history", sessionKey="main", includeTools=True)
        first, second = page["messages"]
        thinking, text, call = first["content"]
        assert thinking == {"type": "thinking", "thinking": "t" * 4000 + "\n…(truncated)…"}
        assert text == {"type": "text", "text": "short"}
        assert call["arguments"] == {"details": {"body": "b" * 4000 + "\n…(truncated)…"}, "native": 1}
        assert "native" not in first
        assert second["content"] == [{"type": "image", "mimeType": "image/png", "omitted": True, "bytes": 3}]
        assert "details" not in second
        assert (page["truncated"], page["contentTruncated"], page["droppedMessages"]) == (True, True, 0)
        assert (await app.transcript())[0]["native"] == {"a": 1}


@pytest.mark.requirement("H3", "003-history-raw")
async def test_secrets_are_masked_on_the_way_out_and_kept_in_the_store(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        call = ToolCall(id="c", name="login", arguments={"password": "tr0ub4dor", "user": ["ann", KEY]})
        await append_messages(
            app, row, make_user_message(f"my key is {KEY}"), AssistantMessage(content=[call], timestamp=NOW)
        )
        await append_messages(
            app, row, make_user_message("x" * 3990 + KEY), make_user_message("y" * 70_000 + KEY)
        )
        page = await call_tool(app, "sessions_history", sessionKey="main")
        assert page["contentRedacted"]
        text = json.dumps(page)
        assert KEY not in text
        assert KEY[6:20] not in text
        assert "tr0ub4dor" not in text
        assert "ann" in text
        assert KEY in json.dumps(await app.transcript())
        rows = await call_tool(app, "sessions_list", messageLimit=4)
        assert KEY[6:20] not in json.dumps(rows)


@pytest.mark.requirement("H3")
def test_no_cut_shows_half_a_secret() -> None:
    block = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQIBADANBgkq\n" * 190 + "-----END PRIVATE KEY-----\n"
    for length in range(15_000, 40_000, 777):
        text = (block * 30)[:length]
        shown = bound_entry({"role": "user", "content": text, "seq": 1}, MAX_HISTORY_RESULT_BYTES)
        assert "MIIEvQ" not in shown.message["content"]


@pytest.mark.requirement("H3")
async def test_the_newest_are_kept_and_the_cursor_leads_to_what_was_dropped(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        await append_messages(
            app, row, *(make_user_message(f"{number:04}" * 1000) for number in range(1, 31))
        )
        page = await call_tool(app, "sessions_history", sessionKey="main")
        assert page["bytes"] <= MAX_HISTORY_RESULT_BYTES
        kept = [item["seq"] for item in page["messages"]]
        assert kept == list(range(31 - len(kept), 31))
        assert (page["droppedMessages"], page["truncated"], page["hasMore"]) == (30 - len(kept), True, True)
        assert page["nextCursor"] == str(kept[0])
        forward = await call_tool(app, "sessions_history", sessionKey="main", after=0)
        assert [item["seq"] for item in forward["messages"]] == list(range(1, len(kept) + 1))
        assert forward["nextCursor"] == f"after:{len(kept)}"


@pytest.mark.requirement("H3")
async def test_a_message_that_is_too_large_leaves_a_placeholder(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        huge = UserMessage(content=[TextBlock(text="x" * 4000) for _ in range(30)], timestamp=NOW)
        await append_messages(app, row, make_user_message("before"), huge, make_user_message("after"))
        page = await call_tool(app, "sessions_history", sessionKey="main")
        stored = (await app.transcript())[1]
        first, large, last = page["messages"]
        assert (first["content"], last["content"]) == ("before", "after")
        assert {name: large[name] for name in ("id", "seq", "role")} == {
            name: stored[name] for name in ("id", "seq", "role")
        }
        assert large["omitted"] is True
        assert (page["contentTruncated"], page["droppedMessages"]) == (True, 0)


async def test_entries_of_any_shape_can_be_shown(tmp_path: Path) -> None:
    deep = "[" * 400 + "]" * 400
    bodies = [
        "not json",
        '{"role": "user"}',
        '{"role": "user", "content": [1, null, ["x"], {"type": "image", "data": 5}]}',
        f'{{"role": "user", "content": {deep}}}',
        f'{{"role": "user", "content": {"[" * 200_000}{"]" * 200_000}}}',
    ]
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        await append_messages(app, row, *(make_user_message("x") for _ in bodies))
        for seq, body in enumerate(bodies, 1):
            app.rows("UPDATE messages SET body = ? WHERE seq = ?", body, seq)
        page = await call_tool(app, "sessions_history", sessionKey="main")
        assert [item["seq"] for item in page["messages"]] == [1, 2, 3, 4, 5]
        assert len((await call_tool(app, "sessions_list", messageLimit=5))["sessions"][0]["messages"]) == 5


# --- exactness ---

SIZES = st.lists(st.sampled_from([1, 500, 3999, 4001, 30_000, 130_000]), min_size=1, max_size=40)


@pytest.mark.requirement("H3", "H4")
@SLOW
@given(sizes=SIZES, limit=st.integers(1, 60), forward=st.booleans(), tools=st.booleans())
def test_following_the_cursors_gives_every_entry_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, forward: bool, tools: bool
) -> None:
    asyncio.run(_followed(tmp_path_factory.mktemp("follow"), sizes, limit, forward, tools))


async def _followed(path: Path, sizes: list[int], limit: int, forward: bool, tools: bool) -> None:
    async with open_app_fixture(path, answer_briefly) as app:
        row = await app.create(MAIN)
        await append_messages(app, row, *(_entry(number, size) for number, size in enumerate(sizes)))
        growing = asyncio.create_task(
            append_messages(app, row, *(_entry(number, 700) for number in range(20)))
        )
        pages: list[list[dict[str, Any]]] = []
        place: dict[str, Any] = {"after": 0} if forward else {}
        wanted = {"sessionKey": "main", "limit": limit, "includeTools": tools}
        while True:
            grown = growing.done()
            page = await call_tool(app, "sessions_history", **wanted, **place)
            assert page["bytes"] <= MAX_HISTORY_RESULT_BYTES
            pages.append(page["messages"])
            if page["hasMore"]:
                place = {"cursor": page["nextCursor"]}
            elif not forward or grown:
                break
            elif page["messages"]:  # what comes next is not there yet
                place = {"after": page["messages"][-1]["seq"]}
        await growing
        entries = [item for page in (pages if forward else reversed(pages)) for item in page]
        newest = entries[-1]["seq"] if entries and not forward else math.inf  # it leads back from there
        stored = [item for item in await app.transcript() if tools or item["role"] != "toolResult"]
        _same(entries, [item for item in stored if item["seq"] <= newest])


def _same(entries: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    assert [item["seq"] for item in entries] == [item["seq"] for item in stored]
    for shown, kept in zip(entries, stored, strict=True):
        assert shown["id"] == kept["id"]
        assert shown.get("omitted") or len(json.dumps(kept)) > 3000 or shown == kept


def _entry(number: int, size: int) -> UserMessage | ToolResult:
    if number % 3 == 2:
        return make_tool_result("r" * size)
    if size > 100_000:  # too large even when each of its texts was cut
        return UserMessage(content=[TextBlock(text="p" * 4000) for _ in range(size // 4000)], timestamp=NOW)
    return make_user_message("m" * size)


# --- who may see what ---

OTHER = "agent:helper:main"


@pytest.mark.requirement("H5", "SEC5", "V1")
async def test_unknown_and_invisible_sessions_look_alike(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        await app.create(MAIN)
        hidden = await app.create(OTHER)
        app.rows("UPDATE sessions SET label = 'secret plans' WHERE key = ?", OTHER)
        for tool in ("sessions_history", "session_status"):
            for real, made_up in (
                (OTHER, "agent:helper:cron:1"),
                (hidden["session_id"], "00000000-0000-0000-0000-000000000000"),
                ("secret plans", "public plans"),
                ("agent:main:cron:1", "agent:main:cron:2"),
            ):
                seen = await call_refused_tool(app, tool, sessionKey=real)
                unseen = await call_refused_tool(app, tool, sessionKey=made_up)
                assert seen["status"] == unseen["status"] == "error"
                assert seen["error"].replace(real, "…") == unseen["error"].replace(made_up, "…")
                assert (
                    "sessions_list" in seen["error"]
                    and "this session and the sub-agents below it" in seen["error"]
                )
                assert "tools.sessions.visibility (in effect: 'tree')" in seen["error"]
                assert "tools.agentToAgent (off)" in seen["error"]
        for real, made_up in ((OTHER, "agent:nobody:main"), (hidden["session_id"], "agent:no:cron:1")):
            seen = await call_refused_tool(app, "sessions_search", query="x", sessionKey=real)
            unseen = await call_refused_tool(app, "sessions_search", query="x", sessionKey=made_up)
            assert seen["error"].replace(real, "…") == unseen["error"].replace(made_up, "…")


@pytest.mark.requirement("H5")
async def test_what_a_token_does_not_grant_is_forbidden(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        await app.create(MAIN)
        nobody = Caller.operator([])
        assert (await call_refused_tool(app, "sessions_history", nobody, sessionKey="main"))[
            "status"
        ] == "forbidden"
        assert (await call_refused_tool(app, "sessions_list", nobody))["status"] == "forbidden"


AGENTS = ("main", "helper", "third")
LINEAGES = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.none() | st.integers(0, 11)), min_size=1, max_size=12
)


@pytest.mark.requirement("V1", "V2", "V3", "SEC5", "K2", "003-history-session-id")
@SLOW
@given(
    lineage=LINEAGES,
    who=st.integers(0, 11),
    visibility=st.sampled_from(["self", "tree", "agent", "all"]),
    crossing=st.sampled_from([None, [], ["main", "helper"], ["*"]]),
    sandboxed=st.booleans(),
)
def test_listed_if_and_only_if_readable(
    tmp_path_factory: pytest.TempPathFactory,
    lineage: list[tuple[str, int | None]],
    who: int,
    visibility: str,
    crossing: list[str] | None,
    sandboxed: bool,
) -> None:
    a2a = {"enabled": crossing is not None, "allow": crossing or []}
    config = {
        "agents": {"list": [{"id": agent} for agent in AGENTS]},
        "tools": {"sessions": {"visibility": visibility}, "agentToAgent": a2a},
    }
    path = tmp_path_factory.mktemp("visible")
    asyncio.run(_listed_if_readable(path, config, lineage, who % len(lineage), sandboxed))


async def _listed_if_readable(
    path: Path, config: dict[str, Any], lineage: list[tuple[str, int | None]], who: int, sandboxed: bool
) -> None:
    async with open_app_fixture(path, answer_briefly, config=make_config(config)) as app:
        rows: list[Any] = []
        for number, (agent, parent) in enumerate(lineage):
            above = rows[parent]["key"] if parent is not None and parent < number else None
            rows.append(await app.create(f"agent:{agent}:cron:{number}", above))
        me = Caller.agent(lineage[who][0], rows[who]["key"], sandboxed=sandboxed)
        result = await call_tool(app, "sessions_list", me, limit=200)
        listed = {row["sessionId"]: row for row in result["sessions"]}
        assert result["count"] + result.get("hiddenCount", 0) == len(rows)
        for row in rows:
            await _agrees(app, me, row, listed.get(row["session_id"]))


async def _agrees(app: AppFixture, me: Caller, row: Any, shown: dict[str, Any] | None) -> None:
    if shown is None:
        for reference in (row["key"], row["session_id"]):
            refusal = await call_refused_tool(app, "sessions_history", me, sessionKey=reference)
            assert refusal["error"].startswith(f"Session {reference!r} was not found.")
            assert refusal["status"] == "error"
        return
    own = row["key"].startswith(f"agent:{me.agent_id}:")
    assert shown["key"] == (row["key"].removeprefix(f"agent:{me.agent_id}:") if own else row["key"])
    for reference in (shown["key"], row["key"], row["session_id"]):
        page = await call_tool(app, "sessions_history", me, sessionKey=reference)
        assert (page["sessionKey"], page["sessionId"]) == (shown["key"], row["session_id"])


@pytest.mark.requirement("V1")
async def test_another_agents_session_is_shown_with_its_full_key(tmp_path: Path) -> None:
    config = make_config({**OPEN_ACCESS, "agents": {"list": [{"id": "main"}, {"id": "helper"}]}})
    async with open_app_fixture(tmp_path, answer_briefly, config=config) as app:
        await app.create(MAIN)
        await append_messages(app, await app.create(OTHER), make_user_message("hello"))
        page = await call_tool(app, "sessions_history", MAIN_AGENT, sessionKey=OTHER)
        assert (page["sessionKey"], page["messages"][0]["content"]) == (OTHER, "hello")
