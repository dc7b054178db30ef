"""What unauthenticated peers can do to a gateway: little, and nothing to its other clients."""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.gateway_attacks import (
    BOUND,
    CONTINUATION,
    MIB,
    PING,
    TEXT_UNFINISHED,
    AttackedGateway,
    HealthProbe,
    make_frame_head,
    reset_connection,
    send_until_refused,
    start_attacked_gateway,
)

pytestmark = [pytest.mark.sqlite_only, pytest.mark.requirement("W1", "SEC14")]

SECONDS = 6.0  # that an attack lasts, unless the gateway ends it
LATENCY = 2.0  # seconds within which another client is answered, however busy the machine; it was 20 and more
GROWTH = 96 * MIB  # of the process; it was gigabytes


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[AttackedGateway]:
    """One for all of them: it has to outlive every attack."""
    with start_attacked_gateway(tmp_path_factory.mktemp("attacked")) as running:
        yield running


def unfinished(size: int) -> Generator[bytes]:
    """A frame that says it has `size` bytes and never gets its last one."""
    yield make_frame_head(0x81, size)
    left = size - 1
    while left:
        piece = min(left, 256 * 1024)
        yield bytes(piece)
        left -= piece


def test_unfinished_first_frames_are_cut_short_and_leave_nothing_behind(gateway: AttackedGateway) -> None:
    before = gateway.resident_bytes
    most_taken = 0
    with HealthProbe(gateway) as witness:
        for _ in range(10):
            with ExitStack() as stack:
                for peer in gateway.silent(60, stack):
                    most_taken = max(most_taken, send_until_refused(peer, unfinished(8 * MIB)))
                    reset_connection(peer)
    assert witness.highest_resident_bytes - before < GROWTH
    assert witness.slowest < LATENCY
    assert most_taken < 8 * MIB - 1, "a stranger's frame of 8 MiB was read"


def test_a_stranger_cannot_fill_a_message_by_fragments(gateway: AttackedGateway) -> None:
    with gateway.raw() as peer:
        piece = make_frame_head(CONTINUATION, 16 * 1024) + bytes(16 * 1024)
        pieces = itertools.chain([make_frame_head(TEXT_UNFINISHED, 1) + b" "], itertools.repeat(piece, 512))
        assert send_until_refused(peer, pieces) < 8 * MIB
        assert ended(peer)


@pytest.mark.parametrize(
    ("first", "flood"),
    [
        (make_frame_head(TEXT_UNFINISHED, 1) + b" ", make_frame_head(CONTINUATION, 0)),
        (b"", make_frame_head(PING, 0)),
    ],
    ids=["empty continuations", "pings"],
)
def test_a_flood_of_empty_frames_delays_no_other_client(
    gateway: AttackedGateway, first: bytes, flood: bytes
) -> None:
    """At 0.5 MiB/s, as one small connection can."""
    burst = flood * (64 * 1024 // len(flood))
    with HealthProbe(gateway) as witness, gateway.raw() as peer:
        peer.sendall(first)
        begun = time.monotonic()
        for number in itertools.count(1):
            if send_until_refused(peer, [burst]) < len(burst) or time.monotonic() - begun > SECONDS:
                break
            select.select([], [], [], max(0.0, begun + number / 8 - time.monotonic()))
        assert ended(peer), "who sends nothing but empty frames is hung up on"
    assert witness.slowest < LATENCY


def test_pongs_do_not_pile_up_for_a_peer_that_never_reads(gateway: AttackedGateway) -> None:
    before = gateway.resident_bytes
    flood = (make_frame_head(PING, 125) + bytes(125)) * 500
    with HealthProbe(gateway) as witness, ExitStack() as stack:
        peers = [stack.enter_context(gateway.raw(reads=False)) for _ in range(4)]
        until = time.monotonic() + SECONDS
        while peers and time.monotonic() < until:
            peers = [peer for peer in peers if send_until_refused(peer, [flood]) == len(flood)]
        assert not peers, "who pings without end is hung up on"
    assert witness.highest_resident_bytes - before < GROWTH
    assert witness.slowest < LATENCY


@pytest.mark.parametrize("count", [64, 200])
def test_silent_sockets_lock_no_client_out(gateway: AttackedGateway, count: int) -> None:
    with ExitStack() as stack:
        peers = gateway.silent(count, stack)
        for _ in range(3):
            with gateway.member():
                pass
        assert ended(peers[0]), "the oldest of them makes room"
        assert not ended(peers[-1], seconds=0.2), "and the newest stays"


def test_connections_that_never_send_a_head_lock_no_client_out(tmp_path: Path) -> None:
    with start_attacked_gateway(tmp_path, files=256) as gateway, ExitStack() as stack:
        address = ("127.0.0.1", gateway.port)
        peers = [stack.enter_context(socket.create_connection(address, BOUND)) for _ in range(400)]
        for _ in range(3):
            with gateway.member():
                pass
        assert ended(peers[0])


def ended(peer: socket.socket, seconds: float = BOUND) -> bool:
    """Whether the gateway hangs up on this peer in time."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        peer.settimeout(left)
        try:
            if not peer.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False
