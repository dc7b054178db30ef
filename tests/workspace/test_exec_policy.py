"""Which commands run unasked: whole parsed commands only, and nothing a shell or a wrapper could extend."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from antiphon.command_patterns import FURTHER_WORDS, matches_pattern
from antiphon.config import parse
from antiphon.errors import ConfigError
from antiphon.workspace.exec_policy import Ask, ExecRules, Security, decide, parse_command

GRANTED = ("git", "status", "--short")


@pytest.mark.parametrize(
    ("security", "ask", "command", "decision"),
    [
        ("deny", "off", "true", "refuse"),
        ("deny", "always", "true", "refuse"),
        ("full", "off", "rm -rf / ; anything | at all", "run"),
        ("full", "always", "git status --short", "ask"),
        ("full", "on-miss", "make test", "ask"),
        ("allowlist", "off", "make test", "refuse"),
        ("allowlist", "on-miss", "make test", "ask"),
        ("allowlist", "on-miss", "git status --short", "run"),
        ("allowlist", "on-miss", "git status", "ask"),
        ("allowlist", "on-miss", "git status --short extra", "ask"),
        ("allowlist", "on-miss", "ls -la src", "run"),
        ("allowlist", "on-miss", "/opt/tool run", "run"),
        ("allowlist", "on-miss", "/tmp/ls -la", "ask"),
        ("allowlist", "on-miss", "wc -l", "run"),
        ("allowlist", "on-miss", "/usr/bin/head -n 5", "run"),
        ("allowlist", "on-miss", "/tmp/head -n 5", "ask"),
        ("allowlist", "on-miss", "head /etc/passwd", "ask"),
        ("allowlist", "on-miss", "head secret", "ask"),
        ("allowlist", "on-miss", "/opt/../tmp/tool run", "ask"),
        ("allowlist", "on-miss", "wc --files0-from=secret", "ask"),
        ("allowlist", "on-miss", "wc --f=secret", "ask"),
        ("allowlist", "on-miss", "wc --fil=secret", "ask"),
        ("allowlist", "on-miss", "tail --follow", "run"),
        ("allowlist", "on-miss", "uniq 1 2", "ask"),
        ("allowlist", "on-miss", "jq --rawfile=/etc/passwd", "ask"),
    ],
)
def test_rules_decide(security: Security, ask: Ask, command: str, decision: str) -> None:
    rules = ExecRules(
        security=security, ask=ask, allowed_commands=["ls", "/opt/*"], granted_commands={GRANTED}
    )
    assert decide(command, rules) == decision


EXTENSIONS = [
    "{}; id",
    "{} && id",
    "{} | sh",
    "{} > file",
    "{} < file",
    "{} &",
    "$({})",
    "`{}`",
    "{}\nid",
    "({})",
    "{{ {}; }}",
    "env {}",
    "env A=1 {}",
    "A=1 {}",
    "sh -c '{}'",
    'bash -lc "{}"',
    "busybox {}",
    "/bin/busybox sh -c '{}'",
    "timeout 5 {}",
    "nohup {}",
    "xargs {}",
    "sudo {}",
    "nice -n 5 {}",
    "find . -exec {}",
    "python3.11 -c '{}'",
    "{} $HOME",
    "{} ~/x",
    "{} *",
    "{} [a]",
    "{} {{a,b}}",
    "{} \\; id",
    "time {}",
    "command {}",
    "setsid {}",
]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_a_grant_covers_no_extension_of_its_command(extension: str) -> None:
    command = extension.format("git status --short")
    rules = ExecRules(security="allowlist", ask="on-miss", granted_commands={GRANTED})
    assert decide(command, rules) == "ask"
    assert decide(command, ExecRules(security="allowlist", ask="off", granted_commands={GRANTED})) == "refuse"


@given(st.text(max_size=30), st.text(max_size=30))
def test_only_the_same_words_are_granted(before: str, after: str) -> None:
    command = f"{before}git status --short{after}"
    assume(parse_command(command) != GRANTED)
    rules = ExecRules(security="allowlist", ask="off", granted_commands={GRANTED}, safe_programs=())
    assert decide(command, rules) == "refuse"


@given(st.lists(st.text(alphabet="ab/.-_='\" \t", min_size=1, max_size=8), min_size=1, max_size=4))
def test_a_parsed_command_has_the_words_a_shell_would_see(words: list[str]) -> None:
    parsed = parse_command(shlex.join(words))
    assert parsed is None or parsed == tuple(words)


@pytest.mark.parametrize(
    ("pattern", "command", "is_covered"),
    [
        ("ls", "ls -la src", True),
        ("ls", "ls", True),
        ("git", "git", True),
        ("git", "git status", False),
        ("git", "git -c core.pager=evil log", False),
        ("git*", "git -c core.pager=evil log", False),
        ("*", "git -c core.pager=evil log", False),
        ("*", "/usr/bin/git log", False),
        ("*", "ls -la", True),
        ("/usr/bin/*", "/usr/bin/tar -xf a", False),
        ("git status", "git status", True),
        ("git status", "git status -s", False),
        ("git status", "git -c a=b status", False),
        ("git status", "/tmp/git status", False),
        ("git log ...", "git log", True),
        ("git log ...", "git log main src/app", True),
        ("git log ...", "git log --output=file", False),
        ("git log ...", "git log main -p", False),
        ("git log -p ...", "git log -p main", True),
        ("git * main", "git log main", True),
        ("git * main", "git -cx main", False),
        ("npm run test-*", "npm run test-unit", True),
        ("npm run test-*", "npm run build", False),
        ("npm run *", "npm run --script-shell=evil", False),
        ("npm run --silent=*", "npm run --silent=true", True),
        ("cat 'a b'", "cat 'a b'", True),
        ("cat 'a b'", "cat a b", False),
        ("sh", "sh -c id", False),
        ("sh ...", "sh script", False),
        ("python3 *", "python3 evil.py", False),
        ("python3 -m unittest", "python3 -m unittest", True),
        ("python3 -m unittest", "python3 -m unittest evil", False),
        ("make test", "make test", True),
        ("make test", "make test SHELL=/tmp/evil", False),
        ("find . -name x", "find . -name x", True),
        ("find", "find . -delete", False),
        ("xargs", "xargs", False),
        ("env", "env", False),
        ("nodejs", "nodejs evil.js", False),
        ("prlimit", "prlimit sh -c id", False),
        ("/lib64/*", "/lib64/ld-linux-x86-64.so.2 /tmp/evil", False),
        ("trap", "trap 'sh evil' EXIT", False),
        ("view", "view -c :!id", False),
        ("view", "view", True),
        ("rg", "rg --pre=./evil word", False),
        ("fd", "fd -x ./evil", False),
        ("ssh-agent", "ssh-agent ./evil", False),
        ("python*", "python3.11 -c x", False),
    ],
)
def test_an_entry_of_the_list_covers_whole_commands(pattern: str, command: str, is_covered: bool) -> None:
    rules = ExecRules(security="allowlist", ask="off", allowed_commands=[pattern], safe_programs=())
    assert (decide(command, rules) == "run") is is_covered


WORDS = st.text(alphabet="ab-./=*? ", min_size=1, max_size=6).filter(lambda word: word != FURTHER_WORDS)


@given(
    st.sampled_from(["git", "tar", "npm"]),
    st.lists(WORDS, max_size=3),
    st.lists(WORDS, max_size=3),
    st.booleans(),
)
def test_no_entry_covers_an_option_that_it_does_not_begin(
    program: str, pattern_words: list[str], words: list[str], is_open: bool
) -> None:
    pattern = shlex.join([program, *pattern_words]) + (" ..." if is_open else "")
    if not matches_pattern([program, *words], pattern):
        return
    options = [word for word in words if word.startswith("-")]
    assert len(options) <= sum(word.startswith("-") for word in pattern_words)
    assert is_open or len(words) == len(pattern_words)


@pytest.mark.parametrize("pattern", ["", " ", "'a", "... a", "a ... b", "...", "''"])
def test_an_entry_that_is_no_command_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a command such as 'ls' or 'git log \.\.\.'"):
        parse({"tools": {"exec": {"allowlist": [pattern]}}})


def test_entries_that_cover_little_are_a_warning() -> None:
    listed = ["git", "sh", "python3 *", "ls", "git status", "make test"]
    _, warnings = parse({"agents": {"list": [{"id": "a", "tools": {"exec": {"allowlist": listed}}}]}})
    found = [text for text in warnings if "allowlist" in text]
    assert [text.split("has ")[1].split(",")[0] for text in found] == ["'git'", "'sh'", "'python3 *'"]
    assert "'agents.list[0].tools.exec.allowlist'" in found[0]
