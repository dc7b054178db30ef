"""An ACP agent that needs nothing but the standard library, for places where little else is. It tells what it sees.

`list` and `use:TOOL:JSON` go to the MCP server that it was given; `get:PATH` asks that server for another path.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
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


servers: list[dict[str, Any]] = []


def open_url(request: urllib.request.Request) -> tuple[int, str]:
    opener = urllib.request.build_opener()  # by way of the variables of the environment
    try:
        with opener.open(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask_server(method: str, params: dict[str, Any]) -> dict[str, Any]:
    [server] = servers
    headers = {each["name"]: each["value"] for each in server["headers"]}
    headers |= {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    headers["MCP-Protocol-Version"] = "2025-11-25"
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    _status, text = open_url(urllib.request.Request(server["url"], json.dumps(body).encode(), headers))  # noqa: S310
    lines = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")]
    return json.loads(lines[-1] if lines else text)


def list_tools(_: str) -> str:
    if not servers:
        return "no server"
    return " ".join(sorted(tool["name"] for tool in ask_server("tools/list", {})["result"]["tools"]))


def use_tool(call: str) -> str:
    name, _, arguments = call.partition(":")
    answer = ask_server("tools/call", {"name": name, "arguments": json.loads(arguments or "{}")})
    return json.dumps(answer["result"]["structuredContent"])


def get(path: str) -> str:
    return str(open_url(urllib.request.Request(servers[0]["url"].replace("/mcp", path)))[0])  # noqa: S310


LOOKS: dict[str, Callable[[str], str]] = {
    "uid": lambda _: str(os.getuid()),
    "cwd": lambda _: str(Path.cwd()),
    "read": read,
    "connect": connect,
    "tunnel": tunnel,
    "list": list_tools,
    "use": use_tool,
    "get": get,
}


def write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    request = json.loads(line)
    can = {"mcpCapabilities": {"http": "no-http" not in sys.argv}}
    result: dict[str, Any] = {"protocolVersion": 1, "agentCapabilities": can, "sessionId": "one"}
    if request.get("method") == "session/new":
        servers[:] = request["params"]["mcpServers"]
    if request.get("method") == "session/prompt":
        word, _, rest = request["params"]["prompt"][-1]["text"].partition(":")
        content = {"type": "text", "text": LOOKS[word](rest)}
        update = {"sessionUpdate": "agent_message_chunk", "content": content}
        write({"method": "session/update", "params": {"sessionId": "one", "update": update}})
        result = {"stopReason": "end_turn"}
    if "id" in request:
        write({"id": request["id"], "result": result})
