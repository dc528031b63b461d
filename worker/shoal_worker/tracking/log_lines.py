"""Warnings and errors from Shoal's own log, for sinks that accept logs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from typing_extensions import override

from shoal_worker.elastic.session.session import Session
from shoal_worker.tracking.sinks import LogLine, Report

_LOGGER = "shoal_worker"


class LogLines(logging.Handler):
    """Passes the warnings and errors in this worker's log to `put`, until the session closes."""

    def __init__(self, session: Session, put: Callable[[Report], None]) -> None:
        """`put`: receives the log lines. Called from several threads."""
        super().__init__(logging.WARNING)
        self._session = session
        self._put = put
        logging.getLogger(_LOGGER).addHandler(self)
        session.on_close(lambda: logging.getLogger(_LOGGER).removeHandler(self))

    @override
    def emit(self, record: logging.LogRecord) -> None:
        level = max(known for known in _LEVELS if known <= record.levelno)
        self._put(
            LogLine(
                step=self._session.steps,
                time_ns=round(record.created * 1e9),
                level=level,
                logger=record.name,
                text=record.getMessage(),
            )
        )


_LEVELS = (logging.WARNING, logging.ERROR, logging.CRITICAL)
