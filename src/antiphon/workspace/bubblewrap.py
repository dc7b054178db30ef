"""The sandbox `bwrap`: a command in namespaces of its own, with its workspace and nothing else of the host.

A gateway that runs as root never gives its commands host uid 0: root sets up the mounts, and the command line then
changes to an unprivileged user without any capability. Arguments and environment of `bwrap` itself are visible inside,
so paths of the host go through a file descriptor and the environment is made.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from antiphon.errors import InvalidInput, Unavailable
from antiphon.workspace import seccomp

WORKSPACE_MOUNT, AGENT_WORKSPACE_MOUNT = "/workspace", "/agent"
SANDBOX_UID = 1000  # inside a user namespace; without one, the configured user keeps its number
ARGUMENTS_PLACEHOLDER, FILTER_PLACEHOLDER = "{arguments}", "{filter}"
PROGRAM_DIRECTORIES = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin")

_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_READABLE_SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/localtime",
    "/etc/magic",
)
_REFUSED_BIND_SOURCES = (
    *("/", "/etc", "/proc", "/sys", "/dev", "/boot", "/root", "/run", "/var/run"),
    *("/var/run/docker.sock", "/run/docker.sock", "/run/containerd", "/run/podman"),
)
_RESERVED_MOUNTS = ("/", "/usr", "/etc", "/proc", "/dev", "/tmp", WORKSPACE_MOUNT, AGENT_WORKSPACE_MOUNT)  # noqa: S108
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE_MOUNT,
    "TMPDIR": "/tmp",  # noqa: S108 - of the sandbox
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}


class Bind(msgspec.Struct, frozen=True):
    """A directory of the host that the operator shows to a sandbox."""

    source: Path
    target: str
    writable: bool = False


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a command. Without control groups, memory and CPU time are counted per process."""

    processes: int = 512
    memory_bytes: int = 4 * 1024**3
    file_bytes: int = 2 * 1024**3
    open_files: int = 1024


class SandboxView(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox sees of the host."""

    workspace: Path
    """Mounted at /workspace."""
    workspace_writable: bool = True
    agent_workspace: Path | None = None
    """Mounted read-only at /agent."""
    temporary: Path
    """Mounted at /tmp."""
    binds: Sequence[Bind] = ()


class SandboxedCommand(msgspec.Struct, frozen=True):
    """A command line whose placeholders stand for descriptors of the given contents."""

    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, bytes]


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


class Bubblewrap:
    def __init__(
        self,
        program: Path,
        *,
        user: int | None,
        limits: ResourceLimits | None = None,
        is_root: bool = os.geteuid() == 0,
    ) -> None:
        """Create a backend. `user` is the unprivileged user id for commands of a gateway that runs as root."""
        if is_root and not user:
            raise Unavailable(
                "A gateway that runs as root needs an unprivileged user for its commands.",
                "Set agents.defaults.sandbox.user to a user id other than 0.",
            )
        self._program = program
        self._user = user if is_root else None
        self._limits = limits or ResourceLimits()
        self._filter = seccomp.build_filter()

    def wrap(
        self, command: Sequence[str], view: SandboxView, *, cwd: str = WORKSPACE_MOUNT, env: Mapping[str, str]
    ) -> SandboxedCommand:
        """Return the command line that runs `command` inside a new sandbox."""
        arguments = [*self._build_isolation(), *_build_system(), *_build_mounts(view), "--chdir", cwd]
        environment = {**_ENVIRONMENT, **env}
        for name, value in environment.items():
            arguments += ["--setenv", name, value]
        files = {ARGUMENTS_PLACEHOLDER: b"".join(os.fsencode(text) + b"\0" for text in arguments)}
        argv = [*self._build_limits(), str(self._program), "--args", ARGUMENTS_PLACEHOLDER]
        if self._filter is not None:
            argv += ["--seccomp", FILTER_PLACEHOLDER]
            files[FILTER_PLACEHOLDER] = self._filter
        return SandboxedCommand([*argv, "--", *self._build_user_change(), *command], {}, files)

    def _build_isolation(self) -> list[str]:
        apart = ["pid", "net", "ipc", "uts"]
        options = [f"--unshare-{name}" for name in apart] + ["--unshare-cgroup-try"]
        options += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if self._user is None:
            number = str(SANDBOX_UID)
            return [*options, "--unshare-user", "--disable-userns", "--uid", number, "--gid", number]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):  # `setpriv` uses them up
            options += ["--cap-add", capability]
        return options

    def _build_user_change(self) -> list[str]:
        if self._user is None:
            return []
        number = str(self._user)
        drop = ["--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
        return ["/usr/bin/setpriv", "--reuid", number, "--regid", number, *drop, "--"]

    def _build_limits(self) -> list[str]:
        limits = self._limits
        return [
            "/usr/bin/prlimit",
            f"--nproc={limits.processes}",
            f"--data={limits.memory_bytes}",
            f"--fsize={limits.file_bytes}",
            f"--nofile={limits.open_files}",
            "--core=0",
            "--",
        ]


def _build_system() -> list[str]:
    """Mount the programs and libraries of the host read-only, and fresh `/proc` and `/dev`."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    options += ["--perms", "0755", "--dir", "/etc"]
    for path in _READABLE_SYSTEM_FILES:
        options += ["--ro-bind-try", path, path]
    return [*options, "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]


def _build_mounts(view: SandboxView) -> list[str]:
    options = ["--bind", str(view.temporary), "/tmp"]  # noqa: S108 - of the sandbox
    options += ["--bind" if view.workspace_writable else "--ro-bind", str(view.workspace), WORKSPACE_MOUNT]
    if view.agent_workspace is not None:
        options += ["--ro-bind", str(view.agent_workspace), AGENT_WORKSPACE_MOUNT]
    for bind in view.binds:
        options += ["--bind" if bind.writable else "--ro-bind", str(bind.source), bind.target]
    return options


def check_binds(binds: Iterable[Bind], state_dir: Path) -> None:
    """Refuse directories that would lead out of the sandbox.

    Raises:
        InvalidInput: a bind is a system directory, holds an engine's socket, or is in or above the state directory.
    """
    private = [Path(path) for path in _REFUSED_BIND_SOURCES]
    for bind in binds:
        source = bind.source.resolve()
        shows_state = state_dir.resolve().is_relative_to(source) or source.is_relative_to(state_dir.resolve())
        inside = ("/etc", "/proc", "/sys", "/dev", "/boot", "/run")
        if source in private or any(source.is_relative_to(path) for path in inside) or shows_state:
            raise InvalidInput(
                f"The directory {str(bind.source)!r} may not be shown to a sandbox.",
                "Bind a directory that holds neither system files nor Antiphon's state.",
                field="binds",
            )
        if not bind.target.startswith("/") or bind.target in _RESERVED_MOUNTS:
            raise InvalidInput(
                f"{bind.target!r} is not a place for a bind.", "Use another absolute path.", field="binds"
            )


_ALL_USER_IDS = 2**32 - 1  # mapped where there is no user namespace

ATTESTATION_SCRIPT = """
while read -r name value rest; do case $name in Uid:|CapEff:|NoNewPrivs:|Seccomp:) echo "$name $value";; esac
done < /proc/self/status
read -r inside outside count < /proc/self/uid_map; echo "map: $inside $outside $count"
read -r name < /proc/1/comm; echo "init: $name"
routes=0; while read -r line; do routes=$((routes + 1)); done < /proc/net/route; echo "routes: $routes"
if [ -r "$CANARY" ]; then echo "canary: readable"; else echo "canary: hidden"; fi
if [ -w /proc/sys/kernel/core_pattern ]; then echo "sysctl: writable"; else echo "sysctl: read-only"; fi
"""
"""Run inside a sandbox, tells what it can see. `CANARY` is a file in the state directory."""


def find_attestation_fault(output: str, *, gateway_is_root: bool) -> str | None:
    """Return what an attestation shows to be wrong with a sandbox, or None if it is isolated."""
    facts = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
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
            "it shares the host's processes": facts["init"] != "bwrap",
            "it has a network route": int(facts["routes"]) > 1,
            "it can read the state directory": facts["canary"] != "hidden",
            "it can change kernel settings": facts["sysctl"] != "read-only",
        }
    except (KeyError, ValueError):
        return "it could not be examined"
    return next((fault for fault, is_so in checks.items() if is_so), None)


_PROBE_FAULTS = (
    ("setting up uid map", "AppArmor forbids user namespaces", "add an AppArmor profile that allows bwrap"),
    ("RTM_NEWADDR", "AppArmor forbids network namespaces", "add an AppArmor profile that allows bwrap"),
    ("No permissions to create", "user namespaces are off", "enable kernel.unprivileged_userns_clone"),
    ("Creating new namespace failed", "the container forbids namespaces", "run it with seccomp=unconfined"),
    ("pivot_root", "the container forbids mounts", "run it with seccomp=unconfined"),
)


def explain_failure(output: str) -> tuple[str, str]:
    """Return why `bwrap` could not start, and what to do about it."""
    for text, reason, cure in _PROBE_FAULTS:
        if text in output:
            return reason, cure
    return f"bwrap failed: {output.strip()[-200:] or 'without a word'}", "see docs/sandbox.md"
