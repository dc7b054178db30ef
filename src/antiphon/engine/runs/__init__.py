"""Runs: queueing, claiming, execution, and the work that follows when one ends."""
