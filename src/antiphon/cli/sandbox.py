"""`antiphon sandbox`: shows what isolates the commands of agents, and what sandboxed sessions have left on disk.

It looks at this machine and works beside a running gateway and without one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.workspace.docker_containers import SandboxContainer
    from antiphon.workspace.sandbox_directories import SandboxDirectory


@click.group(
    help="Show what isolates commands. Without a subcommand: `explain`.", invoke_without_command=True
)
@common_options
@click.pass_context
def command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        _explain(ctx.ensure_object(Settings), None)


@command.command()
@click.option("--agent", "agent_id", help="Only this agent.")
@common_options
@click.pass_obj
def explain(settings: Settings, agent_id: str | None) -> None:
    """Show which sandbox works for each agent.

    Each sandbox is examined from inside. If none works, the reasons and the fixes are printed.
    """
    _explain(settings, agent_id)


def _explain(settings: Settings, agent_id: str | None) -> None:
    config = settings.load().config
    agent_ids = [config.get_agent(agent_id).id] if agent_id else list(config.agent_ids)
    agents = asyncio.run(_examine(settings, config, agent_ids))
    if settings.json:
        _output.print_json({"agents": agents})
        return
    for agent in agents:
        sessions = {"off": "no session", "non-main": "all but main sessions", "all": "all sessions"}
        click.echo(_output.bold(agent["agentId"]))
        _output.print_fact("sandboxed", f"{sessions[agent['mode']]} (sandbox.mode {agent['mode']!r})")
        program = f" ({agent['program']})" if agent["program"] else ""
        _output.print_fact("commands", f"{agent['backend'] or 'refused'}{program}")
        if agent["image"]:
            _output.print_fact("image", agent["image"])
        _output.print_fact("network", ", ".join(agent["allowHosts"]) or agent["network"])
        for fault in agent["faults"]:
            _output.print_fact(fault["backend"], f"{fault['reason']}; to fix it, {fault['cure']}")
        _output.print_fact("workspace", f"{agent['workspaceAccess']}, shared by {agent['scope']}")


async def _examine(settings: Settings, config: Config, agent_ids: list[str]) -> list[dict[str, Any]]:
    from antiphon.workspace.sandbox import Sandboxes

    sandboxes = Sandboxes(config, settings.paths.state_dir)
    found: list[dict[str, Any]] = []
    for agent_id in agent_ids:
        own = config.get_agent(agent_id).sandbox
        status = await sandboxes.find_status(agent_id)
        found.append(
            {
                "agentId": agent_id,
                "mode": own.mode,
                "scope": own.scope,
                "workspaceAccess": own.workspace_access,
                "backend": status.backend,
                "program": status.program,
                "image": own.docker.image if status.backend == "docker" else None,
                "network": own.docker.network if status.backend == "docker" else own.network,
                "allowHosts": own.allow_hosts,
                "faults": [
                    {"backend": name, "reason": fault.reason, "cure": fault.cure}
                    for name, fault in status.faults
                ],
            }
        )
    return found


@command.command("list")
@common_options
@click.pass_obj
def list_sandboxes(settings: Settings) -> None:
    """List the directories and containers of sandboxed sessions."""
    from antiphon.workspace.docker_containers import has_containers, list_containers
    from antiphon.workspace.sandbox_directories import list_directories

    config, state_dir = settings.load().config, settings.paths.state_dir
    containers = asyncio.run(list_containers(state_dir)) if has_containers(config) else []
    _print_remains(settings, list_directories(config, state_dir), containers, "No directories.")


@command.command()
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=1),
    default=24,
    show_default=True,
    help="Remove what was not used for this long.",
)
@common_options
@click.pass_obj
def prune(settings: Settings, idle_hours: float) -> None:
    """Remove unused directories and containers of sessions.

    All files in them are removed, too.
    """
    from antiphon.workspace.docker_containers import has_containers, remove_unused_containers
    from antiphon.workspace.sandbox_directories import remove_idle_directories

    config, state_dir = settings.load().config, settings.paths.state_dir
    containers: list[SandboxContainer] = []
    if has_containers(config):
        now = round(time.time() * 1000)
        containers = asyncio.run(remove_unused_containers(config, state_dir, now, idle_hours=idle_hours))
    removed = remove_idle_directories(config, state_dir, idle_hours)
    nothing = f"Nothing to remove: everything was used in the last {idle_hours:g} h."
    if not settings.json and (removed or containers):
        click.echo("Removed:")
    _print_remains(settings, removed, containers, nothing)


def _print_remains(
    settings: Settings,
    directories: list[SandboxDirectory],
    containers: list[SandboxContainer],
    if_nothing: str,
) -> None:
    if settings.json:
        _output.print_json({"directories": directories, "containers": containers})
        return
    if containers:
        rows = [
            [each.name, each.image, each.state, _output.format_age(each.used_at) if each.used_at else "-"]
            for each in containers
        ]
        _output.print_table(["CONTAINER", "IMAGE", "STATE", "LAST USED"], rows)
    if not directories and not containers:
        click.echo(if_nothing)
    if directories:
        rows = [
            [each.path, str(each.files), f"{each.bytes // 1024} KiB", _output.format_age(each.used_at)]
            for each in directories
        ]
        _output.print_table(["DIRECTORY", "FILES", "SIZE", "LAST USED"], rows)
