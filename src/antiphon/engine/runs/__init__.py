"""Runs: queueing, claiming, the loop of one run, and what its end leads to."""
