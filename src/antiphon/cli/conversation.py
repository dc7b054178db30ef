"""One person and one session: what is typed goes in, what happens comes out, until somebody leaves.

A line is a message or a command that starts with a slash. While an answer comes, further lines are taken too:
a message waits its turn in the session, `/stop` ends what runs.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from antiphon.bus import MessageAppended
from antiphon.cli import output, voices
from antiphon.cli.desk import Desk
from antiphon.cli.keyboard import PROMPT, Keyboard
from antiphon.cli.screen import Screen
from antiphon.errors import AntiphonError
from antiphon.operations import HistoryFilter, Message
from antiphon.views import RunView, end_of

LOOK = 60.0  # seconds of one wait for a run; it is repeated until the run has ended
CATCH_UP = 0.5  # seconds that the feed may lag behind the end of a run

T = TypeVar("T")
Action = Callable[[str], Coroutine[Any, Any, None]]


class Command(NamedTuple):
    act: Action
    about: str


class Conversation:
    """`hosted` says that answers are made by this very process, and stop with it."""

    def __init__(
        self,
        desk: Desk,
        session: str,
        screen: Screen,
        *,
        hosted: bool,
        keyboard: Keyboard | None = None,
        on_end: Callable[[RunView], None] | None = None,
    ) -> None:
        self._desk = desk
        self._hosted = hosted
        self._session = session
        self._screen = screen
        self._keyboard = keyboard
        self._on_end = on_end
        if keyboard is not None and keyboard.interactive:
            screen.out = keyboard.above
        self._waiting: deque[str] = deque()
        self._stopping = False
        self._leaving = asyncio.Event()
        self.interrupted = False
        self.failed = False
        self.provider_failed = False
        self._commands = {
            "/new": Command(self._new, "start a new conversation; the old one is kept"),
            "/stop": Command(self._stop, "stop the answer (so does Ctrl-C)"),
            "/history": Command(self._history, "show the last messages: /history 50"),
            "/status": Command(self._status, "say where this conversation stands"),
            "/help": Command(self._help, "show this"),
            "/quit": Command(self._quit, "leave (so do Ctrl-D, and Ctrl-C at the prompt)"),
        }

    @asynccontextmanager
    async def attended(self) -> AsyncGenerator[None]:
        """Show what happens in the session, and take Ctrl-C as a wish of the person."""
        loop = asyncio.get_running_loop()
        feed = asyncio.create_task(self._feed())
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            feed.cancel()
            await asyncio.gather(feed, return_exceptions=True)

    async def carry_on(self) -> None:
        """Take up the runs that are under way in this session, or that an earlier process left in it."""
        self._waiting += await self._desk.unfinished(self._session)
        for run_id in self._waiting:
            if await self._asked_for(run_id):
                self._screen.expect(run_id)
        if self._waiting:
            question = await self._last_question()
            what = (
                "Carrying on with a turn that was interrupted" if self._hosted else "This is being answered"
            )
            self._screen.note(f"{what}: {question}")
            await self._answers()

    async def _asked_for(self, run_id: str) -> bool:
        """Whether a person is to be answered, not another session or this one's own sub-agents."""
        run = end_of(self._session, await self._desk.wait(run_id, 0))
        return not (run.gated or run.quiet)

    async def talk(self) -> None:
        """Until the end of the input, or until told to leave."""
        assert self._keyboard is not None
        while not self._leaving.is_set():
            line = await self._or_leaving(self._keyboard.line(_prompt()))
            while line is not None and line.endswith("\\"):
                more = await self._or_leaving(self._keyboard.line(". . . "))
                line = f"{line[:-1]}\n{more or ''}"
            if line is None:
                self._screen.note("")
                return
            await self._or_leaving(self._take(line))
            await self._answers()

    async def say(self, text: str) -> None:
        """A message and its answer."""
        await self._send(text)
        await self._answers()

    # --- what is typed ---

    async def _take(self, line: str) -> None:
        """A line, at the prompt or during an answer. What is wrong with it is said and harms nothing."""
        name, _, rest = line.strip().partition(" ")
        try:
            if name in self._commands:
                await self._commands[name].act(rest.strip())
            elif name.startswith("/") and "/" not in name[1:]:
                self._screen.tell(f"There is no command {name!r}. /help lists them.")
            elif name:
                await self._send(line)
        except AntiphonError as error:
            if self._keyboard is None or not self._keyboard.interactive:
                raise
            self._screen.note(str(error))

    async def _send(self, text: str) -> None:
        run_id = uuid.uuid4().hex
        self._screen.expect(run_id)
        message = Message(session=self._session, content=text, idempotency_key=run_id)
        await self._desk.submit(message)
        if self._waiting:
            self._screen.note("(waits until this answer is complete)")
        self._waiting.append(run_id)

    async def _answers(self) -> None:
        """Wait for every answer that is due, and take what is typed meanwhile."""
        while self._waiting and not self._leaving.is_set():
            over = asyncio.create_task(self._over(self._waiting[0]))
            try:
                await self._listen_until(over)
            finally:
                over.cancel()
            if over.done() and not over.cancelled():
                self._waiting.popleft()
                self._note_end(over.result())
        self._stopping = False

    def _note_end(self, view: RunView) -> None:
        self.failed = self.failed or view.state != "ok"
        self.provider_failed = self.provider_failed or view.error_code == "provider_error"
        if self._on_end:
            self._on_end(view)

    async def _listen_until(self, over: asyncio.Task[RunView]) -> None:
        while not over.done() and not self._leaving.is_set():
            leaving = asyncio.create_task(self._leaving.wait())
            tasks: set[asyncio.Task[Any]] = {over, leaving}
            typed = None
            if self._keyboard is not None and self._keyboard.interactive:
                typed = asyncio.create_task(self._keyboard.line())
                tasks.add(typed)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if typed is not None and typed.done():
                await self._heard(typed.result())
            elif typed is not None:
                typed.cancel()
                await asyncio.gather(typed, return_exceptions=True)

    async def _heard(self, line: str | None) -> None:
        if line is None:
            await self._quit("")
        else:
            await self._take(line)

    async def _over(self, run_id: str) -> RunView:
        while True:
            view = await self._desk.wait(run_id, LOOK)
            if view.ended:
                break
        if not await self._screen.ended(run_id, CATCH_UP):
            self._screen.end(run_id, view.state, view.reply, view.error)
        return view

    async def _or_leaving(self, work: Coroutine[Any, Any, T]) -> T | None:
        typed = asyncio.create_task(work)
        leaving = asyncio.create_task(self._leaving.wait())
        await asyncio.wait({typed, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if typed.done():
            return typed.result()
        typed.cancel()
        await asyncio.gather(typed, return_exceptions=True)
        return None

    # --- what happens ---

    async def _feed(self) -> None:
        async for event in self._desk.follow(self._session):
            if isinstance(event, MessageAppended):
                await voices.learn(self._desk, [msgspec.json.decode(event.body)], self._screen.labels)
            self._screen.show(event)

    def _interrupt(self) -> None:
        """Ctrl-C: stop the answer; leave when there is none, or when stopping it takes too long."""
        self.interrupted = True
        if self._waiting and not self._stopping:
            self._stopping = True
            self._stop_task = asyncio.create_task(self._stop(""))
        else:
            self._leaving.set()

    # --- commands ---

    async def _new(self, _: str) -> None:
        old = await self._desk.describe(self._session)
        await self._desk.renew(self._session)
        self._screen.tell(f"A new conversation. The old one: antiphon sessions history {old.session_id}")

    async def _stop(self, _: str) -> None:
        # Only what is being answered: what waits behind it may be somebody else's.
        running = self._waiting or await self._desk.unfinished(self._session)
        if not running or not (await self._desk.stop(self._session, running[0])).run_ids:
            self._screen.tell("Nothing runs.")

    async def _history(self, wanted: str) -> None:
        if wanted and not (wanted.isdecimal() and 0 < int(wanted) <= 1000):
            self._screen.tell("Write how many, from 1 to 1000: /history 50")
            return
        page = await self._desk.history(
            self._session, HistoryFilter(limit=int(wanted or 10), include_tools=True)
        )
        await voices.learn(self._desk, page.messages, self._screen.labels)
        for item in page.messages:
            self._screen.tell(f"{voices.heading(item, self._screen.labels)} {output.said(item)}")
        if not page.messages:
            self._screen.tell("Nothing has been said yet.")

    async def _status(self, _: str) -> None:
        view = await self._desk.describe(self._session)
        page = await self._desk.history(self._session, HistoryFilter(limit=1))
        for name, value in (
            ("session", view.key),
            ("session id", view.session_id),
            ("model", view.model or "the agent's"),
            ("entries", page.total),
            ("tokens", view.total_tokens or 0),
            ("answers due", len(self._waiting)),
        ):
            self._screen.tell(f"{name:<12} {value}")

    async def _help(self, _: str) -> None:
        for name, command in self._commands.items():
            self._screen.tell(f"{name:<9} {command.about}")
        self._screen.tell(
            "A line that ends in \\ goes on in the next one. Everything else is said to the agent."
        )

    async def _quit(self, _: str) -> None:
        if self._waiting:
            when = "is carried on when Antiphon is started again" if self._hosted else "goes on without you"
            self._screen.note(f"The answer {when}.")
        self._leaving.set()

    async def _last_question(self) -> str:
        page = await self._desk.history(self._session, HistoryFilter(limit=20))
        asked = [output.said(item) for item in page.messages if item.get("role") == "user"]
        if not asked:
            return "its question waits"
        question = output.line(asked[-1])
        return f"{question[:60]}…" if len(question) > 64 else question


def _prompt() -> str:
    # The marks keep readline from counting the colours as columns.
    return f"\001\033[1m\002{PROMPT}\001\033[0m\002" if output.coloured() else PROMPT
