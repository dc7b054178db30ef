"""Opens the configured store: the database at `store.url`, or else a file in the state directory."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.errors import StoreError
from antiphon.paths import expand_home

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.store import CommitPhase, Store
    from antiphon.store.postgres.connection import PgServer


async def open_store(
    config: Config,
    database: Path,
    *,
    read_only: bool = False,
    on_commit: Callable[[CommitPhase], None] | None = None,
) -> Store:
    """Opens the store and migrates it unless it is read-only. `on_commit` is called around each commit."""
    if config.store_url is None:
        from antiphon.store.sqlite.store import SqliteStore  # noqa: PLC0415 - each store is imported where it is used

        readers = 1 if read_only else 2
        synchronous = config.store_synchronous
        return await SqliteStore.open(
            database, synchronous=synchronous, readers=readers, read_only=read_only, on_commit=on_commit
        )
    server = build_server(config)
    from antiphon.store.postgres import PgStore  # noqa: PLC0415 - an extra

    connections = 2 if read_only else config.store.connections
    readers = max(1, connections // 3)
    return await PgStore.open(
        server, writers=connections - readers, readers=readers, migrate=not read_only, on_commit=on_commit
    )


def build_server(config: Config) -> PgServer:
    """The PostgreSQL server that `store.url` names.

    Raises:
        ConfigError: `store.url` is not the URL of a PostgreSQL server.
        StoreError: a secret needed to connect could not be read, or a package is missing.
    """
    from antiphon.config.addresses import check_store_url  # noqa: PLC0415 - a file is opened without any of `config`

    settings = config.store
    assert settings.url is not None
    url = settings.url.reveal()
    check_store_url(url)  # checked first: for any other database, installing packages would not help
    from antiphon.store.postgres.connection import PgServer  # noqa: PLC0415 - an extra

    return PgServer(
        url,
        password=settings.password.reveal() if settings.password else None,
        tls=_build_tls_context(settings.tls_ca),
        prepared=settings.prepared_statements,
    )


def _build_tls_context(authority: str | None) -> ssl.SSLContext | None:
    if authority is None:
        return None
    try:
        return ssl.create_default_context(cafile=expand_home(authority))
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            f"The certificates in {authority!r} could not be read ({error}).",
            "Point store.tlsCa at a PEM file.",
        ) from error
