"""Errors of measurements."""

from __future__ import annotations


class MeasurementError(Exception):
    """A run did not do what was to be measured; the message says which, and what its output was.
    The row says so and the others go on."""
