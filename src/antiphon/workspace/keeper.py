"""The keeper: a process that runs commands and outlives the gateway that asked for them.

One keeper serves a state directory. A job has a directory of its own, named after its key, which is on disk before the
command starts: asked for again with the same key, a job that ended gives its result, one that runs is joined, and one
whose keeper died is `lost`. No key ever starts twice: a directory outlives its output until the client has acknowledged
the result.

    jobs/<digest of the key>/spec.json      written before the command starts
                             output.head    the first part of what it prints
                             output.tail.N  the last parts, in files of equal size
                             result.json    written when it has ended
                             acknowledged   the client has stored the result and will not ask for this key again

This file is a program by itself (`python -I keeper.py DIRECTORY`) and imports nothing but the standard library, so
that it stays small. It knows nothing of sessions and sandboxes: the command line and the environment come from the
client in `keeper_client`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import pty
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from io import FileIO
from pathlib import Path
from typing import Any

PROTOCOL_VERSION = 1
SOCKET_NAME, LOCK_NAME, JOBS_NAME = "keeper.sock", "keeper.lock", "jobs"
JOB_VARIABLE = "ANTIPHON_JOB"  # in the environment of a command, to find processes that left its group

MAX_REQUEST_BYTES = 4 * 1024 * 1024
MAX_JOBS = 512
MAX_CONNECTIONS = 2 * MAX_JOBS  # one may wait for each job
OPEN_FILES = 8 * MAX_JOBS
MAX_READ_BYTES = 256 * 1024  # of output in one answer
MAX_INPUT_BYTES = 1024 * 1024  # waiting to be written to a command
HEAD_BYTES = 5 * 1024 * 1024  # of output kept from the beginning
TAIL_SEGMENT_BYTES = 2560 * 1024  # the end is kept in the last two files of this size
DRAIN_SECONDS = 0.2  # how long the output of an ended command is read while another process holds the pipe
TERMINATE_GRACE_SECONDS = 0.5  # between SIGTERM and SIGKILL
STOP_WAIT_SECONDS = 5.0  # how long a stop waits for the end
MAX_KILL_ROUNDS = 20  # of a tree that starts processes while it is killed
MAX_KEPT_WRITES = 1000  # ids of writes to one command, by which a repeated one is recognised
SWEEP_SECONDS = 5.0
UNACKNOWLEDGED_KEEP_SECONDS = 30 * 86_400.0
IDLE_EXIT_SECONDS = 60.0  # without jobs and connections

_PR_SET_CHILD_SUBREAPER = 36

Json = dict[str, Any]


class RequestRefused(Exception):
    """A request that cannot be served; the text goes to the client."""


class Output:
    """What a command prints, within a bounded space on disk: its beginning and its end.

    Of a part that does not fit on a full disk, the rest is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.total_bytes = 0
        self._segment = 0
        self._file: FileIO | None = (folder / "output.head").open("ab", buffering=0)

    def append(self, data: bytes) -> None:
        while data:
            if self.total_bytes < HEAD_BYTES:
                room = HEAD_BYTES - self.total_bytes
            else:
                segment, used = divmod(self.total_bytes - HEAD_BYTES, TAIL_SEGMENT_BYTES)
                if segment + 1 != self._segment:
                    self._begin_segment(segment + 1)
                room = TAIL_SEGMENT_BYTES - used
            self._write(data[:room])
            self.total_bytes += len(data[:room])
            data = data[room:]

    def _begin_segment(self, segment: int) -> None:
        self.close()
        self._segment = segment
        with contextlib.suppress(OSError):
            (self._folder / f"output.tail.{segment - 2}").unlink(missing_ok=True)
            self._file = (self._folder / f"output.tail.{segment}").open("ab", buffering=0)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            is_whole = self._file.write(data) == len(data)
        except OSError:
            is_whole = False
        if not is_whole:  # what follows would be at a wrong offset
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def list_output_parts(folder: Path) -> list[tuple[int, Path]]:
    """Return the kept parts of an output in order, each with its offset in all that was printed."""
    parts = [(0, folder / "output.head")]
    for path in folder.glob("output.tail.*"):
        parts.append((HEAD_BYTES + (int(path.suffix[1:]) - 1) * TAIL_SEGMENT_BYTES, path))
    return sorted(part for part in parts if part[1].exists())


def measure_output(folder: Path) -> int:
    """Return how many bytes were printed, kept or not."""
    return max((offset + path.stat().st_size for offset, path in list_output_parts(folder)), default=0)


def read_output(folder: Path, offset: int, limit: int) -> tuple[int, bytes]:
    """Return kept output from `offset` on, and its true offset: what is not kept any more is skipped.

    It ends where the next missing part begins.
    """
    start, data = offset, b""
    for at, path in list_output_parts(folder):
        end = at + path.stat().st_size
        position = start + len(data)
        if end <= position or len(data) >= limit:
            continue
        if at > position:
            if data:
                break
            start = position = at
        with path.open("rb") as file:
            file.seek(position - at)
            data += file.read(limit - len(data))
    return start, data


class RunningCommand:
    """A command that runs."""

    def __init__(self, key: str, folder: Path, spec: Json) -> None:
        self.key = key
        self.folder = folder
        self.id = folder.name
        self.started_at = time.time()
        self.ended = asyncio.Event()
        self.stop_reason: str | None = None
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Output(folder)
        self._output_fd: int | None = None
        self._input_fd: int | None = None
        self._input = bytearray()
        self._input_closed = False
        self._write_ids: list[str] = []
        self._output_closed = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._processes: dict[int, bytes] = {}  # last seen, with their start times

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def output_bytes(self) -> int:
        return self._output.total_bytes

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
        try:  # from the main thread: a sandbox dies with the thread that started it
            set_mark(compute_mark(self.id))
            self._process = subprocess.Popen(
                [str(files.get(word, word)) for word in spec["argv"]],
                cwd=spec["cwd"],
                env={**spec["env"], JOB_VARIABLE: self.id},
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                pass_fds=list(files.values()),
                start_new_session=True,
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
        except OSError:  # a terminal whose last user has gone
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
        self._timers.append(loop.call_later(TERMINATE_GRACE_SECONDS, self._kill))

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
        self._processes = find_job_processes(self.id, root, self._processes)
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
        """Note how the command ended, and return its result."""
        assert self._process is not None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(TimeoutError):  # a process in the background may hold the pipe for ever
            await asyncio.wait_for(self._output_closed.wait(), DRAIN_SECONDS)
        if self._output_fd is not None:
            self._read_output()
        self._close_output()
        self._close_input()
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
            "startedAt": self.started_at,
            "endedAt": time.time(),
        }


def open_memory_file(data: bytes) -> int:
    """Return a descriptor from which a command reads `data`."""
    fd = os.memfd_create("job")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def compute_mark(job_id: str) -> int:
    """Return a number by which the processes of a job are found that have cleared their environment."""
    return 1 << 60 | int(job_id[:15], 16)


def set_mark(mark: int) -> None:
    """Mark the processes that are started from now on, by a limit that they inherit and that limits nothing.

    It is the microseconds that a real-time process may compute without a pause.
    """
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_RTTIME)[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, resource.RLIM_INFINITY))


def read_mark(process: Path) -> bytes:
    """Return the mark of a process, from its directory in `/proc`."""
    return (process / "limits").read_bytes().partition(b"Max realtime timeout ")[2].split(None, 1)[0]


def has_children() -> bool:
    """Whether this process has any child. What an ended command left behind has become one, where that is possible."""
    if sys.platform != "linux":
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def find_job_processes(job_id: str, root: int | None, known: dict[int, bytes]) -> dict[int, bytes]:
    """Return the processes of a job with their start times, in any process group.

    These are those that have its mark or whose environment names it, the descendants of `root`, and what is left of
    `known`.
    """
    marker = f"{JOB_VARIABLE}={job_id}".encode()
    mark = str(compute_mark(job_id)).encode()
    started: dict[int, bytes] = {}
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] == b"Z":
                continue
            started[pid] = fields[19]
            children.setdefault(int(fields[1]), []).append(pid)
            if (
                known.get(pid) == fields[19]
                or read_mark(folder) == mark
                or marker in (folder / "environ").read_bytes().split(b"\0")
            ):
                found.add(pid)
    waiting = [*found, *([root] if root else [])]
    while waiting:
        below = set(children.get(waiting.pop(), [])) - found
        found |= below
        waiting += below
    return {pid: started[pid] for pid in found - {os.getpid()}}


class Keeper:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs_directory = directory / JOBS_NAME
        self._running: dict[str, RunningCommand] = {}
        self._by_pid: dict[int, RunningCommand] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._unwritten: dict[str, Json] = {}  # results that a full disk has no room for
        self._connections = 0
        self._last_used = time.monotonic()
        self._stopping = asyncio.Event()
        self._job_ended = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until asked to stop, or until nothing has used the keeper for a while."""
        self._settle_lost_jobs()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_REQUEST_BYTES)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), SWEEP_SECONDS)
            self._remove_expired_jobs()
            for job_id in list(self._unwritten):
                self._write_result(self._jobs_directory / job_id, self._unwritten.pop(job_id))
            if self._running or self._connections or self._unwritten:
                self._last_used = time.monotonic()
            elif time.monotonic() - self._last_used > IDLE_EXIT_SECONDS:
                break
        self._stopping.set()
        server.close()  # without waiting for connections, which may stay
        for job in list(self._running.values()):
            job.stop("keeper")
        if self._running:
            await asyncio.wait(
                [asyncio.ensure_future(job.ended.wait()) for job in self._running.values()],
                timeout=3 * TERMINATE_GRACE_SECONDS,
            )

    def _settle_lost_jobs(self) -> None:
        """Note jobs of an earlier keeper that have no result as lost, and end what is left of them."""
        for folder in self._jobs_directory.iterdir():
            if (folder / "spec.json").exists() and load_result(folder) is None:
                for pid in find_job_processes(folder.name, None, {}):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                result = {"state": "lost", "outputBytes": measure_output(folder), "endedAt": time.time()}
                self._write_result(folder, result)

    def _remove_expired_jobs(self) -> None:
        """Remove the output of old jobs, and their directories once the client knows the results."""
        now = time.time()
        for folder in self._jobs_directory.iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError):
                result = json.loads((folder / "result.json").read_bytes())
                spec = json.loads((folder / "spec.json").read_bytes())
                age = now - result["endedAt"]
                if age <= spec["keepSeconds"]:
                    continue
                if (folder / "acknowledged").exists() or age > UNACKNOWLEDGED_KEEP_SECONDS:
                    shutil.rmtree(folder)
                for part in folder.glob("output.*"):
                    part.unlink()

    def _reap(self) -> None:
        """Take the status of every child that has ended, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if job := self._by_pid.pop(pid, None):
                task = asyncio.ensure_future(self._finish(job, status))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)

    async def _finish(self, job: RunningCommand, status: int) -> None:
        result = await job.finish(status)
        self._write_result(job.folder, result, survives_power_failure=False)  # without it, it is lost
        self._running.pop(job.id, None)
        job.ended.set()
        self._job_ended.set()

    def _write_result(self, folder: Path, result: Json, *, survives_power_failure: bool = True) -> None:
        """Write how a job ended. Where the disk is full, it is kept in memory until it can be written."""
        try:
            write_json(folder / "result.json", result, survives_power_failure=survives_power_failure)
        except OSError:
            self._unwritten[folder.name] = result

    # --- requests ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            while self._connections <= MAX_CONNECTIONS and (line := await reader.readline()):
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # the client has gone, or sent more than a request may hold
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, line: bytes) -> Json:
        try:
            request = json.loads(line)
            handler: Callable[[Json], Awaitable[Json]] = getattr(self, f"_handle_{request['op']}")
            return await handler(request)
        except RequestRefused as error:
            return {"refused": str(error)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {"refused": f"the request is not valid: {error}"}

    async def _handle_hello(self, _: Json) -> Json:
        return {"version": PROTOCOL_VERSION, "pid": os.getpid(), "running": len(self._running)}

    async def _handle_start(self, request: Json) -> Json:
        """Start a job, or join the one that has this key already."""
        key, spec = str(request["key"]), request["spec"]
        folder = self._locate(key)
        if not folder.exists():
            if self._stopping.is_set():
                raise ConnectionAbortedError  # the client asks the next keeper
            if len(self._running) >= MAX_JOBS:
                raise RequestRefused(f"{MAX_JOBS} jobs are running already")
            job = self._prepare(key, folder, spec)
            try:
                job.start()
            except OSError as error:
                job.ended.set()
                text = f"{error.strerror}: {error.filename}"
                self._write_result(folder, {"state": "failed", "error": text, "endedAt": time.time()})
            else:
                self._running[job.id] = self._by_pid[job.pid or 0] = job
        return await self._handle_wait(request)

    def _prepare(self, key: str, folder: Path, spec: Json) -> RunningCommand:
        draft = folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir(mode=0o700)
            write_json(draft / "spec.json", {"key": key, "startedAt": time.time(), **spec})
            draft.rename(folder)
            sync_directory(self._jobs_directory)
            return RunningCommand(key, folder, spec)
        except OSError as error:
            for path in (draft, folder):
                shutil.rmtree(path, ignore_errors=True)
            raise RequestRefused(f"its directory could not be written: {error.strerror}") from None

    async def _handle_wait(self, request: Json) -> Json:
        """Wait until a job has ended, at most for `seconds`."""
        folder = self._locate(str(request["key"]))
        if job := self._running.get(folder.name):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.ended.wait(), float(request.get("seconds", 0)))
        return self._describe(folder)

    async def _handle_wait_any(self, request: Json) -> Json:
        """Wait until one of the jobs does not run, at most for `seconds`. Returns the keys of those that do not."""
        folders = {str(key): self._locate(str(key)).name for key in request["keys"]}
        until = time.monotonic() + float(request.get("seconds", 0))
        while True:
            ended = [key for key, name in folders.items() if name not in self._running]
            left = until - time.monotonic()
            if ended or left <= 0:
                return {"ended": ended}
            if self._job_ended.is_set():
                self._job_ended = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._job_ended.wait(), left)

    def _describe(self, folder: Path) -> Json:
        if job := self._running.get(folder.name):
            return {"state": "running", "startedAt": job.started_at, "outputBytes": job.output_bytes}
        return self._unwritten.get(folder.name) or load_result(folder) or {"state": "unknown"}

    async def _handle_read(self, request: Json) -> Json:
        folder = self._locate(str(request["key"]))
        limit = min(int(request["limit"]), MAX_READ_BYTES)
        offset, data = read_output(folder, int(request["offset"]), limit)
        return {"data": base64.b64encode(data).decode(), "offset": offset}

    async def _handle_write(self, request: Json) -> Json:
        job = self._running.get(self._locate(str(request["key"])).name)
        if job is None:
            raise RequestRefused("this job does not run")
        data = base64.b64decode(request.get("data", ""))
        job.write_input(str(request["id"]), data, eof=bool(request.get("eof")))
        return {}

    async def _handle_stop(self, request: Json) -> Json:
        """Stop a job, and wait until it has ended. It is still `running` if the kernel does not end it in time.

        A job that has not been started never will be.
        """
        key = str(request["key"])
        folder = self._locate(key)
        if not folder.exists():
            self._prepare(key, folder, {"keepSeconds": 0.0})
            result = {"state": "failed", "error": "It was stopped before it started.", "endedAt": time.time()}
            self._write_result(folder, result)
        if job := self._running.get(folder.name):
            job.stop(str(request["reason"]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.ended.wait(), STOP_WAIT_SECONDS)
        return self._describe(folder)

    async def _handle_acknowledge(self, request: Json) -> Json:
        """Note that the client has the result of a job. Its output is kept for a while."""
        folder = self._locate(str(request["key"]))
        if (folder / "result.json").exists():
            (folder / "acknowledged").touch()
        return {}

    async def _handle_remove(self, request: Json) -> Json:
        """Forget a job that has ended. Its key must never be used again."""
        folder = self._locate(str(request["key"]))
        if folder.name in self._running:
            raise RequestRefused("this job is running")
        shutil.rmtree(folder, ignore_errors=True)
        return {}

    async def _handle_exit(self, _: Json) -> Json:
        if self._running:
            raise RequestRefused(f"{len(self._running)} jobs are running")
        self._stopping.set()
        return {}

    def _locate(self, key: str) -> Path:
        return self._jobs_directory / hashlib.sha256(key.encode()).hexdigest()[:32]


def load_result(folder: Path) -> Json | None:
    """Return how a job ended, or None if that is not known. After a power failure, the file may be there but empty."""
    try:
        return json.loads((folder / "result.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_json(path: Path, value: Json, *, survives_power_failure: bool = True) -> None:
    """Write a file so that it is there completely or not at all."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        if survives_power_failure:
            os.fsync(file.fileno())
    draft.rename(path)
    if survives_power_failure:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main(directory: Path) -> int:
    """Start a keeper for the directory, unless it has one. Returns when it can be connected to."""
    os.umask(0o077)
    os.chdir(directory)  # the address of a socket may have 108 bytes, and a path more
    (directory / JOBS_NAME).mkdir(mode=0o700, exist_ok=True)
    lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another keeper serves this directory
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    with contextlib.suppress(FileNotFoundError):
        Path(SOCKET_NAME).unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET_NAME)
    Path(SOCKET_NAME).chmod(0o600)
    listener.listen(64)
    if os.fork() == 0:  # the first process returns when connections are accepted
        os.setsid()
        with contextlib.suppress(AttributeError, OSError):  # processes whose parent ends become ours
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.run(Keeper(Path.cwd()).run(listener))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
