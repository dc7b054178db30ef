"""An idempotency key stands for one effect: a repeated request returns what was done, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.app_fixture import OPERATOR
from support.gateway_ws import Client, GatewayFixture, open_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("S9", "W2")]

SIDE, OTHER = "agent:main:dashboard:side", "agent:main:dashboard:other"
JOB: dict[str, Any] = {
    "name": "nightly",
    "schedule": {"kind": "cron", "expr": "0 3 * * *", "tz": "UTC"},
    "payload": {"kind": "agentTurn", "message": "good night"},
    "sessionTarget": "isolated",
}
FILLED = 6  # entries that are in a session before a test begins


async def fill(gateway: GatewayFixture, session: str = SIDE) -> None:
    await gateway.operations.sessions.open(OPERATOR, session)
    for number in range(FILLED):
        await gateway.operations.transcripts.inject(OPERATOR, session, f"{number}")


async def entries(client: Client, session: str = SIDE) -> int:
    return (await client.call("sessions.history", key=session, includeTools=True))["total"]


async def session_id(client: Client, session: str = SIDE) -> str:
    return (await client.call("sessions.describe", key=session))["session"]["sessionId"]


async def refused(client: Client, method: str, **params: Any) -> None:
    error = await client.refused(method, **params)
    assert (error["details"]["type"], error["details"]["field"]) == ("conflict", "idempotencyKey")


async def test_words_are_injected_once(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        asked = {"sessionKey": SIDE, "message": "By the way.", "label": "note", "idempotencyKey": "k"}
        first = await client.call("chat.inject", **asked)
        assert first["messageSeq"] == FILLED + 1
        await client.call("chat.inject", sessionKey=SIDE, message="Something else.")
        assert await client.call("chat.inject", **asked) == first
        assert await entries(client) == FILLED + 2
        await refused(client, "chat.inject", **{**asked, "message": "Other words."})
        await gateway.operations.sessions.open(OPERATOR, OTHER)
        await refused(client, "chat.inject", **{**asked, "sessionKey": OTHER})


async def test_a_conversation_is_shortened_once(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        asked = {"key": SIDE, "maxLines": 2, "idempotencyKey": "k"}
        first = await client.call("sessions.compact", **asked)
        assert (first["compacted"], first["kept"]) == (True, 2)
        await fill(gateway)
        before = await entries(client)
        assert await client.call("sessions.compact", **asked) == first
        assert await entries(client) == before
        await refused(client, "sessions.compact", **{**asked, "maxLines": 3})


async def test_a_session_is_reset_once(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        seen = await session_id(client)
        asked = {"key": SIDE, "idempotencyKey": "k", "expectedSessionId": seen}
        first = await client.call("sessions.reset", **asked)
        assert first["entry"]["sessionId"] != seen
        await fill(gateway)
        again = await client.call("sessions.reset", **asked)
        assert again["entry"]["sessionId"] == first["entry"]["sessionId"] == await session_id(client)
        assert await entries(client) == FILLED
        await refused(client, "sessions.reset", key=SIDE, reason="new", idempotencyKey="k")
        await gateway.operations.sessions.open(OPERATOR, OTHER)
        await refused(client, "sessions.reset", key=OTHER, idempotencyKey="k")


async def test_a_session_is_deleted_once_even_if_another_has_its_key_later(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        await fill(gateway, OTHER)
        asked = {"key": SIDE, "idempotencyKey": "k", "expectedSessionId": await session_id(client)}
        first = await client.call("sessions.delete", **asked)
        assert first["deleted"] is True
        assert await client.call("sessions.delete", **asked) == first
        await fill(gateway)
        assert await client.call("sessions.delete", **asked) == first
        assert await entries(client) == FILLED
        await refused(client, "sessions.delete", key=OTHER, idempotencyKey="k")
        assert await entries(client, OTHER) == FILLED


async def test_what_was_not_there_can_be_deleted_later_under_the_same_key(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        assert (await client.call("sessions.delete", key=SIDE, idempotencyKey="k"))["deleted"] is False
        await fill(gateway)
        assert (await client.call("sessions.delete", key=SIDE, idempotencyKey="k"))["deleted"] is True


async def test_a_job_is_added_once_even_if_it_is_gone(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        first = await client.call("cron.add", **JOB, idempotencyKey="k")
        assert await client.call("cron.add", **JOB, idempotencyKey="k") == first
        assert (await client.call("cron.list"))["total"] == 1
        await refused(client, "cron.add", **{**JOB, "name": "another"}, idempotencyKey="k")
        await client.call("cron.remove", id=first["id"])
        assert await client.call("cron.add", **JOB, idempotencyKey="k") == first
        assert (await client.call("cron.list"))["total"] == 0
        assert (await client.call("cron.add", **JOB))["id"] != first["id"]


@pytest.mark.requirement("W5")
async def test_a_job_is_run_once(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        job = await client.call("cron.add", **JOB)
        asked = {"id": job["id"], "idempotencyKey": "k"}
        first = await client.call("cron.run", **asked)
        assert first["ran"]
        await client.call("agent.wait", runId=first["runId"])
        payload = {"kind": "agentTurn", "message": "good morning"}
        await client.call("cron.update", id=job["id"], patch={"payload": payload})
        assert await client.call("cron.run", **asked) == first
        assert len((await client.call("cron.runs", id=job["id"]))["entries"]) == 1
        await refused(client, "cron.run", **asked, mode="due")
        other = await client.call("cron.add", **{**JOB, "name": "another"})
        await refused(client, "cron.run", id=other["id"], idempotencyKey="k")


async def test_what_did_not_run_may_run_later_under_the_same_key(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        job = await client.call("cron.add", **JOB)
        not_due = await client.call("cron.run", id=job["id"], mode="due", idempotencyKey="k")
        assert (not_due["ran"], not_due["reason"]) == (False, "not-due")
        assert (await client.call("cron.run", id=job["id"], idempotencyKey="k"))["ran"] is True


async def test_messages_and_commands_share_their_keys(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        said = {"sessionKey": SIDE, "message": "hello"}
        await client.call("chat.send", **said, idempotencyKey="said")
        await client.call("agent.wait", runId="said")
        await client.call("chat.inject", **said, idempotencyKey="injected")
        before = await entries(client)
        await refused(client, "chat.inject", **said, idempotencyKey="said")
        await refused(client, "sessions.reset", key=SIDE, idempotencyKey="said")
        await refused(client, "cron.add", **JOB, idempotencyKey="said")
        await refused(client, "chat.send", **said, idempotencyKey="injected")
        await refused(client, "sessions.steer", key=SIDE, message="hello", idempotencyKey="injected")
        await refused(client, "sessions.reset", key=SIDE, idempotencyKey="injected")
        assert await entries(client) == before


async def test_keys_outlive_the_process(tmp_path: Path) -> None:
    asked = {"sessionKey": SIDE, "message": "By the way.", "idempotencyKey": "injected"}
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        await fill(gateway)
        injected = await client.call("chat.inject", **asked)
        await fill(gateway, OTHER)
        await client.call("sessions.delete", key=OTHER, idempotencyKey="deleted")
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        assert await client.call("chat.inject", **asked) == injected
        assert await entries(client) == FILLED + 1
        await fill(gateway, OTHER)
        assert (await client.call("sessions.delete", key=OTHER, idempotencyKey="deleted"))["deleted"] is True
        assert await entries(client, OTHER) == FILLED


@pytest.mark.parametrize("key", ["cron:mine", "http:mine", "two\nlines"])
async def test_keys_that_are_none_are_refused(gateway: GatewayFixture, key: str) -> None:
    async with gateway.client() as client:
        await fill(gateway)
        for method, params in (
            ("chat.inject", {"sessionKey": SIDE, "message": "hello"}),
            ("sessions.compact", {"key": SIDE}),
            ("sessions.reset", {"key": SIDE}),
            ("sessions.delete", {"key": SIDE}),
            ("cron.add", JOB),
            ("cron.run", {"id": "any"}),
        ):
            error = await client.refused(method, **params, idempotencyKey=key)
            assert (error["code"], error["details"]["field"]) == ("INVALID_REQUEST", "idempotencyKey"), method
