"""`antiphon up --join`: replicas on one machine, and commands beside them."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from antiphon.gateway.tokens import TokenRegistry
from antiphon.store.postgres.worker import RETRY_WINDOW_SECONDS
from cli.gateways import up
from cli.terminal import BOUND, Program
from cluster.database import Postgres
from cluster.servers import NatsServer, free_ports, nats_server

pytestmark = pytest.mark.requirement("R", "G2")


@pytest.fixture
def nats() -> Generator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
def shared(
    program: Program, postgres: Postgres, nats: NatsServer, tmp_path: Path
) -> Generator[dict[str, Any]]:
    """A configuration on real servers, which the program has."""
    server = asyncio.run(postgres.database(tmp_path))
    config = {
        "store": {"url": server.url, "password": {"file": str(postgres.secret)}},
        "bus": {"url": nats.url, "drainSeconds": 0},
        "gateway": {
            "port": free_ports(1)[0],
            "auth": {"mode": "token", "token": "a token of sixteen or more"},
        },
    }
    program.configure(config)
    yield config
    postgres.drop_all()


def findings(program: Program, *arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The doctor's exit code, and what it found of each check."""
    done = program.run("doctor", "--json", *arguments)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in done.json["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.code, found


def test_replicas_join_beside_each_other_and_commands_find_them(
    program: Program, shared: dict[str, Any]
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(up(program, join=True))
        second = stack.enter_context(up(program, join=True))
        places = {gateway.facts["stateDir"] for gateway in (first, second)}
        assert places == {str(program.state / "replicas" / number) for number in ("1", "2")}
        assert program.say("say hello") == "hello\n"
        told = program.run("status", "--json").json
        assert {replica["address"] for replica in told["replicas"]} == {first.url, second.url}
        assert [replica["watching"] for replica in told["replicas"]].count(True) <= 1
        assert program.run("status").out.count("replica ") == 2
        assert first.stop() == 0
        assert program.say("say still here") == "still here\n"
        alone = program.run("status").out
        assert alone.count("replica ") == 1
        assert second.url in alone
        assert "1 lanes" not in alone


def test_a_wait_goes_on_with_another_replica(
    program: Program, shared: dict[str, Any], tmp_path: Path
) -> None:
    """From another machine, where only one address is known; the others are learned from that one."""
    elsewhere = replace(
        program,
        home=tmp_path / "elsewhere",
        extra={"ANTIPHON_TOKEN": shared["gateway"]["auth"]["token"]},
    )
    elsewhere.home.mkdir()
    with up(program, join=True) as first, up(program, join=True):
        asking = elsewhere.start("agent", "--message", "slow 3 here it is", "--url", first.url)
        assert asking.stderr is not None
        accepted = asking.stderr.readline()
        assert accepted.startswith("Accepted: run ") and accepted.endswith(" in agent:main:main.\n")
        first.stop(signal.SIGKILL)
        out, err = asking.communicate(timeout=BOUND)
        assert (asking.returncode, out) == (0, "here it is\n"), err


def test_replicas_that_start_at_once_take_different_places(program: Program, shared: dict[str, Any]) -> None:
    (port,) = free_ports(1)
    processes = [program.start("up", "--join", "--json", "--port", str(port)) for _ in range(3)]
    try:
        facts: list[dict[str, Any]] = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=60)[1]
            facts.append(json.loads(line))
        assert {Path(fact["stateDir"]).name for fact in facts} == {"1", "2", "3"}
        assert len({fact["url"] for fact in facts}) == 3
        assert f"ws://127.0.0.1:{port}" in {fact["url"] for fact in facts}
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)


def test_a_command_elsewhere_does_not_become_a_replica(
    program: Program, shared: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = replace(program, home=tmp_path / "elsewhere")
    elsewhere.configure(shared)
    with up(program, join=True) as gateway:
        refused = elsewhere.run("send", "main", "say hello")
        assert refused.code != 0
        assert f"--url {gateway.url}" in refused.err
        assert elsewhere.run("sessions", "list").code == 0  # reading takes nothing away
        assert gateway.url in elsewhere.run("status").out
        assert program.say("say hello") == "hello\n"
        assert gateway.stop() == 0
    told = elsewhere.run("status", "--json").json
    assert (told["running"], told["sessions"], told["replicas"]) == (False, 1, [])
    assert elsewhere.say("say alone") == "alone\n"


def test_there_must_be_something_to_join(program: Program) -> None:
    program.configure({"store": {"url": "postgresql://nobody@127.0.0.1:1/x"}})
    refused = program.run("up", "--join")
    assert refused.code != 0
    assert "'bus.url' is not set" in refused.err


def test_the_doctor_finds_replicas_and_knows_their_port(program: Program, shared: dict[str, Any]) -> None:
    with ExitStack() as stack:
        gateways = [
            stack.enter_context(up(program, port, join=True)) for port in (shared["gateway"]["port"], 0)
        ]
        code, found = findings(program)
        assert code == 0
        assert [finding["what"] for finding in found["gateway"]] == [
            f"running at {gateway.url}, process {gateway.process.pid}" for gateway in gateways
        ]
        assert "port" not in found
        assert [finding["level"] for finding in found["bus"]] == ["ok"]


def test_a_bus_that_is_away_is_told(program: Program, shared: dict[str, Any], nats: NatsServer) -> None:
    with up(program, join=True) as gateway:
        assert program.run("status", "--json").json["degraded"] == []
        nats.kill()
        until = monotonic() + BOUND
        while program.run("status", "--json").json["degraded"] != ["bus"]:
            assert monotonic() < until, "the gateway did not notice"
        told = program.run("status")
        assert told.code == 0
        assert gateway.url in told.out
        assert "NATS is unreachable" in told.out
        for arguments in ([], ["--online"]):
            code, found = findings(program, *arguments)
            (bus,) = found["bus"]
            assert (code, bus["level"]) == (1, "fail")
            assert nats.url in bus["what"]
            assert "\n" not in bus["what"]


def test_the_doctor_does_not_wait_for_a_bus_that_says_nothing(
    program: Program, shared: dict[str, Any], nats: NatsServer
) -> None:
    nats.pause()
    code, found = findings(program)
    (bus,) = found["bus"]
    assert (code, bus["level"]) == (1, "fail")
    assert nats.url in bus["what"]


def test_a_database_that_is_away_does_not_silence_the_status(
    program: Program, shared: dict[str, Any], postgres: Postgres
) -> None:
    with up(program, join=True) as gateway:
        postgres.kill()
        try:
            begun = monotonic()
            told = program.run("status")
            took = monotonic() - begun
            facts = program.run("status", "--json").json
        finally:
            postgres.start()
        assert told.code == 0, told.err
        assert f"running at {gateway.url} (process {gateway.process.pid})" in told.out
        assert "database     unavailable" in told.out
        assert took < RETRY_WINDOW_SECONDS
        assert (facts["running"], facts["failing"], facts["sessions"]) == (True, ["store"], None)


def test_replicas_share_the_tokens_that_were_issued(program: Program, shared: dict[str, Any]) -> None:
    """One that may read is enough for /metrics of each, and a revoked one opens none of them."""
    with ExitStack() as stack:
        gateways = [stack.enter_context(up(program, 0, join=True)) for _ in range(2)]
        token = program.run("tokens", "issue", "prometheus", "--scope", "read").out.strip()
        assert program.run("tokens", "issue", "prometheus", "--scope", "read").code != 0
        for gateway in gateways:
            _until_status(gateway.url, token, 200)
        listed = program.run("tokens", "list", "--json")
        assert [it["scopes"] for it in listed.json["tokens"] if it["name"] == "prometheus"] == [
            ["operator.read"]
        ]
        assert token not in listed.out
        assert program.run("tokens", "revoke", "prometheus").code == 0
        for gateway in gateways:
            _until_status(gateway.url, token, 401)


@pytest.mark.requirement("W7")
def test_every_replica_closes_the_sockets_of_a_token_that_is_revoked(
    program: Program, shared: dict[str, Any]
) -> None:
    with ExitStack() as stack:
        token = program.run("tokens", "issue", "dashboard", "--scope", "read").out.strip()
        gateways = [stack.enter_context(up(program, 0, join=True)) for _ in range(2)]
        watching = [stack.enter_context(_connected(gateway.url, token)) for gateway in gateways]
        owners = [
            stack.enter_context(_connected(gateway.url, shared["gateway"]["auth"]["token"]))
            for gateway in gateways
        ]
        assert program.run("tokens", "revoke", "dashboard").code == 0
        for socket in watching:
            with pytest.raises(ConnectionClosed) as closed:
                _receive_until(socket, lambda frame: False)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "the token was revoked")
        for socket in owners:
            assert _ask(socket, "health")["ok"]


@pytest.mark.requirement("W7")
def test_a_name_is_of_one_token_in_the_database_or_the_file(program: Program, shared: dict[str, Any]) -> None:
    """Otherwise one that is listed and revoked could be another than the one that is used."""
    assert program.run("tokens", "issue", "both", "--scope", "read").code == 0
    in_file = TokenRegistry.open(program.state)
    for name in ("both", "old"):
        in_file.issue_token(name, ["operator.read"])
    for name in ("owner", "old", "both"):
        refused = program.run("tokens", "issue", name, "--scope", "read")
        assert refused.code == 2
        assert f"A token named '{name}' already exists." in refused.err
    for name in ("both", "old"):
        assert program.run("tokens", "revoke", name).code == 0
    listed = program.run("tokens", "list", "--json").json["tokens"]
    assert [token["name"] for token in listed] == ["owner"]
    assert program.run("tokens", "revoke", "both").code == 3


@contextmanager
def _connected(url: str, token: str) -> Generator[ClientConnection]:
    client = {"id": "gateway-client", "version": "1", "platform": "tests", "mode": "backend"}
    with connect(url, open_timeout=BOUND, close_timeout=BOUND) as socket:
        answer = _ask(socket, "connect", minProtocol=3, maxProtocol=4, client=client, auth={"token": token})
        assert answer["ok"], answer
        yield socket


def _ask(socket: ClientConnection, method: str, **params: object) -> dict[str, Any]:
    socket.send(json.dumps({"type": "req", "id": method, "method": method, "params": params}))
    return _receive_until(socket, lambda frame: frame.get("id") == method)


def _receive_until(socket: ClientConnection, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until = monotonic() + BOUND
    while not is_wanted(frame := json.loads(socket.recv(timeout=until - monotonic()))):
        pass
    return frame


def _until_status(url: str, token: str, status: int) -> None:
    """A replica looks for tokens every two seconds; a wrong one may not be tried too often."""
    address = f"{url.replace('ws', 'http', 1)}/metrics"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    until = monotonic() + BOUND
    while monotonic() < until:
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as reply:  # noqa: S310
                found = reply.status
        except urllib.error.HTTPError as error:
            with error:
                found = 401 if error.code == 429 else error.code
        if found == status:
            return
    pytest.fail(f"{address} does not answer {status}")
