"""Formats log records for stderr: one line per record, with `key=value` for each entry of `extra=`.

    2026-03-01T12:00:00.123Z INFO coordinator shoal_coordinator.sessions member joined job_id=mnist
    member_id=4f2c

Times are UTC. Line breaks within a message or a traceback are written as \\n, so that a record is
always a single line.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

from shoal_common.errors import ConfigurationError

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
}
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LineFormatter(logging.Formatter):
    """Formats a log record as one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        time_of_day = f"{seconds}.{int(record.msecs):03d}Z"
        parts = [time_of_day, record.levelname, self._service, record.name, record.getMessage()]
        parts += [
            f"{key}={_value(value)}"
            for key, value in record.__dict__.items()
            if key not in _STANDARD
        ]
        if record.exc_info:
            parts.append(f"exception={_value(self.formatException(record.exc_info))}")
        if record.stack_info:
            parts.append(f"stack={_value(self.formatStack(record.stack_info))}")
        return " ".join(parts).replace("\r", "\\r").replace("\n", "\\n")


def configure_logging(service: str, level: str = "INFO") -> None:
    """Sends all logging of this process to stderr in Shoal's format. Replaces existing handlers.
    `level`: DEBUG ... CRITICAL."""
    if level.upper() not in _LEVELS:
        raise ConfigurationError(f"log level {level!r}: expected one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def _value(value: object) -> str:
    """Returns a value as text. Puts it in quotes if it is empty or contains white space, quotes or
    `=`, so that the end of the value is unambiguous."""
    text = str(value)
    if text and not any(character.isspace() or character in '"=' for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
