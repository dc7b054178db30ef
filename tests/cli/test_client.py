"""The client of a gateway: what it asks, what it hears, and how it gets over a gateway that is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve

from antiphon import errors
from antiphon.bus import Delta, Event, MessageAppended, RunChanged, SessionChanged
from antiphon.client import Client, GatewayUnreachable, ReplicaRotation, Site, connection
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.messages import Provenance, TextBlock
from antiphon.operations.types import IncomingMessage, ListFilter, SendRequest
from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R")]


def make_client(program: Program, url: str, secret: str | None = None) -> Client:
    async def find() -> Site:
        return Site(url, secret or token(program))

    return Client(find)


async def until(feed: AsyncGenerator[Event], over: Callable[[Event], bool]) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(BOUND):
        async for event in feed:
            found.append(event)
            if over(event):
                return found
    raise AssertionError(found)


def ends(run_id: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, RunChanged) and event.run_id == run_id and event.state == "ok"


def seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events if isinstance(event, MessageAppended)]


async def test_questions_and_their_answers(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client:
            view = await client.open("main")
            assert (view.key, view.kind, view.agent_id) == ("agent:main:main", "main", "main")
            message = IncomingMessage(session="main", content="say hello", idempotency_key="k1")
            first, again = await client.submit(message), await client.submit(message)
            assert (first.run_id, first.session_id, first.new, again.new) == (
                "k1",
                view.session_id,
                True,
                False,
            )
            done = await client.wait("k1", BOUND)
            assert (done.state, done.reply, done.has_ended) == ("ok", "hello", True)
            page = await client.read_history("main", HistoryFilter(limit=1))
            assert (page.total, page.has_more, page.next_cursor) == (2, True, "2")
            assert [session.key for session in (await client.list_sessions(ListFilter())).sessions] == [
                view.key
            ]
            renewed = await client.renew("main")
            assert renewed.session_id != view.session_id
            assert (await client.stop("main")).run_ids == []


async def test_histories_page_both_ways(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client:
            for number in range(3):
                await client.submit(
                    IncomingMessage(session="main", content=f"say {number}", idempotency_key=str(number))
                )
            await client.wait("2", BOUND)
            newest = await client.read_history("main", HistoryFilter(limit=4))
            assert ([item["seq"] for item in newest.messages], newest.next_cursor) == ([3, 4, 5, 6], "3")
            older = await client.read_history("main", HistoryFilter(limit=4, before=3))
            assert ([item["seq"] for item in older.messages], older.has_more) == ([1, 2], False)
            later = await client.read_history("main", HistoryFilter(limit=4, after=1))
            assert ([item["seq"] for item in later.messages], later.next_cursor) == ([2, 3, 4, 5], "5")
            assert "__openclaw" not in newest.messages[0]
            asked = await client.read_history("main", HistoryFilter(roles=("user",), since=1))
            assert [item["seq"] for item in asked.messages] == [1, 3, 5]
            assert (await client.read_history("main", HistoryFilter(errors=True))).messages == []


@pytest.mark.requirement("G43")
async def test_what_was_said_to_whom(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client:
            assert (await client.list_exchanges(None, unsettled=False, limit=1)).exchanges == []
            other = (await client.open("agent:main:direct:other")).key
            await client.open("main")
            for number in (1, 2):
                wanted = SendRequest(
                    session=other,
                    message=f"say {number}",
                    announce="none",
                    reply_back=0,
                    idempotency_key=f"k{number}",
                )
                assert (await client.send(wanted, "main")).reply == str(number)
            first = await client.list_exchanges("main", unsettled=False, limit=1)
            [exchange] = first.exchanges
            assert (exchange.id, exchange.requester_session_key) == ("k2", "agent:main:main")
            assert (exchange.target_session_key, exchange.message) == (other, "say 2")
            rest = await client.list_exchanges(None, unsettled=False, limit=5, cursor=first.next_cursor)
            assert ([exchange.id for exchange in rest.exchanges], rest.next_cursor) == (["k1"], None)
            assert (await client.list_exchanges(other, unsettled=True, limit=5)).exchanges == []


async def test_a_feed_tells_words_then_the_message_then_the_end(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client, aclosing(client.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k1")))
            await client.submit(
                IncomingMessage(session="main", content="slow 0.3 one two", idempotency_key="k1")
            )
            events = await heard
    assert seqs(events) == [1, 2]
    answer = next(
        n for n, event in enumerate(events) if isinstance(event, MessageAppended) and event.seq == 2
    )
    words = [event.text for event in events[:answer] if isinstance(event, Delta)]
    assert "".join(words) == "one two"
    assert isinstance(events[-1], RunChanged)
    assert events[-1].reply == "one two"


async def test_a_feed_goes_on_over_a_kill_without_gap_or_repeat(program: Program) -> None:
    """Killed in the middle of an answer, and started again on the same port."""
    with up(program) as first:
        async with make_client(program, first.url) as client, aclosing(client.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k2")))
            await client.submit(IncomingMessage(session="main", content="say one", idempotency_key="k1"))
            await client.wait("k1", BOUND)
            await client.submit(
                IncomingMessage(session="main", content="slow 2 two words", idempotency_key="k2")
            )
            first.stop(signal.SIGKILL)
            with await asyncio.to_thread(Running, program, first.port) as second:
                view = await client.wait("k2", BOUND)
                events = await heard
                assert second.url == first.url
    assert (view.state, view.reply) == ("ok", "two words")
    assert seqs(events) == [1, 2, 3, 4]


class Running:
    """`up` as an object, for who has to start it in a thread."""

    def __init__(self, program: Program, port: int) -> None:
        self._context = up(program, port)
        self._gateway = self._context.__enter__()

    def __enter__(self) -> Gateway:
        return self._gateway

    def __exit__(self, *_: object) -> None:
        self._context.__exit__(None, None, None)


async def test_a_new_conversation_is_told_and_followed(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client, aclosing(client.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k2")))
            await client.submit(IncomingMessage(session="main", content="say one", idempotency_key="k1"))
            await client.wait("k1", BOUND)
            fresh = await client.renew("main")
            await client.submit(IncomingMessage(session="main", content="say two", idempotency_key="k2"))
            events = await heard
    assert seqs(events) == [1, 2, 1, 2]
    renewed = [event for event in events if isinstance(event, SessionChanged)]
    assert [event.session_id for event in renewed] == [fresh.session_id]


async def test_a_stopped_run_says_so_itself(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client, aclosing(client.follow("main", 0)) as feed:
            begun = asyncio.create_task(until(feed, lambda event: isinstance(event, Delta)))
            await client.submit(
                IncomingMessage(session="main", content="slow 30 a b c d e f", idempotency_key="k1")
            )
            await begun
            assert await client.list_unfinished("main") == ["k1"]
            assert (await client.stop("main", "k1")).run_ids == ["k1"]
            rest = await until(feed, lambda event: isinstance(event, RunChanged))
    assert isinstance(rest[-1], RunChanged)
    assert rest[-1].state == "cancelled"


async def test_refusals_are_the_errors_they_were(program: Program) -> None:
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client:
            with pytest.raises(errors.NotFound):
                await client.describe("agent:main:nowhere")
            with pytest.raises(errors.InvalidInput) as empty:
                await client.submit(IncomingMessage(session="main", content=" "))
            assert empty.value.exit_code == 2
            with pytest.raises(errors.InvalidInput):
                await client.call("no.such.method")
        with pytest.raises(errors.Unauthorized) as stranger:
            async with make_client(program, gateway.url, "wrong"):
                pass
        assert stranger.value.exit_code == 4
        assert "wrong" not in repr(Site(gateway.url, "wrong"))


async def test_the_port_is_closed(program: Program) -> None:
    with pytest.raises(GatewayUnreachable) as nobody:
        async with make_client(program, "ws://127.0.0.1:1", "x"):
            pass
    assert nobody.value.exit_code == 5
    assert "antiphon up" in nobody.value.hint


def test_the_gateway_does_not_know_its_client() -> None:
    source = Path(__file__).parents[2] / "src" / "antiphon" / "gateway"
    assert not [file for file in source.rglob("*.py") if "antiphon.client" in file.read_text("utf-8")]


# --- a gateway that behaves as a test says ---

Json = dict[str, Any]
Behaviour = Callable[[ServerConnection, Json], Awaitable[None]]


@asynccontextmanager
async def pretended(
    behave: Behaviour, hello: Json | None = None
) -> AsyncGenerator[tuple[Client, list[Json]]]:
    """A client of a gateway that accepts all clients and then does this; and every request it got."""
    asked: list[Json] = []

    async def speak(socket: ServerConnection) -> None:
        async for text in socket:
            request = msgspec.json.decode(text, type=Json)
            asked.append(request)
            if request["method"] == "connect":
                await answer(socket, request, hello or {})
            else:
                await behave(socket, request)

    async with serve(speak, "127.0.0.1", 0, compression=None) as server:
        host, port = next(iter(server.sockets)).getsockname()

        async def find() -> Site:
            return Site(f"ws://{host}:{port}", None)

        async with asyncio.timeout(BOUND), Client(find) as client:
            yield client, asked


async def answer(socket: ServerConnection, request: Json, payload: Json) -> None:
    await socket.send(
        msgspec.json.encode({"type": "res", "id": request["id"], "ok": True, "payload": payload}), text=True
    )


async def refuse(socket: ServerConnection, request: Json) -> None:
    await socket.close(1009)


async def overwhelm(socket: ServerConnection, request: Json) -> None:
    await answer(socket, request, {"large": "x" * 10_000})


@pytest.mark.parametrize("behave", [refuse, overwhelm])
async def test_what_is_too_large_is_not_asked_again(
    behave: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_FRAME_BYTES", 5000)
    async with pretended(behave) as (client, asked):
        with pytest.raises(errors.TooLarge):
            await client.call("sessions.list")
        assert [request["method"] for request in asked] == ["connect", "sessions.list"]


def message(number: int) -> Json:
    body: Json = {"role": "assistant", "content": [], "id": f"e{number}", "seq": number}
    payload: Json = {
        "sessionKey": "agent:main:main",
        "sessionId": "s",
        "messageId": f"e{number}",
        "messageSeq": number,
        "message": body,
    }
    return {"type": "event", "event": "session.message", "payload": payload}


async def test_a_listener_that_lags_too_far_behind_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_EVENTS", 5)

    async def behave(socket: ServerConnection, request: Json) -> None:
        for number in range(10):
            await socket.send(msgspec.json.encode(message(number)), text=True)
        await answer(socket, request, {})

    async with pretended(behave) as (client, _):
        linked = await connection.GatewayConnection.open(client.site)
        with linked.listen() as heard:
            with pytest.raises(GatewayUnreachable, match="faster than they were taken"):
                await linked.request("any", {})
            taken = [await heard.get() for _ in range(6)]
            assert heard.empty()
        assert [it and it[1]["messageSeq"] for it in taken] == [0, 1, 2, 3, 4, None]
        assert linked.lost.is_set()
        await linked.close()


async def test_a_feed_that_lags_resumes_without_gap_or_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_EVENTS", 5)
    count = 30

    async def behave(socket: ServerConnection, request: Json) -> None:
        await answer(socket, request, {"key": "agent:main:main", "sessionId": "s", "lastSeq": count})
        for number in range(request["params"]["afterSeq"] + 1, count + 1):
            await socket.send(msgspec.json.encode(message(number)), text=True)

    async with pretended(behave) as (client, asked), aclosing(client.follow("main", 0)) as feed:
        told = await until(feed, lambda event: isinstance(event, MessageAppended) and event.seq == count)
    assert seqs(told) == list(range(1, count + 1))
    assert len([request for request in asked if request["method"] == "connect"]) > 1


async def test_a_feed_that_is_told_too_much_at_once_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_FRAME_BYTES", 5000)

    async def behave(socket: ServerConnection, request: Json) -> None:
        await answer(socket, request, {"key": "agent:main:main", "sessionId": "s", "lastSeq": 0})
        await socket.send(" " * 10_000)

    async with pretended(behave) as (client, asked):
        with pytest.raises(errors.TooLarge):
            await anext(client.follow("main", 0))
        assert [request["method"] for request in asked] == ["connect", "sessions.messages.subscribe"]


async def test_a_request_that_a_gateway_would_not_take_is_not_sent() -> None:
    async with pretended(refuse, {"policy": {"maxPayload": 1000}}) as (client, asked):
        with pytest.raises(errors.TooLarge) as large:
            await client.submit(IncomingMessage(session="main", content="é" * 500))
        assert large.value.data["max"] == 1000
        assert len(asked) == 1


async def accept(socket: ServerConnection, request: Json) -> None:
    taken = {"runId": "r", "sessionKey": "k", "sessionId": "s", "state": "queued", "status": "started"}
    await answer(socket, request, taken)


async def test_how_much_to_think_is_sent_along() -> None:
    async with pretended(accept) as (client, asked):
        await client.submit(IncomingMessage(session="main", content="hello", thinking="high"))
        await client.submit(IncomingMessage(session="main", content="hello", origin="agent"))
    assert [request["params"].get("thinking") for request in asked[1:]] == ["high", None]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "openai/gpt"),
        ("instructions", "Be brief."),
        ("origin", "hook"),
        ("provenance", Provenance(kind="external")),
        ("content", [TextBlock(text="hello")]),
    ],
)
async def test_what_cannot_be_carried_is_refused_by_name(field: str, value: Any) -> None:
    async with pretended(accept) as (client, asked):
        with pytest.raises(errors.InvalidInput, match=field) as refused:
            await client.submit(
                msgspec.structs.replace(IncomingMessage(session="main", content="hello"), **{field: value})
            )
        assert refused.value.data["field"] == field
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("named", "added"),
    [
        ("ws://127.0.0.1:1", ["ws://127.0.0.1:2", "ws://[::1]:2", "wss://gw.example:2"]),
        ("ws://localhost:1", ["ws://127.0.0.1:2", "ws://[::1]:2", "wss://gw.example:2"]),
        ("wss://gw.example:1", ["wss://gw.example:2"]),
        (
            "ws://10.0.0.6:1",
            ["ws://127.0.0.1:2", "ws://[::1]:2", "ws://10.0.0.7:2", "ws://gw:2", "wss://gw.example:2"],
        ),
    ],
)
async def test_a_token_is_not_sent_in_clear_to_a_replica_that_the_user_did_not_name(
    named: str, added: list[str]
) -> None:
    replicas = ReplicaRotation([Site(named, "a token")])
    found = ["ws://127.0.0.1:2", "ws://[::1]:2", "ws://10.0.0.7:2", "ws://gw:2", "wss://gw.example:2"]
    replicas.add_replicas(replicas.sites[0], found)
    assert [site.url for site in replicas.sites] == [named, *added]
