"""agents_list, session_status and sessions_search: what the other tools would do, how it is, where it was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon import access, keys
from antiphon.access import Caller, TargetSession
from antiphon.engine.outbox.redaction import redact
from antiphon.engine.sessions import search
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import Forbidden
from antiphon.messages import AssistantMessage, Cost, TokenUsage
from antiphon.runtimes import Prompt
from antiphon.store.fulltext import FulltextQuery, split_words
from support.app_fixture import MAIN, OPERATOR, make_answer, make_config, open_app_fixture
from support.tool_calls import (
    MAIN_AGENT,
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

OTHER = "agent:helper:main"
KEY = "sk-abcdefghijklmnopqrstuvwxyz0123456789"


def household(*allowed: str) -> dict[str, Any]:
    return {
        "agents": {
            "list": [
                {"id": "zoe", "name": "Zoë", "runtime": {"type": "function", "target": "json:dumps"}},
                {"id": "main", "default": True, "subagents": {"allowAgents": list(allowed)}},
                {"id": "adam", "identity": {"name": "Adam"}},
            ]
        }
    }


@pytest.mark.requirement("A1", "G31")
@pytest.mark.parametrize(
    ("allowed", "listed", "allow_any"),
    [
        ([], ["main"], False),
        (["zoe", "nobody"], ["main", "zoe"], False),
        (["*"], ["main", "adam", "zoe"], True),
        (["A*"], ["main", "adam"], False),
    ],
)
async def test_agents_list_is_what_spawning_accepts(
    tmp_path: Path, allowed: list[str], listed: list[str], allow_any: bool
) -> None:
    config = make_config(household(*allowed))
    async with open_app_fixture(tmp_path, answer_briefly, config=config) as app:
        result = await call_tool(app, "agents_list")
        assert set(result) == {"requester", "allowAny", "agents", "hint"}
        assert (result["requester"], result["allowAny"]) == ("main", allow_any)
        assert [agent["id"] for agent in result["agents"]] == listed
        assert all(agent["configured"] is True for agent in result["agents"])
        grants = SessionResolver(config).get_grants(MAIN_AGENT)
        for agent_id in ("main", "zoe", "adam", "nobody"):
            target = TargetSession(str(keys.main_session_key(agent_id)), agent_id)
            try:
                access.authorize(MAIN_AGENT, "spawn", target, grants, configured=config.agent_ids)
                accepted = True
            except Forbidden:
                accepted = False
            assert accepted == (agent_id in listed)


@pytest.mark.requirement("A1")
async def test_an_operator_sees_every_agent_and_what_answers_for_it(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly, config=make_config(household())) as app:
        result = await call_tool(app, "agents_list", OPERATOR)
        assert (result["requester"], result["allowAny"]) == ("main", True)
        main, adam, zoe = result["agents"]
        may = {"canSpawn": True, "canMessage": True}
        assert main == {
            "id": "main", "configured": True, "model": "rehearsal/rehearsal", "runtime": "model", **may
        }  # fmt: skip
        assert adam["name"] == "Adam"
        assert zoe == {"id": "zoe", "configured": True, "name": "Zoë", "runtime": "function", **may}


@pytest.mark.requirement("A1", "V1")
@pytest.mark.parametrize(
    ("tools", "spawn", "messages"),
    [
        ({}, [], []),
        ({"agentToAgent": {"enabled": True}}, [], []),
        ({"sessions": {"visibility": "all"}}, [], []),
        ({"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}, ["zoe"], ["adam", "zoe"]),
        (
            {"sessions": {"send": "all"}, "agentToAgent": {"enabled": True, "allow": ["main", "a*"]}},
            [],
            ["adam"],
        ),
    ],
)
async def test_agents_list_says_whom_the_caller_can_message_and_spawn(
    tmp_path: Path, tools: dict[str, Any], spawn: list[str], messages: list[str]
) -> None:
    config = make_config({**household(*spawn), "tools": tools})
    async with open_app_fixture(tmp_path, answer_briefly, config=config) as app:
        result = await call_tool(app, "agents_list")
        listed = {agent["id"]: agent for agent in [*result["agents"], *result.get("messageOnly", [])]}
        assert [name for name, agent in listed.items() if agent["canSpawn"]] == ["main", *spawn]
        assert sorted(name for name, agent in listed.items() if agent["canMessage"]) == messages
        assert [agent["id"] for agent in result["agents"]] == ["main", *spawn]
        assert ("hint" in result) is not bool(messages)
        if not messages:
            assert "'tools.agentToAgent.enabled'" in result["hint"] and "adam" not in str(result)


@pytest.mark.requirement("A2")
async def test_status_shows_what_runs_and_what_waits(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    async def curious(prompt: Prompt) -> str:
        if not seen:
            await app.say("next")
            seen.append(await call_tool(app, "session_status"))
        return "done"

    async with open_app_fixture(tmp_path, curious) as app:
        run_id = await app.say("hello")
        await app.wait_for_end(run_id)
        status = seen[0]
        assert set(status) == {"ok", "sessionKey", "session", "runs", "usage", "statusText"}
        assert (status["sessionKey"], status["session"]["state"]) == ("main", "running")
        active, waiting = status["runs"]
        assert (active["runId"], active["state"]) == (run_id, "running")
        assert (waiting["state"], waiting["position"]) == ("queued", 1)
        assert "running for 0 s · 1 waiting" in status["statusText"]
        assert "sessionKey" not in active


@pytest.mark.requirement("A2")
async def test_status_is_of_the_current_session_unless_another_is_named(tmp_path: Path) -> None:
    async def costly(prompt: Prompt) -> AssistantMessage:
        cost = Cost(total=0.25)
        return make_answer(
            "done", usage=TokenUsage(input=10, output=5, total_tokens=15, cost=cost), model="m"
        )

    async with open_app_fixture(tmp_path, costly) as app:
        await app.ask("hello")
        await app.create("agent:main:cron:1", MAIN)
        own = await call_tool(app, "session_status")
        assert (own["sessionKey"], own["session"]["sessionId"]) == (
            "main",
            (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id,
        )
        assert (own["runs"], [line["calls"] for line in own["usage"]]) == ([], [1])
        assert "modelOverride" not in own["session"]
        assert "\nTokens: 10 in, 5 out" in own["statusText"]
        assert "\nCost: $0.2500\n" in own["statusText"]
        assert own["statusText"].startswith("Session: main · agent main\nState: idle\n")
        assert (await call_tool(app, "session_status", sessionKey="cron:1"))["sessionKey"] == "cron:1"
        assert (await call_tool(app, "session_status", OPERATOR))["sessionKey"] == MAIN
        assert (
            "There is no argument 'model'"
            in (await call_refused_tool(app, "session_status", model="x"))["error"]
        )
        assert "empty" in (await call_refused_tool(app, "session_status", sessionKey=""))["error"].lower()


@pytest.mark.requirement("A2", "V3")
async def test_search_finds_what_may_be_read_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        search, "SEARCH_BUDGET_SECONDS", 60.0
    )  # how fast this machine is just now is not the question
    config = {"agents": {"list": [{"id": "main"}, {"id": "helper"}]}}
    async with open_app_fixture(tmp_path, answer_briefly, config=make_config(config)) as app:
        own, other = await app.create(MAIN), await app.create(OTHER)
        await append_messages(
            app, own, make_user_message("the quick brown fox"), make_tool_result("a fox in a box")
        )
        await append_messages(app, other, make_assistant_message("no fox here"))
        result = await call_tool(app, "sessions_search", query="fox")
        assert (result["count"], "truncated" in result, "indexing" in result) == (2, False, False)
        assert {hit["sessionKey"] for hit in result["results"]} == {"main"}
        assert set(result["results"][0]) == {
            "sessionKey", "sessionId", "messageId", "seq", "role", "timestamp", "snippet", "score"
        }  # fmt: skip
        alone = await call_tool(app, "sessions_search", query="fox", includeTools=False)
        assert [hit["role"] for hit in alone["results"]] == ["user"]
        assert (await call_tool(app, "sessions_search", query="fox", agentId="helper"))["count"] == 0
        assert (await call_tool(app, "sessions_search", OPERATOR, query="fox"))["count"] == 3
        assert (await call_tool(app, "sessions_search", query="fox", limit=-3))["count"] == 1
        assert "query is empty" in (await call_refused_tool(app, "sessions_search", query=" "))["error"]
        assert "'query' is missing" in (await call_refused_tool(app, "sessions_search"))["error"]
    async with open_app_fixture(
        tmp_path, answer_briefly, config=make_config({**config, **OPEN_ACCESS})
    ) as app:
        hits = (await call_tool(app, "sessions_search", query="fox"))["results"]
        assert [hit["sessionKey"] for hit in hits] == [OTHER, "main", "main"]


@pytest.mark.requirement("A2")
async def test_at_most_twenty_five_are_found_and_that_is_said(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        await append_messages(
            app, await app.create(MAIN), *(make_user_message(f"fox {number}") for number in range(30))
        )
        assert (await call_tool(app, "sessions_search", query="fox"))["count"] == 10
        result = await call_tool(app, "sessions_search", query="fox", limit=1000)
        assert (result["count"], result["truncated"]) == (25, True)


@pytest.mark.requirement("A2", "H3")
async def test_a_snippet_never_shows_a_secret_not_even_half_of_one(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        for gap in range(120, 260, 7):
            await append_messages(app, row, make_user_message(f"needle {'x' * gap} {KEY} {'y ' * 100}"))
        hits = (await call_tool(app, "sessions_search", query="needle", limit=25))["results"]
        assert hits and KEY[6:16] not in json.dumps(hits)
        by_secret = await call_tool(
            app, "sessions_search", query="abcdefghijklmnopqrstuvwxyz0123456789", limit=25
        )
        assert by_secret["count"] == 0, "nor is it found by what is not shown"
        assert "needle" in (await call_tool(app, "sessions_search", query="needle"))["results"][0]["snippet"]


async def test_a_caller_of_an_agent_that_is_gone_is_told(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        gone = Caller.agent("gone", "agent:gone:main")
        assert "no agent 'gone'" in (await call_refused_tool(app, "agents_list", gone))["error"]


SECRET_WORDS = st.text("abcdefghkmnpqrstuvwxyz23456789", min_size=4, max_size=24)
SECRET_CARRIERS = st.sampled_from(
    ["DB_PASSWORD={}", 'API_TOKEN="{}"', "https://x.test/?api_key={}", "--password {}", '{{"secret": "{}"}}']
)


@pytest.mark.sqlite_only
@pytest.mark.requirement("A2", "H3")
@settings(max_examples=200)
@given(secret=SECRET_WORDS, carrier=SECRET_CARRIERS, length=st.integers(1, 24))
def test_no_part_of_a_masked_secret_matches_but_what_the_mask_shows(
    secret: str, carrier: str, length: int
) -> None:
    text = f"zzz {carrier.format(secret)} zzz"
    masked = redact(text)
    assert secret not in masked
    guess = secret[:length]
    asked = FulltextQuery("words", [guess], beginning=True)
    assert asked.matches(text)
    assert asked.matches(masked) == any(word.startswith(guess) for word in split_words(masked))
    assert FulltextQuery("words", ["zzz"], either=["zzz"]).matches(masked)


@pytest.mark.requirement("A2", "H3")
async def test_a_masked_secret_cannot_be_found_letter_by_letter(tmp_path: Path) -> None:
    secret = "hunter2correct"
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        row = await app.create(MAIN)
        spoken = [make_user_message(f"the DB_PASSWORD={secret} for entry {number}") for number in range(4)]
        await append_messages(app, row, make_user_message("a hunter2 in plain sight"), *spoken)
        for length in range(3, len(secret) + 1):
            for query in (secret[:length], f'"password {secret[:length]}"', f"password {secret[:length]}"):
                found = await call_tool(app, "sessions_search", query=query, limit=1)
                snippets = [hit["snippet"] for hit in found["results"]]
                plain = "hunter2".startswith(query)
                assert snippets == (["a hunter2 in plain sight"] if plain else []), query
                assert "truncated" not in found
        found = await call_tool(app, "sessions_search", query="password entry")
        assert [hit["snippet"] for hit in found["results"]] == [
            f"the DB_PASSWORD=*** for entry {number}" for number in (3, 2, 1, 0)
        ]
