"""The sandbox `landlock`: the kernel denies a command all other files, and all sockets.

It is weaker than `bwrap` and needs no namespaces, so it works in most containers. Commands keep the names of the
host's directories, see that other processes exist, and are found by a variable in their environment when they end.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.config.sandbox import SandboxBackendName
from antiphon.workspace import landlock_launcher, seccomp
from antiphon.workspace.locations import TEMPORARY_MOUNT, WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import (
    ARGUMENTS_PLACEHOLDER,
    CANARY_VARIABLE,
    COMMAND_ENVIRONMENT,
    HOST_FILES_FAULT,
    READABLE_SYSTEM_FILES,
    BackendFailed,
    ResourceLimits,
    SandboxedCommand,
    SandboxFault,
    choose_owner,
    read_attestation,
    shows_host_files,
)

_READABLE_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *READABLE_SYSTEM_FILES)
_READABLE_PROCESS_FILES = ("/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/filesystems")
_DEVICE_PATHS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NO_SOCKET_FAMILIES = ()


class Landlock:
    name: SandboxBackendName = "landlock"
    program: Path | None = None

    def __init__(
        self, *, user: int | None, limits: ResourceLimits | None = None, is_root: bool = os.geteuid() == 0
    ) -> None:
        """Create a backend. `user` is the unprivileged user id for commands of a gateway that runs as root."""
        program = seccomp.build_filter(socket_families=_NO_SOCKET_FAMILIES)
        if program is None or sys.platform != "linux":
            raise BackendFailed(
                "Landlock is not supported on this machine", "use the backend bwrap or docker"
            )
        if landlock_launcher.get_version() == 0:
            raise BackendFailed(
                "this kernel has no Landlock", "use Linux 5.13 or newer with Landlock enabled"
            )
        self.owner = choose_owner(user, is_root=is_root)
        self._filter = base64.b64encode(program).decode()
        self._limits = limits or ResourceLimits()

    async def prepare(self, mounts: Sequence[Mount]) -> str:
        """Return an empty text: every command is restricted on its own."""
        return ""

    async def release(self, mounts: Sequence[Mount]) -> None:
        """Do nothing: every command is restricted on its own."""

    def wrap(
        self,
        command: Sequence[str],
        mounts: Sequence[Mount],
        *,
        cwd: str = WORKSPACE_MOUNT,
        env: Mapping[str, str],
    ) -> SandboxedCommand:
        """Return the command line of the program that restricts itself and becomes `command`."""
        by_target = {mount.target: str(mount.path) for mount in mounts}
        spec = {
            "readable": [*_READABLE_PATHS, *_READABLE_PROCESS_FILES],
            "devices": _DEVICE_PATHS,
            "mounts": [(str(mount.root), mount.below, mount.writable) for mount in mounts],
            "cwd": _locate_directory(mounts, cwd),
            "user": self.owner,
            "filter": self._filter,
            "limits": {
                "RLIMIT_NPROC": self._limits.processes,
                "RLIMIT_DATA": self._limits.memory_bytes,
                "RLIMIT_FSIZE": self._limits.file_bytes,
                "RLIMIT_NOFILE": self._limits.open_files,
                "RLIMIT_CORE": 0,
            },
            "argv": list(command),
            "env": {
                **COMMAND_ENVIRONMENT,
                "HOME": by_target[WORKSPACE_MOUNT],
                "TMPDIR": by_target[TEMPORARY_MOUNT],
                **env,
            },
            "examine": CANARY_VARIABLE in env,
        }
        launcher = [sys.executable, "-I", "-S", str(Path(landlock_launcher.__file__)), ARGUMENTS_PLACEHOLDER]
        return SandboxedCommand(launcher, {}, {ARGUMENTS_PLACEHOLDER: json.dumps(spec).encode()})

    def find_fault(self, attestation: str, mounts: Mapping[str, str]) -> str | None:
        """Return what the attestation shows to be wrong, or None if files and sockets are out of reach."""
        facts = read_attestation(attestation)
        try:
            checks = {
                "its processes belong to root": facts["Uid"] == "0",
                "its processes have capabilities": int(facts["CapEff"], 16) != 0,
                "its processes can gain privileges": facts["NoNewPrivs"] != "1",
                "it has no system call filter": facts["Seccomp"] != "2",
                "it can open sockets": facts["sockets"] != "refused",
                "it can read the state directory": facts["canary"] != "hidden",
                HOST_FILES_FAULT: shows_host_files(attestation),
                "it can change kernel settings": facts["sysctl"] != "read-only",
            }
        except (KeyError, ValueError):
            return "it could not be examined"
        return next((fault for fault, is_so in checks.items() if is_so), None)

    def explain_failure(self, output: str) -> SandboxFault:
        """Return why a command could not be restricted."""
        if "cannot enter the directories" in output:
            reason = output.strip().removeprefix("landlock: ")
            return SandboxFault(reason, "run the gateway as an ordinary user")
        return SandboxFault(f"{output.strip()[-200:] or 'no output'}", "see docs/sandbox.md")


def _locate_directory(mounts: Sequence[Mount], path: str) -> tuple[str, str]:
    """Return a directory inside as one of the host, and the part of its path where no link is followed."""
    mount = max(
        (mount for mount in mounts if posixpath.commonpath((path, mount.target)) == mount.target),
        key=lambda mount: len(mount.target),
    )
    below = posixpath.normpath(posixpath.join(mount.below, posixpath.relpath(path, mount.target)))
    return str(mount.root), "" if below == "." else below
