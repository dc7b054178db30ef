"""Invoking one tool as one session, the way that session's agent would, for whichever door was asked.

Only tools that look are on offer; those that act are lifted one by one in `gateway.tools.allow`. A tool that is not
on offer looks exactly like one that does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any, NamedTuple

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine.toolbox import Call, Result, Tool
from antiphon.engine.turns import obedient
from antiphon.errors import AntiphonError, InvalidInput, NotFound, StoreError
from antiphon.gateway.gateway import Gateway
from antiphon.views import SessionView

log = logging.getLogger(__name__)

TIME = 120.0  # seconds a tool may take


class Invocation(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """`name` is another word for `tool`; `action` is an argument that some clients put beside the others."""

    tool: str | None = None
    name: str | None = None
    args: dict[str, Any] | None = None
    action: str | None = None
    session_key: str | None = None
    agent_id: str | None = None
    dry_run: bool = False


class ToolMissing(NotFound):
    """No such tool, or none for this caller."""


class Outcome(NamedTuple):
    """What the tool said, and as which HTTP status that counts."""

    result: Result
    status: int


async def invoke(gateway: Gateway, caller: Caller, wanted: Invocation, key: str | None) -> Outcome:
    """`key` names the call for ever: a tool of ours has its effect once for it."""
    access.require_scope(caller, "send")
    name = wanted.tool or wanted.name or ""
    if not name:
        raise InvalidInput("No tool is named.", "Set 'tool'.", field="tool")
    _offered(gateway, name, (), ())  # before a session is founded for it
    session = await gateway.house.operations.open(caller, _reference(gateway.house.config, wanted))
    agent_id = _agent(session, wanted.agent_id)
    rules = gateway.house.config.agent(agent_id).tools
    tool = _offered(gateway, name, rules.allow, rules.deny)
    call = Call(
        caller=_acting(gateway.house.config, session, agent_id),
        run_id=f"http:{session.key}",
        call_id=_call_id(key),
        arguments=_arguments(tool, wanted),
    )
    if wanted.dry_run:
        text = f"The tool {name!r} is there and was not called."
        return Outcome(Result(text=text, details={"dryRun": True}), 200)
    return await _invoke(tool, call)


def _offered(gateway: Gateway, name: str, allow: tuple[tuple[str, ...], ...], deny: tuple[str, ...]) -> Tool:
    over_http = gateway.house.config.gateway.tools
    tool = gateway.house.toolbox.allowed(allow, deny).get(name)
    if tool is None or name in over_http.deny or (tool.acts and name not in over_http.allow):
        raise ToolMissing(
            f"Tool not available: {name[:80]}.",
            "Name it in gateway.tools.allow if it exists and may be used.",
        )
    return tool


def _reference(config: Config, wanted: Invocation) -> str:
    if wanted.session_key is not None:
        return wanted.session_key
    if wanted.agent_id is None:
        return "main"
    return f"agent:{config.agent(keys.checked_agent_id(wanted.agent_id)).id}:main"


def _agent(session: SessionView, wanted: str | None) -> str:
    agent_id = session.agent_id or ""
    if wanted is not None and wanted.lower() != agent_id:
        raise InvalidInput(
            f"Session {session.key!r} belongs to the agent {agent_id!r}, not to {wanted[:80]!r}.",
            "Leave 'agentId' out, or name a session of that agent.",
            field="agentId",
        )
    return agent_id


def _acting(config: Config, session: SessionView, agent_id: str) -> Caller:
    """The session itself, which is narrower than whoever called: it reaches what its agent reaches.

    Whether a spawned session is in a sandbox is not told to operators; it is taken to be, which is never too much.
    """
    key = keys.GLOBAL if session.key == "main" else keys.parse(session.key)
    mode = config.agent(agent_id).sandbox.mode
    configured = mode == "all" or (mode == "non-main" and key.kind != "main")
    return Caller.agent(agent_id, str(key), sandboxed=configured or session.parent_key is not None)


def _call_id(key: str | None) -> str:
    if key is not None and not (0 < len(key) <= 200 and key.isprintable()):
        raise InvalidInput(
            "The idempotency key must be 1 to 200 printable characters.",
            "Use a UUID.",
            field="idempotencyKey",
        )
    return key or uuid.uuid4().hex


def _arguments(tool: Tool, wanted: Invocation) -> dict[str, Any]:
    arguments = dict(wanted.args or {})
    if wanted.action is not None and "action" in tool.spec.parameters.get("properties", {}):
        arguments.setdefault("action", wanted.action)
    return arguments


async def _invoke(tool: Tool, call: Call) -> Outcome:
    name = tool.spec.name
    try:
        async with asyncio.timeout(TIME):
            result = await obedient(tool.invoke(call))
    except TimeoutError:
        return _failed(504, f"The tool {name!r} did not answer within {TIME:g} seconds.")
    except StoreError:
        raise
    except AntiphonError as error:
        return _failed(400, str(error))
    except Exception:
        log.exception("Tool %r failed when it was invoked", name)
        return _failed(500, f"The tool {name!r} failed. See the log of the gateway.")
    return Outcome(result, 400 if result.is_error else 200)


def _failed(status: int, message: str) -> Outcome:
    return Outcome(Result(text=message, is_error=True), status)
