"""The tool `sessions_spawn`: starts a sub-agent in its own session, which reports back automatically."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon.engine.collaboration.attachments import SpawnAttachment
from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.messages import ThinkingLevel
from antiphon.operations.collaboration_types import SpawnResult
from antiphon.operations.operations import Operations
from antiphon.operations.types import RequestOrigin, SpawnRequest
from antiphon.tools._adapter import ToolArguments, build_tool

TOOL_DESCRIPTION = (
    "Start a sub-agent in its own session and continue immediately. When it finishes, its result is posted to this "
    "chat and added to this conversation: do not poll for it. End your turn with sessions_yield to be woken when all "
    "of your sub-agents have reported."
)
SPAWN_NOTE = "The result arrives automatically. Do not poll; end your turn, or wait with sessions_yield."


class AttachAs(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    mount_path: str | None = None


class SpawnArguments(ToolArguments, frozen=True):
    """Arguments of a spawn request, for the tool and for the method `sessions.spawn`."""

    task: Annotated[
        str, Meta(min_length=1, description="The complete task: the sub-agent sees nothing of this chat.")
    ]
    label: Annotated[str, Meta(description="A short name, for people and for the tool subagents.")] | None = (
        None
    )
    agent_id: Annotated[str, Meta(description="The agent to run. Default: this one.")] | None = None
    model: Annotated[str, Meta(description="provider/model, instead of the agent's own.")] | None = None
    thinking: Annotated[ThinkingLevel, Meta(description="Thinking level.")] | None = None
    run_timeout_seconds: (
        Annotated[float, Meta(ge=0, description="Stop it after this many seconds; 0 = never.")] | None
    ) = None
    thread: Annotated[
        bool, Meta(description="Bind it to a thread of this chat, if the channel has threads.")
    ] = False
    mode: (
        Annotated[
            Literal["run", "session"],
            Meta(description="'session' stays open for more messages and needs a thread."),
        ]
        | None
    ) = None
    cleanup: Annotated[
        Literal["delete", "keep"], Meta(description="Whether its transcript is deleted after the report.")
    ] = "keep"
    sandbox: Annotated[
        Literal["inherit", "require"], Meta(description="'require' refuses a sub-agent without a sandbox.")
    ] = "inherit"
    attachments: Annotated[
        list[SpawnAttachment], Meta(max_length=1000, description="Files for its workspace.")
    ] = msgspec.field(default_factory=list[SpawnAttachment])
    attach_as: Annotated[AttachAs, Meta(description="A hint for where the files should appear.")] | None = (
        None
    )
    runtime: Annotated[Literal["subagent", "acp"], Meta(description="What executes it.")] = "subagent"
    idempotency_key: (
        Annotated[str, Meta(description="Repeated calls with the same key start one sub-agent.")] | None
    ) = None
    announce: Annotated[
        Literal["channel", "parent", "none"],
        Meta(description="Who receives the result: this chat, only you (which wakes you), or no one."),
    ] = "channel"

    @property
    def spawn_request(self) -> SpawnRequest:
        return SpawnRequest(
            task=self.task,
            label=self.label,
            agent_id=self.agent_id,
            model=self.model,
            thinking=self.thinking,
            run_timeout_seconds=self.run_timeout_seconds,
            thread=self.thread,
            mode=self.mode,
            cleanup=self.cleanup,
            sandbox=self.sandbox,
            attachments=self.attachments,
            mount_path=self.attach_as.mount_path if self.attach_as else None,
            runtime=self.runtime,
            idempotency_key=self.idempotency_key,
            announce=self.announce,
        )


def sessions_spawn(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: SpawnArguments) -> dict[str, Any]:
        spawned = await operations.subagents.spawn(
            call.caller, arguments.spawn_request, RequestOrigin(call.run_id, call.key)
        )
        return {**_drop_none_fields(spawned), "note": SPAWN_NOTE}

    return build_tool(
        "sessions_spawn",
        TOOL_DESCRIPTION,
        SpawnArguments,
        run,
        has_side_effects=True,
        agents=operations.agents.list_spawnable,
    )


def _drop_none_fields(spawned: SpawnResult) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(spawned).items() if value is not None}
