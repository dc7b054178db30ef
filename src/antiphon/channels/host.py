"""Runs the configured channels of one process: connects accounts, receives for them, and sends for the outbox.

Every process sends. Of the processes that share a store, one at a time receives for an account, by a lease in the
store. An account that fails is tried again after growing pauses, and never affects another one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from antiphon.bus import EventBus, RunChanged, run_topic
from antiphon.channel_manifest import ChannelManifest, load_manifest
from antiphon.channels.adapter import AccountHealth, ChannelAdapter, HealthState
from antiphon.clock import Clock
from antiphon.config import Config
from antiphon.config.channels import ChannelConfig
from antiphon.engine.inbound import inbound_rows
from antiphon.engine.inbound.events import Inbound
from antiphon.engine.outbox.delivery_channel import DeliveryChannel, Pace, Part, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.errors import AntiphonError, NotSent, StoreError, Unauthorized, Unavailable
from antiphon.event_loop import run_in_background
from antiphon.keys import DEFAULT_ACCOUNT
from antiphon.operations.inbound import InboundOperations, InboundReceipt
from antiphon.store import Store

log = logging.getLogger(__name__)

RECEIVER_LEASE_SECONDS = 30.0
MIN_RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 1.0, 60.0
STABLE_CONNECTION_SECONDS = 60.0  # after which the pauses begin anew
CLEANUP_SECONDS = 600.0
TYPING_REFRESH_SECONDS = 4.5
MAX_TYPING_SECONDS = 120.0
MAX_TYPING_FAILURES = 2
MAX_TYPING_RUNS = 200  # at a time; further ones show none
ENDED_STATES_EXCLUDED = frozenset({"queued", "running"})


class AccountStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An account, as operators see it."""

    channel: str
    account_id: str
    state: HealthState
    name: str | None = None
    identity: str | None = None
    reason: str | None = None
    since: int | None = None
    proof_at: int | None = None
    last_inbound_at: int | None = None
    receives_here: bool = False
    given_up: int = 0
    """Messages that could not be taken."""
    webhook: bool = False


class _Account:
    """One account: its adapter once it exists, and its task."""

    def __init__(self, manifest: ChannelManifest, account_id: str, settings: Any, clock: Clock) -> None:
        self.manifest = manifest
        self.id = account_id
        self.settings = settings
        self.adapter: ChannelAdapter | None = None
        self.health = AccountHealth(clock, max_silence_seconds=MAX_RECONNECT_SECONDS)
        self.receives_here = False

    @property
    def is_ready(self) -> bool:
        return self.adapter is not None and self.adapter.identity is not None


class ChannelOutlet:
    """A channel as the outbox sees it: all of its accounts."""

    def __init__(self, section: ChannelConfig, accounts: Mapping[str, _Account]) -> None:
        self._default = section.default_account_id
        self._accounts = accounts

    idempotency_seconds = 0.0
    can_find = False

    def _find(self, account_id: str | None) -> _Account | None:
        return self._accounts.get(account_id or self._default)

    def _require(self, destination: Destination) -> ChannelAdapter:
        account = self._find(destination.account_id)
        if account is None or account.adapter is None:
            raise NotSent(
                f"Account {destination.account_id!r} of {destination.channel!r} is not connected.",
                "See `antiphon channels status`.",
            )
        return account.adapter

    def is_ready(self, account_id: str | None) -> bool:
        account = self._find(account_id)
        return account is not None and account.is_ready

    def get_pace(self, destination: Destination) -> Pace:
        account = self._find(destination.account_id)
        return account.adapter.get_pace(destination) if account and account.adapter else Pace()

    def render(self, text: str, destination: Destination) -> Sequence[RenderedPart]:
        return self._require(destination).render(text)

    async def send(self, part: Part) -> Receipt:
        return await self._require(part.destination).send(part)

    async def find(self, part: Part, since: int) -> Receipt | None:
        return None


class ChannelHost:
    """The channels of one process. Creating it connects nothing."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._clock = clock
        self._config = config
        self._channels: dict[str, dict[str, _Account]] = {}
        self.outlets: dict[str, DeliveryChannel] = {}
        self._typing: set[asyncio.Task[None]] = set()
        self._inbound: InboundOperations | None = None
        self._store: Store | None = None
        self._bus: EventBus | None = None
        for name, section in config.enabled_channels.items():
            manifest = load_manifest(name)
            assert manifest is not None
            accounts = {
                account_id: _Account(manifest, account_id, settings, clock)
                for account_id, settings in section.list_enabled_accounts().items()
            }
            self._channels[name] = accounts
            self.outlets[name] = ChannelOutlet(section, accounts)

    @asynccontextmanager
    async def run(
        self,
        inbound: InboundOperations,
        store: Store,
        bus: EventBus,
        owner: str,
        wake_outbox: Any,
    ) -> AsyncGenerator[None]:
        """Connect and receive for every account while the context is open."""
        self._inbound, self._store, self._bus = inbound, store, bus
        work: list[Coroutine[Any, Any, None]] = [
            self._run_account(account, store, owner, wake_outbox) for account in self._list_accounts()
        ]
        tasks = [asyncio.create_task(task) for task in work]
        try:
            async with run_in_background(self._clean_up(store)):
                yield
        finally:
            for task in (*tasks, *self._typing):
                task.cancel()
            await asyncio.gather(*tasks, *self._typing, return_exceptions=True)

    async def aclose(self) -> None:
        """Close the connections. The outbox sends until then, also when nothing is received any more."""
        for account in self._list_accounts():
            if account.adapter is not None:
                await account.adapter.close()

    def _list_accounts(self) -> list[_Account]:
        return [account for accounts in self._channels.values() for account in accounts.values()]

    async def _clean_up(self, store: Store) -> None:
        while True:
            try:
                await store.tx(inbound_rows.delete_old_rows, self._clock.now())
            except StoreError as error:
                log.error("%s", error)
            await asyncio.sleep(CLEANUP_SECONDS)

    # --- accounts ---

    async def _run_account(self, account: _Account, store: Store, owner: str, wake_outbox: Any) -> None:
        """Keep an account connected until cancelled."""
        pause = MIN_RECONNECT_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._connect(account)
                wake_outbox()
                await self._receive(account, store, owner)
            except Exception as error:  # noqa: BLE001 - an adapter must not affect other accounts
                self._report_failure(account, error)
            if loop.time() - began > STABLE_CONNECTION_SECONDS:
                pause = MIN_RECONNECT_SECONDS
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(MAX_RECONNECT_SECONDS, pause * 2)

    async def _connect(self, account: _Account) -> None:
        if account.adapter is None:
            factory = account.manifest.load_adapter()
            adapter: ChannelAdapter = await factory.create(account.id, account.settings, self._clock)
            account.adapter, account.health = adapter, adapter.health
        await account.adapter.connect()
        log.info("Connected %s account %r as %s", account.manifest.name, account.id, account.adapter.identity)

    def _report_failure(self, account: _Account, error: Exception) -> None:
        text = str(error) if isinstance(error, AntiphonError) else type(error).__name__
        account.health.report("degraded" if account.is_ready else "down", text)
        is_expected = isinstance(error, AntiphonError)
        log.log(
            logging.WARNING if is_expected else logging.ERROR,
            "Channel %s, account %r: %s",
            account.manifest.name,
            account.id,
            text,
            exc_info=None if is_expected else error,
        )

    async def _receive(self, account: _Account, store: Store, owner: str) -> None:
        """Receive for an account, as long as this process is the only one that does."""
        adapter = account.adapter
        assert adapter is not None
        sink = _Sink(self, account)
        if not store.shared:
            account.receives_here = True
            await adapter.receive(sink)
            return None
        names = (account.manifest.name, account.id)
        while not await self._renew_lease(store, names, owner):
            await adapter.connect()  # this process still sends
            await asyncio.sleep(RECEIVER_LEASE_SECONDS / 3)
        receiving = asyncio.create_task(adapter.receive(sink))
        account.receives_here = True
        try:
            while True:
                done, _ = await asyncio.wait({receiving}, timeout=RECEIVER_LEASE_SECONDS / 3)
                if done:
                    return receiving.result()
                if not await self._renew_lease(store, names, owner):
                    raise Unavailable(
                        "Another gateway receives for this account now.", "Nothing is to be done."
                    )
        finally:
            account.receives_here = False
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            with suppress(StoreError):
                await store.tx(inbound_rows.release_receiver, *names, owner)

    async def _renew_lease(self, store: Store, names: tuple[str, str], owner: str) -> bool:
        now = self._clock.now()
        until = now + round(RECEIVER_LEASE_SECONDS * 1000)
        return await store.tx(inbound_rows.acquire_receiver, *names, owner, until, now)

    # --- messages ---

    async def take(self, account: _Account, inbound: Inbound) -> bool:
        """Take a message; False if it has to be reported again."""
        operations, adapter = self._inbound, account.adapter
        assert operations is not None and adapter is not None
        account.health.last_inbound_at = self._clock.now()
        try:
            receipt = await operations.take(account.manifest, inbound, adapter.fetch)
        except StoreError as error:
            log.error("A message of %s waits: %s", account.manifest.name, error)
            return False
        except Exception as error:
            log.warning("A message of %s failed", account.manifest.name, exc_info=True)
            text = str(error) if isinstance(error, AntiphonError) else f"{type(error).__name__}: {error}"
            return await self.reject(account, inbound.event_id, text)
        self._start_typing(adapter, receipt)
        return True

    async def reject(self, account: _Account, event_id: str, error: str) -> bool:
        assert self._inbound is not None
        try:
            return await self._inbound.record_failure(account.manifest, account.id, event_id, error)
        except StoreError as failure:
            log.error("A message of %s waits: %s", account.manifest.name, failure)
            return False

    # --- typing ---

    @property
    def is_typing(self) -> bool:
        return bool(self._typing)

    def _start_typing(self, adapter: ChannelAdapter, receipt: InboundReceipt) -> None:
        if receipt.outcome != "run" or receipt.run_id is None or receipt.destination is None:
            return
        if len(self._typing) < MAX_TYPING_RUNS:
            task = asyncio.create_task(self._show_typing(adapter, receipt.run_id, receipt.destination))
            self._typing.add(task)
            task.add_done_callback(self._typing.discard)

    async def _show_typing(self, adapter: ChannelAdapter, run_id: str, destination: Destination) -> None:
        """Show that an answer is being written, until its run ends; not after two failures."""
        assert self._bus is not None and self._inbound is not None
        failures = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + MAX_TYPING_SECONDS
        async with self._bus.listen(run_topic(run_id)) as ends:
            while loop.time() < until and failures < MAX_TYPING_FAILURES:
                if await self._inbound.has_ended(run_id):
                    return
                try:
                    await adapter.show_typing(destination)
                except AntiphonError as error:
                    failures += 1
                    log.info("Typing is not shown: %s", error)
                event = await ends.get(TYPING_REFRESH_SECONDS)
                if isinstance(event, RunChanged) and event.state not in ENDED_STATES_EXCLUDED:
                    return

    # --- webhooks ---

    def check_webhook(self, channel: str, account_id: str, headers: Mapping[str, str]) -> None:
        """Check the secret of a request, before anything of its body is read.

        Raises:
            Unauthorized: there is no such webhook, or the secret is wrong.
        """
        account = self._channels.get(channel, {}).get(account_id)
        adapter = account.adapter if account else None
        expected = adapter.webhook_secret if adapter else None
        given = headers.get(adapter.webhook_secret_header, "") if adapter else ""
        if not hmac.compare_digest((expected or "-").encode(), given.encode()) or not expected:
            raise Unauthorized("This request does not carry the secret of a webhook.", "Set 'webhookSecret'.")

    async def take_webhook(self, channel: str, account_id: str, body: bytes) -> None:
        """Take the body of a checked request.

        Raises:
            Unavailable: it could not be stored, so the service has to send it again.
        """
        account = self._channels[channel][account_id]
        if account.adapter is None or not account.is_ready or self._inbound is None:
            raise Unavailable("The account is not connected yet.", "Send it again.")
        if not await account.adapter.take_webhook(body, _Sink(self, account)):
            raise Unavailable("The message could not be stored yet.", "Send it again.")

    def list_webhook_aliases(self) -> dict[str, tuple[str, str]]:
        """Return further paths of webhooks, with their channel and account."""
        aliases: dict[str, tuple[str, str]] = {}
        for account in self._list_accounts():
            if not getattr(account.settings, "webhook_url", None):
                continue
            path = getattr(account.settings, "webhook_path", None)
            default = account.manifest.webhook_alias if account.id == DEFAULT_ACCOUNT else None
            if path or default:
                aliases.setdefault(path or default or "", (account.manifest.name, account.id))
        return aliases

    # --- status ---

    async def describe(self) -> list[AccountStatus]:
        """Return every enabled account."""
        dead = await self._store.read(inbound_rows.count_dead_events) if self._store else {}
        found: list[AccountStatus] = []
        for account in self._list_accounts():
            state, reason = account.health.current
            found.append(
                AccountStatus(
                    channel=account.manifest.name,
                    account_id=account.id,
                    state=state,
                    name=account.settings.name,
                    identity=account.adapter.identity if account.adapter else None,
                    reason=reason,
                    since=account.health.since or None,
                    proof_at=account.health.proof_at,
                    last_inbound_at=account.health.last_inbound_at,
                    receives_here=account.receives_here,
                    given_up=dead.get((account.manifest.name, account.id), 0),
                    webhook=bool(account.adapter and account.adapter.webhook_secret),
                )
            )
        return found


class _Sink:
    """Passes what an adapter receives to the host, with its account."""

    def __init__(self, host: ChannelHost, account: _Account) -> None:
        self._host = host
        self._account = account

    async def take(self, inbound: Inbound) -> bool:
        return await self._host.take(self._account, inbound)

    async def reject(self, event_id: str, error: str) -> bool:
        return await self._host.reject(self._account, event_id, error)
