"""The ASGI application: WebSockets go to `ws.server`, everything else to the HTTP routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon.gateway.http.routes import HttpRoutes
from antiphon.gateway.hub import Hub
from antiphon.gateway.state import GatewayState
from antiphon.gateway.ws.server import WebSocketServer


class AsgiApp:
    """Dispatches by connection type. A WebSocket may be opened at any path, because clients use different ones."""

    def __init__(self, gateway: GatewayState, hub: Hub) -> None:
        self.http = HttpRoutes(gateway)
        self._websocket_server = WebSocketServer(gateway, hub)
        self._http_app: ASGIApp = Starlette(routes=self.http.routes)
        self.http.metrics.sockets.set_function(lambda: len(hub.connections))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = self._websocket_server if scope["type"] == "websocket" else self._http_app
        await door(scope, receive, send)
