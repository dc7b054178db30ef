"""What `antiphon doctor` looks at beside the store: the bus, the gateways here, their token file and their port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.cli.running import here
from antiphon.cli.status import read_readiness
from antiphon.config import Config
from antiphon.doctor import Finding, fail, is_there, ok, unreadable, warn
from antiphon.errors import AntiphonError, BusError, ConfigError, StoreError, Unavailable
from antiphon.gateway import note
from antiphon.gateway.note import Note

if TYPE_CHECKING:
    from antiphon.natslink import Servers

SOON = 2.0  # seconds in which a gateway on this machine takes a connection
BUS_SOON = 3.0  # seconds in which one of the NATS servers does


async def bus(config: Config) -> list[Finding]:
    """Whether a NATS server takes us, where gateways would go there."""
    if config.bus.url is None or config.store.url is None:
        return []
    from antiphon.links import servers_of

    try:
        servers = servers_of(config)
        await _enter(servers)
    except AntiphonError as error:
        return [fail("bus", error.what, error.hint)]
    return [ok("bus", f"reached at {servers.shown()}")]


async def _enter(servers: Servers) -> None:
    from antiphon.natslink import Link

    async def joined(_: object) -> None: ...

    link = Link(servers, name="antiphon doctor", joined=joined, left=lambda: None)
    try:
        async with asyncio.timeout(BUS_SOON):
            await link.start(patience=0)
    except TimeoutError as error:
        where = servers.shown()
        raise BusError(
            f"No NATS server at {where} answers in {BUS_SOON:.0f} s.", "Check bus.url, and that it runs."
        ) from error
    finally:
        await link.stop()


def look(state_dir: Path, config: Config | None) -> Iterator[Finding]:
    found = _here(state_dir)
    if found is None:
        yield warn("gateway", "cannot be looked for, as the state directory cannot.", "Mend that first.")
    elif found:
        yield from map(_answers, found)
    elif left := note.read(state_dir):
        yield warn(
            "gateway",
            f"not running; {note.NAME} was left behind by process {left.pid}, which was killed.",
            "Nothing is lost: start it again with `antiphon up`.",
        )
    else:
        yield ok("gateway", "not running")
    if config:
        yield from _secrets(config)
    if not found and config:
        yield from _port(config)
    yield from _tokens(state_dir)


def _here(state_dir: Path) -> list[Note] | None:
    try:
        return [*here(state_dir)]
    except StoreError:
        return None  # which is a finding already


def _answers(found: Note) -> Finding:
    parts = urlsplit(found.url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=SOON).close()
    except OSError as error:
        return fail(
            "gateway",
            f"process {found.pid} runs, but {found.url} does not answer ({error}).",
            f"See the log; if it stays like this: kill {found.pid}, then `antiphon up`.",
        )
    if "store" in read_readiness(found.url).failing:
        return fail(
            "gateway",
            f"process {found.pid} runs at {found.url}, but it cannot use its database.",
            "See `antiphon logs`. If the database file was deleted or replaced, put the right one there and restart.",
        )
    return ok("gateway", f"running at {found.url}, process {found.pid}")


def _secrets(config: Config) -> Iterator[Finding]:
    """Those without which `up` does not start."""
    auth, hooks = config.gateway.auth, config.hooks
    needed = {
        "gateway.auth.token": auth.token,
        "gateway.auth.password": auth.password,
        "hooks.token": hooks.token if hooks.enabled else None,
    }
    for path, secret in needed.items():
        if secret and (trouble := unreadable(secret)):
            yield fail("secrets", f"{path!r} cannot be had: {trouble.what}", trouble.hint)


def _port(config: Config) -> Iterator[Finding]:
    from antiphon.gateway.server import address, listen

    port = config.gateway.port
    try:
        host = address(config)
        listen(host, port).close()
    except ConfigError as error:
        yield fail("port", error.what, error.hint)
    except Unavailable as error:
        yield warn("port", error.what, error.hint)
    else:
        yield ok("port", f"{host}:{port} is free")


def _tokens(state_dir: Path) -> Iterator[Finding]:
    """Read as the gateway reads it."""
    from antiphon.gateway.tokens import NAME, Tokens

    path = state_dir / NAME
    if not is_there(path):
        return
    try:
        Tokens.read(path)
    except StoreError as error:
        yield fail("tokens", error.what, error.hint)
    else:
        yield ok("tokens", f"{str(path)!r} is private to its owner")
