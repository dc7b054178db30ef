"""Prepares the programs of ACP agents to be started: on this machine, or in the sandbox of a session.

A sandboxed session's program runs in that very sandbox, with the network that the agent's settings give it, or not at
all.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.access import Caller
from antiphon.child_processes.processes import ChildCommand, build_environment
from antiphon.errors import NotFound
from antiphon.host_rules import HostRules
from antiphon.paths import expand_home
from antiphon.workspace.keeper.running_command import CommandProxy, ListenerChannel
from antiphon.workspace.locations import SessionWorkspaceLocator
from antiphon.workspace.sandbox import Sandboxes, resolve_workdir
from antiphon.workspace.sandbox_network import PROXY_PLACEHOLDER, TOOLS_PLACEHOLDER

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.config.acp import AcpProgramConfig


class PreparedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """The complete description of a process, and how to release what it uses."""

    command: ChildCommand
    cwd: str
    """The directory it works in, as the process sees it."""
    is_sandboxed: bool
    tools_listener: asyncio.Future[socket.socket] | None = None
    """The socket that it opens for the tools of its session, in a sandbox that can have one."""
    release_descriptors: Callable[[], None] = lambda: None
    """Closes what only the process needs; called when it has been started."""
    close: Callable[[], None] = lambda: None
    """Called when it has ended."""


class AgentProgramLauncher:
    def __init__(
        self, config: Config, state_dir: Path, sandboxes: Sandboxes, *, offers_tools: bool = False
    ) -> None:
        self._config = config
        self._offers_tools = offers_tools
        self._locate = SessionWorkspaceLocator(config, state_dir)
        self._sandboxes = sandboxes

    async def prepare(self, caller: Caller) -> PreparedProgram:
        """Describe the process of a session's program.

        Raises:
            NotFound: the configured directory does not exist.
            SandboxUnavailable: the session is sandboxed, and no sandbox works.
        """
        assert caller.agent_id is not None
        program = self._config.get_agent(caller.agent_id).runtime.acp
        assert program is not None
        env = await asyncio.to_thread(lambda: {name: secret.reveal() for name, secret in program.env.items()})
        argv = [str(expand_home(program.argv[0])), *program.argv[1:]]
        if caller.sandboxed:
            return await self._prepare_sandboxed(caller, program, argv, env)
        cwd = await asyncio.to_thread(self._prepare_directory, caller, program)
        return PreparedProgram(
            command=ChildCommand(argv=argv, cwd=cwd, env=build_environment(env)), cwd=cwd, is_sandboxed=False
        )

    def _prepare_directory(self, caller: Caller, program: AcpProgramConfig) -> str:
        if program.cwd is not None:
            chosen = expand_home(program.cwd).absolute()
            if not chosen.is_dir():
                raise NotFound(
                    f"The directory {str(chosen)!r} of the agent {caller.agent_id!r} does not exist.",
                    "Create it, or change 'runtime.acp.cwd'.",
                )
            return str(chosen)
        workspace = self._locate(caller).workspace
        workspace.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(workspace.path)

    async def _prepare_sandboxed(
        self, caller: Caller, program: AcpProgramConfig, argv: list[str], env: dict[str, str]
    ) -> PreparedProgram:
        wrapped = await self._sandboxes.wrap(
            caller, argv, workdir=program.cwd, env=env, has_tools=self._offers_tools
        )
        cwd = resolve_workdir(self._locate(caller), program.cwd)
        descriptors: dict[str, int] = {}
        closes: list[Callable[[], None]] = []
        tools_listener = None
        if wrapped.allowed_hosts is not None:
            proxy = CommandProxy(HostRules(wrapped.allowed_hosts))
            descriptors[PROXY_PLACEHOLDER] = proxy.open_channel()
            closes.append(proxy.close)
        if wrapped.has_tools_listener:
            tools_listener, descriptors[TOOLS_PLACEHOLDER], close = _open_tools_channel()
            closes.append(close)

        def close_all() -> None:
            for close in closes:
                close()

        def release_descriptors() -> None:
            for descriptor in descriptors.values():
                os.close(descriptor)

        return PreparedProgram(
            command=ChildCommand(
                argv=wrapped.argv, cwd="/", env=wrapped.env, files=wrapped.files, descriptors=descriptors
            ),
            cwd=cwd,
            is_sandboxed=True,
            tools_listener=tools_listener,
            release_descriptors=release_descriptors,
            close=close_all,
        )


def _open_tools_channel() -> tuple[asyncio.Future[socket.socket], int, Callable[[], None]]:
    """Return a future socket, the descriptor that it will arrive over, and a function that closes both."""
    arrived: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    channel = ListenerChannel(arrived.set_result)

    def close() -> None:
        channel.close()
        if not arrived.cancel() and not arrived.cancelled():
            arrived.result().close()

    return arrived, channel.open(), close
