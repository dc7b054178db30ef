"""A conversation inside this process, where a test can hold up what a person would have to be quick for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from antiphon.app import open_app_operations
from antiphon.cli._backend import LocalBackend
from antiphon.cli.chat import controller
from antiphon.cli.chat.controller import PROMPT_LABEL, ChatController
from antiphon.cli.chat.prompt import ChatPrompt
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.config import Config
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView
from support.app_fixture import BOUND

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R")]


class Typist:
    """A prompt, and what is seen above it."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str | None] = asyncio.Queue()
        self.seen: asyncio.Queue[str] = asyncio.Queue()
        self.labels: list[str] = []
        self.prompted = asyncio.Event()
        self.get_label: Callable[[], str] = str
        self.on_interrupt: Callable[[], None] | None = None
        self.commands: Mapping[str, str] = {}

    async def read_line(self) -> str | None:
        self.refresh()
        line = await self.lines.get()
        self.lines.task_done()
        return line

    def refresh(self) -> None:
        if (label := self.get_label()) and label not in self.labels[-1:]:
            self.labels.append(label)
            self.prompted.set()

    def print_above(self, text: str) -> None:
        self.seen.put_nowait(text)
        self.labels.append(text)

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


class SlowLookup(LocalBackend):
    """Lists unfinished runs when it is told to."""

    def __init__(self, operations: Operations) -> None:
        super().__init__(operations)
        self.go = asyncio.Event()

    async def list_unfinished(self, session: str) -> list[str]:
        await self.go.wait()
        return await super().list_unfinished(session)


class Hasty(LocalBackend):
    """Hears of the end of the first answer at the very moment at which the next line is typed."""

    def __init__(self, operations: Operations, renderer: ChatRenderer, typist: Typist) -> None:
        super().__init__(operations)
        self._renderer, self._typist, self._next = renderer, typist, "say two"

    async def wait(self, run_id: str, timeout: float) -> RunView:
        view = await super().wait(run_id, timeout)
        assert await self._renderer.wait_until_shown(run_id, BOUND)
        if self._next:
            self._typist.lines.put_nowait(self._next)
            self._next = ""
            await asyncio.sleep(0)  # the line is read
        return view


async def test_no_prompt_comes_between_a_line_and_its_answer(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        typist, renderer = Typist(), ChatRenderer("conversation")
        backend = Hasty(operations, renderer, typist)
        key = (await backend.open("main")).key
        chat = ChatController(backend, key, renderer, gateway=None, prompt=cast("ChatPrompt", typist))
        attending = asyncio.create_task(chat.run(chat.read_messages()))
        await typist.prompted.wait()
        typist.lines.put_nowait("say one")
        await typist.sees("two")
        assert typist.labels.count(PROMPT_LABEL) == 1
        typist.lines.put_nowait(None)
        await attending


@pytest.mark.requirement("G16")
async def test_what_is_stopped_before_it_is_accepted_is_not_answered(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        backend, typist = Slow(operations), Typist()
        key = (await backend.open("main")).key
        chat = ChatController(
            backend, key, ChatRenderer("conversation"), gateway=None, prompt=cast("ChatPrompt", typist)
        )
        attending = asyncio.create_task(chat.run(chat.read_messages()))
        typist.lines.put_nowait("slow 600 a b c")
        await backend.asked.wait()
        signal.raise_signal(signal.SIGINT)
        await typist.sees(
            "The answer will be stopped as soon as it begins. Press Ctrl-C again or Ctrl-D to leave."
        )
        backend.go.set()
        await typist.sees("was stopped")
        assert backend.sent is not None
        assert (await backend.wait(backend.sent, BOUND)).state == "cancelled"
        typist.lines.put_nowait("say wanted")
        await typist.sees("wanted")
        typist.lines.put_nowait(None)
        await attending


async def test_a_line_beyond_the_bound_is_refused_and_the_user_can_still_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "MAX_QUEUED_LINES", 100)
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        backend, typist = Slow(operations), Typist()
        key = (await backend.open("main")).key
        chat = ChatController(
            backend, key, ChatRenderer("conversation"), gateway=None, prompt=cast("ChatPrompt", typist)
        )
        attending = asyncio.create_task(chat.run(chat.read_messages()))
        typist.lines.put_nowait("say first")
        await backend.asked.wait()
        for number in range(100):
            typist.lines.put_nowait(f"say {number}")
        typist.lines.put_nowait("say surplus")
        await typist.sees("Not accepted, because 100 lines wait to be sent: say surplus")
        typist.lines.put_nowait(None)
        await attending


async def test_a_line_entered_while_unfinished_runs_are_looked_up_is_sent_after_them(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * BOUND), open_app_operations(Config(), tmp_path / "state") as operations:
        backend, typist = SlowLookup(operations), Typist()
        key = (await backend.open("main")).key
        await backend.submit(IncomingMessage(session=key, content="slow 3 older", idempotency_key="older"))
        chat = ChatController(
            backend, key, ChatRenderer("conversation"), gateway=None, prompt=cast("ChatPrompt", typist)
        )
        attending = asyncio.create_task(chat.run(chat.read_messages()))
        typist.lines.put_nowait("say newer")
        await typist.lines.join()
        backend.go.set()
        await typist.sees("Resuming an interrupted turn")
        await typist.sees("older")
        await typist.sees("newer")
        typist.lines.put_nowait(None)
        await attending
        text = "".join(typist.labels)
        assert text.count("newer") == 1
        assert PROMPT_LABEL not in text[: text.index("older")]
