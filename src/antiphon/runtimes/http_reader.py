"""What every `Reader` has that asks a provider over HTTP: a client, and a message that says who answered when.

How a request is made and an answer is read belongs to the readers of the APIs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import httpx2

from antiphon.clock import Clock, SystemClock
from antiphon.messages import Assistant, StopReason, Text, Thinking, ToolCall, Usage
from antiphon.runtimes.answers import sound
from antiphon.runtimes.model import ModelSpec, Patience

PLACEHOLDER_KEY = "not-needed"
"""Sent where no key is configured: the SDKs refuse to work without one, local servers do not look at it."""

OPENAI_URL = "https://api.openai.com/v1"


class HttpReader(ABC):
    """One HTTP client, reused by every step of a spec."""

    def __init__(
        self,
        spec: ModelSpec,
        patience: Patience,
        *,
        http: httpx2.AsyncClient | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._spec = spec
        self._http = http or _open_client(patience)
        self._clock = clock or SystemClock()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what is the same for every step."""

    async def close(self) -> None:
        await self._http.aclose()

    def _assistant(
        self,
        content: list[Text | Thinking | ToolCall],
        *,
        finish: str | None,
        model: str,
        usage: Usage | None,
        native: dict[str, Any] | None,
    ) -> Assistant:
        return sound(
            Assistant(
                content=content,
                timestamp=self._clock.now(),
                stop_reason=_stop_reason(finish, content),
                api=self._spec.api,
                provider=self._spec.provider,
                model=model,
                usage=usage,
                native=native,
            )
        )


def _open_client(patience: Patience) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(patience.idle, connect=patience.connect, pool=None),
        # The engine bounds how many runs go at once; a second bound here would only hide waiting.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        follow_redirects=True,
    )


def _stop_reason(finish: str | None, content: list[Text | Thinking | ToolCall]) -> StopReason:
    if any(isinstance(block, ToolCall) for block in content):
        return "toolUse"
    return "length" if finish == "length" else "stop"
