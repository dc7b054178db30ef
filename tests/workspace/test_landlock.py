"""The backend `landlock`, and that it is used only where the configuration allows it (`test_sandbox_isolation`)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from antiphon.errors import SandboxUnavailable
from antiphon.workspace import landlock_launcher, sandbox_backend
from antiphon.workspace.sandbox_backend import SandboxedCommand
from support.privileges import open_way_to
from support.sandboxes import CHILD, MAIN, make_sandboxes, run, run_command

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        sys.platform != "linux" or landlock_launcher.get_version() == 0, reason="this kernel has no Landlock"
    ),
]

IS_ROOT = os.geteuid() == 0


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("landlock")
    open_way_to(base)
    (base / "canary").write_text("canary-secret")
    (base / "workspaces" / "other").mkdir(parents=True)
    (base / "workspaces" / "other" / "file").write_text("canary-secret")
    return base


async def test_a_command_works_in_its_workspace(state: Path) -> None:
    sandboxes = make_sandboxes(state, backend="landlock")
    assert (await sandboxes.find_status("main")).backend == "landlock"
    output = await run(
        sandboxes, MAIN, "mkdir a; cd a; echo b > c; cat c; echo t > $TMPDIR/t; cat $TMPDIR/t; id -u"
    )
    assert output.split() == ["b", "t", str(59_321 if IS_ROOT else os.getuid())]
    assert (state / "workspaces" / "main" / "a" / "c").read_text() == "b\n"
    assert (await run(sandboxes, MAIN, "pwd", "/workspace/a")).strip() == str(
        state / "workspaces" / "main" / "a"
    )


@pytest.mark.skipif(not IS_ROOT, reason="only root makes a process 1 without further namespaces")
async def test_a_gateway_that_is_process_1_of_a_container_runs_commands(state: Path) -> None:
    command = await make_sandboxes(state, backend="landlock").wrap(
        MAIN, ["/bin/echo", "done"], workdir=None, env={}
    )
    as_its_child = ["unshare", "--pid", "--fork", "--mount-proc", "/bin/sh", "-c", '"$@"; exit $?', "sh"]
    done = run_command(SandboxedCommand([*as_its_child, *command.argv], command.env, command.files))
    assert done.stdout == "done\n"


@pytest.mark.requirement("AT12")
async def test_nothing_else_of_the_host_can_be_read_or_changed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_KEY", "canary-secret")
    sandboxes = make_sandboxes(state, backend="landlock")
    gateway = os.getpid()
    script = f"""
    cat {state}/canary {state}/workspaces/other/file /etc/passwd /root/.profile
    ln -s {state}/canary link; cat link; ls {state} /tmp /home /root
    cat /proc/{gateway}/environ /proc/{gateway}/cmdline /proc/1/environ /proc/1/cmdline; env
    for f in {state}/new /tmp/new /usr/new /proc/self/oom_score_adj; do echo x > $f && echo "wrote $f"; done
    kill -0 {gateway} && echo "signalled"
    """
    output = await run(sandboxes, MAIN, script)
    assert "canary-secret" not in output
    assert "wrote" not in output
    if landlock_launcher.get_version() >= 6 or IS_ROOT:
        assert "signalled" not in output
    assert not (state / "new").exists()


async def test_a_workspace_replaced_by_a_link_is_not_entered(state: Path) -> None:
    sandboxes = make_sandboxes(state, backend="landlock")
    command = await sandboxes.wrap(CHILD, ["/bin/cat", "file"], workdir=None, env={})
    own = state / "workspaces" / "main" / "subagents" / "6f0c"
    own.rmdir()
    own.symlink_to(state / "workspaces" / "other")
    done = run_command(command)
    assert done.returncode == 126
    assert "canary-secret" not in done.stdout + done.stderr


@pytest.mark.requirement("AT6")
async def test_it_replaces_bwrap_only_where_the_configuration_allows_it(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    shutil.copy("/bin/false", broken)
    monkeypatch.setattr(sandbox_backend, "PROGRAM_DIRECTORIES", (str(broken.parent),))
    with pytest.raises(SandboxUnavailable):
        await run(make_sandboxes(state), MAIN, "echo works")
    allowed = make_sandboxes(state, fallback="landlock")
    assert await run(allowed, MAIN, "echo works") == "works\n"
    status = await allowed.find_status("main")
    assert (status.backend, [name for name, _ in status.faults]) == ("landlock", ["bwrap"])


@pytest.mark.requirement("B2", "AT7")
@pytest.mark.skipif(not IS_ROOT, reason="only root changes the user")
async def test_directories_that_the_user_cannot_enter_are_a_named_fault(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    sandboxes = make_sandboxes(closed / "state", backend="landlock")
    assert (await sandboxes.find_status("main")).backend is None, "it is known before a command needs it"
    assert not sandboxes.is_attested("main")
    with pytest.raises(
        SandboxUnavailable, match=r"cannot enter the directories.*run the gateway as an ordinary user"
    ):
        await run(sandboxes, MAIN, "true")
