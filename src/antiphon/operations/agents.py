"""Which agents a caller may spawn and message: by the configuration, and for a spawned session also by its envelope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import access, keys
from antiphon.access import Action, Caller, Target
from antiphon.engine import sessions
from antiphon.engine.door import Door
from antiphon.engine.envelopes import Envelope
from antiphon.errors import Forbidden, NotFound
from antiphon.operations.core import Core
from antiphon.operations.spawns import Requester
from antiphon.store import Tx
from antiphon.views import AgentCard, AgentLine, AgentsView

if TYPE_CHECKING:  # a command that only reads is over before this would be imported
    from antiphon.config import Config

ANY = "*"
REACH_HINT = (
    "Messages to other agents need 'tools.sessions.visibility' \"all\" and 'tools.agentToAgent.enabled' true, with both"
    " agents in 'tools.agentToAgent.allow' if it is set; starting them needs 'subagents.allowAgents' of your agent."
    " Your operator decides these."
)
"""The same whether other agents exist or not."""


class Agents(Core):
    async def agents(self, caller: Caller) -> AgentsView:
        """Agents that this caller may spawn or message, by the same decisions; an operator sees every agent."""
        access.require_scope(caller, "list")
        requester = caller.agent_id or self.config.default_agent_id
        patterns = self._door.grants(caller).spawn_agents
        roster = Roster(self.config, self._door)
        envelope = await self._store.read(self._within, caller, requester) if caller.session_key else None
        anybody = envelope is None and ANY in (pattern.strip() for pattern in patterns)
        spawnable = [
            agent
            for agent in roster.spawnable_by(caller, requester)
            if _may_spawn(envelope, agent) and self._stays_in_sandbox(caller, agent)
        ]
        messageable = roster.messageable_by(caller)

        def line(agent: str) -> AgentLine:
            return roster.line(agent, can_spawn=agent in spawnable, can_message=agent in messageable)

        return AgentsView(
            requester=requester,
            allow_any=caller.is_operator or anybody,
            agents=[line(agent) for agent in spawnable],
            message_only=[line(agent) for agent in messageable if agent not in spawnable],
            hint=None if any(agent != requester for agent in messageable) else REACH_HINT,
        )

    async def _within(self, tx: Tx, caller: Caller, agent_id: str) -> Envelope | None:
        row = await tx.one(sessions.SQL.whole_by_key, key=caller.session_key)
        return self._rules.within(Requester(row, agent_id)) if row else None

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

    def messageable(self, agent_id: str) -> list[str]:
        """Other agents whose main session this agent's own may send to."""
        main = keys.main_session(agent_id)
        sandboxed = self._door.sandboxes(agent_id, main)
        return self.messageable_by(Caller.agent(agent_id, str(main), sandboxed=sandboxed))

    def messageable_by(self, caller: Caller) -> list[str]:
        """Agents whose main session a caller may send to; its own session is none of them."""
        return [
            agent
            for agent in sorted(self._config.agent_ids)
            if str(keys.main_session(agent)) != caller.session_key and self._allows(caller, "send", agent)
        ]

    def _may_spawn(self, caller: Caller, agent_id: str) -> bool:
        return caller.is_operator or self._allows(caller, "spawn", agent_id)

    def _allows(self, caller: Caller, action: Action, agent_id: str) -> bool:
        target = Target(str(keys.main_session(agent_id)), agent_id)
        grants = self._door.grants(caller)
        try:
            access.authorize(caller, action, target, grants, configured=self._config.agent_ids)
        except (Forbidden, NotFound):
            return False
        return True

    def line(self, agent_id: str, *, can_spawn: bool, can_message: bool) -> AgentLine:
        agent = self._config.agent(agent_id)
        runtime = agent.runtime.type
        return AgentLine(
            id=agent_id,
            configured=True,
            can_spawn=can_spawn,
            can_message=can_message,
            name=agent.name,
            model=self._config.model_ref(agent_id) if runtime == "model" else None,
            runtime=runtime,
        )

    def _card(self, agent_id: str) -> AgentCard:
        agent = self._config.agent(agent_id)
        runtime = agent.runtime.type
        return AgentCard(
            id=agent_id,
            default=agent_id == self._config.default_agent_id,
            name=agent.name,
            model=self._config.model_ref(agent_id) if runtime == "model" else None,
            runtime=runtime,
            may_spawn=self.spawnable(agent_id),
            may_message=self.messageable(agent_id),
        )


def _may_spawn(envelope: Envelope | None, agent_id: str) -> bool:
    return envelope is None or (envelope.depth > 0 and agent_id in envelope.agents)
