"""Sub-agents that are ACP programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import AntiphonError, InvalidInput, SpawnRefused
from antiphon.operations.types import SpawnAttachment, SpawnRequest
from support.acp_agents import OPERATOR, describe_agents, open_acp_app

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

TREE: dict[str, Any] = {"acp": {"defaultAgent": "coder"}}


def describe_tree(agent: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    described = describe_agents(agent=agent, **{**TREE, **config})
    described["agents"]["list"][0]["subagents"] = {"allowAgents": ["coder"]}
    return described


@pytest.mark.requirement("M3", "P3", "K1")
@pytest.mark.parametrize(
    "given", [{"runtime": "acp"}, {"agent_id": "coder"}, {"agent_id": "coder", "runtime": "acp"}]
)
async def test_a_program_works_as_a_sub_agent_and_reports(tmp_path: Path, given: dict[str, Any]) -> None:
    async with open_acp_app(tmp_path, describe_tree()) as app:
        spawned = await app.app.operations.subagents.spawn(OPERATOR, SpawnRequest(task="cwd", **given))
        assert spawned.child_session_key.startswith("agent:coder:acp:")
        view = await app.wait_for_end(spawned.run_id)
        directory = spawned.child_session_key.rpartition(":")[2]
        assert view.reply == str(tmp_path / "workspaces/coder/subagents" / directory)


@pytest.mark.requirement("M3", "P2", "AT19", "003-spawn-attachments-acp")
@pytest.mark.parametrize(
    ("config", "given", "error", "says"),
    [
        ({"acp": {}}, {"runtime": "acp"}, SpawnRefused, "'main' is not an ACP program.*agentId: coder"),
        ({}, {"runtime": "acp", "agent_id": "main"}, SpawnRefused, "'main' is not an ACP program"),
        ({"acp": {"allowedAgents": ["other"]}}, {"agent_id": "coder"}, SpawnRefused, "acp.allowedAgents"),
        ({"acp": {"enabled": False}}, {"agent_id": "coder"}, SpawnRefused, "switched off"),
        ({}, {"agent_id": "coder", "thinking": "low"}, InvalidInput, "chooses its thinking itself"),
        ({}, {"agent_id": "coder", "model": "rehearsal/rehearsal"}, InvalidInput, "chooses its model itself"),
        (
            {},
            {"agent_id": "coder", "attachments": [SpawnAttachment(name="a", content="x")]},
            InvalidInput,
            "takes no attachments",
        ),
        ({}, {"agent_id": "coder", "sandbox": "require"}, SpawnRefused, "does not run in a sandbox"),
    ],
)
async def test_what_a_program_cannot_do_is_refused_before_it_starts(
    tmp_path: Path, config: dict[str, Any], given: dict[str, Any], error: type[AntiphonError], says: str
) -> None:
    async with open_acp_app(tmp_path, describe_tree(**config)) as app:
        with pytest.raises(error, match=says):
            await app.app.operations.subagents.spawn(OPERATOR, SpawnRequest(task="cwd", **given))
        assert not (tmp_path / "workspaces" / "coder").exists()
