"""Tool calls that wait for a person: suspended, decided, expired, stopped, and resumed after a restart."""

from __future__ import annotations

import asyncio
import json
import random
import unicodedata
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.access import ADMIN_SCOPE, APPROVALS_SCOPE, READ_SCOPE, WRITE_SCOPE, Caller
from antiphon.bus import ApprovalChanged, session_topic
from antiphon.config import Config
from antiphon.engine.runs import approval_rows
from antiphon.engine.runs.approval_gate import MAX_QUESTION_CHARACTERS
from antiphon.engine.sessions import session_rows
from antiphon.engine.toolbox import ApprovalQuestion, Tool, ToolOutput, ToolRequest, ask_about_arguments
from antiphon.errors import Conflict, Forbidden, InvalidInput, NotFound
from antiphon.messages import AssistantMessage, ToolCall, ToolResult, UserMessage
from antiphon.operations.operations import Operations
from antiphon.operations.types import ApprovalView
from antiphon.runtimes import Prompt
from antiphon.store import Tx
from antiphon.tools import create_session_tools
from support.agents_fixture import AgentsFixture, make_agents_config, open_agents_fixture
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    AppFixture,
    make_answer,
    make_tool,
    open_app_fixture,
    open_test_store,
    wait_for_event,
    wait_until,
)

pytestmark = pytest.mark.anyio

APPROVER = Caller.operator([APPROVALS_SCOPE])
TWO_AGENTS = Config.model_validate({"agents": {"list": [{"id": "main", "default": True}, {"id": "other"}]}})


class Payer:
    """An agent that makes its rounds of calls in every turn, then repeats their results; and the tool it calls."""

    def __init__(self, *rounds: list[dict[str, Any]]) -> None:
        self.rounds = rounds or ([{"amount": 5}],)
        self.paid: list[Any] = []
        self.entered = asyncio.Event()
        self.hold: asyncio.Event | None = None

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        start = max(i for i, message in enumerate(prompt.messages) if isinstance(message, UserMessage))
        turn = prompt.messages[start:]
        number = sum(isinstance(message, AssistantMessage) for message in turn)
        if number < len(self.rounds):
            calls = [
                ToolCall(id=f"call_{number}_{i}", name="pay", arguments=arguments)
                for i, arguments in enumerate(self.rounds[number])
            ]
            return AssistantMessage(content=[*calls], timestamp=1)
        return make_answer(" | ".join(message.text for message in turn if isinstance(message, ToolResult)))

    async def pay(self, request: ToolRequest) -> ToolOutput:
        self.paid.append(dict(request.arguments))
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        return ToolOutput(text=f"paid {request.arguments.get('amount')}")

    def tool(
        self,
        *,
        settle: bool = False,
        hook: Callable[[ToolRequest], Awaitable[ApprovalQuestion | None]] | None = None,
    ) -> Tool:
        return make_tool("pay", self.pay, settle=settle, ask=hook is None, needs_approval=hook)


async def wait_for_pending(app: AppFixture | AgentsFixture, count: int = 1) -> list[ApprovalView]:
    found: list[ApprovalView] = []

    async def are_pending() -> bool:
        found[:] = await app.operations.approvals.list(OPERATOR)
        return len(found) == count

    await wait_until(are_pending)
    return found


async def pending(app: AppFixture | AgentsFixture) -> ApprovalView:
    [view] = await wait_for_pending(app)
    return view


@pytest.mark.requirement("T7", "AT13", "G41")
async def test_a_call_waits_and_runs_once_when_it_is_allowed(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        assert (waiting.tool, waiting.text, waiting.session_key, waiting.run_id, waiting.agent_id) == (
            "pay",
            '{"amount":5}',
            MAIN,
            run_id,
            "main",
        )
        assert waiting.expires_at - waiting.created_at == 1_800_000
        assert payer.paid == []
        assert (await app.operations.runs.get(OPERATOR, run_id)).state == "running"
        decided = await app.operations.approvals.resolve(APPROVER, waiting.id, "allow-once", "ann")
        assert (decided.state, decided.decision, decided.decided_by) == ("allowed", "allow-once", "ann")
        assert (await app.wait_for_end(run_id)).reply == "paid 5"
        assert payer.paid == [{"amount": 5}]
        assert await app.operations.approvals.list(OPERATOR) == []
        again = await app.operations.approvals.resolve(APPROVER, waiting.id, "allow-once", "ben")
        assert again.decided_by == "ann", "a repeated decision changes nothing"
        with pytest.raises(Conflict, match="already decided: allow-once"):
            await app.operations.approvals.resolve(APPROVER, waiting.id, "deny")


@pytest.mark.requirement("T7", "AT13")
async def test_a_denial_is_a_tool_error(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "deny")
        ended = await app.wait_for_end(run_id)
        assert ended.state == "ok" and "A person denied this call" in (ended.reply or "")
        [result] = [entry for entry in await app.transcript() if entry["role"] == "toolResult"]
        assert result["isError"] is True
    assert payer.paid == []


@pytest.mark.requirement("T7", "AT13", "G41")
async def test_a_call_without_a_decision_is_denied(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()], approval_timeout_seconds=0.05) as app:
        ended = await app.ask("pay")
        assert ended.state == "ok" and "No person allowed this call within 0.05 s" in (ended.reply or "")
        [row] = app.rows("SELECT id, state FROM approvals")
        assert row["state"] == "expired"
        with pytest.raises(Conflict, match="has expired"):
            await app.operations.approvals.resolve(OPERATOR, row["id"], "allow-once")
    assert payer.paid == []


@pytest.mark.requirement("T7")
async def test_a_stopped_run_waits_for_nothing(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        [session] = app.rows("SELECT id FROM sessions")
        async with app.bus.listen(session_topic(session["id"])) as events:
            await app.operations.runs.stop(OPERATOR, MAIN)
            async with asyncio.timeout(BOUND):
                # The event about the new approval may follow its row only now.
                while (
                    not isinstance(event := await events.get(), ApprovalChanged) or event.state == "pending"
                ):
                    pass
            assert (event.approval_id, event.state) == (waiting.id, "expired")
        assert (await app.wait_for_end(run_id)).state == "cancelled"
        with pytest.raises(Conflict, match="has expired"):
            await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        assert await app.operations.approvals.list(OPERATOR) == []
    assert payer.paid == []


@pytest.mark.requirement("T7", "AT13", "G41")
async def test_waiting_survives_any_number_of_restarts(tmp_path: Path) -> None:
    payer = Payer()
    ids: set[str] = set()
    for number in range(8):  # more than the restarts after which a run without progress is given up
        async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
            if number == 0:
                await app.say("pay", idempotency_key="r1")
            ids.add((await pending(app)).id)
            if number == 7:
                await app.operations.approvals.resolve(OPERATOR, ids.pop(), "allow-once")
                assert (await app.wait_for_end("r1")).reply == "paid 5"
    assert not ids and payer.paid == [{"amount": 5}]


@pytest.mark.requirement("T7", "AT13")
@pytest.mark.parametrize("decision", ["allow-once", "deny"])
async def test_a_decision_before_the_restart_counts(tmp_path: Path, decision: Any) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        await app.say("pay", idempotency_key="r1")
        waiting = await pending(app)
    async with open_test_store(tmp_path) as store:  # the process died before it could act on it
        await store.tx(approval_rows.decide_approval, waiting.id, decision, "ann", store.clock.now())
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        reply = (await app.wait_for_end("r1")).reply or ""
    if decision == "deny":
        assert payer.paid == [] and "denied" in reply
    else:
        assert payer.paid == [{"amount": 5}] and reply == "paid 5"


@pytest.mark.requirement("T7", "AT20")
@pytest.mark.parametrize("settle", [False, True])
async def test_a_call_that_had_begun_is_not_begun_again(tmp_path: Path, settle: bool) -> None:
    payer = Payer()
    payer.hold = asyncio.Event()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(settle=settle)]) as app:
        await app.say("pay", idempotency_key="r1")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "allow-once")
        await wait_for_event(payer.entered)
    payer.hold = None
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(settle=settle)]) as app:
        reply = (await app.wait_for_end("r1")).reply or ""
    if settle:
        assert len(payer.paid) == 2 and reply == "paid 5", "its key makes it the same payment"
    else:
        assert len(payer.paid) == 1 and "interrupted" in reply


@pytest.mark.requirement("T7")
async def test_calls_of_one_answer_are_decided_one_by_one(tmp_path: Path) -> None:
    payer = Payer([{"amount": 1}, {"amount": 2}, {"amount": 3}])
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        first, second, third = sorted(await wait_for_pending(app, 3), key=lambda view: view.text)
        await app.operations.approvals.resolve(OPERATOR, third.id, "allow-once")
        await app.operations.approvals.resolve(OPERATOR, first.id, "deny")
        await app.operations.approvals.resolve(OPERATOR, second.id, "allow-once")
        assert (await app.wait_for_end(run_id)).state == "ok"
    assert sorted(each["amount"] for each in payer.paid) == [2, 3]


# --- allow-always ---


@pytest.mark.requirement("T7", "AT14")
async def test_a_grant_covers_one_whole_call_of_one_agent(tmp_path: Path) -> None:
    payer = Payer([{"amount": 5, "to": "x"}])
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()], config=TWO_AGENTS) as app:
        run_id = await app.say("pay")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "allow-always", "ann")
        await app.wait_for_end(run_id)
        payer.rounds = ([{"amount": 5, "to": "x"}], [{"to": "x", "amount": 5}])
        assert (await app.ask("again")).reply == "paid 5 | paid 5", (
            "not asked, with the arguments in any order"
        )
        rows = app.rows("SELECT DISTINCT always, decided_by FROM approvals WHERE run_id <> ?", run_id)
        [grant] = await app.operations.approvals.list_grants(OPERATOR)
        assert rows == [{"always": 1, "decided_by": f"grant {grant.id}"}]
        assert (grant.agent_id, grant.tool, grant.text) == ("main", "pay", '{"amount":5,"to":"x"}')
        for session, arguments in (
            (MAIN, {"amount": 50, "to": "x"}),
            (MAIN, {"amount": 5, "to": "x", "more": True}),
            (MAIN, {"amount": "5", "to": "x"}),
            (MAIN, {"amount": 5}),
            ("agent:other:main", {"amount": 5, "to": "x"}),
        ):
            payer.rounds = ([arguments],)
            run_id = await app.say("pay", session)
            await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "deny")
            await app.wait_for_end(run_id)
        await app.operations.approvals.revoke_grant(OPERATOR, grant.id)
        with pytest.raises(NotFound, match="no grant"):
            await app.operations.approvals.revoke_grant(OPERATOR, grant.id)
        payer.rounds = ([{"amount": 5, "to": "x"}],)
        await app.say("pay")
        await pending(app)


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4), _nested, max_leaves=6
)
json_arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=3)


@pytest.mark.requirement("AT14")
@given(json_arguments, json_arguments)
def test_two_calls_share_a_grant_only_if_they_are_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    def ask(arguments: dict[str, Any]) -> str | None:
        request = ToolRequest(caller=OPERATOR, run_id="r", call_id="c", arguments=arguments)
        return ask_about_arguments(request).grant

    is_same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (ask(one) == ask(other)) is is_same
    assert ask(dict(reversed(one.items()))) == ask(one)


@pytest.mark.requirement("SEC13", "T7", "AT14")
async def test_a_child_is_asked_about_like_its_parent_and_uses_the_grants_of_its_own_agent(
    tmp_path: Path,
) -> None:
    """A child with the tool is no way around the person, and a grant of its parent's agent is not the child's."""
    payer = Payer()

    def create_tools(operations: Operations) -> list[Tool]:
        return [*create_session_tools(operations), payer.tool()]

    config = make_agents_config({"id": "main", "default": True, "subagents": {"allowAgents": ["*"]}}, "other")
    async with open_agents_fixture(
        config,
        tmp_path,
        functions={"main": payer, "other": payer},
        tools=create_tools,
    ) as agents:
        await agents.open_sessions(MAIN)

        async def spawn(agent_id: str) -> str:
            spawned = await agents.use("sessions_spawn", task="pay", agentId=agent_id, announce="none")
            assert spawned["status"] == "accepted", spawned
            return spawned["runId"]

        run_id = await spawn("main")
        waiting = await pending(agents)
        assert (waiting.run_id, waiting.agent_id) == (run_id, "main")
        assert waiting.session_key.startswith("agent:main:subagent:") and payer.paid == []
        child = Caller.agent("main", waiting.session_key)
        for caller in (child, Caller.agent("main", MAIN)):
            with pytest.raises(Forbidden):
                await agents.operations.approvals.resolve(caller, waiting.id, "allow-always")
        await agents.operations.approvals.resolve(OPERATOR, waiting.id, "allow-always", "ann")
        assert (await agents.wait_for_end(run_id)).reply == "paid 5"
        assert (await agents.wait_for_end(await spawn("main"))).reply == "paid 5", (
            "the same call of the same agent"
        )
        await agents.wait_until_idle()
        run_id = await spawn("other")
        waiting = await pending(agents)
        assert (waiting.run_id, waiting.agent_id) == (run_id, "other")
        await agents.operations.approvals.resolve(OPERATOR, waiting.id, "deny")
        await agents.wait_for_end(run_id)
        assert len(payer.paid) == 2


@pytest.mark.requirement("T7")
async def test_what_is_no_single_command_can_be_allowed_only_once(tmp_path: Path) -> None:
    payer = Payer()

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="rm -rf a; ls")

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        assert not waiting.can_allow_always
        with pytest.raises(InvalidInput, match="only once"):
            await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-always")
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        assert (await app.wait_for_end(run_id)).reply == "paid 5"


# --- the hook ---


@pytest.mark.requirement("T7")
async def test_a_hook_decides_which_calls_are_asked_about(tmp_path: Path) -> None:
    payer = Payer([{"amount": 1}], [{"amount": 100}], [{"amount": -1}])

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        if request.arguments["amount"] < 0:
            raise RuntimeError("no such amount")
        text = f"pay {request.arguments['amount']}"
        return ApprovalQuestion(text=text) if request.arguments["amount"] > 10 else None

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        assert waiting.text == "pay 100" and payer.paid == [{"amount": 1}]
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        reply = (await app.wait_for_end(run_id)).reply or ""
    assert reply.startswith("paid 1 | paid 100 | ") and "no such amount" in reply
    assert payer.paid == [{"amount": 1}, {"amount": 100}], "a hook that fails lets nothing pass"


@pytest.mark.requirement("T7", "AT20")
async def test_a_call_that_may_have_run_unasked_is_reported(tmp_path: Path) -> None:
    payer = Payer()
    payer.hold = asyncio.Event()
    limit = 10

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="pay") if request.arguments["amount"] > limit else None

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        await app.say("pay", idempotency_key="r1")
        await wait_for_event(payer.entered)
    limit = 0  # the rules were changed while it was down
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        assert "interrupted" in ((await app.wait_for_end("r1")).reply or "")
        assert await app.operations.approvals.list(OPERATOR) == []
    assert len(payer.paid) == 1


@pytest.mark.requirement("T7")
async def test_a_decision_is_void_when_the_facts_have_changed(tmp_path: Path) -> None:
    payer = Payer()
    directory = "/one"

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="rm -r .", grant="rm -r .", binding=directory)

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        await app.say("pay", idempotency_key="r1")
        waiting = await pending(app)
    directory = "/two"
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        assert "has changed since a person allowed it" in ((await app.wait_for_end("r1")).reply or "")
    assert payer.paid == []


@pytest.mark.requirement("T7", "AT14")
async def test_a_grant_is_void_under_other_facts(tmp_path: Path) -> None:
    payer = Payer()
    directory = "/one"

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="rm -r .", grant="rm -r .", binding=directory)

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        run_id = await app.say("pay")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "allow-always")
        await app.wait_for_end(run_id)
        assert (await app.ask("again")).reply == "paid 5", "not asked"
        directory = "/two"
        run_id = await app.say("elsewhere")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "deny")
        await app.wait_for_end(run_id)
    assert len(payer.paid) == 2


@pytest.mark.requirement("T7")
async def test_a_decision_is_void_when_the_call_reads_otherwise(tmp_path: Path) -> None:
    payer = Payer()
    text = "remove a"

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text=text, grant="remove")

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        await app.say("pay", idempotency_key="r1")
        waiting = await pending(app)
    text = "remove b"
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        assert "has changed since a person allowed it" in ((await app.wait_for_end("r1")).reply or "")
    assert payer.paid == []


@pytest.mark.requirement("T7")
@pytest.mark.parametrize("call_id", [random.Random(1).randbytes(4000).hex(), "a\0b", "a\ud800", "é", "a b"])
async def test_a_call_waits_under_any_name_its_provider_gives_it(tmp_path: Path, call_id: str) -> None:
    payer = Payer()

    async def call_once(prompt: Prompt) -> AssistantMessage:
        if isinstance(last := prompt.messages[-1], ToolResult):
            return make_answer(last.text)
        return AssistantMessage(
            content=[ToolCall(id=call_id, name="pay", arguments={"amount": 5})], timestamp=1
        )

    async with open_app_fixture(tmp_path, call_once, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "allow-once")
        assert (await app.wait_for_end(run_id)).reply == "paid 5"
    assert len(payer.paid) == 1


@pytest.mark.requirement("T7")
async def test_a_call_with_a_character_that_cannot_be_stored_is_allowed_once(tmp_path: Path) -> None:
    payer = Payer()

    async def ask(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="rm a\0b", grant="rm a\0b")

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(hook=ask)]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        assert (waiting.text, waiting.can_allow_always) == (r"rm a\u0000b", False)
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")
        assert (await app.wait_for_end(run_id)).reply == "paid 5"


# --- several who decide, several who execute ---


@pytest.mark.requirement("T7", "G41")
async def test_of_many_who_decide_at_once_one_does(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        for number in range(3):
            payer.rounds = ([{"amount": number}],)
            paid_before, grants_before = len(payer.paid), len(app.rows("SELECT id FROM approval_grants"))
            run_id = await app.say("pay")
            waiting = await pending(app)
            decisions = ["allow-always", "deny", "allow-once"] * 3
            outcomes = await asyncio.gather(
                *(
                    app.operations.approvals.resolve(OPERATOR, waiting.id, decision, f"{decision} {n}")
                    for n, decision in enumerate(decisions)
                ),
                return_exceptions=True,
            )
            views = [outcome for outcome in outcomes if isinstance(outcome, ApprovalView)]
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            [(decision, _)] = {(view.decision, view.decided_by) for view in views}
            assert len(views) == 3 and all(isinstance(error, Conflict) for error in errors)
            assert all("already decided" in str(error) for error in errors)
            await app.wait_for_end(run_id)
            assert len(payer.paid) - paid_before == (decision != "deny")
            grants = len(app.rows("SELECT id FROM approval_grants"))
            assert grants - grants_before == (decision == "allow-always")


@pytest.mark.requirement("T7", "AT20")
@pytest.mark.parametrize("settle", [False, True])
async def test_a_process_that_lost_the_session_makes_no_allowed_call(tmp_path: Path, settle: bool) -> None:
    payer = Payer()

    async def take_over(tx: Tx, session: int, now: int) -> None:
        assert await tx.one(session_rows.SQL.revoke_lane, id=session, count=0, aborted=0, now=now)

    async with open_app_fixture(tmp_path, payer, tools=[payer.tool(settle=settle)]) as app:
        await app.say("pay")
        waiting = await pending(app)
        [session] = app.rows("SELECT id FROM sessions")
        await app.store.tx(take_over, session["id"], app.clock.now())
        await app.operations.approvals.resolve(OPERATOR, waiting.id, "allow-once")

        async def has_given_up() -> bool:
            return not app.engine.worker.active_runs

        await wait_until(has_given_up)
        [row] = app.rows("SELECT state, started_at FROM approvals")
        assert row == {"state": "allowed", "started_at": None}
    assert payer.paid == []


# --- what a person sees, and who decides ---


@pytest.mark.requirement("T7")
async def test_a_call_that_is_too_long_to_be_read_is_refused(tmp_path: Path) -> None:
    payer = Payer([{"amount": 5, "note": " " * MAX_QUESTION_CHARACTERS}])
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        assert "too many to check" in ((await app.ask("pay")).reply or "")
        assert app.rows("SELECT id FROM approvals") == []
    assert payer.paid == []


@pytest.mark.requirement("T7")
@given(st.text())
def test_nothing_that_is_shown_is_invisible_or_controls_a_terminal(text: str) -> None:
    shown = approval_rows.format_question(text)
    assert all(
        character in "\n "
        or unicodedata.category(character) not in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}
        for character in shown
    )
    if shown == text:
        return
    assert "\\u" in shown or "\\U" in shown or "[" in shown, "what is removed leaves a trace"


@pytest.mark.requirement("T7")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rm -r /tmp\u00a0/x", r"rm -r /tmp\u00a0/x"),
        ("a\u3164b", r"a\u3164b"),
        ("a\u2800\u115f\ufe0f\U000e0101b", r"a\u2800\u115f\ufe0f\U000e0101b"),
        ("ls\r\x1b[1Arm", r"ls\u000d\u001b[1Arm"),
        ("ls" + " " * 500 + "; rm -r .", "ls[500 spaces]; rm -r ."),
        ("ls" + "\n" * 500 + "rm -r .", "ls\n[499 empty lines]\nrm -r ."),
        ("ls" + "\n   " * 500 + "\nrm -r .", "ls\n[500 empty lines]\nrm -r ."),
        ("if a:\n\n    b  # é ß 漢 😀", "if a:\n\n    b  # é ß 漢 😀"),
    ],
)
def test_a_call_cannot_hide_a_part_of_itself(text: str, shown: str) -> None:
    assert approval_rows.format_question(text) == shown


@pytest.mark.requirement("T7", "AT14")
@pytest.mark.parametrize(
    "caller",
    [
        Caller.agent("main", MAIN),
        Caller.operator([READ_SCOPE]),
        Caller.operator([WRITE_SCOPE]),
        Caller(),
    ],
)
async def test_only_people_with_the_scope_decide(tmp_path: Path, caller: Caller) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        run_id = await app.say("pay")
        waiting = await pending(app)
        for attempt in (
            app.operations.approvals.resolve(caller, waiting.id, "allow-once"),
            app.operations.approvals.list(caller),
            app.operations.approvals.get(caller, waiting.id),
            app.operations.approvals.wait(caller, waiting.id, 0),
            app.operations.approvals.list_grants(caller),
            app.operations.approvals.revoke_grant(caller, "x"),
        ):
            with pytest.raises(Forbidden):
                await attempt
        assert payer.paid == []
        admin = Caller.operator([ADMIN_SCOPE])
        await app.operations.approvals.resolve(admin, waiting.id, "allow-once")
        assert (await app.wait_for_end(run_id)).reply == "paid 5"


@pytest.mark.requirement("T7")
async def test_approvals_are_deleted_with_their_session(tmp_path: Path) -> None:
    payer = Payer()
    async with open_app_fixture(tmp_path, payer, tools=[payer.tool()]) as app:
        key = "agent:main:cron:1"
        run_id = await app.say("pay", key)
        await app.operations.approvals.resolve(OPERATOR, (await pending(app)).id, "deny")
        await app.wait_for_end(run_id)
        await app.operations.sessions.delete(OPERATOR, key)
        assert app.rows("SELECT id FROM approvals") == []
        with pytest.raises(NotFound, match="There is no approval 'x'"):
            await app.operations.approvals.resolve(OPERATOR, "x", "deny")
        with pytest.raises(InvalidInput, match="invalid decision"):
            await app.operations.approvals.resolve(OPERATOR, "x", "yes")
