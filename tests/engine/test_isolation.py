"""No identity is global: sessions never see each other, and a state directory has one owner."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from antiphon.bus import Delta, MessageAppended, session_topic
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, ToolResult, UserMessage
from antiphon.runtimes import Deltas, Prompt
from support.app_fixture import BOUND, OPERATOR, make_answer, make_tool, make_tool_calls, open_app_fixture
from support.databases import query_database

pytestmark = pytest.mark.anyio

SESSIONS = 200
whoami: ContextVar[str] = ContextVar("whoami", default="nobody")


class Echo:
    """Says the id of its session in pieces, giving way at random, and asks a tool who is calling."""

    context_window = None
    reads_history = True

    def __init__(self) -> None:
        self._rng = random.Random(37)

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        # What an earlier run left in a context variable would be inherited by this one.
        assert whoami.get() in {"nobody", prompt.run_id}, "another run's context"
        whoami.set(prompt.run_id)
        await self._give_way()
        said = [message.content for message in prompt.messages if isinstance(message, UserMessage)]
        assert set(map(str, said)) == {prompt.session_key}, f"{prompt.session_key} was shown {said}"
        seen = [message.text for message in prompt.messages if isinstance(message, ToolResult)]
        assert set(seen) <= {prompt.session_key}
        if not isinstance(prompt.messages[-1], ToolResult):
            return make_tool_calls("who")
        async for piece in self._pieces(prompt.session_key):
            deltas.text(piece)
        return make_answer(prompt.session_key)

    async def _pieces(self, words: str) -> AsyncGenerator[str, None]:
        for at in range(0, len(words), 7):
            await self._give_way()
            yield words[at : at + 7]

    async def _give_way(self) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)

    async def close(self) -> None: ...


@pytest.mark.requirement("G37")
async def test_two_hundred_interleaved_sessions_never_see_each_other(tmp_path: Path) -> None:
    async def who(call: ToolRequest) -> ToolOutput:
        await asyncio.sleep(0)
        return ToolOutput(text=call.caller.session_key or "")

    keys = [f"agent:main:direct:{number}" for number in range(SESSIONS)]
    async with open_app_fixture(tmp_path, Echo(), tools=[make_tool("who", who)]) as app:
        rows = {key: (await app.create(key))["id"] for key in keys}

        async def listen(key: str) -> tuple[str, set[str]]:
            """What a follower of one session hears of two turns: pieces, and whose entries."""
            pieces, owners = "", set[str]()
            async with asyncio.timeout(BOUND * 9), app.bus.listen(session_topic(rows[key])) as events:
                listening.release()
                while len(owners) < 1 or entries[key] < 8:
                    event = await events.get(BOUND * 3)
                    if isinstance(event, Delta):
                        pieces += event.text
                    if isinstance(event, MessageAppended):
                        owners.add(event.session_id)
                        entries[key] += 1
            return pieces, owners

        listening = asyncio.Semaphore(0)
        entries = dict.fromkeys(keys, 0)
        listeners = {key: asyncio.create_task(listen(key)) for key in keys}
        for _ in keys:
            await listening.acquire()
        for _ in range(2):
            ids = await asyncio.gather(*(app.say(key, key) for key in keys))
            for key, run_id in zip(keys, ids, strict=True):
                view = await app.operations.runs.wait(OPERATOR, run_id, BOUND * 3)
                assert (view.state, view.reply, view.session_key) == ("ok", key, key), view.error
        for key in keys:
            pieces, owners = await listeners[key]
            assert pieces == key * 2
            assert owners == {(await app.operations.sessions.describe(OPERATOR, key)).session_id}
        said = app.rows(
            "SELECT s.key, s.id, r.session, m.body FROM messages m JOIN sessions s ON s.transcript = m.transcript "
            "JOIN runs r ON r.n = m.run"
        )
        assert len(said) == 8 * SESSIONS
        assert not any(strange(row) for row in said)


def strange(row: dict[str, Any]) -> bool:
    """Whether an entry is of another session's run, or names another session."""
    return row["session"] != row["id"] or ("direct:" in row["body"] and f'"{row["key"]}"' not in row["body"])


@pytest.mark.requirement("G37")
async def test_a_run_inherits_nothing_from_the_run_that_caused_it(tmp_path: Path) -> None:
    """A task copies the context it is made in, and lanes are made where a run is submitted: inside a tool, say."""
    seen: list[str] = []

    async def tell(call: ToolRequest) -> ToolOutput:
        whoami.set("the teller")
        run_id = await app.say("told", "agent:main:direct:told")
        return ToolOutput(text=(await app.wait_for_end(run_id)).reply or "")

    async def agent(prompt: Prompt) -> AssistantMessage:
        if prompt.session_key == "agent:main:direct:told":
            seen.append(whoami.get())
            return make_answer("heard")
        whoami.set("the teller")
        return make_answer("told") if isinstance(prompt.messages[-1], ToolResult) else make_tool_calls("tell")

    whoami.set("the test")
    async with open_app_fixture(tmp_path, agent, tools=[make_tool("tell", tell)]) as app:
        assert (await app.ask("go")).reply == "told"
    assert seen == ["nobody"]


OWNER = """
import asyncio, sys
from pathlib import Path
from typing import Any
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.errors import AntiphonError
from antiphon.app import open_app_operations
from antiphon.operations.types import (IncomingMessage)

async def main():
    try:
        async with open_app_operations(Config(), Path(sys.argv[1])) as operations:
            print("hosting", flush=True)
            for line in sys.stdin:
                message = IncomingMessage(session="main", content=line)
                accepted = await operations.messages.submit(Caller.operator(), message)
                view = await operations.runs.wait(Caller.operator(), accepted.run_id, 10)
                print(view.reply, flush=True)
    except AntiphonError as error:
        print(error.code, error, flush=True)
        sys.exit(error.exit_code)

asyncio.run(main())
"""


def owner(state_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(state_dir)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.sqlite_only  # who owns the directory, with either database
@pytest.mark.requirement("G2", "G13")
def test_a_second_process_says_so_and_disturbs_nothing(tmp_path: Path) -> None:
    first = owner(tmp_path / "state")
    assert first.stdin and first.stdout
    try:
        assert first.stdout.readline() == "hosting\n"
        second = owner(tmp_path / "state")
        told, _ = second.communicate("say never\n", timeout=30)
        assert told.startswith("store_locked") and str(first.pid) in told
        assert second.returncode == 7
        first.stdin.write("say still here\n")
        first.stdin.flush()
        assert first.stdout.readline() == "still here\n"
        # A killed owner leaves a lock behind that blocks no other process.
        os.kill(first.pid, signal.SIGKILL)
        first.wait(30)
    finally:
        first.kill()
        first.communicate()
    third = owner(tmp_path / "state")
    told, _ = third.communicate("say my turn\n", timeout=30)
    assert told == "hosting\nmy turn\n"
    assert (
        len(query_database(tmp_path / "state" / "antiphon.db", "SELECT 1 FROM runs WHERE state = 'ok'")) == 2
    )
