"""Checks agents that are ACP programs for errors and for settings that deserve a warning."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from antiphon.config.acp import KNOWN_PROGRAMS
from antiphon.config.errors import Problem
from antiphon.paths import expand_home

if TYPE_CHECKING:
    from antiphon.config.agents import RuntimeConfig
    from antiphon.config.schema import Config


def check_program(path: str, runtime: RuntimeConfig) -> Iterator[Problem]:
    """Yield errors in the runtime of an agent."""
    program = runtime.acp
    if (runtime.type == "acp") != (program is not None):
        what = f"{path!r} must have 'acp' if, and only if, its 'type' is 'acp'."
        yield Problem(f"{path}.acp", what, "Write: runtime: {type: 'acp', acp: {agent: 'codex'}}.")
    if program is None:
        return
    if program.command is None and program.known_name is None:
        known = ", ".join(KNOWN_PROGRAMS)
        what = (
            f"{path + '.acp'!r} names no program."
            if program.agent is None
            else f"{program.agent!r} in {path + '.acp.agent'!r} is not a known program."
        )
        yield Problem(f"{path}.acp", what, f"Set 'agent' to one of {known}, or 'command' to any program.")
    for name in program.env:
        if not name or "=" in name or "\0" in name:
            yield Problem(
                f"{path}.acp.env",
                f"{name[:80]!r} in {path + '.acp.env'!r} is not a valid variable name.",
                "Use a name without '=' and NUL characters.",
            )
    if any("\0" in text for text in (program.command or "", *program.args, program.cwd or "")):
        yield Problem(f"{path}.acp", f"{path + '.acp'!r} contains a NUL character.", "Remove it.")


def check_acp(config: Config) -> Iterator[Problem]:
    """Yield settings of `acp` that contradict the agents."""
    name = config.acp.default_agent
    if name is not None and name not in config.acp_agent_ids and not _is_unlisted_program(config, name):
        yield Problem(
            "acp.defaultAgent",
            f"'acp.defaultAgent' is {name!r}, which is not an agent with an ACP program.",
            f"Use one of {', '.join(config.acp_agent_ids)}."
            if config.acp_agent_ids
            else "Add it to agents.list with runtime {type: 'acp', acp: {…}}.",
        )


def _is_unlisted_program(config: Config, name: str) -> bool:
    """Whether it is a known program that no agent runs, which related gateways take for an agent."""
    return name in KNOWN_PROGRAMS and name not in config.agent_ids


def find_program_warnings(config: Config) -> Iterator[str]:
    """Yield warnings about settings that are accepted."""
    default = config.acp.default_agent
    if default is not None and _is_unlisted_program(config, default):
        yield (
            f"'acp.defaultAgent' is {default!r}, but there is no such agent, so sessions_spawn with runtime 'acp'"
            " needs an agentId."
            f" Add {{id: {default!r}, runtime: {{type: 'acp', acp: {{agent: {default!r}}}}}}} to 'agents.list'."
        )
    for index, agent_id in enumerate(config.agent_ids):
        agent = config.get_agent(agent_id)
        program, path = agent.runtime.acp, f"agents.list[{index}]"
        if program is None:
            continue
        if not config.acp.enabled:
            yield f"'acp.enabled' is false, so agent {agent_id!r}, which is an ACP program, cannot answer."
        if shutil.which(str(expand_home(program.argv[0]))) is None:
            install = (
                KNOWN_PROGRAMS[program.known_name][1]
                if program.command is None and program.known_name
                else None
            )
            yield (
                f"The program {program.argv[0]!r} of '{path}.runtime.acp' cannot be found on PATH."
                f" {f'Install it: {install}' if install else 'Check its name.'}"
            )
        if agent.sandbox.mode != "off" and agent.sandbox.network == "none":
            yield (
                f"The sandboxed sessions of agent {agent_id!r} have no network, so {program.name!r} reaches no model."
                f" Set '{path}.sandbox.network' to 'proxy' and 'allowHosts' to the host of its model."
            )
