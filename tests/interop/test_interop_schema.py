"""What this gateway sends agrees with `protocol.schema.json` of `@openclaw/gateway-protocol`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from interop.wire import Frame, Wire, published, wired
from support.interop_processes import MAIN, Gateway, start_gateway

pytestmark = pytest.mark.requirement("W6")

EVENTS = {"chat": "ChatEvent", "agent": "AgentEvent", "tick": "TickEvent", "shutdown": "ShutdownEvent"}
RESULTS: list[tuple[str, dict[str, object], str]] = [
    ("agents.list", {}, "AgentsListResult"),
    ("models.list", {}, "ModelsListResult"),
    ("agent.identity.get", {"agentId": "main"}, "AgentIdentityResult"),
    ("sessions.resolve", {"key": "main"}, "SessionsResolveResult"),
    ("sessions.search", {"query": "word"}, "SessionsSearchResult"),
    ("sessions.create", {}, "SessionsCreateResult"),
    ("channels.status", {}, "ChannelsStatusResult"),
    ("tools.catalog", {}, "ToolsCatalogResult"),
    ("tools.effective", {"sessionKey": MAIN}, "ToolsEffectiveResult"),
    ("tools.invoke", {"name": "no_such_tool", "args": {}, "sessionKey": MAIN}, "ToolsInvokeResult"),
    ("logs.tail", {"limit": 5}, "LogsTailResult"),
    ("commands.list", {}, "CommandsListResult"),
    ("question.list", {}, "QuestionListResult"),
]


def ended(key: str) -> Callable[[Frame], bool]:
    def wanted(frame: Frame) -> bool:
        if frame.get("event") != "chat" or frame["payload"]["runId"] != key:
            return False
        return frame["payload"]["state"] in ("final", "error", "aborted")

    return wanted


def take_turns(wire: Wire, name: str) -> None:
    """Turns that go well, fail, are stopped and call a tool: their runs are `<name>-well` and so on."""
    wire.call("sessions.subscribe", {})
    wire.call("sessions.messages.subscribe", {"key": MAIN})
    turns = {
        "well": "think first\nslow 1 word by word",
        "failed": "fail on purpose",
        "stopped": "slow 50 a long one",
        "tool": "call sessions_list {}",
    }
    for ending, text in turns.items():
        run = f"{name}-{ending}"
        wire.call("chat.send", {"sessionKey": "main", "message": text, "idempotencyKey": run})
        if ending == "stopped":
            wire.call("chat.abort", {"sessionKey": "main", "runId": run})
        wire.until(ended(run))


def mistakes(wire: Wire) -> list[str]:
    """Against the schema, in everything that came over this connection."""
    event, response = published("EventFrame", closed=True), published("ResponseFrame", closed=True)
    found = [
        error for frame in wire.frames for error in (response if frame["type"] == "res" else event)(frame)
    ]
    for name, definition in EVENTS.items():
        check = published(definition)
        found += [error for frame in wire.events(name) for error in check(frame["payload"])]
    row = published("SessionRow")
    for frame in wire.events("sessions.changed"):
        found += row(frame["payload"]) if "key" in frame["payload"] else []
    presence = published("PresenceEntry")
    for frame in wire.events("presence"):
        found += [error for entry in frame["payload"]["presence"] for error in presence(entry)]
    return found


@pytest.mark.parametrize("protocol", [4, 3])
def test_hello_and_the_events_of_turns(gateway: Gateway, protocol: int) -> None:
    with wired(gateway, protocol) as (wire, hello):
        assert hello["protocol"] == protocol
        assert published("HelloOk")(hello) == []
        take_turns(wire, name := f"v{protocol}")
        states = {(frame["payload"]["runId"], frame["payload"]["state"]) for frame in wire.events("chat")}
        assert {
            (f"{name}-well", "delta"),
            (f"{name}-well", "final"),
            (f"{name}-failed", "error"),
            (f"{name}-stopped", "aborted"),
        } <= states
        streams = {frame["payload"]["stream"] for frame in wire.events("agent")}
        assert "lifecycle" in streams
        assert "assistant" not in streams, "the text of `chat` events again"
        assert mistakes(wire) == []


def test_every_event_is_announced_and_numbered(gateway: Gateway) -> None:
    with wired(gateway) as (wire, hello):
        take_turns(wire, "numbered")
        frames = [frame for frame in wire.frames if frame["type"] == "event"]
        assert {frame["event"] for frame in frames} <= set(hello["features"]["events"])
        numbers = [frame["seq"] for frame in frames if "seq" in frame]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize(("method", "params", "definition"), RESULTS, ids=[name for name, *_ in RESULTS])
def test_results(gateway: Gateway, method: str, params: dict[str, object], definition: str) -> None:
    with wired(gateway) as (wire, hello):
        assert method in hello["features"]["methods"]
        assert published(definition)(wire.call(method, params)) == []


def test_rows(gateway: Gateway) -> None:
    with wired(gateway) as (wire, _):
        asked = {"sessionKey": "main", "message": "say hello", "idempotencyKey": "r1"}
        wire.call("chat.send", asked)
        wire.until(ended("r1"))
        row = published("SessionRow")
        listed = wire.call("sessions.list", {"includeLastMessage": True, "includeDerivedTitles": True})
        assert listed["sessions"]
        assert [error for session in listed["sessions"] for error in row(session)] == []
        assert row(wire.call("sessions.describe", {"key": "main"})["session"]) == []


def test_ticks_and_the_end(tmp_path: Path) -> None:
    with start_gateway(tmp_path) as gateway, wired(gateway) as (wire, hello):
        tick = hello["policy"]["tickIntervalMs"]
        assert tick <= 30_000, "clients close a connection that was silent for two of these"
        wire.until(lambda frame: frame.get("event") == "tick")
        assert gateway.stop() == 0
        code = wire.rest()
        assert [frame["event"] for frame in wire.events("shutdown")] == ["shutdown"]
        assert code == 1012, "service restart: clients come back"
        assert mistakes(wire) == []
