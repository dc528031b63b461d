"""Labels the ticks of a plot's axes with plain numbers: 0.6 instead of 6 x 10^-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

_DECADES: Final = 3
"""Maximum number of decades of an axis that also has ticks between the powers of ten."""
_WIDE: Final = 20
"""Minimum ratio of the largest to the smallest value for a logarithmic axis."""


def is_wide(values: Sequence[float]) -> bool:
    """Returns whether the range of these values is wide enough for a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) >= _WIDE * min(values)


def logarithmic(axes: Any, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Makes an axis of matplotlib's `axes` logarithmic. `which`: "x" or "y". `values`: values to
    show, all above 0."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    subs = (1.0,) if max(values) > 10**_DECADES * min(values) else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float) -> str:
    """Returns a number in ordinary notation: 0.0005, 0.6, 12, 1,000,000."""
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return text if text not in ("0", "-0") or value == 0 else f"{value:g}"
