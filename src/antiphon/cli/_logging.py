"""The log: a file in the state directory, so that what the terminal shows stays readable.

One JSON object per line, with the run and the session it is about where the one who logs knows them. Whoever
watches with `--debug` reads the same as plain lines.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from antiphon.cli._output import clean_text
from antiphon.paths import LOG_FILE_NAME
from antiphon.store import STORE_TROUBLE_LOGGER

MAX_LOG_FILE_BYTES = 2**20
DEBUG_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTEXT_FIELDS = (
    "run_id",
    "session_key",
)  # of what is given as `extra`; nothing else is written, whoever logs


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, its fields always in the same order."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{name: getattr(record, name, None) for name in CONTEXT_FIELDS},
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps(
            {name: clean_text(str(value)) for name, value in event.items() if value is not None},
            ensure_ascii=False,
        )


class _CleanFormatter(logging.Formatter):
    """A log is read on a terminal, and quotes what others have said."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(super().format(record))


class _IgnoreWriteErrors(logging.Handler):
    def handleError(self, record: logging.LogRecord) -> None:
        """The disk may be full, or nobody there to read: that is not to be told in the middle of a conversation."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LogFileHandler(_IgnoreWriteErrors, RotatingFileHandler): ...


class _StderrHandler(_IgnoreWriteErrors, logging.StreamHandler[TextIO]):
    def __init__(self, format_: str) -> None:
        super().__init__()
        self.setFormatter(_CleanFormatter(format_))


def configure_logging(state_dir: Path, *, debug: bool) -> None:
    """Write what the program logs there; with `debug` also to standard error.

    That nothing can be kept for now is said there in any case: else whoever waits would not know what for.
    """
    file = _LogFileHandler(
        state_dir / LOG_FILE_NAME, maxBytes=MAX_LOG_FILE_BYTES, backupCount=2, delay=True, encoding="utf-8"
    )
    file.setFormatter(_JsonFormatter())
    watched = _StderrHandler(DEBUG_LOG_FORMAT if debug else "%(message)s")
    if not debug:
        watched.addFilter(logging.Filter(STORE_TROUBLE_LOGGER))
    handlers: list[logging.Handler] = [file, watched]
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=handlers)
