"""The official `openai` client on /v1."""

from __future__ import annotations

from collections.abc import Generator

import openai
import pytest

from support.interop_processes import BOUND, Gateway, Openclaw

pytestmark = pytest.mark.requirement("W6")

MODEL = "openclaw"


@pytest.fixture
def client(gateway: Gateway) -> Generator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.http}/v1", api_key=gateway.token, timeout=BOUND, max_retries=0
    ) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    ids = [model.id for model in client.models.list()]
    assert "antiphon/main" in ids


def test_chat_completions(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say good morning"}]
    )
    assert [choice.message.content for choice in done.choices] == ["good morning"]
    assert done.choices[0].finish_reason == "stop"
    assert done.object == "chat.completion"


def test_chat_completions_streamed(client: openai.OpenAI) -> None:
    parts = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "slow 1 one word at a time"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = [choice.delta.content for part in parts for choice in part.choices if choice.delta.content]
    assert "".join(said) == "one word at a time"
    assert len(said) > 1, "an answer that takes a second comes in parts"
    assert [c.finish_reason for part in parts for c in part.choices if c.finish_reason] == ["stop"]
    assert len({part.id for part in parts}) == 1
    assert parts[-1].usage is not None


def test_a_user_is_a_session(client: openai.OpenAI, gateway: Gateway, openclaw: Openclaw) -> None:
    for text in ("say one", "say two"):
        client.chat.completions.create(model=MODEL, user="lab", messages=[{"role": "user", "content": text}])
    history = openclaw.call(gateway, "chat.history", {"sessionKey": "agent:main:openai-user:lab"}).json
    assert [message["role"] for message in history["messages"]] == ["user", "assistant"] * 2


def test_responses(client: openai.OpenAI) -> None:
    done = client.responses.create(model=MODEL, input="say good evening")
    assert (done.status, done.output_text) == ("completed", "good evening")
    assert done.usage is not None


def test_responses_streamed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="slow 1 one word at a time", stream=True))
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == "one word at a time"
    assert len(said) > 1, "an answer that takes a second comes in parts"
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "one word at a time"


def test_a_wrong_key_is_refused(gateway: Gateway) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_an_unknown_agent_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        client.chat.completions.create(
            model="openclaw/nobody", messages=[{"role": "user", "content": "say hello"}]
        )
