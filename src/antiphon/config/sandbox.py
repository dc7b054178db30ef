"""The sandbox of commands: `agents.defaults.sandbox`, and the same section of an agent."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from antiphon.config.base import MAX_NUMBER, Section, Strings, Text, build_expected_error
from antiphon.host_rules import parse_host_rule

SandboxMode = Literal["off", "non-main", "all"]
SandboxBackendName = Literal["bwrap", "landlock"]
WorkspaceAccess = Literal["none", "ro", "rw"]
SandboxScope = Literal["session", "agent", "shared"]

DEFAULT_SANDBOX_USER_ID = 59_321  # in the range of ordinary users, where no account is created by default

PruneTime = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
_FOREIGN_BACKENDS = ("docker", "openshell", "ssh")


def _refuse_foreign_backend(value: object) -> object:
    if value in _FOREIGN_BACKENDS:
        raise build_expected_error("'bwrap' or 'landlock', the backends of this release")
    return value


def _refuse_foreign_network(value: object) -> object:
    if isinstance(value, str) and value not in ("none", "proxy"):
        raise build_expected_error(
            "'none' or 'proxy', with the hosts that commands may reach in 'allowHosts'"
        )
    return value


def _check_host(value: str) -> str:
    try:
        parse_host_rule(value)
    except ValueError as error:
        raise build_expected_error(
            f"a host such as 'example.org', '*.example.org', 'example.org:8443' or '10.0.0.5:8080'; {error}"
        ) from None
    return value


HostPatterns = Annotated[tuple[Annotated[str, AfterValidator(_check_host)], ...], Strict(False)]


class SandboxPrune(Section):
    """When directories of sandboxed sessions are removed. 0 means never; the shorter time counts."""

    idle_hours: PruneTime = Field(default=24, description="Hours without use.")
    max_age_days: PruneTime = Field(default=7, description="Days without use.")


class SandboxConfig(Section):
    """Which sessions are sandboxed, what they see, and what isolates commands."""

    mode: SandboxMode = "off"
    session_tools_visibility: Literal["spawned", "all"] = "spawned"
    scope: SandboxScope = Field(default="agent", description="Who shares a directory of their own.")
    workspace_access: WorkspaceAccess = Field(
        default="none",
        description="What sandboxed sessions see of the agent's workspace: 'ro' at /agent, 'rw' at /workspace.",
    )
    workspace_root: Text | None = Field(
        default=None,
        description="Where sandboxed sessions have their directories, instead of the state directory.",
    )
    backend: Annotated[SandboxBackendName, BeforeValidator(_refuse_foreign_backend)] = "bwrap"
    fallback: Literal["landlock"] | None = Field(
        default=None, description="A weaker backend that may be used where bwrap does not work."
    )
    user: Annotated[int, Field(ge=1, lt=2**32 - 1)] = Field(
        default=DEFAULT_SANDBOX_USER_ID, description="User id of commands, if the gateway runs as root."
    )
    binds: Strings = Field(default=(), description="Directories as 'source:target[:ro|rw]'.")
    prune: SandboxPrune = Field(
        default_factory=SandboxPrune.model_construct, description="When their directories are removed."
    )
    network: Annotated[Literal["none", "proxy"], BeforeValidator(_refuse_foreign_network)] = Field(
        default="none", description="Whether commands reach the hosts of 'allowHosts' through a proxy."
    )
    allow_hosts: HostPatterns = Field(
        default=(),
        description="Hosts that commands may reach: 'example.org' or '*.example.org', with a port or for 80 and 443.",
    )
    docker: dict[str, Any] = Field(
        default_factory=dict, description="Has no effect: containers are not supported."
    )


class EntrySandbox(SandboxConfig):
    """One agent's overrides of `agents.defaults.sandbox`. Binds are added; other settings replace theirs."""


def merge_sandbox(base: SandboxConfig, own: SandboxConfig) -> SandboxConfig:
    """Return the settings of an agent: what its own section sets, over the defaults."""
    changes: dict[str, Any] = {name: getattr(own, name) for name in own.model_fields_set}
    changes["binds"] = tuple(dict.fromkeys((*base.binds, *own.binds)))
    return base.model_copy(update=changes)
