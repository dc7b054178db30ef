"""The OpenClaw command line, unmodified, talks to this gateway."""

from __future__ import annotations

from typing import Any, cast

import pytest

from support.interop_processes import MAIN, Gateway, Openclaw

pytestmark = pytest.mark.requirement("W6")


def test_gateway_call_health(gateway: Gateway, openclaw: Openclaw) -> None:
    assert openclaw.call(gateway, "health").json["ok"] is True


def test_gateway_call_holds_a_conversation(gateway: Gateway, openclaw: Openclaw) -> None:
    key = "agent:main:direct:calls"
    sent = {"sessionKey": key, "message": "say good morning", "idempotencyKey": "call-1"}
    ack = openclaw.call(gateway, "chat.send", sent).json
    assert (ack["runId"], ack["status"]) == ("call-1", "started")
    waited = openclaw.call(gateway, "agent.wait", {"runId": "call-1", "timeoutMs": 20_000}).json
    assert (waited["runId"], waited["status"]) == ("call-1", "ok")
    again = openclaw.call(gateway, "chat.send", sent).json
    assert (again["runId"], again["status"]) == ("call-1", "ok"), "the same key is the same message"

    history = openclaw.call(gateway, "chat.history", {"sessionKey": key, "limit": 10}).json
    assert [(message["role"], text(message)) for message in history["messages"]] == [
        ("user", "say good morning"),
        ("assistant", "good morning"),
    ]
    listed = openclaw.call(gateway, "sessions.list", {"limit": 50}).json
    assert key in {row["key"] for row in listed["sessions"]}
    assert listed["count"] == len(listed["sessions"])


def test_gateway_call_waits_for_the_second_response_of_agent(gateway: Gateway, openclaw: Openclaw) -> None:
    asked = {"message": "say from afar", "sessionKey": MAIN, "idempotencyKey": "call-2"}
    done = openclaw.call(gateway, "agent", asked, "--expect-final").json
    assert (done["runId"], done["status"], done["summary"]) == ("call-2", "ok", "completed")
    assert [payload["text"] for payload in done["result"]["payloads"]] == ["from afar"]


def test_gateway_call_without_waiting_has_the_first_response_of_agent(
    gateway: Gateway, openclaw: Openclaw
) -> None:
    asked = {"message": "slow 1 later", "sessionKey": MAIN, "idempotencyKey": "call-3"}
    accepted = openclaw.call(gateway, "agent", asked).json
    assert (accepted["runId"], accepted["status"]) == ("call-3", "accepted")
    waited = openclaw.call(gateway, "agent.wait", {"runId": "call-3", "timeoutMs": 20_000}).json
    assert waited["status"] == "ok"


def test_gateway_call_changes_and_resets_a_session(gateway: Gateway, openclaw: Openclaw) -> None:
    key = "agent:main:direct:changed"
    asked = {"message": "say kept", "sessionKey": key, "idempotencyKey": "call-4"}
    openclaw.call(gateway, "agent", asked, "--expect-final")
    patched = openclaw.call(gateway, "sessions.patch", {"key": key, "label": "a label"}).json
    assert (patched["ok"], patched["key"], patched["entry"]["label"]) == (True, key, "a label")
    listed = openclaw.call(gateway, "sessions.list", {"label": "a label"}).json
    assert [row["key"] for row in listed["sessions"]] == [key]

    reset = openclaw.call(gateway, "sessions.reset", {"key": key, "reason": "new"}).json
    assert (reset["ok"], reset["key"]) == (True, key)
    history = openclaw.call(gateway, "chat.history", {"sessionKey": key}).json
    # A gateway may mark the reset itself; of the conversation nothing is left.
    assert [message for message in history["messages"] if message["role"] != "system"] == []


@pytest.mark.requirement("S2", "P2", "P4", "L1", "H1")
def test_gateway_call_uses_the_session_tools(gateway: Gateway, openclaw: Openclaw) -> None:
    """The same answers as a model gets: a session asks another one, and has a sub-agent do something."""
    mine = "agent:main:direct:tools"

    def tool(name: str, **args: object) -> dict[str, Any]:
        asked = {"name": name, "args": args, "sessionKey": mine, "idempotencyKey": f"tool-{name}"}
        answer = openclaw.call(gateway, "tools.invoke", asked).json
        assert answer["ok"] is True, answer
        return answer["output"]["details"]

    sent = tool("sessions_send", agentId="helper", message="say here I am", announce="none", replyBack=0)
    assert (sent["status"], sent["reply"], sent["sessionKey"]) == ("ok", "here I am", "agent:helper:main")
    said = tool("sessions_history", sessionKey="agent:helper:main")["messages"]
    assert [message["role"] for message in said] == ["user", "assistant"]
    assert said[0]["provenance"]["sourceSessionKey"] == mine

    spawned = tool("sessions_spawn", task="say forty-two", label="sums")
    waited = openclaw.call(gateway, "agent.wait", {"runId": spawned["runId"], "timeoutMs": 20_000}).json
    assert waited["status"] == "ok"
    rows = {row["key"]: row for row in tool("sessions_list", limit=200)["sessions"]}
    assert rows[spawned["childSessionKey"]]["label"] == "sums"


def test_gateway_call_reports_what_the_gateway_refuses(gateway: Gateway, openclaw: Openclaw) -> None:
    unknown = openclaw.call(gateway, "no.such.method")
    assert unknown.code == 1
    assert "unknown method: no.such.method" in unknown.out + unknown.err
    invalid = openclaw.call(gateway, "sessions.list", {"limit": 0})
    assert invalid.code == 1
    assert "invalid sessions.list params" in invalid.out + invalid.err


def test_a_wrong_token_is_refused(gateway: Gateway, openclaw: Openclaw) -> None:
    address = ("--url", gateway.url, "--token", "wrong", "--timeout", "20000")
    done = openclaw.run("gateway", "call", "health", *address)
    assert done.code == 1
    assert "unauthorized" in done.out + done.err


def test_gateway_health(gateway: Gateway, openclaw: Openclaw) -> None:
    done = openclaw.run("gateway", "health", "--url", gateway.url, "--token", gateway.token)
    assert done.code == 0, done.err
    assert "OK" in done.out


def test_health(gateway: Gateway, openclaw: Openclaw) -> None:
    assert openclaw.run("health", "--json", extra=_address(gateway)).json["ok"] is True
    for_people = openclaw.run("health", extra=_address(gateway))
    assert for_people.code == 0, for_people.err
    assert "main (default)" in for_people.out


def test_agent(gateway: Gateway, openclaw: Openclaw) -> None:
    key = "agent:main:direct:agent"
    said = openclaw.run(
        "agent", "--session-key", key, "--message", "say to a person", extra=_address(gateway)
    )
    assert (said.code, said.out.strip()) == (0, "to a person"), said.err
    done = openclaw.run(
        "agent", "--agent", "main", "--message", "say to a script", "--json", extra=_address(gateway)
    )
    assert done.json["status"] == "ok"
    assert [payload["text"] for payload in done.json["result"]["payloads"]] == ["to a script"]


def _address(gateway: Gateway) -> dict[str, str]:
    return {"OPENCLAW_GATEWAY_URL": gateway.url, "OPENCLAW_GATEWAY_TOKEN": gateway.token}


def text(message: dict[str, object]) -> str:
    """What a message says, whichever of the two shapes its content has."""
    content = message["content"]
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    blocks = cast(list[dict[str, str]], content)
    return "".join(block["text"] for block in blocks if block["type"] == "text")
