"""Decides permission requests of programs, by the kind of the call and the agent's policy for commands.

A program is answered with one of its own options, chosen by their kinds and never by their order. If a person allows a
call permanently, Antiphon stores the whole call; the program is never told more than `once`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import msgspec

from antiphon.config import ExecSettings
from antiphon.config.acp import ToolKind
from antiphon.runtimes.acp.turn_recorder import RecordedCall, render_content
from antiphon.runtimes.turns import PermissionQuestion

Decision = Literal["allow", "ask", "refuse"]

_PREFERRED_OPTION_KINDS: dict[bool, tuple[str, ...]] = {
    True: ("allow_once", "allow_always"),
    False: ("reject_once", "reject_always"),
}
CANCELLED_OUTCOME: dict[str, Any] = {"outcome": {"outcome": "cancelled"}}


class PermissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of an agent for its program."""

    settings: ExecSettings
    allowed_kinds: Sequence[ToolKind]
    is_sandboxed: bool
    """Whether the program runs in the sandbox of its session."""


def decide(kind: ToolKind, rules: PermissionRules) -> Decision:
    """Return the decision about a call. The policy for commands counts if it is for where the program runs."""
    settings = rules.settings
    if settings.security == "deny" and kind not in rules.allowed_kinds:
        return "refuse"
    if settings.ask == "always":
        return "ask"
    if kind in rules.allowed_kinds:
        return "allow"
    applies = rules.is_sandboxed == (settings.host == "sandbox")
    if applies and settings.security == "full" and settings.ask == "off":
        return "allow"
    if applies and settings.ask == "off":
        return "refuse"  # a list of commands cannot be compared with what a program says of itself
    return "ask"


def build_question(
    call: RecordedCall, program: str, workdir: str, *, is_sandboxed: bool
) -> PermissionQuestion:
    """Return what a person is asked. The place comes first: what follows is the program's own text."""
    where = "In the sandbox" if is_sandboxed else "On this machine"
    parts = [call.title, _render_input(call.input), *map(render_content, call.content)]
    text = "\n".join(filter(None, parts)) or "(The program does not say what it wants to do.)"
    given: Any = call.input
    arguments = cast("object", given) if isinstance(given, dict | list) and given else None
    grant = None
    if arguments is not None:
        grant = msgspec.json.encode([call.kind, arguments], order="deterministic").decode()
    return PermissionQuestion(
        tool=f"{program}:{call.kind}",
        call_id=call.call_id,
        text=f"{where}, in {workdir!r}, {program} wants to {_VERBS[call.kind]}:\n{text}",
        grant=grant,
        binding=json.dumps([program, workdir, is_sandboxed]),
    )


_VERBS: dict[ToolKind, str] = {
    "read": "read",
    "edit": "change a file",
    "delete": "delete",
    "move": "move a file",
    "search": "search",
    "execute": "run a command",
    "think": "think",
    "fetch": "fetch from the network",
    "switch_mode": "switch its mode",
    "other": "use a tool",
}


def _render_input(given: Any) -> str:
    match given:
        case None:
            return ""
        case str():
            return given
        case {"command": str(command), **rest} if not rest.keys() - {"description"}:
            return command
        case _:
            return msgspec.json.encode(given, order="deterministic").decode()


def choose_option(options: object, *, is_allowed: bool) -> dict[str, Any]:
    """Return the answer for a program: the narrowest of its options that says so."""
    found = [
        cast("dict[str, Any]", option)
        for option in cast("Iterable[object]", options if isinstance(options, list) else ())
        if isinstance(option, dict)
    ]
    for kind in _PREFERRED_OPTION_KINDS[is_allowed]:
        for option in found:
            if option.get("kind") == kind and isinstance(option.get("optionId"), str):
                return {"outcome": {"outcome": "selected", "optionId": option["optionId"]}}
    return CANCELLED_OUTCOME
