"""Transcripts over HTTP: pages, streams that miss and repeat nothing, and stopping."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from antiphon.gateway.http import responses
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Prompt
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    wait_for_event,
    wait_until,
)
from support.gateway_http import HttpGatewayFixture, open_event_stream, open_http_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W4")]

HISTORY = f"/sessions/{quote(MAIN, safe='')}/history"


async def test_a_page_is_the_raw_transcript_with_ids_and_numbers(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    page = (await http_gateway.http.get(HISTORY)).json()
    assert page["sessionKey"] == MAIN
    assert page["items"] == page["messages"]
    assert (page["total"], page["hasMore"]) == (2, False)
    assert "nextCursor" not in page
    first = page["messages"][0]
    assert (first["role"], first["content"], first["seq"]) == ("user", "one", 1)
    assert first["__openclaw"] == {"id": first["id"], "seq": 1}
    assert page["sessionId"]


@pytest.mark.requirement("003-http-history-parameters")
async def test_pages_lead_back_to_the_beginning(http_gateway: HttpGatewayFixture) -> None:
    for word in ("one", "two", "three"):
        await http_gateway.ask(word)
    seen: list[int] = []
    cursor = ""
    while True:
        page = (await http_gateway.http.get(f"{HISTORY}?limit=4{cursor}")).json()
        seen = [item["seq"] for item in page["items"]] + seen
        if not page["hasMore"]:
            break
        cursor = f"&cursor=seq:{page['nextCursor']}"
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [i["seq"] for i in (await http_gateway.http.get(f"{HISTORY}?cursor=3")).json()["items"]] == [1, 2]


@pytest.mark.requirement("003-http-history-parameters")
async def test_tool_results_are_shown_when_asked_for(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("look") if len(prompt.messages) == 1 else make_answer("seen")

    async with open_http_gateway(tmp_path, agent, tools=lambda _: [_look()]) as http_gateway:
        await http_gateway.ask("go")
        roles = [item["role"] for item in (await http_gateway.http.get(HISTORY)).json()["items"]]
        all_roles = [
            item["role"]
            for item in (await http_gateway.http.get(f"{HISTORY}?includeTools=1")).json()["items"]
        ]
        assert roles == ["user", "assistant", "assistant"]
        assert all_roles == ["user", "assistant", "toolResult", "assistant"]


def _look() -> Any:
    from antiphon.engine.toolbox import ToolOutput, ToolRequest

    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="a view")

    return make_tool("look", look)


async def test_a_wrong_question_is_answered_with_400_and_the_name_of_the_field(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    for query, field in (
        ("limit=0", "limit"), ("limit=x", "limit"), ("limit=-1", "limit"),
        ("limit=", "limit"), ("limit=٣", "limit"), ("cursor=x", "cursor"), ("cursor=seq:", "cursor"),
        ("cursor=" + "9" * 30, "cursor"), ("includeTools=maybe", "includeTools"), ("follow=2", "follow"),
    ):  # fmt: skip
        reply = await http_gateway.http.get(f"{HISTORY}?{query}")
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request"), query
        assert field in error["message"]


async def test_more_than_there_can_be_is_as_much_as_there_can_be(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    for limit in ("1001", "1000000000", "9" * 30):
        reply = await http_gateway.http.get(f"{HISTORY}?limit={limit}")
        assert (reply.status_code, reply.json()["total"]) == (200, 2), limit


@pytest.mark.requirement("003-http-history-unknown")
async def test_a_session_that_is_not_there_is_not_found(http_gateway: HttpGatewayFixture) -> None:
    empty = ("agent:main:telegram:group:", "agent:main:cron:", "agent::main", "cron:", "agent:main:")
    for path in ("agent:main:nothing", "nothing", "agent%3Amain%3Anothing", "unknown", "global", *empty):
        reply = await http_gateway.http.get(f"/sessions/{path}/history")
        assert reply.status_code == 404
        assert reply.json() == {
            "ok": False,
            "error": {"type": "not_found", "message": reply.json()["error"]["message"]},
        }
        assert (await http_gateway.http.get(f"/sessions/{path}/history?follow=1")).status_code == 404


async def test_the_key_is_decoded_exactly_once(http_gateway: HttpGatewayFixture) -> None:
    key = "agent:main:telegram:group:a/b c%2F+é"
    await http_gateway.ask("hello", key)
    reply = await http_gateway.http.get(f"/sessions/{quote(key, safe='')}/history")
    assert reply.status_code == 200, reply.text
    assert reply.json()["sessionKey"] == key


async def test_a_path_that_names_no_session_is_refused(http_gateway: HttpGatewayFixture) -> None:
    for path in ("/sessions//history", "/sessions/%20/history", "/sessions/%FF%FE/history"):
        reply = await http_gateway.http.get(path)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request"), path
    assert (await http_gateway.http.get("/sessions/%73/h%69story")).status_code == 400


@pytest.mark.requirement("003-http-history-parameters", "003-http-history-follow")
async def test_a_stream_begins_with_the_history_and_goes_on_with_each_entry(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1&limit=1") as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["x-content-type-options"] == "nosniff"
        first, history = await stream.take(2)
        assert first.retry == "1000"
        assert history.event == "history"
        assert [item["seq"] for item in history.json["items"]] == [2]
        await http_gateway.ask("two")
        told = await stream.take(2)
        session_id = history.json["sessionId"]
        assert [event.event for event in told] == ["message", "message"]
        assert [event.id for event in told] == [f"{session_id}:3", f"{session_id}:4"]
        data = told[0].json
        assert (data["sessionKey"], data["sessionId"], data["messageSeq"]) == (MAIN, session_id, 3)
        assert data["message"]["content"] == "two"
        assert data["messageId"] == data["message"]["id"] == data["message"]["__openclaw"]["id"]


async def test_an_accept_header_asks_for_a_stream_too(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    async with open_event_stream(
        http_gateway.http, HISTORY, headers={"Accept": "text/event-stream"}
    ) as stream:
        assert (await stream.take(2))[1].event == "history"
    head = await http_gateway.http.head(f"{HISTORY}?follow=1")
    assert (head.status_code, head.content) == (200, b"")


async def test_a_live_stream_leaves_tool_results_out_unless_they_are_wanted(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("look") if len(prompt.messages) == 1 else make_answer("seen")

    async with open_http_gateway(tmp_path, agent, tools=lambda _: [_look()]) as http_gateway:
        await http_gateway.app.operations.sessions.open(OPERATOR, MAIN)
        async with (
            open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as plain,
            open_event_stream(http_gateway.http, f"{HISTORY}?follow=1&includeTools=1") as full,
        ):
            await asyncio.gather(plain.take(2), full.take(2))
            await http_gateway.ask("go")
            assert [event.json["message"]["role"] for event in await full.take(4)] == [
                "user", "assistant", "toolResult", "assistant",
            ]  # fmt: skip
            assert [event.json["messageSeq"] for event in await plain.take(3)] == [1, 2, 4]


async def test_a_returning_client_gets_what_it_missed_and_nothing_twice(
    http_gateway: HttpGatewayFixture,
) -> None:
    await http_gateway.ask("one")
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
        place = (await stream.take(2))[1].id
    assert place is not None
    await http_gateway.ask("two")
    async with open_event_stream(
        http_gateway.http, f"{HISTORY}?follow=1", headers={"Last-Event-ID": place}
    ) as stream:
        events = await stream.take(3)
        assert [event.event for event in events[1:]] == ["message", "message"]
        assert [event.json["messageSeq"] for event in events[1:]] == [3, 4]
        await http_gateway.ask("three")
        assert [event.json["messageSeq"] for event in await stream.take(2)] == [5, 6]


async def test_many_readers_that_are_cut_off_while_much_is_said_see_every_entry_once(
    http_gateway: HttpGatewayFixture,
) -> None:
    runs = 40
    await http_gateway.app.operations.sessions.open(OPERATOR, MAIN)

    async def read(patience: int) -> list[int]:
        """Hang up after every few events and come back."""
        seen: list[int] = []
        headers: dict[str, str] = {}
        while len(seen) < 2 * runs:
            async with open_event_stream(
                http_gateway.http, f"{HISTORY}?follow=1&limit=1000", headers=headers
            ) as stream:
                await stream.next()  # retry
                for _ in range(patience):
                    event = await stream.next()
                    seen += _numbers(event.event, event.json)
                    headers = {"Last-Event-ID": event.id or ""}
                    if len(seen) >= 2 * runs:
                        break
        return seen

    readers = [asyncio.create_task(read(patience)) for patience in (1, 2, 3, 7, 1000)]
    for number in range(runs):
        await http_gateway.ask(str(number))
    async with asyncio.timeout(BOUND):
        for seen in await asyncio.gather(*readers):
            assert seen == list(range(1, 2 * runs + 1))


def _numbers(event: str, data: Any) -> list[int]:
    return [item["seq"] for item in data["items"]] if event == "history" else [data["messageSeq"]]


async def test_a_reader_is_told_of_a_gap_where_its_place_is_gone(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    page = (await http_gateway.http.get(HISTORY)).json()
    for place, reason in ((f"{page['sessionId']}:99", "ahead"), ("other:1", "reset"), ("nonsense", "reset")):
        async with open_event_stream(
            http_gateway.http, f"{HISTORY}?follow=1", headers={"Last-Event-ID": place}
        ) as stream:
            _, gap, history = await stream.take(3)
            assert (gap.event, history.event) == ("gap", "history")
            assert gap.json == {"sessionKey": MAIN, "sessionId": page["sessionId"], "reason": reason}


async def test_a_reset_is_told_and_the_new_conversation_followed(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
        old = (await stream.take(2))[1].json["sessionId"]
        new = (await http_gateway.app.operations.conversations.renew(OPERATOR, MAIN)).session_id
        gap = await stream.next()
        assert (gap.event, gap.json) == ("gap", {"sessionKey": MAIN, "sessionId": new, "reason": "reset"})
        await http_gateway.ask("two")
        assert [event.id for event in await stream.take(2)] == [f"{new}:1", f"{new}:2"]
    async with open_event_stream(
        http_gateway.http, f"{HISTORY}?follow=1", headers={"Last-Event-ID": f"{old}:2"}
    ) as stream:
        _, gap, history = await stream.take(3)
        assert gap.json["reason"] == "reset"
        assert history.json["sessionId"] == new


async def test_readers_that_leave_are_not_listened_for_any_longer(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    for _ in range(3):
        async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
            await stream.take(2)
            await wait_until(_open(http_gateway, 1))
        await wait_until(_open(http_gateway, 0))


def _open(http_gateway: HttpGatewayFixture, number: int) -> Any:
    async def is_so() -> bool:
        return http_gateway.listeners() == number and http_gateway.web.slots.open_count == number

    return is_so


async def test_streams_end_at_once_when_the_gateway_closes(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
        await stream.take(2)
        http_gateway.state.closing.set()
        assert await stream.rest() == []
    await wait_until(_open(http_gateway, 0))


async def test_the_stream_of_a_token_ends_when_it_is_revoked(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "KEEP_ALIVE_SECONDS", 0.02)
    await http_gateway.ask("one")
    reader = http_gateway.limited("operator.read")
    async with (
        open_event_stream(http_gateway.stranger, f"{HISTORY}?follow=1", headers=reader) as revoked,
        open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as other,
    ):
        await revoked.take(2)
        await other.take(2)
        await revoked.next()  # a keep-alive, while the token counts
        http_gateway.tokens.revoke_token(http_gateway.tokens.records[-1].name)
        await revoked.rest()
        await wait_until(_open(http_gateway, 1))
        await other.next()


async def test_asking_for_the_head_of_a_stream_opens_none(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    http_gateway.web.slots.max_open = 0
    reply = await http_gateway.http.head(f"{HISTORY}?follow=1")
    assert (reply.status_code, reply.content) == (200, b"")


async def test_there_are_only_so_many_streams(http_gateway: HttpGatewayFixture) -> None:
    await http_gateway.ask("one")
    http_gateway.web.slots.max_open = 1
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
        await stream.take(2)
        reply = await http_gateway.http.get(f"{HISTORY}?follow=1")
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "unavailable")
        assert (await http_gateway.http.get(HISTORY)).status_code == 200
        await wait_until(_open(http_gateway, 1))


async def test_a_reader_that_does_not_read_is_dropped(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "SEND_TIMEOUT_SECONDS", 0.05)
    for _ in range(3):
        await http_gateway.ask("x" * 1_000_000)
    host, _, port = http_gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        token = http_gateway.owner["Authorization"]
        writer.write(f"GET {HISTORY}?follow=1 HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"event: history"), BOUND)
        await http_gateway.ask("this cannot be told to it")
        await wait_until(_open(http_gateway, 0))
    finally:
        writer.close()


@pytest.mark.requirement("G16")
async def test_kill_stops_what_runs(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    async with open_http_gateway(tmp_path, agent) as http_gateway:
        kill = f"/sessions/{quote(MAIN, safe='')}/kill"
        assert (await http_gateway.http.post(kill)).status_code == 404
        asking = asyncio.create_task(http_gateway.ask("wait"))
        await wait_for_event(began)
        refused = await http_gateway.stranger.post(kill, headers=http_gateway.limited("operator.read"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "forbidden")
        assert (await http_gateway.http.post(kill)).json() == {"ok": True, "killed": True}
        assert (await asking).state == "cancelled"
        assert (await http_gateway.http.post(kill)).json() == {"ok": True, "killed": False}


async def test_a_conversation_that_ends_while_it_is_opened_is_told_as_reset(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http_gateway.ask("one")
    operations = http_gateway.app.operations
    follow = operations.transcripts.follow
    renewed: list[str] = []

    async def first_renewed(*args: Any) -> Any:
        if not renewed:
            renewed.append((await operations.conversations.renew(OPERATOR, MAIN)).session_id)
        async for event in follow(*args):
            yield event

    monkeypatch.setattr(operations.transcripts, "follow", first_renewed)
    async with open_event_stream(http_gateway.http, f"{HISTORY}?follow=1") as stream:
        _, _, gap, history = await stream.take(4)
        assert (gap.event, gap.json["reason"]) == ("gap", "reset")
        assert history.json["sessionId"] == gap.json["sessionId"] == renewed[0]
