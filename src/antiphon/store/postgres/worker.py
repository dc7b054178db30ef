"""One connection and the transactions on it: run again when they met others, or when the connection broke."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from time import monotonic
from typing import Any, Literal, TypeAlias, TypeVar

from antiphon.errors import StoreError, StoreUnsure
from antiphon.store import Tx
from antiphon.store.postgres.commits import Marks, tidy
from antiphon.store.postgres.connection import (
    IDLE_SECONDS,
    MET,
    PATIENCE,
    STATEMENT_SECONDS,
    Link,
    Lost,
    Server,
    pg,
    told,
)
from antiphon.store.postgres.transaction import PgTx, Strictly

T = TypeVar("T")
Phase = Literal["before", "after"]
Bound: TypeAlias = Callable[[Tx], Coroutine[Any, Any, T]]

ATTEMPTS = 10  # of one script against rows that are there; against others who change them, as many as there is time for
TOGETHER = 4  # of a batch, before each of its scripts is run by itself
WAIT = 20.0  # seconds after it was handed over in which a script is begun again on a new connection
RESOLVE = 2.0 * IDLE_SECONDS  # seconds to find out whether a commit took place

# One round trip each. Whoever waits long for a row may be waiting for each other: both begin again.
_SETTINGS = (
    f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'; "
    "SET LOCAL lock_timeout = '1s'; SET LOCAL jit = off; SET LOCAL enable_seqscan = off; "
    "SET LOCAL max_parallel_workers_per_gather = 0"
)
WRITE = f"BEGIN ISOLATION LEVEL REPEATABLE READ; {_SETTINGS}"
_BATCH = "; SET LOCAL lock_timeout = '100ms'"  # two batches often have the same rows in another order
LOOK = f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_SETTINGS}"

_THERE = (pg.UniqueViolationError, pg.ForeignKeyViolationError)


class Job:
    """A script on its way to a worker, and where its outcome goes."""

    __slots__ = ("future", "run", "until")

    def __init__(self, run: Bound[Any], future: asyncio.Future[Any]) -> None:
        self.run = run
        self.future = future
        self.until = monotonic() + WAIT

    def succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Worker:
    """One connection, opened when there is something to do, and renewed when it breaks."""

    def __init__(
        self,
        server: Server,
        begin: str,
        again: asyncio.Lock,
        on_commit: Callable[[Phase], None] | None = None,
    ) -> None:
        self._server = server
        self._again = again
        self._begin = begin
        self._writes = begin == WRITE
        self._on_commit = on_commit
        self._link: Link | None = None
        self._marks = Marks()
        self._refused: BaseException | None = None
        self._running = 0

    async def work(self, jobs: Sequence[Job]) -> None:
        """Every job has its outcome when this returns."""
        wanted = [job for job in jobs if not job.future.done()]  # some may have been given up
        for job in await self._together(wanted):
            try:
                job.succeed(await self._alone(job))
            except (pg.PostgresError, pg.InterfaceError, Lost) as error:
                job.fail(told(error, self._server))
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                job.fail(error)

    async def close(self) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()

    def drop(self) -> None:
        """Without a word: nothing is known of what is open on it."""
        if self._link is not None:
            self._link.terminate()
            self._link = None

    async def _together(self, jobs: list[Job]) -> list[Job]:
        """All in one transaction; those for which nothing has happened, to be run each by itself."""
        aside: list[Job] = []
        for attempt in range(TOGETHER):
            if len(jobs) < 2:
                break
            try:
                results = await self._attempt(attempt, [job.run for job in jobs], jobs[0].until)
            except Lost:
                break
            except MET:
                await _pause(attempt)
            except StoreUnsure as error:
                for job in jobs:
                    job.fail(error)
                return aside
            except Exception:  # noqa: BLE001 - it may be due to the others: it is the script's if it is raised alone
                aside.append(jobs.pop(min(self._running, len(jobs) - 1)))
            else:
                for job, result in zip(jobs, results, strict=True):
                    job.succeed(result)
                return aside
        return [*jobs, *aside]

    async def _alone(self, job: Job) -> Any:
        """Run again until it met nobody, within bounds."""
        for attempt in count():
            try:
                return (await self._attempt(attempt, [job.run], job.until))[0]
            except MET as error:
                if attempt + 1 >= ATTEMPTS and (isinstance(error, _THERE) or monotonic() > job.until):
                    raise
                await _pause(attempt)
            except Lost:
                if monotonic() > job.until:
                    raise
                await asyncio.sleep(random.uniform(0.02, 0.2))  # noqa: S311
        raise AssertionError("unreachable")

    async def _attempt(self, attempt: int, scripts: Sequence[Bound[Any]], until: float) -> list[Any]:
        """After the first, one at a time in this process: of many that want one row, only one can have it anyway."""
        if attempt == 0:
            return await self._transact(scripts, until)
        mine = await _acquired(self._again)
        try:
            return await self._transact(scripts, until)
        finally:
            if mine:
                self._again.release()

    async def _transact(self, scripts: Sequence[Bound[Any]], until: float) -> list[Any]:
        link = await self._connected(until)
        try:
            await link.execute(self._begin + (_BATCH if len(scripts) > 1 else ""), timeout=PATIENCE)
            results = await self._results(scripts, PgTx(link, writes=self._writes))
        except BaseException as error:
            await self._undo(link, error)
            raise
        await self._commit(link)
        return results

    async def _results(self, scripts: Sequence[Bound[Any]], tx: PgTx) -> list[Any]:
        results: list[Any] = []
        for self._running, script in enumerate(scripts):
            results.append(await Strictly(script(tx), tx))
        return results

    async def _commit(self, link: Link) -> None:
        """Returns if it took place, or if there was nothing to keep."""
        self._signal("before")
        commit, mark = self._marks.close() if self._writes else ("COMMIT", 0)
        try:
            status = await link.execute(commit)
        except Lost:
            self.drop()
            if self._writes and not await self._took_place(self._marks, mark):
                raise  # known not to have happened: run again
        except BaseException as error:
            await self._undo(link, error)
            raise
        else:
            if status != "COMMIT":  # a script went on after a statement that failed
                raise StoreError(
                    f"The database {self._server.named} rolled a transaction back because a statement in it failed.",
                    "Run `antiphon doctor`; nothing of this request was kept.",
                )
        self._signal("after")

    async def _took_place(self, marks: Marks, mark: int) -> bool:
        """Whether a transaction was committed, asked on another connection.

        Raises:
            StoreUnsure: that could not be found out in time.
        """
        until = monotonic() + RESOLVE
        while monotonic() < until:
            try:
                return await marks.kept(await self._connected(until), mark)
            except (pg.PostgresError, Lost):
                self.drop()
            await asyncio.sleep(0.1)
        raise StoreUnsure(
            f"The connection to the database {self._server.named} broke in the middle of a commit.",
            "Whether it took place is not known: ask again with the same idempotency key.",
        )

    async def _undo(self, link: Link, error: BaseException) -> None:
        # One that turned read only may be a primary no more: a new connection may find the one that is.
        if isinstance(error, (Lost, pg.ReadOnlySQLTransactionError)) or not isinstance(error, Exception):
            self.drop()
            return
        try:
            await link.execute("ROLLBACK", timeout=PATIENCE)
        except (pg.PostgresError, Lost):
            self.drop()

    async def _connected(self, until: float) -> Link:
        if self._link is not None and not self._link.is_closed():
            return self._link
        if self._refused is not None and monotonic() > until:
            raise Lost(self._refused)  # whoever has waited long enough does not wait for another attempt
        try:
            link = await self._server.link()
        except Lost as error:
            self._refused = error.cause
            raise
        self._link, self._marks, self._refused = link, Marks(), None
        if self._writes:
            await self._tidied(link)
        return link

    async def _tidied(self, link: Link) -> None:
        try:
            await tidy(link)
        except pg.PostgresError:
            return  # a database that is read only, say: whoever writes to it is told

    def _signal(self, phase: Phase) -> None:
        if self._writes and self._on_commit:
            self._on_commit(phase)


async def _acquired(lock: asyncio.Lock) -> bool:
    """Or not, when whoever has it takes long: it is only there to waste less."""
    try:
        async with asyncio.timeout(1.0):
            return await lock.acquire()
    except TimeoutError:
        return False


async def _pause(attempt: int) -> None:
    await asyncio.sleep(random.uniform(0, min(0.05, 0.001 * 2**attempt)))  # noqa: S311
