"""What a command cannot reach, in every kind of sandbox: bwrap of a gateway of root and of a user, Landlock, Docker.

What is not here, and why:
- what the attestation sees, and known causes of a failed start: `test_bubblewrap`, `test_landlock`, `test_sandbox`
- binds that are refused: they are, before a backend is asked (`test_bubblewrap`)
- file tools and swapped links: they run in the gateway, not in a sandbox (`test_directory`, `test_sandbox`)
- kills of gateway and keeper, and what stops, timeouts and deletions leave: `test_keeper`, `tests/chaos`, `tests/tools`
- CPU time: it has no limit of its own, and a command that computes for ever is ended by its timeout
- another boot of the machine: the keeper does not ask for it; no process has the mark of the job, so the job is lost,
  as with a killed keeper
- a backend that breaks after its examination: `test_sandbox`; Landlock is the kernel's and cannot go away
- memory and processes of all commands together, and a full disk: not limited, as `docs/sandbox.md` says
"""

from __future__ import annotations

import os
import platform
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.workspace.bubblewrap import SHARED_MEMORY_BYTES
from antiphon.workspace.locations import TEMPORARY_MOUNT, Mount
from support.disks import mount_small_disk
from support.docker_daemon import DockerDaemon
from support.isolation import CANARY, IS_ROOT, KINDS, LIMITS, Isolation, open_isolation

pytestmark = pytest.mark.requirement("B3")

PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="the system has no Python to try it with")


@pytest.fixture(params=KINDS)
def isolation(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Isolation:
    if request.param == "docker":
        daemon: DockerDaemon = request.getfixturevalue("docker_daemon")
        daemon.remove_containers()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{daemon.socket}")
    return open_isolation(request.param, tmp_path_factory.mktemp("isolation"))


def run_python(isolation: Isolation, program: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> str:
    """Run a program with the system's Python inside; return what it printed."""
    (isolation.place / "workspace" / "program.py").write_text(program)
    words = " ".join(f"'{argument}'" for argument in arguments)
    done = isolation.run(f"{PYTHON} -I program.py {words}", stdin=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- network ---

CONNECT = """
import socket, sys
tcp, udp, path, name = sys.argv[1:]
def attempt(family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(2)
            s.connect(address)
            s.send(b"x")
        print("sent", address)
    except OSError:
        print("refused")
attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(tcp)))
attempt(socket.AF_INET6, socket.SOCK_STREAM, ("::1", int(tcp)))
attempt(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))
attempt(socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 443))
attempt(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53))
attempt(socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8::1", 80))
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    attempt(socket.AF_UNIX, kind, path)
    attempt(socket.AF_UNIX, kind, "\\0" + name)
try:
    print("found", socket.getaddrinfo("example.org", 80))
except OSError:
    print("refused")
for family in (16, 17, 38, 40):  # netlink, packet, alg, vsock
    try:
        socket.socket(family, socket.SOCK_RAW if family < 38 else socket.SOCK_STREAM)
        print("opened", family)
    except OSError:
        print("refused")
"""
SEND_TO_LOOPBACK = """
import socket, sys
try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"canary", ("127.0.0.1", int(sys.argv[1])))
except OSError:
    pass
"""


@needs_python
def test_nothing_is_connected_to(isolation: Isolation) -> None:
    """Neither addresses of the world and of the host, nor names, nor sockets of programs on the host."""
    name = f"antiphon-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as at_path,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        path = isolation.place / "other" / "socket"
        at_path.bind(str(path))
        path.chmod(0o777)
        abstract.bind(f"\0{name}")
        for server in (at_path, abstract):
            server.listen()
        ports = str(tcp.getsockname()[1]), str(udp.getsockname()[1])
        output = run_python(isolation, CONNECT, *ports, str(path), name)
        assert output.splitlines()[:11] == ["refused"] * 11
        assert isolation.is_container or output.split() == ["refused"] * 15
        run_python(isolation, SEND_TO_LOOPBACK, ports[1])
        for server in (tcp, udp, at_path, abstract):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(10) if server is udp else server.accept()


# --- files ---


@pytest.mark.parametrize("name", ["state", "other", "agent"])
def test_files_outside_the_workspace_cannot_be_read_or_changed(isolation: Isolation, name: str) -> None:
    """Also not through a link, and under no further name."""
    file = isolation.place / name / "file"
    script = f"""
    cat {file}; ls {file.parent} {isolation.place} /root /home
    ln -s {file} link; cat link; echo x >> link
    ln {file} second; cat second; echo x >> second
    echo x >> {file}; echo x > {file.parent}/new; mv {file} taken; rm -f {file}; chmod 777 {file.parent}
    """
    assert isolation.run(script).stdout == ""
    assert file.read_text() == CANARY
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_a_read_only_workspace_cannot_be_changed(isolation: Isolation) -> None:
    """Also not by giving its files another name in a directory that can be written."""
    agent = isolation.get_name_inside(isolation.agent)
    script = f"""
    cat {agent}/file; echo
    ln {agent}/file second && echo x >> second; mv {agent}/file taken; rm -f {agent}/file
    echo x >> {agent}/file; touch {agent}/new; chmod 600 {agent}/file; mkdir {agent}/folder
    touch $HOME/mine || echo refused
    """
    done = isolation.run(script, mounts=isolation.build_mounts(isolation.agent, writable=False))
    assert done.stdout == f"{CANARY}\nrefused\n"
    done = isolation.run(script, mounts=isolation.build_mounts(isolation.agent))
    assert done.stdout == f"{CANARY}\n"
    file = isolation.place / "agent" / "file"
    assert file.read_text() == CANARY
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_the_system_cannot_be_changed(isolation: Isolation) -> None:
    script = """
    for directory in / /usr /usr/bin /etc /dev /proc /proc/sys /proc/self/fdinfo /sys; do
      touch $directory/antiphon-new 2> /dev/null && echo "wrote in $directory"
      ln /usr/bin/env $directory/antiphon-new 2> /dev/null && echo "linked in $directory"
    done
    ln /usr/bin/env $HOME/program 2> /dev/null && echo linked
    true
    """
    assert isolation.run(script).stdout == ""


# --- /proc ---


@pytest.mark.requirement("AT12")
def test_no_secret_of_the_gateway_is_found(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_KEY", CANARY)
    script = """
    env
    for process in /proc/[0-9]*; do
      for name in environ cmdline mountinfo status; do tr '\\0' '\\n' < $process/$name; done
      ls -l $process/cwd $process/root $process/exe $process/fd
    done
    """
    done = isolation.run(script, env={"GIVEN": "given"})
    assert "given" in done.stdout
    assert CANARY not in done.stdout + done.stderr
    if not isolation.is_landlock:
        assert str(Path(__file__).parent) not in done.stdout
        assert str(sys.executable) not in done.stdout


def test_processes_of_the_host_are_out_of_reach(isolation: Isolation) -> None:
    other = subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE, user=isolation.owner if IS_ROOT else None, env={"KEY": CANARY}
    )
    try:
        pid = other.pid
        script = f"""
        cat /proc/{pid}/environ /proc/{pid}/maps /proc/{pid}/mem /proc/1/mem; ls /proc/{pid}/cwd/ /proc/{pid}/fd/
        kill -9 {pid}; kill -9 {os.getpid()}; kill -9 -1
        """
        done = isolation.run(script)
        assert CANARY not in done.stdout
        assert done.stdout == ""
        assert other.poll() is None
    finally:
        other.kill()
        other.communicate()


def test_settings_of_the_kernel_cannot_be_changed(isolation: Isolation) -> None:
    """They are never written here: it would be the host's that change."""
    script = """
    find /proc/sys /sys -type f -writable 2> /dev/null | head -3
    for name in /proc/sysrq-trigger /proc/sys/kernel/core_pattern /proc/kcore /proc/kmsg /dev/mem /dev/kmsg; do
      test -w $name && echo "$name can be written"
    done
    cat /proc/keys /proc/kallsyms /proc/sys/kernel/random/boot_id
    """
    done = isolation.run(script)
    assert done.stdout == "" or not isolation.is_landlock
    assert "can be written" not in done.stdout
    if not isolation.is_landlock:
        mounts = isolation.run("grep ' /proc/sys ' /proc/self/mountinfo").stdout
        assert mounts.split()[5].startswith("ro,")


# --- privileges ---


@pytest.mark.parametrize(
    "script",
    [
        "unshare -U true",
        "unshare -m true",
        "unshare -n true",
        "nsenter -t 1 -m true",
        "mount -t tmpfs none .",
        "mount --bind / .",
        "mount -o remount,rw /proc/sys",
        "umount /proc",
        "mknod device c 1 1",
        "mknod disk b 8 0",
        "chroot . true",
        "ls /sys/kernel",
        "chown 0 .",
        "hostname other",
        "renice -n -5 $$",
        "su -c true",
    ],
)
def test_privileged_actions_are_refused(isolation: Isolation, script: str) -> None:
    if isolation.is_container and script == "ls /sys/kernel":
        pytest.skip("the engine shows /sys, which cannot be written")
    assert isolation.run(script).returncode != 0


def test_a_setuid_file_gives_nothing(isolation: Isolation) -> None:
    isolation.run("cp /usr/bin/id id; chmod u+s,g+s id; ./id -u > who")
    work = isolation.place / "workspace"
    assert (work / "id").stat().st_uid == isolation.owner
    assert (work / "who").read_text().strip() != "0"
    script = 'while read -r name value; do echo "$name $value"; done < /proc/$$/status'
    facts = dict(line.split(" ", 1) for line in isolation.run(script).stdout.splitlines())
    assert {facts[f"Cap{name}:"] for name in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert (facts["NoNewPrivs:"], facts["Seccomp:"]) == ("1", "2")


CALL = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for word in sys.argv[1:]:
    name, number, *arguments = word.split(":")
    given = [os.getppid() if argument == "parent" else int(argument) for argument in arguments]
    if libc.syscall(int(number), *given) >= 0:
        print("allowed", name)
    elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print("tried", name, os.strerror(ctypes.get_errno()))
"""
CALLS = {
    "x86_64": [
        *("ptrace:101:16:1", "ptrace of the parent:101:16:parent", "process_vm_readv:310:1:0:0:0:0:0"),
        *("keyctl:250:0:-3:1", "add_key:248:0:0:0:0:-3", "request_key:249:0:0:0:0"),
        *("bpf:321:0:0:0", "userfaultfd:323:0", "perf_event_open:298:0:0:-1:-1:0", "io_uring_setup:425:1:0"),
        *("open_by_handle_at:304:0:0:0", "clone3:435:0:0", "unshare:272:268435456", "setns:308:0:0"),
        *("fsopen:430:0:0", "open_tree:428:-100:0:1", "move_mount:429:0:0:0:0:0", "pivot_root:155:0:0"),
        *("x32 getpid:1073741863", "syslog:103:3:0:0"),
    ],
    "aarch64": [
        *("ptrace:117:16:1", "ptrace of the parent:117:16:parent", "process_vm_readv:270:1:0:0:0:0:0"),
        *("keyctl:219:0:-3:1", "add_key:217:0:0:0:0:-3", "request_key:218:0:0:0:0"),
        *("bpf:280:0:0:0", "userfaultfd:282:0", "perf_event_open:241:0:0:-1:-1:0", "io_uring_setup:425:1:0"),
        *("open_by_handle_at:265:0:0:0", "clone3:435:0:0", "unshare:97:268435456", "setns:268:0:0"),
        *("fsopen:430:0:0", "open_tree:428:-100:0:1", "move_mount:429:0:0:0:0:0", "pivot_root:41:0:0"),
    ],
}


@needs_python
@pytest.mark.skipif(platform.machine() not in CALLS, reason="the numbers of its system calls are not known")
def test_calls_that_have_led_out_of_sandboxes_are_refused(isolation: Isolation) -> None:
    """Refused by the filter, with `EPERM` or `ENOSYS`, before the kernel looks at the arguments."""
    if isolation.is_container:
        pytest.skip("the filter is the engine's, which allows the tracing of processes in the same container")
    assert run_python(isolation, CALL, *CALLS[platform.machine()]) == ""


TYPE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for request in (0x5412, 0x541C):  # TIOCSTI, TIOCLINUX
    for bits in (0, 1 << 32):  # the kernel looks at the lower half only
        if libc.ioctl(0, ctypes.c_ulong(request | bits), ctypes.c_char_p(b"\\3")) == 0:
            print("typed")
        elif ctypes.get_errno() != 1:
            print("tried", os.strerror(ctypes.get_errno()))
try:
    os.open("/dev/tty", os.O_RDWR)
    print("it has a controlling terminal")
except OSError:
    print("done")
"""


@needs_python
def test_nothing_can_be_typed_into_the_terminal_of_a_gateway(isolation: Isolation) -> None:
    """A sandbox started from a terminal has none that controls it, and cannot put characters into its input."""
    if isolation.is_container:
        pytest.skip("a command has a terminal of its own there, which it may type into")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    if IS_ROOT:
        os.fchown(theirs, isolation.owner, -1)
    try:
        assert run_python(isolation, TYPE, stdin=theirs) == "done\n"
        os.set_blocking(theirs, False)
        for end in (ours, theirs):
            with pytest.raises(BlockingIOError):
                os.read(end, 1)
    finally:
        os.close(theirs)
        os.close(ours)


# --- limits ---


def test_processes_memory_and_files_are_limited(isolation: Isolation) -> None:
    bomb = "n=0; while [ $n -lt 300 ]; do sleep 20 > /dev/null 2>&1 & n=$((n + 1)); done; echo survived"
    assert "survived" not in isolation.run(bomb).stdout
    hog = isolation.run("head -c 1000000000 /dev/zero | tail | wc -c")
    assert hog.stdout.strip() != "1000000000"
    big = isolation.run("head -c 100000000 /dev/zero > big")
    assert big.returncode != 0
    assert (isolation.place / "workspace" / "big").stat().st_size <= LIMITS.file_bytes


def test_a_full_temporary_directory_fills_nothing_else(isolation: Isolation) -> None:
    """It is on the disk of its session's files; a command there fails, and the next one can make room."""
    if not IS_ROOT:
        pytest.skip("only root mounts a small disk")
    temporary = isolation.place / "small"
    with mount_small_disk(temporary) as disk:
        os.chown(temporary, isolation.owner, isolation.owner)
        mounts = [isolation.build_mounts()[0], Mount(TEMPORARY_MOUNT, disk.path)]
        done = isolation.run(
            "cat /dev/zero > $TMPDIR/fill; echo > $TMPDIR/more; echo x > here", mounts=mounts
        )
        assert "No space left on device" in done.stderr
        assert (isolation.place / "workspace" / "here").read_text() == "x\n"
        done = isolation.run("rm $TMPDIR/fill && echo y > $TMPDIR/more && cat $TMPDIR/more", mounts=mounts)
        assert done.stdout == "y\n", done.stderr


def test_places_in_memory_are_bounded(isolation: Isolation) -> None:
    """What is written there takes memory of the host that no limit of a process counts."""
    script = """
    for directory in / /dev /dev/shm /run /var /var/tmp; do
      test -d $directory && df --output=target,fstype,size $directory | tail -n 1
      n=0; while [ $n -lt 8 ]; do
        n=$((n + 1)); head -c 15000000 /dev/zero > $directory/fill$n 2> /dev/null || break
      done
      cat $directory/fill* 2> /dev/null | wc -c; rm -f $directory/fill*
    done
    """
    done = isolation.run(script)
    written = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(written) == 6
    if isolation.is_container:  # it counts as memory of the container
        assert sum(written) <= LIMITS.memory_bytes
        return
    assert sum(written) <= SHARED_MEMORY_BYTES, done.stdout
    assert (written[2] > SHARED_MEMORY_BYTES // 2) != isolation.is_landlock, "programs share memory there"
