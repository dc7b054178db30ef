"""Runtimes that answer a whole turn, tools included, and keep their own memory, such as ACP programs.

The engine gives such a runtime a `TurnHost`, which commits what the runtime says to the transcript and asks people. A
turn that a crash interrupted is not continued: the runtime is told about it, and its calls are in the transcript.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import Protocol

import msgspec

from antiphon.access import Caller
from antiphon.messages import AssistantMessage, Message, ToolCall, ToolResult
from antiphon.runtimes import Deltas, Prompt


class TurnIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The turn, and the conversation it belongs to."""

    run_id: str
    run_number: int
    session_key: str
    session_id: str
    """Changes when the session begins a new conversation."""
    first_seq: int
    """The number of the entry that the turn answers."""
    caller: Caller
    tool_names: Set[str]
    """The tools of the session, which the runtime may offer to a program as well."""
    is_resumed: bool
    """Whether the turn was begun before, by a process that was then lost."""


class PermissionQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a person is asked before a runtime uses one of its tools."""

    tool: str
    call_id: str
    text: str
    grant: str | None
    """The whole call in a normalized form, for `allow-always`; None if it can be allowed only once."""
    binding: str


class TurnHost(Protocol):
    """The services of the engine for a runtime during a turn."""

    @property
    def identity(self) -> TurnIdentity: ...

    @property
    def used_call_ids(self) -> Set[str]:
        """The ids of tool calls that the run has already."""
        ...

    def now(self) -> int: ...

    async def commit(self, messages: Sequence[Message]) -> None:
        """Append entries to the transcript."""
        ...

    def show_call(self, call: ToolCall, result: ToolResult | None) -> None:
        """Show people that a call begins, or has ended."""
        ...

    async def ask(self, question: PermissionQuestion) -> bool:
        """Wait until a person decides; False if it was not allowed."""
        ...

    async def render_missed(self, since: int, known_run: int | None) -> str:
        """Return the entries from `since` on as framed text, without those of a run and the message of the turn itself.

        Empty if there are none.
        """
        ...


class TurnRuntime(ABC):
    """Answers whole turns. Cancelling the awaiting task must stop the turn.

    Not a protocol: every run asks whether its runtime is one, and a protocol compares the attributes each time.
    """

    context_window: int | None
    reads_history: bool

    @abstractmethod
    async def run_turn(self, prompt: Prompt, host: TurnHost, deltas: Deltas) -> AssistantMessage: ...

    @abstractmethod
    async def close(self) -> None: ...
