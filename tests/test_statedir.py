"""Which directories are closed to others, and which are left alone."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from antiphon.errors import StoreError
from antiphon.store.statedir import StateDir


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def opened(path: Path, bits: int = 0o755, files: Mapping[str, str] = {}) -> Path:
    """A directory that others can read, with these files in it."""
    path.mkdir()
    for name, content in files.items():
        path.joinpath(name).write_text(content)
    path.chmod(bits)
    return path


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    StateDir.open_locked(tmp_path / "a" / "state").close()
    assert mode(tmp_path / "a" / "state") == 0o700


@pytest.mark.parametrize(
    "files", [{}, {"antiphon.db": ""}, {"lock": "123\n", "other": ""}, {"config.json5": "{}"}]
)
def test_an_empty_directory_and_our_own_are_tightened(tmp_path: Path, files: dict[str, str]) -> None:
    state = opened(tmp_path / "state", files=files)
    StateDir.open_locked(state).close()
    assert mode(state) == 0o700


@pytest.mark.parametrize("files", [{"notes.txt": "mine"}, {"lock": "of another program"}])
@pytest.mark.parametrize("bits", [0o755, 0o777, 0o730])
def test_an_exposed_directory_with_other_files_is_refused_unchanged(
    tmp_path: Path, files: dict[str, str], bits: int
) -> None:
    place = opened(tmp_path / "place", bits, files)
    before = {path: path.read_text() for path in place.iterdir()}
    with pytest.raises(StoreError) as refused:
        StateDir.open_locked(place)
    assert repr(str(place)) in refused.value.what
    assert "empty or private directory" in refused.value.hint
    assert mode(place) == bits
    assert {path: path.read_text() for path in place.iterdir()} == before


def test_a_private_directory_may_hold_anything(tmp_path: Path) -> None:
    StateDir.open_locked(opened(tmp_path / "place", 0o700, {"notes.txt": "mine"})).close()
    assert mode(tmp_path / "place") == 0o700
