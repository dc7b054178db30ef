"""The log: a file in the state directory, so that a conversation on the terminal stays readable."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from antiphon.cli.output import clean

NAME = "antiphon.log"
MOST_BYTES = 2**20
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Cleaned(logging.Formatter):
    """A log is read on a terminal, and quotes what others have said."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def keep_journal(state_dir: Path, *, debug: bool) -> None:
    """Write what the program logs there; with `debug` also to standard error."""
    handlers: list[logging.Handler] = [
        RotatingFileHandler(
            state_dir / NAME, maxBytes=MOST_BYTES, backupCount=2, delay=True, encoding="utf-8"
        )
    ]
    if debug:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(_Cleaned(FORMAT))
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=handlers)
