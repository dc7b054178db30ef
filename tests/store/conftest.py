"""Fixtures of the store tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.store.postgres.connection import PgServer
from cluster.database import Postgres


@pytest.fixture
async def server(postgres: Postgres, tmp_path: Path) -> PgServer:
    """An empty database of its own on the shared PostgreSQL server."""
    return await postgres.database(tmp_path)
