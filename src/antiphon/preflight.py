"""Builds what the runs of a configuration need and prepares their first request, without store or network.

What fails here fails in every such run. Secrets are replaced by placeholders: this does not check that they exist.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec, TypeVar

import httpx2

from antiphon import keys
from antiphon.bus.local import LocalBus
from antiphon.clock import Clock, SystemClock
from antiphon.config import Config, Secret
from antiphon.config.errors import Problem
from antiphon.engine.sessions.identity import SessionIdentityResolver
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.toolbox import Tool, Toolbox
from antiphon.errors import AntiphonError, ConfigError, ProviderError, StoreError, StoreReadOnly
from antiphon.messages import UserMessage
from antiphon.operations.context import OperationContext
from antiphon.operations.operations import Operations
from antiphon.runtimes import DiscardedDeltas, Prompt, ToolSpec
from antiphon.runtimes.model import ModelRuntime, open_reader
from antiphon.runtimes.registry import RuntimeRegistry
from antiphon.runtimes.retry import RetryPolicy
from antiphon.store import Script
from antiphon.tools import (
    create_chat_tools,
    create_command_launcher,
    create_command_tools,
    create_session_tools,
    create_work_tools,
)
from antiphon.tools.python_tools import load_python_tools
from antiphon.workspace.sandbox import Sandboxes

P = ParamSpec("P")
T = TypeVar("T")

SECRET_PLACEHOLDER = "a-secret-that-is-not-read"  # noqa: S105
REFUSED_STATUS = 401


async def find_problems(config: Config) -> list[Problem]:
    """Problems that would make every run of an agent or a model fail."""
    stand_in = _replace_secrets(config)
    runtimes = RuntimeRegistry(stand_in)
    problems: list[Problem] = []
    try:
        python_tools = await asyncio.to_thread(load_python_tools, config.tools.python)
    except ConfigError as error:
        python_tools = list[Tool]()
        problems.append(Problem(str(error.data["path"]), error.what, error.hint))
    toolbox = build_toolbox(stand_in, python_tools)
    identities = SessionIdentityResolver(stand_in, SessionResolver(stand_in), toolbox)
    tools: dict[str, Sequence[ToolSpec]] = {}
    try:
        for number, agent_id in enumerate(config.agent_ids):
            path = f"agents.list[{number}]"
            try:
                tools[agent_id] = _list_tool_specs(identities, agent_id)
            except Exception as error:  # noqa: BLE001 - any error would end the run
                problems.append(_build_problem(f"{path}.tools", f"The tools of agent {agent_id!r}", error))
            target = config.get_agent(agent_id).runtime.target
            if target is None or find_spec(target.partition(".")[0].partition(":")[0]) is None:
                continue  # a missing module is a warning: the gateway may have another PYTHONPATH
            try:
                await runtimes.get_runtime(agent_id, None)
            except Exception as error:  # noqa: BLE001
                problems.append(
                    _build_problem(f"{path}.runtime.target", f"The runtime of agent {agent_id!r}", error)
                )
        for ref in config.model_refs:
            name, _, model_id = ref.partition("/")
            users = [
                agent_id
                for agent_id in tools
                if config.get_agent(agent_id).runtime.type == "model"
                and config.get_model_ref(agent_id) == ref
            ]
            agent_id = next(iter(users), config.default_agent_id)
            try:
                await _try_first_request(runtimes, ref, agent_id, tools.get(agent_id, ()))
            except Exception as error:  # noqa: BLE001
                path = f"models.providers.{name}"
                problems.append(_build_problem(path, f"Model {model_id!r} of the provider {name!r}", error))
    finally:
        await runtimes.aclose()
    return problems


def _build_problem(path: str, subject: str, error: Exception) -> Problem:
    if isinstance(error, AntiphonError):
        return Problem(path, error.what, error.hint)
    # Without its text: libraries quote addresses and headers, which may contain secrets.
    return Problem(
        path, f"{subject} cannot be used ({type(error).__name__}).", f"Check the settings in {path!r}."
    )


def _replace_secrets(config: Config) -> Config:
    """Replaces secret references; literal secrets stay, since they are checked as parts of a request."""

    def replace_secret(secret: Secret) -> Secret:
        return secret if secret.kind == "text" else Secret("text", (SECRET_PLACEHOLDER,))

    providers = {
        name: provider.model_copy(
            update={
                "api_key": provider.api_key and replace_secret(provider.api_key),
                "headers": {header: replace_secret(secret) for header, secret in provider.headers.items()},
            }
        )
        for name, provider in config.models.providers.items()
    }
    return config.model_copy(update={"models": config.models.model_copy(update={"providers": providers})})


def build_toolbox(config: Config, added_tools: Sequence[Tool], sandboxes: Sandboxes | None = None) -> Toolbox:
    """Return the tools of a gateway with this configuration, with `added_tools`. They cannot be called.

    Commands count as available, unless `sandboxes` has found out that they are not.
    """
    toolbox, session_resolver = Toolbox(), SessionResolver(config)
    operations = Operations(
        OperationContext(
            config=config,
            store=_NoStore(),
            bus=LocalBus(),
            clock=SystemClock(),
            session_resolver=session_resolver,
            worker=None,
            state_dir=Path(),
            toolbox=toolbox,
        )
    )
    work_tools = create_work_tools(
        config, _NoStore(), SystemClock(), Path(), RuntimeRegistry(config).get_model_runtime
    )
    chat_tools = create_chat_tools(operations, config)
    launcher = create_command_launcher(config, sandboxes or Sandboxes(config, Path()), Path())
    command_tools = create_command_tools(
        config, launcher, _NoStore(), LocalBus(), SystemClock(), Path()
    ).tools
    for tool in (*work_tools, *command_tools, *create_session_tools(operations), *chat_tools, *added_tools):
        toolbox.add(tool)
    return toolbox


def _list_tool_specs(identities: SessionIdentityResolver, agent_id: str) -> list[ToolSpec]:
    """The tools of the agent's main session; those of its sub-agents are built as a check, too."""
    child = str(keys.subagent_key(agent_id, "check"))
    identities.resolve(agent_id, child, sandboxed=False, envelope=None)
    identity = identities.resolve(
        agent_id, str(keys.main_session_key(agent_id)), sandboxed=False, envelope=None
    )
    return [tool.spec for tool in identity.tools.values()]


async def _try_first_request(
    runtimes: RuntimeRegistry, ref: str, agent_id: str, tools: Sequence[ToolSpec]
) -> None:
    """Makes the first request of a run, which is refused before it leaves the process."""
    runtime = await runtimes.get_model_runtime(ref)
    if not isinstance(runtime, ModelRuntime):
        return
    unsendable_headers: list[str] = []

    def refuse_request(request: httpx2.Request) -> httpx2.Response:
        unsendable_headers.extend(
            name for name, value in request.headers.items() if not is_sendable_header(name, value)
        )
        return httpx2.Response(REFUSED_STATUS)

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(refuse_request))
    async with client:
        reader = open_reader(runtime.spec, RetryPolicy(), http=client)
        prompt = Prompt(
            run_id="check",
            session_key=str(keys.main_session_key(agent_id)),
            agent_id=agent_id,
            instructions="You are a helpful assistant.",
            messages=[UserMessage(content="Hello.", timestamp=0)],
            tools=tools,
        )
        try:
            await reader.read(prompt, DiscardedDeltas())
        except ProviderError as error:
            if error.data.get("status") != REFUSED_STATUS:
                raise
    if unsendable_headers:
        raise ConfigError(
            f"Requests to the provider {ref.partition('/')[0]!r} cannot be sent: the header "
            f"{sorted(unsendable_headers)[0]!r} contains a line break, an outer blank or another character that "
            "HTTP does not allow.",
            "Remove it from 'apiKey' or 'headers'.",
        )


_HEADER_NAME_PATTERN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE_PATTERN = re.compile(r"(?:[^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?")


def is_sendable_header(name: str, value: str) -> bool:
    """Whether a transport sends the header; it refuses others only when it sends the request."""
    return bool(_HEADER_NAME_PATTERN.fullmatch(name) and _HEADER_VALUE_PATTERN.fullmatch(value))


class _NoStore:
    """A placeholder for code that is built here but would use a store only in a run."""

    clock: Clock = SystemClock()
    shared = False
    identity = ""
    write_error: StoreError | None = None

    async def tx(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        raise StoreReadOnly("A check of the configuration has no store.", "Start the gateway.")

    async def read(self, script: Script[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        raise StoreReadOnly("A check of the configuration has no store.", "Start the gateway.")

    async def close(self) -> None: ...
