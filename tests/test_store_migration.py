"""`antiphon store migrate`: everything is copied once, or the command reports failure."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import msgspec
import pytest

from antiphon.app import open_app, open_app_operations
from antiphon.config import Config
from antiphon.engine.jobs.jobs import AgentTurn, JobSpec
from antiphon.engine.jobs.schedule import EverySchedule
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import AntiphonError, Conflict, StoreDamaged, StoreError, StoreLocked
from antiphon.gateway.tokens import TokenRegistry
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, ListFilter, SendRequest, SessionPatch, SpawnRequest
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import FunctionRuntime
from antiphon.state_access import open_operations_readonly
from antiphon.store.postgres.connection import PgServer
from antiphon.store.sqlite import copy_source as sources
from antiphon.store.sqlite.copy_source import CopySource
from antiphon.store.statedir import StateDir
from antiphon.transfers.postgres_migration import MigrationProgress, MigrationResult, migrate_to_postgres
from cli.gateways import up
from cli.terminal import Program
from cluster.database import PASSWORD, Postgres
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_until

pytestmark = pytest.mark.anyio
T = TypeVar("T")

HELPER, SLOW, GROUP = "agent:helper:main", "agent:slow:main", "agent:main:telegram:group:7"
SETTINGS: dict[str, Any] = {
    "agents": {
        "defaults": {"subagents": {"allowAgents": ["*"]}},
        "list": [{"id": "main", "default": True}, {"id": "helper"}, {"id": "slow"}],
    },
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
    "session": {"transcripts": {"mirror": False}},  # the files are not part of a database
}
CONFIG = Config.model_validate(SETTINGS)
STAYING = {
    "owners",
    "watch",
    "search_cursor",
    "tokens",
}  # of processes that are gone, of an index, and in a file
NEW_INDEX = {"message_words", "unindexed"}  # made anew from the messages
ASKING = {
    "agentId": "slow",
    "message": "say it was asked",
    "timeoutSeconds": 60,
    "replyBack": 0,
    "announce": "none",
}


# --- a store with everything in it ---


async def fill(path: Path) -> None:
    """Ends while the slow one is at work, another one waits for it, and it has messages in line."""
    held = asyncio.Event()

    async def hold(prompt: Prompt) -> str:
        held.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with open_app(CONFIG, path, functions={"slow": FunctionRuntime(hold)}) as home:
        operations = home.operations
        await told(operations, MAIN, "say the first answer is saffron")
        await operations.conversations.renew(OPERATOR, MAIN)
        await told(operations, MAIN, "say the second answer is madder \0 root")
        await told(operations, GROUP, "call agents_list {}\nsay hello group")
        await operations.sessions.patch(
            OPERATOR, GROUP, SessionPatch(label="The Choir", display_name="Sönntag")
        )
        asked = SendRequest(session=GROUP, message="say say yes", timeout_seconds=BOUND)
        assert (await operations.exchanges.send(OPERATOR, asked, requester=MAIN)).status == "ok"
        await operations.subagents.spawn(OPERATOR, SpawnRequest(task="say 42", label="calc"), requester=MAIN)
        await wait_until(lambda: _settled(operations))
        await told(operations, "agent:main:telegram:group:8", "say goodbye")
        await operations.sessions.patch(OPERATOR, "agent:main:telegram:group:8", SessionPatch(archived=True))
        spec = JobSpec(
            name="daily",
            schedule=EverySchedule(every_ms=86_400_000),
            payload=AgentTurn(message="say morning"),
        )
        await home.operations.jobs.add(OPERATOR, spec, key="the job")
        await told(operations, "agent:main:telegram:group:9", "say forget me")
        await operations.sessions.delete(OPERATOR, "agent:main:telegram:group:9")
        await operations.messages.submit(
            OPERATOR, IncomingMessage(session=SLOW, content="begin", idempotency_key="r1")
        )
        await asyncio.wait_for(held.wait(), BOUND)
        await operations.messages.submit(
            OPERATOR, IncomingMessage(session=SLOW, content="then this", idempotency_key="r2")
        )
        words = f"call sessions_send {json.dumps(ASKING)}"
        await operations.messages.submit(
            OPERATOR, IncomingMessage(session=HELPER, content=words, idempotency_key="r3")
        )
        await wait_until(lambda: _waits(path))


async def told(operations: Operations, session: str, text: str) -> None:
    run = await operations.messages.submit(OPERATOR, IncomingMessage(session=session, content=text))
    assert (await operations.runs.wait(OPERATOR, run.run_id, BOUND)).state == "ok"


async def _settled(operations: Operations) -> bool:
    page = await operations.exchanges.list(OPERATOR, None, unsettled=True, limit=10)
    tasks = await operations.subagents.list(OPERATOR, MAIN)
    return not page.exchanges and all(task.ended_at for task in tasks)


async def _waits(path: Path) -> bool:
    with closing(sqlite3.connect(path / "antiphon.db")) as connection:
        return bool(connection.execute("SELECT count(*) FROM waits").fetchone()[0])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "state"
    asyncio.run(fill(path))
    return path


@pytest.fixture
def state(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "state"))


@pytest.fixture
def database(state: Path) -> Path:
    return state / "antiphon.db"


def change(database: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# --- where it goes ---


def aside(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """In a loop of its own, even if another one is running here."""
    results: list[T] = []
    thread = Thread(target=lambda: results.append(asyncio.run(work())))
    thread.start()
    thread.join(BOUND)
    return results[0]


async def _ask(server: PgServer, sql: str) -> list[tuple[Any, ...]]:
    connection = await server.connect()
    try:
        return [tuple(row.values()) for row in await connection.fetch(sql)]  # pyright: ignore
    finally:
        await connection.close(timeout=BOUND)


def ask(server: PgServer, sql: str) -> list[tuple[Any, ...]]:
    return aside(lambda: _ask(server, sql))


@contextmanager
def _made(postgres: Postgres) -> Generator[PgServer]:
    name = f"m{uuid.uuid4().hex[:16]}"
    ask(postgres.server("postgres"), f'CREATE DATABASE "{name}"')
    yield postgres.server(name)
    ask(postgres.server("postgres"), f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def target(postgres: Postgres) -> Iterator[PgServer]:
    """A database with nothing in it, not even our tables."""
    with _made(postgres) as server:
        yield server


def on(server: PgServer) -> Config:
    return Config.model_validate({**SETTINGS, "store": {"url": server.url, "password": PASSWORD}})


def everything(server: PgServer) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table there."""
    names = ask(server, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return {name: sorted(ask(server, f'SELECT * FROM "{name}"'), key=repr) for (name,) in names}  # noqa: S608


def rows_of(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row that is to be found there afterwards."""

    def stored(row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in row)

    with closing(CopySource.open(database)) as source, closing(sqlite3.connect(database)) as connection:
        return {
            table.name: sorted(map(stored, connection.execute(f'SELECT * FROM "{table.name}"')), key=repr)  # noqa: S608
            for table in source.list_tables()
            if table.name != "session_names"
        }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ignore(progress: MigrationProgress) -> None: ...


class Stopped(Exception):
    """As far as it was to go."""


class Stop:
    """Ends a move when some of a table has been copied."""

    def __init__(self, table: str) -> None:
        self._table = table

    def __call__(self, progress: MigrationProgress) -> None:
        if progress.table == self._table and progress.rows:
            raise Stopped


# --- that it is the same ---


async def seen(operations: Operations) -> dict[str, Any]:
    """What can be asked of a store, as JSON."""
    listed = await operations.sessions.list(OPERATOR, ListFilter(limit=200, include_archived=True))
    wanted = HistoryFilter(limit=1000, include_tools=True, after=0)
    found = {
        "list": listed,
        "choir": await operations.sessions.list(OPERATOR, ListFilter(search="choir sonn")),
        "histories": [
            await operations.transcripts.read(OPERATOR, row.key, wanted) for row in listed.sessions
        ],
        "past": [
            await operations.transcripts.read(OPERATOR, past.session_id, wanted)
            for past in await operations.conversations.list(OPERATOR, MAIN)
        ],
        "exchanges": await operations.exchanges.list(OPERATOR, None, unsettled=False, limit=100),
        "deliveries": await operations.deliveries.list(OPERATOR, None, 100),
        "usage": await operations.transcripts.get_usage(OPERATOR, MAIN, tree=True),
        "runs": [
            msgspec.structs.replace(await operations.runs.get(OPERATOR, run), queued_ms=None, running_ms=None)
            for run in ("r1", "r2", "r3")
        ],
    }
    return json.loads(msgspec.json.encode(found))


@pytest.mark.requirement("G21")
async def test_a_house_goes_on_where_the_other_stopped(state: Path, database: Path, target: PgServer) -> None:
    async with open_operations_readonly(CONFIG, state) as operations:
        before = await seen(operations)
    moved = await migrate_to_postgres(database, target, ignore)
    assert moved.tables["messages"] > 10
    async with open_operations_readonly(on(target), state) as operations:
        assert await seen(operations) == before
    assert before["choir"]["sessions"][0]["key"] == GROUP

    played: list[str] = []

    async def answer(prompt: Prompt) -> str:
        played.append(repr(prompt.messages[-1]))
        return f"done with {len(played)}"

    async with open_app(on(target), state, functions={"slow": FunctionRuntime(answer)}) as home:
        operations = home.operations
        for run in ("r1", "r2", "r3"):
            assert (await operations.runs.wait(OPERATOR, run, BOUND)).state == "ok", run
        (job,) = await home.operations.jobs.list(OPERATOR)
        assert job.name == "daily" and job.state.next_run_at_ms
        for word, session in (("saffron", MAIN), ("madder", MAIN), ("group", GROUP)):
            assert session in {
                hit.session_key for hit in (await operations.search.find(OPERATOR, word)).results
            }
        await told(operations, MAIN, "say and on it goes")
        history = await operations.transcripts.read(OPERATOR, SLOW, HistoryFilter(limit=100))
    asked = [item["content"] for item in history.messages if item["role"] == "user"]
    assert asked == ["begin", "then this", "say it was asked"]
    assert len(played) == 3, "each of them once"


async def test_every_row_is_there_and_numbers_go_on_behind_those_that_were_given_out(
    database: Path, target: PgServer
) -> None:
    change(
        database,
        "DELETE FROM usage WHERE id = (SELECT max(id) FROM usage)",  # its number was given out
        "UPDATE runs SET agent_id = 'helper', woken_by = '', options = '{}' WHERE id = 'r2'",
        "INSERT INTO file_versions (session, path, seen, written, call, updated_at)"
        " VALUES (1, '/w/a.txt', 'a', 'b', 'r1:c', 1)",
        "INSERT INTO approvals (id, call, run_id, session, session_key, agent_id, tool, question, binding, subject,"
        " state, created_at, expires_at)"
        " VALUES ('a1', 'r1:c', 'r1', 1, 'agent:main:main', 'main', 'pay', '{}', 'b', '{}', 'pending', 1, 2)",
        "INSERT INTO approval_grants (id, agent_id, tool, digest, subject, decided_by, created_at)"
        " VALUES ('g1', 'main', 'pay', 'd', '{}', 'owner', 1)",
        "INSERT INTO exec_commands (key, id, session, session_key, agent_id, sandboxed, run_id, host, owner, backend,"
        " command, workdir, timeout_seconds, state, created_at)"
        " VALUES ('r:c', 'c1', 1, 'agent:main:main', 'main', 0, 'r', 'h', 'o', 'gateway', 'ls', '', 5, 'lost', 1)",
        "INSERT INTO delivery_parts (delivery, n, text, plain, started_at, message_id, sent_at)"
        " VALUES (1, 1, '<b>hi</b>', 'hi', 1, 'm1', 2)",
        "INSERT INTO channel_holds (account, until) VALUES ('telegram|', 5)",
        "INSERT INTO inbound_events (channel, account, event_id, state, received_at, expires_at)"
        " VALUES ('telegram', 'default', '1', 'decided', 1, 2)",
        "INSERT INTO group_context (place, sender, text, sent_at) VALUES ('telegram|default|-1|', 'Ann', 'hi', 1)",
        "INSERT INTO pairings (channel, account, sender, state, requested_at)"
        " VALUES ('telegram', 'default', '7', 'approved', 1)",
        "INSERT INTO channel_accounts (channel, account) VALUES ('telegram', 'default')",
    )
    before = rows_of(database)
    content = digest(database)
    assert not [name for name, rows in before.items() if not rows], "something of everything is tried"
    moved = await migrate_to_postgres(database, target, ignore)
    after = everything(target)
    assert {name: after[name] for name in before} == before
    assert after["owners"] == []
    assert moved.replaced == 1, "the reply with a NUL"
    assert sorted(after["unindexed"]) == sorted((row[0],) for row in before["messages"])
    assert sorted(row[0] for row in after["session_names"]) == sorted(row[0] for row in before["sessions"])
    with closing(sqlite3.connect(database)) as connection:
        for table, last in connection.execute("SELECT name, seq FROM sqlite_sequence"):
            column = (
                "n"
                if table in {"runs", "jobs", "exchanges", "tasks", "deliveries", "group_context"}
                else "id"
            )
            number = f"pg_get_serial_sequence('{table}', '{column}')"
            assert ask(target, f"SELECT nextval({number})") == [(last + 1,)], table
    assert digest(database) == content, "the source is as it was"


async def test_every_table_and_column_is_moved(database: Path, target: PgServer) -> None:
    await migrate_to_postgres(database, target, ignore)
    there: dict[str, set[str]] = {}
    columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
    for table, column in ask(target, columns):
        there.setdefault(table, set()).add(column)
    with closing(sqlite3.connect(database)) as connection:
        ours = "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE '%fts5%' AND sql LIKE 'CREATE%'"
        kept = {name for (name,) in connection.execute(ours) if "'" not in name} - {"sqlite_sequence"}
        indexes = {name for name in kept if name.startswith(("message_words_", "session_names_"))}
    with closing(CopySource.open(database)) as source:
        here = {table.name: set(table.names) for table in source.list_tables()}
    assert here.keys() == (kept - indexes - STAYING) | {"session_names"}
    assert here.keys() | STAYING | NEW_INDEX <= there.keys()
    assert here == {name: there[name] for name in here}


async def test_a_table_comes_after_those_it_refers_to(tmp_path: Path) -> None:
    database = tmp_path / "some.db"
    change(
        database,
        "CREATE TABLE a (id INTEGER PRIMARY KEY, b BIGINT REFERENCES b (id))",
        "CREATE TABLE b (id INTEGER PRIMARY KEY, c BIGINT REFERENCES c (id))",
        "CREATE TABLE c (id INTEGER PRIMARY KEY)",
    )
    with closing(CopySource(database, sqlite3.connect(database))) as source:
        assert [table.name for table in source.list_tables()][:3] == ["c", "b", "a"]


async def test_what_postgresql_cannot_store_is_replaced_and_counted(database: Path, target: PgServer) -> None:
    change(
        database,
        "UPDATE sessions SET display_name = 'be' || char(0) || 'fore' WHERE label = 'The Choir'",
        "UPDATE commands SET id = 'k' || char(0) || 'ey', answer = '{\"a\":' || char(0) || '}'"
        " WHERE digest <> ''",
    )
    assert (await migrate_to_postgres(database, target, ignore)).replaced == 3 + 1
    assert ask(target, "SELECT display_name FROM sessions WHERE label = 'The Choir'") == [("be\ufffdfore",)]
    assert ask(target, "SELECT id, answer FROM commands WHERE digest <> ''") == [
        ("k\ufffdey", '{"a":\ufffd}')
    ]


async def test_what_a_killed_process_left_in_the_log_comes_along(
    state: Path, database: Path, target: PgServer, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("INSERT INTO chains (id, runs, created_at) VALUES ('in the log', 1, 1)")
        connection.commit()
        left = Path(
            shutil.copytree(state, tmp_path / "left")
        )  # as it is on the disk while a process has it open
    assert left.joinpath("antiphon.db-wal").stat().st_size
    await migrate_to_postgres(left / "antiphon.db", target, ignore)
    assert ("in the log", 1, 1) in everything(target)["chains"]


async def test_batches_are_bounded_by_what_they_weigh(
    database: Path, target: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 2000)
    change(database, "UPDATE messages SET body = body || printf('%.*c', 1500, ' ')")
    steps: list[int] = []

    def count(progress: MigrationProgress) -> None:
        if (progress.step, progress.table) == ("copy", "messages"):
            steps.append(progress.rows)

    moved = await migrate_to_postgres(database, target, count)
    assert max(after - before for before, after in pairwise(steps)) <= 2
    assert steps[-1] == moved.tables["messages"]


# --- going on ---


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return path


class Lives:
    """See `moving`."""

    def __init__(self, database: Path, target: PgServer, password: Path, log: Path) -> None:
        arguments = ("--from", f"sqlite:{database}", "--to", target.url, "--password-file", str(password))
        here = Path(__file__).parent
        environ = {**os.environ, "PYTHONPATH": str(here), "HOME": str(database.parent)}
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(here / "support" / "killed_migration.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
            )

    def live(self, kill: int) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{kill}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def calls(self) -> int:
        """Around commits, in the last life that came to its end."""
        return int(self.said.rpartition("calls ")[2])

    def close(self) -> None:
        self._process.communicate(timeout=BOUND)


@contextmanager
def lives(database: Path, target: PgServer, password: Path, log: Path) -> Generator[Lives]:
    found = Lives(database, target, password, log)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.requirement("G21")
@pytest.mark.parametrize("seed", [1, 2])
async def test_it_is_killed_again_and_again_and_ends_right(
    seed: int, database: Path, target: PgServer, password: Path, tmp_path: Path
) -> None:
    before, dice, kills = rows_of(database), random.Random(seed), 0
    with lives(database, target, password, tmp_path / "log") as moving:
        while (code := moving.live(dice.randint(1, 24))) == -9:
            kills += 1
            assert kills < 100, "it does not get on"
        assert code == 0, moving.said
    assert kills >= 3
    after = everything(target)
    assert {name: after[name] for name in before} == before
    assert len(after["unindexed"]) == len(before["messages"])
    assert "moving" not in after


async def test_killed_at_its_last_commit_it_is_known_to_be_done(
    database: Path, target: PgServer, postgres: Postgres, password: Path, tmp_path: Path
) -> None:
    with _made(postgres) as other, lives(database, other, password, tmp_path / "log") as moving:
        assert moving.live(0) == 0, moving.said
        calls = moving.calls
    with lives(database, target, password, tmp_path / "log2") as moving:
        assert moving.live(calls - 1) == -9, "before it"
        assert "moving" in everything(target)
        assert moving.live(4) == -9, "after it: nothing was left but to begin and to finish, a commit each"
        assert "moving" not in everything(target)
        assert moving.live(0) == 0, moving.said
        assert "Everything was copied before" in moving.said


async def test_two_that_do_the_same_at_once_do_it_once(
    database: Path, target: PgServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BATCH_ROWS", 2)
    before = rows_of(database)
    copies = [Path(shutil.copy(database, tmp_path / f"{name}.db")) for name in ("one", "two")]
    done = await asyncio.gather(
        *(migrate_to_postgres(copy, target, ignore) for copy in copies), return_exceptions=True
    )
    assert any(isinstance(each, MigrationResult) for each in done), done
    # One that looks when the other has just come to its end sees what is not its own, and leaves it alone.
    assert all(isinstance(each, MigrationResult | StoreError | Conflict) for each in done), done
    after = everything(target)
    assert {name: after[name] for name in before} == before
    assert (await migrate_to_postgres(database, target, ignore)).was_finished


async def test_a_lost_server_delays_no_caller_and_loses_nothing(
    database: Path, target: PgServer, postgres: Postgres
) -> None:
    def cut(progress: MigrationProgress) -> None:
        if progress.table == "messages" and progress.rows:
            postgres.kill()

    try:
        with pytest.raises(StoreError) as failed:
            await migrate_to_postgres(database, target, cut)
    finally:
        postgres.start()
    assert "same command again" in failed.value.hint
    before = rows_of(database)
    await migrate_to_postgres(database, target, ignore)
    after = everything(target)
    assert {name: after[name] for name in before} == before


async def test_a_partly_created_database_is_not_used(state: Path, database: Path, target: PgServer) -> None:
    with pytest.raises(Stopped):
        await migrate_to_postgres(database, target, Stop("messages"))
    half = everything(target)
    with pytest.raises(StoreError, match="is being migrated into this one"):
        async with open_app_operations(on(target), state):
            pass
    with pytest.raises(StoreError, match="it continues where it stopped"):
        async with open_operations_readonly(on(target), state):
            pass
    assert everything(target) == half
    await migrate_to_postgres(database, target, ignore)
    async with open_operations_readonly(on(target), state) as operations:
        assert (await operations.sessions.describe(OPERATOR, GROUP)).label == "The Choir"


# --- what is refused ---


async def refused(work: Awaitable[MigrationResult], kind: type[AntiphonError], words: str) -> AntiphonError:
    with pytest.raises(kind) as failed:
        await work
    assert words in failed.value.what
    return failed.value


async def test_a_source_that_was_used_meanwhile_is_noticed(database: Path, target: PgServer) -> None:
    with pytest.raises(Stopped):
        await migrate_to_postgres(database, target, Stop("sessions"))
    half = everything(target)
    change(database, "UPDATE sessions SET updated_at = updated_at + 1 WHERE id = 1")
    error = await refused(
        migrate_to_postgres(database, target, ignore), Conflict, "the source has changed since"
    )
    assert error.data["table"] == "sessions"
    assert everything(target) == half


async def test_what_is_added_meanwhile_comes_along(database: Path, target: PgServer) -> None:
    with pytest.raises(Stopped):
        await migrate_to_postgres(database, target, Stop("sessions"))
    change(database, "INSERT INTO chains (id, runs, created_at) VALUES ('zzz', 1, 1)")
    await migrate_to_postgres(database, target, ignore)
    assert ("zzz", 1, 1) in everything(target)["chains"]


async def test_half_of_another_source_is_refused(database: Path, target: PgServer, tmp_path: Path) -> None:
    other = Path(shutil.copy(database, tmp_path / "other.db"))
    change(other, "UPDATE chains SET runs = runs + 1")
    with pytest.raises(Stopped):
        await migrate_to_postgres(other, target, Stop("messages"))
    half = everything(target)
    await refused(migrate_to_postgres(database, target, ignore), Conflict, "contains part of another copy")
    assert everything(target) == half


async def test_a_target_with_other_sessions_is_refused(
    state: Path, database: Path, target: PgServer, tmp_path: Path
) -> None:
    async with open_app_operations(on(target), tmp_path / "elsewhere") as operations:
        await told(operations, MAIN, "say something else")
    before = everything(target)
    error = await refused(
        migrate_to_postgres(database, target, ignore), Conflict, "already contains other sessions"
    )
    assert error.exit_code == 2 and "nothing was changed" in error.hint
    assert everything(target) == before


async def test_a_target_that_was_used_after_the_move_is_refused(
    state: Path, database: Path, target: PgServer
) -> None:
    await migrate_to_postgres(database, target, ignore)
    assert (await migrate_to_postgres(database, target, ignore)).was_finished
    ask(target, "UPDATE sessions SET updated_at = updated_at + 1 WHERE id = 1")
    before = everything(target)
    await refused(migrate_to_postgres(database, target, ignore), Conflict, "already contains other sessions")
    assert everything(target) == before


async def test_tables_of_another_program_are_refused(database: Path, target: PgServer) -> None:
    ask(target, "CREATE TABLE sessions (customer TEXT)")
    await refused(
        migrate_to_postgres(database, target, ignore), Conflict, "contains tables of another program"
    )
    assert everything(target) == {"sessions": []}


async def test_a_gateway_on_the_target_is_refused(database: Path, target: PgServer, tmp_path: Path) -> None:
    async with open_app_operations(on(target), tmp_path / "elsewhere"):
        await refused(
            migrate_to_postgres(database, target, ignore), Conflict, "A gateway is running on the database"
        )
        assert "moving" not in everything(target)
    await migrate_to_postgres(database, target, ignore)


async def test_a_target_on_which_a_gateway_was_only_started_takes_the_secrets_of_the_source(
    database: Path, target: PgServer, tmp_path: Path
) -> None:
    async with open_app_operations(on(target), tmp_path / "elsewhere"):
        pass
    assert ask(target, "SELECT count(*) FROM secrets") == [(1,)]
    ask(target, "DELETE FROM owners")  # whose lease would run out by itself
    await migrate_to_postgres(database, target, ignore)
    assert ask(target, "SELECT name, value FROM secrets") == rows_of(database)["secrets"]


async def test_a_state_directory_that_is_in_use_is_refused(
    state: Path, database: Path, target: PgServer
) -> None:
    with StateDir.open_locked(state):
        await refused(
            migrate_to_postgres(database, target, ignore), StoreLocked, "is in use by another Antiphon"
        )
    assert everything(target) == {}


def _torn(database: Path) -> None:
    size = database.stat().st_size
    with database.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x5a" * (size // 4))


def _older(database: Path) -> None:
    change(database, "PRAGMA user_version = 3")


def _foreign(database: Path) -> None:
    change(database, "PRAGMA application_id = 7")


def _unreadable(database: Path) -> None:
    change(database, "UPDATE messages SET body = CAST(x'ff00fe' AS TEXT) WHERE id = 3")


@pytest.mark.parametrize(
    ("harm", "kind", "words"),
    [
        (_torn, StoreDamaged, "is damaged"),
        (_older, StoreError, "was written by an older Antiphon"),
        (_foreign, StoreDamaged, "is another program's database"),
        (Path.unlink, StoreError, "There is no Antiphon database"),
        (_unreadable, StoreDamaged, "cannot be read"),
    ],
)
async def test_a_source_that_cannot_be_used_is_refused(
    harm: Callable[[Path], None], kind: type[AntiphonError], words: str, database: Path, target: PgServer
) -> None:
    harm(database)
    error = await refused(migrate_to_postgres(database, target, ignore), kind, words)
    assert error.exit_code == 7


async def test_a_value_that_does_not_fit_is_named(database: Path, target: PgServer) -> None:
    change(database, "UPDATE sessions SET depth = 'deep' WHERE id = 1")
    error = await refused(
        migrate_to_postgres(database, target, ignore), StoreError, "A row of the table 'sessions'"
    )
    assert error.data["table"] == "sessions"


@pytest.mark.parametrize(
    ("table", "harm", "words"),
    [
        ("messages", "UPDATE messages SET body = body || ' ' WHERE id = 1", "not the same ones"),
        ("messages", "DELETE FROM messages WHERE id = 2", "in the target"),
        ("usage", "UPDATE usage SET cost = 0.1 WHERE id = 1", "not the same ones"),
        ("sessions", "UPDATE sessions SET label = '' WHERE id = 1", "not the same ones"),
        ("session_names", "DELETE FROM session_names WHERE rowid = 1", "in the target"),
        ("lineage", "UPDATE lineage SET ancestor = ancestor + 1000", "not the same ones"),
        ("chains", "INSERT INTO chains (id, runs, created_at) VALUES ('more', 1, 1)", "in the target"),
    ],
)
async def test_what_is_not_the_same_is_noticed(
    table: str, harm: str, words: str, state: Path, database: Path, target: PgServer
) -> None:
    harmed: list[str] = []

    def tamper(progress: MigrationProgress) -> None:
        if progress.step == "check" and not harmed:
            harmed.append(harm)
            ask(target, harm)

    error = await refused(migrate_to_postgres(database, target, tamper), StoreError, f"The table {table!r}")
    assert words in error.what and error.exit_code == 7 and error.data["table"] == table
    with pytest.raises(StoreError, match="is being migrated into this one"):
        async with open_operations_readonly(on(target), state):
            pass


# --- the command ---


@pytest.fixture
def program(state: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


@pytest.mark.requirement("R")
async def test_the_command_says_how_it_goes_and_what_is_next(
    program: Program, target: PgServer, password: Path
) -> None:
    arguments = ("store", "migrate", "--to", target.url, "--password-file", str(password))
    with program.terminal(*arguments) as terminal:
        terminal.expect(r"Copying +messages +\[#{20}\] +\d+ of \d+")
        terminal.expect(r"Comparing +messages +\[#{20}\]")
        terminal.expect(r"Everything is copied: [\d,]+ rows of \d+ tables, the same on both sides\.")
        terminal.expect(r"Next: set store\.url .* and start `antiphon up`\.")
        assert terminal.ended() == 0
    again = program.run(*arguments)
    assert again.code == 0 and again.out.startswith("Comparing chains"), again.err
    assert "Everything was copied before" in again.out


@pytest.mark.requirement("R")
async def test_issued_tokens_are_valid_after_the_move_and_are_revoked_everywhere(
    program: Program, target: PgServer, tmp_path: Path
) -> None:
    token = TokenRegistry.open(program.state).issue_token("dashboard", ["operator.read"])
    config = {**SETTINGS, "store": {"url": target.url, "password": PASSWORD}}
    program.configure(config)
    for _ in range(2):  # also of a command that is given again
        assert json.loads(program.run("store", "migrate", "--json").out.splitlines()[-1])["tokens"] == 1
    elsewhere = replace(program, home=tmp_path / "elsewhere", extra={"ANTIPHON_TOKEN": token})
    elsewhere.configure(config)
    with up(elsewhere) as gateway:
        listed = elsewhere.run("sessions", "list", "--url", gateway.url)
        assert listed.code == 0, listed.err
        assert elsewhere.run("spawn", "say no", "--url", gateway.url).code != 0, "it may only read"
        assert gateway.stop() == 0
    with up(program):
        assert [record.name for record in TokenRegistry.open(program.state).records] == ["owner"]
        names = [row["name"] for row in program.run("tokens", "list", "--json").json["tokens"]]
        assert names == ["owner", "dashboard"]
        assert elsewhere.run("tokens", "revoke", "dashboard").code == 0
        assert [row["name"] for row in program.run("tokens", "list", "--json").json["tokens"]] == ["owner"]


@pytest.mark.requirement("R")
async def test_the_command_takes_the_server_of_the_configuration(program: Program, target: PgServer) -> None:
    program.configure({**SETTINGS, "store": {"url": target.url, "password": PASSWORD}})
    done = program.run("store", "migrate", "--json")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0, done.err
    assert {line["event"] for line in lines[:-1]} == {"progress"}
    assert {line["step"] for line in lines[:-1]} == {"copy", "check"}
    assert (
        lines[-1]["event"] == "done"
        and lines[-1]["tables"]["sessions"] == ask(target, "SELECT count(*) FROM sessions")[0][0]
    )
    assert program.run("store", "migrate", "--to", f"postgres:{target.url}").code == 0
    assert program.run("sessions", "history", GROUP).out.count("hello group") == 2, "asked for and said"


@pytest.mark.requirement("R")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--from", "postgres://here/db", "--to", "postgres://there/db"), 2, "Only an SQLite database"),
        (("--to", "mysql://there/db"), 2, "Only PostgreSQL can be the target"),
        ((), 2, "No target given"),
        (("--to", "postgres://me:secret@there/db"), 2, "--password-file"),
        (
            ("--from", "sqlite:nowhere/antiphon.db", "--to", "postgres://me@127.0.0.1:1/db"),
            7,
            "no Antiphon database",
        ),
        (("--to", "postgres://me@127.0.0.1:1/db"), 7, "cannot be reached"),
    ],
)
async def test_a_command_that_cannot_be_says_why(
    arguments: tuple[str, ...], code: int, words: str, program: Program
) -> None:
    done = program.run("store", "migrate", *arguments)
    assert (done.code, done.out) == (code, "")
    assert words in done.err and "secret" not in done.err


@pytest.mark.requirement("R")
async def test_the_command_does_nothing_beside_a_running_gateway(program: Program, target: PgServer) -> None:
    program.configure(SETTINGS)
    with up(program):
        done = program.run("store", "migrate", "--to", target.url)
    assert done.code == 7 and "in use by another Antiphon" in done.err
    assert everything(target) == {}
