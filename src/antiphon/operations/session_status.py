"""The status of one session: its settings, its runs and its cost, in one snapshot."""

from __future__ import annotations

from antiphon.access import Caller
from antiphon.operations.runs import RunOperations
from antiphon.operations.session_list import SessionListOperations
from antiphon.operations.transcripts import TranscriptOperations
from antiphon.store import Row, Tx
from antiphon.views import RunView, SessionStatusView, UsageLine

MAX_LISTED_RUNS = 50  # further runs are left out


class SessionStatusOperations(SessionListOperations, TranscriptOperations, RunOperations):
    async def get_session_status(self, caller: Caller, session: str) -> SessionStatusView:
        """Return the status of a session; for callers that may read it."""
        row, runs, usage = await self._store.read(self._load_session_status, caller, session)
        await self._find_transcript_files([(row["session_id"], row["key"])])
        return SessionStatusView(session=self._build_session_view(caller, row), runs=runs, usage=usage)

    async def _load_session_status(
        self, tx: Tx, caller: Caller, session: str
    ) -> tuple[Row, list[RunView], list[UsageLine]]:
        row, _ = await self._load_session_and_run(tx, caller, session)
        unfinished = await self._load_unfinished_runs(tx, caller, session)
        runs = [await self._load_run_view(tx, caller, run_id) for run_id in unfinished[:MAX_LISTED_RUNS]]
        return row, runs, await self._load_usage(tx, caller, session, tree=False)
