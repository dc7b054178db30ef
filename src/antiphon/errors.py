"""Every error that Antiphon raises on purpose.

Each one says who has to react (`who`), carries its data as attributes in `data`, and knows its form on
each wire (`http`, `ws`, `exit_code`). The text states what happened and then what to do next, in plain
sentences that suit a model, a person and a log alike.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

ErrorAudience = Literal["caller", "operator", "model", "engine"]


def format_install_hint(extra: str) -> str:
    """The next step when the packages of an extra are missing."""
    return f"Run `{format_install_command(extra)}`."


def format_install_command(extra: str) -> str:
    """The command that installs the packages of an extra into the environment of this process."""
    script = Path(__file__).parents[2] / "scripts" / "extra"
    if script.is_file():  # a checkout, which may not have uv on the path
        return f"{shlex.quote(str(script))} {extra}"
    return f"{shlex.quote(sys.executable)} -m pip install 'antiphon[{extra}]'"


class AntiphonError(Exception):
    """Base of every deliberate error. `hint` is the next step and is never empty."""

    code: ClassVar[str] = "internal"
    who: ClassVar[ErrorAudience] = "operator"
    http: ClassVar[int] = 500
    ws: ClassVar[str] = "UNAVAILABLE"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, hint: str, **data: Any) -> None:
        super().__init__(f"{what} {hint}")
        self.what = what
        self.hint = hint
        self.data: dict[str, Any] = data


class InvalidInput(AntiphonError):
    """The caller sent invalid data; `data['field']` names it. Nothing was changed."""

    code = "invalid_input"
    who = "caller"
    http = 400
    ws = "INVALID_REQUEST"
    exit_code = 2


class InvalidKey(InvalidInput):
    """A session key or reference that no rule of the grammar accepts."""

    code = "invalid_key"


class TooLarge(InvalidInput):
    """The input exceeds a documented limit (`data['bytes']`, `data['max']`)."""

    code = "too_large"
    http = 413


class Ambiguous(InvalidInput):
    """A reference that matches more than one session; `data['candidates']` lists them."""

    code = "ambiguous"
    http = 409


class Conflict(InvalidInput):
    """The request contradicts something already accepted, such as an idempotency key used for another text."""

    code = "conflict"
    http = 409


class ProtocolMismatch(InvalidInput):
    """The client and the gateway have no protocol version in common."""

    code = "protocol_mismatch"


class StaleFile(Conflict):
    """The content of a file has changed since its writer read it."""

    code = "stale"


class NotFound(AntiphonError):
    """The target does not exist, or the caller may not know about it: both look the same."""

    code = "not_found"
    who = "caller"
    http = 404
    ws = "INVALID_REQUEST"
    exit_code = 3


class ToolMissing(NotFound):
    """The tool does not exist or is not offered to this caller."""


class Forbidden(AntiphonError):
    """The caller may know that the target exists, but may not do this to it."""

    code = "forbidden"
    who = "caller"
    http = 403
    ws = "FORBIDDEN"
    exit_code = 4


class Unauthorized(AntiphonError):
    """The credentials are missing or wrong. `data['code']` says which, for clients that check."""

    code = "unauthorized"
    who = "caller"
    http = 401
    ws = "INVALID_REQUEST"
    exit_code = 4


class TooManyFailures(Unauthorized):
    """Too many failed logins from this address; `data['retryAfterMs']` says how long to wait."""

    code = "rate_limited"
    http = 429


class Unavailable(AntiphonError):
    """Not available at the moment: a feature that is switched off, or a server that is stopping."""

    code = "unavailable"
    who = "caller"
    http = 503
    exit_code = 5


class SandboxUnavailable(Unavailable):
    """Commands cannot be isolated here, so none is run. The hint says how to fix it."""

    code = "sandbox_unavailable"
    who = "operator"


class McpServerUnavailable(Unavailable):
    """An MCP server cannot be used; `data['server']` names it. A run fails with it if the server is required."""

    code = "mcp_server_unavailable"


class RunContinues(Unavailable):
    """The gateway is stopping, but the run was accepted; a retry without the same idempotency key starts another."""


class SendBlocked(Forbidden):
    """The session's send policy is `deny`."""

    code = "send_blocked"
    ws = "INVALID_REQUEST"


class SelfSend(InvalidInput):
    """A session cannot send to itself."""

    code = "self_send"


class WaitCycle(Conflict):
    """Waiting would close a cycle of sessions that wait for each other; `data['path']` lists them."""

    code = "wait_cycle"


class ChainTooLong(Forbidden):
    """A chain of messages between sessions has reached one of its limits (`data['chain_id']`, `data['max']`)."""

    code = "chain_limit"
    ws = "INVALID_REQUEST"


class SpawnRefused(Forbidden):
    """A sub-agent cannot be spawned here; `data['reason']` names the rule."""

    code = "spawn_refused"
    ws = "INVALID_REQUEST"


RefusalKind = Literal["gone", "forbidden", "too_long", "bad_format", "window_closed", "moved", "auth"]
"""Why a chat service refused a message: the chat does not exist, Antiphon may not write there, the text is too long,
its markup is wrong, the time after a person's message is over, the chat has another id, or the credentials."""


class NotSent(AntiphonError):
    """A chat service has certainly not taken a message, which may be sent later.

    `retry_after` is the wait that the service named, in seconds; with `whole_account`, it is for all chats.
    """

    code = "not_sent"

    def __init__(
        self,
        what: str,
        hint: str,
        *,
        retry_after: float | None = None,
        whole_account: bool = False,
        **data: Any,
    ) -> None:
        super().__init__(what, hint, **data)
        self.retry_after = retry_after
        self.whole_account = whole_account


class Refused(AntiphonError):
    """A chat service has refused a message, and would refuse it again. `to` is the new id of a chat that has moved."""

    code = "refused"

    def __init__(
        self, what: str, hint: str, *, kind: RefusalKind, to: str | None = None, **data: Any
    ) -> None:
        super().__init__(what, hint, **data)
        self.kind: RefusalKind = kind
        self.to = to


class Unsure(AntiphonError):
    """It is unknown whether a chat service has taken a message."""

    code = "unsure"


class LaneFull(AntiphonError):
    """The session already has as many queued messages as it may hold."""

    code = "lane_full"
    who = "caller"
    http = 429
    exit_code = 5


class ConfigError(AntiphonError):
    """The configuration cannot be used; `data['path']` is the key at fault."""

    code = "config_invalid"
    http = 500
    exit_code = 6


class StoreError(AntiphonError):
    """The store cannot do its work now. The request had no effect, unless this is a `StoreUnsure`."""

    code = "store_unavailable"
    http = 503
    exit_code = 7


class StoreUnsure(StoreError):
    """It could not be determined whether the request took effect: repeat it with the same key."""

    code = "store_unsure"


class StoreLocked(StoreError):
    """Another process owns the state directory."""

    code = "store_locked"


class StoreDamaged(StoreError):
    """The file is not a valid Antiphon database."""

    code = "store_damaged"


class StoreNewer(StoreError):
    """The database was written by a newer Antiphon."""

    code = "store_newer"


class StoreFull(StoreError):
    """The disk has no room for the transaction."""

    code = "store_full"


class StoreReadOnly(StoreError):
    """The state directory or the database cannot be written."""

    code = "store_read_only"


class StoreReplaced(StoreError):
    """The database file was deleted or replaced while it was open; nothing is accepted until a restart."""

    code = "store_replaced"


class BusError(AntiphonError):
    """The NATS servers cannot be used. Accepted work is not lost; it waits in the store."""

    code = "bus_unavailable"
    http = 503
    exit_code = 7


class ProviderError(AntiphonError):
    """A model provider failed. `retryable` says whether the same request may work later."""

    code = "provider_error"
    http = 502
    exit_code = 8

    def __init__(self, what: str, hint: str, *, retryable: bool = False, **data: Any) -> None:
        super().__init__(what, hint, **data)
        self.retryable = retryable


class CredentialsRefused(ProviderError):
    """The provider refused the API key, which may have been rotated since it was read."""


class AgentProgramFailed(ProviderError):
    """The ACP program that answers for an agent could not be started, broke the protocol, or ended during a turn."""

    code = "agent_program_failed"


class ContextOverflow(ProviderError):
    """The conversation exceeds the model's context window; the engine compacts it and tries again."""

    code = "context_overflow"
    who = "engine"


class UnknownModel(InvalidInput):
    """A model reference that names no configured provider and model."""

    code = "unknown_model"


class ToolFailed(AntiphonError):
    """A tool refused or failed; the text goes to the model as an error result."""

    code = "tool_failed"
    who = "model"


class RunFailed(AntiphonError):
    """A fault in Antiphon or in a runtime; the log has the details."""

    code = "run_failed"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            "The run failed for an internal reason.",
            "See the log for the details, then try again.",
            run_id=run_id,
        )


class AgentRunFailed(AntiphonError):
    """The run of an `agent` request failed; `data['payload']` has its result."""

    code = "run_failed"
    ws = "UNAVAILABLE"


class CrashSuspected(AntiphonError):
    """The run may have crashed its process, so it must wait until no other such run is executing."""

    code = "suspected"
    who = "engine"

    def __init__(self, run_id: str) -> None:
        super().__init__(f"Run {run_id!r} was interrupted before.", "Wait for its turn.", run_id=run_id)


class Fenced(AntiphonError):
    """This process lost the lane: a holder with a higher epoch owns the run, so it must not commit."""

    code = "fenced"
    who = "engine"

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"Run {run_id!r} is owned by another worker now.", "Leave the run to it.", run_id=run_id
        )
