"""A real MCP server for tests, written with the library: `python mcp_server.py stdio|http|oauth [PORT]`.

Each call of a tool with effects is a line in the file that `CALLS_FILE` names. In the directory `PIDS_DIRECTORY`, a
file per process says that it was started.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    ToolAnnotations,
)

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.mcp_oauth import TestAuthorizationServer, build_auth_settings

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def record(line: str) -> None:
    if file := os.environ.get("CALLS_FILE"):
        with Path(file).open("a") as calls:
            calls.write(line + "\n")


def build_server(  # noqa: C901 - one tool after the other
    auth: AuthSettings | None = None, authorization: TestAuthorizationServer | None = None
) -> MCPServer:
    server = MCPServer(
        "test-server",
        instructions=os.environ.get("INSTRUCTIONS", "Use add to add."),
        auth=auth,
        auth_server_provider=authorization,
    )

    @server.tool()
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        record(f"add {a} {b}")
        return str(a + b)

    @server.tool()
    def environment() -> str:
        """Lists the variables of the server."""
        return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()))

    @server.tool()
    def where() -> str:
        """Says where the server runs."""
        return f"cwd={Path.cwd()} pid={os.getpid()} uid={os.getuid()}"

    @server.tool()
    def picture() -> Image:
        """Draws."""
        return Image(data=PNG, format="png")

    @server.tool()
    def album(pictures: int, sizes: int = 0) -> list[ImageContent]:
        """Draws many different pictures, each with so many bytes more."""
        drawn = [PNG + bytes(sizes) + str(number).encode() for number in range(pictures)]
        return [ImageContent(data=base64.b64encode(data).decode(), mime_type="image/png") for data in drawn]

    @server.tool()
    def documents() -> list[EmbeddedResource | AudioContent | ImageContent | ResourceLink]:
        """Returns what cannot be shown."""
        data = base64.b64encode(b"%PDF-1.7").decode()
        pdf = BlobResourceContents(uri="note://pdf", mime_type="application/pdf", blob=data)
        return [
            EmbeddedResource(resource=pdf),
            AudioContent(data=base64.b64encode(b"RIFF").decode(), mime_type="x/../../y"),
            ImageContent(data="not base64", mime_type="image/png"),
            ResourceLink(uri="note://hello", name="hello", mime_type="text/plain"),
        ]

    @server.tool()
    def long_text(characters: int) -> str:
        """Writes a long text."""
        return "<" + "x" * (characters - 2) + ">"

    @server.tool()
    def fail() -> str:
        """Fails."""
        raise ValueError("the reason")

    @server.tool()
    async def wait(seconds: float) -> str:
        """Waits."""
        record("wait")
        await asyncio.sleep(seconds)
        return "waited"

    @server.tool()
    def die() -> str:
        """Kills the server in the middle of the call."""
        record("die")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, idempotent_hint=True))
    def die_once(marker: str, ctx: Context) -> str:
        """Kills the server in the middle of the first call."""
        meta = ctx.request_context.meta or {}
        record(f"die_once {meta.get('antiphon/idempotencyKey')}")
        if not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def look() -> str:
        """Only looks."""
        record("look")
        return "seen"

    @server.tool()
    async def grow(ctx: Context) -> str:
        """Adds a tool."""

        def grown() -> str:
            """Was added."""
            return "grown"

        server.add_tool(grown)
        await ctx.notify_tools_changed()
        return "done"

    @server.tool()
    def leave_behind() -> str:
        """Starts a process that outlives the call, and that has left the group and the session."""
        started = subprocess.Popen(
            ["/bin/sh", "-c", "trap '' TERM HUP INT; while true; do sleep 1; done"], start_new_session=True
        )
        return str(started.pid)

    @server.tool()
    def revoke(refresh_tokens: bool) -> str:
        """Makes the tokens invalid that were issued so far."""
        assert authorization is not None
        authorization.access_tokens.clear()
        if refresh_tokens:
            authorization.refresh_tokens.clear()
        return "revoked"

    @server.resource("note://hello")
    def hello() -> str:
        """A note."""
        return "the note"

    @server.resource("note://data.tgz", mime_type="application/gzip")
    def data() -> bytes:
        """Bytes."""
        return b"PK data"

    @server.resource("note://{day}/diary")
    def diary(day: str) -> str:
        """The diary of a day."""
        return f"On {day}."

    @server.prompt()
    def review(language: str, tone: str = "kind") -> str:
        """How to review code."""
        return f"Review {language}, be {tone}."

    return server


def main() -> None:
    if directory := os.environ.get("PIDS_DIRECTORY"):
        Path(directory, str(os.getpid())).touch()
    if sys.argv[1] == "stdio":
        build_server().run("stdio")
    elif sys.argv[1] == "oauth":
        authorization = TestAuthorizationServer(record)
        server = build_server(build_auth_settings(int(sys.argv[2])), authorization)
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        build_server().run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))


if __name__ == "__main__":
    main()
