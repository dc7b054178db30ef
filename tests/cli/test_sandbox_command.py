"""`antiphon sandbox` and the finding of `doctor`: what isolates commands, and the directories that sessions leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from antiphon import doctor
from antiphon.paths import Paths
from antiphon.workspace import sandbox_backend, sandbox_directories
from antiphon.workspace.locations import locate_own_directory
from cli.terminal import Program
from support.agents_fixture import make_agents_config
from support.sandboxes import hide_every_bubblewrap

HAS_BWRAP = sandbox_backend.find_program("bwrap", []) is not None


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


@pytest.mark.skipif(not HAS_BWRAP, reason="bwrap is not installed (apt-get install bubblewrap)")
def test_it_is_explained_which_backend_isolates_commands(program: Program) -> None:
    program.configure({"agents": {"defaults": {"sandbox": {"mode": "non-main", "workspaceAccess": "ro"}}}})
    printed = program.run("sandbox").out
    assert "all but main sessions" in printed
    assert "commands bwrap (/usr/bin/bwrap)" in printed
    [agent] = program.run("sandbox", "explain", "--agent", "main", "--json").json["agents"]
    assert (agent["backend"], agent["faults"], agent["workspaceAccess"]) == ("bwrap", [], "ro")
    assert not (program.state / "sandboxes").exists()


def test_unused_directories_are_removed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "chosen"
    config = make_agents_config(agents={"defaults": {"sandbox": {"workspaceRoot": str(root)}}})
    agent = config.get_agent("main")
    old, new = (
        locate_own_directory(agent, f"agent:main:direct:{name}", tmp_path, sandboxed=False)
        for name in ("old", "new")
    )
    theirs = root / "main" / "tmp-of-somebody"
    for directory in (old, new, theirs, root / "other" / "tmp"):
        (directory / "tmp").mkdir(parents=True)
        (directory / "tmp" / "file").write_text("x")
    yesterday = time.time() - 25 * 3600
    for path in (old, old / "tmp", old / "tmp" / "file", theirs, theirs / "tmp", theirs / "tmp" / "file"):
        os.utime(path, (yesterday, yesterday))
    listed = sandbox_directories.list_directories(config, tmp_path)
    assert [directory.path for directory in listed] == [str(new), str(old)]
    assert (listed[1].files, listed[1].bytes) == (1, 1)
    removed = sandbox_directories.remove_idle_directories(config, tmp_path, 24)
    assert [directory.path for directory in removed] == [str(old)]
    assert not old.exists()
    assert all((directory / "tmp" / "file").exists() for directory in (new, theirs, root / "other" / "tmp"))


def test_the_command_tells_what_it_removed(program: Program) -> None:
    used = program.state / "sandboxes" / "main" / "_agent"
    old = program.state / "sandboxes" / "main" / ("0" * 32)
    for directory in (used, old):
        (directory / "tmp").mkdir(parents=True)
    program.state.chmod(0o700)
    yesterday = time.time() - 25 * 3600
    for path in (old / "tmp", old):
        os.utime(path, (yesterday, yesterday))
    first, second = (program.run("sandbox", "prune").out for _ in range(2))
    assert first.startswith("Removed:")
    assert str(old) in first
    assert str(used) not in first
    assert second == "Nothing to remove: everything was used in the last 24 h.\n"


@pytest.mark.anyio
@pytest.mark.requirement("AT6")
async def test_the_doctor_names_the_fault_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json5"
    hide_every_bubblewrap(monkeypatch)
    for mode, level in (("off", "warn"), ("all", "fail")):
        path.write_text(f'{{ agents: {{ defaults: {{ sandbox: {{ mode: "{mode}" }} }} }} }}')
        path.chmod(0o600)
        findings = await doctor.run_checks(Paths(path, config_explicit=True, state_dir=tmp_path / "state"))
        [found] = [finding for finding in findings if finding.check == "sandbox"]
        assert found.level == level
        assert "the program bwrap is not installed" in found.what
        assert "apt-get install bubblewrap" in (found.next_step or "")
