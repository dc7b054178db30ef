"""`@openclaw/gateway-client`, the published reference client, holds a turn with this gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.interop_processes import MODULES, NODE, Gateway, Openclaw, run_program

pytestmark = pytest.mark.requirement("W6")

SCRIPT = Path(__file__).with_name("client.mjs")
KEY = "agent:main:direct:client"


def test_the_reference_client_holds_a_turn(gateway: Gateway, openclaw: Openclaw) -> None:
    environ = {**openclaw.environ, "OPENCLAW_GATEWAY_TOKEN": gateway.token}
    seen = run_program([str(NODE), str(SCRIPT), str(MODULES), gateway.url, KEY], environ).json
    assert seen["hello"]["type"] == "hello-ok"
    assert seen["hello"]["protocol"] == 4
    assert seen["health"]["ok"] is True
    assert (seen["subscribed"]["subscribed"], seen["subscribed"]["key"]) == (True, KEY)
    assert (seen["ack"]["runId"], seen["ack"]["status"]) == ("client-1", "started")

    chat = payloads(seen, "chat")
    assert {(payload["runId"], payload["sessionKey"]) for payload in chat} == {("client-1", KEY)}
    said = "".join(payload["deltaText"] for payload in chat if payload["state"] == "delta")
    assert "word by word".startswith(said), "the parts of an answer make the answer"
    assert said, "an answer that takes a second comes in parts"
    assert chat[-1]["state"] == "final"
    assert chat[-1]["message"]["content"] == [{"type": "text", "text": "word by word"}]

    messages = payloads(seen, "session.message")
    assert [message["message"]["role"] for message in messages] == ["user", "assistant"]
    assert {message["sessionKey"] for message in messages} == {KEY}
    assert KEY in {row["key"] for row in seen["sessions"]["sessions"]}
    assert (seen["unsubscribed"]["subscribed"], seen["unsubscribed"]["key"]) == (False, KEY)
    assert "invalid sessions.list params" in seen["refused"]
    assert seen["gaps"] == [], "the numbers of the events have no gap"
    assert seen["closesBeforeStop"] == 0


def payloads(seen: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [frame["payload"] for frame in seen["events"] if frame["event"] == event]
