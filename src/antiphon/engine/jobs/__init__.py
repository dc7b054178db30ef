"""Scheduled jobs: their rows, when they are due, and what a firing does."""
