"""Runtimes answer a turn, one step at a time.

A step takes a prompt and returns one assistant message, which may request tools. The durable loop around it
(commit, run the tools, commit, next step) belongs to the engine, so a runtime keeps no state between steps, does
not know the store and never runs a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from antiphon.messages import AssistantMessage, Message


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments object."""
    strict: bool = False
    """Whether the provider must enforce the schema; always False for Antiphon's own tools."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Model settings that a request chose for its own run; None leaves a setting to the model.

    A runtime that does not support one refuses it by name (`InvalidInput`) instead of ignoring it.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Maximum tokens of one answer; a lower limit of the configured model applies as well."""
    stop: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    """As in chat completions: `{type: "json_object"}` or `{type: "json_schema", json_schema: {…}}`."""
    parallel_tool_calls: bool | None = None
    tool_required: bool = False
    tool_name: str | None = None
    """The tool that has to be called, together with `tool_required`."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one step. `messages` is a valid conversation: every call has its result."""

    run_id: str
    session_key: str
    agent_id: str
    instructions: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    thinking: str | None = None
    """One of `off minimal low medium high xhigh`, or None for the model's default."""
    sampling: Sampling | None = None

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields that make log lines searchable by run and session."""
        return {"run_id": self.run_id, "session_key": self.session_key}


class Deltas(Protocol):
    """Receives a step's output while it streams. Calls are cheap and never block."""

    def text(self, piece: str) -> None: ...

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None:
        """Starts over: everything streamed in this step so far is discarded."""
        ...


class DiscardedDeltas:
    """Discards the deltas of a model step whose answer is used only when it is complete."""

    def text(self, piece: str) -> None: ...

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None: ...


class Runtime(Protocol):
    """Answers steps. Cancelling the awaiting task must stop the step at once."""

    @property
    def context_window(self) -> int | None:
        """Tokens that fit into the runtime's context, or None if it has no limit."""
        ...

    @property
    def reads_history(self) -> bool:
        """False for a runtime that reads only the run's own messages, which saves loading the others."""
        ...

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage: ...

    async def close(self) -> None: ...
