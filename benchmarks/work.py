"""What the tools for work cost: commands, with and without a sandbox, files, many commands at once, and to have them.

    uv run python benchmarks/work.py            all of it, about a minute
    uv run python benchmarks/work.py --quick    small sizes
    uv run python benchmarks/work.py commands   only this part

Where a Docker engine has the image (`ANTIPHON_BENCHMARK_IMAGE`, or Debian's), commands run in a container, too.

Each call is made as in a step of a run. `subprocess` in the same run is the yardstick for the machine. A turn that uses
no tool is compared with one of an agent that has none, in turns, so that both see the same machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from antiphon.access import Caller
from antiphon.app import App, open_app
from antiphon.bus import EVERY_SESSION_TOPIC, MessageAppended
from antiphon.config import parse
from antiphon.engine.runs.command_rows import COMMAND_END_KIND
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.messages import UserMessage, decode_message
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.workspace.keeper_client import KEEPER_DIRECTORY_NAME
from antiphon.workspace.sandbox import Sandboxes
from figures import Figure, at_least, at_most, main, timed
from gateway import temporary

OPERATOR = Caller.operator()
MAIN = Caller.agent("main", "agent:main:main")
COUNTS = {"commands": 200, "reads": 100, "background": 100, "turns": 400}
QUICK = {"commands": 40, "reads": 30, "background": 20, "turns": 80}
IN_SANDBOX: dict[str, Any] = {"agents": {"list": [{"id": "main", "default": True}]}}
CONTAINER_IMAGE = os.environ.get("ANTIPHON_BENCHMARK_IMAGE", "debian:bookworm-slim")
IN_CONTAINER: dict[str, Any] = {
    "agents": {
        "defaults": {"sandbox": {"backend": "docker", "docker": {"image": CONTAINER_IMAGE}}},
        **IN_SANDBOX["agents"],
    }
}
ON_GATEWAY: dict[str, Any] = {
    **IN_SANDBOX,
    "tools": {"exec": {"host": "gateway", "security": "full", "ask": "off"}},
}
WITHOUT_TOOLS: dict[str, Any] = {**IN_SANDBOX, "tools": {"deny": ["*"]}}
MAX_WAIT_SECONDS = 120.0
MAX_SLOWER_PERCENT = 10.0


async def instant(prompt: Prompt) -> str:
    return "ok"


@asynccontextmanager
async def hosted(folder: Path, settings: dict[str, Any]) -> AsyncGenerator[App]:
    functions = {"main": FunctionRuntime(instant, history=False)}
    async with open_app(parse(settings)[0], folder, functions=functions) as opened:
        await opened.operations.sessions.open(OPERATOR, "agent:main:main")
        yield opened


async def call(opened: App, tool: str, **arguments: Any) -> ToolOutput:
    """As a run's step would, without the run."""
    made = ToolRequest(
        caller=MAIN,
        run_id="benchmark",
        call_id=uuid.uuid4().hex,
        arguments=arguments,
        tool_names=opened.toolbox.names,
    )
    result = await opened.toolbox.tools[tool].invoke(made)
    assert not result.is_error, result.text
    return result


async def run_program(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0


async def has_containers() -> bool:
    """Whether a Docker engine answers that has the image."""
    with tempfile.TemporaryDirectory() as folder:
        status = await Sandboxes(parse(IN_CONTAINER)[0], Path(folder)).find_status("main")
        return status.backend == "docker"


async def commands(counts: dict[str, int]) -> list[Figure]:
    figures: list[Figure] = []
    bare = ("bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "/bin/true")
    for name, words in (("true", ("/bin/true",)), ("true in a bare bwrap", bare)):
        times = await timed(lambda words=words: run_program(*words), counts["commands"])
        figures.append(at_most(f"subprocess: {name}, p50", statistics.median(times), "ms", 1000))
    places = [("plain", ON_GATEWAY, 6), ("in bwrap", IN_SANDBOX, 20)]
    if await has_containers():
        places.append(("in a container", IN_CONTAINER, 500))
    for name, settings, most in places:
        with tempfile.TemporaryDirectory() as folder:
            async with hosted(Path(folder), settings) as opened:
                await call(opened, "exec", command="true")  # starts the keeper
                times = await timed(lambda: call(opened, "exec", command="true"), counts["commands"])
                figures.append(at_most(f"exec true, {name}, p50", statistics.median(times), "ms", most))
    return figures


async def files(counts: dict[str, int]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        async with hosted(Path(folder), IN_SANDBOX) as opened:
            await call(opened, "write", path="large.txt", content="a line of text\n" * 69_000)
            times = await timed(lambda: call(opened, "read", path="large.txt"), counts["reads"])
            return [at_most("read of a 1 MB file, p50", statistics.median(times), "ms", 5)]


async def background(counts: dict[str, int]) -> list[Figure]:
    """Start many commands at once, each from a session of its own, and count the notes about their ends."""
    keys = [f"agent:main:direct:{number}" for number in range(counts["background"])]
    with tempfile.TemporaryDirectory() as folder:
        async with (
            hosted(Path(folder), ON_GATEWAY) as opened,
            opened.bus.listen(EVERY_SESSION_TOPIC) as heard,
        ):
            for key in keys:
                await opened.operations.sessions.open(OPERATOR, key)
            await asyncio.gather(*(start_in_background(opened, key) for key in keys))
            notes: dict[str, int] = {}
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                while sum(notes.values()) < len(keys):
                    event = await heard.get(MAX_WAIT_SECONDS)
                    if isinstance(event, MessageAppended) and is_command_note(event):
                        notes[event.session_key] = notes.get(event.session_key, 0) + 1
            keeper = find_keeper(Path(folder))
            return [
                at_least(
                    "background commands reported once", sum(n == 1 for n in notes.values()), "", len(keys)
                ),
                at_most("resident memory of the keeper after them", keeper.memory_info().rss / 1e6, "MB", 25),
            ]


async def turns(counts: dict[str, int]) -> list[Figure]:
    """Time turns that use no tool, of an agent that has all of them and of one that has none, one after the other."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        async with hosted(Path(one), IN_SANDBOX) as equipped, hosted(Path(other), WITHOUT_TOOLS) as bare:
            times: dict[int, list[float]] = {0: [], 1: []}
            for _ in range(counts["turns"]):
                for number, opened in enumerate((equipped, bare)):
                    times[number] += await timed(lambda opened=opened: take_turn(opened), 1)
            with_tools, without = (statistics.median(times[number]) for number in (0, 1))
            return [
                at_most("turn of an agent without tools, p50", without, "ms", 25),
                at_most("turn of an agent with tools, p50", with_tools, "ms", 25),
                at_most("… slower by", (with_tools / without - 1) * 100, "%", MAX_SLOWER_PERCENT),
            ]


async def take_turn(opened: App) -> None:
    message = IncomingMessage(session="agent:main:main", content="hello")
    accepted = await opened.operations.messages.submit(OPERATOR, message)
    ended = await opened.operations.runs.wait(OPERATOR, accepted.run_id, MAX_WAIT_SECONDS)
    assert ended.state == "ok", ended.error


async def memory(counts: dict[str, int]) -> list[Figure]:
    """Weigh a gateway in a process of its own that has nothing to do, and a keeper that has run one command."""
    async with temporary(IN_SANDBOX) as gateway:
        figures = [
            at_most("resident memory of an idle gateway", gateway.process.memory_info().rss / 1e6, "MB", 80)
        ]
    with tempfile.TemporaryDirectory() as folder:
        async with hosted(Path(folder), ON_GATEWAY) as opened:
            await call(opened, "exec", command="true")
            idle = find_keeper(Path(folder)).memory_info().rss / 1e6
    return [*figures, at_most("resident memory of an idle keeper", idle, "MB", 25)]


async def start_in_background(opened: App, key: str) -> None:
    made = ToolRequest(
        caller=Caller.agent("main", key),
        run_id=f"benchmark {key}",
        call_id="call",
        arguments={"command": "sleep 1; echo done", "background": True},
        tool_names=opened.toolbox.names,
    )
    result = await opened.toolbox.tools["exec"].invoke(made)
    assert not result.is_error, result.text


def is_command_note(event: MessageAppended) -> bool:
    message = decode_message(event.body)
    return (
        isinstance(message, UserMessage)
        and message.provenance is not None
        and message.provenance.kind == COMMAND_END_KIND
    )


def find_keeper(state_dir: Path) -> psutil.Process:
    directory = str(state_dir / KEEPER_DIRECTORY_NAME)
    for process in psutil.process_iter(["cmdline"]):
        if directory in (process.info["cmdline"] or []) and process.pid != os.getpid():
            return process
    raise AssertionError("no keeper runs")


PARTS = {"commands": commands, "files": files, "turns": turns, "background": background, "memory": memory}

if __name__ == "__main__":
    main(__doc__, PARTS, COUNTS, QUICK)
