"""The gateway: WebSocket, HTTP and SSE as thin adapters over `operations`. Nothing is decided here but the wire."""
