"""One NATS server for all tests of buses; each test has a namespace of its own on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.servers import NatsServer, nats_server


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server
