"""Antiphon: a gateway that hosts agents' chat sessions and lets them reach each other.

For programs that embed it, or that give its agents tools: `tool`, `ToolRequest`, `ToolOutput`, `Caller`, `Config` and
`open_app_operations`. They are imported on first use, since a command that needs none of them should start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.access import Caller
    from antiphon.app import open_app_operations
    from antiphon.config import Config
    from antiphon.engine.toolbox import ToolOutput, ToolRequest
    from antiphon.tools.python_tools import tool

__all__ = ["Caller", "Config", "ToolOutput", "ToolRequest", "open_app_operations", "tool"]
__version__ = "0.1.0"
PROTOCOL_VERSIONS = (3, 4)  # of the gateway's WebSocket; the gateway and the client support the same ones

_MODULES_BY_NAME = {
    "Caller": "antiphon.access",
    "Config": "antiphon.config",
    "ToolOutput": "antiphon.engine.toolbox",
    "ToolRequest": "antiphon.engine.toolbox",
    "open_app_operations": "antiphon.app",
    "tool": "antiphon.tools.python_tools",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES_BY_NAME[name]), name)
