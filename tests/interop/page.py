"""The Control UI's files on a port of their own, as any web server would serve them."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from support.interop_processes import BOUND, CONTROL_UI

# What the page asks its own origin before it connects; OpenClaw's answer, as far as it says anything.
SETTINGS = {
    "basePath": "",
    "assistantName": "Assistant",
    "assistantAvatar": "A",
    "assistantAgentId": "main",
    "embedSandbox": "scripts",
    "allowExternalEmbedUrls": False,
    "automaticallyFetchFavicons": False,
    "communityInvite": False,
    "terminalEnabled": False,
}


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/control-ui-config.json":
            self._send(json.dumps(SETTINGS).encode())
        else:
            if "." not in path:
                self.path = "/"  # a route of the page, which is one document
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hosting() -> Generator[str]:
    """Its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(CONTROL_UI))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(BOUND)
