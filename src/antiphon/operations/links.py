"""Where a request comes from, and where in a chain of messages between sessions that puts it."""

from __future__ import annotations

import msgspec

from antiphon.engine import chains
from antiphon.engine.chains import Limits, Link
from antiphon.operations.core import Core
from antiphon.store import Tx


class Origin(msgspec.Struct, frozen=True):
    """The run and the call that a request is made in; they stand for it if it is repeated."""

    run_id: str | None = None
    key: str | None = None


class Links(Core):
    async def _link(self, tx: Tx, origin: Origin, session: int, fresh: str) -> Link:
        """The next link of the chain that a session's run is in, or the first of a new one.

        Raises:
            ChainTooLong: it is at one of its limits.
        """
        limits = self.config.session.agent_to_agent
        return await chains.link(tx, origin.run_id, session, fresh, Limits(limits.max_hops, limits.max_runs))
