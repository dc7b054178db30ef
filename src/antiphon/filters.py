"""Filters for lists and transcripts. Permissions and limits are decided in `operations`.

A module of its own, because a command that queries a running gateway finishes before `operations` would be imported.
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
    """Include tool results. Ignored if `roles`, `tool` or `errors` is set, which decide that themselves."""
    before: int | None = None
    after: int | None = None
    roles: tuple[str, ...] | None = None
    since: int | None = None
    """Only entries written then or later, in milliseconds."""
    errors: bool = False
    """Only failures: answers that ended in an error or were aborted, and errors of tools."""
    tool: str | None = None
    """Only answers that called this tool, and its results."""

    without_internal: bool = False
    """Only the visible conversation (see `engine.sessions.internal_entries`)."""

    @property
    def is_narrow(self) -> bool:
        """Whether most of a transcript may be skipped, so that the search for matches has to be bounded."""
        narrowed = self.roles is not None or self.since is not None or self.errors or self.tool is not None
        return narrowed or self.without_internal

    @property
    def hides_results(self) -> bool:
        return not (self.include_tools or self.errors or self.roles is not None or self.tool is not None)
