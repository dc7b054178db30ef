"""What the crash suite asks of a process, as data: the worker plays it, the checker knows what must come of it.

Messages are scripts for the rehearsal model, so every run has one right outcome however often its process dies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

TELL = "tell"  # our own kind of tool: settled by its key after a crash
NOTE = "note"  # a foreign one: reported as interrupted after a crash
NOTES = "notes.txt"  # where `note` leaves its mark, in the state directory


@dataclass(frozen=True, slots=True)
class Planned:
    """A message, and what its run must come to."""

    key: str
    session: str
    text: str
    state: str
    steps: int
    """Answers of the model in the transcript, the last one included."""


def _tell(key: str, number: int) -> str:
    arguments = {"session": f"agent:main:direct:told{number % 2}", "text": f"say heard {key} {number}"}
    return f"call {TELL} {json.dumps(arguments)}"


def _note(key: str, number: int) -> str:
    return f"call {NOTE} {json.dumps({'line': f'{key} {number}'})}"


def _said(*lines: str, key: str) -> str:
    return "\n".join([*lines, f"say done {key}"])


# Each shape: the script, the state its run must end in, the number of answers it takes.
_Shape = Callable[[str], tuple[str, str, int]]
_SHAPES: dict[str, _Shape] = {
    "say": lambda key: (_said(key=key), "ok", 1),
    "think": lambda key: (_said("think hm", key=key), "ok", 1),
    "tell": lambda key: (_said(_tell(key, 0), key=key), "ok", 2),
    "note": lambda key: (_said(_note(key, 0), key=key), "ok", 2),
    "tell, note": lambda key: (_said(_tell(key, 0), _note(key, 1), key=key), "ok", 3),
    "tell + note": lambda key: (_said(f"{_tell(key, 0)} + {_note(key, 1)}", key=key), "ok", 2),
    "note + note + tell": lambda key: (
        _said(f"{_note(key, 0)} + {_note(key, 1)} + {_tell(key, 2)}", key=key),
        "ok",
        2,
    ),
    "note, tell + tell": lambda key: (
        _said(_note(key, 0), f"{_tell(key, 1)} + {_tell(key, 2)}", key=key),
        "ok",
        3,
    ),
    "fail": lambda key: (f"{_tell(key, 0)}\nfail {key}", "error", 2),
    "nothing": lambda key: (f"{_note(key, 0)}\nsay", "incomplete", 2),
}


def _planned(shape: str, key: str, session: str) -> Planned:
    text, state, steps = _SHAPES[shape](key)
    return Planned(key, session, text, state, steps)


def single(shape: str) -> list[Planned]:
    """One message to one session."""
    return [_planned(shape, "only", "agent:main:main")]


def several(seed: int, sessions: int = 3, messages: int = 8) -> list[Planned]:
    """A seeded mixture over several sessions; the queues of the lanes are longer than one."""
    dice = random.Random(seed)
    return [
        _planned(dice.choice(list(_SHAPES)), f"m{number}", f"agent:main:direct:s{dice.randrange(sessions)}")
        for number in range(messages)
    ]


def plan(name: str) -> list[Planned]:
    """By the name that goes over a command line: `single:<shape>` or `several:<seed>`."""
    kind, _, rest = name.partition(":")
    return single(rest) if kind == "single" else several(int(rest))
