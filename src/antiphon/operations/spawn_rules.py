"""Decides whether a sub-agent may be spawned, and with which permissions, before anything is created.

A child never has more rights than its parent: no further tools, agents or reach, and no way out of a sandbox. Its
maximum permissions are fixed here, once, and stored (column `envelope`).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from antiphon import access, keys
from antiphon.access import Action, Caller, TargetSession
from antiphon.engine import validation
from antiphon.engine.collaboration import attachments, prompts, task_rows
from antiphon.engine.collaboration.attachments import AttachmentLimits
from antiphon.engine.collaboration.chains import ChainLink
from antiphon.engine.collaboration.permissions import (
    SubagentPermissionResolver,
    SubagentPermissions,
)
from antiphon.engine.collaboration.subagents import ValidatedSpawn
from antiphon.engine.collaboration.task_rows import TaskOptions
from antiphon.engine.outbox import delivery_rows
from antiphon.engine.sessions.identity import get_answering_model
from antiphon.engine.validation import MAX_LABEL_CHARACTERS, validate_choice, validate_printable_name
from antiphon.errors import Forbidden, InvalidInput, NotFound, SpawnRefused
from antiphon.keys import SessionKey
from antiphon.messages import THINKING_LEVELS
from antiphon.operations.context import OperationContext
from antiphon.operations.types import SpawnRequest
from antiphon.store import Row, Tx
from antiphon.tool_selection import SPAWN_TOOL_NAME, ToolAudience
from antiphon.workspace.locations import locate_agent_workspace, locate_subagent_directory

if TYPE_CHECKING:
    from antiphon.config import AgentConfig

# Failures in a row of the same task, and how long it is then refused.
MAX_CONSECUTIVE_FAILURES, BREAKER_COOLDOWN_MILLISECONDS = (
    3,
    300_000,
)
CHILD_ID_NAMESPACE = uuid.UUID("3f1c8a5e-2a56-4f0e-8a70-6b7d1f6f9f21")
MAX_RUN_TIMEOUT_SECONDS = 30 * 86_400
MAX_MOUNT_PATH_CHARACTERS = 400


class SpawnRequester(NamedTuple):
    """The session that spawns, and the agent acting in it: in a shared main session this may be any agent."""

    session: Row
    agent_id: str

    @property
    def other_agent(self) -> str | None:
        """The acting agent, if the session belongs to another one."""
        return None if self.agent_id == self.session["agent_id"] else self.agent_id


class SpawnRules:
    """Applies the configured rules for spawning."""

    def __init__(self, context: OperationContext) -> None:
        self._config = context.config
        self._session_resolver = context.session_resolver
        self._toolbox = context.toolbox
        self._permission_resolver = SubagentPermissionResolver(context.config, context.toolbox)
        self._state_dir = context.state_dir
        self._explain_missing_sandbox = context.explain_missing_sandbox
        files = context.transcript_files
        self._transcripts_folder = "" if files is None else str(files.folder)

    # --- checks that need no lookup ---

    def validate_request(self, request: SpawnRequest) -> list[tuple[str, bytes]]:
        """Validate the request and return its attachments as bytes."""
        validation.validate_message_content(request.task, self._config.store.message_max_bytes, field="task")
        if request.label is not None:
            validate_printable_name(request.label, MAX_LABEL_CHARACTERS, "label")
        if request.agent_id is not None:
            keys.validate_agent_id(request.agent_id)
        if request.thinking is not None:
            validate_choice(request.thinking, THINKING_LEVELS, "thinking")
        if request.model is not None:
            self._config.find_model(request.model)
        seconds = request.run_timeout_seconds
        if seconds is not None and not 0 <= seconds <= MAX_RUN_TIMEOUT_SECONDS:
            raise InvalidInput(
                f"'runTimeoutSeconds' is {seconds}.",
                f"Use 0 for none, or up to {MAX_RUN_TIMEOUT_SECONDS}.",
                field="runTimeoutSeconds",
            )
        _check_mode(request)
        return self._validate_attachments(request)

    def _validate_attachments(self, request: SpawnRequest) -> list[tuple[str, bytes]]:
        given = self._config.tools.sessions_spawn.attachments
        if request.mount_path is not None:
            validate_printable_name(request.mount_path, MAX_MOUNT_PATH_CHARACTERS, "attachAs.mountPath")
        if not request.attachments:
            return []
        if request.runtime == "acp":
            raise _build_program_attachments_error()
        if not given.enabled:
            raise _build_refusal(
                "attachments",
                "Attachments are switched off.",
                "Put what matters into the task, or enable tools.sessions_spawn.attachments.",
            )
        return attachments.validate_attachments(
            request.attachments,
            AttachmentLimits(given.max_files, given.max_file_bytes, given.max_total_bytes),
        )

    # --- checks that depend on the requester ---

    async def plan_child(
        self,
        tx: Tx,
        caller: Caller,
        requester: SpawnRequester,
        request: SpawnRequest,
        task_id: str,
        link: ChainLink,
        now: int,
    ) -> ValidatedSpawn:
        """Return the validated plan of the child.

        Raises:
            SpawnRefused: a rule forbids it; `data['reason']` says which.
        """
        session = requester.session
        own = self._config.get_agent(requester.agent_id)
        actor = self._build_actor(caller, requester)
        target = self._resolve_target_agent(caller, requester, own, request)
        is_program = self._check_runtime(target, request)
        parent = self._compute_current_permissions(requester, own, actor)
        # The caller's key may be any text; the id derived from it is part of a session key and names a folder.
        child_id = str(uuid.uuid5(CHILD_ID_NAMESPACE, f"{session['key']}\n{task_id}"))
        child_key = keys.subagent_key(target.id, child_id, is_program=is_program)
        self._check_depth(session, parent)
        await self._check_children(tx, session, own)
        await _check_breaker(tx, target.id, request.task, now)
        sandboxed = self._resolve_sandboxed(actor, target, child_key, request)
        permissions = self._build_child_permissions(actor, target, parent)
        return ValidatedSpawn(
            id=task_id,
            digest=request.compute_digest(session["key"]),
            requester=session,
            child_key=child_key,
            task=request.task,
            label=request.label.strip() if request.label else None,
            model=None if is_program else request.model or _get_default_model(target),
            thinking=None if is_program else request.thinking or target.subagents.thinking,
            deadline_at=_compute_deadline(target, request, now),
            instructions=self._build_instructions(session, child_key, permissions, request),
            sandboxed=sandboxed,
            permissions=permissions,
            options=self._build_options(requester, target, request, child_id),
            destination=delivery_rows.resolve_session_destination(session),
            link=link,
        )

    def _resolve_target_agent(
        self, caller: Caller, requester: SpawnRequester, own: AgentConfig, request: SpawnRequest
    ) -> AgentConfig:
        if request.agent_id is None and own.subagents.require_agent_id:
            raise InvalidInput(
                "An agent must be named.", "Call agents_list, then pass agentId.", field="agentId"
            )
        chosen = request.agent_id or (self._config.acp.default_agent if request.runtime == "acp" else None)
        agent_id = keys.validate_agent_id(chosen) if chosen else own.id
        target = TargetSession(str(keys.subagent_key(agent_id, "new")), agent_id)
        configured = self._config.agent_ids
        access.authorize(
            caller, "spawn", target, self._session_resolver.get_grants(caller), configured=configured
        )
        permissions = self.get_stored_permissions(requester)
        if agent_id not in configured or (permissions is not None and agent_id not in permissions.agents):
            allowed = [id for id in (permissions.agents if permissions else configured) if id in configured]
            raise _build_refusal(
                "agent",
                f"Agent {agent_id!r} cannot be spawned from here.",
                f"These can: {', '.join(allowed) or 'none'}.",
            )
        return self._config.get_agent(agent_id)

    def _check_runtime(self, target: AgentConfig, request: SpawnRequest) -> bool:
        """Check that what executes the child can do what is asked. Returns whether it is an ACP program."""
        acp, programs = self._config.acp, self._config.acp_agent_ids
        if target.runtime.type != "acp":
            if request.runtime != "acp":
                return False
            hint = (
                f"Pass agentId: {', '.join(programs)}."
                if programs
                else "Leave runtime out, or use 'subagent'."
            )
            raise _build_refusal("runtime", f"Agent {target.id!r} is not an ACP program.", hint)
        if not acp.enabled:
            raise _build_refusal(
                "runtime", "Agents that are ACP programs are switched off.", "Spawn another agent."
            )
        if acp.allowed_agents is not None and not access.matches_agent_patterns(
            target.id, acp.allowed_agents
        ):
            raise _build_refusal(
                "agent",
                f"Agent {target.id!r} may not be spawned as a program ('acp.allowedAgents').",
                f"These may: {', '.join(acp.allowed_agents) or 'none'}.",
            )
        if request.attachments:
            raise _build_program_attachments_error()
        for field in ("model", "thinking"):
            if getattr(request, field) is not None:
                raise InvalidInput(
                    f"Agent {target.id!r} is a program, which chooses its {field} itself.",
                    f"Leave {field!r} out.",
                    field=field,
                )
        return True

    def get_stored_permissions(self, requester: SpawnRequester) -> SubagentPermissions | None:
        """Return the stored permissions of a sub-agent's session; None for other sessions."""
        session = requester.session
        return self._permission_resolver.resolve(requester.agent_id, session["key"], session["envelope"])

    def _compute_current_permissions(
        self, requester: SpawnRequester, agent: AgentConfig, actor: Caller
    ) -> SubagentPermissions:
        """Return the current permissions of a session: its agent's, restricted by its sandbox and its stored ones."""
        stored = self.get_stored_permissions(requester)
        grants = self._session_resolver.get_grants(actor)
        left = agent.subagents.max_spawn_depth - requester.session["depth"]
        return SubagentPermissions(
            tools=_intersect_names(
                self._toolbox.select_permitted(
                    agent.id,
                    agent.tools.selection,
                    ToolAudience(
                        model=get_answering_model(self._config, agent.id, requester.session["model"]),
                        is_sandboxed=actor.sandboxed,
                    ),
                ).by_name,
                stored and stored.tools,
            ),
            agents=_intersect_names(
                self._list_spawnable(agent.id, grants.spawn_agents), stored and stored.agents
            ),
            read=grants.read,
            send=grants.send,
            depth=stored.depth if stored else max(0, left),
        )

    def _build_actor(self, caller: Caller, requester: SpawnRequester) -> Caller:
        """Return the requester's identity, sandboxed if the caller, the session or the configuration says so."""
        session, agent_id = requester
        stored = self.get_stored_permissions(requester)
        inside = (
            caller.sandboxed
            or bool(session["sandboxed"])
            or self._session_resolver.is_sandboxed(agent_id, keys.parse(session["key"]))
        )
        return Caller.agent(agent_id, session["key"], sandboxed=inside, cap=stored.cap if stored else None)

    def _list_spawnable(self, agent_id: str, patterns: Sequence[str]) -> list[str]:
        return [
            id
            for id in self._config.agent_ids
            if id == agent_id or access.matches_agent_patterns(id, patterns)
        ]

    def _build_child_permissions(
        self, actor: Caller, target: AgentConfig, parent: SubagentPermissions
    ) -> SubagentPermissions:
        above = msgspec.structs.replace(actor, cap=parent.cap)
        depth = max(0, parent.depth - 1)
        grants = self._session_resolver.get_grants(Caller.agent(target.id, "agent:x:main"))
        return SubagentPermissions(
            tools=tuple(self._permission_resolver.list_tool_names(target, depth)),
            agents=tuple(self._list_spawnable(target.id, grants.spawn_agents)),
            # If the parent cannot reach every session of the agent, the child reaches only its own tree.
            read=grants.read
            if self._can_reach_agent(above, "read", target.id)
            else access.pick_narrower_visibility(grants.read, "tree"),
            send=grants.send
            if self._can_reach_agent(above, "send", target.id)
            else access.pick_narrower_visibility(grants.send, "tree"),
            depth=depth,
        ).intersect(parent)

    def _can_reach_agent(self, caller: Caller, action: Action, agent_id: str) -> bool:
        """Whether the caller reaches every session of the agent, not only those that it has spawned."""
        target = TargetSession(str(keys.subagent_key(agent_id, "any")), agent_id)
        try:
            access.authorize(caller, action, target, self._session_resolver.get_grants(caller))
        except (NotFound, Forbidden):
            return False
        return True

    def _check_depth(self, requester: Row, parent: SubagentPermissions) -> None:
        if parent.depth <= 0:
            raise _build_refusal(
                "depth",
                f"A sub-agent at depth {requester['depth']} may not spawn another one.",
                "Do the work here, or raise agents.defaults.subagents.maxSpawnDepth.",
            )

    async def _check_children(self, tx: Tx, requester: Row, own: AgentConfig) -> None:
        count = await task_rows.count_active_children(tx, requester["id"])
        most = own.subagents.max_children_per_agent
        if count >= most:
            raise _build_refusal(
                "children",
                f"This session already has {count} of at most {most} active sub-agents.",
                "Wait for one of them with sessions_yield, or stop one with subagents.",
            )

    def _resolve_sandboxed(
        self, actor: Caller, target: AgentConfig, child_key: SessionKey, request: SpawnRequest
    ) -> bool:
        sandboxed = self._session_resolver.is_sandboxed(target.id, child_key)
        if actor.sandboxed and not sandboxed:
            raise _build_refusal(
                "sandbox",
                "A sandboxed session may not spawn a child outside of a sandbox.",
                "Spawn a sandboxed agent; agents_list shows them.",
            )
        if request.sandbox == "require" and not sandboxed:
            raise _build_refusal(
                "sandbox",
                f"Agent {target.id!r} does not run in a sandbox.",
                "Spawn another agent, or leave sandbox 'require' out.",
            )
        if request.sandbox == "require" and (fault := self._explain_missing_sandbox(target.id)):
            raise _build_refusal("sandbox", f"Agent {target.id!r} has no sandbox.", fault)
        return sandboxed

    def _build_instructions(
        self, requester: Row, child_key: SessionKey, permissions: SubagentPermissions, request: SpawnRequest
    ) -> str:
        return prompts.build_subagent_context(
            requester_key=keys.display_full_key(requester["key"]),
            child_key=str(child_key),
            depth=requester["depth"] + 1,
            max_depth=requester["depth"] + 1 + permissions.depth,
            may_spawn=SPAWN_TOOL_NAME in permissions.tools,
            label=request.label,
            attachments=attachments.format_relative_dir(child_key.id) if request.attachments else None,
        )

    def _build_options(
        self, requester: SpawnRequester, target: AgentConfig, request: SpawnRequest, folder: str
    ) -> TaskOptions:
        settings = target.subagents
        mode = request.mode or ("session" if request.thread else "run")
        workspace = str(locate_agent_workspace(target, self._state_dir))
        below = locate_subagent_directory(str(keys.subagent_key(target.id, folder)))
        return TaskOptions(
            announce=request.announce,
            cleanup="keep" if mode == "session" else request.cleanup,
            mode=mode,
            locale=self._config.session.announce.locale,
            announce_ms=settings.announce_timeout_ms,
            archive_minutes=settings.archive_after_minutes,
            transcripts=self._transcripts_folder,
            workspace=workspace if request.attachments else None,
            workspace_below=below if request.attachments else "",
            attachments=folder if request.attachments else None,
            retain=self._config.tools.sessions_spawn.attachments.retain_on_session_keep,
            mount_path=request.mount_path,
            requester_agent=requester.other_agent,
        )


def _check_mode(request: SpawnRequest) -> None:
    if request.mode == "session" and not request.thread:
        raise InvalidInput(
            "Mode 'session' needs a thread to talk in.",
            "Set thread to true, or use mode 'run'.",
            field="mode",
        )
    if request.thread:
        raise _build_refusal(
            "thread",
            "This session's channel has no threads to bind a child to.",
            "Leave thread out: the report is posted to this chat.",
        )


def _build_program_attachments_error() -> InvalidInput:
    return InvalidInput(
        "A child of runtime 'acp' takes no attachments.",
        "Leave them out, or use runtime 'subagent'.",
        field="attachments",
    )


async def _check_breaker(tx: Tx, agent_id: str, task: str, now: int) -> None:
    """Refuse a task that keeps failing until its cooldown is over."""
    alike = await task_rows.list_latest_similar_tasks(tx, agent_id, task, MAX_CONSECUTIVE_FAILURES)
    if len(alike) < MAX_CONSECUTIVE_FAILURES or any(row["outcome"] in {"ok", "cancelled"} for row in alike):
        return
    left = alike[0]["ended_at"] + BREAKER_COOLDOWN_MILLISECONDS - now
    if left > 0:
        raise _build_refusal(
            "breaker",
            f"This task has failed {MAX_CONSECUTIVE_FAILURES} times in a row for agent {agent_id!r}.",
            f"Change the task, or wait {-(-left // 1000)} seconds.",
            retry_after_ms=left,
        )


def _get_default_model(agent: AgentConfig) -> str | None:
    model = agent.subagents.model
    return model.primary if model else None


def _compute_deadline(agent: AgentConfig, request: SpawnRequest, now: int) -> int | None:
    seconds = request.run_timeout_seconds
    if seconds is None:
        seconds = agent.subagents.run_timeout_seconds
    return now + round(seconds * 1000) if seconds else None


def _intersect_names(names: Iterable[str], within: Collection[str] | None) -> tuple[str, ...]:
    return tuple(name for name in names if within is None or name in within)


def _build_refusal(reason: str, what: str, hint: str, **data: object) -> SpawnRefused:
    return SpawnRefused(what, hint, reason=reason, **data)
