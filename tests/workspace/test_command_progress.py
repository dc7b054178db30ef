"""What people see of a running command: the end of its output, less and less often, and only if it is new."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.errors import Unavailable
from antiphon.workspace import command_output
from antiphon.workspace.command_output import MAX_PROGRESS_CHARACTERS, show_progress
from antiphon.workspace.keeper_client import OutputPart

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T5")]

BOUND_SECONDS = 20.0


class Screen:
    def __init__(self) -> None:
        self.shown: list[tuple[str, int]] = []
        self.looks = 0
        self.is_on = True

    def is_listening(self) -> bool:
        self.looks += 1
        return self.is_on

    def show(self, text: str, total_bytes: int) -> None:
        self.shown.append((text, total_bytes))


async def test_new_output_is_shown_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    outputs = [b"", b"a\xff\0", b"a\xff\0", b"x" * 100_000]
    screen = Screen()
    at = -1

    async def sleep(seconds: float) -> None:
        nonlocal at
        waits.append(seconds)
        at += 1
        screen.is_on = at != 4  # nobody looks at the last output at first

    async def measure() -> int:
        if at > 5:
            raise Unavailable("The keeper is gone.", "Try again.")
        return len(outputs[min(at, 3)])

    async def read(offset: int, limit: int) -> OutputPart:
        return OutputPart(offset, outputs[min(at, 3)][offset : offset + limit])

    monkeypatch.setattr(command_output.asyncio, "sleep", sleep)
    await asyncio.wait_for(show_progress(measure, read, screen), BOUND_SECONDS)
    assert screen.shown == [("a??", 3), ("x" * MAX_PROGRESS_CHARACTERS, 100_000)]
    assert waits[0] == command_output.FIRST_PROGRESS_SECONDS
    assert waits == sorted(waits)
    assert screen.looks == len(waits)
