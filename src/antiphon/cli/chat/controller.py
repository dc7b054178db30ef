"""Runs the chat between one person and one session: reads lines, sends messages, shows events.

A line is a message or a command that starts with a slash. Lines are also read while an answer streams: a message waits
its turn in the session, `/stop` ends the current run. Executing a line may take as long as a gateway is unreachable, so
lines are queued and executed by a task of their own: the user can leave at any time.
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
from antiphon.cli import _output
from antiphon.cli._backend import Backend
from antiphon.cli.chat import speakers
from antiphon.cli.chat.line_reader import PROMPT_TEXT, LineReader
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.errors import AntiphonError, InvalidInput
from antiphon.operations import HistoryFilter, IncomingMessage
from antiphon.send_policy import parse_send_command
from antiphon.views import RunView, build_run_ended_event

if TYPE_CHECKING:
    from antiphon.client import Client

RUN_WAIT_SECONDS = 60.0  # length of one wait; repeated until the run has ended
FEED_LAG_SECONDS = 0.5  # how far the feed may lag behind the end of a run
LEAVE_TIMEOUT_SECONDS = 1.0  # for lines typed before leaving to be executed
MAX_QUEUED_LINES = 100  # further input stays in the terminal's buffer
QUIT_COMMAND = "/quit"
_UNKNOWN_COMMAND_HINT = (
    "/help lists them. For a message that begins like one, put something before the slash."
)

LineHandler = Callable[[str], Coroutine[Any, Any, None]]


class ChatCommand(NamedTuple):
    act: LineHandler
    about: str


class ChatController:
    """The chat of one session. Without a gateway, this process produces the answers, and they stop with it."""

    def __init__(
        self,
        desk: Backend,
        session: str,
        screen: ChatRenderer,
        *,
        gateway: Client | None,
        keyboard: LineReader | None = None,
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
            screen.out = self._person.print_above_prompt
        self._begun = ""
        """The lines so far of a message that continues on the next line."""
        self._typed: asyncio.Queue[str] = asyncio.Queue(MAX_QUEUED_LINES)
        self._untaken: deque[str] = deque()
        """Lines that were typed and not yet executed."""
        self._taking = False
        """Whether the first of `_untaken` is being executed."""
        self._unsent: float | None = None
        """Since when the gateway was unreachable when that line was started; None if it was reachable."""
        self._waiting: deque[str] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._stopping = False
        self._stop_asked: asyncio.Task[Any] | None = None
        self._unwanted = False
        """Whether to stop the answer to the line that is being executed."""
        self._leaving = asyncio.Event()
        self.interrupted = False
        self.failed = False
        self.provider_failed = False
        self._commands = {
            "/new": ChatCommand(
                self._start_new_conversation, "start a new conversation; the old one is kept"
            ),
            "/stop": ChatCommand(self._stop_answer, "stop the answer (so does Ctrl-C)"),
            "/send": ChatCommand(
                self._set_send_policy, "allow or block messages to this session: /send on, off or inherit"
            ),
            "/history": ChatCommand(self._show_history, "show the last messages: /history 50"),
            "/status": ChatCommand(self._show_status, "say where this conversation stands"),
            "/help": ChatCommand(self._show_help, "show this"),
        }

    @property
    def _away(self) -> float | None:
        return self._gateway.reconnect_deadline if self._gateway else None

    async def run(self, talk: Coroutine[Any, Any, None]) -> None:
        """Run `talk` until it is done or the user leaves; meanwhile show events and handle Ctrl-C.

        Raises:
            AntiphonError: the gateway is gone for good, or a script cannot continue.
        """
        loop = asyncio.get_running_loop()
        for work in (talk, self._process_queued_lines(), self._show_events(), self._leaving.wait()):
            self._start_task(work)
        loop.add_signal_handler(signal.SIGINT, self._handle_interrupt)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._leaving.is_set() and not self._away:
                await self._finish_queued_lines()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._report_unfinished()
        if not self._leaving.is_set():
            for task in done:
                task.result()

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def resume_unfinished_runs(self) -> None:
        """Follow the runs that are in progress in this session, or that an earlier process left in it."""
        self._waiting += await self._desk.unfinished(self._session)
        for run_id in self._waiting:
            if await self._is_for_person(run_id):
                self._screen.expect_answer(run_id)
        if self._waiting:
            question = await self._load_last_question()
            what = (
                "This is being answered" if self._gateway else "Carrying on with a turn that was interrupted"
            )
            self._screen.print_note(f"{what}: {question}")
            await self._wait_until_answered()

    async def _is_for_person(self, run_id: str) -> bool:
        """Whether the run answers a person, not another session or this one's own sub-agents."""
        run = build_run_ended_event(self._session, await self._desk.wait(run_id, 0))
        return not (run.gated or run.quiet)

    async def read_messages(self) -> None:
        """Read and queue lines until the user leaves or the input ends."""
        assert self._keyboard is not None
        while not (self._leaving.is_set() or (self.interrupted and not self._person)):
            line = await self._keyboard.read_line(". . . " if self._begun else _format_prompt())
            if line is None:
                self._screen.print_note("")
            await self._accept_line(line)
            await self._wait_until_answered()

    async def send_messages(self, messages: Sequence[str]) -> None:
        """Send messages, each after the answer to the one before, until one is stopped."""
        self._untaken += messages
        for message in messages:
            if not self.interrupted:
                await self._process_line(message, self._send_message)
                await self._wait_until_answered()

    # --- input ---

    async def _accept_line(self, line: str | None) -> None:
        """Handle a line, or the end of the input (None). Leaving does not wait for queued lines."""
        if line is None and self._begun and not self._person:
            line = ""  # a file may end in the middle of a message
        if line is None or f"{self._begun}{line}".split(maxsplit=1)[:1] == [QUIT_COMMAND]:
            self._leaving.set()
        elif line.endswith("\\"):
            self._begun += f"{line[:-1]}\n"
        else:
            line, self._begun = f"{self._begun}{line}", ""
            if line.strip():
                await self._queue_line(line)

    async def _queue_line(self, line: str) -> None:
        """Queue a line for execution; wait while the queue is full."""
        self._untaken.append(line)
        if self._away:
            self._screen.print_note("(is sent when the gateway is back)")
        await self._typed.put(line)

    async def _process_queued_lines(self) -> None:
        """Execute queued lines one after the other."""
        while True:
            await self._process_line(await self._typed.get(), self._execute_line)
            self._typed.task_done()

    async def _process_line(self, line: str, act: LineHandler) -> None:
        """Execute the first queued line."""
        self._taking, self._unsent = True, self._away
        try:
            await act(line)
        except InvalidInput:  # it was certainly not accepted
            self._mark_line_processed()
            raise
        self._mark_line_processed()

    def _mark_line_processed(self) -> None:
        self._untaken.popleft()
        self._taking = self._unwanted = False

    async def _finish_queued_lines(self) -> None:
        """Give queued lines and a requested stop a moment to finish before leaving."""
        last = [self._start_task(self._typed.join()), *([self._stop_asked] if self._stop_asked else [])]
        await asyncio.wait(last, timeout=LEAVE_TIMEOUT_SECONDS)

    async def _execute_line(self, line: str) -> None:
        """Execute a line. An error is printed and the chat continues; in a script it is raised."""
        name, _, rest = line.strip().partition(" ")
        try:
            if name in self._commands:
                await self._commands[name].act(rest.strip())
            elif _is_slash_command(line):
                raise InvalidInput(f"There is no command {name!r}.", _UNKNOWN_COMMAND_HINT)
            elif name:
                await self._send_message(line)
        except AntiphonError as error:
            if self._away or not self._person:
                raise
            self._screen.print_note(str(error))

    async def _send_message(self, text: str) -> None:
        run_id = uuid.uuid4().hex
        self._screen.expect_answer(run_id)
        message = IncomingMessage(session=self._session, content=text, idempotency_key=run_id)
        await self._desk.submit(message)
        if self._waiting:
            self._screen.print_note("(waits until this answer is complete)")
        self._waiting.append(run_id)
        if self._unwanted:
            await self._desk.stop(self._session, run_id)

    async def _wait_until_answered(self) -> None:
        """Wait until every line is executed and every answer is complete; keep reading lines meanwhile."""
        while True:
            work = self._start_task(self._wait_for_answers())
            while not work.done():
                await self._read_line_during(work)
            self._tasks.remove(work)
            work.result()
            # A line may have been read just as the last answer was completed.
            if not (self._person and self._untaken):
                break
        self._stopping = False

    async def _wait_for_answers(self) -> None:
        await self._typed.join()
        while self._waiting:
            view = await self._wait_for_run(self._waiting[0])
            self._waiting.popleft()
            self._stopping = False
            self._record_run_end(view)
            await self._typed.join()

    async def _read_line_during(self, work: asyncio.Task[Any]) -> None:
        """Read one line, but only until `work` is done."""
        if self._person is None:
            await asyncio.wait([work])
            return
        line = self._start_task(self._person.read_line())
        await asyncio.wait({work, line}, return_when=asyncio.FIRST_COMPLETED)
        if not line.done():
            line.cancel()
        self._tasks.remove(line)
        [typed] = await asyncio.gather(line, return_exceptions=True)
        if not isinstance(typed, BaseException):
            await self._accept_line(typed)

    def _record_run_end(self, view: RunView) -> None:
        self.failed = self.failed or view.state != "ok"
        self.provider_failed = self.provider_failed or view.error_code == "provider_error"
        if self._on_end:
            self._on_end(view)

    async def _wait_for_run(self, run_id: str) -> RunView:
        while True:
            view = await self._desk.wait(run_id, RUN_WAIT_SECONDS)
            if view.has_ended:
                break
        if not await self._screen.wait_until_shown(run_id, FEED_LAG_SECONDS):
            self._screen.show_run_end(run_id, view.state, view.reply, view.error)
        return view

    # --- events ---

    async def _show_events(self) -> None:
        """Show events as long as the feed works; without it, the ends of runs are still polled."""
        try:
            async for event in self._desk.follow(self._session):
                if isinstance(event, MessageAppended):
                    entry = {**msgspec.json.decode(event.body), "runId": event.run_id}
                    await speakers.look_up_speakers(self._desk, [entry], self._screen.known)
                self._screen.show_event(event)
        except AntiphonError:
            if self._away:
                raise
        await self._leaving.wait()

    def _handle_interrupt(self) -> None:
        """Handle Ctrl-C: stop the answer; leave if none is in progress, or if stopping it takes too long.

        A message that is still being sent is stopped as soon as it is accepted; a script does not wait for that.
        """
        self.interrupted = True
        if self._stopping or not (self._waiting or (self._person and self._untaken)):
            self._leaving.set()
            return
        self._stopping = True
        if self._waiting:
            self._stop_asked = self._start_task(self._execute_line("/stop"))
        else:
            self._unwanted = True
        if self._away or self._unwanted:
            when = "when the gateway is back" if self._away else "as soon as it begins"
            answered = self._waiting or not _is_slash_command(self._untaken[0])
            stopped = f"The answer is stopped {when}. " if answered else ""
            self._screen.print_note(f"{stopped}Ctrl-C again, or Ctrl-D, leaves.")

    # --- commands ---

    async def _start_new_conversation(self, _: str) -> None:
        old = await self._desk.describe(self._session)
        await self._desk.renew(self._session, expected=old.session_id)
        self._screen.print_result(
            f"A new conversation. The old one: antiphon sessions history {old.session_id}"
        )

    async def _stop_answer(self, _: str) -> None:
        # Only the current answer: queued runs may belong to another client.
        running = self._waiting or await self._desk.unfinished(self._session)
        if not running or not (await self._desk.stop(self._session, running[0])).run_ids:
            self._screen.print_result("Nothing runs.")

    async def _set_send_policy(self, wanted: str) -> None:
        if parse_send_command(text := f"/send {wanted}") is None:
            self._screen.print_result("Write /send on, /send off or /send inherit.")
            return
        await self._send_message(text)

    async def _show_history(self, wanted: str) -> None:
        if wanted and not (wanted.isdecimal() and 0 < int(wanted) <= 1000):
            self._screen.print_result("Write how many, from 1 to 1000: /history 50")
            return
        page = await self._desk.history(
            self._session, HistoryFilter(limit=int(wanted or 10), include_tools=True, without_internal=True)
        )
        await speakers.look_up_speakers(self._desk, page.messages, self._screen.known)
        for item in page.messages:
            heading = speakers.format_heading(item, self._screen.known, self._screen.speaker)
            self._screen.print_result(f"{heading} {_output.format_entry_text(item)}")
        if not page.messages:
            self._screen.print_result("Nothing has been said yet.")

    async def _show_status(self, _: str) -> None:
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
            self._screen.print_result(f"{name:<12} {value}")

    async def _show_help(self, _: str) -> None:
        for name, command in self._commands.items():
            self._screen.print_result(f"{name:<9} {command.about}")
        self._screen.print_result(
            f"{QUIT_COMMAND:<9} leave (so do Ctrl-D, Ctrl-C at the prompt, and twice anywhere)"
        )
        self._screen.print_result(
            "A line that ends in \\ goes on in the next one. Everything else is said to the agent."
        )

    def _report_unfinished(self) -> None:
        """Report what happens to pending answers and to lines that were not executed."""
        told: list[str] = []
        going_on = len(self._waiting)
        if going_on and self._stopping and _has_succeeded(self._stop_asked):
            going_on -= 1
            told.append("The answer is stopped.")
        if going_on:
            answers = "The answer goes" if going_on == 1 else "The answers go"
            told.append(f"{answers} on {self._describe_continuation()}.")
        lines = [*self._untaken, *([self._begun] if self._begun else [])]
        if self._taking and (self._unsent is None or self._unsent != self._away):
            doubtful = lines.pop(0)
            if not _is_slash_command(doubtful):
                look = f"`antiphon sessions history {self._session}`"
                told.append(f"{look} shows whether this was sent: {_abbreviate(doubtful)}")
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            told.append(f"Not sent: {_abbreviate(lines[0])}{more}")
        if self._keyboard and not self._person and self._keyboard.has_more():
            told.append("The rest of the input was not sent.")
        if told:
            self._screen.print_warning(" ".join(told))

    def _describe_continuation(self) -> str:
        if self._gateway is None:
            return "when Antiphon is started again"
        return "at the gateway once it is back" if self._away else "without you"

    async def _load_last_question(self) -> str:
        page = await self._desk.history(self._session, HistoryFilter(limit=20, without_internal=True))
        asked = [_output.format_entry_text(item) for item in page.messages if item.get("role") == "user"]
        if not asked:
            return "its question waits"
        return _abbreviate(asked[-1])


def _has_succeeded(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _is_slash_command(line: str) -> bool:
    """Whether a line is a chat command, not a message that begins with a path."""
    name = line.strip().partition(" ")[0]
    return name.startswith("/") and "/" not in name[1:]


def _abbreviate(text: str) -> str:
    line = _output.clean_line(text.strip())
    return f"{line[:60]}…" if len(line) > 64 else line


def _format_prompt() -> str:
    # The markers keep readline from counting colour codes as columns.
    return f"\001\033[1m\002{PROMPT_TEXT}\001\033[0m\002" if _output.is_coloured() else PROMPT_TEXT
