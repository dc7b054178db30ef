"""The backend `bwrap` of a gateway that runs as root and of one that does not; see also `test_sandbox_isolation`."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from antiphon.errors import InvalidInput
from antiphon.workspace import bubblewrap, landlock_launcher, seccomp
from antiphon.workspace.bubblewrap import Bubblewrap
from antiphon.workspace.landlock import Landlock
from antiphon.workspace.locations import Mount
from antiphon.workspace.sandbox_backend import (
    ATTESTATION_SCRIPT,
    BackendFailed,
    check_bind_targets,
    check_mounts,
    find_attestation_fault,
    find_program,
)
from support.isolation import CANARY, IS_ROOT, KINDS, LIMITS, Isolation, open_isolation
from support.keepers import wait_until_gone

BWRAP = find_program("bwrap", [])
pytestmark = pytest.mark.skipif(BWRAP is None, reason="bwrap is not installed (apt-get install bubblewrap)")


@pytest.fixture(params=[kind for kind in KINDS if kind.startswith("bwrap")])
def isolation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Isolation:
    return open_isolation(request.param, tmp_path_factory.mktemp("sandbox"))


def test_a_sandbox_attests_its_isolation(isolation: Isolation) -> None:
    place = isolation.place
    attested = isolation.run(
        ATTESTATION_SCRIPT, env={"CANARY": str(place / "state" / "file"), "MOUNTS": "/workspace /tmp"}
    )
    is_root = isolation.kind == "bwrap of root"
    status = (place / "workspace").stat()
    mounts = {"/workspace": f"{status.st_dev}:{status.st_ino}"}

    def find_fault(mounts: Mapping[str, str], *, is_root: bool = is_root) -> str | None:
        return find_attestation_fault(attested.stdout, mounts, gateway_is_root=is_root, init_names=["bwrap"])

    assert find_fault(mounts) is None, attested.stdout + attested.stderr
    assert find_fault({"/workspace": "1:1"}) == "its /workspace is another directory than the gateway's"
    if not is_root:  # the same picture from a gateway of root would mean host uid 0
        assert find_fault(mounts, is_root=True) is not None


def test_an_attestation_from_outside_a_sandbox_is_a_fault(tmp_path: Path) -> None:
    canary = tmp_path / "file"
    canary.touch()
    outside = subprocess.run(
        ["/bin/sh", "-c", ATTESTATION_SCRIPT],
        capture_output=True,
        text=True,
        env={"CANARY": str(canary)},
        check=False,
    )

    def find_fault(output: str) -> str | None:
        return find_attestation_fault(output, {}, gateway_is_root=IS_ROOT, init_names=["bwrap"])

    assert find_fault(outside.stdout) is not None
    assert find_fault("") == "it could not be examined"


def test_a_command_works_in_its_workspace(isolation: Isolation) -> None:
    done = isolation.run("pwd; echo hello > file; cat file; echo > /tmp/scratch; mkdir a; exit 3")
    assert (done.returncode, done.stdout) == (3, "/workspace\nhello\n"), done.stderr
    assert (isolation.place / "workspace" / "file").read_text() == "hello\n"
    assert (isolation.place / "tmp" / "scratch").exists()


def test_variables_of_a_command_do_not_reach_what_starts_it(isolation: Isolation) -> None:
    """The loader writes down every program that it starts with these variables, such as one that is still root."""
    work = isolation.place / "workspace"
    work.chmod(0o777)
    done = isolation.run("true", env={"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": "/workspace/debug", "-a": "b"})
    assert done.returncode == 0, done.stderr
    traces = list(work.glob("debug.*"))
    assert {trace.stat().st_uid for trace in traces} == {isolation.owner}
    assert not [trace for trace in traces if "setpriv" in trace.read_text()]


def test_other_processes_of_the_user_do_not_count(isolation: Isolation) -> None:
    if isolation.kind == "bwrap of root":
        pytest.skip("without a user namespace, all commands of the user count together")
    owner = isolation.owner
    program = f"""
import os, threading
if {IS_ROOT}:
    os.setresuid({owner}, {owner}, {owner})
for _ in range({LIMITS.processes + 1}):
    threading.Thread(target=input).start()
print("ready", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as busy:
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == b"ready\n"
            assert isolation.run("echo done").stdout == "done\n"
        finally:
            busy.kill()


@pytest.mark.anyio
async def test_no_process_outlives_its_command(isolation: Isolation) -> None:
    mark = f"{os.getpid()}.{secrets.randbelow(10**9):09}"  # other tests run at the same time
    script = f"setsid sh -c 'trap \"\" TERM; sleep {mark}' > /dev/null 2>&1 & echo started"
    done = await asyncio.to_thread(isolation.run, script)
    assert done.stdout == "started\n"
    await wait_until_gone(mark)  # its namespace is removed after the command has ended


def test_root_needs_another_user() -> None:
    assert BWRAP is not None
    for user in (None, 0):
        with pytest.raises(BackendFailed, match="unprivileged user"):
            Bubblewrap(BWRAP, user=user, is_root=True)
        if landlock_launcher.get_version():
            with pytest.raises(BackendFailed, match="unprivileged user"):
                Landlock(user=user, is_root=True)


@pytest.mark.parametrize(
    "source", ["/", "/etc/ssl", "/proc", "/dev", "/run/docker.sock", "state", "state/inside", "."]
)
def test_binds_that_lead_out_are_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "state" / "inside").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="may not be shown"):
        check_mounts([Mount("/data", tmp_path / source)], tmp_path / "state")


@pytest.mark.parametrize(
    "target", ["/", "/usr", "/usr/bin", "/proc/sys", "/tmp", "/workspace", "/data/../etc"]
)
def test_binds_that_hide_the_system_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(InvalidInput, match="not a place"):
        check_bind_targets([Mount(target, tmp_path)])


def test_a_bind_is_shown_where_it_is_asked_for(isolation: Isolation) -> None:
    bind = Mount("/data", isolation.place / "other", writable=False)
    check_mounts([bind], isolation.place / "state")
    check_bind_targets([bind])
    done = isolation.run(
        "cat /data/file; touch /data/new || echo refused", mounts=isolation.build_mounts(bind)
    )
    assert done.stdout == f"{CANARY}refused\n"


def test_a_program_in_a_workspace_is_not_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap-of-an-agent"
    shutil.copy("/bin/true", fake)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("bwrap-of-an-agent", [tmp_path]) is None
    assert find_program("bwrap-of-an-agent", []) == fake


def test_filters_exist_for_the_common_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        program = seccomp.build_filter(machine)
        assert program is not None
        assert len(program) % 8 == 0
    assert seccomp.build_filter("unheard-of") is None


@pytest.mark.requirement("AT8")
@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("bwrap: setting up uid map: Permission denied", "AppArmor forbids user namespaces"),
        (
            "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
            "AppArmor forbids network namespaces",
        ),
        ("bwrap: Creating new namespace failed: Operation not permitted", "the container forbids namespaces"),
        ("bwrap: Unknown option --size", "this bwrap is older than 0.8"),
        ("bwrap: something new", "bwrap failed: bwrap: something new"),
    ],
)
def test_known_causes_of_a_failed_start_are_told_apart(output: str, reason: str) -> None:
    found = bubblewrap.explain_start_failure(output)
    assert found.reason == reason
    assert "docker" not in found.cure  # no such backend
