"""Which commands run unasked: whole parsed commands only, and nothing a shell or a wrapper could extend."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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
        ("allowlist", "on-miss", "uniq 1 2", "ask"),
        ("allowlist", "on-miss", "jq --rawfile=/etc/passwd", "ask"),
    ],
)
def test_rules_decide(security: Security, ask: Ask, command: str, decision: str) -> None:
    rules = ExecRules(
        security=security, ask=ask, allowed_programs=["ls", "/opt/*"], granted_commands={GRANTED}
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
    import shlex

    parsed = parse_command(shlex.join(words))
    assert parsed is None or parsed == tuple(words)
