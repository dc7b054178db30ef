"""Antiphon: a gateway that hosts agents' chat sessions and lets them reach each other."""

__version__ = "0.1.0"
