"""What a command takes for granted of a configuration that it has not read yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli._options import Settings
from antiphon.config import Config, parse
from antiphon.errors import ConfigError
from support.privileges import drop_privileges

DEFERRED_SETTINGS = (
    "store_url",
    "store_synchronous",
    "main_key",
    "session_scope",
    "mirrors_transcripts",
    "agent_ids",
    "default_agent_id",
)


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
        unread.setattr(Config, "__init__", None)  # it would fail
        unread.setattr("antiphon.config.load_document", None)
        for name in DEFERRED_SETTINGS:
            assert getattr(found, name) == getattr(default, name), name
        ref = default.get_model_ref("main")
        assert found.get_model_ref("main") == ref
        assert found.get_context_window(ref) == default.get_context_window(ref)
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
    assert (found.default_agent_id, found.main_key) == (agent, main_key)


@pytest.mark.parametrize(
    "written",
    [
        {"store": {"synchronous": "normal"}, "session": {"scope": "global"}},
        {"session": {"transcripts": {"mirror": False}}},
        {
            "models": {
                "providers": {"x": {"baseUrl": "http://x", "models": [{"id": "m", "contextWindow": 9}]}}
            }
        },
        {"agents": {"defaults": {"model": "openai/gpt-5"}}},
    ],
)
def test_settings_are_those_of_the_validated_configuration(tmp_path: Path, written: dict[str, Any]) -> None:
    found, validated = config(tmp_path, written), parse(written)[0]
    for name in DEFERRED_SETTINGS:
        assert getattr(found, name) == getattr(validated, name), name
    ref = validated.get_model_ref("main")
    assert found.get_model_ref("main") == ref
    assert found.get_context_window(ref) == validated.get_context_window(ref)


def test_names_of_sections_elsewhere_in_the_file_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json5").write_text('{ // no store, session or agents\n hooks: {path: "/agents"} }')
    found = Settings(state_dir=str(tmp_path)).load_config_lazily()
    assert found.agent_ids == ("main",)
    assert "_validated" not in vars(found)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json5").write_text("{hooks: {}, hooks: {}}")
    with pytest.raises(ConfigError, match="a second time"):
        Settings(state_dir=str(tmp_path)).load_config_lazily()


def test_a_file_that_cannot_be_read_is_not_taken_for_none(open_path: Path) -> None:
    path = open_path / "config.json5"
    path.write_text('{"store": {"url": "postgresql://db/antiphon"}}')
    path.chmod(0)
    with (
        drop_privileges(),
        pytest.raises(ConfigError, match=r"config\.json5' could not be read: Permission denied"),
    ):
        config(open_path, None)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json5' could not be read: Is a directory"):
        config(open_path, None)


def test_where_no_file_can_be_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert config(tmp_path / "file", None).store_url is None


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    missing = Settings(config=str(tmp_path / "nowhere.json5"), state_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"nowhere\.json5"):
        missing.load_config_lazily()
