"""What can be wrong with a PostgreSQL server, each in one sentence without a secret; and what may stand before one."""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path
from time import monotonic
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config import Config
from antiphon.errors import ConfigError, StoreError, StoreFull, StoreReadOnly
from antiphon.store import Tx, listing
from antiphon.store.factory import open_store
from antiphon.store.postgres import PgStore, worker
from antiphon.store.postgres.connection import PgServer, pg, translate_postgres_error
from cluster.certificates import authority, issued
from cluster.database import PASSWORD, Postgres
from cluster.proxy import Proxy
from cluster.servers import free_ports
from cluster.stores import (
    altered,
    ask,
    increase,
    lease,
    opened,
    owners,
    put,
    through,
    within,
)

pytestmark = pytest.mark.anyio


# --- errors ---


def config(url: str, **more: object) -> Config:
    return Config.model_validate({"store": {"url": url, "password": PASSWORD, **more}})


async def refused(settings: Config, path: Path) -> StoreError:
    began = monotonic()
    with pytest.raises(StoreError) as caught:
        await (await within(open_store(settings, path))).close()
    assert monotonic() - began < 15
    assert_readable(caught.value)
    return caught.value


def assert_readable(error: StoreError) -> None:
    """One sentence and a next step, without a secret in either."""
    said = f"{error.what} {error.hint}"
    assert error.what.endswith(".") and error.hint.endswith(".")
    assert "\n" not in said and "Traceback" not in said
    assert PASSWORD not in said


async def test_connect_errors_are_one_sentence(postgres: Postgres, tmp_path: Path) -> None:
    good = postgres.url("postgres")
    here = f"127.0.0.1:{postgres.port}"
    cases = {
        "postgresql://[::1/x": "cannot be read",
        f"postgresql://antiphon:{PASSWORD}/half@{here}/x": "cannot be read",
        "postgresql://antiphon@127.0.0.1:port/x": "cannot be read",
        f"postgresql://antiphon@127.0.0.1:{free_ports(1)[0]}/x": "cannot be reached",
        "postgresql://antiphon@no-such-host.invalid/x": "cannot be reached",
        f"postgresql://nobody@{here}/x": "rejected the login",
        f"postgresql://antiphon@{here}/nowhere": "There is no database",
        f"{good}?sslmode=perhaps": "cannot be read",
        f"{good}?sslmode=require": "cannot be reached",
        f"{good}?no_such_setting=1": "refused a statement",
    }
    for url, words in cases.items():
        error = await refused(config(url), tmp_path)
        assert words in error.what, url
    wrong = await refused(config(good, password="not this one"), tmp_path)
    assert "rejected the login" in wrong.what and "not this one" not in wrong.what


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("antiphon.store.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asyncpg", None)


@pytest.mark.usefixtures("no_packages")
async def test_a_package_that_is_missing_is_named(postgres: Postgres, tmp_path: Path) -> None:
    error = await refused(config(postgres.url("postgres")), tmp_path)
    assert error.hint.endswith("scripts/extra cluster`.")


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize(
    ("url", "words"),
    [("mysql://here/x", "has the unsupported scheme 'mysql://'"), ("here/x", "has no scheme")],
)
async def test_another_database_behind_a_reference_is_refused_before_any_package_is_missed(
    url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_URL", url)
    settings = Config.model_validate({"store": {"url": {"env": "STORE_URL"}}})
    with pytest.raises(ConfigError) as caught:
        await open_store(settings, tmp_path)
    assert caught.value.data["path"] == "store.url" and words in caught.value.what


@pytest.mark.requirement("G21")
async def test_a_user_without_privileges_gets_an_error(
    postgres: Postgres, server: PgServer, tmp_path: Path
) -> None:
    await altered(server, f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD.replace(chr(39), chr(39) * 2)}'")
    guest = msgspec.structs.replace(server, url=server.url.replace("antiphon@", "guest@"))
    try:
        with pytest.raises(StoreReadOnly, match="refuses this user") as caught:
            await within(PgStore.open(guest))
        assert_readable(caught.value)
        await altered(server, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
        async with opened(guest) as store:
            assert await store.read(owners) == []
            with pytest.raises(StoreReadOnly, match="refuses this user"):
                await within(store.tx(put, "a"))
    finally:
        await altered(server, "DROP OWNED BY guest", "DROP ROLE guest")


@pytest.mark.requirement("G21")
async def test_a_database_that_is_read_only_is_said_to_be_so_and_survived(server: PgServer) -> None:
    name = server.url.rpartition("/")[2]
    async with opened(server) as store:
        await altered(server, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        await altered(
            server,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        with pytest.raises(StoreReadOnly, match="read only") as caught:
            await within(store.tx(put, "a"))
        assert_readable(caught.value)
        assert await store.read(owners) == []
        await altered(server, "SET default_transaction_read_only = off; SELECT 1",
                      f'SET default_transaction_read_only = off; ALTER DATABASE "{name}" RESET ALL')  # fmt: skip
        assert await within(store.tx(put, "a")) == "a"  # on a new connection


FULL = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.id LIKE 'big%' THEN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON owners FOR EACH ROW EXECUTE FUNCTION full_disk();
"""


@pytest.mark.requirement("G21")
async def test_a_full_disk_changes_nothing_and_is_survived(server: PgServer) -> None:
    async with opened(server, writers=1) as store:
        await altered(server, FULL)
        outcomes = await within(
            asyncio.gather(*(store.tx(put, name) for name in ("a", "big", "b")), return_exceptions=True)
        )
        assert outcomes[::2] == ["a", "b"]
        assert isinstance(outcomes[1], StoreFull)
        assert_readable(outcomes[1])
        assert await store.read(owners) == ["a", "b"]


async def test_a_statement_that_takes_too_long_is_ended(
    server: PgServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BEGIN_READ_SQL", worker.BEGIN_READ_SQL.replace("'30s'", "'50ms'"))
    monkeypatch.setattr("antiphon.store.postgres.BEGIN_READ_SQL", worker.BEGIN_READ_SQL)
    async with opened(server) as store:
        with pytest.raises(StoreError, match="did not finish a statement in time") as caught:
            await within(store.read(ask, "SELECT pg_sleep(60)"))
        assert_readable(caught.value)
        assert await store.read(owners) == []


async def test_a_value_that_does_not_fit_is_told_at_once(server: PgServer) -> None:
    async with opened(server) as store:
        began = monotonic()
        for value in (2**63, cast("int", "text")):
            with pytest.raises(StoreError, match="does not fit") as caught:
                await within(store.tx(put, "a", value))
            assert_readable(caught.value)
        assert monotonic() - began < 5


async def test_what_a_script_raises_is_not_taken_for_the_database(server: PgServer) -> None:
    async with opened(server) as store:
        for error in (TimeoutError("mine"), FileNotFoundError("mine")):

            async def failing(tx: Tx, error: Exception = error) -> None:
                await put(tx, "a")
                raise error

            began = monotonic()
            with pytest.raises(type(error), match="mine"):
                await within(store.tx(failing))
            assert monotonic() - began < 5


async def test_rows_that_stay_in_the_way_are_an_error_in_bounded_time(server: PgServer) -> None:
    await altered(server, "INSERT INTO watch (id, owner, until) VALUES (1, '', 0) ON CONFLICT DO NOTHING")
    async with opened(server) as store:
        with pytest.raises(StoreError, match="refused a statement") as caught:
            await within(
                store.tx(ask, "INSERT INTO watch (id, owner, until) VALUES (1, '', 0) RETURNING id"), 20
            )
        assert_readable(caught.value)


TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), min_size=6, max_size=20)


@given(password=TEXTS, where=st.sampled_from(["user", "query", "both"]))
def test_no_name_of_a_server_has_a_part_of_its_password(password: str, where: str) -> None:
    secret = f"Zq{password}Zq"
    user = f"user:{secret}@" if where != "query" else "user@"
    query = f"?password={secret}" if where != "user" else ""
    server = PgServer(f"postgresql://{user}host:5432/database{query}")
    assert "Zq" not in server.display_name
    for error in (OSError("gone"), ValueError(f"bad port {secret}"), pg.ClientConfigurationError(secret)):
        assert "Zq" not in str(translate_postgres_error(error, server))


# --- connection poolers ---


async def test_without_prepared_statements_it_is_the_same(server: PgServer) -> None:
    async with opened(msgspec.structs.replace(server, prepared=False)) as store:
        values = await within(asyncio.gather(*(store.tx(increase, "n") for _ in range(50))))
        assert sorted(values) == list(range(1, 51))
        assert (
            await within(
                store.read(listing.load_session_page, listing.SessionListQuery(limit=5, search="some words"))
            )
            == []
        )
        assert await store.read(lease, "n") == 50


async def test_only_the_right_authority_is_trusted(
    postgres: Postgres, server: PgServer, tmp_path: Path
) -> None:
    ours = authority(tmp_path / "ours.pem")
    authority(tmp_path / "theirs.pem")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(issued(ours, tmp_path / "server.pem", "127.0.0.1"))
    async with Proxy(postgres.port, tls=tls) as proxy:
        url = through(proxy, server).url
        store = await within(open_store(config(url, tlsCa=str(tmp_path / "ours.pem")), tmp_path))
        assert await store.tx(put, "a") == "a"
        await within(store.close())
        error = await refused(config(url, tlsCa=str(tmp_path / "theirs.pem")), tmp_path)
        assert "A TLS connection" in error.what
        assert "store.tlsCa" in error.hint
    for broken in (tmp_path / "nothing.pem", tmp_path):
        error = await refused(config(url, tlsCa=str(broken)), tmp_path)
        assert "could not be read" in error.what
    plain = await refused(config(server.url, tlsCa=str(tmp_path / "ours.pem")), tmp_path)
    assert "cannot be reached" in plain.what  # a server without TLS is not talked to in the open
