"""Whether the gateway says that it is ready where its store can be read, and nothing can be kept in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon import app
from antiphon.engine import replicas
from antiphon.engine.replicas import Replica
from antiphon.errors import StoreFull
from antiphon.store import Store, Tx
from antiphon.store.queries import Query
from support.gateway_http import open_http_gateway

HISTORY = "/sessions/agent:main:main/history"
LIMIT = Query("test.limit", "PRAGMA max_page_count = 1")  # SQLite takes the present size: not a page more
UNLIMIT = Query("test.unlimit", "PRAGMA max_page_count = 1073741823")


async def ask(tx: Tx, query: Query) -> None:
    await tx.one(query)


async def put(tx: Tx, name: str) -> None:
    await replicas.renew_lease(tx, Replica(id="test", name=name), 1, 1)


@pytest.mark.anyio
@pytest.mark.sqlite_only
@pytest.mark.requirement("W5", "G21")
async def test_it_is_not_ready_while_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Store] = []
    open_store = app.open_store

    async def opened(*args: Any, **options: Any) -> Store:
        stores.append(await open_store(*args, **options))
        return stores[-1]

    monkeypatch.setattr(app, "open_store", opened)
    async with open_http_gateway(tmp_path) as http_gateway:
        await http_gateway.ask("hello")
        assert (await http_gateway.stranger.get("/readyz")).json() == {"ready": True}
        monkeypatch.setattr("antiphon.store.sqlite.errors.MIN_FREE_DISK_BYTES", 2**62)  # no disk has that
        await stores[0].tx(ask, LIMIT)
        with pytest.raises(StoreFull):
            await stores[0].tx(put, "x" * 500_000)
        reply = await http_gateway.stranger.get("/readyz")
        assert (reply.status_code, reply.json()) == (503, {"ready": False, "failing": ["store"]})
        assert (await http_gateway.http.get(HISTORY)).status_code == 200  # what is there can be read
        monkeypatch.undo()
        await stores[0].tx(ask, UNLIMIT)
        await stores[0].tx(put, "x" * 500_000)
        assert (await http_gateway.stranger.get("/readyz")).json() == {"ready": True}
