"""What sessions say to each other in a plan, and what must come of it: data, as in `scenario`.

The rehearsal model says what follows `say`, so each `say` in front of the words is one more turn in which they are
passed on; what is not told to say anything ends the conversation with REPLY_SKIP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

HELPER = "agent:helper:main"
KEYED, UNKEYED = "keyed", "unkeyed"  # channels outside; the first one honours keys
ATTEMPTS = ".attempts"  # beside what was posted there: what was to be posted
POSTING, POSTED = "posting", "posted"  # moments between claiming a delivery and settling it
TURNS = 5  # of reply-back, as the configuration has it
SKIP = "REPLY_SKIP"
WOKEN = "Their reports are in."  # what the rehearsal model says when it is woken
YIELDED = "Turn yielded."

Ending = Literal["ok", "skip", "fail", "nothing"]


@dataclass(frozen=True, slots=True)
class PlannedSend:
    """A `sessions_send`."""

    to: str
    message: str
    wait: bool
    replies: tuple[str, ...]
    """What was said in turn: by the target, by the requester, and so on. Empty if the target failed."""
    announced: str
    """How the exchange ends."""
    body: str | None
    """What the target's chat is told, if anything."""
    key: str | None = None
    """Under which it is the same message, however often it is sent."""

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
    """Words that are passed on `says - 1` times; with 0 the target fails."""
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
    """To a group whose chat is outside."""
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
    """Of one that is woken, it is what it says then."""
    announced: str
    """How the task ends."""
    body: str | None
    """How the report begins, if there is one."""
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
    # The task's script, its outcome, its result and the beginning of the report.
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
    """A sub-agent that waits for its own, which reports to its chat or only to itself."""
    below = plan_spawn(f"{key}-below", announce=announce)
    task = f"{below.call}\ncall sessions_yield {{}}\nannounce above {key}"
    body = f"Status: ok\nResult: above {key}"
    return PlannedSpawn(task, "main", "channel", "keep", "ok", None, "delivered", body, (below,), wakes=1)
