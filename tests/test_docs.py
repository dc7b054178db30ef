"""The examples in the documents work: configurations load, Python runs, requests succeed, and links resolve."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import httpx2
import pyjson5
import pytest

from antiphon.cli import root
from antiphon.config import parse
from antiphon.gateway.methods import METHODS_BY_NAME
from cli.gateways import token, up
from cli.terminal import BOUND, Program

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")


def list_blocks(language: str) -> list[tuple[str, str]]:
    found = [(page, match) for page in PAGES for match in BLOCK.finditer(page.read_text("utf-8"))]
    return [(page.name, match[2]) for page, match in found if match[1] == language]


@pytest.mark.requirement("C")
@pytest.mark.parametrize(("page", "text"), list_blocks("json5"))
def test_configurations_in_the_documents_load(page: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_agents", ModuleType("my_agents"))  # the reader's own
    monkeypatch.setattr("shutil.which", lambda name: name)  # type: ignore[misc]
    config, warnings = parse(pyjson5.decode(text))
    assert config.agent_ids, page
    assert not warnings, page


@pytest.mark.parametrize(("page", "text"), list_blocks("python"))
def test_python_in_the_documents_runs(page: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"


def list_commands() -> list[str]:
    """The commands of Antiphon in the documents, as they are written."""
    texts = [text.replace("\\\n", " ") for _, text in list_blocks("sh")]
    return [line for text in texts for line in text.splitlines() if line.split()[:1] == ["antiphon"]]


@pytest.mark.requirement("R")
@pytest.mark.parametrize("line", list_commands())
def test_commands_in_the_documents_exist_with_their_options(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is asked for its help, which it gives only if it knows all options that are there."""
    words = shlex.split(line, comments=True)[1:]
    if ">" in words:
        words = words[: words.index(">")]
    first = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    root.main([*words[:first], "--help", *words[first:]], prog_name="antiphon", standalone_mode=False)
    assert "Usage: antiphon" in capsys.readouterr().out


CURLS = [text for _, text in list_blocks("sh") if text.startswith("curl ")]


@pytest.mark.requirement("W5")
def test_requests_in_the_documents_are_answered(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The requests are sent as shown, except for the port."""
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    secret = "a secret of the hooks"
    program.configure(
        {
            "gateway": {"http": {"endpoints": {"chatCompletions": {"enabled": True}}}},
            "hooks": {"enabled": True, "token": secret},
        }
    )
    with up(program) as gateway:
        known = {"$ANTIPHON_TOKEN": token(program), "$HOOKS_TOKEN": secret}
        completion, hook = (text.replace(":18789", f":{gateway.port}") for text in CURLS)
        assert _send_curl_request(completion, known).json()["choices"][0]["message"]["content"] == "hello"
        answer = _send_curl_request(hook, known).json()
        assert answer["ok"]
        assert _send_curl_request(hook, known).json() == answer


def _send_curl_request(text: str, known: dict[str, str]) -> httpx2.Response:
    """Send the request that this curl command describes."""
    program, url, *words = shlex.split(text.replace("\\\n", " "))
    assert program == "curl"
    options = list(zip(words[::2], words[1::2], strict=True))
    headers = dict(_parse_header(value, known) for option, value in options if option == "-H")
    (body,) = (value for option, value in options if option == "-d")
    answer = httpx2.post(url, headers=headers, content=body, timeout=BOUND)
    assert answer.status_code == 200, answer.text
    return answer


def _parse_header(text: str, known: dict[str, str]) -> tuple[str, str]:
    for name, value in known.items():
        text = text.replace(name, value)
    name, value = text.split(": ", 1)
    return name, value


@pytest.mark.requirement("W2")
def test_the_protocol_page_lists_every_method_with_its_scope() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    section = page.split("### Methods")[1].split("\n### ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    documented = {name: scope.strip() for names, scope in rows for name in re.findall(r"`([^`]+)`", names)}
    assert documented == {name: method.scope for name, method in METHODS_BY_NAME.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_documents_resolve(page: Path) -> None:
    broken: list[str] = []
    for path, fragment in LINK.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in _list_anchors(target)):
            broken.append(f"{path}#{fragment}")
    assert broken == []


def _list_anchors(page: Path) -> list[str]:
    """List the anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", ["AGENTS.md", "docs/architecture.md"])
def test_the_maps_name_files_that_exist(page: str) -> None:
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.sql|\.md|/))`", (ROOT / page).read_text("utf-8")))
    bases = [ROOT, ROOT / "src/antiphon", ROOT / "src/antiphon/engine", ROOT / "src/antiphon/gateway"]
    assert {name for name in named if not any((base / name).exists() for base in bases)} == set()


def test_the_map_names_every_part() -> None:
    source = ROOT / "src/antiphon"
    parts = {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    parts |= {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", (ROOT / "AGENTS.md").read_text("utf-8")))
    assert parts - named == set()
