"""The connection to NATS that the bus and the lanes share."""
