"""Whom a command asks: the gateway that runs, or the store itself where none does. Both answer the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from antiphon.cli.running import find
from antiphon.cli.settings import Settings

if TYPE_CHECKING:
    from antiphon.bus import Event
    from antiphon.client import Client
    from antiphon.client.link import Site
    from antiphon.operations import HistoryFilter, ListFilter, Message, Operations, Send, Spawn, StopView
    from antiphon.views import (
        Accepted,
        Conversation,
        DeliveryPage,
        DeliveryView,
        HistoryPage,
        RunView,
        Sent,
        SessionPage,
        SessionView,
        Spawned,
        TaskView,
    )


class Desk(Protocol):
    """What commands ask of sessions. See `Operations`, of which this is a part."""

    async def submit(self, message: Message) -> Accepted: ...
    async def wait(self, run_id: str, timeout: float) -> RunView: ...
    async def unfinished(self, session: str) -> list[str]: ...
    async def stop(self, session: str, run_id: str | None = None) -> StopView: ...
    async def list(self, wanted: ListFilter) -> SessionPage: ...
    async def describe(self, session: str) -> SessionView: ...
    async def history(self, session: str, wanted: HistoryFilter) -> HistoryPage: ...
    async def conversations(self, session: str) -> list[Conversation]: ...
    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]: ...
    async def open(self, session: str) -> SessionView: ...
    async def renew(self, session: str) -> SessionView: ...
    async def send(self, wanted: Send, requester: str) -> Sent: ...
    async def spawn(self, wanted: Spawn, requester: str) -> Spawned: ...
    async def tasks(self, session: str) -> list[TaskView]: ...
    async def task_report(self, run_id: str) -> str | None: ...
    async def deliveries(self, state: str | None, limit: int, cursor: str | None = None) -> DeliveryPage: ...
    async def deliver_again(self, key: str) -> DeliveryView: ...


class Own:
    """The operations of this process, asked by whoever sits at the machine."""

    def __init__(self, operations: Operations) -> None:
        from antiphon.access import Caller

        self._operations = operations
        self._caller = Caller.operator()

    async def submit(self, message: Message) -> Accepted:
        return await self._operations.submit(self._caller, message)

    async def wait(self, run_id: str, timeout: float) -> RunView:
        return await self._operations.wait(self._caller, run_id, timeout)

    async def unfinished(self, session: str) -> list[str]:
        return await self._operations.unfinished(self._caller, session)

    async def stop(self, session: str, run_id: str | None = None) -> StopView:
        return await self._operations.stop(self._caller, session, run_id)

    async def list(self, wanted: ListFilter) -> SessionPage:
        return await self._operations.list(self._caller, wanted)

    async def describe(self, session: str) -> SessionView:
        return await self._operations.describe(self._caller, session)

    async def history(self, session: str, wanted: HistoryFilter) -> HistoryPage:
        return await self._operations.history(self._caller, session, wanted)

    async def conversations(self, session: str) -> list[Conversation]:
        return await self._operations.conversations(self._caller, session)

    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]:
        return self._operations.follow(self._caller, session, after)

    async def open(self, session: str) -> SessionView:
        return await self._operations.open(self._caller, session)

    async def renew(self, session: str) -> SessionView:
        return await self._operations.renew(self._caller, session)

    async def send(self, wanted: Send, requester: str) -> Sent:
        return await self._operations.send(self._caller, wanted, requester=requester)

    async def spawn(self, wanted: Spawn, requester: str) -> Spawned:
        return await self._operations.spawn(self._caller, wanted, requester=requester)

    async def tasks(self, session: str) -> list[TaskView]:
        return await self._operations.tasks(self._caller, session)

    async def task_report(self, run_id: str) -> str | None:
        return await self._operations.task_report(self._caller, run_id)

    async def deliveries(self, state: str | None, limit: int, cursor: str | None = None) -> DeliveryPage:
        return await self._operations.deliveries(self._caller, state, limit, cursor)

    async def deliver_again(self, key: str) -> DeliveryView:
        return await self._operations.deliver_again(self._caller, key)


def _nothing(_: str) -> None: ...


def calling(settings: Settings, on_change: Callable[[str], None] = _nothing) -> Client | None:
    """A client of the gateway that the command is to talk to, if there is one. Entering it connects."""
    site = find(settings)
    if site is None:
        return None
    from antiphon.client import Client
    from antiphon.client.link import lost

    async def again() -> Site:
        found = find(settings)
        if found is None:
            raise lost(site, "it is not running")
        return found

    return Client(again, on_change)


@asynccontextmanager
async def reading(settings: Settings) -> AsyncGenerator[Desk]:
    """For questions: nothing is started to answer them."""
    if client := calling(settings):
        async with client:
            yield client
        return
    from antiphon.visits import looking

    async with looking(settings.config_when_needed(), settings.paths.state_dir) as operations:
        yield Own(operations)


@asynccontextmanager
async def talking(
    settings: Settings, on_change: Callable[[str], None] = _nothing
) -> AsyncGenerator[tuple[Desk, Client | None]]:
    """For messages: without a gateway this process hosts the directory while it talks."""
    if client := calling(settings, on_change):
        async with client:
            yield client, client
        return
    from antiphon.cli.journal import keep_journal
    from antiphon.host import hosting

    loaded = settings.load()
    keep_journal(settings.paths.state_dir, debug=settings.debug)
    async with hosting(loaded.config, settings.paths.state_dir) as operations:
        yield Own(operations), None
