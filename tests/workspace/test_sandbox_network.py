"""The network of a sandbox with a proxy: listed hosts are reached through it, and nothing else in any way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from antiphon.config import parse
from antiphon.errors import ConfigError
from antiphon.workspace.bubblewrap import Bubblewrap
from antiphon.workspace.keeper_client import CommandSpec, CommandStatus, KeeperClient, ProxySpec
from antiphon.workspace.locations import TEMPORARY_MOUNT, WORKSPACE_MOUNT, Mount
from antiphon.workspace.sandbox_backend import SandboxedCommand, find_program, set_variables
from antiphon.workspace.sandbox_network import (
    PROXY_PLACEHOLDER,
    build_proxy_environment,
    find_python,
    open_proxy_first,
)
from support.keepers import end_keeper, find_keeper, wait_until_true
from support.privileges import open_way_to
from support.sandboxes import MAIN, make_sandboxes

UNPRIVILEGED_UID = 61_001
BWRAP = find_program("bwrap", [])
PYTHON = find_python()
IS_ROOT = os.geteuid() == 0

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.requirement("B1"),
    pytest.mark.skipif(BWRAP is None or PYTHON is None, reason="bwrap or /usr/bin/python3 is not installed"),
]

Run = Callable[..., Awaitable[tuple[CommandStatus, str]]]

FETCH = """
import socket, sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(url, urllib.request.urlopen(url, timeout=10).read().decode().strip())
    except urllib.error.HTTPError as error:
        print(url, error.code, error.read().decode().strip())
    except OSError as error:
        print(url, "failed", error)
"""
DIRECT = """
import socket, sys
port = int(sys.argv[1])
for family, kind, address in [
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
    (socket.AF_INET, socket.SOCK_STREAM, ("93.184.216.34", 443)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700::1", 443)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
]:
    try:
        with socket.socket(family, kind) as opened:
            opened.settimeout(5)
            opened.connect(address)
            print("reached", address)
    except OSError:
        pass
try:
    print("resolved", socket.getaddrinfo("example.org", 80))
except OSError:
    pass
print("looked")
"""


@asynccontextmanager
async def serving(text: str) -> AsyncGenerator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[KeeperClient]:
    opened = KeeperClient(tmp_path)
    yield opened
    await opened.close()
    end_keeper(tmp_path)


@pytest.fixture(params=["root", "unprivileged"])
def run(request: pytest.FixtureRequest, tmp_path: Path, client: KeeperClient) -> Run:
    """Runs a command in a new sandbox as the gateway of root or of an ordinary user would."""
    as_root = request.param == "root"
    if as_root and not IS_ROOT:
        pytest.skip("these tests do not run as root")
    assert BWRAP is not None
    assert PYTHON is not None
    python = PYTHON
    backend = Bubblewrap(BWRAP, user=UNPRIVILEGED_UID if as_root else None, is_root=as_root)
    owner = UNPRIVILEGED_UID if IS_ROOT else os.getuid()
    open_way_to(tmp_path)
    mounts = [Mount(WORKSPACE_MOUNT, tmp_path / "workspace"), Mount(TEMPORARY_MOUNT, tmp_path / "tmp")]
    for mount in mounts:
        mount.path.mkdir()
        os.chown(mount.path, owner, owner)

    async def run_command(
        key: str, *command: str, allowed: list[str] | None, wait_seconds: float = 30
    ) -> tuple[CommandStatus, str]:
        if allowed is not None:
            command = tuple(
                open_proxy_first(set_variables(command, build_proxy_environment(allowed)), python)
            )
        wrapped: SandboxedCommand = backend.wrap(command, mounts, cwd=WORKSPACE_MOUNT, env={})
        change = ["/usr/bin/setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--"]
        spec = CommandSpec(
            argv=[*(change if IS_ROOT and not as_root else []), *wrapped.argv],
            cwd="/",
            env=dict(wrapped.env),
            files=wrapped.files,
            timeout=60,
            proxy=None if allowed is None else ProxySpec(argument=PROXY_PLACEHOLDER, allowed_hosts=allowed),
        )
        status = await client.start(key, spec, wait_seconds=wait_seconds)
        return status, (await client.read(key, 0, 100_000)).data.decode()

    return run_command


async def test_only_listed_hosts_are_reached_and_only_through_the_proxy(run: Run) -> None:
    async with serving("listed") as listed, serving("not listed") as other:
        urls = [
            *(f"http://127.0.0.1:{listed}/", f"http://127.0.0.1:{other}/", "http://169.254.169.254/latest/"),
            *(f"http://localhost:{listed}/", "http://example.org/"),
        ]
        status, output = await run(
            "a", "/usr/bin/python3", "-c", FETCH, *urls, allowed=[f"127.0.0.1:{listed}"]
        )
        assert status.exit_code == 0, output
        answers = dict(line.split(" ", 1) for line in output.splitlines())
        assert answers[urls[0]] == "listed"
        for url in (urls[1], urls[2], urls[4]):
            assert answers[url].startswith("403 "), answers
            assert "'agents.defaults.sandbox.allowHosts'" in answers[url]
        assert answers[urls[3]].startswith("failed"), "the sandbox's own loopback was asked of the proxy"
        assert list(status.refused_hosts) == [f"127.0.0.1:{other}", "169.254.169.254:80", "example.org:80"]

        status, output = await run(
            "b", "/usr/bin/python3", "-c", DIRECT, str(listed), allowed=[f"127.0.0.1:{listed}"]
        )
        assert output == "looked\n"


def read_ignored_signals() -> int:
    """The signals that the tests ignore themselves, for example because `nohup` runs them."""
    return int(Path("/proc/self/status").read_text().partition("SigIgn:")[2].split()[0], 16)


async def test_what_opened_the_proxy_leaves_nothing_inside(run: Run) -> None:
    script = (
        "ls /proc/self/fd | tr '\\n' ' '; echo; cat /proc/[0-9]*/comm | sort -u | tr '\\n' ' '; echo;"
        " find / -type s 2>/dev/null; grep -E 'CapEff|NoNewPrivs|SigIgn' /proc/self/status; exit 7"
    )
    status, output = await run("a", "/bin/sh", "-c", script, allowed=["example.org"])
    assert status.exit_code == 7, output
    descriptors, processes, *status_lines = output.splitlines()
    assert descriptors == "0 1 2 3 ", "a descriptor of the launch is left"  # 3 is the directory that ls reads
    assert set(processes.split()) <= {"bwrap", "sh", "cat", "sort", "tr"}
    assert sorted(line.split()[0] for line in status_lines) == ["CapEff:", "NoNewPrivs:", "SigIgn:"]
    values = {int(line.split()[1], 16) for line in status_lines if not line.startswith("NoNewPrivs")}
    assert {value & ~read_ignored_signals() for value in values} == {0}, (
        "a capability or an ignored signal is left"
    )


async def test_a_sandbox_cannot_use_the_proxy_of_another(run: Run, tmp_path: Path) -> None:
    async with serving("listed") as listed:
        allowed = [f"127.0.0.1:{listed}"]
        begin = "echo begun; while [ ! -e go ]; do sleep 0.05; done"
        await run("open", "/bin/sh", "-c", begin, allowed=allowed, wait_seconds=0)
        connect = "import socket; socket.create_connection(('127.0.0.1', 3128), 5)"
        for key, hosts in (("none", None), ("other", ["other.example"])):
            status, output = await run(key, "/usr/bin/python3", "-c", connect, allowed=hosts)
            assert (status.exit_code == 0) is (hosts is not None), output
        ask = (  # by hand, since programs go to the loopback directly
            "import socket; s = socket.create_connection(('127.0.0.1', 3128), 5);"
            f" s.sendall(b'GET http://127.0.0.1:{listed}/ HTTP/1.1\\r\\n\\r\\n'); print(s.recv(100).decode())"
        )
        _, output = await run("ask", "/usr/bin/python3", "-c", ask, allowed=["other.example"])
        assert output.startswith("HTTP/1.1 403 ")
        (tmp_path / "workspace" / "go").touch()


async def test_the_proxy_ends_with_its_command(run: Run, client: KeeperClient, tmp_path: Path) -> None:
    is_held, has_ended = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_held.set()
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
        has_ended.set()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await run("warm", "/bin/true", allowed=["example.org"])
        process = find_keeper(tmp_path)
        assert process is not None
        before = process.num_fds()
        tunnel = (
            "import socket, time; s = socket.create_connection(('127.0.0.1', 3128));"
            f" s.sendall(b'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\nx'); time.sleep(600)"
        )
        await run("tunnel", "/usr/bin/python3", "-c", tunnel, allowed=[f"127.0.0.1:{port}"], wait_seconds=0)

        await asyncio.wait_for(is_held.wait(), 20)
        assert process.num_fds() > before
        assert (await client.stop("tunnel", "abort")).state == "ended"
        await asyncio.wait_for(has_ended.wait(), 20)

        async def is_closed() -> bool:
            return process.num_fds() <= before

        await wait_until_true(is_closed)


async def test_a_session_has_the_hosts_of_its_agent(tmp_path: Path, client: KeeperClient) -> None:
    open_way_to(tmp_path)
    async with serving("listed") as listed:
        sandboxes = make_sandboxes(tmp_path / "state", network="proxy", allowHosts=[f"localhost:{listed}"])
        command = await sandboxes.wrap(
            MAIN,
            ["/usr/bin/python3", "-c", FETCH, f"http://localhost:{listed}/"],
            workdir=None,
            env={"A": "b"},
        )
        assert command.allowed_hosts == (f"localhost:{listed}",)
        spec = CommandSpec(
            argv=command.argv,
            cwd="/",
            env=dict(command.env),
            files=command.files,
            timeout=60,
            proxy=ProxySpec(argument=PROXY_PLACEHOLDER, allowed_hosts=command.allowed_hosts or ()),
        )
        await client.start("a", spec, wait_seconds=30)
        assert (await client.read("a", 0, 10_000)).data.decode() == f"http://localhost:{listed}/ listed\n"


async def test_without_a_python_for_the_sandbox_commands_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.workspace.sandbox.find_python", lambda: None)
    sandboxes = make_sandboxes(tmp_path / "state", network="proxy", allowHosts=["example.org"])
    status = await sandboxes.find_status("main")
    assert status.backend is None
    assert "install one, for example with `apt-get install python3`" in " ".join(status.describe_faults())


@pytest.mark.parametrize(
    ("sandbox", "path", "said"),
    [
        ({"allowHosts": ["example.org"]}, "allowHosts", "Set 'network' there to 'proxy'"),
        ({"network": "proxy", "backend": "landlock"}, "network", "'landlock' cannot enforce"),
        ({"network": "proxy", "fallback": "landlock"}, "network", "'landlock' cannot enforce"),
        (
            {"network": "proxy", "allowHosts": ["https://example.org"]},
            "allowHosts[0]",
            "must be a host such as",
        ),
        ({"network": "host"}, "network", "'none' or 'proxy'"),
    ],
)
@pytest.mark.parametrize("level", ["agents.defaults", "agents.list[0]"])
def test_a_network_that_cannot_be_is_refused_in_the_configuration(
    sandbox: dict[str, object], path: str, said: str, level: str
) -> None:
    agents = {"defaults": {"sandbox": sandbox}}
    if level != "agents.defaults":
        agents = {"list": [{"id": "main", "sandbox": sandbox}]}
    with pytest.raises(ConfigError) as caught:
        parse({"agents": agents})
    assert caught.value.data["path"] == f"{level}.sandbox.{path}"
    assert said in str(caught.value)


def test_an_agent_may_have_hosts_of_its_own() -> None:
    config, warnings = parse(
        {
            "agents": {
                "defaults": {"sandbox": {"network": "proxy"}},
                "list": [{"id": "main", "sandbox": {"allowHosts": ["*.example.org"]}}, {"id": "other"}],
            }
        }
    )
    assert config.get_agent("main").sandbox.allow_hosts == ("*.example.org",)
    assert config.get_agent("other").sandbox.allow_hosts == ()
    assert not [text for text in warnings if "allowHosts" in text or "network" in text]
