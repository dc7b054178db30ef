"""What the conformance suite of MCP looks for, behind the real `/mcp` of a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.errors import NotFound, ToolMissing
from antiphon.mcp.server import ReportProgress, Resource, ResourcePage
from antiphon.runtimes import ToolSpec

STATIC_TEXT_URI = "test://static-text"
SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


class ConformanceProvider:
    """Takes the place of the gateway's own provider."""

    instructions = "Tools of a test."
    resource_template = Resource(
        uri="test://template/{id}/data",
        name="template",
        title="A template",
        description="A template.",
        media_type="text/plain",
    )

    def __init__(self, *_: Any) -> None: ...

    async def list_tools(self) -> Sequence[Tool]:
        plain: dict[str, Any] = {"type": "object", "properties": {}}
        schemas: dict[str, dict[str, Any]] = {name: plain for name in _TEXTS} | {
            "json_schema_2020_12_tool": SCHEMA_2020_12
        }
        return [
            Tool(spec=ToolSpec(name=name, description=f"Tool {name}.", parameters=schema), invoke=_refuse)
            for name, schema in schemas.items()
        ]

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], report_progress: ReportProgress | None
    ) -> ToolOutput:
        if name not in _TEXTS:
            raise ToolMissing(f"There is no tool {name!r}.", "Choose another.")
        if report_progress is not None:
            for done in (0.0, 50.0, 100.0):
                await report_progress(done, 100.0, f"{done:.0f} of 100")
        return ToolOutput(text=_TEXTS[name], is_error=name == "test_error_handling")

    async def list_resources(self, cursor: str | None) -> ResourcePage:
        text = Resource(
            uri=STATIC_TEXT_URI,
            name="text",
            title="A text",
            description="A text.",
            media_type="text/plain",
        )
        return ResourcePage([text])

    async def read_resource(self, uri: str) -> str:
        if uri == STATIC_TEXT_URI:
            return "This is the content of the static text resource."
        if uri.startswith("test://template/"):
            return '{"id": "123", "templateTest": true, "data": "Data for ID: 123"}'
        raise NotFound(f"There is no resource {uri!r}.", "List the resources.")


_TEXTS = {
    "test_simple_text": "This is a simple text response for testing.",
    "test_error_handling": "This tool intentionally returns an error for testing",
    "test_tool_with_progress": "Done.",
    "test_logging_tool": "Done.",  # without a log, since we send none
}


async def _refuse(_: ToolRequest) -> ToolOutput:
    raise AssertionError("the provider calls the tools")
