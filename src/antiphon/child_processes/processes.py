"""Starts and ends child processes, as the client of their launcher."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pwd
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from antiphon.child_processes import launcher
from antiphon.child_processes.pipes import open_memory_file
from antiphon.errors import Unavailable

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = launcher.INPUT_END_GRACE_SECONDS + launcher.TERMINATE_GRACE_SECONDS + 3.0
MAX_EVENT_BYTES = 64 * 1024
_LAUNCHER_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
INHERITED_VARIABLES = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")


class ChildCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The complete command line of a program; nothing else is inherited."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    files: Mapping[str, bytes] = {}
    """Contents that it reads from descriptors; in `argv`, a name stands for the number of its descriptor."""
    descriptors: Mapping[str, int] = {}
    """Further descriptors that it is given, named in the same way. They stay open here."""


class ChildProcess:
    """A running program: this side of its pipes, and whether it has ended."""

    def __init__(self, name: str, stdin: int, stdout: int, stderr: int) -> None:
        self.name = name
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.exited = asyncio.Event()
        self.exit_code: int | None = None


class ChildProcesses:
    """The programs of one purpose in a state directory; the first one starts their launcher.

    With `adopts`, the launcher first ends those that a killed gateway left behind.
    """

    def __init__(self, state_dir: Path, purpose: str, *, adopts: bool) -> None:
        digest = f"{hashlib.sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]}-{purpose}"
        self._owner = digest if adopts else f"{digest}-{uuid.uuid4().hex[:8]}"
        self._adopts = adopts
        self._lock = asyncio.Lock()
        self._control: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._processes: dict[str, ChildProcess] = {}
        self._answer: asyncio.Future[dict[str, Any]] | None = None

    async def start(self, command: ChildCommand) -> ChildProcess:
        """Start a program.

        Raises:
            Unavailable: the program could not be started.
        """
        async with self._lock:
            await self._require_launcher()
            starting = asyncio.ensure_future(self._start(command))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                await asyncio.wait([starting])
                if not starting.cancelled() and starting.exception() is None:
                    self._abandon(starting.result())
                raise

    async def stop(self, process: ChildProcess) -> None:
        """End a program whose input was closed, and wait until its processes are gone."""
        if not process.exited.is_set():
            self._send({"op": "stop", "name": process.name})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                    await process.exited.wait()

    async def aclose(self) -> None:
        """End the launcher, which ends every program, and wait for it."""
        popen, self._popen = self._popen, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if popen is not None:
            await asyncio.to_thread(_wait_for_end, popen)

    # --- the launcher ---

    async def _require_launcher(self) -> None:
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        try:
            self._popen = await asyncio.to_thread(self._start_launcher, theirs)
        except OSError as error:
            ours.close()
            raise Unavailable(
                f"The launcher of other programs could not be started: {error}.", "Try again."
            ) from error
        finally:
            theirs.close()
        ours.setblocking(False)
        self._control = ours
        reader, writer = await asyncio.open_connection(sock=ours.dup(), limit=MAX_EVENT_BYTES)
        ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_events(reader, writer, ready))
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                await asyncio.shield(ready)
        except TimeoutError:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            popen, self._popen = self._popen, None
            popen.kill()  # when it adopts at last, it would end what the next one has started
            await asyncio.to_thread(popen.wait)
            raise Unavailable("The launcher of other programs does not answer.", "Try again.") from None

    def _start_launcher(self, control: socket.socket) -> subprocess.Popen[bytes]:
        options = ["adopt"] if self._adopts else []
        return subprocess.Popen(
            [sys.executable, "-I", "-S", launcher.__file__, self._owner, *options],
            stdin=control.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_LAUNCHER_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    async def _read_events(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ready: asyncio.Future[None]
    ) -> None:
        try:
            while line := await reader.readline():
                self._handle_event(msgspec.json.decode(line), ready)
        except (ConnectionError, ValueError):
            pass
        finally:
            writer.close()
            self._lose_launcher()
            if not ready.done():
                ready.set_result(None)

    def _handle_event(self, event: dict[str, Any], ready: asyncio.Future[None]) -> None:
        if event.get("event") == "ready":
            ready.set_result(None)
        elif event.get("event") == "exited":
            if process := self._processes.pop(event["name"], None):
                process.exit_code = event["code"]
                process.exited.set()
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(event)

    def _lose_launcher(self) -> None:
        """Note that the launcher has ended, and with it every program."""
        if self._control is not None:
            self._control.close()
            self._control = None
        for process in self._processes.values():
            process.exited.set()
        self._processes.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result({"error": "the launcher of other programs ended"})

    # --- requests ---

    async def _start(self, command: ChildCommand) -> ChildProcess:
        name = uuid.uuid4().hex
        spec = {
            "argv": list(command.argv),
            "cwd": command.cwd,
            "env": dict(command.env),
            "files": [*command.files, *command.descriptors],
        }
        given: list[int] = []
        kept: list[int] = []
        try:
            given.append(open_memory_file(msgspec.json.encode(spec)))
            for ours in (1, 0, 0):  # stdin is written here, the others are read
                pipe = os.pipe()
                kept.append(pipe[ours])
                given.append(pipe[1 - ours])
            given += [open_memory_file(content) for content in command.files.values()]
            process = self._processes[name] = ChildProcess(name, *kept)
            self._answer = asyncio.get_running_loop().create_future()
            self._send({"op": "start", "name": name}, [*given, *command.descriptors.values()])
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                answer = await self._answer
        except BaseException:
            self._processes.pop(name, None)
            _close_all(kept)
            raise
        finally:
            _close_all(given)
            self._answer = None
        if "error" in answer:
            self._processes.pop(name, None)
            _close_all(kept)
            raise Unavailable(
                f"The program {command.argv[0]!r} could not be started: {answer['error']}.",
                "Check 'command', 'cwd' and PATH.",
            )
        return process

    def _abandon(self, process: ChildProcess) -> None:
        _close_all([process.stdin, process.stdout, process.stderr])
        self._send({"op": "stop", "name": process.name})

    def _send(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request. It is small and only one waits for its answer, so there is always room."""
        if self._control is None:
            return
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [msgspec.json.encode(request) + b"\n"], descriptors)


def _wait_for_end(popen: subprocess.Popen[bytes]) -> None:
    try:
        popen.wait(launcher.SHUTDOWN_GRACE_SECONDS + launcher.KILL_TIMEOUT_SECONDS + 2)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def build_environment(configured: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program that runs on this machine."""
    inherited = {name: value for name in INHERITED_VARIABLES if (value := os.environ.get(name))}
    if "HOME" not in inherited:
        with contextlib.suppress(KeyError):
            inherited["HOME"] = pwd.getpwuid(os.geteuid()).pw_dir
    return {**inherited, **configured}
