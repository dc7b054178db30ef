"""PostgreSQL stores to try things on: opened, with a way to them that can be broken, and scripts to run on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from msgspec.structs import replace

from antiphon.engine import replicas
from antiphon.engine.replicas import Replica
from antiphon.store import Row, Tx
from antiphon.store.postgres import PgStore
from antiphon.store.postgres.connection import PgServer
from antiphon.store.queries import Query
from cluster.proxy import Proxy

T = TypeVar("T")

BOUND = 60.0
COMMIT = b"; COMMIT\0"  # as it ends a transaction that changed something
LEASE = Query("test.lease", "SELECT lease_until FROM owners WHERE id = :id")
OWNERS = Query("test.owners", "SELECT id FROM owners ORDER BY id")


async def put(tx: Tx, owner: str, until: int = 0) -> str:
    await replicas.renew_lease(tx, Replica(id=owner), until, 1)
    return owner


async def lease(tx: Tx, owner: str) -> int:
    row = await tx.one(LEASE, id=owner)
    return row["lease_until"] if row else 0


async def increase(tx: Tx, owner: str) -> int:
    value = await lease(tx, owner) + 1
    await put(tx, owner, value)
    return value


async def owners(tx: Tx) -> list[str]:
    return [row["id"] for row in await tx.all(OWNERS)]


async def ask(tx: Tx, text: str, **params: int | str) -> Row | None:
    return await tx.one(Query("test.ask", text), **params)


async def within(work: Awaitable[T], seconds: float = BOUND) -> T:
    return await asyncio.wait_for(work, seconds)


@asynccontextmanager
async def opened(server: PgServer, **options: Any) -> AsyncGenerator[PgStore]:
    store = await within(PgStore.open(server, **options))
    try:
        yield store
    finally:
        await within(store.close())


@asynccontextmanager
async def proxied(server: PgServer, **options: Any) -> AsyncGenerator[tuple[Proxy, PgStore]]:
    """A store whose way to its database can be broken."""
    async with Proxy(port_of(server)) as proxy, opened(through(proxy, server), **options) as store:
        yield proxy, store


def port_of(server: PgServer) -> int:
    found = re.search(r":(\d+)/", server.url)
    assert found
    return int(found[1])


def through(proxy: Proxy, server: PgServer) -> PgServer:
    return replace(server, url=server.url.replace(f":{port_of(server)}/", f":{proxy.port}/"))


async def altered(server: PgServer, *statements: str) -> None:
    asked = await server.connect()
    try:
        for statement in statements:
            await asked.execute(statement)
    finally:
        await asked.close(timeout=5)
