"""A whole gateway on a real socket, and raw WebSocket clients that record every frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.typing import Origin

from antiphon.app import App
from antiphon.clock import Clock
from antiphon.config import Config
from antiphon.engine.toolbox import Tool
from antiphon.gateway.server import ListeningGateway, serve_gateway
from antiphon.gateway.tokens import TokenRegistry
from antiphon.operations.operations import Operations
from antiphon.runtimes import Runtime
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from support.app_fixture import BOUND, DATABASE
from support.gateway_http import ALL_ENDPOINTS, echo

Frame = dict[str, Any]
READ, WRITE, ADMIN = "operator.read", "operator.write", "operator.admin"
TEST_CLIENT = {"id": "test", "version": "1", "platform": "linux", "mode": "test"}
TUI_CLIENT = {"id": "openclaw-tui", "version": "1", "platform": "linux", "mode": "ui"}


class Answer(NamedTuple):
    ok: bool
    payload: Any
    error: Frame


class Client:
    """One connection. It records frames in order, and every wait has a time limit."""

    def __init__(self, ws: ClientConnection) -> None:
        self.ws = ws
        self.hello: Frame = {}
        self.events: list[Frame] = []
        """All events so far."""
        self._untaken: list[Frame] = []
        self._answers: dict[str, list[Answer]] = {}
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._number = 0

    def read(self) -> None:
        """Start reading frames; a client that never does is a slow one."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(ConnectionClosed):
            while True:
                self._record(msgspec.json.decode(await self.ws.recv(), type=Frame))
        self._news.set()

    def _record(self, frame: Frame) -> None:
        if frame["type"] == "res":
            answer = Answer(frame["ok"], frame.get("payload"), frame.get("error", {}))
            self._answers.setdefault(frame["id"], []).append(answer)
        else:
            assert frame["type"] == "event"
            self.events.append(frame)
            self._untaken.append(frame)
        self._news.set()

    async def _until(self, found: Callable[[], Any], what: str) -> Any:
        try:
            async with asyncio.timeout(BOUND):
                while (value := found()) is None:
                    assert not self.over, f"{what}: the connection was closed with {self.ws.close_code}"
                    self._news.clear()
                    await self._news.wait()
                return value
        except TimeoutError:
            seen = [(event["event"], str(event["payload"])[:150]) for event in self.events[-20:]]
            raise AssertionError(f"{what} did not arrive; the last events were {seen}") from None

    def collect_pongs(self) -> list[bytes]:
        """Answer no more pings; return the list to which their payloads are added."""
        payloads: list[bytes] = []
        send_frame = self.ws.protocol.send_frame

        def send_other_frame(frame: WebSocketFrame) -> None:
            if frame.opcode is Opcode.PONG:
                payloads.append(bytes(frame.data))
            else:
                send_frame(frame)

        self.ws.protocol.send_frame = send_other_frame
        return payloads

    async def news(self) -> None:
        """Wait until something arrives or the connection is closed."""
        self._news.clear()
        await self._news.wait()

    def has_answer(self, request_id: str) -> bool:
        return bool(self._answers.get(request_id))

    @property
    def over(self) -> bool:
        return self._reader is not None and self._reader.done()

    # --- requests ---

    async def send(self, frame: Frame | str | bytes) -> None:
        """Send a frame unchanged."""
        await self.ws.send(msgspec.json.encode(frame).decode() if isinstance(frame, dict) else frame)

    async def start(self, method: str, params: Mapping[str, Any] | None = None) -> str:
        """Send a request without waiting for the answer; return its id."""
        self._number += 1
        request_id = f"{self._number}:{method}"
        await self.send({"type": "req", "id": request_id, "method": method, "params": params or {}})
        return request_id

    async def answer(self, request_id: str) -> Answer:
        """Wait for the next answer to a request."""

        def found() -> Answer | None:
            waiting = self._answers.get(request_id)
            return waiting.pop(0) if waiting else None

        return await self._until(found, f"An answer to {request_id}")

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Answer:
        return await self.answer(await self.start(method, params))

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method that must succeed; return its payload."""
        answer = await self.ask(method, params)
        assert answer.ok, f"{method}: {answer.error}"
        return answer.payload

    async def refused(self, method: str, **params: Any) -> Frame:
        """Call a method that must fail; return its error."""
        answer = await self.ask(method, params)
        assert not answer.ok, f"{method} was not refused: {answer.payload}"
        assert answer.error.get("message")
        return answer.error

    # --- events ---

    async def event(self, name: str, **fields: Any) -> Any:
        """Wait for the next event of this name with these fields; return its payload. Each event is returned once."""

        def found() -> Frame | None:
            for frame in self._untaken:
                payload = frame["payload"]
                if frame["event"] == name and all(payload.get(field) == fields[field] for field in fields):
                    self._untaken.remove(frame)
                    return payload
            return None

        return await self._until(found, f"The event {name!r} with {fields}")

    async def take(self, name: str, number: int, **fields: Any) -> list[Any]:
        return [await self.event(name, **fields) for _ in range(number)]

    def list_events(self, name: str, **fields: Any) -> list[Any]:
        """Return the payloads of all events of this name so far."""
        payloads = [frame["payload"] for frame in self.events if frame["event"] == name]
        return [
            payload for payload in payloads if all(payload.get(field) == fields[field] for field in fields)
        ]

    @property
    def numbers(self) -> list[int]:
        return [frame["seq"] for frame in self.events if "seq" in frame]

    async def settled(self) -> None:
        """Wait until everything sent before has arrived: requests are answered in order."""
        await self.ask("health")

    # --- endings ---

    async def closed(self) -> tuple[int, str]:
        """Wait until the gateway closes the connection; return code and reason."""
        await asyncio.wait_for(self.ws.wait_closed(), BOUND)
        if self._reader:
            await asyncio.wait_for(self._reader, BOUND)
        return self.ws.close_code or 0, self.ws.close_reason or ""

    def abort(self) -> None:
        """Drop the connection, as if the cable were pulled."""
        self.ws.transport.abort()

    async def leave(self) -> None:
        await asyncio.wait_for(self.ws.close(), BOUND)
        if self._reader:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)


def connect_params(**changes: Any) -> dict[str, Any]:
    return {"minProtocol": 3, "maxProtocol": 4, "client": TEST_CLIENT, **changes}


@dataclass(frozen=True, slots=True)
class GatewayFixture:
    """A listening gateway with its parts accessible."""

    served: ListeningGateway
    path: Path
    tokens: TokenRegistry

    @property
    def app(self) -> App:
        return self.served.gateway.app

    @property
    def operations(self) -> Operations:
        return self.app.operations

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def owner(self) -> str:
        token = self.tokens.owner_token
        assert token is not None
        return token

    def issue(self, *scopes: str) -> str:
        return self.tokens.issue_token(f"t{len(self.tokens.records)}", scopes)

    @asynccontextmanager
    async def connect_unauthenticated(
        self, *, origin: str | None = None, reading: bool = True, path: str = ""
    ) -> AsyncGenerator[Client]:
        """Open a connection that has sent nothing yet."""
        ws = await connect(
            self.served.url + path,
            origin=Origin(origin) if origin else None,
            compression=None,
            max_size=None,
            max_queue=1 if not reading else None,
            ping_interval=None,
            proxy=None,
            open_timeout=BOUND,
        )
        client = Client(ws)
        if reading:
            client.read()
        try:
            yield client
        finally:
            await client.leave()

    @asynccontextmanager
    async def client(
        self,
        token: str | None = None,
        *,
        scopes: list[str] | None = None,
        origin: str | None = None,
        **changes: Any,
    ) -> AsyncGenerator[Client]:
        """Open an authenticated connection, by default as the owner."""
        async with self.connect_unauthenticated(origin=origin) as client:
            given = {"auth": {"token": self.owner if token is None else token}, **changes}
            if scopes is not None:
                given["scopes"] = scopes
            client.hello = await client.call("connect", **connect_params(**given))
            yield client

    def http(self, token: str | None = None) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.owner if token is None else token}"}
        return httpx2.AsyncClient(
            base_url=self.served.url.replace("ws://", "http://"), headers=headers, timeout=BOUND
        )


@asynccontextmanager
async def open_gateway(
    path: Path,
    agent: AgentFunction | Runtime | None = echo,
    *,
    settings: Mapping[str, Any] | None = None,
    agents: Mapping[str, AgentFunction] | None = None,
    tools: Callable[[Operations], Iterable[Tool]] | None = None,
    clock: Clock | None = None,
) -> AsyncGenerator[GatewayFixture]:
    """Open a gateway; without an agent the rehearsal model answers."""
    config = Config.model_validate(ALL_ENDPOINTS if settings is None else settings)
    functions: dict[str, Runtime] = {name: FunctionRuntime(fn) for name, fn in (agents or {}).items()}
    if agent is not None:
        functions["main"] = FunctionRuntime(agent) if callable(agent) else agent
    async with serve_gateway(config, path, port=0, functions=functions, tools=tools, clock=clock) as served:
        yield GatewayFixture(served, path, TokenRegistry.open(path))
