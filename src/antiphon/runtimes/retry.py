"""Retries and timeouts of provider requests, and what is logged of them.

stamina is imported with the first reader, off the event loop, because that takes longer than importing the rest of a
runtime.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from antiphon.errors import ProviderError

if TYPE_CHECKING:
    import stamina
    from stamina.instrumentation import RetryDetails, RetryHook

log = logging.getLogger(__name__)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often a step is retried, and its timeouts. Times are in seconds."""

    attempts: int = 4
    first_wait: float = 0.5
    """Doubles with every attempt; up to `jitter` is added so that many sessions do not retry together."""
    longest_wait: float = 20.0
    jitter: float = 1.0
    retry_after: float = 60.0
    """Longest delay requested by a provider that is waited for; beyond it the step fails."""
    connect: float = 10.0
    idle: float = 120.0
    """Longest silence on an open connection, before the first byte and between bytes."""
    content: float = 600.0
    """Longest time without content: some models think for long and send only keep-alives meanwhile."""


def iterate_attempts(retry_policy: RetryPolicy) -> AsyncIterator[stamina.Attempt]:
    """Yields the attempts at one request as context managers; the last one raises."""
    import stamina  # noqa: PLC0415 - imported with the reader

    _install_retry_hook()

    def wait_for(error: Exception) -> bool | float:
        """Whether to retry: False, True for the default wait, or a number of seconds."""
        if not isinstance(error, ProviderError) or not error.retryable:
            return False
        retry_after: float | None = error.data.get("retryAfter")
        if retry_after is None:
            return True
        jitter = random.uniform(0, retry_policy.jitter)  # noqa: S311
        return retry_after <= retry_policy.retry_after and retry_after + jitter

    return aiter(
        stamina.retry_context(
            on=wait_for,
            attempts=retry_policy.attempts,
            timeout=None,
            wait_initial=retry_policy.first_wait,
            wait_max=retry_policy.longest_wait,
            wait_jitter=retry_policy.jitter,
        )
    )


def _install_retry_hook() -> None:
    """Logs provider retries in our format. Hooks are process-wide, so other retries keep the default ones."""
    from stamina.instrumentation import get_on_retry_hooks, set_on_retry_hooks  # noqa: PLC0415

    hooks = get_on_retry_hooks()
    if _log_retry not in hooks:
        set_on_retry_hooks([_log_retry, *map(_skip_provider_errors, hooks)])


def _log_retry(details: RetryDetails) -> None:
    error = details.caused_by
    if isinstance(error, ProviderError):
        log.warning(
            "Attempt %d at %s/%s failed; retrying in %.1f seconds: %s",
            details.retry_num,
            error.data.get("provider"),
            error.data.get("model"),
            details.wait_for,
            error.what,
            extra={name: error.data.get(name) for name in ("run_id", "session_key")},
        )


def _skip_provider_errors(hook: RetryHook) -> RetryHook:
    return lambda details: None if isinstance(details.caused_by, ProviderError) else hook(details)
