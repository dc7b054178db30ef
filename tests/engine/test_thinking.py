"""How much a model is asked to think: as the run says, else its session, else its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.app import open_app_operations
from antiphon.config import Config, parse
from antiphon.operations.types import IncomingMessage, SessionPatch
from support.app_fixture import BOUND, MAIN, OPERATOR
from support.model_provider import Provider

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
    async with (
        Provider().running() as provider,
        open_app_operations(settings(provider.url), tmp_path) as operations,
    ):
        await operations.sessions.create(OPERATOR, session=session)
        await operations.sessions.patch(OPERATOR, session, SessionPatch(thinking_level=own))
        accepted = await operations.messages.submit(
            OPERATOR, IncomingMessage(session=session, content="hi", thinking=said)
        )
        assert (await operations.runs.wait(OPERATOR, accepted.run_id, BOUND)).state == "ok"
    assert [body.get("reasoning_effort") for body in provider.bodies] == [sent]
