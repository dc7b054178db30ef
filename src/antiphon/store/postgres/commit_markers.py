"""Finds out whether a commit whose answer was lost took place.

Every connection has a row with the number of its last transaction that changed anything, written in that
transaction. Checking it also writes the row, which makes the answer final: a transaction that is still open and
writes its marker later finds the row changed since it began and fails (repeatable read). PostgreSQL's transaction
ids would not do: after a crash, and on a promoted standby, lost ids are reused, and another commit would pass for ours.
"""

from __future__ import annotations

from uuid import uuid4

from antiphon.store.postgres.connection import PgConnection

_NOW_SECONDS_SQL = "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)"
# Both statements in one round trip, hence with inlined values: only single, prepared statements take parameters.
_COMMIT_WITH_MARKER_SQL = f"""
INSERT INTO commits (connection, number, at)
SELECT '{{connection}}', {{number}}, {_NOW_SECONDS_SQL} WHERE pg_current_xact_id_if_assigned() IS NOT NULL
ON CONFLICT (connection) DO UPDATE SET number = excluded.number, at = excluded.at; COMMIT"""
_BEGIN_SQL = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'"
_READ_MARKER_SQL = f"""
INSERT INTO commits (connection, number, at) VALUES ($1, 0, {_NOW_SECONDS_SQL})
ON CONFLICT (connection) DO UPDATE SET at = excluded.at RETURNING number
"""  # noqa: S608
_DELETE_OLD_MARKERS_SQL = f"""
DELETE FROM commits WHERE connection IN (
  SELECT connection FROM commits WHERE at < {_NOW_SECONDS_SQL} - 86400 LIMIT 1000 FOR UPDATE SKIP LOCKED
)
"""  # noqa: S608


class CommitMarkers:
    """The commit markers of one connection."""

    def __init__(self) -> None:
        self._connection = uuid4().hex
        self._number = 0

    def build_commit(self) -> tuple[str, int]:
        """SQL that commits the open transaction, with its marker if it changed anything, and the marker's number."""
        self._number += 1
        return _COMMIT_WITH_MARKER_SQL.format(connection=self._connection, number=self._number), self._number

    async def was_committed(self, other: PgConnection, number: int) -> bool:
        """Whether that transaction took place, checked on another connection; afterwards it no longer can.

        Raises:
            LockNotAvailableError: it is still open.
        """
        await other.execute(_BEGIN_SQL)
        last = await other.fetchval(_READ_MARKER_SQL, self._connection)
        await other.execute("COMMIT")
        return last == number


async def delete_old_markers(link: PgConnection) -> None:
    """Deletes the markers of long-gone connections."""
    await link.execute(_DELETE_OLD_MARKERS_SQL)
