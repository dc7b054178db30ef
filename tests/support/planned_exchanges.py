"""Planned sends and spawns with their expected outcomes, as data like `scenario`.

The rehearsal model answers with what follows `say`, so each `say` before a text passes it on for one more turn; a text
without `say` ends the conversation with REPLY_SKIP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

HELPER = "agent:helper:main"
KEYED, UNKEYED = "keyed", "unkeyed"  # external channels; the first one honours keys
ATTEMPTS = ".attempts"  # suffix of the file with attempted posts
POSTING, POSTED = "posting", "posted"  # points between claiming a delivery and settling it
TURNS = 5  # reply-back turns in the configuration
SKIP = "REPLY_SKIP"
WOKEN = "Their reports are in."  # answer of the rehearsal model when it is woken
YIELDED = "Turn yielded."

Ending = Literal["ok", "skip", "fail", "nothing"]


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """A `sessions_send`."""

    to: str
    message: str
    wait: bool
    replies: tuple[str, ...]
    """Replies of the target, the requester, and so on in turn. Empty if the target failed."""
    announced: str
    """Expected outcome of the announcement."""
    body: str | None
    """Text posted in the target's chat, if any."""
    key: str | None = None
    """Idempotency key."""

    @property
    def call(self) -> str:
        arguments: dict[str, Any] = {
            "sessionKey": self.to,
            "message": self.message,
            "timeoutSeconds": 20 if self.wait else 0,
        }
        if self.announced == "none":
            arguments["announce"] = "none"
        if self.key is not None:
            arguments["idempotencyKey"] = self.key
        return f"call sessions_send {json.dumps(arguments)}"

    @property
    def status(self) -> str:
        if not self.wait:
            return "accepted"
        return "ok" if self.replies else "error"


def plan_send(
    key: str, *, says: int, wait: bool, announced: str = "delivered", to: str = HELPER
) -> PlannedSend:
    """Plan a send whose text is passed on `says - 1` times; with 0 the target fails."""
    if says == 0:
        return PlannedSend(to, f"fail {key}", wait, (), "run_failed", None)
    words = f"wörtlich  {key} ✓"
    replies = [f"{'say ' * left}{words}" for left in reversed(range(says))][: TURNS + 1]
    if says <= TURNS:
        replies.append(SKIP)
    body = f"announced {key}" if announced == "delivered" else None
    wish = {"delivered": f"\nannounce {body}", "skipped": "\nannounce ANNOUNCE_SKIP"}.get(announced, "")
    return PlannedSend(to, f"{'say ' * says}{words}{wish}", wait, tuple(replies), announced, body)


def plan_announced_send(key: str, channel: str) -> PlannedSend:
    """Plan a send to a group on an external channel."""
    return plan_send(key, says=1, wait=True, to=f"agent:helper:{channel}:group:room")


@dataclass(frozen=True, slots=True)
class PlannedSpawn:
    """A `sessions_spawn`."""

    task: str
    agent: str
    announce: str
    cleanup: str
    outcome: str
    result: str | None
    """For a sub-agent that is woken, its answer then."""
    announced: str
    """Expected outcome of the announcement."""
    body: str | None
    """Beginning of the report, if any."""
    spawns: tuple[PlannedSpawn, ...] = ()
    wakes: int = 0

    @property
    def call(self) -> str:
        arguments = {
            "task": self.task,
            "agentId": self.agent,
            "announce": self.announce,
            "cleanup": self.cleanup,
        }
        return f"call sessions_spawn {json.dumps(arguments)}"


_ENDINGS: dict[Ending, tuple[str, str, str | None, str | None]] = {
    # Script, outcome, result, and beginning of the report of the task.
    "ok": (
        "say result {key}\nannounce worded {key}",
        "ok",
        "result {key}",
        "Status: ok\nResult: worded {key}",
    ),
    "skip": ("say result {key}\nannounce ANNOUNCE_SKIP", "ok", "result {key}", None),
    "fail": ("fail {key}", "error", None, "Status: error\nResult: none\nNotes: "),
    "nothing": ("think {key}\nsay", "incomplete", None, "Status: incomplete\nResult: none\nNotes: "),
}


def plan_spawn(
    key: str, *, ending: Ending = "ok", announce: str = "channel", cleanup: str = "keep", agent: str = "main"
) -> PlannedSpawn:
    task, outcome, result, body = (text and text.format(key=key) for text in _ENDINGS[ending])
    assert task and outcome
    announced = {"channel": "delivered", "parent": "parent", "none": "none"}[announce]
    if announced == "none" or body is None:
        announced, body = "skipped" if body is None else "none", None
    return PlannedSpawn(task, agent, announce, cleanup, outcome, result, announced, body)


def plan_nested_spawn(key: str, announce: str = "channel") -> PlannedSpawn:
    """Plan a sub-agent that waits for its own sub-agent."""
    below = plan_spawn(f"{key}-below", announce=announce)
    task = f"{below.call}\ncall sessions_yield {{}}\nannounce above {key}"
    body = f"Status: ok\nResult: above {key}"
    return PlannedSpawn(task, "main", "channel", "keep", "ok", None, "delivered", body, (below,), wakes=1)
