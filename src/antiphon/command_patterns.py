"""Patterns of commands in an operator's list, and the programs that can run other programs. Pure.

A pattern has the words of a whole command. `*` stands for any part of one word, and `...` at the end for any further
words; neither covers an option, because an option can change what a program does. A program alone stands for all of its
commands, unless its arguments can make it run other programs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

FURTHER_WORDS = "..."

_VERSION_SUFFIX_PATTERN = re.compile(r"[0-9.]+$")
_WILDCARD_PATTERN = re.compile(r"[*?\[]")
_WRAPPER_NAMES = """
sh bash dash zsh ksh fish busybox toybox env exec eval command builtin sudo doas su runuser setpriv
chroot unshare nsenter nohup setsid nice ionice chrt taskset timeout stdbuf time watch xargs
parallel find ssh script strace ltrace gdb python perl ruby node deno bun php lua awk gawk mawk
source . flock start-stop-daemon systemd-run at batch make npx trap csh tcsh rbash nodejs pypy tclsh
Rscript pwsh prlimit setarch linux32 linux64 pkexec bwrap firejail fakeroot unbuffer chronic valgrind
perf rlwrap dbus-run-session run-parts numactl runcon capsh ld-linux-x86-64.so ash mksh nawk julia
sshpass ssh-agent choom xvfb-run hyperfine watchexec direnv tsx ts-node bunx ldd
"""
_RUNNER_NAMES = """
git hg svn cvs gh tig tar zip rsync cpio sed ed ex vi vim nvim emacs nano less more most man pg sort
split tee dd install curl wget scp sftp ftp telnet nc ncat netcat socat openssl tcpdump nmap gpg
docker podman nerdctl kubectl helm systemctl journalctl crontab screen tmux expect ip mount npm pnpm
yarn pip pipx uv uvx poetry gem bundle composer cargo go java javac gradle mvn ant cmake ninja meson
gcc g++ cc clang ld rpm dpkg apt apt-get dnf yum apk snap brew mysql psql sqlite ansible terraform
pytest tox nox just task rake m4 logrotate entr fzf dot view vimdiff editor pager R rg ag ack fd
fdfind bat batcat ctags sdiff diff3 aria2c rclone c++ clang++ rustc eslint jest vitest mocha rspec
"""

_WRAPPER_PROGRAMS = frozenset(_WRAPPER_NAMES.split())
"""Programs that run what their arguments say: a grant for one would be a grant for everything."""
_RUNNER_PROGRAMS = frozenset(_RUNNER_NAMES.split())
"""Programs that some option or subcommand makes run other programs, or write any file."""


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Return the words of a pattern.

    Raises:
        ValueError: it is not a valid pattern.
    """
    try:
        words = tuple(shlex.split(pattern))
    except ValueError:
        raise ValueError("its quotes are not closed") from None
    if not words or not words[0] or words[0] == FURTHER_WORDS:
        raise ValueError("it names no program")
    if FURTHER_WORDS in words[:-1]:
        raise ValueError(f"{FURTHER_WORDS!r} is not its last word")
    return words


def matches_pattern(words: Sequence[str], pattern: str) -> bool:
    """Whether a pattern covers the words of a command."""
    program, *arguments = parse_pattern(pattern)
    if is_wrapper(words[0]):  # only as a whole
        return len(arguments) > 0 and not has_wildcards(pattern) and (program, *arguments) == tuple(words)
    if not fnmatchcase(words[0], program):
        return False
    if not arguments:
        return len(words) == 1 or not runs_programs(words[0])
    rest: Sequence[str] = ()
    given = words[1:]
    if arguments[-1] == FURTHER_WORDS:
        arguments = arguments[:-1]
        given, rest = given[: len(arguments)], given[len(arguments) :]
    return (
        len(given) == len(arguments)
        and all(map(_matches_word, given, arguments))
        and not any(word.startswith("-") for word in rest)
    )


def _matches_word(word: str, pattern: str) -> bool:
    return fnmatchcase(word, pattern) and (pattern.startswith("-") or not word.startswith("-"))


def has_wildcards(pattern: str) -> bool:
    return bool(_WILDCARD_PATTERN.search(pattern)) or FURTHER_WORDS in pattern.split()


def is_wrapper(program: str) -> bool:
    """Whether a program runs the command that its arguments are."""
    return _is_among(program, _WRAPPER_PROGRAMS)


def runs_programs(program: str) -> bool:
    """Whether arguments can make a program run others, or write files that it is not named for."""
    return _is_among(program, _WRAPPER_PROGRAMS) or _is_among(program, _RUNNER_PROGRAMS)


def _is_among(program: str, names: frozenset[str]) -> bool:
    name = PurePosixPath(program).name
    return name in names or _VERSION_SUFFIX_PATTERN.sub("", name) in names
