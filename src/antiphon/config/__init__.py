"""The configuration: JSON5 in, typed and frozen objects out, with a published JSON Schema.

Errors name the key, the allowed values and the given value. Secrets stay references until `reveal()` is called.
This package decides nothing about sessions, and importing it has no side effects.
"""

from antiphon.config.agents import (
    AgentConfig,
    ExecSettings,
    ModelChoice,
    RuntimeConfig,
    SandboxConfig,
    SubagentsConfig,
    ToolRules,
)
from antiphon.config.base import ConfiguredThinkingLevel
from antiphon.config.load import LoadedConfig, list_secrets, load, load_document, parse
from antiphon.config.schema import Config, FoundModel, build_json_schema
from antiphon.config.secrets import Secret
from antiphon.config.sections import (
    NATIVE_PROVIDER_APIS,
    ModelConfig,
    ProviderConfig,
    ResetConfig,
    SendMatch,
    SendPolicyConfig,
    SendRuleConfig,
)
from antiphon.config.tools import WebFetchConfig, WebSearchConfig
from antiphon.keys import REHEARSAL_MODEL_REF, REHEARSAL_PROVIDER
from antiphon.paths import Paths, locate_paths

__all__ = [
    "NATIVE_PROVIDER_APIS",
    "REHEARSAL_MODEL_REF",
    "REHEARSAL_PROVIDER",
    "AgentConfig",
    "Config",
    "ConfiguredThinkingLevel",
    "ExecSettings",
    "FoundModel",
    "LoadedConfig",
    "ModelChoice",
    "ModelConfig",
    "Paths",
    "ProviderConfig",
    "ResetConfig",
    "RuntimeConfig",
    "SandboxConfig",
    "Secret",
    "SendMatch",
    "SendPolicyConfig",
    "SendRuleConfig",
    "SubagentsConfig",
    "ToolRules",
    "WebFetchConfig",
    "WebSearchConfig",
    "build_json_schema",
    "list_secrets",
    "load",
    "load_document",
    "locate_paths",
    "parse",
]
