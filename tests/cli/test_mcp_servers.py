"""`antiphon mcp add`, `list`, `test` and `remove` with real servers, and the configuration that they leave."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

import pyjson5
import pytest

from cli.gateways import up
from cli.terminal import Program
from support.mcp_servers import SCRIPTED_SERVER_FILE, describe_scripted_server, find_processes

pytestmark = pytest.mark.requirement("M1", "AT18")

PLAIN = [sys.executable, "-I", "-S", str(SCRIPTED_SERVER_FILE), "plain"]
BROKEN = [*PLAIN[:-1], "exit"]
COMMENTED = "{\n  // the port of the house\n  gateway: { port: 18789 },\n}\n"


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


def read_config(program: Program) -> dict[str, Any]:
    return pyjson5.decode((program.state / "config.json5").read_text())


def write_config(program: Program, text: str) -> None:
    program.configure({})
    (program.state / "config.json5").write_text(text)


def test_a_server_is_added_tried_listed_and_removed(program: Program) -> None:
    write_config(program, COMMENTED)
    added = program.run("mcp", "add", "notes", "-e", "LEVEL=3", "-e", "HOME", "--trust", "--", *PLAIN)
    assert added.code == 0, added.err
    assert "offers 4 tools" in added.out and "mcp__notes__echo  Tool echo." in added.out
    written = (program.state / "config.json5").read_text()
    assert (
        "// the port of the house" in written and (program.state / "config.json5").stat().st_mode & 0o77 == 0
    )
    assert read_config(program)["mcp"]["servers"]["notes"] == {
        "command": PLAIN[0],
        "args": PLAIN[1:],
        "env": {"LEVEL": "3", "HOME": {"env": "HOME"}},
        "trust": True,
    }
    [listed] = program.run("mcp", "list", "--json").json["servers"]
    assert (listed["name"], listed["state"], listed["tools"]) == ("notes", "idle", 4)
    assert listed["lastContactAt"] > 0
    assert "mcp__notes__echo" in program.run("tools").out  # known before any gateway has started
    tried = program.run("mcp", "test", "notes", "--json")
    assert tried.code == 0 and tried.json["servers"][0]["state"] == "ready"
    removed = program.run("mcp", "remove", "notes")
    assert removed.code == 0 and "Removed 'notes'" in removed.out
    assert read_config(program)["mcp"]["servers"] == {}
    assert "// the port of the house" in (program.state / "config.json5").read_text()
    assert list((program.state / "mcp").glob("*.json")) == []
    assert "No MCP server is configured" in program.run("mcp", "list").out
    assert find_processes(str(SCRIPTED_SERVER_FILE)) == []


def test_what_cannot_be_used_is_not_added_unless_asked_for(program: Program) -> None:
    refused = program.run("mcp", "add", "broken", "--json", "--", *BROKEN)
    assert refused.code == 5 and not (program.state / "config.json5").exists()
    assert "cannot find the database" in refused.error["message"] and "\x1b" not in refused.err
    assert program.run("mcp", "add", "broken", "--no-test", "--", *BROKEN).code == 0
    assert program.run("mcp", "add", "notes", "--", *PLAIN).code == 0
    again = program.run("mcp", "add", "notes", "--", *PLAIN)
    assert again.code == 2 and "--replace" in again.err
    assert program.run("mcp", "add", "notes", "--replace", "--tool", "ec*", "--", *PLAIN).code == 0
    tried = program.run("mcp", "test", "--json")
    assert tried.code == 5
    assert {server["name"]: server["state"] for server in tried.json["servers"]} == {
        "broken": "failed",
        "notes": "ready",
    }
    assert [tool["name"] for tool in tried.json["servers"][1]["tools"]] == ["mcp__notes__echo"]
    shown = program.run("mcp", "list").out
    assert "cannot find the database" in shown and "failed" in shown
    rows = {row["name"]: row for row in program.run("mcp", "list", "--json").json["servers"]}
    assert (rows["notes"]["tools"], rows["notes"]["offeredTools"]) == (4, 1)
    assert "'notes' offers 1 tool\n" in program.run("doctor").out
    assert program.run("mcp", "test", "other").code == 3
    assert program.run("mcp", "remove", "other").code == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("x",), "Give a name"),
        (("x", "npx", "-y", "foo"), "put `--` before the command"),
        (("x", "--header", "A: b", "--", "prog"), "--header is for a URL"),
        (("x", "http://localhost/mcp", "--env", "A"), "--env is for programs"),
        (("x", "http://localhost/mcp", "more"), "takes no arguments"),
        (("x", "http://localhost/mcp", "-H", "nothing"), "is not a header"),
        (("x\n", "http://localhost/mcp"), "not a valid name"),
        (("x", "--timeout", "0", "--", "prog"), "timeout"),
    ],
)
def test_what_makes_no_sense_is_refused(program: Program, arguments: tuple[str, ...], expected: str) -> None:
    done = program.run("mcp", "add", *arguments)
    assert done.code in (2, 6) and expected in done.err
    assert not (program.state / "config.json5").exists()


def test_the_cause_is_shown_and_not_the_advice_after_it(program: Program) -> None:
    printed = """npm warn old thing
    throw new Error("quoted")
npm error code E404
npm error 404 Not Found
npm error A complete log of this run can be found in: /x.log"""
    refused = program.run("mcp", "add", "x", "--json", "--", "sh", "-c", 'echo "$0" >&2; exit 1', printed)
    assert refused.code == 5
    assert refused.error["message"].endswith("npm error code E404.")


def test_an_address_that_answers_something_else_is_described_in_words(program: Program) -> None:
    class Nonsense(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"220 mail.example.com ESMTP\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        refused = program.run("mcp", "add", "x", f"http://127.0.0.1:{server.server_address[1]}/mcp", "--json")
        server.shutdown()
        thread.join()
    assert refused.code == 5
    assert (
        "without a valid HTTP answer" in refused.error["message"] and "Error)" not in refused.error["message"]
    )


def test_servers_stay_where_they_are_written(program: Program) -> None:
    program.configure({"mcpServers": {"a": describe_scripted_server("plain")}})
    assert program.run("mcp", "add", "b", "--no-test", "--", "prog").code == 0
    assert program.run("mcp", "add", "a", "--replace", "--no-test", "--", "prog").code == 0
    assert read_config(program) == {"mcpServers": {"a": {"command": "prog"}, "b": {"command": "prog"}}}
    assert "b" not in program.run("mcp", "remove", "b", "--json").err
    assert read_config(program) == {"mcpServers": {"a": {"command": "prog"}}}


def test_what_cannot_be_written_is_shown_to_be_pasted(program: Program, tmp_path: Path) -> None:
    (tmp_path / "state").symlink_to(tmp_path / "nowhere" / "state")
    (tmp_path / "nowhere").write_text("")
    done = program.run("mcp", "add", "notes", "--no-test", "--", "prog", "--flag")
    assert done.code == 6, done.err
    pasted = done.err[done.err.index("{") : done.err.rindex("}") + 1]
    assert pyjson5.decode(pasted) == {"mcp": {"servers": {"notes": {"command": "prog", "args": ["--flag"]}}}}


def test_a_person_is_asked_for_everything(program: Program) -> None:
    with program.terminal("mcp", "add") as terminal:
        terminal.expect("Name")
        terminal.type("notes")
        terminal.expect("Command, or URL")
        terminal.type(json.dumps(PLAIN[0]) + " " + " ".join(PLAIN[1:]))
        terminal.expect("Variable it needs")
        terminal.type("LEVEL=3")
        terminal.expect("Variable it needs")
        terminal.type("")
        terminal.expect("Added 'notes'")
        terminal.expect("offers 4 tools")
        terminal.expect("mcp__notes__echo")
        assert terminal.ended() == 0
    assert read_config(program)["mcp"]["servers"]["notes"]["env"] == {"LEVEL": "3"}
    with program.terminal("mcp", "add", "broken", "--", *BROKEN) as terminal:
        terminal.expect("cannot find the database")
        terminal.expect("Add it anyway")
        terminal.type("n")
        assert terminal.ended() == 5
    assert list(read_config(program)["mcp"]["servers"]) == ["notes"]


def test_a_running_gateway_shows_the_states_and_is_not_disturbed(program: Program) -> None:
    program.configure(
        {
            "mcp": {
                "servers": {
                    "good": describe_scripted_server("plain"),
                    "bad": describe_scripted_server("exit"),
                    "off": {"command": "prog", "disabled": True},
                }
            }
        }
    )
    with up(program) as gateway:
        assert program.run("agent", "--message", "say hello").code == 0  # which waits for the first lists
        states = {row["name"]: row for row in program.run("mcp", "list", "--json").json["servers"]}
        assert {name: row["state"] for name, row in states.items()} == {
            "good": "ready",
            "bad": "failed",
            "off": "disabled",
        }
        assert "cannot find the database" in states["bad"]["reason"]
        assert program.run("mcp", "test", "good").code == 0
        again = program.run("mcp", "list", "--json").json["servers"]
        assert again[0]["state"] == "ready" and again[0]["connections"] == 1
        added = program.run("mcp", "add", "more", "--no-test", "--", "prog")
        assert "after a restart" in added.out
        assert program.run("mcp", "remove", "good").code == 0
        changed = {row["name"]: row for row in program.run("mcp", "list", "--json").json["servers"]}
        assert changed["more"]["state"] == "new" and "after a restart" in changed["more"]["reason"]
        assert changed["good"]["state"] == "ready" and changed["good"]["reason"].startswith("removed from")
        assert gateway.stop() == 0
    left = {row["name"]: row["state"] for row in program.run("mcp", "list", "--json").json["servers"]}
    assert left == {"bad": "failed", "more": "idle", "off": "disabled"}


def test_variables_in_texts_are_replaced(program: Program) -> None:
    """As people write it for other programs: `Bearer ${TOKEN}`."""
    server = describe_scripted_server("plain", env={"STARTS_FILE": "${WHERE}/starts"})
    program.configure({"mcpServers": {"s": server}})
    missing = program.run("mcp", "test", "s")
    assert missing.code == 5 and "'WHERE'" in missing.out
    given = Program(program.home, program.bytecode, {"WHERE": str(program.home)})
    assert given.run("mcp", "test", "s").code == 0
    assert (program.home / "starts").exists()


def test_doctor_names_each_server_and_why_it_cannot_be_used(program: Program) -> None:
    servers = {
        "good": describe_scripted_server("plain"),
        "bad": describe_scripted_server("exit"),
        "missing": {"command": "/does/not/exist"},
        "secret": describe_scripted_server("plain", env={"A": {"env": "NOT_SET_HERE"}}),
        "off": {"command": "prog", "enabled": False},
    }
    program.configure({"mcp": {"servers": servers}})

    def diagnose(*options: str) -> dict[str, tuple[str, str]]:
        found = program.run("doctor", "--json", *options).json["findings"]
        shown = [finding for finding in found if finding["check"] == "mcp"]
        return {each["what"].split("'")[1]: (each["level"], each["what"]) for each in shown}

    before = diagnose()
    assert {name: level for name, (level, _) in before.items()} == {
        "good": "ok",
        "bad": "ok",  # not known before it was tried
        "missing": "warn",
        "secret": "warn",
    }
    assert "is not found" in before["missing"][1] and "NOT_SET_HERE" in before["secret"][1]
    online = diagnose("--online")
    assert online["good"] == ("ok", "'good' offers 4 tools")
    assert online["bad"][0] == "warn" and "cannot find the database" in online["bad"][1]
    program.configure({"mcp": {"servers": {"bad": {**servers["bad"], "required": True}}}})
    assert diagnose()["bad"][0] == "fail"
