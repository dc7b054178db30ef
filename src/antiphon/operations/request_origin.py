"""Where a request comes from, and where in a chain of messages between sessions that puts it."""

from __future__ import annotations

import msgspec

from antiphon.engine.collaboration import chains
from antiphon.engine.collaboration.chains import ChainLimits, ChainLink
from antiphon.operations.context import OperationContext
from antiphon.store import Tx


class RequestOrigin(msgspec.Struct, frozen=True):
    """The run and the call that a request is made in; they stand for it if it is repeated."""

    run_id: str | None = None
    key: str | None = None


class ChainOperations(OperationContext):
    async def _build_chain_link(self, tx: Tx, origin: RequestOrigin, session: int, fresh: str) -> ChainLink:
        """The next link of the chain that a session's run is in, or the first of a new one.

        Raises:
            ChainTooLong: it is at one of its limits.
        """
        limits = self.config.session.agent_to_agent
        return await chains.extend_chain(
            tx, origin.run_id, session, fresh, ChainLimits(limits.max_hops, limits.max_runs)
        )
