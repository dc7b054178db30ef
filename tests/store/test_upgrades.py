"""What each of the later migrations makes of a database of the schema before it, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from test_postgres_schema import (
    HOUSE,
    KNOWN,
    empty,  # pyright: ignore[reportUnusedImport]  # noqa: F401 - a fixture
    everything,
    migrated,
    on,
    schema_of,
    told,
)
from test_sqlite import NAME, schema

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.config import Config
from antiphon.store.migrations import load_migrations, select_missing_migrations
from antiphon.store.postgres.connection import PgServer
from antiphon.store.sqlite.database_file import check_file
from support.app_fixture import BOUND, open_test_store
from support.databases import query_database

pytestmark = pytest.mark.anyio

Rows: TypeAlias = list[dict[str, Any]]
Answers: TypeAlias = Mapping[str, list[tuple[Any, ...]]]
FOR_THE_SHARED_SESSION = '{"session":1,"sessionKey":"global","destination":{"to":"global"}}'
OF_THE_SCHEMA = {"schema_version", "sqlite_sequence", "unindexed"}


@dataclass(frozen=True)
class Upgrade:
    """One migration: the rows that it meets, which of their values it changes, and what it makes possible."""

    version: int
    met: list[str]
    found: Answers
    """What a question is answered with, right after the migration."""
    done: list[str] = field(default_factory=list[str])
    """Statements that the new schema takes."""
    renamed: dict[str, str] = field(default_factory=dict[str, str])


UPGRADES = [
    Upgrade(
        9,
        [
            "INSERT INTO transcripts (session_id, key, reason, started_at) VALUES ('g', 'global', 'new', 1)",
            "INSERT INTO sessions (key, session_id, transcript, agent_id, kind, created_at, updated_at)"
            " VALUES ('global', 'g', 2, 'main', 'main', 1, 1)",
            "INSERT INTO sessions (key, session_id, transcript, agent_id, kind, parent_key, root_key, created_at,"
            " updated_at) VALUES ('agent:main:subagent:1', 'u', 3, 'main', 'other', 'global', 'global', 1, 1)",
            "INSERT INTO usage (at, run_id, session_key, session_id, root_key, agent_id, input, output, cache_read,"
            " cache_write) VALUES (1, 'r', 'global', 'g', 'global', 'main', 5, 0, 0, 0)",
            "INSERT INTO commands (id, digest, answer, created_at) VALUES ('forgotten:global old', '', 'old', 1)",
        ],
        {
            "SELECT key, parent_key, root_key FROM sessions WHERE id > 1 ORDER BY id": [
                ("main", None, None),
                ("agent:main:subagent:1", "main", "main"),
            ],
            "SELECT key FROM transcripts ORDER BY id": [("agent:main:main",), ("main",)],
            "SELECT id FROM commands": [("forgotten:main old",)],
            "SELECT DISTINCT agent_id FROM runs": [(None,)],
        },
        ["UPDATE runs SET agent_id = 'main' WHERE id = 'waiting'"],
        {"global": "main", "forgotten:global old": "forgotten:main old"},
    ),
    Upgrade(
        10,
        ["UPDATE sessions SET yielded = 'all', yield_run = 'cut' WHERE id = 1"],
        {"SELECT id, woken_by FROM runs ORDER BY id": [("cut", ""), ("waiting", None)]},
        [
            "UPDATE runs SET woken_by = 'waiting' WHERE id = 'cut'",
            "UPDATE runs SET woken_by = NULL",
            "UPDATE sessions SET yielded = NULL, yield_run = NULL",
        ],
    ),
    Upgrade(
        11,
        [],
        {"SELECT count(*) FROM secrets": [(0,)]},
        ["INSERT INTO secrets (name, value) VALUES ('frames', 'abcd')"],
    ),
    Upgrade(
        12,
        [],
        {"SELECT id, options FROM runs ORDER BY id": [("cut", None), ("waiting", None)]},
        ["UPDATE runs SET options = '{}' WHERE id = 'waiting'"],
    ),
    Upgrade(
        13,
        ["INSERT INTO secrets (name, value) VALUES ('frames', 'abcd')"],
        {"SELECT count(*) FROM tokens": [(0,)]},
        ["INSERT INTO tokens (name, scopes, digest, created_at) VALUES ('n', 'operator.read', 'd', 1)"],
    ),
    Upgrade(
        14,
        [],
        {"SELECT id, shown FROM runs ORDER BY id": [("cut", None), ("waiting", None)]},
        ["UPDATE runs SET shown = 1 WHERE id = 'waiting'"],
    ),
    Upgrade(
        15,
        [],
        {"SELECT count(requester_agent) FROM exchanges": [(0,)]},
        ["UPDATE exchanges SET requester_agent = 'main'"],
    ),
    Upgrade(
        16,
        [
            'UPDATE runs SET target = \'{"session":1,"sessionKey":"global","destination":{"to":"global"}}\''
            " WHERE id = 'waiting'"
        ],
        {
            "SELECT id, target FROM runs ORDER BY id": [
                ("cut", None),
                ("waiting", FOR_THE_SHARED_SESSION.replace("global", "main")),
            ]
        },
        ["UPDATE runs SET target = NULL"],
        {FOR_THE_SHARED_SESSION: FOR_THE_SHARED_SESSION.replace("global", "main")},
    ),
    Upgrade(
        17,
        [],
        {"SELECT count(*) FROM file_versions": [(0,)]},
        [
            "INSERT INTO file_versions (session, path, seen, written, call, updated_at)"
            " VALUES (1, '/w/a.txt', 'a', 'b', 'r:c', 1)"
        ],
    ),
    Upgrade(
        18,
        [],
        {"SELECT count(*) FROM approvals": [(0,)], "SELECT count(*) FROM approval_grants": [(0,)]},
        [
            "INSERT INTO approvals (id, call, run_id, session, session_key, agent_id, tool, question, binding, state,"
            " created_at, expires_at)"
            " VALUES ('a1', 'r:c', 'r', 1, 'agent:main:main', 'main', 'pay', '{}', 'b', 'pending', 1, 2)",
            "INSERT INTO approval_grants (id, agent_id, tool, digest, subject, created_at)"
            " VALUES ('g1', 'main', 'pay', 'd', '{}', 1)",
        ],
    ),
    Upgrade(
        19,
        [],
        {"SELECT count(*) FROM exec_commands": [(0,)]},
        [
            "INSERT INTO exec_commands (key, id, session, session_key, agent_id, sandboxed, run_id, host, owner,"
            " backend, command, workdir, timeout_seconds, state, created_at)"
            " VALUES ('r:c', 'c1', 1, 'agent:main:main', 'main', 0, 'r', 'h', 'o', 'gateway', 'ls', '', 5, 'lost', 1)",
        ],
    ),
    Upgrade(
        20,
        [
            "INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, state, attempts,"
            " next_at, created_at)"
            " VALUES ('d1', 'reply', 1, 'agent:main:main', '{}', 'discord|||', 'hi', 'ambiguous', 3, 1, 1)",
            "INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, next_at, created_at)"
            " VALUES ('d2', 'reply', 1, 'agent:main:main', '{}', 'discord|||', 'hi', 1, 1)",
            "DELETE FROM deliveries WHERE key = 'd2'",
        ],
        {
            "SELECT expires_at, attempts FROM deliveries WHERE key = 'd1'": [(None, 3)],
            "SELECT count(*) FROM delivery_parts": [(0,)],
        },
        [
            "UPDATE deliveries SET state = 'expired', expires_at = 2 WHERE key = 'd1'",
            "INSERT INTO delivery_parts (delivery, n, text) VALUES (1, 1, 'hi')",
            "INSERT INTO channel_holds (account, until) VALUES ('discord|', 5)",
        ],
    ),
    Upgrade(
        21,
        ["INSERT INTO channel_holds (account, until) VALUES ('telegram|', 5)"],
        {
            "SELECT until FROM channel_holds": [(5,)],
            "SELECT count(*) FROM inbound_events": [(0,)],
            "SELECT count(*) FROM group_context": [(0,)],
        },
        [
            "INSERT INTO inbound_events (channel, account, event_id, state, received_at, expires_at)"
            " VALUES ('telegram', 'default', '1', 'decided', 1, 2)",
            "INSERT INTO group_context (place, sender, text, sent_at) VALUES ('telegram|default|-1|', 'Ann', 'hi', 1)",
            "INSERT INTO pairings (channel, account, sender, state, requested_at)"
            " VALUES ('telegram', 'default', '7', 'approved', 1)",
            "INSERT INTO channel_accounts (channel, account) VALUES ('telegram', 'default')",
        ],
    ),
]
RELEASED_SCHEMA = 8


def test_replicas_of_the_last_release_can_work_on_the_newest_schema() -> None:
    known = load_migrations("postgres")
    released = [migration for migration in known if migration.version <= RELEASED_SCHEMA]
    assert select_missing_migrations(known[-1].version, known[-1].oldest_compatible_version, released) == []


def test_every_migration_since_the_ninth_has_its_upgrade() -> None:
    assert [upgrade.version for upgrade in UPGRADES] == [step.version for step in KNOWN if step.version > 8]


upgrades = pytest.mark.parametrize("upgrade", UPGRADES, ids=[f"to-{it.version}" for it in UPGRADES])


@pytest.mark.requirement("G45", "K3")
@upgrades
async def test_a_file_of_the_schema_before_is_brought_up(tmp_path: Path, upgrade: Upgrade) -> None:
    path = tmp_path / NAME

    async def bring(version: int) -> None:
        with schema(version):
            async with open_test_store(tmp_path):
                pass

    async def tell(statement: str) -> Rows:
        return query_database(path, statement)

    async def look() -> dict[str, Rows]:
        names = query_database(
            path, "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE '%fts5%'"
        )
        shadows = ("message_words", "session_names")  # of the indexes
        return {
            row["name"]: query_database(path, f"SELECT * FROM {row['name']}")  # noqa: S608
            for row in names
            if not row["name"].startswith(shadows)
        }

    await _upgrade(upgrade, bring, tell, look)
    assert query_database(path, "PRAGMA user_version") == [{"user_version": upgrade.version}]
    await _goes_on(Config(), tmp_path)
    check_file(path)


@pytest.mark.requirement("G45", "K3")
@upgrades
async def test_a_database_of_the_schema_before_is_brought_up(
    empty: PgServer,  # noqa: F811
    tmp_path: Path,
    upgrade: Upgrade,
) -> None:
    await _upgrade(
        upgrade,
        lambda version: migrated(empty, KNOWN[:version]),
        lambda statement: told(empty, statement),
        lambda: everything(empty),
    )
    assert await schema_of(empty) == (upgrade.version, RELEASED_SCHEMA)
    await _goes_on(on(empty), tmp_path)


async def _upgrade(
    upgrade: Upgrade,
    bring: Callable[[int], Awaitable[None]],
    tell: Callable[[str], Awaitable[Rows]],
    look: Callable[[], Awaitable[dict[str, Rows]]],
) -> None:
    await bring(upgrade.version - 1)
    for statement in [*HOUSE, *upgrade.met]:
        await tell(statement)
    before = await look()
    await bring(upgrade.version)
    after = await look()
    for table in before.keys() - OF_THE_SCHEMA:
        kept = [{name: row[name] for name in before[table][0]} for row in after[table] if before[table]]
        expected = [
            {name: upgrade.renamed.get(value, value) for name, value in row.items()} for row in before[table]
        ]
        assert sorted(kept, key=repr) == sorted(expected, key=repr), table
    for question, answer in upgrade.found.items():
        assert [tuple(row.values()) for row in await tell(question)] == answer, question
    for statement in upgrade.done:
        await tell(statement)


async def _goes_on(config: Config, path: Path) -> None:
    """This version works on it: what was cut off and what waited is answered."""
    async with open_app_operations(config, path) as operations:
        for run in ("cut", "waiting"):
            view = await operations.runs.wait(Caller.operator(), run, BOUND)
            assert (view.state, view.reply) == ("ok", "hello")
