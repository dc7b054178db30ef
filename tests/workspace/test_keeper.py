"""Commands that outlive the gateway: each key runs once, its true result is found again, and no process survives."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import antiphon
from antiphon.errors import InvalidInput, Unavailable
from antiphon.workspace import keeper
from antiphon.workspace.command_output import read_shown
from antiphon.workspace.keeper.job_directory import HEAD_BYTES
from antiphon.workspace.keeper_client import CommandSpec, CommandStatus, KeeperClient, OutputPart
from support.keepers import (
    end_keeper,
    find_keeper,
    find_marked,
    wait_until_gone,
    wait_until_true,
)

pytestmark = pytest.mark.anyio

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
UPDATED_KEEPER = """
import runpy, sys
sys.path.append({root!r})
from antiphon.workspace import keeper
keeper.PROTOCOL_VERSION = 4711
runpy.run_path({program!r}, run_name="__main__")
"""


def shell(
    script: str, directory: Path, *, timeout: float = 30.0, stdin: bool = False, pty: bool = False
) -> CommandSpec:
    return CommandSpec(
        argv=["/bin/sh", "-c", script],
        cwd=str(directory),
        env=ENVIRONMENT,
        timeout=timeout,
        stdin=stdin,
        pty=pty,
    )


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[KeeperClient]:
    opened = KeeperClient(tmp_path)
    yield opened
    await opened.close()
    end_keeper(tmp_path)


async def test_exit_code_and_output_are_told(client: KeeperClient, tmp_path: Path) -> None:
    status = await client.start("a", shell("echo out; echo err >&2; exit 7", tmp_path), wait_seconds=10)
    assert (status.state, status.exit_code, status.signal, status.output_bytes) == ("ended", 7, None, 8)
    assert (await client.read("a", 0, 100)).data == b"out\nerr\n"
    assert (await client.read("a", 4, 2)).data == b"er"


async def test_a_key_runs_once(client: KeeperClient, tmp_path: Path) -> None:
    spec = shell("echo once >> effect; echo done", tmp_path)
    answers = await asyncio.gather(*(client.start("same", spec, wait_seconds=10) for _ in range(20)))
    assert {answer.exit_code for answer in answers} == {0}
    assert (tmp_path / "effect").read_text() == "once\n"


async def test_the_environment_is_made_and_not_inherited(
    client: KeeperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_KEY", "canary-secret")
    await client.start("env", shell("env; tr '\\0' '\\n' < /proc/$PPID/environ", tmp_path), wait_seconds=10)
    output = (await client.read("env", 0, 10_000)).data
    assert b"PATH=/usr/bin:/bin" in output
    assert b"canary-secret" not in output


async def test_a_foreground_command_reads_the_end_of_its_input(client: KeeperClient, tmp_path: Path) -> None:
    status = await client.start("cat", shell("cat; echo done", tmp_path), wait_seconds=10)
    assert status.exit_code == 0
    with pytest.raises(InvalidInput, match="does not run"):
        await client.write("cat", "w1", b"late", eof=False)


@pytest.mark.parametrize("pty", [False, True])
async def test_a_background_command_can_be_written_to(
    client: KeeperClient, tmp_path: Path, pty: bool
) -> None:
    script = 'read line; echo "got $line"; cat > rest'
    status = await client.start("in", shell(script, tmp_path, stdin=True, pty=pty), wait_seconds=0)
    assert status.state == "running"
    await client.write("in", "w1", b"hello\n", eof=False)
    await client.write("in", "w2", b"more\n", eof=True)
    status = await client.wait("in", 10)
    assert status.exit_code == 0
    assert b"got hello" in (await client.read("in", 0, 1000)).data
    assert (tmp_path / "rest").read_text() == "more\n"


async def test_what_a_command_creates_has_the_usual_permissions(client: KeeperClient, tmp_path: Path) -> None:
    assert (await client.start("key", shell("echo x > made", tmp_path), wait_seconds=20)).exit_code == 0
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o644
    [folder] = (tmp_path / "keeper" / "jobs").iterdir()
    assert [path.name for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077] == []


@pytest.mark.requirement("AT3")
async def test_a_process_that_holds_the_pipe_does_not_delay_the_end(
    client: KeeperClient, tmp_path: Path
) -> None:
    status = await client.start("bg", shell("sleep 61 & echo started", tmp_path), wait_seconds=20)
    assert status.exit_code == 0
    assert (await client.read("bg", 0, 100)).data == b"started\n"


async def test_a_timeout_ends_the_whole_tree(client: KeeperClient, tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 3611 & sleep 3612 & wait"
    status = await client.start("slow", shell(script, tmp_path, timeout=0.3), wait_seconds=20)
    assert (status.state, status.stop_reason) == ("ended", "timeout")
    await wait_until_gone("sleep 361")


async def test_a_stopped_job_leaves_no_process(client: KeeperClient, tmp_path: Path) -> None:
    await client.start(
        "stop", shell("setsid sh -c 'sleep 3621 & sleep 3622' & sleep 3623", tmp_path), wait_seconds=0
    )

    async def has_begun() -> bool:
        return all(find_marked(f"sleep 362{n}") for n in (1, 2, 3)) and len(find_marked("sleep 362")) >= 4

    await wait_until_true(has_begun)
    status = await client.stop("stop", "aborted")
    assert (status.state, status.stop_reason) == ("ended", "aborted")
    await wait_until_gone("sleep 362")


@pytest.mark.requirement("AT2")
async def test_a_daemon_without_the_environment_of_its_command_ends_with_it(
    client: KeeperClient, tmp_path: Path
) -> None:
    """Its parents have ended, its session is its own, and nothing in its environment names the command."""
    daemon = (
        "env -i setsid sh -c 'sleep 362{} & echo > begun' & while [ ! -e begun ]; do sleep 0.01; done; {}"
    )
    ended = await client.start("ends", shell(daemon.format(71, "rm begun"), tmp_path), wait_seconds=20)
    assert ended.exit_code == 0
    await wait_until_gone("sleep 36271")
    script = daemon.format(72, "sleep 36273")
    await client.start("stays", shell(script, tmp_path), wait_seconds=0)

    async def has_begun() -> bool:
        return (tmp_path / "begun").exists()

    await wait_until_true(has_begun)
    await client.stop("stays", "aborted")
    await wait_until_gone("sleep 3627")


async def test_a_full_disk_does_not_hide_the_end_of_a_command(client: KeeperClient, tmp_path: Path) -> None:
    await client.start(
        "full", shell("echo first; read go; seq 100000; exit 3", tmp_path, stdin=True), wait_seconds=0
    )

    async def has_printed() -> bool:
        return (await client.wait("full", 0)).output_bytes == len("first\n")

    await wait_until_true(has_printed)
    process = find_keeper(tmp_path)
    assert process is not None
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, before[1]))  # as on a full disk, nothing more can be written
    await client.write("full", "go", b"go\n", eof=True)
    status = await client.wait("full", 20)
    assert (status.state, status.exit_code, status.output_bytes) == ("ended", 3, 588_901)
    assert (await client.read("full", 0, 100)).data == b"first\n"
    with pytest.raises(InvalidInput, match="directory could not be written"):
        await client.start("next", shell("true", tmp_path), wait_seconds=0)
    process.rlimit(psutil.RLIMIT_FSIZE, before)
    assert (await client.start("next", shell("exit 4", tmp_path), wait_seconds=20)).exit_code == 4

    async def is_written() -> bool:
        return len(list((tmp_path / "keeper" / "jobs").glob("*/result.json"))) == 2

    await wait_until_true(is_written)


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("is_there", [True, False], ids=["empty", "missing"])
async def test_a_job_of_which_a_power_failure_left_only_the_name_is_lost(
    client: KeeperClient, tmp_path: Path, is_there: bool
) -> None:
    spec = shell("echo >> runs", tmp_path)
    assert (await client.start("key", spec, wait_seconds=20)).state == "ended"
    process = find_keeper(tmp_path)
    assert process is not None
    process.kill()
    process.wait(10)
    jobs = tmp_path / "keeper" / "jobs"
    (jobs / "interrupted.draft").mkdir()
    for file in [*jobs.glob("*/*.json")]:
        file.write_bytes(b"") if is_there else file.unlink()
    assert (await client.start("key", spec, wait_seconds=20)).state == "lost"
    assert (tmp_path / "runs").read_text() == "\n"
    assert [folder.suffix for folder in jobs.iterdir()] == [""]
    await client.acknowledge("key")

    async def is_removed() -> bool:
        return not list(jobs.iterdir())

    await wait_until_true(is_removed)


async def test_commands_that_cannot_start_leave_nothing_open(client: KeeperClient, tmp_path: Path) -> None:
    await client.start("first", shell("true", tmp_path), wait_seconds=20)
    process = find_keeper(tmp_path)
    assert process is not None
    before = process.num_fds()
    for number in range(5):
        spec = CommandSpec(argv=["/nowhere"], cwd="/", env={}, timeout=5, stdin=True, pty=number % 2 == 1)
        await client.start(f"none-{number}", spec, wait_seconds=5)
    assert process.num_fds() == before


async def test_output_keeps_its_beginning_and_its_end(client: KeeperClient, tmp_path: Path) -> None:
    script = "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last"
    status = await client.start("large", shell(script, tmp_path), wait_seconds=60)
    assert status.output_bytes == 50_000_012
    assert (await client.read("large", 0, 6)).data == b"first\n"
    kept = sum(file.stat().st_size for file in (tmp_path / "keeper" / "jobs").glob("*/output*"))
    assert kept < 11 * 1024 * 1024
    assert (await client.read("large", status.output_bytes - 200, 200)).data.endswith(b"x\nlast\n")
    before = await client.read("large", HEAD_BYTES - 10, 100)
    assert before == (HEAD_BYTES - 10, b"x" * 10), "a part ends where what is not kept begins"
    after = await client.read("large", HEAD_BYTES, 100)
    assert after.offset > 40_000_000
    assert after.data == b"x" * 100


MEGABYTE = 1_000_000


@asynccontextmanager
async def open_bounded_client(directory: Path, max_bytes: int) -> AsyncGenerator[KeeperClient]:
    client = KeeperClient(directory, max_bytes)
    try:
        yield client
    finally:
        await client.close()
        end_keeper(directory)


def print_bytes(directory: Path, count: int, then: str = "") -> CommandSpec:
    return shell(f"head -c {count} /dev/zero | tr '\\0' x; {then}", directory, stdin=True)


def measure_kept_output(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "keeper" / "jobs").glob("*/output.*"))


async def find_kept(client: KeeperClient, *keys: str) -> list[str]:
    return [key for key in keys if (await client.read(key, 0, 1)).data]


@pytest.mark.requirement("AT5")
async def test_the_oldest_outputs_of_ended_commands_make_room(tmp_path: Path) -> None:
    async with open_bounded_client(tmp_path, 3 * MEGABYTE) as client:
        for key in ("unread", "first", "second"):
            await client.start(key, print_bytes(tmp_path, MEGABYTE), wait_seconds=30)
        for key in ("second", "first"):  # in another order than that of their ends
            await client.acknowledge(key)
        assert measure_kept_output(tmp_path) == 3 * MEGABYTE
        await client.start("third", print_bytes(tmp_path, MEGABYTE), wait_seconds=30)
        assert await find_kept(client, "unread", "first", "second", "third") == ["unread", "second", "third"]
        await client.start("fourth", print_bytes(tmp_path, 2 * MEGABYTE), wait_seconds=30)
        assert await find_kept(client, "unread", "second", "third", "fourth") == ["third", "fourth"]
        assert measure_kept_output(tmp_path) <= 3 * MEGABYTE
        assert (await client.wait("unread", 0)).exit_code == 0, "results stay"
        keeper_process = find_keeper(tmp_path)
        assert keeper_process
        keeper_process.kill()
        keeper_process.wait(10)
        await client.start("fifth", print_bytes(tmp_path, MEGABYTE), wait_seconds=30)
        assert await find_kept(client, "third", "fourth", "fifth") == ["fourth", "fifth"]


async def test_the_output_of_a_running_command_is_not_removed(tmp_path: Path) -> None:
    async with open_bounded_client(tmp_path, 3 * MEGABYTE) as client:
        waiting = print_bytes(tmp_path, 2 * MEGABYTE, "read -r line; echo; echo last")
        await client.start("waits", waiting, wait_seconds=0)

        async def has_printed() -> bool:
            return (await client.wait("waits", 0)).output_bytes == 2 * MEGABYTE

        await wait_until_true(has_printed, 30)
        ended = await client.start("large", print_bytes(tmp_path, 4 * MEGABYTE), wait_seconds=30)
        assert (ended.exit_code, ended.output_bytes) == (0, 4 * MEGABYTE)
        assert measure_kept_output(tmp_path) == 3 * MEGABYTE

        async def read(offset: int, limit: int) -> OutputPart:
            return await client.read("large", offset, limit)

        assert (await read_shown(read, ended.output_bytes)).text.endswith("bytes were not kept …]\n")
        await client.write("waits", "line", b"go\n", eof=True)
        assert (await client.wait("waits", 30)).exit_code == 0
        assert (await client.read("waits", 2 * MEGABYTE, 100)).data == b"\nlast\n"


async def test_a_command_is_refused_while_running_ones_fill_the_space(tmp_path: Path) -> None:
    async with open_bounded_client(tmp_path, MEGABYTE) as client:
        await client.start("waits", print_bytes(tmp_path, 2 * MEGABYTE, "read -r line"), wait_seconds=0)

        async def has_printed() -> bool:
            return (await client.wait("waits", 0)).output_bytes == 2 * MEGABYTE

        await wait_until_true(has_printed, 30)
        with pytest.raises(
            InvalidInput, match=r"fills the 1000000 bytes that 'tools\.exec\.maxTotalOutputBytes'"
        ):
            await client.start("more", shell("echo ran > effect", tmp_path), wait_seconds=5)
        assert not (tmp_path / "effect").exists()
        await client.stop("waits", "test")
        assert (await client.start("more", shell("echo fits", tmp_path), wait_seconds=5)).exit_code == 0
        assert (await client.read("more", 0, 100)).data == b"fits\n"


async def test_a_command_that_cannot_start_has_failed(client: KeeperClient, tmp_path: Path) -> None:
    spec = CommandSpec(argv=["/nowhere/program"], cwd=str(tmp_path), env={}, timeout=5)
    status = await client.start("none", spec, wait_seconds=5)
    assert status.state == "failed"
    assert "/nowhere/program" in (status.error or "")
    assert (await client.wait("never", 0)).state == "unknown"


GATEWAY = """
import asyncio, sys
from pathlib import Path
from antiphon.workspace.keeper_client import CommandSpec, KeeperClient

async def main():
    client = KeeperClient(Path(sys.argv[1]))
    spec = CommandSpec(argv=["/bin/sh", "-c", sys.argv[2]], cwd=sys.argv[1], env={"PATH": "/usr/bin:/bin"}, timeout=60)
    await client.start("job", spec, wait_seconds=60)

asyncio.run(main())
"""


async def test_a_job_survives_the_gateway_and_its_result_is_adopted(
    client: KeeperClient, tmp_path: Path
) -> None:
    script = "echo begun >> effect; while [ ! -e go ]; do sleep 0.05; done; echo all of it; exit 7"
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, str(tmp_path), script)

    async def has_begun() -> bool:
        return (tmp_path / "effect").exists()

    await wait_until_true(has_begun)
    gateway.kill()
    await gateway.wait()
    (tmp_path / "go").touch()
    spec = shell(script, tmp_path)
    status = await client.start("job", spec, wait_seconds=20)
    assert (status.state, status.exit_code) == ("ended", 7)
    assert (await client.read("job", 0, 100)).data == b"all of it\n"
    assert (tmp_path / "effect").read_text() == "begun\n"


async def test_a_killed_keeper_loses_its_jobs_and_leaves_no_process(
    client: KeeperClient, tmp_path: Path
) -> None:
    script = "echo begun; setsid sleep 3631 & sleep 3632"
    await client.start("job", shell(script, tmp_path), wait_seconds=0)

    async def has_begun() -> bool:
        return len(find_marked("sleep 363")) >= 2 and bool((await client.read("job", 0, 10)).data)

    await wait_until_true(has_begun)
    process = find_keeper(tmp_path)
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    status: CommandStatus = await client.start("job", shell(script, tmp_path), wait_seconds=20)
    assert status.state == "lost"
    assert (await client.read("job", 0, 100)).data == b"begun\n"
    await wait_until_gone("sleep 363")


async def test_a_second_keeper_leaves_the_directory_to_the_first(
    client: KeeperClient, tmp_path: Path
) -> None:
    await client.start("a", shell("true", tmp_path), wait_seconds=10)
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", keeper.PROGRAM_PATH, str(tmp_path / "keeper")
    )
    assert await asyncio.wait_for(second.wait(), 20) == 0
    assert (await client.wait("a", 0)).exit_code == 0
    assert (tmp_path / "keeper" / keeper.SOCKET_NAME).stat().st_mode & 0o777 == 0o600


async def test_a_keeper_of_another_version_finishes_its_jobs_and_makes_way(
    client: KeeperClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    await client.start("ended", shell("exit 7", tmp_path), wait_seconds=20)
    script = f"while [ ! -e {go} ]; do sleep 0.05; done; echo all of it"
    assert (await client.start("running", shell(script, tmp_path), wait_seconds=0)).state == "running"
    await client.close()
    updated = tmp_path / "updated.py"
    updated.write_text(
        UPDATED_KEEPER.format(root=str(Path(antiphon.__file__).parents[1]), program=keeper.PROGRAM_PATH)
    )
    monkeypatch.setattr(keeper, "PROGRAM_PATH", str(updated))
    monkeypatch.setattr(keeper, "PROTOCOL_VERSION", 4711)
    later = KeeperClient(tmp_path)
    with pytest.raises(Unavailable, match="is of another version of Antiphon, and 1 jobs are running"):
        await later.start("new", shell("true", tmp_path), wait_seconds=20)
    go.touch()

    async def has_made_way() -> bool:
        try:
            return (await later.start("new", shell("true", tmp_path), wait_seconds=20)).exit_code == 0
        except Unavailable:
            return False

    await wait_until_true(has_made_way)
    assert (await later.wait("ended", 0)).exit_code == 7
    assert (await later.wait("running", 0)).state == "ended"
    assert (await later.read("running", 0, 100)).data == b"all of it\n"
    await later.close()
    end_keeper(tmp_path)


async def test_a_hundred_jobs_at_once_all_end(client: KeeperClient, tmp_path: Path) -> None:
    statuses = await asyncio.gather(
        *(client.start(f"job-{n}", shell(f"exit {n}", tmp_path), wait_seconds=60) for n in range(100))
    )
    assert [status.exit_code for status in statuses] == list(range(100))


@pytest.mark.requirement("T5", "AT1")
async def test_keepers_of_two_directories_leave_each_others_commands_alone(
    client: KeeperClient, tmp_path: Path
) -> None:
    """The same key may be used in both: it is made of ids that callers and models choose."""
    other_directory = tmp_path / "other"
    other = KeeperClient(other_directory)
    go = tmp_path / "go"
    try:
        waiting = shell(f"setsid sleep 3661 & while [ ! -e {go} ]; do sleep 0.02; done; exit 7", tmp_path)
        for key in ("ends", "is lost"):
            assert (await client.start(key, waiting, wait_seconds=0)).state == "running"

        async def have_begun() -> bool:
            return len(find_marked("sleep 3661")) >= 4  # with their shells

        await wait_until_true(have_begun)
        assert (
            await other.start("ends", shell("sleep 3662 & exit 4", tmp_path), wait_seconds=20)
        ).exit_code == 4
        assert (
            await other.start("is lost", shell("sleep 3663", tmp_path), wait_seconds=0)
        ).state == "running"
        killed = find_keeper(other_directory)
        assert killed is not None
        killed.kill()
        killed.wait(10)
        assert (await other.wait("is lost", 0)).state == "lost"
        assert len(find_marked("sleep 3661")) >= 4
        go.touch()
        assert [(await client.wait(key, 20)).exit_code for key in ("ends", "is lost")] == [7, 7]
    finally:
        await other.close()
        end_keeper(other_directory)
