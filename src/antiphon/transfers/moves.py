"""Moving everything from the SQLite database of a state directory into a PostgreSQL database.

Rows go over in batches, in the order of their keys, each batch in one transaction with how far it got: whoever is
killed goes on there. In the end both sides are counted and summed up, apart from how they were copied, and only a
database that is the same is handed over. Before that no gateway starts on it.

What the source held up to the last key must still be what was copied: so a source that was used meanwhile is noticed
before anything else happens, and one that is not the same at all, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from antiphon.errors import Conflict, StoreError
from antiphon.paths import DATABASE
from antiphon.store.postgres.connection import LOST, Server, pg
from antiphon.store.postgres.target import Place, Target
from antiphon.store.source import Source
from antiphon.store.statedir import StateDir
from antiphon.store.tables import Sum, Table

_EMPTY = "Empty the target (dropdb and createdb) and begin again; the source is as it was."


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a table's rows have been copied, or compared."""

    step: Literal["copy", "check"]
    table: str
    rows: int
    total: int


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What is on the other side now, row by row the same."""

    tables: dict[str, int]
    replaced: int
    """Texts in which U+0000, which PostgreSQL cannot store, was replaced by U+FFFD."""
    already: bool = False
    """Everything had been there before."""


Tell: TypeAlias = Callable[[Progress], None]


async def migrate(path: Path, server: Server, tell: Tell) -> Moved:
    """Move everything, or the rest of it. Nobody may be using the source, and it is never changed.

    Raises:
        StoreError: one of the two cannot be used, or they differ in the end; the sentence names the table.
        Conflict: the target holds something else.
    """
    with await asyncio.to_thread(_owned, path), closing(await asyncio.to_thread(Source.open, path)) as source:
        async with _reached(server) as target:
            return await _move(source, target, tell)


def _owned(path: Path) -> AbstractContextManager[object]:
    """A state directory has one owner; a copy of its database under another name is nobody's."""
    if path.name == DATABASE and path.exists():
        return StateDir.own(path.parent)
    return nullcontext()


@asynccontextmanager
async def _reached(server: Server) -> AsyncGenerator[Target]:
    target = await Target.reach(server)
    try:
        yield target
    except (pg.PostgresError, *LOST) as error:
        raise target.tell(error) from error
    finally:
        await target.close()


async def _move(source: Source, target: Target, tell: Tell) -> Moved:
    tables = await asyncio.to_thread(source.tables)
    places = await target.begin(tables)
    if places is None:
        return await _recognise(source, target, tables, tell)
    await _check_places(source, target, tables, places)
    for table in tables:
        places[table.name] = await _copy(source, target, table, places.get(table.name, Place()), tell)
    sums = await _check(source, target, tables, tell)
    await target.finish(await asyncio.to_thread(source.sequences), tables)
    return Moved(tables=sums, replaced=sum(place.replaced for place in places.values()))


async def _recognise(source: Source, target: Target, tables: Sequence[Table], tell: Tell) -> Moved:
    """Somebody may have been killed between the last commit and saying so."""
    try:
        return Moved(tables=await _check(source, target, tables, tell), replaced=0, already=True)
    except StoreError as error:
        raise target.foreign() from error


async def _check_places(
    source: Source, target: Target, tables: Sequence[Table], places: Mapping[str, Place]
) -> None:
    for table in tables:
        place = places.get(table.name)
        if place and await asyncio.to_thread(source.sum, table, place.last) != place.sum:
            raise Conflict(
                f"The database {target.named} holds a part of something else, or the source was used since then: "
                f"what was copied of the table {table.name!r} is not in it any more.",
                _EMPTY,
                table=table.name,
            )


async def _copy(source: Source, target: Target, table: Table, place: Place, tell: Tell) -> Place:
    total = await asyncio.to_thread(source.count, table)
    _tell(tell, "copy", table, place.sum.rows, total)
    while batch := await asyncio.to_thread(source.after, table, place.last):
        place = await target.put(table, place, batch) or await target.place(table)
        _tell(tell, "copy", table, place.sum.rows, total)
    return place


async def _check(source: Source, target: Target, tables: Sequence[Table], tell: Tell) -> dict[str, int]:
    """Both sides, read from end to end."""
    sums: dict[str, int] = {}
    for table in tables:
        here = await asyncio.to_thread(source.sum, table)
        _tell(tell, "check", table, 0, here.rows)
        there = await target.sum(
            table, lambda rows, table=table, total=here.rows: _tell(tell, "check", table, rows, total)
        )
        if here != there:
            raise _differs(table, here, there)
        sums[table.name] = here.rows
    return sums


def _differs(table: Table, here: Sum, there: Sum) -> StoreError:
    how = (
        f"{here.rows} rows in the source, {there.rows} in the target"
        if here.rows != there.rows
        else f"{here.rows} rows in both, but not the same ones"
    )
    return StoreError(f"The table {table.name!r} was not copied faithfully: {how}.", _EMPTY, table=table.name)


def _tell(tell: Tell, step: Literal["copy", "check"], table: Table, rows: int, total: int) -> None:
    tell(Progress(step=step, table=table.name, rows=rows, total=total))
