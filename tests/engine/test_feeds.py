"""Following a session, and reading it back: every entry once and in order, although events were dropped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from antiphon.bus import Delta, Event, MessageAppended, RunChanged, SessionChanged, ToolPhase, session_topic
from antiphon.bus.local import LocalBus
from antiphon.engine.sessions import feeds, transcripts
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import Conflict, NotFound
from antiphon.messages import AssistantMessage, ToolResult
from antiphon.runtimes import Prompt
from antiphon.store import Row, Tx
from antiphon.store.queries import Query
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    AppFixture,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_until,
)

pytestmark = pytest.mark.anyio


async def echo(prompt: Prompt) -> str:
    return "ok"


async def take(
    events: AsyncIterator[Event], upto: int, pause: random.Random | None = None
) -> list[tuple[str, int]]:
    """Entries until number `upto`, reading as slowly as the dice say."""
    seen: list[tuple[str, int]] = []
    async with asyncio.timeout(BOUND):
        async for event in events:
            if isinstance(event, MessageAppended):
                seen.append((event.session_id, event.seq))
                if event.seq >= upto:
                    return seen
            for _ in range(pause.randrange(20) if pause else 0):
                await asyncio.sleep(0)
    raise AssertionError("a feed ends never")


@pytest.mark.requirement("G38", "W3")
@pytest.mark.parametrize("seed", range(6))
async def test_every_entry_once_and_in_order_although_events_are_dropped(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer of two events drops nearly everything; followers come late, read slowly and come back."""
    monkeypatch.setattr(
        feeds, "IDLE_REREAD_SECONDS", 3600
    )  # looking again by itself would hide a missed hint
    rng = random.Random(seed)
    turns, last = 25, 50
    async with open_app_fixture(tmp_path, echo, bus=LocalBus(buffer=rng.choice([1, 2, 3]))) as app:
        await app.create(MAIN)

        async def follower(own: random.Random) -> list[int]:
            seen: list[int] = []
            while len(seen) < last:
                # Up to some entry, then away, then again from there.
                upto = min(last, len(seen) + own.randint(1, 30))
                async with aclosing(
                    app.operations.transcripts.follow(OPERATOR, MAIN, after=len(seen))
                ) as events:
                    seen += [seq for _, seq in await take(events, upto, own)]
            return seen

        async def speak() -> None:
            for number in range(turns):
                await app.say(f"{number}")
                for _ in range(rng.randrange(10)):
                    await asyncio.sleep(0)

        followers = [asyncio.create_task(follower(random.Random(f"{seed} {n}"))) for n in range(4)]
        await speak()
        for task in followers:
            assert await asyncio.wait_for(task, BOUND) == list(range(1, last + 1))


@pytest.mark.requirement("G38")
async def test_a_hole_shows_in_the_next_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "IDLE_REREAD_SECONDS", 3600)

    class Leaky(LocalBus):
        """Loses every other entry without a word, as a network may."""

        def publish(self, topic: str, event: Event) -> None:
            if not (isinstance(event, MessageAppended) and event.seq % 2):
                super().publish(topic, event)

    async with open_app_fixture(tmp_path, echo, bus=Leaky()) as app:
        await app.create(MAIN)
        following = asyncio.create_task(take(app.operations.transcripts.follow(OPERATOR, MAIN, after=0), 6))
        for words in ("one", "two", "three"):
            await app.ask(words)
        assert [seq for _, seq in await following] == [1, 2, 3, 4, 5, 6]


@pytest.mark.requirement("G38")
async def test_a_lost_hint_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "IDLE_REREAD_SECONDS", 0.01)

    class Deaf(LocalBus):
        """Loses everything, as a network may."""

        def publish(self, topic: str, event: Event) -> None: ...

    async with open_app_fixture(tmp_path, echo, bus=Deaf()) as app:
        await app.create(MAIN)
        following = asyncio.create_task(take(app.operations.transcripts.follow(OPERATOR, MAIN, after=0), 4))
        for words in ("one", "two"):
            await app.ask(words)
        assert [seq for _, seq in await following] == [1, 2, 3, 4]


@pytest.mark.requirement("G38", "G25")
async def test_a_renewed_session_is_followed_into_its_new_transcript(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("one")
        before = await app.operations.sessions.describe(OPERATOR, MAIN)
        seen: list[Event] = []
        ready = asyncio.Event()

        async def follow() -> None:
            async for event in app.operations.transcripts.follow(OPERATOR, MAIN, after=0):
                if isinstance(event, MessageAppended | SessionChanged):
                    seen.append(event)
                if isinstance(event, MessageAppended) and event.seq == 2:
                    ready.set()
                    if event.session_id != before.session_id:
                        return

        following = asyncio.create_task(follow())
        await asyncio.wait_for(ready.wait(), BOUND)
        after = await app.operations.conversations.renew(OPERATOR, MAIN)
        await app.ask("two")
        await asyncio.wait_for(following, BOUND)
        entries = [(event.session_id, event.seq) for event in seen if isinstance(event, MessageAppended)]
        assert entries == [
            (before.session_id, 1),
            (before.session_id, 2),
            (after.session_id, 1),
            (after.session_id, 2),
        ]
        told = [at for at, event in enumerate(seen) if isinstance(event, SessionChanged)]
        assert told == [2], "the change is told once, between the transcripts"


def in_short(event: Event) -> list[str]:
    match event:
        case MessageAppended():
            return [f"entry {event.seq}"]
        case RunChanged():
            return [event.state]
        case ToolPhase():
            return [f"tool {event.phase}"]
        case Delta() if event.text:
            return [f"says {event.text}"]
        case _:
            return []


async def test_who_stops_following_is_not_listened_for(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("one")
        topic = session_topic(app.rows("SELECT id FROM sessions")[0]["id"])
        async with aclosing(app.operations.transcripts.follow(OPERATOR, MAIN, after=0)) as events:
            await anext(events)
            assert app.bus.has_listeners(topic)
        assert not app.bus.has_listeners(topic)


@pytest.mark.parametrize("outcome", ["ok", "error", "timeout"])
async def test_nothing_is_streamed_after_the_end(tmp_path: Path, outcome: str) -> None:
    """Pieces are gathered for a while; those still gathered at the end come before it or not at all."""

    async def agent(prompt: Prompt) -> AsyncGenerator[str, None]:
        yield "first "
        await asyncio.sleep(0)
        yield "second"
        if outcome == "error":
            raise ValueError("no")
        if outcome == "timeout":
            await asyncio.Event().wait()

    async with open_app_fixture(tmp_path, agent) as app:
        row = await app.create(MAIN)
        async with app.bus.listen(session_topic(row["id"])) as events:
            await app.ask("go", timeout_seconds=0.5 if outcome == "timeout" else 60)
            seen: list[str] = []
            while event := await events.get(0.1):  # twice as long as pieces are gathered for
                seen += in_short(event)
        assert seen == ["queued", "running", "entry 1", "says first ", "says second", "entry 2", outcome]


async def test_live_events_come_in_the_order_of_a_turn(tmp_path: Path) -> None:
    async def work(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="done")

    async def agent(prompt: Prompt) -> AssistantMessage:
        done = any(isinstance(message, ToolResult) for message in prompt.messages)
        return make_answer("finished") if done else make_tool_calls("work")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)]) as app:
        await app.create(MAIN)
        seen: list[str] = []

        async def follow() -> None:
            async for event in app.operations.transcripts.follow(OPERATOR, MAIN, after=0):
                seen.extend(in_short(event))
                if seen[-1:] == ["ok"]:
                    return

        following = asyncio.create_task(follow())

        async def listening() -> bool:
            row = app.rows("SELECT id FROM sessions")[0]
            return app.bus.has_listeners(session_topic(row["id"]))

        await wait_until(listening)
        await app.ask("go")
        await asyncio.wait_for(following, BOUND)
        assert seen == [
            "queued",
            "running",
            "entry 1",
            "entry 2",
            "tool start",
            "entry 3",
            "tool result",
            "says finished",
            "entry 4",
            "ok",
        ]


@pytest.mark.requirement("V3")
async def test_what_may_not_be_read_may_not_be_followed(tmp_path: Path) -> None:
    from antiphon.access import Caller

    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("secret", "agent:main:direct:a")
        stranger = Caller.agent("main", "agent:main:direct:b")
        with pytest.raises(NotFound):
            await anext(aiter(app.operations.transcripts.follow(stranger, "agent:main:direct:a", after=0)))


# --- reading back ---


async def pages(app: AppFixture, limit: int, *, backwards: bool, tools: bool) -> list[dict[str, Any]]:
    """The whole transcript along the cursors, while it still grows."""
    found: list[dict[str, Any]] = []
    at: int | None = None if backwards else 0
    while True:
        before, after = (at, None) if backwards else (None, at)
        wanted = HistoryFilter(limit=limit, include_tools=tools, before=before, after=after)
        page = await app.operations.transcripts.read(OPERATOR, MAIN, wanted)
        found = [*page.messages, *found] if backwards else [*found, *page.messages]
        assert len(page.messages) <= limit
        assert len(page.messages) == 1 or await size(app, page.messages) <= transcripts.MAX_PAGE_BYTES
        assert page.has_more == (page.next_cursor is not None)
        if page.next_cursor is None:
            return found
        at = int(page.next_cursor)


async def size(app: AppFixture, items: list[dict[str, Any]]) -> int:
    """Of the bodies of these entries, in bytes."""
    wanted = {item["seq"] for item in items}
    rows = app.rows("SELECT seq, body FROM messages")
    return sum(len(row["body"].encode()) for row in rows if row["seq"] in wanted)


@pytest.mark.requirement("G23", "H1", "H2", "H4")
@pytest.mark.parametrize("room", [2**22, 1500, 400, 1])
@pytest.mark.parametrize("backwards", [True, False])
async def test_following_the_cursors_gives_the_transcript_exactly(
    tmp_path: Path, backwards: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a page ends because its entries are large, at any place in what is fetched at once."""
    monkeypatch.setattr(transcripts, "MAX_PAGE_BYTES", room)
    monkeypatch.setattr(transcripts, "ROWS_PER_FETCH", 5)
    rng = random.Random(room)

    async def work(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="done")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_answer("ok") if isinstance(prompt.messages[-1], ToolResult) else make_tool_calls("work")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)]) as app:
        for number in range(4):
            await app.ask(f"{number} " + "é" * rng.choice([0, 50, 500]))
        talking = asyncio.create_task(asyncio.wait_for(_talk(app), BOUND))
        for limit in (1, 3, 7, 1000):
            for tools in (True, False):
                found = await pages(app, limit, backwards=backwards, tools=tools)
                seqs = [item["seq"] for item in found]
                roles = [item["role"] for item in found]
                whole = [row["seq"] for row in app.rows("SELECT seq, role FROM messages ORDER BY seq")
                         if tools or row["role"] != "toolResult"]  # fmt: skip
                assert seqs == whole[: len(seqs)] and len(seqs) >= 12
                assert ("toolResult" in roles) == tools
        await talking


@pytest.mark.requirement("G23", "H1")
@pytest.mark.parametrize("backwards", [True, False])
async def test_large_entries_are_not_all_fetched_for_a_page_of_few(tmp_path: Path, backwards: bool) -> None:
    class Counting:
        """A transaction that knows how many rows it gave out."""

        def __init__(self, tx: Tx) -> None:
            self._tx = tx
            self.rows = 0

        async def all(self, query: Query, /, **params: Any) -> list[Row]:
            found = await self._tx.all(query, **params)
            self.rows += len(found)
            return found

    async def read(tx: Tx, transcript: int) -> tuple[transcripts.Page, int]:
        counting: Any = Counting(tx)
        ask = transcripts.read_page_before if backwards else transcripts.read_page_after
        page = await ask(
            counting, transcript, transcripts.AFTER_LAST_SEQ if backwards else 0, 1000, tools=True
        )
        return page, counting.rows

    async with open_app_fixture(tmp_path, echo) as app:
        row = await app.create(MAIN)
        for _ in range(3 * transcripts.ROWS_PER_FETCH):
            await app.operations.transcripts.inject(OPERATOR, MAIN, "x" * 100_000)
        page, rows = await app.store.read(read, row["transcript"])
    assert (page.has_more, rows) == (True, transcripts.ROWS_PER_FETCH)
    seqs = [entry.seq for entry in page.entries]
    first = 3 * transcripts.ROWS_PER_FETCH - len(seqs) + 1 if backwards else 1
    assert seqs == list(range(first, first + len(seqs)))
    assert len(seqs) == transcripts.MAX_PAGE_BYTES // len(page.entries[0].body)


@pytest.mark.requirement("G38")
async def test_a_feed_gives_every_entry_however_few_fit_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "IDLE_REREAD_SECONDS", 3600)
    monkeypatch.setattr(transcripts, "MAX_PAGE_BYTES", 1)
    async with open_app_fixture(tmp_path, echo) as app:
        for number in range(3):
            await app.ask(f"{number}")
        async with aclosing(app.operations.transcripts.follow(OPERATOR, MAIN, after=0)) as events:
            assert [seq for _, seq in await take(events, 6)] == [1, 2, 3, 4, 5, 6]


async def _talk(app: AppFixture) -> None:
    for number in range(10):
        await app.ask(f"later {number}")


# --- a new conversation ---


@pytest.mark.requirement("G25")
async def test_renewing_keeps_the_old_conversation_readable(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> str:
        return f"{len(prompt.messages)} shown"

    async with open_app_fixture(tmp_path, agent) as app:
        await app.ask("old")
        old = await app.operations.sessions.describe(OPERATOR, MAIN)
        new = await app.operations.conversations.renew(OPERATOR, MAIN, "reset")
        assert (new.key, new.session_id == old.session_id) == (old.key, False)
        assert await app.transcript() == []
        assert (await app.ask("fresh")).reply == "1 shown"
        kept = await app.transcript(old.session_id)
        assert [entry["content"] for entry in kept if entry["role"] == "user"] == ["old"]
        reasons = app.rows("SELECT session_id, reason, ended_at FROM transcripts ORDER BY id")
        assert [(row["session_id"], row["reason"]) for row in reasons] == [
            (old.session_id, "created"),
            (new.session_id, "reset"),
        ]
        assert reasons[0]["ended_at"] is not None
    async with open_app_fixture(tmp_path, agent) as app:
        assert (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id == new.session_id


class _Between:
    """A store in which something happens right after a restored conversation was found."""

    def __init__(self, app: AppFixture, session_id: str) -> None:
        self._stage = app
        self._session_id = session_id

    async def read(self, script: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = await self._stage.store.read(script, *args, **kwargs)
        at = await self._stage.operations.sessions.describe(OPERATOR, MAIN)
        if at.session_id == self._session_id:
            self._session_id = ""
            await self._stage.operations.transcripts.inject(OPERATOR, MAIN, "between")
        return found


@pytest.mark.requirement("G38", "G25")
async def test_nothing_is_skipped_that_was_said_while_a_conversation_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "IDLE_REREAD_SECONDS", 3600)
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("one")
        old = (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id
        await app.operations.conversations.renew(OPERATOR, MAIN)
        row = app.rows("SELECT * FROM sessions")[0]
        await app.operations.conversations.restore(OPERATOR, old)
        store: Any = _Between(app, old)
        seen: list[Event] = []
        async with (
            asyncio.timeout(BOUND),
            aclosing(feeds.follow_session(store, app.bus, session_topic(row["id"]), row, 0)) as events,
        ):
            while not (seen and isinstance(seen[-1], MessageAppended)):
                seen.append(await anext(events))
    moved, entry = seen
    assert moved == SessionChanged(session_key=MAIN, reason="renewed", session_id=old, seq=2)
    assert isinstance(entry, MessageAppended)
    assert (entry.session_id, entry.seq) == (old, 3)


@pytest.mark.requirement("G25")
async def test_a_busy_session_is_not_renewed(tmp_path: Path) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        begun.set()
        await release.wait()
        return "ok"

    async with open_app_fixture(tmp_path, agent) as app:
        run_id = await app.say("go")
        await asyncio.wait_for(begun.wait(), BOUND)
        with pytest.raises(Conflict):
            await app.operations.conversations.renew(OPERATOR, MAIN)
        release.set()
        assert (await app.wait_for_end(run_id)).state == "ok"


async def test_a_conversation_that_has_ended_is_not_followed(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("one")
        old = (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id
        await app.operations.conversations.renew(OPERATOR, MAIN)
        async with aclosing(app.operations.transcripts.follow(OPERATOR, old)) as events:
            with pytest.raises(Conflict, match="by the key"):
                await anext(events)
