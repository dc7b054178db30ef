"""Spans, seen by a real SDK in a process of its own: a provider is set once and for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from antiphon import tracing
from antiphon.errors import ConfigError

WATCHED = """
import asyncio, json, sys
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from antiphon.engine.toolbox import ToolRequest, ToolOutput, Tool
from antiphon.runtimes import ToolSpec
from antiphon.tracing import start_span
from antiphon.config import Config
from antiphon.app import open_app_operations
from antiphon.access import Caller
from antiphon.operations.types import (IncomingMessage)

seen = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(seen))
trace.set_tracer_provider(provider)

async def invoke(call: ToolRequest) -> ToolOutput:
    return ToolOutput(text="done")

tool = Tool(spec=ToolSpec(name="look", description="Looks.", parameters={"type": "object"}), invoke=invoke)

async def main() -> None:
    async with open_app_operations(Config(), Path(sys.argv[1]), tools=lambda operations: [tool]) as operations:
        caller = Caller.operator()
        message = IncomingMessage(session="main", content="call look {}", idempotency_key="r1")
        await operations.messages.submit(caller, message)
        await operations.runs.wait(caller, "r1", 20)
    with start_span("request", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", method="health"):
        pass

asyncio.run(main())
print(json.dumps([
    {"name": s.name, "trace": f"{s.context.trace_id:032x}", "parent": s.parent and f"{s.parent.span_id:016x}",
     "id": f"{s.context.span_id:016x}", "attributes": dict(s.attributes)}
    for s in seen.get_finished_spans()
]))
"""


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("state")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder / "s")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "HOME": str(folder)},
    )
    return json.loads(done.stdout)


def test_a_run_has_a_span_with_its_steps_and_tools_below_it(spans: list[dict[str, Any]]) -> None:
    [run] = [span for span in spans if span["name"] == "antiphon.run"]
    assert run["attributes"] == {
        "antiphon.run_id": "r1",
        "antiphon.session_key": "agent:main:main",
        "antiphon.agent_id": "main",
    }
    below = [span["name"] for span in spans if span["parent"] == run["id"]]
    assert below == ["antiphon.model_step", "antiphon.tool", "antiphon.model_step"]


def test_a_request_goes_on_with_the_trace_it_came_with(spans: list[dict[str, Any]]) -> None:
    [request] = [span for span in spans if span["name"] == "antiphon.request"]
    assert (request["trace"], request["parent"]) == ("a" * 32, "b" * 16)


def test_without_a_collector_there_are_no_spans() -> None:
    with tracing.start_span("run", run_id="r") as current:
        assert current is None
    assert tracing.configure_export({}) is False


def test_a_library_that_is_being_imported_is_not_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", types.ModuleType("opentelemetry.trace"))
    with tracing.start_span("run", run_id="r") as current:
        assert current is None


def test_a_missing_extra_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="extra otel`"):
        tracing.configure_export({tracing.ENDPOINT_VARIABLE: "http://127.0.0.1:1"})
