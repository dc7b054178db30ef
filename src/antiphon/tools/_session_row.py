"""A session as the tools show it: exactly the documented names, absent if unknown."""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon import keys
from antiphon.access import Caller
from antiphon.operations.types import SessionView

# An allow list, not a deny list: the view also serves the gateway and will grow for it.
SHOWN_FIELDS = (
    "key", "kind", "channel", "displayName", "label", "updatedAt", "sessionId", "model", "contextTokens",
    "totalTokens", "thinkingLevel", "verboseLevel", "systemSent", "abortedLastRun", "sendPolicy", "lastChannel",
    "lastTo", "lastAccountId", "deliveryContext", "transcriptPath", "state", "lastActivityAt", "agentId",
    "parentKey", "childCount", "sandboxed",
)  # fmt: skip


def build_tool_session_row(caller: Caller, view: SessionView) -> dict[str, Any]:
    known = msgspec.to_builtins(view)
    shown = {name: known[name] for name in SHOWN_FIELDS if name in known}
    if view.parent_key is not None:
        shown["parentKey"] = keys.display_stored_key(view.parent_key, viewer_agent_id=caller.agent_id)
    shown["provider"] = view.channel  # the older name of the field
    return shown
