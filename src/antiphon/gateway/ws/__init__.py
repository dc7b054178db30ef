"""WebSocket connections: handshake, frames, limits and sending."""
