"""Where a running gateway is found: a note in the state directory, for the commands on this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

NAME = "gateway.json"


class Note(msgspec.Struct, frozen=True):
    url: str
    pid: int


def write(state_dir: Path, note: Note) -> None:
    (state_dir / NAME).write_bytes(msgspec.json.encode(note))


def read(state_dir: Path) -> Note | None:
    """What was last noted, true or not."""
    try:
        return msgspec.json.decode((state_dir / NAME).read_bytes(), type=Note)
    except (OSError, msgspec.MsgspecError):
        return None


def remove(state_dir: Path) -> None:
    (state_dir / NAME).unlink(missing_ok=True)
