"""The plan of a tensor-parallel model: a value that says, for every module that holds parameters,
how it is split and why.

A plan is made from shapes alone (derive.py), so that every rank makes the same one, also where its
parameters are on `meta`, and it can be looked at before anything is distributed: `print(plan)`. It
holds no tensor and no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# ------------------------------------------------------------------------------------------- styles
#
# Styles are the words that plans are written in: how one module's parameters are split over the
# ranks of a tensor-parallel group. What a style does to a forward pass is in layers.py.


class Style(StrEnum):
    """One way to split a module. What goes in and comes out is said as the model's own code sees
    it."""

    COLUMN = "column"
    """A linear layer by output features. The output stays split; what follows works on its part, up
    to a `ROW`."""
    PACKED_COLUMN = "packed_column"
    """`COLUMN` for a layer whose output is several parts side by side (query | key | value): each
    part is split by itself."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer by output features, whose output is gathered at once: for a layer that has no
    partner."""
    ROW = "row"
    """A linear layer by input features. Its input is what a `COLUMN` left split, its output is
    summed over the ranks."""
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
    """A style with what it needs to know, for plans that a user gives. A bare `Style`, or its name,
    stands for one with defaults."""

    style: Style
    parts: int = 1
    """How many equal parts lie side by side in a `PACKED_COLUMN`'s output: 3 for query | key |
    value."""
    heads: int | None = None
    """Attention heads that the output (per part), or the input of a `ROW`, consists of; they must
    divide by the group's size."""

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.style is Style.PACKED_COLUMN) != (self.parts > 1):
            raise ConfigurationError(
                f"Split(style={self.style.value!r}, parts={self.parts}): packed_column needs parts "
                "of at least 2, and no other style has more than one"
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
            f"tensor-parallel plan: {value!r} is not a style; expected one of "
            f"{', '.join(s.value for s in Style)}"
        ) from None
    return Split(style=style, parts=3 if style is Style.PACKED_COLUMN else 1)


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """Where one parameter's elements lie."""

    name: str
    """The name that `named_parameters` of the whole model gives it."""
    shape: tuple[int, ...]
    """Shape of the original parameter, and so of the gathered one."""
    stored_shape: tuple[int, ...]
    """Shape of the distributed parameter: a packed one has a dimension for its parts, so that one
    contiguous split cuts each of them."""
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
    """The collectives over activations that one block needs in a step, under plain tensor
    parallelism.

    With sequence parallelism an all-gather and a reduce-scatter, of the same bytes together, take
    the place of an all-reduce.
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
    """Dimension of activations along which they are split between blocks; None: no sequence
    parallelism."""
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
        return sum(
            layout.elements_per_rank(self.size) * layout.element_size for layout in self.parameters
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        return sum(math.prod(layout.shape) * layout.element_size for layout in self.parameters)

    @property
    def communication(self) -> tuple[BlockCommunication, ...]:
        """The collectives over activations a step, for each block that is split: for a transformer
        block two in each direction.

        Backward: a block whose input needs no gradient has none; attention over another input than
        its own (cross-attention) has one more.
        """
        found: list[BlockCommunication] = []
        if self.size == 1:
            return ()
        for block in dict.fromkeys(
            entry.block for entry in self.entries if entry.style is not Style.REPLICATE
        ):
            styles = [entry.style for entry in self.entries if entry.block == block]
            enters = any(s in _ENTERING for s in styles)
            found.append(
                BlockCommunication(
                    block=block,
                    forward_all_reduces=sum(s in (Style.ROW, Style.VOCABULARY) for s in styles),
                    forward_all_gathers=sum(
                        s in (Style.COLUMN_GATHERED, Style.EMBEDDING_DIMENSION) for s in styles
                    ),
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
                    entry.reason
                    if entry.tied_to is None
                    else f"tied to {entry.tied_to}; {entry.reason}",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(
            f"{self.bytes_per_rank:,} bytes of parameters per rank, of {self.total_bytes:,}, on "
            f"{self.size} ranks"
        )
        return "\n".join(lines)


_ENTERING = (Style.COLUMN, Style.PACKED_COLUMN, Style.COLUMN_GATHERED, Style.ATTENTION)


# --------------------------------------------------------------------- the shards that a plan names
#
# `Distributor` and what stands below it turn the parameters of a module into the shards that a plan
# names. Called at the beginning of a run.


@dataclass(frozen=True, kw_only=True)
class Share:
    """What of a model is on this rank, where it is cut in another way too: into pipeline stages."""

    parameters: frozenset[str]
    """By all their names. They get memory, with any values in it; others stay on `meta`."""
    elsewhere: tuple[str, ...]
    """Modules that other ranks run, with all that they contain: they stay as they are."""

    def runs(self, module: str) -> bool:
        """Whether this rank runs a module, or something that it contains."""
        return not any(
            module == other or module.startswith(f"{other}.") for other in self.elsewhere
        )


class Distributor:
    """Gives the parameters of this rank's share memory for their parts. A parameter that several
    modules share stays one."""

    def __init__(self, mesh: DeviceMesh, share: Share, device: torch.device) -> None:
        self.share = share
        self._mesh = mesh
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        """The parameters made so far, by the id of the one that each replaced and by their own: a
        tied one is met again under either."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        """Puts this rank's part of a parameter in its place, with any values in it."""
        old = module._parameters[attribute]
        assert old is not None
        new = self._made.get(id(old))
        if new is None:
            new = self._part(old, layout) if layout.name in self.share.parameters else old
            self._made[id(old)] = self._made[id(new)] = new
        module.register_parameter(attribute, new)

    def _part(self, old: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
        if layout.dimension is None:
            return nn.Parameter(torch.empty_like(old, device=self._device), old.requires_grad)
        shape = cut_shape(layout, self._mesh.size(), self._mesh.get_local_rank())
        new = nn.Parameter(
            _distributed(
                torch.empty(shape, dtype=old.dtype, device=self._device), layout, self._mesh
            )
        )
        _keep_gradients_placed(new)
        new.requires_grad_(old.requires_grad)
        return new


def cut(whole: torch.Tensor, layout: ParameterLayout, size: int, part: int) -> torch.Tensor:
    """The part that rank `part` of `size` holds of a whole tensor; a copy. Pieces are of one size,
    rounded up, the last one smaller."""
    assert layout.dimension is not None
    begin, length = _range(layout, size, part)
    return (
        whole.reshape(layout.stored_shape)
        .narrow(layout.dimension, begin, length)
        .clone(memory_format=torch.contiguous_format)
    )


def cut_shape(layout: ParameterLayout, size: int, part: int) -> torch.Size:
    """The shape of `cut`."""
    assert layout.dimension is not None
    shape = list(layout.stored_shape)
    shape[layout.dimension] = _range(layout, size, part)[1]
    return torch.Size(shape)


def _range(layout: ParameterLayout, size: int, part: int) -> tuple[int, int]:
    """Where it begins, and how long it is. As DTensor cuts."""
    assert layout.dimension is not None
    length = layout.stored_shape[layout.dimension]
    piece = -(-length // size)
    begin = min(part * piece, length)
    return begin, min(piece, length - begin)


def _distributed(local: torch.Tensor, layout: ParameterLayout, mesh: DeviceMesh) -> DTensor:
    assert layout.dimension is not None
    meta = torch.empty(layout.stored_shape, device="meta")
    return DTensor.from_local(
        local,
        mesh,
        [Shard(layout.dimension)],
        run_check=False,
        shape=meta.shape,
        stride=meta.stride(),
    )


def _keep_gradients_placed(parameter: nn.Parameter) -> None:
    """A gradient that comes as a sum yet to be made, or whole, is brought to the parameter's own
    layout before it is added up."""
    placements = parameter.placements  # type: ignore[attr-defined]  # set where it was cut

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
