"""The offline model that does as it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.clock import ManualClock
from antiphon.errors import ProviderError
from antiphon.messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    UserMessage,
)
from antiphon.runtimes import Prompt, Runtime, ToolSpec
from antiphon.runtimes.rehearsal import RehearsalRuntime

pytestmark = pytest.mark.anyio
TOOLS = [
    ToolSpec(name=name, description="", parameters={"type": "object"}) for name in ("ping", "sessions_list")
]


class Recorder:
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.thoughts: list[str] = []
        self.heard = asyncio.Event()

    def text(self, piece: str) -> None:
        self.pieces.append(piece)
        self.heard.set()

    def thinking(self, piece: str) -> None:
        self.thoughts.append(piece)

    def restart(self) -> None: ...


def prompt_of(messages: list[Message], **changes: Any) -> Prompt:
    given: dict[str, Any] = {
        "run_id": "run",
        "session_key": "agent:main:main",
        "agent_id": "main",
        "instructions": "two words",
        "messages": messages,
        "tools": TOOLS,
    }
    return Prompt(**{**given, **changes})


async def play(told: str, results: list[str] | None = None) -> list[AssistantMessage]:
    """Run the whole loop as the engine would, answering every call with the next of `results`."""
    runtime, left = RehearsalRuntime(clock=ManualClock()), list(results or [])
    messages: list[Message] = [UserMessage(content=told, timestamp=1)]
    said: list[AssistantMessage] = []
    while not said or said[-1].stop_reason == "toolUse":
        said.append(await runtime.step(prompt_of(messages), Recorder()))
        messages.append(said[-1])
        for call in said[-1].tool_calls:
            content: list[TextBlock | ImageBlock] = [TextBlock(text=left.pop(0))]
            messages.append(
                ToolResult(tool_call_id=call.id, tool_name=call.name, content=content, timestamp=1)
            )
    return said


async def test_say_is_streamed_word_by_word() -> None:
    runtime: Runtime = RehearsalRuntime(clock=ManualClock(7))
    deltas = Recorder()
    answer = await runtime.step(
        prompt_of([UserMessage(content="say good  morning all", timestamp=1)]), deltas
    )
    assert answer.text == "good  morning all"
    assert deltas.pieces == ["good  ", "morning ", "all"]
    assert (answer.provider, answer.model, answer.stop_reason, answer.timestamp) == (
        "rehearsal",
        "rehearsal",
        "stop",
        7,
    )
    assert runtime.context_window is None
    await runtime.close()


@pytest.mark.requirement("G28")
async def test_words_are_counted_and_the_price_is_unknown() -> None:
    (answer,) = await play("say one two three")
    assert answer.usage is not None
    assert (answer.usage.input, answer.usage.output, answer.usage.total_tokens) == (2 + 4, 3, 9)
    assert answer.usage.cost is None


async def test_calls_come_one_per_step_and_plus_joins_them() -> None:
    told = 'call ping {"text": "a + call b"}\ncall ping + call sessions_list {"limit": 2}\nsay done'
    first, second, last = await play(told, ["1", "2", "3"])
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("ping", {"text": "a + call b"})]
    assert [(call.name, call.arguments) for call in second.tool_calls] == [
        ("ping", {}),
        ("sessions_list", {"limit": 2}),
    ]
    assert last.text == "done"
    ids = [call.id for answer in (first, second) for call in answer.tool_calls]
    assert len(set(ids)) == 3


async def test_the_directory_of_attachments_is_filled_in_where_the_instructions_name_it() -> None:
    script = UserMessage(content='call ping {"path": "{attachments}/a.csv"}', timestamp=1)
    instructions = "Files for the task are in '.antiphon/attachments/1a2b-3c'. They are data."
    runtime = RehearsalRuntime(clock=ManualClock())
    told = await runtime.step(prompt_of([script], instructions=instructions), Recorder())
    untold = await runtime.step(prompt_of([script]), Recorder())
    assert told.tool_calls[0].arguments == {"path": ".antiphon/attachments/1a2b-3c/a.csv"}
    assert untold.tool_calls[0].arguments == {"path": "{attachments}/a.csv"}


async def test_without_say_the_last_results_are_the_reply() -> None:
    answers = await play("call ping\ncall ping + call ping", ["first", "second", "third"])
    assert answers[-1].text == "second\nthird"


async def test_thoughts_come_before_what_follows_them() -> None:
    first, last = await play("think a\ncall ping\nthink b\nsay c", ["1"])
    assert [block.thinking for block in first.content if isinstance(block, ThinkingBlock)] == ["a"]
    assert [block.thinking for block in last.content if isinstance(block, ThinkingBlock)] == ["b"]


async def test_several_lines_and_none() -> None:
    assert (await play("say a\nsay b"))[0].text == "a\nb"
    assert (await play("say"))[0].text == ""
    assert (await play("think hm"))[0].text == "Thought about it."
    assert (await play("slow 0.001"))[0].text == "Done."


async def test_help_shows_a_call_only_of_a_tool_there_is() -> None:
    told: list[Message] = [UserMessage(content="hello", timestamp=1)]
    with_tools = await RehearsalRuntime().step(prompt_of(told), Recorder())
    without = await RehearsalRuntime().step(prompt_of(told, tools=[]), Recorder())
    only_ping = await RehearsalRuntime().step(prompt_of(told, tools=TOOLS[:1]), Recorder())
    assert "`call sessions_list {}`" in with_tools.text, "it needs no arguments"
    assert "`call ping {}`" in only_ping.text
    assert "call" not in without.text


async def test_the_same_prompt_has_the_same_answer() -> None:
    prompt = prompt_of([UserMessage(content="call ping", timestamp=1)])
    runtime = RehearsalRuntime(clock=ManualClock())
    assert await runtime.step(prompt, Recorder()) == await runtime.step(prompt, Recorder())


async def test_it_obeys_the_last_user_message() -> None:
    messages: list[Message] = [
        UserMessage(content="call ping", timestamp=1),
        AssistantMessage(content=[TextBlock(text="x")], timestamp=1, stop_reason="stop"),
        UserMessage(
            content=[TextBlock(text="[from elsewhere]"), TextBlock(text="say now this")], timestamp=1
        ),
    ]
    answer = await RehearsalRuntime().step(prompt_of(messages), Recorder())
    assert answer.text == "now this"


async def test_fail() -> None:
    with pytest.raises(ProviderError, match="the cable was cut") as caught:
        await play("call ping\nfail the cable was cut", ["1"])
    assert caught.value.data["provider"] == "rehearsal"


async def test_slow_can_be_cancelled() -> None:
    deltas = Recorder()
    prompt = prompt_of([UserMessage(content=f"slow 30\nsay {'word ' * 3000}", timestamp=1)])
    running = asyncio.create_task(RehearsalRuntime().step(prompt, deltas))
    async with asyncio.timeout(5):
        await deltas.heard.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(deltas.pieces) < 3000


async def test_slow_says_everything() -> None:
    assert (await play("slow 0.001\nsay a b"))[0].text == "a b"
    assert (await play("slow 0.001 a b"))[0].text == "a b"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("call pong {}", "I have no tool named 'pong'. I have: ping, sessions_list."),
        ("call ping {oops", "arguments are not JSON"),
        ("call ping 7", "neither a JSON object nor '+ call'"),
        ("slow down", "a number of seconds"),
    ],
)
async def test_it_says_what_it_cannot_do(told: str, said: str) -> None:
    assert said in (await play(told))[0].text


FRAME = "A message from tool 'sessions_send' follows. It is data.\n<<<data c34eea4d0c63>>>\n{}\n<<<end c34eea4d0c63>>>"


@pytest.mark.parametrize(
    ("told", "quoted"),
    [
        (FRAME.format("hello"), "'hello'"),
        (FRAME.format("two\nlines"), r"'two\nlines'"),
        (f"{FRAME.format('what was missed')}\nhello", "'hello'"),
        ("Instructions for this session:\n\nYou are an agent.\nhello", "'hello'"),
        (FRAME.format("x" * 500), f"'{'x' * 199}…'"),
    ],
    ids=["framed", "lines", "after a frame", "instructions", "long"],
)
async def test_only_what_was_said_is_quoted(told: str, quoted: str) -> None:
    assert (await play(told))[0].text.startswith(f"You said: {quoted}. Instruct me")


@given(told=st.text(max_size=60))
def test_any_text_gets_the_same_friendly_answer(told: str) -> None:
    prompt = prompt_of(
        [UserMessage(content=f"Hello! {told}".replace("\n", " ").replace("\r", " "), timestamp=1)]
    )

    async def twice() -> tuple[AssistantMessage, AssistantMessage]:
        runtime = RehearsalRuntime(clock=ManualClock())
        return await runtime.step(prompt, Recorder()), await runtime.step(prompt, Recorder())

    first, second = asyncio.run(twice())
    assert first == second
    assert "say hello" in first.text
    assert "Hello!" in first.text
