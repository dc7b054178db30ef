"""Whether a commit whose answer was lost took place.

Every connection has a row with the number of its last transaction that changed anything, written in that transaction.
Asking for it writes the row as well, and so is final: a transaction that is still open, and comes with its mark later,
finds the row changed since it began and fails (repeatable read). The transaction's own id would not do: after a crash,
and on a standby that took over, ids of what was lost are given out again, and somebody else's commit would be taken
for ours.
"""

from __future__ import annotations

from uuid import uuid4

from antiphon.store.postgres.connection import PgConnection

_NOW_SECONDS_SQL = "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)"
# One round trip for both, written out: only what is prepared can have parameters, and that is one statement each.
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
    """What the transactions of one connection leave behind."""

    def __init__(self) -> None:
        self._connection = uuid4().hex
        self._number = 0

    def build_commit(self) -> tuple[str, int]:
        """What commits the open transaction with its mark, if it has changed anything, and that mark."""
        self._number += 1
        return _COMMIT_WITH_MARKER_SQL.format(connection=self._connection, number=self._number), self._number

    async def was_committed(self, other: PgConnection, number: int) -> bool:
        """Whether that transaction took place, asked on another connection; afterwards it cannot any more.

        Raises:
            LockNotAvailableError: it is still open.
        """
        await other.execute(_BEGIN_SQL)
        last = await other.fetchval(_READ_MARKER_SQL, self._connection)
        await other.execute("COMMIT")
        return last == number


async def delete_old_markers(link: PgConnection) -> None:
    """Remove what connections of long ago have left."""
    await link.execute(_DELETE_OLD_MARKERS_SQL)
