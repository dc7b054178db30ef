"""The log: a file in the state directory, so that the terminal output stays readable.

Each line is one JSON object, with the run and the session if the caller passes them. `--debug` also prints the same
records as plain lines.
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
# Keys of `extra` that are written; all others are dropped.
CONTEXT_FIELDS = (
    "run_id",
    "session_key",
)


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line, with a fixed order of fields."""

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
    """Formats a record without control characters, since logs quote foreign text and are read on terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_text(super().format(record))


class _IgnoreWriteErrors(logging.Handler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore failed writes (disk full, closed terminal): a traceback would interrupt the conversation."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _LogFileHandler(_IgnoreWriteErrors, RotatingFileHandler): ...


class _StderrHandler(_IgnoreWriteErrors, logging.StreamHandler[TextIO]):
    def __init__(self, format_: str) -> None:
        super().__init__()
        self.setFormatter(_CleanFormatter(format_))


def configure_logging(state_dir: Path, *, debug: bool) -> None:
    """Write log records to the state directory; with `debug` also to standard error.

    If the disk is full, that is printed to standard error in any case, because the command may be waiting for space.
    """
    file = _LogFileHandler(
        state_dir / LOG_FILE_NAME, maxBytes=MAX_LOG_FILE_BYTES, backupCount=2, delay=True, encoding="utf-8"
    )
    file.setFormatter(_JsonFormatter())
    stderr = _StderrHandler(DEBUG_LOG_FORMAT if debug else "%(message)s")
    if not debug:
        stderr.addFilter(logging.Filter(STORE_TROUBLE_LOGGER))
    handlers: list[logging.Handler] = [file, stderr]
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=handlers)
