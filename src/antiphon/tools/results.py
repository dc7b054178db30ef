"""Results of tools: the same data as text for the model and as a structure for programs.

The text is compact JSON. A model reads the documented names and can pass on a key or a cursor unchanged; a program
behind `/tools/invoke` that only gets the text can parse it. Prose would serve neither.
"""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon.engine.toolbox import ToolOutput
from antiphon.errors import AntiphonError, Forbidden, SendBlocked

SHOWN_ERROR_DATA = frozenset({"path", "candidates", "reason", "field", "max", "retry_after_ms"})
"""The fields of an error's data that help the model to correct its call."""


def render_view(view: Any) -> ToolOutput:
    """Render a view, or plain data that contains views."""
    plain = msgspec.to_builtins(view)
    return ToolOutput(text=msgspec.json.encode(plain).decode(), details=plain)


def render_refusal(error: AntiphonError) -> ToolOutput:
    """Render an error: `forbidden` for a visible target that the caller may not use, otherwise `error`.

    A message blocked by the send policy is an `error` too: the policy is about the target, not about the caller.
    """
    forbidden = isinstance(error, Forbidden) and not isinstance(error, SendBlocked)
    details = {"status": "forbidden" if forbidden else "error", "error": str(error), "code": error.code}
    details |= {name: value for name, value in error.data.items() if name in SHOWN_ERROR_DATA}
    return ToolOutput(text=msgspec.json.encode(details).decode(), details=details, is_error=True)
