"""Which runtime a configuration means."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_limits import endless

from antiphon.config import Config, parse
from antiphon.errors import ProviderError
from antiphon.messages import AssistantMessage, TextBlock, UserMessage
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.model import ModelRuntime, ModelSpec, build_provider_error
from antiphon.runtimes.registry import RuntimeRegistry
from support.model_provider import Answer, Failure, Provider, serve_asgi

pytestmark = pytest.mark.anyio
BOUND = 20.0


@pytest.mark.requirement("G29")
@pytest.mark.parametrize(
    ("provider", "settings", "api"),
    [
        ("openai", {}, "openai-completions"),
        ("anthropic", {}, "anthropic-messages"),
        ("google", {}, "google-generative-ai"),
        ("anthropic", {"api": "openai-completions"}, "openai-completions"),
        ("local", {"baseUrl": "http://127.0.0.1:9/v1"}, "openai-completions"),
    ],
)
async def test_a_provider_is_spoken_to_in_its_own_language(
    provider: str, settings: dict[str, str], api: str
) -> None:
    """A key sent to the wrong company is a key given away."""
    providers = {provider: {"apiKey": "k", "models": [{"id": "m"}], **settings}}
    config, _ = parse({"models": {"providers": providers}})
    catalog = RuntimeRegistry(config)
    runtime = await catalog.get_runtime("main", None)
    assert isinstance(runtime, ModelRuntime)
    assert (runtime.spec.provider, runtime.spec.model, runtime.spec.api) == (provider, "m", api)
    await catalog.aclose()


@pytest.mark.requirement("G12")
async def test_a_slow_model_holds_up_no_other(tmp_path: Path) -> None:
    """Not even with a very high number of concurrent answers."""
    async with Provider().running() as slow, Provider().running() as quick:
        slow.default = Answer(text=("late",), hold_after=0)
        local = {"apiKey": "k", "api": "openai-completions", "models": [{"id": "m"}]}
        servers = {"slow": f"{slow.url}/v1", "quick": f"{quick.url}/v1"}
        providers = {name: {**local, "baseUrl": url} for name, url in servers.items()}
        config, _ = parse({"models": {"providers": providers}})
        async with (
            asyncio.timeout(BOUND),
            aclosing(RuntimeRegistry(config)) as catalog,
            asyncio.TaskGroup() as group,
        ):
            held = await catalog.get_runtime("main", "slow/m")
            waiting = [group.create_task(held.step(prompt(), Hush())) for _ in range(100)]
            await slow.arrived.wait()
            answer = await (await catalog.get_runtime("main", "quick/m")).step(prompt(), Hush())
            assert answer.text == "Hello there."
            assert not any(task.done() for task in waiting)
            slow.release()


@pytest.mark.requirement("G12")
async def test_a_provider_that_only_drips_delays_no_other() -> None:
    """It has all of its slots taken, and more requests wait for one."""
    drip, both = endless(b": keep-alive\n\n"), asyncio.Event()
    arrived: list[str] = []

    async def dripping(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        arrived.append(scope["path"])
        if len(arrived) == 2:
            both.set()
        await drip(scope, receive, send)

    async with serve_asgi(dripping) as stuck, Provider().running() as quick:
        local = {"apiKey": "k", "api": "openai-completions", "models": [{"id": "m"}]}
        providers = {"stuck": {**local, "baseUrl": stuck}, "quick": {**local, "baseUrl": f"{quick.url}/v1"}}
        agents = {"defaults": {"maxConcurrent": 2}}
        config, _ = parse({"models": {"providers": providers}, "agents": agents})
        async with asyncio.timeout(BOUND), aclosing(RuntimeRegistry(config)) as catalog:
            held = await catalog.get_runtime("main", "stuck/m")
            waiting = [asyncio.create_task(held.step(prompt(), Hush())) for _ in range(4)]
            try:
                await both.wait()
                other = await catalog.get_runtime("main", "quick/m")
                for _ in range(3):
                    assert (await other.step(prompt(), Hush())).text == "Hello there."
                assert not any(task.done() for task in waiting)
                assert len(arrived) == 2, "the others wait for a slot"
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)


# --- secrets that are replaced while it runs ---


class Hush:
    def text(self, piece: str) -> None: ...

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None: ...


def prompt(text: str = "hi") -> Prompt:
    return Prompt(
        run_id="run",
        session_key="agent:main:main",
        agent_id="main",
        instructions="",
        messages=[UserMessage(content=text, timestamp=1)],
    )


def settings(tmp_path: Path, url: str) -> Config:
    """One model, whose key comes from a program that leaves a mark whenever it is asked."""
    asked = ["/bin/sh", "-c", f"echo . >> {tmp_path}/asked; cat {tmp_path}/key"]
    provider = {
        "baseUrl": url,
        "apiKey": {"exec": asked},
        "api": "openai-completions",
        "models": [{"id": "m"}],
    }
    config, _ = parse({"models": {"providers": {"local": provider}}})
    return config


def asked(tmp_path: Path) -> int:
    return len((tmp_path / "asked").read_text().split())


@asynccontextmanager
async def catalog_of(tmp_path: Path, url: str) -> AsyncGenerator[RuntimeRegistry]:
    (tmp_path / "key").write_text("old")
    async with asyncio.timeout(BOUND), aclosing(RuntimeRegistry(settings(tmp_path, url))) as catalog:
        yield catalog


async def model_of(catalog: RuntimeRegistry) -> ModelRuntime:
    runtime = await catalog.get_runtime("main", None)
    assert isinstance(runtime, ModelRuntime)
    return runtime


@pytest.mark.requirement("C")
@pytest.mark.parametrize(
    "refusal",
    [
        Failure(status=401, body={"error": {"message": "expired"}}),
        Failure(status=400, body={"error": {"message": "no", "code": "invalid_api_key"}}),
    ],
)
async def test_after_refused_credentials_the_next_run_has_those_of_now(
    tmp_path: Path, refusal: Failure
) -> None:
    async with Provider().running() as provider, catalog_of(tmp_path, f"{provider.url}/v1") as catalog:
        old = await model_of(catalog)
        await old.step(prompt(), Hush())
        (tmp_path / "key").write_text("new")
        provider.script(refusal)
        with pytest.raises(ProviderError):
            await old.step(prompt(), Hush())
        found = await asyncio.gather(*(model_of(catalog) for _ in range(5)))
        assert {id(runtime) for runtime in found} == {id(await model_of(catalog))}
        assert asked(tmp_path) == 2, "once each, however many runs begin"
        await found[0].step(prompt(), Hush())
        keys = [request.headers["authorization"] for request in provider.received]
        assert keys == ["Bearer old", "Bearer old", "Bearer new"]


@pytest.mark.requirement("C")
async def test_no_other_failure_asks_for_the_secret_again(tmp_path: Path) -> None:
    async with Provider().running() as provider, catalog_of(tmp_path, f"{provider.url}/v1") as catalog:
        runtime = await model_of(catalog)
        provider.script(Failure(status=400, body={"error": {"message": "no such parameter"}}))
        with pytest.raises(ProviderError):
            await runtime.step(prompt(), Hush())
        assert await model_of(catalog) is runtime
        assert asked(tmp_path) == 1


class Scripted:
    """A reader that is refused, or answers when it is told to."""

    def __init__(self, spec: ModelSpec, reading: asyncio.Event) -> None:
        self.spec = spec
        self.closed = False
        self.reading, self.go_on = reading, asyncio.Event()

    async def read(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        assert not self.closed
        if prompt.messages[0] == UserMessage(content="refuse", timestamp=1):
            raise build_provider_error(self.spec, "credentials", status=401)
        self.reading.set()
        await self.go_on.wait()
        assert not self.closed
        return AssistantMessage(content=[TextBlock(text="ok")], timestamp=1, stop_reason="stop")

    async def close(self) -> None:
        self.closed = True


async def test_a_connection_with_old_credentials_is_closed_also_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Scripted] = []
    reading = asyncio.Event()

    def open_reader(spec: ModelSpec, *_: Any) -> Scripted:
        opened.append(Scripted(spec, reading))
        return opened[-1]

    monkeypatch.setattr("antiphon.runtimes.model.open_reader", open_reader)
    async with catalog_of(tmp_path, "http://127.0.0.1:9/v1") as catalog:
        old = await model_of(catalog)
        slow = asyncio.create_task(old.step(prompt("slow"), Hush()))
        await reading.wait()
        with pytest.raises(ProviderError):
            await old.step(prompt("refuse"), Hush())
        assert not opened[0].closed
        opened[0].go_on.set()
        await slow
        assert opened[0].closed
        # A run that has it from before may take another step.
        with pytest.raises(ProviderError):
            await old.step(prompt("refuse"), Hush())
        new = await model_of(catalog)
        assert new is not old
        with pytest.raises(ProviderError):
            await old.step(prompt("refuse"), Hush())
        assert await model_of(catalog) is new, "the old one's troubles are not those of the new one"
        assert all(reader.closed for reader in opened) and len(opened) == 3


# --- libraries ---

STARTED_GATEWAY = """
import asyncio, json, sys, threading
from pathlib import Path
from antiphon.config import parse
from antiphon.gateway.server import serve_gateway
from antiphon.runtimes.registry import PRELOAD_THREAD_NAME

async def start() -> None:
    config, _ = parse(json.loads(sys.argv[1]))
    async with serve_gateway(config, Path(sys.argv[2]), port=0):
        for thread in threading.enumerate():
            if thread.name == PRELOAD_THREAD_NAME:
                await asyncio.to_thread(thread.join)
        print(json.dumps([name for name in ("pydantic_ai.models", "anthropic") if name in sys.modules]))

asyncio.run(start())
"""


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("api", "imported"),
    [("anthropic-messages", ["pydantic_ai.models", "anthropic"]), ("openai-completions", [])],
)
def test_a_started_gateway_imports_the_libraries_before_the_first_run_needs_them(
    tmp_path: Path, api: str, imported: list[str]
) -> None:
    """A run's time is counted from when it is accepted, and the first import takes seconds."""
    key = {"exec": ["/bin/false"]}  # secrets are not read meanwhile
    provider = {"baseUrl": "http://127.0.0.1:9/v1", "api": api, "apiKey": key, "models": [{"id": "m"}]}
    config = json.dumps({"models": {"providers": {"p": provider}}})
    done = subprocess.run(
        [sys.executable, "-c", STARTED_GATEWAY, config, str(tmp_path)],
        capture_output=True, text=True, timeout=3 * BOUND, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout and json.loads(done.stdout)) == (0, imported), done.stderr
