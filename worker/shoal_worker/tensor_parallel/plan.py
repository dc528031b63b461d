"""The plan of a tensor-parallel model: a value that says, for every module that holds parameters, how it is split and why.

A plan is made from shapes alone (derive.py), so that every rank makes the same one, also where its parameters are on `meta`, and it can be
looked at before anything is distributed: `print(plan)`. It holds no tensor and no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shoal_worker.tensor_parallel.styles import Style


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """Where one parameter's elements lie."""

    name: str
    """The name that `named_parameters` of the whole model gives it."""
    shape: tuple[int, ...]
    """Shape of the original parameter, and so of the gathered one."""
    stored_shape: tuple[int, ...]
    """Shape of the distributed parameter: a packed one has a dimension for its parts, so that one contiguous split cuts each of them."""
    dimension: int | None
    """Dimension of `stored_shape` that is split; None: whole on every rank."""
    element_size: int
    """Bytes."""
    trainable: bool = True

    def elements_per_rank(self, size: int) -> int:
        """Elements on the rank that has most of them."""
        if self.dimension is None:
            return math.prod(self.shape)
        cut = -(-self.stored_shape[self.dimension] // size)
        return math.prod(self.stored_shape) // max(1, self.stored_shape[self.dimension]) * cut


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One module that holds parameters of its own."""

    module: str
    """Its path; "" is the model itself."""
    kind: str
    """Its class."""
    style: Style
    block: str
    """Path of the attention or MLP block that it belongs to; its own path if it stands alone."""
    parameters: tuple[ParameterLayout, ...]
    parts: int = 1
    tied_to: str | None = None
    """The module that the same weight was listed under first; the bytes are counted there."""
    reason: str = ""
    """Why this style."""

    def bytes_per_rank(self, size: int) -> int:
        """Bytes of parameters on the rank that has most of them."""
        return sum(p.elements_per_rank(size) * p.element_size for p in self.parameters)

    @property
    def split_dimension(self) -> int | None:
        return self.parameters[0].dimension if self.parameters else None


@dataclass(frozen=True, kw_only=True)
class BlockCommunication:
    """The collectives over activations that one block needs in a step, under plain tensor parallelism.

    With sequence parallelism an all-gather and a reduce-scatter, of the same bytes together, take the place of an all-reduce.
    """

    block: str
    forward_all_reduces: int
    forward_all_gathers: int
    backward_all_reduces: int


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """How a model is laid out over `size` ranks."""

    size: int
    """Ranks of the tensor-parallel group."""
    entries: tuple[PlanEntry, ...]
    """In the order of the model's modules."""
    sequence_dimension: int | None = None
    """Dimension of activations along which they are split between blocks; None: no sequence parallelism."""
    loss_parallel: bool = False
    """The model's logits stay split over the vocabulary, for `loss_parallel()`."""

    @cached_property
    def by_module(self) -> Mapping[str, PlanEntry]:
        return {entry.module: entry for entry in self.entries}

    @property
    def parameters(self) -> Iterator[ParameterLayout]:
        """Each parameter once."""
        seen: set[str] = set()
        for entry in self.entries:
            for layout in entry.parameters:
                if layout.name not in seen:
                    seen.add(layout.name)
                    yield layout

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters on the rank that has most of them."""
        return sum(layout.elements_per_rank(self.size) * layout.element_size for layout in self.parameters)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(math.prod(layout.shape) * layout.element_size for layout in self.parameters)

    @property
    def communication(self) -> tuple[BlockCommunication, ...]:
        """The collectives over activations a step, for each block that is split: for a transformer block two in each direction.

        Backward: a block whose input needs no gradient has none; attention over another input than its own (cross-attention) has one more.
        """
        found: list[BlockCommunication] = []
        if self.size == 1:
            return ()
        for block in dict.fromkeys(entry.block for entry in self.entries if entry.style is not Style.REPLICATE):
            styles = [entry.style for entry in self.entries if entry.block == block]
            enters = any(s in _ENTERING for s in styles)
            found.append(
                BlockCommunication(
                    block=block,
                    forward_all_reduces=sum(s in (Style.ROW, Style.VOCABULARY) for s in styles),
                    forward_all_gathers=sum(s in (Style.COLUMN_GATHERED, Style.EMBEDDING_DIMENSION) for s in styles),
                    backward_all_reduces=int(enters),
                )
            )
        return tuple(found)

    def __str__(self) -> str:
        rows = [("module", "kind", "style", "shape", "split", "bytes/rank", "why")]
        for entry in self.entries:
            first = entry.parameters[0] if entry.parameters else None
            rows.append(
                (
                    entry.module or "(model)",
                    entry.kind,
                    entry.style.value,
                    "x".join(map(str, first.shape)) if first else "-",
                    "-" if first is None or first.dimension is None else str(first.dimension),
                    f"{0 if entry.tied_to is not None else entry.bytes_per_rank(self.size):,}",
                    entry.reason if entry.tied_to is None else f"tied to {entry.tied_to}; {entry.reason}",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(f"{self.bytes_per_rank:,} bytes of parameters per rank, of {self.total_bytes:,}, on {self.size} ranks")
        return "\n".join(lines)


_ENTERING = (Style.COLUMN, Style.PACKED_COLUMN, Style.COLUMN_GATHERED, Style.ATTENTION)
