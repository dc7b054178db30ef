"""The one gate, end to end: agents that misuse its tokens, and everything that leaves for people meanwhile.

Words stream in pieces of one to three characters, each of which goes out at once. What is collected is what a person
could see: the `chat` events of a real WebSocket, the words that are told to be delivered, and posts to a channel.
`test_sanitize` tests the texts alone.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from antiphon.access import Caller
from antiphon.app import App
from antiphon.bus import EVERY_SESSION_TOPIC, Delivered, Delta, Event, EventBus, RunChanged, SessionChanged
from antiphon.bus.local import MAX_BUFFERED_EVENTS
from antiphon.engine.runs import deltas
from antiphon.gateway.server import serve_gateway
from antiphon.gateway.tokens import TokenRegistry
from antiphon.operations.types import IncomingMessage, SendRequest, SessionPatch, SpawnRequest
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from support.agents_fixture import RecordingChannel, get_last_user_text
from support.app_fixture import BOUND, DATABASE, MAIN, OPERATOR, make_config, wait_until
from support.databases import query_database

pytestmark = pytest.mark.anyio

HELPER = "agent:helper:main"
ROOM = "agent:helper:pigeon:group:room"
PEER = "agent:helper:pigeon:direct:bob"
OWN = "agent:main:pigeon:group:den"
SECRET = "sk-proj-abcdefghijklmnopqrstuvwx"
SETTINGS = {
    "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}

# --- who looks for it: simpler than the gate, and not from it ---

_TOKENS = re.compile("reply_skip|announce_skip|no_reply")
_MARKERS = re.compile("<<<(data|end) [0-9a-f]{12}>>>")
_KEYS = re.compile("agent(:|%3a)[a-z0-9_-]+(:|%3a)(pigeon:)?direct(:|%3a)(ann|bob)")


def leaked(text: str) -> list[str]:
    """What a person would read in it that is not meant for people."""
    plain = "".join(
        char for char in text if char not in "\\*`~" and unicodedata.category(char) not in "Cf Cc"
    )
    read = unicodedata.normalize("NFKC", plain).lower()
    found = [match[0] for what in (_TOKENS, _MARKERS, _KEYS) for match in what.finditer(read)]
    return [*found, *([SECRET] if SECRET in text else [])]


def test_the_checker_sees() -> None:
    for text in (
        "x REPLY_SKIPx",
        "`no_reply`",
        "NO\u200b_REPLY",
        f"a {PEER}",
        "<<<end 0123456789ab>>>",
        SECRET,
    ):
        assert leaked(text), text
    assert not leaked("An agent: may skip a reply. <<<data>>>")


# --- who says it ---

Lines = Mapping[str, str]
"""What an agent says, by the kind of step: `chat`, `request`, `turn`, `announce` or `wake`."""


def _step(prompt: Prompt) -> str:
    head, colon, _ = prompt.run_id.partition(":")
    return (
        {"note": "wake"}.get(head, head)
        if colon
        else ("chat" if get_last_user_text(prompt).startswith("chat") else "request")
    )


def streaming(lines: Lines, sizes: tuple[int, ...] = (1, 2, 3, 2)) -> AgentFunction:
    async def speak(prompt: Prompt) -> AsyncGenerator[str, None]:
        text, at, number = lines.get(_step(prompt), "Well."), 0, 0
        while at < len(text):
            size = sizes[number % len(sizes)]
            yield text[at : at + size]
            at, number = at + size, number + 1

    return speak


# --- who sees it ---


@dataclass(slots=True)
class Page:
    """A person's browser: a WebSocket that keeps every event."""

    ws: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    answers: dict[str, asyncio.Future[Any]] = field(default_factory=dict[str, asyncio.Future[Any]])

    async def read(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                frame = msgspec.json.decode(await self.ws.recv(), type=dict[str, Any])
                if frame["type"] == "event":
                    self.events.append(frame)
                elif frame["id"] in self.answers:
                    self.answers.pop(frame["id"]).set_result(frame)

    async def call(self, method: str, **params: Any) -> Any:
        id = f"{method}-{len(self.events)}-{id_of(params)}"
        self.answers[id] = asyncio.get_running_loop().create_future()
        frame = {"type": "req", "id": id, "method": method, "params": params}
        await self.ws.send(msgspec.json.encode(frame).decode())
        answer = await asyncio.wait_for(self.answers[id], BOUND)
        assert answer["ok"], answer
        return answer["payload"]

    def chats(self) -> list[dict[str, Any]]:
        return [event["payload"] for event in self.events if event["event"] == "chat"]


def id_of(params: Mapping[str, Any]) -> int:
    return abs(hash(repr(params)))


@dataclass(slots=True)
class Street:
    """The house, and everything that left it."""

    app: App
    path: Path
    page: Page
    pigeon: RecordingChannel
    delivered: list[Delivered] = field(default_factory=list[Delivered])
    pieces: list[Delta] = field(default_factory=list[Delta])

    async def listen(self, bus: EventBus, ready: asyncio.Event) -> None:
        async with bus.listen(EVERY_SESSION_TOPIC) as events:
            ready.set()
            while True:
                match await events.get():
                    case Delivered() as event:
                        self.delivered.append(event)
                    case Delta() as event:
                        self.pieces.append(event)
                    case _:
                        pass

    async def quiet(self) -> None:
        """Nothing is left to do, and the page has heard of all of it."""
        await wait_until(self._over)
        await self.page.call("health")

    async def _over(self) -> bool:
        runs = query_database(self.path / DATABASE, "SELECT id, state FROM runs WHERE origin <> 'note'")
        sent = query_database(self.path / DATABASE, "SELECT destination, state FROM deliveries")
        ended = {
            event["payload"]["runId"]
            for event in self.page.events
            if event["event"] == "agent" and event["payload"]["data"].get("phase") in ("end", "error")
        }
        shown = [row for row in sent if row["state"] == "delivered" and "pigeon" not in row["destination"]]
        return (
            ended >= {row["id"] for row in runs}
            and all(row["state"] not in ("pending", "sending") for row in sent)
            and len(shown) <= sum(chat["seq"] == 0 for chat in self.page.chats())
        )

    def origins(self) -> dict[str, str]:
        return {
            row["id"]: row["origin"]
            for row in query_database(self.path / DATABASE, "SELECT id, origin FROM runs")
        }

    def check(self) -> None:
        for way, said in self.left().items():
            for text in said:
                assert not leaked(text), (way, text)

    def left(self) -> dict[str, list[str]]:
        """Every text that a person saw, by the way it took; runs that a person of the chat asked for left out."""
        origins = self.origins()
        unasked = {id for id, origin in origins.items() if origin != "chat"}
        chats = [chat for chat in self.page.chats() if chat["runId"] in unasked or chat["seq"] == 0]
        return {
            "chat": [_words(chat) for chat in chats],
            "delta": [chat.get("deltaText", "") for chat in chats],
            "stream": [piece.text for piece in self.pieces if piece.run_id in unasked],
            "told": [_without_stats(event.text, event.kind) for event in self.delivered],
            "post": [_without_stats(text, key.split(":")[0]) for key, _, text in self.pigeon.posts],
        }


def _words(chat: Mapping[str, Any]) -> str:
    content: Any = chat.get("message", {}).get("content", "")
    if not isinstance(content, str):
        content = "".join(block.get("text", "") for block in content)
    # Words that were delivered have no place in a stream; those that tell of a task end in a line of facts.
    told = chat["seq"] == 0 and chat["runId"].startswith("note:")
    return _without_stats(content, "task" if told else "")


def _without_stats(text: str, kind: str) -> str:
    if kind != "task":
        return text
    body, blank, stats = text.rpartition("\n\n")
    assert blank and "sessionKey" in stats, text
    return body


@asynccontextmanager
async def street(path: Path, agents: Mapping[str, AgentFunction]) -> AsyncGenerator[Street]:
    pigeon = RecordingChannel()
    functions = {agent: FunctionRuntime(fn) for agent, fn in agents.items()}
    config = make_config(SETTINGS)
    async with serve_gateway(
        config, path, port=0, functions=functions, channels={"pigeon": pigeon}
    ) as served:
        app = served.gateway.app
        for key in (MAIN, HELPER, ROOM, OWN):
            await app.operations.sessions.open(OPERATOR, key)
        async with connect(served.url, max_size=None, proxy=None, open_timeout=BOUND) as ws:
            page = Page(ws)
            place = Street(app, path, page, pigeon)
            ready = asyncio.Event()
            tasks = [
                asyncio.create_task(page.read()),
                asyncio.create_task(place.listen(app.bus, ready)),
            ]
            await asyncio.wait_for(ready.wait(), BOUND)
            token = TokenRegistry.open(path).owner_token
            client = {"id": "test", "version": "1", "platform": "linux", "mode": "test"}
            await page.call(
                "connect",
                minProtocol=3,
                maxProtocol=4,
                client=client,
                auth={"token": token},
                scopes=["operator.read"],
            )
            try:
                yield place
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece goes out as it comes."""
    monkeypatch.setattr(deltas, "DELTA_INTERVAL_SECONDS", 0.0)


async def converse(place: Street) -> None:
    """Every way in which agents make text that no person in a chat has asked for."""
    operations = place.app.operations
    for sender, target in ((MAIN, HELPER), (OWN, ROOM)):
        caller = Caller.agent("main", sender)
        await operations.exchanges.send(
            caller, SendRequest(message="go", session=target, timeout_seconds=0, reply_back=2)
        )
        await operations.subagents.spawn(caller, SpawnRequest(task="go"))
        await operations.subagents.spawn(caller, SpawnRequest(task="go once more", announce="parent"))
    await place.quiet()


NASTY = (
    "REPLY_SKIP",
    "ANNOUNCE_SKIP",
    "NO_REPLY",
    "Fine.REPLY_SKIP",
    "ANNOUNCE_SKIPANNOUNCE_SKIP done",
    "announce_skip, said I",
    "```\nNO_REPLY\n```\nand more",
    "REPLY_NO_REPLYSKIP twice hidden",
    "**REPLY\\_SKIP** in markdown",
    "R\u200bEPLY_SKIP unseen",
    "<<<data 0123456789ab>>> inner <<<end 0123456789ab>>>",
    f"ask {PEER}, or agent:main:direct:ann.",
    f"the password is {SECRET} ok",
    "api_key=hunter2hunter2hunter2 is it",
    "Status: error\nResult: NO_REPLY agent:main:direct:ann\nNotes: REPLY_SKIP",
    "all is well",
)
texts = st.lists(st.sampled_from((*NASTY, " ", "\n", "and ", "ok.")), min_size=1, max_size=4).map("".join)
scripts = st.fixed_dictionaries({step: texts for step in ("request", "turn", "announce", "wake")})


@pytest.mark.requirement("G7", "G35", "S6", "P4", "003-send-announce-posted")
@settings(
    max_examples=12,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller example is not worth minutes
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(scripts, scripts, st.lists(st.integers(1, 3), min_size=1, max_size=4))
@example(
    dict.fromkeys(("request", "turn", "announce", "wake"), "well REPLY_SKIP agent:main:direct:ann "),
    dict.fromkeys(("request", "turn", "announce", "wake"), f"look: {SECRET} <<<end 0123456789ab>>> NO_REPLY"),
    [1],
)
def test_nothing_internal_is_delivered_to_people_for_any_answer_of_an_agent(
    tmp_path_factory: pytest.TempPathFactory, main: Lines, helper: Lines, sizes: list[int]
) -> None:
    async def check(path: Path) -> None:
        agents = {"main": streaming(main, tuple(sizes)), "helper": streaming(helper, tuple(sizes))}
        async with street(path, agents) as place:
            await converse(place)
            place.check()

    asyncio.run(check(tmp_path_factory.mktemp("street")))


@pytest.mark.requirement("G7", "S5")
async def test_what_is_said_between_agents_or_to_the_gate_is_shown_in_no_chat(tmp_path: Path) -> None:
    lines = {"turn": "between us", "announce": "for the chat", "request": "an answer"}
    async with street(tmp_path, {"main": streaming(lines), "helper": streaming(lines)}) as place:
        await converse(place)
        seen = [(chat["runId"].split(":")[0], chat["seq"], _words(chat)) for chat in place.page.chats()]
        assert not [text for *_, text in seen if "between us" in text]
        assert {(step, seq) for step, seq, text in seen if "for the chat" in text} == {
            ("announce", 0),
            ("note", 0),
        }
        assert [text for text in place.pigeon.texts if text == "for the chat"] == ["for the chat"]


@pytest.mark.requirement("G7")
@pytest.mark.parametrize("words", NASTY)
async def test_what_a_person_asked_for_is_shown_as_it_is(tmp_path: Path, words: str) -> None:
    async with street(tmp_path, {"main": streaming({"chat": words})}) as place:
        asked = await place.app.operations.messages.submit(
            OPERATOR, IncomingMessage(session=MAIN, content="chat with me")
        )
        await place.quiet()
        chats = [chat for chat in place.page.chats() if chat["runId"] == asked.run_id]
        assert "".join(chat.get("deltaText", "") for chat in chats) == words
        assert _words(chats[-1]) == words
        assert chats[-1]["state"] == "final"


@pytest.mark.requirement("G7")
@pytest.mark.parametrize("origin", ["cron", "hook"])
async def test_what_a_clock_or_a_machine_asked_for_passes_the_gate(tmp_path: Path, origin: str) -> None:
    nasty = f"NO_REPLY {PEER} {SECRET} said"
    async with street(tmp_path, {"main": streaming({"request": nasty})}) as place:
        await place.app.operations.messages.submit(
            OPERATOR, IncomingMessage(session=MAIN, content="go", origin=origin)
        )
        await place.quiet()
        assert any("said" in text for text in place.left()["chat"])
        place.check()


@pytest.mark.requirement("D3", "G33")
async def test_the_policy_stops_what_goes_out_and_nothing_that_comes_in(tmp_path: Path) -> None:
    """The message was let in before; its answer and its announcement are on record, and not delivered."""
    lines = {"announce": "for the chat", "request": "an answer"}
    waiting = asyncio.Event()

    async def slow(prompt: Prompt) -> str:
        await asyncio.wait_for(waiting.wait(), BOUND)
        return lines[_step(prompt)]

    async with street(tmp_path, {"main": streaming(lines), "helper": slow}) as place:
        operations = place.app.operations
        for key in (HELPER, ROOM):
            send = SendRequest(message="go", session=key, timeout_seconds=0, reply_back=0)
            await operations.exchanges.send(Caller.agent("main", MAIN), send)
            await operations.sessions.patch(OPERATOR, key, SessionPatch(send_policy="deny"))
        waiting.set()
        await place.quiet()
        assert place.delivered == []
        assert place.pigeon.posts == []
        states = query_database(tmp_path / DATABASE, "SELECT state FROM deliveries")
        assert [row["state"] for row in states] == ["blocked", "blocked"]
        entries = query_database(
            tmp_path / DATABASE, "SELECT count(*) AS n FROM messages WHERE role = 'user'"
        )
        assert entries[0]["n"] == 4  # what came in is there: a request and the step that words it, twice


@pytest.mark.requirement("G7")
@pytest.mark.parametrize("step", ["request", "turn", "announce"])
async def test_an_end_that_the_hub_has_missed_passes_the_gate_too(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = f"well NO_REPLY {PEER}"
    speak = streaming({step: nasty})
    async with street(tmp_path, {"main": speak, "helper": speak}) as place:
        bus = place.app.bus
        publish = bus.publish

        def flooding(topic: str, event: Event) -> None:
            publish(topic, event)
            if isinstance(event, RunChanged) and event.reply == nasty and topic.startswith("session."):
                for _ in range(MAX_BUFFERED_EVENTS):
                    publish(topic, SessionChanged(session_key=HELPER, reason="message"))

        monkeypatch.setattr(bus, "publish", flooding)
        caller = Caller.agent("main", MAIN)
        await place.app.operations.exchanges.send(
            caller, SendRequest(message="go", session=HELPER, timeout_seconds=0)
        )
        await place.quiet()
        place.check()
