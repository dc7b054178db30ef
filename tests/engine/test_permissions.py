"""Permissions: in any configuration, a child has no more than its parent."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.access import Visibility, pick_narrower_visibility
from antiphon.config import Config
from antiphon.engine.collaboration import permissions
from antiphon.engine.collaboration.permissions import SubagentPermissions
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage
from antiphon.operations.operations import Operations
from antiphon.operations.types import SpawnRequest
from antiphon.runtimes import Prompt
from antiphon.state_access import open_store_exclusive
from antiphon.transfers.import_source import scan_source
from antiphon.transfers.imports import import_source
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    AgentsFixture,
    ScriptedAgent,
    get_last_user_text,
    get_phase,
    get_tool_result,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import make_tool, make_tool_calls

VISIBILITIES = st.sampled_from(get_args(Visibility))
NAMES = st.lists(st.sampled_from("abcdef"), unique=True).map(tuple)
ENVELOPES = st.builds(
    SubagentPermissions,
    tools=NAMES,
    agents=NAMES,
    read=VISIBILITIES,
    send=VISIBILITIES,
    depth=st.integers(0, 5),
)


def no_more(one: SubagentPermissions, other: SubagentPermissions) -> bool:
    return (
        set(one.tools) <= set(other.tools)
        and set(one.agents) <= set(other.agents)
        and pick_narrower_visibility(one.read, other.read) == one.read
        and pick_narrower_visibility(one.send, other.send) == one.send
        and one.depth <= max(0, other.depth - 1)
    )


@pytest.mark.requirement("SEC6")
@given(ENVELOPES, ENVELOPES, ENVELOPES)
def test_within_is_no_more_than_both_at_any_depth(
    child: SubagentPermissions, parent: SubagentPermissions, above: SubagentPermissions
) -> None:
    once = child.intersect(parent)
    assert no_more(once, parent)
    assert set(once.tools) <= set(child.tools) and once.depth <= child.depth
    assert no_more(once.intersect(above), above)


@pytest.mark.requirement("SEC6")
@given(ENVELOPES)
def test_an_envelope_is_stored_as_it_is(envelope: SubagentPermissions) -> None:
    assert permissions.decode_permissions(envelope.json_text) == envelope
    assert permissions.decode_permissions(None) is None


# --- in the house ---


OTHER_TOOLS = [
    *("edit", "apply_patch", "group:web", "group:runtime"),
    *("memory_search", "memory_get", "image", "cron", "message"),
]
"""Built-in tools besides those that `tools` replaces."""


def tools(operations: Operations) -> list[Tool]:
    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="looked")

    return [make_tool(name, look) for name in ("read", "write", "shell")]


def envelope_of(agents: AgentsFixture, key: str) -> SubagentPermissions:
    (row,) = agents.rows("SELECT envelope FROM sessions WHERE key = ?", key)
    stored = permissions.decode_permissions(row["envelope"])
    assert stored is not None
    return stored


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P3")
async def test_a_tool_that_the_parent_does_not_have_the_child_has_not_either(tmp_path: Path) -> None:
    helper = ScriptedAgent(".")
    config = make_agents_config(
        {
            "id": "main",
            "default": True,
            "tools": {"deny": ["shell"]},
            "subagents": {"allowAgents": ["helper"]},
        },
        {"id": "helper", "tools": {"deny": ["write"]}},
        tools={"deny": OTHER_TOOLS},
    )
    async with open_agents_fixture(config, tmp_path, functions={"helper": helper}, tools=tools) as agents:
        await agents.ask("hello", HELPER)
        assert "shell" in [spec.name for spec in helper.prompts[0].tools]
        said = await agents.call_tool("sessions_spawn", task="work", agentId="helper")
        await agents.wait_until_idle()
        (prompt,) = [prompt for prompt in helper.prompts if prompt.run_id == said["runId"]]
        assert [spec.name for spec in prompt.tools] == ["read"]


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "V1")
@pytest.mark.parametrize("mine", ["self", "tree", "agent", "all"])
async def test_a_child_reaches_no_more_than_its_parent_even_if_its_agent_may(
    tmp_path: Path, mine: str
) -> None:
    """The helper may see everything; a helper that `main` has spawned sees what `main` may."""
    reach = {"subagents": {"tools": {"alsoAllow": ["sessions_list", "sessions_send"]}}}
    config = make_agents_config(
        {
            "id": "main",
            "default": True,
            "tools": {"sessions": {"visibility": mine}},
            "subagents": {"allowAgents": ["helper"]},
        },
        "helper",
        "other",
        tools=reach,
    )
    seen: list[dict[str, Any]] = []

    def helper(prompt: Prompt) -> AssistantMessage | str:
        result = get_tool_result(prompt)
        if get_phase(prompt) != "request":
            return "."
        if result is None:
            return make_tool_calls("sessions_list")
        seen.append(result)
        if "sessions" in result:
            return make_tool_calls(
                "sessions_send", sessionKey="agent:other:main", message="say .", replyBack=0
            )
        return "done"

    async with open_agents_fixture(config, tmp_path, functions={"helper": ScriptedAgent(helper)}) as agents:
        await agents.open_sessions(HELPER, "agent:other:main", "agent:main:cron:job")
        said = await agents.call_tool("sessions_spawn", task="look", agentId="helper")
        await agents.wait_until_idle()
        keys = {row["key"] for row in seen[0]["sessions"]}
        assert said["childSessionKey"] in keys
        assert ("agent:other:main" in keys) == (mine == "all")
        assert ("main" in keys) == (mine == "all"), "its agent's other sessions are not its parent's"
        assert seen[1]["status"] == ("ok" if mine == "all" else "error")
        envelope = envelope_of(agents, said["childSessionKey"])
        assert pick_narrower_visibility(envelope.read, mine) == envelope.read  # pyright: ignore[reportArgumentType]


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P2")
async def test_down_a_tree_of_agents_an_envelope_only_shrinks(tmp_path: Path) -> None:
    """Each agent lists what the one before may not have; in the end there is hardly anything left."""
    config = make_agents_config(
        {
            "id": "main",
            "default": True,
            "tools": {"deny": ["shell"]},
            "subagents": {"allowAgents": ["helper", "other"]},
        },
        {"id": "helper", "tools": {"deny": ["write"]}, "subagents": {"allowAgents": ["*"]}},
        {"id": "other", "subagents": {"allowAgents": ["*"]}},
        "fourth",
        agents={"defaults": {"subagents": {"maxSpawnDepth": 3}}},
    )

    def deeper(prompt: Prompt) -> AssistantMessage | str:
        if get_phase(prompt) != "request" or (result := get_tool_result(prompt)):
            return "."
        del result
        following = {"main": "helper", "helper": "other", "other": "other"}[prompt.agent_id]
        may = "sessions_spawn" in [spec.name for spec in prompt.tools]
        return make_tool_calls("sessions_spawn", task="deeper", agentId=following) if may else "the end"

    functions = {name: ScriptedAgent(deeper) for name in ("main", "helper", "other")}
    async with open_agents_fixture(config, tmp_path, functions=functions, tools=tools) as agents:
        await agents.ask("go")
        await agents.wait_until_idle()
        rows = agents.rows("SELECT key, agent_id FROM sessions WHERE depth > 0 ORDER BY depth")
        assert [row["agent_id"] for row in rows] == ["helper", "other", "other"]
        chain = [envelope_of(agents, row["key"]) for row in rows]
        assert [envelope.depth for envelope in chain] == [2, 1, 0]
        assert all(no_more(below, above) for above, below in pairwise(chain))
        assert not {"shell", "write", "sessions_spawn"} & set(chain[-1].tools)
        assert all("fourth" not in envelope.agents for envelope in chain), "though theirs allow any"


@pytest.mark.anyio
@pytest.mark.requirement("SEC6")
async def test_what_is_granted_later_does_not_widen_a_child_that_is_there(tmp_path: Path) -> None:
    main = ScriptedAgent(".")
    narrow = make_agents_config(tools={"deny": ["write", *OTHER_TOOLS], "sessions": {"visibility": "tree"}})
    async with open_agents_fixture(narrow, tmp_path, functions={"main": main}, tools=tools) as agents:
        await agents.open_sessions(MAIN)
        child = (await agents.use("sessions_spawn", task="work"))["childSessionKey"]
        await agents.wait_until_idle()
        before = envelope_of(agents, child)
    wide = make_agents_config(tools={"subagents": {"tools": {"alsoAllow": ["*"]}}})
    async with open_agents_fixture(wide, tmp_path, functions={"main": main}, tools=tools) as agents:
        await agents.ask("still you?", child)
        assert get_last_user_text(main.prompts[-1]) == "still you?"
        assert [spec.name for spec in main.prompts[-1].tools] == ["read", "shell"]
        assert envelope_of(agents, child) == before
    nothing = make_agents_config(tools={"deny": ["read"]})
    async with open_agents_fixture(nothing, tmp_path, functions={"main": main}, tools=tools) as agents:
        await agents.ask("and now?", child)
        assert [spec.name for spec in main.prompts[-1].tools] == ["shell"], (
            "what is taken away is gone at once"
        )


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P2")
async def test_an_operators_child_is_within_its_requesters_envelope_too(tmp_path: Path) -> None:
    config = make_agents_config(
        {"id": "main", "default": True, "tools": {"deny": ["shell"]}}, "helper", tools={"deny": OTHER_TOOLS}
    )
    async with open_agents_fixture(config, tmp_path, tools=tools) as agents:
        spawned = await agents.operations.subagents.spawn(
            OPERATOR, SpawnRequest(task="say .", agent_id="main")
        )
        await agents.wait_until_idle()
        envelope = envelope_of(agents, spawned.child_session_key)
        assert envelope.tools == ("read", "write") and envelope.depth == 0


ORPHAN = "agent:main:subagent:1d9f7e0c-0000-4000-8000-000000000003"


async def _imported(path: Path, config: Config) -> None:
    """As another program left it; its parent does not exist here."""
    source = path / "old"
    source.mkdir()
    entry = {"sessionId": "s", "subagentRole": "orchestrator", "spawnedBy": "agent:gone:main"}
    source.joinpath("sessions.json").write_text(json.dumps({ORPHAN: entry}))
    async with open_store_exclusive(config, path) as store:
        assert (await import_source(store, config, scan_source(source, config), 1)).imported == 1


@pytest.mark.anyio
@pytest.mark.requirement("P3", "SEC6", "003-spawn-tools", "003-spawn-tools-config")
@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("also", [[], ["sessions_spawn", "agents_list"]])
async def test_a_sub_agent_that_was_not_spawned_here_has_the_tools_of_a_leaf(
    tmp_path: Path, imported: bool, also: list[str]
) -> None:
    main = ScriptedAgent(".")
    config = make_agents_config(
        "helper",
        agents={"defaults": {"subagents": {"maxSpawnDepth": 3, "allowAgents": ["*"]}}},
        tools={"deny": OTHER_TOOLS, "subagents": {"tools": {"alsoAllow": also, "deny": ["write"]}}},
    )
    if imported:
        await _imported(tmp_path, config)
    async with open_agents_fixture(config, tmp_path, functions={"main": main}, tools=tools) as agents:
        await agents.ask("hello", ORPHAN)
        has = {"read", "shell", *also} - {"sessions_spawn"}
        assert {spec.name for spec in main.prompts[0].tools} == has
        assert set((await agents.operations.sessions.describe_actor(OPERATOR, ORPHAN)).actor.tools) == has
        assert (await agents.use("agents_list", ORPHAN))["agents"] == []
        assert (await agents.use("sessions_spawn", ORPHAN, task="more"))["reason"] == "depth"
        (row,) = agents.rows("SELECT depth, role FROM sessions WHERE key = ?", ORPHAN)
        assert (row["depth"], row["role"]) == (1, "orchestrator" if imported else "leaf")
