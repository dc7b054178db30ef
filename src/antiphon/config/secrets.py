"""Secrets in the config: the text itself, or a reference to its source.

A `Secret` never shows its value in `repr`, `str`, dumps or errors. Only `reveal()` returns it, and reads the
source each time, so that a rotated secret is picked up and nothing is cached. This is not a keyring and does
not encrypt anything.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from antiphon.errors import ConfigError
from antiphon.paths import expand_home

MAX_SECRET_BYTES = 64 * 1024
EXEC_TIMEOUT_SECONDS = 10.0
SECRET_MASK = "***"  # noqa: S105

SecretKind = Literal["text", "env", "file", "exec"]

ENV_REFERENCE_PATTERN = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""The `${NAME}` form of older configs; recognized only if it is the whole text."""
_ACCEPTED_FORMS = 'text, {env: "NAME"}, {file: "path"} or {exec: ["command", "argument"]}'


class Secret:
    """A text that only `reveal()` shows."""

    __slots__ = ("_base", "_kind", "_value")

    def __init__(self, kind: SecretKind, value: tuple[str, ...], base: Path | None = None) -> None:
        self._kind: SecretKind = kind
        self._value = value
        self._base = base

    @classmethod
    def parse(cls, value: object, base: Path | None = None) -> Secret:
        """Reads one of the accepted forms; relative files and commands are resolved against `base`.

        Raises:
            ValueError: `value` has none of the forms. The message does not contain it.
        """
        if isinstance(value, Secret):
            return value
        reference = _parse_reference(value)
        if reference is None:
            raise ValueError(_ACCEPTED_FORMS)
        return cls(*reference, base)

    @property
    def kind(self) -> SecretKind:
        return self._kind

    @property
    def is_written(self) -> bool:
        """Whether the secret is written in the config itself; a URL without a place for a password is no secret."""
        text = self._value[0]
        return self._kind == "text" and ("://" not in text or "@" in text or "?" in text)

    @property
    def availability_error(self) -> ConfigError | None:
        """Why the secret is not available, as far as can be known without opening or running anything."""
        try:
            if self._kind == "env":
                read_env(self._value[0])
            elif self._kind == "file":
                _check_file_exists(self._resolve_path())
        except ConfigError as error:
            return error
        return None

    def _resolve_path(self) -> Path:
        return (self._base or Path()) / expand_home(self._value[0])

    def reveal(self) -> str:
        """Returns the secret itself. A file or command may block for seconds, so call it in a thread.

        Raises:
            ConfigError: the source is missing, unsafe or failed. The error contains nothing that it printed or holds.
        """
        match self._kind:
            case "text":
                return self._value[0]
            case "env":
                return read_env(self._value[0])
            case "file":
                return _read_file(self._resolve_path())
            case "exec":
                return _read_command_output(self._value, self._base)

    def __repr__(self) -> str:
        return f"Secret({self._kind})"

    def __str__(self) -> str:
        return SECRET_MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return (self._kind, self._value, self._base) == (other._kind, other._value, other._base)

    def __hash__(self) -> int:
        return hash((self._kind, self._value, self._base))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            cls._validate, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "title": "Secret",
            "description": "The secret itself, or a reference to it.",
            "anyOf": [
                {"type": "string", "minLength": 1, "writeOnly": True},
                _build_one_key_schema(
                    "env", {"type": "string", "description": "Name of an environment variable."}
                ),
                _build_one_key_schema(
                    "file", {"type": "string", "description": "A file that only its owner can read."}
                ),
                _build_one_key_schema("exec", {"type": "array", "items": {"type": "string"}, "minItems": 1}),
            ],
        }

    @classmethod
    def _validate(cls, value: object, info: core_schema.ValidationInfo[Any]) -> Secret:
        base = info.context.get("base") if info.context else None
        try:
            return cls.parse(value, base)
        except ValueError:
            # A separate error type, so that the report never shows the given value.
            raise PydanticCustomError("secret", "{text}", {"text": _ACCEPTED_FORMS}) from None


def _build_one_key_schema(key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}


def _parse_reference(value: object) -> tuple[SecretKind, tuple[str, ...]] | None:
    if isinstance(value, str):
        named = ENV_REFERENCE_PATTERN.fullmatch(value)
        return ("env", (named[1],)) if named else ("text", (value,)) if _is_usable(value) else None
    if not isinstance(value, dict):
        return None
    entries = cast("dict[str, object]", value)
    if entries.get("source") == "env" and entries.keys() <= {"source", "provider", "id"}:
        entries = {"env": entries.get("id")}  # the long form of related gateways
    if len(entries) != 1:
        return None
    [(kind, source)] = entries.items()
    return _parse_single_key(kind, source)


def _parse_single_key(kind: str, source: object) -> tuple[SecretKind, tuple[str, ...]] | None:
    if (kind == "exec") != isinstance(source, list):
        return None
    words = cast("list[object]", source if kind == "exec" else [source])
    texts = tuple(word for word in words if isinstance(word, str))
    if kind not in ("env", "file", "exec") or not texts or len(texts) < len(words) or not _is_usable(*texts):
        return None
    return kind, texts


def _is_usable(*texts: str) -> bool:
    """Whether every text is non-empty and free of NUL and lone surrogates, which no path or header can hold."""
    return bool(texts[0]) and not any(re.search("[\0\ud800-\udfff]", text) for text in texts)


def read_env(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"The environment variable {name!r}, which the config names as a secret, is not set.",
            "Set it for this process, or name another source.",
            env=name,
        )
    return value


class _UnsafeFile(Exception):
    """A file that is not safe for a secret; the text completes "the file …"."""


def _read_file(path: Path) -> str:
    try:
        content = _read_private_file(path)
    except _UnsafeFile as error:
        hint = f"Make it a regular file owned by this user and run: chmod 600 {str(path)!r}"
        raise _build_refused_error(path, str(error), hint) from None
    except (OSError, ValueError) as error:
        raise _build_absent_error(path, error) from None
    if len(content) > MAX_SECRET_BYTES:
        raise _build_refused_error(
            path, f"is larger than {MAX_SECRET_BYTES} bytes", "Keep only the secret in it."
        )
    return _decode_secret(content, f"The secret file {str(path)!r}").rstrip("\r\n")


def _check_file_exists(path: Path) -> None:
    try:
        path.stat()
    except (OSError, ValueError) as error:
        raise _build_absent_error(path, error) from None


def _build_absent_error(path: Path, error: OSError | ValueError) -> ConfigError:
    why = getattr(error, "strerror", None) or "its name is not valid"
    return _build_refused_error(path, f"could not be read: {why}", "Fix the path, or create the file.")


def _build_refused_error(path: Path, why: str, hint: str) -> ConfigError:
    return ConfigError(f"The secret file {str(path)!r} {why}.", hint, file=str(path))


def _read_private_file(path: Path) -> bytes:
    # Checked on the open file, so that it cannot be swapped between the check and the read; non-blocking,
    # because opening a pipe would otherwise wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _UnsafeFile("is not a regular file")
        if status.st_mode & 0o077:
            raise _UnsafeFile(f"is accessible to other users (mode {status.st_mode & 0o777:04o})")
        if status.st_uid not in (os.geteuid(), 0):
            raise _UnsafeFile("belongs to another user")
        return file.read(MAX_SECRET_BYTES + 1)


def _read_command_output(command: tuple[str, ...], base: Path | None) -> str:
    try:
        output = _run_command(command, base)
    except TimeoutError:
        why = f"did not finish within {EXEC_TIMEOUT_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        why = f"exited with status {error.returncode}"
    except OverflowError:
        why = f"printed more than {MAX_SECRET_BYTES} bytes"
    except (OSError, ValueError):
        why = "could not be started"
    else:
        first = output.split(b"\n", 1)[0].rstrip(b"\r")
        return _decode_secret(first, f"The first line of the secret command {command[0]!r}")
    # Only the program is named: its arguments and its output may be the secret.
    raise ConfigError(
        f"The secret command {command[0]!r} {why}.",
        "Run it manually; it must print the secret as its first line and exit with status 0.",
        command=command[0],
    )


def _run_command(command: tuple[str, ...], base: Path | None) -> bytes:
    deadline = time.monotonic() + EXEC_TIMEOUT_SECONDS
    process = subprocess.Popen(
        command,
        cwd=base,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with cast("IO[bytes]", process.stdout) as stream:
            output = _read_until(stream, deadline)
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except (TimeoutError, OverflowError, subprocess.TimeoutExpired) as error:
        # Before it is waited for, its number cannot belong to another process group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise OverflowError if isinstance(error, OverflowError) else TimeoutError from None
    if status:
        raise subprocess.CalledProcessError(status, command[0])
    return output


def _read_until(stream: IO[bytes], deadline: float) -> bytes:
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(output) <= MAX_SECRET_BYTES:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(stream.fileno(), MAX_SECRET_BYTES)
            if not chunk:
                return bytes(output)
            output += chunk
    raise OverflowError


def _decode_secret(content: bytes, what: str) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if not text.strip():
        raise ConfigError(f"{what} is empty or not UTF-8 text.", "Put the secret there as one line of text.")
    return text
