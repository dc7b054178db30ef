"""`antiphon demo`: agents that message each other or work, drawn as it happens.

Starts an app with the rehearsal model in a directory of its own. Messages from a person start the conversation; the
output is built only from the app's events. The texts are in `_demo_stories`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from antiphon.bus import EVERY_SESSION_TOPIC, Event, Gap, Listener, MessageAppended, RunChanged, ToolPhase
from antiphon.cli import _output
from antiphon.cli._demo_stories import (
    MAIN_SESSION_KEY,
    PERSON_NAME,
    STORIES_BY_NAME,
    DemoStory,
    strip_script_lines,
)
from antiphon.cli._move_diagram import (
    ASCII_CHARACTERS,
    MAX_DIAGRAM_COLUMNS,
    UNICODE_CHARACTERS,
    make_diagram,
)
from antiphon.cli._moves import Move, MoveBuilder
from antiphon.cli._options import Settings, common_options
from antiphon.cli._param_types import FiniteNumberParam
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.app import App

DEFAULT_PACE_SECONDS = 0.35  # how long a step is shown before the next one
MAX_PACE_SECONDS = 10.0
EVENT_TIMEOUT_SECONDS = 20.0  # without any event, after which the demo gives up


@click.command(
    help="Watch agents at work. `talk` (default) shows two agents and a sub-agent in conversation, `work` a sub-agent "
    "that reads a file, runs a command in a sandbox and writes a file. Needs no model, key or gateway: the rehearsal "
    "model answers, in a temporary state directory, which is removed afterwards, except after `work`."
)
@click.argument("story", type=click.Choice([*STORIES_BY_NAME]), default="talk")
@click.option("--fast", is_flag=True, help="Do not pause between moves.")
@click.option(
    "--pace",
    type=FiniteNumberParam("seconds", 0, MAX_PACE_SECONDS),
    metavar="SECONDS",
    help=f"Pause after each move; default: {DEFAULT_PACE_SECONDS:g} on a terminal, else 0.",
)
@click.option("--keep", is_flag=True, help="Keep the state directory and print its path.")
@common_options
@click.pass_obj
def command(settings: Settings, story: str, fast: bool, pace: float | None, keep: bool) -> int:
    from antiphon.event_loop import run

    if settings.state_dir or settings.config:
        raise click.UsageError("The demo uses a temporary state directory. Remove --state-dir and --config.")
    if pace is None:
        pace = DEFAULT_PACE_SECONDS if sys.stdout.isatty() else 0.0
    chosen = STORIES_BY_NAME[story]
    presenter = _JsonPresenter() if settings.json else _DiagramPresenter(chosen, 0.0 if fast else pace)
    keep = keep or chosen.written_file is not None
    return run(_run_demo(chosen, presenter, debug=settings.debug, keep=keep))


async def _run_demo(
    story: DemoStory, presenter: _JsonPresenter | _DiagramPresenter, *, debug: bool, keep: bool
) -> int:
    with _cancel_on_signal() as stopped:
        try:
            with _make_state_dir(story.config, keep=keep) as state_dir:
                await _play_scenes(story, presenter, state_dir, debug=debug, keep=keep)
        except asyncio.CancelledError:
            if not stopped:
                raise
    if not stopped:
        return 0
    click.echo("\nStopped." if keep else "\nStopped. Nothing is left behind.", err=True)
    return 128 + stopped[0]


@contextmanager
def _cancel_on_signal() -> Generator[list[int]]:
    """Cancel the task on a signal, so that its files are removed; yield the list of received signals."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _make_state_dir(config: dict[str, Any], *, keep: bool) -> Generator[Path]:
    from tempfile import mkdtemp

    state_dir = Path(mkdtemp(prefix="antiphon-demo-"))
    try:
        # Written to a file, so that a gateway started there later hosts the same agents.
        (state_dir / "config.json5").write_text(dumps(config, indent=2) + "\n", "utf-8")
        yield state_dir
    finally:
        if not keep:
            shutil.rmtree(state_dir, ignore_errors=True)


@asynccontextmanager
async def _open_demo_app(state_dir: Path, *, debug: bool) -> AsyncGenerator[tuple[App, Listener]]:
    """Open the app, with a listener for all its events."""
    from antiphon.app import open_app
    from antiphon.cli._logging import configure_logging
    from antiphon.config import load

    configure_logging(state_dir, debug=debug)
    config = load(state_dir / "config.json5").config
    async with open_app(config, state_dir) as app, app.bus.listen(EVERY_SESSION_TOPIC) as listener:
        yield app, listener


async def _play_scenes(
    story: DemoStory,
    presenter: _JsonPresenter | _DiagramPresenter,
    state_dir: Path,
    *,
    debug: bool,
    keep: bool,
) -> None:
    from antiphon.access import Caller
    from antiphon.operations.types import IncomingMessage

    start = time.monotonic()
    operator = Caller.operator()
    builder = MoveBuilder(story.names_by_session_key, PERSON_NAME, strip_script_lines)
    async with _open_demo_app(state_dir, debug=debug) as (app, listener):
        for session_key in story.names_by_session_key:
            await app.operations.sessions.open(operator, session_key)
        for scene in story.scenes:
            await presenter.begin_scene(scene.title)
            await app.operations.messages.submit(
                operator, IncomingMessage(session=MAIN_SESSION_KEY, content=scene.message)
            )
            while not scene.ends <= builder.finished:
                event = _check_event(await listener.get(EVENT_TIMEOUT_SECONDS))
                await presenter.show_event(event, builder.process_event(event))
        written = await asyncio.to_thread(_find_written_file, app, story, state_dir)
        summary = await _build_summary(app, builder, time.monotonic() - start)
    presenter.show_summary(summary, state_dir if keep else None, written)


def _find_written_file(app: App, story: DemoStory, state_dir: Path) -> Path | None:
    if story.written_file is None:
        return None
    if written := next(state_dir.rglob(story.written_file), None):
        return written
    if reason := app.toolbox.tools["exec"].explain_absence("main", is_sandboxed=False):
        raise AntiphonError("The demo failed: its command could not run.", reason)
    raise _make_demo_error("the sub-agent wrote no file")


def _check_event(event: Event | None) -> Event:
    """Return the event; raise if it means that the demo has failed."""
    match event:
        case None | Gap():
            raise _make_demo_error("no more events arrived")
        case RunChanged(state=state) if state not in {"queued", "running", "ok"}:
            raise _make_demo_error(f"a run ended as {state!r}")
        case ToolPhase(is_error=True, name=name):
            raise _make_demo_error(f"the tool {name!r} failed")
        case _:
            return event


def _make_demo_error(what: str) -> AntiphonError:
    return AntiphonError(f"The demo failed: {what}.", "Run it again with --debug and --keep to see why.")


# --- summary ---


class ParticipantSummary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Counts for one participant."""

    name: str
    runs: int
    messages: int
    tokens_in: int
    tokens_out: int


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    participants: list[ParticipantSummary] = msgspec.field(name="voices")
    turns: int
    """Turns of the exchange after the first reply."""
    deliveries: dict[str, int]
    """Number of deliveries by state."""
    tasks: dict[str, str | None]
    """How each sub-agent's task ended."""
    seconds: float


async def _build_summary(app: App, builder: MoveBuilder, seconds: float) -> DemoSummary:
    """Build the summary from the events and from the store, which must agree that everything has ended."""
    from antiphon.access import Caller

    operator = Caller.operator()
    page = await app.operations.deliveries.list(operator)
    tasks = await app.operations.subagents.list(operator, MAIN_SESSION_KEY)
    if set(page.count_by_state) != {"delivered"} or any(task.phase != "settled" for task in tasks):
        raise _make_demo_error("a delivery or a sub-agent has not finished")
    return DemoSummary(
        participants=[
            ParticipantSummary(
                name=name,
                runs=tally.runs,
                messages=tally.messages,
                tokens_in=tally.tokens_in,
                tokens_out=tally.tokens_out,
            )
            for name, tally in builder.tallies.items()
        ],
        turns=sum(builder.turns.values()),
        deliveries=page.count_by_state,
        tasks={task.label or task.child_session_key: task.status for task in tasks},
        seconds=round(seconds, 3),
    )


# --- output ---


class _JsonPresenter:
    """Prints events as one JSON value per line, then the summary."""

    async def begin_scene(self, title: str) -> None:
        """Print nothing: a scene is not an event."""

    async def show_event(self, event: Event, moves: Sequence[Move]) -> None:
        plain: dict[str, Any] = msgspec.to_builtins(event)
        if isinstance(event, MessageAppended):
            plain["body"] = msgspec.json.decode(event.body)
        _output.print_json(plain, compact=True)

    def show_summary(self, summary: DemoSummary, kept: Path | None, written: Path | None) -> None:
        plain: dict[str, Any] = msgspec.to_builtins(summary)
        paths = {
            "stateDir": str(kept) if kept else None,
            **({"writtenFile": str(written)} if written else {}),
        }
        _output.print_json({"event": "summary", **plain, **paths}, compact=True)


class _DiagramPresenter:
    """Draws each step after it happened, at a readable pace."""

    def __init__(self, story: DemoStory, pace: float) -> None:
        self._story = story
        self._pace = pace
        self._waited = 0.0
        self._width = min(shutil.get_terminal_size().columns, MAX_DIAGRAM_COLUMNS)
        self._diagram = make_diagram(
            [PERSON_NAME, *story.names_by_session_key.values()],
            self._width,
            UNICODE_CHARACTERS if _can_print_unicode() else ASCII_CHARACTERS,
        )
        self._print_wrapped(story.introduction)
        click.echo()

    async def begin_scene(self, title: str) -> None:
        await self._print_lines(self._diagram.draw_title(title))

    async def show_event(self, event: Event, moves: Sequence[Move]) -> None:
        for move in moves:
            await self._print_lines(self._diagram.draw([move]))

    def show_summary(self, summary: DemoSummary, kept: Path | None, written: Path | None) -> None:
        click.echo()
        rows = [
            [part.name, str(part.runs), str(part.messages), str(part.tokens_in), str(part.tokens_out)]
            for part in summary.participants
        ]
        _output.print_table(("who", "runs", "messages", "tokens read", "written"), rows)
        click.echo()
        for what, outcome in self._format_outcome(summary):
            self._print_wrapped(f"{what:<11} {outcome}", "    ")
        if written:
            click.echo(f"{'file':<11} {written}")
        if kept:
            click.echo(
                f"{'kept':<11} {_output.format_program()} --state-dir {kept} sessions history main --tools"
            )
        click.echo()
        for number, (what, why) in enumerate(self._story.next_steps):
            command = _output.name_program(what)
            self._print_wrapped(
                f"{'      ' if number else 'Next: '}{command:<22} {_output.name_program(why)}", "        "
            )

    def _format_outcome(self, summary: DemoSummary) -> Iterator[tuple[str, str]]:
        if summary.turns:
            yield "exchange", f"settled: one request, one reply, {summary.turns} reply-back turns"
        for name, status in summary.tasks.items():
            yield "sub-agent", f"{name} reported {status!r}"
        yield "deliveries", f"{summary.deliveries['delivered']}, all delivered"
        reading = f", {self._waited:.1f} s of them for reading along" if self._waited else ""
        yield "time", f"{summary.seconds:.1f} s{reading}"

    async def _print_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            click.echo(line)
        if self._pace:
            await asyncio.sleep(self._pace)
            self._waited += self._pace

    def _print_wrapped(self, text: str, indent: str = "") -> None:
        lines = textwrap.wrap(text, self._width, break_on_hyphens=False, subsequent_indent=indent)
        click.echo("\n".join(lines))


def _can_print_unicode() -> bool:
    """Whether standard output supports more than ASCII."""
    return sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf")
