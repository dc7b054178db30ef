"""Builds the setup of a run: who acts, with which runtime, tools and instructions.

Everything comes from the configuration and, for a spawned session, from the limits of its spawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon import keys
from antiphon.config import AgentConfig, Config
from antiphon.engine.collaboration import framing
from antiphon.engine.runs.lifecycle import Claim
from antiphon.engine.runs.run_loop import RunSetup
from antiphon.engine.sessions.identity import (
    SessionIdentity,
    SessionIdentityResolver,
    get_answering_model,
)
from antiphon.errors import Forbidden, NotFound
from antiphon.runtimes import Runtime
from antiphon.runtimes.model import ModelRuntime
from antiphon.runtimes.registry import ConcurrencyLimitedRuntime, RuntimeRegistry
from antiphon.runtimes.turns import TurnRuntime
from antiphon.tool_selection import ToolAudience
from antiphon.workspace.bootstrap import BootstrapReader

if TYPE_CHECKING:
    from antiphon.mcp.servers import McpServers
    from antiphon.runtimes.acp.sessions import AcpSessions

MAX_TOOL_RESULT_CHARACTERS = 200_000  # more would not fit a prompt anyway


class RunSetupBuilder:
    """Builds the setup of a run from the configuration and, for a spawned session, its limits."""

    def __init__(
        self,
        config: Config,
        runtimes: RuntimeRegistry,
        identities: SessionIdentityResolver,
        secret: bytes,
        state_dir: Path,
        wait_until_examined: Callable[[], Awaitable[None]],
        explain_missing_sandbox: Callable[[str], str | None],
        mcp_servers: McpServers | None,
        acp_sessions: AcpSessions | None = None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._bootstrap = BootstrapReader(state_dir)
        self._wait_until_examined = wait_until_examined
        self._explain_missing_sandbox = explain_missing_sandbox
        self._mcp_servers = mcp_servers
        self._acp_sessions = acp_sessions
        self._runtimes = runtimes
        self._agents = {agent_id: config.get_agent(agent_id) for agent_id in config.agent_ids}
        self._identities = identities
        self._approval_timeout_seconds = config.tools.approvals.timeout_seconds
        self._max_subagent_steps = config.agents.defaults.subagents.max_concurrent
        self._subagent_slots: dict[str | None, asyncio.Semaphore] = {}
        """Slots for steps of sub-agents by provider, so that a stuck provider does not delay the others.

        The key is None for agents without a provider.
        """

    async def __call__(self, claim: Claim) -> RunSetup:
        agent = self._agents.get(claim.agent_id)
        if agent is None:
            raise NotFound(
                f"Agent {claim.agent_id!r} is not configured any more.",
                "Add it to agents.list, or archive the session.",
            )
        key = keys.parse(claim.session_key)
        is_program = agent.runtime.type == "acp"
        runtime: Runtime | TurnRuntime
        if is_program and self._acp_sessions is not None:
            runtime = self._acp_sessions.get_runtime(agent.id)
        else:
            runtime = await self._runtimes.get_runtime(agent.id, claim.model)
        spec = runtime.spec if isinstance(runtime, ModelRuntime) else None
        if key.shape == "subagent" and not isinstance(runtime, TurnRuntime):
            runtime = ConcurrencyLimitedRuntime(
                runtime, self._get_subagent_slots(spec.provider if spec else None)
            )
        await self._wait_until_examined()
        if self._mcp_servers is not None and not is_program:
            await self._mcp_servers.prepare_run(agent.tools.selection)
        identity = self._identities.resolve(
            agent.id,
            claim.session_key,
            sandboxed=claim.sandboxed,
            envelope=claim.envelope,
            model=claim.model,
        )
        if identity.caller.sandboxed and agent.runtime.type == "function":
            raise Forbidden(
                f"The session {claim.session_key!r} is sandboxed, but agent {agent.id!r} is a Python function, which"
                " runs outside any sandbox ('agents.list[].runtime').",
                "Start a new session, or let a model answer for the agent.",
            )
        nonce = framing.derive_nonce(self._secret, claim.session_key, claim.session_id)
        return RunSetup(
            nonce=nonce,
            runtime=runtime,
            caller=identity.caller,
            instructions=_build_instructions(
                agent,
                claim,
                nonce,
                # A program reads the files of its directory and has tools of its own.
                "" if is_program else await self._bootstrap.read(agent, claim.session_key),
                "" if is_program else self._explain_missing_commands(agent, identity),
                "" if is_program else self._describe_mcp_servers(agent, claim, identity, nonce),
            ),
            tools={} if is_program else identity.tools,
            max_steps=agent.max_steps,
            reserve_tokens=agent.compaction.reserve_tokens,
            keep_tokens=agent.compaction.keep_recent_tokens,
            max_result_chars=MAX_TOOL_RESULT_CHARACTERS,
            thinking=agent.thinking_default,
            approval_timeout_seconds=self._approval_timeout_seconds,
            loop_detection=agent.loop_detection,
            model=spec.model if spec else None,
            session_tool_names=identity.tools.keys() if is_program else frozenset(),
        )

    def _explain_missing_commands(self, agent: AgentConfig, identity: SessionIdentity) -> str:
        """Return why commands cannot run, if no sandbox works, so that the model does not promise or guess."""
        reason = self._explain_missing_sandbox(agent.id) if "exec" in identity.absent else None
        return f"You cannot run commands. {reason}" if reason else ""

    def _describe_mcp_servers(
        self, agent: AgentConfig, claim: Claim, identity: SessionIdentity, nonce: str
    ) -> str:
        if self._mcp_servers is None:
            return ""
        audience = ToolAudience(
            model=get_answering_model(self._config, agent.id, claim.model),
            is_sandboxed=identity.caller.sandboxed,
        )
        return self._mcp_servers.describe_for_run(identity.tools, agent.tools.selection, audience, nonce)

    def _get_subagent_slots(self, provider: str | None) -> asyncio.Semaphore:
        return self._subagent_slots.setdefault(provider, asyncio.Semaphore(self._max_subagent_steps))


def _build_instructions(
    agent: AgentConfig, claim: Claim, nonce: str, workspace_texts: str, *tool_texts: str
) -> str:
    own = agent.instructions or f"You are {agent.name or agent.id}, a helpful assistant."
    here = f"This conversation is the session {keys.display_full_key(claim.session_key)!r}."
    parts = [own, workspace_texts, here, framing.explain_frames(nonce), *tool_texts, claim.instructions]
    return "\n\n".join(filter(None, parts))
