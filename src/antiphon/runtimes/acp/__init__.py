"""Programs that speak the Agent Client Protocol (version 1) as runtimes: Codex, Claude, opencode and others.

One process per session. It keeps its own memory, runs its own tools and asks for permission; what it says is committed
to our transcript. Neither files nor terminals are offered to it.
"""
