"""Planned turns with commands and file tools, as data like `scenario`.

What must come of them is in `chaos.work_checks`.

Each command leaves a line in a file when it starts, so that its starts can be counted. The one in front leaves a daemon
behind; the one in the background ends when a later call of the turn writes the file `GO`.
"""

from __future__ import annotations

import json
from typing import Any

FRONT, BACK = "ran-front", "ran-back"
FRONT_EXIT_CODE, BACK_EXIT_CODE = 7, 3
GO = "go"
MAX_SECONDS = 25
NOTES_FILE, NOTES_TEXT = "notes.txt", "alpha\nbeta beta\ngamma\n"
EXTRA_FILE, EXTRA_TEXT = "extra.txt", "added\n"
MOVED_FILE, MOVED_TEXT = "moved/to.txt", "one\ntwo\nthree\n"
FILES = {NOTES_FILE: NOTES_TEXT, EXTRA_FILE: EXTRA_TEXT, MOVED_FILE: MOVED_TEXT, GO: "now"}
"""What the workspace holds at the end, besides the files of the commands. A change made twice leads to another text."""

_PATCH = f"""*** Begin Patch
*** Update File: {NOTES_FILE}
@@
 beta beta
+gamma
*** Add File: {EXTRA_FILE}
+added
*** Update File: from.txt
*** Move to: {MOVED_FILE}
@@
 one
+two
 three
*** End Patch
"""


def _call(tool: str, **arguments: Any) -> str:
    return f"call {tool} {json.dumps(arguments)}"


_RUN_FRONT = _call(
    "exec",
    command=f"echo once >> {FRONT}; setsid sleep 3600 > /dev/null 2>&1 & echo out; sleep 0.25; exit {FRONT_EXIT_CODE}",
    timeout=MAX_SECONDS,
    yieldMs=1000 * MAX_SECONDS,
)
_RUN_BACK = _call(
    "exec",
    command=f"echo once >> {BACK}; while [ ! -e {GO} ]; do sleep 0.02; done; echo back out; exit {BACK_EXIT_CODE}",
    timeout=MAX_SECONDS,
    background=True,
)
_WRITE = _call("write", path=NOTES_FILE, content="alpha\nbeta\n")
_WRITE_FROM = _call("write", path="from.txt", content="one\nthree\n")
_EDIT = _call("edit", path=NOTES_FILE, oldText="beta", newText="beta beta")
_APPLY_PATCH = _call("apply_patch", input=_PATCH)
_LET_GO = _call("write", path=GO, content="now")

_SCRIPTS = {
    "in turn": [_RUN_FRONT, _WRITE, _WRITE_FROM, _EDIT, _APPLY_PATCH, _RUN_BACK, _LET_GO],
    "together": [" + ".join([_RUN_FRONT, _WRITE, _WRITE_FROM, _RUN_BACK]), _EDIT, _APPLY_PATCH, _LET_GO],
}
_ON_THIS_MACHINE = {"tools": {"exec": {"host": "gateway", "security": "full", "ask": "off"}}}
WORK = {"in turn": _ON_THIS_MACHINE, "together": _ON_THIS_MACHINE, "in a sandbox": {}}
"""The turns by name, with the settings that they need."""


def write_script(name: str) -> list[str]:
    """Return the steps of a turn, without its answer."""
    return _SCRIPTS[name if name in _SCRIPTS else "in turn"]
