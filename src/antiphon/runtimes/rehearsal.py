"""The built-in model that needs no network and no key: it follows the script in the last user message.

One instruction per line; other lines are ignored as long as at least one line is an instruction:

    call <tool> {json}       call a tool, one step per line, in order; `+` joins several calls in one step
    think <text>             think this before the next output
    say <text>               the exact reply; several lines make a reply of several lines
    slow <seconds> [<text>]  stream the reply over that time; the text, if any, is used as with `say`
    fail <text>              fail as a provider would
    announce <text>          the reply when this request is announced later

In the arguments of a call, `{attachments}` stands for the directory of the files that a sub-agent was given.

Without `say` the reply is the last step's tool results, or a short confirmation; `say` alone makes it empty; without
any instruction it is a short usage text. In an announce step it replies with the `announce` text, or passes on the
result; where it may end a conversation between agents and has no further instruction, it does. The position in the
script is the number of tool results after that message, so the same prompt always gets the same answer and a
resumed run continues where it was.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from hashlib import blake2s
from typing import Any, cast

import msgspec

from antiphon.clock import Clock, SystemClock
from antiphon.errors import ProviderError
from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    Message,
    TextBlock,
    ThinkingBlock,
    TokenUsage,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.runtimes import Deltas, Prompt

_CALL_PATTERN = re.compile(r"call\s+(\S+)\s*")
_PLUS_PATTERN = re.compile(r"\s*\+\s*(?=call\s)")
_ATTACHMENTS_PLACEHOLDER = "{attachments}"
_FRAME_PATTERN = re.compile(r"<<<data (\w+)>>>\n(.*?)\n<<<end \1>>>", re.DOTALL)
"""Matches a text of another agent or program as models see it."""
_INSTRUCTIONS_HEADING = "Instructions for this session:"  # before the first message to an ACP agent
MAX_QUOTED_CHARACTERS = 200  # of a message that has no instruction
_ATTACHMENTS_PATTERN = re.compile(r"\.antiphon/attachments/[0-9A-Za-z-]+")


class _ScriptStep(msgspec.Struct):
    """The actions of one step: think, then call tools; the last step has no calls and replies."""

    thoughts: list[str] = msgspec.field(default_factory=list[str])
    calls: list[tuple[str, dict[str, Any]]] = msgspec.field(default_factory=list[tuple[str, dict[str, Any]]])


class _Script(msgspec.Struct):
    steps: list[_ScriptStep]
    """Steps that call tools, in order."""
    ending: _ScriptStep
    lines: list[str] = msgspec.field(default_factory=list[str])
    """The texts of `say`."""
    seconds: float = 0.0
    failure: str | None = None
    unreadable: str | None = None


class RehearsalRuntime:
    """A `Runtime` that follows the script in the last user message."""

    reads_history = True

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()

    @property
    def context_window(self) -> int | None:
        return None

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        instruction, results = _find_position(prompt.messages)
        script = _parse_script(instruction)
        if script is None:
            usage = f"You said: {_shorten_instruction(instruction)!r}. {_format_help(prompt)}"
            text = _answer_unscripted_step(instruction, prompt) or usage
            return await self._stream_reply(prompt, deltas, text)
        step = _find_next_step(script, len(results))
        if problem := _find_problem(script, step, prompt):
            return await self._stream_reply(prompt, deltas, problem)
        if step.calls:
            return self._build_tool_calls(prompt, deltas, step)
        if script.failure is not None:
            raise _build_failure(script.failure)
        text = "\n".join(script.lines) if script.lines else _format_last_results(script, results)
        return await self._stream_reply(prompt, deltas, text, thoughts=step.thoughts, seconds=script.seconds)

    async def close(self) -> None:
        """Does nothing: it holds no resources."""

    def _build_tool_calls(self, prompt: Prompt, deltas: Deltas, step: _ScriptStep) -> AssistantMessage:
        # Ids depend only on the run and step, so a repeated step is recognized.
        run = blake2s(prompt.run_id.encode(), digest_size=6).hexdigest()
        calls = [
            ToolCall(
                id=f"call_{run}_{len(prompt.messages)}_{index}",
                name=name,
                arguments=_fill_in_attachments(arguments, prompt.instructions),
            )
            for index, (name, arguments) in enumerate(step.calls)
        ]
        return self._build_assistant(prompt, [*_emit_thinking(step.thoughts, deltas), *calls])

    async def _stream_reply(
        self, prompt: Prompt, deltas: Deltas, text: str, *, thoughts: Sequence[str] = (), seconds: float = 0.0
    ) -> AssistantMessage:
        content = _emit_thinking(thoughts, deltas)
        words = re.findall(r"\S+\s*|\s+", text)
        for word in words:
            if seconds:
                await asyncio.sleep(seconds / len(words))
            deltas.text(word)
        return self._build_assistant(prompt, [*content, TextBlock(text=text)])

    def _build_assistant(
        self, prompt: Prompt, content: Sequence[TextBlock | ThinkingBlock | ToolCall]
    ) -> AssistantMessage:
        seen = _count_words(prompt.instructions) + sum(map(_count_words, map(_get_text, prompt.messages)))
        written = sum(map(_count_block_words, content))
        return AssistantMessage(
            content=list(content),
            timestamp=self._clock.now(),
            stop_reason="toolUse" if isinstance(content[-1], ToolCall) else "stop",
            api="rehearsal",
            provider="rehearsal",
            model="rehearsal",
            usage=TokenUsage(input=seen, output=written, total_tokens=seen + written),
        )


def _shorten_instruction(instruction: str) -> str:
    """Return what was said, without the text around it that is for models."""
    text = instruction.strip()
    frames = list(_FRAME_PATTERN.finditer(text))
    if frames:
        text = text[frames[-1].end() :].strip() or frames[-1][2].strip()
    elif text.startswith(_INSTRUCTIONS_HEADING):
        text = text.rpartition("\n")[2]
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[: MAX_QUOTED_CHARACTERS - 1]}…"


def _format_help(prompt: Prompt) -> str:
    # A call can only be suggested if the prompt has a tool; preferably one that needs no arguments.
    names = [tool.name for tool in prompt.tools]
    call = f"`call {'sessions_list' if 'sessions_list' in names else names[0]} {{}}`, " if names else ""
    return f"Instruct me with lines such as `say hello`, {call}`think …`, `slow 2` or `fail …`."


def _answer_unscripted_step(instruction: str, prompt: Prompt) -> str | None:
    """The answer to an unscripted step between agents."""
    if instruction.split("\n", 1)[0].endswith("announce step."):
        quoted = [line.removeprefix("> ") for line in instruction.splitlines() if line.startswith("> ")]
        announcements = [line.removeprefix("announce ") for line in quoted if line.startswith("announce ")]
        _, _, last = instruction.rpartition(":\n> ")
        return announcements[0] if announcements else last.replace("\n> ", "\n").strip()
    if instruction.startswith("The sub-agents you were waiting for"):
        return "Their reports are in."
    return "REPLY_SKIP" if "REPLY_SKIP" in prompt.instructions else None


def _find_position(messages: Sequence[Message]) -> tuple[str, list[ToolResult]]:
    """The message to follow and the tool results after it."""
    results: list[ToolResult] = []
    for message in reversed(messages):
        if isinstance(message, UserMessage):
            return _get_text(message), results[::-1]
        if isinstance(message, ToolResult):
            results.append(message)
    return "", results[::-1]


def _parse_script(instruction: str) -> _Script | None:
    """The parsed script, or None without any instruction."""
    script = _Script(steps=[], ending=_ScriptStep())
    instructed = False
    for line in map(str.strip, instruction.splitlines()):
        verb, _, rest = line.partition(" ")
        if verb in _VERB_HANDLERS and (rest or verb == "say"):
            instructed = True
            _VERB_HANDLERS[verb](script, line, rest.lstrip())
    return script if instructed else None


def _add_call(script: _Script, line: str, _: str) -> None:
    try:
        script.ending.calls = _read_calls(line)
    except ValueError as error:
        script.unreadable = script.unreadable or f"I cannot read {line!r}: {error}."
    else:
        script.steps.append(script.ending)
        script.ending = _ScriptStep()


def _add_thought(script: _Script, _: str, rest: str) -> None:
    script.ending.thoughts.append(rest)


def _add_line(script: _Script, _: str, rest: str) -> None:
    script.lines.append(rest)


def _add_delay(script: _Script, line: str, rest: str) -> None:
    seconds, _, text = rest.partition(" ")
    try:
        script.seconds = float(seconds)
    except ValueError:
        script.unreadable = script.unreadable or f"I cannot read {line!r}: it takes a number of seconds."
    if text:
        script.lines.append(text)


def _add_failure(script: _Script, _: str, rest: str) -> None:
    script.failure = rest


def _ignore_instruction(script: _Script, _: str, rest: str) -> None:
    """Ignored while parsing; `_answer_unscripted_step` reads it later."""


_VERB_HANDLERS = {
    "announce": _ignore_instruction,
    "call": _add_call,
    "think": _add_thought,
    "say": _add_line,
    "slow": _add_delay,
    "fail": _add_failure,
}


def _read_calls(line: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of one line. The JSON is parsed properly, so a `+` inside it joins nothing."""
    calls: list[tuple[str, dict[str, Any]]] = []
    at = 0
    while found := _CALL_PATTERN.match(line, at):
        arguments, at = _read_arguments(line, found.end())
        calls.append((found[1], arguments))
        if joined := _PLUS_PATTERN.match(line, at):
            at = joined.end()
        elif line[at:].strip():
            raise ValueError(f"after {found[1]!r} comes neither a JSON object nor '+ call'")
        else:
            break
    return calls


def _read_arguments(line: str, at: int) -> tuple[dict[str, Any], int]:
    if not line.startswith("{", at):
        return {}, at
    try:
        arguments, end = json.JSONDecoder().raw_decode(line, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"its arguments are not JSON ({error.msg})") from error
    return cast(dict[str, Any], arguments), end


def _fill_in_attachments(arguments: dict[str, Any], instructions: str) -> dict[str, Any]:
    """Return the arguments with the placeholder replaced by the directory that the instructions name, if any."""
    directory = _ATTACHMENTS_PATTERN.search(instructions)
    if directory is None:
        return arguments
    return json.loads(json.dumps(arguments).replace(_ATTACHMENTS_PLACEHOLDER, directory[0]))


def _find_next_step(script: _Script, done: int) -> _ScriptStep:
    for step in script.steps:
        if done < len(step.calls):
            return step
        done -= len(step.calls)
    return script.ending


def _find_problem(script: _Script, step: _ScriptStep, prompt: Prompt) -> str | None:
    if script.unreadable:
        return script.unreadable
    known = [tool.name for tool in prompt.tools]
    missing = next((name for name, _ in step.calls if name not in known), None)
    if missing is None:
        return None
    return f"I have no tool named {missing!r}. I have: {', '.join(known) or 'none'}."


def _format_last_results(script: _Script, results: Sequence[ToolResult]) -> str:
    if not script.steps:
        return "Thought about it." if script.ending.thoughts else "Done."
    return "\n".join(result.text for result in results[-len(script.steps[-1].calls) :])


def _build_failure(text: str) -> ProviderError:
    return ProviderError(
        "Provider 'rehearsal' failed as instructed.",
        # In the hint, not in the message: messages are logged, and this text is private.
        f"Remove the line `fail {text}` to get an answer.",
        status=None,
        provider="rehearsal",
        model="rehearsal",
    )


def _emit_thinking(thoughts: Sequence[str], deltas: Deltas) -> list[ThinkingBlock]:
    for thought in thoughts:
        deltas.thinking(thought)
    return [ThinkingBlock(thinking=thought) for thought in thoughts]


def _get_text(message: Message) -> str:
    if isinstance(message, CompactionEntry):
        return message.summary
    if isinstance(message, UserMessage):
        content = message.content
        return (
            content
            if isinstance(content, str)
            else "\n".join(b.text for b in content if isinstance(b, TextBlock))
        )
    return message.text


def _count_words(text: str) -> int:
    return len(text.split())


def _count_block_words(block: TextBlock | ThinkingBlock | ToolCall) -> int:
    match block:
        case TextBlock():
            return _count_words(block.text)
        case ThinkingBlock():
            return _count_words(block.thinking)
        case ToolCall():
            return 1 + len(block.arguments)
