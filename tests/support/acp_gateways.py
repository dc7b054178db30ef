"""What tests ask of a real `antiphon up` whose agent `coder` is a program."""

from __future__ import annotations

from typing import Any

from antiphon.client import Client
from support.acp_agents import BOUND, CODER


async def send(client: Client, text: str, key: str) -> str:
    sent = await client.call("chat.send", {"sessionKey": CODER, "message": text, "idempotencyKey": key})
    return sent["runId"]


async def wait_for_end(client: Client, run_id: str) -> dict[str, Any]:
    return await client.call(
        "agent.wait", {"runId": run_id, "timeoutMs": int(BOUND * 1000)}, seconds=BOUND + 5
    )


async def reply(client: Client, text: str, key: str) -> str:
    """Return the answer of the program, the last of its texts."""
    ended = await wait_for_end(client, await send(client, text, key))
    assert ended["status"] == "ok", ended
    found = await client.call("sessions.history", {"key": CODER})
    content = found["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]
