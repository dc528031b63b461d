"""The plan of a tensor-parallel model: a value that states, for every module with parameters, how
it is split and why.

A plan is created from shapes alone (derive.py), so that every rank creates the same one, even with
parameters on `meta`, and it can be inspected before anything is distributed: `print(plan)`. It
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
# Styles are the vocabulary of plans: how one module's parameters are split over the ranks of a
# tensor-parallel group. layers.py implements their effect on a forward pass.


class Style(StrEnum):
    """One way to split a module. Inputs and outputs are described as seen by the model's own
    code."""

    COLUMN = "column"
    """A linear layer split by output features. The output stays split; later modules work on their
    part, up to a `ROW`."""
    PACKED_COLUMN = "packed_column"
    """`COLUMN` for a layer whose output is several parts side by side (query | key | value): each
    part is split separately."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer split by output features, whose output is gathered immediately: for a layer
    without a partner."""
    ROW = "row"
    """A linear layer split by input features. Its input is the split output of a `COLUMN`; its
    output is summed over the ranks."""
    VOCABULARY = "vocabulary"
    """An embedding split by rows: each rank looks up its own, and the outputs are summed."""
    EMBEDDING_DIMENSION = "embedding_dimension"
    """An embedding or embedding bag by columns, whose output is gathered."""
    ATTENTION = "attention"
    """nn.MultiheadAttention by heads. Its `out_proj` is a `ROW` of its own."""
    REPLICATE = "replicate"
    """Whole on every rank."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A style with its parameters, for plans given by a user. A bare `Style`, or its name, means
    one with defaults."""

    style: Style
    parts: int = 1
    """Number of equal parts side by side in a `PACKED_COLUMN`'s output: 3 for query | key |
    value."""
    heads: int | None = None
    """Number of attention heads in the output (per part), or in the input of a `ROW`; the group's
    size must divide it."""

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.style is Style.PACKED_COLUMN) != (self.parts > 1):
            raise ConfigurationError(
                f"Split(style={self.style.value!r}, parts={self.parts}): packed_column needs at "
                "least 2 parts, and every other style exactly 1"
            )


def to_split(value: Split | Style | str) -> Split:
    """Converts a user's value to a split.

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
    """Layout of one parameter's elements."""

    name: str
    """Name in `named_parameters` of the whole model."""
    shape: tuple[int, ...]
    """Shape of the original parameter and of the gathered one."""
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
    """The module under which the same weight was listed first; the bytes are counted there."""
    reason: str = ""
    """Reason for this style."""

    def bytes_per_rank(self, size: int) -> int:
        """Returns the bytes of parameters on the rank that has most of them."""
        return sum(p.elements_per_rank(size) * p.element_size for p in self.parameters)

    @property
    def split_dimension(self) -> int | None:
        return self.parameters[0].dimension if self.parameters else None


@dataclass(frozen=True, kw_only=True)
class BlockCommunication:
    """The collectives over activations that one block needs in a step, under plain tensor
    parallelism.

    With sequence parallelism an all-gather and a reduce-scatter, of the same bytes together,
    replace an all-reduce.
    """

    block: str
    forward_all_reduces: int
    forward_all_gathers: int
    backward_all_reduces: int


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """Layout of a model over `size` ranks."""

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
        """Collectives over activations per step, for each split block: for a transformer block two
        in each direction.

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
# `Distributor` and the functions below it convert a module's parameters into the shards named by a
# plan. Called at the beginning of a run.


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a model on this rank, if it is also divided in another way: into pipeline
    stages."""

    parameters: frozenset[str]
    """All names of the parameters that get memory, with arbitrary values; others stay on `meta`."""
    elsewhere: tuple[str, ...]
    """Modules that other ranks run, including their submodules, which are not changed."""

    def runs(self, module: str) -> bool:
        """Returns whether this rank runs a module, or something that it contains."""
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
        """The parameters created so far, by the id of the parameter that each replaces and by their
        own: a tied one is found again under either."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        """Replaces a parameter by this rank's part, with arbitrary values."""
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
    """Returns a copy of the part that rank `part` of `size` holds of a whole tensor. Pieces have
    the same size, rounded up; the last one is smaller."""
    assert layout.dimension is not None
    begin, length = _range(layout, size, part)
    return (
        whole.reshape(layout.stored_shape)
        .narrow(layout.dimension, begin, length)
        .clone(memory_format=torch.contiguous_format)
    )


def cut_shape(layout: ParameterLayout, size: int, part: int) -> torch.Size:
    """Returns the shape of the result of `cut`."""
    assert layout.dimension is not None
    shape = list(layout.stored_shape)
    shape[layout.dimension] = _range(layout, size, part)[1]
    return torch.Size(shape)


def _range(layout: ParameterLayout, size: int, part: int) -> tuple[int, int]:
    """Returns start and length of a piece, as DTensor splits."""
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
    """Brings a gradient that is a pending sum, or whole, to the parameter's own layout before it is
    accumulated."""
    placements = parameter.placements  # type: ignore[attr-defined]  # set where it was cut

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
