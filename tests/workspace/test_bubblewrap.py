"""What a command in a `bwrap` sandbox can see and do, for a gateway that runs as root and for one that does not."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from antiphon.child_processes.pipes import open_memory_file
from antiphon.errors import InvalidInput, Unavailable
from antiphon.workspace import bubblewrap, seccomp
from antiphon.workspace.bubblewrap import Bubblewrap
from antiphon.workspace.locations import AGENT_WORKSPACE_MOUNT, TEMPORARY_MOUNT, WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import (
    ATTESTATION_SCRIPT,
    ResourceLimits,
    check_bind_targets,
    check_mounts,
    find_attestation_fault,
    find_program,
)

UNPRIVILEGED_UID = 61_001
BOUND_SECONDS = 30
LIMITS = ResourceLimits(processes=64, memory_bytes=256 * 1024**2, file_bytes=16 * 1024**2)

BWRAP = find_program("bwrap", [])
IS_ROOT = os.geteuid() == 0
needs_bwrap = pytest.mark.skipif(BWRAP is None, reason="bwrap is not installed (apt-get install bubblewrap)")
pytestmark = needs_bwrap

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the unprivileged user can reach."""
    base = tmp_path_factory.mktemp("sandbox")
    for parent in (base, *base.parents):
        if parent.is_relative_to(tmp_path_factory.getbasetemp().parent.parent) and os.access(parent, os.W_OK):
            parent.chmod(parent.stat().st_mode | 0o011)
    for name in ("workspace", "tmp", "agent", "other", "state"):
        (base / name).mkdir()
    (base / "state" / "canary").write_text("canary-secret")
    (base / "other" / "file").write_text("of another workspace")
    (base / "agent" / "file").write_text("of the agent")
    return base


def build_mounts(place: Path, *further: Mount, writable: bool = True) -> list[Mount]:
    workspace = Mount(WORKSPACE_MOUNT, place / "workspace", writable=writable)
    return [workspace, Mount(TEMPORARY_MOUNT, place / "tmp"), *further]


@pytest.fixture(params=["root", "unprivileged"])
def run(request: pytest.FixtureRequest, place: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script in a new sandbox, as a gateway of root or of an ordinary user would."""
    as_root = request.param == "root"
    if as_root and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    assert BWRAP is not None
    backend = Bubblewrap(BWRAP, user=UNPRIVILEGED_UID if as_root else None, limits=LIMITS, is_root=as_root)
    monkeypatch.setenv("CANARY_KEY", "canary-secret")
    owner = UNPRIVILEGED_UID if IS_ROOT else os.getuid()
    for name in ("workspace", "tmp"):
        os.chown(place / name, owner, owner)

    def run_script(
        script: str,
        *,
        mounts: Sequence[Mount] = (),
        env: Mapping[str, str] | None = None,
        seconds: float = BOUND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        command = backend.wrap(["/bin/sh", "-c", script], mounts or build_mounts(place), env=env or {})
        files = {name: open_memory_file(data) for name, data in command.files.items()}
        argv = [str(files.get(argument, argument)) for argument in command.argv]
        if IS_ROOT and not as_root:
            argv = ["/usr/bin/setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--", *argv]
        try:
            return subprocess.run(
                argv,
                pass_fds=list(files.values()),
                env=dict(command.env),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        finally:
            for fd in files.values():
                os.close(fd)

    return run_script


def test_a_sandbox_attests_its_isolation(run: Run, place: Path, request: pytest.FixtureRequest) -> None:
    attested = run(
        ATTESTATION_SCRIPT, env={"CANARY": str(place / "state" / "canary"), "MOUNTS": "/workspace /tmp"}
    )
    is_root = request.node.callspec.params["run"] == "root"
    status = (place / "workspace").stat()
    mounts = {"/workspace": f"{status.st_dev}:{status.st_ino}"}

    def find_fault(mounts: Mapping[str, str], *, is_root: bool = is_root) -> str | None:
        return find_attestation_fault(attested.stdout, mounts, gateway_is_root=is_root, init_names=["bwrap"])

    assert find_fault(mounts) is None, attested.stdout + attested.stderr
    assert find_fault({"/workspace": "1:1"}) == "its /workspace is another directory than the gateway's"
    if not is_root:  # the same picture from a gateway of root would mean host uid 0
        assert find_fault(mounts, is_root=True) is not None


def test_an_attestation_from_outside_a_sandbox_is_a_fault(place: Path) -> None:
    environment = {"CANARY": str(place / "state" / "canary")}
    outside = subprocess.run(
        ["/bin/sh", "-c", ATTESTATION_SCRIPT], capture_output=True, text=True, env=environment, check=False
    )

    def find_fault(output: str) -> str | None:
        return find_attestation_fault(output, {}, gateway_is_root=IS_ROOT, init_names=["bwrap"])

    assert find_fault(outside.stdout) is not None
    assert find_fault("") == "it could not be examined"


def test_a_command_works_in_its_workspace(run: Run, place: Path) -> None:
    done = run("pwd; echo hello > file; cat file; echo > /tmp/scratch; mkdir a; exit 3")
    assert (done.returncode, done.stdout) == (3, "/workspace\nhello\n"), done.stderr
    assert (place / "workspace" / "file").read_text() == "hello\n"
    assert (place / "tmp" / "scratch").exists()


def test_a_read_only_workspace_cannot_be_written(run: Run, place: Path) -> None:
    agent = Mount(AGENT_WORKSPACE_MOUNT, place / "agent", writable=False)
    mounts = build_mounts(place, agent, writable=False)
    done = run("cat /agent/file; touch file || echo refused; touch /agent/new || echo refused", mounts=mounts)
    assert done.stdout == "of the agentrefused\nrefused\n"


@pytest.mark.parametrize("name", ["state/canary", "other/file", "agent/file"])
def test_files_outside_the_workspace_are_not_there(run: Run, place: Path, name: str) -> None:
    done = run(f"cat {place / name}; ls {place.parent} /root /home; ln -s {place / name} link; cat link")
    assert "canary-secret" not in done.stdout
    assert done.stdout == ""


@pytest.mark.requirement("AT12")
def test_no_secret_of_the_gateway_is_inside(run: Run) -> None:
    script = "env; for f in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do tr '\\0' '\\n' < $f; done"
    done = run(script, env={"GIVEN": "given"})
    assert "given" in done.stdout
    assert "canary-secret" not in done.stdout + done.stderr
    assert "/sandbox" not in done.stdout  # paths of the host


def test_variables_of_a_command_do_not_reach_what_starts_it(run: Run, place: Path) -> None:
    """The loader writes down every program that it starts with these variables, such as one that is still root."""
    (place / "workspace").chmod(0o777)
    done = run("true", env={"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": "/workspace/debug", "-a": "b"})
    assert done.returncode == 0, done.stderr
    traces = list((place / "workspace").glob("debug.*"))
    owner = UNPRIVILEGED_UID if IS_ROOT else os.getuid()
    assert {trace.stat().st_uid for trace in traces} == {owner}
    assert not [trace for trace in traces if "setpriv" in trace.read_text()]


def test_there_is_no_network(run: Run) -> None:
    script = """
import socket
def attempt(kind, family, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2)
            s.connect(address)
            if kind == socket.SOCK_DGRAM: s.send(b"x")
        print("connected", address)
    except OSError as error:
        print("refused")
attempt(socket.SOCK_STREAM, socket.AF_INET, ("127.0.0.1", PORT))
attempt(socket.SOCK_STREAM, socket.AF_INET, ("169.254.169.254", 80))
attempt(socket.SOCK_DGRAM, socket.AF_INET, ("192.0.2.1", 53))
attempt(socket.SOCK_STREAM, socket.AF_INET6, ("2001:db8::1", 80))
for family in (socket.AF_NETLINK, socket.AF_PACKET, 38):
    try:
        socket.socket(family, socket.SOCK_RAW)
        print("opened", family)
    except OSError:
        print("refused")
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = script.replace("PORT", str(server.getsockname()[1]))
        if not Path("/usr/bin/python3").exists():
            pytest.skip("the system has no Python to connect with")
        done = run(f"/usr/bin/python3 -I -c '{program}'")
    assert done.stdout.split() == ["refused"] * 7, done.stdout + done.stderr


@pytest.mark.parametrize(
    "script",
    [
        "unshare -U true",
        "unshare -m true",
        "mount -t tmpfs none /tmp",
        "mknod /tmp/device c 1 1",
        "chroot / true",
        "ls /sys/kernel",
        "test -w /proc/sys/kernel/core_pattern",
        "test -w /proc/sysrq-trigger",
        "test -w /usr/bin",
    ],
)
def test_privileged_actions_are_refused(run: Run, script: str) -> None:
    assert run(script).returncode != 0


def test_a_setuid_file_gives_nothing(run: Run, place: Path) -> None:
    run("cp /usr/bin/id id; chmod u+s,g+s id; ./id -u > who")
    assert (place / "workspace" / "id").stat().st_uid != 0
    assert (place / "workspace" / "who").read_text().strip() != "0"


def test_only_processes_of_the_sandbox_are_seen(run: Run) -> None:
    done = run("ls -d /proc/[0-9]* | wc -l; kill -9 -1; echo")
    assert int(done.stdout.split()[0]) < 8


def test_processes_and_memory_are_limited(run: Run) -> None:
    bomb = "n=0; while [ $n -lt 300 ]; do sleep 20 & n=$((n + 1)); done; echo survived"
    assert "survived" not in run(bomb).stdout
    hog = run("head -c 1000000000 /dev/zero | tail | wc -c")
    assert hog.stdout.strip() != "1000000000"
    big = run("head -c 100000000 /dev/zero > big")
    assert big.returncode != 0


def test_other_processes_of_the_user_do_not_count(
    run: Run, place: Path, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["run"] == "root":
        pytest.skip("without a user namespace, all commands of the user count together")
    owner = UNPRIVILEGED_UID if IS_ROOT else os.getuid()
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
            assert run("echo done").stdout == "done\n"
        finally:
            busy.kill()


def test_no_process_outlives_its_command(run: Run) -> None:
    mark = f"{os.getpid()}.{secrets.randbelow(10**9):09}"  # other tests run at the same time
    done = run(f"setsid sh -c 'trap \"\" TERM; sleep {mark}' > /dev/null 2>&1 & echo started")
    assert done.stdout == "started\n"
    assert (
        mark not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )


def test_root_needs_another_user() -> None:
    assert BWRAP is not None
    for user in (None, 0):
        with pytest.raises(Unavailable, match="unprivileged user"):
            Bubblewrap(BWRAP, user=user, is_root=True)


@pytest.mark.parametrize(
    "source", ["/", "/etc/ssl", "/proc", "/dev", "/run/docker.sock", "state", "state/inside", "."]
)
def test_binds_that_lead_out_are_refused(place: Path, source: str) -> None:
    (place / "state" / "inside").mkdir()
    with pytest.raises(InvalidInput, match="may not be shown"):
        check_mounts([Mount("/data", place / source)], place / "state")


@pytest.mark.parametrize(
    "target", ["/", "/usr", "/usr/bin", "/proc/sys", "/tmp", "/workspace", "/data/../etc"]
)
def test_binds_that_hide_the_system_are_refused(place: Path, target: str) -> None:
    with pytest.raises(InvalidInput, match="not a place"):
        check_bind_targets([Mount(target, place / "other")])


def test_a_bind_is_shown_where_it_is_asked_for(run: Run, place: Path) -> None:
    bind = Mount("/data", place / "other", writable=False)
    check_mounts([bind], place / "state")
    check_bind_targets([bind])
    done = run("cat /data/file; touch /data/new || echo refused", mounts=build_mounts(place, bind))
    assert done.stdout == "of another workspacerefused\n"


def test_a_program_in_a_workspace_is_not_the_sandbox(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = place / "workspace" / "bwrap-of-an-agent"
    shutil.copy("/bin/true", fake)
    monkeypatch.setenv("PATH", str(place / "workspace"))
    assert find_program("bwrap-of-an-agent", [place / "workspace"]) is None
    assert find_program("bwrap-of-an-agent", []) == fake


def test_filters_exist_for_the_common_machines() -> None:
    for machine in ("x86_64", "aarch64"):
        program = seccomp.build_filter(machine)
        assert program is not None
        assert len(program) % 8 == 0
    assert seccomp.build_filter("unheard-of") is None


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("bwrap: setting up uid map: Permission denied", "AppArmor forbids user namespaces"),
        (
            "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
            "AppArmor forbids network namespaces",
        ),
        ("bwrap: Creating new namespace failed: Operation not permitted", "the container forbids namespaces"),
        ("bwrap: something new", "bwrap failed: bwrap: something new"),
    ],
)
def test_known_causes_of_a_failed_start_are_told_apart(output: str, reason: str) -> None:
    found = bubblewrap.explain_start_failure(output)
    assert found.reason == reason
    assert "docker" not in found.cure  # no such backend
