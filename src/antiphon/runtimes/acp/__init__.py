"""Programs that speak the Agent Client Protocol (version 1) as runtimes: Codex, Claude, opencode and others.

One process per session. It keeps its own memory, runs its own tools and asks for permission. Its answers are committed
to the transcript. It is offered neither files nor terminals.
"""
