"""A turn that ends to wait for sub-agents is not the answer: the turn it is woken for is, for all who had asked.

And no wait is endless: not for what was stopped with them, nor for what was lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.engine.jobs.jobs import AgentTurn, AnnounceDelivery, JobSpec
from antiphon.engine.jobs.schedule import EverySchedule
from antiphon.messages import AssistantMessage
from antiphon.operations.types import SendRequest
from antiphon.runtimes import Prompt
from antiphon.store.migrations import load_migrations
from support.agents_fixture import (
    HELPER,
    MAIN,
    OPERATOR,
    AgentsFixture,
    RecordingChannel,
    get_last_user_text,
    get_phase,
    get_tool_result,
    make_agents_config,
    open_agents_fixture,
)
from support.app_fixture import BOUND, DATABASE, make_answer, make_tool_calls
from support.databases import chosen, query_database

pytestmark = pytest.mark.anyio


async def has_yielded(agents: AgentsFixture) -> None:
    async def yielded() -> bool:
        return bool(agents.rows("SELECT 1 FROM runs WHERE yielded = 1"))

    await agents.until(yielded)


async def delegating(prompt: Prompt) -> AssistantMessage:
    """Has a sub-agent do it and waits for that, then answers.

    A sub-agent that were done before that would wake it by its report, which it would answer in another turn.
    """
    if "subagent" in prompt.session_key:
        return make_answer("worded: 42" if get_phase(prompt) == "announce" else "42")
    if get_phase(prompt) == "wake":
        return make_answer("the answer is 42")
    if get_phase(prompt) != "request" and get_phase(prompt) != "cron":
        return make_answer("so it is")
    result = get_tool_result(prompt)
    if result is None:
        return make_tool_calls("sessions_spawn", task="compute", announce="parent")
    return make_tool_calls("sessions_yield") if "waitFor" not in result else make_answer("never said")


@pytest.mark.requirement("S2", "S5", "G18", "A2")
async def test_the_reply_to_a_send_is_that_of_the_turn_that_was_woken(tmp_path: Path) -> None:
    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await has_yielded(agents)
        return await delegating(prompt)

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN, HELPER)
        sent = await agents.use("sessions_send", sessionKey=HELPER, message="well?", replyBack=0)
        assert (sent["status"], sent["reply"]) == ("ok", "the answer is 42")
        await agents.wait_until_idle()
        [exchange] = agents.rows("SELECT first_reply, latest_reply, announced FROM exchanges")
        assert exchange == {
            "first_reply": "the answer is 42",
            "latest_reply": "the answer is 42",
            "announced": "delivered",
        }


@pytest.mark.requirement("S2", "G4")
async def test_a_target_that_waits_longer_than_the_sender_has_not_answered_yet(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await held.wait()
        return await delegating(prompt)

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(HELPER)
        wanted = SendRequest(message="well?", session=HELPER, timeout_seconds=0.3, idempotency_key="k")
        sent = await agents.operations.exchanges.send(OPERATOR, wanted)
        assert (sent.status, sent.reply) == ("timeout", None)
        held.set()
        await agents.wait_until_idle()
        again = await agents.operations.exchanges.send(OPERATOR, wanted)
        assert (again.status, again.reply) == ("ok", "the answer is 42")


OTHER = "agent:other:main"


def yielded_runs(agents: AgentsFixture) -> int:
    return agents.rows("SELECT count(*) AS n FROM runs WHERE yielded = 1")[0]["n"]


@pytest.mark.requirement("S2", "S5", "G18", "A2")
async def test_one_wake_answers_every_sender_for_whom_the_target_has_yielded(tmp_path: Path) -> None:
    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await agents.until(both_wait)
        return await delegating(prompt)

    async def both_wait() -> bool:
        return yielded_runs(agents) == 2

    async with open_agents_fixture(
        make_agents_config("helper", "other"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN, OTHER, HELPER)
        replies = await asyncio.gather(
            *(
                agents.use("sessions_send", sender, sessionKey=HELPER, message="well?", replyBack=1)
                for sender in (MAIN, OTHER)
            )
        )
        assert [(sent["status"], sent["reply"]) for sent in replies] == [("ok", "the answer is 42")] * 2
        await agents.wait_until_idle()
        exchanges = agents.rows("SELECT first_reply, turn, announced FROM exchanges")
        assert exchanges == [{"first_reply": "the answer is 42", "turn": 1, "announced": "delivered"}] * 2
        assert len(agents.rows("SELECT 1 FROM runs WHERE id LIKE 'wake:%'")) == 1
        assert agents.rows("SELECT 1 FROM runs WHERE woken_by IS NOT NULL") == []


@pytest.mark.requirement("S2", "S5", "G18")
async def test_who_is_woken_and_yields_again_answers_for_all_in_the_end(tmp_path: Path) -> None:
    first, second = asyncio.Event(), asyncio.Event()

    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await asyncio.wait_for((second if "again" in get_last_user_text(prompt) else first).wait(), BOUND)
            return make_answer("42")
        if get_phase(prompt) not in {"request", "wake"}:
            return make_answer("so it is")
        result = get_tool_result(prompt)
        woken = get_phase(prompt) == "wake"
        if woken and second.is_set():
            return make_answer("the answer is 42")
        if result is None:
            return make_tool_calls("sessions_spawn", task="again" if woken else "first", announce="none")
        return make_tool_calls("sessions_yield")

    async def yields(number: int) -> None:
        async def so_many() -> bool:
            return yielded_runs(agents) == number

        await agents.until(so_many)

    async with open_agents_fixture(
        make_agents_config("helper", "other"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN, OTHER, HELPER)
        sends = [
            asyncio.create_task(
                agents.use("sessions_send", sender, sessionKey=HELPER, message="well?", replyBack=0)
            )
            for sender in (MAIN, OTHER)
        ]
        await yields(2)
        first.set()
        await yields(3)
        second.set()
        for send in sends:
            assert (await send)["reply"] == "the answer is 42"
        await agents.wait_until_idle()
        assert agents.rows("SELECT announced FROM exchanges") == [{"announced": "delivered"}] * 2


@pytest.mark.requirement("S2", "G9", "G16")
@pytest.mark.parametrize("how", ["stop", "reset", "delete"])
async def test_a_wait_for_a_target_that_has_yielded_ends_when_it_is_stopped(tmp_path: Path, how: str) -> None:
    target = "agent:helper:dashboard:one"

    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await asyncio.Event().wait()
        return await delegating(prompt)

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN, target)
        wanted = {"sessionKey": target, "message": "well?", "timeoutSeconds": 10 * BOUND}
        send = asyncio.create_task(agents.use("sessions_send", **wanted))
        await has_yielded(agents)
        ends = {
            "stop": agents.operations.runs.stop,
            "reset": agents.operations.conversations.reset,
            "delete": agents.operations.sessions.delete,
        }
        await ends[how](OPERATOR, target)
        sent = await asyncio.wait_for(send, BOUND)
        assert (sent["status"], sent.get("reply")) == ("error", None)
        assert "before it answered" in sent["error"]
        assert agents.rows("SELECT announced FROM exchanges") == [{"announced": "run_stopped"}]
        await agents.wait_until_idle()


@pytest.mark.requirement("G45", "G18")
async def test_a_run_that_had_yielded_before_the_upgrade_is_answered_after_it(tmp_path: Path) -> None:
    """Schema 9 named it in its session alone."""
    held = asyncio.Event()

    async def helper(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await held.wait()
        return await delegating(prompt)

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.open_sessions(MAIN, HELPER)
        wanted = {"sessionKey": HELPER, "message": "well?", "timeoutSeconds": 0, "replyBack": 0}
        await agents.use("sessions_send", **wanted)
        await has_yielded(agents)
    path = tmp_path / DATABASE
    query_database(path, "DROP INDEX runs_woken")
    query_database(path, "ALTER TABLE runs DROP COLUMN woken_by")
    [upgrade] = [
        step for step in load_migrations("postgres" if chosen.postgres else "sqlite") if step.version == 10
    ]
    for statement in upgrade.split_statements():  # as from schema 9; later steps are not taken twice
        query_database(path, statement)
    held.set()
    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper}
    ) as agents:
        await agents.wait_until_idle()
        [exchange] = agents.rows("SELECT first_reply, announced FROM exchanges")
        assert exchange == {"first_reply": "the answer is 42", "announced": "delivered"}
        assert agents.rows("SELECT 1 FROM runs WHERE woken_by IS NOT NULL") == []


@pytest.mark.requirement("G18", "W2", "G7")
async def test_a_job_that_delegates_announces_the_answer_and_nothing_before_it(tmp_path: Path) -> None:
    pigeon = RecordingChannel()

    async def main(prompt: Prompt) -> AssistantMessage:
        if "subagent" in prompt.session_key:
            await has_yielded(agents)
        return await delegating(prompt)

    async with open_agents_fixture(
        make_agents_config(), tmp_path, functions={"main": main}, channels={"pigeon": pigeon}
    ) as agents:
        spec = JobSpec(
            name="daily",
            schedule=EverySchedule(every_ms=3_600_000),
            payload=AgentTurn(message="go"),
            delivery=AnnounceDelivery(channel="pigeon", to="bob"),
        )
        job = await agents.app.operations.jobs.add(OPERATOR, spec)
        await agents.app.operations.jobs.run(OPERATOR, job.id)

        async def posted() -> bool:
            return bool(pigeon.posts)

        await agents.until(posted)
        await agents.wait_until_idle()
        assert pigeon.texts == ["the answer is 42"]


@pytest.mark.requirement("G9", "G16", "A2")
async def test_what_was_stopped_is_not_waited_for(tmp_path: Path) -> None:
    """It is still winding down when its requester has something new done and waits for that."""
    stubborn, release = asyncio.Event(), asyncio.Event()

    async def main(prompt: Prompt) -> AssistantMessage:
        if prompt.session_key != MAIN:
            if get_last_user_text(prompt) == "stubborn":
                stubborn.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await release.wait()
            return make_answer("did it")
        if get_phase(prompt) == "wake":
            return make_answer("woken")
        result = get_tool_result(prompt)
        if result is None:
            return make_tool_calls("sessions_spawn", task=get_last_user_text(prompt))
        if get_last_user_text(prompt) == "stubborn" or "waitFor" in result:
            return make_answer("started")
        return make_tool_calls("sessions_yield")

    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": main}) as agents:
        await agents.ask("stubborn")
        await asyncio.wait_for(stubborn.wait(), BOUND)
        await agents.operations.runs.stop(OPERATOR, MAIN)
        await agents.ask("quick")

        async def woken() -> bool:
            return bool(agents.rows("SELECT 1 FROM runs WHERE origin = 'wake' AND reply = 'woken'"))

        await agents.until(woken)
        release.set()
        await agents.wait_until_idle()


@pytest.mark.requirement("G1", "G2")
async def test_what_nothing_would_move_on_any_more_is_settled(tmp_path: Path) -> None:
    """As if a run had been lost: the exchange and the task say so instead of waiting for ever."""
    async with open_agents_fixture(make_agents_config("helper"), tmp_path) as agents:
        await agents.open_sessions(MAIN, HELPER)
        await agents.use(
            "sessions_send", sessionKey=HELPER, message="say hello", announce="none", replyBack=0
        )
        await agents.use("sessions_spawn", task="say done")
        await agents.wait_until_idle()
        agents.rows("UPDATE exchanges SET phase = 'primary', settled_at = NULL, announced = NULL")
        agents.rows(
            "UPDATE tasks SET phase = 'running', current = 'gone', settled_at = NULL, outcome = NULL, announced = NULL"
        )
        await agents.wait_until_idle()
        assert agents.rows("SELECT announced FROM exchanges") == [{"announced": "interrupted"}]
        [task] = agents.rows("SELECT outcome, error FROM tasks")
        assert task == {"outcome": "interrupted", "error": "The run was lost."}


@pytest.mark.requirement("S5", "S6", "G16")
async def test_a_conversation_that_is_stopped_is_not_announced(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def helper(prompt: Prompt) -> AssistantMessage:
        if get_phase(prompt) == "turn":
            begun.set()
            await asyncio.Event().wait()
        return make_answer("go on")

    async def main(prompt: Prompt) -> AssistantMessage:
        return make_answer("tell me more")

    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": helper, "main": main}
    ) as agents:
        await agents.open_sessions(MAIN, HELPER)
        await agents.use("sessions_send", sessionKey=HELPER, message="hello")
        await asyncio.wait_for(begun.wait(), BOUND)
        await agents.operations.runs.stop(OPERATOR, HELPER)
        await agents.wait_until_idle()
        assert agents.rows("SELECT announced FROM exchanges") == [{"announced": "cancelled"}]
        assert agents.rows("SELECT 1 FROM deliveries") == []


@pytest.mark.requirement("S9", "D1", "S8")
async def test_a_key_whose_session_is_gone_is_no_ticket_to_another(tmp_path: Path) -> None:
    rules = [{"action": "deny", "match": {"channel": "discord"}}]
    config = make_agents_config("helper", session={"sendPolicy": {"rules": rules}})
    child, denied = "agent:helper:direct:a", "agent:helper:discord:group:private"
    async with open_agents_fixture(config, tmp_path) as agents:
        await agents.open_sessions(MAIN, child, denied)
        given = {"message": "say hello", "idempotencyKey": "k", "replyBack": 0}
        assert (await agents.use("sessions_send", sessionKey=child, **given))["status"] == "ok"
        await agents.wait_until_idle()
        await agents.operations.sessions.delete(OPERATOR, child)
        refused = await agents.use("sessions_send", sessionKey=denied, **given)
        assert (refused["status"], refused["code"]) == ("error", "conflict")
        assert not agents.rows(
            "SELECT 1 FROM runs r JOIN sessions s ON s.id = r.session WHERE s.key = ?", denied
        )


@pytest.mark.requirement("D1", "D3", "G6", "G33", "003-policy-replies")
@pytest.mark.parametrize("gone", [False, True], ids=["moved", "deleted"])
async def test_the_policy_is_asked_about_where_words_go_as_well(tmp_path: Path, gone: bool) -> None:
    """The route that a task was accepted with is denied; that its person writes from elsewhere now changes nothing."""
    pigeon = RecordingChannel()
    rules = [{"action": "deny", "match": {"channel": "pigeon"}}]
    held = asyncio.Event()

    async def main(prompt: Prompt) -> AssistantMessage:
        await held.wait()
        return make_answer("done")

    config = make_agents_config(session={"sendPolicy": {"rules": rules}})
    session = "agent:main:direct:bob"
    async with open_agents_fixture(
        config, tmp_path, functions={"main": main}, channels={"pigeon": pigeon}
    ) as agents:
        await agents.open_sessions(session)
        agents.rows(
            "UPDATE sessions SET last_channel = 'pigeon', last_to = 'bob', send_policy = 'allow' WHERE key = ?",
            session,
        )
        await agents.use("sessions_spawn", session, task="find out")
        agents.rows("UPDATE sessions SET last_channel = 'webchat', send_policy = NULL WHERE key = ?", session)
        if gone:
            agents.rows("UPDATE deliveries SET session = -1")
            agents.rows("UPDATE tasks SET requester = -1")
        held.set()

        async def blocked() -> bool:
            return [row["state"] for row in agents.rows("SELECT state FROM deliveries")] == ["blocked"]

        await agents.until(blocked)
        assert pigeon.posts == []
