"""`antiphon up`: it starts, says how to reach it, stops when told, and loses nothing by that."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from antiphon.errors import ConfigError
from antiphon.gateway.server import open_listener
from cli.gateways import token, up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R")


def test_the_first_success(program: Program) -> None:
    with up(program) as gateway:
        assert gateway.facts == {
            "url": gateway.url,
            "pid": gateway.process.pid,
            "stateDir": str(program.state),
            "tokenFile": str(program.state / "tokens.json"),
            "warnings": [],
        }
        assert program.say("say hello") == "hello\n"
        assert gateway.stop() == 0
    assert not (program.state / "gateway.json").exists()
    assert "hello" in program.run("sessions", "history", "main").out


def test_a_person_is_told_where_everything_is(program: Program) -> None:
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(r"is up \(process \d+\)")
        terminal.expect(r"ws://127\.0\.0\.1:\d+ and http://127\.0\.0\.1:\d+")
        terminal.expect("rehearsal/rehearsal")
        terminal.expect("tokens.json")
        terminal.expect("No model provider is configured")
        terminal.expect("antiphon chat")
        terminal.interrupt()
        terminal.expect("Stopping… active runs continue at the next start")
        assert terminal.ended() == 0
        assert token(program) not in terminal.text


def test_a_rehearsal_beside_configured_providers_is_named(program: Program) -> None:
    provider = {"baseUrl": "http://127.0.0.1:9/v1", "models": [{"id": "m"}]}
    model = {"defaults": {"model": "rehearsal/rehearsal"}}
    program.configure({"agents": model, "models": {"providers": {"fake": provider}}})
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(r"uses the built-in rehearsal model, not a provider \(fake\)")
        terminal.interrupt()
        assert terminal.ended() == 0
        assert "No model provider is configured" not in terminal.text


def test_the_token_is_nowhere_but_in_its_private_file(program: Program) -> None:
    with up(program) as gateway:
        program.say("say hello")
        program.run("status", "--debug")
        arguments = Path(f"/proc/{gateway.process.pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{gateway.process.pid}/environ").read_bytes()
        secret = token(program).encode()
        assert secret not in arguments + environment
        assert secret.decode() not in json.dumps(gateway.facts)
        assert gateway.stop() == 0
    files = [path for path in program.state.rglob("*") if path.is_file()]
    holding = [file.name for file in files if secret in file.read_bytes()]
    assert holding == ["tokens.json"]
    assert (program.state / "tokens.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.requirement("G2")
def test_a_run_in_flight_goes_on_at_the_next_start(program: Program, how: signal.Signals) -> None:
    with up(program) as gateway:
        accepted = program.run("send", "main", "slow 3 a long answer", "--key", "k1", "--json")
        assert accepted.json["state"] == "queued"
        assert gateway.stop(how) == (0 if how != signal.SIGKILL else -signal.SIGKILL)
    kept = program.run("status", "--json").json
    assert (kept["running"], kept["sessions"]) == (False, 1)
    assert sum(kept["runs"].values()) == 1
    with up(program):
        again = program.run("send", "main", "slow 3 a long answer", "--key", "k1", "--wait", "50")
        assert (again.code, again.out) == (0, "a long answer\n")
        history = program.run("sessions", "history", "main", "--json").json
        assert [item["role"] for item in history["messages"]] == ["user", "assistant"]


@pytest.mark.requirement("G13")
def test_one_gateway_for_each_directory(program: Program) -> None:
    with up(program) as gateway:
        second = program.run("up", "--port", "0", "--json")
        assert (second.code, second.error["code"]) == (7, "store_locked")
        assert second.error["data"] == {"pid": str(gateway.process.pid), "url": gateway.url}
        assert gateway.url in program.run("up", "--port", "0").err
        assert program.say("say still here") == "still here\n"


@pytest.mark.parametrize(
    "gateway",
    [{"bind": "tailnet"}, {"bind": "custom", "customBindHost": "192.0.2.1"}],
    ids=["unknown", "foreign"],
)
def test_an_address_that_cannot_be_listened_on_is_a_mistake_in_the_configuration(
    program: Program, gateway: dict[str, str]
) -> None:
    program.configure({"gateway": gateway})
    refused = program.run("up", "--port", "0", "--json")
    assert (refused.code, refused.error["code"]) == (6, "config_invalid")
    assert "gateway.customBindHost to a" in refused.error["hint"]
    assert "Unknown error" not in refused.error["message"]
    examined = program.run("doctor", "--json")
    [found] = [finding for finding in examined.json["findings"] if finding["level"] == "fail"]
    assert (examined.code, found["check"], found["nextStep"]) == (1, "port", refused.error["hint"])
    assert program.run("config", "check").code == 0
    assert program.say("say hello") == "hello\n"


def test_a_host_without_an_address_is_named_with_the_reason() -> None:
    with pytest.raises(ConfigError) as refused:
        open_listener("no such host", 0)
    assert "Unknown error" not in refused.value.what


def test_a_port_that_is_in_use(program: Program) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = program.run("up", "--port", str(port), "--json")
    assert (refused.code, refused.error["code"], refused.error["data"]["port"]) == (5, "unavailable", port)
    assert "--port" in refused.error["hint"]


def test_a_port_that_is_none(program: Program) -> None:
    assert program.run("up", "--port", "70000").code == 2


def test_it_is_stopped_by_a_command(program: Program) -> None:
    none = program.run("stop", "--json")
    assert (none.code, none.error["code"]) == (3, "not_found")
    with up(program) as gateway:
        done = program.run("stop")
        gateway.process.communicate(timeout=BOUND)
        assert (done.code, gateway.process.returncode) == (0, 0), done.err
        assert done.out == f"Stopped the gateway at {gateway.url} (process {gateway.facts['pid']}).\n"
    assert program.run("stop").code == 3


def test_the_log_is_shown_and_followed(program: Program) -> None:
    program.state.mkdir(mode=0o700, parents=True)
    assert program.run("logs").code == 0
    log = program.state / "antiphon.log"
    entry = {
        "time": "2026-08-01T09:00:00.1Z",
        "level": "warning",
        "logger": "x",
        "event": "one",
        "run_id": "r1",
    }
    log.write_text(f"{json.dumps(entry)}\n" * 2)
    shown = "2026-08-01T09:00:00 warning  x: one run_id=r1\n"
    assert program.run("logs").out == shown * 2
    assert program.run("logs", "-n", "1").out == shown
    assert json.loads(program.run("logs", "-n", "1", "--json").out) == entry
    with program.terminal("logs", "-f", "-n", "1") as terminal:
        terminal.expect("x: one run_id=r1\n")
        with log.open("a") as more:
            more.write(f"{json.dumps({**entry, 'event': 'two'})}\n")
        terminal.expect("x: two run_id=r1\n")
        log.rename(program.state / "antiphon.log.1")
        log.write_text(f"{json.dumps({**entry, 'event': 'three'})}\n")
        terminal.expect("x: three run_id=r1\n")
        terminal.interrupt()
        assert terminal.ended() == 130


def test_a_key_that_is_missing_is_said_at_the_start(program: Program) -> None:
    key = {"env": "ANTIPHON_TEST_UNSET"}
    provider = {"baseUrl": "http://127.0.0.1:9/v1", "apiKey": key, "models": [{"id": "m"}]}
    program.configure({"models": {"providers": {"far": provider}}})
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(r"warning: 'models.providers.far.apiKey' is missing: .*'ANTIPHON_TEST_UNSET'")
        terminal.expect(r"is up \(process")
        terminal.interrupt()
        assert terminal.ended() == 0
    with up(program) as gateway:
        [warning] = gateway.facts["warnings"]
        assert "'ANTIPHON_TEST_UNSET'" in warning


def test_warnings_of_the_configuration_are_said(program: Program) -> None:
    program.state.mkdir(mode=0o700)
    (program.state / "config.json5").write_text("{ logging: { level: 'debug' } }")
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect("warning: .*logging")
        terminal.expect("Ctrl-C stops it")


TWO = {"list": [{"id": "main", "default": True}, {"id": "helper"}]}


@pytest.mark.requirement("R", "V1")
def test_two_agents_that_cannot_reach_each_other_are_told_what_to_set(program: Program) -> None:
    program.configure({"agents": TWO})
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect("hint: No agent can message another")
        terminal.expect("Ctrl-C stops it")
        listed = program.run("agents").out
        assert "MAY MESSAGE" in listed and "tools.agentToAgent.enabled" in listed
    checked = program.run("config", "check").out
    assert "may spawn itself; may message no other agent" in checked
    assert "tools.agentToAgent" in checked
    program.configure(
        {"agents": TWO, "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}}
    )
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect("Ctrl-C stops it")
        assert "hint:" not in terminal.text
        cards = program.run("agents", "--json").json["agents"]
        assert {card["id"]: card["mayMessage"] for card in cards} == {"main": ["helper"], "helper": ["main"]}
    assert "may spawn itself; may message helper" in program.run("config", "check").out


LOGS = """
import logging, sys
from pathlib import Path
from antiphon.cli._logging import configure_logging
configure_logging(Path(sys.argv[1]), debug=True)
log = logging.getLogger("antiphon.test")
log.warning("Run %r \\x1b[31mfailed", "r1", extra={"run_id": "r1", "session_key": "k", "token": "s3cret"})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("Nothing can be done")
"""


def test_the_log_is_json_lines_that_can_be_searched_by_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS, str(tmp_path)],
        capture_output=True,
        check=True,
        timeout=BOUND,
        encoding="utf-8",
    )
    text = (tmp_path / "antiphon.log").read_text("utf-8")
    first, second = (json.loads(line) for line in text.splitlines())
    assert list(first) == ["time", "level", "logger", "event", "run_id", "session_key"]
    assert (first["level"], first["logger"], first["run_id"]) == ("warning", "antiphon.test", "r1")
    assert first["event"] == "Run 'r1' \ufffd[31mfailed"
    assert "ZeroDivisionError" in second["exception"]
    assert "s3cret" not in text + done.stderr
    assert "WARNING antiphon.test: Run 'r1' \ufffd[31mfailed" in done.stderr


def test_it_continues_without_listeners(program: Program) -> None:
    process = program.start("up", "--port", "0")
    assert process.stdout is not None
    process.stdout.close()
    try:
        until = time.monotonic() + BOUND
        while not (program.state / "gateway.json").exists() and time.monotonic() < until:
            assert process.poll() is None
        assert program.say("say hello") == "hello\n"
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(BOUND)
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        process.stderr.close()


def test_it_says_that_other_machines_can_reach_it(program: Program) -> None:
    program.configure({"gateway": {"bind": "lan", "auth": {"mode": "token", "token": "of sixteen or more"}}})
    process = program.start("up", "--port", "0")
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert "to other machines (gateway.bind is 'lan')" in lines[1]
    finally:
        process.terminate()
        process.communicate(timeout=BOUND)
