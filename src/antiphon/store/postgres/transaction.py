"""A PostgreSQL transaction for a script, and a guard against scripts that await anything else."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar
from zlib import crc32

from antiphon.store import Param, Row
from antiphon.store.fulltext import FulltextQuery, FulltextVector
from antiphon.store.postgres.connection import PgConnection
from antiphon.store.queries import Query, translate_to_postgres

T = TypeVar("T")

LOCK_ROWS = 16_384  # rows; names that share one merely wait for each other needlessly
_LOCK_ROW_SQL = "UPDATE turnstiles SET passed = passed + 1 WHERE id = $1"


class PgTx:
    """A transaction on one connection."""

    def __init__(self, connection: PgConnection, *, writes: bool = False) -> None:
        self._connection = connection
        self._writes = writes
        self.is_waiting = False
        """Whether a statement is waiting for the database's answer."""

    async def one(self, query: Query, /, **params: Param) -> Row | None:
        text, values = _translate_query(query, params)
        return await self._await_answer(self._connection.fetchrow(text, *values))

    async def all(self, query: Query, /, **params: Param) -> list[Row]:
        text, values = _translate_query(query, params)
        return await self._await_answer(self._connection.fetch(text, *values))

    async def do(self, query: Query, /, **params: Param) -> int:
        text, values = _translate_query(query, params)
        status = await self._await_answer(self._connection.execute(text, *values))
        changed = status.rpartition(" ")[2]
        return int(changed) if changed.isdigit() else 0

    async def lock(self, name: str) -> None:
        # Not an advisory lock: after waiting for one, a script would continue on its old snapshot. Of two
        # transactions that change a row, the second is run again.
        if self._writes:
            await self._await_answer(
                self._connection.execute(_LOCK_ROW_SQL, crc32(name.encode()) % LOCK_ROWS)
            )

    async def _await_answer(self, answer: Awaitable[T]) -> T:
        self.is_waiting = True
        try:
            return await answer
        finally:
            self.is_waiting = False


class GuardedScript(Generic[T]):
    """Awaits a script that may await only its transaction; anything else would keep rows locked and is refused."""

    def __init__(self, script: Coroutine[Any, Any, T], tx: PgTx) -> None:
        self._script = script
        self._tx = tx

    def __await__(self) -> Generator[Any, Any, T]:
        thrown: BaseException | None = None
        while True:
            try:
                waited = self._script.throw(thrown) if thrown else self._script.send(None)
            except StopIteration as stop:
                return stop.value
            if not self._tx.is_waiting:
                self._script.close()
                raise RuntimeError(
                    "a transaction script awaited something other than its Tx; move that out of the script"
                )
            try:
                yield waited
            except BaseException as error:  # noqa: BLE001 - it is the script's
                thrown = error
            else:
                thrown = None


def _translate_query(query: Query, params: dict[str, Param]) -> tuple[str, list[Any]]:
    text, names = translate_to_postgres(query.text)
    return text, [_encode_param(params[name]) for name in names]


def _encode_param(param: Param) -> Any:
    match param:
        case str():
            return param.replace("\0", "\ufffd")  # PostgreSQL cannot store NUL in a text
        case FulltextQuery():
            return param.to_tsquery()
        case FulltextVector():
            return param.to_tsvector()
        case _:
            return param
