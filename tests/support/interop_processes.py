"""The real gateway as a process, and third-party clients as they come from npm.

`scripts/interop` installs those clients into a cache outside the repository. Each gets its own home directory, is
configured not to use the network, and is killed with its child processes when its test ends. Every wait is bounded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUND = 60.0  # seconds after which any wait is a failure; node alone takes two to start
POLL_SECONDS = 0.05  # for conditions without an event

CACHE = Path(os.environ.get("ANTIPHON_INTEROP_CACHE") or Path.home() / ".cache" / "antiphon-interop")
NODE = CACHE / "node" / "node_modules" / ".bin" / "node"
MODULES = CACHE / "openclaw" / "node_modules"
OPENCLAW = MODULES / "openclaw" / "openclaw.mjs"
CONTROL_UI = MODULES / "openclaw" / "dist" / "control-ui"
SCHEMA = MODULES / "@openclaw" / "gateway-protocol" / "protocol.schema.json"
CHROMIUM = Path(os.environ.get("ANTIPHON_INTEROP_CHROMIUM") or "/usr/bin/chromium")

# A control run sets another server with the same options: a test that fails against the real OpenClaw is wrong.
SERVER = os.environ.get("ANTIPHON_INTEROP_SERVER")
COMMAND = [SERVER] if SERVER else [sys.executable, "-m", "antiphon"]
MAIN = "agent:main:main"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, f"exit code {self.code}:\n{self.out}\n{self.err}"
        return json.loads(self.out)


@dataclass(frozen=True)
class Gateway:
    url: str
    token: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def http(self) -> str:
        return self.url.replace("ws://", "http://", 1)

    def stop(self) -> int:
        """Stop it with SIGTERM; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(BOUND)


@dataclass(frozen=True)
class Openclaw:
    """The OpenClaw command line with its own home directory."""

    home: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": f"{NODE.parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "NO_COLOR": "1",
            "OPENCLAW_STATE_DIR": str(self.home / "state"),
            "OPENCLAW_CONFIG_PATH": str(self.home / "openclaw.json"),
            # No network: no update check, no statistics, no downloads, no announcement.
            "OPENCLAW_NO_AUTO_UPDATE": "1",
            "DO_NOT_TRACK": "1",
            "OPENCLAW_OFFLINE": "1",
            "OPENCLAW_DISABLE_BONJOUR": "1",
        }

    def write_config(self) -> None:
        """Write its configuration."""
        self.home.mkdir(parents=True, exist_ok=True)
        quiet = {"update": {"checkOnStart": False}, "logging": {"file": str(self.home / "openclaw.log")}}
        (self.home / "openclaw.json").write_text(json.dumps(quiet))

    def run(self, *arguments: str, extra: Mapping[str, str] | None = None) -> Result:
        return run_program([str(NODE), str(OPENCLAW), *arguments], {**self.environ, **(extra or {})})

    def call(self, gateway: Gateway, method: str, params: object = None, *options: str) -> Result:
        """`openclaw gateway call`, as a script would use it."""
        address = ("--url", gateway.url, "--token", gateway.token, "--timeout", "30000", "--json")
        body = () if params is None else ("--params", json.dumps(params))
        return self.run("gateway", "call", method, *address, *body, *options)


def run_program(command: Sequence[str], environ: Mapping[str, str]) -> Result:
    """Run a program to its end."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with start_process(command, environ, stdin=null, stdout=pipe, stderr=pipe) as process:
        out, err = process.communicate(timeout=BOUND)
        return Result(process.returncode, out.decode(), err.decode())


@contextmanager
def start_process(
    command: Sequence[str], environ: Mapping[str, str], *, stdin: int, stdout: int, stderr: int
) -> Generator[subprocess.Popen[bytes]]:
    """Start a program in its own process group, which is killed afterwards."""
    process = subprocess.Popen(
        command, env=environ, start_new_session=True, stdin=stdin, stdout=stdout, stderr=stderr
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(BOUND)


@contextmanager
def start_gateway(
    directory: Path, origins: Sequence[str] = (), *, python_tools: str = ""
) -> Generator[Gateway]:
    """Start the gateway on a free port with the rehearsal model, and wait until it is ready.

    `python_tools` is the source of a module whose `tools` agents get as well.
    """
    state, log = directory / "state", directory / "gateway.log"
    state.mkdir(mode=0o700, parents=True)
    settings = _config(origins)
    if python_tools:
        (directory / "interop_tools.py").write_text(python_tools)
        settings["tools"]["python"] = ["./interop_tools.py:tools"]
    config = directory / "config.json5"
    config.write_text(json.dumps(settings))
    environ = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    options = ("up", "--port", "0", "--state-dir", str(state), "--config", str(config))
    environ |= {"HOME": str(directory), "PYTHONWARNINGS": "error"}
    null, same = subprocess.DEVNULL, subprocess.STDOUT
    with (
        log.open("wb") as output,
        start_process(
            [*COMMAND, *options], environ, stdin=null, stdout=output.fileno(), stderr=same
        ) as process,
    ):
        address = _address(process, state / "gateway.json", log)
        yield Gateway(address, _owner(state), log, process)


def _config(origins: Sequence[str]) -> dict[str, Any]:
    on = {"enabled": True}
    return {
        "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
        "tools": {"sessions": {"visibility": "all"}, "agentToAgent": on},
        "gateway": {
            "tools": {"allow": ["sessions_send", "sessions_spawn"]},
            "controlUi": {"allowedOrigins": list(origins)},
            "http": {"endpoints": {"chatCompletions": on, "responses": on}},
        },
    }


def _address(process: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    until = time.monotonic() + BOUND
    while not file.exists():
        assert time.monotonic() < until, f"the gateway was not ready in {BOUND:.0f} s:\n{log.read_text()}"
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECONDS)
            raise AssertionError(f"the gateway ended with {code}:\n{log.read_text()}")
    return json.loads(file.read_text())["url"]


def _owner(state: Path) -> str:
    records = json.loads((state / "tokens.json").read_text())["tokens"]
    return next(record["token"] for record in records if record.get("token"))
