"""Changes single members of the config file. Comments, spelling and order of everything else stay as they are.

The text is changed, not the decoded document. What was written is decoded again and compared before it replaces the
file, so a change that would lose or alter anything else is refused.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from antiphon.config_file import TOKEN_PATTERN, decode_json5, decode_key, read_document
from antiphon.errors import ConfigError

NEW_FILE_TEXT = "{\n}\n"
NEW_FILE_MODE = 0o600
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN_KEY_PATTERN = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")


class _Member(msgspec.Struct):
    name: str
    start: int
    value: _Value
    comma: int | None = None
    """The position of the comma after it."""


class _Value(msgspec.Struct):
    start: int
    end: int
    members: list[_Member] | None = None
    """None for a value that is not an object."""


def set_member(path: Path, keys: Sequence[str], value: object) -> None:
    """Add a member to the config file, or replace it. The file is created if it does not exist.

    Raises:
        ConfigError: it could not be written, or could not be changed safely; nothing was changed.
    """

    def change(document: dict[str, Any]) -> None:
        *outer, last = keys
        for key in outer:
            document = document.setdefault(key, {})
        document[last] = value

    _rewrite(path, lambda text: _write_member(text, keys, value), change)


def remove_member(path: Path, keys: Sequence[str]) -> None:
    """Remove a member from the config file.

    Raises:
        ConfigError: as for `set_member`.
    """

    def change(document: dict[str, Any]) -> None:
        *outer, last = keys
        for key in outer:
            document = document[key]
        del document[last]

    _rewrite(path, lambda text: _cut_member(text, keys), change)


def format_member(keys: Sequence[str], value: object) -> str:
    """Return the text of a member for a person to paste into the config."""
    return _Style().format_value(_nest(keys, value), "")


def _nest(keys: Sequence[str], value: object) -> dict[str, Any]:
    *outer, last = keys
    nested: dict[str, Any] = {last: value}
    for key in reversed(outer):
        nested = {key: nested}
    return nested


# --- the file ---


def _rewrite(path: Path, edit: Callable[[str], str], change: Callable[[dict[str, Any]], None]) -> None:
    target = path.resolve()
    document = read_document(target, required=False)
    before = None if document is None else target.read_bytes()
    text = NEW_FILE_TEXT if before is None else before.decode("utf-8-sig")
    expected = {} if document is None else copy.deepcopy(document.content)
    change(expected)
    edited = edit(text)
    if decode_json5(edited, path) != expected:
        raise ConfigError(
            f"The config file {str(path)!r} could not be changed safely.",
            "Edit the file by hand.",
            file=str(path),
        )
    content = edited.encode()
    if before is not None and before.startswith(b"\xef\xbb\xbf"):
        content = b"\xef\xbb\xbf" + content
    try:
        _replace_file(target, before, content)
    except OSError as error:
        raise ConfigError(
            f"The config file {str(path)!r} could not be written: {error.strerror}.",
            "Check the permissions of the file and its directory, or change it by hand.",
            file=str(path),
        ) from error


def _replace_file(path: Path, before: bytes | None, content: bytes) -> None:
    """Replace the file as a whole. Its owner and mode stay; one that has changed meanwhile is left alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(
        missing_ok=True
    )  # left by a crash, or made by the owner of the directory for root to follow
    descriptor = os.open(temporary, _CREATE_FLAGS, NEW_FILE_MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                status = path.stat()
                if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if (path.read_bytes() if path.exists() else None) != before:
            raise ConfigError(
                f"The config file {str(path)!r} was changed by another program at the same time.",
                "Run the command again.",
                file=str(path),
            )
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --- the text ---


def _write_member(text: str, keys: Sequence[str], value: object) -> str:
    """Return the text with a member; where objects on the way to it are missing, they are added."""
    at = _parse(text)
    for number, key in enumerate(keys):
        assert at.members is not None
        found = next((member for member in at.members if member.name == key), None)
        is_last = number == len(keys) - 1
        if found is None:
            return _insert(text, at, key, _nest(keys[number + 1 :], value) if not is_last else value)
        if is_last or found.value.members is None:
            indent = _find_indent(text, found.start)
            written = _Style.detect(text).format_value(
                _nest(keys[number + 1 :], value) if not is_last else value, indent
            )
            return text[: found.value.start] + written + text[found.value.end :]
        at = found.value
    raise AssertionError("unreachable")


def _insert(text: str, parent: _Value, key: str, value: object) -> str:
    """Return the text with a new last member of an object."""
    assert parent.members is not None
    style = _Style.detect(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    close = parent.end - 1
    content_end, ends_in_line_comment = _find_content_end(text, parent)
    is_one_line = bool(parent.members) and "\n" not in text[parent.start : close] and not ends_in_line_comment
    if is_one_line:
        indent, before, after = _find_indent(text, parent.start), " ", ""
    else:
        outer = _find_indent(text, parent.start)
        indent = _find_indent(text, parent.members[-1].start) if parent.members else outer + style.indent
        before = newline + indent
        after = "" if "\n" in text[content_end:close] else newline + outer
    had_comma = not parent.members or parent.members[-1].comma is not None
    keeps_comma = bool(parent.members) and had_comma
    written = f"{style.format_key(key)}: {style.format_value(value, indent, is_one_line=is_one_line)}"
    if newline != "\n":
        written = written.replace("\n", newline)
    addition = f"{before}{written}{',' if keeps_comma and not is_one_line else ''}{after}"
    edited = text[:content_end] + addition + text[content_end:]
    if not had_comma:
        last = parent.members[-1].value.end
        edited = edited[:last] + "," + edited[last:]
    return edited


def _find_content_end(text: str, parent: _Value) -> tuple[int, bool]:
    """Return where the last token or comment in an object ends, and whether it is a comment up to the line's end."""
    end, is_line_comment = parent.start + 1, False
    for token in TOKEN_PATTERN.finditer(text, parent.start + 1, parent.end - 1):
        end, is_line_comment = token.end(), token[0].startswith("//")
    return end, is_line_comment


def _cut_member(text: str, keys: Sequence[str]) -> str:
    parent = _parse(text)
    for key in keys[:-1]:
        assert parent.members is not None
        parent = next(member.value for member in parent.members if member.name == key)
    assert parent.members is not None
    number = next(number for number, member in enumerate(parent.members) if member.name == keys[-1])
    member = parent.members[number]
    start, end = member.start, member.value.end if member.comma is None else member.comma + 1
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    has_own_lines = not text[line_start:start].strip() and line_end >= 0 and not text[end:line_end].strip()
    if has_own_lines:
        start, end = line_start, line_end + 1
    elif not text[end : end + 1].strip():
        end += 1
    edited = text[:start] + text[end:]
    previous = parent.members[number - 1] if number > 0 else None
    if member.comma is None and previous is not None and previous.comma is not None:
        edited = edited[: previous.comma] + edited[previous.comma + 1 :]
    return edited


def _find_indent(text: str, offset: int) -> str:
    line_start = text.rfind("\n", 0, offset) + 1
    return re.match(r"[ \t]*", text[line_start:])[0]  # type: ignore[index]


class _Style(msgspec.Struct, frozen=True):
    """How the file is written: as JSON, without plain keys and final commas, or as JSON5."""

    is_json: bool = False
    indent: str = "  "

    @classmethod
    def detect(cls, text: str) -> _Style:
        try:
            json.loads(text)
        except ValueError:
            is_json = False
        else:
            is_json = text != NEW_FILE_TEXT
        found = re.search(r"^([ \t]+)[^\s/*]", text, re.MULTILINE)
        return cls(is_json, found[1] if found else cls().indent)

    def format_key(self, key: str) -> str:
        is_plain = not self.is_json and _PLAIN_KEY_PATTERN.fullmatch(key)
        return key if is_plain else json.dumps(key, ensure_ascii=False)

    def format_value(self, value: object, indent: str, *, is_one_line: bool = False) -> str:
        if isinstance(value, dict):
            return self._format_object(cast("dict[str, Any]", value), indent, is_one_line=is_one_line)
        if isinstance(value, (list, tuple)):
            items = cast("Sequence[object]", value)
            return f"[{', '.join(self.format_value(item, indent, is_one_line=True) for item in items)}]"
        return json.dumps(value, ensure_ascii=False)

    def _format_object(self, value: dict[str, Any], indent: str, *, is_one_line: bool) -> str:
        if not value:
            return "{}"
        inner = indent + self.indent
        is_one_line = is_one_line or _is_reference(value)
        members = [
            f"{self.format_key(key)}: {self.format_value(item, inner, is_one_line=is_one_line)}"
            for key, item in value.items()
        ]
        if is_one_line:
            return f"{{ {', '.join(members)} }}"
        end = "" if self.is_json else ","
        return "{\n" + ",\n".join(f"{inner}{member}" for member in members) + f"{end}\n{indent}}}"


def _is_reference(value: dict[str, Any]) -> bool:
    """Whether an object is short, such as a reference to a secret."""
    return len(value) == 1 and not isinstance(next(iter(value.values())), dict)


# --- positions ---


def _parse(text: str) -> _Value:
    """Return where the values of a document are. The text must already have been accepted by the parser."""
    tokens = [token for token in TOKEN_PATTERN.finditer(text) if token.lastgroup != "note"]
    value, _ = _parse_value(tokens, 0)
    return value


def _parse_value(tokens: list[re.Match[str]], number: int) -> tuple[_Value, int]:
    """Return the value that begins with a token, and the number of the token after it."""
    first = tokens[number]
    if first[0] not in ("{", "["):
        return _Value(first.start(), first.end()), number + 1
    close = {"{": "}", "[": "]"}[first[0]]
    members: list[_Member] = []
    number += 1
    while tokens[number][0] != close:
        if close == "}":
            key = tokens[number]
            value, number = _parse_value(tokens, number + 2)
            members.append(_Member(decode_key(key[0]), key.start(), value))
        else:
            _, number = _parse_value(tokens, number)
        if tokens[number][0] == ",":
            if members:
                members[-1].comma = tokens[number].start()
            number += 1
    whole = _Value(first.start(), tokens[number].end(), members if close == "}" else None)
    return whole, number + 1
