"""How a session is right now: what it is, what goes on in it and what it has cost, all at one moment."""

from __future__ import annotations

from antiphon.access import Caller
from antiphon.operations.histories import Histories
from antiphon.operations.lists import Lists
from antiphon.operations.runs import Runs
from antiphon.store import Row, Tx
from antiphon.views import RunView, StatusView, UsageLine

RUNS_MOST = 50  # that are told one by one


class Statuses(Lists, Histories, Runs):
    async def status(self, caller: Caller, session: str) -> StatusView:
        """For whoever may read the session."""
        row, runs, usage = await self._store.read(self._status, caller, session)
        await self._look_for_files([(row["session_id"], row["key"])])
        return StatusView(session=self._session_view(caller, row), runs=runs, usage=usage)

    async def _status(
        self, tx: Tx, caller: Caller, session: str
    ) -> tuple[Row, list[RunView], list[UsageLine]]:
        row, _ = await self._describe(tx, caller, session)
        unfinished = await self._unfinished(tx, caller, session)
        runs = [await self._run(tx, caller, run_id) for run_id in unfinished[:RUNS_MOST]]
        return row, runs, await self._usage(tx, caller, session, tree=False)
