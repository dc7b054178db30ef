"""Serves the requests of clients, and manages the directories of jobs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from antiphon.workspace.keeper import MAX_REQUEST_BYTES, PROTOCOL_VERSION
from antiphon.workspace.keeper.job_directory import (
    Json,
    load_process_id,
    load_result,
    load_spec,
    measure_output,
    read_output,
    sync_directory,
    write_json,
)
from antiphon.workspace.keeper.output_budget import OutputBudget, remove_output
from antiphon.workspace.keeper.processes import find_job_processes, make_process_id
from antiphon.workspace.keeper.running_command import (
    TERMINATE_GRACE_SECONDS,
    RequestRefused,
    RunningCommand,
)

JOBS_NAME = "jobs"
DRAFT_SUFFIX = ".draft"  # of the directory of a job that has not been started
MAX_JOBS = 512
MAX_CONNECTIONS = 2 * MAX_JOBS  # one may wait for each job
MAX_READ_BYTES = 256 * 1024  # of output in one answer
STOP_WAIT_SECONDS = 5.0  # how long a stop waits for the end
SWEEP_SECONDS = 5.0
UNACKNOWLEDGED_KEEP_SECONDS = 30 * 86_400.0
IDLE_EXIT_SECONDS = 60.0  # without jobs and connections


class Keeper:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs_directory = directory / JOBS_NAME
        self._running: dict[str, RunningCommand] = {}
        self._by_pid: dict[int, RunningCommand] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._outputs = OutputBudget()
        self._unwritten: dict[str, Json] = {}  # results that a full disk has no room for
        self._connections = 0
        self._last_used = time.monotonic()
        self._stopping = asyncio.Event()
        self._job_ended = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until asked to stop, or until nothing has used the keeper for a while."""
        self._settle_lost_jobs()
        self._outputs.load(self._jobs_directory.iterdir())
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
        """Record jobs of an earlier keeper that have no result as lost, and end their processes.

        After a power failure, only the name of a directory is certain to be there.
        """
        for folder in self._jobs_directory.iterdir():
            if folder.suffix == DRAFT_SUFFIX:
                shutil.rmtree(folder, ignore_errors=True)
            elif load_result(folder) is None:
                for pid in find_job_processes(load_process_id(folder), None, {}):
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
                age = now - result["endedAt"]
                if age <= load_spec(folder).get("keepSeconds", 0.0):
                    continue
                self._outputs.forget(folder)
                if (folder / "acknowledged").exists() or age > UNACKNOWLEDGED_KEEP_SECONDS:
                    shutil.rmtree(folder)
                remove_output(folder)

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
        self._outputs.add_ended(job.folder, job.taken_bytes)
        job.ended.set()
        self._job_ended.set()

    def _write_result(self, folder: Path, result: Json, *, survives_power_failure: bool = True) -> None:
        """Write how a job ended. While the disk is full, the result is kept in memory."""
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
        self._outputs.limit_bytes = request.get("maxTotalOutputBytes")
        folder = self._locate(key)
        if not folder.exists():
            if self._stopping.is_set():
                raise ConnectionAbortedError  # the client asks the next keeper
            if len(self._running) >= MAX_JOBS:
                raise RequestRefused(f"{MAX_JOBS} jobs are running already")
            if not self._outputs.has_room():
                raise RequestRefused(
                    f"what the running commands have printed fills the {self._outputs.limit_bytes} bytes that"
                    " 'tools.exec.maxTotalOutputBytes' allows"
                )
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
        draft = folder.with_suffix(DRAFT_SUFFIX)
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir(mode=0o700)
            spec = {**spec, "key": key, "startedAt": time.time(), "processId": make_process_id()}
            write_json(draft / "spec.json", spec, survives_power_failure=False)
            draft.rename(folder)
            sync_directory(self._jobs_directory)  # its name must survive: by it, the key never starts again
            return RunningCommand(key, folder, spec, self._outputs)
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
        self._outputs.forget(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return {}

    async def _handle_exit(self, _: Json) -> Json:
        if self._running:
            raise RequestRefused(f"{len(self._running)} jobs are running")
        self._stopping.set()
        return {}

    def _locate(self, key: str) -> Path:
        return self._jobs_directory / hashlib.sha256(key.encode()).hexdigest()[:32]
