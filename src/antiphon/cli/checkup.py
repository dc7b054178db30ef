"""What `antiphon doctor` looks at beside the store: the gateway, its token file and its port."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from antiphon.cli.running import running
from antiphon.config import Config
from antiphon.doctor import Finding, fail, ok, warn
from antiphon.gateway import note
from antiphon.gateway.note import Note

SOON = 2.0  # seconds in which a gateway on this machine takes a connection


def look(state_dir: Path, config: Config | None) -> Iterator[Finding]:
    found = running(state_dir)
    if found:
        yield _answers(found)
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
    from antiphon.errors import ConfigError
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
