"""A command that runs: its process tree, its input and its output."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pty
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from antiphon.child_processes.pipes import open_memory_file
from antiphon.host_rules import HostRules
from antiphon.workspace.keeper.host_proxy import HostProxy
from antiphon.workspace.keeper.job_directory import Json, Output
from antiphon.workspace.keeper.output_budget import OutputBudget
from antiphon.workspace.keeper.processes import (
    JOB_VARIABLE,
    compute_mark,
    find_job_processes,
    has_children,
    set_mark,
)

MAX_INPUT_BYTES = 1024 * 1024  # waiting to be written to a command
MAX_KEPT_WRITES = 1000  # ids of writes to one command, by which a repeated one is recognized
DRAIN_SECONDS = 0.2  # how long the output of an ended command is read while another process holds the pipe
TERMINATE_GRACE_SECONDS = 0.5  # between SIGTERM and SIGKILL
COMMAND_UMASK = 0o022  # as of a login; the keeper's own files are private
MAX_KILL_ROUNDS = 20  # of a tree that starts processes while it is killed


class RequestRefused(Exception):
    """A request that cannot be served; the text goes to the client."""


class RunningCommand:
    """A command that runs."""

    def __init__(self, key: str, folder: Path, spec: Json, outputs: OutputBudget) -> None:
        self.key = key
        self.folder = folder
        self.id = folder.name
        self.started_at = time.time()
        self.ended = asyncio.Event()
        self.stop_reason: str | None = None
        self._spec = spec
        self._process_id: str = spec["processId"]
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Output(folder, outputs)
        self._output_fd: int | None = None
        self._input_fd: int | None = None
        self._input = bytearray()
        self._input_closed = False
        self._write_ids: list[str] = []
        self._output_closed = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._proxy: CommandProxy | None = None
        self._processes: dict[int, bytes] = {}  # last seen, with their start times

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def output_bytes(self) -> int:
        return self._output.total_bytes

    @property
    def taken_bytes(self) -> int:
        """The space that its output takes."""
        return self._output.taken_bytes

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        spec = self._spec
        if spec.get("pty"):
            self._output_fd, terminal = pty.openpty()
            self._input_fd = os.dup(self._output_fd)
            given = [terminal]
        else:
            self._output_fd, writer = os.pipe()
            given = [writer]
            if spec.get("stdin"):
                reader, self._input_fd = os.pipe()
                given.insert(0, reader)
        has_input = self._input_fd is not None
        try:
            self._spawn(spec, stdin=given[0] if has_input else subprocess.DEVNULL, stdout=given[-1])
        except BaseException:
            if self._proxy is not None:
                self._proxy.close()
            given += [self._output_fd, *([] if self._input_fd is None else [self._input_fd])]
            raise
        finally:
            for fd in given:
                os.close(fd)
        os.set_blocking(self._output_fd, False)
        if self._input_fd is not None:
            os.set_blocking(self._input_fd, False)
        loop.add_reader(self._output_fd, self._read_output)
        if seconds := spec.get("timeout"):
            self._timers.append(loop.call_later(seconds, self.stop, "timeout"))

    def _spawn(self, spec: Json, *, stdin: int, stdout: int) -> None:
        files = {
            name: open_memory_file(base64.b64decode(text)) for name, text in spec.get("files", {}).items()
        }
        if (proxy := spec.get("proxy")) is not None:
            self._proxy = CommandProxy(HostRules(proxy["allowedHosts"]))
            files[proxy["argument"]] = self._proxy.open_channel()
        try:  # from the main thread: a sandbox dies with the thread that started it
            set_mark(compute_mark(self._process_id))
            self._process = subprocess.Popen(
                [str(files.get(word, word)) for word in spec["argv"]],
                cwd=spec["cwd"],
                env={**spec["env"], JOB_VARIABLE: self._process_id},
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                pass_fds=list(files.values()),
                start_new_session=True,
                umask=COMMAND_UMASK,
            )
        finally:
            set_mark(resource.RLIM_INFINITY)
            for fd in files.values():
                os.close(fd)

    def _read_output(self) -> None:
        assert self._output_fd is not None
        try:
            data = os.read(self._output_fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # a terminal that no process has open any more
            data = b""
        if data:
            self._output.append(data)
        else:
            self._close_output()

    def _close_output(self) -> None:
        if self._output_fd is not None:
            asyncio.get_running_loop().remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = None
            self._output_closed.set()

    def write_input(self, write_id: str, data: bytes, *, eof: bool) -> None:
        """Write to the command once per id."""
        if write_id in self._write_ids:
            return
        if self._input_fd is None or self._input_closed:
            raise RequestRefused("the input of this job is closed")
        if len(self._input) + len(data) > MAX_INPUT_BYTES:
            raise RequestRefused("the command does not read its input; wait until it does")
        self._write_ids = [*self._write_ids[-MAX_KEPT_WRITES:], write_id]
        self._input += data
        self._input_closed = eof
        self._flush_input()

    def _flush_input(self) -> None:
        if self._input_fd is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._input:
                written = os.write(self._input_fd, self._input[:65536])
                del self._input[:written]
        except BlockingIOError:
            loop.add_writer(self._input_fd, self._flush_input)
            return
        except OSError:  # the command closed it
            self._input.clear()
            self._input_closed = True
        loop.remove_writer(self._input_fd)
        if self._input_closed:
            self._close_input()

    def _close_input(self) -> None:
        if self._input_fd is not None:
            asyncio.get_running_loop().remove_writer(self._input_fd)
            if self._spec.get("pty"):
                with contextlib.suppress(OSError):
                    os.write(self._input_fd, b"\x04")
            os.close(self._input_fd)
            self._input_fd = None

    def stop(self, reason: str) -> None:
        """Ask the whole process tree to end, and kill it after a moment."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self._signal_tree(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        seconds = self._spec.get("killAfterSeconds") or TERMINATE_GRACE_SECONDS
        self._timers.append(loop.call_later(seconds, self._kill))

    def _kill(self) -> None:
        self._signal_tree(
            signal.SIGKILL
        )  # repeated until it has ended: a process may have been started meanwhile
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(TERMINATE_GRACE_SECONDS, self._kill))

    def _signal_tree(self, number: signal.Signals) -> bool:
        """Signal every process of the command. False if none is left."""
        is_running = self._process is not None and self._process.returncode is None
        root = self._process.pid if self._process and is_running else None
        self._processes = find_job_processes(self._process_id, root, self._processes)
        if self._process is not None and is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        for pid in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        return bool(self._processes)

    async def _end_remaining_processes(self) -> None:
        """End what the command leaves behind. Servers are to be started as commands of their own."""
        for _ in range(MAX_KILL_ROUNDS):
            if not has_children() or not self._signal_tree(signal.SIGKILL):
                return
            await asyncio.sleep(0.01)

    async def finish(self, status: int) -> Json:
        """Record how the command ended, and return its result."""
        assert self._process is not None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(TimeoutError):  # a background process may hold the pipe open
            await asyncio.wait_for(self._output_closed.wait(), DRAIN_SECONDS)
        if self._output_fd is not None:
            self._read_output()
        self._close_output()
        self._close_input()
        if self._proxy is not None:
            self._proxy.close()
        for timer in self._timers:
            timer.cancel()
        await self._end_remaining_processes()
        self._output.close()
        code = self._process.returncode
        return {
            "state": "ended",
            "exitCode": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "stopReason": self.stop_reason,
            "outputBytes": self._output.total_bytes,
            "refusedHosts": [] if self._proxy is None else list(self._proxy.refused),
            "startedAt": self.started_at,
            "endedAt": time.time(),
        }


class CommandProxy:
    """The proxy of a command. The command opens the listening socket, since it belongs to the network inside."""

    def __init__(self, rules: HostRules) -> None:
        self._proxy = HostProxy(rules)
        self._channel = ListenerChannel(self._serve)
        self._starting: asyncio.Task[None] | None = None

    @property
    def refused(self) -> Iterable[str]:
        return self._proxy.refused

    def open_channel(self) -> int:
        """Return the descriptor over which the command hands out its socket. The caller closes it."""
        return self._channel.open()

    def _serve(self, listener: socket.socket) -> None:
        self._starting = asyncio.ensure_future(self._proxy.start(listener))

    def close(self) -> None:
        self._channel.close()
        self._proxy.close()


class ListenerChannel:
    """Takes the listening socket that a command hands out of its sandbox, once."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take
        self._channel: socket.socket | None = None

    def open(self) -> int:
        """Return the descriptor that the command is given. The caller closes it."""
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._receive_listener)
        return theirs.detach()

    def _receive_listener(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._channel, 16, 1)
            if descriptors:
                listener = socket.socket(fileno=descriptors[0])
                listener.setblocking(False)
                self._take(listener)
        self.close()

    def close(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
