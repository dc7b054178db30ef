"""The skills of a workspace in the system prompt: names and descriptions. The model reads a skill when it needs it.

A skill is a directory `skills/<name>/` with a file SKILL.md that begins with `name` and `description` between two lines
`---`. Sub-agents are not shown any.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import NamedTuple

from antiphon import keys
from antiphon.errors import AntiphonError
from antiphon.workspace.directory import WorkspaceDirectory

SKILLS_DIRECTORY_NAME, SKILL_FILE_NAME = "skills", "SKILL.md"
MAX_SKILLS = 100
MAX_SKILL_FILE_BYTES = 256 * 1024
MAX_NAME_CHARACTERS, MAX_DESCRIPTION_CHARACTERS = 64, 300
SKILLS_HEADING = (
    "# Skills\n\nBefore a task that one of these describes, read its file with the tool `read` and follow it."
)
_FRONT_MATTER_PATTERN = re.compile(r"\A---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)


class Skill(NamedTuple):
    name: str
    description: str
    path: str


def has_skills(workspace: Path) -> bool:
    """Whether the workspace has a directory of skills."""
    return os.path.isdir(f"{workspace}/{SKILLS_DIRECTORY_NAME}")  # noqa: PTH112 - before every run


async def read_skills(workspace: Path, session_key: str) -> str:
    """Return the part of the system prompt that lists the skills; empty without any."""
    if keys.parse(session_key).is_spawned:
        return ""
    skills = await asyncio.to_thread(_load_skills, workspace)
    lines = [f"- {skill.name} ({skill.path}): {skill.description}" for skill in skills]
    return "\n\n".join([SKILLS_HEADING, "\n".join(lines)]) if lines else ""


def _load_skills(workspace: Path) -> list[Skill]:
    found: list[Skill] = []
    try:
        with WorkspaceDirectory(workspace) as directory:
            for name in sorted(os.listdir(workspace / SKILLS_DIRECTORY_NAME))[:MAX_SKILLS]:  # noqa: PTH208
                path = f"{SKILLS_DIRECTORY_NAME}/{name}/{SKILL_FILE_NAME}"
                try:
                    data = directory.read_file(path, MAX_SKILL_FILE_BYTES).data
                except AntiphonError:
                    continue  # not a skill, or it leads outside
                found.append(_parse_skill(name, path, data.decode(errors="replace")))
    except OSError:
        return found
    return found


def _parse_skill(directory_name: str, path: str, text: str) -> Skill:
    matched = _FRONT_MATTER_PATTERN.match(text.replace("\r\n", "\n"))
    fields: dict[str, str] = {}
    for line in matched[1].split("\n") if matched else ():
        key, colon, value = line.partition(":")
        if colon and key == key.strip():
            fields[key.lower()] = value.strip().strip("\"'")
    return Skill(
        _shorten(fields.get("name") or directory_name, MAX_NAME_CHARACTERS),
        _shorten(fields.get("description") or "no description", MAX_DESCRIPTION_CHARACTERS),
        path,
    )


def _shorten(text: str, max_characters: int) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(shown.split())[:max_characters]
