"""A real `antiphon up` under attack by unauthenticated peers, and a probe that measures the effect on others."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from websockets.sync.client import ClientConnection, connect

MIB = 2**20
BOUND = 60.0  # seconds after which any wait of a test is a failure
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
PING, TEXT_UNFINISHED, CONTINUATION = 0x89, 0x01, 0x00
NO_MASK = bytes(4)
LIMITED = (
    "import os, resource, sys; files = int(sys.argv[1]);"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)); os.execv(sys.argv[2], sys.argv[2:])"
)


def make_frame_head(head: int, size: int) -> bytes:
    """Make the head of a client's frame, with a mask of zeros."""
    if size < 126:
        return struct.pack("!BB", head, 0x80 | size) + NO_MASK
    if size < 2**16:
        return struct.pack("!BBH", head, 0x80 | 126, size) + NO_MASK
    return struct.pack("!BBQ", head, 0x80 | 127, size) + NO_MASK


@dataclass
class AttackedGateway:
    """A gateway in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    token: str

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @contextmanager
    def member(self) -> Generator[ClientConnection]:
        """A client with the owner's token."""
        with connect(f"ws://127.0.0.1:{self.port}", open_timeout=BOUND, max_size=None) as client:
            client.recv(timeout=BOUND)
            introduction = {
                "minProtocol": 4,
                "maxProtocol": 4,
                "client": {"id": "test", "version": "1", "platform": "linux", "mode": "test"},
                "auth": {"token": self.token},
            }
            call_method(client, "connect", introduction)
            yield client

    def raw(self, *, reads: bool = True) -> socket.socket:
        """Open a WebSocket without authenticating; a peer with `reads=False` has a tiny receive buffer."""
        peer = socket.create_connection(("127.0.0.1", self.port), BOUND)
        if not reads:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(UPGRADE)
        answer = b""
        while b"\r\n\r\n" not in answer:
            chunk = peer.recv(4096)
            assert chunk, f"no answer to the upgrade: {answer!r}"
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 101"), answer
        return peer

    def silent(self, count: int, stack: ExitStack) -> list[socket.socket]:
        return [stack.enter_context(self.raw()) for _ in range(count)]


def call_method(client: ClientConnection, method: str, params: Mapping[str, object] | None = None) -> object:
    client.send(json.dumps({"type": "req", "id": method, "method": method, "params": dict(params or {})}))
    until = time.monotonic() + BOUND
    while True:
        answer = json.loads(client.recv(timeout=max(0.0, until - time.monotonic())))
        if answer["type"] == "res" and answer["id"] == method:
            assert answer["ok"], answer
            return answer["payload"]


@contextmanager
def start_attacked_gateway(
    home: Path, config: dict[str, object] | None = None, files: int | None = None
) -> Generator[AttackedGateway]:
    """Run `antiphon up` on a free port, with at most `files` open files."""
    state = home / "state"
    state.mkdir(mode=0o700, parents=True)
    if config is not None:
        path = state / "config.json5"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
    inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environ = {**inherited, "HOME": str(home), "ANTIPHON_STATE_DIR": str(state)}
    log = (home / "log").open("wb")
    command = [sys.executable, "-m", "antiphon", "up", "--port", "0"]
    if files is not None:
        command = [sys.executable, "-c", LIMITED, str(files), *command]
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        port = _port(process, home / "log")
        tokens = json.loads((state / "tokens.json").read_text())["tokens"]
        yield AttackedGateway(
            process, port, next(record["token"] for record in tokens if record.get("token"))
        )
    finally:
        process.terminate()
        try:
            process.wait(BOUND)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(BOUND)
        log.close()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        if found := re.search(r"127\.0\.0\.1:(\d+)", log.read_text()):
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(found[1])), 1.0):
                return int(found[1])
        time.sleep(0.01)  # polls a file that another process writes
    raise AssertionError(f"the gateway did not start: {log.read_text()}")


@dataclass
class HealthProbe:
    """A second client that calls `health` repeatedly while others attack."""

    victim: AttackedGateway
    slowest: float = 0.0
    asked: int = 0
    highest_resident_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: Exception | None = None

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._probe, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(BOUND)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(BOUND)
        assert not self._thread.is_alive(), "the second client got no answer"
        if self._failure is not None and error is None:
            raise self._failure

    def _probe(self, ready: threading.Event) -> None:
        try:
            with self.victim.member() as client:
                ready.set()
                while not self._stop.is_set():
                    begun = time.monotonic()
                    call_method(client, "health")
                    self.slowest = max(self.slowest, time.monotonic() - begun)
                    self.asked += 1
                    self.highest_resident_bytes = max(self.highest_resident_bytes, self.victim.resident_bytes)
                    self._stop.wait(0.02)
        except Exception as failure:  # noqa: BLE001 - raised where the test can fail
            self._failure = failure
        finally:
            ready.set()


def send_until_refused(peer: socket.socket, pieces: Iterable[bytes]) -> int:
    """Send until the gateway closes the connection or accepts nothing for a second; return the bytes sent."""
    sent = 0
    peer.settimeout(1.0)
    with suppress(OSError):
        for piece in pieces:
            peer.sendall(piece)
            sent += len(piece)
    return sent


def reset_connection(peer: socket.socket) -> None:
    """Close with a TCP reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
