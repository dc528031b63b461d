"""Errors of measurements."""

from __future__ import annotations


class MeasurementError(Exception):
    """A run failed to do what was to be measured. The message gives the reason and the run's
    output. The error is shown in the row; the other systems are still measured."""
