"""Invoking one tool as one session, the way that session's agent would, for whichever door was asked.

A session has here what a run in it has, and no more (`Operations.act_as`). Of that, only tools that look are on offer;
those that act are lifted one by one in `gateway.tools.allow`. A tool that is not on offer looks exactly like one that
does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.engine import words
from antiphon.engine.toolbox import Call, Result, Tool
from antiphon.engine.turns import obedient
from antiphon.errors import AntiphonError, InvalidInput, NotFound, StoreError
from antiphon.gateway.gateway import Gateway
from antiphon.operations.acting import Acting
from antiphon.operations.exchanges import LONGEST
from antiphon.tools.results import refusal

log = logging.getLogger(__name__)

TIME = 120.0  # seconds a tool may take, beside what it is told to wait


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
    """The tool's result and the HTTP status of the answer: 200 for every result, refusals included."""

    result: Result
    status: int


async def invoke(gateway: Gateway, caller: Caller, wanted: Invocation, key: str | None) -> Outcome:
    """`key` names the call for ever: a tool of ours has its effect once for it."""
    access.require_scope(caller, "send")
    name = wanted.tool or wanted.name or ""
    if not name:
        raise InvalidInput("No tool is named.", "Set 'tool'.", field="tool")
    _offered(gateway, name, gateway.house.toolbox.allowed((), ()))  # before a session is founded for it
    words.check_key(key)
    acting = await gateway.house.operations.act_as(caller, _reference(gateway.house.config, wanted))
    _check_agent(acting, wanted.agent_id)
    tool = _offered(gateway, name, acting.actor.tools)
    call = Call(
        caller=acting.actor.caller,
        run_id=f"http:{acting.session.key}",
        call_id=key or uuid.uuid4().hex,
        arguments=_arguments(tool, wanted),
    )
    if wanted.dry_run:
        text = f"The tool {name!r} is there and was not called."
        return Outcome(Result(text=text, details={"dryRun": True}), 200)
    return await _invoke(tool, call)


def _offered(gateway: Gateway, name: str, tools: Mapping[str, Tool]) -> Tool:
    over_http = gateway.house.config.gateway.tools
    tool = tools.get(name)
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


def _check_agent(acting: Acting, wanted: str | None) -> None:
    agent_id = acting.actor.caller.agent_id
    if wanted is not None and wanted.lower() != agent_id:
        raise InvalidInput(
            f"Session {acting.session.key!r} belongs to the agent {agent_id!r}, not to {wanted[:80]!r}.",
            "Leave 'agentId' out, or name a session of that agent.",
            field="agentId",
        )


def _arguments(tool: Tool, wanted: Invocation) -> dict[str, Any]:
    arguments = dict(wanted.args or {})
    if wanted.action is not None and "action" in tool.spec.parameters.get("properties", {}):
        arguments.setdefault("action", wanted.action)
    return arguments


async def _invoke(tool: Tool, call: Call) -> Outcome:
    name = tool.spec.name
    seconds = TIME + _told_to_wait(tool, call.arguments)
    try:
        async with asyncio.timeout(seconds):
            result = await obedient(tool.invoke(call))
    except TimeoutError:
        return _failed(504, f"The tool {name!r} did not answer within {seconds:g} seconds.")
    except StoreError:
        raise
    except AntiphonError as error:
        return Outcome(refusal(error), 200)
    except Exception:
        log.exception("Tool %r failed when it was invoked", name)
        return _failed(500, f"The tool {name!r} failed. See the log of the gateway.")
    return Outcome(result, 200)


def _told_to_wait(tool: Tool, arguments: Mapping[str, Any]) -> float:
    """A tool that takes `timeoutSeconds` waits so long on purpose, and says itself when that is over."""
    takes = tool.spec.parameters.get("properties", {}).get("timeoutSeconds")
    if takes is None:
        return 0.0
    try:
        seconds = float(arguments.get("timeoutSeconds", takes.get("default", 0.0)))
    except (TypeError, ValueError):
        return 0.0  # the tool will say that this is no number
    return min(seconds, LONGEST) if seconds > 0 else 0.0


def complaint(result: Result) -> dict[str, Any]:
    """An error of a tool on either wire: a sentence, and what the model would read of it as it is."""
    told: object = result.details
    if not isinstance(told, dict):
        return {"message": result.text}
    details = cast("dict[str, Any]", told)
    return {"message": details.get("error", result.text), "details": details}


def _failed(status: int, message: str) -> Outcome:
    return Outcome(Result(text=message, is_error=True), status)
