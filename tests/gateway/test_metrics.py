"""Figures of the whole: what the rows say of every replica, and what is told when they cannot be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon import __version__
from antiphon.access import Caller
from antiphon.errors import Forbidden, StoreError
from antiphon.operations.types import IncomingMessage, SystemStatus
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR
from support.gateway_http import HttpGatewayFixture, open_http_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]


async def figures(http_gateway: HttpGatewayFixture) -> dict[str, float]:
    text = (await http_gateway.http.get("/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_an_idle_gateway_says_that_all_is_well(http_gateway: HttpGatewayFixture) -> None:
    told = await figures(http_gateway)
    assert told[f'antiphon_build_info{{version="{__version__}"}}'] == 1
    assert told["antiphon_bus_connected"] == told["antiphon_store_up"] == told["antiphon_replicas"] == 1
    assert 0 < told["antiphon_store_answer_seconds"] < BOUND
    assert told["antiphon_store_idle_seconds"] == 0
    for state in ("queued", "running", "abandoned"):
        assert told[f'antiphon_store_runs{{state="{state}"}}'] == 0
    for state in ("pending", "ambiguous", "dead", "expired"):
        assert told[f'antiphon_store_deliveries{{state="{state}"}}'] == 0


async def test_what_waits_and_what_runs_is_counted_in_the_rows(tmp_path: Path) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(prompt: Prompt) -> str:
        started.set()
        await go_on.wait()
        return "done"

    async with open_http_gateway(tmp_path, slow) as http_gateway:
        message = IncomingMessage(session=MAIN, content="go")
        accepted = [await http_gateway.app.operations.messages.submit(OPERATOR, message) for _ in range(3)]
        async with asyncio.timeout(BOUND):
            await started.wait()
        told = await figures(http_gateway)
        assert told['antiphon_store_runs{state="running"}'] == 1
        assert told['antiphon_store_runs{state="queued"}'] == 2
        # They wait for their turn in the session, not for a replica.
        assert told["antiphon_store_idle_seconds"] == 0
        go_on.set()
        await http_gateway.app.operations.runs.wait(OPERATOR, accepted[-1].run_id, BOUND)
        assert (await figures(http_gateway))["antiphon_run_start_seconds_count"] == 3


async def test_a_store_that_does_not_answer_is_told_and_nothing_is_invented(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(*_: object) -> SystemStatus:
        raise StoreError("The database cannot be reached.", "Start it.")

    monkeypatch.setattr(http_gateway.app.operations.status, "get", away)
    told = await figures(http_gateway)
    assert told["antiphon_store_up"] == 0
    assert not [name for name in told if name.startswith(("antiphon_replicas", "antiphon_store_runs"))]
    assert "The database cannot be reached." in caplog.text


async def test_one_answer_serves_all_who_ask_in_the_same_moment(
    http_gateway: HttpGatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    ask = http_gateway.app.operations.status.get

    async def counted(caller: Caller) -> SystemStatus:
        nonlocal asked
        asked += 1
        return await ask(caller)

    monkeypatch.setattr(http_gateway.app.operations.status, "get", counted)
    await asyncio.gather(*(figures(http_gateway) for _ in range(5)))
    assert asked == 1


async def test_agents_do_not_see_the_whole(http_gateway: HttpGatewayFixture) -> None:
    with pytest.raises(Forbidden):
        await http_gateway.app.operations.status.get(Caller.agent("main", MAIN))
