"""HTTP routes of the gateway, with their limits, streams and metrics."""
