"""Loads the config: reads its file, validates it, and checks who else can change the file.

Nothing here resolves a secret or writes anything.
"""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
from pydantic import ValidationError
from pydantic.alias_generators import to_camel

from antiphon.config.base import Location, Section, format_path
from antiphon.config.channels import drop_keys_without_effect
from antiphon.config.compat import drop_foreign_keys
from antiphon.config.errors import Problem, build_problems, combine_problems
from antiphon.config.schema import Config
from antiphon.config.secrets import Secret
from antiphon.config.validate import find_contradictions, find_warnings
from antiphon.config_file import ConfigDocument, read_document, require_object
from antiphon.errors import ConfigError
from antiphon.paths import locate_paths


class LoadedConfig(msgspec.Struct, frozen=True):
    """A usable config, the path it was read from, and warnings for its owner."""

    config: Config
    path: Path | None
    """None if no file was found."""
    warnings: tuple[str, ...]


def load(path: Path | None = None, *, required: bool = True) -> LoadedConfig:
    """Reads and checks a config file; without a path, the current user's.

    A missing file gives the defaults if no path was given or the file is not `required`.

    Raises:
        ConfigError: the file could not be read or is invalid. `data['path']` is the first key at fault and
            `data['problems']` lists the other problems.
    """
    if path is None:
        paths = locate_paths(None, None, os.environ)
        path, required = paths.config, paths.config_explicit
    document = read_document(path, required=required)
    return LoadedConfig(Config(), None, ()) if document is None else load_document(document)


def load_document(document: ConfigDocument) -> LoadedConfig:
    """Checks a document that has been read.

    Raises:
        ConfigError: as for `load`.
    """
    path, status = document.path, document.status
    config, warnings = parse(document.content, base=path.parent, file=str(path))
    secrets = list(list_secrets(config))
    if exposure := _find_exposure(path, status):
        _check_harmless(exposure, path, config, secrets)
        warnings = (*warnings, f"The config file {str(path)!r} {exposure.why}. Run: {exposure.fix}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and (
        any(secret.is_written for _, secret in secrets) or _list_urls_with_credentials(config)
    ):
        readable = f"{str(path)!r} contains secrets and is not private (mode {mode:04o})."
        warnings = (*warnings, f"{readable} Run: chmod 600 {str(path)!r}")
    return LoadedConfig(config, path, warnings)


def parse(
    raw: object, *, base: Path | None = None, file: str | None = None
) -> tuple[Config, tuple[str, ...]]:
    """Checks a decoded config and returns it with its warnings; `raw` is not modified.

    Raises:
        ConfigError: as for `load`.
    """
    known = copy.deepcopy(require_object(raw, file))
    _check_unicode(known, (), file)
    warnings = [*drop_foreign_keys(known), *drop_keys_without_effect(known.get("channels"))]
    config = _validate(known, base, file)
    return config, (*warnings, *find_warnings(config))


def _check_unicode(value: object, location: Location, file: str | None) -> None:
    """Refuses lone surrogates: JSON can spell them, but no file, wire or database can store them."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            path = format_path(location).encode(errors="replace").decode()
            what = f"Value of {path!r} contains half of a surrogate pair, which is not text."
            raise combine_problems([Problem(path, what, "Write valid Unicode.")], file) from None
    elif isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            _check_unicode(key, (*location, key), file)
            _check_unicode(item, (*location, key), file)
    elif isinstance(value, list):
        for number, item in enumerate(cast("list[object]", value)):
            _check_unicode(item, (*location, number), file)


def _validate(known: dict[str, Any], base: Path | None, file: str | None) -> Config:
    try:
        config = Config.model_validate(known, context={"base": base}).add_implied_providers()
    except ValidationError as error:
        problems = build_problems(error.errors(include_url=False))
    else:
        problems = find_contradictions(config)
        if not problems:
            return config
    # Raised outside the except block, because the validation error would carry the values along.
    raise combine_problems(problems, file)


class _Exposure(msgspec.Struct, frozen=True):
    why: str
    fix: str


def _find_exposure(path: Path, status: os.stat_result) -> _Exposure | None:
    """How other users can change or replace the file, or None if they cannot.

    A file on a read-only mount, as in containers, is accepted regardless of its owner and mode.
    """
    mode, folder = stat.S_IMODE(status.st_mode), path.absolute().parent
    around = folder.stat()
    replaceable = around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.geteuid(), 0):
        why, fix = f"belongs to another user (uid {status.st_uid})", f"chown {os.geteuid()} {str(path)!r}"
    elif mode & 0o022:
        why, fix = f"can be written to by other users (mode {mode:04o})", f"chmod go-w {str(path)!r}"
    elif replaceable:
        why, fix = f"is in {str(folder)!r}, which all users can write to", f"chmod o-w {str(folder)!r}"
    else:
        return None
    return None if os.statvfs(path).f_flag & os.ST_RDONLY else _Exposure(why, fix)


def _check_harmless(
    exposure: _Exposure, path: Path, config: Config, secrets: list[tuple[str, Secret]]
) -> None:
    """Refuses commands and secrets in an exposed file: other users could run a command or redirect a secret.

    Raises:
        ConfigError: the file has one of them.
    """
    found = {key: "names a command to run" for key, secret in secrets if secret.kind == "exec"}
    found |= {
        key: "is a secret" for key, secret in secrets if secret.kind in ("env", "file") or secret.is_written
    }
    if config.tools.python:
        found["tools.python"] = "names code to run"
    found |= {
        key: "names a program to run"
        for key, _, server in config.list_mcp_servers()
        if server.command is not None
    }
    found |= {key: "may contain a password" for key in _list_urls_with_credentials(config)}
    for key, what in found.items():
        raise ConfigError(
            f"{key!r} {what}, but the config file {str(path)!r} {exposure.why}.",
            f"Run: {exposure.fix}",
            path=key,
            file=str(path),
        )


def _list_urls_with_credentials(config: Config) -> list[str]:
    urls = {
        format_path(("models", "providers", name, "baseUrl")): provider.base_url
        for name, provider in config.models.providers.items()
    }
    urls |= {f"{path}.url": server.url for path, _, server in config.list_mcp_servers()}
    return [path for path, url in urls.items() if "@" in (url or "") or "?" in (url or "")]


def list_secrets(value: object, location: Location = ()) -> Iterator[tuple[str, Secret]]:
    """Yields every secret in a config with its path."""
    if isinstance(value, Secret):
        yield format_path(location), value
    elif isinstance(value, Section):
        for name, item in value:
            yield from list_secrets(item, (*location, to_camel(name)))
    elif isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            yield from list_secrets(item, (*location, name))
