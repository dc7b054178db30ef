"""What channels cost a gateway that has none, and what a manifest imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from antiphon.channel_manifest import list_channel_names

GATEWAY = """
import asyncio, sys, tempfile
from pathlib import Path
from antiphon.config import Config
from antiphon.gateway.server import serve_gateway

async def main():
    async with serve_gateway(Config(), Path(sys.argv[1]), port=0):
        print(*[name for name in sys.modules if name.startswith("antiphon.")])

asyncio.run(main())
"""


def run(code: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.requirement("N1")
def test_a_gateway_without_channels_imports_none_of_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = run(GATEWAY, str(tmp_path_factory.mktemp("state")))
    assert "antiphon.app" in loaded
    assert not {name for name in loaded if name.startswith("antiphon.channels")}
    assert loaded.isdisjoint(
        {
            "antiphon.operations.inbound",
            "antiphon.operations.command_runner",
            "antiphon.engine.inbound.admission",
        }
    )


@pytest.mark.requirement("N1")
@pytest.mark.parametrize("name", list_channel_names())
def test_a_manifest_imports_nothing_of_its_channel_and_no_library(name: str) -> None:
    code = f"import sys\nimport antiphon.channels.{name}.manifest\nprint(*sys.modules)"
    loaded = run(code)
    assert loaded.isdisjoint({"pydantic", "httpx2", "antiphon.config"})
    ours = {module for module in loaded if module.startswith(f"antiphon.channels.{name}")}
    assert ours == {f"antiphon.channels.{name}", f"antiphon.channels.{name}.manifest"}
