"""The origin of a request, and its place in a chain of messages between sessions."""

from __future__ import annotations

import msgspec

from antiphon.engine.collaboration import chains
from antiphon.engine.collaboration.chains import ChainLimits, ChainLink
from antiphon.operations.context import OperationContext
from antiphon.store import Tx


class RequestOrigin(msgspec.Struct, frozen=True):
    """The run and the tool call that a request is made in; they identify it if it is repeated."""

    run_id: str | None = None
    key: str | None = None


class ChainOperations(OperationContext):
    async def _build_chain_link(self, tx: Tx, origin: RequestOrigin, session: int, fresh: str) -> ChainLink:
        """Return the next link of the chain that the session's run is in, or the first link of a new chain.

        Raises:
            ChainTooLong: the chain has reached one of its limits.
        """
        limits = self.config.session.agent_to_agent
        return await chains.extend_chain(
            tx, origin.run_id, session, fresh, ChainLimits(limits.max_hops, limits.max_runs)
        )
