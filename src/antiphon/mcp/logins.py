"""Locates the login files of servers, and forgets a server. This does not import the library, unlike `oauth`."""

from __future__ import annotations

from pathlib import Path

from antiphon.mcp.listings import locate_directory, name_file

AUTH_DIRECTORY_NAME = "auth"


def locate_login_file(state_dir: Path, server: str) -> Path:
    return locate_directory(state_dir) / AUTH_DIRECTORY_NAME / name_file(server)


def read_login_version(state_dir: Path, server: str) -> int | None:
    """Return a number that changes with the login of a server; None if there is none."""
    try:
        return locate_login_file(state_dir, server).stat().st_mtime_ns
    except OSError:
        return None


def forget_server(state_dir: Path, server: str) -> None:
    """Remove the login and the stored record of a server. Blocks."""
    login = locate_login_file(state_dir, server)
    for file in (login, login.with_suffix(".lock"), locate_directory(state_dir) / name_file(server)):
        file.unlink(missing_ok=True)
