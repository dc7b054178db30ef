"""Which agents a caller may spawn and message, by the configuration and, for a spawned session, by its permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import access, keys
from antiphon.access import Action, Caller, TargetSession
from antiphon.engine.collaboration.permissions import SubagentPermissions
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import Forbidden, NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.spawn_rules import SpawnRequester, SpawnRules
from antiphon.operations.types import AgentSummary, AgentsView, ReachableAgent
from antiphon.store import Tx

if TYPE_CHECKING:  # not needed at run time; keeps commands that only read fast
    from antiphon.config import Config

ANY_AGENT = "*"
REACH_HINT = (
    "Messages to other agents need 'tools.sessions.visibility' \"all\" and 'tools.agentToAgent.enabled' true, with both"
    " agents in 'tools.agentToAgent.allow' if it is set; starting them needs 'subagents.allowAgents' of your agent."
    " Your operator decides these."
)
"""Does not reveal whether other agents exist."""


class AgentOperations:
    def __init__(self, context: OperationContext, spawn_rules: SpawnRules) -> None:
        self._context = context
        self._spawn_rules = spawn_rules
        self._directory = AgentDirectory(context.config, context.session_resolver)

    async def list_reachable(self, caller: Caller) -> AgentsView:
        """Return the agents that this caller may spawn or message; an operator sees every agent."""
        access.require_scope(caller, "list")
        requester = caller.agent_id or self._context.config.default_agent_id
        patterns = self._context.session_resolver.get_grants(caller).spawn_agents
        permissions = (
            await self._context.store.read(self._load_permissions, caller, requester)
            if caller.session_key
            else None
        )
        can_spawn_any = permissions is None and ANY_AGENT in (pattern.strip() for pattern in patterns)
        spawnable = [
            agent
            for agent in self._directory.list_spawnable_by(caller, requester)
            if _permissions_allow_spawn(permissions, agent) and self._stays_in_sandbox(caller, agent)
        ]
        messageable = self._directory.list_messageable_by(caller)

        def describe(agent: str) -> ReachableAgent:
            return self._directory.build_reachable_agent(
                agent, can_spawn=agent in spawnable, can_message=agent in messageable
            )

        return AgentsView(
            requester=requester,
            allow_any=caller.is_operator or can_spawn_any,
            agents=[describe(agent) for agent in spawnable],
            message_only=[describe(agent) for agent in messageable if agent not in spawnable],
            hint=None if any(agent != requester for agent in messageable) else REACH_HINT,
        )

    async def _load_permissions(self, tx: Tx, caller: Caller, agent_id: str) -> SubagentPermissions | None:
        row = await session_rows.find_by_key(tx, caller.session_key or "")
        return self._spawn_rules.get_stored_permissions(SpawnRequester(row, agent_id)) if row else None

    def _stays_in_sandbox(self, caller: Caller, agent_id: str) -> bool:
        return not caller.sandboxed or self._context.session_resolver.is_sandboxed(
            agent_id, keys.subagent_key(agent_id, "new")
        )

    def list_spawnable(self, agent_id: str) -> list[str]:
        """Return the agents that one agent may spawn, itself first."""
        return self._directory.list_spawnable(agent_id)

    async def list(self, caller: Caller) -> list[AgentSummary]:
        """Return every configured agent; for operators only."""
        access.require_scope(caller, "list")
        if not caller.is_operator:
            raise Forbidden("Only operators can see every agent.", "Call agents_list.", action="list")
        return self._directory.list_summaries()


class AgentDirectory:
    """The configured agents; needs no store."""

    def __init__(self, config: Config, session_resolver: SessionResolver) -> None:
        self._config = config
        self._session_resolver = session_resolver

    def list_summaries(self) -> list[AgentSummary]:
        return [self._build_summary(agent_id) for agent_id in self._config.agent_ids]

    def list_spawnable(self, agent_id: str) -> list[str]:
        return self.list_spawnable_by(Caller.agent(agent_id, str(keys.main_session_key(agent_id))), agent_id)

    def list_spawnable_by(self, caller: Caller, requester: str) -> list[str]:
        others = sorted(agent for agent in self._config.agent_ids if agent != requester)
        return [requester, *(agent for agent in others if self._can_spawn(caller, agent))]

    def list_messageable(self, agent_id: str) -> list[str]:
        """Return the other agents to whose main session this agent's main session may send."""
        main = keys.main_session_key(agent_id)
        sandboxed = self._session_resolver.is_sandboxed(agent_id, main)
        return self.list_messageable_by(Caller.agent(agent_id, str(main), sandboxed=sandboxed))

    def list_messageable_by(self, caller: Caller) -> list[str]:
        """Return the agents to whose main session a caller may send, without the caller's own session."""
        return [
            agent
            for agent in sorted(self._config.agent_ids)
            if str(keys.main_session_key(agent)) != caller.session_key
            and self._is_allowed(caller, "send", agent)
        ]

    def _can_spawn(self, caller: Caller, agent_id: str) -> bool:
        return caller.is_operator or self._is_allowed(caller, "spawn", agent_id)

    def _is_allowed(self, caller: Caller, action: Action, agent_id: str) -> bool:
        target = TargetSession(str(keys.main_session_key(agent_id)), agent_id)
        grants = self._session_resolver.get_grants(caller)
        try:
            access.authorize(caller, action, target, grants, configured=self._config.agent_ids)
        except (Forbidden, NotFound):
            return False
        return True

    def build_reachable_agent(self, agent_id: str, *, can_spawn: bool, can_message: bool) -> ReachableAgent:
        agent = self._config.get_agent(agent_id)
        runtime = agent.runtime.type
        return ReachableAgent(
            id=agent_id,
            configured=True,
            can_spawn=can_spawn,
            can_message=can_message,
            name=agent.name,
            model=self._config.get_model_ref(agent_id) if runtime == "model" else None,
            runtime=runtime,
        )

    def _build_summary(self, agent_id: str) -> AgentSummary:
        agent = self._config.get_agent(agent_id)
        runtime = agent.runtime.type
        return AgentSummary(
            id=agent_id,
            default=agent_id == self._config.default_agent_id,
            name=agent.name,
            model=self._config.get_model_ref(agent_id) if runtime == "model" else None,
            runtime=runtime,
            may_spawn=self.list_spawnable(agent_id),
            may_message=self.list_messageable(agent_id),
        )


def _permissions_allow_spawn(permissions: SubagentPermissions | None, agent_id: str) -> bool:
    return permissions is None or (permissions.depth > 0 and agent_id in permissions.agents)
