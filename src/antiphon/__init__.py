"""Antiphon: a gateway that hosts agents' chat sessions and lets them reach each other."""

__version__ = "0.1.0"
PROTOCOL_VERSIONS = (3, 4)  # of the gateway's WebSocket; the gateway and the client support the same ones
