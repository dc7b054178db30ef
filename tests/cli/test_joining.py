"""`antiphon up --join`: replicas on one machine, and commands beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.gateways import up
from cli.terminal import Program
from cluster.database import Postgres
from cluster.servers import free_ports, nats_server

pytestmark = pytest.mark.requirement("R", "G2")


@pytest.fixture
def shared(program: Program, postgres: Postgres, tmp_path: Path) -> Generator[dict[str, Any]]:
    """A configuration on real servers, which the program has."""
    server = asyncio.run(postgres.database(tmp_path))
    with nats_server() as nats:
        config = {
            "store": {"url": server.url, "password": {"file": str(postgres.secret)}},
            "bus": {"url": nats.url, "drainSeconds": 0},
            "gateway": {"auth": {"mode": "token", "token": "a token of sixteen or more"}},
        }
        program.configure(config)
        yield config
    postgres.drop_all()


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
        assert elsewhere.run("sessions", "list").code == 0  # looking takes nothing from anybody
        assert gateway.stop() == 0
    assert elsewhere.say("say alone") == "alone\n"


def test_there_must_be_something_to_join(program: Program) -> None:
    program.configure({"store": {"url": "postgresql://nobody@127.0.0.1:1/x"}})
    refused = program.run("up", "--join")
    assert refused.code != 0
    assert "'bus.url' is not set" in refused.err
