"""`antiphon tools`: what an agent has, and which key decides, without a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import Program

pytestmark = pytest.mark.requirement("T2")


def test_every_tool_is_listed_with_the_key_that_decides(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    program.configure(
        {
            "agents": {"list": [{"id": "main"}, {"id": "clerk", "tools": {"deny": ["group:fs"]}}]},
            "tools": {"sandbox": {"tools": {"alsoAllow": ["web_fetch"]}}},
        }
    )

    def explain(*options: str) -> dict[str, Any]:
        ran = program.run("tools", "--json", *options)
        assert ran.code == 0, ran.err
        return {row["name"]: (row["offered"], row["path"]) for row in json.loads(ran.out)["tools"]}

    main = explain()
    assert main["read"] == (True, "tools.profile")
    assert main["message"] == (False, "tools.profile")
    assert main["web_search"] == (False, None)
    assert explain("--agent", "clerk")["read"] == (False, "agents.list[1].tools.deny")
    boxed = explain("--sandboxed")
    assert boxed["web_fetch"] == (True, "tools.sandbox.tools.alsoAllow")
    assert boxed["cron"] == (False, "tools.sandbox.tools.allow")
    shown = program.run("tools")
    assert "No search service is configured." in " ".join(shown.out.split())
    assert program.run("tools", "--agent", "nobody").code != 0


def test_a_stored_session_shows_what_it_has_and_why_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    program.configure(
        {"agents": {"defaults": {"sandbox": {"mode": "non-main"}}}, "tools": {"exec": {"security": "deny"}}}
    )
    for session in ("agent:main:main", "agent:main:side"):
        assert program.run("agent", "--session", session, "--message", "say hello").code == 0

    def explain(session: str) -> dict[str, Any]:
        ran = program.run("tools", "--json", "--session", session)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    main, side = explain("agent:main:main"), explain("agent:main:side")
    assert (main["sandboxed"], side["sandboxed"], side["sessionKey"]) == (False, True, "agent:main:side")
    offered = [{row["name"]: row["offered"] for row in shown["tools"]} for shown in (main, side)]
    assert [(names["cron"], names["read"], names["exec"]) for names in offered] == [
        (True, True, False),
        (False, True, False),
    ]
    [reason] = [row["reason"] for row in main["tools"] if row["name"] == "exec"]
    assert "tools.exec.security" in reason
    assert program.run("tools", "--session", "agent:main:missing").code != 0
    assert program.run("tools", "--session", "agent:main:main", "--sandboxed").code == 2
