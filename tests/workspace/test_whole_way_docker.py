"""Commands in containers with the real gateway: a model over HTTP uses them, and kills of the gateway lose nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.gateways import connect, up
from cli.terminal import BOUND, Program
from support.docker_daemon import IMAGE, DockerDaemon
from support.keepers import end_keeper, find_keeper, wait_until_gone, wait_until_running, wait_until_true
from support.model_provider import Provider
from support.privileges import open_way_to
from workspace.test_whole_way_commands import SCRIPT_BY_MESSAGE, choose_answer, running

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
SANDBOX: Json = {"backend": "docker", "docker": {"image": IMAGE}}


@pytest.fixture
def program(docker_daemon: DockerDaemon, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    open_way_to(tmp_path)
    docker_daemon.remove_containers()
    bytecode = tmp_path_factory.getbasetemp().parent / "antiphon-bytecode"
    return Program(tmp_path, bytecode, {"DOCKER_HOST": f"unix://{docker_daemon.socket}"})


@pytest.mark.requirement("T1", "AT9", "B1")
async def test_a_model_works_in_a_container(program: Program, docker_daemon: DockerDaemon) -> None:
    SCRIPT_BY_MESSAGE["in a container"] = [
        ("exec", {"command": "echo from a command > made.txt; pwd; head -c 11 /proc/1/comm"}),
        ("read", {"path": "made.txt"}),
        ("write", {"path": "written.txt", "content": "from a tool\n"}),
        ("exec", {"command": "cat written.txt; cat $CANARY_FILE; ls /var/run/docker.sock"}),
        ("exec", {"command": "cat", "background": True}),
        ("process", {"action": "write", "sessionId": "ID", "data": "typed\n", "eof": True}),
        ("process", {"action": "poll", "sessionId": "ID", "timeout": 20_000}),
    ]
    async with running(program, {}, SANDBOX) as antiphon:
        reply = await antiphon.wait_for_reply(await antiphon.send("in a container"))
        made, read, _, seen, _, _, polled = reply.split(" | ")
        assert made.endswith("\n\n/workspace\ndocker-init"), made
        assert "from a command" in read
        assert "from a tool\n" in seen
        assert "No such file or directory" in seen
        assert polled.endswith("typed\n"), polled
        assert (program.home / "work" / "made.txt").read_text() == "from a command\n"
        [container] = docker_daemon.list_containers()
        assert container["State"] == "running"
        shown = await asyncio.to_thread(program.run, "sandbox")
        assert "docker" in shown.out


@pytest.mark.requirement("AT6", "B2")
async def test_without_an_engine_no_command_runs(program: Program) -> None:
    SCRIPT_BY_MESSAGE["no engine"] = [("exec", {"command": "touch effect"})]
    absent = Program(program.home, program.bytecode, {"DOCKER_HOST": "unix:///absent.sock"})
    async with running(absent, {}, SANDBOX) as antiphon:
        offered: list[str] = []
        run_id = await antiphon.send("no engine")
        await antiphon.client.call(
            "agent.wait", {"runId": run_id, "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
        )
        for body in antiphon.provider.bodies:
            offered += [tool["function"]["name"] for tool in body.get("tools", ())]
        assert "read" in offered
        assert "exec" not in offered
        assert not (program.home / "work" / "effect").exists()
        checked = await asyncio.to_thread(absent.run, "doctor")
        assert "no Docker engine answers at '/absent.sock'" in " ".join(checked.out.split())


@pytest.mark.requirement("T5", "AT1", "AT20")
@pytest.mark.parametrize("kills_keeper", [False, True])
async def test_a_command_in_a_container_survives_its_gateway_and_ends_with_its_keeper(
    program: Program, kills_keeper: bool
) -> None:
    marker = f"9{abs(hash(program.home)) % 10**8}.{int(kills_keeper)}"
    script = f"echo begun >> effect; while [ ! -e go ]; do sleep 0.05; done; sleep 0.{marker[:3]}; echo done; exit 3"
    SCRIPT_BY_MESSAGE["killed"] = [("exec", {"command": f": {marker}; {script}", "yieldMs": 60_000})]
    provider = Provider(choose=lambda body: choose_answer(body, "0"))
    async with provider.running():
        program.configure(
            {
                "agents": {"defaults": {"workspace": "~/work", "sandbox": SANDBOX}},
                "tools": {"profile": "coding"},
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
            }
        )
        effect = program.home / "work" / "effect"

        async def has_begun() -> bool:
            return effect.exists()

        try:
            with up(program) as gateway:
                async with connect(gateway, program) as client:
                    sent = await client.call(
                        "chat.send",
                        {"sessionKey": "main", "message": "killed", "idempotencyKey": "killed"},
                    )
                await wait_until_true(has_begun, BOUND)
                await wait_until_running(marker)
                await asyncio.to_thread(gateway.stop, signal.SIGKILL)
                if kills_keeper:
                    keeper = find_keeper(program.state)
                    assert keeper is not None
                    keeper.kill()
                    await wait_until_gone(marker)
            (program.home / "work" / "go").touch()
            with up(program) as gateway:
                async with connect(gateway, program) as client:
                    ended = await client.call(
                        "agent.wait",
                        {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)},
                        seconds=BOUND,
                    )
                reply = ended["reply"]
                if kills_keeper:
                    assert "may have had effects" in reply, reply
                else:
                    assert reply.startswith("Exit code 3 after "), reply
                    assert reply.endswith("\n\ndone\n"), reply
                assert effect.read_text() == "begun\n"
                assert gateway.stop() == 0
        finally:
            end_keeper(program.state)
        await wait_until_gone(marker)
