"""Decides whether and where a command may run, and builds the complete description of its process.

A command runs in a sandbox, or on this machine if the operator chose that for its agent; the commands of a sandboxed
session always run in the sandbox. A command inherits no variable of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from antiphon.access import Caller
from antiphon.engine.toolbox import ApprovalQuestion
from antiphon.errors import Forbidden, InvalidInput, NotFound
from antiphon.workspace.exec_policy import (
    DEFAULT_SAFE_PROGRAMS,
    DEFAULT_TRUSTED_DIRECTORIES,
    Decision,
    ExecRules,
    decide,
    parse_command,
)
from antiphon.workspace.keeper_client import CommandSpec, ProxySpec
from antiphon.workspace.locations import WORKSPACE_MOUNT, SessionWorkspaceLocator
from antiphon.workspace.sandbox_network import PROXY_PLACEHOLDER

if TYPE_CHECKING:
    from antiphon.config import Config, ExecSettings
    from antiphon.workspace.sandbox import Sandboxes

log = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 100_000  # the kernel takes an argument of at most 128 KiB
MAX_ENVIRONMENT_BYTES = 64 * 1024
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUIET_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""Keeps programs from prompting."""
SHELL_PROGRAM = "/bin/sh"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A command as a session asks for it."""

    command: str
    workdir: str | None = None
    env: Mapping[str, str] = {}
    timeout_seconds: int
    stdin: bool
    pty: bool


class CommandLauncher:
    def __init__(self, config: Config, locate: SessionWorkspaceLocator, sandboxes: Sandboxes) -> None:
        self._config = config
        self._locate = locate
        self._sandboxes = sandboxes
        self._examination: asyncio.Task[None] | None = None

    def get_settings(self, caller: Caller) -> ExecSettings:
        assert caller.agent_id is not None
        return self._config.get_agent(caller.agent_id).exec

    def begin_examination(self) -> None:
        """Find out in the background which agents can run commands, and report those that cannot."""
        self._examination = asyncio.create_task(self._examine())

    async def wait_until_examined(self) -> None:
        """Wait until an examination that has begun is complete."""
        if self._examination is not None and not self._examination.done():
            await asyncio.wait([self._examination])

    async def aclose(self) -> None:
        if self._examination is not None:
            self._examination.cancel()
            await asyncio.wait([self._examination])

    async def _examine(self) -> None:
        affected: dict[str, list[str]] = {}
        for agent_id in self._config.agent_ids:
            agent = self._config.get_agent(agent_id)
            runs_commands = agent.exec.security != "deny"
            if agent.sandbox.mode != "off" or runs_commands:  # a spawn may sandbox a session of any agent
                await self._sandboxes.find_status(agent_id)
            if not runs_commands:
                continue
            if reason := self.explain_unavailable(agent_id, agent.sandbox.mode == "all"):
                affected.setdefault(reason, []).append(agent_id)
        for reason, agent_ids in affected.items():
            log.warning("No commands for %s: %s", ", ".join(map(repr, agent_ids)), reason)

    def explain_unavailable(self, agent_id: str, is_sandboxed: bool) -> str | None:
        """Return why sessions of an agent cannot run commands and what to do; None if they can or it is unknown yet."""
        agent = self._config.get_agent(agent_id)
        settings = agent.exec
        if settings.security == "deny":
            return "Commands are off ('tools.exec.security' is 'deny'). Set it to 'allowlist' or 'full'."
        if settings.host == "node":
            return "'tools.exec.host' is 'node', which Antiphon does not support. Use 'sandbox' or 'gateway'."
        if settings.host == "gateway" and not is_sandboxed:
            return None
        return self._sandboxes.explain_unavailable(agent_id)

    def find_backend(self, caller: Caller) -> str:
        """Return where a session's commands run: `gateway` or `sandbox`."""
        is_on_this_machine = self.get_settings(caller).host == "gateway" and not caller.sandboxed
        return "gateway" if is_on_this_machine else "sandbox"

    # --- the decision ---

    def decide(self, caller: Caller, launch: Launch) -> Decision:
        """Return whether a command runs, must be allowed by a person, or is refused."""
        settings = self.get_settings(caller)
        rules = ExecRules(
            security=settings.security,
            ask=settings.ask,
            allowed_commands=settings.allowlist,
            safe_programs=DEFAULT_SAFE_PROGRAMS if settings.safe_bins is None else settings.safe_bins,
            trusted_directories=DEFAULT_TRUSTED_DIRECTORIES
            if settings.safe_bin_trusted_dirs is None
            else settings.safe_bin_trusted_dirs,
        )
        decision = decide(launch.command, rules)
        is_unrestricted = settings.security == "full" and settings.ask == "off"
        if decision == "run" and launch.env and not is_unrestricted:
            # Variables can change what a listed program does, so the list does not cover it.
            return "refuse" if settings.ask == "off" else "ask"
        return decision

    def require_permission(self, caller: Caller, launch: Launch) -> None:
        """Check that a command is not refused. Approval, where it is needed, was given before.

        Raises:
            Forbidden: the settings refuse it.
        """
        if self.decide(caller, launch) != "refuse":
            return
        settings = self.get_settings(caller)
        if settings.security == "deny":
            raise Forbidden("Commands are off ('tools.exec.security' is 'deny').", "Work without commands.")
        raise Forbidden(
            "This command is not on the list ('tools.exec.security' is 'allowlist', 'tools.exec.ask' is 'off').",
            "Use a listed program as one plain command, or ask the operator to extend 'tools.exec.allowlist'.",
        )

    def build_question(self, caller: Caller, launch: Launch) -> ApprovalQuestion | None:
        """Return what a person is asked before a command runs, or None if it runs or is refused without a question."""
        if self.decide(caller, launch) != "ask":
            return None
        backend = self.find_backend(caller)
        workdir = repr(launch.workdir) if launch.workdir else "the workspace"
        where = "On this machine" if backend == "gateway" else "In the sandbox"
        words = parse_command(launch.command) if not launch.env else None
        environment = "".join(f", with {name}={value!r}" for name, value in sorted(launch.env.items()))
        return ApprovalQuestion(
            # The place comes first, so that no line of the command can be mistaken for it.
            text=f"{where}, in {workdir}{environment}:\n{launch.command}",
            grant=None if words is None else shlex.join(words),
            binding=json.dumps([backend, caller.agent_id, launch.workdir, sorted(launch.env.items())]),
        )

    # --- the process ---

    async def build_spec(self, caller: Caller, launch: Launch) -> CommandSpec:
        """Return the complete description of the process.

        Raises:
            NotFound: the working directory does not exist.
            SandboxUnavailable: the sandbox cannot be used; the text says what to do.
        """
        settings = self.get_settings(caller)
        keep_seconds = settings.cleanup_ms / 1000
        argv = [SHELL_PROGRAM, "-c", launch.command]
        if self.find_backend(caller) == "gateway":
            cwd = await asyncio.to_thread(self._find_directory, caller, launch.workdir)
            env = self._build_host_environment(settings, cwd) | dict(launch.env)
            return CommandSpec(
                argv=argv,
                cwd=cwd,
                env=env,
                timeout=launch.timeout_seconds,
                stdin=launch.stdin,
                pty=launch.pty,
                keep_seconds=keep_seconds,
            )
        env = dict(launch.env)
        if settings.path_prepend:
            env.setdefault("PATH", ":".join([*settings.path_prepend, "/usr/local/bin:/usr/bin:/bin"]))
        wrapped = await self._sandboxes.wrap(caller, argv, workdir=launch.workdir, env=env)
        return CommandSpec(
            argv=wrapped.argv,
            cwd="/",
            env=dict(wrapped.env),
            files=wrapped.files,
            kill_after_seconds=wrapped.kill_after_seconds,
            proxy=None
            if wrapped.allowed_hosts is None
            else ProxySpec(argument=PROXY_PLACEHOLDER, allowed_hosts=wrapped.allowed_hosts),
            timeout=launch.timeout_seconds,
            stdin=launch.stdin,
            pty=launch.pty,
            keep_seconds=keep_seconds,
        )

    async def explain_failed_start(self, caller: Caller, output: str) -> str | None:
        """Return why the sandbox of a failed command did not start, or None if it did."""
        if self.find_backend(caller) == "gateway":
            return None
        return await self._sandboxes.explain_failed_start(caller, output)

    def _find_directory(self, caller: Caller, workdir: str | None) -> str:
        workspace = self._locate(caller)
        start = workspace.workspace.path / workspace.start
        start.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = start / (workdir or "")
        if workdir is not None and PurePosixPath(workdir).is_relative_to(WORKSPACE_MOUNT):
            directory = workspace.workspace.path / PurePosixPath(workdir).relative_to(WORKSPACE_MOUNT)
        if not directory.is_dir():
            raise NotFound(f"There is no directory {workdir!r}.", "Use one that exists.", field="workdir")
        return str(directory)

    def _build_host_environment(self, settings: ExecSettings, cwd: str) -> dict[str, str]:
        try:
            account = pwd.getpwuid(os.geteuid())
            home, name = account.pw_dir, account.pw_name
        except KeyError:
            home, name = cwd, str(os.geteuid())
        path = ":".join([*settings.path_prepend, SYSTEM_PATH])
        return {
            **QUIET_ENVIRONMENT,
            "PATH": path,
            "HOME": home,
            "USER": name,
            "LOGNAME": name,
            "SHELL": SHELL_PROGRAM,
        }


def check_launch(launch: Launch) -> None:
    """Check that a process can be started with this command, directory and environment.

    Raises:
        InvalidInput: the command or a variable has a NUL character, is empty or too long.
    """
    if not launch.command.strip() or _measure(launch.command) > MAX_COMMAND_BYTES or "\0" in launch.command:
        raise InvalidInput(
            f"The command must have 1 to {MAX_COMMAND_BYTES} bytes and no NUL character.",
            "Put a long script into a file first.",
            field="command",
        )
    for name, value in launch.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidInput(
                f"The variable {name!r} is not valid.",
                "Use a name without '=', and no NUL character in name or value.",
                field="env",
            )
    if sum(_measure(name + value) for name, value in launch.env.items()) > MAX_ENVIRONMENT_BYTES:
        raise InvalidInput("The variables are too long.", "Put them into a file.", field="env")
    if launch.workdir is not None and "\0" in launch.workdir:
        raise InvalidInput("The directory contains a NUL character.", "Remove it.", field="workdir")


def _measure(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
