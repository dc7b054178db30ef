"""Which agents a caller may spawn: the configuration's word, and for a spawned session also its envelope's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import access, keys
from antiphon.access import Caller, Target
from antiphon.engine import sessions
from antiphon.engine.door import Door
from antiphon.engine.envelopes import Envelope
from antiphon.errors import Forbidden
from antiphon.operations.core import Core
from antiphon.store import Tx
from antiphon.views import AgentCard, AgentLine, AgentsView

if TYPE_CHECKING:  # a command that only reads is over before this would be imported
    from antiphon.config import Config

ANY = "*"


class Agents(Core):
    async def agents(self, caller: Caller) -> AgentsView:
        """What spawning would accept for this caller's agent, by the same decision; for an operator, every agent."""
        access.require_scope(caller, "list")
        requester = caller.agent_id or self.config.default_agent_id
        patterns = self._door.grants(caller).spawn_agents
        roster = Roster(self.config, self._door)
        envelope = await self._store.read(self._within, caller.session_key) if caller.session_key else None
        anybody = envelope is None and ANY in (pattern.strip() for pattern in patterns)
        return AgentsView(
            requester=requester,
            allow_any=caller.is_operator or anybody,
            agents=[
                roster.line(agent)
                for agent in roster.spawnable_by(caller, requester)
                if _may_spawn(envelope, agent) and self._stays_in_sandbox(caller, agent)
            ],
        )

    async def _within(self, tx: Tx, session_key: str) -> Envelope | None:
        row = await tx.one(sessions.SQL.whole_by_key, key=session_key)
        return self._rules.within(row) if row else None

    def _stays_in_sandbox(self, caller: Caller, agent_id: str) -> bool:
        return not caller.sandboxed or self._door.sandboxes(agent_id, keys.subagent_key(agent_id, "new"))

    def spawnable(self, agent_id: str) -> list[str]:
        """The agents that one agent may spawn, itself first."""
        return Roster(self.config, self._door).spawnable(agent_id)

    async def roster(self, caller: Caller) -> list[AgentCard]:
        """Every agent there is, for operators."""
        access.require_scope(caller, "list")
        if not caller.is_operator:
            raise Forbidden("Only operators see every agent.", "Call agents_list.", action="list")
        return Roster(self.config, self._door).cards()


class Roster:
    """The configured agents. Asking it needs no store."""

    def __init__(self, config: Config, door: Door) -> None:
        self._config = config
        self._door = door

    def cards(self) -> list[AgentCard]:
        return [self._card(agent_id) for agent_id in self._config.agent_ids]

    def spawnable(self, agent_id: str) -> list[str]:
        return self.spawnable_by(Caller.agent(agent_id, str(keys.main_session(agent_id))), agent_id)

    def spawnable_by(self, caller: Caller, requester: str) -> list[str]:
        others = sorted(agent for agent in self._config.agent_ids if agent != requester)
        return [requester, *(agent for agent in others if self._may_spawn(caller, agent))]

    def _may_spawn(self, caller: Caller, agent_id: str) -> bool:
        if caller.is_operator:
            return True
        target = Target(str(keys.main_session(agent_id)), agent_id)
        grants = self._door.grants(caller)
        try:
            access.authorize(caller, "spawn", target, grants, configured=self._config.agent_ids)
        except Forbidden:
            return False
        return True

    def line(self, agent_id: str) -> AgentLine:
        agent = self._config.agent(agent_id)
        runtime = agent.runtime.type
        return AgentLine(
            id=agent_id,
            configured=True,
            name=agent.name,
            model=self._config.model_ref(agent_id) if runtime == "model" else None,
            runtime=runtime,
        )

    def _card(self, agent_id: str) -> AgentCard:
        line = self.line(agent_id)
        return AgentCard(
            id=agent_id,
            default=agent_id == self._config.default_agent_id,
            name=line.name,
            model=line.model,
            runtime=line.runtime,
            may_spawn=self.spawnable(agent_id),
        )


def _may_spawn(envelope: Envelope | None, agent_id: str) -> bool:
    return envelope is None or (envelope.depth > 0 and agent_id in envelope.agents)
