"""What the crash suite asks of a process, as data: the worker plays it, the checker knows what must come of it.

Messages are scripts for the rehearsal model, so every run has one right outcome however often its process dies.
What is said between sessions (`Sent`) and what sub-agents do (`Spawned`) is in `talk`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from support.planned_exchanges import (
    HELPER,
    KEYED,
    TURNS,
    UNKEYED,
    PlannedSend,
    PlannedSpawn,
    plan_announced_send,
    plan_nested_spawn,
    plan_send,
    plan_spawn,
)
from support.planned_work import WORK, write_script

TELL = "tell"  # our own kind of tool: settled by its key after a crash
NOTE = "note"  # a foreign one: reported as interrupted after a crash
NOTES = "notes.txt"  # where `note` leaves its mark, in the state directory
WORKING = "working"  # the kind of plans with commands and files
YIELD = "call sessions_yield {}"


@dataclass(frozen=True, slots=True)
class Planned:
    """A message, and what its run must come to."""

    key: str
    session: str
    text: str
    state: str
    steps: int
    """Answers of the model in the transcript, the last one included."""
    sends: tuple[PlannedSend, ...] = ()
    spawns: tuple[PlannedSpawn, ...] = ()
    wakes: int | None = None
    """How often its session is woken by sub-agents; None where others share the session."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A message without its place: its script and what it leads to."""

    text: str
    state: str = "ok"
    steps: int = 1
    sends: tuple[PlannedSend, ...] = ()
    spawns: tuple[PlannedSpawn, ...] = ()
    wakes: int | None = None

    def at(self, key: str, session: str) -> Planned:
        # Who is woken has a session to itself, so that it is known by whom.
        own = session if self.wakes is None else f"agent:main:direct:own-{key}"
        return Planned(key, own, self.text, self.state, self.steps, self.sends, self.spawns, self.wakes)


def _tell(key: str, number: int) -> str:
    arguments = {"session": f"agent:main:direct:told{number % 2}", "text": f"say heard {key} {number}"}
    return f"call {TELL} {json.dumps(arguments)}"


def _note(key: str, number: int) -> str:
    return f"call {NOTE} {json.dumps({'line': f'{key} {number}'})}"


def _said(*lines: str, key: str) -> Shape:
    return Shape("\n".join([*lines, f"say done {key}"]), steps=len(lines) + 1)


def _think(key: str) -> Shape:
    return Shape(f"think hm\nsay done {key}")


def _fail(key: str) -> Shape:
    return Shape(f"{_tell(key, 0)}\nfail {key}", "error", 2)


def _nothing(key: str) -> Shape:
    return Shape(f"{_note(key, 0)}\nsay", "incomplete", 2)


_SHAPES: dict[str, Callable[[str], Shape]] = {
    "say": lambda key: _said(key=key),
    "think": _think,
    "tell": lambda key: _said(_tell(key, 0), key=key),
    "note": lambda key: _said(_note(key, 0), key=key),
    "tell, note": lambda key: _said(_tell(key, 0), _note(key, 1), key=key),
    "tell + note": lambda key: _said(f"{_tell(key, 0)} + {_note(key, 1)}", key=key),
    "note + note + tell": lambda key: _said(f"{_note(key, 0)} + {_note(key, 1)} + {_tell(key, 2)}", key=key),
    "note, tell + tell": lambda key: _said(_note(key, 0), f"{_tell(key, 1)} + {_tell(key, 2)}", key=key),
    "fail": _fail,
    "nothing": _nothing,
}


def _sends(key: str, *sends: PlannedSend) -> Shape:
    return replace(_said(*(sent.call for sent in sends), key=key), sends=sends)


def _spawns(key: str, *spawns: PlannedSpawn, wakes: int | None = None) -> Shape:
    return replace(_said(*(spawned.call for spawned in spawns), key=key), spawns=spawns, wakes=wakes)


def _yields(key: str, *spawns: PlannedSpawn) -> Shape:
    """Ends its turn to be woken: the last answer is the one that the tool ends it with."""
    text = "\n".join([*(spawned.call for spawned in spawns), YIELD])
    return Shape(text, steps=len(spawns) + 2, spawns=spawns, wakes=1)


def _twice(key: str) -> Shape:
    sent = replace(plan_send(key, says=2, wait=True), key=f"key of {key}")
    return _sends(key, sent, sent)


def _spawn_and_send(key: str) -> Shape:
    """The report comes while its requester is busy, and waits."""
    spawned, sent = plan_spawn(key), plan_send(key, says=3, wait=True)
    return replace(_said(spawned.call, sent.call, key=key), sends=(sent,), spawns=(spawned,))


_TALKS: dict[str, Callable[[str], Shape]] = {
    "five turns": lambda key: _sends(key, plan_send(key, says=TURNS + 1, wait=True)),
    "five turns, no wait": lambda key: _sends(key, plan_send(key, says=TURNS + 1, wait=False)),
    "two turns": lambda key: _sends(key, plan_send(key, says=2, wait=True)),
    "no announce": lambda key: _sends(key, plan_send(key, says=1, wait=False, announced="none")),
    "skipped": lambda key: _sends(key, plan_send(key, says=3, wait=False, announced="skipped")),
    "no reply": lambda key: _sends(key, plan_send(key, says=0, wait=True)),
    "two sends": lambda key: _sends(
        key, plan_send(key, says=1, wait=False), plan_send(f"{key}b", says=2, wait=True)
    ),
    "the same twice": _twice,
    "spawn": lambda key: _spawns(key, plan_spawn(key)),
    "spawn two": lambda key: _spawns(
        key, plan_spawn(key), plan_spawn(f"{key}b", agent="helper", ending="fail")
    ),
    "spawn, send": _spawn_and_send,
    "spawn, skip": lambda key: _spawns(key, plan_spawn(key, ending="skip")),
    "spawn, fail": lambda key: _spawns(key, plan_spawn(key, ending="fail")),
    "spawn, nothing": lambda key: _spawns(key, plan_spawn(key, ending="nothing")),
    "spawn, silent": lambda key: _spawns(key, plan_spawn(key, announce="none")),
    "spawn for parent": lambda key: _spawns(key, plan_spawn(key, announce="parent"), wakes=1),
    "spawn and delete": lambda key: _spawns(key, plan_spawn(key, cleanup="delete")),
    "spawn, yield": lambda key: _yields(key, plan_spawn(key)),
    "spawn two, yield": lambda key: _yields(key, plan_spawn(key), plan_spawn(f"{key}b", ending="fail")),
    "spawn for parent, yield": lambda key: _yields(key, plan_spawn(key, announce="parent")),
    "nested": lambda key: _spawns(key, plan_nested_spawn(key)),
    "nested, yield": lambda key: _yields(key, plan_nested_spawn(key)),
    "nested for parent": lambda key: _spawns(key, plan_nested_spawn(key, announce="parent")),
    "keyed": lambda key: _sends(key, plan_announced_send(key, KEYED)),
    "unkeyed": lambda key: _sends(key, plan_announced_send(key, UNKEYED)),
}


def _planned(shape: str, key: str, session: str) -> Planned:
    return {**_SHAPES, **_TALKS}[shape](key).at(key, session)


def single(shape: str) -> list[Planned]:
    """One message to one session."""
    return [_planned(shape, "only", "agent:main:main")]


def several(seed: int, sessions: int = 3, messages: int = 8) -> list[Planned]:
    """A seeded mixture over several sessions; the queues of the lanes are longer than one."""
    rng = random.Random(seed)
    return [
        _planned(rng.choice(list(_SHAPES)), f"m{number}", f"agent:main:direct:s{rng.randrange(sessions)}")
        for number in range(messages)
    ]


def talking(seed: int, sessions: int = 3, messages: int = 5) -> list[Planned]:
    """The same, of which most begin conversations or sub-agents."""
    rng = random.Random(seed)
    return [
        _planned(
            rng.choice([*_TALKS, "tell, note", "fail"]),
            f"m{number}",
            f"agent:main:direct:s{rng.randrange(sessions)}",
        )
        for number in range(messages)
    ]


def plan(name: str) -> list[Planned]:
    """By the name on a command line: `single:<shape>`, `working:<shape>`, `several:<seed>` or `talking:<seed>`."""
    kind, _, rest = name.partition(":")
    if kind == "single":
        return single(rest)
    if kind == WORKING:
        return [_said(*write_script(rest), key="only").at("only", "agent:main:main")]
    return talking(int(rest)) if kind == "talking" else several(int(rest))


def settings(name: str) -> dict[str, Any]:
    """Return what a plan needs in the configuration, besides what all have."""
    kind, _, rest = name.partition(":")
    return WORK[rest] if kind == WORKING else {}


def places(planned: list[Planned]) -> list[str]:
    """Sessions that must be there before the first message."""
    return sorted({HELPER, *(sent.to for message in planned for sent in message.sends)})
