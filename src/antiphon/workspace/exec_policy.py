"""Decides whether a command may run, needs the approval of a person, or is refused. Pure.

A grant (`allow-always`) is for one whole command, word by word; a list has patterns of whole commands
(`command_patterns`). A command that a shell would read as more than its words is never covered by either: it is asked
about. One that runs another command is covered only if the list has it word by word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from antiphon.command_patterns import is_wrapper, matches_pattern

Security = Literal["deny", "allowlist", "full"]
Ask = Literal["off", "on-miss", "always"]
Decision = Literal["run", "ask", "refuse"]

DEFAULT_SAFE_PROGRAMS = ("cut", "head", "jq", "tail", "tr", "uniq", "wc")
DEFAULT_TRUSTED_DIRECTORIES = ("/bin", "/usr/bin")
MAX_PARSED_CHARACTERS = 10_000

_SHELL_SYNTAX_PATTERN = re.compile(r"[$`;&|<>(){}\[\]*?~!#\n\r\\]")
"""Characters that a shell may act on. Quoted ones are refused as well: a person can judge them better than a parser."""
_ASSIGNMENT_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_NUMBERS_PATTERN = re.compile(r"[0-9][0-9,.-]*")
_OPTION_PATTERN = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9-]*(=[\w,.:'\"-]*)?|-[0-9][0-9,.-]*")
_FILE_OPTION_PATTERN = re.compile(r"file|from|^--f(il?|ro?)?(=|$)")
"""Matches an option such as `wc --files0-from=NAME`, also where it is abbreviated."""


class ExecRules(msgspec.Struct, frozen=True, kw_only=True):
    security: Security
    ask: Ask
    allowed_commands: Sequence[str] = ()
    """Patterns of commands (`command_patterns`)."""
    granted_commands: Collection[tuple[str, ...]] = ()
    """Whole commands that a person allowed permanently."""
    safe_programs: Sequence[str] = DEFAULT_SAFE_PROGRAMS
    """Programs that only filter their input, as long as they are given no file."""
    trusted_directories: Sequence[str] = DEFAULT_TRUSTED_DIRECTORIES


def parse_command(command: str) -> tuple[str, ...] | None:
    """Return the words of a simple command that does not run another one, or None if it is anything else."""
    words = split_command(command)
    return None if words is None or is_wrapper(words[0]) else words


def split_command(command: str) -> tuple[str, ...] | None:
    """Return the words of a simple command, or None if it is anything else."""
    if len(command) > MAX_PARSED_CHARACTERS or _SHELL_SYNTAX_PATTERN.search(command):
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        return None
    if not words or not words[0] or _ASSIGNMENT_PATTERN.match(words[0]):
        return None
    return words


def decide(command: str, rules: ExecRules) -> Decision:
    """Return what happens to a command."""
    if rules.security == "deny":
        return "refuse"
    if rules.ask == "always":
        return "ask"
    if rules.security == "full" and rules.ask == "off":
        return "run"
    words = split_command(command)
    if words is not None and (_is_granted(words, rules) or _is_listed(words, rules)):
        return "run"
    if rules.ask == "on-miss":
        return "ask"
    return "refuse"


def _is_granted(words: tuple[str, ...], rules: ExecRules) -> bool:
    return words in rules.granted_commands and not is_wrapper(words[0])


def _is_listed(words: tuple[str, ...], rules: ExecRules) -> bool:
    program = words[0]
    if ".." in PurePosixPath(program).parts:  # it would lead out of the directory of a pattern
        return False
    if any(matches_pattern(words, pattern) for pattern in rules.allowed_commands):
        return True
    if is_wrapper(program):
        return False
    path = PurePosixPath(program)
    is_trusted = path.parent == PurePosixPath(".") or str(path.parent) in rules.trusted_directories
    return is_trusted and path.name in rules.safe_programs and not _may_name_a_file(words)


def _may_name_a_file(words: Sequence[str]) -> bool:
    """Whether an argument of a filter could be a file. Options are not, nor numbers or field lists after an option."""
    return not all(
        (_NUMBERS_PATTERN.fullmatch(word) and before.startswith("-"))
        or (_OPTION_PATTERN.fullmatch(word) and not _FILE_OPTION_PATTERN.search(word))
        for before, word in pairwise(words)
    )
