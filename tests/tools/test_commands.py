"""The tools `exec` and `process` in a real app: what the model reads, and what becomes of the processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.config import Config
from antiphon.errors import InvalidInput
from antiphon.messages import AssistantMessage, TextBlock, ThinkingBlock, ToolCall, ToolResult
from antiphon.runtimes import Prompt
from antiphon.workspace.command_launch import CommandLauncher, Launch, check_launch
from antiphon.workspace.locations import SessionWorkspaceLocator
from antiphon.workspace.sandbox import Sandboxes
from support.agents_fixture import (
    OPERATOR,
    AgentsFixture,
    ScriptedAgent,
    get_phase,
    make_agents_config,
    merge_settings,
    open_agents_fixture,
)
from support.app_fixture import MAIN
from support.keepers import end_keeper, find_keeper, find_marked, wait_until_gone, wait_until_running
from tools.command_gateway import RUN_ID

pytestmark = pytest.mark.anyio

GATEWAY = Path(__file__).with_name("command_gateway.py")

ON_THIS_MACHINE = {"tools": {"exec": {"host": "gateway", "security": "full", "ask": "off"}}}


def configure(**exec_settings: Any) -> Config:
    return make_agents_config(**merge_settings(ON_THIS_MACHINE, {"tools": {"exec": exec_settings}}))


@asynccontextmanager
async def opened(path: Path, config: Config | None = None, **options: Any) -> AsyncGenerator[AgentsFixture]:
    try:
        async with open_agents_fixture(config or configure(), path, **options) as agents:
            yield agents
    finally:
        end_keeper(path)


async def run(
    agents: AgentsFixture, command: str, session: str = MAIN, tool: str = "exec", /, **more: Any
) -> str:
    """Let the rehearsal model run a command; return what it reads."""
    view = await agents.ask(f"call {tool} {json.dumps({'command': command, **more})}", session)
    assert view.reply is not None, view.error
    return view.reply


async def process(agents: AgentsFixture, session: str = MAIN, /, **arguments: Any) -> str:
    view = await agents.ask(f"call process {json.dumps(arguments)}", session)
    assert view.reply is not None, view.error
    return view.reply


def find_rows(agents: AgentsFixture) -> list[dict[str, Any]]:
    return agents.rows("SELECT * FROM exec_commands ORDER BY created_at, id")


def find_wakes(agents: AgentsFixture) -> list[str]:
    rows = agents.rows("SELECT input FROM runs WHERE id LIKE 'wake:exec:%' ORDER BY n")
    return [json.loads(row["input"])["content"] for row in rows]


@pytest.mark.requirement("T1", "T5", "AT1")
async def test_a_command_answers_with_its_exit_code_and_output(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        text = await run(agents, "echo out; echo err >&2; exit 7")
        assert text.startswith("Exit code 7 after ")
        assert text.endswith("\n\nout\nerr\n")
        assert "(no output)" in await run(agents, "true")
        [first, second] = find_rows(agents)
        assert (first["state"], first["exit_code"], first["output"]) == ("ended", 7, "out\nerr\n")
        assert (second["background"], second["stop_reason"]) == (0, None)
        assert find_wakes(agents) == []


@pytest.mark.requirement("T1")
async def test_bash_is_exec(tmp_path: Path) -> None:
    def answer(prompt: Prompt) -> str | AssistantMessage:
        last = prompt.messages[-1]
        return (
            last.text if isinstance(last, ToolResult) else make_calls([{"command": "echo two words"}], "bash")
        )

    async with opened(tmp_path, functions={"main": ScriptedAgent(answer)}) as agents:
        assert "two words" in ((await agents.ask("go")).reply or "")


def make_calls(calls: list[dict[str, Any]], name: str = "exec") -> AssistantMessage:
    made: list[TextBlock | ThinkingBlock | ToolCall] = [
        ToolCall(id=f"c{number}", name=name, arguments=arguments) for number, arguments in enumerate(calls)
    ]
    return AssistantMessage(content=made, timestamp=1)


@pytest.mark.requirement("T5")
async def test_names_of_arguments_in_other_programs_are_accepted(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        (tmp_path / "workspaces" / "main" / "sub").mkdir(parents=True)
        given = {
            "cmd": "pwd; echo $WORD",
            "working_dir": "sub",
            "yield_time_ms": 5000,
            "env": {"WORD": "hello"},
        }
        view = await agents.ask(f"call exec {json.dumps({**given, 'description': 'Shows the place'})}")
        assert view.reply is not None
        assert view.reply.endswith("/workspaces/main/sub\nhello\n")
        assert "There is no directory" in await run(agents, "pwd", workdir="nowhere")


@pytest.mark.requirement("T6")
async def test_the_environment_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_KEY", "canary-secret")
    async with opened(tmp_path, configure(pathPrepend=["/opt/first"])) as agents:
        text = await run(agents, "env; cat; echo end of input")
        assert "canary-secret" not in text
        assert "PATH=/opt/first:/usr/local/sbin" in text
        for expected in (
            "GIT_TERMINAL_PROMPT=0",
            "DEBIAN_FRONTEND=noninteractive",
            "PAGER=cat",
            "end of input",
        ):
            assert expected in text


@pytest.mark.requirement("T5", "AT4")
async def test_a_long_command_goes_on_and_wakes_its_session_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        go = tmp_path / "go"
        command = f"echo begun; while [ ! -e {go} ]; do sleep 0.02; done; echo done; exit 3"
        text = await run(agents, command, yieldMs=50)
        [row] = find_rows(agents)
        assert text.startswith("Running for ")
        assert repr(row["id"]) in text
        assert "You are notified when it ends" in text
        assert "running" in (await process(agents, action="list")).lower()
        assert "begun" in await process(agents, action="poll", sessionId=row["id"])
        go.touch()

        async def is_told() -> bool:
            return bool(find_wakes(agents))

        await agents.until(is_told)
        await agents.wait_until_idle()
        [wake] = find_wakes(agents)
        assert wake.startswith(f"The background command '{row['id']}' has ended. Exit code 3 after ")
        assert wake.endswith("begun\ndone")
        polled = await process(agents, action="poll", sessionId=row["id"])
        assert polled.startswith("Exit code 3")
        assert polled.endswith("\n\ndone\n"), "only what is new"
        assert len(find_wakes(agents)) == 1


@pytest.mark.requirement("T5")
async def test_a_background_command_can_be_written_to(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        await run(agents, "read line; echo got $line; cat", background=True)
        [row] = find_rows(agents)
        written = await process(agents, action="write", sessionId=row["id"], data="hello\n")
        assert written == f"Wrote 6 characters to {row['id']!r}."
        await process(agents, action="write", sessionId=row["id"], data="more\n", eof=True)
        text = await process(agents, action="poll", sessionId=row["id"], timeout=20)
        assert text.startswith("Exit code 0")
        assert text.endswith("got hello\nmore\n")
        refused = await process(agents, action="write", sessionId=row["id"], data="late")
        assert "has ended" in refused
        log = await process(agents, action="log", sessionId=row["id"], limit=1)
        assert log == "[Lines 2 to 2 of 2]\nmore"


@pytest.mark.requirement("AT2", "AT4")
async def test_a_killed_command_leaves_no_process_and_wakes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        await run(agents, "trap '' TERM; setsid sleep 4711 & sleep 4712 & wait", background=True)
        await wait_until_running("sleep 4712")
        [row] = find_rows(agents)
        assert (await process(agents, action="kill", sessionId=row["id"])).startswith("Stopped after")
        await wait_until_gone("sleep 471")
        assert "Removed" in await process(agents, action="remove", sessionId=row["id"])
        assert "no command" in await process(agents, action="poll", sessionId=row["id"])
        assert "no commands" in await process(agents, action="list")
        await agents.wait_until_idle()
        assert find_wakes(agents) == []


@pytest.mark.requirement("AT3")
async def test_a_timeout_ends_a_command_and_what_it_started(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        text = await run(agents, "echo before; setsid sleep 5011 & sleep 5012", timeout=1)
        assert "its timeout of 1 s was over" in text
        assert text.endswith("before\n")
        assert not find_marked("sleep 501")
        quick = await run(agents, "sleep 5021 & echo started")
        assert quick.startswith("Exit code 0")


@pytest.mark.requirement("AT5")
async def test_long_output_keeps_its_ends_and_the_whole_is_a_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        text = await run(agents, "echo first; seq 1 200000; echo last")
        assert len(text) <= 30_000
        assert "first\n1\n2\n" in text
        assert "\n200000\nlast\n" in text
        [row] = find_rows(agents)
        path = row["output_file"]
        assert path in text
        read = await agents.ask(f"call read {json.dumps({'path': path, 'offset': 100_001, 'limit': 2})}")
        assert read.reply is not None
        assert "100000\n100001" in read.reply


async def test_a_session_runs_a_limited_number_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        for _ in range(16):
            await run(agents, "sleep 5111", background=True)
        assert "16 commands of this session are running" in await run(agents, "echo no")
        await agents.operations.runs.stop(OPERATOR, MAIN)
        await wait_until_gone("sleep 5111")


async def test_without_process_a_command_is_waited_for(tmp_path: Path) -> None:
    config = make_agents_config(**merge_settings(ON_THIS_MACHINE, {"tools": {"deny": ["process"]}}))
    async with opened(tmp_path, config) as agents:
        text = await run(agents, "sleep 0.3; echo whole", background=True, yieldMs=0)
        assert text.startswith("Exit code 0")
        assert text.endswith("whole\n")


@pytest.mark.requirement("T6")
async def test_the_list_refuses_what_is_not_on_it(tmp_path: Path) -> None:
    async with opened(tmp_path, configure(security="allowlist", allowlist=["echo"])) as agents:
        assert (await run(agents, "echo listed")).endswith("listed\n")
        for command in ("touch file", "echo a; touch file", "sh -c 'touch file'"):
            assert "'tools.exec.security' is 'allowlist'" in await run(agents, command)
        assert "allowlist" in await run(agents, "echo a", env={"LD_PRELOAD": "/tmp/x.so"})
        assert find_rows(agents)[1:] == []


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    "given", [{"command": "é" * 70_000}, {"command": "true", "env": {"A": "é" * 40_000}}]
)
def test_what_the_kernel_would_refuse_is_refused_before(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="file"):
        check_launch(Launch(timeout_seconds=1, stdin=False, pty=False, **given))


@pytest.mark.sqlite_only
@pytest.mark.requirement("T6")
@pytest.mark.parametrize("security", ["allowlist", "full"])
async def test_variables_make_a_listed_program_another_one(tmp_path: Path, security: str) -> None:
    config = configure(security=security, ask="on-miss", allowlist=["echo"])
    launcher = CommandLauncher(config, SessionWorkspaceLocator(config, tmp_path), Sandboxes(config, tmp_path))

    def decide(**more: Any) -> str:
        launch = Launch(timeout_seconds=1, stdin=False, pty=False, **more)
        return launcher.decide(Caller.agent("main", MAIN), launch)

    for command in ("echo listed", "wc -l"):
        assert decide(command=command) == "run"
        assert decide(command=command, env={"LD_PRELOAD": "/workspace/x.so"}) == "ask"


@pytest.mark.requirement("T6")
async def test_an_agent_without_a_place_for_commands_is_not_offered_them(tmp_path: Path) -> None:
    offered: list[set[str]] = []

    def answer(prompt: Prompt) -> str:
        offered.append({tool.name for tool in prompt.tools})
        return "noted"

    for settings in ({"host": "node"}, {"security": "deny"}):
        config = make_agents_config(tools={"exec": settings})
        async with opened(
            tmp_path / str(settings), config, functions={"main": ScriptedAgent(answer)}
        ) as agents:
            await agents.ask("hello")
            assert find_keeper(agents.path) is None
    assert all(names and not names & {"exec", "process"} for names in offered)


@pytest.mark.requirement("AT4")
async def test_a_hundred_background_commands_are_each_reported_once(tmp_path: Path) -> None:
    sessions = [f"agent:main:dashboard:s{number}" for number in range(10)]

    def answer(prompt: Prompt) -> str | AssistantMessage:
        if get_phase(prompt) != "request" or len(prompt.messages) > 1:
            return "noted"
        return make_calls([{"command": f"sleep 0.1; echo {n}", "background": True} for n in range(10)])

    async with opened(tmp_path, functions={"main": ScriptedAgent(answer)}) as agents:
        await agents.open_sessions(*sessions)
        for session in sessions:
            await agents.say("go", session)

        async def are_told() -> bool:
            return len(find_wakes(agents)) == 100

        await agents.commits.until(are_told, 60)
        await agents.wait_until_idle(60)
        assert len(find_wakes(agents)) == 100
        rows = find_rows(agents)
        assert {(row["state"], row["exit_code"]) for row in rows} == {("ended", 0)}


@pytest.mark.requirement("T5", "AT1", "AT4")
async def test_a_command_that_ends_without_a_gateway_is_reported_at_its_start(tmp_path: Path) -> None:
    go = tmp_path / "go"
    try:
        async with open_agents_fixture(configure(), tmp_path) as agents:
            await run(agents, f"while [ ! -e {go} ]; do sleep 0.02; done; echo late", background=True)
        go.touch()
        async with open_agents_fixture(configure(), tmp_path) as agents:

            async def is_told() -> bool:
                return bool(find_wakes(agents))

            await agents.until(is_told)
            await agents.wait_until_idle()
            [wake] = find_wakes(agents)
            assert wake.endswith("late")
        async with open_agents_fixture(configure(), tmp_path) as agents:
            await agents.wait_until_idle()
            assert len(find_wakes(agents)) == 1
    finally:
        end_keeper(tmp_path)


@pytest.mark.requirement("T6", "AT9")
async def test_a_command_runs_in_the_sandbox_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("secret")
    async with opened(tmp_path, make_agents_config()) as agents:
        text = await run(agents, f"pwd; echo made > file; cat {canary}; id -u; env", env={"WORD": "hello"})
        assert "/workspace\n" in text
        assert "secret" not in text
        assert "WORD=hello" in text
        assert "PAGER=cat" in text
        [row] = find_rows(agents)
        assert row["backend"] == "sandbox"
        read = await agents.ask(f"call read {json.dumps({'path': 'file'})}")
        assert read.reply is not None
        assert "made" in read.reply
        await run(agents, "setsid sleep 5211 & sleep 5212", background=True)
        await wait_until_running("sleep 5212")
        await agents.operations.runs.stop(OPERATOR, MAIN)
        await wait_until_gone("sleep 521")
        text = await run(agents, "pwd", workdir="/etc")
        assert "outside the workspace" in text


@pytest.mark.requirement("T5", "AT1", "AT20")
async def test_a_killed_keeper_is_an_interruption_and_repeats_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as agents:
        effect = tmp_path / "effect"
        command = f"echo begun >> {effect}; echo begun; setsid sleep 5311 & sleep 5312"
        waiting = await agents.say(f"call exec {json.dumps({'command': command})}")
        await wait_until_running("sleep 5312")
        found = find_keeper(tmp_path)
        assert found is not None
        found.kill()
        view = await agents.wait_for_end(waiting, 30)
        assert view.reply is not None
        assert view.reply.startswith("Interrupted: ")
        assert "may have had effects; check before repeating" in view.reply
        assert view.reply.endswith("begun\n")
        assert effect.read_text() == "begun\n"
        await wait_until_gone("sleep 531")
        assert (await run(agents, "echo again")).endswith("again\n")


@pytest.mark.requirement("T5", "AT4", "AT20")
async def test_a_keeper_killed_without_a_gateway_is_reported_once(tmp_path: Path) -> None:
    try:
        async with open_agents_fixture(configure(), tmp_path) as agents:
            await run(agents, "sleep 5411", background=True)
        found = find_keeper(tmp_path)
        assert found is not None
        found.kill()
        async with open_agents_fixture(configure(), tmp_path) as agents:

            async def is_told() -> bool:
                return bool(find_wakes(agents))

            await agents.commits.until(is_told, 30)
            await agents.wait_until_idle()
            [wake] = find_wakes(agents)
            assert "Interrupted: " in wake
        await wait_until_gone("sleep 5411")
    finally:
        end_keeper(tmp_path)


@pytest.mark.sqlite_only
@pytest.mark.requirement("T5", "AT1", "AT20")
@pytest.mark.parametrize("also_keeper", [False, True], ids=["gateway", "gateway-and-keeper"])
async def test_a_gateway_killed_at_any_commit_runs_a_command_at_most_once(
    tmp_path: Path, also_keeper: bool
) -> None:
    kill_at, was_killed = 0, True
    while was_killed:
        kill_at += 1
        state_dir = tmp_path / str(kill_at)
        effect = tmp_path / f"effect-{kill_at}"
        message = f"call exec {json.dumps({'command': f'echo once >> {effect}; echo done'})}"
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GATEWAY), str(state_dir)),
            *(json.dumps(ON_THIS_MACHINE), message, str(kill_at)),
        )
        was_killed = await asyncio.wait_for(victim.wait(), 90) == -signal.SIGKILL
        if also_keeper and (found := find_keeper(state_dir)):
            found.kill()
        async with opened(state_dir) as agents:
            await agents.wait_until_idle(30)
            runs = agents.rows("SELECT state, reply FROM runs WHERE id = ?", RUN_ID)
            effects = effect.read_text() if effect.exists() else ""
            if not runs:
                assert effects == "", "what was not accepted has no effect"
                continue
            reply = runs[0]["reply"]
            if reply.startswith("Interrupted: "):
                assert also_keeper
                assert effects in ("", "once\n")
            else:
                assert reply.startswith("Exit code 0 after ")
                assert reply.endswith("done\n")
                assert effects == "once\n"
            assert find_wakes(agents) == []
    assert kill_at > 5
