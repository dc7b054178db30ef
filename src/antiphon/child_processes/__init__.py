"""Programs of the operator that the gateway starts and speaks to over pipes, such as MCP servers and ACP agents.

They are started by a launcher, so none of their processes outlives the gateway. Their output is bounded and cleaned.
This package knows no protocol.
"""
