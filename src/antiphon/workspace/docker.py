"""The sandbox `docker`: commands in a container, one for all sessions that see the same directories.

A container is found by its name, which is derived from everything that it is created from, so changed settings lead to
another one. Before its first use, files in its directories prove that the engine mounts those of this gateway: an
engine elsewhere, or a gateway that runs in a container itself, has others. What ends a command is in `docker_launcher`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.sandbox import SandboxBackendName
from antiphon.errors import AntiphonError, Unavailable
from antiphon.paths import expand_home
from antiphon.workspace import docker_launcher
from antiphon.workspace.directory import FileReplacement, WorkspaceDirectory
from antiphon.workspace.docker_engine import (
    DockerEngine,
    EngineRefused,
    Json,
    explaining_refusals,
    find_engine_socket,
)
from antiphon.workspace.locations import TEMPORARY_MOUNT, WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import (
    ARGUMENTS_PLACEHOLDER,
    COMMAND_ENVIRONMENT,
    OWN_MOUNTS,
    BackendFailed,
    ResourceLimits,
    SandboxedCommand,
    SandboxFault,
    find_attestation_fault,
    read_attestation,
)

if TYPE_CHECKING:
    from antiphon.config.sandbox import SandboxConfig, SandboxDocker

log = logging.getLogger(__name__)

STATE_LABEL, OWN_DIRECTORY_LABEL = "antiphon.state", "antiphon.directory"
SETUP_TIMEOUT_SECONDS = 900.0
PROOF_TIMEOUT_SECONDS = 30.0
MAX_PROOF_BYTES = 1024
MAX_PREPARE_ATTEMPTS = 3
TMPFS_OPTIONS = "rw,noexec,nosuid,nodev,size=256m"

_MAIN_COMMAND = ("/bin/sh", "-c", "while :; do sleep 3600; done")
_MAIN_USER = "65534:65534"  # not that of the commands, so that none of them can end the container
_NO_SUCH_PROGRAM_STATUSES = (126, 127)
_INIT_NAMES = ("docker-init", "podman-init", "tini", "catatonit")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_.-]+")

_PROOF_SCRIPT = """
name=$1
shift
for directory; do
  read -r secret < "$directory/$name" || secret=
  if [ -w "$directory" ]; then access=rw; else access=ro; fi
  if echo "$secret" > "$directory/$name.answer"; then answered=yes; else answered=no; fi
  echo "$directory $access $answered $secret"
done 2> /dev/null
"""


class ContainerPlan(msgspec.Struct, frozen=True):
    """A container to create: its name, and the request to the engine."""

    name: str
    body: Json


class Docker:
    name: SandboxBackendName = "docker"
    program: Path | None = None

    def __init__(
        self,
        settings: SandboxConfig,
        state_dir: Path,
        *,
        limits: ResourceLimits | None = None,
        is_root: bool = os.geteuid() == 0,
    ) -> None:
        self._docker = settings.docker
        self._state_dir = state_dir.resolve()
        self._limits = limits or ResourceLimits()
        user = str(settings.user) if is_root else f"{os.geteuid()}:{os.getegid()}"
        uid, _, gid = (settings.docker.user or user).partition(":")
        self._user = f"{uid}:{gid or uid}"
        self.owner: int | None = int(uid) if is_root else None
        self._engine = DockerEngine(find_engine_socket())
        self._security_options = _build_security_options(settings.docker)
        self._preparing = asyncio.Lock()
        self._plans: dict[tuple[Mount, ...], ContainerPlan] = {}
        self._container_ids: dict[tuple[Mount, ...], str] = {}
        self._unproven_targets: set[str] = set()  # own directories that were too full for a proof
        self._proven: dict[str, str] = {}  # start times of the containers whose directories are proven

    # --- the container ---

    async def prepare(self, mounts: Sequence[Mount]) -> str:
        """Start the container of these directories if it does not run. Returns what identifies this start of it."""
        key = tuple(mounts)
        async with self._preparing, explaining_refusals():
            plan = self._plans.get(key) or await self._plan(key)
            found = await self._engine.find_container(plan.name)
            for _ in range(MAX_PREPARE_ATTEMPTS):
                if found is not None and found["State"]["Running"]:
                    break
                if found is None:
                    self._plans.pop(key, None)
                    plan = await self._plan(key)
                    await self._create(plan)
                else:
                    await self._start(found["Id"])
                found = await self._engine.find_container(plan.name)
            if found is None or not found["State"]["Running"]:
                await self._engine.remove_container(plan.name)
                if found is not None and found["State"]["ExitCode"] in _NO_SUCH_PROGRAM_STATUSES:
                    raise self._build_image_failure()
                raise BackendFailed("its container stops by itself", "check the log of the engine")
            container_id, started = found["Id"], found["State"]["StartedAt"]
            if self._proven.get(plan.name) != container_id + started:
                try:
                    await self._prove_directories(container_id, key)
                except BackendFailed:
                    await self._engine.remove_container(container_id)
                    raise
                self._proven[plan.name] = container_id + started
            self._container_ids[key] = container_id
            return container_id + started

    async def release(self, mounts: Sequence[Mount]) -> None:
        """Remove the container of directories that will not be used again."""
        key = tuple(mounts)
        self._container_ids.pop(key, None)
        if (plan := self._plans.pop(key, None)) is not None:
            self._proven.pop(plan.name, None)
            with suppress(BackendFailed):
                async with explaining_refusals():
                    await self._engine.remove_container(plan.name)

    async def _plan(self, mounts: tuple[Mount, ...]) -> ContainerPlan:
        docker = self._docker
        image = await self._engine.find_image(docker.image)
        if image is None:
            raise BackendFailed(
                f"the image {docker.image!r} is not on this machine",
                f"run `docker pull {docker.image}`, or set 'sandbox.docker.image' to one that is",
            )
        self._check_socket_is_hidden(mounts)
        body = self._build_container(mounts, image["Id"])
        own = next(
            (mount.root.parent for mount in mounts if mount.target == TEMPORARY_MOUNT), self._state_dir
        )
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
        readable = _NOT_IN_NAMES.sub("-", "-".join(own.parts[-2:]))[-40:].strip("-.")
        body["Labels"] = {STATE_LABEL: str(self._state_dir), OWN_DIRECTORY_LABEL: str(own)}
        plan = ContainerPlan(f"{docker.container_prefix}{readable}-{digest}", body)
        self._plans[mounts] = plan
        return plan

    def _check_socket_is_hidden(self, mounts: Sequence[Mount]) -> None:
        socket = self._engine.path.resolve()
        for mount in mounts:
            if socket.is_relative_to(mount.path.resolve()):
                raise BackendFailed(
                    f"{str(mount.path)!r} contains the engine's socket, by which commands could control this machine",
                    "remove the bind, or choose another workspace",
                )

    def _build_container(self, mounts: Sequence[Mount], image_id: str) -> Json:
        docker, limits = self._docker, self._limits
        ulimits = {
            "core": (0, 0),
            "fsize": (limits.file_bytes, limits.file_bytes),
            "nofile": (limits.open_files, limits.open_files),
        }
        for name, limit in docker.ulimits.items():
            soft = limit.hard if limit.soft is None else limit.soft
            if soft is not None:
                ulimits[name] = (soft, soft if limit.hard is None else limit.hard)
        host: Json = {
            "Init": True,
            "NetworkMode": docker.network,
            "CapDrop": list(docker.cap_drop),
            "SecurityOpt": self._security_options,
            "ReadonlyRootfs": docker.read_only_root,
            "Tmpfs": _build_tmpfs(docker.tmpfs, {mount.target for mount in mounts}),
            "Mounts": [
                {
                    "Type": "bind",
                    "Source": str(mount.path),
                    "Target": mount.target,
                    "ReadOnly": not mount.writable,
                    "BindOptions": {"Propagation": "rprivate"},
                }
                for mount in mounts
            ],
            "PidsLimit": docker.pids_limit,
            "Memory": docker.memory,
            "Ulimits": [
                {"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in sorted(ulimits.items())
            ],
            "IpcMode": "private",
            "Dns": list(docker.dns),
            "ExtraHosts": list(docker.extra_hosts),
            "LogConfig": {"Type": "none"},
        }
        if docker.memory_swap is not None:
            host["MemorySwap"] = docker.memory_swap
        if docker.cpus is not None:
            host["NanoCpus"] = round(docker.cpus * 1_000_000_000)
        return {
            "Image": image_id,
            "Entrypoint": list(_MAIN_COMMAND),
            "Cmd": [],
            "User": _MAIN_USER,
            "WorkingDir": WORKSPACE_MOUNT,
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {"antiphon.user": self._user, "antiphon.setup": docker.setup_command or ""},
            "HostConfig": host,
        }

    async def _create(self, plan: ContainerPlan) -> None:
        """Create a container and set it up. It gets its name when it is complete; of several, the first one counts."""
        draft = f"{plan.name}-{secrets.token_hex(4)}"
        try:
            created = await self._engine.request(
                "POST", "/containers/create", params={"name": draft}, body=plan.body
            )
        except EngineRefused as error:
            if "bind source path" in str(error):
                raise self._build_directory_failure(str(error)) from None
            raise
        for warning in created.get("Warnings") or ():
            log.warning("The Docker engine says about the container %r: %s", plan.name, warning)
        container_id, is_complete = created["Id"], False
        try:
            await self._start(container_id)
            await self._set_up(container_id)
            try:
                await self._engine.request(
                    "POST", f"/containers/{container_id}/rename", params={"name": plan.name}
                )
                is_complete = True
            except EngineRefused as error:
                if error.status != 409:  # another process was faster
                    raise
        finally:
            if not is_complete:
                await asyncio.shield(self._engine.remove_container(container_id))
        await self._remove_predecessors(plan)

    async def _start(self, container_id: str) -> None:
        try:
            await self._engine.request("POST", f"/containers/{container_id}/start")
        except EngineRefused as error:
            if "bind source path" in str(error) or "mount" in str(error):
                raise self._build_directory_failure(str(error)) from None
            if "/bin/sh" in str(error):
                raise self._build_image_failure() from None
            raise

    async def _set_up(self, container_id: str) -> None:
        if (script := self._docker.setup_command) is None:
            return
        command = {"Cmd": ["/bin/sh", "-c", script], "User": self._user, "WorkingDir": WORKSPACE_MOUNT}
        status, output = await self._engine.run(container_id, command, SETUP_TIMEOUT_SECONDS)
        if status != 0:
            raise BackendFailed(
                f"'setupCommand' ended with status {status}: {output.strip()[-300:] or 'no output'}",
                "correct 'sandbox.docker.setupCommand'",
            )

    async def _remove_predecessors(self, plan: ContainerPlan) -> None:
        """Remove containers of the same directories that were created from other settings, unless they are in use."""
        targets = _list_sources(plan.body["HostConfig"]["Mounts"])
        for found in await self._engine.list_containers(f"{STATE_LABEL}={self._state_dir}"):
            if f"/{plan.name}" in found["Names"] or _list_sources(found["Mounts"]) != targets:
                continue
            if not await self._engine.is_busy(found["Id"]):
                await self._engine.remove_container(found["Id"])

    # --- the proof of its directories ---

    async def _prove_directories(self, container_id: str, mounts: Sequence[Mount]) -> None:
        """Check that files from here can be read inside the container, and files from inside can be read here.

        A directory on a full disk takes no file. Its number must be the same inside (`find_fault`).

        Raises:
            BackendFailed: the engine has mounted others, or its user may not write there.
        """
        name, secret = f".antiphon-{secrets.token_hex(8)}", secrets.token_hex(16)
        own = [mount for mount in mounts if mount.target in OWN_MOUNTS]
        try:
            written = await asyncio.to_thread(_write_proofs, own, name, secret)
            command = {
                "Cmd": ["/bin/sh", "-c", _PROOF_SCRIPT, "sh", name, *(mount.target for mount in own)],
                "User": self._user,
            }
            status, output = await self._engine.run(container_id, command, PROOF_TIMEOUT_SECONDS)
            answers = await asyncio.to_thread(_read_answers, own, name)
        finally:
            await asyncio.to_thread(_remove_proofs, own, name)
        if status != 0:
            raise BackendFailed(*self.explain_failure(output))
        facts = {words[0]: words[1:] for line in output.splitlines() if len(words := line.split()) > 1}
        self._unproven_targets = {mount.target for mount in own} - written
        for mount in own:
            access, answered, *read = facts.get(mount.target, ["", "", ""])
            if mount.target in written and read != [secret]:
                raise self._build_directory_failure(f"{mount.target} is not {str(mount.path)!r}")
            if mount.writable and access != "rw":
                raise BackendFailed(
                    f"user {self._user} of the container cannot write to {str(mount.path)!r}",
                    f"give it the directory, for example with `chown -R {self._user} {mount.path}`, or set"
                    " 'sandbox.docker.user' to the owner",
                )
            if mount.target in written and answered == "yes" and answers.get(mount.target) != secret:
                raise self._build_directory_failure(f"what is written to {mount.target} is not here")

    def _build_directory_failure(self, reason: str) -> BackendFailed:
        return BackendFailed(
            f"the engine mounts other directories than those of this gateway ({reason})",
            "run the gateway on the engine's machine. If it runs in a container, mount its state directory and"
            " workspaces there under the paths that they have on the machine",
        )

    def _build_image_failure(self) -> BackendFailed:
        return BackendFailed(
            f"the image {self._docker.image!r} lacks programs that commands need",
            "use an image that has /bin/sh, /usr/bin/env and stat, such as 'debian:bookworm-slim'",
        )

    # --- commands ---

    def wrap(
        self,
        command: Sequence[str],
        mounts: Sequence[Mount],
        *,
        cwd: str = WORKSPACE_MOUNT,
        env: Mapping[str, str],
    ) -> SandboxedCommand:
        """Return the command line of the program that runs `command` in the container, which has been prepared."""
        variables = {name: value for name, value in COMMAND_ENVIRONMENT.items() if name != "PATH"}
        spec = {
            "socket": str(self._engine.path),
            "container": self._container_ids[tuple(mounts)],
            "user": self._user,
            "cwd": cwd,
            "env": {**variables, **self._docker.env, **env},
            "argv": list(command),
        }
        launcher = [sys.executable, "-I", "-S", docker_launcher.__file__, ARGUMENTS_PLACEHOLDER]
        return SandboxedCommand(
            launcher,
            {},
            {ARGUMENTS_PLACEHOLDER: json.dumps(spec).encode()},
            kill_after_seconds=docker_launcher.STOP_SECONDS,
        )

    def find_fault(self, attestation: str, mounts: Mapping[str, str]) -> str | None:
        """Return what the attestation shows to be wrong, or None if the container is isolated.

        The numbers of directories are those of another system if the engine runs in a virtual machine. Then the files
        that were exchanged prove the workspaces; nothing proves binds, so they are refused.
        """
        facts = read_attestation(attestation)
        is_same_system = facts.get(f"mount {WORKSPACE_MOUNT}") == mounts.get(WORKSPACE_MOUNT)
        proven = () if is_same_system else set(OWN_MOUNTS) - self._unproven_targets
        numbers = {name: number for name, number in mounts.items() if name not in proven}
        if self._docker.network != "none":
            attestation = re.sub(r"^routes: \d+$", "routes: 1", attestation, flags=re.MULTILINE)
        return find_attestation_fault(attestation, numbers, gateway_is_root=False, init_names=_INIT_NAMES)

    def explain_failure(self, output: str) -> SandboxFault:
        """Return why a command could not be started."""
        if "exec failed" in output or "not found" in output:
            return self._build_image_failure().fault
        lines = output.strip().splitlines() or ["no output"]
        return SandboxFault(f"docker failed: {lines[-1][-200:]}", "see docs/sandbox.md")


def _build_security_options(docker: SandboxDocker) -> list[str]:
    options = ["no-new-privileges"]
    if docker.apparmor_profile is not None:
        options.append(f"apparmor={docker.apparmor_profile}")
    if docker.seccomp_profile is not None:
        path = expand_home(docker.seccomp_profile)
        try:
            profile = json.dumps(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise BackendFailed(
                f"the filter of system calls {str(path)!r} could not be read: {error}",
                "correct 'sandbox.docker.seccompProfile', or remove it for the engine's own filter",
            ) from None
        options.append(f"seccomp={profile}")
    return options


def _build_tmpfs(entries: Sequence[str], targets: set[str]) -> dict[str, str]:
    """Return the directories in memory that are not mounted anyway."""
    found: dict[str, str] = {}
    for entry in entries:
        path, _, options = entry.partition(":")
        if path not in targets:
            found[path] = options or TMPFS_OPTIONS
    return found


def _list_sources(mounts: Sequence[Mapping[str, str]]) -> set[tuple[str, str]]:
    """Return pairs of a mounted directory and its target."""
    return {(mount["Source"], mount.get("Target") or mount.get("Destination", "")) for mount in mounts}


def _write_proofs(mounts: Sequence[Mount], name: str, secret: str) -> set[str]:
    """Write a file into each directory. Returns the names of those that took it."""
    written: set[str] = set()
    for mount in mounts:
        with (
            suppress(Unavailable),  # its disk is full
            WorkspaceDirectory(mount.root, below=mount.below) as directory,
        ):
            directory.replace_files([FileReplacement(name, None, f"{secret}\n".encode())], MAX_PROOF_BYTES)
            written.add(mount.target)
    return written


def _read_answers(mounts: Sequence[Mount], name: str) -> dict[str, str]:
    answers: dict[str, str] = {}
    for mount in mounts:
        with (
            suppress(AntiphonError),
            WorkspaceDirectory(mount.root, below=mount.below) as directory,
        ):
            content = directory.find_content(f"{name}.answer", MAX_PROOF_BYTES)
            answers[mount.target] = content.data.decode("utf-8", "replace").strip() if content else ""
    return answers


def _remove_proofs(mounts: Sequence[Mount], name: str) -> None:
    for mount in mounts:
        for each in (name, f"{name}.answer"):
            with (
                suppress(AntiphonError),
                WorkspaceDirectory(mount.root, below=mount.below) as directory,
            ):
                if (sha256 := directory.find_sha256(each, MAX_PROOF_BYTES)) is not None:
                    directory.replace_files([FileReplacement(each, sha256, None)], MAX_PROOF_BYTES)
