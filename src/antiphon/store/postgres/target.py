"""A PostgreSQL database that another one is moved into, and how far that is.

While it goes on there is one table more, with the last key of each table that has been copied. It is written in the
transaction that copies the rows, so a kill leaves no doubt. As long as it is there, nobody else uses the database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, cast

import msgspec

from antiphon.errors import AntiphonError, Conflict, StoreError
from antiphon.store.migrations import migrations
from antiphon.store.postgres.connection import LOST, Connection, Server, pg, told
from antiphon.store.postgres.schema import MOVING, STEP_SECONDS, begin_alone, prepare
from antiphon.store.source import Batch
from antiphon.store.tables import Key, Sum, Table, Value, digest_in_postgres, digest_of, quoted
from antiphon.store.words import Vector

_UNFIT = (ValueError, TypeError, OverflowError, pg.DataError, pg.IntegrityConstraintViolationError)
_PAGE = 1_000  # rows whose digests are asked for at a time
_TABLES = "SELECT tablename AS name FROM pg_tables WHERE schemaname = current_schema() ORDER BY tablename"
_MOVING = """
CREATE TABLE moving (
  name      TEXT   PRIMARY KEY,
  last      TEXT   NOT NULL,
  rows      BIGINT NOT NULL,
  digest    TEXT   NOT NULL,
  replaced  BIGINT NOT NULL
)
"""
_FIRST = """
INSERT INTO moving (name, last, rows, digest, replaced) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING
"""
_NEXT = "UPDATE moving SET last = $2, rows = $3, digest = $4, replaced = $5 WHERE name = $1 AND rows = $6"
_LIVE = (
    "SELECT EXISTS (SELECT 1 FROM owners WHERE lease_until > extract(epoch FROM clock_timestamp()) * 1000)"
)
_NAME = """
INSERT INTO session_names (rowid, names)
SELECT id, CAST(words AS TSVECTOR) FROM unnest(CAST($1 AS BIGINT[]), CAST($2 AS TEXT[])) AS named (id, words)
"""
_SECRETS = "secrets"
"""Made by every gateway that starts; while nothing else is in a database, nothing depends on them."""
_NOW_EMPTY = "Name an empty database, such as one that createdb has just made; nothing was changed."


class Filling(Connection, Protocol):
    """What is used here beside."""

    async def copy_records_to_table(
        self, table_name: str, *, records: Sequence[Sequence[Value]], columns: Sequence[str]
    ) -> str: ...


class Place(msgspec.Struct, frozen=True):
    """How far a table is: the last key that was copied, and what the rows up to it amount to."""

    last: Key | None = None
    sum: Sum = msgspec.field(default_factory=Sum)
    replaced: int = 0


class Target:
    """See the module. Open with `Target.reach`; what fails leaves the connection of no use."""

    def __init__(self, server: Server, connection: Filling) -> None:
        self._server = server
        self._connection = connection

    @classmethod
    async def reach(cls, server: Server) -> Target:
        try:
            return cls(server, cast("Filling", await server.connect()))
        except (pg.PostgresError, ValueError, *LOST) as error:
            raise told(error, server) from error

    async def close(self) -> None:
        with suppress(*LOST):
            await self._connection.close(timeout=2.0)

    @property
    def named(self) -> str:
        return self._server.named

    def tell(self, error: Exception) -> AntiphonError:
        """What went wrong on the way, with what to do then."""
        found = told(error, self._server)
        if found is error:
            return found
        again = "Put that right and give the same command again: it goes on where it stopped."
        return type(found)(found.what, again)

    async def begin(self, tables: Sequence[Table]) -> dict[str, Place] | None:
        """How far each table is, those of which nothing is there left out; None if nothing is left to be moved.

        Raises:
            Conflict: it belongs to somebody else; nothing was changed.
        """
        names = await self._names()
        if MOVING not in names:
            if names and "schema_version" not in names:
                raise Conflict(f"The database {self.named} holds tables of another program.", _NOW_EMPTY)
            if await self._filled(tables, names):
                if not await self._is_current():
                    raise self.foreign()
                return None
        await prepare(self._connection, migrate=True, moving=True)
        if not await self._is_current():
            raise Conflict(
                f"The database {self.named} was prepared by a newer Antiphon.",
                "Upgrade this one and start it once on the source, so that both have the same schema.",
            )
        await begin_alone(self._connection)
        if MOVING not in await self._names():
            await self._mark(tables)
        places = await self._places()
        await self.commit()
        return places

    async def put(self, table: Table, place: Place, batch: Batch) -> Place | None:
        """Copy rows that follow those at `place`; None if somebody else has copied them meanwhile."""
        added = Sum()
        for row in batch.rows:
            added.add(digest_of(table, row))
        after = Place(batch.last, place.sum.plus(added), place.replaced + batch.replaced)
        await self._connection.execute("BEGIN")
        if not await self._advance(table, place, after):
            await self._connection.execute("ROLLBACK")
            return None
        try:
            await self._copy(table, batch.rows)
        except _UNFIT as error:
            raise StoreError(
                f"A row of the table {table.name!r} before {batch.last} cannot be stored in PostgreSQL ({error}).",
                "Run `antiphon doctor` on the source; nothing in it was changed.",
                table=table.name,
            ) from error
        await self.commit()
        return after

    async def place(self, table: Table) -> Place:
        return (await self._places()).get(table.name, Place())

    async def sum(self, table: Table, tell: Callable[[int], None]) -> Sum:
        """Of all rows. Their digests are made over there, so that no row has to come back."""
        own, digest = quoted(*table.key), digest_in_postgres(table)
        numbers = ", ".join(f"${number}" for number in range(1, len(table.key) + 1))
        head = f"SELECT {own}, {digest} AS digest FROM {quoted(table.name)}"  # noqa: S608
        tail = f"ORDER BY {own} LIMIT {_PAGE}"
        total, last = Sum(), ()
        while rows := await self._connection.fetch(
            f"{head} WHERE ({own}) > ({numbers}) {tail}" if last else f"{head} {tail}", *last
        ):
            for row in rows:
                total.add(row["digest"])
            last = tuple(rows[-1][part] for part in table.key)
            tell(total.rows)
        return total

    async def finish(self, sequences: Mapping[str, int], tables: Sequence[Table]) -> None:
        """Numbers go on behind those that were given out, and the database is anybody's to use."""
        await self._connection.execute("BEGIN")
        for table in tables:
            if sequences.get(table.name):
                await self._connection.execute(
                    "SELECT setval(pg_get_serial_sequence($1, $2), $3)",
                    table.name,
                    table.key[0],
                    sequences[table.name],
                )
            await self._connection.execute(f"ANALYZE {quoted(table.name)}", timeout=STEP_SECONDS)
        await self._connection.execute("DROP TABLE moving")
        await self.commit()

    async def commit(self) -> None:
        await self._connection.execute("COMMIT")

    async def _names(self) -> list[str]:
        return [row["name"] for row in await self._connection.fetch(_TABLES)]

    async def _filled(self, tables: Sequence[Table], names: Sequence[str]) -> bool:
        """Whether anything is in there that somebody would miss; `names` are the tables that it has."""
        for name in (table.name for table in tables if table.name in names and table.name != _SECRETS):
            if await self._connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {quoted(name)})"):  # noqa: S608
                return True
        return False

    async def _is_current(self) -> bool:
        version = await self._connection.fetchval("SELECT version FROM schema_version")
        return version == migrations("postgres")[-1].version

    def foreign(self) -> Conflict:
        return Conflict(f"The database {self.named} already holds other sessions.", _NOW_EMPTY)

    async def _mark(self, tables: Sequence[Table]) -> None:
        """From now on it is nobody's but ours."""
        if await self._connection.fetchval(_LIVE):
            raise Conflict(
                f"A gateway is running on the database {self.named}.", "Stop it first; nothing was changed."
            )
        if await self._filled(tables, await self._names()):
            raise self.foreign()
        await self._connection.execute(f"DELETE FROM {_SECRETS}")  # noqa: S608
        await self._connection.execute(_MOVING)

    async def _places(self) -> dict[str, Place]:
        rows = await self._connection.fetch("SELECT name, last, rows, digest, replaced FROM moving")
        return {
            row["name"]: Place(
                tuple(msgspec.json.decode(row["last"], type=list[str | int])),
                Sum(row["rows"], int(row["digest"], 16)),
                row["replaced"],
            )
            for row in rows
        }

    async def _advance(self, table: Table, before: Place, after: Place) -> bool:
        """Waits for whoever is just doing the same, such as what a killed process left behind."""
        last = msgspec.json.encode(after.last).decode()
        values = (table.name, last, after.sum.rows, f"{after.sum.digest:x}", after.replaced)
        if before.last is None:
            done = await self._connection.execute(_FIRST, *values)
        else:
            done = await self._connection.execute(_NEXT, *values, before.sum.rows)
        return done.endswith(" 1")

    async def _copy(self, table: Table, rows: Sequence[tuple[Value, ...]]) -> None:
        columns = table.names
        if any(column.kind == "words" for column in table.columns):
            words = [Vector(str(text)).tsvector() for _, text in rows]
            await self._connection.execute(_NAME, [number for number, _ in rows], words)
            return
        await self._connection.copy_records_to_table(table.name, records=rows, columns=columns)
        if table.name == "messages":  # found by their words when the indexer has come to them
            numbers = [(row[columns.index("id")],) for row in rows]
            await self._connection.copy_records_to_table("unindexed", records=numbers, columns=["message"])
