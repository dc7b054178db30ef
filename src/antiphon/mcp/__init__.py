"""The Model Context Protocol: tools of other programs for agents (client), and sessions for other programs (server)."""
