"""The sandbox of commands: `agents.defaults.sandbox`, and the same section of an agent."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from antiphon.config.base import MAX_NUMBER, Amount, Section, Strings, Text, build_expected_error
from antiphon.host_rules import parse_host_rule
from antiphon.paths import BIND_PATTERN

SandboxMode = Literal["off", "non-main", "all"]
SandboxBackendName = Literal["bwrap", "docker", "landlock"]
WorkspaceAccess = Literal["none", "ro", "rw"]
SandboxScope = Literal["session", "agent", "shared"]

DEFAULT_SANDBOX_USER_ID = 59_321  # in the range of ordinary users, where no account is created by default

PruneTime = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
MAX_BYTES = 1 << 50
_FOREIGN_BACKENDS = ("openshell", "ssh")
_SIZE_PATTERN = re.compile(r"(\d{1,15})\s*([bkmgt]?)b?", re.IGNORECASE)
_USER_PATTERN = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def _refuse_foreign_backend(value: object) -> object:
    if value in _FOREIGN_BACKENDS:
        raise build_expected_error("'bwrap', 'docker' or 'landlock', the backends of this release")
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


def _check_bind(value: str) -> str:
    if not BIND_PATTERN.fullmatch(value):
        raise build_expected_error(
            "'/directory/of/the/host:/name/inside', with ':ro' or ':rw' at the end for its mode"
        )
    return value


Binds = Annotated[tuple[Annotated[str, AfterValidator(_check_bind)], ...], Strict(False)]


def _parse_size(value: object) -> object:
    """Return a number of bytes, which may be written like '512m' or '2g'."""
    match = _SIZE_PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return int(match[1]) << 10 * " kmgt".index(match[2].lower().replace("b", "") or " ")


def _check_container_user(value: str) -> str:
    match = _USER_PATTERN.fullmatch(value)
    if match is None or int(match[1]) == 0:
        raise build_expected_error("the number of a user other than root, such as '1000' or '1000:1000'")
    return value


def _check_container_network(value: str) -> str:
    if value == "host" or value.startswith("container:"):
        raise build_expected_error(
            "'none', 'bridge' or the name of a network that the containers have to themselves"
        )
    return value


def _refuse_unconfined(value: str) -> str:
    if value.strip().lower() == "unconfined":
        raise build_expected_error("a profile, since without one commands are not isolated")
    return value


Size = Annotated[int, BeforeValidator(_parse_size), Field(ge=0, le=MAX_BYTES)]
Profile = Annotated[Text, AfterValidator(_refuse_unconfined)]


class Ulimit(Section):
    """A limit of every process in a container."""

    soft: Annotated[int, Field(ge=-1)] | None = None
    hard: Annotated[int, Field(ge=-1)] | None = None


def _parse_ulimit(value: object) -> object:
    """Return a limit that may be written as a number or as 'soft:hard'."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}(:-?\d{1,18})?", value):
        soft, _, hard = value.partition(":")
        return {"soft": int(soft), "hard": int(hard or soft)}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"soft": value, "hard": value}
    return value


def _join_commands(value: object) -> object:
    return "\n".join(map(str, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType]


class SandboxDocker(Section):
    """The containers of the backend `docker`, one for all commands that see the same directories."""

    image: Text = Field(default="debian:bookworm-slim", description="Image, which must be on the machine.")
    container_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,40}$")] = "antiphon-sbx-"
    workdir: Literal["/workspace"] = "/workspace"
    read_only_root: bool = Field(
        default=True, description="Whether the files of the image cannot be changed."
    )
    tmpfs: Strings = Field(default=("/var/tmp", "/run"), description="Directories in memory, besides `/tmp`.")  # noqa: S108
    network: Annotated[Text, AfterValidator(_check_container_network)] = Field(
        default="none", description="Network of the containers: `none`, `bridge`, or the name of one."
    )
    user: Annotated[str, AfterValidator(_check_container_user)] | None = Field(
        default=None,
        description="User of commands as 'uid' or 'uid:gid'; by default the gateway's, never root.",
    )
    cap_drop: Strings = Field(default=("ALL",), description="Capabilities that processes do not have.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables of commands.")
    setup_command: Annotated[Text, BeforeValidator(_join_commands)] | None = Field(
        default=None, description="Script that runs once in a new container."
    )
    pids_limit: Amount = Field(
        default=512, description="Maximum processes of a container; 0 is the engine's limit."
    )
    memory: Size = Field(default=4 << 30, description="Memory of a container; 0 is no limit.")
    memory_swap: Size | None = Field(default=None, description="Memory and swap space together.")
    cpus: Annotated[float, Field(gt=0, le=MAX_NUMBER)] | None = Field(
        default=None, description="Number of processors; may be a fraction."
    )
    ulimits: dict[str, Annotated[Ulimit, BeforeValidator(_parse_ulimit)]] = Field(
        default_factory=dict,
        description="Limits of each process, by name: a number, 'soft:hard' or both by name.",
    )
    seccomp_profile: Profile | None = Field(
        default=None, description="File that replaces the engine's filter."
    )
    apparmor_profile: Profile | None = None
    dns: Strings = ()
    extra_hosts: Strings = Field(default=(), description="Further names of hosts as 'name:address'.")
    binds: Binds = Field(default=(), description="Directories as 'source:target[:ro|rw]', `rw` by default.")


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
    backend: Annotated[SandboxBackendName | None, BeforeValidator(_refuse_foreign_backend)] = Field(
        default=None,
        description="What isolates commands. By default 'docker' if that is set and an engine answers, else 'bwrap'.",
    )
    fallback: Literal["landlock"] | None = Field(
        default=None, description="A weaker backend that may be used where the chosen one does not work."
    )
    user: Annotated[int, Field(ge=1, lt=2**32 - 1)] = Field(
        default=DEFAULT_SANDBOX_USER_ID, description="User id of commands, if the gateway runs as root."
    )
    binds: Binds = Field(default=(), description="Directories as 'source:target[:ro|rw]'.")
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
    docker: SandboxDocker = Field(
        default_factory=SandboxDocker.model_construct, description="The containers of the backend 'docker'."
    )


class EntrySandbox(SandboxConfig):
    """One agent's overrides of `agents.defaults.sandbox`. Binds are added; other settings replace theirs."""


def merge_sandbox(base: SandboxConfig, own: SandboxConfig) -> SandboxConfig:
    """Return the settings of an agent: what its own section sets, over the defaults."""
    merged = _override(base, own)
    docker = base.docker
    if "docker" in own.model_fields_set:
        docker = _override(base.docker, own.docker)
        united = {
            "env": base.docker.env | own.docker.env,
            "ulimits": base.docker.ulimits | own.docker.ulimits,
        }
        docker = docker.model_copy(update=united)
    binds = _unite(base.binds, own.binds)
    if merged.backend in (None, "docker"):
        binds = _unite(binds, _write_modes(base.docker.binds), _write_modes(own.docker.binds))
    return merged.model_copy(update={"binds": binds, "docker": docker})


_SectionT = TypeVar("_SectionT", bound=Section)


def _override(base: _SectionT, own: _SectionT) -> _SectionT:
    changes: dict[str, Any] = {name: getattr(own, name) for name in own.model_fields_set}
    return base.model_copy(update=changes)


def _unite(*lists: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for items in lists for item in items))


def _write_modes(binds: tuple[str, ...]) -> tuple[str, ...]:
    """Return binds with the mode that Docker takes those without one for."""
    return tuple(bind if bind.endswith((":ro", ":rw")) else f"{bind}:rw" for bind in binds)
