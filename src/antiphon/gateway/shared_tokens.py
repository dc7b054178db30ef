"""Tokens that replicas share: digests in rows of their database, instead of one token file per replica.

A replica reads them before it listens and then every `REFRESH_SECONDS`. From then on a revoked token is rejected; the
hub closes its open connections. Tokens from a replica's file become rows when it starts, so that they can be revoked
everywhere; the owner's token stays in the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from antiphon.errors import Conflict, NotFound, StoreError
from antiphon.gateway.tokens import TokenRecord, TokenRegistry, create_token
from antiphon.store import Store, Tx
from antiphon.store.queries import Queries

log = logging.getLogger(__name__)

SQL = Queries("tokens")
REFRESH_SECONDS = 2.0
MAX_TOKENS = 10_000


async def read_tokens(tx: Tx) -> list[TokenRecord]:
    rows = await tx.all(SQL.list_all, limit=MAX_TOKENS)
    return [
        TokenRecord(
            name=row["name"],
            scopes=row["scopes"].split(),
            digest=row["digest"],
            created_at=row["created_at"],
            last_used_at=row["last_used_at"],
        )
        for row in rows
    ]


async def issue_token(tx: Tx, record: TokenRecord, now: int) -> None:
    scopes = " ".join(record.scopes)
    if not await tx.do(SQL.issue, name=record.name, scopes=scopes, digest=record.digest, now=now):
        raise Conflict(
            f"A token named {record.name!r} already exists.", "Choose another name, or revoke that one."
        )


async def adopt_tokens(tx: Tx, records: Sequence[TokenRecord], now: int) -> set[str]:
    """Insert tokens from a file unless their name is taken. Return the digests that have a row now."""
    for record in records:
        scopes = " ".join(record.scopes)
        await tx.do(SQL.issue, name=record.name, scopes=scopes, digest=record.digest, now=now)
    known = {record.digest for record in await read_tokens(tx)}
    return {record.digest for record in records if record.digest in known}


async def revoke_token(tx: Tx, name: str, *, or_none: bool = False) -> None:
    if not await tx.do(SQL.revoke, name=name) and not or_none:
        raise NotFound(f"No token is named {name!r}.", "See `antiphon tokens list`.")


async def issue_shared_token(store: Store, name: str, scopes: list[str]) -> str:
    """Issue a token. Only its digest is stored, so it cannot be shown again."""
    token, record = create_token(name, scopes)
    await store.tx(issue_token, record, store.clock.now())
    return token


class SharedTokens:
    """Syncs the registry with the database: tokens into the registry, times of last use into the rows."""

    def __init__(self, store: Store, tokens: TokenRegistry) -> None:
        self._store = store
        self._tokens = tokens
        self._failing_updates: set[str] = set()

    async def start(self) -> None:
        """Load all tokens before any request is accepted."""
        await self._adopt_file_tokens()
        await self.refresh()

    async def _adopt_file_tokens(self) -> None:
        issued = [record for record in self._tokens.load_current_records() if record.token is None]
        if not issued:
            return
        rows = await self._store.tx(adopt_tokens, issued, self._store.clock.now())
        try:
            await asyncio.to_thread(self._tokens.remove_tokens, rows)
        except (OSError, StoreError) as error:
            log.warning("Failed to remove tokens from the token file; they stay valid here. %s", error)
        if left := sorted(record.name for record in issued if record.digest not in rows):
            log.warning(
                "Tokens stay in the token file, because the database has others of the same names: %s", left
            )

    async def refresh(self) -> None:
        self._tokens.shared_records = await self._store.read(read_tokens)

    async def run(self) -> None:
        """Sync until cancelled.

        Reads come first: a database that rejects writes can still report revoked tokens.
        """
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self._try_update(self.refresh, "read the issued tokens; the known ones stay valid")
            await self._try_update(self._record_uses, "record when tokens were used; it is recorded later")

    async def _try_update(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """Run one part of an update. Repeated failures are logged once, until the part succeeds again."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - whatever it was, the next update is due
            if what not in self._failing_updates:
                log.warning("Failed to %s. %s", what, error)
            self._failing_updates.add(what)
        else:
            self._failing_updates.discard(what)

    async def _record_uses(self) -> None:
        used, self._tokens.used_digests = self._tokens.used_digests, set()
        if not used:
            return
        try:
            await self._store.tx(_store_uses, sorted(used), self._store.clock.now())
        except BaseException:
            self._tokens.used_digests |= used
            raise


async def _store_uses(tx: Tx, digests: list[str], now: int) -> None:
    for digest in digests:
        await tx.do(SQL.record_use, digest=digest, now=now)
