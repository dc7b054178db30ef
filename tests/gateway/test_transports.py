"""The same behaviour on every transport: in process, over the WebSocket, over HTTP, and for hooks."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx2
import pytest

from antiphon.access import Caller
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import AntiphonError
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_for_event
from support.gateway_http import ALL_ENDPOINTS, HOOK_TOKEN, echo
from support.gateway_ws import READ, WRITE, Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("V3", "W2", "W5")]

OTHER = "agent:main:dashboard:other"
SETTINGS = {
    **ALL_ENDPOINTS,
    "store": {"messageMaxBytes": 2000},
    "hooks": {**ALL_ENDPOINTS["hooks"], "allowRequestSessionKey": True},
    "session": {"sendPolicy": {"rules": [{"action": "deny", "match": {"keyPrefix": "dashboard:mute"}}]}},
}


WORDS = {
    "invalid_request": "invalid_input",
    "invalid_key": "invalid_input",
    "model_not_found": "not_found",
    "MISSING_SCOPE": "forbidden",
}


class Refused(Exception):
    """What every transport has in common when it says no: a word, and a sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = WORDS.get(kind, kind)
        self.message = message


class Page(NamedTuple):
    items: list[dict[str, Any]]
    cursor: str | None


class Transport(ABC):
    """What can be done at any of them."""

    @abstractmethod
    async def say(self, session: str, text: str, key: str) -> str:
        """The run's reply."""

    @abstractmethod
    async def history(self, session: str, limit: int = 50, cursor: str | None = None) -> Page: ...

    @abstractmethod
    async def stop(self, session: str) -> bool: ...

    async def texts(self, session: str) -> list[Any]:
        said = [item["content"] for item in (await self.history(session)).items]
        return [content if isinstance(content, str) else content[0]["text"] for content in said]


class InProcess(Transport):
    def __init__(self, operations: Operations, caller: Caller) -> None:
        self._operations, self._caller = operations, caller

    async def say(self, session: str, text: str, key: str) -> str:
        message = IncomingMessage(session=session, content=text, idempotency_key=key)
        accepted = await self._done(self._operations.messages.submit(self._caller, message))
        return (
            await self._done(self._operations.runs.wait(self._caller, accepted.run_id, BOUND))
        ).reply or ""

    async def history(self, session: str, limit: int = 50, cursor: str | None = None) -> Page:
        wanted = HistoryFilter(limit=limit, include_tools=True, before=int(cursor) if cursor else None)
        page = await self._done(self._operations.transcripts.read(self._caller, session, wanted))
        return Page(page.messages, page.next_cursor)

    async def stop(self, session: str) -> bool:
        return bool((await self._done(self._operations.runs.stop(self._caller, session))).run_ids)

    @staticmethod
    async def _done(work: Any) -> Any:
        try:
            return await work
        except AntiphonError as error:
            raise Refused(error.code, str(error)) from error


class WebSocket(Transport):
    def __init__(self, client: Client) -> None:
        self._client = client

    async def say(self, session: str, text: str, key: str) -> str:
        sent = await self._ask("chat.send", sessionKey=session, message=text, idempotencyKey=key)
        return (await self._ask("agent.wait", runId=sent["runId"]))["reply"]

    async def history(self, session: str, limit: int = 50, cursor: str | None = None) -> Page:
        await self._ask("sessions.get", key=session)  # `chat.history` takes what is not there for empty
        more = {"cursor": cursor} if cursor else {}
        page = await self._ask("chat.history", sessionKey=session, limit=limit, **more)
        return Page(page["messages"], page.get("nextCursor"))

    async def stop(self, session: str) -> bool:
        return (await self._ask("chat.abort", sessionKey=session))["aborted"]

    async def _ask(self, method: str, **params: Any) -> Any:
        answer = await self._client.ask(method, params)
        if not answer.ok:
            raise Refused(answer.error["details"]["type"], answer.error["message"])
        return answer.payload


class Http(Transport):
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def say(self, session: str, text: str, key: str) -> str:
        agent = session.split(":")[1] if session.startswith("agent:") else ""  # which is a model of this API
        model = f"antiphon/{agent or 'default'}"
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        headers = {"x-antiphon-session-key": session, "Idempotency-Key": key}
        answer = await self._json("POST", "/v1/chat/completions", json=body, headers=headers)
        return answer["choices"][0]["message"]["content"]

    async def history(self, session: str, limit: int = 50, cursor: str | None = None) -> Page:
        more = {"cursor": cursor} if cursor else {}
        params = {"limit": str(limit), "includeTools": "1", **more}
        page = await self._json("GET", f"/sessions/{quote(session, safe='')}/history", params=params)
        return Page(page["items"], page.get("nextCursor"))

    async def stop(self, session: str) -> bool:
        return (await self._json("POST", f"/sessions/{quote(session, safe='')}/kill"))["killed"]

    async def _json(self, method: str, path: str, **options: Any) -> Any:
        response = await self._http.request(method, path, **options)
        body = response.json()
        if response.status_code != 200:
            raise Refused(body["error"].get("code") or body["error"]["type"], body["error"]["message"])
        return body


class Hooks(Http):
    """Hooks only speak; what they said is read over HTTP."""

    def __init__(self, http: httpx2.AsyncClient, gateway: GatewayFixture) -> None:
        super().__init__(http)
        self._gate = gateway

    async def say(self, session: str, text: str, key: str) -> str:
        headers = {"Authorization": f"Bearer {HOOK_TOKEN}", "Idempotency-Key": key}
        body = {"message": text, "sessionKey": session}
        run = (await self._json("POST", "/hooks/agent", json=body, headers=headers))["runId"]
        return (await self._gate.operations.runs.wait(OPERATOR, run, BOUND)).reply or ""


Connect = Callable[[GatewayFixture, str], AbstractAsyncContextManager[Transport]]


@asynccontextmanager
async def _in_process(gateway: GatewayFixture, scope: str) -> AsyncGenerator[Transport]:
    yield InProcess(gateway.operations, Caller.operator([scope]))


@asynccontextmanager
async def _websocket(gateway: GatewayFixture, scope: str) -> AsyncGenerator[Transport]:
    async with gateway.client(gateway.issue(scope)) as client:
        yield WebSocket(client)


@asynccontextmanager
async def _http(gateway: GatewayFixture, scope: str) -> AsyncGenerator[Transport]:
    async with gateway.http(gateway.issue(scope)) as http:
        yield Http(http)


@asynccontextmanager
async def _hooks(gateway: GatewayFixture, scope: str) -> AsyncGenerator[Transport]:
    async with gateway.http(gateway.issue(scope)) as http:
        yield Hooks(http, gateway)


ENTRANCES: dict[str, Connect] = {
    "in process": _in_process,
    "websocket": _websocket,
    "http": _http,
    "hooks": _hooks,
}


@pytest.fixture
async def gateway(tmp_path: Path, anyio_backend: str) -> AsyncGenerator[GatewayFixture]:
    async with open_gateway(tmp_path, settings=SETTINGS) as gateway:
        yield gateway


@pytest.fixture(params=ENTRANCES)
def connect(request: pytest.FixtureRequest) -> Connect:
    """A way in; called with a gateway and a scope."""
    return ENTRANCES[request.param]


@pytest.fixture
async def transport(gateway: GatewayFixture, connect: Connect) -> AsyncGenerator[Transport]:
    async with connect(gateway, WRITE) as transport:
        yield transport


async def test_a_message_is_answered_and_stored(
    transport: Transport, gateway: GatewayFixture, tmp_path: Path
) -> None:
    assert await transport.say(OTHER, "héllo 😀", "k1") == "heard héllo 😀"
    assert await transport.texts(OTHER) == ["héllo 😀", "heard héllo 😀"]
    page = await gateway.operations.transcripts.read(OPERATOR, OTHER, HistoryFilter())
    assert [item["seq"] for item in page.messages] == [1, 2]
    assert page.messages[0]["content"] == "héllo 😀"


async def test_a_repeated_key_sends_once(transport: Transport) -> None:
    for _ in range(2):
        assert await transport.say(OTHER, "once", "k1") == "heard once"
    assert await transport.texts(OTHER) == ["once", "heard once"]
    for session, text in ((OTHER, "something else"), (MAIN, "once")):
        with pytest.raises(Refused) as refusal:
            await transport.say(session, text, "k1")
        assert refusal.value.kind == "conflict"
    assert await transport.texts(OTHER) == ["once", "heard once"]


async def test_a_key_used_on_one_transport_is_not_sent_again_on_another(
    gateway: GatewayFixture, connect: Connect
) -> None:
    async with _in_process(gateway, WRITE) as first, connect(gateway, WRITE) as second:
        await first.say(OTHER, "once", "k1")
        with pytest.raises(Refused) as refusal:
            await second.say(OTHER, "twice", "k1")
        assert refusal.value.kind == "conflict"
        assert await second.texts(OTHER) == ["once", "heard once"]


@pytest.mark.parametrize(
    ("session", "text", "kind"),
    [
        (OTHER, "", "invalid_input"),
        (OTHER, " \n\t", "invalid_input"),
        (OTHER, "x" * 2001, "too_large"),
        (OTHER, "é" * 1001, "too_large"),
        ("agent::x", "hello", "invalid_input"),
        ("global", "hello", "invalid_input"),
        ("agent:nobody:main", "hello", "not_found"),
        ("agent:main:dashboard:mute", "hello", "send_blocked"),
    ],
)
async def test_invalid_messages_are_refused_alike_and_leave_nothing(
    transport: Transport, gateway: GatewayFixture, session: str, text: str, kind: str
) -> None:
    with pytest.raises(Refused) as refusal:
        await transport.say(session, text, uuid.uuid4().hex)
    assert refusal.value.kind == kind
    assert refusal.value.message
    if kind == "send_blocked":
        assert refusal.value.message.startswith("send blocked by session policy")
    page = await gateway.operations.sessions.get_summary(OPERATOR)
    assert (page.queued, page.running) == (0, 0)
    for key in (OTHER, MAIN):
        with pytest.raises(Refused) as missing:
            await transport.history(key)
        assert missing.value.kind == "not_found"


async def test_the_longest_message_is_accepted(transport: Transport) -> None:
    assert await transport.say(OTHER, "x" * 2000, "k1") == "heard " + "x" * 2000


async def test_a_missing_session_is_not_found_and_not_stopped(transport: Transport) -> None:
    for work in (transport.history(OTHER), transport.stop(OTHER), transport.history("no-such-label")):
        with pytest.raises(Refused) as refusal:
            await work
        assert refusal.value.kind == "not_found"


@pytest.mark.parametrize("connect", [name for name in ENTRANCES if name != "hooks"], indirect=True)
async def test_a_reader_can_read_and_do_nothing_else(gateway: GatewayFixture, connect: Connect) -> None:
    async with _in_process(gateway, WRITE) as writer, connect(gateway, READ) as reader:
        await writer.say(OTHER, "hello", "k1")
        assert await reader.texts(OTHER) == ["hello", "heard hello"]
        for work in (reader.say(OTHER, "mine", "k2"), reader.stop(OTHER)):
            with pytest.raises(Refused) as refusal:
                await work
            assert refusal.value.kind == "forbidden"
            assert WRITE in refusal.value.message
        assert await writer.texts(OTHER) == ["hello", "heard hello"]


@pytest.mark.requirement("H4")
async def test_paging_back_gives_every_message_once(transport: Transport, gateway: GatewayFixture) -> None:
    await gateway.operations.sessions.open(OPERATOR, OTHER)
    for number in range(11):
        await gateway.operations.transcripts.inject(OPERATOR, OTHER, f"{number}")
    seen: list[int] = []
    page = await transport.history(OTHER, limit=3)
    while True:
        seen = [item["seq"] for item in page.items] + seen
        if page.cursor is None:
            break
        page = await transport.history(OTHER, limit=3, cursor=page.cursor)
    assert seen == list(range(1, 12))


@pytest.mark.requirement("G16")
async def test_stop_reports_whether_a_run_was_stopped(tmp_path: Path, connect: Connect) -> None:
    going = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        going.set()
        await asyncio.Event().wait()
        return await echo(prompt)

    async with (
        open_gateway(tmp_path, agent, settings=SETTINGS) as gateway,
        connect(gateway, WRITE) as transport,
    ):
        await gateway.operations.messages.submit(
            OPERATOR, IncomingMessage(session=OTHER, content="x", idempotency_key="r1")
        )
        await wait_for_event(going)
        assert await transport.stop(OTHER) is True
        view = await gateway.operations.runs.wait(OPERATOR, "r1", BOUND)
        assert (view.has_ended, view.state) == (True, "cancelled")
        assert await transport.stop(OTHER) is False
