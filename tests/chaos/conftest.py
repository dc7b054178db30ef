from __future__ import annotations

from collections.abc import Generator

import pytest

from chaos.harness import Servers


@pytest.fixture(scope="session")
def servers() -> Generator[Servers]:
    started = Servers()
    yield started
    started.close()
