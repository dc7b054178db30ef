"""A session is called sandboxed only where that was seen from inside, and then none of its tools leads outside."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.config import Config
from antiphon.workspace import landlock_launcher, sandbox_backend
from antiphon.workspace.sandbox import Sandboxes
from support.agents_fixture import AgentsFixture, make_agents_config, open_agents_fixture
from support.app_fixture import OPERATOR
from support.privileges import open_way_to

GROUP = "agent:main:discord:group:1"
CANARY = "canary-secret"
WORK_TOOLS = {"read", "write", "edit", "apply_patch", "exec", "process"}
"""The tools of a sandboxed session that touch the machine."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.requirement("AT7", "B2"),
    pytest.mark.parametrize(
        "backend",
        [
            pytest.param(
                "bwrap",
                marks=pytest.mark.skipif(
                    sandbox_backend.find_program("bwrap", []) is None,
                    reason="bwrap is not installed (apt-get install bubblewrap)",
                ),
            ),
            pytest.param(
                "landlock",
                marks=pytest.mark.skipif(
                    sys.platform != "linux" or landlock_launcher.get_version() == 0,
                    reason="this kernel has no Landlock",
                ),
            ),
        ],
    ),
]


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that every user may enter, with files that every user may read."""
    base = tmp_path_factory.mktemp("attested")
    open_way_to(base)
    (base / "outside").write_text(CANARY)
    (base / "outside").chmod(0o644)
    monkeypatch.setenv("CANARY_KEY", CANARY)
    return base


def configure(base: Path, backend: str, **sections: Any) -> Config:
    sandbox = {"mode": "all", "backend": backend, "workspaceRoot": str(base / "boxes")}
    defaults = {"workspace": str(base / "work"), "sandbox": sandbox}
    return make_agents_config(agents={"defaults": defaults}, **sections)


def break_backend(base: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the program of a backend by one that starts commands without isolating their files."""
    if backend == "bwrap":
        program = base / "bin" / "bwrap"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(sandbox_backend, "PROGRAM_DIRECTORIES", (str(program.parent),))
        return
    restriction = "    _call(_RESTRICT_SELF, ruleset, 0)\n"
    source = Path(landlock_launcher.__file__).read_text()
    assert restriction in source
    launcher = base / "launcher.py"
    launcher.write_text(source.replace(restriction, ""))
    monkeypatch.setattr(landlock_launcher, "__file__", str(launcher))


async def call(agents: AgentsFixture, tool: str, **arguments: Any) -> str:
    """Let the rehearsal model call a tool in the group's session; return what it reads."""
    ended = await agents.ask(f"call {tool} {json.dumps(arguments)}", GROUP)
    return ended.reply or ended.error or ""


async def is_called_sandboxed(agents: AgentsFixture) -> bool:
    listed = await agents.use("sessions_list", GROUP, kinds=["group"])
    (row,) = listed["sessions"]
    status = (await agents.use("session_status", GROUP))["statusText"]
    assert row.get("sandboxed", False) == ("sandboxed" in status)
    return row.get("sandboxed", False)


def put_link(base: Path) -> None:
    """Make a link that leads out of the workspace, which has the file `marked`."""
    (found,) = (path for path in base.rglob("marked") if path.is_file())
    (found.parent / "link").symlink_to(base)


async def check_file_tools(agents: AgentsFixture, base: Path) -> None:
    """Try to leave the workspace with every file tool: by paths, and by a link that a command may have made."""
    await call(agents, "write", path="marked", content="mark")
    put_link(base)
    for path in (str(base / "outside"), "link/outside", "../outside", "../../../outside"):
        steps = (f"Delete File: {path}", f"Add File: {path}\n+changed")
        patches = [f"*** Begin Patch\n*** {step}\n*** End Patch" for step in steps]
        for tool, arguments in (
            ("read", {"path": path}),
            ("write", {"path": path, "content": "changed"}),
            ("edit", {"path": path, "oldText": "secret", "newText": "changed"}),
            *(("apply_patch", {"input": patch}) for patch in patches),
        ):
            shown = await call(agents, tool, **arguments)
            assert CANARY not in shown, (tool, path)
    assert (base / "outside").read_text() == CANARY


async def test_what_is_called_sandboxed_shows_no_tool_anything_of_the_host(base: Path, backend: str) -> None:
    config, state = configure(base, backend), base / "state"
    look = f"cat {base}/outside {state}/* /etc/passwd; env; tr '\\0' '\\n' < /proc/$PPID/environ; id -u; echo looked"
    async with open_agents_fixture(config, state) as agents:
        agents.app.examine_commands()
        await agents.open_sessions(GROUP)
        seen = await call(agents, "exec", command=look)
        assert "looked" in seen
        assert CANARY not in seen
        assert "root:x:0" not in seen
        if os.geteuid() == 0:
            assert "\n0\n" not in seen
        assert await is_called_sandboxed(agents)
        offered = set((await agents.operations.sessions.act_as(OPERATOR, GROUP)).actor.tools)
        at_work = {name for name in offered if not agents.app.toolbox.tools[name].reaches_sessions}
        assert at_work - {"session_status", "agents_list"} == WORK_TOOLS, "a tool that no check is about"
        spawned = await agents.use("sessions_spawn", GROUP, task="say .", sandbox="require")
        assert spawned["status"] == "accepted"
        await check_file_tools(agents, base)
    status = await Sandboxes(config, state).find_status("main")
    assert (status.backend, status.faults) == (backend, [])


async def test_a_backend_that_does_not_isolate_is_no_sandbox(
    base: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_backend(base, backend, monkeypatch)
    config, state = configure(base, backend), base / "state"
    async with open_agents_fixture(config, state) as agents:
        agents.app.examine_commands()
        await agents.open_sessions(GROUP)
        assert "no tool named 'exec'" in await call(agents, "exec", command=f"touch {base}/ran")
        assert not await is_called_sandboxed(agents)
        spawned = await agents.use("sessions_spawn", GROUP, task="say .", sandbox="require")
        assert (spawned["status"], spawned["reason"]) == ("forbidden", "sandbox")
        await check_file_tools(agents, base)
    status = await Sandboxes(config, state).find_status("main")
    assert status.backend is None
    assert [name for name, _ in status.faults] == [backend]
    assert not (base / "ran").exists()


async def test_the_sandbox_of_an_agent_without_commands_is_examined_too(base: Path, backend: str) -> None:
    config = configure(base, backend, tools={"exec": {"security": "deny"}})
    async with open_agents_fixture(config, base / "state") as agents:
        agents.app.examine_commands()
        await agents.open_sessions(GROUP)
        assert await call(agents, "write", path="file", content="x")
        assert await is_called_sandboxed(agents)
