"""The tools `cron` and `message`: an agent's own jobs, and texts for the people in a chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine.jobs import agent_jobs
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    AgentsFixture,
    make_agents_config,
    open_agents_fixture,
)

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T1")]

DAILY: dict[str, Any] = {
    "name": "tea",
    "schedule": {"kind": "cron", "expr": "0 9 * * *"},
    "payload": {"kind": "agentTurn", "message": "Make tea."},
}
GROUP = "agent:main:telegram:group:7"


def make_config(sections: dict[str, Any] | None = None, tools: dict[str, Any] | None = None) -> Config:
    """Two agents, which reach only their own trees unless `tools` says otherwise."""
    reach = {"sessions": {"visibility": "tree"}, "agentToAgent": {"enabled": False}, **(tools or {})}
    return make_agents_config("helper", tools=reach, **(sections or {}))


async def use(agents: AgentsFixture, tool: str, session: str = MAIN, **arguments: Any) -> dict[str, Any]:
    await agents.open_sessions(session)
    return await agents.use(tool, session, **arguments)


async def invoke_as(agents: AgentsFixture, caller: Caller, tool: str, **arguments: Any) -> ToolOutput:
    call = ToolRequest(caller=caller, run_id="run", call_id="call", arguments=arguments)
    return await agents.app.toolbox.tools[tool].invoke(call)


async def test_an_agent_manages_its_own_jobs(tmp_path: Path) -> None:
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        added = await use(agents, "cron", action="add", job=DAILY)
        assert (added["agentId"], added["sessionTarget"], added["enabled"]) == ("main", "isolated", True)
        theirs = await use(agents, "cron", HELPER, action="add", job={**DAILY, "name": "coffee"})
        listed = await use(agents, "cron")
        assert [job["id"] for job in listed["jobs"]] == [added["id"]]
        changed = await use(
            agents, "cron", action="update", id=added["id"], patch={"enabled": False, "name": "chai"}
        )
        assert (changed["name"], changed["enabled"]) == ("chai", False)
        assert (await use(agents, "cron"))["total"] == 0
        fired = await use(agents, "cron", action="run", jobId=added["id"])
        assert fired["ran"]
        await agents.wait_for_end(fired["runId"])
        [ran] = (await use(agents, "cron", action="runs", jobId=added["id"]))["runs"]
        assert ran["runId"] == fired["runId"]
        for action in ("update", "remove", "run", "runs"):
            refused = await use(agents, "cron", action=action, jobId=theirs["id"], patch={"name": "x"})
            assert (refused["status"], refused["code"]) == ("error", "not_found")
        assert (await use(agents, "cron", action="remove", jobId=added["id"])) == {"removed": True}
        assert [job.id for job in await agents.operations.jobs.list(OPERATOR)] == [theirs["id"]]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"agentId": "helper"}, "forbidden"),
        ({"sessionTarget": "session:agent:helper:main"}, "not_found"),
        ({"schedule": {"kind": "every", "everyMs": 5000}}, "invalid_input"),
        ({"schedule": {"kind": "cron", "expr": "*/5 * * * * *"}}, "invalid_input"),
        ({"delivery": {"mode": "announce", "to": "someone"}}, "forbidden"),
        ({"delivery": {"mode": "announce", "channel": "webchat"}}, "forbidden"),
        ({"payload": {"kind": "agentTurn"}}, "invalid_input"),
    ],
)
async def test_a_job_reaches_no_further_than_its_agent(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        await agents.open_sessions(HELPER)
        refused = await use(agents, "cron", action="add", job={**DAILY, **changes})
        assert refused["code"] == code
        assert await agents.operations.jobs.list(OPERATOR) == []
        added = await use(agents, "cron", action="add", job=DAILY)
        refused = await use(agents, "cron", action="update", jobId=added["id"], patch=changes)
        assert refused["code"] == code


async def test_a_group_may_not_reach_the_main_chat_by_a_job(tmp_path: Path) -> None:
    main = {"sessionTarget": "main", "payload": {"kind": "systemEvent", "text": "Look."}}
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        for job in ({**DAILY, **main}, {**DAILY, "delivery": {"mode": "announce"}}):
            assert (await use(agents, "cron", GROUP, action="add", job=job))["code"] == "not_found"
            own = await use(agents, "cron", MAIN, action="add", job=job)
            assert "id" in own
            assert await use(agents, "cron", MAIN, action="remove", jobId=own["id"]) == {"removed": True}


@pytest.mark.parametrize(
    "caller",
    [
        Caller.agent("main", MAIN, sandboxed=True),
        Caller.agent("main", "agent:main:subagent:1"),
        Caller.agent("main", "agent:main:cron:1"),
        Caller.agent("main", "agent:main:hook:1"),
    ],
)
async def test_what_ends_soon_or_is_confined_schedules_nothing(tmp_path: Path, caller: Caller) -> None:
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        for arguments in ({"action": "list"}, {"action": "add", "job": DAILY}):
            refused = await invoke_as(agents, caller, "cron", **arguments)
            assert refused.details["status"] == "forbidden"
        assert await agents.operations.jobs.list(OPERATOR) == []


async def test_the_jobs_of_an_agent_are_bounded_and_a_repeated_call_adds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_jobs, "MAX_JOBS_PER_AGENT", 1)
    me = Caller.agent("main", MAIN)
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        first, again = [await invoke_as(agents, me, "cron", action="add", job=DAILY) for _ in range(2)]
        assert first.details == again.details
        refused = await use(agents, "cron", action="add", job={**DAILY, "name": "more"})
        assert (refused["code"], "has 1 jobs already" in refused["error"]) == ("conflict", True)


async def test_without_a_scheduler_there_is_no_cron(tmp_path: Path) -> None:
    async with open_agents_fixture(make_config({"cron": {"enabled": False}}), tmp_path) as agents:
        actor = (await agents.operations.sessions.act_as(OPERATOR, MAIN)).actor
        assert "cron" not in actor.tools
        assert (
            agents.app.toolbox.tools["cron"].explain_absence("main", is_sandboxed=False)
            == "'cron.enabled' is false."
        )


async def test_a_message_is_posted_once_to_the_chat_of_the_session(tmp_path: Path) -> None:
    me = Caller.agent("main", MAIN)
    async with open_agents_fixture(make_config(), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        sent, again = [await invoke_as(agents, me, "message", text="The kettle is on.") for _ in range(2)]
        assert sent.details == again.details
        assert (sent.details["status"], sent.details["channel"]) == ("queued", "webchat")
        await agents.wait_until_idle()
        [delivery] = (await agents.operations.deliveries.list(OPERATOR)).deliveries
        assert (delivery.kind, delivery.state) == ("message", "delivered")
        [entry] = await agents.transcript()
        assert entry["content"][0]["text"] == "The kettle is on."


async def test_a_message_goes_where_the_session_may_send(tmp_path: Path) -> None:
    policy = {"session": {"sendPolicy": {"rules": [{"action": "deny", "match": {"keyPrefix": "dashboard"}}]}}}
    denied = "agent:main:dashboard:00000000-0000-4000-8000-000000000001"
    async with open_agents_fixture(
        make_config(policy, {"sessions": {"visibility": "agent"}}), tmp_path
    ) as agents:
        await agents.open_sessions(MAIN, HELPER, GROUP, denied)
        assert (await use(agents, "message", target=HELPER, message="x"))["code"] == "not_found"
        assert (await use(agents, "message", to=denied, message="x"))["code"] == "send_blocked"
        assert (await use(agents, "message", to=GROUP, message="x"))["field"] == "channel"
        assert (await use(agents, "message", message="x", channel="telegram"))["field"] == "channel"
        assert (await use(agents, "message", message=" "))["status"] == "error"
        assert (await agents.operations.deliveries.list(OPERATOR)).deliveries == []
