"""Containers that nothing uses are listed and removed; others are not."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from antiphon.clock import SystemClock
from antiphon.config import Config
from antiphon.workspace.docker_containers import has_containers, list_containers
from antiphon.workspace.locations import locate_own_directory
from antiphon.workspace.sandbox_pruning import SandboxPruner
from cli.terminal import Program
from support.agents_fixture import make_agents_config
from support.app_fixture import open_test_store
from support.docker_daemon import IMAGE, DockerDaemon
from support.keepers import find_marked
from support.privileges import open_way_to
from support.sandboxes import GROUP, OTHER_GROUP, make_sandboxes, run

pytestmark = pytest.mark.anyio

HOUR_SECONDS = 3600


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
    return directory


def build_settings(**settings: Any) -> dict[str, Any]:
    return {"backend": "docker", "docker": {"image": IMAGE}, "mode": "all", "scope": "session", **settings}


def make_config(**settings: Any) -> Config:
    return make_agents_config(agents={"defaults": {"sandbox": build_settings(**settings)}})


def age(config: Config, state: Path, key: str, hours: float) -> Path:
    """Make the directory of a session one that was used last some hours ago."""
    own = locate_own_directory(config.get_agent("main"), key, state, sandboxed=True)
    then = time.time() - hours * HOUR_SECONDS
    for path in (*own.rglob("*"), own):
        os.utime(path, (then, then))
    return own


async def list_names(state: Path) -> set[str]:
    return {container.name for container in await list_containers(state)}


async def test_a_container_goes_when_nothing_has_used_it(engine: DockerDaemon, state: Path) -> None:
    config = make_config(prune={"idleHours": 2})
    sandboxes = make_sandboxes(state, **build_settings())
    for caller in (GROUP, OTHER_GROUP):
        assert await run(sandboxes, caller, "echo works") == "works\n"
    both = await list_names(state)
    assert len(both) == 2
    assert GROUP.session_key is not None
    async with open_test_store(state) as store:
        pruner = SandboxPruner(config, store, SystemClock(), state)
        age(config, state, GROUP.session_key, 1.9)
        assert await pruner.prune() == []
        assert await list_names(state) == both
        own = age(config, state, GROUP.session_key, 2.1)
        assert await pruner.prune() == [own]
        [left] = await list_containers(state)
        assert left.directory != str(own)
    assert await run(sandboxes, GROUP, "echo works") == "works\n"


async def test_a_container_goes_when_it_is_too_old_and_not_in_use(engine: DockerDaemon, state: Path) -> None:
    config = make_config(prune={"idleHours": 0, "maxAgeDays": 0.00001})
    await run(make_sandboxes(state, **build_settings()), GROUP, "true")
    async with open_test_store(state) as store:
        pruner = SandboxPruner(config, store, SystemClock(), state)
        await pruner.prune()
        assert len(await list_containers(state)) == 1  # it was used a moment ago
        assert GROUP.session_key is not None
        age(config, state, GROUP.session_key, 0.05)
        await pruner.prune()
        assert await list_containers(state) == []


async def test_a_container_in_which_a_command_runs_stays(engine: DockerDaemon, state: Path) -> None:
    config, marker = make_config(), f"{os.getpid()}.{secrets.randbelow(10**9):09}"
    busy = asyncio.create_task(run(make_sandboxes(state, **build_settings()), GROUP, f"sleep {marker}"))
    async with asyncio.timeout(30):
        while not find_marked(f"sleep {marker}"):  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.01)
    assert GROUP.session_key is not None
    own = age(config, state, GROUP.session_key, 1000)
    async with open_test_store(state) as store:
        pruner = SandboxPruner(config, store, SystemClock(), state)
        await pruner._prune_containers()  # pyright: ignore[reportPrivateUsage] - the directory has no command row here
        assert len(await list_containers(state)) == 1
        assert own.exists()
        for pid in find_marked(f"sleep {marker}"):
            os.kill(pid, 9)
        await busy
        await pruner._prune_containers()  # pyright: ignore[reportPrivateUsage]
        assert await list_containers(state) == []


async def test_containers_of_another_state_directory_stay(engine: DockerDaemon, state: Path) -> None:
    other = state.with_name("other")
    other.mkdir()
    for directory in (state, other):
        await run(make_sandboxes(directory, **build_settings()), GROUP, "true")
    names = await list_names(other)
    assert len(names) == 1
    assert await list_names(state) != names
    config = make_config()
    assert GROUP.session_key is not None
    for directory in (state, other):
        age(config, directory, GROUP.session_key, 1000)
    async with open_test_store(state) as store:
        await SandboxPruner(config, store, SystemClock(), state).prune()
    assert (await list_names(state), await list_names(other)) == (set(), names)


async def test_without_an_engine_there_is_nothing_to_remove(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///absent.sock")
    assert await list_containers(state) == []
    async with open_test_store(state) as store:
        assert await SandboxPruner(make_config(), store, SystemClock(), state).prune() == []
    assert not has_containers(make_agents_config())
    assert has_containers(make_config(backend=None))


@pytest.mark.requirement("R")
async def test_the_commands_show_and_remove_containers(
    engine: DockerDaemon, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    open_way_to(tmp_path)
    bytecode = tmp_path_factory.getbasetemp().parent / "antiphon-bytecode"
    program = Program(tmp_path, bytecode, {"DOCKER_HOST": f"unix://{engine.socket}"})
    program.configure({"agents": {"defaults": {"sandbox": build_settings()}}})
    explained = await asyncio.to_thread(program.run, "sandbox", "--json")
    [agent] = explained.json["agents"]
    assert (agent["backend"], agent["image"], agent["faults"]) == ("docker", IMAGE, [])
    checked = await asyncio.to_thread(program.run, "doctor", "--json")
    assert "docker isolates commands" in checked.out
    listed = await asyncio.to_thread(program.run, "tools", "--json")
    assert '"exec"' in listed.out
    assert engine.list_containers() == []  # what was only examined leaves nothing

    await run(make_sandboxes(program.state, **build_settings()), GROUP, "true")
    shown = await asyncio.to_thread(program.run, "sandbox", "list")
    assert "antiphon-sbx-" in shown.out
    assert "running" in shown.out
    [container] = (await asyncio.to_thread(program.run, "sandbox", "list", "--json")).json["containers"]
    assert container["image"]
    kept = await asyncio.to_thread(program.run, "sandbox", "prune", "--json")
    assert kept.json == {"directories": [], "containers": []}
    assert GROUP.session_key is not None
    age(make_config(), program.state, GROUP.session_key, 30)
    removed = await asyncio.to_thread(program.run, "sandbox", "prune", "--json")
    assert [each["name"] for each in removed.json["containers"]] == [container["name"]]
    assert engine.list_containers() == []
