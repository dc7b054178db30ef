"""What sessions do with each other: exchanges, sub-agents, yields, and how their words are framed."""
