"""Directories of sandboxed sessions that nothing uses are removed by themselves; others are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from antiphon import keys
from antiphon.clock import ManualClock
from antiphon.config import Config
from antiphon.engine.runs import command_rows
from antiphon.engine.runs.command_rows import NewCommand
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.store import Tx
from antiphon.workspace import sandbox_pruning
from antiphon.workspace.locations import SessionWorkspaceLocator, locate_own_directory, mark_used
from antiphon.workspace.sandbox_directories import list_idle_directories, remove_directory
from antiphon.workspace.sandbox_pruning import SandboxPruner
from support.agents_fixture import make_agents_config
from support.app_fixture import open_test_store
from support.sandboxes import GROUP

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("B1")]

KEYS = ("agent:main:direct:one", "agent:main:direct:two")


def make_config(**sandbox: Any) -> Config:
    return make_agents_config(agents={"defaults": {"sandbox": {"scope": "session", **sandbox}}})


def create_directory(config: Config, state: Path, key: str, clock: ManualClock) -> Path:
    """Create the directory of a session as one that was used last when the clock says."""
    own = locate_own_directory(config.get_agent("main"), key, state, sandboxed=True)
    (own / "workspace" / "inside").mkdir(parents=True)
    (own / "workspace" / "inside" / "file").write_text("x")
    seconds = clock.now() / 1000
    for path in (*own.rglob("*"), own):
        os.utime(path, (seconds, seconds))
    return own


async def test_an_idle_directory_is_removed_after_its_time(tmp_path: Path) -> None:
    config, clock = make_config(), ManualClock()
    async with open_test_store(tmp_path) as store:
        pruner = SandboxPruner(config, store, clock, tmp_path)
        old = create_directory(config, tmp_path, KEYS[0], clock)
        clock.advance(seconds=2 * 3600)
        new = create_directory(config, tmp_path, KEYS[1], clock)
        own_workspace = tmp_path / "workspaces" / "main"
        own_workspace.mkdir(parents=True)
        os.utime(own_workspace, (0, 0))
        clock.advance(seconds=21.9 * 3600)
        assert await pruner.prune() == []
        clock.advance(seconds=0.2 * 3600)
        assert await pruner.prune() == [old]
        assert (old.exists(), (new / "workspace" / "inside" / "file").exists()) == (False, True)
        clock.advance(days=300)
        assert await pruner.prune() == [new]
        assert list(new.parent.iterdir()) == []
        assert own_workspace.exists()


@pytest.mark.parametrize(
    ("prune", "kept_days", "removed_days"),
    [
        ({"idleHours": 0}, 6.9, 7.1),
        ({"idleHours": 1000, "maxAgeDays": 2}, 1.9, 2.1),
        ({"idleHours": 0, "maxAgeDays": 0}, 10_000, None),
    ],
)
async def test_the_shorter_time_counts_and_zero_means_never(
    tmp_path: Path, prune: dict[str, int], kept_days: float, removed_days: float | None
) -> None:
    config, clock = make_config(prune=prune), ManualClock()
    async with open_test_store(tmp_path) as store:
        pruner = SandboxPruner(config, store, clock, tmp_path)
        own = create_directory(config, tmp_path, KEYS[0], clock)
        clock.advance(days=kept_days)
        assert await pruner.prune() == []
        if removed_days is not None:
            clock.advance(days=removed_days - kept_days)
            assert await pruner.prune() == [own]


async def test_a_directory_in_which_a_command_runs_is_kept(tmp_path: Path) -> None:
    config, clock = make_config(), ManualClock()
    command = NewCommand(
        key="c1", session_key=KEYS[0], agent_id="main", sandboxed=True, run_id="r1", backend="sandbox",
        command="sleep 100000", workdir="", timeout_seconds=100_000,
    )  # fmt: skip

    async def begin(tx: Tx) -> None:
        await session_rows.create_session(tx, keys.parse(KEYS[0]), 1, NewSession())
        await command_rows.begin_command(tx, command, clock.now())

    async with open_test_store(tmp_path) as store:
        await store.tx(begin)
        busy, idle = (create_directory(config, tmp_path, each, clock) for each in KEYS)
        clock.advance(days=30)
        assert await SandboxPruner(config, store, clock, tmp_path).prune() == [idle]
        assert (busy / "workspace" / "inside" / "file").exists()


async def test_a_directory_that_is_used_meanwhile_is_kept(tmp_path: Path) -> None:
    config, clock = make_config(), ManualClock()
    own = create_directory(config, tmp_path, GROUP.session_key or "", clock)
    clock.advance(days=30)
    idle = list_idle_directories(config, tmp_path, clock.now())
    assert list(idle) == [own]
    mark_used(SessionWorkspaceLocator(config, tmp_path)(GROUP).mounts)
    assert not remove_directory(own, idle[own])
    assert (own / "workspace" / "inside" / "file").exists()


async def test_one_pass_is_bounded_and_what_a_crash_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, clock = make_config(), ManualClock()
    monkeypatch.setattr(sandbox_pruning, "MAX_REMOVED_PER_PASS", 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    for key in KEYS:
        own = create_directory(config, tmp_path, key, clock)
        (own / "workspace" / "link").symlink_to(outside)
        (own / "workspace" / "inside").chmod(0)
        os.utime(own / "workspace" / "link", (0, 0), follow_symlinks=False)
        for path in (own / "workspace", own):
            os.utime(path, (0, 0))
    (tmp_path / "sandboxes" / "main" / ".antiphon-removed-1" / "half").mkdir(parents=True)
    clock.advance(days=30)
    async with open_test_store(tmp_path) as store:
        pruner = SandboxPruner(config, store, clock, tmp_path)
        assert [len(await pruner.prune()) for _ in range(3)] == [1, 1, 0]
    assert list((tmp_path / "sandboxes" / "main").iterdir()) == []
    assert (outside / "file").exists()
