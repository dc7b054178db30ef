"""Any input is answered or ends the connection: it causes no internal error, no silence and no leak."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from test_authorization import SPARE, TABLE
from websockets.exceptions import ConnectionClosed

from antiphon.gateway.http import openapi
from antiphon.gateway.methods import METHODS_BY_NAME
from antiphon.gateway.ws import frames
from antiphon.gateway.ws.handshake import ConnectParams
from support.app_fixture import BOUND, MAIN
from support.gateway_http import ALL_ENDPOINTS, HOOK_TOKEN
from support.gateway_ws import Client, GatewayFixture, connect_params, open_gateway

pytestmark = [pytest.mark.requirement("W1")]

SEED = 1
PER_METHOD = 30
RAW = 160
MIB = 2**20
FAULT = "Internal error."

WORDS: list[Any] = [
    "", " ", "main", MAIN, "agent:main:dashboard:f", "agent::", "agent:nobody:main", "global", "current", "x" * 600,
    "\x00", "é😀", "/new", "/stop", "../../etc/passwd", "%00", "' OR 1=1 --", "operator.admin", "seq:1", "0|~",
    "1", "image/png", "off", "AAAA", "f1", "f2", "*", '"', "a:b:c:d:e:f", "\u202e", "k" * 201,
]  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 1000, 1001, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e308,
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, [], {}, [[]], {"": {}}, [None], {"kind": "at"}, {"kind": "cron", "expr": "* * * * *"},
]  # fmt: skip
ANYTHING = [*WORDS, *NUMBERS, *OTHERS]


def likely(kind: Any, chance: random.Random) -> Any:
    """Something of about that type; every now and then of another."""
    if chance.random() < 0.1:
        return chance.choice(ANYTHING)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is list:
        return [likely(parts[0], chance) for _ in range(chance.randint(0, 3))]
    if origin is dict or kind is Any:
        return chance.choice(OTHERS)
    if parts:  # a union or a literal, or a type with its bounds
        return likely(parts[0] if hasattr(kind, "__metadata__") else chance.choice(parts), chance)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind, chance)
    pools: dict[Any, list[Any]] = {str: WORDS, int: NUMBERS, float: NUMBERS}
    return chance.choice([kind] if isinstance(kind, str | int) else pools.get(kind, ANYTHING))


def filled(struct: type[msgspec.Struct], chance: random.Random) -> dict[str, Any]:
    fields = msgspec.structs.fields(struct)
    given = {f.encode_name: likely(f.type, chance) for f in fields if f.required or chance.random() < 0.3}
    if {"runId", "timeoutMs"} <= {field.encode_name for field in fields}:
        given["timeoutMs"] = chance.choice([0, 1, 5, -1, "x"])  # not to wait for what will never be
    if chance.random() < 0.05:
        given[str(chance.choice(WORDS))] = 1
    return given


def raw(chance: random.Random) -> str | bytes:
    """Frames that are hardly any."""
    method, params = chance.choice(sorted(METHODS_BY_NAME)), chance.choice(OTHERS)
    whole = json.dumps({"type": "req", "id": "1", "method": method, "params": params})
    return chance.choice(
        [
            whole[: chance.randint(0, len(whole))],
            whole.replace(chance.choice(whole), chance.choice(["", '"', "{", "\\", "\u0000", "9" * 50]), 1),
            json.dumps(chance.choice(ANYTHING)),
            "[" * chance.randint(1, 30_000),
            '{"a":' * chance.randint(1, 5_000),
            bytes(chance.randrange(256) for _ in range(chance.randint(0, 200))),
            whole.encode("utf-16"),
            f'{{"type":"req","id":"1","method":"health","params":{chance.choice(["1e999", "NaN", "-", "1" * 5000])}}}',
            '{"type":"req","id":"\\ud800","method":"\\udfff","params":{}}',
            json.dumps({"type": "req", "id": "x" * 10_000, "method": "y" * 10_000}),
        ]
    )  # fmt: skip


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Generator[list[str]]:
    """What the gateway logged as its own fault; a test that uses this fails if there is any."""
    found: list[str] = []
    yield found
    found += [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert found == []


@pytest.mark.anyio
async def test_parameters_of_any_kind_are_taken_or_refused_in_words(
    gateway: GatewayFixture, faults: list[str]
) -> None:
    chance = random.Random(SEED)
    taken = 0
    async with gateway.client() as client:
        for number in range(PER_METHOD * len(METHODS_BY_NAME)):
            name = sorted(METHODS_BY_NAME)[number % len(METHODS_BY_NAME)]
            params = json.dumps(filled(METHODS_BY_NAME[name].params, chance))
            await client.send(f'{{"type":"req","id":"{number}","method":"{name}","params":{params}}}')
            answer = await client.answer(str(number))
            assert FAULT not in str(answer.error), (name, params)
            taken += answer.ok
        assert (await client.call("health"))["ok"]
    assert (
        200 < taken < (PER_METHOD - 4) * len(METHODS_BY_NAME)
    )  # neither is everything refused nor is everything taken
    assert client.numbers == list(range(1, len(client.numbers) + 1))


@pytest.mark.anyio
async def test_numbers_beyond_all_bounds_are_taken_or_refused_in_words(
    gateway: GatewayFixture, faults: list[str]
) -> None:
    tried = 0
    async with gateway.client() as client:
        await client.call("sessions.create", key=MAIN)
        await client.call("sessions.create", key=SPARE)
        for name, (_, params) in TABLE.items():
            for field in msgspec.structs.fields(METHODS_BY_NAME[name].params):
                for value in BEYOND if {int, float} & set(_kinds(field.type)) else ():
                    answer = await client.ask(name, {**params, field.encode_name: value})
                    assert FAULT not in str(answer.error), (name, field.encode_name, value)
                    tried += 1
    assert tried > 60


BEYOND = (-1, 0, 2**53, 2**63, 2**64, 10**30, 10**400, 1e-300, 1e308)


def _kinds(kind: Any) -> list[Any]:
    """A type, with what it is made of."""
    return [kind, *(deeper for part in get_args(kind) for deeper in _kinds(part))]


@pytest.mark.anyio
async def test_frames_of_any_kind_are_answered_or_end_the_connection(
    gateway: GatewayFixture, faults: list[str]
) -> None:
    chance = random.Random(SEED)
    codes: set[int] = set()
    for _ in range(RAW):
        async with gateway.client() as client:
            await client.send(raw(chance))
            codes.add(await _survives(client))
    assert codes == {0, 1000, 1008}
    async with gateway.client() as client:
        assert (await client.call("health"))["ok"]


async def _survives(client: Client) -> int:
    """0 if requests are still answered, else the code with which the connection was closed."""
    with suppress(ConnectionClosed):
        await client.send('{"type":"req","id":"after","method":"health"}')
    async with asyncio.timeout(BOUND):
        while not client.over and not client.has_answer("after"):
            await client.news()
    return 0 if client.has_answer("after") else (await client.closed())[0]


@pytest.mark.anyio
async def test_strangers_of_any_kind_are_let_in_or_turned_away(tmp_path: Path, faults: list[str]) -> None:
    chance = random.Random(SEED)
    codes: set[int] = set()
    async with open_gateway(tmp_path, settings={"gateway": {"auth": {"mode": "none"}}}) as gateway:
        for number in range(RAW):
            async with gateway.connect_unauthenticated() as client:
                if number % 2:
                    spoken = connect_params() if number % 10 == 1 else {}
                    await client.start("connect", {**filled(ConnectParams, chance), **spoken})
                else:
                    await client.send(raw(chance))
                codes.add(await _survives(client))
        async with gateway.client() as client:
            assert (await client.call("health"))["ok"]
    assert codes <= {0, 1000, 1002, 1008}
    assert {0, 1000, 1008} <= codes


@pytest.mark.anyio
async def test_frames_of_many_megabytes_are_refused_and_not_kept(
    gateway: GatewayFixture, faults: list[str]
) -> None:
    process = psutil.Process()
    large = "x" * (7 * MIB)
    async with gateway.client() as client:
        error = await client.refused("chat.send", sessionKey="main", message=large, idempotencyKey="k")
        assert error["details"]["type"] == "too_large"
        before = process.memory_info().rss
        for number in range(12):
            error = await client.refused(
                "chat.send", sessionKey="main", message=large, idempotencyKey=f"{number}"
            )
            assert error["details"]["type"] == "too_large"
            await client.refused("sessions.resolve", key=large, label=large[:1])
        assert process.memory_info().rss - before < 120 * MIB
        await client.send(large)
        assert (await client.closed())[0] == 1000
    async with gateway.client() as client:
        with suppress(ConnectionClosed):
            await client.send(" " * (frames.MAX_FRAME_BYTES + 1))
        assert (await client.closed())[0] == 1009
    async with gateway.client() as client:
        assert (await client.call("health"))["ok"]


# --- HTTP ---


@contextmanager
def elsewhere(path: Path) -> Generator[GatewayFixture]:
    """A gateway in a thread of its own, for a client that blocks."""
    ready, over = threading.Event(), threading.Event()
    found: list[GatewayFixture] = []

    async def host() -> None:
        async with open_gateway(path, settings=ALL_ENDPOINTS) as gateway:
            found.append(gateway)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(host()))
    thread.start()
    try:
        assert ready.wait(BOUND)
        yield found[0]
    finally:
        over.set()
        thread.join(BOUND)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # the gateway in its thread may
@pytest.mark.requirement("W4", "W5")
def test_requests_of_any_kind_are_answered_as_the_document_says(tmp_path: Path, faults: list[str]) -> None:
    document = openapi.build_document()
    schema: Any = schemathesis.openapi.from_dict(document)
    tried = Counter[str]()
    with elsewhere(tmp_path) as gateway:
        for result in schema.get_all_operations():
            operation = result.ok()
            token = HOOK_TOKEN if operation.path.startswith("/hooks") else gateway.owner
            _attempt(operation, gateway.served.url.replace("ws://", "http://"), token, tried)
    assert set(tried) == set(document["paths"])
    assert sum(tried.values()) > 50


def _attempt(operation: Any, url: str, token: str, tried: Counter[str]) -> None:
    wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @settings(
        max_examples=8,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy() | wrong)
    def attempt(case: Any) -> None:
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=BOUND)
        tried[case.path] += 1
        assert response.status_code < 500, (case.path, case.body, response.text)

    attempt()
