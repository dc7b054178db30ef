"""The source of truth: one transactional store behind two small protocols.

Everything that must survive is a row. Work on rows is written as *transaction scripts*: plain
`async def script(tx, …)` functions that use nothing but their `Tx`. A store runs a script atomically and, for
`Store.tx`, returns only when the outcome is durable. A script must not await anything but its `Tx` (on SQLite
the writer thread drives it without an event loop) and must be safe to run again after a rollback. It sees one
snapshot: if two scripts change the same row, one of them is run again after the other. Scripts that must exclude
each other for any other reason take a `Tx.lock`.

`Store` and `Tx` know nothing of sessions or runs. Scripts do not know which database runs them; only the
configuration, the checks of an installation and the migration between databases do.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from antiphon.clock import Clock
from antiphon.errors import StoreError
from antiphon.store.fulltext import FulltextQuery, FulltextVector
from antiphon.store.queries import Query

P = ParamSpec("P")
T = TypeVar("T")

STORE_TROUBLE_LOGGER = "antiphon.store.troubles"
"""Logger on which a store reports that it cannot write for now, and that it can again."""

Param = str | int | float | FulltextQuery | FulltextVector | None


class Row(Protocol):
    """A result row, read by column name, or as all columns in the order of the query."""

    def __getitem__(self, column: str, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Tx(Protocol):
    """One transaction, as a script sees it."""

    async def one(self, query: Query, /, **params: Param) -> Row | None:
        """Returns the first row, or None."""
        ...

    async def all(self, query: Query, /, **params: Param) -> list[Row]:
        """Returns every row. The query must bound their number."""
        ...

    async def do(self, query: Query, /, **params: Param) -> int:
        """Runs a statement and returns how many rows it changed."""
        ...

    async def lock(self, name: str) -> None:
        """Serialises the transactions that take this lock; each sees everything that earlier holders committed.

        Changed rows are protected without it. Use it where a decision depends on rows that others may be adding or
        changing meanwhile: which of several is the last to end, for example, or whether a limit has been reached.
        """
        ...


Script = Callable[Concatenate[Tx, P], Coroutine[Any, Any, T]]
BoundScript: TypeAlias = Callable[[Tx], Coroutine[Any, Any, T]]
"""A script together with its arguments."""
CommitPhase = Literal["before", "after"]
"""When an `on_commit` callback is called, relative to the commit."""


class Store(Protocol):
    """Runs transaction scripts."""

    @property
    def clock(self) -> Clock:
        """The clock shared by all processes that use this store."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other processes may write to it as well."""
        ...

    @property
    def identity(self) -> str:
        """An id shared by all processes that use this store, and different for every other store."""
        ...

    @property
    def write_error(self) -> StoreError | None:
        """Why the store cannot write at the moment, if it knows that without a request."""
        ...

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a script atomically; the result is durable on return. If it raises, nothing was changed."""
        ...

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a script on a snapshot; it neither waits for a writer nor delays one."""
        ...

    async def close(self) -> None: ...
