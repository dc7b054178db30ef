"""Python functions as tools: their schema, their calls, and what is refused when they are configured."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

import antiphon
from antiphon.access import Caller
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import ConfigError
from antiphon.tools._function_threads import FunctionThreads
from antiphon.tools.python_tools import build_python_tool, load_python_tools
from cli.gateways import connect, send_and_wait, up
from cli.terminal import BOUND, Program
from support.keepers import wait_until_true
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("T8")]

MODULE = '''
import antiphon

CALLS = {calls!r}


@antiphon.tool
def count_words(text: str, language: str = "en") -> dict[str, int]:
    """Counts the words of a text.

    Args:
        text: The text whose words
            are counted.
        language: A language code.
    """
    with open(CALLS, "a") as file:
        file.write(text + "\\n")
    return {{"words": len(text.split())}}


@antiphon.tool(name="shout", repeatable=True)
async def shout_loudly(text: str) -> str:
    """Shouts."""
    return text.upper()


tools = [count_words, shout_loudly]
'''

BLOCKING_MODULE = '''
import pathlib, time

import antiphon


@antiphon.tool
def wait() -> str:
    """Waits."""
    pathlib.Path({began!r}).touch()
    time.sleep(3600)
'''


async def call(tool: Tool, **arguments: Any) -> ToolOutput:
    request = ToolRequest(
        caller=Caller.agent("main", "agent:main:main"), run_id="r", call_id="c", arguments=arguments
    )
    return await tool.invoke(request)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "my_tools.py"
    file.write_text(MODULE.format(calls=str(tmp_path / "calls.txt")))
    return file


async def test_signature_and_docstring_are_the_schema(module: Path) -> None:
    count_words, shout = load_python_tools([f"{module}:tools"])
    assert count_words.spec.name == "count_words"
    assert count_words.spec.description == "Counts the words of a text."
    assert count_words.spec.parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "The text whose words are counted."},
            "language": {"type": "string", "description": "A language code.", "default": "en"},
        },
        "required": ["text"],
        "additionalProperties": False,
    }
    assert (shout.spec.name, shout.spec.description) == ("shout", "Shouts.")
    assert (count_words.after_crash, shout.after_crash) == ("report", "settle")
    assert not count_words.reaches_sessions  # so that sub-agents have it, too


async def test_results_are_text_or_json(module: Path) -> None:
    count_words, shout = load_python_tools([f"{module}:tools"])
    assert json.loads((await call(count_words, text="one two")).text) == {"words": 2}
    assert (await call(shout, text="hey")).text == "HEY"


async def test_arguments_are_checked_before_the_function_runs(module: Path, tmp_path: Path) -> None:
    [count_words, _] = load_python_tools([f"{module}:tools"])
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "'text' is missing"),
        ({"text": "x", "lang": "en"}, "no argument 'lang'"),
        ({"text": []}, "'text'"),
    ]
    for arguments, expected in cases:
        refused = await call(count_words, **arguments)
        assert refused.is_error
        assert expected in json.loads(refused.text)["error"]
    assert not (tmp_path / "calls.txt").exists()


async def test_annotations_describe_and_constrain() -> None:
    @antiphon.tool
    async def paint(
        color: Annotated[Literal["red", "blue"], "The color of the wall."],
        coats: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1,
    ) -> None:
        """Paints the wall."""

    tool = build_python_tool(paint)
    properties = tool.spec.parameters["properties"]
    assert properties["color"]["description"] == "The color of the wall."
    assert sorted(properties["color"]["enum"]) == ["blue", "red"]
    assert (properties["coats"]["minimum"], properties["coats"]["maximum"]) == (1, 3)
    assert (await call(tool, color="red")).text == "Done."
    assert (await call(tool, color="red", coats=4)).is_error


async def test_a_synchronous_function_does_not_block_the_event_loop() -> None:
    threads: list[int] = []

    @antiphon.tool
    def work() -> str:
        """Works."""
        threads.append(threading.get_ident())
        return "done"

    await call(build_python_tool(work))
    assert threads != [threading.get_ident()]


async def test_functions_that_block_delay_neither_the_gateway_nor_each_other() -> None:
    go_on = threading.Event()

    @antiphon.tool
    def wait() -> str:
        """Waits."""
        assert go_on.wait(BOUND)
        return "done"

    tool = build_python_tool(wait)
    waiting = [
        asyncio.create_task(call(tool)) for _ in range(40)
    ]  # the event loop's own threads are at most 32
    async with asyncio.timeout(BOUND):
        assert await asyncio.to_thread(lambda: "a thread of the gateway") == "a thread of the gateway"
    assert not any(task.done() for task in waiting)
    go_on.set()
    assert {(await task).text for task in waiting} == {"done"}


async def test_calls_at_once_are_bounded_until_the_functions_return() -> None:
    go_on, began = threading.Event(), threading.Semaphore(0)

    def wait() -> str:
        began.release()
        assert go_on.wait(BOUND)
        return "done"

    threads = FunctionThreads(1)
    first, second = (asyncio.create_task(threads.run(wait, {})) for _ in range(2))
    assert await asyncio.to_thread(began.acquire, timeout=BOUND)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not began.acquire(blocking=False), "the first function still runs"
    go_on.set()
    assert await second == "done"
    for error in (StopIteration("x"), SystemExit(3), ValueError("y")):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises((type(error), RuntimeError)):
            await threads.run(fail, {})


async def test_a_function_that_blocks_does_not_delay_the_end_of_a_gateway(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    program.configure({"tools": {"python": ["./my_tools.py:wait"]}})
    began = tmp_path / "began"
    (program.state / "my_tools.py").write_text(BLOCKING_MODULE.format(began=str(began)))
    with up(program) as gateway:
        async with connect(gateway, program) as client:
            await client.call(
                "chat.send", {"sessionKey": "main", "message": "call wait {}", "idempotencyKey": "1"}
            )

            async def has_begun() -> bool:
                return began.exists()

            await wait_until_true(has_begun)
        assert gateway.stop() == 0


async def test_a_function_can_ask_for_the_request() -> None:
    @antiphon.tool
    def identify(request: ToolRequest, greeting: str = "hello") -> str:
        """Says who calls."""
        return f"{greeting} {request.caller.session_key} {request.key}"

    tool = build_python_tool(identify)
    assert list(tool.spec.parameters["properties"]) == ["greeting"]
    assert (await call(tool)).text == "hello agent:main:main r:c"


def _make_positional() -> Callable[..., Any]:
    @antiphon.tool
    def positional(text: str, /) -> None:
        """Has a parameter without a name."""

    return positional


def _make_untyped() -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec('def untyped(text): "Has a parameter without a type."', scope)  # noqa: S102 - types cannot express it
    return antiphon.tool(scope["untyped"])


def _make_undocumented() -> Callable[..., Any]:
    @antiphon.tool
    def undocumented(text: str) -> None: ...

    return undocumented


def _make_unnameable() -> Callable[..., Any]:
    @antiphon.tool(name="two words")
    def unnameable() -> None:
        """Has a name that providers refuse."""

    return unnameable


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_make_positional, "'text' has no name for callers"),
        (_make_untyped, "'text' has no type"),
        (_make_undocumented, "no docstring"),
        (_make_unnameable, "'two words', which is not a valid name"),
    ],
)
async def test_functions_that_cannot_be_tools_are_refused(
    make: Callable[[], Callable[..., Any]], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_python_tool(make())


async def test_modules_that_cannot_be_used_are_refused(module: Path) -> None:
    broken = module.with_name("broken.py")
    broken.write_text("raise SystemExit(3)")
    plain = module.with_name("plain.py")
    plain.write_text("def f(): ...\n")
    for target, expected in (
        (f"{module.with_name('missing.py')}:tools", "there is no such file"),
        (f"{module}:other", "not a function marked with @antiphon.tool"),
        (f"{plain}:f", "not a function marked with @antiphon.tool"),
        (f"{broken}:tools", r"could not be imported \(SystemExit: 3\)"),
        ("no_such_package.tools:tools", "could not be imported"),
    ):
        with pytest.raises(ConfigError, match=expected) as raised:
            load_python_tools([target])
        assert raised.value.data["path"] == "tools.python[0]"
    with pytest.raises(ConfigError, match="a second tool 'count_words'"):
        load_python_tools([f"{module}:tools", f"{module}:count_words"])
    with pytest.raises(ConfigError, match="a second tool 'shout'"):
        load_python_tools([f"{module}:tools"], {"shout"})
    plain.chmod(0o666)
    with pytest.raises(ConfigError, match="every user can change"):
        load_python_tools([f"{plain}:f"])


async def test_a_gateway_offers_the_configured_functions(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a configuration beside a module, over a model on HTTP, to the answer."""
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    async with Provider().running() as provider:
        program.configure(
            {
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
                "tools": {"python": ["./my_tools.py:tools"]},
            }
        )
        calls = tmp_path / "calls.txt"
        (program.state / "my_tools.py").write_text(MODULE.format(calls=str(calls)))
        assert program.run("config", "check").code == 0
        provider.script(
            Answer(calls=(Call("count_words", '{"text": "one two three"}', "call_1"),)),
            Answer(text=("Three words.",)),
        )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                ended = await send_and_wait(client, "Count.")
            assert ended["reply"] == "Three words.", ended
            assert gateway.stop() == 0
    assert calls.read_text() == "one two three\n"
    assert json.loads(provider.bodies[1]["messages"][-1]["content"]) == {"words": 3}


async def test_what_cannot_be_loaded_is_named_by_the_check(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    program.configure({"tools": {"python": ["./my_tools.py:tools"]}})
    checked = program.run("config", "check")
    assert checked.code == ConfigError.exit_code
    assert "tools.python[0]" in checked.err
    program.configure({"tools": {"python": ["my_tools"]}})
    assert "./file.py:name" in program.run("config", "check").err
