"""Reads chat completions without a provider library."""
