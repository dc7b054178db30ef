"""A real gateway whose database file is deleted or replaced accepts nothing any more, and says why."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("G21")

NOTICED = "was deleted or replaced while it was open"


def delete(state: Path) -> None:
    (state / "antiphon.db").unlink()


def rename(state: Path) -> None:
    (state / "antiphon.db").rename(state / "away.db")


def restore_over(state: Path) -> None:
    shutil.copy(state / "antiphon.db", state / "backup.db")
    (state / "backup.db").replace(state / "antiphon.db")


def delete_log(state: Path) -> None:
    (state / "antiphon.db-wal").unlink()


def replace_directory(state: Path) -> None:
    state.rename(state.with_name("away"))
    state.mkdir(mode=0o700)


DAMAGES = [delete, rename, restore_over, delete_log, replace_directory]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_message_is_refused_at_once_and_the_log_says_why_once(
    program: Program, damage: Callable[[Path], None]
) -> None:
    with up(program) as gateway:
        assert program.say("say before") == "before\n"
        secret = token(program)
        damage(program.state)
        reached = Program(program.home, program.bytecode, {"ANTIPHON_TOKEN": secret})
        for _ in range(2):
            refused = reached.run("send", "main", "say lost", "--url", gateway.url, "--json")
            assert (refused.code, refused.error["code"]) == (7, "store_replaced"), refused
            assert NOTICED in refused.error["message"]
            assert "restart" in refused.error["hint"]
        read = reached.run("sessions", "history", "main", "--url", gateway.url)
        assert "before" in read.out
        assert "lost" not in read.out
        gateway.process.terminate()
        _, log = gateway.process.communicate(timeout=BOUND)
        assert log.count(NOTICED) == 1, log
        assert "Traceback" not in log


@pytest.mark.parametrize("damage", [delete, replace_directory])
def test_an_idle_gateway_notices_it_by_itself(program: Program, damage: Callable[[Path], None]) -> None:
    with up(program) as gateway:
        damage(program.state)
        _until_not_ready(gateway)


@pytest.mark.parametrize("damage", [delete, restore_over])
def test_doctor_reports_it(program: Program, damage: Callable[[Path], None]) -> None:
    with up(program) as gateway:
        damage(program.state)
        _until_not_ready(gateway)
        examined = program.run("doctor", "--json")
        failed = {finding["check"] for finding in examined.json["findings"] if finding["level"] == "fail"}
        assert examined.code == 1
        assert "gateway" in failed
        assert ("database" in failed) == (damage is delete)


def test_a_restart_recovers_what_was_written_before(program: Program) -> None:
    with up(program) as gateway:
        assert program.say("say before") == "before\n"
        rename(program.state)
        assert program.run("send", "main", "say lost").code == 7
        assert gateway.stop() == 0
    (program.state / "away.db").replace(program.state / "antiphon.db")
    with up(program):
        assert program.say("say after") == "after\n"
        history = program.run("sessions", "history", "main").out
        assert "before" in history
        assert "lost" not in history


def test_the_log_of_a_restored_database_survives_the_end_of_the_old_process(program: Program) -> None:
    """SQLite removes the log by its path when it closes; the one there now may belong to another database."""
    with up(program) as gateway:
        rename(program.state)
        (program.state / "antiphon.db-wal").rename(program.state / "away.db-wal")
        (program.state / "antiphon.db").write_bytes(b"restored")
        (program.state / "antiphon.db-wal").write_bytes(b"its log")
        _until_not_ready(gateway)
        assert gateway.stop() == 0
    assert (program.state / "antiphon.db-wal").read_bytes() == b"its log"


def _until_not_ready(gateway: Gateway) -> None:
    until = time.monotonic() + BOUND
    address = f"{gateway.url.replace('ws', 'http', 1)}/readyz"
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(address, timeout=BOUND).close()  # noqa: S310 - our own address
        except urllib.error.HTTPError as error:
            with error:
                assert (error.code, error.read()) == (503, b'{"ready":false,"failing":["store"]}')
            return
    pytest.fail("the gateway still says that it is ready")
