"""A program for each test, with bytecode that all of them share: compiling is most of a cold start."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal import Program


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
