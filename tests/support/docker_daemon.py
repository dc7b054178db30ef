"""A Docker engine of the tests' own, with a small image, since no registry can be counted on."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from antiphon.workspace.docker_launcher import EngineFailed, EngineSocket

IMAGE = "antiphon-test:1"
START_SECONDS = 60.0
STOP_SECONDS = 30.0
_PROGRAMS = (
    *("sh", "bash", "cat", "cp", "chmod", "cut", "env", "false", "grep", "head", "id", "ln", "ls", "mkdir"),
    *("mknod", "mount", "mv", "ps", "pwd", "rm", "seq", "setsid", "sleep", "stat", "tail", "touch", "tr"),
    *("true", "unshare", "wc", "yes", "chroot", "sort", "date", "tty", "readlink", "find", "df", "touch"),
    *("nsenter", "umount", "hostname", "renice", "su", "dd"),
)
_PYTHON = Path("/usr/bin/python3")
_LEFT_OUT_OF_PYTHON = (
    "test",
    "idlelib",
    "lib2to3",
    "tkinter",
    "pydoc_data",
    "distutils",
    "ensurepip",
    "turtledemo",
)
_DIRECTORIES = ("dev", "etc", "opt", "proc", "run", "sys", "tmp", "usr/bin", "var/tmp", "workspace")
_STORAGE_DRIVERS = ("overlay2", "vfs")


class DaemonMissing(Exception):
    """No engine can be started here; the text says why."""


class DockerDaemon:
    """An engine with a directory of its own."""

    def __init__(self, base: Path, storage_driver: str) -> None:
        self.socket = base / "docker.sock"
        self._base = base
        self._storage_driver = storage_driver
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self.socket)),
            base_url="http://docker",
            timeout=START_SECONDS,
        )

    def start(self) -> None:
        """Start the engine, also after it was killed.

        Raises:
            DaemonMissing: it does not start.
        """
        self._base.mkdir(mode=0o711, exist_ok=True)
        paths = {"--data-root": "data", "--exec-root": "run", "--pidfile": "pid"}
        arguments = [f"{option}={self._base / name}" for option, name in paths.items()]
        arguments += [f"--host=unix://{self.socket}", f"--storage-driver={self._storage_driver}"]
        arguments += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        log = self._base / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["/usr/bin/setpriv", "--pdeathsig", "TERM", "--", find_dockerd(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        until = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            if self.is_up():
                return
            time.sleep(0.05)
        self.stop()
        lines = log.read_text("utf-8", "replace").splitlines() or ["no output"]
        raise DaemonMissing(f"dockerd does not start: {lines[-1][:300]}")

    def kill(self) -> None:
        """End the engine at once; what it has started goes on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_SECONDS)
        # The process of this number ends with the engine. If nothing reaps it, the next engine would wait for it.
        (self._base / "run" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End the engine with its containers."""
        if self._process is not None and self._process.poll() is None:
            with suppress(httpx2.HTTPError, AssertionError):
                self.remove_containers()
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def close(self) -> None:
        if self._process is not None and self._process.returncode == -signal.SIGKILL:
            self.start()  # what it left running ends with it
        self.stop()
        self._http.close()
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (mounted := line.split()[4]).startswith(
                f"{self._base}/"
            ):  # an engine leaves its own namespaces
                subprocess.run(["/bin/umount", "-l", mounted], check=False, capture_output=True)

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Return the answer to a request; None if it is not JSON."""
        answer = self._http.request(method, path, **options)
        assert answer.status_code < 400, answer.text
        return answer.json() if answer.headers.get("content-type") == "application/json" else None

    def is_up(self) -> bool:
        try:
            EngineSocket(str(self.socket)).request("GET", "/version")
        except (OSError, EngineFailed):
            return False
        return True

    def list_containers(self) -> list[dict[str, Any]]:
        return self.request("GET", "/containers/json", params={"all": "true"})

    def remove_containers(self) -> None:
        for container in self.list_containers():
            with suppress(AssertionError):  # another removes it
                self.request("DELETE", f"/containers/{container['Id']}", params={"force": "true"})

    def import_image(self, name: str, archive: bytes) -> None:
        repository, _, tag = name.partition(":")
        self.request(
            "POST",
            "/images/create",
            params={"fromSrc": "-", "repo": repository, "tag": tag},
            content=archive,
            headers={"Content-Type": "application/x-tar"},
        )


@contextmanager
def run_docker_daemon() -> Generator[DockerDaemon]:
    """Start an engine with the test image, and end it with its containers.

    Raises:
        DaemonMissing: it cannot be started here.
    """
    find_dockerd()
    if os.geteuid() != 0:
        raise DaemonMissing("only root can start dockerd")
    with tempfile.TemporaryDirectory(prefix="antiphon-docker-", ignore_cleanup_errors=True) as base:
        Path(base).chmod(0o711)  # an ordinary user's gateway connects to it
        daemon = _start_with_any_driver(Path(base))
        try:
            daemon.import_image(IMAGE, build_image())
            yield daemon
        finally:
            daemon.close()


def _start_with_any_driver(base: Path) -> DockerDaemon:
    for driver in _STORAGE_DRIVERS:
        daemon = DockerDaemon(base / driver, driver)
        try:
            daemon.start()
        except DaemonMissing:
            daemon.close()
            if driver == _STORAGE_DRIVERS[-1]:
                raise
        else:
            return daemon
    raise AssertionError


def find_dockerd() -> str:
    """Return the program of the engine.

    Raises:
        DaemonMissing: it is not installed.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    if found := shutil.which("dockerd", path=path):
        return found
    raise DaemonMissing("dockerd is not installed (apt-get install docker.io)")


def build_image() -> bytes:
    """Return an archive with programs of this machine and the libraries that they need."""
    files: dict[str, Path] = {}
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is not None:
            files[f"usr/bin/{name}"] = Path(found).resolve()
    files |= _find_python()
    programs = {path for path in files.values() if path.suffix != ".py"}
    for library in _find_libraries(
        path for path in programs if ".so" in path.name or os.access(path, os.X_OK)
    ):
        files[str(library).lstrip("/")] = library.resolve()
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for directory in _DIRECTORIES:
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if directory.endswith("tmp") else 0o755
            archive.addfile(entry)
        link = tarfile.TarInfo("bin")
        link.type, link.linkname = tarfile.SYMTYPE, "usr/bin"
        archive.addfile(link)
        for name, path in sorted(files.items()):
            archive.add(path, name)
    return output.getvalue()


def _find_python() -> dict[str, Path]:
    """Return the files of the system's Python that simple programs need, by their names; none without one."""
    program = _PYTHON.resolve()
    modules = Path("/usr/lib", program.name)
    if not program.exists():
        return {}
    found = {"usr/bin/python3": program}
    for path in modules.rglob("*"):
        first = path.relative_to(modules).parts[0]
        if first not in _LEFT_OUT_OF_PYTHON and "__pycache__" not in path.parts and path.is_file():
            found[str(path).lstrip("/")] = path.resolve()
    return found


def _find_libraries(programs: Iterable[Path]) -> set[Path]:
    found: set[Path] = set()
    for program in programs:
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    return found
