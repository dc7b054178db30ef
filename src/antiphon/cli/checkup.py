"""What `antiphon doctor` looks at beside the store: the bus, the gateways here, their token file and their port."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.cli.running import here
from antiphon.config import Config
from antiphon.doctor import Finding, fail, ok, warn
from antiphon.errors import AntiphonError, BusError, ConfigError
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
    found = [*here(state_dir)]
    if found:
        yield from map(_answers, found)
    elif left := note.read(state_dir):
        yield warn(
            "gateway",
            f"not running; {note.NAME} was left behind by process {left.pid}, which was killed.",
            "Nothing is lost: start it again with `antiphon up`.",
        )
    else:
        yield ok("gateway", "not running")
    if not found and config:
        yield from _port(config)
    yield from _tokens(state_dir)


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
    return ok("gateway", f"running at {found.url}, process {found.pid}")


def _port(config: Config) -> Iterator[Finding]:
    from antiphon.gateway.server import address

    port = config.gateway.port
    try:
        host = address(config)
    except ConfigError as error:
        yield fail("port", error.what, error.hint)
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            yield warn(
                "port",
                f"{host}:{port} cannot be listened on ({error.strerror}).",
                "Stop what uses it, or set another gateway.port.",
            )
        else:
            yield ok("port", f"{host}:{port} is free")


def _tokens(state_dir: Path) -> Iterator[Finding]:
    from antiphon.gateway.tokens import NAME as TOKENS

    path = state_dir / TOKENS
    if not path.exists():
        return
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield fail(
            "tokens",
            f"{str(path)!r} can be read by others, and the gateway refuses it.",
            f"Run: chmod 600 {str(path)!r}; replace its tokens if others may have seen them.",
        )
    else:
        yield ok("tokens", f"{str(path)!r} is private to its owner")
