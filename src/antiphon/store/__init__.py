"""The truth: one transactional store, seen through two small protocols.

Everything that must survive is a row. Work on rows is written as *transaction scripts*: plain
`async def script(tx, …)` functions that use nothing but their `Tx`. A store runs a script atomically and, for
`Store.tx`, returns only when the outcome is durable. A script must not await anything but its `Tx` (on SQLite
the writer thread drives it without an event loop) and must be safe to run again after a rollback. It sees one moment:
of two that change the same row one is run again after the other, and what else must not happen at once is said with
`Tx.alone`.

`Store` and `Tx` know nothing of sessions or runs, and nothing outside this package knows which database is
behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from antiphon.clock import Clock
from antiphon.errors import StoreError
from antiphon.store.fulltext import FulltextQuery, FulltextVector
from antiphon.store.queries import Query

P = ParamSpec("P")
T = TypeVar("T")

STORE_TROUBLE_LOGGER = "antiphon.store.troubles"
"""The log on which a store says that it can keep nothing for now, and that it can again."""

Param = str | int | float | FulltextQuery | FulltextVector | None


class Row(Protocol):
    """A result row, read by column name, or all columns in the order of the query."""

    def __getitem__(self, column: str, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Tx(Protocol):
    """One transaction, as a script sees it."""

    async def one(self, query: Query, /, **params: Param) -> Row | None:
        """The first row, or None."""
        ...

    async def all(self, query: Query, /, **params: Param) -> list[Row]:
        """Every row. The query must bound them."""
        ...

    async def do(self, query: Query, /, **params: Param) -> int:
        """Run a statement; how many rows it changed."""
        ...

    async def lock(self, name: str) -> None:
        """Of the transactions that name this, one at a time, each seeing everything that those before it did.

        Rows that a script changes keep others out by themselves. It is for what is decided by looking at rows that
        others may be adding or changing meanwhile: the last of several to end, say, or whether there is room for more.
        """
        ...


Script = Callable[Concatenate[Tx, P], Awaitable[T]]


class Store(Protocol):
    """Runs transaction scripts."""

    @property
    def clock(self) -> Clock:
        """The time that everybody who shares this store agrees on."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes may be writing to it, too."""
        ...

    @property
    def identity(self) -> str:
        """The same for everybody who shares it, and for no other store."""
        ...

    @property
    def trouble(self) -> StoreError | None:
        """Why nothing can be kept now, where the store knows it without being asked anything."""
        ...

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run atomically; durable when it returns. If it raises, nothing happened."""
        ...

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run on a snapshot; never waits for, nor delays, a writer."""
        ...

    async def close(self) -> None: ...
