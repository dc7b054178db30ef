"""Collaboration between sessions: exchanges, sub-agents, yields, and the framing of their messages."""
