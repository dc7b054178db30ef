"""Typed operations that every transport calls; independent of any protocol.

The CLI, WebSocket, HTTP and the agent tools pass a `Caller` and get data, or an error from `errors`. Each operation
validates its input, opens the session through `SessionResolver` inside one transaction, commits, and publishes events.
Nothing here knows a wire format or keeps state. `operations.Operations` has them all; their requests and results are in
`types`.
"""
