"""Reads the config file: JSON5 text to a document of plain values.

What the keys mean is decided by `antiphon.config`. This module is apart from it because a command that only has to
know which sections a file has would spend most of its time on importing the sections' types.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from antiphon.errors import ConfigError

MAX_CONFIG_BYTES = 1024 * 1024

TOKEN_PATTERN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<note>//[^\n\r\u2028\u2029]*|/\*.*?\*/)"""
    r"""|(?P<mark>[{}\[\],:])|(?P<word>[^\s\ufeff{}\[\],:"'/]+)""",
    re.DOTALL,
)


class ConfigDocument(msgspec.Struct, frozen=True):
    """The content of a config file, decoded but not validated."""

    content: dict[str, Any]
    path: Path
    status: os.stat_result
    """Owner and mode of the file that was read."""


def read_document(path: Path, *, required: bool) -> ConfigDocument | None:
    """Reads a config file, or returns None if it does not exist and is not `required`.

    Raises:
        ConfigError: the file could not be read, is not a JSON5 object, or has a key twice.
    """
    found = _read_file(path, required=required)
    if found is None:
        return None
    text, status = found
    return ConfigDocument(require_object(decode_json5(text, path), str(path)), path, status)


def require_object(value: object, file: str | None = None) -> dict[str, Any]:
    """Returns a decoded config, which has to be an object.

    Raises:
        ConfigError: it is anything else.
    """
    if not isinstance(value, dict):
        raise ConfigError(
            "The config is not an object.", "Put its keys between '{' and '}'.", path="", file=file
        )
    return cast("dict[str, Any]", value)


def _read_file(path: Path, *, required: bool) -> tuple[str, os.stat_result] | None:
    try:
        with path.open("rb") as file:
            content, status = file.read(MAX_CONFIG_BYTES + 1), os.fstat(file.fileno())
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"The config file {str(path)!r} is larger than {MAX_CONFIG_BYTES} bytes.",
                "Move long texts out of it.",
                file=str(path),
            )
        return content.decode("utf-8-sig"), status
    except (FileNotFoundError, NotADirectoryError) as error:
        if not required:
            return None
        missing = isinstance(error, FileNotFoundError)
        why = "does not exist" if missing else f"could not be read: {error.strerror}"
        hint = "Create it, or leave the option out to use the defaults."
    except UnicodeDecodeError as error:
        why, hint = f"is not UTF-8 text (byte {error.start})", "Save it as UTF-8."
    except (OSError, ValueError) as error:
        why, hint = (
            f"could not be read: {getattr(error, 'strerror', error)}",
            "Check the path and its permissions.",
        )
    raise ConfigError(f"The config file {str(path)!r} {why}.", hint, file=str(path))


def decode_json5(text: str, path: Path) -> object:
    import pyjson5  # noqa: PLC0415 - only where there is a file: it takes longer than many commands' own modules

    try:
        decoded = pyjson5.decode(text)
    except (pyjson5.Json5Exception, ValueError, RecursionError) as error:
        if not text.strip():
            raise ConfigError(
                f"The config file {str(path)!r} is empty.", "Write {} into it, or remove it.", file=str(path)
            ) from None
        why = _describe_syntax_error(error, text)
    else:
        # The parser would silently drop the first of two sections with one name.
        for name, offset in find_duplicate_keys(text):
            position = _format_position(text, offset)
            raise ConfigError(
                f"The config file {str(path)!r} has the key {name!r} a second time at {position}.",
                "Merge the two values under one key.",
                path=name,
                file=str(path),
            )
        return decoded
    raise ConfigError(
        f"The config file {str(path)!r} is not JSON5: {why}.",
        "Check that position for a missing comma, quote or bracket.",
        file=str(path),
    )


def find_duplicate_keys(text: str) -> Iterator[tuple[str, int]]:
    """Yields each duplicate key and its position. The text must already have been accepted by the parser."""
    objects: list[set[str]] = []
    key: tuple[str, int] | None = None
    for token in TOKEN_PATTERN.finditer(text):
        match token.lastgroup, token[0]:
            case (("text" | "word"), word):
                key = word, token.start()
            case "mark", ":" if key is not None:
                name = decode_key(key[0])
                if name in objects[-1]:
                    yield name, key[1]
                objects[-1].add(name)
            case "mark", ("{" | "["):
                objects.append(set())
            case "mark", ("}" | "]"):
                objects.pop()
            case _:
                pass


def decode_key(written: str) -> str:
    """Returns a key without the quotes and escapes with which it is written."""
    import pyjson5  # noqa: PLC0415

    return next(iter(pyjson5.decode(f"{{{written}: 0}}")))


def _describe_syntax_error(error: Exception, text: str) -> str:
    """The position and reason of a syntax error, without the excerpts that the parser attaches."""
    import pyjson5  # noqa: PLC0415

    found = re.search(r"near (\d+)", str(error.args[0]) if error.args else "")
    offset = max(0, int(found[1]) - 1) if found else 0
    if isinstance(error, pyjson5.Json5ExtraData):
        what = "unexpected content after the end of the document"
        # This parser's offset points to the end of the document, not to the offending character.
        offset = len(text) - len(text[offset + 1 :].lstrip())
    elif isinstance(error, pyjson5.Json5EOF):
        what = "what starts here is not terminated"
    elif isinstance(error, pyjson5.Json5NestingTooDeep):
        what = "it is nested too deeply"
    else:
        what = "unexpected character"
    return f"{_format_position(text, offset)}: {what}"


def _format_position(text: str, offset: int) -> str:
    return f"line {text.count(chr(10), 0, offset) + 1}, column {offset - text.rfind(chr(10), 0, offset)}"
