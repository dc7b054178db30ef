"""Chat services: one folder per channel, all of one shape, and the host that runs the configured ones.

A channel translates and transports. Who may write, sessions, commands, retries, order and parts are decided above it.
"""
