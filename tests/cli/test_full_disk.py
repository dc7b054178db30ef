"""Commands and the gateway where the disk is full: what is said, and that everything goes on when there is room."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from cli.terminal import BOUND, Program
from support.disks import Disk, mount_small_disk

pytestmark = pytest.mark.requirement("G21")

FULL = "There is no room left for the database"
WAITING = f"{FULL}; work continues once space is freed."
AGAIN = "The database is writable again"


@pytest.fixture
def disk(program: Program) -> Generator[Disk]:
    """The state directory, on a disk of its own."""
    with mount_small_disk(program.state) as disk:
        yield disk


def test_a_gateway_says_so_once_and_is_not_ready_until_there_is_room(program: Program, disk: Disk) -> None:
    with program.terminal("up", "--port", "0") as gateway:
        gateway.expect("Ctrl-C stops it")
        disk.fill()
        gateway.expect(WAITING)
        assert program.run("status", "--json").json["failing"] == ["store"]
        assert "database     unavailable" in program.run("status").out
        disk.clear()
        gateway.expect(AGAIN)
        assert program.run("status", "--json").json["failing"] == []
        assert (gateway.text.count(FULL), gateway.text.count(AGAIN)) == (1, 1)
        assert "Traceback" not in gateway.text


@pytest.mark.parametrize("command", [["agent"], ["send", "main", "--wait", "30"], ["chat"]])
def test_a_command_that_hosts_by_itself_says_what_it_waits_for(
    program: Program, disk: Disk, command: list[str]
) -> None:
    program.say("say before")
    words = "slow 4 done at last"
    with program.terminal(*command, *([words] if "send" in command else ["--message", words])) as terminal:
        _until_running(program)
        disk.fill()
        terminal.expect(WAITING)
        disk.clear()
        terminal.expect(AGAIN)
        terminal.expect("last")  # some of it may have been shown before
        assert terminal.ended() == 0
        assert (terminal.text.count(FULL), terminal.text.count(AGAIN)) == (1, 1)
        assert "Logging error" not in terminal.text
    entries = program.run("sessions", "history", "main").out
    assert entries.count("main> done at last") == 1


def _until_running(program: Program) -> None:
    until = time.monotonic() + BOUND
    path = f"file:{program.state / 'antiphon.db'}?mode=ro"
    while time.monotonic() < until:
        with closing(sqlite3.connect(path, uri=True)) as database:
            if database.execute("SELECT 1 FROM runs WHERE state = 'running'").fetchone():
                return
    pytest.fail("nothing runs")


WRITING = [
    ["agent", "--message", "say x"],
    ["chat", "--message", "say x"],
    ["cron", "add", "--name", "n", "--message", "say x", "--every", "1h"],
    ["up", "--port", "0"],
]
READING = [
    ["sessions", "list"],
    ["sessions", "history", "main"],
    ["sessions", "search", "before"],
    ["cron", "list"],
    ["status"],
]


def test_where_nothing_can_be_kept_that_is_said_and_what_is_there_can_be_read(
    program: Program, disk: Disk
) -> None:
    program.say("say before")
    disk.fill()
    for command in WRITING:
        refused = program.run(*command, "--json")
        assert (refused.code, refused.error["code"]) == (7, "store_full"), command
        assert refused.error["message"].startswith(FULL)
    for command in READING:
        done = program.run(*command)
        assert (done.code, done.err) == (0, ""), command
    assert "before" in program.run("sessions", "history", "main").out
    found = program.run("doctor").out
    assert "fail  disk" in found
    assert "fail  database" not in found
    disk.clear()
    assert program.say("say after") == "after\n"


def test_what_is_there_can_be_read_where_no_file_can_grow(program: Program) -> None:
    program.say("say before")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [*program.command, "sessions", "history", "main"]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        env={**program.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=BOUND,
        check=False,
        preexec_fn=limit,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "main> before" in done.stdout


LOGS = """
import logging, sys
from pathlib import Path
from antiphon.cli._logging import configure_logging
configure_logging(Path(sys.argv[1]), debug=False)
for number in range(1000):
    logging.getLogger("antiphon.test").warning("a line of the log, number %d", number)
print("done")
"""


def logs(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        check=False,
        timeout=BOUND,
        encoding="utf-8",
    )


def test_a_log_that_cannot_be_written_is_not_complained_of(tmp_path: Path) -> None:
    (tmp_path / "antiphon.log").symlink_to("/dev/full")
    done = logs(tmp_path, LOGS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_line_that_makes_no_sense_is_complained_of(tmp_path: Path) -> None:
    done = logs(tmp_path, LOGS.replace("number %d", "number %d of %d"))
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "TypeError: not enough arguments for format string" in done.stderr
