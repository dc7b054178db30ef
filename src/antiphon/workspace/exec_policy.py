"""Whether a command may run, must be approved by a person, or is refused. Pure.

A grant (`allow-always`) is for one whole command, word by word. A command that a shell would read as more than its
words, or that runs another command, is never covered by a grant or a list: it is asked about.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Literal

import msgspec

Security = Literal["deny", "allowlist", "full"]
Ask = Literal["off", "on-miss", "always"]
Decision = Literal["run", "ask", "refuse"]

DEFAULT_SAFE_PROGRAMS = ("cut", "head", "jq", "tail", "tr", "uniq", "wc")
DEFAULT_TRUSTED_DIRECTORIES = ("/bin", "/usr/bin")
MAX_PARSED_CHARACTERS = 10_000

_SHELL_SYNTAX = re.compile(r"[$`;&|<>(){}\[\]*?~!#\n\r\\]")
"""Characters that a shell may act on. Quoted ones are refused as well: a person can judge them better than a parser."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_WRAPPERS = frozenset(
    {
        *(
            "sh",
            "bash",
            "dash",
            "zsh",
            "ksh",
            "fish",
            "busybox",
            "toybox",
            "env",
            "exec",
            "eval",
            "command",
            "builtin",
        ),
        *(
            "sudo",
            "doas",
            "su",
            "runuser",
            "setpriv",
            "chroot",
            "unshare",
            "nsenter",
            "nohup",
            "setsid",
            "nice",
        ),
        *(
            "ionice",
            "chrt",
            "taskset",
            "timeout",
            "stdbuf",
            "time",
            "watch",
            "xargs",
            "parallel",
            "find",
            "ssh",
        ),
        *(
            "script",
            "strace",
            "ltrace",
            "gdb",
            "python",
            "perl",
            "ruby",
            "node",
            "deno",
            "bun",
            "php",
            "lua",
            "awk",
        ),
        *(
            "gawk",
            "mawk",
            "source",
            ".",
            "flock",
            "start-stop-daemon",
            "systemd-run",
            "at",
            "batch",
            "make",
            "npx",
        ),
    }
)
"""Programs that run what their arguments say: a grant for one would be a grant for everything."""
_VERSION_SUFFIX = re.compile(r"[0-9.]+$")
_NUMBERS = re.compile(r"[0-9][0-9,.-]*")
_OPTION = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9-]*(=[\w,.:'\"-]*)?|-[0-9][0-9,.-]*")
_FILE_OPTION = re.compile("file|from")  # such as `wc --files0-from=NAME`


class ExecRules(msgspec.Struct, frozen=True, kw_only=True):
    security: Security
    ask: Ask
    allowed_programs: Sequence[str] = ()
    """Patterns of programs, by name or by absolute path."""
    granted_commands: Collection[tuple[str, ...]] = ()
    """Whole commands that a person allowed for good."""
    safe_programs: Sequence[str] = DEFAULT_SAFE_PROGRAMS
    """Programs that only filter their input, as long as they are given no file."""
    trusted_directories: Sequence[str] = DEFAULT_TRUSTED_DIRECTORIES


def parse_command(command: str) -> tuple[str, ...] | None:
    """Return the words of a simple command, or None if it is anything else."""
    if len(command) > MAX_PARSED_CHARACTERS or _SHELL_SYNTAX.search(command):
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        return None
    if not words or not words[0] or _ASSIGNMENT.match(words[0]) or _is_wrapper(words[0]):
        return None
    return words


def _is_wrapper(program: str) -> bool:
    name = PurePosixPath(program).name
    return name in _WRAPPERS or _VERSION_SUFFIX.sub("", name) in _WRAPPERS


def decide(command: str, rules: ExecRules) -> Decision:
    """Return what happens to a command."""
    if rules.security == "deny":
        return "refuse"
    if rules.ask == "always":
        return "ask"
    if rules.security == "full" and rules.ask == "off":
        return "run"
    words = parse_command(command)
    if words is not None and (words in rules.granted_commands or _is_listed(words, rules)):
        return "run"
    if rules.ask == "on-miss":
        return "ask"
    return "refuse"


def _is_listed(words: tuple[str, ...], rules: ExecRules) -> bool:
    program = words[0]
    if ".." in PurePosixPath(program).parts:  # it would lead out of the directory of a pattern
        return False
    if any(fnmatchcase(program, pattern) for pattern in rules.allowed_programs):
        return True
    path = PurePosixPath(program)
    is_trusted = path.parent == PurePosixPath(".") or str(path.parent) in rules.trusted_directories
    return is_trusted and path.name in rules.safe_programs and not _may_name_a_file(words)


def _may_name_a_file(words: Sequence[str]) -> bool:
    """Whether an argument of a filter could be a file. Options are not, nor numbers or field lists after an option."""
    return not all(
        (_NUMBERS.fullmatch(word) and before.startswith("-"))
        or (_OPTION.fullmatch(word) and not _FILE_OPTION.search(word))
        for before, word in pairwise(words)
    )
