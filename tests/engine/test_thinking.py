"""How much a model is asked to think: as the run says, else its session, else its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.config import Config, parse
from antiphon.host import hosting
from antiphon.operations import Message, Patch
from providers import Provider
from stage import BOUND, MAIN, OPERATOR

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("C")]
HELPER = "agent:helper:main"


def settings(url: str) -> Config:
    openai = {"baseUrl": f"{url}/v1", "apiKey": "k", "models": [{"id": "gpt-5"}]}
    agents = {
        "defaults": {"thinkingDefault": "low"},
        "list": [{"id": "main"}, {"id": "helper", "thinkingDefault": "high"}],
    }
    return parse({"models": {"providers": {"openai": openai}}, "agents": agents})[0]


@pytest.mark.parametrize(
    ("session", "own", "said", "sent"),
    [
        (MAIN, None, None, "low"),
        (HELPER, None, None, "high"),
        (HELPER, "medium", None, "medium"),
        (HELPER, "medium", "low", "low"),
        (HELPER, None, "low", "low"),
        (HELPER, "off", None, "minimal"),  # the least that this model can
    ],
)
async def test_the_nearest_level_is_what_the_provider_is_asked_for(
    tmp_path: Path, session: str, own: str | None, said: str | None, sent: str
) -> None:
    async with Provider().running() as provider, hosting(settings(provider.url), tmp_path) as operations:
        await operations.create(OPERATOR, session=session)
        await operations.patch(OPERATOR, session, Patch(thinking_level=own))
        accepted = await operations.submit(OPERATOR, Message(session=session, content="hi", thinking=said))
        assert (await operations.wait(OPERATOR, accepted.run_id, BOUND)).state == "ok"
    assert [body.get("reasoning_effort") for body in provider.bodies] == [sent]
