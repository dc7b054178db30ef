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

from antiphon.access import ADMIN_SCOPE, Caller
from antiphon.clock import Clock
from antiphon.errors import Forbidden, TooManyFailures, Unauthorized
from antiphon.gateway.tokens import TokenRecord, TokenRegistry

AuthMode = Literal["token", "password", "none"]
FAILURE_WINDOW_MS = 60_000  # ms in which failures count
MAX_FAILURES_PER_ADDRESS, MAX_FAILURES_IN_TOTAL = (
    10,
    200,
)  # in one window: from one address, and from everywhere
MAX_TRACKED_ADDRESSES = 4096  # that are remembered
MIN_UNGUESSABLE_TOKEN_CHARACTERS = 32  # characters of a token that nobody finds by trying
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
CREDENTIALS_HINT = "Pass the right one; the owner's token is in tokens.json of the gateway's state directory."


class ClientIdentity(msgspec.Struct, frozen=True):
    """Somebody with a right secret. `scopes` is what the record grants, before a client narrows it."""

    name: str
    scopes: frozenset[str]
    digest: str | None = None
    """Of the token, by which it is known whether it still counts; None where there is no record."""

    def to_caller(self, wanted: Iterable[str] | None = None) -> Caller:
        return Caller.operator(self.grant_scopes(wanted))

    def grant_scopes(self, wanted: Iterable[str] | None) -> list[str]:
        """What a client may have of what it asks for; all there is when it does not ask."""
        if wanted is None:
            return sorted(self.scopes)
        if ADMIN_SCOPE in self.scopes:
            return list(dict.fromkeys(wanted))
        return sorted(Caller.operator(wanted).scopes & Caller.operator(self.scopes).scopes)


LOCAL_ADMIN_IDENTITY = ClientIdentity("local", frozenset({ADMIN_SCOPE}))


class FailureLimiter:
    """Wrong secrets of the last minute, by address and in all. Bounded, whoever tries."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, deque[int]] = OrderedDict()
        self._all_failures: deque[int] = deque(maxlen=MAX_FAILURES_IN_TOTAL)

    def find_limit_error(self, address: str) -> TooManyFailures | None:
        """Why this address has to wait, while there are too many."""
        now = self._clock.now()
        for times, most in (
            (self._by_address.get(address), MAX_FAILURES_PER_ADDRESS),
            (self._all_failures, MAX_FAILURES_IN_TOTAL),
        ):
            while times and times[0] <= now - FAILURE_WINDOW_MS:
                times.popleft()
            if times and len(times) >= most:
                wait = times[0] + FAILURE_WINDOW_MS - now
                return TooManyFailures(
                    "Too many wrong credentials came from this address.",
                    f"Try again in {max(1, wait // 1000)} seconds.",
                    code="AUTH_RATE_LIMITED",
                    retryAfterMs=wait,
                )
        return None

    def count_failure(self, address: str) -> None:
        now = self._clock.now()
        self._all_failures.append(now)
        self._by_address.setdefault(address, deque(maxlen=MAX_FAILURES_PER_ADDRESS)).append(now)
        self._by_address.move_to_end(address)
        while len(self._by_address) > MAX_TRACKED_ADDRESSES:
            self._by_address.popitem(last=False)


class AuthGuard:
    def __init__(
        self,
        *,
        mode: AuthMode,
        tokens: TokenRegistry,
        owner: TokenRecord | None,
        password: str | None,
        origins: Iterable[str],
        clock: Clock,
    ) -> None:
        """`owner` is the record of a token that the configuration sets; it takes the place of the file's owner."""
        self.mode: AuthMode = mode
        self._tokens = tokens
        self._owner_record = owner
        self._password = password
        self._origins = {_normalize_origin(origin) for origin in origins}
        self._failures = FailureLimiter(clock)
        self._endpoint_secret_failures = FailureLimiter(clock)
        self.refused_count = 0
        """Wrong secrets since the start."""

    def authenticate(
        self, address: str, origin: str | None, *, token: str | None = None, password: str | None = None
    ) -> ClientIdentity:
        """Whoever brings the right secret from an origin that may bring one."""
        given = [secret for secret in (token, password) if secret]
        if (limit := self._failures.find_limit_error(address)) and not self._has_unguessable_token(given):
            raise limit
        self.check_origin(origin)
        if self.mode == "none":
            return LOCAL_ADMIN_IDENTITY
        if not given:
            raise Unauthorized(
                f"unauthorized: gateway {self.mode} missing.",
                CREDENTIALS_HINT,
                code=self._build_error_code("MISSING"),
            )
        for secret in given:  # clients put the secret into either field
            if identity := self._find_identity(secret):
                return identity
        self._count_refusal(address, self._failures)
        raise Unauthorized(
            f"unauthorized: gateway {self.mode} mismatch.",
            CREDENTIALS_HINT,
            code=self._build_error_code("MISMATCH"),
        )

    def check_origin(self, origin: str | None) -> None:
        if not self.is_origin_allowed(origin):
            raise Forbidden(
                f"Requests from pages of {(origin or '')[:200]!r} are not allowed.",
                "Add it to gateway.controlUi.allowedOrigins if you trust it.",
                code="CONTROL_UI_ORIGIN_NOT_ALLOWED",
            )

    def is_origin_allowed(self, origin: str | None) -> bool:
        """A browser says on whose page a request was made; programs say nothing."""
        return origin is None or _normalize_origin(origin) in self._origins

    def authenticate_http(self, address: str, headers: Mapping[str, str]) -> ClientIdentity:
        """For a request: `Authorization: Bearer <token or password>`."""
        if self.mode == "none":
            _check_loopback_host(headers.get("host", ""))
        kind, _, secret = headers.get("authorization", "").partition(" ")
        given = secret.strip() if kind.lower() == "bearer" else None
        return self.authenticate(address, headers.get("origin"), token=given)

    def check_endpoint_secret(
        self, address: str, origin: str | None, given: str | None, secret: str, what: str
    ) -> None:
        """For a door with a secret of its own. Who tries it in vain is counted apart: it locks nobody else out."""
        right = bool(given and secret) and _is_same_secret(given or "", secret)
        if (limit := self._endpoint_secret_failures.find_limit_error(address)) and not (
            right and len(secret) >= MIN_UNGUESSABLE_TOKEN_CHARACTERS
        ):
            raise limit
        self.check_origin(origin)
        if not given:
            raise Unauthorized(
                f"unauthorized: {what} missing.", f"Pass the {what}.", code="AUTH_TOKEN_MISSING"
            )
        if not right:
            self._count_refusal(address, self._endpoint_secret_failures)
            raise Unauthorized(
                f"unauthorized: {what} mismatch.", f"Pass the {what}.", code="AUTH_TOKEN_MISMATCH"
            )

    def _count_refusal(self, address: str, failures: FailureLimiter) -> None:
        failures.count_failure(address)
        self.refused_count += 1

    def _has_unguessable_token(self, given: Iterable[str]) -> bool:
        """Whether one of these is right and cannot have been found by trying, as a password can."""
        return self.mode == "token" and any(
            len(secret) >= MIN_UNGUESSABLE_TOKEN_CHARACTERS and self._find_identity(secret)
            for secret in given
        )

    def _find_identity(self, secret: str) -> ClientIdentity | None:
        if self.mode == "password":
            right = self._password is not None and _is_same_secret(secret, self._password)
            return LOCAL_ADMIN_IDENTITY if right else None
        found = TokenRegistry.find_record(self._list_records(), secret)
        if found and found.created_at is not None:
            self._tokens.used_digests.add(found.digest)
        return ClientIdentity(found.name, frozenset(found.scopes), found.digest) if found else None

    def _list_records(self) -> list[TokenRecord]:
        records = self._tokens.load_current_records()
        if self._owner_record is None:
            return records
        return [self._owner_record, *(record for record in records if record.token is None)]

    def is_still_valid(self, identity: ClientIdentity) -> bool:
        """Whether somebody who was let in would be let in again: a token may have been revoked since."""
        return identity.digest is None or any(
            record.digest == identity.digest for record in self._list_records()
        )

    def _build_error_code(self, what: str) -> str:
        return f"AUTH_{self.mode.upper()}_{what}"


def find_origin_header(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What a browser says of itself, in headers as they came."""
    return next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)


def list_own_origins(host: str, port: int, base: str = "http") -> list[str]:
    """The origins of pages that this gateway itself serves; a name that only resolves to it is not one."""
    return [f"{base}://{name}:{port}" for name in dict.fromkeys((*LOOPBACK_HOSTS, host))]


def _check_loopback_host(host: str) -> None:
    """A page whose name was made to resolve to this machine sends no origin with what it reads, but its own name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() not in LOOPBACK_HOSTS:
        raise Forbidden(
            f"Requests for the host {host[:200]!r} are not answered without credentials.",
            "Use http://127.0.0.1 or http://localhost.",
        )


def _normalize_origin(text: str) -> str:
    parts = urlsplit(text.strip().lower())
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else text.strip().lower()


def _is_same_secret(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))
