"""Commands that people enter in chats: their names, who may use them, and their arguments.

One table for chat services, for `commands.list` and for the page. Executing them is not decided here. Only a person's
own message is read as a command, never a text of another session.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_COMMAND_PATTERN = re.compile(r"/([a-z_]{1,32})(?:\s+(.*))?", re.IGNORECASE | re.DOTALL)


class ChatCommand(NamedTuple):
    """A command as `/help` and `commands.list` describe it."""

    name: str
    description: str
    has_argument: bool = False
    is_for_owner: bool = False
    is_for_services: bool = False
    """Whether only chat services have it: the page and the terminal show the same in other ways."""


CHAT_COMMANDS = (
    ChatCommand("help", "List the commands.", is_for_services=True),
    ChatCommand("whoami", "Show your id and what you may do.", is_for_services=True),
    ChatCommand("status", "Show the session and its model.", is_for_services=True),
    ChatCommand("stop", "Stop the current run."),
    ChatCommand("new", "Start a new conversation; the old one stays readable."),
    ChatCommand("reset", "Same as /new."),
    ChatCommand(
        "send",
        "Allow or forbid sending to this session: on, off or inherit.",
        has_argument=True,
        is_for_owner=True,
    ),
    ChatCommand(
        "approve",
        "Decide on a waiting tool call: ID allow-once, allow-always or deny.",
        has_argument=True,
        is_for_owner=True,
    ),
)
_ALIASES = {"start": "help", "commands": "help", "abort": "stop", "id": "whoami"}
_COMMANDS_BY_NAME = {command.name: command for command in CHAT_COMMANDS}


class EnteredCommand(NamedTuple):
    command: ChatCommand
    argument: str


def parse_command(text: str) -> EnteredCommand | None:
    """Return the command that a whole message is, or None; an unknown one is a text for the agent."""
    match = _COMMAND_PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    name = match[1].lower()
    command = _COMMANDS_BY_NAME.get(_ALIASES.get(name, name))
    argument = (match[2] or "").strip()
    if command is None or (argument and not command.has_argument and name != "start"):
        return None
    return EnteredCommand(command, argument)


def format_help(*, is_owner: bool) -> str:
    lines = [
        f"/{command.name}: {command.description}"
        for command in CHAT_COMMANDS
        if is_owner or not command.is_for_owner
    ]
    return "\n".join(["Write a message, and the agent answers here. Commands:", *lines])
