"""Bounds and stores what servers say about themselves: their tools and their instructions.

Everything here comes from programs that have not been vetted. Texts are cut and cleaned, and a tool whose schema a
provider would refuse is left out, since one refused tool would fail every run of its agent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from antiphon.child_processes.text import clean_text
from antiphon.config.mcp import McpServerConfig

if TYPE_CHECKING:
    from antiphon.config import Config

MAX_TOOLS_PER_SERVER = 256
MAX_LIST_PAGES = 32
MAX_DESCRIPTION_CHARACTERS = 2000
MAX_INSTRUCTIONS_CHARACTERS = 4000
MAX_REASON_CHARACTERS = 300
MAX_TOOL_NAME_CHARACTERS = 256
MAX_SCHEMA_BYTES = 32 * 1024
MAX_SCHEMA_LEVELS = 24
MAX_NOTES = 20
MAX_FILE_PREFIX_CHARACTERS = 40
DIRECTORY_NAME = "mcp"

ServerState = Literal["idle", "starting", "ready", "failed", "needs_auth"]
"""`idle`: not started, or closed since nothing uses it. `needs_auth`: a person must log in."""

_PROPERTY_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_UNSUPPORTED_AT_TOP = ("$schema", "$id", "anyOf", "oneOf", "allOf", "not", "enum", "if", "then", "else")
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_VALUES = ("items", "additionalProperties", "not")


class ListedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a server. The last three are claims, which count only if the operator trusts the server."""

    name: str
    description: str
    parameters: dict[str, Any]
    only_reads: bool = False
    is_idempotent: bool = False


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The tools and the instructions of a server."""

    tools: list[ListedTool] = []
    instructions: str = ""
    has_resources: bool = False
    has_prompts: bool = False
    notes: list[str] = []
    """What was left out, and why."""


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is stored about a server, so that it is known after a restart of the gateway."""

    fingerprint: str
    listing: Listing | None = None
    state: ServerState = "idle"
    reason: str | None = None
    last_contact_at: int | None = None


# --- schemas ---


def check_schema(raw: object) -> dict[str, Any]:
    """Return the schema of a tool's arguments in a form that providers take.

    Raises:
        ValueError: it cannot be used. The text completes "its schema …".
    """
    if not isinstance(raw, dict):
        raise ValueError("is not an object")
    try:
        size = len(json.dumps(raw))
    except (RecursionError, ValueError, TypeError):
        raise ValueError("is nested too deeply") from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    schema = cast("dict[str, Any]", raw)
    if schema.get("type", "object") != "object":
        raise ValueError("does not describe an object")
    kept: dict[str, Any] = {name: value for name, value in schema.items() if name not in _UNSUPPORTED_AT_TOP}
    properties = cast("dict[str, Any]", schema.get("properties") or {})
    shaped: dict[str, Any] = {**kept, "type": "object", "properties": properties}
    _check_node(shaped, 1)
    for name in properties:
        if not _PROPERTY_NAME_PATTERN.fullmatch(name):
            raise ValueError(f"has the argument {clean_text(name, 80)!r}, which providers refuse")
    return shaped


def _check_node(node: object, level: int) -> None:
    """Check that a part of a schema is a schema."""
    if level > MAX_SCHEMA_LEVELS:
        raise ValueError("is nested too deeply")
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        raise ValueError("is not a JSON schema")
    schema = cast("dict[str, Any]", node)
    _check_keywords(schema)
    for part in _list_parts(schema):
        _check_node(part, level + 1)


def _check_keywords(schema: dict[str, Any]) -> None:
    kinds: object = schema.get("type", "string")
    listed = cast("list[object]", kinds) if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) and kind in _SCHEMA_TYPES for kind in listed):
        raise ValueError("names a type that JSON schema does not have")
    required: object = schema.get("required", [])
    is_named = isinstance(required, list) and all(
        isinstance(name, str) for name in cast("list[object]", required)
    )
    if not is_named or not isinstance(schema.get("enum", []), list):
        raise ValueError("is not a JSON schema")
    if not str(schema.get("$ref", "#")).startswith("#"):
        raise ValueError("refers to another document")


def _list_parts(schema: dict[str, Any]) -> list[object]:
    """Return the schemas that are directly in a schema."""
    parts: list[object] = []
    for name in _SCHEMA_MAPS:
        named: object = schema.get(name, {})
        if not isinstance(named, dict):
            raise ValueError("is not a JSON schema")
        parts += cast("dict[str, object]", named).values()
    for name in _SCHEMA_LISTS:
        choices: object = schema.get(name, [])
        if not isinstance(choices, list):
            raise ValueError("is not a JSON schema")
        parts += cast("list[object]", choices)
    parts += [
        schema[name] for name in _SCHEMA_VALUES if name in schema and not isinstance(schema[name], list)
    ]
    return parts


# --- listings ---


class RawTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as a server lists it."""

    name: str
    description: str | None
    schema: object
    only_reads: bool
    is_idempotent: bool


def build_listing(
    raw_tools: Iterable[RawTool],
    *,
    instructions: str | None,
    has_resources: bool,
    has_prompts: bool = False,
    notes: Sequence[str] = (),
) -> Listing:
    """Return what a server offers, without unusable tools."""
    tools: dict[str, ListedTool] = {}
    left_out = list(notes)
    for raw in raw_tools:
        shown = clean_text(raw.name, 80)
        if len(tools) >= MAX_TOOLS_PER_SERVER:
            left_out.append(f"It lists more than {MAX_TOOLS_PER_SERVER} tools; the others are left out.")
            break
        if not raw.name or len(raw.name) > MAX_TOOL_NAME_CHARACTERS:
            left_out.append(f"A tool is left out: its name has {len(raw.name)} characters.")
        elif raw.name in tools:
            left_out.append(f"The tool {shown!r} is listed twice; the first one is used.")
        else:
            try:
                parameters = check_schema(raw.schema)
            except ValueError as error:
                left_out.append(f"The tool {shown!r} is left out: its schema {error}.")
                continue
            tools[raw.name] = ListedTool(
                name=raw.name,
                description=clean_text(raw.description or "", MAX_DESCRIPTION_CHARACTERS, keeps_lines=True),
                parameters=parameters,
                only_reads=raw.only_reads,
                is_idempotent=raw.is_idempotent,
            )
    return Listing(
        tools=list(tools.values()),
        instructions=clean_text(instructions or "", MAX_INSTRUCTIONS_CHARACTERS, keeps_lines=True).strip(),
        has_resources=has_resources,
        has_prompts=has_prompts,
        notes=left_out[:MAX_NOTES],
    )


def describe_server(name: str, server: McpServerConfig, listing: Listing | None) -> dict[str, Any]:
    """Return the settings of a server and what is known about it, except its state."""
    return {
        "name": name,
        "transport": server.transport_name,
        "tools": len(listing.tools) if listing else 0,
        "required": server.required,
        "trust": server.trust,
        "notes": list(listing.notes) if listing else [],
    }


def describe_disabled_servers(config: Config) -> list[dict[str, Any]]:
    return [
        {**describe_server(name, server, None), "state": "disabled"}
        for _, name, server in config.list_mcp_servers()
        if not server.is_enabled
    ]


# --- the file ---


def compute_fingerprint(server: McpServerConfig) -> str:
    """Return a digest of a server's program or address. Another one may have other tools."""
    facts = [server.command, server.args, server.directory, server.url]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def locate_directory(state_dir: Path) -> Path:
    return state_dir / DIRECTORY_NAME


def name_file(server: str) -> str:
    """Return a file name for a server, whose own name may have any characters."""
    return f"{build_file_prefix(server)}-{hashlib.sha256(server.encode()).hexdigest()[:12]}.json"


def build_file_prefix(server: str) -> str:
    """Return the prefix of the names of a server's files."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", server)[:MAX_FILE_PREFIX_CHARACTERS]


def load_record(state_dir: Path, name: str, server: McpServerConfig) -> ServerRecord:
    """Return the stored record of a server, or an empty one if its program or address has changed."""
    fingerprint = compute_fingerprint(server)
    try:
        content = (locate_directory(state_dir) / name_file(name)).read_bytes()
        record = msgspec.json.decode(content, type=ServerRecord)
    except (OSError, msgspec.MsgspecError):
        return ServerRecord(fingerprint=fingerprint)
    return record if record.fingerprint == fingerprint else ServerRecord(fingerprint=fingerprint)


def save_record(state_dir: Path, name: str, record: ServerRecord) -> None:
    write_private_file(locate_directory(state_dir) / name_file(name), msgspec.json.encode(record))


def write_private_file(path: Path, content: bytes) -> None:
    """Write a file atomically, so that only its owner can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
