"""Errors of measurements."""

from __future__ import annotations


class MeasurementError(Exception):
    """Raised if a run cannot be measured. The message contains the reason and the run's output. It
    is shown in the system's row; the other systems are still measured."""
