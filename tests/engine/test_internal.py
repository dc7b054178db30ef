"""Which entries are not part of what a person would call the conversation, by what they say."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.engine.sessions.transcripts import Entry, is_internal_entry, remove_control_tokens
from antiphon.messages import (
    AssistantMessage,
    Message,
    Provenance,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    UserMessage,
    decode_message,
    encode_message,
)

pytestmark = pytest.mark.requirement("H6")


def answer(*content: TextBlock | ThinkingBlock | ToolCall) -> AssistantMessage:
    return AssistantMessage(content=list(content), timestamp=1, stop_reason="stop")


CALL = ToolCall(id="c", name="sessions_list", arguments={})
ELSEWHERE = Provenance(kind="inter_session")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (answer(TextBlock(text="REPLY_SKIP")), True),
        (answer(TextBlock(text="```\nannounce_skip\n```")), True),
        (answer(TextBlock(text="ＮＯ＿ＲＥＰＬＹ")), True),
        (answer(ThinkingBlock(thinking="No words."), TextBlock(text=" NO_REPLY. ")), True),
        (answer(TextBlock(text="REPLY_SKIP ends a conversation.")), False),
        (answer(TextBlock(text="NO_REPLY"), CALL), False),
        (answer(CALL), False),
        (answer(), False),
        (UserMessage(content="NO_REPLY", timestamp=1), False),  # a person has typed it
        (UserMessage(content="NO_REPLY", timestamp=1, provenance=ELSEWHERE), True),
        (UserMessage(content="a_b", timestamp=1, provenance=ELSEWHERE), False),
        (UserMessage(content="Well?", timestamp=1, provenance=Provenance(kind="announce_step")), True),
    ],
)
def test_an_entry_is_internal_by_what_it_says(message: Message, expected: bool) -> None:
    assert is_internal_entry(str(message.__struct_config__.tag), encode_message(message)) is expected


@pytest.mark.parametrize("body", ["", "_", '{"content": "_', "[1, 2_]", '{"content": [1, null], "x_": 2}'])
def test_a_damaged_entry_is_shown(body: str) -> None:
    assert not is_internal_entry("assistant", body)
    assert not is_internal_entry("user", body)


def test_escapes_make_no_difference() -> None:
    text = msgspec.json.encode({"content": [{"type": "text", "text": "NO_REPLY"}]}).decode()
    assert is_internal_entry("assistant", text.replace("_", "\\u005f"))


@pytest.mark.parametrize(
    ("run_id", "text", "expected"),
    [
        ("announce:1", "All done. ANNOUNCE_SKIP Thanks.", "All done. Thanks."),
        ("turn:1:2", "Fine. REPLY_SKIP", "Fine."),
        ("asked-by-a-person", "ANNOUNCE_SKIP keeps a target silent.", "ANNOUNCE_SKIP keeps a target silent."),
        (None, "ANNOUNCE_SKIP keeps a target silent.", "ANNOUNCE_SKIP keeps a target silent."),
    ],
)
def test_people_see_no_token_in_an_announcement(run_id: str | None, text: str, expected: str) -> None:
    body = encode_message(answer(ThinkingBlock(thinking="NO_REPLY?"), TextBlock(text=text)))
    entry = Entry(seq=1, id="e", role="assistant", body=body, created_at=1, run_id=run_id)
    shown = decode_message(remove_control_tokens(entry).body)
    assert shown == answer(ThinkingBlock(thinking="NO_REPLY?"), TextBlock(text=expected))


@pytest.mark.parametrize("body", ["", "[1]", '{"content": "NO_REPLY"}', '{"content": [1, {"type": "text"}]}'])
def test_a_damaged_announcement_stays_as_it_is(body: str) -> None:
    entry = Entry(seq=1, id="e", role="assistant", body=body, created_at=1, run_id="announce:1")
    assert remove_control_tokens(entry) is entry
