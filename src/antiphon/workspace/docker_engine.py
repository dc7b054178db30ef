"""Client of a Docker engine: the requests of the backend `docker`, over the unix socket of this machine's engine."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from antiphon.workspace.sandbox_backend import BackendFailed

REQUEST_TIMEOUT_SECONDS = 60.0
DEFAULT_SOCKET = Path("/var/run/docker.sock")
_HOST_VARIABLE = "DOCKER_HOST"
_UNIX_SCHEME = "unix://"

Json: TypeAlias = dict[str, Any]


class EngineRefused(Exception):
    """The engine refuses a request; the text is its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def find_engine_socket() -> Path:
    """Return the socket of the engine: that of `DOCKER_HOST`, of the machine, or of the user.

    Raises:
        BackendFailed: `DOCKER_HOST` names another machine.
    """
    if host := os.environ.get(_HOST_VARIABLE):
        if not host.startswith(_UNIX_SCHEME):
            raise BackendFailed(
                f"{_HOST_VARIABLE} is {host!r}, and an engine on another machine does not have these directories",
                f"set {_HOST_VARIABLE} to 'unix:///var/run/docker.sock', or remove it",
            )
        return Path(host.removeprefix(_UNIX_SCHEME))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(runtime, "docker.sock") if runtime else DEFAULT_SOCKET
    return own if own.exists() and not DEFAULT_SOCKET.exists() else DEFAULT_SOCKET


def is_engine_there() -> bool:
    """Whether an engine answers."""
    try:
        _connect(find_engine_socket())
    except BackendFailed:
        return False
    return True


class DockerEngine:
    def __init__(self, path: Path) -> None:
        self.path = path

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Any:
        """Return the answer to a request: the decoded JSON, or the bytes.

        Raises:
            EngineRefused: the engine refuses it.
            BackendFailed: no engine answers.
        """
        await asyncio.to_thread(_connect, self.path)
        import httpx2  # noqa: PLC0415 - only where there are containers

        transport = httpx2.AsyncHTTPTransport(uds=str(self.path), verify=False)
        try:
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://docker", timeout=seconds, trust_env=False
            ) as http:
                answer = await http.request(method, path, params=params, json=body)
        except httpx2.HTTPError as error:
            raise BackendFailed(
                f"the Docker engine does not answer ({type(error).__name__} for {method} {path})",
                "check its log, for example with `journalctl -u docker`",
            ) from None
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if answer.status_code >= 400:
            text = answer.json().get("message", "") if is_json else answer.text
            raise EngineRefused(answer.status_code, text.strip()[:500])
        return answer.json() if is_json else answer.content

    async def find_container(self, name: str) -> Json | None:
        return await self._find(f"/containers/{name}/json")

    async def find_image(self, name: str) -> Json | None:
        return await self._find(f"/images/{name}/json")

    async def _find(self, path: str) -> Json | None:
        try:
            return await self.request("GET", path)
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise

    async def list_containers(self, label: str) -> list[Json]:
        """Return the containers with a label, running or not."""
        import json  # noqa: PLC0415

        filters = json.dumps({"label": [label]})
        return await self.request("GET", "/containers/json", params={"all": "true", "filters": filters})

    async def is_busy(self, container_id: str) -> bool:
        """Whether a command runs in a container."""
        found = await self.find_container(container_id)
        for exec_id in (found or {}).get("ExecIDs") or ():
            execution = await self._find(f"/exec/{exec_id}/json")
            if execution is not None and execution["Running"]:
                return True
        return False

    async def remove_container(self, container_id: str) -> None:
        """Remove a container and everything that runs in it; one that is gone is no error."""
        try:
            await self.request("DELETE", f"/containers/{container_id}", params={"force": "true", "v": "true"})
        except EngineRefused as error:
            if error.status not in (404, 409):  # it is being removed
                raise

    async def run(self, container_id: str, command: Mapping[str, object], seconds: float) -> tuple[int, str]:
        """Run a short program of our own in a container; return its exit status and its output."""
        created = await self.request(
            "POST",
            f"/containers/{container_id}/exec",
            body={"AttachStdout": True, "AttachStderr": True, **command},
        )
        frames = await self.request(
            "POST", f"/exec/{created['Id']}/start", body={"Detach": False, "Tty": False}, seconds=seconds
        )
        execution = await self.request("GET", f"/exec/{created['Id']}/json")
        return execution["ExitCode"] or 0, _join_frames(frames).decode("utf-8", "replace")


@asynccontextmanager
async def explaining_refusals() -> AsyncGenerator[None]:
    """Translate what the engine refuses into `BackendFailed`."""
    try:
        yield
    except EngineRefused as error:
        raise BackendFailed(f"the Docker engine says: {error}", "see docs/sandbox.md") from None


def _connect(path: Path) -> None:
    """Check that an engine accepts connections.

    Raises:
        BackendFailed: it cannot be, and why.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REQUEST_TIMEOUT_SECONDS)
        try:
            connection.connect(str(path))
        except PermissionError:
            name = _find_user_name()
            raise BackendFailed(
                f"the user {name!r} may not use the Docker engine at {str(path)!r}",
                f"run `usermod -aG docker {name}` and start the gateway from a new login",
            ) from None
        except OSError:
            raise BackendFailed(
                f"no Docker engine answers at {str(path)!r}",
                f"start one, for example with `systemctl start docker`, or set {_HOST_VARIABLE} to its socket",
            ) from None


def _find_user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _join_frames(data: bytes) -> bytes:
    """Return the output of a program, which comes in frames: the number of a stream, a length, the data."""
    output = b""
    while len(data) >= 8:
        end = 8 + int.from_bytes(data[4:8], "big")
        output, data = output + data[8:end], data[end:]
    return output
