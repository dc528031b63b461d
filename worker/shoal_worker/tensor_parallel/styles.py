"""How one module's parameters are split over the ranks of a tensor-parallel group: the words that plans are written in.

What a style does to a forward pass is in layers.py; this module decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_common.errors import ConfigurationError


class Style(StrEnum):
    """One way to split a module. What goes in and comes out is said as the model's own code sees it."""

    COLUMN = "column"
    """A linear layer by output features. The output stays split; what follows works on its part, up to a `ROW`."""
    PACKED_COLUMN = "packed_column"
    """`COLUMN` for a layer whose output is several parts side by side (query | key | value): each part is split by itself."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer by output features, whose output is gathered at once: for a layer that has no partner."""
    ROW = "row"
    """A linear layer by input features. Its input is what a `COLUMN` left split, its output is summed over the ranks."""
    VOCABULARY = "vocabulary"
    """An embedding by rows: each rank looks up its own, and the outputs are summed."""
    EMBEDDING_DIMENSION = "embedding_dimension"
    """An embedding or embedding bag by columns, whose output is gathered."""
    ATTENTION = "attention"
    """nn.MultiheadAttention by heads. Its `out_proj` is a `ROW` of its own."""
    REPLICATE = "replicate"
    """Whole on every rank."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A style with what it needs to know, for plans that a user gives. A bare `Style`, or its name, stands for one with defaults."""

    style: Style
    parts: int = 1
    """How many equal parts lie side by side in a `PACKED_COLUMN`'s output: 3 for query | key | value."""
    heads: int | None = None
    """Attention heads that the output (per part), or the input of a `ROW`, consists of; they must divide by the group's size."""

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.style is Style.PACKED_COLUMN) != (self.parts > 1):
            raise ConfigurationError(
                f"Split(style={self.style.value!r}, parts={self.parts}): packed_column needs parts of at least 2, "
                "and no other style has more than one"
            )


def to_split(value: Split | Style | str) -> Split:
    """What a user may write for a split.

    Raises:
        ConfigurationError: not the name of a style.
    """
    if isinstance(value, Split):
        return value
    try:
        style = Style(value)
    except ValueError:
        raise ConfigurationError(
            f"tensor-parallel plan: {value!r} is not a style; expected one of {', '.join(s.value for s in Style)}"
        ) from None
    return Split(style=style, parts=3 if style is Style.PACKED_COLUMN else 1)
