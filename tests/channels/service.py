"""A chat service as the contract suite sees it, and a gateway in this process that is connected to it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.channels.host import AccountStatus, ChannelHost
from antiphon.config.load import parse
from antiphon.engine.jobs.jobs import AgentTurn, AnnounceDelivery, JobSpec
from antiphon.engine.jobs.schedule import EverySchedule
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.gateway.server import ListeningGateway, serve_gateway
from antiphon.operations.jobs import JobFireResult
from antiphon.operations.operations import Operations
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from support.app_fixture import BOUND, DATABASE, wait_until
from support.databases import query_database

OPERATOR = Caller.operator()
Json = dict[str, Any]
__all__ = ["Chats", "Service", "open_chats"]


class Service(ABC):
    """The stand-in of a service. Chats, people and threads have the ids that session keys show."""

    name: str
    webhook_secret: str
    refuse_credentials: bool = False

    @property
    @abstractmethod
    def credentials(self) -> Json: ...
    @property
    @abstractmethod
    def broken_credentials(self) -> Json: ...
    @property
    @abstractmethod
    def webhook_settings(self) -> Json: ...

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[object]: ...

    @abstractmethod
    def unreachable(self) -> AbstractAsyncContextManager[None]:
        """The service takes no connections while the block lasts."""

    @abstractmethod
    def build_block(self, settings: Json) -> Json:
        """The channel's block of the configuration."""

    @abstractmethod
    async def write(
        self,
        text: str,
        *,
        user: str,
        chat: str | None = None,
        thread: str | None = None,
        mention: bool = False,
        is_bot: bool = False,
        replies_to_bot: bool = False,
        image: str | None = None,
        size: int = 0,
    ) -> object:
        """A person writes; returns the event, for `repeat`."""

    @abstractmethod
    async def write_as_self(self, text: str) -> None: ...
    @abstractmethod
    async def write_unreadable(self) -> None: ...
    @abstractmethod
    async def repeat(self, event: Any) -> None: ...
    @abstractmethod
    async def post_webhook(self, url: str, text: str, secret: str | None) -> int: ...
    @abstractmethod
    def add_group(self, chat: str, *threads: str) -> None: ...
    @abstractmethod
    def delete_thread(self, chat: str, thread: str) -> None: ...
    @abstractmethod
    def add_image(self, ref: str, content: bytes) -> None: ...
    @abstractmethod
    def take_next_send_then_reset(self) -> None: ...
    @abstractmethod
    def flood_next_send(self, seconds: int) -> None: ...

    @abstractmethod
    def texts(self, chat: str, thread: str | None = "any") -> list[str]:
        """What people see in a chat, or in one thread of it; None is its root."""

    @abstractmethod
    async def until_shown(
        self, number: int, chat: str | None = None, *, seconds: float = BOUND
    ) -> list[str]: ...

    @abstractmethod
    async def until(self, condition: Callable[[], Any]) -> None: ...
    @abstractmethod
    def typing_chats(self) -> set[str]: ...
    @abstractmethod
    def count_typing(self) -> int: ...


@dataclass(frozen=True)
class Chats:
    """A running gateway and its service."""

    service: Service
    served: ListeningGateway
    path: Path
    posted: list[str] = field(default_factory=list[str])

    @property
    def operations(self) -> Operations:
        return self.served.gateway.app.operations

    @property
    def host(self) -> ChannelHost:
        host = self.served.gateway.app.channels
        assert host is not None
        return host

    @property
    def http_url(self) -> str:
        return self.served.url.replace("ws", "http", 1)

    def now(self) -> int:
        return self.served.gateway.app.clock.now()

    def rows(self, sql: str, *parameters: object) -> list[dict[str, Any]]:
        return query_database(self.path / DATABASE, sql, *parameters)

    def outcomes(self) -> list[str]:
        found = self.rows("SELECT outcome FROM inbound_events WHERE state = 'decided' ORDER BY event_id")
        return [row["outcome"] for row in found]

    async def list_accounts(self) -> list[AccountStatus]:
        return await self.host.describe()

    async def until(self, condition: Callable[[], Any]) -> None:
        async def is_met() -> bool:
            return bool(condition())

        await wait_until(is_met)

    async def until_state(self, state: str, account: str = "default") -> None:
        async def has_state() -> bool:
            return any(it.state == state for it in await self.list_accounts() if it.account_id == account)

        await wait_until(has_state)

    async def until_delivery(self, state: str, number: int = 1) -> None:
        await self.until(lambda: len(self.rows("SELECT 1 FROM deliveries WHERE state = ?", state)) >= number)

    async def post(self, text: str, to: str) -> None:
        self.posted.append(text)
        place = Destination(channel=self.service.name, to=to, account_id="default")
        await self.operations.posts.post_to_chat(OPERATOR, text, f"post-{len(self.posted)}", place)

    async def fire_job(self, text: str, channel: str, to: str) -> JobFireResult:
        spec = JobSpec(
            name="news",
            schedule=EverySchedule(every_ms=3_600_000),
            payload=AgentTurn(message=text),
            delivery=AnnounceDelivery(channel=channel, to=to),
        )
        job = await self.operations.jobs.add(OPERATOR, spec)
        return await self.operations.jobs.run(OPERATOR, job.id)


@asynccontextmanager
async def open_chats(
    path: Path,
    service: Service,
    settings: Json,
    agent: AgentFunction,
    *,
    functions: dict[str, AgentFunction] | None = None,
    **sections: Any,
) -> AsyncGenerator[Chats]:
    config, _ = parse({"channels": {service.name: service.build_block(settings)}, **sections})
    agents = {"main": agent, **(functions or {})}
    runtimes = {name: FunctionRuntime(function) for name, function in agents.items()}
    state = path / "state"
    async with asyncio.timeout(150), serve_gateway(config, state, port=0, functions=runtimes) as served:
        yield Chats(service, served, state)
