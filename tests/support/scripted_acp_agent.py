"""An ACP agent that needs nothing but the standard library, for places where little else is. It tells what it sees."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read(name: str) -> str:
    try:
        return Path(name).read_text()
    except OSError as error:
        return type(error).__name__


def connect(port: str) -> str:
    try:
        socket.create_connection(("127.0.0.1", int(port)), 2).close()
    except OSError:
        return "unreachable"
    return "connected"


def tunnel(port: str) -> str:
    """Connect through the proxy of the sandbox."""
    with socket.create_connection(("127.0.0.1", 3128), 5) as proxy:
        proxy.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
        return proxy.recv(4096).split(b" ")[1].decode()


LOOKS: dict[str, Callable[[str], str]] = {
    "uid": lambda _: str(os.getuid()),
    "cwd": lambda _: str(Path.cwd()),
    "read": read,
    "connect": connect,
    "tunnel": tunnel,
}


def write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    request = json.loads(line)
    result: dict[str, Any] = {"protocolVersion": 1, "agentCapabilities": {}, "sessionId": "one"}
    if request.get("method") == "session/prompt":
        word, _, rest = request["params"]["prompt"][-1]["text"].partition(":")
        content = {"type": "text", "text": LOOKS[word](rest)}
        update = {"sessionUpdate": "agent_message_chunk", "content": content}
        write({"method": "session/update", "params": {"sessionId": "one", "update": update}})
        result = {"stopReason": "end_turn"}
    if "id" in request:
        write({"id": request["id"], "result": result})
