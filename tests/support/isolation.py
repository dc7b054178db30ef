"""Commands in every kind of sandbox that this machine has, with directories of the host that they must not reach.

Scripts name their directories as `$HOME` and `$TMPDIR`, since not every backend gives them names of their own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.child_processes.pipes import open_memory_file
from antiphon.config.sandbox import SandboxConfig, SandboxDocker
from antiphon.workspace import landlock_launcher
from antiphon.workspace.bubblewrap import Bubblewrap
from antiphon.workspace.docker import Docker
from antiphon.workspace.landlock import Landlock
from antiphon.workspace.locations import AGENT_WORKSPACE_MOUNT, TEMPORARY_MOUNT, WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import ResourceLimits, SandboxBackend, find_program, set_variables
from support.docker_daemon import IMAGE
from support.privileges import open_way_to
from support.sandboxes import BOUND_SECONDS

UNPRIVILEGED_UIDS = range(200_000, 400_000)
"""One is chosen for each test: processes are counted by user, and what another test left may not be reaped yet."""
LIMITS = ResourceLimits(processes=64, memory_bytes=256 * 1024**2, file_bytes=16 * 1024**2)
IS_ROOT = os.geteuid() == 0
CANARY = "canary-secret"
KINDS = ("bwrap of root", "bwrap of a user", "landlock", "docker")


@dataclass(frozen=True)
class Isolation:
    """One kind of sandbox, and the directories of the host around it."""

    kind: str
    place: Path
    owner: int
    """Whose processes the commands are."""

    @property
    def is_landlock(self) -> bool:
        return self.kind == "landlock"

    @property
    def is_container(self) -> bool:
        return self.kind == "docker"

    @property
    def agent(self) -> Mount:
        """The agent's workspace, as a session with `workspaceAccess: "ro"` sees it."""
        return Mount(AGENT_WORKSPACE_MOUNT, self.place / "agent", writable=False)

    def get_name_inside(self, mount: Mount) -> str:
        return str(mount.path) if self.is_landlock else mount.target

    def build_mounts(self, *further: Mount, writable: bool = True) -> list[Mount]:
        workspace = Mount(WORKSPACE_MOUNT, self.place / "workspace", writable=writable)
        return [workspace, Mount(TEMPORARY_MOUNT, self.place / "tmp"), *further]

    def run(
        self,
        script: str,
        *,
        mounts: Sequence[Mount] = (),
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in a new sandbox."""
        shell = ["/bin/sh", "-c", script]
        backend, shown = self._create_backend(), mounts or self.build_mounts()
        asyncio.run(backend.prepare(shown))
        # As `Sandboxes` does: what starts a command must not see its variables.
        command = backend.wrap(set_variables(shell, env or {}), shown, cwd=WORKSPACE_MOUNT, env={})
        files = {name: open_memory_file(data) for name, data in command.files.items()}
        argv = [str(files.get(argument, argument)) for argument in command.argv]
        if IS_ROOT and self.kind == "bwrap of a user":
            user = [f"--reuid={self.owner}", f"--regid={self.owner}", "--clear-groups"]
            argv = ["/usr/bin/setpriv", *user, "--", *argv]
        process = subprocess.Popen(
            argv,
            pass_fds=list(files.values()),
            env=dict(command.env),
            cwd="/",
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for fd in files.values():
            os.close(fd)
        try:
            output, errors = process.communicate(timeout=BOUND_SECONDS)
        finally:
            with suppress(ProcessLookupError):  # what is left, which the keeper would end
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def _create_backend(self) -> SandboxBackend:
        if self.is_landlock:
            return Landlock(user=self.owner, limits=LIMITS)
        if self.is_container:
            limits = {"pidsLimit": LIMITS.processes, "memory": LIMITS.memory_bytes}
            docker = SandboxDocker.model_validate({"image": IMAGE, **limits})
            settings = SandboxConfig(user=self.owner, docker=docker)
            return Docker(settings, self.place / "state", limits=LIMITS)
        as_root = self.kind == "bwrap of root"
        program = find_program("bwrap", [])
        assert program is not None
        return Bubblewrap(program, user=self.owner if as_root else None, limits=LIMITS, is_root=as_root)


def open_isolation(kind: str, place: Path) -> Isolation:
    """Create the directories; skip the test if the machine does not have this kind of sandbox."""
    if kind == "landlock":
        if sys.platform != "linux" or landlock_launcher.get_version() == 0:
            pytest.skip("this kernel has no Landlock")
    elif kind != "docker" and find_program("bwrap", []) is None:
        pytest.skip("bwrap is not installed (apt-get install bubblewrap)")
    elif kind == "bwrap of root" and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    open_way_to(place)
    for name in ("workspace", "tmp", "agent", "other", "state"):
        (place / name).mkdir()
    owner = secrets.choice(UNPRIVILEGED_UIDS) if IS_ROOT else os.getuid()
    for name in ("workspace", "tmp"):
        os.chown(place / name, owner, owner)
    for name in ("agent", "other", "state"):
        # Only the sandbox protects them: the user of the commands may read and write them.
        (place / name / "file").write_text(CANARY)
        for path in (place / name, place / name / "file"):
            os.chown(path, owner, owner)
    return Isolation(kind, place, owner)
