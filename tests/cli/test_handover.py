"""Commands that own the state directory without a gateway, and others that want it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from antiphon.store.statedir import StateDir
from cli.gateways import up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R")


def hosting(program: Program, *arguments: str) -> subprocess.Popen[str]:
    """A command that owns the directory and has been accepted."""
    process = program.start(*arguments)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("Accepted: run "), line
    return process


@pytest.mark.parametrize(
    "command",
    [
        ("send", "main", "slow 4 hello", "--wait", "50"),
        ("agent", "--message", "slow 4 hello"),
        ("spawn", "slow 4 hello", "--wait", "50"),
    ],
    ids=lambda command: command[0],
)
def test_a_gateway_takes_over_the_run_of_a_command(program: Program, command: tuple[str, ...]) -> None:
    program.say("say first")
    process = hosting(program, *command)
    status = program.run("status").out
    assert f"`{command[0]}`, process {process.pid}" in status
    assert "takes over its run" in status and "start it with" not in status
    with up(program) as gateway:
        assert process.poll() is None, "the gateway did not wait for the run to end"
        out, err = process.communicate(timeout=BOUND)
        assert process.returncode == 0 and "hello\n" in out, err
        assert gateway.stop() == 0
    history = program.run("sessions", "list", "--json").json["sessions"]
    assert all(row["state"] != "running" for row in history)


def test_a_gateway_comes_up_after_its_kill_though_a_command_is_faster(program: Program) -> None:
    with up(program) as killed:
        killed.stop(signal.SIGKILL)
    process = hosting(program, "send", "main", "slow 4 hello", "--wait", "50")
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(rf"Waiting up to 60 s .* `send`, process {process.pid}")
        terminal.expect(r"is up \(process \d+\)")
        out, _ = process.communicate(timeout=BOUND)
        assert out == "hello\n"
        terminal.interrupt()
        assert terminal.ended() == 0


def test_a_command_waits_for_another_that_ends_soon(program: Program) -> None:
    process = hosting(program, "send", "main", "slow 3 hello", "--wait", "50")
    second = program.run("agent", "--message", "say second")
    assert (second.code, second.out) == (0, "second\n"), second.err
    assert process.communicate(timeout=BOUND)[0] == "hello\n"


def test_a_command_that_waited_too_long_says_for_what(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from antiphon.cli import _backend, main

    monkeypatch.setattr(_backend, "SHORT_OWNER_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(os, "umask", int)  # the command's would stay that of all later tests in this process
    arguments = ["--state-dir", str(tmp_path / "state"), "send", "main", "hi", "--json"]
    with StateDir.open_locked(tmp_path / "state", "send"), CliRunner().isolation() as (_, err, _):
        assert main(arguments) == 7
        told = err.getvalue().decode()
    assert f"in use by another Antiphon (`send`, process {os.getpid()})" in told
    assert "up` takes over its run at once" in told


def test_a_request_for_the_directory_ends_with_its_process(tmp_path: Path) -> None:
    with StateDir.open_locked(tmp_path / "state", "send") as home:
        assert (home.path / "lock").read_text() == f"{os.getpid()}\n", "as in: kill -9 $(cat lock)"
        other = StateDir.open_unlocked(home.path)
        assert other.owner == (str(os.getpid()), "send") and other.holder == str(os.getpid())
        assert not home.is_handover_requested
        with other.request_handover():
            assert home.is_handover_requested
        assert not home.is_handover_requested
    assert other.owner is None


def test_up_that_is_stopped_while_it_waits_ends(program: Program) -> None:
    with StateDir.open_locked(program.state, "chat"):
        process = program.start("up", "--port", "0")
        assert process.stderr is not None
        assert "Leave that chat with /quit" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=BOUND / 2)
        assert (process.returncode, out) == (130, "")
