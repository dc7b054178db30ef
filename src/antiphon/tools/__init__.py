"""The tools of agents, one file per tool: adapters over `operations`, and over `workspace` for files and the web.

Validation and authorization happen there; this package decides how an answer is worded and how much of it fits into a
prompt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.engine.runs.effects import Effects
from antiphon.engine.toolbox import Tool
from antiphon.operations.operations import Operations
from antiphon.runtimes import Runtime
from antiphon.store import Store
from antiphon.tools._command_results import CommandNotices
from antiphon.tools.agents_list import agents_list
from antiphon.tools.apply_patch import apply_patch
from antiphon.tools.cron import cron
from antiphon.tools.edit import edit
from antiphon.tools.exec import create_exec_tool
from antiphon.tools.image import ImageViewer, image
from antiphon.tools.memory_get import memory_get
from antiphon.tools.memory_search import memory_search
from antiphon.tools.message import message
from antiphon.tools.process import create_process_tool
from antiphon.tools.read import read
from antiphon.tools.session_status import session_status
from antiphon.tools.sessions_history import sessions_history
from antiphon.tools.sessions_list import sessions_list
from antiphon.tools.sessions_search import sessions_search
from antiphon.tools.sessions_send import sessions_send
from antiphon.tools.sessions_spawn import sessions_spawn
from antiphon.tools.sessions_yield import sessions_yield
from antiphon.tools.subagents import subagents
from antiphon.tools.web_fetch import web_fetch
from antiphon.tools.web_search import web_search
from antiphon.tools.write import write
from antiphon.workspace.command_launch import CommandLauncher
from antiphon.workspace.commands import OWNER_GRACE_ACK_WAITS, Commands
from antiphon.workspace.files import WorkspaceFiles
from antiphon.workspace.kept_files import COMMAND_OUTPUTS_DIRECTORY, MAX_COMMAND_OUTPUTS, KeptFiles
from antiphon.workspace.locations import SessionWorkspaceLocator
from antiphon.workspace.memory import WorkspaceMemory
from antiphon.workspace.web import FetchLimits, WebClient
from antiphon.workspace.web_search import WebSearch

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.workspace.sandbox import Sandboxes

__all__ = [
    "CommandTools",
    "create_chat_tools",
    "create_command_launcher",
    "create_command_tools",
    "create_file_tools",
    "create_memory_tools",
    "create_session_tools",
    "create_web_tools",
    "create_work_tools",
]


def create_session_tools(operations: Operations) -> list[Tool]:
    return [
        sessions_list(operations),
        sessions_history(operations),
        sessions_search(operations),
        session_status(operations),
        agents_list(operations),
        sessions_send(operations),
        sessions_spawn(operations),
        sessions_yield(operations),
        subagents(operations),
    ]


def create_chat_tools(operations: Operations, config: Config) -> list[Tool]:
    """Create the tools with which agents schedule their own work and post to chats."""
    return [cron(operations, is_enabled=config.cron.enabled), message(operations)]


def create_work_tools(
    config: Config,
    store: Store,
    clock: Clock,
    state_dir: Path,
    get_model_runtime: Callable[[str], Awaitable[Runtime]],
) -> list[Tool]:
    """Create the tools with which agents work on files and notes, look at images, and search and read the web."""
    locate = SessionWorkspaceLocator(config, state_dir)
    files = WorkspaceFiles(store, clock, locate)
    return [
        *create_file_tools(files),
        image(ImageViewer(config, files, get_model_runtime, store, clock)),
        *create_memory_tools(WorkspaceMemory(locate)),
        *create_web_tools(config, clock),
    ]


class CommandTools(NamedTuple):
    """The tools for commands, and the commands that they start."""

    commands: Commands
    tools: list[Tool]


def create_command_launcher(config: Config, sandboxes: Sandboxes, state_dir: Path) -> CommandLauncher:
    return CommandLauncher(config, SessionWorkspaceLocator(config, state_dir), sandboxes)


def create_command_tools(
    config: Config,
    launcher: CommandLauncher,
    store: Store,
    bus: EventBus,
    clock: Clock,
    state_dir: Path,
    *,
    owner: str = "",
    apply_effects: Callable[[Effects], Awaitable[None]] | None = None,
) -> CommandTools:
    """Create the tools with which agents run commands. Without `apply_effects`, nothing is woken."""
    commands = Commands(
        store=store,
        bus=bus,
        clock=clock,
        state_dir=state_dir,
        outputs=KeptFiles(
            SessionWorkspaceLocator(config, state_dir), COMMAND_OUTPUTS_DIRECTORY, MAX_COMMAND_OUTPUTS
        ),
        build_notice=CommandNotices(config, clock),
        max_total_output_bytes=config.tools.exec.max_total_output_bytes,
        owner_grace_seconds=OWNER_GRACE_ACK_WAITS * config.bus.ack_wait_seconds,
        owner=owner,
        apply_effects=apply_effects,
    )
    tools = [create_exec_tool(commands, launcher, clock), create_process_tool(commands, launcher, clock)]
    return CommandTools(commands, tools)


def create_file_tools(files: WorkspaceFiles) -> list[Tool]:
    return [read(files), write(files), edit(files), apply_patch(files)]


def create_memory_tools(memory: WorkspaceMemory) -> list[Tool]:
    return [memory_search(memory), memory_get(memory)]


def create_web_tools(config: Config, clock: Clock) -> list[Tool]:
    fetch, search = config.tools.web.fetch, config.tools.web.search
    limits = FetchLimits(
        timeout_seconds=fetch.timeout_seconds,
        max_bytes=fetch.max_response_bytes,
        max_redirects=fetch.max_redirects,
    )
    return [
        web_fetch(WebClient(limits, user_agent=fetch.user_agent), fetch.max_chars, is_enabled=fetch.enabled),
        web_search(WebSearch(search, clock, user_agent=fetch.user_agent), search),
    ]
