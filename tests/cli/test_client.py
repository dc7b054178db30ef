"""The client of a gateway: what it asks, what it hears, and how it gets over a gateway that is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from antiphon import errors
from antiphon.bus import Delta, Event, MessageAppended, RunChanged, SessionChanged
from antiphon.client import Client, Lost, Site
from antiphon.operations import HistoryFilter, ListFilter, Message
from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R")]


def client(program: Program, url: str, secret: str | None = None) -> Client:
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
        async with client(program, gateway.url) as desk:
            view = await desk.open("main")
            assert (view.key, view.kind, view.agent_id) == ("agent:main:main", "main", "main")
            message = Message(session="main", content="say hello", idempotency_key="k1")
            first, again = await desk.submit(message), await desk.submit(message)
            assert (first.run_id, first.session_id, first.new, again.new) == (
                "k1",
                view.session_id,
                True,
                False,
            )
            done = await desk.wait("k1", BOUND)
            assert (done.state, done.reply, done.ended) == ("ok", "hello", True)
            page = await desk.history("main", HistoryFilter(limit=1))
            assert (page.total, page.has_more, page.next_cursor) == (2, True, "2")
            assert [session.key for session in (await desk.list(ListFilter())).sessions] == [view.key]
            renewed = await desk.renew("main")
            assert renewed.session_id != view.session_id
            assert (await desk.stop("main")).run_ids == []


async def test_histories_page_both_ways(program: Program) -> None:
    with up(program) as gateway:
        async with client(program, gateway.url) as desk:
            for number in range(3):
                await desk.submit(
                    Message(session="main", content=f"say {number}", idempotency_key=str(number))
                )
            await desk.wait("2", BOUND)
            newest = await desk.history("main", HistoryFilter(limit=4))
            assert ([item["seq"] for item in newest.messages], newest.next_cursor) == ([3, 4, 5, 6], "3")
            older = await desk.history("main", HistoryFilter(limit=4, before=3))
            assert ([item["seq"] for item in older.messages], older.has_more) == ([1, 2], False)
            later = await desk.history("main", HistoryFilter(limit=4, after=1))
            assert ([item["seq"] for item in later.messages], later.next_cursor) == ([2, 3, 4, 5], "5")
            assert "__openclaw" not in newest.messages[0]


async def test_a_feed_tells_words_then_the_message_then_the_end(program: Program) -> None:
    with up(program) as gateway:
        async with client(program, gateway.url) as desk, aclosing(desk.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k1")))
            await desk.submit(Message(session="main", content="slow 0.3 one two", idempotency_key="k1"))
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
        async with client(program, first.url) as desk, aclosing(desk.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k2")))
            await desk.submit(Message(session="main", content="say one", idempotency_key="k1"))
            await desk.wait("k1", BOUND)
            await desk.submit(Message(session="main", content="slow 2 two words", idempotency_key="k2"))
            first.stop(signal.SIGKILL)
            with await asyncio.to_thread(Running, program, first.port) as second:
                view = await desk.wait("k2", BOUND)
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
        async with client(program, gateway.url) as desk, aclosing(desk.follow("main", 0)) as feed:
            heard = asyncio.create_task(until(feed, ends("k2")))
            await desk.submit(Message(session="main", content="say one", idempotency_key="k1"))
            await desk.wait("k1", BOUND)
            fresh = await desk.renew("main")
            await desk.submit(Message(session="main", content="say two", idempotency_key="k2"))
            events = await heard
    assert seqs(events) == [1, 2, 1, 2]
    renewed = [event for event in events if isinstance(event, SessionChanged)]
    assert [event.session_id for event in renewed] == [fresh.session_id]


async def test_a_stopped_run_says_so_itself(program: Program) -> None:
    with up(program) as gateway:
        async with client(program, gateway.url) as desk, aclosing(desk.follow("main", 0)) as feed:
            begun = asyncio.create_task(until(feed, lambda event: isinstance(event, Delta)))
            await desk.submit(Message(session="main", content="slow 30 a b c d e f", idempotency_key="k1"))
            await begun
            assert await desk.unfinished("main") == ["k1"]
            assert (await desk.stop("main", "k1")).run_ids == ["k1"]
            rest = await until(feed, lambda event: isinstance(event, RunChanged))
    assert isinstance(rest[-1], RunChanged)
    assert rest[-1].state == "cancelled"


async def test_refusals_are_the_errors_they_were(program: Program) -> None:
    with up(program) as gateway:
        async with client(program, gateway.url) as desk:
            with pytest.raises(errors.NotFound):
                await desk.describe("agent:main:nowhere")
            with pytest.raises(errors.InvalidInput) as empty:
                await desk.submit(Message(session="main", content=" "))
            assert empty.value.exit_code == 2
            with pytest.raises(errors.InvalidInput):
                await desk.call("no.such.method")
        with pytest.raises(errors.Unauthorized) as stranger:
            async with client(program, gateway.url, "wrong"):
                pass
        assert stranger.value.exit_code == 4
        assert "wrong" not in repr(Site(gateway.url, "wrong"))


async def test_nobody_there(program: Program) -> None:
    with pytest.raises(Lost) as nobody:
        async with client(program, "ws://127.0.0.1:1", "x"):
            pass
    assert nobody.value.exit_code == 5
    assert "antiphon up" in nobody.value.hint


def test_the_gateway_does_not_know_its_client() -> None:
    source = Path(__file__).parents[2] / "src" / "antiphon" / "gateway"
    assert not [file for file in source.rglob("*.py") if "antiphon.client" in file.read_text("utf-8")]
