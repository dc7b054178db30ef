"""Runs the commands of sessions in sandboxes: which backend, what it shows, and the proof that it isolates.

A backend counts only after a command inside the very sandbox that will be used has reported what it sees. If none
works, commands are refused; they never run on the host instead.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.access import Caller
from antiphon.child_processes.pipes import open_memory_file
from antiphon.errors import Forbidden, InvalidInput, SandboxUnavailable
from antiphon.workspace.directory import WorkspaceDirectory
from antiphon.workspace.locations import (
    TEMPORARY_DIRECTORY_NAME,
    TEMPORARY_MOUNT,
    WORKSPACE_DIRECTORY_NAME,
    WORKSPACE_MOUNT,
    Mount,
    SessionWorkspace,
    SessionWorkspaceLocator,
    create_root,
    locate_agent_workspace,
    locate_sandboxes,
    mark_used,
    parse_binds,
)
from antiphon.workspace.sandbox_backend import (
    ATTESTATION_SCRIPT,
    CANARY_VARIABLE,
    MOUNTS_VARIABLE,
    VARIABLES_PLACEHOLDER,
    BackendFailed,
    SandboxBackend,
    SandboxedCommand,
    SandboxFault,
    check_bind_targets,
    check_mounts,
    read_variables,
    set_variables,
)
from antiphon.workspace.sandbox_network import (
    build_proxy_environment,
    find_python,
    open_proxy_first,
    open_tools_first,
)

if TYPE_CHECKING:
    from antiphon.config import AgentConfig, Config, SandboxConfig
    from antiphon.config.sandbox import SandboxBackendName

__all__ = ["SandboxBackend", "SandboxStatus", "SandboxedCommand", "Sandboxes"]

ATTESTATION_TIMEOUT_SECONDS = 30.0
MAX_ATTESTED_VIEWS = 4096

# The directory could be replaced by a link between the moment it is opened and the moment it is mounted.
_CHECKED_START = """
if [ "$(stat -c %d:%i "$1")" != "$2" ]; then echo "bwrap: the workspace was replaced"; exit 126; fi
shift 2
exec "$@"
"""


class SandboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The backend that isolates the commands of an agent, or why there is none."""

    backend: SandboxBackendName | None
    program: str | None = None
    """The file that starts the backend, if it is not part of Antiphon."""
    faults: Sequence[tuple[SandboxBackendName, SandboxFault]] = ()
    """The backends that were tried and do not work."""

    def describe_backend(self) -> str | None:
        """Return the backend with its program, or None if there is none."""
        return f"{self.backend} ({self.program})" if self.program else self.backend

    def describe_faults(self) -> tuple[str, str]:
        """Return what is wrong, and how to fix it."""
        if not self.faults:
            return "", ""
        reasons = "; ".join(f"{name}: {fault.reason}" for name, fault in self.faults)
        cures = ", or ".join(dict.fromkeys(fault.cure for _, fault in self.faults))
        return f"No sandbox for commands works here ({reasons}).", f"To fix it, {cures}."


class _Selected(msgspec.Struct, frozen=True):
    backend: SandboxBackend | None
    status: SandboxStatus


class Sandboxes:
    """The sandboxes of a state directory. The first use of a backend examines it, or `probe` does so earlier."""

    def __init__(self, config: Config, state_dir: Path) -> None:
        self._config = config
        self._state_dir = state_dir
        self._locate = SessionWorkspaceLocator(config, state_dir)
        self._selected: dict[tuple[object, ...], _Selected] = {}
        self._backend_keys: dict[str, tuple[object, ...]] = {}
        """By configured agent: every run asks, and the settings do not change."""
        self._refused: dict[str, _Selected | None] = {}
        """By agent: the refusal of its directories, or None if they were checked and may be shown."""
        self._attested: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._selecting = asyncio.Lock()

    async def probe(self) -> None:
        """Find the backend of every agent. Faults are kept for `explain_unavailable`."""
        for agent_id in self._config.agent_ids:
            await self._select(self._config.get_agent(agent_id))

    async def find_status(self, agent_id: str) -> SandboxStatus:
        """Return which backend isolates the commands of an agent, after examining it."""
        return (await self._select(self._config.get_agent(agent_id))).status

    def explain_unavailable(self, agent_id: str) -> str | None:
        """Return why the agent's commands cannot run, or None if they can or this is not known yet."""
        selected = self._find_selected(agent_id)
        if selected is None or selected.backend is not None:
            return None
        return " ".join(selected.status.describe_faults())

    def is_attested(self, agent_id: str) -> bool:
        """Whether a backend was examined from inside for this agent, and isolates its commands."""
        selected = self._find_selected(agent_id)
        return selected is not None and selected.backend is not None

    async def wrap(
        self,
        caller: Caller,
        command: Sequence[str],
        *,
        workdir: str | None,
        env: Mapping[str, str],
        has_proxy: bool = True,
        has_tools: bool = False,
    ) -> SandboxedCommand:
        """Return the command line that runs a command in the sandbox of the caller's session.

        Without `has_proxy` it has no network, whatever the agent's settings say. With `has_tools` it opens a socket for
        the tools of its session, if the sandbox has a network of its own.

        Raises:
            SandboxUnavailable: no backend works; the error names the cure.
            Forbidden: the working directory is outside.
            NotFound: there is no such directory.
        """
        workspace = self._locate(caller)
        agent = self._config.get_agent(caller.agent_id or "")
        selected = await self._select(agent)
        if selected.backend is None:
            raise SandboxUnavailable(*selected.status.describe_faults())
        cwd = resolve_workdir(workspace, workdir)
        owner = selected.backend.owner
        numbers = await asyncio.to_thread(self._prepare_directories, agent, workspace, cwd, owner)
        try:
            python = self._find_proxy_python(agent) if has_proxy else None
            await self._attest(selected.backend, workspace.mounts, numbers)
        except BackendFailed as error:
            raise SandboxUnavailable(
                f"The sandbox {selected.backend.name!r} does not work: {error.fault.reason}.",
                f"To fix it, {error.fault.cure}.",
            ) from None
        files: dict[str, bytes] = {}
        if env and selected.backend.name == "bwrap":  # whose arguments stay visible
            command, files[VARIABLES_PLACEHOLDER] = read_variables(command, env)
        else:
            command = set_variables(command, env)
        tools_python = find_python() if has_tools and selected.backend.name == "bwrap" else None
        if tools_python is not None:
            command = open_tools_first(command, tools_python)
        if python is not None:
            variables = build_proxy_environment(agent.sandbox.allow_hosts)
            command = open_proxy_first(set_variables(command, variables), python)
        if selected.backend.name == "bwrap" and workspace.workspace.below:
            expected = numbers[WORKSPACE_MOUNT]
            command = ["/bin/sh", "-c", _CHECKED_START, "sh", WORKSPACE_MOUNT, expected, *command]
        wrapped = selected.backend.wrap(command, workspace.mounts, cwd=cwd, env={})
        return msgspec.structs.replace(
            wrapped,
            files={**wrapped.files, **files},
            allowed_hosts=None if python is None else agent.sandbox.allow_hosts,
            has_tools_listener=tools_python is not None,
        )

    async def explain_failed_start(self, caller: Caller, output: str) -> str | None:
        """Return why a command that failed could not be started, or None if its sandbox works.

        `output` is what it printed. Only a text that looks like one of a backend is examined.
        """
        selected = self._find_selected(caller.agent_id or "")
        if selected is None or selected.backend is None or f"{selected.backend.name}: " not in output:
            return None
        self._attested.clear()
        self._selected.clear()
        self._refused.clear()
        try:
            await self.wrap(caller, ["true"], workdir=None, env={})
        except SandboxUnavailable as error:
            return str(error)
        return None

    # --- which backend ---

    def _find_selected(self, agent_id: str) -> _Selected | None:
        """Return the backend of an agent, or None if it is not known yet."""
        if refused := self._refused.get(agent_id):
            return refused
        return self._selected.get(self._get_backend_key(self._config.get_agent(agent_id)))

    def _get_backend_key(self, agent: AgentConfig) -> tuple[object, ...]:
        if (key := self._backend_keys.get(agent.id)) is None:
            key = self._backend_keys[agent.id] = _build_backend_key(agent.sandbox)
        return key

    async def _select(self, agent: AgentConfig) -> _Selected:
        key = self._get_backend_key(agent)
        async with self._selecting:
            if agent.id not in self._refused:
                self._refused[agent.id] = await self._find_refused(agent, key)
            return self._refused[agent.id] or self._selected[key]

    async def _find_refused(self, agent: AgentConfig, key: tuple[object, ...]) -> _Selected | None:
        """Select the backend of an agent. Returns a refusal if the agent's directories prevent its use, else None."""
        if refused := await asyncio.to_thread(self._check_directories, agent):
            return refused
        if key not in self._selected:
            self._selected[key] = await self._find_working_backend(agent)
        backend = self._selected[key].backend
        if backend is None:
            return None
        fault = await asyncio.to_thread(self._find_owner_fault, agent, backend)
        return _refuse(backend.name, fault) if fault else None

    async def _find_working_backend(self, agent: AgentConfig) -> _Selected:
        faults: list[tuple[SandboxBackendName, SandboxFault]] = []
        for name in await asyncio.to_thread(_list_backend_names, agent.sandbox):
            try:
                backend = await asyncio.to_thread(self._create_backend, name, agent)
                await self._probe_backend(backend, agent)
            except BackendFailed as error:
                faults.append((name, error.fault))
            except OSError as error:
                faults.append(
                    (name, SandboxFault(f"it could not be examined: {error}", "see docs/sandbox.md"))
                )
            else:
                program = str(backend.program) if backend.program else None
                return _Selected(backend, SandboxStatus(backend=name, program=program, faults=faults))
        return _Selected(None, SandboxStatus(backend=None, faults=faults))

    def _check_directories(self, agent: AgentConfig) -> _Selected | None:
        """Return a refusal if the agent's settings name a directory that no sandbox may show, else None."""
        settings = agent.sandbox
        own = locate_sandboxes(agent, self._state_dir)
        mounts = [Mount(TEMPORARY_MOUNT, own), *parse_binds(settings.binds)]
        if settings.mode != "all" or settings.workspace_access != "none":
            work = locate_agent_workspace(agent, self._state_dir)
            mounts.append(Mount(WORKSPACE_MOUNT, work, writable=_can_change_workspace(settings)))
        try:
            check_bind_targets(parse_binds(settings.binds))
            check_mounts(mounts, self._state_dir)
        except InvalidInput as error:
            fault = SandboxFault(_make_clause(error.what), _make_clause(error.hint))
            return _refuse(_list_backend_names(settings)[0], fault)
        return None

    def _find_owner_fault(self, agent: AgentConfig, backend: SandboxBackend) -> SandboxFault | None:
        """Return a fault if the workspace belongs to another user than commands, which does not change; else None."""
        if agent.workspace is None or backend.owner is None or not _can_change_workspace(agent.sandbox):
            return None
        work = locate_agent_workspace(agent, self._state_dir)
        try:
            status = work.stat()
        except OSError:
            return None
        if status.st_uid in (0, backend.owner) or status.st_mode & stat.S_IRWXO == stat.S_IRWXO:
            return None
        setting = "sandbox.docker.user" if backend.name == "docker" else "sandbox.user"
        return SandboxFault(
            f"the workspace {str(work)!r} belongs to user {status.st_uid}, and commands run as user {backend.owner}",
            f"set {setting!r} to {status.st_uid}, or run `chown -R {backend.owner} {work}`",
        )

    async def _probe_backend(self, backend: SandboxBackend, agent: AgentConfig) -> None:
        with self._make_probe_mounts(backend, agent) as mounts:
            workspace = SessionWorkspace(tuple(mounts))
            preparing = asyncio.create_task(
                asyncio.to_thread(self._prepare_directories, agent, workspace, WORKSPACE_MOUNT, backend.owner)
            )
            try:
                numbers = await asyncio.shield(preparing)
            except asyncio.CancelledError:
                await asyncio.wait([preparing])  # else it would create again what is removed now
                raise
            try:
                await self._attest(backend, mounts, numbers)
            finally:
                await asyncio.shield(backend.release(mounts))

    def _find_proxy_python(self, agent: AgentConfig) -> str | None:
        """Return the interpreter that opens the proxy's socket inside, or None if the agent has no network.

        Raises:
            BackendFailed: there is no such interpreter.
        """
        if agent.sandbox.network != "proxy":
            return None
        if python := find_python():
            return python
        raise BackendFailed(
            "'network' is 'proxy', and there is no Python in /usr/bin or /usr/local/bin to connect it",
            "install one, for example with `apt-get install python3`",
        )

    def _create_backend(self, name: SandboxBackendName, agent: AgentConfig) -> SandboxBackend:
        self._find_proxy_python(agent)
        if name == "landlock":
            from antiphon.workspace.landlock import Landlock  # noqa: PLC0415 - only where it is chosen

            return Landlock(user=agent.sandbox.user)
        if name == "docker":
            from antiphon.workspace.docker import Docker  # noqa: PLC0415

            return Docker(agent.sandbox, self._state_dir)
        from antiphon.workspace.bubblewrap import (  # noqa: PLC0415 - not needed by most commands
            Bubblewrap,
            find_bubblewrap,
        )

        return Bubblewrap(find_bubblewrap(self._list_writable_places()), user=agent.sandbox.user)

    def _list_writable_places(self) -> list[Path]:
        """Return the directories that hold what commands may write, so no program there can be trusted."""
        agents = [self._config.get_agent(agent_id) for agent_id in self._config.agent_ids]
        workspaces = [locate_agent_workspace(agent, self._state_dir) for agent in agents]
        own = [locate_sandboxes(agent, self._state_dir) for agent in agents]
        binds = [bind.path for agent in agents for bind in parse_binds(agent.sandbox.binds) if bind.writable]
        return list(dict.fromkeys([self._state_dir, *workspaces, *own, *binds]))

    # --- what it shows ---

    @contextmanager
    def _make_probe_mounts(self, backend: SandboxBackend, agent: AgentConfig) -> Generator[list[Mount]]:
        """Provide directories to examine a backend with, which leave no trace."""
        parent: Path | None = None
        changes_user = backend.name == "landlock" and backend.owner is not None
        if backend.name == "docker" or changes_user:
            # An engine may have another temporary directory, and a user may not be allowed to enter this one.
            parent = locate_sandboxes(agent, self._state_dir)
            parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="antiphon-sandbox-", dir=parent) as base:
            Path(base).chmod(0o711)  # the user of the commands enters it
            yield [
                Mount(WORKSPACE_MOUNT, Path(base, WORKSPACE_DIRECTORY_NAME)),
                Mount(TEMPORARY_MOUNT, Path(base, TEMPORARY_DIRECTORY_NAME)),
            ]

    def _prepare_directories(
        self, agent: AgentConfig, workspace: SessionWorkspace, cwd: str, owner: int | None
    ) -> dict[str, str]:
        """Create what is missing, and return the device and inode numbers of the directories by their names."""
        check_bind_targets(parse_binds(agent.sandbox.binds))
        check_mounts(workspace.mounts, self._state_dir)
        mark_used(workspace.mounts)
        bound = {bind.target for bind in parse_binds(agent.sandbox.binds)}
        numbers: dict[str, str] = {}
        theirs = locate_agent_workspace(agent, self._state_dir) if agent.workspace else None
        for mount in workspace.mounts:
            create_root(mount)
            if owner is not None and mount.writable and mount.target not in bound:
                start = workspace.start if mount is workspace.workspace else ""
                for below in {"", mount.below, start}:
                    with WorkspaceDirectory(mount.root, below=below) as directory:
                        if below or mount.root != theirs or directory.get_owner() == 0:
                            directory.give_to(owner)
            with WorkspaceDirectory(mount.root, below=mount.below, aliases=(mount.target,)) as directory:
                numbers[mount.target] = directory.get_number()
                if mount is workspace.workspace and workspace.start:
                    directory.make_directory(workspace.start)
                if posixpath.commonpath((cwd, mount.target)) == mount.target:
                    directory.require_directory(cwd)
        return numbers

    # --- the proof ---

    async def _attest(
        self, backend: SandboxBackend, mounts: Sequence[Mount], numbers: Mapping[str, str]
    ) -> None:
        """Examine a sandbox from inside, unless the same one has been examined before.

        Raises:
            BackendFailed: it does not start, or does not isolate.
        """
        instance = await backend.prepare(mounts)
        view = (backend.name, instance, tuple(mounts), tuple(numbers.items()))
        if view in self._attested:
            self._attested.move_to_end(view)
            return
        canary = await asyncio.to_thread(self._find_canary)
        environment = {CANARY_VARIABLE: str(canary), MOUNTS_VARIABLE: " ".join(numbers)}
        wrapped = backend.wrap(
            ["/bin/sh", "-c", ATTESTATION_SCRIPT], mounts, cwd=WORKSPACE_MOUNT, env=environment
        )
        done = await asyncio.to_thread(_run, wrapped)
        if done.returncode != 0:
            raise BackendFailed(*backend.explain_failure(done.stdout))
        if reason := backend.find_fault(done.stdout, numbers):
            raise BackendFailed(reason, "see docs/sandbox.md")
        self._attested[view] = None
        if len(self._attested) > MAX_ATTESTED_VIEWS:
            self._attested.popitem(last=False)

    def _find_canary(self) -> Path:
        """Return a file of the state directory, which no sandbox may open. Before the first start there is none."""
        if not self._state_dir.is_dir():
            return self._state_dir
        return next((path for path in sorted(self._state_dir.iterdir()) if path.is_file()), self._state_dir)


def _refuse(name: SandboxBackendName, fault: SandboxFault) -> _Selected:
    return _Selected(None, SandboxStatus(backend=None, faults=[(name, fault)]))


def _can_change_workspace(settings: SandboxConfig) -> bool:
    """Whether commands of any session may change the workspace of the agent."""
    return settings.mode != "all" or settings.workspace_access == "rw"


def _make_clause(sentence: str) -> str:
    """Return a sentence as a part of another one."""
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def _build_backend_key(settings: SandboxConfig) -> tuple[object, ...]:
    """Return what the choice of a backend depends on."""
    containers = settings.docker.model_dump_json() if settings.backend in (None, "docker") else ""
    return settings.backend, settings.fallback, settings.user, settings.network, containers


def _list_backend_names(settings: SandboxConfig) -> list[SandboxBackendName]:
    """Return the backends to try, the preferred one first."""
    names: list[SandboxBackendName] = [settings.backend or _choose_backend(settings)]
    if settings.fallback is not None and settings.fallback not in names:
        names.append(settings.fallback)
    return names


def _choose_backend(settings: SandboxConfig) -> SandboxBackendName:
    """Return the backend of settings that name none: containers where they are described and an engine answers."""
    if settings.docker.model_fields_set and settings.network != "proxy":
        from antiphon.workspace.docker_engine import is_engine_there  # noqa: PLC0415

        if is_engine_there():
            return "docker"
    return "bwrap"


def resolve_workdir(workspace: SessionWorkspace, workdir: str | None) -> str:
    """Return the working directory inside: absolute there, relative to the workspace, or named as on the host."""
    start = posixpath.join(WORKSPACE_MOUNT, workspace.start)
    path = posixpath.normpath(posixpath.join(start, workdir or "."))
    for mount in workspace.mounts:
        if Path(path).is_relative_to(mount.path):
            path = posixpath.normpath(posixpath.join(mount.target, Path(path).relative_to(mount.path)))
    if not any(posixpath.commonpath((path, mount.target)) == mount.target for mount in workspace.mounts):
        raise Forbidden(
            f"The directory {workdir!r} is outside the workspace.", "Use one inside it.", field="workdir"
        )
    return path


def _run(command: SandboxedCommand) -> subprocess.CompletedProcess[str]:
    """Run a short command of our own. The thread that starts it waits for its end, as a sandbox requires."""
    files = {name: open_memory_file(data) for name, data in command.files.items()}
    try:
        return subprocess.run(
            [str(files.get(argument, argument)) for argument in command.argv],
            pass_fds=list(files.values()),
            env=dict(command.env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ATTESTATION_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command.argv, 1, "it did not answer in time")
    finally:
        for fd in files.values():
            os.close(fd)
