"""The HTTP routes with their authentication and error handling.

Every route is a `RouteHandler`, which counts responses under its path template and turns errors into responses.
Authentication is set per route and happens before the endpoint is called.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from antiphon import __version__, access
from antiphon.access import Caller
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import health, tool_invocations
from antiphon.gateway.auth import ClientIdentity
from antiphon.gateway.http import history, responses
from antiphon.gateway.http.hooks import HookEndpoints
from antiphon.gateway.http.metrics import Metrics
from antiphon.gateway.http.responses import StreamSlots, build_json_response
from antiphon.gateway.mcp import McpClient, McpEndpoint
from antiphon.gateway.openai import common
from antiphon.gateway.program_tools import ProgramToolServer
from antiphon.gateway.state import GatewayState
from antiphon.operations.types import Readiness

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
CallerEndpoint = Callable[[Caller, Request], Awaitable[Response]]
IdentityEndpoint = Callable[[ClientIdentity, Request], Awaitable[Response]]


class GatewayInfo(msgspec.Struct, frozen=True):
    name: str
    version: str
    docs: str


class Liveness(msgspec.Struct, frozen=True):
    ok: bool
    status: str


CLIENT_CLOSED_REQUEST_STATUS = 499  # counted if the client disconnects before the response


class HttpRoutes:
    """The routes of one gateway, and the background tasks they need while open."""

    def __init__(self, gateway: GatewayState, program_tools: ProgramToolServer | None = None) -> None:
        self._gateway = gateway
        self._program_tools = program_tools
        self.slots = StreamSlots()
        self.metrics = Metrics(gateway, self.slots)
        self._hooks = HookEndpoints(gateway)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        if self._gateway.app.config.hooks.enabled:
            await self._hooks.open()
        async with self.metrics.run_watchers():
            yield

    @property
    def routes(self) -> list[BaseRoute]:
        """All routes. The last one matches everything, so add others before it."""
        return [
            *self._build_public_routes(),
            *self._build_session_routes(),
            *self._build_hook_routes(),
            *self._build_channel_routes(),
            *self._build_openai_routes(),
            self._build_mcp_route(),
            self._build_fallback_route(),
        ]

    def _build_public_routes(self) -> list[BaseRoute]:
        return [
            self._build_route("/", GET=_get_root),
            *(self._build_route(path, GET=_get_health) for path in ("/healthz", "/health")),
            *(self._build_route(path, GET=self._get_readiness) for path in ("/readyz", "/ready")),
        ]

    async def _get_readiness(self, request: Request) -> Response:
        if failing := await health.list_readiness_failures(self._gateway):
            return build_json_response(Readiness(ready=False, failing=failing), 503)
        # Without the bus, requests are still accepted and stored, so the gateway stays ready.
        degraded = [] if self._gateway.app.coordination.is_connected() else ["bus"]
        return build_json_response(Readiness(ready=True, degraded=degraded))

    def _build_session_routes(self) -> list[BaseRoute]:
        gateway, slots, operator = self._gateway, self.slots, self._require_caller
        read = self._require_identity(partial(history.get_history, gateway, slots))
        return [
            self._build_route("/sessions/{key:path}/history", GET=read),
            self._build_route(
                "/sessions/{key:path}/kill", POST=operator(partial(history.post_kill, gateway))
            ),
            self._build_route("/tools/invoke", POST=operator(partial(tool_invocations.post_invoke, gateway))),
            self._build_route("/metrics", GET=operator(self.metrics.get_metrics)),
            self._build_route("/openapi.json", GET=operator(_get_openapi)),
        ]

    def _build_openai_routes(self) -> list[BaseRoute]:
        endpoints = self._gateway.app.config.gateway.http.endpoints
        has_chat, has_responses = endpoints.chat_completions.enabled, endpoints.responses.enabled
        models = self._require_caller(partial(common.get_models, self._gateway))
        switches = (
            "gateway.http.endpoints.chatCompletions.enabled",
            "gateway.http.endpoints.responses.enabled",
        )
        off = RouteHandler("/v1/{path:path}", {}, self.metrics, common.build_error_response)
        refuse = [_build_disabled_endpoints(switch) for switch in (*switches, " or ".join(switches))]
        routes: list[tuple[str, dict[str, Endpoint]]] = [
            ("/v1/chat/completions", self._build_chat_endpoints() if has_chat else refuse[0]),
            ("/v1/responses", self._build_responses_endpoints() if has_responses else refuse[1]),
            ("/v1/models", {"GET": models} if has_chat or has_responses else refuse[2]),
        ]
        return [
            *(self._build_openai_route(path, **methods) for path, methods in routes),
            Route("/v1/{path:path}", off),
        ]

    def _build_chat_endpoints(self) -> dict[str, Endpoint]:
        from antiphon.gateway.openai.chat_completions import post_chat_completions  # noqa: PLC0415 - only if enabled

        return {"POST": self._require_identity(partial(post_chat_completions, self._gateway, self.slots))}

    def _build_responses_endpoints(self) -> dict[str, Endpoint]:
        from antiphon.gateway.openai.responses import post_responses  # noqa: PLC0415 - as above

        return {"POST": self._require_identity(partial(post_responses, self._gateway, self.slots))}

    def _build_openai_route(self, path: str, **methods: Endpoint) -> BaseRoute:
        address = RouteHandler(
            path,
            methods,
            self.metrics,
            common.build_error_response,
            common.build_unexpected_error_response,
        )
        return Route(path, address)

    def _build_hook_routes(self) -> list[BaseRoute]:
        hooks, settings = self._hooks, self._gateway.app.config.hooks
        base, on = settings.path.rstrip("/"), settings.enabled
        off = _build_disabled_endpoints("hooks.enabled")
        return [
            self._build_route(
                f"{base}/agent", **({"POST": self._require_hook_token(hooks.post_agent)} if on else off)
            ),
            self._build_route(
                f"{base}/wake", **({"POST": self._require_hook_token(hooks.post_wake)} if on else off)
            ),
        ]

    def _build_channel_routes(self) -> list[BaseRoute]:
        if (channels := self._gateway.app.channels) is None:
            return []
        from antiphon.gateway.http.channel_webhooks import ChannelWebhooks  # noqa: PLC0415 - only if configured

        webhooks = ChannelWebhooks(channels)
        return [
            self._build_route("/channels/{channel}/{account}", POST=webhooks.post),
            *(
                self._build_route(path, POST=partial(webhooks.post_to_account, *account))
                for path, account in channels.list_webhook_aliases().items()
            ),
        ]

    def _build_mcp_route(self) -> BaseRoute:
        if not self._gateway.app.config.gateway.mcp.enabled:
            return self._build_route("/mcp", **_build_disabled_endpoints("gateway.mcp.enabled"))
        endpoint = McpEndpoint(self._gateway, self.slots)
        post_as_client = self._require_identity(endpoint.post)

        async def post(request: Request) -> Response:
            program = None if self._program_tools is None else self._program_tools.find(request.headers)
            if program is None:
                return await post_as_client(request)
            self._gateway.authenticator.check_origin(request.headers.get("origin"))
            return await endpoint.answer(program, request)

        return self._build_route("/mcp", POST=post)

    def build_program_app(self, client: McpClient) -> ASGIApp:
        """Return the application for one program in its sandbox: `/mcp` as this client, and nothing else."""
        endpoint = McpEndpoint(self._gateway, self.slots)

        async def post(request: Request) -> Response:
            self._gateway.authenticator.check_origin(request.headers.get("origin"))
            return await endpoint.answer(client, request)

        return Starlette(routes=[self._build_route("/mcp", POST=post), self._build_fallback_route()])

    def _build_fallback_route(self) -> BaseRoute:
        return Route("/{path:path}", RouteHandler("*", {}, self.metrics))

    def _build_route(self, path: str, **methods: Endpoint) -> BaseRoute:
        return Route(path, RouteHandler(path, methods, self.metrics))

    # --- authentication ---

    def _require_caller(self, endpoint: CallerEndpoint) -> Endpoint:
        async def with_caller(identity: ClientIdentity, request: Request) -> Response:
            return await endpoint(identity.to_caller(), request)

        return self._require_identity(with_caller)

    def _require_identity(self, endpoint: IdentityEndpoint) -> Endpoint:
        """Wrap an endpoint: authenticate the request and pass the identity, so that streams notice a revoked token."""

        async def checked(request: Request) -> Response:
            _check_query_has_no_token(request)
            return await endpoint(
                self._gateway.authenticator.authenticate_http(get_client_address(request), request.headers),
                request,
            )

        return checked

    def _require_hook_token(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            _check_query_has_no_token(request)
            await self._hooks.authenticate(get_client_address(request), request)
            return await endpoint(request)

        return checked


class RouteHandler:
    """Handles the requests of one path. Without endpoints it answers 404."""

    def __init__(
        self,
        template: str,
        endpoints: Mapping[str, Endpoint],
        metrics: Metrics,
        errors: Callable[[AntiphonError], Response] = responses.build_error_response,
        unexpected: Callable[[], Response] = responses.build_unexpected_error_response,
    ) -> None:
        self._template = template
        self._endpoints = {**endpoints, **({"HEAD": endpoints["GET"]} if "GET" in endpoints else {})}
        self._metrics = metrics
        self._build_error_response = errors
        self._build_unexpected_response = unexpected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self._respond(request)
        method = request.method if request.method in self._endpoints else "other"
        self._metrics.count_response(
            method, self._template, response.status_code if response else CLIENT_CLOSED_REQUEST_STATUS
        )
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response | None:
        try:
            if not self._endpoints:
                raise NotFound("This path does not exist.", "See GET /openapi.json for the paths.")
            endpoint = self._endpoints.get(request.method)
            return (
                await endpoint(request)
                if endpoint
                else responses.build_wrong_method_response(", ".join(self._endpoints))
            )
        except AntiphonError as error:
            return self._build_error_response(error)
        except ClientDisconnect:
            return None
        except Exception:
            log.exception("%s %s failed", request.method, self._template)
            return self._build_unexpected_response()


def _build_disabled_endpoints(setting: str) -> dict[str, Endpoint]:
    async def refuse(request: Request) -> Response:
        raise NotFound(
            f"{request.url.path} is disabled.", f"Set {setting} to true in the configuration and restart."
        )

    return dict.fromkeys(("GET", "POST"), refuse)


def get_client_address(request: Request) -> str:
    """Return the address of the connected peer; proxy headers are ignored."""
    return request.client.host if request.client else ""


def _check_query_has_no_token(request: Request) -> None:
    if "token" in request.query_params:
        raise InvalidInput(
            "A token must not be part of a URL: URLs are logged and shared.",
            "Send it as the header Authorization: Bearer <token>.",
            field="token",
        )


async def _get_root(request: Request) -> Response:
    return build_json_response(GatewayInfo("antiphon", __version__, "GET /openapi.json with the token"))


async def _get_health(request: Request) -> Response:
    return build_json_response(Liveness(ok=True, status="live"))


async def _get_openapi(caller: Caller, request: Request) -> Response:
    from antiphon.gateway.http import openapi  # noqa: PLC0415 - seldom asked for

    access.require_scope(caller, "read")
    return build_json_response(openapi.build_document())
