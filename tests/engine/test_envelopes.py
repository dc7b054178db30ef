"""Envelopes: whatever is configured and whoever spawns whom, a child has no more than its parent."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.access import Visibility, narrower
from antiphon.config import Config
from antiphon.engine import envelopes
from antiphon.engine.envelopes import Envelope
from antiphon.engine.toolbox import Call, Result, Tool
from antiphon.messages import Assistant
from antiphon.operations import Operations, Spawn
from antiphon.runtimes import Prompt
from antiphon.transfers.imports import look, take
from antiphon.visits import keeping
from stage import calls, tool
from tools.troupe import HELPER, MAIN, OPERATOR, Player, Troupe, cast_of, heard, house, phase_of, result_in

VISIBILITIES = st.sampled_from(get_args(Visibility))
NAMES = st.lists(st.sampled_from("abcdef"), unique=True).map(tuple)
ENVELOPES = st.builds(
    Envelope, tools=NAMES, agents=NAMES, read=VISIBILITIES, send=VISIBILITIES, depth=st.integers(0, 5)
)


def no_more(one: Envelope, other: Envelope) -> bool:
    return (
        set(one.tools) <= set(other.tools)
        and set(one.agents) <= set(other.agents)
        and narrower(one.read, other.read) == one.read
        and narrower(one.send, other.send) == one.send
        and one.depth <= max(0, other.depth - 1)
    )


@pytest.mark.requirement("SEC6")
@given(ENVELOPES, ENVELOPES, ENVELOPES)
def test_within_is_no_more_than_both_at_any_depth(child: Envelope, parent: Envelope, above: Envelope) -> None:
    once = child.within(parent)
    assert no_more(once, parent)
    assert set(once.tools) <= set(child.tools) and once.depth <= child.depth
    assert no_more(once.within(above), above)


@pytest.mark.requirement("SEC6")
@given(ENVELOPES)
def test_an_envelope_is_stored_as_it_is(envelope: Envelope) -> None:
    assert envelopes.read(envelope.text) == envelope
    assert envelopes.read(None) is None


# --- in the house ---


def tools(operations: Operations) -> list[Tool]:
    async def look(call: Call) -> Result:
        return Result(text="looked")

    return [tool(name, look) for name in ("read", "write", "shell")]


def envelope_of(troupe: Troupe, key: str) -> Envelope:
    (row,) = troupe.rows("SELECT envelope FROM sessions WHERE key = ?", key)
    stored = envelopes.read(row["envelope"])
    assert stored is not None
    return stored


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P3")
async def test_a_tool_that_the_parent_does_not_have_the_child_has_not_either(tmp_path: Path) -> None:
    helper = Player(".")
    config = cast_of(
        {
            "id": "main",
            "default": True,
            "tools": {"deny": ["shell"]},
            "subagents": {"allowAgents": ["helper"]},
        },
        {"id": "helper", "tools": {"deny": ["write"]}},
    )
    async with house(config, tmp_path, functions={"helper": helper}, tools=tools) as troupe:
        await troupe.ask("hello", HELPER)
        assert "shell" in [spec.name for spec in helper.prompts[0].tools]
        said = await troupe.does("sessions_spawn", task="work", agentId="helper")
        await troupe.quiet()
        (prompt,) = [prompt for prompt in helper.prompts if prompt.run_id == said["runId"]]
        assert [spec.name for spec in prompt.tools] == ["read"]


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "V1")
@pytest.mark.parametrize("mine", ["self", "tree", "agent", "all"])
async def test_a_child_reaches_no_more_than_its_parent_whatever_its_agent_may(
    tmp_path: Path, mine: str
) -> None:
    """The helper may see everything; a helper that `main` has spawned sees what `main` may."""
    reach = {"subagents": {"tools": {"alsoAllow": ["sessions_list", "sessions_send"]}}}
    config = cast_of(
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

    def helper(prompt: Prompt) -> Assistant | str:
        result = result_in(prompt)
        if phase_of(prompt) != "request":
            return "."
        if result is None:
            return calls("sessions_list")
        seen.append(result)
        if "sessions" in result:
            return calls("sessions_send", sessionKey="agent:other:main", message="say .", replyBack=0)
        return "done"

    async with house(config, tmp_path, functions={"helper": Player(helper)}) as troupe:
        await troupe.found(HELPER, "agent:other:main", "agent:main:cron:job")
        said = await troupe.does("sessions_spawn", task="look", agentId="helper")
        await troupe.quiet()
        keys = {row["key"] for row in seen[0]["sessions"]}
        assert said["childSessionKey"] in keys
        assert ("agent:other:main" in keys) == (mine == "all")
        assert ("main" in keys) == (mine == "all"), "its agent's other sessions are not its parent's"
        assert seen[1]["status"] == ("ok" if mine == "all" else "error")
        envelope = envelope_of(troupe, said["childSessionKey"])
        assert narrower(envelope.read, mine) == envelope.read  # pyright: ignore[reportArgumentType]


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P2")
async def test_down_a_tree_of_agents_an_envelope_only_shrinks(tmp_path: Path) -> None:
    """Each agent lists what the one before may not have; in the end there is hardly anything left."""
    config = cast_of(
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

    def deeper(prompt: Prompt) -> Assistant | str:
        if phase_of(prompt) != "request" or (result := result_in(prompt)):
            return "."
        del result
        following = {"main": "helper", "helper": "other", "other": "other"}[prompt.agent_id]
        may = "sessions_spawn" in [spec.name for spec in prompt.tools]
        return calls("sessions_spawn", task="deeper", agentId=following) if may else "the end"

    functions = {name: Player(deeper) for name in ("main", "helper", "other")}
    async with house(config, tmp_path, functions=functions, tools=tools) as troupe:
        await troupe.ask("go")
        await troupe.quiet()
        rows = troupe.rows("SELECT key, agent_id FROM sessions WHERE depth > 0 ORDER BY depth")
        assert [row["agent_id"] for row in rows] == ["helper", "other", "other"]
        chain = [envelope_of(troupe, row["key"]) for row in rows]
        assert [envelope.depth for envelope in chain] == [2, 1, 0]
        assert all(no_more(below, above) for above, below in pairwise(chain))
        assert not {"shell", "write", "sessions_spawn"} & set(chain[-1].tools)
        assert all("fourth" not in envelope.agents for envelope in chain), "though theirs say anybody"


@pytest.mark.anyio
@pytest.mark.requirement("SEC6")
async def test_what_is_granted_later_does_not_widen_a_child_that_is_there(tmp_path: Path) -> None:
    main = Player(".")
    narrow = cast_of(tools={"deny": ["write"], "sessions": {"visibility": "tree"}})
    async with house(narrow, tmp_path, functions={"main": main}, tools=tools) as troupe:
        await troupe.found(MAIN)
        child = (await troupe.use("sessions_spawn", task="work"))["childSessionKey"]
        await troupe.quiet()
        before = envelope_of(troupe, child)
    wide = cast_of(tools={"subagents": {"tools": {"alsoAllow": ["*"]}}})
    async with house(wide, tmp_path, functions={"main": main}, tools=tools) as troupe:
        await troupe.ask("still you?", child)
        assert heard(main.prompts[-1]) == "still you?"
        assert [spec.name for spec in main.prompts[-1].tools] == ["read", "shell"]
        assert envelope_of(troupe, child) == before
    nothing = cast_of(tools={"deny": ["read"]})
    async with house(nothing, tmp_path, functions={"main": main}, tools=tools) as troupe:
        await troupe.ask("and now?", child)
        assert [spec.name for spec in main.prompts[-1].tools] == ["shell"], (
            "what is taken away is gone at once"
        )


@pytest.mark.anyio
@pytest.mark.requirement("SEC6", "P2")
async def test_an_operators_child_is_within_its_requesters_envelope_too(tmp_path: Path) -> None:
    config = cast_of({"id": "main", "default": True, "tools": {"deny": ["shell"]}}, "helper")
    async with house(config, tmp_path, tools=tools) as troupe:
        spawned = await troupe.operations.spawn(OPERATOR, Spawn(task="say .", agent_id="main"))
        await troupe.quiet()
        envelope = envelope_of(troupe, spawned.child_session_key)
        assert envelope.tools == ("read", "write") and envelope.depth == 0


ORPHAN = "agent:main:subagent:1d9f7e0c-0000-4000-8000-000000000003"


async def _imported(path: Path, config: Config) -> None:
    """As another program left it; whoever spawned it there is not here."""
    source = path / "old"
    source.mkdir()
    entry = {"sessionId": "s", "subagentRole": "orchestrator", "spawnedBy": "agent:gone:main"}
    source.joinpath("sessions.json").write_text(json.dumps({ORPHAN: entry}))
    async with keeping(config, path) as store:
        assert (await take(store, config, look(source, config), 1)).imported == 1


@pytest.mark.anyio
@pytest.mark.requirement("P3", "SEC6", "003-spawn-tools", "003-spawn-tools-config")
@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("also", [[], ["sessions_spawn", "agents_list"]])
async def test_a_sub_agent_that_nobody_spawned_here_has_what_a_leaf_has(
    tmp_path: Path, imported: bool, also: list[str]
) -> None:
    main = Player(".")
    config = cast_of(
        "helper",
        agents={"defaults": {"subagents": {"maxSpawnDepth": 3, "allowAgents": ["*"]}}},
        tools={"subagents": {"tools": {"alsoAllow": also, "deny": ["write"]}}},
    )
    if imported:
        await _imported(tmp_path, config)
    async with house(config, tmp_path, functions={"main": main}, tools=tools) as troupe:
        await troupe.ask("hello", ORPHAN)
        has = {"read", "shell", *also} - {"sessions_spawn"}
        assert {spec.name for spec in main.prompts[0].tools} == has
        assert set((await troupe.operations.tools_of(OPERATOR, ORPHAN)).actor.tools) == has
        assert (await troupe.use("agents_list", ORPHAN))["agents"] == []
        assert (await troupe.use("sessions_spawn", ORPHAN, task="more"))["reason"] == "depth"
        (row,) = troupe.rows("SELECT depth, role FROM sessions WHERE key = ?", ORPHAN)
        assert (row["depth"], row["role"]) == (1, "orchestrator" if imported else "leaf")
