"""The HTTP surface, put together: which address leads where, who has to prove what, and what errors look like.

Every route is an `Address`. It knows its methods and its own template, which is what is counted; whatever goes
wrong behind it becomes an answer. Who is asking is established per route, before its endpoint is called.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from antiphon import __version__, access
from antiphon.access import Caller
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import health, history, openai_api, replies, tools_http
from antiphon.gateway.auth import Identity
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.hooks import Hooks
from antiphon.gateway.metrics import Metrics
from antiphon.gateway.replies import Slots, json_reply

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
Protected = Callable[[Caller, Request], Awaitable[Response]]
Streaming = Callable[[Identity, Request], Awaitable[Response]]
GONE = 499  # what a request is counted as whose client left before the answer


class Web:
    """The routes of one gateway, and what has to run while they are open."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.slots = Slots()
        self.metrics = Metrics(gateway, self.slots)
        self._hooks = Hooks(gateway)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        if self._gateway.house.config.hooks.enabled:
            await self._hooks.open()
        async with self.metrics.watching():
            yield

    @property
    def routes(self) -> list[BaseRoute]:
        """The last takes whatever is left: put others before it."""
        return [*self._public(), *self._sessions(), *self._hooked(), *self._openai(), self._anything_else()]

    def _public(self) -> list[BaseRoute]:
        ready = partial(health.get_ready, self._gateway)
        return [
            self._route("/", GET=_get_root),
            *(self._route(path, GET=health.get_health) for path in ("/healthz", "/health")),
            *(self._route(path, GET=ready) for path in ("/readyz", "/ready")),
        ]

    def _sessions(self) -> list[BaseRoute]:
        gateway, slots, operator = self._gateway, self.slots, self._operator
        read = self._streaming(partial(history.get_history, gateway, slots))
        return [
            self._route("/sessions/{key:path}/history", GET=read),
            self._route("/sessions/{key:path}/kill", POST=operator(partial(history.post_kill, gateway))),
            self._route("/tools/invoke", POST=operator(partial(tools_http.post_invoke, gateway))),
            self._route("/metrics", GET=operator(self.metrics.get_metrics)),
            self._route("/openapi.json", GET=operator(_get_openapi)),
        ]

    def _openai(self) -> list[BaseRoute]:
        endpoints = self._gateway.house.config.gateway.http.endpoints
        chat, responses = endpoints.chat_completions.enabled, endpoints.responses.enabled
        models = self._operator(partial(openai_api.get_models, self._gateway))
        switches = (
            "gateway.http.endpoints.chatCompletions.enabled",
            "gateway.http.endpoints.responses.enabled",
        )
        off = Address("/v1/{path:path}", {}, self.metrics, openai_api.error_reply)
        refuse = [_switched_off(switch) for switch in (*switches, " or ".join(switches))]
        routes: list[tuple[str, dict[str, Endpoint]]] = [
            ("/v1/chat/completions", self._chat_completions() if chat else refuse[0]),
            ("/v1/responses", self._responses() if responses else refuse[1]),
            ("/v1/models", {"GET": models} if chat or responses else refuse[2]),
        ]
        return [
            *(self._openai_route(path, **methods) for path, methods in routes),
            Route("/v1/{path:path}", off),
        ]

    def _chat_completions(self) -> dict[str, Endpoint]:
        from antiphon.gateway.openai_chat import post_chat  # noqa: PLC0415 - what is off is not loaded

        return {"POST": self._streaming(partial(post_chat, self._gateway, self.slots))}

    def _responses(self) -> dict[str, Endpoint]:
        from antiphon.gateway.openai_responses import post_responses  # noqa: PLC0415 - as above

        return {"POST": self._streaming(partial(post_responses, self._gateway, self.slots))}

    def _openai_route(self, path: str, **methods: Endpoint) -> BaseRoute:
        address = Address(path, methods, self.metrics, openai_api.error_reply, openai_api.unexpected_reply)
        return Route(path, address)

    def _hooked(self) -> list[BaseRoute]:
        hooks, settings = self._hooks, self._gateway.house.config.hooks
        base, on = settings.path.rstrip("/"), settings.enabled
        off = _switched_off("hooks.enabled")
        return [
            self._route(f"{base}/agent", **({"POST": self._hook(hooks.post_agent)} if on else off)),
            self._route(f"{base}/wake", **({"POST": self._hook(hooks.post_wake)} if on else off)),
        ]

    def _anything_else(self) -> BaseRoute:
        return Route("/{path:path}", Address("*", {}, self.metrics))

    def _route(self, path: str, **methods: Endpoint) -> BaseRoute:
        return Route(path, Address(path, methods, self.metrics))

    # --- who is asking ---

    def _operator(self, endpoint: Protected) -> Endpoint:
        async def called(identity: Identity, request: Request) -> Response:
            return await endpoint(identity.caller(), request)

        return self._streaming(called)

    def _streaming(self, endpoint: Streaming) -> Endpoint:
        """What may stay open has to know whose it is: a token may be revoked in the meantime."""

        async def checked(request: Request) -> Response:
            _check_query(request)
            return await endpoint(self._gateway.guard.http(address_of(request), request.headers), request)

        return checked

    def _hook(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            _check_query(request)
            await self._hooks.check(address_of(request), request)
            return await endpoint(request)

        return checked


class Address:
    """What answers at one path. A path without methods is one where nothing is."""

    def __init__(
        self,
        template: str,
        endpoints: Mapping[str, Endpoint],
        metrics: Metrics,
        errors: Callable[[AntiphonError], Response] = replies.error_reply,
        unexpected: Callable[[], Response] = replies.unexpected_reply,
    ) -> None:
        self._template = template
        self._endpoints = {**endpoints, **({"HEAD": endpoints["GET"]} if "GET" in endpoints else {})}
        self._metrics = metrics
        self._errors = errors
        self._unexpected = unexpected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        response = await self._answer(request)
        method = request.method if request.method in self._endpoints else "other"
        self._metrics.answered(method, self._template, response.status_code if response else GONE)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        try:
            if not self._endpoints:
                raise NotFound("There is nothing at this address.", "GET /openapi.json lists what there is.")
            endpoint = self._endpoints.get(request.method)
            return await endpoint(request) if endpoint else replies.wrong_method(", ".join(self._endpoints))
        except AntiphonError as error:
            return self._errors(error)
        except ClientDisconnect:
            return None
        except Exception:
            log.exception("%s %s failed", request.method, self._template)
            return self._unexpected()


def _switched_off(setting: str) -> dict[str, Endpoint]:
    async def refuse(request: Request) -> Response:
        raise NotFound(
            f"{request.url.path} is switched off.", f"Set {setting} to true in the configuration and restart."
        )

    return dict.fromkeys(("GET", "POST"), refuse)


def address_of(request: Request) -> str:
    """The peer of the connection; what a proxy would say about it is not looked at."""
    return request.client.host if request.client else ""


def _check_query(request: Request) -> None:
    if "token" in request.query_params:
        raise InvalidInput(
            "A token does not belong into an address: addresses are logged and shared.",
            "Send it as the header Authorization: Bearer <token>.",
            field="token",
        )


async def _get_root(request: Request) -> Response:
    return json_reply(
        {"name": "antiphon", "version": __version__, "docs": "GET /openapi.json with the token"}
    )


async def _get_openapi(caller: Caller, request: Request) -> Response:
    from antiphon.gateway import openapi  # noqa: PLC0415 - seldom asked for

    access.require_scope(caller, "read")
    return json_reply(openapi.document())
