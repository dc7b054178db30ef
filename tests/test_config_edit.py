"""Changes of the config file: the member changes, and everything else stays byte for byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyjson5
import pytest

from antiphon.config.edit import format_member, remove_member, set_member
from antiphon.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json5"))
SERVER = {"command": "npx", "args": ["-y", "@x/y", 'a "b"'], "env": {"TOKEN": {"env": "TOKEN"}}}
KEYS = ("mcp", "servers", "my notes")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    path.chmod(0o600)
    return path


def add(document: dict[str, Any], server: object = SERVER) -> dict[str, Any]:
    document.setdefault("mcp", {}).setdefault("servers", {})["my notes"] = server
    return document


LAYOUTS = {
    "empty": "{}",
    "empty lines": "{\n\n}\n",
    "only a comment": "{ // nothing yet\n}\n",
    "one line": "{ gateway: { port: 1 } }",
    "no final comma": "{\n  // why\n  gateway: { port: 1 } // the port\n}\n",
    "final comma": "{\n  gateway: {\n    port: 1,\n  }, /* why */\n}\n",
    "json": '{\n\t"gateway": {\n\t\t"port": 1\n\t},\n\t"mcp": {"servers": {}}\n}\n',
    "other server": "{\n  mcp: {\n    servers: {\n      a: { command: 'a' }, // first\n      // last\n    },\n  },\n}",
    "crlf": "{\r\n  // why\r\n  gateway: { port: 1 },\r\n}\r\n",
    "byte order mark": "\ufeff{\n  gateway: { port: 1 }\n}\n",
    "comment at the end": "{ gateway: { port: 1 } // ends here\n}",
    "text like code": '{ a: \'}{,//\', "b\\u0063": "/* no\\\n */", list: [{ mcp: 1 }, [], -1] }',
}


@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_a_member_is_added_and_removed_without_other_changes(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "config.json5", text)
    before = pyjson5.decode(text.removeprefix("\ufeff"))
    set_member(path, KEYS, SERVER)
    changed = path.read_bytes().decode()
    assert pyjson5.decode(changed.removeprefix("\ufeff")) == add(before)
    for comment in (
        "// why",
        "// the port",
        "/* why */",
        "// first",
        "// last",
        "// nothing yet",
        "// ends here",
    ):
        assert (comment in text) == (comment in changed)
    assert ("\r\n" in text) == ("\r\n" in changed) and changed.count("\r") == changed.count("\r\n")
    assert changed.startswith("\ufeff") == text.startswith("\ufeff")
    set_member(path, KEYS, {"url": "http://localhost/mcp"})
    replaced = path.read_bytes().decode().removeprefix("\ufeff")
    assert pyjson5.decode(replaced)["mcp"]["servers"]["my notes"] == {"url": "http://localhost/mcp"}
    remove_member(path, KEYS)
    del before["mcp"]["servers"]["my notes"]
    assert pyjson5.decode(path.read_bytes().decode().removeprefix("\ufeff")) == before
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("original", CONFIGS, ids=lambda path: path.stem)
def test_configurations_of_people_keep_their_comments(tmp_path: Path, original: Path) -> None:
    text = original.read_text()
    path = write(tmp_path / "config.json5", text)
    set_member(path, KEYS, SERVER)
    changed = path.read_text()
    assert pyjson5.decode(changed) == add(pyjson5.decode(text))
    lines = iter(changed.splitlines())
    for line in text.splitlines():  # all lines are there in their order; one may have got a comma
        assert any(other.rstrip(",") == line.rstrip(",") for other in lines), line


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("end", [",", ""])
def test_each_of_several_members_can_be_removed(tmp_path: Path, gone: str, end: str) -> None:
    for text in (
        f"{{ s: {{ a: 1, b: {{ x: [2] }}, c: 3{end} }} }}",
        f"{{\n  s: {{\n    // one\n    a: 1, // two\n    b: {{\n      x: [2],\n    }},\n    c: 3{end}\n  }},\n}}\n",
    ):
        path = write(tmp_path / "config.json5", text)
        remove_member(path, ("s", gone))
        expected = pyjson5.decode(text)
        del expected["s"][gone]
        left = path.read_text()
        assert pyjson5.decode(left) == expected
        assert "// one" not in text or "// one" in left
        assert "\n\n" not in left and "\n    \n" not in left


def test_json_stays_json(tmp_path: Path) -> None:
    text = '{\n\t"gateway": {\n\t\t"port": 1\n\t}\n}\n'
    path = write(tmp_path / "config.json", text)
    set_member(path, KEYS, SERVER)
    assert json.loads(path.read_text()) == add(json.loads(text))
    assert '\n\t"mcp": {\n\t\t"servers": {\n\t\t\t"my notes": {\n\t\t\t\t"command"' in path.read_text()
    remove_member(path, ("mcp",))
    assert path.read_text() == text


def test_a_new_file_is_private_and_a_link_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "state" / "config.json5"
    set_member(target, KEYS, SERVER)
    assert pyjson5.decode(target.read_text()) == add({})
    assert target.stat().st_mode & 0o777 == 0o600
    target.chmod(0o640)
    link = tmp_path / "link.json5"
    link.symlink_to(target)
    set_member(link, KEYS, {"command": "other"})
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert pyjson5.decode(target.read_text()) == add({}, {"command": "other"})
    assert list(target.parent.iterdir()) == [target]


def test_a_link_in_place_of_the_draft_is_not_followed(tmp_path: Path) -> None:
    """The directory may belong to another user, and the program run as root."""
    path, other = write(tmp_path / "config.json5", "{\n}\n"), write(tmp_path / "other", "mine")
    other.chmod(0o644)
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(other)
    set_member(path, KEYS, SERVER)
    assert other.read_text() == "mine"
    assert pyjson5.decode(path.read_text())["mcp"]["servers"]["my notes"] == SERVER
    assert {each.name for each in tmp_path.iterdir()} == {"config.json5", "other"}


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken.json5", "{ a: ")
    with pytest.raises(ConfigError, match="is not JSON5"):
        set_member(broken, KEYS, SERVER)
    assert broken.read_text() == "{ a: "
    folder = tmp_path / "file"
    folder.write_text("")
    with pytest.raises(ConfigError, match="could not be written"):
        set_member(folder / "config.json5", KEYS, SERVER)


def test_what_is_shown_to_be_pasted_is_the_same() -> None:
    assert pyjson5.decode(format_member(KEYS, SERVER)) == add({})
