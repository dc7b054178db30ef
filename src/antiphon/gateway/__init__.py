"""The gateway: WebSocket, HTTP and SSE as thin adapters over `operations`, without business rules of their own."""
