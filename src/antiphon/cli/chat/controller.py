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
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from antiphon.bus import MessageAppended
from antiphon.cli import _output
from antiphon.cli._backend import Backend
from antiphon.cli._references import find_approval_id
from antiphon.cli.chat import speakers
from antiphon.cli.chat.line_reader import LineReader
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import AntiphonError, Forbidden, InvalidInput, NotFound
from antiphon.operations.types import APPROVAL_DECISIONS, IncomingMessage, RunView, build_run_ended_event
from antiphon.send_policy import parse_send_command

if TYPE_CHECKING:
    from antiphon.cli.chat.prompt import ChatPrompt
    from antiphon.client import Client

RUN_WAIT_SECONDS = 60.0  # length of one wait; repeated until the run has ended
FEED_LAG_SECONDS = 0.5  # how far the feed may lag behind the end of a run
MAX_QUEUED_LINES = 10_000  # a long paste fits; further ones are refused until some of them are executed
LEAVE_TIMEOUT_SECONDS = 1.0  # for lines typed before leaving to be executed
PROMPT_LABEL, CONTINUATION_LABEL = "you> ", ". . . "
QUIT_COMMAND = "/quit"
_UNKNOWN_COMMAND_HINT = (
    "/help lists them. For a message that begins like one, put something before the slash."
)

LineHandler = Callable[[str], Coroutine[Any, Any, None]]


class TerminalCommand(NamedTuple):
    handler: LineHandler
    help: str
    has_argument: bool = False


class ChatController:
    """The chat of one session. Without a gateway, this process produces the answers, and they stop with it.

    Lines come from `prompt` in an interactive chat, or from `pipe` in a script; with neither, from `send_messages`.
    """

    def __init__(
        self,
        backend: Backend,
        session: str,
        renderer: ChatRenderer,
        *,
        gateway: Client | None,
        prompt: ChatPrompt | None = None,
        pipe: LineReader | None = None,
        on_end: Callable[[RunView], None] | None = None,
    ) -> None:
        self._backend = backend
        self._gateway = gateway
        self._session = session
        self._renderer = renderer
        renderer.known.session_key = session
        self._prompt = prompt
        self._pipe = pipe
        self._on_end = on_end
        self._continued_text = ""
        """The lines so far of a message that continues on the next line."""
        self._line_queue: asyncio.Queue[str] = asyncio.Queue(MAX_QUEUED_LINES)
        self._pending_lines: deque[str] = deque()
        """Lines that were entered and not yet executed."""
        self._is_resuming = prompt is not None
        """Whether the unfinished runs of the session are still being looked up."""
        self._is_processing = False
        """Whether the first of `_pending_lines` is being executed."""
        self._reconnect_deadline_before_line: float | None = None
        """The reconnect deadline when that line was started; None if the gateway was connected."""
        self._run_queue: asyncio.Queue[str] = asyncio.Queue()
        self._pending_runs: deque[str] = deque()
        """Runs whose answers are awaited, in their order."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_stopping = False
        self._stop_task: asyncio.Task[Any] | None = None
        self._stop_after_send = False
        """Whether to stop the answer to the line that is being executed."""
        self._leaving = asyncio.Event()
        self.interrupted = False
        self.failed = False
        self.provider_failed = False
        self._commands = self._list_commands()
        if prompt:
            renderer.out = prompt.print_above
            prompt.get_label = self._format_prompt_label
            prompt.on_interrupt = self._handle_interrupt
            prompt.commands = {name: command.help for name, command in self._commands.items()}
            prompt.commands[QUIT_COMMAND] = "leave"

    def _list_commands(self) -> dict[str, TerminalCommand]:
        """Return the slash commands of this chat; leaving is handled where lines are read."""
        return {
            "/new": TerminalCommand(
                self._start_new_conversation, "start a new conversation; the old one is kept"
            ),
            "/stop": TerminalCommand(self._stop_answer, "stop the answer (also Ctrl-C)"),
            "/send": TerminalCommand(
                self._set_send_policy,
                "allow or block messages to this session: /send on, off or inherit",
                has_argument=True,
            ),
            "/approve": TerminalCommand(
                self._decide_approval,
                "decide on a waiting tool call: /approve ID allow-once, allow-always or deny",
                has_argument=True,
            ),
            "/history": TerminalCommand(
                self._show_history, "show the last messages: /history 50", has_argument=True
            ),
            "/status": TerminalCommand(self._show_status, "show the state of this conversation"),
            "/help": TerminalCommand(self._show_help, "show this help"),
        }

    @property
    def _reconnect_deadline(self) -> float | None:
        """Set while the gateway is unreachable."""
        return self._gateway.reconnect_deadline if self._gateway else None

    async def run(self, input_task: Coroutine[Any, Any, None]) -> None:
        """Run `input_task` until it is done or the user leaves; meanwhile show events and handle Ctrl-C.

        Raises:
            AntiphonError: the gateway does not come back, or a script cannot continue.
        """
        loop = asyncio.get_running_loop()
        for work in (
            input_task,
            self._process_queued_lines(),
            self._wait_for_answers(),
            self._show_events(),
            self._leaving.wait(),
        ):
            self._start_task(work)
        loop.add_signal_handler(signal.SIGINT, self._handle_interrupt)
        try:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._leaving.is_set() and not self._reconnect_deadline:
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

    async def _resume_unfinished_runs(self) -> None:
        """Follow the runs that are in progress in this session, or that an earlier process left in it."""
        for run_id in await self._backend.list_unfinished(self._session):
            if await self._is_for_person(run_id):
                self._renderer.expect_answer(run_id)
            self._add_pending_run(run_id)
        if self._pending_runs:
            question = await self._load_last_question()
            what = "This is being answered" if self._gateway else "Resuming an interrupted turn"
            self._renderer.print_note(f"{what}: {question}")
        self._is_resuming = False
        self._refresh_prompt()

    async def _is_for_person(self, run_id: str) -> bool:
        """Whether the run answers a person, not another session or this one's own sub-agents."""
        run = build_run_ended_event(self._session, await self._backend.wait(run_id, 0))
        return not (run.needs_sanitizing or run.quiet)

    async def read_messages(self) -> None:
        """Read and queue lines until the user leaves or the input ends. A script waits for each answer."""
        while not self._leaving.is_set():
            if self._prompt:
                self._accept_line(await self._prompt.read_line())
            elif self._pipe and not self.interrupted:
                self._accept_line(await self._pipe.read_line())
                await self._wait_until_answered()
            else:
                return

    async def send_messages(self, messages: Sequence[str]) -> None:
        """Send messages, each after the answer to the one before, until one is stopped."""
        self._pending_lines += messages
        for message in messages:
            if not self.interrupted:
                await self._process_line(message, self._send_message)
                await self._wait_until_answered()

    # --- input ---

    def _format_prompt_label(self) -> str:
        """Return the label of the prompt: empty while an answer is pending, though lines can be entered then too."""
        if self._is_resuming or self._pending_lines or self._pending_runs:
            return ""
        return CONTINUATION_LABEL if self._continued_text else _output.bold(PROMPT_LABEL)

    def _accept_line(self, line: str | None) -> None:
        """Handle a line, or the end of the input (None). Leaving does not wait for queued lines."""
        if line is None and self._continued_text and not self._prompt:
            line = ""  # a file may end in the middle of a message
        if line is None or f"{self._continued_text}{line}".split(maxsplit=1)[:1] == [QUIT_COMMAND]:
            self._leaving.set()
        elif line.endswith("\\"):
            self._continued_text += f"{line[:-1]}\n"
        else:
            line, self._continued_text = f"{self._continued_text}{line}", ""
            if not line.strip():
                return
            if self._line_queue.full():  # not waited for: the user must be able to leave
                self._renderer.print_note(
                    f"Not accepted, because {MAX_QUEUED_LINES} lines wait to be sent: {_abbreviate(line)}"
                )
                return
            self._pending_lines.append(line)
            if self._reconnect_deadline:
                self._renderer.print_note("(will be sent when the gateway is back)")
            self._line_queue.put_nowait(line)

    async def _process_queued_lines(self) -> None:
        """Execute queued lines one after the other; in an interactive chat, after what is unfinished is known."""
        if self._is_resuming:
            await self._resume_unfinished_runs()
        while True:
            await self._process_line(await self._line_queue.get(), self._execute_line)
            self._line_queue.task_done()

    async def _process_line(self, line: str, handler: LineHandler) -> None:
        """Execute the first queued line."""
        self._is_processing, self._reconnect_deadline_before_line = True, self._reconnect_deadline
        try:
            await handler(line)
        except InvalidInput:  # it was certainly not accepted
            self._mark_line_processed()
            raise
        self._mark_line_processed()

    def _mark_line_processed(self) -> None:
        self._pending_lines.popleft()
        self._is_processing = self._stop_after_send = False
        self._is_stopping = self._is_stopping and bool(self._pending_runs)
        self._refresh_prompt()

    def _refresh_prompt(self) -> None:
        if self._prompt:
            self._prompt.refresh()

    async def _finish_queued_lines(self) -> None:
        """Give queued lines and a requested stop a moment to finish before leaving."""
        last = [self._start_task(self._line_queue.join()), *([self._stop_task] if self._stop_task else [])]
        await asyncio.wait(last, timeout=LEAVE_TIMEOUT_SECONDS)

    async def _execute_line(self, line: str) -> None:
        """Execute a line. An error is printed and the chat continues; in a script it is raised."""
        name, _, rest = line.strip().partition(" ")
        try:
            if name in self._commands:
                await self._execute_command(name, rest.strip())
            elif _is_slash_command(line):
                raise InvalidInput(f"There is no command {name!r}.", _UNKNOWN_COMMAND_HINT)
            elif name:
                await self._send_message(line)
        except AntiphonError as error:
            if self._reconnect_deadline or not self._prompt:
                raise
            self._renderer.print_note(_output.name_program(str(error)))

    async def _execute_command(self, name: str, argument: str) -> None:
        command = self._commands[name]
        if argument and not command.has_argument:
            raise InvalidInput(
                f"{name} takes no argument, so nothing was done.",
                f"Enter {name} alone, and a message on a line of its own.",
            )
        await command.handler(argument)

    async def _send_message(self, text: str) -> None:
        run_id = uuid.uuid4().hex
        self._renderer.expect_answer(run_id)
        message = IncomingMessage(session=self._session, content=text, idempotency_key=run_id)
        await self._backend.submit(message)
        if self._pending_runs:
            waits = ", which waits for your approval" if self._renderer.has_undecided_approval else ""
            self._renderer.print_note(f"(queued behind the current answer{waits})")
        self._add_pending_run(run_id)
        if self._stop_after_send:
            await self._backend.stop(self._session, run_id)

    def _add_pending_run(self, run_id: str) -> None:
        self._pending_runs.append(run_id)
        self._run_queue.put_nowait(run_id)

    async def _wait_until_answered(self) -> None:
        """Wait until every line is executed and every answer is complete."""
        await self._line_queue.join()
        await self._run_queue.join()

    async def _wait_for_answers(self) -> None:
        """Wait for each answer in turn, as long as the chat lasts."""
        while True:
            view = await self._wait_for_run(await self._run_queue.get())
            self._pending_runs.popleft()
            self._is_stopping = False
            self._record_run_end(view)
            self._run_queue.task_done()
            self._refresh_prompt()

    def _record_run_end(self, view: RunView) -> None:
        self.failed = self.failed or view.state != "ok"
        self.provider_failed = self.provider_failed or view.error_code == "provider_error"
        if self._on_end:
            self._on_end(view)

    async def _wait_for_run(self, run_id: str) -> RunView:
        while True:
            view = await self._backend.wait(run_id, RUN_WAIT_SECONDS)
            if view.has_ended:
                break
        if not await self._renderer.wait_until_shown(run_id, FEED_LAG_SECONDS):
            self._renderer.show_run_end(run_id, view.state, view.reply, view.error)
        return view

    # --- events ---

    async def _show_events(self) -> None:
        """Show events as long as the feed works; without it, the ends of runs are still polled."""
        try:
            await self._show_pending_approvals()
            async for event in self._backend.follow(self._session):
                if isinstance(event, MessageAppended):
                    entry = {**msgspec.json.decode(event.body), "runId": event.run_id}
                    await speakers.look_up_speakers(self._backend, [entry], self._renderer.known)
                self._renderer.show_event(event)
        except AntiphonError:
            if self._reconnect_deadline:
                raise
        await self._leaving.wait()

    async def _show_pending_approvals(self) -> None:
        """Show the calls that were waiting before the chat began, if the reader may decide on them."""
        with suppress(Forbidden, NotFound):
            for approval in await self._backend.list_approvals(self._session):
                self._renderer.show_approval(approval)

    def _handle_interrupt(self) -> None:
        """Handle Ctrl-C: stop the answer; leave if none is in progress, or if stopping it takes too long.

        A message that is still being sent is stopped as soon as it is accepted; a script does not wait for that.
        """
        self.interrupted = True
        if self._is_stopping or not (self._pending_runs or (self._prompt and self._pending_lines)):
            self._leaving.set()
            return
        self._is_stopping = True
        if self._pending_runs:
            self._stop_task = self._start_task(self._execute_line("/stop"))
        else:
            self._stop_after_send = True
        if self._reconnect_deadline or self._stop_after_send:
            when = "when the gateway is back" if self._reconnect_deadline else "as soon as it begins"
            answered = self._pending_runs or not _is_slash_command(self._pending_lines[0])
            stopped = f"The answer will be stopped {when}. " if answered else ""
            self._renderer.print_note(f"{stopped}Press Ctrl-C again or Ctrl-D to leave.")

    # --- commands ---

    async def _start_new_conversation(self, _: str) -> None:
        old = await self._backend.describe(self._session)
        await self._backend.renew(self._session, expected=old.session_id)
        self._renderer.print_result(
            "Started a new conversation. To read the old one: "
            f"{_output.format_program()} sessions history {old.session_id}"
        )

    async def _stop_answer(self, _: str) -> None:
        # Only the current answer: queued runs may belong to another client.
        running = self._pending_runs or await self._backend.list_unfinished(self._session)
        if not running or not (await self._backend.stop(self._session, running[0])).run_ids:
            self._renderer.print_result("Nothing is running.")

    async def _set_send_policy(self, argument: str) -> None:
        if parse_send_command(text := f"/send {argument}") is None:
            raise InvalidInput("/send needs one of: on, off, inherit.", "Enter, for example, /send off.")
        await self._send_message(text)

    async def _decide_approval(self, argument: str) -> None:
        approval_id, _, decision = argument.partition(" ")
        if decision.strip() not in APPROVAL_DECISIONS:
            decisions = ", ".join(APPROVAL_DECISIONS)
            raise InvalidInput(
                f"/approve needs the id of a waiting call and one of: {decisions}.",
                f"Enter /approve ID {APPROVAL_DECISIONS[0]}; `antiphon approvals` lists the ids.",
            )
        await self._backend.resolve_approval(
            await find_approval_id(self._backend, approval_id), decision.strip()
        )

    async def _show_history(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and 0 < int(argument) <= 1000):
            raise InvalidInput("/history takes a number from 1 to 1000.", "Enter, for example, /history 50.")
        page = await self._backend.read_history(
            self._session, HistoryFilter(limit=int(argument or 10), include_tools=True, without_internal=True)
        )
        await speakers.look_up_page_speakers(self._backend, page.messages, self._renderer.known)
        whole = f"{_output.format_program()} sessions history {self._session} --json"
        for item in page.messages:
            heading = speakers.format_heading(item, self._renderer.known, self._renderer.speaker)
            self._renderer.print_result(f"{heading} {_output.format_entry_text(item, whole=whole)}")
        if not page.messages:
            self._renderer.print_result("There are no messages yet.")

    async def _show_status(self, _: str) -> None:
        view = await self._backend.describe(self._session)
        page = await self._backend.read_history(self._session, HistoryFilter(limit=1))
        for name, value in (
            ("session", view.key),
            ("session id", view.session_id),
            ("model", view.model or "the agent's"),
            ("entries", page.total),
            ("tokens", view.total_tokens or 0),
            ("pending answers", len(self._pending_runs)),
        ):
            self._renderer.print_result(f"{name:<16} {value}")

    async def _show_help(self, _: str) -> None:
        for name, command in self._commands.items():
            self._renderer.print_result(f"{name:<9} {command.help}")
        self._renderer.print_result(
            f"{QUIT_COMMAND:<9} leave (also Ctrl-D, Ctrl-C at the prompt, or Ctrl-C twice)"
        )
        self._renderer.print_result(
            "A line that ends in \\ continues on the next one. Everything else is sent to the agent."
        )

    def _report_unfinished(self) -> None:
        """Report what happens to pending answers and to lines that were not executed."""
        notices: list[str] = []
        continuing = len(self._pending_runs)
        if continuing and self._is_stopping and _has_succeeded(self._stop_task):
            continuing -= 1
            notices.append("The answer was stopped.")
        if continuing:
            answers = "The answer continues" if continuing == 1 else "The answers continue"
            notices.append(f"{answers} {self._describe_continuation()}.")
        lines = [*self._pending_lines, *([self._continued_text] if self._continued_text else [])]
        if self._is_processing and (
            self._reconnect_deadline_before_line is None
            or self._reconnect_deadline_before_line != self._reconnect_deadline
        ):
            doubtful = lines.pop(0)
            if not _is_slash_command(doubtful):
                look = f"`{_output.format_program()} sessions history {self._session}`"
                notices.append(f"{look} shows whether this was sent: {_abbreviate(doubtful)}")
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            notices.append(f"Not sent: {_abbreviate(lines[0])}{more}")
        if self._pipe and self._pipe.has_more():
            notices.append("The rest of the input was not sent.")
        if notices:
            self._renderer.print_warning(" ".join(notices))

    def _describe_continuation(self) -> str:
        if self._gateway is None:
            return "when Antiphon is started again"
        return "at the gateway once it is back" if self._reconnect_deadline else "at the gateway"

    async def _load_last_question(self) -> str:
        page = await self._backend.read_history(self._session, HistoryFilter(limit=20, without_internal=True))
        messages = [_output.format_entry_text(item) for item in page.messages if item.get("role") == "user"]
        if not messages:
            return "(its question is still queued)"
        return _abbreviate(messages[-1])


def _has_succeeded(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.done() and not task.cancelled() and task.exception() is None


def _is_slash_command(line: str) -> bool:
    """Whether a line is a chat command, not a message that begins with a path."""
    name = line.strip().partition(" ")[0]
    return name.startswith("/") and "/" not in name[1:]


def _abbreviate(text: str) -> str:
    line = _output.clean_line(text.strip())
    return f"{line[:60]}…" if len(line) > 64 else line
