"""What an editor's prompts and updates are: translations between the protocol and the gateway, without either."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from acp.schema import SessionNotification
from hypothesis import given
from hypothesis import strategies as st

from antiphon.bus import Delta, ToolPhase
from antiphon.cli.acp import updates
from antiphon.cli.acp.connection import MAX_OPEN_REQUESTS, Answer, EditorConnection
from antiphon.cli.acp.prompts import translate_prompt
from antiphon.cli.acp.tool_calls import ShownToolCalls
from antiphon.cli.acp.turn import RESTART_NOTE, EditorTurn
from antiphon.errors import AntiphonError, InvalidInput, TooLarge

pytestmark = [pytest.mark.requirement("M3")]

RUN = "run-1"
WORDS = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8)
Json = dict[str, Any]


def validate(update: Json) -> None:
    """Fail unless the protocol's library can read the update as it is."""
    note = SessionNotification.model_validate({"sessionId": "s", "update": update})
    read = note.model_dump(mode="json", by_alias=True, exclude_none=True)["update"]
    assert read == {name: it for name, it in update.items() if it is not None}


# --- prompts ---


@given(st.text(), st.text())
def test_an_embedded_text_cannot_leave_its_fence(text: str, question: str) -> None:
    resource = {"type": "resource", "resource": {"uri": "file:///x", "text": text}}
    prompt = translate_prompt([{"type": "text", "text": question}, resource])
    head, _, fenced = prompt.text.rpartition("Content of file:///x, attached as data:\n")
    if "Content of file:///x" not in text:
        assert head.startswith(question) or not question.strip()
        fence = re.match("`+", fenced)
        assert fence is not None
        lines = fenced.split("\n")
        assert [number for number, line in enumerate(lines) if line == fence[0]] == [0, len(lines) - 1]
        assert fence[0] not in text
        inside = fenced.removeprefix(f"{fence[0]}\n").removesuffix(fence[0])
        assert inside in (text, f"{text}\n")


@given(st.text(min_size=1), st.text())
def test_a_link_is_one_link_whatever_it_is_called(uri: str, name: str) -> None:
    prompt = translate_prompt([{"type": "resource_link", "uri": uri, "name": name}])
    assert re.fullmatch(r"\[@[^\[\]()\n]+\]\([^\s\[\]()<>]*\)", prompt.text)


UNREADABLE: list[tuple[list[Any], str]] = [
    ([], "empty"),
    ([{"type": "text", "text": " \n"}], "empty"),
    ([{"type": "audio", "data": "", "mimeType": "audio/wav"}], "'audio'"),
    ([{"type": "text"}], "'text'"),
    ([{}], "no type"),
    (["text"], "no type"),
    (
        [{"type": "resource", "resource": {"uri": "a.pdf", "blob": "", "mimeType": "application/pdf"}}],
        "a.pdf",
    ),
]


@pytest.mark.parametrize(("blocks", "fault"), UNREADABLE)
def test_what_an_agent_cannot_read_is_refused(blocks: Sequence[object], fault: str) -> None:
    with pytest.raises(InvalidInput, match=fault):
        translate_prompt(blocks)


def test_texts_do_not_run_together_and_links_stay_within_their_sentence() -> None:
    first, second, blank = ({"type": "text", "text": text} for text in ("You help.", "say hi", ""))
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    link = {"type": "resource_link", "uri": "file:///a.py", "name": "a.py"}
    spaced = {"type": "text", "text": "You help.\n\n"}
    for blocks in ([first, second], [first, image, second], [blank, first, blank, second], [spaced, second]):
        assert translate_prompt(blocks).text == "You help.\n\nsay hi"
    assert translate_prompt([first, link, second]).text == "You help.[@a.py](file:///a.py)say hi"


def test_images_are_attached_wherever_they_come_from() -> None:
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    blob = {"type": "resource", "resource": {"uri": "file:///b.png", "blob": "BB==", "mimeType": "image/png"}}
    prompt = translate_prompt([image, blob])
    assert [each["content"] for each in prompt.attachments] == ["AA==", "BB=="]
    assert not prompt.is_plain_text
    assert translate_prompt([{"type": "text", "text": "/new"}]).is_plain_text


# --- answers ---


def delta(number: int, text: str, *, restart: bool = False) -> Delta:
    return Delta(session_key="k", run_id=RUN, number=number, text=text, restart=restart)


def answer(text: str) -> Json:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def join(found: Sequence[Json]) -> str:
    for update in found:
        validate(update)
    return "".join(update["content"]["text"] for update in found)


@given(WORDS, st.data())
def test_an_answer_is_sent_once_whatever_is_missed_or_begins_again(
    words: list[str], data: st.DataObject
) -> None:
    """Deltas may be lost, and the gateway may be killed and stream the same answer again."""
    turn, found, whole = EditorTurn(RUN), list[Json](), "".join(words)
    for _ in range(data.draw(st.integers(1, 3), "attempts")):
        end = data.draw(st.integers(0, len(words)), "streamed")
        for number, word in enumerate(words[:end], start=1):
            if number == 1 or data.draw(st.booleans(), "arrives"):
                found += turn.take_delta(delta(number, word))
    found += turn.take_answer(answer(whole), is_internal=False)
    assert join(found) == (whole if whole.strip() else join(found))
    assert turn.take_reply(whole) == []
    assert len({update["messageId"] for update in found}) <= 1


def test_an_answer_that_reads_differently_after_a_crash_is_repeated() -> None:
    turn = EditorTurn(RUN)
    found = [*turn.take_delta(delta(1, "The ans")), *turn.take_delta(delta(1, "An ans"))]
    found += turn.take_answer(answer("An answer."), is_internal=False)
    assert join(found) == f"The ans{RESTART_NOTE}\n\nAn answer."
    assert len({update["messageId"] for update in found}) == 2


def test_what_is_not_for_people_is_not_sent() -> None:
    turn = EditorTurn(RUN)
    found = [*turn.take_delta(delta(1, "NO_")), *turn.take_delta(delta(2, "REPLY"))]
    found += turn.take_answer(answer("NO_REPLY"), is_internal=True)
    assert found == [] and turn.take_reply("NO_REPLY") == []
    assert join(turn.take_delta(delta(3, "NO_REPLY is a token"))) == "NO_REPLY is a token"


def test_the_next_step_may_be_faster_than_the_entry_of_the_last_one() -> None:
    turn = EditorTurn(RUN)
    found = [*turn.take_delta(delta(1, "one ")), *turn.take_delta(delta(2, "two"))]
    found += turn.take_answer(answer("one "), is_internal=False)
    found += turn.take_delta(delta(3, " and more"))
    found += turn.take_answer(answer("two and more"), is_internal=False)
    assert join(found) == "one two and more"


def test_thoughts_are_sent_once() -> None:
    turn = EditorTurn(RUN)
    entry = {"content": [{"type": "thinking", "thinking": "hm well"}, {"type": "text", "text": "yes"}]}
    found = turn.take_delta(Delta(session_key="k", run_id=RUN, number=0, thinking="hm "))
    found += turn.take_answer(entry, is_internal=False)
    assert [(each["sessionUpdate"], each["content"]["text"]) for each in found] == [
        ("agent_thought_chunk", "hm "),
        ("agent_thought_chunk", "well"),
        ("agent_message_chunk", "yes"),
    ]


# --- tool calls ---

CALL = {"type": "toolCall", "id": "call_1", "name": "exec", "arguments": {"command": "ls -l\n"}}
RESULT = {
    "toolCallId": "call_1",
    "toolName": "exec",
    "isError": True,
    "content": [{"type": "text", "text": "no"}],
}
STEPS = ("announce", "start", "update", "result phase", "result")


def take(calls: ShownToolCalls, step: str) -> list[Json]:
    if step == "announce":
        return [calls.announce(CALL, RUN)]
    if step == "result":
        return [calls.take_result(RESULT, RUN)]
    phase = step.removesuffix(" phase")
    event = ToolPhase(
        session_key="k",
        run_id=RUN,
        call_id="call_1",
        name="exec",
        phase=phase,
        is_error=True,
        output="so far",
    )
    return [update for update in [calls.take_phase(event)] if update]


@given(st.permutations(STEPS))
def test_a_call_is_announced_once_in_whatever_order_its_news_arrive(steps: Sequence[str]) -> None:
    calls = ShownToolCalls()
    found = [update for step in steps for update in take(calls, step)]
    assert [update["sessionUpdate"] for update in found] == ["tool_call"] + ["tool_call_update"] * (
        len(found) - 1
    )
    state: Json = {}
    for update in found:
        validate(update)
        state |= update
    assert (state["toolCallId"], state["title"], state["kind"]) == (f"{RUN}:call_1", "ls -l ", "execute")
    assert state["status"] == "failed"
    assert state["content"][0]["content"]["text"] == "no"
    assert calls.end_run(RUN) == []


def test_a_call_without_a_result_fails_with_its_run() -> None:
    calls = ShownToolCalls()
    calls.announce(CALL, RUN)
    assert calls.find_waiting(RUN, "exec") == f"{RUN}:call_1"
    assert [update["status"] for update in calls.end_run(RUN)] == ["failed"]
    assert calls.find_waiting(RUN, "exec") is None


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda more: st.lists(more) | st.dictionaries(st.text(), more)
    )
)
def test_any_entry_can_be_shown(content: object) -> None:
    """An import may hold anything."""
    entry: Json = {"content": content, "id": "e"}
    block = {"id": 1, "name": "x", "arguments": content}
    for update in (
        *updates.build_user_chunks(entry, "helper"),
        *updates.build_answer_chunks(entry, None),
        ShownToolCalls().announce(block, None),
        ShownToolCalls().take_result(entry, None),
    ):
        validate(update)


def test_long_results_and_arguments_are_cut() -> None:
    result = updates.describe_result({"content": [{"type": "text", "text": "x" * 10**6}]})
    assert len(json.dumps(result)) < 2 * updates.MAX_RESULT_CHARACTERS
    call = updates.describe_call({"name": "write", "arguments": {"path": "a", "content": "x" * 10**6}})
    assert call == {"title": "write a", "kind": "edit"}


# --- the connection ---


class SlowHandler:
    """Answers nothing until it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def handle_request(self, method: str, params: object) -> Answer:
        await self.released.wait()
        return Answer({})

    def handle_notification(self, method: str, params: object) -> None:
        self.released.set()

    def handle_end(self) -> None: ...


async def exchange(handler: SlowHandler, content: bytes) -> list[Json]:
    """Give a connection this input, and return what it writes."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    reports: list[AntiphonError] = []
    connection = EditorConnection(handler, reports.append, input_fd=in_read, output_fd=out_write)

    def feed() -> None:
        os.write(in_write, content)
        os.close(in_write)

    try:
        _, _ = await asyncio.gather(connection.run(), asyncio.to_thread(feed))
    finally:
        os.close(out_write)
        written = os.read(out_read, 10**6)
        os.close(out_read)
        os.close(in_read)
    return [json.loads(line) for line in written.splitlines()]


@pytest.mark.anyio
async def test_open_requests_are_bounded() -> None:
    requests = [{"jsonrpc": "2.0", "id": number, "method": "x"} for number in range(MAX_OPEN_REQUESTS + 1)]
    last = {"jsonrpc": "2.0", "method": "release"}
    lines = "".join(f"{json.dumps(each)}\n" for each in (*requests, last))
    answers = await exchange(SlowHandler(), lines.encode())
    assert len(answers) == MAX_OPEN_REQUESTS + 1
    [refused] = [each for each in answers if "error" in each]
    assert refused["id"] == MAX_OPEN_REQUESTS and "requests are open" in refused["error"]["message"]


@pytest.mark.anyio
async def test_long_lines_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.cli.acp.connection.MAX_LINE_BYTES", 1000)
    with pytest.raises(TooLarge):
        await exchange(SlowHandler(), b"x" * 1001)


def test_nothing_heavy_is_imported() -> None:
    import subprocess
    import sys

    script = (
        "import antiphon.cli.acp.agent, antiphon.cli.acp.command, sys;"
        "print([name for name in ('acp', 'pydantic', 'prompt_toolkit', 'aiosqlite') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
