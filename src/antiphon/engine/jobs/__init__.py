"""Scheduled jobs: their rows, their schedules, and firing them."""
