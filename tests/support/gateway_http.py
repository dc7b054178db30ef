"""A gateway with its HTTP routes on a real socket: an app on a directory, uvicorn in a task, two clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import uvicorn
from starlette.applications import Starlette

from antiphon.app import App, open_app
from antiphon.bus.local import LocalBus
from antiphon.clock import Clock
from antiphon.config import Config
from antiphon.engine.toolbox import Tool
from antiphon.gateway.auth import Authenticator, AuthMode, list_own_origins
from antiphon.gateway.http.routes import HttpRoutes
from antiphon.gateway.state import GatewayState
from antiphon.gateway.tokens import TokenRegistry
from antiphon.messages import UserMessage
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, RunView
from antiphon.runtimes import Prompt, Runtime
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from support.app_fixture import BOUND, MAIN, OPERATOR, strip_frame

HOOK_TOKEN = "a-hook-token"
ALL_ENDPOINTS: dict[str, Any] = {
    "gateway": {
        "http": {"endpoints": {"chatCompletions": {"enabled": True}, "responses": {"enabled": True}}}
    },
    "hooks": {"enabled": True, "token": HOOK_TOKEN},
}


@dataclass(frozen=True, slots=True)
class HttpGatewayFixture:
    url: str
    state: GatewayState
    web: HttpRoutes
    tokens: TokenRegistry
    http: httpx2.AsyncClient
    """A client with the owner's token."""
    stranger: httpx2.AsyncClient
    """A client without a token."""
    server: uvicorn.Server

    @property
    def app(self) -> App:
        return self.state.app

    @property
    def owner(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens.owner_token}"}

    def limited(self, *scopes: str) -> dict[str, str]:
        """Issue a token with these scopes; return its header."""
        token = self.tokens.issue_token(f"t{len(self.tokens.records)}", scopes)
        return {"Authorization": f"Bearer {token}"}

    async def ask(self, text: str, session: str = MAIN) -> RunView:
        accepted = await self.app.operations.messages.submit(
            OPERATOR, IncomingMessage(session=session, content=text)
        )
        view = await self.app.operations.runs.wait(OPERATOR, accepted.run_id, BOUND)
        assert view.has_ended
        return view

    def listeners(self) -> int:
        """Count the listeners on single sessions and runs."""
        assert isinstance(self.app.bus, LocalBus)
        counts = self.app.bus.count_listeners()
        return sum(
            number for topic, number in counts.items() if topic.startswith(("session.", "run."))
        ) - counts.get("session.*", 0)


@dataclass(slots=True)
class Event:
    event: str = "message"
    id: str | None = None
    data: str = ""
    retry: str | None = None

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.data)


@dataclass(slots=True)
class Stream:
    """The server-sent events of a response, each awaited within a time limit."""

    response: httpx2.Response
    _lines: AsyncGenerator[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = self.response.aiter_lines()  # pyright: ignore

    async def next(self) -> Event:
        async with asyncio.timeout(BOUND):
            event = Event()
            async for line in self._lines:
                if not line:
                    return event
                name, _, value = line.partition(": ")
                if name == "data" and event.data:
                    value = f"{event.data}\n{value}"
                if name:
                    setattr(event, name, value)
            raise EOFError

    async def take(self, number: int) -> list[Event]:
        return [await self.next() for _ in range(number)]

    async def rest(self) -> list[Event]:
        events: list[Event] = []
        try:
            while True:
                events.append(await self.next())
        except EOFError:
            return events


@asynccontextmanager
async def open_event_stream(client: httpx2.AsyncClient, url: str, **options: Any) -> AsyncGenerator[Stream]:
    method = options.pop("method", "GET")
    async with client.stream(method, url, **options) as response:
        assert response.status_code == 200, await response.aread()
        yield Stream(response)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def echo(prompt: Prompt) -> str:
    last = prompt.messages[-1]
    assert isinstance(last, UserMessage)
    assert isinstance(last.content, str)
    return f"heard {strip_frame(last.content)}"


@asynccontextmanager
async def open_http_gateway(
    path: Path,
    agent: AgentFunction | Runtime | None = echo,
    *,
    settings: Mapping[str, Any] | None = None,
    tools: Callable[[Operations], Iterable[Tool]] | None = None,
    mode: AuthMode = "token",
    clock: Clock | None = None,
) -> AsyncGenerator[HttpGatewayFixture]:
    """Open a gateway with its HTTP routes; without an agent the rehearsal model answers."""
    config = Config.model_validate(ALL_ENDPOINTS if settings is None else settings)
    functions: dict[str, Runtime] = {}
    if agent is not None:
        functions = {"main": FunctionRuntime(agent) if callable(agent) else agent}
    async with open_app(config, path, tools=tools, functions=functions, clock=clock) as opened:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        tokens = TokenRegistry.open(path)
        authenticator = Authenticator(
            mode=mode,
            tokens=tokens,
            owner=None,
            password="a password",
            origins=list_own_origins("127.0.0.1", port),
            clock=opened.clock,
        )
        gateway = GatewayState(
            app=opened, authenticator=authenticator, state_dir=path, started_at=opened.clock.now()
        )
        async with _listening(gateway, tokens, listener) as fixture:
            yield fixture


@asynccontextmanager
async def _listening(
    gateway: GatewayState, tokens: TokenRegistry, listener: socket.socket
) -> AsyncGenerator[HttpGatewayFixture]:
    web = HttpRoutes(gateway)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with web.open():
            yield

    server = _Server(
        uvicorn.Config(
            Starlette(routes=web.routes, lifespan=lifespan),
            loop="none",
            ws="websockets-sansio",
            lifespan="on",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(BOUND):
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    owner = {"Authorization": f"Bearer {tokens.owner_token}"}
    async with (
        httpx2.AsyncClient(base_url=url, headers=owner, timeout=BOUND) as http,
        httpx2.AsyncClient(base_url=url, timeout=BOUND) as stranger,
    ):
        try:
            yield HttpGatewayFixture(url, gateway, web, tokens, http, stranger, server)
        finally:
            gateway.closing.set()
            server.should_exit = True
            await asyncio.wait_for(task, BOUND)
