"""Events: messages once and in order from any number on, what happens to sessions, and runs as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.bus import Event, EventBus, Gap, RunChanged, SessionChanged
from antiphon.bus.local import MAX_BUFFERED_EVENTS, LocalBus
from antiphon.engine.sessions import transcripts
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.gateway import subscriptions
from antiphon.gateway.ws import connection, frames
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Prompt
from support.app_fixture import (
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    wait_for_event,
    wait_until,
)
from support.gateway_ws import ADMIN, READ, Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W3")]

OTHER = "agent:main:dashboard:other"


async def fill(gateway: GatewayFixture, number: int, session: str = MAIN) -> None:
    await gateway.operations.sessions.open(OPERATOR, session)
    for n in range(number):
        await gateway.operations.transcripts.inject(OPERATOR, session, f"{session} {n}")


async def seqs(client: Client, number: int, session: str = MAIN) -> list[int]:
    return [told["messageSeq"] for told in await client.take("session.message", number, sessionKey=session)]


async def ask(client: Client, message: str = "hello", session: str = MAIN) -> Any:
    """Say it and wait for the last `chat` event of its run."""
    sent = await client.call(
        "chat.send", sessionKey=session, message=message, idempotencyKey=f"{session} {message}"
    )
    return await client.event("chat", runId=sent["runId"], state="final")


# --- messages of one session ---


@pytest.mark.requirement("G38")
async def test_messages_come_once_in_order_and_say_who_they_are(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        answer = await client.call("sessions.messages.subscribe", key="main")
        assert (answer["subscribed"], answer["key"], answer["lastSeq"]) == (True, MAIN, 0)
        await ask(client, "one")
        await ask(client, "two")
        first, *_ = told = await client.take("session.message", 4)
        await client.settled()
    assert [event["messageSeq"] for event in told] == [1, 2, 3, 4]
    assert len(client.list_events("session.message")) == 4
    assert [event["message"]["role"] for event in told] == ["user", "assistant"] * 2
    assert (first["sessionKey"], first["sessionId"]) == (MAIN, answer["sessionId"])
    assert first["message"]["content"] == "one"
    assert first["message"]["__openclaw"] == {"id": first["messageId"], "seq": 1, "runId": f"{MAIN} one"}
    assert [event["message"]["seq"] for event in told] == [1, 2, 3, 4]


async def test_a_token_that_a_person_types_is_not_internal(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key="main")
        await ask(client, "NO_REPLY")
        typed, _ = await client.take("session.message", 2)
    assert (typed["message"]["role"], typed["message"]["content"]) == ("user", "NO_REPLY")
    assert "internal" not in typed["message"]


@pytest.mark.requirement("G38")
@pytest.mark.parametrize(("after", "expected"), [(0, [1, 2, 3, 4, 5]), (2, [3, 4, 5]), (4, [5])])
async def test_a_subscriber_gets_what_came_after_its_number_and_then_what_is_new(
    gateway: GatewayFixture, after: int, expected: list[int]
) -> None:
    await fill(gateway, 4)
    async with gateway.client() as client:
        answer = await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=after)
        assert answer["lastSeq"] == 4
        await fill(gateway, 1)
        assert await seqs(client, len(expected)) == expected
        await client.settled()
        assert client.list_events("session.gap") == []
        assert len(client.list_events("session.message")) == len(expected)


@pytest.mark.requirement("G38")
async def test_a_number_that_was_never_given_out_is_a_gap_and_the_whole_conversation_follows(
    gateway: GatewayFixture,
) -> None:
    await fill(gateway, 2)
    async with gateway.client() as client:
        answer = await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=7)
        gap = await client.event("session.gap")
        assert gap == {"sessionKey": MAIN, "sessionId": answer["sessionId"], "reason": "reset"}
        await fill(gateway, 1)
        assert await seqs(client, 3) == [1, 2, 3]


@pytest.mark.requirement("G38", "G25")
async def test_a_number_of_a_past_conversation_is_a_gap_even_if_it_would_fit(gateway: GatewayFixture) -> None:
    await fill(gateway, 3)
    async with gateway.client() as client:
        past = (await client.call("sessions.describe", key=MAIN))["session"]["sessionId"]
        await client.call("sessions.reset", key=MAIN)
        await fill(gateway, 3)
        answer = await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=2, sessionId=past)
        gap = await client.event("session.gap")
        assert (gap["sessionId"], gap["reason"]) == (answer["sessionId"], "reset")
        assert answer["sessionId"] != past
        told = await client.take("session.message", 3)
        assert [(event["messageSeq"], event["sessionId"]) for event in told] == [
            (n, answer["sessionId"]) for n in (1, 2, 3)
        ]
        await client.call("sessions.messages.unsubscribe", key=MAIN)
        same = await client.call(
            "sessions.messages.subscribe", key=MAIN, afterSeq=2, sessionId=answer["sessionId"]
        )
        assert same["lastSeq"] == 3
        assert await seqs(client, 1) == [3]
        assert len(client.list_events("session.gap")) == 1


@pytest.mark.requirement("G38")
async def test_a_long_history_arrives_whole_while_it_grows(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "HISTORY_PAGE_ENTRIES", 7)
    await fill(gateway, 60)
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        await fill(gateway, 30)
        assert await seqs(client, 90) == list(range(1, 91))
        await client.settled()
        assert len(client.list_events("session.message")) == 90


@pytest.mark.requirement("G38")
async def test_a_history_larger_than_the_outbox_is_told_at_the_pace_of_who_reads(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is more than may wait for a client; it is not dropped for what it never had a chance to read."""
    monkeypatch.setattr(frames, "MAX_BUFFERED_BYTES", 1_000_000)
    monkeypatch.setattr(connection, "LAGGING_SEND_QUEUE_BYTES", 100_000)
    await gateway.operations.sessions.open(OPERATOR, MAIN)
    for _ in range(40):
        await gateway.operations.transcripts.inject(OPERATOR, MAIN, "x" * 100_000)
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        await gateway.operations.transcripts.inject(OPERATOR, MAIN, "new")
        assert await seqs(client, 41) == list(range(1, 42))


async def test_a_reset_is_a_gap_and_counts_from_one_again(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        before = await client.call("sessions.messages.subscribe", key=MAIN)
        await ask(client, "one")
        await client.take("session.message", 2)
        reset = await client.call("sessions.reset", key=MAIN)
        gap = await client.event("session.gap", reason="reset")
        assert gap["sessionId"] == reset["entry"]["sessionId"] != before["sessionId"]
        await ask(client, "two")
        told = await client.take("session.message", 2)
        assert [(event["messageSeq"], event["sessionId"]) for event in told] == [
            (1, gap["sessionId"]),
            (2, gap["sessionId"]),
        ]


async def test_a_deleted_session_ends_its_subscriptions(gateway: GatewayFixture) -> None:
    await fill(gateway, 1, OTHER)
    async with gateway.client() as client:
        for session in (OTHER, MAIN):
            await client.call("sessions.messages.subscribe", key=session)
        assert (await client.call("sessions.delete", key=OTHER))["deleted"]
        assert (await client.event("session.gap"))["reason"] == "ended"
        await fill(gateway, 1, OTHER)  # the key can be used again
        await client.call("sessions.messages.subscribe", key=OTHER, afterSeq=0)
        assert await seqs(client, 1, OTHER) == [1]
        await fill(gateway, 1)
        assert await seqs(client, 1) == [1]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Who catches up waits before every message, as for a client that does not read; called, it goes on."""
    monkeypatch.setattr(subscriptions, "HISTORY_PAGE_ENTRIES", 1)
    monkeypatch.setattr(connection, "LAGGING_SEND_QUEUE_BYTES", -1)

    def over() -> None:
        monkeypatch.undo()
        monkeypatch.setattr(subscriptions, "HISTORY_PAGE_ENTRIES", 1)

    return over


async def test_deleting_a_session_ends_a_feed_that_catches_up(
    gateway: GatewayFixture, patience: Callable[[], None]
) -> None:
    await fill(gateway, 5, OTHER)
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=OTHER, afterSeq=0)
        assert (await client.call("sessions.delete", key=OTHER))["deleted"]
        await fill(gateway, 1, OTHER)
        patience()
        assert (await client.event("session.gap"))["reason"] == "ended"
        await wait_until(lambda: _followed(gateway, 0))
        assert client.list_events("session.message") == []
        await client.call("sessions.messages.subscribe", key=OTHER, afterSeq=0)
        again = await client.event("session.message")
        assert (again["messageSeq"], again["sessionId"]) == (1, await _id(client, OTHER))
        assert len(client.list_events("session.gap")) == 1


async def _id(client: Client, key: str) -> str:
    return (await client.call("sessions.describe", key=key))["session"]["sessionId"]


@pytest.mark.requirement("003-subscribe-messages")
async def test_sessions_do_not_leak_into_each_other(gateway: GatewayFixture) -> None:
    async with gateway.client() as one, gateway.client() as both:
        await one.call("sessions.messages.subscribe", key=MAIN)
        for session in (MAIN, OTHER):
            await both.call("sessions.create", key=session)
            await both.call("sessions.messages.subscribe", key=session)
        for n in range(3):
            await ask(both, f"to main {n}")
            await ask(both, f"to other {n}", OTHER)
        assert await seqs(both, 6) == await seqs(one, 6) == [1, 2, 3, 4, 5, 6]
        assert await seqs(both, 6, OTHER) == [1, 2, 3, 4, 5, 6]
        await one.settled()
    assert {told["sessionKey"] for told in one.list_events("session.message")} == {MAIN}
    for client in (one, both):
        for told in client.list_events("session.message"):
            assert ("other" in str(told["message"]["content"])) is (told["sessionKey"] == OTHER)


async def test_a_subscription_founds_the_session_for_who_may_write_and_only_for_them(
    gateway: GatewayFixture,
) -> None:
    async with gateway.client(gateway.issue(READ)) as reader, gateway.client() as writer:
        error = await reader.refused("sessions.messages.subscribe", key=MAIN)
        assert "was not found" in error["message"]
        assert (await writer.call("sessions.messages.subscribe", key=MAIN))["subscribed"]
        assert (await reader.call("sessions.messages.subscribe", key=MAIN))["subscribed"]
        for mistyped in ("agent:main:dashbord:x", "agent:main:cron:none", "agent:nobody:main"):
            error = await writer.refused("sessions.messages.subscribe", key=mistyped)
            assert error["details"]["type"] == "not_found"
        assert [row["key"] for row in (await writer.call("sessions.list"))["sessions"]] == [MAIN]
        assert len((await writer.call("sessions.list", activeMinutes=0))["sessions"]) == 1


async def test_who_unsubscribes_hears_nothing_more(gateway: GatewayFixture) -> None:
    async with gateway.client() as client, gateway.client() as other:
        for one in (client, other):
            await one.call("sessions.messages.subscribe", key=MAIN)
        await fill(gateway, 1)
        assert await seqs(client, 1) == [1]
        answer = await client.call("sessions.messages.unsubscribe", key="main")
        assert answer == {"subscribed": False, "key": MAIN}
        await fill(gateway, 2)
        assert await seqs(other, 3) == [1, 2, 3]
        await client.settled()
        assert len(client.list_events("session.message")) == 1


async def test_who_unsubscribes_while_catching_up_hears_nothing_more(
    gateway: GatewayFixture, patience: Callable[[], None]
) -> None:
    await fill(gateway, 5)
    async with gateway.client() as client, gateway.client() as other:
        await other.call("sessions.messages.subscribe", key=MAIN)
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        await client.call("sessions.messages.unsubscribe", key=MAIN)
        patience()
        await fill(gateway, 1)
        assert await seqs(other, 1) == [6]
        for _ in range(20):
            await client.settled()
        assert client.list_events("session.message") == []


async def test_subscribing_again_begins_again_and_only_once(
    gateway: GatewayFixture, patience: Callable[[], None]
) -> None:
    await fill(gateway, 5)
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        patience()
        await client.settled()
        assert await seqs(client, 5) == [1, 2, 3, 4, 5]
        await fill(gateway, 1)
        assert await seqs(client, 1) == [6]
        await client.settled()
        assert len(client.list_events("session.message")) == 6


async def test_a_connection_subscribes_to_so_many_sessions_and_no_more(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIPTIONS_PER_CONNECTION", 2)
    async with gateway.client() as client:
        for n in range(2):
            await client.call("sessions.create", key=f"{OTHER}{n}")
            await client.call("sessions.messages.subscribe", key=f"{OTHER}{n}")
        error = await client.refused("sessions.messages.subscribe", key=MAIN)
        assert error["details"]["field"] == "key"
        await client.call("sessions.messages.subscribe", key=f"{OTHER}1")  # one it has already
        await client.call("sessions.messages.unsubscribe", key=f"{OTHER}0")
        await client.call("sessions.messages.subscribe", key=MAIN)


async def test_no_session_is_followed_without_a_subscriber(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=MAIN)
        await wait_until(lambda: _followed(gateway, 1))
        client.abort()
        await wait_until(lambda: _followed(gateway, 0))


async def _followed(gateway: GatewayFixture, number: int) -> bool:
    assert isinstance(gateway.app.bus, LocalBus)
    heard = gateway.app.bus.count_listeners()
    return sum(topic.startswith("session.") and topic != "session.*" for topic in heard) == number


# --- all sessions ---


@pytest.mark.requirement("003-subscribe-sessions")
async def test_who_hears_of_every_session_gets_each_message_once_even_if_subscribed_too(
    gateway: GatewayFixture,
) -> None:
    async with gateway.client() as client:
        await client.call("sessions.subscribe")
        await client.call("sessions.messages.subscribe", key=MAIN)
        await ask(client, "one")
        await ask(client, "two", OTHER)
        await client.event("sessions.changed", sessionKey=OTHER, phase="end")
        for session in (MAIN, OTHER):
            told = client.list_events("session.message", sessionKey=session)
            assert [event["messageSeq"] for event in told] == [1, 2]
        assert (await client.call("sessions.unsubscribe")) == {"subscribed": False}
        heard = len(client.list_events("sessions.changed"))
        await ask(client, "three", OTHER)
        await client.settled()
        assert len(client.list_events("sessions.changed")) == heard
        assert len(client.list_events("session.message", sessionKey=OTHER)) == 2


@pytest.mark.requirement("003-subscribe-sessions", "003-event-sessions-changed")
async def test_what_happens_to_sessions_is_told_with_their_row(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.call("sessions.subscribe")
        await client.call("sessions.create", key=OTHER, label="first")
        created = await client.event("sessions.changed", reason="create")
        assert (created["sessionKey"], created["key"], created["label"]) == (OTHER, OTHER, "first")

        await client.call("sessions.patch", key=OTHER, label="second")
        assert (await client.event("sessions.changed", reason="patch"))["label"] == "second"

        await ask(client, "hello", OTHER)
        message = await client.event("sessions.changed", phase="message")
        end = await client.event("sessions.changed", phase="end")
        assert message["messageSeq"] in {1, 2}, "the latest of those that were gathered"
        assert message["messageId"]
        assert end["runId"] == f"{OTHER} hello"
        assert (end["hasActiveRun"], end["activeRunIds"], end["status"]) == (False, [], "done")

        await client.call("sessions.reset", key=OTHER)
        reset = await client.event("sessions.changed", reason="reset")
        assert reset["sessionId"] != end["sessionId"]

        await client.call("sessions.delete", key=OTHER)
        deleted = await client.event("sessions.changed", reason="delete")
        assert deleted["sessionKey"] == OTHER
        assert deleted["sessionId"] == reset["sessionId"], "clients ignore the end of an unnamed conversation"
        assert "key" not in deleted


async def test_a_run_under_way_shows_in_the_row(tmp_path: Path) -> None:
    going, go = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        going.set()
        await go.wait()
        return "done"

    async with open_gateway(tmp_path, agent) as gateway, gateway.client() as client:
        await client.call("sessions.subscribe")
        await client.call("chat.send", sessionKey=MAIN, message="x", idempotencyKey="r1")
        await wait_for_event(going)
        row = await client.event("sessions.changed", hasActiveRun=True)
        assert row["activeRunIds"] == ["r1"]
        assert len(client.list_events("sessions.changed", phase="start")) == 1
        info = (await client.call("chat.history", sessionKey=MAIN))["sessionInfo"]
        assert (info["hasActiveRun"], info["activeRunIds"]) == (True, ["r1"])
        go.set()
        assert (await client.event("sessions.changed", phase="end"))["activeRunIds"] == []


# --- runs ---


async def test_an_answer_is_told_as_it_grows_and_then_as_a_whole(tmp_path: Path) -> None:
    told_of, go_on = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> AsyncGenerator[str]:
        yield "one "
        told_of.set()
        await go_on.wait()
        yield "two "
        yield "three"

    async with open_gateway(tmp_path, agent) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey="main", message="count", idempotencyKey="r1")
        await wait_for_event(told_of)
        first = await client.event("chat", state="delta")
        assert first["deltaText"] == "one "
        assert first["message"]["content"] == [{"type": "text", "text": "one "}]
        assert first["message"]["role"] == "assistant"
        go_on.set()
        final = await client.event("chat", state="final")
        await client.settled()
        deltas = client.list_events("chat", state="delta")
    assert "".join(delta["deltaText"] for delta in deltas) == "one two three"
    assert [event["seq"] for event in (*deltas, final)] == list(range(1, len(deltas) + 2))
    assert (final["runId"], final["sessionKey"], final["stopReason"]) == ("r1", MAIN, "stop")
    assert final["message"]["content"][0]["text"] == "one two three"
    assert len(client.list_events("chat", state="final")) == 1
    streams = [(event["stream"], event["data"].get("phase")) for event in client.list_events("agent")]
    assert streams == [("lifecycle", "start"), ("lifecycle", "end")]
    numbers = [event["seq"] for event in client.list_events("agent")]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_failure_is_told_as_an_error(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, None) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey="main", message="fail no luck", idempotencyKey="r1")
        error = await client.event("chat", state="error")
        assert (error["runId"], error["sessionKey"]) == ("r1", MAIN)
        assert "no luck" in error["errorMessage"]
        lifecycle = await client.event("agent", stream="lifecycle", runId="r1")
        ended = await client.event("agent", stream="lifecycle", runId="r1")
        assert (lifecycle["data"]["phase"], ended["data"]["phase"]) == ("start", "error")
        assert "no luck" in ended["data"]["error"]


async def test_stopping_is_told_as_aborted(tmp_path: Path) -> None:
    going = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        going.set()
        await asyncio.Event().wait()
        return ""

    async with open_gateway(tmp_path, agent) as gateway, gateway.client() as client:
        await client.call("chat.send", sessionKey="main", message="x", idempotencyKey="r1")
        await wait_for_event(going)
        queued = await client.call("chat.send", sessionKey="main", message="y", idempotencyKey="r2")
        assert queued["status"] == "started"
        stopped = await client.call("chat.abort", sessionKey="main")
        assert sorted(stopped["runIds"]) == ["r1", "r2"]
        for run in ("r1", "r2"):
            aborted = await client.event("chat", state="aborted", runId=run)
            assert aborted["stopReason"] == "rpc"


async def test_tools_are_told_of_to_who_wants_to_hear_of_them(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, _looks, tools=lambda _: [make_tool("look", _look)]) as gateway,
        gateway.client(caps=["tool-events"]) as keen,
        gateway.client() as plain,
    ):
        await ask(keen)
        start, result = await keen.take("agent", 2, stream="tool")
        await plain.event("chat", state="final")
        await plain.settled()
        assert (start["data"]["phase"], start["data"]["name"]) == ("start", "look")
        assert (result["data"]["phase"], result["data"]["isError"]) == ("result", False)
        assert start["data"]["toolCallId"] == result["data"]["toolCallId"]
        assert plain.list_events("agent", stream="tool") == []


async def _looks(prompt: Prompt) -> AssistantMessage:
    return make_tool_calls("look") if len(prompt.messages) == 1 else make_answer("seen")


async def _look(call: ToolRequest) -> ToolOutput:
    return ToolOutput(text="a view")


@pytest.mark.requirement("W7", "SEC11", "003-subscribe-sessions")
async def test_who_may_not_read_is_told_nothing(tmp_path: Path) -> None:
    async with (
        open_gateway(tmp_path, _looks, tools=lambda _: [make_tool("look", _look)]) as gateway,
        gateway.client() as owner,
        gateway.client(scopes=[], caps=["tool-events"]) as blind,
    ):
        for method in ("sessions.subscribe", "sessions.messages.subscribe"):
            params = {"key": MAIN} if "messages" in method else {}
            assert (await blind.refused(method, **params))["message"] == "missing scope: operator.read"
        await owner.call("sessions.subscribe")
        await ask(owner)
        await owner.event("sessions.changed", phase="end")
        await blind.settled()
        assert [event["event"] for event in blind.events] == ["connect.challenge"]
        assert blind.hello["snapshot"]["presence"] == []


# --- lost events ---


Publish = Callable[[str, Event], None]


def _unrelated(publish: Publish) -> None:
    """More than a listener holds: everything it had is dropped and replaced by a gap."""
    for n in range(MAX_BUFFERED_EVENTS + 10):
        publish("session.0", SessionChanged(session_key=f"agent:main:dashboard:{n}", reason="message"))


def _losing(bus: EventBus, which: Callable[[Event], bool], *, after: bool) -> Publish:
    """The bus, overflowing right after (or before) the events in question."""
    publish = bus.publish

    def overflowing(topic: str, event: Event) -> None:
        if topic.startswith("session.") and which(event) and not after:
            _unrelated(publish)
        publish(topic, event)
        if topic.startswith("session.") and which(event) and after:
            _unrelated(publish)

    return overflowing


def _is_end(event: Event) -> bool:
    return isinstance(event, RunChanged) and event.state not in ("queued", "running")


def _is_anything(event: Event) -> bool:
    return not isinstance(event, Gap)


@pytest.mark.requirement("G38")
@pytest.mark.parametrize("which", [_is_end, _is_anything])
@pytest.mark.parametrize("after", [True, False], ids=["lost", "late"])
async def test_the_end_of_a_run_is_sent_once_although_the_bus_loses_events(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch, which: Callable[[Event], bool], after: bool
) -> None:
    bus = gateway.app.bus
    async with gateway.client() as client, gateway.client() as other:
        await other.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        monkeypatch.setattr(bus, "publish", _losing(bus, which, after=after))
        for n in range(3):
            final = await ask(client, f"word {n}")
            assert final["sessionKey"] == MAIN
            assert final["message"]["content"][0]["text"] == f"heard word {n}"
        monkeypatch.undo()
        assert await seqs(other, 6) == [1, 2, 3, 4, 5, 6]
        await ask(client, "last", OTHER)
        await client.settled()
        await other.settled()
        for one in (client, other):
            finals = [
                told["runId"] for told in one.list_events("chat", state="final") if told["sessionKey"] == MAIN
            ]
            assert sorted(finals) == sorted(set(finals))
        assert len(client.list_events("chat", state="final")) == 4
        assert len(other.list_events("session.message")) == 6


async def test_only_admins_hear_nothing_special(gateway: GatewayFixture) -> None:
    """What is told depends on `operator.read`, which the other scopes imply."""
    async with gateway.client(scopes=[ADMIN]) as admin, gateway.client(gateway.issue(READ)) as reader:
        await ask(admin)
        assert (await reader.event("chat", state="final"))["runId"] == f"{MAIN} hello"


# --- a conversation that comes back ---


@pytest.mark.requirement("G38", "G25")
async def test_a_restored_conversation_goes_on_after_its_last_number(gateway: GatewayFixture) -> None:
    await fill(gateway, 6)
    async with gateway.client() as early, gateway.client() as late:
        past = await _id(early, MAIN)
        await early.call("sessions.reset", key=MAIN)
        await early.call("sessions.messages.subscribe", key=MAIN)
        await early.call("sessions.restore", sessionId=past)
        assert (await early.event("session.gap"))["sessionId"] == past
        answer = await late.call("sessions.messages.subscribe", key=MAIN)
        assert (answer["sessionId"], answer["lastSeq"]) == (past, 6)
        await fill(gateway, 1)
        for client in (early, late):
            assert await seqs(client, 1) == [7]
            await client.settled()
            assert len(client.list_events("session.message")) == 1


@pytest.mark.requirement("G38")
async def test_who_catches_up_gets_everything_however_few_fit_a_page(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MAX_PAGE_BYTES", 1)
    await fill(gateway, 5)
    async with gateway.client() as client:
        await client.call("sessions.messages.subscribe", key=MAIN, afterSeq=0)
        await fill(gateway, 1)
        assert await seqs(client, 6) == [1, 2, 3, 4, 5, 6]


# --- many subscriptions ---


class _Unwalked(dict[str, Any]):
    """For looking up, and not for going through."""

    def __iter__(self) -> Any:
        raise AssertionError("every session was looked at")


async def test_who_comes_and_goes_is_not_looked_for_in_every_session(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: Any = gateway.served.hub.subscriptions
    monkeypatch.setattr(held, "_followed_sessions", _Unwalked())
    async with gateway.client() as stays:
        await stays.call("sessions.create", key=OTHER)
        await stays.call("sessions.messages.subscribe", key=MAIN)
        async with gateway.client() as goes:
            for session in (MAIN, OTHER):
                await goes.call("sessions.messages.subscribe", key=session)
            await goes.call("sessions.messages.subscribe", key=OTHER, afterSeq=0)
            await goes.call("sessions.messages.unsubscribe", key=MAIN)
        await wait_until(lambda: _followed(gateway, 1))
        assert len(held._sessions_by_connection) == 1
        await stays.call("sessions.messages.unsubscribe", key=MAIN)
        assert (len(held._sessions_by_connection), len(held._followed_sessions)) == (0, 0)
