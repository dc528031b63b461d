"""Parses and formats numbers of bytes, operations and seconds."""

from __future__ import annotations

import math
import re
from typing import Final

from shoal_common.errors import ConfigurationError

_AMOUNT: Final = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)(/s)?\s*")
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_FACTORS_1024: Final = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SCALES: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def parse_bytes(what: str, value: str | float) -> int:
    """Converts a number, or text such as "80GB" (10^9), "80GiB" (2^30), "25GB/s" or "200Gbit/s", to
    bytes or bytes per second. `what`: name of the value, for errors.

    Raises:
        ConfigurationError: the value has none of these forms, or is not above 0.
    """
    amount = _parse(value, {"b": 1.0, "bit": 0.125, "": 1.0}, _FACTORS | _FACTORS_1024)
    if amount is None or amount < 1:
        raise ConfigurationError(
            f'{what}={value!r}: expected a positive number of bytes, such as "80GB" (10^9 each), '
            '"80GiB" (2^30) or "200Gbit/s"'
        )
    return int(amount)


def parse_flops(what: str, value: str | float) -> float:
    """Converts a number, or text such as "312T" or "312TFLOP/s", to floating-point operations per
    second. `what`: name of the value, for errors.

    Raises:
        ConfigurationError: the value has none of these forms, or is not above 0.
    """
    amount = _parse(value, {"flop": 1.0, "flops": 1.0, "": 1.0}, _FACTORS)
    if amount is None or amount < 1:
        raise ConfigurationError(
            f"{what}={value!r}: expected a positive number of operations per second, such as "
            '"312T" or 3.12e14'
        )
    return amount


def _parse(value: str | float, units: dict[str, float], factors: dict[str, int]) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    word = match[2].lower()
    for unit in sorted(units, key=len, reverse=True):
        prefix = word.removesuffix(unit)
        if word.endswith(unit) and prefix in factors:
            return float(match[1]) * factors[prefix] * units[unit]
    return None


def readable_bytes(amount: float) -> str:
    """Formats a number of bytes with a unit, with one to four digits before the decimal point."""
    unit, scale = scale_for(amount)
    return f"{amount:.0f} B" if scale == 1 else f"{amount / scale:.1f} {unit}"


def scale_for(amount: float) -> tuple[str, int]:
    """Returns the largest unit that is not larger than `amount`, and the number of bytes in that
    unit."""
    return next((each for each in _SCALES if amount >= each[1]), _SCALES[-1])


def readable_seconds(seconds: float) -> str:
    """Formats a duration with three significant digits and a unit."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError("the last unit takes all")
