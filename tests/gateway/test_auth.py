"""The authenticator by itself: who has to wait after too many failures, and who does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.clock import ManualClock
from antiphon.errors import Forbidden, TooManyFailures, Unauthorized
from antiphon.gateway.auth import MAX_FAILURES_PER_ADDRESS, Authenticator, AuthMode
from antiphon.gateway.tokens import TokenRegistry, build_owner_record

pytestmark = pytest.mark.requirement("W7", "SEC9")
HERE = "127.0.0.1"
LONG = "0123456789abcdef0123456789abcdef"


def guarded(path: Path, mode: AuthMode = "token", secret: str = LONG) -> Authenticator:
    return Authenticator(
        mode=mode,
        tokens=TokenRegistry.open(path),
        owner=build_owner_record(secret),
        password=secret,
        origins=[],
        clock=ManualClock(),
    )


def fail(authenticator: Authenticator) -> None:
    for _ in range(MAX_FAILURES_PER_ADDRESS):
        with pytest.raises(Unauthorized):
            authenticator.authenticate(HERE, None, token="wrong")


def test_only_a_long_token_is_let_in_after_too_many_failures(tmp_path: Path) -> None:
    authenticator = guarded(tmp_path)
    fail(authenticator)
    assert authenticator.authenticate(HERE, None, token=LONG).name == "owner"
    assert authenticator.authenticate(HERE, None, token="wrong", password=LONG).name == "owner"
    with pytest.raises(Forbidden):
        authenticator.authenticate(HERE, "http://evil.example", token=LONG)
    for token, origin in ((LONG[:-1] + "x", None), ("wrong", "http://evil.example"), (None, None)):
        with pytest.raises(TooManyFailures):
            authenticator.authenticate(HERE, origin, token=token)
    assert authenticator.refused_count == MAX_FAILURES_PER_ADDRESS  # those were not even looked at


@pytest.mark.parametrize(("mode", "secret"), [("password", LONG), ("token", LONG[:-1])])
def test_what_can_be_guessed_has_to_wait(tmp_path: Path, mode: AuthMode, secret: str) -> None:
    authenticator = guarded(tmp_path, mode, secret)
    fail(authenticator)
    with pytest.raises(TooManyFailures):
        authenticator.authenticate(HERE, None, token=secret)


def test_the_secret_of_another_door_is_counted_apart(tmp_path: Path) -> None:
    authenticator = guarded(tmp_path, "password")
    for _ in range(MAX_FAILURES_PER_ADDRESS):
        with pytest.raises(Unauthorized):
            authenticator.check_endpoint_secret(HERE, None, "wrong", "short", "hook token")
    for given in ("wrong", "short"):
        with pytest.raises(TooManyFailures):
            authenticator.check_endpoint_secret(HERE, None, given, "short", "hook token")
    authenticator.check_endpoint_secret(HERE, None, LONG, LONG, "hook token")
    assert authenticator.authenticate(HERE, None, password=LONG)
