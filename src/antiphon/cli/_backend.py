"""The backend of a command: the running gateway, or the store itself if none runs. Both give the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from antiphon.cli._gateway_lookup import build_not_running_error, find_gateway, find_named_gateways
from antiphon.cli._options import Settings
from antiphon.cli._ownership import (
    POLL_SECONDS,
    SHORT_OWNER_WAIT_SECONDS,
    get_command_name,
    open_when_free,
    run_until_handover,
)
from antiphon.errors import AntiphonError, NotFound, StoreFull, StoreLocked, StoreReadOnly, Unavailable

if TYPE_CHECKING:
    from antiphon.bus import Event
    from antiphon.client import Client
    from antiphon.client.connection import Site
    from antiphon.engine.sessions.transcripts import HistoryFilter
    from antiphon.operations import collaboration_types, transcript_types
    from antiphon.operations import types as views
    from antiphon.operations.operations import Operations
    from antiphon.operations.types import IncomingMessage, ListFilter, SendRequest, SpawnRequest, StopView

T = TypeVar("T")

GATEWAY_START_SECONDS = 60.0  # for a gateway that asked for the directory to answer
MAX_SESSIONS_COMPARED = 200  # the most recent ones, to suggest one for a mistyped name
MAX_INDEXING_SECONDS = 5.0  # how long a search waits for the index
INDEXING_SLICE_SECONDS = 0.4  # how long one slice of indexing keeps the directory locked


class Backend(Protocol):
    """The part of `Operations` that commands use."""

    async def submit(self, message: IncomingMessage) -> views.MessageReceipt: ...
    async def wait(self, run_id: str, timeout: float) -> views.RunView: ...
    async def list_unfinished(self, session: str) -> list[str]: ...
    async def stop(self, session: str, run_id: str | None = None) -> StopView: ...
    async def list_sessions(self, filters: ListFilter) -> views.SessionPage: ...
    async def describe(self, session: str) -> views.SessionView: ...
    async def read_history(self, session: str, filters: HistoryFilter) -> transcript_types.HistoryPage: ...
    async def list_conversations(self, session: str) -> list[transcript_types.ConversationView]: ...
    async def search(
        self, query: str, *, session: str | None, agent_id: str | None, limit: int
    ) -> transcript_types.SearchPage: ...
    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]: ...
    async def open(self, session: str) -> views.SessionView: ...
    async def renew(self, session: str, expected: str | None = None) -> views.SessionView: ...
    async def restore(self, session_id: str) -> views.SessionView: ...
    async def set_label(self, session: str, text: str | None) -> views.SessionView: ...
    async def delete(self, session: str, expected: str) -> bool: ...
    async def send(self, request: SendRequest, requester: str) -> collaboration_types.SendResult: ...
    async def spawn(self, request: SpawnRequest, requester: str) -> collaboration_types.SpawnResult: ...
    async def list_subagents(self, session: str) -> list[collaboration_types.TaskView]: ...
    async def get_report(self, run_id: str) -> str | None: ...
    async def list_agents(self) -> list[views.AgentSummary]: ...
    async def list_exchanges(
        self, session: str | None, *, unsettled: bool, limit: int, cursor: str | None = None
    ) -> collaboration_types.ExchangePage: ...
    async def get_exchange(self, reference: str) -> collaboration_types.ExchangeDetail: ...
    async def list_deliveries(
        self, state: str | None, limit: int, cursor: str | None = None
    ) -> collaboration_types.DeliveryPage: ...
    async def retry_delivery(self, key: str) -> collaboration_types.DeliveryView: ...
    async def list_approvals(self, session: str | None = None) -> list[views.ApprovalView]: ...
    async def resolve_approval(self, approval_id: str, decision: str) -> views.ApprovalView: ...
    async def list_grants(self) -> list[views.GrantView]: ...
    async def revoke_grant(self, grant_id: str) -> None: ...
    async def list_pairings(self) -> list[views.PairingView]: ...
    async def approve_pairing(
        self, channel: str, code: str, account: str | None = None
    ) -> views.PairingView: ...
    async def revoke_pairing(self, channel: str, sender: str, account: str | None = None) -> None: ...


class LocalBackend:
    """Runs the operations in this process, with the rights of the local user."""

    def __init__(self, operations: Operations) -> None:
        from antiphon.access import Caller

        self._operations = operations
        self._caller = Caller.operator()

    async def submit(self, message: IncomingMessage) -> views.MessageReceipt:
        return await self._operations.messages.submit(self._caller, message)

    async def wait(self, run_id: str, timeout: float) -> views.RunView:
        return await self._operations.runs.wait(self._caller, run_id, timeout)

    async def list_unfinished(self, session: str) -> list[str]:
        return await self._operations.runs.list_unfinished(self._caller, session)

    async def stop(self, session: str, run_id: str | None = None) -> StopView:
        return await self._operations.runs.stop(self._caller, session, run_id)

    async def list_sessions(self, filters: ListFilter) -> views.SessionPage:
        return await self._operations.sessions.list(self._caller, filters)

    async def describe(self, session: str) -> views.SessionView:
        return await self._operations.sessions.describe(self._caller, session)

    async def read_history(self, session: str, filters: HistoryFilter) -> transcript_types.HistoryPage:
        return await self._operations.transcripts.read(self._caller, session, filters)

    async def list_conversations(self, session: str) -> list[transcript_types.ConversationView]:
        return await self._operations.conversations.list(self._caller, session)

    async def search(
        self, query: str, *, session: str | None, agent_id: str | None, limit: int
    ) -> transcript_types.SearchPage:
        return await self._operations.search.find(
            self._caller, query, session=session, agent_id=agent_id, limit=limit
        )

    def follow(self, session: str, after: int | None = None) -> AsyncGenerator[Event]:
        return self._operations.transcripts.follow(self._caller, session, after)

    async def open(self, session: str) -> views.SessionView:
        return await self._operations.sessions.open(self._caller, session)

    async def renew(self, session: str, expected: str | None = None) -> views.SessionView:
        return await self._operations.conversations.renew(self._caller, session, expected=expected)

    async def restore(self, session_id: str) -> views.SessionView:
        return await self._operations.conversations.restore(self._caller, session_id)

    async def set_label(self, session: str, text: str | None) -> views.SessionView:
        from antiphon.operations.types import SessionPatch

        return await self._operations.sessions.patch(self._caller, session, SessionPatch(label=text))

    async def delete(self, session: str, expected: str) -> bool:
        return await self._operations.sessions.delete(self._caller, session, expected=expected)

    async def send(self, request: SendRequest, requester: str) -> collaboration_types.SendResult:
        return await self._operations.exchanges.send(self._caller, request, requester=requester)

    async def spawn(self, request: SpawnRequest, requester: str) -> collaboration_types.SpawnResult:
        return await self._operations.subagents.spawn(self._caller, request, requester=requester)

    async def list_subagents(self, session: str) -> list[collaboration_types.TaskView]:
        return await self._operations.subagents.list(self._caller, session)

    async def get_report(self, run_id: str) -> str | None:
        return await self._operations.subagents.get_report(self._caller, run_id)

    async def list_agents(self) -> list[views.AgentSummary]:
        return await self._operations.agents.list(self._caller)

    async def list_exchanges(
        self, session: str | None, *, unsettled: bool, limit: int, cursor: str | None = None
    ) -> collaboration_types.ExchangePage:
        return await self._operations.exchanges.list(
            self._caller, session, unsettled=unsettled, limit=limit, cursor=cursor
        )

    async def get_exchange(self, reference: str) -> collaboration_types.ExchangeDetail:
        return await self._operations.exchanges.get(self._caller, reference)

    async def list_approvals(self, session: str | None = None) -> list[views.ApprovalView]:
        return await self._operations.approvals.list(self._caller, session)

    async def resolve_approval(self, approval_id: str, decision: str) -> views.ApprovalView:
        return await self._operations.approvals.resolve(self._caller, approval_id, decision)

    async def list_grants(self) -> list[views.GrantView]:
        return await self._operations.approvals.list_grants(self._caller)

    async def revoke_grant(self, grant_id: str) -> None:
        await self._operations.approvals.revoke_grant(self._caller, grant_id)

    async def list_pairings(self) -> list[views.PairingView]:
        return await self._operations.pairings.list(self._caller)

    async def approve_pairing(self, channel: str, code: str, account: str | None = None) -> views.PairingView:
        return await self._operations.pairings.approve(self._caller, channel, code, account)

    async def revoke_pairing(self, channel: str, sender: str, account: str | None = None) -> None:
        await self._operations.pairings.revoke(self._caller, channel, sender, account)

    async def list_deliveries(
        self, state: str | None, limit: int, cursor: str | None = None
    ) -> collaboration_types.DeliveryPage:
        return await self._operations.deliveries.list(self._caller, state, limit, cursor)

    async def retry_delivery(self, key: str) -> collaboration_types.DeliveryView:
        return await self._operations.deliveries.retry(self._caller, key)


class HostingBackend(LocalBackend):
    """Hosts the sessions of the directory in this process, until a gateway asks for the directory."""

    def __init__(self, operations: Operations, settings: Settings, hosting: AsyncExitStack) -> None:
        super().__init__(operations)
        self._settings = settings
        self._hosting = hosting

    async def wait_here_or_at_gateway(self, work: Callable[[Backend], Coroutine[Any, Any, T]]) -> T:
        """Do work that only waits; a gateway that asks for the directory gets it, and the work starts again there."""
        if done := await run_until_handover(self._settings, work(self)):
            return done.result()
        await self._hosting.aclose()
        async with await self._find_new_gateway() as client:
            return await work(client)

    async def _find_new_gateway(self) -> Client:
        loop = asyncio.get_running_loop()
        until = loop.time() + GATEWAY_START_SECONDS
        while (client := make_gateway_client(self._settings)) is None:
            if loop.time() > until:
                raise Unavailable(
                    "The gateway that asked for the state directory has not started.",
                    "See why with `antiphon doctor`, and start it again with `antiphon up`.",
                    url=None,
                )
            await asyncio.sleep(POLL_SECONDS)
        return client


async def wait_with_handover(backend: Backend, work: Callable[[Backend], Coroutine[Any, Any, T]]) -> T:
    """Do work that only waits, and give the directory to a gateway that asks for it meanwhile."""
    if isinstance(backend, HostingBackend):
        return await backend.wait_here_or_at_gateway(work)
    return await work(backend)


def _ignore_change(_: str) -> None: ...


def make_gateway_client(
    settings: Settings, on_change: Callable[[str], None] = _ignore_change
) -> Client | None:
    """Return a client for the gateway that the command should use, or None. Entering it connects."""
    site = find_gateway(settings)
    if site is None:
        return None
    from antiphon.client import Client
    from antiphon.client.connection import build_unreachable_error

    if settings.named_gateways:
        return Client.of_replicas(find_named_gateways(settings), on_change)

    async def find_site() -> Site:
        found = find_gateway(settings)
        if found is None:
            raise build_unreachable_error(site, "it is not running")
        return found

    return Client(find_site, on_change)


async def remember_replicas(settings: Settings, client: Client | None) -> None:
    """Ask the gateway for its other replicas, in case it goes away during a wait.

    Replicas on this machine are found without asking.
    """
    if client is not None and settings.named_gateways:
        with suppress(AntiphonError):  # needed only if the connection is lost
            await client.remember_replicas()


@asynccontextmanager
async def _suggest_similar_session(backend: Backend) -> AsyncGenerator[None]:
    """Suggest a similarly named session in the error for one that does not exist."""
    try:
        yield
    except NotFound as error:
        reference = error.data.get("reference")
        if isinstance(reference, str) and (meant := await _find_similar_session(backend, reference)):
            raise NotFound(error.what, f"Did you mean {meant!r}? {error.hint}", **error.data) from error
        raise


async def _find_similar_session(backend: Backend, reference: str) -> str | None:
    """The session whose key, label or agent id is most similar to the reference; None if none is."""
    from difflib import get_close_matches

    from antiphon.operations.types import ListFilter

    try:
        rows = (await backend.list_sessions(ListFilter(limit=MAX_SESSIONS_COMPARED))).sessions
        names = {agent.id: f"agent:{agent.id}:main" for agent in await backend.list_agents()}
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
async def open_backend_for_reading(settings: Settings) -> AsyncGenerator[Backend]:
    """Open a backend for queries, without starting anything."""
    if client := make_gateway_client(settings):
        async with client, _suggest_similar_session(client):
            yield client
        return
    from antiphon.state_access import open_operations_readonly

    async with open_operations_readonly(
        settings.load_config_lazily(), settings.paths.state_dir
    ) as operations:
        backend = LocalBackend(operations)
        async with _suggest_similar_session(backend):
            yield backend


@asynccontextmanager
async def open_backend_for_search(settings: Settings) -> AsyncGenerator[Backend]:
    """Open a backend for searches; without a gateway, first index new messages if the store allows it."""
    if find_gateway(settings) is None:
        # The answer reports that the index is incomplete.
        with suppress(StoreFull, StoreLocked, StoreReadOnly):
            await _index_new_messages(settings)
    async with open_backend_for_reading(settings) as backend:
        yield backend


async def _index_new_messages(settings: Settings) -> None:
    """Index new messages in slices, so that a process that wants to own the directory waits for one slice at most."""
    from antiphon.engine.sessions import search
    from antiphon.state_access import open_store_exclusive, open_store_readonly
    from antiphon.store.statedir import StateDir

    config, home = settings.load_config_lazily(), StateDir.open_unlocked(settings.paths.state_dir)
    if config.store_url is not None:
        return
    # Fails if the schema would have to be migrated first.
    async with open_store_readonly(config, home.path) as store:
        last, head = await store.read(search.load_index_position)
    left, clock = last < head, asyncio.get_running_loop().time
    until = clock() + MAX_INDEXING_SECONDS
    while left and clock() < until:
        began = clock()
        async with open_store_exclusive(config, home.path) as store:
            left = await search.index_for_seconds(store, INDEXING_SLICE_SECONDS)
        await asyncio.sleep(clock() - began if left else 0)


@asynccontextmanager
async def open_backend_for_changes(settings: Settings) -> AsyncGenerator[Backend]:
    """Open a backend for changes that start no run; without a gateway, this process owns the directory meanwhile."""
    if client := make_gateway_client(settings):
        async with client, _suggest_similar_session(client):
            yield client
        return
    from antiphon.state_access import create_operations, open_store_exclusive, require_no_live_replicas
    from antiphon.store.sqlite.database_file import check_exists
    from antiphon.store.statedir import StateDir

    config, home = settings.load().config, StateDir.open_unlocked(settings.paths.state_dir)
    if config.store.url is None:
        check_exists(home.database)
    await require_no_live_replicas(config, home.path)
    async with AsyncExitStack() as stack:
        store = await _open_unless_gateway_starts(
            stack, settings, lambda: open_store_exclusive(config, home.path, get_command_name())
        )
        backend = (
            LocalBackend(create_operations(config, store, home))
            if store is not None
            else await stack.enter_async_context(_require_gateway_client(settings))
        )
        async with _suggest_similar_session(backend):
            yield backend


@asynccontextmanager
async def open_backend_for_messages(
    settings: Settings, on_change: Callable[[str], None] = _ignore_change
) -> AsyncGenerator[tuple[Backend, Client | None]]:
    """Open a backend for messages; without a gateway, this process hosts the directory until it is closed."""
    if client := make_gateway_client(settings, on_change):
        async with client, _suggest_similar_session(client):
            yield client, client
        return
    from antiphon.app import open_app_operations
    from antiphon.cli._logging import configure_logging
    from antiphon.state_access import require_no_live_replicas

    loaded = settings.load()
    await require_no_live_replicas(loaded.config, settings.paths.state_dir)
    configure_logging(settings.paths.state_dir, debug=settings.debug)
    async with AsyncExitStack() as stack:
        operations = await _open_unless_gateway_starts(
            stack,
            settings,
            lambda: open_app_operations(loaded.config, settings.paths.state_dir, command=get_command_name()),
        )
        if operations is not None:
            backend, client = HostingBackend(operations, settings, stack), None
        else:
            backend = client = await stack.enter_async_context(_require_gateway_client(settings, on_change))
        async with _suggest_similar_session(backend):
            yield backend, client


async def _open_unless_gateway_starts(
    stack: AsyncExitStack, settings: Settings, open_context: Callable[[], AbstractAsyncContextManager[T]]
) -> T | None:
    """Own the directory, after a command that owns it for a moment; None if a gateway has started meanwhile."""
    state_dir = settings.paths.state_dir
    try:
        return await open_when_free(stack, state_dir, open_context, seconds=SHORT_OWNER_WAIT_SECONDS)
    except StoreLocked:
        if find_gateway(settings) is None:
            raise
        return None


def _require_gateway_client(settings: Settings, on_change: Callable[[str], None] = _ignore_change) -> Client:
    """Return a client for the gateway of the directory, which has just started."""
    client = make_gateway_client(settings, on_change)
    if client is None:
        raise build_not_running_error(settings)
    return client
