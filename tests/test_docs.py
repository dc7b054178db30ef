"""What the documents show works: configurations load, Python runs, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyjson5
import pytest

from antiphon.config import parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(language: str) -> list[tuple[str, str]]:
    found = [(page, match) for page in PAGES for match in BLOCK.finditer(page.read_text("utf-8"))]
    return [(page.name, match[2]) for page, match in found if match[1] == language]


@pytest.mark.requirement("C")
@pytest.mark.parametrize(("page", "text"), blocks("json5"))
def test_configurations_in_the_documents_load(page: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_agents", ModuleType("my_agents"))  # the reader's own
    config, warnings = parse(pyjson5.decode(text))
    assert config.agent_ids, page
    assert not warnings, page


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_in_the_documents_runs(page: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_documents_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]
    assert missing == []
