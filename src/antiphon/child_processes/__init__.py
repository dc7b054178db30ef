"""Starts programs that the gateway talks to over pipes, such as MCP servers and ACP agents.

A launcher starts them, so none of their processes outlives the gateway. Their output is bounded and cleaned.
This package knows no protocol.
"""
