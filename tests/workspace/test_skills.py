"""Skills of a workspace in the system prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.workspace import skills
from support.app_fixture import MAIN

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T3")]


def write_skill(workspace: Path, name: str, text: str) -> None:
    folder = workspace / "skills" / name
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(text)


async def read(workspace: Path, session: str = MAIN) -> list[str]:
    text = await skills.read_skills(workspace, session)
    return [line for line in text.splitlines() if line.startswith("- ")]


async def test_skills_are_listed_with_name_description_and_path(tmp_path: Path) -> None:
    assert await read(tmp_path) == []
    write_skill(tmp_path, "tea", '---\nname: Tea\ndescription: "Makes\ttea."\n---\nBoil: water.\n')
    write_skill(tmp_path, "plain", "No front matter.\nname: trick\n")
    write_skill(tmp_path, "long", f"---\ndescription: {'x' * 1000}\n---\n")
    (tmp_path / "skills" / "note.txt").write_text("no skill")
    outside = tmp_path / "outside.md"
    outside.write_text("---\nname: outside\n---\n")
    (tmp_path / "skills" / "linked").mkdir()
    (tmp_path / "skills" / "linked" / "SKILL.md").symlink_to("/etc/hostname")
    assert await read(tmp_path) == [
        f"- long (skills/long/SKILL.md): {'x' * skills.MAX_DESCRIPTION_CHARACTERS}",
        "- plain (skills/plain/SKILL.md): no description",
        "- Tea (skills/tea/SKILL.md): Makes tea.",
    ]
    assert await read(tmp_path, "agent:main:subagent:1") == []


async def test_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skills, "MAX_SKILLS", 2)
    for name in "abc":
        write_skill(tmp_path, name, "text")
    assert len(await read(tmp_path)) == 2
