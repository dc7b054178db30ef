"""Commands in a container, as the launcher starts and ends them."""

from __future__ import annotations

import json
import os
import pty
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.child_processes.pipes import open_memory_file
from antiphon.workspace import docker_launcher
from support.docker_daemon import IMAGE, DockerDaemon, run_docker_daemon
from support.keepers import find_marked

BOUND_SECONDS = 30.0
STOP_BOUND_SECONDS = 10.0  # it is promised within 2 s, which a busy machine does not keep
USER = "61001:61001"

Launch = Callable[..., "subprocess.Popen[bytes]"]


def create_container(daemon: DockerDaemon) -> str:
    created = daemon.request(
        "POST",
        "/containers/create",
        json={
            "Image": IMAGE,
            "Cmd": ["/bin/sh", "-c", "while :; do sleep 3600; done"],
            "User": "65534:65534",
            "HostConfig": {
                "Init": True,
                "NetworkMode": "none",
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "PidsLimit": 256,
                "Ulimits": [
                    {"Name": "nproc", "Soft": 512, "Hard": 512}
                ],  # where a kernel has no limit for containers
            },
        },
    )
    daemon.request("POST", f"/containers/{created['Id']}/start")
    return created["Id"]


@pytest.fixture(scope="module")
def container(docker_daemon: DockerDaemon) -> str:
    return create_container(docker_daemon)


@pytest.fixture
def marker() -> str:
    """A time to sleep by which the processes of this test are found."""
    return f"{os.getpid()}.{secrets.randbelow(10**9):09}"


def open_spec(daemon: DockerDaemon, container: str, argv: Sequence[str]) -> int:
    """Return a descriptor with the description of a command."""
    spec: dict[str, Any] = {
        "socket": str(daemon.socket),
        "container": container,
        "user": USER,
        "cwd": "/",
        "env": {"GIVEN": "given"},
        "argv": argv,
    }
    return open_memory_file(json.dumps(spec).encode())


@contextmanager
def launching(daemon: DockerDaemon, container: str) -> Generator[Launch]:
    started: list[subprocess.Popen[bytes]] = []

    def launch(
        script: str | Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        argv = ["/bin/sh", "-c", script] if isinstance(script, str) else script
        fd = open_spec(daemon, container, argv)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", docker_launcher.__file__, str(fd)],
                pass_fds=[fd],
                env={},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            os.close(fd)
        started.append(process)
        return process

    try:
        yield launch
    finally:
        for process in started:
            process.kill()
            process.wait(BOUND_SECONDS)
            for file in (process.stdin, process.stdout, process.stderr):
                if file is not None:
                    file.close()


@pytest.fixture
def launch(docker_daemon: DockerDaemon, container: str) -> Generator[Launch]:
    with launching(docker_daemon, container) as launch:
        yield launch


def read_all(process: subprocess.Popen[bytes], given: bytes | None = None) -> str:
    output, _ = process.communicate(given, timeout=BOUND_SECONDS)
    return output.decode()


def wait_for_line(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().decode() == f"{line}\n"


def wait_until_gone(marker: str, since: float) -> float:
    """Wait until no process has the marker; return how long that took."""
    while find_marked(marker):
        assert time.monotonic() < since + STOP_BOUND_SECONDS, find_marked(marker)
        time.sleep(0.01)
    return time.monotonic() - since


def test_a_command_has_its_output_and_its_status(launch: Launch) -> None:
    process = launch("echo first; echo second >&2; echo $GIVEN; id -u; pwd; exit 7")
    assert read_all(process).split() == ["first", "second", "given", "61001", "/"]
    assert process.returncode == 7


def test_output_and_errors_stay_apart_where_they_are(launch: Launch) -> None:
    process = launch("echo out; echo err >&2", stderr=subprocess.PIPE)
    assert process.communicate(timeout=BOUND_SECONDS) == (b"out\n", b"err\n")


def test_a_command_reads_its_input_to_the_end(launch: Launch) -> None:
    data = b"x" * 3_000_000 + b"\n"
    process = launch("tr x y; exit 3", stdin=subprocess.PIPE)
    assert read_all(process, data) == data.decode().replace("x", "y")
    assert process.returncode == 3


def test_a_command_without_input_is_at_its_end(launch: Launch) -> None:
    assert read_all(launch("cat; echo done")) == "done\n"


def test_a_command_has_a_terminal(launch: Launch, marker: str) -> None:
    ours, theirs = pty.openpty()
    process = launch(
        f"tty; read line; echo got $line; sleep {marker}", stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    os.write(ours, b"hello\n")
    while b"got hello" not in seen:
        seen += os.read(ours, 1000)
    assert b"/dev/pts/" in seen
    os.write(ours, b"\x03")
    assert process.wait(BOUND_SECONDS) == 130
    wait_until_gone(marker, time.monotonic())
    os.close(ours)


def test_a_large_output_arrives_whole(launch: Launch) -> None:
    assert len(read_all(launch("head -c 30000000 /dev/zero"))) == 30_000_000


@pytest.mark.requirement("AT3")
def test_nothing_outlives_its_command(launch: Launch, marker: str) -> None:
    process = launch(f"(trap '' TERM; setsid sleep {marker}) & setsid env -i sleep {marker} & echo started")
    assert read_all(process) == "started\n"
    assert process.returncode == 0
    wait_until_gone(f"sleep {marker}", time.monotonic())


@pytest.mark.requirement("AT2")
@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
@pytest.mark.parametrize("stop", ["terminate", "kill"])
def test_a_stop_ends_the_whole_tree_and_nothing_else(
    launch: Launch, marker: str, stop: str, stdin: int
) -> None:
    other = launch(f"echo other; exec sleep 1{marker}")
    wait_for_line(other, "other")
    script = f"trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep {marker}; sleep {marker}' & sleep {marker}"
    process = launch(f"{script} & echo started; wait; sleep {marker}", stdin=stdin)
    wait_for_line(process, "started")
    began = time.monotonic()
    getattr(process, stop)()
    process.wait(BOUND_SECONDS)
    wait_until_gone(f"sleep {marker}", began)
    assert other.poll() is None
    assert find_marked(f"sleep 1{marker}")


def test_a_command_may_end_by_itself_when_it_is_asked_to(launch: Launch) -> None:
    process = launch("trap 'echo bye; exit 4' TERM; echo started; while :; do :; done")
    wait_for_line(process, "started")
    process.terminate()
    assert read_all(process) == "bye\n"
    assert process.returncode == 4


@pytest.mark.requirement("AT2")
def test_a_command_that_kills_everything_else_leaves_nothing(launch: Launch, marker: str) -> None:
    process = launch(f"setsid sleep {marker} & echo started; kill -9 -1")
    wait_for_line(process, "started")
    process.wait(BOUND_SECONDS)
    wait_until_gone(marker, time.monotonic())


@pytest.mark.requirement("AT2")
def test_processes_that_start_others_all_the_time_end_with_the_container(
    docker_daemon: DockerDaemon, marker: str
) -> None:
    container = create_container(docker_daemon)
    with launching(docker_daemon, container) as launch:
        process = launch(f": {marker}; b() {{ b | b & }}; b; sleep 100")
        assert process.stdout is not None
        while b"fork" not in (line := process.stdout.readline()):
            assert line, "it ended before it reached the limit"
        began = time.monotonic()
        process.terminate()
        read_all(process)
        assert process.returncode != 0
        wait_until_gone(marker, began)


def test_a_program_that_is_not_there_is_named(launch: Launch) -> None:
    process = launch(["no-such-program"])
    assert "no-such-program" in read_all(process)
    assert process.returncode == 127


@pytest.mark.requirement("AT6")
def test_a_missing_engine_or_container_is_named(docker_daemon: DockerDaemon, tmp_path: Path) -> None:
    with launching(docker_daemon, "no-such-container") as launch:
        process = launch("true")
        assert read_all(process) == "docker: No such container: no-such-container\n"
        assert process.returncode == docker_launcher.REFUSED_STATUS
    absent = DockerDaemon(tmp_path, "vfs")
    with launching(absent, "any") as launch:
        assert read_all(launch("true")).startswith(f"docker: no engine answers at '{tmp_path}/docker.sock'")
    absent.close()


def test_a_command_ends_with_its_container(docker_daemon: DockerDaemon, marker: str) -> None:
    container = create_container(docker_daemon)
    with launching(docker_daemon, container) as launch:
        process = launch(f"echo started; sleep {marker}")
        wait_for_line(process, "started")
        docker_daemon.request("DELETE", f"/containers/{container}", params={"force": "true"})
        assert process.wait(BOUND_SECONDS) != 0


def test_a_command_ends_with_what_started_its_launcher(
    docker_daemon: DockerDaemon, container: str, marker: str
) -> None:
    """The launcher is asked to end by nothing; it sees that its parent is another one."""
    fd = open_spec(docker_daemon, container, ["sleep", marker])
    parent = subprocess.Popen(
        ["/bin/sh", "-c", f'"{sys.executable}" -I -S "$0" {fd} & wait', docker_launcher.__file__],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
    )
    os.close(fd)
    while not find_marked(f"sleep {marker}"):
        time.sleep(0.01)
    parent.kill()
    parent.wait(BOUND_SECONDS)
    wait_until_gone(f"sleep {marker}", time.monotonic())


@pytest.mark.requirement("AT2")
def test_a_command_whose_engine_was_killed_ends_when_it_is_back(
    docker_daemon: DockerDaemon, marker: str
) -> None:
    with run_docker_daemon() as daemon, launching(daemon, create_container(daemon)) as launch:
        process = launch(f"setsid sleep {marker} & echo started; sleep {marker}")
        stopped = launch(f"echo started; sleep 1{marker}")
        for each in (process, stopped):
            wait_for_line(each, "started")
        daemon.kill()
        stopped.terminate()
        output = read_all(stopped)
        assert "The command was interrupted: " in output
        assert process.poll() is None  # it goes on
        daemon.start()
        assert "It may have had effects" in read_all(process)
        for each in (process, stopped):
            assert each.returncode == docker_launcher.REFUSED_STATUS
        wait_until_gone(marker, time.monotonic())
