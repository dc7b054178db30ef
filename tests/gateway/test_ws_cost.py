"""What events cost on the wire: an answer what it says, and a change of a session its row once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.bus import EVERY_SESSION_TOPIC, Delta, Event, MessageAppended
from antiphon.engine.runs import deltas
from antiphon.gateway import run_streams
from antiphon.gateway.hub import Hub
from antiphon.gateway.ws import connection
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_for_event, wait_until
from support.gateway_ws import Client, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W9")]

KIB = 1024
PIECE = "and so it goes on, "
ANSWER = PIECE * (50 * KIB // len(PIECE))
HELPER = "agent:helper:main"
WINDOW = {"id": "openclaw-tui", "version": "2026.9.6", "platform": "linux", "mode": "ui"}
APP = {**WINDOW, "id": "openclaw-ios"}


def wire_bytes(client: Client) -> int:
    """Of all events that a client was sent. What is sent has no spaces, as what is encoded here."""
    return sum(len(msgspec.json.encode(frame)) for frame in client.events)


def texts(client: Client) -> str:
    """An answer put together from its increments."""
    text = ""
    for payload in client.list_events("chat", state="delta"):
        text = payload["deltaText"] if payload.get("replace") else text + payload["deltaText"]
    return text


async def says_a_lot(prompt: Prompt) -> AsyncGenerator[str]:
    for _ in range(len(ANSWER) // len(PIECE)):
        yield PIECE
        await asyncio.sleep(0)


@pytest.fixture
def every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two pieces of an answer are one event of the engine, however fast they come."""
    monkeypatch.setattr(deltas, "DELTA_INTERVAL_SECONDS", 0.0)


@pytest.mark.usefixtures("every_piece")
@pytest.mark.parametrize("caps", [[], ["chat-deltas"], ["tool-events", "chat-deltas"]])
async def test_a_long_answer_costs_a_reader_of_protocol_4_what_it_says(
    tmp_path: Path, caps: list[str]
) -> None:
    async with open_gateway(tmp_path, says_a_lot) as gateway, gateway.client(caps=caps) as client:
        await client.call("chat.send", sessionKey="main", message="go on", idempotencyKey="r1")
        final = await client.event("chat", state="final")
        streams = {event["stream"] for event in client.list_events("agent")}
        assert wire_bytes(client) < 150_000
    assert texts(client) == final["message"]["content"][0]["text"] == ANSWER
    pieces = client.list_events("chat", state="delta")
    assert len(pieces) > 1, "it was not streamed"
    assert all("message" not in piece for piece in pieces[1:])
    assert ("message" in pieces[0]) == ("chat-deltas" not in caps)
    assert [piece["seq"] for piece in (*pieces, final)] == list(range(1, len(pieces) + 2))
    assert "assistant" not in streams, "the same text by another event"


@pytest.mark.usefixtures("every_piece")
@pytest.mark.parametrize("change", [{"maxProtocol": 3}, {"client": WINDOW}, {"client": APP}])
async def test_who_needs_the_whole_is_sent_it_in_one_form_and_seldom_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(run_streams, "FULL_TEXT_INTERVAL_SECONDS", 0.0)
    async with open_gateway(tmp_path, says_a_lot) as gateway, gateway.client(**change) as client:
        await client.call("chat.send", sessionKey="main", message="go on", idempotencyKey="r1")
        final = await client.event("chat", state="final")
        assert wire_bytes(client) < 150_000
    assert final["message"]["content"][0]["text"] == ANSWER
    pieces = client.list_events("chat", state="delta")
    by_chat = [piece["message"]["content"][0]["text"] for piece in pieces]
    by_agent = [event["data"]["text"] for event in client.list_events("agent", stream="assistant")]
    grown = by_agent if change.get("client") == APP else by_chat
    assert by_chat + by_agent == grown, "the same text by another event"
    assert len(grown) > 10, "it was not streamed"
    assert all(len(after) > 1.1 * len(before) for before, after in pairwise(grown))
    assert all(ANSWER.startswith(text) for text in grown)
    assert {piece["deltaText"] for piece in pieces} <= {""}, "the same text as an increment"


async def test_who_comes_later_is_sent_what_was_said_before(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        begun.set()
        await go_on.wait()
        yield "two"

    async with open_gateway(tmp_path, agent) as gateway, gateway.client(caps=["chat-deltas"]) as early:
        await early.call("chat.send", sessionKey="main", message="count", idempotencyKey="r1")
        await wait_for_event(begun)
        await early.event("chat", state="delta")
        async with gateway.client(caps=["chat-deltas"]) as late:
            go_on.set()
            await late.event("chat", state="final")
            await early.event("chat", state="final")
            assert [texts(early), texts(late)] == ["one two", "one two"]


async def test_who_connects_while_no_one_else_is_connected_is_sent_what_was_said_before(
    tmp_path: Path,
) -> None:
    go_on = [asyncio.Event() for _ in range(2)]

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        for number, event in enumerate(go_on):
            await event.wait()
            yield f"{number} "

    async with open_gateway(tmp_path, agent) as gateway:
        async with gateway.client(caps=["chat-deltas"]) as early:
            await early.call("chat.send", sessionKey="main", message="count", idempotencyKey="r1")
            await early.event("chat", state="delta")

        async def is_alone() -> bool:
            return not gateway.served.hub.connections

        await wait_until(is_alone)
        async with gateway.app.bus.listen(EVERY_SESSION_TOPIC) as events, asyncio.timeout(BOUND):
            go_on[0].set()
            while not isinstance(await events.get(), Delta):
                pass
        async with gateway.client(caps=["chat-deltas"]) as late:
            go_on[1].set()
            await late.event("chat", state="final")
            assert texts(late) == "one 0 1 "


async def test_who_subscribes_during_an_answer_is_sent_the_whole_text_again(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        await go_on.wait()
        yield "two"

    async with open_gateway(tmp_path, agent) as gateway, gateway.client(caps=["chat-deltas"]) as client:
        await client.call("chat.send", sessionKey="main", message="count", idempotencyKey="r1")
        await client.event("chat", state="delta")
        await client.call("sessions.messages.subscribe", key="main")
        go_on.set()
        await client.event("chat", state="final")
        pieces = client.list_events("chat", state="delta")
        assert [(piece["deltaText"], piece.get("replace")) for piece in pieces] == [
            ("one ", None),
            ("one two", True),
        ]


async def test_who_lags_is_sent_no_text_with_a_hole_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), [asyncio.Event(), asyncio.Event()]

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        begun.set()
        for number, event in enumerate(go_on):
            await event.wait()
            yield f"{number} "

    async with (
        open_gateway(tmp_path, agent) as gateway,
        gateway.client(caps=["chat-deltas"]) as client,
        gateway.client(caps=["chat-deltas"]) as other,
    ):
        await client.call("chat.send", sessionKey="main", message="count", idempotencyKey="r1")
        await wait_for_event(begun)
        for each in (client, other):
            await each.event("chat", state="delta")
        [lagging] = [
            each for each in gateway.served.hub.connections if each.id == client.hello["server"]["connId"]
        ]
        with monkeypatch.context() as patches:
            patches.setattr(lagging, "_waiting_bytes", connection.LAGGING_SEND_QUEUE_BYTES + 1)
            go_on[0].set()
            await other.event("chat", state="delta")
        go_on[1].set()
        final = await client.event("chat", state="final")
        await other.event("chat", state="final")
        assert [texts(client), texts(other)] == ["one ", "one 0 1 "]
        assert final["message"]["content"][0]["text"] == "one 0 1 "


@pytest.mark.usefixtures("every_piece")
@pytest.mark.parametrize(("late", "streamed"), [(Delta, "like"), (MessageAppended, "like this")])
async def test_no_increment_comes_after_the_entry_that_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: type[Event], streamed: str
) -> None:
    """Whether the last increment or only the entry reaches the hub late."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "like"
        begun.set()
        await go_on.wait()
        yield " this"

    held: list[Event] = []
    hear = Hub._handle_event  # pyright: ignore[reportPrivateUsage]

    def hear_late(hub: Hub, event: Event) -> None:
        if held or (isinstance(event, late) and go_on.is_set()):
            held.append(event)
        else:
            hear(hub, event)

    monkeypatch.setattr(run_streams, "MIN_DELTA_SECONDS", BOUND)
    async with open_gateway(tmp_path, agent) as gateway, gateway.client(caps=["chat-deltas"]) as client:
        await client.call("sessions.messages.subscribe", key="main", afterSeq=0)
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="r1")
        await wait_for_event(begun)
        await client.event("chat", state="delta")
        with monkeypatch.context() as patches:
            patches.setattr(Hub, "_handle_event", hear_late)
            go_on.set()
            await client.event("session.message", messageSeq=2)
        for event in held:
            hear(gateway.served.hub, event)
        await client.event("chat", state="final")
        names = [frame["event"] for frame in client.events if frame["payload"].get("state") != "final"]
        assert texts(client) == streamed
        assert "chat" not in names[names.index("session.message", names.index("chat")) :]


async def test_changes_of_a_session_are_gathered_with_one_row(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        await client.call("sessions.subscribe")
        await client.call("chat.send", sessionKey="main", message="say x", idempotencyKey="r1")
        end = await client.event("sessions.changed", phase="end")
        told = client.list_events("sessions.changed", sessionKey=MAIN)
        assert "session" not in end
        assert (end["hasActiveRun"], end["activeRunIds"]) == (False, [])
        kinds = Counter(change.get("phase") or change.get("reason") for change in told if "key" not in change)
        assert set(kinds) <= {"create", "start", "message"}, "only earlier changes come without the row"


async def test_one_exchange_and_one_spawn_cost_a_subscriber_little(tmp_path: Path) -> None:
    settings = {
        "agents": {
            "list": [
                {"id": "main", "default": True, "subagents": {"allowAgents": ["helper"]}},
                {"id": "helper"},
            ]
        }
    }
    async with (
        open_gateway(tmp_path, None, settings=settings) as gateway,
        gateway.client() as client,
        gateway.client() as subscriber,
    ):
        for key in (MAIN, HELPER):
            await gateway.operations.sessions.open(OPERATOR, key)
        await subscriber.call("sessions.subscribe")
        asked = {"key": HELPER, "message": "say say pong", "fromSessionKey": "main", "idempotencyKey": "k1"}
        sent = await client.call("sessions.send", **asked, timeoutSeconds=BOUND)
        assert sent["status"] == "ok"
        await client.call("sessions.spawn", task="say 42", label="calc", idempotencyKey="k2")

        async def settled() -> bool:
            [task] = (await client.call("subagents.list", sessionKey="main"))["subagents"]
            unfinished = [
                await gateway.operations.runs.list_unfinished(OPERATOR, key) for key in (MAIN, HELPER)
            ]
            return task["phase"] == "settled" and not any(unfinished)

        await wait_until(settled)
        await subscriber.settled()
        spent = Counter[str]()
        for frame in subscriber.events:
            spent[frame["event"]] += len(msgspec.json.encode(frame))
        assert not [row for row in subscriber.list_events("sessions.changed") if "transcriptPath" in row]
        assert spent.total() < 24_000, spent
