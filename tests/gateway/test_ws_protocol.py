"""The WebSocket protocol: who is let in and how others are turned away, closed parameters, liveness, slow clients."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.exceptions import InvalidStatus

from antiphon import __version__
from antiphon.access import Caller
from antiphon.clock import ManualClock
from antiphon.config.addresses import is_loopback
from antiphon.gateway import health
from antiphon.gateway.http.limits import PendingPeers
from antiphon.gateway.methods import METHODS_BY_NAME
from antiphon.gateway.ws import connection, devices, frames, handshake, server
from support.app_fixture import BOUND, MAIN, OPERATOR, wait_for_event, wait_until
from support.gateway_ws import (
    ADMIN,
    READ,
    WRITE,
    Answer,
    Client,
    GatewayFixture,
    connect_params,
    open_gateway,
)

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W1")]


async def turned_away(gateway: GatewayFixture, params: dict[str, Any], **options: Any) -> tuple[Answer, int]:
    """What a refused `connect` hears, and the code the connection is closed with."""
    async with gateway.connect_unauthenticated(**options) as client:
        answer = await client.ask("connect", params)
        assert not answer.ok
        return answer, (await client.closed())[0]


def with_token(gateway: GatewayFixture, **changes: Any) -> dict[str, Any]:
    return connect_params(auth={"token": gateway.owner}, **changes)


# --- the first words ---


async def test_the_gateway_speaks_first_with_a_challenge(gateway: GatewayFixture) -> None:
    async with (
        gateway.connect_unauthenticated() as one,
        gateway.connect_unauthenticated(path="/any/path?x=1") as other,
    ):
        first, second = await one.event("connect.challenge"), await other.event("connect.challenge")
    assert isinstance(first["ts"], int)
    assert first["ts"] > 0
    assert len(first["nonce"]) >= 32
    assert first["nonce"] != second["nonce"]
    assert "seq" not in one.events[0]


@pytest.mark.parametrize(
    ("least", "most", "spoken"), [(3, 3, 3), (4, 4, 4), (3, 4, 4), (1, 3, 3), (4, 99, 4)]
)
async def test_the_newest_protocol_that_both_speak_is_spoken(
    gateway: GatewayFixture, least: int, most: int, spoken: int
) -> None:
    async with gateway.client(minProtocol=least, maxProtocol=most) as client:
        assert client.hello["protocol"] == spoken


@pytest.mark.parametrize(("least", "most"), [(1, 2), (5, 9), (4, 3)])
async def test_no_common_protocol_is_said_with_what_is_spoken_here(
    gateway: GatewayFixture, least: int, most: int
) -> None:
    answer, code = await turned_away(gateway, with_token(gateway, minProtocol=least, maxProtocol=most))
    assert code == 1002
    assert answer.error["code"] == "INVALID_REQUEST"
    assert answer.error["message"].startswith("protocol mismatch")
    details = answer.error["details"]
    assert (details["code"], details["expectedProtocol"]) == ("PROTOCOL_MISMATCH", 4)
    assert (details["clientMinProtocol"], details["clientMaxProtocol"]) == (least, most)


async def test_protocol_3_knows_no_forbidden(gateway: GatewayFixture) -> None:
    token = gateway.issue(READ)
    async with gateway.client(token, minProtocol=3, maxProtocol=3) as old, gateway.client(token) as new:
        errors = [await client.refused("chat.send", **SEND) for client in (old, new)]
    assert [error["code"] for error in errors] == ["INVALID_REQUEST", "FORBIDDEN"]
    assert {error["message"] for error in errors} == {"missing scope: operator.write"}
    assert errors[1]["details"]["code"] == "MISSING_SCOPE"


SEND = {"sessionKey": "main", "message": "hello", "idempotencyKey": "k"}


async def test_hello_lists_the_features_and_limits_of_the_gateway(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        hello = client.hello
    assert hello["type"] == "hello-ok"
    assert hello["server"]["version"] == __version__
    assert hello["server"]["connId"]
    assert hello["features"]["methods"] == sorted(METHODS_BY_NAME)
    assert set(hello["features"]["events"]) >= {
        "chat",
        "agent",
        "session.message",
        "sessions.changed",
        "tick",
    }
    assert hello["auth"] == {"role": "operator", "scopes": [ADMIN]}
    assert hello["policy"] == {
        "maxPayload": frames.MAX_FRAME_BYTES,
        "maxBufferedBytes": 52_428_800,
        "tickIntervalMs": 30_000,
        "attachments": hello["policy"]["attachments"],
    }
    snapshot = hello["snapshot"]
    assert snapshot["sessionDefaults"]["mainSessionKey"] == MAIN
    assert snapshot["sessionDefaults"]["defaultAgentId"] == "main"
    assert snapshot["health"]["ok"] is True
    assert set(snapshot["stateVersion"]) == {"presence", "health"}
    assert snapshot["uptimeMs"] >= 0
    assert gateway.owner not in str(hello)


# --- turned away: every row of the table ---


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("health", {}, "connect"),
        ("connect", {}, "minProtocol"),
        ("connect", connect_params(role="king"), "at /role"),
        ("connect", connect_params(surprise=1), "at root: unexpected property 'surprise'"),
        ("connect", connect_params(client={"id": "x"}), "at /client: must have required property 'version'"),
        ("connect", connect_params(minProtocol="3"), "at /minProtocol: must be int, not str"),
    ],
)
async def test_a_wrong_first_request_is_answered_and_ends_the_connection(
    gateway: GatewayFixture, method: str, params: dict[str, Any], says: str
) -> None:
    async with gateway.connect_unauthenticated() as client:
        answer = await client.ask(method, params)
        assert answer.error["code"] == "INVALID_REQUEST"
        assert says in answer.error["message"]
        assert (await client.closed())[0] == 1008


FRAMES = [
    ("hello", 1000), ("", 1000), ("{", 1000), (b"\xff\xfe", 1000), ("nan", 1000), ('{"type":"req"', 1000),
    ("[]", 1008), ("1", 1008), ("null", 1008), ('{"type":"req"}', 1008), ('{"type":"res","id":"1","ok":true}', 1008),
    ('{"type":"req","id":1,"method":"connect"}', 1008), ('{"type":"req","id":"1","method":"health","more":1}', 1008),
    ('{"id":"1","method":"health"}', 1008), ("[" * 10_000, 1008), ("[" * 20_000 + "]" * 20_000, 1008),
]  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["before connect", "after connect"])
async def test_what_is_no_json_ends_with_1000_and_json_that_is_no_request_with_1008(
    gateway: GatewayFixture, known: bool
) -> None:
    for frame, code in FRAMES:
        async with gateway.client() if known else gateway.connect_unauthenticated() as client:
            await client.send(frame)
            assert (await client.closed())[0] == code, frame[:60]
    async with gateway.client() as client:
        assert (await client.call("health"))["ok"]


async def test_what_is_nested_too_deeply_is_refused(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        nested = "[" * 900 + "]" * 900
        for name, params in (("health", nested), ("cron.add", f'{{"name":"n","schedule":{nested}}}')):
            await client.send(f'{{"type":"req","id":"{name}","method":"{name}","params":{params}}}')
            error = (await client.answer(name)).error
            assert error["code"] == "INVALID_REQUEST"
            assert error["message"].startswith(f"invalid {name} params")
        depth = 200_000
        await client.send(f'{{"type":"req","id":"1","method":"health","params":{"[" * depth}{"]" * depth}}}')
        assert (await client.closed())[0] == 1008


@pytest.mark.requirement("SEC14")
async def test_a_stranger_may_not_say_much(gateway: GatewayFixture) -> None:
    for padding in ("x" * 70_000, "é" * 40_000):  # the second is not that many characters, but as many bytes
        async with gateway.connect_unauthenticated() as client:
            await client.start("connect", with_token(gateway, userAgent=padding))
            assert (await client.closed())[0] == 1009
    async with gateway.client(userAgent="x" * 60_000) as client:
        big = await client.refused("sessions.resolve", key="k" * 70_000)
        assert big["code"] == "INVALID_REQUEST"


async def test_a_silent_connection_is_closed(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECT_TIMEOUT_SECONDS", 0.02)
    async with gateway.connect_unauthenticated() as client:
        assert await client.closed() == (1008, "handshake timeout")


async def test_a_second_connect_is_refused_and_changes_nothing(gateway: GatewayFixture) -> None:
    async with gateway.client(gateway.issue(READ)) as client:
        error = await client.refused("connect", **with_token(gateway))
        assert error["message"].startswith("connect is only valid as the first request")
        assert (await client.refused("chat.send", **SEND))["message"] == "missing scope: operator.write"


# --- secrets ---


@pytest.mark.requirement("W7")
@pytest.mark.parametrize(
    ("auth", "code"),
    [
        ({}, "AUTH_TOKEN_MISSING"),
        ({"token": ""}, "AUTH_TOKEN_MISSING"),
        ({"deviceToken": "x"}, "AUTH_TOKEN_MISSING"),
        ({"token": "wrong"}, "AUTH_TOKEN_MISMATCH"),
        ({"password": "wrong"}, "AUTH_TOKEN_MISMATCH"),
        ({"token": "wrong", "password": "wrong", "deviceToken": "x"}, "AUTH_TOKEN_MISMATCH"),
    ],
)
async def test_a_connection_without_the_token_is_refused(
    gateway: GatewayFixture, auth: dict[str, str], code: str
) -> None:
    answer, closed = await turned_away(gateway, connect_params(auth=auth))
    assert (answer.error["code"], closed) == ("INVALID_REQUEST", 1008)
    assert answer.error["message"].startswith("unauthorized: gateway token")
    assert answer.error["details"]["code"] == code


@pytest.mark.requirement("W7")
async def test_the_password_mode_takes_the_password_and_no_token(tmp_path: Path) -> None:
    settings = {"gateway": {"auth": {"mode": "password", "password": "open sesame"}}}
    async with open_gateway(tmp_path, settings=settings) as gateway:
        for auth, code in (
            ({}, "AUTH_PASSWORD_MISSING"),
            ({"password": "wrong"}, "AUTH_PASSWORD_MISMATCH"),
            ({"token": gateway.owner}, "AUTH_PASSWORD_MISMATCH"),
        ):
            answer, closed = await turned_away(gateway, connect_params(auth=auth))
            assert (answer.error["details"]["code"], closed) == (code, 1008)
        for field in ("password", "token"):  # clients put the secret into either
            async with gateway.connect_unauthenticated() as client:
                hello = await client.call("connect", **connect_params(auth={field: "open sesame"}))
                assert hello["auth"]["scopes"] == [ADMIN]


@pytest.mark.requirement("W7", "SEC2")
async def test_without_credentials_this_machine_gets_in_and_pages_of_others_do_not(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, settings={"gateway": {"auth": {"mode": "none"}}}) as gateway:
        async with gateway.connect_unauthenticated() as client:
            hello = await client.call("connect", **connect_params())
            assert hello["auth"]["scopes"] == [ADMIN]
            assert hello["snapshot"]["authMode"] == "none"
        async with gateway.connect_unauthenticated() as client:
            hello = await client.call("connect", **connect_params(scopes=[READ]))
            assert await _may(client) == {READ}
        answer, closed = await turned_away(gateway, connect_params(), origin="http://rebound.example:18789")
        assert (answer.error["details"]["code"], closed) == ("CONTROL_UI_ORIGIN_NOT_ALLOWED", 1008)


@pytest.mark.requirement("W7")
async def test_a_token_of_the_configuration_replaces_the_one_of_the_file(tmp_path: Path) -> None:
    async with open_gateway(
        tmp_path, settings={"gateway": {"auth": {"token": "from the config"}}}
    ) as gateway:
        answer, _ = await turned_away(gateway, with_token(gateway))
        assert answer.error["details"]["code"] == "AUTH_TOKEN_MISMATCH"
        async with gateway.client("from the config") as client:
            assert client.hello["auth"]["scopes"] == [ADMIN]


@pytest.mark.requirement("W7", "SEC9")
@pytest.mark.parametrize(
    "auth", [{"mode": "password", "password": "open sesame"}, {"mode": "token", "token": "open sesame"}]
)
async def test_guessing_is_stopped_for_a_minute_even_for_who_then_guesses_right(
    tmp_path: Path, auth: dict[str, str]
) -> None:
    clock = ManualClock()
    right = connect_params(auth={"token": "open sesame"})
    async with open_gateway(tmp_path, clock=clock, settings={"gateway": {"auth": auth}}) as gateway:
        for n in range(10):
            answer, _ = await turned_away(
                gateway, connect_params(auth={"token": f"guess {n}", "deviceToken": "x"})
            )
            assert answer.error["details"]["code"] == f"AUTH_{auth['mode'].upper()}_MISMATCH"
        answer, closed = await turned_away(gateway, right)
        assert (answer.error["details"]["code"], closed) == ("AUTH_RATE_LIMITED", 1008)
        assert 0 < answer.error["retryAfterMs"] <= 60_000
        clock.advance(seconds=59)
        assert (await turned_away(gateway, right))[0].error["details"]["code"] == "AUTH_RATE_LIMITED"
        clock.advance(seconds=2)
        async with gateway.client("open sesame") as client:
            assert client.hello["type"] == "hello-ok"


@pytest.mark.requirement("W7")
async def test_forgetting_the_token_does_not_lock_the_owner_out(gateway: GatewayFixture) -> None:
    for _ in range(12):
        await turned_away(gateway, connect_params())
    async with gateway.client() as client:
        assert client.hello["type"] == "hello-ok"


@pytest.mark.requirement("W7")
async def test_a_revoked_token_is_not_let_in_any_more(gateway: GatewayFixture) -> None:
    token = gateway.issue(READ)
    async with gateway.client(token) as client:
        assert client.hello["auth"]["scopes"] == [READ]
    gateway.tokens.revoke_token(gateway.tokens.records[-1].name)
    answer, _ = await turned_away(gateway, connect_params(auth={"token": token}))
    assert answer.error["details"]["code"] == "AUTH_TOKEN_MISMATCH"


@pytest.mark.requirement("W7", "SEC1")
async def test_pages_of_other_origins_are_turned_away_even_with_the_token(tmp_path: Path) -> None:
    settings = {"gateway": {"controlUi": {"allowedOrigins": ["https://mine.example"]}}}
    async with open_gateway(tmp_path, settings=settings) as gateway:
        own = gateway.served.url.replace("ws://", "http://")
        for origin in ("https://evil.example", own.replace("127.0.0.1", "127.0.0.1.evil.example"), "null"):
            answer, closed = await turned_away(gateway, with_token(gateway), origin=origin)
            assert answer.error["code"] == "INVALID_REQUEST"
            assert (answer.error["details"]["code"], closed) == ("CONTROL_UI_ORIGIN_NOT_ALLOWED", 1008)
        for origin in (own, own.replace("127.0.0.1", "localhost"), "https://mine.example"):
            async with gateway.client(origin=origin) as client:
                assert client.hello["type"] == "hello-ok"


# --- scopes ---

CLOSURE = {READ: {READ}, WRITE: {READ, WRITE}, ADMIN: {READ, WRITE, ADMIN}}


@pytest.mark.requirement("W7", "SEC3")
@pytest.mark.parametrize("record", [READ, WRITE, ADMIN])
async def test_scopes_are_what_was_asked_for_and_the_record_has(gateway: GatewayFixture, record: str) -> None:
    token = gateway.issue(record)
    wishes: list[list[str]] = [[], [READ], [WRITE], [ADMIN], [READ, ADMIN], ["operator.pairing", READ], ["*"]]
    for wanted in wishes:
        async with gateway.client(token, scopes=wanted) as client:
            asked = set[str]().union(*(CLOSURE.get(scope, set()) for scope in wanted))
            assert _effective(client.hello["auth"]["scopes"]) == asked & CLOSURE[record]
            assert await _may(client) == asked & CLOSURE[record]
    async with gateway.client(token) as client:  # who does not ask gets what the record has
        assert await _may(client) == CLOSURE[record]


def _effective(scopes: list[str]) -> set[str]:
    return set(Caller.operator(scopes).scopes) & {READ, WRITE, ADMIN}


async def _may(client: Client) -> set[str]:
    """By trying, not by what was said."""
    tries: dict[str, tuple[str, dict[str, str]]] = {
        READ: ("health", {}),
        WRITE: ("chat.abort", {"sessionKey": "main"}),
        ADMIN: ("cron.remove", {"id": "x"}),
    }
    answers = {scope: await client.ask(method, params) for scope, (method, params) in tries.items()}
    return {scope for scope, answer in answers.items() if not _lacks_scope(answer)}


def _lacks_scope(answer: Answer) -> bool:
    return not answer.ok and answer.error["details"].get("code") == "MISSING_SCOPE"


@pytest.mark.requirement("W7")
async def test_a_node_has_a_session_of_its_own_and_no_scopes(gateway: GatewayFixture) -> None:
    async with gateway.client(), gateway.client(role="node") as client:
        assert client.hello["auth"] == {"role": "node", "scopes": []}
        assert await _may(client) == set()
        assert client.hello["snapshot"]["presence"] == []
    async with gateway.client() as owner:
        listed = await owner.call("sessions.list", kinds=["node"])
        assert [row["sessionKind"] for row in listed["sessions"]] == ["node"]


@pytest.mark.requirement("W7")
async def test_a_token_that_may_only_read_founds_no_session_by_calling_itself_a_node(
    gateway: GatewayFixture,
) -> None:
    params = connect_params(role="node", auth={"token": gateway.issue(READ)})
    answer, closed = await turned_away(gateway, params)
    assert (answer.error["message"], closed) == ("missing scope: operator.write", 1008)
    async with gateway.client() as owner:
        assert (await owner.call("sessions.list"))["count"] == 0


async def test_a_node_with_an_impossible_name_is_turned_away(gateway: GatewayFixture) -> None:
    for name in ("\u0000", " ", "a:b|c\n"):
        client = {"id": name, "version": "1", "platform": "x", "mode": "node"}
        async with gateway.connect_unauthenticated() as stranger:
            answer = await stranger.ask("connect", with_token(gateway, role="node", client=client))
            if not answer.ok:
                assert answer.error["code"] == "INVALID_REQUEST"
                assert (await stranger.closed())[0] == 1008


# --- devices ---


@dataclass(frozen=True, slots=True)
class Pair:
    """A device's key pair."""

    private: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    @property
    def id(self) -> str:
        return hashlib.sha256(self.public).hexdigest()

    def signs(self, form: str, token: str, challenge: Any, **changes: Any) -> dict[str, Any]:
        """`connect` parameters with a signature of that form; `changes` are told but not signed."""
        params = connect_params(scopes=[READ, WRITE], auth={"token": token})
        params["client"]["deviceFamily"] = "Desk"
        client, at = params["client"], challenge["ts"]
        claims = [self.id, client["id"], client["mode"], "operator", f"{READ},{WRITE}", str(at), token]
        extra = {"v1": [], "v2": [challenge["nonce"]], "v3": [challenge["nonce"], "linux", "desk"]}[form]
        signature = self.private.sign("|".join([form, *claims, *extra]).encode())
        device = {
            "id": self.id,
            "publicKey": unpadded(self.public),
            "signature": unpadded(signature),
            "signedAt": at,
        }
        if form != "v1":
            device["nonce"] = challenge["nonce"]
        return {**params, "device": {**device, **changes}}


def unpadded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


PAIR = Pair(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


@pytest.mark.parametrize("form", ["v1", "v2", "v3"])
async def test_a_device_that_signed_the_challenge_is_known_by_its_id(
    gateway: GatewayFixture, form: str
) -> None:
    async with gateway.connect_unauthenticated() as client:
        challenge = await client.event("connect.challenge")
        hello = await client.call("connect", **PAIR.signs(form, gateway.owner, challenge))
        assert hello["auth"]["scopes"] == [READ, WRITE]
        assert [entry["deviceId"] for entry in await client.call("system-presence")] == [PAIR.id]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"publicKey": "AAAA"}, "PUBLIC_KEY_INVALID"),
        ({"publicKey": "not base64 !"}, "PUBLIC_KEY_INVALID"),
        ({"publicKey": "é"}, "PUBLIC_KEY_INVALID"),
        ({"id": "0" * 64}, "DEVICE_ID_MISMATCH"),
        ({"signature": unpadded(bytes(64))}, "SIGNATURE_INVALID"),
        ({"signature": "AAAA"}, "SIGNATURE_INVALID"),
        ({"nonce": "another"}, "NONCE_MISMATCH"),
        ({"nonce": None}, "SIGNATURE_INVALID"),  # signed with a nonce, told without
    ],
)
async def test_a_device_that_pretends_is_turned_away_although_the_token_is_right(
    gateway: GatewayFixture, changes: dict[str, Any], code: str
) -> None:
    async with gateway.connect_unauthenticated() as client:
        challenge = await client.event("connect.challenge")
        answer = await client.ask("connect", PAIR.signs("v2", gateway.owner, challenge, **changes))
        assert answer.error["details"]["code"] == f"DEVICE_AUTH_{code}"
        assert (await client.closed())[0] == 1008


async def test_a_signature_for_other_claims_does_not_fit(gateway: GatewayFixture) -> None:
    async with gateway.connect_unauthenticated() as client:
        challenge = await client.event("connect.challenge")
        params = PAIR.signs("v3", gateway.owner, challenge)
        answer = await client.ask("connect", {**params, "scopes": [ADMIN]})
        assert answer.error["details"]["code"] == "DEVICE_AUTH_SIGNATURE_INVALID"


@pytest.mark.parametrize("seconds", [-121, 121])
async def test_a_signature_of_another_time_is_not_taken(tmp_path: Path, seconds: int) -> None:
    clock = ManualClock()
    async with open_gateway(tmp_path, clock=clock) as gateway, gateway.connect_unauthenticated() as client:
        challenge = await client.event("connect.challenge")
        clock.advance(seconds=seconds)
        answer = await client.ask("connect", PAIR.signs("v2", gateway.owner, challenge))
        assert answer.error["details"]["code"] == "DEVICE_AUTH_SIGNATURE_EXPIRED"


async def test_only_this_machine_may_leave_the_challenge_unsigned(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "is_loopback", lambda _: False)  # pyright: ignore
    async with gateway.connect_unauthenticated() as client:
        challenge = await client.event("connect.challenge")
        answer = await client.ask("connect", PAIR.signs("v1", gateway.owner, challenge))
        assert answer.error["details"]["code"] == "DEVICE_AUTH_NONCE_REQUIRED"
    assert devices.MAX_CLOCK_SKEW_MS == 120_000


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("127.evil.com", False), ("10.0.0.1", False)],
)
def test_what_is_local_is_an_address_and_not_a_prefix(address: str, local: bool) -> None:
    assert is_loopback(address) is local


# --- requests ---


async def test_every_method_names_an_unknown_parameter(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        for name in METHODS_BY_NAME:
            error = await client.refused(name, x=1)
            assert error["code"] == "INVALID_REQUEST"
            assert error["message"].startswith(f"invalid {name} params: at root: unexpected property 'x'"), (
                name
            )


async def test_a_misspelt_parameter_is_answered_with_the_one_that_was_meant(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        wrong = await client.refused("chat.send", sessionKey="main", mesage="x")
        assert "Did you mean 'message'?" in wrong["message"]
        lacking = await client.refused("chat.send", sessionKey="main")
        assert "Valid parameters: 'sessionKey', 'message'" in lacking["message"]


async def test_half_a_character_spoils_neither_its_message_nor_the_connection(
    gateway: GatewayFixture,
) -> None:
    """As a client that cuts texts in UTF-16 sends it."""
    async with gateway.client() as client:
        await client.call("sessions.create", key="main")
        params = r'{"sessionKey": "main", "message": "cut \ud83d off"}'
        await client.send(f'{{"type": "req", "id": "1", "method": "chat.inject", "params": {params}}}')
        assert (await client.answer("1")).ok
        (said,) = (await client.call("chat.history", sessionKey="main"))["messages"]
        assert said["content"] == [{"type": "text", "text": "cut \ufffd off"}]


async def test_every_method_names_the_path_of_a_value_of_the_wrong_type(
    gateway: GatewayFixture,
) -> None:
    tried = 0
    async with gateway.client() as client:
        for name, method in METHODS_BY_NAME.items():
            for field in msgspec.structs.fields(method.params):
                if field.type is Any:
                    continue
                tried += 1
                error = await client.refused(name, **{field.encode_name: [[]]})
                where = f"invalid {name} params: at /{field.encode_name}"
                assert error["message"].startswith(where), (name, field.encode_name, error)
    assert tried > 100


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("sessions.list", {"limit": 0}, "at /limit: must be >= 1"),
        ("chat.history", {"sessionKey": "main", "limit": 1001}, "at /limit: must be <= 1000"),
        ("chat.history", {}, "at root: must have required property 'sessionKey'"),
        ("chat.send", {**SEND, "message": 1}, "at /message: must be str, not int"),
        ("chat.send", {**SEND, "attachments": [{}, {"mimeType": 1}]}, "at /attachments/1/mimeType: must be"),
        ("sessions.preview", {"keys": []}, "at /keys"),
        ("sessions.preview", {"keys": ["a", 2]}, "at /keys/1: must be str, not int"),
        ("agent", {"message": "x", "idempotencyKey": "k", "inputProvenance": {"kind": 1}}, "at /inputProvenance/kind"),
    ],
)  # fmt: skip
async def test_errors_say_where_and_what_would_be_right(
    gateway: GatewayFixture, method: str, params: dict[str, Any], says: str
) -> None:
    async with gateway.client() as client:
        error = await client.refused(method, **params)
        assert error["message"].startswith(f"invalid {method} params: {says}")


@pytest.mark.parametrize("params", [[], 1, "x", True])
async def test_parameters_are_an_object(gateway: GatewayFixture, params: object) -> None:
    async with gateway.client() as client:
        await client.send({"type": "req", "id": "1", "method": "health", "params": params})
        answer = await client.answer("1")
        assert answer.error["message"].startswith("invalid health params: at root: must be object")


async def test_parameters_may_be_left_out_or_null(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.send({"type": "req", "id": "1", "method": "health"})
        await client.send(
            {"type": "req", "id": "2", "method": "health", "params": None, "traceparent": "00-x"}
        )
        assert [(await client.answer(request)).ok for request in ("1", "2")] == [True, True]


async def test_an_unknown_method_is_named(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        error = await client.refused("sessions.dance")
        assert error["code"] == "INVALID_REQUEST"
        assert error["message"].startswith("unknown method: sessions.dance")


async def test_binary_frames_are_read_like_texts(gateway: GatewayFixture) -> None:
    async with gateway.client() as client:
        await client.send(b'{"type":"req","id":"b","method":"health"}')
        assert (await client.answer("b")).ok


async def test_waiting_requests_delay_no_other_and_are_bounded(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_WAITING_REQUESTS_PER_CONNECTION", 3)
    async with gateway.client() as client:
        waits = [await client.start("agent.wait", {"runId": f"r{n}", "timeoutMs": 60_000}) for n in range(4)]
        refused = await client.answer(waits[3])
        assert (refused.error["code"], refused.error["retryable"]) == ("UNAVAILABLE", True)
        assert (await client.call("health"))["ok"]


async def test_too_many_connections_are_told_to_come_back(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    async with gateway.client():
        with pytest.raises(InvalidStatus):
            async with gateway.connect_unauthenticated():
                pass


async def test_the_oldest_stranger_makes_room_for_another(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_UNAUTHENTICATED_CONNECTIONS", 2)
    async with gateway.connect_unauthenticated() as first, gateway.connect_unauthenticated() as second:
        await first.event("connect.challenge")
        await second.event("connect.challenge")
        async with gateway.connect_unauthenticated() as third:
            await third.event("connect.challenge")
            assert await first.closed() == (1013, "try again later")
            async with gateway.client() as client:
                assert client.hello["type"] == "hello-ok"
                assert await second.closed() == (1013, "try again later")
                assert not third.over


def test_the_address_that_has_most_strangers_loses_its_oldest() -> None:
    peers, evicted = PendingPeers(), list[str]()
    for name, address in (("b1", "b"), ("a1", "a"), ("a2", "a"), ("c1", "c"), ("a3", "a")):
        peers.add(address, partial(evicted.append, name))
    assert [peers.evict_one() for _ in range(5)] == [True] * 5
    assert evicted == ["a1", "a2", "b1", "c1", "a3"]
    assert not peers.evict_one()
    ticket = peers.add("a", partial(evicted.append, "a4"))
    peers.discard(ticket)
    peers.discard(ticket)
    assert (len(peers), peers.evict_one()) == (0, False)


def test_a_peer_with_many_addresses_of_one_network_loses_its_own() -> None:
    """An IPv6 host has a /64 to choose from, and a socket for both protocols shows IPv4 addresses as IPv6."""
    peers, evicted = PendingPeers(), list[str]()
    for name, address in (
        ("other", "2001:db8:0:2::1"),
        ("host1", "2001:db8:0:1::1"),
        ("host2", "2001:db8:0:1:ffff::2"),
        ("host3", "2001:db8:0:1::3"),
        ("v4a", "192.0.2.1"),
        ("v4b", "::ffff:192.0.2.1"),
        ("v4other", "::ffff:192.0.2.2"),
        ("link", "fe80::1%eth0"),
    ):
        peers.add(address, partial(evicted.append, name))
    assert [peers.evict_one() for _ in range(8)] == [True] * 8
    assert evicted == ["host1", "host2", "v4a", "other", "host3", "v4b", "v4other", "link"]


# --- liveness ---


async def test_ticks_come_as_often_as_hello_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "TICK_INTERVAL_MS", 20)
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        assert client.hello["policy"]["tickIntervalMs"] == 20
        ticks = await client.take("tick", 3)
        assert [tick["ts"] for tick in ticks] == sorted(tick["ts"] for tick in ticks)


@pytest.mark.requirement("W7")
async def test_who_is_connected_by_a_token_that_is_revoked_is_hung_up_on_at_once(
    gateway: GatewayFixture,
) -> None:
    async with gateway.client(gateway.issue(READ)) as client, gateway.client() as owner:
        gateway.tokens.revoke_token(gateway.tokens.records[-1].name)
        assert await client.closed() == (1008, "the token was revoked")
        assert client.list_events("tick") == [], "it took as long as from one tick to the next"
        await owner.settled()


async def test_presence_says_who_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PRESENCE_INTERVAL_SECONDS", 0.0)
    async with open_gateway(tmp_path) as gateway, gateway.client() as client:
        async with gateway.client(client={"id": "guest", "version": "9", "platform": "x", "mode": "ui"}):
            while "guest" not in [entry["host"] for entry in (await client.event("presence"))["presence"]]:
                pass
            entries = {entry["host"]: entry for entry in await client.call("system-presence")}
            assert (entries["guest"]["version"], entries["guest"]["mode"]) == ("9", "ui")
        while "guest" in [entry["host"] for entry in (await client.event("presence"))["presence"]]:
            pass
        frame = next(frame for frame in reversed(client.events) if frame["event"] == "presence")
        assert frame["stateVersion"]["presence"] > 1


async def test_stopping_says_goodbye_and_to_come_back(tmp_path: Path) -> None:
    async with AsyncExitStack() as clients:
        async with open_gateway(tmp_path) as gateway:
            client = await clients.enter_async_context(gateway.client())
        goodbye = await client.event("shutdown")
        assert goodbye["reason"]
        assert goodbye["restartExpectedMs"] > 0
        assert await client.closed() == (1012, "service restart")


async def test_goodbye_is_said_after_what_was_still_to_be_said(gateway: GatewayFixture) -> None:
    """Also when it is the reader that is sending."""
    sent: list[str] = []
    sending, may_go = asyncio.Event(), asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["text"])
        sending.set()
        await may_go.wait()

    one = connection.WebSocketConnection("1", send, 0)
    writer = asyncio.create_task(one.run_writer())
    answering = asyncio.create_task(one.send_response("an answer"))
    await wait_for_event(sending)
    one.send_event('{"event":"shutdown"')
    one.close(1012, "service restart")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not writer.done()
    may_go.set()
    await asyncio.wait_for(asyncio.gather(writer, answering), BOUND)
    assert sent == ["an answer", '{"event":"shutdown","seq":1}']


async def test_who_goes_away_before_the_answer_is_no_fault(
    gateway: GatewayFixture, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        async with gateway.client() as client:
            for _ in range(20):
                await client.start("sessions.list")
            client.abort()
    async with gateway.client() as client:
        assert (await client.call("health"))["ok"]
        await wait_until(lambda: _count(gateway, 1))
    ours = [record for record in caplog.records if record.name.startswith("antiphon")]
    assert [record.getMessage() for record in ours if record.levelno >= logging.WARNING] == []


async def test_the_events_of_a_connection_are_numbered_without_holes(gateway: GatewayFixture) -> None:
    async with gateway.client() as client, gateway.client() as late:
        await client.call("sessions.subscribe")
        for word in ("one", "two"):
            sent = await client.call("chat.send", sessionKey="main", message=word, idempotencyKey=word)
            await client.event("chat", runId=sent["runId"], state="final")
        await client.call("sessions.unsubscribe")
        await client.settled()
        await late.settled()
    assert client.numbers == list(range(1, len(client.numbers) + 1))
    assert len(client.numbers) > len(late.numbers) > 0
    assert late.numbers == list(range(1, len(late.numbers) + 1))


# --- slow clients ---

LARGE = 300_000
MANY = 80  # together more than the system itself buffers between two sockets


async def test_a_client_that_does_not_read_is_dropped_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_BUFFERED_BYTES", 2_000_000)
    monkeypatch.setattr(connection, "LAGGING_SEND_QUEUE_BYTES", 100_000)
    settings = {"store": {"messageMaxBytes": 2 * LARGE}}
    async with open_gateway(tmp_path, settings=settings) as gateway, gateway.client() as quick:
        await quick.call("sessions.subscribe")
        await gateway.operations.sessions.open(OPERATOR, MAIN)
        async with gateway.connect_unauthenticated(reading=False) as slow:
            await _enter_without_reading(gateway, slow)
            for n in range(MANY):
                await gateway.operations.transcripts.inject(OPERATOR, MAIN, f"{n} " + "x" * LARGE)
                await quick.event("session.message", messageSeq=n + 1)  # the slow one delays no other
            await wait_until(lambda: _count(gateway, 1))
            assert (await quick.call("health"))["ok"]
            slow.read()
            code, _ = await slow.closed()
            assert code in (1006, 1008)
            heard = [event["messageSeq"] for event in slow.list_events("session.message")]
            assert heard == list(range(1, len(heard) + 1))
            assert len(heard) < MANY
            assert slow.numbers == list(range(1, len(slow.numbers) + 1))
        assert quick.numbers == list(range(1, len(quick.numbers) + 1))


async def _enter_without_reading(gateway: GatewayFixture, slow: Client) -> None:
    await slow.start("connect", with_token(gateway))
    await slow.start("sessions.subscribe")
    await wait_until(lambda: _count(gateway, 2))
    await wait_until(lambda: _subscribed(gateway, 2))


async def _count(gateway: GatewayFixture, number: int) -> bool:
    return len(gateway.served.hub.connections) == number


async def _subscribed(gateway: GatewayFixture, number: int) -> bool:
    return len(gateway.served.hub.connections.session_subscribers) == number


async def test_pieces_of_answers_are_left_out_for_who_lags_but_never_messages() -> None:
    sent: list[str] = []
    may_go = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["text"])
        await may_go.wait()

    lagging = connection.WebSocketConnection("1", send, 0)
    writer = asyncio.create_task(lagging.run_writer())
    lagging.send_event('{"a":"' + "x" * connection.LAGGING_SEND_QUEUE_BYTES + '"')
    lagging.send_event('{"piece":1', droppable=True)
    lagging.send_event('{"message":1')
    may_go.set()
    async with asyncio.timeout(BOUND):
        await lagging.wait_for_room()
        lagging.send_event('{"piece":2', droppable=True)
        lagging.close(1000, "")
        await writer
    assert sent[1:] == ['{"message":1,"seq":2}', '{"piece":2,"seq":3}']


@pytest.mark.requirement("W7", "SEC9")
async def test_a_client_with_an_old_token_does_not_lock_the_owner_out(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, clock=ManualClock()) as gateway:
        old = connect_params(auth={"token": "an old token that was long enough to be random"})
        codes = [(await turned_away(gateway, old))[0].error["details"]["code"] for _ in range(12)]
        assert codes == ["AUTH_TOKEN_MISMATCH"] * 10 + ["AUTH_RATE_LIMITED"] * 2
        async with gateway.client() as client, gateway.client(gateway.issue(READ)) as reader:
            assert (client.hello["type"], reader.hello["type"]) == ("hello-ok", "hello-ok")


@pytest.mark.requirement("W7", "SEC1")
async def test_pages_of_other_origins_cannot_use_up_the_places_of_others(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_FOREIGN_ORIGIN_CONNECTIONS", 2)
    evil = "http://evil.example"
    async with (
        gateway.connect_unauthenticated(origin=evil),
        gateway.connect_unauthenticated(origin=evil) as last,
    ):
        with pytest.raises(InvalidStatus, match="403"):
            async with gateway.connect_unauthenticated(origin=evil):
                pass
        async with gateway.client() as client:
            assert client.hello["type"] == "hello-ok"
        assert not (await last.ask("connect", with_token(gateway))).ok
        await last.closed()
        answer, _ = await turned_away(gateway, with_token(gateway), origin=evil)
        assert answer.error["details"]["code"] == "CONTROL_UI_ORIGIN_NOT_ALLOWED"
