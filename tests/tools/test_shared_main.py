"""`session.scope: "global"`: in the shared main session every rule is about the agent that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from troupe import HELPER, MAIN, OPERATOR, cast_of, house

from antiphon import keys
from antiphon.errors import SpawnRefused
from antiphon.operations import Spawn

pytestmark = pytest.mark.anyio

ONE_MAIN = {"session": {"scope": "global"}}
BOXED = {"id": "helper", "sandbox": {"mode": "all"}, "subagents": {"allowAgents": ["open"]}}
SIDE = "agent:main:dashboard:side"


def agent_of(key: str) -> str:
    return keys.parse(key).agent_id


@pytest.mark.requirement("P8", "SEC6", "K3", "003-spawn-guard", "003-spawn-sandbox")
@pytest.mark.parametrize("scope", ["per-sender", "global"])
async def test_a_sandboxed_agent_does_not_leave_its_sandbox_from_the_shared_session(
    tmp_path: Path, scope: str
) -> None:
    config = cast_of(BOXED, "open", session={"scope": scope})
    async with house(config, tmp_path) as troupe:
        await troupe.found(MAIN)
        said = await troupe.does("sessions_spawn", HELPER, task="say .", agentId="open")
        assert (said["status"], said["code"], said["reason"]) == ("forbidden", "spawn_refused", "sandbox")
        with pytest.raises(SpawnRefused) as refused:
            await troupe.operations.spawn(OPERATOR, Spawn(task="say .", agent_id="open"), requester=HELPER)
        assert refused.value.data["reason"] == "sandbox"
        acting = await troupe.operations.act_as(OPERATOR, HELPER)
        assert (acting.actor.caller.agent_id, acting.actor.caller.sandboxed) == ("helper", True)
        assert troupe.rows("SELECT * FROM tasks") == []


@pytest.mark.requirement("K3", "P8")
async def test_an_agent_spawns_itself_with_its_own_settings_from_the_shared_session(tmp_path: Path) -> None:
    strict = {"id": "main", "default": True, "subagents": {"requireAgentId": True}}
    async with house(cast_of(strict, "helper", **ONE_MAIN), tmp_path) as troupe:
        await troupe.found(MAIN)
        said = await troupe.does("sessions_spawn", HELPER, task="say .", announce="none")
        assert agent_of(said["childSessionKey"]) == "helper"
        assert (await troupe.does("sessions_spawn", MAIN, task="say ."))["field"] == "agentId"
        await troupe.quiet()


@pytest.mark.requirement("K3", "V2")
@pytest.mark.parametrize("scope", ["per-sender", "global"])
async def test_an_agent_that_may_not_be_messaged_is_not_reached_through_the_shared_session(
    tmp_path: Path, scope: str
) -> None:
    alone: dict[str, Any] = {"sessions": {"visibility": "agent"}, "agentToAgent": {"enabled": False}}
    async with house(cast_of("helper", tools=alone, session={"scope": scope}), tmp_path) as troupe:
        await troupe.found(MAIN, HELPER, SIDE)
        for where in ({"sessionKey": HELPER}, {"agentId": "helper"}):
            said = await troupe.does("sessions_send", SIDE, message="say .", replyBack=0, **where)
            assert said["status"] == "error"
        said = await troupe.does("sessions_send", SIDE, sessionKey=MAIN, message="say yes", replyBack=0)
        assert said["reply"] == "yes"
        await troupe.quiet()
