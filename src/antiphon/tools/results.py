"""What a tool says: the same data once as text for the model and once as it is for programs.

The text is compact JSON. A model reads the names that the contract gives, and can pass on a key or a cursor just
as it stands; a program behind `/tools/invoke` that only gets the text can parse it. Prose would serve neither.
"""

from __future__ import annotations

from typing import Any

import msgspec

from antiphon.engine.toolbox import ToolOutput
from antiphon.errors import AntiphonError, Forbidden, SendBlocked

SHOWN_ERROR_DATA = frozenset({"path", "candidates", "reason", "field", "max", "retry_after_ms"})
"""Of an error's data, what helps to do better next time."""


def render_view(view: Any) -> ToolOutput:
    """A view, or plain data with a view in it."""
    plain = msgspec.to_builtins(view)
    return ToolOutput(text=msgspec.json.encode(plain).decode(), details=plain)


def render_refusal(error: AntiphonError) -> ToolOutput:
    """`forbidden` is for what the caller may know of and may not do; all that is missing or wrong is an `error`.

    What the policy keeps from being sent is an error too: it is about the target, not about who asks.
    """
    forbidden = isinstance(error, Forbidden) and not isinstance(error, SendBlocked)
    said = {"status": "forbidden" if forbidden else "error", "error": str(error), "code": error.code}
    said |= {name: value for name, value in error.data.items() if name in SHOWN_ERROR_DATA}
    return ToolOutput(text=msgspec.json.encode(said).decode(), details=said, is_error=True)
