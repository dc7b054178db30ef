"""What a command takes for granted of a configuration that it has not read yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli._options import Settings
from antiphon.config import Config
from antiphon.errors import ConfigError
from support.privileges import drop_privileges


def config(path: Path, written: dict[str, Any] | None) -> Config:
    if written is not None:
        (path / "config.json5").write_text(json.dumps(written))
    return Settings(state_dir=str(path)).load_config_lazily()


@pytest.mark.parametrize("written", [None, {}, {"gateway": {"port": 1}}])
def test_what_is_not_written_is_as_by_default(
    tmp_path: Path, written: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, default = config(tmp_path, written), Config()
    with monkeypatch.context() as unread:
        unread.setattr(Settings, "load", None)  # it would fail
        assert found.default_agent_id == default.default_agent_id
        assert (found.session.main_key, found.session.scope) == (
            default.session.main_key,
            default.session.scope,
        )
        assert (found.store.url, found.store.synchronous) == (default.store.url, default.store.synchronous)
    assert found.session.retention == default.session.retention
    assert found.agent_ids == default.agent_ids


@pytest.mark.parametrize(
    ("written", "agent", "main_key"),
    [
        ({"session": {"mainKey": "home"}}, "main", "home"),
        ({"agents": {"list": [{"id": "other", "default": True}]}}, "other", "main"),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, written: dict[str, Any], agent: str, main_key: str) -> None:
    found = config(tmp_path, written)
    assert (found.default_agent_id, found.session.main_key) == (agent, main_key)


def test_a_file_that_cannot_be_read_is_not_taken_for_none(open_path: Path) -> None:
    path = open_path / "config.json5"
    path.write_text('{"store": {"url": "postgresql://db/antiphon"}}')
    path.chmod(0)
    with (
        drop_privileges(),
        pytest.raises(ConfigError, match=r"config\.json5' cannot be read: Permission denied"),
    ):
        config(open_path, None)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json5' cannot be read: Is a directory"):
        config(open_path, None)


def test_where_no_file_can_be_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert config(tmp_path / "file", None).store.url is None


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    missing = Settings(config=str(tmp_path / "nowhere.json5"), state_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere\.json5"):
        missing.load_config_lazily()
