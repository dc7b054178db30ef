"""What the demo shows: its agents, what a person writes to them, and what the rehearsal model answers.

The rehearsal model follows instructions in a message, and each answer passes on the instructions for the next.
"""

from __future__ import annotations

import re
from json import dumps
from typing import Any, NamedTuple

PERSON_NAME, MAIN_SESSION_KEY, HELPER_SESSION_KEY = "you", "agent:main:main", "agent:helper:main"
_SCRIPT_LINE_PATTERN = re.compile(r"(?:say|slow|call|announce)\b")
_REHEARSAL_NOTE = (
    "The built-in rehearsal model answers, without a key or a network. It understands nothing, so each message also "
    "carries the answers to come; they are left out below (--json has them)."
)


class DemoScene(NamedTuple):
    title: str
    message: str
    ends: frozenset[str]
    """What must have ended before the next scene begins."""


class DemoStory(NamedTuple):
    config: dict[str, Any]
    names_by_session_key: dict[str, str]
    introduction: str
    scenes: tuple[DemoScene, ...]
    next_steps: tuple[tuple[str, str], ...]
    written_file: str | None = None
    """A file that a sub-agent leaves in its workspace; the state directory is kept for it."""


def strip_script_lines(text: str) -> str:
    """Remove the instructions for the rehearsal model."""
    return "\n".join(line for line in text.splitlines() if not _SCRIPT_LINE_PATTERN.match(line))


_ASK_SCRIPT = """\
When does the ferry leave?
say At 12:40, from pier 2.
say say That is too early for us. Is there a later one?
say say say Yes, at 15:10. Shall I hold two seats?
say say say say Yes, please.
announce I am holding two seats on the 15:10 ferry."""
_WIND_SCRIPT = """\
How strong is the wind at 15:10?
slow 0.3 A light breeze from the south-west."""

_TALK_STORY = DemoStory(
    config={
        "agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]},
        "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
    },
    names_by_session_key={MAIN_SESSION_KEY: "main", HELPER_SESSION_KEY: "helper"},
    introduction="Two agents, main and helper; you write to main. "
    f"{_REHEARSAL_NOTE} The sessions, tools, turns and deliveries are real.",
    scenes=(
        DemoScene(
            "An agent asks another one",
            f"Can we take the ferry today?\n"
            f"call sessions_list {{}}\n"
            f"call sessions_send {dumps({'sessionKey': HELPER_SESSION_KEY, 'message': _ASK_SCRIPT})}\n"
            f"say There is one at 12:40. I am asking for a later one.",
            frozenset({"announce"}),
        ),
        DemoScene(
            "An agent spawns a sub-agent",
            f"Will the sea be calm?\n"
            f"call sessions_spawn {dumps({'task': _WIND_SCRIPT, 'label': 'scout'})}\n"
            f"call sessions_yield {dumps({'message': 'A scout is finding out.'})}",
            frozenset({"task", "wake"}),
        ),
    ),
    next_steps=(
        ("antiphon demo work", "a sub-agent that reads, runs a command and writes"),
        ("antiphon up", "run the gateway, for yourself and your agents"),
        ("antiphon chat", "talk with an agent, in another terminal"),
        ("docs/tools.md", "what agents can do with each other's sessions"),
        ("docs/configuration.md", "how to use a real model"),
    ),
)

_SALES_CSV = "date,fruit\n06-01,pear\n06-01,plum\n06-02,plum\n06-03,apple\n06-03,plum\n06-04,pear\n"
_SALES_SUMMARY = "# Sales\n\nThe plum sold best: 3 of 6. Then the pear (2) and the apple (1).\n"
_COUNT_COMMAND = "cd {attachments}; tail -n +2 sales.csv | cut -d, -f2 | sort | uniq -c | sort -rn"
_COUNT_SCRIPT = f"""\
Which fruit sold best? Write a summary.
call read {dumps({"path": "{attachments}/sales.csv"})}
call exec {dumps({"command": _COUNT_COMMAND})}
call write {dumps({"path": "summary.md", "content": _SALES_SUMMARY})}
slow 0.3 The plum sold best. I wrote summary.md."""
_WORK_STORY = DemoStory(
    config={"agents": {"list": [{"id": "main", "default": True}]}},
    names_by_session_key={MAIN_SESSION_KEY: "main"},
    introduction="One agent, main, to which you write. It gives a file to a sub-agent. "
    f"{_REHEARSAL_NOTE} The files, the command and its sandbox are real.",
    scenes=(
        DemoScene(
            "A sub-agent reads, runs a command and writes",
            "What do our sales say?\n"
            + "call sessions_spawn "
            + dumps(
                {
                    "task": _COUNT_SCRIPT,
                    "label": "clerk",
                    "attachments": [{"name": "sales.csv", "content": _SALES_CSV}],
                }
            )
            + "\ncall sessions_yield "
            + dumps({"message": "A clerk is counting."}),
            frozenset({"task", "wake"}),
        ),
    ),
    next_steps=(
        ("antiphon chat", "talk with an agent, after `antiphon up`"),
        ("docs/tools.md", "what agents can do"),
        ("docs/sandbox.md", "what a command can and cannot reach"),
    ),
    written_file="summary.md",
)

STORIES_BY_NAME = {"talk": _TALK_STORY, "work": _WORK_STORY}
