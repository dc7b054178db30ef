"""Shared by tests: fixtures, servers that speak real protocols, and checkers."""
