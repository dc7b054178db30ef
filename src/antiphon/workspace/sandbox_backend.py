"""What every sandbox backend has in common: its interface, the attestation, and the rules for binds."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import msgspec

from antiphon.config.sandbox import SandboxBackendName
from antiphon.errors import InvalidInput
from antiphon.workspace.locations import (
    AGENT_WORKSPACE_MOUNT,
    OWN_MOUNTS,
    SESSION_DIRECTORY_NAMES,
    TEMPORARY_MOUNT,
    WORKSPACE_MOUNT,
    Mount,
)

ARGUMENTS_PLACEHOLDER, FILTER_PLACEHOLDER, VARIABLES_PLACEHOLDER = "{arguments}", "{filter}", "{variables}"
PROGRAM_DIRECTORIES = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin")
READABLE_SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/localtime",
    "/etc/magic",
)
_SETTING_BY_MOUNT = {
    WORKSPACE_MOUNT: "workspace",
    AGENT_WORKSPACE_MOUNT: "workspace",
    TEMPORARY_MOUNT: "workspaceRoot",
}
MOUNTS_VARIABLE, CANARY_VARIABLE = "MOUNTS", "CANARY"

_PRIVATE_DIRECTORIES = (
    *("/etc", "/proc", "/sys", "/dev", "/boot", "/run", "/var/run"),
    *("/var/lib/docker", "/var/lib/containerd", "/var/lib/containers"),
)
_SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/var/lib")
COMMAND_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE_MOUNT,
    "TMPDIR": TEMPORARY_MOUNT,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a command. Without control groups, memory and CPU time are counted per process."""

    processes: int = 512
    memory_bytes: int = 4 * 1024**3
    file_bytes: int = 2 * 1024**3
    open_files: int = 1024


class SandboxedCommand(msgspec.Struct, frozen=True):
    """A command line whose placeholders stand for descriptors of the given contents."""

    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    allowed_hosts: Sequence[str] | None = None
    """Hosts that its proxy connects to; None if it has none."""
    has_tools_listener: bool = False
    """Whether it opens a socket for the tools of its session (`sandbox_network`)."""
    kill_after_seconds: float | None = None
    """How long it may take to end what it started elsewhere after SIGTERM; None for the keeper's own time."""


class SandboxFault(NamedTuple):
    """Why a sandbox does not work, and what to do about it. Both complete a sentence."""

    reason: str
    cure: str


class BackendFailed(Exception):
    """A backend does not work. The text of the fault is shown in `SandboxUnavailable` and by `antiphon sandbox`."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"{reason}; {cure}")
        self.fault = SandboxFault(reason, cure)


class SandboxBackend(Protocol):
    """Runs commands isolated from the host."""

    name: SandboxBackendName
    program: Path | None
    """The file that starts it, if it is not part of Antiphon."""

    owner: int | None
    """The user id of commands, which is given what it may write; None if it is the gateway's own."""

    async def prepare(self, mounts: Sequence[Mount]) -> str:
        """Provide what commands with these mounts share. Returns a text that changes when it is made again.

        Raises:
            BackendFailed: it could not be provided.
        """
        ...

    async def release(self, mounts: Sequence[Mount]) -> None:
        """Remove what commands with these mounts share."""
        ...

    def wrap(
        self, command: Sequence[str], mounts: Sequence[Mount], *, cwd: str, env: Mapping[str, str]
    ) -> SandboxedCommand:
        """Return the command line that runs `command` in a sandbox. `cwd` is a path inside."""
        ...

    def find_fault(self, attestation: str, mounts: Mapping[str, str]) -> str | None:
        """Return what the output of the attestation shows to be wrong, or None if the sandbox is isolated."""
        ...

    def explain_failure(self, output: str) -> SandboxFault:
        """Return why a sandbox could not be started."""
        ...


def choose_owner(user: int | None, *, is_root: bool) -> int | None:
    """Return the user that commands run as, or None for that of the gateway.

    Raises:
        BackendFailed: the gateway runs as root, and there is no other user.
    """
    if not is_root:
        return None
    if not user:
        raise BackendFailed(
            "a gateway that runs as root needs an unprivileged user for its commands",
            "set agents.defaults.sandbox.user to a user id other than 0",
        )
    return user


def set_variables(command: Sequence[str], env: Mapping[str, str]) -> Sequence[str]:
    """Return a command that starts with these variables.

    What runs before it, such as the change of the user, must not see them: LD_PRELOAD and PATH decide what a program
    does.
    """
    if not env:
        return command
    return ["/usr/bin/env", "--", *(f"{name}={value}" for name, value in env.items()), *command]


_START_WITH_VARIABLES = 'variables="/proc/self/fd/$1"; shift; . "$variables"'


def read_variables(command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], bytes]:
    """Return a command that reads these variables from the descriptor of its placeholder, and what it reads there.

    They may be secrets, and the arguments of a process can be seen by all users of the host.
    """
    words = ["exec", "/usr/bin/env", "--", *(f"{name}={value}" for name, value in env.items())]
    content = os.fsencode(f'{shlex.join(words)} "$@"\n')
    return ["/bin/sh", "-c", _START_WITH_VARIABLES, "sh", VARIABLES_PLACEHOLDER, *command], content


def find_program(name: str, forbidden: Iterable[Path]) -> Path | None:
    """Return a program in a system directory, or one on PATH that no agent could have written."""
    for directory in (*PROGRAM_DIRECTORIES, *os.environ.get("PATH", "").split(os.pathsep)):
        if not directory.startswith("/"):
            continue
        found = shutil.which(name, path=directory)
        if found is None:
            continue
        real = Path(found).resolve()
        if any(real.is_relative_to(place.resolve()) for place in (*forbidden, Path.cwd())):
            continue
        if real.stat().st_mode & stat.S_IWOTH == 0:
            return Path(found)
    return None


def check_mounts(mounts: Iterable[Mount], state_dir: Path) -> None:
    """Refuse directories that would lead out of a sandbox. What Antiphon keeps for sessions in its own is allowed.

    Raises:
        InvalidInput: one is a system directory, holds an engine's socket, or shows the state directory.
    """
    state = state_dir.resolve()
    for mount in mounts:
        source = mount.path.resolve()
        private = [Path(path) for path in _PRIVATE_DIRECTORIES]
        if (
            source in [Path("/"), *private]
            or any(source.is_relative_to(path) for path in private)
            or any(source.is_relative_to(path) for path in map(Path, _SYSTEM_DIRECTORIES) if mount.writable)
            or any(path.is_relative_to(source) for path in private)
            or (_shows_state(source, state))
        ):
            setting = _SETTING_BY_MOUNT.get(mount.target, "binds")
            raise InvalidInput(
                f"The directory {str(mount.path)!r} of {setting!r} may not be shown to a sandbox.",
                "Choose one that holds neither system files nor Antiphon's state.",
                field=setting,
            )


def _shows_state(source: Path, state: Path) -> bool:
    if not source.is_relative_to(state):
        return state.is_relative_to(source)
    return source.relative_to(state).parts[:1] not in [(name,) for name in SESSION_DIRECTORY_NAMES]


def check_bind_targets(binds: Iterable[Mount]) -> None:
    """Refuse names inside that belong to the system or to Antiphon.

    Raises:
        InvalidInput: a bind has such a name.
    """
    for bind in binds:
        target = PurePosixPath(bind.target)
        reserved = bind.target in ("/", *OWN_MOUNTS) or any(
            target.is_relative_to(path)
            for path in ("/usr", "/etc", "/proc", "/dev", "/sys", "/bin", "/sbin", "/lib")
        )
        if not target.is_absolute() or ".." in target.parts or reserved:
            raise InvalidInput(
                f"{bind.target!r} is not a place for a bind.",
                "Use another absolute path for it inside.",
                field="binds",
            )


_ALL_USER_IDS = 2**32 - 1  # mapped where there is no user namespace

ATTESTATION_SCRIPT = """
while read -r name value rest; do case $name in Uid:|CapEff:|NoNewPrivs:|Seccomp:) echo "$name $value";; esac
done < /proc/self/status
read -r inside outside count < /proc/self/uid_map; echo "map: $inside $outside $count"
read -r name < /proc/1/comm; echo "init: $name"
routes=0; while read -r line; do routes=$((routes + 1)); done < /proc/net/route; echo "routes: $routes"
if { true < "$CANARY"; } 2>/dev/null; then echo "canary: readable"; else echo "canary: hidden"; fi
for mount in $MOUNTS; do echo "mount $mount: $(stat -c %d:%i "$mount" 2>&1)"; done
if { true < /etc/passwd; } 2>/dev/null; then echo "accounts: readable"; else echo "accounts: hidden"; fi
if [ -w /proc/sys/kernel/core_pattern ]; then echo "sysctl: writable"; else echo "sysctl: read-only"; fi
"""
"""Reports what a sandbox can see, when it is run inside.

`CANARY` is a file in the state directory, and `MOUNTS` the names of the mounts.
"""


HOST_FILES_FAULT = "it can read files of the host"


def read_attestation(output: str) -> dict[str, str]:
    """Return the facts that the attestation reports."""
    return dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)


def shows_host_files(attestation: str) -> bool:
    """Whether a sandbox without files of its own shows a file of the host that every user may read.

    That the state directory is hidden proves less: its permissions keep other users out of it.
    """
    return read_attestation(attestation).get("accounts") != "hidden"


def find_attestation_fault(
    output: str, mounts: Mapping[str, str], *, gateway_is_root: bool, init_names: Collection[str]
) -> str | None:
    """Return what an attestation shows to be wrong with a sandbox, or None if it is isolated.

    `mounts` are the device and inode numbers of the directories that it must see, by name.
    """
    facts = read_attestation(output)
    try:
        _, _, mapped_ids = facts["map"].split()
        # In a user namespace, processes belong on the host to the user that created it.
        in_user_namespace = int(mapped_ids) < _ALL_USER_IDS
        is_host_root = gateway_is_root if in_user_namespace else facts["Uid"] == "0"
        checks = {
            "its processes belong to root on the host": is_host_root,
            "its processes have capabilities": int(facts["CapEff"], 16) != 0,
            "its processes can gain privileges": facts["NoNewPrivs"] != "1",
            "it has no system call filter": facts["Seccomp"] != "2",
            "it shares the host's processes": facts["init"] not in init_names,
            "it has a network route": int(facts["routes"]) > 1,
            "it can read the state directory": facts["canary"] != "hidden",
            "it can change kernel settings": facts["sysctl"] != "read-only",
            **{
                f"its {name} is another directory than the gateway's": facts[f"mount {name}"] != number
                for name, number in mounts.items()
            },
        }
    except (KeyError, ValueError):
        return "it could not be examined"
    return next((fault for fault, is_so in checks.items() if is_so), None)
