"""Deliveries to people: rows, the sender, and what is removed before anything is sent."""
