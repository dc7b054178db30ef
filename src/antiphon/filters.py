"""What of a list or a transcript is wanted. Only the question: who may ask it, and how much, `operations` says.

By itself, because a command that asks a running gateway is over before `operations` would be imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

EntryRole: TypeAlias = Literal["user", "assistant", "toolResult", "compaction"]

DEFAULT_LIST_ROWS, MAX_LIST_ROWS = 50, 200
DEFAULT_HISTORY_ENTRIES, MAX_HISTORY_ENTRIES = 50, 1000


class ListFilter(msgspec.Struct, frozen=True, kw_only=True):
    kinds: Sequence[str] | None = None
    limit: int = DEFAULT_LIST_ROWS
    active_minutes: float | None = None
    agent_id: str | None = None
    label: str | None = None
    search: str | None = None
    spawned_by: str | None = None
    include_archived: bool = False
    cursor: str | None = None


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    limit: int = DEFAULT_HISTORY_ENTRIES
    include_tools: bool = False
    """What tools returned, too. Without a meaning beside `roles`, `tool` and `errors`, which say it themselves."""
    before: int | None = None
    after: int | None = None
    roles: tuple[str, ...] | None = None
    since: int | None = None
    """Only what was written then or later, in milliseconds."""
    errors: bool = False
    """Only what failed: answers that ended in an error or were aborted, errors of tools."""
    tool: str | None = None
    """Only answers that called this tool, and what it returned."""

    without_internal: bool = False
    """Only what a person would call the conversation (see `engine.internal`)."""

    @property
    def is_narrow(self) -> bool:
        """Whether most of a transcript may be left out, so that looking for the rest has to be bounded."""
        narrowed = self.roles is not None or self.since is not None or self.errors or self.tool is not None
        return narrowed or self.without_internal

    @property
    def hides_results(self) -> bool:
        return not (self.include_tools or self.errors or self.roles is not None or self.tool is not None)
