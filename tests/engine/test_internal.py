"""Which entries are not part of what a person would call the conversation, by what they say."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.engine.internal import is_internal
from antiphon.messages import Assistant, Message, Provenance, Text, Thinking, ToolCall, User, encode

pytestmark = pytest.mark.requirement("H6")


def answer(*content: Text | Thinking | ToolCall) -> Assistant:
    return Assistant(content=list(content), timestamp=1, stop_reason="stop")


CALL = ToolCall(id="c", name="sessions_list", arguments={})
ELSEWHERE = Provenance(kind="inter_session")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (answer(Text(text="REPLY_SKIP")), True),
        (answer(Text(text="```\nannounce_skip\n```")), True),
        (answer(Text(text="ＮＯ＿ＲＥＰＬＹ")), True),
        (answer(Thinking(thinking="No words."), Text(text=" NO_REPLY. ")), True),
        (answer(Text(text="REPLY_SKIP ends a conversation.")), False),
        (answer(Text(text="NO_REPLY"), CALL), False),
        (answer(CALL), False),
        (answer(), False),
        (User(content="NO_REPLY", timestamp=1), False),  # somebody has typed it
        (User(content="NO_REPLY", timestamp=1, provenance=ELSEWHERE), True),
        (User(content="a_b", timestamp=1, provenance=ELSEWHERE), False),
        (User(content="Well?", timestamp=1, provenance=Provenance(kind="announce_step")), True),
    ],
)
def test_an_entry_is_internal_by_what_it_says(message: Message, expected: bool) -> None:
    assert is_internal(str(message.__struct_config__.tag), encode(message)) is expected


@pytest.mark.parametrize("body", ["", "_", '{"content": "_', "[1, 2_]", '{"content": [1, null], "x_": 2}'])
def test_a_damaged_entry_is_shown(body: str) -> None:
    assert not is_internal("assistant", body)
    assert not is_internal("user", body)


def test_escapes_make_no_difference() -> None:
    text = msgspec.json.encode({"content": [{"type": "text", "text": "NO_REPLY"}]}).decode()
    assert is_internal("assistant", text.replace("_", "\\u005f"))
