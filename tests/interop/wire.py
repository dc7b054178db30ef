"""A plain WebSocket client that keeps every frame it was sent, and the published schema to hold them against."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import jsonschema_rs
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from support.interop_processes import BOUND, SCHEMA, Gateway

Frame = dict[str, Any]
SCOPES = ["operator.admin", "operator.read", "operator.write"]


class Wire:
    """One connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.frames: list[Frame] = []
        self._sent = 0

    def greet(self, token: str, protocol: int) -> Frame:
        """The handshake of the command line, which needs no device; what hello-ok says."""
        assert self.until(lambda frame: frame.get("event") == "connect.challenge")
        client = {"id": "cli", "version": "1", "platform": "linux", "mode": "cli"}
        params = {
            "minProtocol": protocol,
            "maxProtocol": protocol,
            "client": client,
            "role": "operator",
            "scopes": SCOPES,
            "caps": ["tool-events"],
            "auth": {"token": token},
        }
        return self.call("connect", params)

    def call(self, method: str, params: object) -> Frame:
        """Its first response, which has to say that it went well."""
        self._sent += 1
        id = str(self._sent)
        self._socket.send(json.dumps({"type": "req", "id": id, "method": method, "params": params}))
        response = self.until(lambda frame: frame.get("id") == id)
        assert response["ok"], response
        return response["payload"]

    def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        """The next frame that is wanted; those before it are kept as well."""
        limit = time.monotonic() + BOUND
        while True:
            frame = json.loads(self._socket.recv(max(0.0, limit - time.monotonic())))
            self.frames.append(frame)
            if wanted(frame):
                return frame

    def rest(self) -> int | None:
        """Everything up to the end of the connection; the code it was closed with."""
        with suppress(ConnectionClosed):
            self.until(lambda _: False)
        return self._socket.close_code

    def events(self, *names: str) -> list[Frame]:
        return [frame for frame in self.frames if frame.get("event") in names]


@contextmanager
def wired(gateway: Gateway, protocol: int = 4) -> Generator[tuple[Wire, Frame]]:
    with connect(gateway.url, max_size=None, open_timeout=BOUND, close_timeout=BOUND) as socket:
        wire = Wire(socket)
        yield wire, wire.greet(gateway.token, protocol)


@cache
def _published() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text())


def published(definition: str, *, closed: bool = False) -> Callable[[Any], list[str]]:
    """What a value does wrong by a definition of the published protocol.

    The schema is closed and older than the program it describes: OpenClaw's own payloads have more fields. So a
    field it does not know is no mistake in a payload, and is one in a frame, where clients refuse it.
    """
    definitions = _published()["definitions"]
    schema: dict[str, Any] = {"$ref": f"#/definitions/{definition}", "definitions": definitions}
    validator = jsonschema_rs.Draft7Validator(schema if closed else _opened(schema))
    return lambda value: [
        f"{definition}{error.instance_path}: {error.message[:300]}" for error in validator.iter_errors(value)
    ]


def _opened(schema: Any) -> Any:
    """The same schema, which lets other fields pass."""
    if isinstance(schema, dict):
        fields = cast(dict[str, Any], schema).items()
        return {
            name: _opened(value) for name, value in fields if (name, value) != ("additionalProperties", False)
        }
    if isinstance(schema, list):
        return [_opened(value) for value in cast(list[Any], schema)]
    return schema
