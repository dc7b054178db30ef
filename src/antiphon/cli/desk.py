"""Whom a command asks: the gateway that runs, or the store itself where none does. Both answer the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from antiphon.cli.running import find, find_named
from antiphon.cli.settings import Settings
from antiphon.errors import AntiphonError, NotFound, StoreFull, StoreLocked, StoreReadOnly

if TYPE_CHECKING:
    from antiphon import views
    from antiphon.bus import Event
    from antiphon.client import Client
    from antiphon.client.link import Site
    from antiphon.filters import HistoryFilter, ListFilter
    from antiphon.operations import Message, Operations, Send, Spawn, StopView

MAX_SESSIONS_COMPARED = 200  # the latest ones, to suggest one for a mistyped name
INDEXING = 5.0  # seconds that somebody who searches waits for the index
TURN = 0.4  # seconds of them in one go, in which nobody else can own the directory


class Desk(Protocol):
    """What commands ask of sessions. See `Operations`, of which this is a part."""

    async def submit(self, message: Message) -> views.Accepted: ...
    async def wait(self, run_id: str, timeout: float) -> views.RunView: ...
    async def unfinished(self, session: str) -> list[str]: ...
    async def stop(self, session: str, run_id: str | None = None) -> StopView: ...
    async def list(self, wanted: ListFilter) -> views.SessionPage: ...
    async def describe(self, session: str) -> views.SessionView: ...
    async def history(self, session: str, wanted: HistoryFilter) -> views.HistoryPage: ...
    async def conversations(self, session: str) -> list[views.Conversation]: ...
    async def search(
        self, query: str, *, session: str | None, agent_id: str | None, limit: int
    ) -> views.SearchPage: ...
    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]: ...
    async def open(self, session: str) -> views.SessionView: ...
    async def renew(self, session: str, expected: str | None = None) -> views.SessionView: ...
    async def restore(self, session_id: str) -> views.SessionView: ...
    async def label(self, session: str, text: str | None) -> views.SessionView: ...
    async def delete(self, session: str, expected: str) -> bool: ...
    async def send(self, wanted: Send, requester: str) -> views.Sent: ...
    async def spawn(self, wanted: Spawn, requester: str) -> views.Spawned: ...
    async def tasks(self, session: str) -> list[views.TaskView]: ...
    async def task_report(self, run_id: str) -> str | None: ...
    async def roster(self) -> list[views.AgentCard]: ...
    async def exchanges(
        self, session: str | None, *, unsettled: bool, limit: int, cursor: str | None = None
    ) -> views.ExchangePage: ...
    async def exchange(self, reference: str) -> views.ExchangeDetail: ...
    async def deliveries(
        self, state: str | None, limit: int, cursor: str | None = None
    ) -> views.DeliveryPage: ...
    async def deliver_again(self, key: str) -> views.DeliveryView: ...


class Own:
    """The operations of this process, asked by whoever sits at the machine."""

    def __init__(self, operations: Operations) -> None:
        from antiphon.access import Caller

        self._operations = operations
        self._caller = Caller.operator()

    async def submit(self, message: Message) -> views.Accepted:
        return await self._operations.submit(self._caller, message)

    async def wait(self, run_id: str, timeout: float) -> views.RunView:
        return await self._operations.wait(self._caller, run_id, timeout)

    async def unfinished(self, session: str) -> list[str]:
        return await self._operations.unfinished(self._caller, session)

    async def stop(self, session: str, run_id: str | None = None) -> StopView:
        return await self._operations.stop(self._caller, session, run_id)

    async def list(self, wanted: ListFilter) -> views.SessionPage:
        return await self._operations.list(self._caller, wanted)

    async def describe(self, session: str) -> views.SessionView:
        return await self._operations.describe(self._caller, session)

    async def history(self, session: str, wanted: HistoryFilter) -> views.HistoryPage:
        return await self._operations.history(self._caller, session, wanted)

    async def conversations(self, session: str) -> list[views.Conversation]:
        return await self._operations.conversations(self._caller, session)

    async def search(
        self, query: str, *, session: str | None, agent_id: str | None, limit: int
    ) -> views.SearchPage:
        return await self._operations.search(
            self._caller, query, session=session, agent_id=agent_id, limit=limit
        )

    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]:
        return self._operations.follow(self._caller, session, after)

    async def open(self, session: str) -> views.SessionView:
        return await self._operations.open(self._caller, session)

    async def renew(self, session: str, expected: str | None = None) -> views.SessionView:
        return await self._operations.renew(self._caller, session, expected=expected)

    async def restore(self, session_id: str) -> views.SessionView:
        return await self._operations.restore(self._caller, session_id)

    async def label(self, session: str, text: str | None) -> views.SessionView:
        from antiphon.operations import Patch

        return await self._operations.patch(self._caller, session, Patch(label=text))

    async def delete(self, session: str, expected: str) -> bool:
        return await self._operations.delete(self._caller, session, expected=expected)

    async def send(self, wanted: Send, requester: str) -> views.Sent:
        return await self._operations.send(self._caller, wanted, requester=requester)

    async def spawn(self, wanted: Spawn, requester: str) -> views.Spawned:
        return await self._operations.spawn(self._caller, wanted, requester=requester)

    async def tasks(self, session: str) -> list[views.TaskView]:
        return await self._operations.tasks(self._caller, session)

    async def task_report(self, run_id: str) -> str | None:
        return await self._operations.task_report(self._caller, run_id)

    async def roster(self) -> list[views.AgentCard]:
        return await self._operations.roster(self._caller)

    async def exchanges(
        self, session: str | None, *, unsettled: bool, limit: int, cursor: str | None = None
    ) -> views.ExchangePage:
        return await self._operations.exchanges(
            self._caller, session, unsettled=unsettled, limit=limit, cursor=cursor
        )

    async def exchange(self, reference: str) -> views.ExchangeDetail:
        return await self._operations.exchange(self._caller, reference)

    async def deliveries(
        self, state: str | None, limit: int, cursor: str | None = None
    ) -> views.DeliveryPage:
        return await self._operations.deliveries(self._caller, state, limit, cursor)

    async def deliver_again(self, key: str) -> views.DeliveryView:
        return await self._operations.deliver_again(self._caller, key)


def _nothing(_: str) -> None: ...


def calling(settings: Settings, on_change: Callable[[str], None] = _nothing) -> Client | None:
    """A client of the gateway that the command is to talk to, if there is one. Entering it connects."""
    site = find(settings)
    if site is None:
        return None
    from antiphon.client import Client
    from antiphon.client.link import lost

    if settings.named_gateways:
        return Client.of_replicas(find_named(settings), on_change)

    async def again() -> Site:
        found = find(settings)
        if found is None:
            raise lost(site, "it is not running")
        return found

    return Client(again, on_change)


async def remember_replicas(settings: Settings, client: Client | None) -> None:
    """Ask the gateway for its other replicas, in case it goes away during a wait.

    Replicas on this machine are found without asking.
    """
    if client is not None and settings.named_gateways:
        with suppress(AntiphonError):  # needed only if the connection is lost
            await client.remember_replicas()


@asynccontextmanager
async def _suggesting(desk: Desk) -> AsyncGenerator[None]:
    """Suggest a similarly named session in the error for one that does not exist."""
    try:
        yield
    except NotFound as error:
        reference = error.data.get("reference")
        if isinstance(reference, str) and (meant := await _nearest(desk, reference)):
            raise NotFound(error.what, f"Did you mean {meant!r}? {error.hint}", **error.data) from error
        raise


async def _nearest(desk: Desk, reference: str) -> str | None:
    """The session whose key, label or agent id is most similar to the reference; None if none is."""
    from difflib import get_close_matches

    from antiphon.filters import ListFilter

    try:
        rows = (await desk.list(ListFilter(limit=MAX_SESSIONS_COMPARED))).sessions
        names = {card.id: f"agent:{card.id}:main" for card in await desk.roster()}
    except AntiphonError:  # report the first error instead
        return None
    names |= {row.key.split(":", 2)[-1]: row.key for row in rows if ":subagent:" not in row.key}
    names |= {name: name for row in rows for name in (row.key, row.label) if name}
    names["main"] = "main"
    if reference in names:  # known by another kind of name, such as an agent's id
        return names[reference] if names[reference] != reference else None
    close = get_close_matches(reference, names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


@asynccontextmanager
async def reading(settings: Settings) -> AsyncGenerator[Desk]:
    """For questions: nothing is started to answer them."""
    if client := calling(settings):
        async with client, _suggesting(client):
            yield client
        return
    from antiphon.visits import looking

    async with looking(settings.config_when_needed(), settings.paths.state_dir) as operations:
        desk = Own(operations)
        async with _suggesting(desk):
            yield desk


@asynccontextmanager
async def searching(settings: Settings) -> AsyncGenerator[Desk]:
    """For finding what was said: where no process is there that indexes it, this one does first, if it can."""
    if find(settings) is None:
        with suppress(StoreFull, StoreLocked, StoreReadOnly):  # what is left is said with the answer
            await _index(settings)
    async with reading(settings) as desk:
        yield desk


async def _index(settings: Settings) -> None:
    """A little at a time: whoever wants to own the directory meanwhile waits for one turn, not for all of it."""
    from antiphon.engine import search
    from antiphon.store.statedir import StateDir
    from antiphon.visits import keeping, reading

    config, home = settings.config_when_needed(), StateDir.look(settings.paths.state_dir)
    if config.store.url is not None:
        return
    async with reading(config, home.path) as store:  # refuses what would have to be brought up to date first
        last, head = await store.read(search.place)
    left, clock = last < head, asyncio.get_running_loop().time
    until = clock() + INDEXING
    while left and clock() < until:
        began = clock()
        async with keeping(config, home.path) as store:
            left = await search.hurry(store, TURN)
        await asyncio.sleep(clock() - began if left else 0)


@asynccontextmanager
async def changing(settings: Settings) -> AsyncGenerator[Desk]:
    """For changes that play no run: without a gateway this process has the directory to itself meanwhile."""
    if client := calling(settings):
        async with client, _suggesting(client):
            yield client
        return
    from antiphon.store.sqlite import check_begun
    from antiphon.store.statedir import StateDir
    from antiphon.visits import check_alone, keeping, operations_on

    config, home = settings.load().config, StateDir.look(settings.paths.state_dir)
    if config.store.url is None:
        check_begun(home.database)
    await check_alone(config, home.path)
    async with keeping(config, home.path) as store:
        desk = Own(operations_on(config, store, home))
        async with _suggesting(desk):
            yield desk


@asynccontextmanager
async def talking(
    settings: Settings, on_change: Callable[[str], None] = _nothing
) -> AsyncGenerator[tuple[Desk, Client | None]]:
    """For messages: without a gateway this process hosts the directory while it talks."""
    if client := calling(settings, on_change):
        async with client, _suggesting(client):
            yield client, client
        return
    from antiphon.cli.journal import keep_journal
    from antiphon.host import hosting
    from antiphon.visits import check_alone

    loaded = settings.load()
    await check_alone(loaded.config, settings.paths.state_dir)
    keep_journal(settings.paths.state_dir, debug=settings.debug)
    async with hosting(loaded.config, settings.paths.state_dir) as operations:
        desk = Own(operations)
        async with _suggesting(desk):
            yield desk, None
