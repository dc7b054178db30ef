"""What answers a turn.

A runtime takes one step at a time: it is given a prompt and gives back one assistant message, which may ask
for tools. The durable loop around it (commit, run the tools, commit, step again) is the engine's, so a
runtime keeps no state between steps, knows no store and never runs a tool.
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
    """Whether the provider has to hold the model to the schema; ours are never sent so."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Model settings that a request chose for its own run; what is None is left to the model.

    A runtime that cannot honour one refuses it by name (`InvalidInput`) instead of leaving it out.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Most tokens of one answer; a lower limit of the configured model holds as well."""
    stop: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    """As in chat completions: `{type: "json_object"}` or `{type: "json_schema", json_schema: {…}}`."""
    parallel_tool_calls: bool | None = None
    tool_required: bool = False
    tool_name: str | None = None
    """With `tool_required`, the tool that has to be called."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step may look at. `messages` is a valid conversation: every call has its result."""

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
        """For the log, which can be searched by either."""
        return {"run_id": self.run_id, "session_key": self.session_key}


class Deltas(Protocol):
    """Where a step streams what it has so far. Calls are cheap and never block."""

    def text(self, piece: str) -> None: ...

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None:
        """A retry begins: what was streamed in this step is void."""
        ...


class Runtime(Protocol):
    """One way of answering. Cancelling the awaiting task must stop the step at once."""

    @property
    def context_window(self) -> int | None:
        """Tokens the runtime can look at, or None when there is no such bound."""
        ...

    @property
    def reads_history(self) -> bool:
        """False for a runtime that only looks at the run's own messages, which saves reading the others."""
        ...

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage: ...

    async def close(self) -> None: ...
