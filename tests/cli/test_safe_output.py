"""What others wrote or configured reaches a terminal as text, and what is secret does not reach it at all."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from antiphon.bus import ToolPhase
from antiphon.cli import _output
from antiphon.cli._errors import report_error
from antiphon.cli._logging import configure_logging
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.config.addresses import mask_url
from antiphon.errors import AntiphonError
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R")
ESCAPE = "\x1b]0;owned\x07\x9b2J"


def harmless(text: str) -> bool:
    return not {"\x1b", "\x07", "\x9b"} & set(text)


# --- escapes ---


def test_a_role_cannot_command_a_terminal(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    folder.joinpath("sessions.json").write_text(json.dumps({"agent:main:main": {"sessionId": "s1"}}))
    lines = [
        {"type": "session", "version": 3, "id": "s1", "timestamp": "2024-01-01T00:00:00Z"},
        {
            "type": "message",
            "id": "e1",
            "timestamp": "2024-01-01T00:00:00Z",
            "message": {"role": ESCAPE, "content": "hello"},
        },
    ]
    folder.joinpath("s1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert program.run("sessions", "import", str(folder)).code == 0
    for arguments in (["--tools"], ["--tools", "--json"]):
        done = program.run("sessions", "history", "main", *arguments)
        assert "owned" in done.out
        assert harmless(done.out)
    assert done.json["messages"][0]["role"] == ESCAPE


def test_a_summary_cannot_command_a_terminal() -> None:
    assert harmless(_output.format_entry_text({"role": "compaction", "summary": ESCAPE}))


def test_an_imported_agent_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from antiphon.cli import _sessions_transfer
    from antiphon.transfers.import_source import ImportReport

    done = ImportReport(dry_run=False)
    done.unknown_agents = [ESCAPE]
    _sessions_transfer._print_import(done)  # pyright: ignore[reportPrivateUsage]
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert harmless(shown)


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--debug"]])
def test_an_error_cannot_command_a_terminal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report_error(AntiphonError(f"what {ESCAPE}", f"hint {ESCAPE}", problems=[f"problem {ESCAPE}"]), arguments)
    told = capsys.readouterr().err
    assert told.count("owned") >= 3
    assert harmless(told)


def test_names_on_the_screen_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", ESCAPE)
    screen.expect_answer("r")
    screen.show_event(
        ToolPhase(session_key="k", run_id="r", call_id="c", name=ESCAPE, phase="result", is_error=True)
    )
    screen.show_run_end("r", "error", "an answer", ESCAPE)
    shown = capsys.readouterr().out
    assert shown.count("owned") == 3
    assert harmless(shown)


def test_a_configuration_cannot_command_a_terminal(program: Program) -> None:
    program.configure({"models": {"providers": {f"p{ESCAPE}": {"models": [{"id": "m"}]}}}})
    for command in (["config", "check"], ["doctor"], ["config", "check", "--json"]):
        done = program.run(*command)
        assert "owned" in done.out + done.err
        assert harmless(done.out + done.err)


def test_the_log_cannot_command_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    configure_logging(tmp_path, debug=False)
    logging.root.warning("said %s", ESCAPE)
    for handler in logging.root.handlers:
        handler.close()
    written = (tmp_path / "antiphon.log").read_text()
    assert "owned" in written
    assert harmless(written)


# --- secrets ---


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:s3cret@h:81/v1?key=s3cret#s3cret", "http://h:81/v1"),
        ("https://[::1]:8080/v1", "https://[::1]:8080/v1"),
        ("http://user:s3c#s3cret@h/v1", "http://…"),
        ("http://user:s3c/s3cret@h/v1", "http://…"),
        ("http://[s3cret", "an invalid address"),
        ("http://h/v1;key=s3cret", "http://h/v1"),
        ("http://h/a;key=s3cret/v1;s3cret", "http://h/a/v1"),
        ("https://h/s3cretS3cretS3cret/v1", "https://h/…/v1"),
        ("https://h/v1/sk-s3cret", "https://h/v1/…"),
        ("https://h/openai/deployments/gpt-4o/", "https://h/openai/deployments/gpt-4o/"),
        (None, "the provider's public address"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str | None, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.fixture
def requests() -> Iterator[tuple[int, list[str]]]:
    """The port of a server, and what it was sent: the paths and credentials."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(f"{self.path} {self.headers.get('Authorization', '')}")
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, sent
        server.shutdown()
        thread.join(10)


def test_the_doctor_neither_shows_nor_sends_the_secrets_of_an_address(
    program: Program, requests: tuple[int, list[str]]
) -> None:
    port, sent = requests
    places = {"up": port, "down": 9}
    program.configure(
        {
            "models": {
                "providers": {
                    name: {"baseUrl": f"http://user:s3cret@127.0.0.1:{number}/v1?key=s3cret", "models": []}
                    for name, number in places.items()
                }
                | {"wrong": {"baseUrl": "http://[s3cret", "models": []}}
            }
        },
    )
    for arguments in ([], ["--online"]):
        done = program.run("doctor", *arguments)
        assert f"http://127.0.0.1:{port}/v1" in done.out
        assert "s3cret" not in done.out + done.err
        assert "'wrong' at an invalid address" in done.out
    assert "answers (HTTP 401)" in done.out
    assert sent == ["/v1 "]


# --- what else a command line has to get right ---


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999", "1e300", "-1"])
def test_minutes_are_a_finite_number(program: Program, value: str) -> None:
    refused = program.run("sessions", "list", f"--active={value}", "--json")
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert "--active" in refused.error["message"]


def test_a_conversation_has_the_loop_that_was_measured(program: Program) -> None:
    pytest.importorskip("uvloop")
    script = (
        "import gc, sys; from antiphon.cli import main; code = main(sys.argv[1:]);"
        " print(code, 'uvloop' in sys.modules, gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "chat", "--message", "say hello"],
        capture_output=True,
        encoding="utf-8",
        env=program.environ,
        timeout=BOUND,
        check=True,
    )
    assert done.stdout == "hello\n0 True 20000\n"
