"""Who is asking: credentials and origins in, a `Caller` out, the same for every transport.

The order is fixed: first whether this address has failed too often, then the origin, then the secret. A long
token is let in all the same, so that a program with an old one does not lock its owner out. Scopes come from the
token's record; what a client asks for can only make them fewer. Headers that a proxy would add are not looked at.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from antiphon.access import ADMIN, Caller
from antiphon.clock import Clock
from antiphon.errors import Forbidden, TooManyFailures, Unauthorized
from antiphon.gateway.tokens import Record, Tokens

Mode = Literal["token", "password", "none"]
WINDOW = 60_000  # ms in which failures count
FAILURES, FAILURES_IN_ALL = 10, 200  # in one window: from one address, and from everywhere
ADDRESSES = 4096  # that are remembered
LONG = 32  # characters of a token that nobody finds by trying
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CARD = "Pass the right one; the owner's token is in tokens.json of the gateway's state directory."


class Identity(msgspec.Struct, frozen=True):
    """Somebody with a right secret. `scopes` is what the record grants, before a client narrows it."""

    name: str
    scopes: frozenset[str]
    digest: str | None = None
    """Of the token, by which it is known whether it still counts; None where there is no record."""

    def caller(self, wanted: Iterable[str] | None = None) -> Caller:
        return Caller.operator(self.granted(wanted))

    def granted(self, wanted: Iterable[str] | None) -> list[str]:
        """What a client may have of what it asks for; all there is when it does not ask."""
        if wanted is None:
            return sorted(self.scopes)
        if ADMIN in self.scopes:
            return list(dict.fromkeys(wanted))
        return sorted(Caller.operator(wanted).scopes & Caller.operator(self.scopes).scopes)


EVERYTHING = Identity("local", frozenset({ADMIN}))


class Failures:
    """Wrong secrets of the last minute, by address and in all. Bounded, whoever tries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, deque[int]] = OrderedDict()
        self._all: deque[int] = deque(maxlen=FAILURES_IN_ALL)

    def limit(self, address: str) -> TooManyFailures | None:
        """Why this address has to wait, while there are too many."""
        now = self._clock.now()
        for times, most in ((self._by_address.get(address), FAILURES), (self._all, FAILURES_IN_ALL)):
            while times and times[0] <= now - WINDOW:
                times.popleft()
            if times and len(times) >= most:
                wait = times[0] + WINDOW - now
                return TooManyFailures(
                    "Too many wrong credentials came from this address.",
                    f"Try again in {max(1, wait // 1000)} seconds.",
                    code="AUTH_RATE_LIMITED",
                    retryAfterMs=wait,
                )
        return None

    def count(self, address: str) -> None:
        now = self._clock.now()
        self._all.append(now)
        self._by_address.setdefault(address, deque(maxlen=FAILURES)).append(now)
        self._by_address.move_to_end(address)
        while len(self._by_address) > ADDRESSES:
            self._by_address.popitem(last=False)


class Guard:
    def __init__(
        self,
        *,
        mode: Mode,
        tokens: Tokens,
        owner: Record | None,
        password: str | None,
        origins: Iterable[str],
        clock: Clock,
    ) -> None:
        """`owner` is the record of a token that the configuration sets; it takes the place of the file's owner."""
        self.mode: Mode = mode
        self._tokens = tokens
        self._owner = owner
        self._password = password
        self._origins = {_origin(origin) for origin in origins}
        self._failures = Failures(clock)
        self._failures_elsewhere = Failures(clock)
        self.refused = 0
        """Wrong secrets since the start."""

    def admit(
        self, address: str, origin: str | None, *, token: str | None = None, password: str | None = None
    ) -> Identity:
        """Whoever brings the right secret from an origin that may bring one."""
        given = [secret for secret in (token, password) if secret]
        if (limit := self._failures.limit(address)) and not self._surely_known(given):
            raise limit
        self.admit_origin(origin)
        if self.mode == "none":
            return EVERYTHING
        if not given:
            raise Unauthorized(
                f"unauthorized: gateway {self.mode} missing.", CARD, code=self._code("MISSING")
            )
        for secret in given:  # clients put the secret into either field
            if identity := self._known(secret):
                return identity
        self._refuse(address, self._failures)
        raise Unauthorized(f"unauthorized: gateway {self.mode} mismatch.", CARD, code=self._code("MISMATCH"))

    def admit_origin(self, origin: str | None) -> None:
        if not self.allows(origin):
            raise Forbidden(
                f"Requests from pages of {(origin or '')[:200]!r} are not allowed.",
                "Add it to gateway.controlUi.allowedOrigins if you trust it.",
                code="CONTROL_UI_ORIGIN_NOT_ALLOWED",
            )

    def allows(self, origin: str | None) -> bool:
        """A browser says on whose page a request was made; programs say nothing."""
        return origin is None or _origin(origin) in self._origins

    def http(self, address: str, headers: Mapping[str, str]) -> Identity:
        """For a request: `Authorization: Bearer <token or password>`."""
        if self.mode == "none":
            _check_local(headers.get("host", ""))
        kind, _, secret = headers.get("authorization", "").partition(" ")
        given = secret.strip() if kind.lower() == "bearer" else None
        return self.admit(address, headers.get("origin"), token=given)

    def expect(self, address: str, origin: str | None, given: str | None, secret: str, what: str) -> None:
        """For a door with a secret of its own. Who tries it in vain is counted apart: it locks nobody else out."""
        right = bool(given and secret) and _same(given or "", secret)
        if (limit := self._failures_elsewhere.limit(address)) and not (right and len(secret) >= LONG):
            raise limit
        self.admit_origin(origin)
        if not given:
            raise Unauthorized(
                f"unauthorized: {what} missing.", f"Pass the {what}.", code="AUTH_TOKEN_MISSING"
            )
        if not right:
            self._refuse(address, self._failures_elsewhere)
            raise Unauthorized(
                f"unauthorized: {what} mismatch.", f"Pass the {what}.", code="AUTH_TOKEN_MISMATCH"
            )

    def _refuse(self, address: str, failures: Failures) -> None:
        failures.count(address)
        self.refused += 1

    def _surely_known(self, given: Iterable[str]) -> bool:
        """Whether one of these is right and cannot have been found by trying, as a password can."""
        return self.mode == "token" and any(len(secret) >= LONG and self._known(secret) for secret in given)

    def _known(self, secret: str) -> Identity | None:
        if self.mode == "password":
            right = self._password is not None and _same(secret, self._password)
            return EVERYTHING if right else None
        found = Tokens.match(self._records(), secret)
        if found and found.created_at is not None:
            self._tokens.used.add(found.digest)
        return Identity(found.name, frozenset(found.scopes), found.digest) if found else None

    def _records(self) -> list[Record]:
        records = self._tokens.current()
        if self._owner is None:
            return records
        return [self._owner, *(record for record in records if record.token is None)]

    def still_knows(self, identity: Identity) -> bool:
        """Whether somebody who was let in would be let in again: a token may have been revoked since."""
        return identity.digest is None or any(record.digest == identity.digest for record in self._records())

    def _code(self, what: str) -> str:
        return f"AUTH_{self.mode.upper()}_{what}"


def origin_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What a browser says of itself, in headers as they came."""
    return next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)


def own_origins(host: str, port: int, base: str = "http") -> list[str]:
    """The origins of pages that this gateway itself serves; a name that only resolves to it is not one."""
    return [f"{base}://{name}:{port}" for name in dict.fromkeys((*LOOPBACK, host))]


def _check_local(host: str) -> None:
    """A page whose name was made to resolve to this machine sends no origin with what it reads, but its own name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() not in LOOPBACK:
        raise Forbidden(
            f"Requests for the host {host[:200]!r} are not answered without credentials.",
            "Use http://127.0.0.1 or http://localhost.",
        )


def _origin(text: str) -> str:
    parts = urlsplit(text.strip().lower())
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else text.strip().lower()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))
