"""Deliveries to people: rows, the sender, sanitizing and redaction."""
