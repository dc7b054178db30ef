"""The launcher: starts programs for a gateway, and ends all their processes when it stops or is killed.

A program may be a tree of processes, such as `npx` and what it starts, and not all of them end when their input does.
The launcher adopts every process of these trees, so none is left when a program is stopped, when the gateway stops, or
when it is killed. Each request comes as one line on a socket together with the descriptors of the program's pipes:

    {"op": "start", "name": …}   descriptors: the specification, stdin, stdout, stderr, and files that `argv` names
    {"op": "stop", "name": …}    ends the process tree
    {"event": "exited", …}       sent when the first process of a program has ended, and the rest of its tree with it

This file is a program by itself (`python -I -S launcher.py OWNER [adopt]`) and imports nothing but the standard
library. `OWNER` marks the processes in their environment; with `adopt`, processes with the mark that another launcher
left behind are ended first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OWNER_VARIABLE = "ANTIPHON_CHILD_OWNER"
CHILD_VARIABLE = "ANTIPHON_CHILD"
MAX_REQUEST_BYTES = 4096
MAX_DESCRIPTORS = 16
INPUT_END_GRACE_SECONDS = 1.0  # from the end of a program's input to SIGTERM
TERMINATE_GRACE_SECONDS = 1.0  # from SIGTERM to SIGKILL
SHUTDOWN_GRACE_SECONDS = 0.3  # for programs to end by themselves when the gateway is gone
KILL_ROUND_SECONDS = 0.05
KILL_TIMEOUT_SECONDS = 5.0

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Json = dict[str, Any]


class Process:
    """One running program, and the signals that are still to be sent to it."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.popen = popen
        self.steps: list[tuple[float, signal.Signals]] = []
        """The signals that are still to be sent, and when."""

    def begin_stop(self, now: float) -> None:
        if not self.steps:
            self.steps = [
                (now + INPUT_END_GRACE_SECONDS, signal.SIGTERM),
                (now + INPUT_END_GRACE_SECONDS + TERMINATE_GRACE_SECONDS, signal.SIGKILL),
            ]

    def send_due_signals(self, now: float) -> None:
        while self.steps and self.steps[0][0] <= now:
            _, number = self.steps.pop(0)
            signal_tree(self.popen.pid, self.name, number)
            if number == signal.SIGKILL:
                self.steps = [(now + KILL_ROUND_SECONDS, signal.SIGKILL)]  # until it has ended


class ProgramLauncher:
    def __init__(self, control: socket.socket, owner: str) -> None:
        self._control = control
        self._owner = owner
        self._processes: dict[int, Process] = {}
        self._received = b""
        self._descriptors: list[int] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        """Serve until the gateway is gone, then end every process."""
        wake, signal_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(signal_end, False)
        signal.set_wakeup_fd(signal_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            is_served = True
            while is_served:
                ready = {key.fileobj for key, _ in selector.select(self._find_timeout())}
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
                if self._control in ready:
                    is_served = self._receive()
                self._reap()
                now = time.monotonic()
                for process in list(self._processes.values()):
                    process.send_due_signals(now)
        self._end_all()

    def _find_timeout(self) -> float | None:
        due = [process.steps[0][0] for process in self._processes.values() if process.steps]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _receive(self) -> bool:
        """Handle what the gateway sent. False if it is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        except (ConnectionError, OSError):
            return False
        self._descriptors += descriptors
        self._received += data
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            self._handle(json.loads(line))
        return bool(data)

    def _handle(self, request: Json) -> None:
        if request["op"] == "start":
            descriptors, self._descriptors = self._descriptors, []
            try:
                answer = {"pid": self._start(request["name"], descriptors)}
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                answer = {"error": getattr(error, "strerror", None) or str(error)}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._send({"op": "start", "name": request["name"], **answer})
        else:
            for process in self._processes.values():
                if process.name == request["name"]:
                    process.begin_stop(time.monotonic())

    def _start(self, name: str, descriptors: list[int]) -> int:
        spec_file, stdin, stdout, stderr, *files = descriptors
        with open(spec_file, "rb", closefd=False) as file:
            spec: Json = json.load(file)
        numbers = dict(zip(spec["files"], files, strict=True))
        popen = subprocess.Popen(
            [str(numbers.get(word, word)) for word in spec["argv"]],
            cwd=spec["cwd"],
            env={**spec["env"], OWNER_VARIABLE: self._owner, CHILD_VARIABLE: name},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=files,
            start_new_session=True,
            preexec_fn=self._die_with_launcher,  # noqa: PLW1509 - this process has a single thread
        )
        self._processes[popen.pid] = Process(name, popen)
        return popen.pid

    def _die_with_launcher(self) -> None:
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._processes.pop(pid, None)
            if process is not None:
                process.popen.returncode = os.waitstatus_to_exitcode(status)
                self._end_tree(process)
                self._send({"event": "exited", "name": process.name, "code": process.popen.returncode})

    def _end_tree(self, process: Process) -> None:
        kill_until_gone(lambda: find_processes(CHILD_VARIABLE, process.name, process.popen.pid))

    def _send(self, message: Json) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _end_all(self) -> None:
        """End every process, even one that changed its process group or cleared its environment."""
        self._control.close()
        until = time.monotonic() + SHUTDOWN_GRACE_SECONDS
        while self._processes and time.monotonic() < until:
            self._reap()
            time.sleep(0.01)
        kill_until_gone(lambda: find_processes(OWNER_VARIABLE, self._owner, os.getpid()) - {os.getpid()})


def signal_tree(root: int, name: str, number: signal.Signals) -> None:
    """Signal a program's first process, its group, and everything that belongs to it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, number)
    signal_all(find_processes(CHILD_VARIABLE, name, root), number)


def signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_until_gone(find: Callable[[], set[int]]) -> None:
    """Kill processes until none is found, since they may start others meanwhile."""
    until = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (pids := find()) and time.monotonic() < until:
        signal_all(pids, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        time.sleep(0.01)


def find_processes(variable: str, value: str, root: int) -> set[int]:
    """Return the processes with a variable, those of the session that `root` leads, and its descendants."""
    marker = f"{variable}={value}".encode()
    found: set[int] = set()
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            state, parent, _, session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            children.setdefault(int(parent), []).append(pid)
            if state == b"Z":
                continue
            if int(session) == root or marker in (folder / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    waiting = [*found, root]
    while waiting:
        for child in children.pop(waiting.pop(), ()):
            if child not in found and is_running(child):
                found.add(child)
            waiting.append(child)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return False


def main(owner: str, *, adopts: bool) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the gateway decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if adopts:
        kill_until_gone(lambda: find_processes(OWNER_VARIABLE, owner, os.getpid()) - {os.getpid()})
    with socket.socket(fileno=0) as control:
        control.sendall(b'{"event": "ready"}\n')
        ProgramLauncher(control, owner).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], adopts="adopt" in sys.argv[2:]))
