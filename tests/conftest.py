"""Fixtures and hooks for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from antiphon import app, state_access
from cluster.database import Postgres
from support import databases
from support.docker_daemon import DaemonMissing, DockerDaemon, run_docker_daemon
from support.privileges import open_way_to

DUAL_DATABASE_PATHS = (
    "channels/test_channel_contract.py",
    "chaos/",
    "engine/",
    "gateway/",
    "store/test_contract.py",
    "store/test_listing.py",
    "test_changes.py",
    "test_deliveries.py",
    "test_mirror.py",
    "test_operations.py",
    "test_reach.py",
    "test_schedules.py",
    "test_searches.py",
    "test_transfers.py",
    "tools/",
)
"""Tests that run on both databases, except those marked `sqlite_only`."""

SETTINGS_ATTRIBUTE = "_hypothesis_internal_use_settings"  # where Hypothesis stores `@settings`

STORELESS_PATHS = ("engine/test_attachments.py", "gateway/test_auth.py", "gateway/test_tokens.py")
"""Of those, tests with a directory but no store."""

EXAMPLES_DIVISOR = 5
"""Hypothesis runs fewer examples on PostgreSQL, since each creates a database."""


settings.register_profile("antiphon", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("antiphon")


def pytest_configure() -> None:
    os.umask(0o022)  # the loader refuses configurations with secrets that a group can write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=240, help="seeded kills of the crash suite")
    parser.addoption(
        "--every-moment",
        action="store_true",
        help="kill at every moment of a turn with commands, not at some",
    )
    parser.addoption(
        "--link-swap-seconds",
        type=int,
        default=5,
        help="seconds of file tools while a command swaps links; over 60 also needs --timeout",
    )
    parser.addoption("--storm", type=float, default=0, help="seconds of random faults for three replicas")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A directory that other users can access; pytest's own are private."""
    open_way_to(tmp_path)
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[DockerDaemon]:
    """A Docker engine; tests that need one are skipped where none can be started."""
    with ExitStack() as stack:
        try:
            daemon = stack.enter_context(run_docker_daemon())
        except DaemonMissing as error:
            pytest.skip(str(error))
        yield daemon


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.definition.path.relative_to(Path(__file__).parent).as_posix()
    is_dual = path.startswith(DUAL_DATABASE_PATHS) and not path.startswith(STORELESS_PATHS)
    if is_dual and {"tmp_path", "tmp_path_factory"} & {*metafunc.fixturenames}:
        metafunc.parametrize("base", ["sqlite", "postgres"], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop the PostgreSQL variant of tests marked `sqlite_only`."""
    items[:] = [item for item in items if not (_on_postgres(item) and item.get_closest_marker("sqlite_only"))]


def _on_postgres(item: pytest.Item) -> bool:
    case: Any = getattr(item, "callspec", None)
    return case is not None and case.params.get("base") == "postgres"


@pytest.fixture(autouse=True)
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    """The database of this test; see `support.databases`."""
    kind: str = getattr(request, "param", "sqlite")
    if kind != "postgres":
        yield kind
        return
    server: Postgres = request.getfixturevalue("postgres")
    # Separate from the `monkeypatch` of the test, which may undo its patches at any time.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(databases.chosen, "postgres", server)
        patches.setattr(app, "open_store", databases.open_store)
        patches.setattr(state_access, "open_store", databases.open_store)
        configured = getattr(request.function, SETTINGS_ATTRIBUTE, None)
        if isinstance(configured, settings):
            fewer = settings(configured, max_examples=-(-configured.max_examples // EXAMPLES_DIVISOR))
            patches.setattr(request.function, SETTINGS_ATTRIBUTE, fewer)
        yield kind
    used = server.used
    server.drop_all()
    assert used, "This test has no store: mark it `sqlite_only`, or add its module to STORELESS_PATHS."
