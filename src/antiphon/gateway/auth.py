"""Authentication for every transport: turns credentials and an origin into a `Caller`.

The order is fixed: the failure limit of the address, then the origin, then the secret. A correct long token passes
even above the limit, so that a program with an outdated token does not lock its owner out. Scopes come from the
token's record; a client can only ask for fewer. Headers that a proxy would add are ignored.
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
FAILURE_WINDOW_MS = 60_000  # sliding window in which failures count
MAX_FAILURES_PER_ADDRESS = 10  # per window
MAX_FAILURES_IN_TOTAL = 200  # per window
MAX_TRACKED_ADDRESSES = 4096
MIN_UNGUESSABLE_TOKEN_CHARACTERS = 32  # too long to be found by guessing
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
PROGRAM_SECRET_PREFIX = "antiphon-program-"  # noqa: S105
"""Begins the secrets of programs (`program_tools`), which are valid for the tools of their session only."""
CREDENTIALS_HINT = "Pass the right one; the owner's token is in tokens.json in the gateway's state directory."


class ClientIdentity(msgspec.Struct, frozen=True):
    """An authenticated client. `scopes` are those of the token's record, before the client narrows them."""

    name: str
    scopes: frozenset[str]
    digest: str | None = None
    """Digest of the token, to check whether it is still valid; None if the client has no token record."""

    def to_caller(self, requested: Iterable[str] | None = None) -> Caller:
        return Caller.operator(self.grant_scopes(requested))

    def grant_scopes(self, requested: Iterable[str] | None) -> list[str]:
        """Return the requested scopes that this identity may have; all of its scopes if `requested` is None."""
        if requested is None:
            return sorted(self.scopes)
        if ADMIN_SCOPE in self.scopes:
            return list(dict.fromkeys(requested))
        return sorted(Caller.operator(requested).scopes & Caller.operator(self.scopes).scopes)


LOCAL_ADMIN_IDENTITY = ClientIdentity("local", frozenset({ADMIN_SCOPE}))


class FailureLimiter:
    """Counts failed attempts of the last minute, per address and in total, in bounded memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, deque[int]] = OrderedDict()
        self._all_failures: deque[int] = deque(maxlen=MAX_FAILURES_IN_TOTAL)

    def find_limit_error(self, address: str) -> TooManyFailures | None:
        """Return the error for an address that has to wait; None if it may try."""
        now = self._clock.now()
        for times, limit in (
            (self._by_address.get(address), MAX_FAILURES_PER_ADDRESS),
            (self._all_failures, MAX_FAILURES_IN_TOTAL),
        ):
            while times and times[0] <= now - FAILURE_WINDOW_MS:
                times.popleft()
            if times and len(times) >= limit:
                wait = times[0] + FAILURE_WINDOW_MS - now
                return TooManyFailures(
                    "Too many failed attempts to authenticate from this address.",
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


class Authenticator:
    """Checks origins and secrets, and limits failed attempts."""

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
        """`owner` is the token set in the configuration; it replaces the owner's token in the file."""
        self.mode: AuthMode = mode
        self._tokens = tokens
        self._owner_record = owner
        self._password = password
        self._origins = {_normalize_origin(origin) for origin in origins}
        self._failures = FailureLimiter(clock)
        self._endpoint_secret_failures = FailureLimiter(clock)
        self.refused_count = 0
        """Failed attempts since the start."""

    def authenticate(
        self, address: str, origin: str | None, *, token: str | None = None, password: str | None = None
    ) -> ClientIdentity:
        """Return the identity that a secret belongs to, if the origin is allowed."""
        secrets = [secret for secret in (token, password) if secret]
        if (limit := self._failures.find_limit_error(address)) and not self._has_unguessable_token(secrets):
            raise limit
        self.check_origin(origin)
        if any(secret.startswith(PROGRAM_SECRET_PREFIX) for secret in secrets):
            raise Unauthorized(  # not counted as a failure, so that the program of a session cannot lock out its owner
                "unauthorized: the secret of a program is only valid at /mcp, while the program runs.",
                CREDENTIALS_HINT,
                code=self._build_error_code("MISMATCH"),
            )
        if self.mode == "none":
            return LOCAL_ADMIN_IDENTITY
        if not secrets:
            raise Unauthorized(
                f"unauthorized: gateway {self.mode} missing.",
                CREDENTIALS_HINT,
                code=self._build_error_code("MISSING"),
            )
        for secret in secrets:  # clients put the secret into either field
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
        """Return whether the origin is allowed. Browsers send one with every request; other programs send none."""
        return origin is None or _normalize_origin(origin) in self._origins

    def authenticate_http(self, address: str, headers: Mapping[str, str]) -> ClientIdentity:
        """Authenticate a request by its header `Authorization: Bearer <token or password>`."""
        if self.mode == "none":
            _check_loopback_host(headers.get("host", ""))
        return self.authenticate(address, headers.get("origin"), token=find_bearer_token(headers))

    def check_endpoint_secret(
        self, address: str, origin: str | None, presented: str | None, secret: str, what: str
    ) -> None:
        """Check the secret of an endpoint that has its own. Its failures are counted separately."""
        is_right = bool(presented and secret) and _is_same_secret(presented or "", secret)
        if (limit := self._endpoint_secret_failures.find_limit_error(address)) and not (
            is_right and len(secret) >= MIN_UNGUESSABLE_TOKEN_CHARACTERS
        ):
            raise limit
        self.check_origin(origin)
        if not presented:
            raise Unauthorized(
                f"unauthorized: {what} missing.", f"Pass the {what}.", code="AUTH_TOKEN_MISSING"
            )
        if not is_right:
            self._count_refusal(address, self._endpoint_secret_failures)
            raise Unauthorized(
                f"unauthorized: {what} mismatch.", f"Pass the {what}.", code="AUTH_TOKEN_MISMATCH"
            )

    def _count_refusal(self, address: str, failures: FailureLimiter) -> None:
        failures.count_failure(address)
        self.refused_count += 1

    def _has_unguessable_token(self, secrets: Iterable[str]) -> bool:
        """Return whether one of these is a valid token that is too long to have been guessed."""
        return self.mode == "token" and any(
            len(secret) >= MIN_UNGUESSABLE_TOKEN_CHARACTERS and self._find_identity(secret)
            for secret in secrets
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
        """Return whether the token of this identity is still valid, that is, has not been revoked."""
        return identity.digest is None or any(
            record.digest == identity.digest for record in self._list_records()
        )

    def _build_error_code(self, what: str) -> str:
        return f"AUTH_{self.mode.upper()}_{what}"


def find_bearer_token(headers: Mapping[str, str]) -> str | None:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else None


def find_origin_header(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the `Origin` header from raw ASGI headers."""
    return next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)


def list_own_origins(host: str, port: int, base: str = "http") -> list[str]:
    """Return the origins of pages that this gateway serves; other names that resolve to it are not included."""
    return [f"{base}://{name}:{port}" for name in dict.fromkeys((*LOOPBACK_HOSTS, host))]


def _check_loopback_host(host: str) -> None:
    """Reject foreign `Host` headers: after DNS rebinding, a page's read requests carry no origin, but its host name."""
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
