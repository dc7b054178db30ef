"""Which database the truth is in: the one at `store.url`, or else a file in the state directory."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from antiphon.errors import StoreError

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.store import Store
    from antiphon.store.postgres.connection import Server

Phase = Literal["before", "after"]
SCHEMES = ("postgresql", "postgres")


async def open_store(
    config: Config,
    database: Path,
    *,
    read_only: bool = False,
    on_commit: Callable[[Phase], None] | None = None,
) -> Store:
    """Open it and, unless it is only to be read, bring it up to date. `on_commit` is called around each commit."""
    if config.store.url is None:
        from antiphon.store.sqlite import SqliteStore  # noqa: PLC0415 - each store is imported where it is used

        readers = 1 if read_only else 2
        synchronous = config.store.synchronous
        return await SqliteStore.open(
            database, synchronous=synchronous, readers=readers, read_only=read_only, on_commit=on_commit
        )
    from antiphon.store.postgres import PgStore  # noqa: PLC0415 - an extra

    most = 2 if read_only else config.store.connections
    readers = max(1, most // 3)
    return await PgStore.open(
        server_of(config), writers=most - readers, readers=readers, migrate=not read_only, on_commit=on_commit
    )


def server_of(config: Config) -> Server:
    """The PostgreSQL server that `store.url` names.

    Raises:
        StoreError: it names none, or what is needed to reach it cannot be read.
    """
    from antiphon.store.postgres.connection import Server  # noqa: PLC0415 - an extra

    settings = config.store
    assert settings.url is not None
    url = settings.url.reveal()
    scheme = _scheme(url)
    if scheme not in SCHEMES:
        begins = f"begins with {scheme + '://'!r}, which" if scheme else "has no beginning, so that it"
        raise StoreError(
            f"'store.url' {begins} is no database that is known here.",
            "Write postgresql://user@host/database, or leave it out to use a file.",
        )
    return Server(
        url,
        password=settings.password.reveal() if settings.password else None,
        tls=_tls(settings.tls_ca),
        prepared=settings.prepared_statements,
    )


def _scheme(url: str) -> str:
    """How it begins; nothing where that cannot be told from what may be a user or a password."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and scheme.isascii() and scheme.isalnum() else ""


def _tls(authority: str | None) -> ssl.SSLContext | None:
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=Path(authority).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            f"The certificates in {authority!r} cannot be read ({error}).", "Point store.tlsCa at a PEM file."
        ) from error
