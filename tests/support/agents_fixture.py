"""An app with several agents, each the rehearsal model or a function that records its prompts.

The store, the engine, the tools and the outbox are real. A test supplies the answers, the channels and the clock.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from antiphon import keys
from antiphon.access import Caller
from antiphon.app import App, open_app
from antiphon.bus import Event, Listener, SessionChanged
from antiphon.clock import Clock, SystemClock
from antiphon.config import Config
from antiphon.engine.outbox.delivery_channel import DeliveryChannel, Pace, Part, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import NotSent, Refused
from antiphon.messages import AssistantMessage, Message, ToolResult, UserMessage
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage as Words
from antiphon.operations.types import RunView
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from support import app_fixture
from support.app_fixture import BOUND, DATABASE, MAIN, OPERATOR, make_answer
from support.commit_watcher import CommitWatcher
from support.databases import query_database

HELPER = "agent:helper:main"
QUICK_TIMINGS = EngineTimings(sweep_interval_seconds=0.02)
OPEN_ACCESS = {"tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}}}
"""Settings with which every agent can see and message every other."""

Answer = str | AssistantMessage
wait_until = (
    app_fixture.wait_until
)  # for conditions outside the store; `AgentsFixture.until` is for those in it
_numbers = itertools.count(1)


def make_agents_config(*agents: str | Mapping[str, Any], **sections: Any) -> Config:
    """Configure `main` and these agents, which can reach each other unless a section says otherwise."""
    listed: list[dict[str, Any]] = [
        {"id": agent} if isinstance(agent, str) else dict(agent) for agent in agents
    ]
    if all(agent["id"] != "main" for agent in listed):
        listed.insert(0, {"id": "main", "default": True})
    return Config.model_validate(
        merge_settings({"agents": {"list": listed}}, merge_settings(OPEN_ACCESS, sections))
    )


def merge_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two settings recursively; the second wins where they differ."""
    result = dict(one)
    for name, value in other.items():
        below = result.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[name] = merge_settings(cast(Mapping[str, Any], below), cast(Mapping[str, Any], value))
        else:
            result[name] = value
    return result


class ScriptedAgent:
    """A function agent that records every prompt and gives scripted answers."""

    def __init__(
        self, answer: Callable[[Prompt], Answer | Awaitable[Answer]] | Answer = "understood"
    ) -> None:
        self._answer = answer
        self.prompts: list[Prompt] = []

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        self.prompts.append(prompt)
        answer = self._answer(prompt) if callable(self._answer) else self._answer
        if isinstance(answer, Awaitable):
            answer = await answer
        return make_answer(answer) if isinstance(answer, str) else answer

    def list_prompts(self, phase: str) -> list[Prompt]:
        """Return the prompts of one kind of step: `request`, `turn`, `announce` or `wake`."""
        return [prompt for prompt in self.prompts if get_phase(prompt) == phase]


def get_phase(prompt: Prompt) -> str:
    return _phase(prompt.run_id)


def _phase(run_id: str) -> str:
    head, colon, _ = run_id.partition(":")
    return head if colon else "request"


def get_last_user_text(prompt: Prompt) -> str:
    """Return the last user message of a prompt."""
    content = [message for message in prompt.messages if isinstance(message, UserMessage)][-1].content
    assert isinstance(content, str)
    return content


def get_tool_result(prompt: Prompt) -> dict[str, Any] | None:
    """Return the tool result at the end of a prompt, or None if it ends with something else."""
    last: Message = prompt.messages[-1]
    return json.loads(last.text) if isinstance(last, ToolResult) else None


class RecordingChannel:
    """A channel that records what is posted, and fails on demand."""

    can_find = False

    def __init__(
        self, *, is_idempotent: bool = False, fails: Callable[[str], Exception | None] | None = None
    ) -> None:
        self.is_idempotent = is_idempotent
        self.idempotency_seconds = float("inf") if is_idempotent else 0.0
        self.posts: list[tuple[str, Destination, str]] = []
        """Every text that people there would see."""
        self.tries: list[str] = []
        self._fails = fails

    def is_ready(self, account_id: str | None) -> bool:
        return True

    def get_pace(self, destination: Destination) -> Pace:
        return Pace()

    def render(self, text: str, destination: Destination) -> list[RenderedPart]:
        return [RenderedPart(text)]

    async def send(self, part: Part) -> Receipt:
        self.tries.append(part.key)
        error = self._fails(part.key) if self._fails else None
        is_repeated = self.is_idempotent and part.key in (seen for seen, *_ in self.posts)
        if not is_repeated and not isinstance(error, (NotSent, Refused)):
            self.posts.append((part.key, part.destination, part.text))
        if error:
            raise error
        return Receipt(f"message-{len(self.posts)}")

    async def find(self, part: Part, since: int) -> Receipt | None:
        return None

    @property
    def texts(self) -> list[str]:
        return [text for *_, text in self.posts]


@dataclass(slots=True)
class AgentsFixture:
    """An open app, with helpers to act in it as a person or as an agent."""

    app: App
    path: Path
    commits: CommitWatcher

    @property
    def operations(self) -> Operations:
        return self.app.operations

    # --- as a person ---

    async def say(self, words: str, session: str = MAIN, **options: Any) -> str:
        message = Words(session=session, content=words, **options)
        return (await self.operations.messages.submit(OPERATOR, message)).run_id

    async def wait_for_end(self, run_id: str, seconds: float = BOUND) -> RunView:
        view = await self.operations.runs.wait(OPERATOR, run_id, seconds)
        assert view.has_ended, f"{run_id} is still {view.state} after {seconds} seconds"
        return view

    async def ask(self, words: str, session: str = MAIN, **options: Any) -> RunView:
        return await self.wait_for_end(await self.say(words, session, **options))

    async def open_sessions(self, *sessions: str) -> None:
        for session in sessions:
            await self.operations.sessions.open(OPERATOR, session)

    # --- as an agent ---

    async def call_tool(self, tool: str, session: str = MAIN, /, **arguments: Any) -> dict[str, Any]:
        """Call a tool from the rehearsal model in a run of the session; return its result."""
        view = await self.ask(f"call {tool} {json.dumps(arguments)}", session)
        assert view.reply is not None, view.error
        return json.loads(view.reply)

    async def invoke_tool(self, tool: str, session: str = MAIN, /, **arguments: Any) -> ToolOutput:
        """Call a tool as the agent of the session, outside any run."""
        caller = Caller.agent(keys.parse(session).agent_id, session)
        call = ToolRequest(caller=caller, run_id="no run", call_id=f"{next(_numbers)}", arguments=arguments)
        return await self.app.toolbox.tools[tool].invoke(call)

    async def use(self, tool: str, session: str = MAIN, /, **arguments: Any) -> dict[str, Any]:
        return (await self.invoke_tool(tool, session, **arguments)).details

    # --- reading ---

    def rows(self, sql: str, *params: object) -> list[dict[str, Any]]:
        """Query the database directly."""
        return query_database(self.path / DATABASE, sql, *params)

    async def transcript(self, session: str = MAIN) -> list[dict[str, Any]]:
        wanted = HistoryFilter(limit=1000, include_tools=True, after=0)
        return (await self.operations.transcripts.read(OPERATOR, session, wanted)).messages

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition on the store, checked after each commit."""
        await self.commits.until(condition)

    async def wait_until_idle(self, seconds: float = BOUND) -> None:
        """Wait until every run, exchange, task and delivery has ended."""

        async def is_idle() -> bool:
            (left,) = self.rows(
                "SELECT (SELECT count(*) FROM runs WHERE state IN ('queued', 'running'))"
                " + (SELECT count(*) FROM exchanges WHERE phase <> 'settled')"
                " + (SELECT count(*) FROM tasks WHERE phase <> 'settled')"
                " + (SELECT count(*) FROM deliveries WHERE state IN ('pending', 'sending')) AS n"
            )
            return left["n"] == 0

        await self.commits.until(is_idle, seconds)

    async def collect_events(self, events: Listener) -> list[Event]:
        """Return all events until the app is idle.

        The last row is committed before its event is published, so one more commit of our own flushes that event.
        """
        await self.wait_until_idle()
        await self.open_sessions(f"agent:main:dashboard:after-{next(_numbers)}")
        collected: list[Event] = []
        while (event := await events.get(0)) is not None:
            collected.append(event)
        return collected

    def list_steps(self) -> list[str]:
        """List the steps of all exchanges and tasks in the order they were queued, as `agent:phase`."""
        sql = (
            "SELECT r.id, s.agent_id FROM runs r JOIN sessions s ON s.id = r.session"
            " WHERE r.exchange IS NOT NULL OR r.task IS NOT NULL ORDER BY r.n"
        )
        return [f"{row['agent_id']}:{_phase(row['id'])}" for row in self.rows(sql)]


@asynccontextmanager
async def open_agents_fixture(
    config: Config,
    path: Path,
    *,
    functions: Mapping[str, AgentFunction | ScriptedAgent] | None = None,
    channels: Mapping[str, DeliveryChannel] | None = None,
    clock: Clock | None = None,
    timings: EngineTimings = QUICK_TIMINGS,
    tools: Any = None,
) -> AsyncGenerator[AgentsFixture]:
    """Open an app; agents without a function use the rehearsal model."""
    clock = clock or SystemClock()
    runtimes = {agent: FunctionRuntime(fn, clock=clock) for agent, fn in (functions or {}).items()}
    commits = CommitWatcher()
    async with open_app(
        config,
        path,
        functions=runtimes,
        channels=channels,
        clock=clock,
        timings=timings,
        tools=tools,
        on_commit=commits,
    ) as opened:
        yield AgentsFixture(opened, path, commits)


async def list_changed_sessions(
    agents: AgentsFixture, reason: str, cause: Callable[[], Awaitable[object]]
) -> list[str]:
    """Run `cause`, and return the keys of sessions that changed for this reason until the app is idle."""
    changed: list[str] = []
    async with agents.app.bus.listen("sessions") as events:
        await cause()
        for event in await agents.collect_events(events):
            if isinstance(event, SessionChanged) and event.reason == reason:
                changed.append(event.session_key)
    return changed
