"""What a provider calls its model reaches people, rows and exports: only if it is nothing but a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.app import open_app_operations
from antiphon.config import Config, parse
from antiphon.operations.types import IncomingMessage
from support.app_fixture import BOUND, DATABASE, MAIN, OPERATOR
from support.databases import dump_database, query_database
from support.model_provider import Answer, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G29")]


def settings(url: str) -> Config:
    """A window so small that a second message is preceded by a summary, which is an answer as well."""
    model = {"id": "gpt-5", "contextWindow": 4000}
    openai = {"baseUrl": f"{url}/v1", "apiKey": "of-this-test", "models": [model]}
    agents = {"defaults": {"compaction": {"keepRecentTokens": 50}}}
    return parse({"models": {"providers": {"openai": openai}}, "agents": agents})[0]


@pytest.mark.parametrize(
    ("reported", "kept"),
    [
        ("gpt-5-2026-08-07", "gpt-5-2026-08-07"),
        ("NO_REPLY", "gpt-5"),
        ("vendor/Reply_Skip-1", "gpt-5"),
        ("announce_skip", "gpt-5"),
        ("agent:main:telegram:direct:49151", "gpt-5"),
        ("see-AGENT:helper:main", "gpt-5"),
        ("sk-proj-abcdefghijkl1234", "gpt-5"),
        ("m/ghp_abcdefghijklmnop", "gpt-5"),
    ],
)
async def test_what_is_more_than_a_name_gives_way_to_the_configured_one(
    tmp_path: Path, reported: str, kept: str
) -> None:
    async with Provider().running() as provider:
        provider.default = Answer(text=("fine",), model=reported)
        async with open_app_operations(settings(provider.url), tmp_path) as operations:
            for _ in range(2):
                asked = IncomingMessage(session=MAIN, content="long " * 1200)
                accepted = await operations.messages.submit(OPERATOR, asked)
                assert (await operations.runs.wait(OPERATOR, accepted.run_id, BOUND)).state == "ok"
    assert len(provider.bodies) == 3, "two answers and a summary"
    calls = query_database(tmp_path / DATABASE, "SELECT model FROM usage")
    assert [row["model"] for row in calls] == [kept] * 3
    said = query_database(tmp_path / DATABASE, "SELECT model_answered FROM runs")
    assert {row["model_answered"] for row in said} == {f"openai/{kept}"}
    assert (reported in str(dump_database(tmp_path / DATABASE))) is (reported == kept)
