"""The configuration: JSON5 in, typed and frozen objects out, with a published JSON Schema.

Errors name the key, what is allowed and what was given; secrets stay references until somebody reveals them.
This package decides nothing about sessions, and importing it starts nothing.
"""

from antiphon.config.agents import AgentConfig, ModelChoice, Runtime, Sandbox, Subagents, ToolRules
from antiphon.config.base import Thinking, Visibility
from antiphon.config.load import Loaded, load, parse, secrets_in
from antiphon.config.model import REHEARSAL, REHEARSAL_REF, Config, FoundModel, json_schema
from antiphon.config.secrets import Secret
from antiphon.config.sections import (
    OWN_APIS,
    ModelConfig,
    ProviderConfig,
    Reset,
    SendMatch,
    SendPolicy,
    SendRule,
)
from antiphon.paths import Paths, locate

__all__ = [
    "OWN_APIS",
    "REHEARSAL",
    "REHEARSAL_REF",
    "AgentConfig",
    "Config",
    "FoundModel",
    "Loaded",
    "ModelChoice",
    "ModelConfig",
    "Paths",
    "ProviderConfig",
    "Reset",
    "Runtime",
    "Sandbox",
    "Secret",
    "SendMatch",
    "SendPolicy",
    "SendRule",
    "Subagents",
    "Thinking",
    "ToolRules",
    "Visibility",
    "json_schema",
    "load",
    "locate",
    "parse",
    "secrets_in",
]
