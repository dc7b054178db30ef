"""The PostgreSQL database that a store is moved into, with the progress of the move.

During a move it has one extra table with the last key copied of each table. It is written in the transaction that
copies the rows, so a kill leaves no ambiguity. As long as that table exists, no gateway uses the database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, cast

import msgspec

from antiphon.errors import AntiphonError, Conflict, StoreError
from antiphon.store.fulltext import FulltextVector
from antiphon.store.migrations import load_migrations
from antiphon.store.postgres.connection import (
    CONNECTION_ERRORS,
    AsyncpgConnection,
    PgServer,
    pg,
    translate_postgres_error,
)
from antiphon.store.postgres.schema import (
    COPY_PROGRESS_TABLE,
    MIGRATION_TIMEOUT_SECONDS,
    begin_exclusive,
    prepare_schema,
)
from antiphon.store.sqlite.copy_source import RowBatch
from antiphon.store.table_digests import (
    ColumnValue,
    DigestSum,
    RowKey,
    Table,
    build_digest_expression,
    compute_digest,
    quote_names,
)

_UNSTORABLE_ERRORS = (
    ValueError,
    TypeError,
    OverflowError,
    pg.DataError,
    pg.IntegrityConstraintViolationError,
)
_DIGEST_PAGE_ROWS = 1_000  # rows whose digests are fetched at a time
_LIST_TABLES_SQL = (
    "SELECT tablename AS name FROM pg_tables WHERE schemaname = current_schema() ORDER BY tablename"
)
_CREATE_PROGRESS_SQL = """
CREATE TABLE moving (
  name      TEXT   PRIMARY KEY,
  last      TEXT   NOT NULL,
  rows      BIGINT NOT NULL,
  digest    TEXT   NOT NULL,
  replaced  BIGINT NOT NULL
)
"""
_INSERT_PROGRESS_SQL = """
INSERT INTO moving (name, last, rows, digest, replaced) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING
"""
_UPDATE_PROGRESS_SQL = (
    "UPDATE moving SET last = $2, rows = $3, digest = $4, replaced = $5 WHERE name = $1 AND rows = $6"
)
_LIVE_GATEWAY_SQL = (
    "SELECT EXISTS (SELECT 1 FROM owners WHERE lease_until > extract(epoch FROM clock_timestamp()) * 1000)"
)
_INSERT_SESSION_NAMES_SQL = """
INSERT INTO session_names (rowid, names)
SELECT id, CAST(words AS TSVECTOR) FROM unnest(CAST($1 AS BIGINT[]), CAST($2 AS TEXT[])) AS named (id, words)
"""
_SECRETS_TABLE = "secrets"
"""Created by every gateway on start; nothing depends on them while the database is otherwise empty."""
_USE_EMPTY_DATABASE_HINT = (
    "Name an empty database, such as one just created by createdb; nothing was changed."
)


class CopyConnection(AsyncpgConnection, Protocol):
    """The additional methods of asyncpg's connection that are used here."""

    async def copy_records_to_table(
        self, table_name: str, *, records: Sequence[Sequence[ColumnValue]], columns: Sequence[str]
    ) -> str: ...


class TableProgress(msgspec.Struct, frozen=True):
    """How far a table has been copied: the last key, and the digest sum of the rows up to it."""

    last: RowKey | None = None
    sum: DigestSum = msgspec.field(default_factory=DigestSum)
    replaced: int = 0


class CopyTarget:
    """A database to copy into. Open it with `CopyTarget.connect`; after a failure the connection is unusable."""

    def __init__(self, server: PgServer, connection: CopyConnection) -> None:
        self._server = server
        self._connection = connection

    @classmethod
    async def connect(cls, server: PgServer) -> CopyTarget:
        try:
            return cls(server, cast("CopyConnection", await server.connect()))
        except (pg.PostgresError, ValueError, *CONNECTION_ERRORS) as error:
            raise translate_postgres_error(error, server) from error

    async def close(self) -> None:
        with suppress(*CONNECTION_ERRORS):
            await self._connection.close(timeout=2.0)

    @property
    def display_name(self) -> str:
        return self._server.display_name

    def translate_error(self, error: Exception) -> AntiphonError:
        """Translates an error during the move, with what to do next."""
        found = translate_postgres_error(error, self._server)
        if found is error:
            return found
        hint = "Fix that and run the same command again; it continues where it stopped."
        return type(found)(found.what, hint)

    async def begin_copy(self, tables: Sequence[Table]) -> dict[str, TableProgress] | None:
        """The progress of each table that was begun, or None if the move is already finished.

        Raises:
            Conflict: the database contains other data; nothing was changed.
        """
        names = await self._list_table_names()
        if COPY_PROGRESS_TABLE not in names:
            if names and "schema_version" not in names:
                raise Conflict(
                    f"The database {self.display_name} contains tables of another program.",
                    _USE_EMPTY_DATABASE_HINT,
                )
            if await self._has_rows(tables, names):
                if not await self._is_current():
                    raise self.build_foreign_error()
                return None
        await prepare_schema(self._connection, migrate=True, copying=True)
        if not await self._is_current():
            raise Conflict(
                f"The database {self.display_name} was prepared by a newer Antiphon.",
                "Upgrade this one and start it once on the source, so that both have the same schema.",
            )
        await begin_exclusive(self._connection)
        if COPY_PROGRESS_TABLE not in await self._list_table_names():
            await self._start_progress(tables)
        progress = await self._load_all_progress()
        await self.commit()
        return progress

    async def copy_batch(
        self, table: Table, progress: TableProgress, batch: RowBatch
    ) -> TableProgress | None:
        """Copies rows that follow those at `progress`; returns None if another process has copied them meanwhile."""
        added = DigestSum()
        for row in batch.rows:
            added.add(compute_digest(table, row))
        after = TableProgress(batch.last, progress.sum.combine(added), progress.replaced + batch.replaced)
        await self._connection.execute("BEGIN")
        if not await self._advance_progress(table, progress, after):
            await self._connection.execute("ROLLBACK")
            return None
        try:
            await self._copy_rows(table, batch.rows)
        except _UNSTORABLE_ERRORS as error:
            raise StoreError(
                f"A row of the table {table.name!r} before {batch.last} cannot be stored in PostgreSQL ({error}).",
                "Run `antiphon doctor` on the source; nothing in it was changed.",
                table=table.name,
            ) from error
        await self.commit()
        return after

    async def load_progress(self, table: Table) -> TableProgress:
        return (await self._load_all_progress()).get(table.name, TableProgress())

    async def sum_digests(self, table: Table, report: Callable[[int], None]) -> DigestSum:
        """The digest sum of all rows. Digests are computed by the server, so that no row is transferred."""
        key_columns, digest = quote_names(*table.key), build_digest_expression(table)
        numbers = ", ".join(f"${number}" for number in range(1, len(table.key) + 1))
        select = f"SELECT {key_columns}, {digest} AS digest FROM {quote_names(table.name)}"  # noqa: S608
        order = f"ORDER BY {key_columns} LIMIT {_DIGEST_PAGE_ROWS}"
        total, last = DigestSum(), ()
        while rows := await self._connection.fetch(
            f"{select} WHERE ({key_columns}) > ({numbers}) {order}" if last else f"{select} {order}", *last
        ):
            for row in rows:
                total.add(row["digest"])
            last = tuple(rows[-1][part] for part in table.key)
            report(total.rows)
        return total

    async def finish(self, sequences: Mapping[str, int], tables: Sequence[Table]) -> None:
        """Sets the sequences past the numbers already used, and releases the database for use."""
        await self._connection.execute("BEGIN")
        for table in tables:
            if sequences.get(table.name):
                await self._connection.execute(
                    "SELECT setval(pg_get_serial_sequence($1, $2), $3)",
                    table.name,
                    table.key[0],
                    sequences[table.name],
                )
            await self._connection.execute(
                f"ANALYZE {quote_names(table.name)}", timeout=MIGRATION_TIMEOUT_SECONDS
            )
        await self._connection.execute("DROP TABLE moving")
        await self.commit()

    async def commit(self) -> None:
        await self._connection.execute("COMMIT")

    async def _list_table_names(self) -> list[str]:
        return [row["name"] for row in await self._connection.fetch(_LIST_TABLES_SQL)]

    async def _has_rows(self, tables: Sequence[Table], names: Sequence[str]) -> bool:
        """Whether the database contains data that would be lost; `names` are the tables that it has."""
        for name in (table.name for table in tables if table.name in names and table.name != _SECRETS_TABLE):
            if await self._connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {quote_names(name)})"):  # noqa: S608
                return True
        return False

    async def _is_current(self) -> bool:
        version = await self._connection.fetchval("SELECT version FROM schema_version")
        return version == load_migrations("postgres")[-1].version

    def build_foreign_error(self) -> Conflict:
        return Conflict(
            f"The database {self.display_name} already contains other sessions.", _USE_EMPTY_DATABASE_HINT
        )

    async def _start_progress(self, tables: Sequence[Table]) -> None:
        """Creates the progress table; from now on the database is reserved for the move."""
        if await self._connection.fetchval(_LIVE_GATEWAY_SQL):
            raise Conflict(
                f"A gateway is running on the database {self.display_name}.",
                "Stop it first; nothing was changed.",
            )
        if await self._has_rows(tables, await self._list_table_names()):
            raise self.build_foreign_error()
        await self._connection.execute(f"DELETE FROM {_SECRETS_TABLE}")  # noqa: S608
        await self._connection.execute(_CREATE_PROGRESS_SQL)

    async def _load_all_progress(self) -> dict[str, TableProgress]:
        rows = await self._connection.fetch("SELECT name, last, rows, digest, replaced FROM moving")
        return {
            row["name"]: TableProgress(
                tuple(msgspec.json.decode(row["last"], type=list[str | int])),
                DigestSum(row["rows"], int(row["digest"], 16)),
                row["replaced"],
            )
            for row in rows
        }

    async def _advance_progress(self, table: Table, before: TableProgress, after: TableProgress) -> bool:
        """Records progress. Waits for a concurrent update, such as that of a killed process's open transaction."""
        last = msgspec.json.encode(after.last).decode()
        values = (table.name, last, after.sum.rows, f"{after.sum.digest:x}", after.replaced)
        if before.last is None:
            status = await self._connection.execute(_INSERT_PROGRESS_SQL, *values)
        else:
            status = await self._connection.execute(_UPDATE_PROGRESS_SQL, *values, before.sum.rows)
        return status.endswith(" 1")

    async def _copy_rows(self, table: Table, rows: Sequence[tuple[ColumnValue, ...]]) -> None:
        columns = table.names
        if any(column.kind == "words" for column in table.columns):
            words = [FulltextVector(str(text)).to_tsvector() for _, text in rows]
            await self._connection.execute(_INSERT_SESSION_NAMES_SQL, [number for number, _ in rows], words)
            return
        await self._connection.copy_records_to_table(table.name, records=rows, columns=columns)
        if table.name == "messages":  # searchable once the indexer has processed them
            numbers = [(row[columns.index("id")],) for row in rows]
            await self._connection.copy_records_to_table("unindexed", records=numbers, columns=["message"])
