"""One person and one session: what is typed goes in, what happens comes out, until somebody leaves.

A line is a message or a command that starts with a slash. While an answer comes, further lines are taken too:
a message waits its turn in the session, `/stop` ends what runs. Taking a line may last as long as a gateway is away,
so it is heard first and taken by a task of its own: whoever wants to leave is heard at any time.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from antiphon.bus import MessageAppended
from antiphon.cli import output, voices
from antiphon.cli.desk import Desk
from antiphon.cli.keyboard import PROMPT, Keyboard
from antiphon.cli.screen import Screen
from antiphon.errors import AntiphonError, InvalidInput
from antiphon.operations import HistoryFilter, Message
from antiphon.policy import parse_send_command
from antiphon.views import RunView, end_of

if TYPE_CHECKING:
    from antiphon.client import Client

LOOK = 60.0  # seconds of one wait for a run; it is repeated until the run has ended
CATCH_UP = 0.5  # seconds that the feed may lag behind the end of a run
LAST = 1.0  # seconds in which what was typed before leaving is still taken
MOST_TYPED = 100  # lines that may wait to be taken; what is typed beyond them waits in the terminal
QUIT = "/quit"
_NO_COMMAND = "/help lists them. For a message that begins like one, put something before the slash."

Action = Callable[[str], Coroutine[Any, Any, None]]


class Command(NamedTuple):
    act: Action
    about: str


class Conversation:
    """Without a gateway, answers are made by this very process, and stop with it."""

    def __init__(
        self,
        desk: Desk,
        session: str,
        screen: Screen,
        *,
        gateway: Client | None,
        keyboard: Keyboard | None = None,
        on_end: Callable[[RunView], None] | None = None,
    ) -> None:
        self._desk = desk
        self._gateway = gateway
        self._session = session
        self._screen = screen
        screen.known.session_key = session
        self._keyboard = keyboard
        self._on_end = on_end
        self._person = keyboard if keyboard is not None and keyboard.interactive else None
        if self._person:
            screen.out = self._person.above
        self._begun = ""
        """Lines that go on in the next one."""
        self._typed: asyncio.Queue[str] = asyncio.Queue(MOST_TYPED)
        self._untaken: deque[str] = deque()
        """What was typed and is not known to be taken."""
        self._taking = False
        """Whether the first of these is being taken."""
        self._unsent: float | None = None
        """The absence of the gateway in which that was begun."""
        self._waiting: deque[str] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = False
        self._stop_asked: asyncio.Task[Any] | None = None
        self._unwanted = False
        """Whether the answer to what is being taken is to be stopped."""
        self._leaving = asyncio.Event()
        self.interrupted = False
        self.failed = False
        self.provider_failed = False
        self._commands = {
            "/new": Command(self._new, "start a new conversation; the old one is kept"),
            "/stop": Command(self._stop, "stop the answer (so does Ctrl-C)"),
            "/send": Command(
                self._switch, "allow or block messages to this session: /send on, off or inherit"
            ),
            "/history": Command(self._history, "show the last messages: /history 50"),
            "/status": Command(self._status, "say where this conversation stands"),
            "/help": Command(self._help, "show this"),
        }

    @property
    def _away(self) -> float | None:
        return self._gateway.away if self._gateway else None

    async def attend(self, talk: Coroutine[Any, Any, None]) -> None:
        """Talk until that is over or somebody leaves; show meanwhile what happens, and take Ctrl-C as a wish.

        Raises:
            AntiphonError: the gateway went away for good, or a script cannot go on.
        """
        loop = asyncio.get_running_loop()
        for work in (talk, self._take_typed(), self._feed(), self._leaving.wait()):
            self._begin(work)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._leaving.is_set() and not self._away:
                await self._take_last()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tell_rest()
        if not self._leaving.is_set():
            for task in done:
                task.result()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def carry_on(self) -> None:
        """Take up the runs that are under way in this session, or that an earlier process left in it."""
        self._waiting += await self._desk.unfinished(self._session)
        for run_id in self._waiting:
            if await self._asked_for(run_id):
                self._screen.expect(run_id)
        if self._waiting:
            question = await self._last_question()
            what = (
                "This is being answered" if self._gateway else "Carrying on with a turn that was interrupted"
            )
            self._screen.note(f"{what}: {question}")
            await self._settle()

    async def _asked_for(self, run_id: str) -> bool:
        """Whether a person is to be answered, not another session or this one's own sub-agents."""
        run = end_of(self._session, await self._desk.wait(run_id, 0))
        return not (run.gated or run.quiet)

    async def talk(self) -> None:
        """Until told to leave, which the end of the input does as well."""
        assert self._keyboard is not None
        while not (self._leaving.is_set() or (self.interrupted and not self._person)):
            line = await self._keyboard.line(". . . " if self._begun else _prompt())
            if line is None:
                self._screen.note("")
            await self._hear(line)
            await self._settle()

    async def say(self, messages: Sequence[str]) -> None:
        """Messages, each when the one before is answered, until one is stopped."""
        self._untaken += messages
        for message in messages:
            if not self.interrupted:
                await self._handle(message, self._send)
                await self._settle()

    # --- what is typed ---

    async def _hear(self, line: str | None) -> None:
        """A line, at the prompt or during an answer, or the end of all. Who leaves waits for nothing before it."""
        if line is None and self._begun and not self._person:
            line = ""  # a file may end in the middle of a message
        if line is None or f"{self._begun}{line}".split(maxsplit=1)[:1] == [QUIT]:
            self._leaving.set()
        elif line.endswith("\\"):
            self._begun += f"{line[:-1]}\n"
        else:
            line, self._begun = f"{self._begun}{line}", ""
            if line.strip():
                await self._keep(line)

    async def _keep(self, line: str) -> None:
        """A line, until it is its turn to be taken. No other is heard before there is room for it."""
        self._untaken.append(line)
        if self._away:
            self._screen.note("(is sent when the gateway is back)")
        await self._typed.put(line)

    async def _take_typed(self) -> None:
        """What is typed, one line after the other."""
        while True:
            await self._handle(await self._typed.get(), self._take)
            self._typed.task_done()

    async def _handle(self, line: str, act: Action) -> None:
        """The first of what is not taken."""
        self._taking, self._unsent = True, self._away
        try:
            await act(line)
        except InvalidInput:  # it was refused, and there is no doubt about that
            self._taken()
            raise
        self._taken()

    def _taken(self) -> None:
        self._untaken.popleft()
        self._taking = self._unwanted = False

    async def _take_last(self) -> None:
        """Who has typed a line, or asked for a stop, and leaves at once has not called it off."""
        last = [self._begin(self._typed.join()), *([self._stop_asked] if self._stop_asked else [])]
        await asyncio.wait(last, timeout=LAST)

    async def _take(self, line: str) -> None:
        """A line. What is wrong with it is said and harms nothing, except to a script."""
        name, _, rest = line.strip().partition(" ")
        try:
            if name in self._commands:
                await self._commands[name].act(rest.strip())
            elif _is_command(line):
                raise InvalidInput(f"There is no command {name!r}.", _NO_COMMAND)
            elif name:
                await self._send(line)
        except AntiphonError as error:
            if self._away or not self._person:
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
        if self._unwanted:
            await self._desk.stop(self._session, run_id)

    async def _settle(self) -> None:
        """Until all that was typed is taken and every answer is there; hear what is typed meanwhile."""
        while True:
            work = self._begin(self._answers())
            while not work.done():
                await self._listen(work)
            self._tasks.remove(work)
            work.result()
            # A line may have been heard at the very moment at which the last answer was complete.
            if not (self._person and self._untaken):
                break
        self._stopping = False

    async def _answers(self) -> None:
        await self._typed.join()
        while self._waiting:
            view = await self._over(self._waiting[0])
            self._waiting.popleft()
            self._stopping = False
            self._note_end(view)
            await self._typed.join()

    async def _listen(self, work: asyncio.Task[Any]) -> None:
        """For one line, while this is not done."""
        if self._person is None:
            await asyncio.wait([work])
            return
        line = self._begin(self._person.line())
        await asyncio.wait({work, line}, return_when=asyncio.FIRST_COMPLETED)
        if not line.done():
            line.cancel()
        self._tasks.remove(line)
        [typed] = await asyncio.gather(line, return_exceptions=True)
        if not isinstance(typed, BaseException):
            await self._hear(typed)

    def _note_end(self, view: RunView) -> None:
        self.failed = self.failed or view.state != "ok"
        self.provider_failed = self.provider_failed or view.error_code == "provider_error"
        if self._on_end:
            self._on_end(view)

    async def _over(self, run_id: str) -> RunView:
        while True:
            view = await self._desk.wait(run_id, LOOK)
            if view.ended:
                break
        if not await self._screen.ended(run_id, CATCH_UP):
            self._screen.end(run_id, view.state, view.reply, view.error)
        return view

    # --- what happens ---

    async def _feed(self) -> None:
        """What happens, as long as it can be followed; without that, ends are still asked for."""
        try:
            async for event in self._desk.follow(self._session):
                if isinstance(event, MessageAppended):
                    entry = {**msgspec.json.decode(event.body), "runId": event.run_id}
                    await voices.look_up_speakers(self._desk, [entry], self._screen.known)
                self._screen.show(event)
        except AntiphonError:
            if self._away:
                raise
        await self._leaving.wait()

    def _interrupt(self) -> None:
        """Ctrl-C: stop the answer; leave when there is none, or when stopping it takes too long.

        What is on its way to be answered is stopped as soon as it is accepted; a script does not wait for that.
        """
        self.interrupted = True
        if self._stopping or not (self._waiting or (self._person and self._untaken)):
            self._leaving.set()
            return
        self._stopping = True
        if self._waiting:
            self._stop_asked = self._begin(self._take("/stop"))
        else:
            self._unwanted = True
        if self._away or self._unwanted:
            when = "when the gateway is back" if self._away else "as soon as it begins"
            answered = self._waiting or not _is_command(self._untaken[0])
            stopped = f"The answer is stopped {when}. " if answered else ""
            self._screen.note(f"{stopped}Ctrl-C again, or Ctrl-D, leaves.")

    # --- commands ---

    async def _new(self, _: str) -> None:
        old = await self._desk.describe(self._session)
        await self._desk.renew(self._session, expected=old.session_id)
        self._screen.tell(f"A new conversation. The old one: antiphon sessions history {old.session_id}")

    async def _stop(self, _: str) -> None:
        # Only what is being answered: what waits behind it may be somebody else's.
        running = self._waiting or await self._desk.unfinished(self._session)
        if not running or not (await self._desk.stop(self._session, running[0])).run_ids:
            self._screen.tell("Nothing runs.")

    async def _switch(self, wanted: str) -> None:
        if parse_send_command(text := f"/send {wanted}") is None:
            self._screen.tell("Write /send on, /send off or /send inherit.")
            return
        await self._send(text)

    async def _history(self, wanted: str) -> None:
        if wanted and not (wanted.isdecimal() and 0 < int(wanted) <= 1000):
            self._screen.tell("Write how many, from 1 to 1000: /history 50")
            return
        page = await self._desk.history(
            self._session, HistoryFilter(limit=int(wanted or 10), include_tools=True, without_internal=True)
        )
        await voices.look_up_speakers(self._desk, page.messages, self._screen.known)
        for item in page.messages:
            heading = voices.heading(item, self._screen.known, self._screen.speaker)
            self._screen.tell(f"{heading} {output.said(item)}")
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
        self._screen.tell(f"{QUIT:<9} leave (so do Ctrl-D, Ctrl-C at the prompt, and twice anywhere)")
        self._screen.tell(
            "A line that ends in \\ goes on in the next one. Everything else is said to the agent."
        )

    def _tell_rest(self) -> None:
        """What becomes of the answers that are due, and of what was typed and not taken."""
        told: list[str] = []
        going_on = len(self._waiting)
        if going_on and self._stopping and _has_succeeded(self._stop_asked):
            going_on -= 1
            told.append("The answer is stopped.")
        if going_on:
            answers = "The answer goes" if going_on == 1 else "The answers go"
            told.append(f"{answers} on {self._when()}.")
        lines = [*self._untaken, *([self._begun] if self._begun else [])]
        if self._taking and (self._unsent is None or self._unsent != self._away):
            doubtful = lines.pop(0)
            if not _is_command(doubtful):
                look = f"`antiphon sessions history {self._session}`"
                told.append(f"{look} shows whether this was sent: {_brief(doubtful)}")
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            told.append(f"Not sent: {_brief(lines[0])}{more}")
        if self._keyboard and not self._person and self._keyboard.has_more():
            told.append("The rest of the input was not sent.")
        if told:
            self._screen.warn(" ".join(told))

    def _when(self) -> str:
        if self._gateway is None:
            return "when Antiphon is started again"
        return "at the gateway once it is back" if self._away else "without you"

    async def _last_question(self) -> str:
        page = await self._desk.history(self._session, HistoryFilter(limit=20, without_internal=True))
        asked = [output.said(item) for item in page.messages if item.get("role") == "user"]
        if not asked:
            return "its question waits"
        return _brief(asked[-1])


def _has_succeeded(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _is_command(line: str) -> bool:
    """Whether it is for the chat itself, and not a message that begins with a path."""
    name = line.strip().partition(" ")[0]
    return name.startswith("/") and "/" not in name[1:]


def _brief(text: str) -> str:
    line = output.line(text.strip())
    return f"{line[:60]}…" if len(line) > 64 else line


def _prompt() -> str:
    # The marks keep readline from counting the colours as columns.
    return f"\001\033[1m\002{PROMPT}\001\033[0m\002" if output.coloured() else PROMPT
