"""Commands of sessions in containers of a real engine."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import SandboxUnavailable
from antiphon.workspace import docker_launcher
from antiphon.workspace.keeper_client import CommandSpec, KeeperClient
from antiphon.workspace.sandbox import Sandboxes
from support.docker_daemon import IMAGE, DockerDaemon
from support.keepers import end_keeper, find_keeper, find_marked, wait_until_gone
from support.privileges import open_way_to
from support.sandboxes import CHILD, GROUP, MAIN, OTHER_GROUP, make_sandboxes, run, run_command

pytestmark = pytest.mark.anyio

Json = dict[str, Any]


@pytest.fixture
def engine(docker_daemon: DockerDaemon, monkeypatch: pytest.MonkeyPatch) -> DockerDaemon:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{docker_daemon.socket}")
    docker_daemon.remove_containers()
    return docker_daemon


@pytest.fixture
def state(tmp_path: Path) -> Path:
    open_way_to(tmp_path)
    directory = tmp_path / "state"
    directory.mkdir()
    (directory / "antiphon.db").write_text("canary-secret")
    return directory


def make_containers(state: Path, docker: Json | None = None, **settings: Any) -> Sandboxes:
    return make_sandboxes(state, backend="docker", docker={"image": IMAGE, **(docker or {})}, **settings)


async def find_reason(sandboxes: Sandboxes) -> str:
    with pytest.raises(SandboxUnavailable) as failure:
        await run(sandboxes, MAIN, "true")
    return str(failure.value)


async def test_a_command_works_in_its_workspace(engine: DockerDaemon, state: Path) -> None:
    sandboxes = make_containers(state)
    assert await run(sandboxes, MAIN, "pwd; echo hello > made; cat made; id -u") in (
        "/workspace\nhello\n59321\n",
        f"/workspace\nhello\n{os.getuid()}\n",
    )
    assert (state / "workspaces" / "main" / "made").read_text() == "hello\n"
    assert (await sandboxes.find_status("main")).backend == "docker"
    assert sandboxes.is_attested("main")
    assert not list((state / "workspaces" / "main").glob(".antiphon*"))
    [container] = engine.list_containers()  # that of the examination is gone
    assert container["State"] == "running"


@pytest.mark.requirement("AT9", "B1")
@pytest.mark.parametrize("scope", ["session", "agent", "shared"])
@pytest.mark.parametrize("access", ["none", "ro", "rw"])
async def test_a_session_sees_what_its_settings_say(
    engine: DockerDaemon, state: Path, scope: str, access: str
) -> None:
    sandboxes = make_containers(state, mode="all", scope=scope, workspaceAccess=access)
    agent = state / "workspaces" / "main"
    agent.mkdir(parents=True)
    (agent / "of-agent").write_text("agent\n")
    agent.chmod(0o755)
    script = "echo x > /workspace/made; cat /workspace/of-agent /agent/of-agent; touch /agent/new; ls /tmp"
    seen = await run(sandboxes, GROUP, f"{script}; echo t > /tmp/temporary")
    assert (agent / "made").exists() is (access == "rw")
    assert ("agent\n" in seen) is (access != "none")
    assert not (agent / "new").exists()
    other = await run(sandboxes, OTHER_GROUP, "cat /tmp/temporary")
    assert (other == "t\n") is (scope != "session")
    own = sandboxes._locate(GROUP).workspace.path  # pyright: ignore[reportPrivateUsage]
    assert (own / "made").read_text() == "x\n"
    (own / "from-outside").write_text("outside")
    assert await run(sandboxes, GROUP, "cat from-outside") == "outside"


async def test_commands_of_a_scope_share_a_container(engine: DockerDaemon, state: Path) -> None:
    sandboxes = make_containers(state, mode="all", scope="agent")
    first = await run(sandboxes, GROUP, "echo > /var/tmp/kept")
    assert first == ""
    assert await run(sandboxes, OTHER_GROUP, "ls /var/tmp") == "kept\n"
    await run(sandboxes, CHILD, "echo x > made")
    assert (state / "workspaces/main/subagents/6f0c/made").exists()
    assert len(engine.list_containers()) == 2  # a sub-agent's directory is its own


# --- isolation ---


@pytest.mark.requirement("B3", "AT12")
async def test_nothing_of_the_host_is_inside(
    engine: DockerDaemon, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_KEY", "canary-secret")
    (tmp_path / "other").write_text("canary-secret")
    sandboxes = make_containers(state)
    script = f"""
cat {state}/antiphon.db {tmp_path}/other {engine.socket} /var/run/docker.sock
ln -s {tmp_path}/other link; cat link
env
for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do tr '\\0' '\\n' < $f; done
"""
    seen = await run(sandboxes, MAIN, f"({script}) 2> /dev/null; ls /proc | grep -c '^[0-9]'")
    assert "canary-secret" not in seen
    assert int(seen.splitlines()[-1]) < 12  # processes
    assert "GIVEN=given" in await run_with_env(sandboxes, "env")


async def run_with_env(sandboxes: Sandboxes, script: str) -> str:
    command = await sandboxes.wrap(MAIN, ["/bin/sh", "-c", script], workdir=None, env={"GIVEN": "given"})
    done = await asyncio.to_thread(run_command, command)
    return done.stdout + done.stderr


@pytest.mark.requirement("B3")
async def test_there_is_no_network(engine: DockerDaemon, state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        places = (f"tcp/127.0.0.1/{port}", "tcp/169.254.169.254/80", "udp/192.0.2.1/53")
        for place in places:
            seen = await run(make_containers(state), MAIN, f"bash -c ': > /dev/{place}' && echo connected")
            assert "connected" not in seen, place


@pytest.mark.requirement("B3")
@pytest.mark.parametrize(
    "script",
    [
        "unshare -U true",
        "unshare -m true",
        "mount -t tmpfs none /tmp",
        "mknod /tmp/device c 1 1",
        "chroot / true",
        "test -w /proc/sys/kernel/core_pattern",
        "test -w /proc/sysrq-trigger",
        "touch /usr/bin/new",
        "touch /new",
        "kill -9 1 && sleep 0.2 && test ! -e /proc/1",
        "cp /usr/bin/id /workspace/id && chmod u+s /workspace/id && test $(/workspace/id -u) = 0",
        "cp /usr/bin/id /run/id && /run/id",
    ],
)
async def test_privileged_actions_are_refused(engine: DockerDaemon, state: Path, script: str) -> None:
    seen = await run(make_containers(state), MAIN, f"{{ {script}; }} > /dev/null 2>&1 || echo refused")
    assert seen == "refused\n"


@pytest.mark.requirement("B3")
async def test_processes_memory_and_files_are_limited(engine: DockerDaemon, state: Path) -> None:
    sandboxes = make_containers(
        state, {"pidsLimit": 40, "memory": "64m", "memorySwap": "64m", "ulimits": {"fsize": 1_000_000}}
    )
    bomb = "n=0; while [ $n -lt 100 ]; do sleep 20 & n=$((n + 1)); done; echo survived"
    assert "survived" not in await run(sandboxes, MAIN, bomb)
    assert "200000000" not in await run(
        sandboxes, MAIN, "head -c 200000000 /dev/zero | tail -c 200000000 | wc -c"
    )
    await run(sandboxes, MAIN, "head -c 3000000 /dev/zero > big")
    assert (state / "workspaces/main/big").stat().st_size == 1_000_000
    assert await run(sandboxes, MAIN, "echo works") == "works\n"


@pytest.mark.requirement("AT7", "B2")
async def test_a_container_that_does_not_isolate_is_refused(engine: DockerDaemon, state: Path) -> None:
    """Someone replaced it by one of the same name and directories: only what is seen inside counts."""
    sandboxes = make_containers(state)
    await run(sandboxes, MAIN, "true")
    [ours] = engine.list_containers()
    inspected = engine.request("GET", f"/containers/{ours['Id']}/json")
    changes: list[tuple[Json, str]] = [
        ({"SecurityOpt": []}, "can gain privileges"),
        ({"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]}, "no system call filter"),
        ({"PidMode": "host"}, "shares the host's processes"),
        ({"NetworkMode": "host"}, "network route"),
    ]
    for change, reason in changes:
        engine.remove_containers()
        body = {
            **{name: inspected["Config"][name] for name in ("Image", "Entrypoint", "User", "WorkingDir")},
            "HostConfig": {**inspected["HostConfig"], **change},
        }
        name = inspected["Name"].lstrip("/")
        created = engine.request("POST", "/containers/create", params={"name": name}, json=body)
        engine.request("POST", f"/containers/{created['Id']}/start")
        if reason == "network route" and not has_route():
            continue
        assert reason in await find_reason(sandboxes), change
    engine.remove_containers()
    assert await run(sandboxes, MAIN, "echo works") == "works\n"


def has_route() -> bool:
    return len(Path("/proc/net/route").read_text().splitlines()) > 1


# --- commands of the keeper ---


@pytest.fixture
async def keeper(state: Path) -> AsyncIterator[KeeperClient]:
    client = KeeperClient(state)
    yield client
    await client.close()
    await asyncio.to_thread(end_keeper, state)


async def start(keeper: KeeperClient, sandboxes: Sandboxes, script: str, timeout: float) -> None:
    wrapped = await sandboxes.wrap(MAIN, ["/bin/sh", "-c", script], workdir=None, env={})
    spec = CommandSpec(
        argv=wrapped.argv,
        cwd="/",
        env=dict(wrapped.env),
        files=wrapped.files,
        kill_after_seconds=wrapped.kill_after_seconds,
        timeout=timeout,
    )
    assert (await keeper.start("key", spec, wait_seconds=0)).state == "running"


@pytest.mark.requirement("AT2")
@pytest.mark.parametrize(
    "script",
    ["trap '' TERM; setsid sleep {0} & sleep {0}; sleep {0}", "b() {{ b | b & }}; b; exec sleep {0}"],
)
@pytest.mark.parametrize("how", ["stop", "timeout", "keeper"])
async def test_the_keeper_ends_whole_trees_in_containers(
    engine: DockerDaemon, state: Path, keeper: KeeperClient, script: str, how: str
) -> None:
    marker = f"{os.getpid()}.{secrets.randbelow(10**9):09}"
    sandboxes = make_containers(state, {"pidsLimit": 400})
    filled = f": {marker}; touch begun; {script.format(marker)}"
    await start(keeper, sandboxes, filled, timeout=4.0 if how == "timeout" else 600.0)
    async with asyncio.timeout(30):
        while not (state / "workspaces/main/begun").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    if how == "stop":
        ended = await keeper.stop("key", "stop")
        assert ended.stop_reason == "stop"
    elif how == "timeout":
        ended = await keeper.wait("key", 30)
        assert ended.stop_reason == "timeout"
    else:
        process = find_keeper(state)
        assert process is not None
        process.kill()
        assert (await keeper.wait("key", 0)).state == "lost"
    await wait_until_gone(marker)
    assert await run(sandboxes, MAIN, "echo works") == "works\n"


# --- the proof of the directories ---


@pytest.mark.requirement("AT10")
async def test_directories_that_are_not_the_gateways_are_refused(
    engine: DockerDaemon, state: Path, tmp_path: Path
) -> None:
    sandboxes = make_containers(state)
    await run(sandboxes, MAIN, "true")
    [ours] = engine.list_containers()
    inspected = engine.request("GET", f"/containers/{ours['Id']}/json")
    engine.remove_containers()
    other = tmp_path / "other"
    other.mkdir(mode=0o777)
    other.chmod(0o777)
    for mount in inspected["HostConfig"]["Mounts"]:
        if mount["Target"] == "/workspace":
            mount["Source"] = str(other)
    body = {
        **{name: inspected["Config"][name] for name in ("Image", "Entrypoint", "User", "WorkingDir")},
        "HostConfig": inspected["HostConfig"],
    }
    name = inspected["Name"].lstrip("/")
    created = engine.request("POST", "/containers/create", params={"name": name}, json=body)
    engine.request("POST", f"/containers/{created['Id']}/start")
    assert "mounts other directories than those of this gateway" in await find_reason(sandboxes)
    assert not engine.list_containers()


@pytest.mark.requirement("AT10")
@pytest.mark.parametrize("exists_on_the_host", [True, False])
async def test_a_gateway_with_a_file_system_of_its_own_is_told(
    engine: DockerDaemon, state: Path, tmp_path: Path, exists_on_the_host: bool
) -> None:
    """As in a container that was given the engine's socket: its directories have other contents on the host."""
    config = tmp_path / "antiphon.json5"
    settings = f'{{backend: "docker", docker: {{image: "{IMAGE}"}}}}'
    config.write_text(f"{{agents: {{defaults: {{sandbox: {settings}}}}}}}")
    if exists_on_the_host:
        (state / "sandboxes").mkdir()
    gateway = f"'{sys.executable}' -m antiphon sandbox explain --config '{config}' --state-dir '{state}'"
    shown = await asyncio.to_thread(
        subprocess.run,
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs none '{state}' && {gateway}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "mounts other directories than those of this gateway" in " ".join(shown.stdout.split()), shown
    assert not engine.list_containers()


# --- the life of a container ---


@pytest.mark.requirement("B1")
async def test_changed_settings_lead_to_another_container(engine: DockerDaemon, state: Path) -> None:
    await run(make_containers(state), MAIN, "true")
    [first] = engine.list_containers()
    await run(make_containers(state), MAIN, "true")
    assert [container["Id"] for container in engine.list_containers()] == [first["Id"]]
    await run(make_containers(state, {"memory": "128m"}), MAIN, "true")
    [second] = engine.list_containers()
    assert second["Id"] != first["Id"]
    found = engine.request("GET", f"/containers/{second['Id']}/json")
    assert found["HostConfig"]["Memory"] == 128 << 20


async def test_a_container_in_use_is_not_removed_for_changed_settings(
    engine: DockerDaemon, state: Path
) -> None:
    marker = f"{os.getpid()}.{secrets.randbelow(10**9):09}"
    busy = asyncio.create_task(run(make_containers(state), MAIN, f"sleep {marker}"))
    async with asyncio.timeout(30):
        while not find_marked(f"sleep {marker}"):  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.01)
    assert await run(make_containers(state, {"memory": "128m"}), MAIN, "echo works") == "works\n"
    assert find_marked(f"sleep {marker}")
    for pid in find_marked(f"sleep {marker}"):
        os.kill(pid, 9)
    await busy


async def test_a_container_that_was_stopped_is_started_again(engine: DockerDaemon, state: Path) -> None:
    sandboxes = make_containers(state)
    for how in ("kill", "stop?t=0"):
        await run(sandboxes, MAIN, "true")
        [container] = engine.list_containers()
        engine.request("POST", f"/containers/{container['Id']}/{how}")
        assert await run(sandboxes, MAIN, "echo works") == "works\n"
    engine.remove_containers()
    assert await run(sandboxes, MAIN, "echo works") == "works\n"


async def test_commands_at_the_same_time_get_one_container(engine: DockerDaemon, state: Path) -> None:
    """Also those of two processes."""
    several = [make_containers(state), make_containers(state)]
    for sandboxes in several:
        await sandboxes.probe()
    seen = await asyncio.gather(*(run(each, MAIN, "echo works") for each in several * 3))
    assert seen == ["works\n"] * 6
    assert len(engine.list_containers()) == 1


async def test_a_setup_command_runs_once(engine: DockerDaemon, state: Path) -> None:
    sandboxes = make_containers(
        state, {"setupCommand": ["echo run >> /workspace/setup", "id -u > /var/tmp/id"]}
    )
    for _ in range(2):
        assert "59321" in await run(sandboxes, MAIN, "cat /var/tmp/id") or os.geteuid() != 0
    assert (state / "workspaces/main/setup").read_text() == "run\n"
    failing = make_containers(state, {"setupCommand": "echo broken pipe; exit 3"})
    assert "'setupCommand' ended with status 3: broken pipe" in await find_reason(failing)
    assert len(engine.list_containers()) == 1


async def test_settings_reach_the_container(engine: DockerDaemon, state: Path, tmp_path: Path) -> None:
    bound = tmp_path / "bound"
    bound.mkdir()
    (bound / "file").write_text("bound\n")
    for path in (bound, bound / "file"):
        path.chmod(0o755)
    settings: Json = {
        "user": "61002:61003",
        "env": {"FROM_CONFIG": "yes"},
        "tmpfs": ["/opt:size=1m"],
        "cpus": 0.5,
        "binds": [f"{bound}:/data:ro"],
        "containerPrefix": "mine-",
        "readOnlyRoot": False,
        "extraHosts": ["api.local:192.0.2.7"],
    }
    script = (
        "id -u; id -g; echo $FROM_CONFIG; cat /data/file; grep api.local /etc/hosts; touch /data/x || echo ro"
    )
    seen = await run(make_containers(state, settings), MAIN, script)
    assert seen.split()[:4] == ["61002", "61003", "yes", "bound"]
    assert "192.0.2.7" in seen
    assert "ro\n" in seen
    [container] = engine.list_containers()
    assert container["Names"][0].startswith("/mine-")
    found = engine.request("GET", f"/containers/{container['Id']}/json")["HostConfig"]
    assert (found["NanoCpus"], found["Tmpfs"]) == (500_000_000, {"/opt": "size=1m"})
    assert (state / "workspaces/main").stat().st_uid == 61002


# --- refusals ---


@pytest.mark.requirement("AT6", "AT8")
async def test_what_is_missing_is_named_with_its_cure(
    engine: DockerDaemon, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "run `docker pull no-such:1`" in await find_reason(make_containers(state, {"image": "no-such:1"}))
    profile = make_containers(state, {"seccompProfile": str(tmp_path / "absent.json")})
    assert "correct 'sandbox.docker.seccompProfile'" in await find_reason(profile)
    bind = make_containers(state, binds=[f"{engine.socket.parent}:/engine:ro"])
    assert "contains the engine's socket" in await find_reason(bind)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    reason = await find_reason(make_containers(state))
    assert f"no Docker engine answers at '{tmp_path}/absent.sock'" in reason
    assert "systemctl start docker" in reason
    monkeypatch.setenv("DOCKER_HOST", "tcp://example.org:2375")
    assert "an engine on another machine does not have these directories" in await find_reason(
        make_containers(state)
    )


@pytest.mark.requirement("AT8")
async def test_a_user_without_permission_is_told(engine: DockerDaemon) -> None:
    program = """
import asyncio, concurrent.futures.thread, os, sys
from pathlib import Path
from antiphon.workspace.docker_engine import DockerEngine
os.setgroups([]); os.setresgid(61009, 61009, 61009); os.setresuid(61009, 61009, 61009)
asyncio.run(DockerEngine(Path(sys.argv[1])).request("GET", "/version"))
"""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, str(engine.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "the user '61009' may not use the Docker engine" in done.stderr
    assert "usermod -aG docker 61009" in done.stderr


@pytest.mark.requirement("AT6")
async def test_an_image_without_a_shell_is_refused(engine: DockerDaemon, state: Path) -> None:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        directory = tarfile.TarInfo("workspace")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(directory)
    engine.import_image("antiphon-empty:1", output.getvalue())
    reason = await find_reason(make_containers(state, {"image": "antiphon-empty:1"}))
    assert "the image 'antiphon-empty:1' lacks programs that commands need" in reason
    assert not engine.list_containers()


@pytest.mark.requirement("AT6")
async def test_an_engine_that_breaks_after_the_examination_refuses(
    engine: DockerDaemon, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = make_containers(state)
    command = await sandboxes.wrap(MAIN, ["touch", "effect"], workdir=None, env={})
    engine.remove_containers()
    done = await asyncio.to_thread(run_command, command)
    assert done.returncode == docker_launcher.REFUSED_STATUS
    assert done.stderr.startswith("docker: No such container")
    assert not (state / "workspaces/main/effect").exists()
    assert await sandboxes.explain_failed_start(MAIN, done.stderr) is None  # it works again


async def test_containers_are_chosen_where_they_are_described_and_an_engine_answers(
    engine: DockerDaemon, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await make_sandboxes(state, docker={"image": IMAGE}).find_status("main")).backend == "docker"
    assert (await make_sandboxes(state).find_status("main")).backend != "docker"
    monkeypatch.setenv("DOCKER_HOST", "unix:///absent.sock")
    assert (await make_sandboxes(state, docker={"image": IMAGE}).find_status("main")).backend != "docker"
