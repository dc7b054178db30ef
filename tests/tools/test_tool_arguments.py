"""What a tool takes is what its schema says, and what it refuses it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import jsonschema_rs
import msgspec
import pytest
from msgspec import Meta

from antiphon.engine.toolbox import ToolRequest
from antiphon.errors import InvalidInput, StoreReadOnly
from antiphon.tools._adapter import ToolArguments, build_schema, build_tool, parse_arguments
from support.app_fixture import open_app_fixture
from support.tool_calls import MAIN_AGENT, answer_briefly, call_refused_tool, list_tools

pytestmark = pytest.mark.anyio
NAMES = ("sessions_list", "sessions_history", "sessions_search", "session_status", "agents_list")


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    title: str = ""


class Example(ToolArguments, frozen=True):
    task: Annotated[str, Meta(description="What.")]
    some_number: Annotated[int, Meta(ge=1, le=9)] = 3
    share: float | None = None
    sure: bool = False
    files: tuple[File, ...] = ()


def test_a_schema_is_closed_plain_and_without_references() -> None:
    assert build_schema(Example) == {
        "type": "object",
        "properties": {
            "task": {"type": "string", "description": "What."},
            "someNumber": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "share": {"type": "number"},
            "sure": {"type": "boolean", "default": False},
            "files": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "title": {"type": "string", "default": ""}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
                "default": [],
            },
        },
        "required": ["task"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("number", [5, 5.0, "5", "5.0"])
def test_numbers_are_understood_however_a_model_writes_them(number: Any) -> None:
    given = {"task": "null", "someNumber": number, "share": "0.5", "sure": "true", "files": None}
    assert parse_arguments(Example, given) == Example(task="null", some_number=5, share=0.5, sure=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "'task' is missing. 'task' takes text."),
        ({"task": 5}, "'task' cannot be accepted: Expected `str`, got `int`. 'task' takes text."),
        ({"task": "x", "someNumber": 10}, "'someNumber' takes a whole number from 1 to 9."),
        ({"task": "x", "someNumber": 1.5}, "'someNumber' takes a whole number from 1 to 9."),
        (
            {"task": "x", "tsak": 1},
            "no argument 'tsak'. The arguments are task, someNumber, share, sure, files.",
        ),
        ({"task": "x", "tsak": None}, "no argument 'tsak'."),
        ({"task": "x", "files": [{"nom": 1}]}, "'files' takes a list; each item is an object."),
        ({"task": "\ud800"}, "not valid Unicode"),
    ],
)
def test_what_cannot_be_accepted_is_named_with_what_can(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_arguments(Example, given)
    assert words in str(caught.value)


@pytest.mark.requirement("L1", "H1", "A1", "A2")
async def test_every_tool_has_a_valid_closed_schema_and_only_looks(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        found = list_tools(app)
        assert set(NAMES) <= set(found)
        for name in NAMES:
            tool = found[name]
            assert (tool.has_side_effects, tool.after_crash) == (False, "settle")
            assert tool.spec.description
            parameters = dict(tool.spec.parameters)
            jsonschema_rs.meta.validate(parameters)
            assert parameters["additionalProperties"] is False
            assert "$ref" not in str(parameters)
            assert "$defs" not in parameters
            for told in parameters["properties"].values():
                assert told["description"]
            required = dict.fromkeys(parameters.get("required", []), "x")
            checker = jsonschema_rs.validator_for(parameters)
            assert checker.is_valid(required)
            assert not checker.is_valid({**required, "nonsense": 1})


@pytest.mark.requirement("L1", "H1", "A2")
async def test_every_tool_refuses_an_argument_that_is_not_there(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, answer_briefly) as app:
        for name in NAMES:
            refusal = await call_refused_tool(app, name, nonsense=True)
            assert refusal["status"] == "error"
            assert "There is no argument 'nonsense'." in refusal["error"]


async def test_a_fault_of_ours_is_no_answer() -> None:
    async def broken(call: object, given: Example) -> object:
        raise StoreReadOnly("The store is closed.", "Start again.")

    tool = build_tool("example", "An example.", Example, broken)
    with pytest.raises(StoreReadOnly):
        await tool.invoke(ToolRequest(caller=MAIN_AGENT, run_id="r", call_id="c", arguments={"task": "x"}))
