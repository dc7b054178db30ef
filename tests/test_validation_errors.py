"""Validation errors: short however much was sent, and halves of surrogate pairs replaced as if parsed."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import validation_errors
from antiphon.config import Config
from antiphon.errors import AntiphonError
from antiphon.gateway.ws import frames
from antiphon.tools import _adapter
from antiphon.validation_errors import MAX_COMPARED_NAME_CHARACTERS, find_nearest

pytestmark = pytest.mark.requirement("W1")

MEGABYTES = "sessionKey" * 400_000


class Inner(frames.Params, frozen=True):
    mode: str = "a"


class Outer(frames.Params, frozen=True):
    session_key: str = ""
    inner: tuple[Inner, ...] = ()


class Taken(_adapter.ToolArguments, frozen=True):
    mode: Literal["a", "b"] = "a"


def refusal(params: object) -> AntiphonError:
    with pytest.raises(AntiphonError) as caught:
        frames.read_params("a.method", msgspec.Raw(msgspec.json.encode(params)), msgspec.json.Decoder(Outer))
    return caught.value


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({MEGABYTES: 1}, "at root: unexpected property 'sessionKeysession"),
        ({"inner": [{MEGABYTES: 1}]}, "at /inner/0: unexpected property 'sessionKeysession"),
        ({f"x - at `$.{MEGABYTES}": 1}, "at "),
    ],
)
def test_what_is_said_of_a_name_is_short_however_long_it_is(params: object, says: str) -> None:
    error = refusal(params)
    assert says in str(error)
    assert "Did you mean" not in str(error)
    assert len(str(error)) + len(str(error.data)) < 1000


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Config().get_agent(MEGABYTES),
        lambda: Config().find_model(MEGABYTES),
        lambda: _adapter.parse_arguments(Taken, {"mode": MEGABYTES}),
    ],
)
def test_neither_is_what_nothing_is_called_repeated(ask: Any) -> None:
    with pytest.raises(AntiphonError) as caught:
        ask()
    assert len(str(caught.value)) + len(str(caught.value.data)) < 1000


def test_only_a_name_is_compared_with_others() -> None:
    name = "n" * MAX_COMPARED_NAME_CHARACTERS
    assert find_nearest(name, [name.upper()]) == name.upper()
    assert find_nearest(name + "n", [name + "n"]) is None


ESCAPES = st.sampled_from(
    [r"\\", r"\"", r"\n", r"\u0041", r"\ud800", r"\uD83D", r"\udc00", r"\uDe00", "ud800", "\U0001f600", "é"]
)  # fmt: skip


@given(st.lists(ESCAPES, max_size=12).map("".join), st.booleans())
def test_lone_surrogates_are_replaced_and_nothing_else(text: str, as_bytes: bool) -> None:
    raw = f'{{"{text}": ["{text}"]}}'
    whole = json.dumps(json.loads(raw), ensure_ascii=False).encode("utf-16", "surrogatepass")
    replaced = validation_errors.replace_lone_surrogates(raw.encode() if as_bytes else raw)
    assert msgspec.json.decode(replaced) == json.loads(whole.decode("utf-16", "replace"))


def test_what_is_no_json_does_not_become_any() -> None:
    with pytest.raises(ValueError, match="NUL"):
        validation_errors.replace_lone_surrogates('["\0"]')
    assert validation_errors.replace_lone_surrogates(b'\xef\xbb\xbf["\xed\xa0\x80"]') == '["\ufffd"]'.encode()
    assert validation_errors.replace_lone_surrogates("[NaN") == b"[NaN"
