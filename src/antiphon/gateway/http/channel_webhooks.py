"""Webhooks of chat services, on the gateway's own port.

The secret is checked before the body is read. A request is answered when its message is stored, before any agent runs.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from antiphon.channels.host import ChannelHost
from antiphon.errors import TooLarge

MAX_WEBHOOK_BYTES = 1024 * 1024


class ChannelWebhooks:
    def __init__(self, channels: ChannelHost) -> None:
        self._channels = channels

    async def post(self, request: Request) -> Response:
        return await self.post_to_account(
            request.path_params["channel"], request.path_params["account"], request
        )

    async def post_to_account(self, channel: str, account: str, request: Request) -> Response:
        self._channels.check_webhook(channel, account, request.headers)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_WEBHOOK_BYTES:
                raise TooLarge("The request is too large.", f"Send at most {MAX_WEBHOOK_BYTES} bytes.")
        await self._channels.take_webhook(channel, account, bytes(body))
        return Response(status_code=200)
