"""A conversation inside this process, where a test can hold up what a person would have to be quick for."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import cast

import pytest

from antiphon.app import open_app_operations
from antiphon.cli._backend import LocalBackend
from antiphon.cli.chat.controller import ChatController
from antiphon.cli.chat.line_reader import LineReader
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.config import Config
from antiphon.operations import IncomingMessage, Operations
from antiphon.views import MessageReceipt, RunView
from support.app_fixture import BOUND

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R")]


class Typist:
    """A keyboard, and what is seen above it."""

    interactive = True

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str | None] = asyncio.Queue()
        self.seen: asyncio.Queue[str] = asyncio.Queue()
        self.prompts = 0

    async def read_line(self, prompt: str | None = None) -> str | None:
        self.prompts += prompt is not None
        return await self.lines.get()

    def print_above_prompt(self, text: str) -> None:
        self.seen.put_nowait(text)

    async def sees(self, words: str) -> None:
        async with asyncio.timeout(BOUND):
            while words not in await self.seen.get():
                pass


class Slow(LocalBackend):
    """Takes a message when it is told to."""

    sent: str | None = None

    def __init__(self, operations: Operations) -> None:
        super().__init__(operations)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def submit(self, message: IncomingMessage) -> MessageReceipt:
        self.sent = message.idempotency_key
        self.asked.set()
        await self.go.wait()
        return await super().submit(message)


class Hasty(LocalBackend):
    """Hears of the end of the first answer at the very moment at which somebody types the next line."""

    def __init__(self, operations: Operations, screen: ChatRenderer, typist: Typist) -> None:
        super().__init__(operations)
        self._screen, self._typist, self._next = screen, typist, "say two"

    async def wait(self, run_id: str, timeout: float) -> RunView:
        view = await super().wait(run_id, timeout)
        assert await self._screen.wait_until_shown(run_id, BOUND)
        if self._next:
            self._typist.lines.put_nowait(self._next)
            self._next = ""
        return view


async def test_no_prompt_comes_between_a_line_and_its_answer(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        typist, screen = Typist(), ChatRenderer("conversation")
        desk = Hasty(operations, screen, typist)
        key = (await desk.open("main")).key
        conversation = ChatController(desk, key, screen, gateway=None, keyboard=cast("LineReader", typist))
        attending = asyncio.create_task(conversation.run(conversation.read_messages()))
        typist.lines.put_nowait("say one")
        await typist.sees("two")
        assert typist.prompts == 1
        typist.lines.put_nowait(None)
        await attending


@pytest.mark.requirement("G16")
async def test_what_is_stopped_before_it_is_accepted_is_not_answered(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        desk, typist = Slow(operations), Typist()
        key = (await desk.open("main")).key
        conversation = ChatController(
            desk, key, ChatRenderer("conversation"), gateway=None, keyboard=cast("LineReader", typist)
        )
        attending = asyncio.create_task(conversation.run(conversation.read_messages()))
        typist.lines.put_nowait("slow 600 a b c")
        await desk.asked.wait()
        signal.raise_signal(signal.SIGINT)
        await typist.sees("The answer is stopped as soon as it begins. Ctrl-C again, or Ctrl-D, leaves.")
        desk.go.set()
        await typist.sees("was stopped")
        assert desk.sent is not None
        assert (await desk.wait(desk.sent, BOUND)).state == "cancelled"
        typist.lines.put_nowait("say wanted")
        await typist.sees("wanted")
        typist.lines.put_nowait(None)
        await attending
