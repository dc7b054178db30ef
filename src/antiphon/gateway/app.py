"""The ASGI application: WebSockets to `socket`, everything else to the HTTP routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.gateway.gateway import Gateway
from antiphon.gateway.hub import Hub
from antiphon.gateway.socket import Sockets
from antiphon.gateway.web import Web


class App:
    """One port for everything: a WebSocket may be opened at any path, as its clients do."""

    def __init__(self, gateway: Gateway, hub: Hub) -> None:
        self.web = Web(gateway)
        self._sockets = Sockets(gateway, hub)
        self._pages: ASGIApp = Starlette(routes=self.web.routes)
        self.web.metrics.sockets.set_function(lambda: len(hub.connections))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = self._sockets if scope["type"] == "websocket" else self._pages
        await door(scope, receive, send)
