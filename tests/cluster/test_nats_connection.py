"""Connecting to NATS: who we are, whom we trust, and what is said when it does not work."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import Any

import nkeys
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from antiphon.bus import SessionChanged
from antiphon.bus.nats import NatsBus
from antiphon.errors import AntiphonError, BusError, ConfigError
from antiphon.nats.connection import NatsConnection, NatsServers
from cluster.servers import free_ports, nats_server

pytestmark = pytest.mark.anyio

BOUND = 15.0
WORDS: dict[str, Any] = {"user": "choir", "password": "s3cret-word"}
LOCKED: dict[str, Any] = {"authorization": WORDS}


async def connect(servers: NatsServers, timeout: float = 0.0) -> None:
    """An event goes from one connection to another."""
    one, other = NatsBus(servers), NatsBus(servers)
    try:
        await one.start(timeout)
        await other.start(timeout)
        async with other.listen("sessions") as listener:
            one.publish("sessions", SessionChanged(session_key="k", reason="r"))
            assert await listener.get(BOUND) is not None
    finally:
        await one.stop()
        await other.stop()


async def refused(servers: NatsServers) -> str:
    """The one sentence, and what to do."""
    with pytest.raises(AntiphonError) as caught:
        await asyncio.wait_for(connect(servers), BOUND)
    assert caught.value.hint and "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_user_and_password() -> None:
    with nats_server(**LOCKED) as server:
        await connect(server.servers(**WORDS))
        await connect(NatsServers(url=f"nats://choir:s3cret-word@127.0.0.1:{server.port}"))
        wrong = "does not accept the credentials. Check the credentials in `bus`."
        assert wrong in await refused(server.servers())
        assert wrong in await refused(server.servers(user="choir", password="s3cret-other"))
        assert wrong in await refused(NatsServers(url=f"nats://choir:s3cret-x@127.0.0.1:{server.port}"))


async def test_wrong_credentials_are_not_tried_again() -> None:
    with nats_server(**LOCKED) as server, pytest.raises(BusError):
        await asyncio.wait_for(connect(server.servers(), timeout=600), BOUND)


async def test_a_token() -> None:
    with nats_server(authorization={"token": "s3cret"}) as server:
        await connect(server.servers(token="s3cret"))
        assert "does not accept" in await refused(server.servers(token="s3cret2"))


async def test_secrets_are_not_shown() -> None:
    servers = NatsServers(url="nats://u:s3cret@a:1, nats://s3cret@b:2", password="s3cret", token="s3cret")
    assert servers.format_without_secrets() == "nats://a:1, nats://b:2"
    assert "s3cret" not in repr(servers).replace(servers.url, "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:4222",
        "http://a:4222",
        "nats://",
        "nats://a:b",
        "nats://a:4222, b:4222",
        "nats://a:99999",
    ],
)
async def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the address of a NATS server\. Write bus\.url as"):
        await connect(NatsServers(url=url))


async def test_an_unreachable_server_is_reported() -> None:
    (port,) = free_ports(1)
    told = await refused(NatsServers(url=f"nats://127.0.0.1:{port}"))
    assert f"nats://127.0.0.1:{port} cannot be reached" in told and told.endswith(
        "Check bus.url, and that the server is running."
    )
    assert "cannot be reached" in await refused(NatsServers(url="nats://nobody.invalid:4222"))


async def test_start_waits_for_a_late_server() -> None:
    with nats_server() as server:
        await asyncio.to_thread(server.kill)
        connecting = asyncio.create_task(connect(server.servers(), timeout=BOUND))
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(connecting, BOUND)


async def test_a_server_that_is_not_nats_is_reported() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.org ready\r\n")
        writer.close()

    for talk, told in ((hang, "does not answer"), (chat, "cannot be reached")):
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as strange:
            port = strange.sockets[0].getsockname()[1]
            assert told in await refused(NatsServers(url=f"nats://127.0.0.1:{port}"))


async def test_one_reachable_server_of_several_is_enough() -> None:
    dead, other = free_ports(2)
    with nats_server() as server:
        url = f"nats://127.0.0.1:{dead},{server.url}, nats://127.0.0.1:{other}"
        for _ in range(5):
            await connect(NatsServers(url=url))


async def test_a_missing_nats_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "nats" or name.startswith("nats.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(ConfigError, match=r"scripts/extra cluster`\.$"):
        await NatsBus(NatsServers(url="nats://127.0.0.1:4222")).start()


async def test_the_connection_is_replaced_after_any_server_error() -> None:
    """nats-py gives up for good when a server sends it an error; we do not."""
    joins: asyncio.Queue[Any] = asyncio.Queue()

    async def joined(client: Any) -> None:
        joins.put_nowait(client)

    with nats_server() as server:
        link = NatsConnection(
            server.servers(), name="test", on_connected=joined, on_disconnected=lambda: None
        )
        await link.start()
        try:
            client = await asyncio.wait_for(joins.get(), BOUND)
            await client._process_err("'User Authentication Expired'")
            assert await asyncio.wait_for(joins.get(), BOUND) is not client
            assert await link.confirm_flushed(await asyncio.wait_for(link.wait_until_connected(), BOUND))
        finally:
            await link.stop()


async def test_a_failed_preparation_is_retried() -> None:
    attempts: asyncio.Queue[Any] = asyncio.Queue()

    async def joined(client: Any) -> None:
        attempts.put_nowait(client)
        if attempts.qsize() in (2, 3):
            raise ValueError("not yet")

    with nats_server() as server:
        link = NatsConnection(
            server.servers(), name="test", on_connected=joined, on_disconnected=lambda: None
        )
        await link.start()
        try:
            await (await link.wait_until_connected()).close()
            assert await asyncio.wait_for(link.wait_until_connected(), BOUND)
            assert attempts.qsize() == 4
        finally:
            await link.stop()


# --- credentials of an operator ---


def key_pair(prefix: int) -> Any:
    keys: Any = nkeys
    return keys.from_seed(keys.encode_seed(os.urandom(32), prefix))


def public(pair: Any) -> str:
    return bytes(pair.public_key).decode()


def token(issuer: Any, subject: str, name: str, nats: dict[str, Any]) -> str:
    """A JWT as NATS wants it."""

    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    claims = {"jti": name, "iat": 1, "iss": public(issuer), "name": name, "sub": subject, "nats": nats}
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    signed = ".".join(part(json.dumps(each).encode()) for each in (head, claims))
    return f"{signed}.{part(issuer.sign(signed.encode()))}"


async def test_credentials_from_a_file(tmp_path: Path) -> None:
    operator = key_pair(nkeys.PREFIX_BYTE_OPERATOR)
    account, user, stranger = (
        key_pair(prefix)
        for prefix in (nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER, nkeys.PREFIX_BYTE_ACCOUNT)
    )
    unlimited = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    account_claims = {"type": "account", "version": 2, "limits": unlimited}
    settings = {
        "operator": token(operator, public(operator), "operator", {"type": "operator", "version": 2}),
        "resolver": "MEMORY",
        "resolver_preload": {public(account): token(operator, public(account), "antiphon", account_claims)},
        "jetstream": False,
    }
    limits = {"subs": -1, "data": -1, "payload": -1}
    with nats_server(**settings) as server:
        for issuer, told in ((account, ""), (stranger, "does not accept the credentials")):
            jwt = token(issuer, public(user), "replica", {"type": "user", "version": 2, **limits})
            file = tmp_path / "replica.creds"
            file.write_text(
                f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{bytes(user.seed).decode()}\n------END USER NKEY SEED------\n"
            )
            if told:
                assert told in await refused(server.servers(credentials=file))
            else:
                await connect(server.servers(credentials=file))


# --- encryption ---

Signed = tuple[Path, Path, Path]


def certificate(folder: Path, names: list[x509.GeneralName]) -> Signed:
    """A certificate for these names, its key, and the authority that signed it."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority of a test")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)

    def build(
        name: x509.Name, public: ec.EllipticCurvePublicKey, *, authority: bool
    ) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(public)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        return builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)

    root = build(issuer, authority_key.public_key(), authority=True).sign(authority_key, hashes.SHA256())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats")])
    leaf = build(subject, key.public_key(), authority=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(names), critical=False)
    files = (folder / "leaf.pem", folder / "key.pem", folder / "authority.pem")
    files[0].write_bytes(leaf.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    files[2].write_bytes(root.public_bytes(serialization.Encoding.PEM))
    return files


def encrypted(signed: Signed) -> dict[str, Any]:
    return {"tls": {"cert_file": str(signed[0]), "key_file": str(signed[1])}, **LOCKED}


async def test_an_encrypted_connection(tmp_path: Path) -> None:
    signed = certificate(tmp_path, [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    with nats_server(**encrypted(signed)) as server:
        url = server.url.replace("nats://", "tls://")
        await connect(NatsServers(url=url, authority=signed[2], **WORDS))
        assert "cannot be trusted" in await refused(NatsServers(url=url, **WORDS))


async def test_a_certificate_for_another_name_is_not_trusted(tmp_path: Path) -> None:
    signed = certificate(tmp_path, [x509.DNSName("nats.example.org")])
    with nats_server(**encrypted(signed)) as server:
        assert "cannot be trusted" in await refused(server.servers(authority=signed[2], **WORDS))


async def test_credentials_are_not_sent_to_a_server_that_does_not_encrypt(tmp_path: Path) -> None:
    """Also when an attacker in between only removed the request to encrypt from its greeting."""
    said: list[bytes] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"x","version":"2.12.0","auth_required":true,"max_payload":1048576}\r\n'
        )
        said.append(await reader.read())
        writer.close()

    signed = certificate(tmp_path, [x509.DNSName("localhost")])
    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for servers in (
            NatsServers(url=f"tls://127.0.0.1:{port}", **WORDS),
            NatsServers(url=f"nats://127.0.0.1:{port}", authority=signed[2], **WORDS),
        ):
            assert "does not encrypt" in await refused(servers)
    assert b"".join(said) == b""


async def test_invalid_credential_and_certificate_files_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"authority": tmp_path / "none.pem"}, "none.pem could not be read .No such file"),
        ({"authority": empty}, "empty.pem contains no certificate"),
        ({"credentials": tmp_path / "none.creds"}, "none.creds could not be read .No such file"),
        ({"credentials": empty}, "empty.pem contains no credentials"),
    ]
    for given, told in cases:
        with pytest.raises(ConfigError, match=told):
            await connect(NatsServers(url="nats://127.0.0.1:4222", **given))
