"""Approvals on the wire: methods, events, the slash command, and who may use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.engine.toolbox import ApprovalQuestion, Tool, ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, ToolResult
from antiphon.operations.operations import Operations
from antiphon.runtimes import Prompt
from support.app_fixture import MAIN, make_answer, make_tool, make_tool_calls
from support.gateway_http import ALL_ENDPOINTS
from support.gateway_ws import READ, WRITE, Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T7")]

APPROVALS = "operator.approvals"
SETTINGS = {**ALL_ENDPOINTS, "gateway": {**ALL_ENDPOINTS.get("gateway", {}), "tools": {"allow": ["pay"]}}}


class Payer:
    def __init__(self) -> None:
        self.paid = 0

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        last = prompt.messages[-1]
        if isinstance(last, ToolResult):
            return make_answer(last.text)
        return make_tool_calls("pay", amount=5, note="\x1b[2J\u202e")

    async def pay(self, request: ToolRequest) -> ToolOutput:
        self.paid += 1
        return ToolOutput(text="paid")


@asynccontextmanager
async def open_payer(path: Path, payer: Payer) -> AsyncGenerator[GatewayFixture]:
    def create_tools(operations: Operations) -> list[Tool]:
        return [make_tool("pay", payer.pay, ask=True)]

    async with open_gateway(path, payer, settings=SETTINGS, tools=create_tools) as gateway:
        yield gateway


async def ask(client: Client, key: str = "k1") -> dict[str, Any]:
    """Send a message, and return the event about the call that waits."""
    await client.call("chat.send", sessionKey="main", message="pay", idempotencyKey=key)
    event = await client.event("exec.approval.requested")
    assert event["request"]["runId"] == key
    return event


async def test_a_client_lists_and_decides(tmp_path: Path) -> None:
    payer = Payer()
    async with open_payer(tmp_path, payer) as gateway, gateway.client() as client:
        event = await ask(client)
        request = event["request"]
        assert (request["tool"], request["agentId"], request["sessionKey"]) == ("pay", "main", MAIN)
        assert request["text"] == r'{"amount":5,"note":"\u001b[2J\u202e"}', "nothing that acts on a terminal"
        assert request["command"] == f"pay {request['text']}", "other clients show nothing else"
        assert request["allowedDecisions"] == ["allow-once", "allow-always", "deny"]
        assert event["expiresAtMs"] - event["createdAtMs"] == 1_800_000
        [listed] = await client.call("exec.approval.list")
        assert {**listed, "ts": event["ts"]} == event
        assert await client.call("exec.approval.list", sessionKey=MAIN) == [listed]
        undecided = await client.call("exec.approval.waitDecision", id=event["id"], timeoutMs=0)
        assert (undecided["state"], undecided["decision"]) == ("pending", None)
        waiting = await client.start("exec.approval.waitDecision", {"id": event["id"]})
        decided = await client.call("exec.approval.resolve", id=event["id"], decision="allow-once")
        assert decided["ok"] and decided["decision"] == "allow-once" and decided["resolvedBy"] == "owner"
        assert (await client.answer(waiting)).payload["decision"] == "allow-once"
        resolved = await client.event("exec.approval.resolved", id=event["id"])
        assert (resolved["decision"], resolved["resolvedBy"]) == ("allow-once", "owner")
        assert (await client.call("agent.wait", runId="k1"))["reply"] == "paid"
        assert await client.call("exec.approval.list") == []
        error = await client.refused("exec.approval.resolve", id="nope", decision="deny")
        assert error["code"] == "INVALID_REQUEST" and error["details"]["reason"] == "APPROVAL_NOT_FOUND"
    assert payer.paid == 1


async def test_a_command_line_is_shown_as_it_is_and_with_the_decisions_it_has(tmp_path: Path) -> None:
    async def propose(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("exec")

    async def ask_once(request: ToolRequest) -> ApprovalQuestion | None:
        return ApprovalQuestion(text="make; ls")

    def create_tools(operations: Operations) -> list[Tool]:
        return [msgspec.structs.replace(make_tool("exec", Payer().pay), needs_approval=ask_once)]

    async with open_gateway(tmp_path, propose, tools=create_tools) as gateway, gateway.client() as client:
        request = (await ask(client))["request"]
        assert (request["tool"], request["command"], request["text"]) == ("exec", "make; ls", "make; ls")
        assert request["allowedDecisions"] == ["allow-once", "deny"], "no single command"


async def test_a_grant_is_listed_and_revoked(tmp_path: Path) -> None:
    payer = Payer()
    async with open_payer(tmp_path, payer) as gateway, gateway.client() as client:
        event = await ask(client)
        await client.call("exec.approval.resolve", id=event["id"], decision="allow-always")
        assert (await client.call("agent.wait", runId="k1"))["reply"] == "paid"
        await client.call("chat.send", sessionKey="main", message="pay", idempotencyKey="k2")
        assert (await client.call("agent.wait", runId="k2"))["reply"] == "paid", "without a question"
        [grant] = (await client.call("exec.approval.grants"))["grants"]
        assert (grant["agentId"], grant["tool"], grant["decidedBy"]) == ("main", "pay", "owner")
        await client.call("exec.approval.revoke", id=grant["id"])
        assert (await ask(client, "k3"))["state"] == "pending"


@pytest.mark.requirement("AT14")
async def test_the_slash_command_decides_and_no_model_reads_it(tmp_path: Path) -> None:
    payer = Payer()
    async with open_payer(tmp_path, payer) as gateway, gateway.client() as client:
        event = await ask(client)
        for incomplete in ("/approve", f"/approve {event['id']}"):
            error = await client.refused(
                "chat.send", sessionKey="main", message=incomplete, idempotencyKey="c0"
            )
            assert "/approve ID allow-once" in error["message"]
        said = await client.call(
            "chat.send", sessionKey="main", message=f"/approve {event['id']} deny", idempotencyKey="c1"
        )
        assert said["status"] == "ok"
        assert "denied" in (await client.call("agent.wait", runId="k1"))["reply"]
        history = await client.call("chat.history", sessionKey="main")
        assert "/approve" not in str(history["messages"])
    assert payer.paid == 0


@pytest.mark.requirement("AT14")
async def test_others_neither_hear_nor_decide(tmp_path: Path) -> None:
    payer = Payer()
    async with (
        open_payer(tmp_path, payer) as gateway,
        gateway.client() as owner,
        gateway.client(scopes=[READ, WRITE]) as writer,
        gateway.client(scopes=[APPROVALS]) as approver,
    ):
        await owner.call("sessions.subscribe")
        event = await ask(owner)
        command = f"/approve {event['id']} allow-once"
        for method, params in (
            ("exec.approval.list", {}),
            ("exec.approval.resolve", {"id": event["id"], "decision": "allow-once"}),
            ("exec.approval.waitDecision", {"id": event["id"]}),
            ("exec.approval.grants", {}),
            ("exec.approval.revoke", {"id": "x"}),
            ("chat.send", {"sessionKey": "main", "message": command, "idempotencyKey": "c1"}),
        ):
            assert (await writer.refused(method, **params))["code"] == "FORBIDDEN", method
        # As a message of another session it is only text.
        await owner.call("sessions.create", key="agent:main:x")
        sent = {"key": MAIN, "message": command, "idempotencyKey": "c2", "fromSessionKey": "agent:main:x"}
        await owner.start("sessions.send", sent)
        await owner.event("sessions.changed", sessionKey=MAIN)
        assert payer.paid == 0 and len(await approver.call("exec.approval.list")) == 1
        await approver.event("exec.approval.requested", id=event["id"])
        await approver.call("exec.approval.resolve", id=event["id"], decision="allow-once")
        assert (await owner.call("agent.wait", runId="k1"))["reply"] == "paid"
        await writer.call("health")
        assert not writer.list_events("exec.approval.requested")
        assert not writer.list_events("exec.approval.resolved")


@pytest.mark.requirement("SEC12")
async def test_a_tool_that_asks_cannot_be_invoked_without_a_conversation(tmp_path: Path) -> None:
    payer = Payer()
    async with open_payer(tmp_path, payer) as gateway, gateway.client() as client:
        error = await client.refused("tools.invoke", name="pay", args={"amount": 1})
        assert "asks a person before this call" in error["message"]
        async with gateway.http() as http:
            answered = await http.post("/tools/invoke", json={"tool": "pay", "args": {"amount": 1}})
            assert answered.status_code == 403
    assert payer.paid == 0
