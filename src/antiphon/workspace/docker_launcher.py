"""Runs a command in a container, and ends it when this process ends for any reason.

This file is a program by itself (`python -I -S docker_launcher.py DESCRIPTOR`) and imports nothing but the standard
library. The descriptor holds what to run, as JSON. Its input, output and exit status are those of the command.

An engine does not end what it has started when its client goes. So the processes of a command are marked, by a limit
that limits nothing and by a variable, and a shell inside waits at the other end of a connection: for a signal to pass
on to all of them, or for the end of the connection, upon which it kills them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys
import termios
import time
import tty
from typing import Any

REFUSED_STATUS = 125
KILL_AFTER_SECONDS = 0.3  # from SIGTERM on
KILL_CONTAINER_AFTER_SECONDS = 0.9  # from the kill of the command on
GIVE_UP_SECONDS = 1.5  # from the kill of the container on, or from the end of the output on
PARENT_POLL_SECONDS = 0.5
STOP_SECONDS = 3.0  # within which it ends after SIGTERM
ABSENT_POLL_SECONDS = 0.5
REQUEST_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 65536
MAX_PENDING_INPUT_BYTES = 1024 * 1024

SUPERVISOR_SCRIPT = """
mode=$1 kilobytes=$2 mark=$3 job=$4
shift 4
case $mode in *-merged) exec 2>&1 ;; esac

is_marked() {
  while read -r line; do
    case $line in
      "Max resident set "*" $mark "*) return 0 ;;
      "Max resident set "*) break ;;
    esac
  done < "$1/limits"
  while IFS= read -r line || [ "$line" ]; do
    case $line in *"ANTIPHON_JOB=$job"*) return 0 ;; esac
  done < "$1/environ"
  return 1
}

is_alive() {
  read -r line < "$1/stat" || return 1
  case ${line##*) } in [ZX]*) return 1 ;; esac
}

signal_all() {
  none=1
  for folder in /proc/[0-9]*; do
    if is_marked "$folder" && is_alive "$folder" && kill -s "$1" "${folder#/proc/}"; then none=0; fi
  done
  return $none
}

# What starts processes faster than they are found is frozen first, with all else that runs here.
end_all() {
  rounds=0
  while [ $rounds -lt 1000 ] && signal_all STOP; do
    rounds=$((rounds + 1))
    [ $rounds -lt "$1" ] || kill -s STOP -- -1
    signal_all KILL
    [ $rounds -lt "$1" ] || kill -s CONT -- -1
  done
}

watch() {
  while read -r order; do
    case $order in
      TERM) signal_all TERM ;;
      KILL) end_all 3 ;;
    esac
  done
  end_all 3
}

run() {
  (
    ulimit -m "$kilobytes" || exit 126
    export ANTIPHON_JOB="$job"
    exec "$@"
  )
  status=$?
  end_all 20 2> /dev/null
  exit $status
}

case $mode in
  watch)
    exec 2> /dev/null
    watch
    ;;
  run | run-merged) run "$@" ;;
  watch-run | watch-run-merged)
    exec 4<&0 < /dev/null
    (
      exec <&4 4<&- > /dev/null 2>&1
      watch
    ) &
    exec 4<&-
    run "$@"
    ;;
esac
"""
"""Run inside by `/bin/sh`, with built-in commands only: there may be no room for another process."""

_UNLIMITED_KILOBYTES = 1 << 40


class EngineFailed(Exception):
    """The engine failed to perform a request; the text says why."""


class CommandInterrupted(Exception):
    """It is unknown how a command ended; the text tells the session."""


class EngineAbsent(EngineFailed):
    """No engine answers."""


class EngineSocket:
    """The requests of a launcher to an engine, each with a connection of its own."""

    def __init__(self, path: str) -> None:
        self._path = path

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer to a request.

        Raises:
            EngineAbsent: no engine answers.
            EngineFailed: it refuses the request.
        """
        answer = b""
        try:
            with self._connect() as connection:
                connection.sendall(_build_request(method, path, body, "HTTP/1.0"))
                while data := connection.recv(CHUNK_BYTES):
                    answer += data
        except OSError as error:
            raise EngineAbsent(f"the engine does not answer: {error.strerror or error}") from None
        head, _, content = answer.partition(b"\r\n\r\n")
        _check_status(head, content)
        return json.loads(content) if content.strip() else None

    def open_stream(self, exec_id: str, *, has_terminal: bool) -> tuple[socket.socket, bytes]:
        """Start what was created, and return the connection to its input and output, with what was read of it."""
        connection = self._connect()
        try:
            body = {"Detach": False, "Tty": has_terminal}
            upgrade = "Connection: Upgrade\r\nUpgrade: tcp\r\n"
            connection.sendall(_build_request("POST", f"/exec/{exec_id}/start", body, "HTTP/1.1", upgrade))
            answer = b""
            while b"\r\n\r\n" not in answer:
                data = connection.recv(CHUNK_BYTES)
                if not data:
                    raise EngineAbsent("the engine does not answer")
                answer += data
            head, _, rest = answer.partition(b"\r\n\r\n")
            if b" 101 " not in head.split(b"\r\n")[0] + b" ":
                _check_status(head, rest)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection, rest

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(REQUEST_TIMEOUT_SECONDS)
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise EngineAbsent(f"no engine answers at {self._path!r}: {error.strerror or error}") from None
        return connection


def _build_request(method: str, path: str, body: Any, version: str, headers: str = "") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} {version}\r\nHost: docker\r\n{headers}Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _check_status(head: bytes, content: bytes) -> None:
    try:
        status = int(head.split(None, 2)[1])
    except (IndexError, ValueError):
        raise EngineAbsent("the engine does not answer") from None
    if status >= 400:
        try:
            text = str(json.loads(content)["message"])
        except (ValueError, KeyError, TypeError):
            text = f"the engine answered with status {status}"
        raise EngineFailed(text.strip()[:500])


class Launcher:
    """One command in a container, from its start to its end."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._engine = EngineSocket(spec["socket"])
        self._number = _UNLIMITED_KILOBYTES | int.from_bytes(os.urandom(5), "big") >> 1
        self._control: socket.socket | None = None
        self._orders: list[bytes] = []

    def run(self, parent: int) -> int:
        """Run the command until it has ended, or `parent` has. Returns its exit status."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        signal.signal(signal.SIGHUP, self._terminate)
        signal.signal(signal.SIGALRM, self._kill)
        has_terminal = os.isatty(0)
        has_input = has_terminal or not _is_null_device(0)
        if has_input:  # orders need a connection of their own
            self._use_control(self._start("watch", has_terminal=False)[1])
        mode = "run" if has_input else "watch-run"
        if os.path.sameopenfile(1, 2):  # as two streams, they would lose their order
            mode += "-merged"
        exec_id, connection, first = self._start(mode, has_terminal=has_terminal)
        if not has_input:
            self._use_control(connection)
        relay = Relay(connection, first, has_terminal=has_terminal, reads_input=has_input)
        while not relay.step(PARENT_POLL_SECONDS):
            if os.getppid() != parent:
                return REFUSED_STATUS  # its processes are killed as the connection ends
        return self._find_status(exec_id, parent)

    def _start(self, mode: str, *, has_terminal: bool) -> tuple[str, socket.socket, bytes]:
        spec = self._spec
        mark = [str(self._number), str(self._number * 1024), f"{self._number:x}"]
        command: list[str] = [] if mode == "watch" else spec["argv"]
        created = self._engine.request(
            "POST",
            f"/containers/{spec['container']}/exec",
            {
                "AttachStdin": True,
                "AttachStdout": True,
                "AttachStderr": True,
                "Tty": has_terminal,
                "User": spec["user"],
                "WorkingDir": spec["cwd"],
                "Env": [f"{name}={value}" for name, value in spec["env"].items()],
                "Cmd": ["/bin/sh", "-c", SUPERVISOR_SCRIPT, "sh", mode, *mark, *command],
            },
        )
        connection, first = self._engine.open_stream(created["Id"], has_terminal=has_terminal)
        return created["Id"], connection, first

    def _find_status(self, exec_id: str, parent: int) -> int:
        """Return the status of a command whose output has ended.

        While no engine answers, the command may go on. An engine that comes back does not know it any more.
        """
        until = time.monotonic() + GIVE_UP_SECONDS
        try:
            while time.monotonic() < until and os.getppid() == parent:
                try:
                    found = self._engine.request("GET", f"/exec/{exec_id}/json")
                except EngineAbsent:
                    if self._orders:
                        raise
                    until = time.monotonic() + GIVE_UP_SECONDS
                    time.sleep(ABSENT_POLL_SECONDS)
                    continue
                if not found["Running"] and found["ExitCode"] is not None:
                    return found["ExitCode"]
                time.sleep(0.005)
            reason = "the engine does not say how it ended"
        except EngineFailed as error:
            reason = str(error)
            with contextlib.suppress(OSError, EngineFailed):  # else nothing runs there any more
                self._start("watch", has_terminal=False)[1].close()
        raise CommandInterrupted(
            f"The command was interrupted: {reason}. It may have had effects, so check before repeating it."
        )

    # --- signals ---

    def _terminate(self, *_: object) -> None:
        if not self._orders:
            signal.setitimer(signal.ITIMER_REAL, KILL_AFTER_SECONDS)
            self._order(b"TERM\n")

    def _kill(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, self._kill_container)
        signal.setitimer(signal.ITIMER_REAL, KILL_CONTAINER_AFTER_SECONDS)
        self._order(b"KILL\n")

    def _kill_container(self, *_: object) -> None:
        """End everything in the container, as the last resort. It is started again when it is needed."""
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, GIVE_UP_SECONDS)
        with contextlib.suppress(OSError, EngineFailed):  # it has been stopped or removed
            self._engine.request("POST", f"/containers/{self._spec['container']}/kill")

    def _order(self, order: bytes) -> None:
        self._orders.append(order)
        if self._control is not None:
            _send_order(self._control, order)

    def _use_control(self, connection: socket.socket) -> None:
        self._control = connection
        for order in list(self._orders):
            _send_order(connection, order)


def _give_up(*_: object) -> None:
    os._exit(REFUSED_STATUS)  # a write may wait for a reader


def _send_order(connection: socket.socket, order: bytes) -> None:
    with contextlib.suppress(OSError):  # the shell at its other end has gone, and so has what it waited for
        connection.send(order)


class Relay:
    """Copies between a connection to a process in a container and the input and output of this one."""

    def __init__(
        self, connection: socket.socket, first: bytes, *, has_terminal: bool, reads_input: bool
    ) -> None:
        self._connection = connection
        self._has_terminal = has_terminal
        self._frames: bytes = b""
        self._pending: bytes = b""
        self._reads_input = reads_input
        self._input_ended = False
        if has_terminal:
            tty.setraw(0, termios.TCSANOW)
        if reads_input:
            connection.setblocking(False)
        self._take_output(first)

    def step(self, seconds: float) -> bool:
        """Copy what is there, or wait for it this long. Returns whether the output has ended."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if self._reads_input and len(self._pending) < MAX_PENDING_INPUT_BYTES:
            poll.register(0, select.POLLIN)
        for fd, events in poll.poll(seconds * 1000):
            if fd == 0:
                self._read_input()
            else:
                if events & select.POLLOUT:
                    self._write_input()
                if events & ~select.POLLOUT and not self._read_output():
                    return True
        return False

    def _read_input(self) -> None:
        try:
            data = os.read(0, CHUNK_BYTES)
        except OSError:  # a terminal whose other side has gone
            data = b""
        self._pending += data
        if not data:
            self._reads_input, self._input_ended = False, True
        self._write_input()

    def _write_input(self) -> None:
        try:
            if self._pending:
                self._pending = self._pending[self._connection.send(self._pending) :]
            if self._input_ended and not self._pending:
                self._input_ended = False
                self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # the process does not read any more
            self._pending = b""

    def _read_output(self) -> bool:
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._take_output(data)
        return bool(data)

    def _take_output(self, data: bytes) -> None:
        """Write output. Without a terminal, it comes in frames: the number of a stream, a length, the data."""
        if self._has_terminal:
            _write_all(1, data)
            return
        self._frames += data
        while len(self._frames) >= 8:
            end = 8 + int.from_bytes(self._frames[4:8], "big")
            if len(self._frames) < end:
                return
            _write_all(2 if self._frames[0] == 2 else 1, self._frames[8:end])
            self._frames = self._frames[end:]


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(
        OSError
    ):  # the reader has gone; the command goes on, as long as it is not stopped
        while data:
            data = data[os.write(fd, data) :]


def _is_null_device(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116


def main() -> int:
    parent = os.getppid()
    with open(int(sys.argv[1]), "rb") as file:  # noqa: PTH123 - a descriptor
        spec = json.load(file)
    try:
        return Launcher(spec).run(parent)
    except CommandInterrupted as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the output of the command
        return REFUSED_STATUS
    except (OSError, EngineFailed) as error:
        print(f"docker: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the output of the command
        return REFUSED_STATUS


if __name__ == "__main__":
    sys.exit(main())
