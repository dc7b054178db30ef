"""What ends commands besides themselves, and what is never started again."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from antiphon.access import Caller
from antiphon.config import parse
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import ConfigError
from antiphon.workspace.keeper import server
from support.agents_fixture import AgentsFixture
from support.app_fixture import MAIN
from support.keepers import find_marked, wait_until_gone, wait_until_true
from tools.test_commands import configure, find_rows, find_wakes, opened, run

pytestmark = pytest.mark.anyio

EXPIRY_BOUND_SECONDS = 10 * server.SWEEP_SECONDS
RUN_TIMEOUTS_SECONDS = (2, 10, 40)  # the first in which the command begins on a busy machine


@pytest.mark.requirement("AT2", "AT4")
@pytest.mark.parametrize("background", [False, True])
async def test_a_run_that_times_out_ends_its_commands(tmp_path: Path, background: bool) -> None:
    began = tmp_path / "began"
    command = f"setsid sleep 5511 & touch {began}; sleep 5512"
    words = f"call exec {json.dumps({'command': command, 'background': background})}"
    if background:  # the run goes on without it
        words += f"\ncall exec {json.dumps({'command': 'sleep 5513'})}"
    async with opened(tmp_path) as agents:
        for seconds in RUN_TIMEOUTS_SECONDS:
            view = await agents.ask(words, timeout_seconds=seconds)
            assert view.state == "timeout"
            if began.exists():
                break
        assert began.exists()
        await wait_until_gone("sleep 551")

        async def is_over() -> bool:
            return all(row["ended_at"] for row in find_rows(agents))

        await agents.until(is_over)
        await agents.wait_until_idle()
        assert {row["stop_reason"] for row in find_rows(agents)} == {"timeout"}
        assert find_wakes(agents) == []
        assert not find_marked("sleep 551")


async def call_once_more(agents: AgentsFixture, command: str) -> ToolOutput:
    """Call `exec` as the same call of the same run does when it is repeated."""
    caller = Caller.agent("main", MAIN)
    call = ToolRequest(caller=caller, run_id="a run", call_id="c1", arguments={"command": command})
    return await agents.app.toolbox.tools["exec"].invoke(call)


@pytest.mark.requirement("AT20")
async def test_a_call_whose_output_has_expired_is_not_started_again(tmp_path: Path) -> None:
    jobs = tmp_path / "keeper" / server.JOBS_NAME
    command = f"echo once >> {tmp_path / 'effect'}; echo done"

    async def has_expired() -> bool:
        return not await asyncio.to_thread(lambda: list(jobs.iterdir()))

    async with opened(tmp_path, configure(cleanupMs=0)) as agents:
        await agents.open_sessions(MAIN)
        first = await call_once_more(agents, command)
        assert first.text.endswith("done\n")
        await wait_until_true(has_expired, EXPIRY_BOUND_SECONDS)
        assert await call_once_more(agents, command) == first
    shutil.rmtree(tmp_path / "keeper")
    async with opened(tmp_path, configure(cleanupMs=0)) as agents:
        assert (await call_once_more(agents, command)).text == first.text
        assert (tmp_path / "effect").read_text() == "once\n"


@pytest.mark.sqlite_only
@pytest.mark.requirement("T6")
@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"tools": {"exec": {"host": "gateway"}}}, "tools.exec"),
        (
            {"agents": {"list": [{"id": "a", "tools": {"exec": {"host": "gateway"}}}]}},
            "agents.list[0].tools.exec",
        ),
    ],
)
def test_this_machine_needs_an_explicit_policy(settings: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}.security".replace("[", r"\[")) as refused:
        parse(settings)
    assert "without protection" in str(refused.value)


@pytest.mark.sqlite_only
@pytest.mark.requirement("AT5")
async def test_the_outputs_of_all_commands_are_bounded_as_configured(tmp_path: Path) -> None:
    most = 16 * 1024 * 1024
    jobs = tmp_path / "keeper" / server.JOBS_NAME

    def measure_kept() -> int:
        return sum(part.stat().st_size for part in jobs.glob("*/output.*"))

    async with opened(tmp_path, configure(maxTotalOutputBytes=most)) as agents:
        for _ in range(3):
            text = await run(agents, "echo first; head -c 9000000 /dev/zero | tr '\\0' x; echo; echo last")
            assert "first\n" in text
            assert "\nlast\n" in text
            assert 9_000_000 < measure_kept() <= most
        files = [row["output_file"] for row in find_rows(agents)]
        workspace = tmp_path / "workspaces" / "main"
        assert [(workspace / name).stat().st_size > 9_000_000 for name in files] == [True] * 3


def test_the_bound_of_all_outputs_is_not_for_one_agent() -> None:
    with pytest.raises(ConfigError, match="maxTotalOutputBytes"):
        parse({"agents": {"list": [{"id": "a", "tools": {"exec": {"maxTotalOutputBytes": 2**30}}}]}})
    with pytest.raises(ConfigError, match="maxTotalOutputBytes"):
        parse({"tools": {"exec": {"maxTotalOutputBytes": 1024}}})
