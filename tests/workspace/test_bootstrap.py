"""Files of a workspace in the system prompt: which, how much of them, and after a change."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from antiphon.config import AgentConfig, parse
from antiphon.workspace import bootstrap
from antiphon.workspace.bootstrap import BootstrapReader
from support.agents_fixture import ScriptedAgent, make_agents_config, open_agents_fixture
from support.app_fixture import MAIN

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T3")]

GROUP, CHILD = "agent:main:discord:group:1", "agent:main:subagent:1"
NAMES = ("AGENTS.md", "SOUL.md", "USER.md", "IDENTITY.md", "TOOLS.md", "MEMORY.md")


def make_agent(workspace: Path | None, **settings: int) -> AgentConfig:
    entry = {"id": "main", **({"workspace": str(workspace)} if workspace else {}), **settings}
    config, warnings = parse({"agents": {"list": [entry]}})
    assert warnings == ()
    return config.get_agent("main")


@pytest.mark.parametrize(
    ("session", "names"), [(MAIN, NAMES), (GROUP, NAMES[:-1]), (CHILD, ("AGENTS.md", "TOOLS.md"))]
)
async def test_a_session_reads_the_files_meant_for_it(
    tmp_path: Path, session: str, names: tuple[str, ...]
) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(f"the text of {name}\n")
    text = await BootstrapReader(tmp_path).read(make_agent(tmp_path), session)
    assert text.split("\n\n## ")[1:] == [f"{name}\n\nthe text of {name}" for name in names]


async def test_long_files_are_cut_and_say_so(tmp_path: Path) -> None:
    for name in NAMES[:3]:
        (tmp_path / name).write_text("x" * 100)
    agent = make_agent(tmp_path, bootstrapMaxChars=60, bootstrapTotalMaxChars=100)
    text = await BootstrapReader(tmp_path).read(agent, MAIN)
    assert text.count("x") == 100
    assert "[AGENTS.md is cut after 60 of 100 characters.]" in text
    assert "[SOUL.md is cut after 40 of 100 characters.]" in text
    assert "[USER.md is cut after 0 of 100 characters.]" in text


async def test_a_file_is_read_again_only_after_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def read_text(workspace: Path, name: str) -> str:
        reads.append(name)
        return (workspace / name).read_text()

    monkeypatch.setattr(bootstrap, "_read_text", read_text)
    reader, agent = BootstrapReader(tmp_path), make_agent(tmp_path)
    assert await reader.read(agent, MAIN) == ""
    (tmp_path / "SOUL.md").write_text("calm")
    assert "calm" in await reader.read(agent, MAIN)
    assert "calm" in await reader.read(agent, MAIN)
    assert reads == ["SOUL.md"]
    (tmp_path / "SOUL.md").write_text("kind")
    os.utime(tmp_path / "SOUL.md", (1, 1))
    assert "kind" in await reader.read(agent, MAIN)
    (tmp_path / "SOUL.md").unlink()
    assert await reader.read(agent, MAIN) == ""


async def test_unchanged_files_of_the_state_directory_cost_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "workspaces" / "main"
    reader, agent = BootstrapReader(tmp_path), make_agent(None)
    assert await reader.read(agent, MAIN) == ""
    workspace.mkdir(parents=True)
    (workspace / "SOUL.md").write_text("calm")
    await asyncio.sleep(0)  # runs that start in one iteration of the event loop share one look
    assert "calm" in await reader.read(agent, MAIN)

    async def refuse_thread(*_: object) -> None:
        pytest.fail("used a thread")

    monkeypatch.setattr(bootstrap.asyncio, "to_thread", refuse_thread)
    assert "calm" in await reader.read(agent, MAIN)
    monkeypatch.undo()
    (workspace / "SOUL.md").write_text("very kind")
    await asyncio.sleep(0)
    assert "very kind" in await reader.read(agent, MAIN)


@pytest.mark.requirement("AT11")
async def test_a_link_that_leads_outside_is_not_read(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (tmp_path / "secret").write_text("a secret")
    (workspace / "AGENTS.md").symlink_to(tmp_path / "secret")
    text = await BootstrapReader(tmp_path).read(make_agent(workspace), MAIN)
    assert "a secret" not in text and "[AGENTS.md could not be read." in text


async def test_they_are_in_the_instructions_of_a_run(tmp_path: Path) -> None:
    workspace = tmp_path / "workspaces" / "main"
    workspace.mkdir(parents=True)
    (workspace / "SOUL.md").write_text("You are calm.")
    main = ScriptedAgent(".")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": main}) as agents:
        await agents.ask("hello")
    assert "# Files of your workspace\n\n## SOUL.md\n\nYou are calm." in main.prompts[0].instructions
