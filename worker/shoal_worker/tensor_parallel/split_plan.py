"""The plan of a tensor-parallel model: how each module with parameters is split, and why.

A plan is created from shapes alone (derive.py), so every rank creates the same plan, even with
parameters on the meta device. It can be inspected with `print(plan)` before anything is
distributed. It does not contain tensors or process groups.
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
# A style defines how one module's parameters are split across the ranks of a tensor-parallel group.
# layers.py implements the effects of styles on a forward pass.


class Style(StrEnum):
    """One way to split a module. Inputs and outputs are described from the point of view of the
    model's own code."""

    COLUMN = "column"
    """A linear layer split by output features. Its output remains split for the modules that
    follow, up to a `ROW`."""
    PACKED_COLUMN = "packed_column"
    """A `COLUMN` whose output consists of several concatenated parts (query | key | value). Each
    part is split separately."""
    COLUMN_GATHERED = "column_gathered"
    """A linear layer split by output features, whose output is gathered immediately. Used for a
    layer without a matching `ROW`."""
    ROW = "row"
    """A linear layer split by input features. Its input is the split output of a `COLUMN`; its
    output is summed across ranks."""
    VOCABULARY = "vocabulary"
    """An embedding split by rows. Each rank looks up its own rows, and the outputs are summed."""
    EMBEDDING_DIMENSION = "embedding_dimension"
    """An embedding or embedding bag split by columns, whose output is gathered."""
    ATTENTION = "attention"
    """nn.MultiheadAttention split by heads. Its `out_proj` is a separate `ROW`."""
    REPLICATE = "replicate"
    """Replicated on every rank."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A style and its settings, for plans written by users. In such a plan, a `Style` or its name
    can be used instead of a `Split` with default settings."""

    style: Style
    parts: int = 1
    """Number of equal, concatenated parts in the output of a `PACKED_COLUMN`: 3 for query | key |
    value."""
    heads: int | None = None
    """Number of attention heads in the output (in each part), or in the input of a `ROW`. Must be
    divisible by the size of the group."""

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.style is Style.PACKED_COLUMN) != (self.parts > 1):
            raise ConfigurationError(
                f"Split(style={self.style.value!r}, parts={self.parts}): expected at least 2 "
                "parts for packed_column, and exactly 1 for every other style"
            )


def to_split(value: Split | Style | str) -> Split:
    """Converts a style from a user's plan to a `Split`.

    Raises:
        ConfigurationError: the value is not the name of a style.
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
    """Name of the parameter in the complete model's `named_parameters`."""
    shape: tuple[int, ...]
    """Shape of the original parameter and of the gathered one."""
    stored_shape: tuple[int, ...]
    """Shape of the distributed parameter. A packed parameter has a separate dimension for its
    parts, so that a contiguous split along another dimension splits each part."""
    dimension: int | None
    """Dimension of `stored_shape` that is split; None: the parameter is replicated."""
    element_size: int
    """Bytes per element."""
    trainable: bool = True

    def elements_per_rank(self, size: int) -> int:
        """Returns the number of elements on the rank that has the most."""
        if self.dimension is None:
            return math.prod(self.shape)
        cut = -(-self.stored_shape[self.dimension] // size)
        return math.prod(self.stored_shape) // max(1, self.stored_shape[self.dimension]) * cut


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """Entry of a plan for one module that owns parameters directly."""

    module: str
    """Path of the module; "" is the model itself."""
    kind: str
    """Name of the module's class."""
    style: Style
    block: str
    """Path of the attention or MLP block that contains the module; the module's own path if there
    is none."""
    parameters: tuple[ParameterLayout, ...]
    parts: int = 1
    tied_to: str | None = None
    """Path of an earlier module in the plan that owns the same weight; the weight's bytes are
    included only there. None if there is no such module."""
    reason: str = ""
    """Reason for the module's style."""

    def bytes_per_rank(self, size: int) -> int:
        """Returns the size in bytes of the module's parameters on the rank that has the most."""
        return sum(p.elements_per_rank(size) * p.element_size for p in self.parameters)

    @property
    def split_dimension(self) -> int | None:
        return self.parameters[0].dimension if self.parameters else None


@dataclass(frozen=True, kw_only=True)
class BlockCommunication:
    """Number of collectives on activations that tensor parallelism needs in one block and step.

    With sequence parallelism, an all-gather and a reduce-scatter take the place of each all-reduce.
    Together, they send the same number of bytes.
    """

    block: str
    forward_all_reduces: int
    forward_all_gathers: int
    backward_all_reduces: int


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """Layout of a model on `size` ranks."""

    size: int
    """Number of ranks in the tensor-parallel group."""
    entries: tuple[PlanEntry, ...]
    """Entries in the order of the model's modules."""
    sequence_dimension: int | None = None
    """Dimension along which activations are split between blocks; None: no sequence parallelism."""
    loss_parallel: bool = False
    """True if the model's logits remain split along the vocabulary, for `loss_parallel()`."""

    @cached_property
    def by_module(self) -> Mapping[str, PlanEntry]:
        return {entry.module: entry for entry in self.entries}

    @property
    def parameters(self) -> Iterator[ParameterLayout]:
        """Yields each parameter once."""
        seen: set[str] = set()
        for entry in self.entries:
            for layout in entry.parameters:
                if layout.name not in seen:
                    seen.add(layout.name)
                    yield layout

    @property
    def bytes_per_rank(self) -> int:
        """Size in bytes of the parameters on the rank that has the most."""
        return sum(
            layout.elements_per_rank(self.size) * layout.element_size for layout in self.parameters
        )

    @property
    def total_bytes(self) -> int:
        """Size in bytes of all parameters of the model."""
        return sum(math.prod(layout.shape) * layout.element_size for layout in self.parameters)

    @property
    def communication(self) -> tuple[BlockCommunication, ...]:
        """The collectives on activations in a step, for each tensor-parallel block. A transformer
        block has two of these blocks, and so two collectives in the forward pass and two in the
        backward pass.

        In the backward pass, a block has no collective if its input does not need a gradient, and
        an additional one if it attends to a second input (cross-attention).
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
# `Distributor` and the functions below it convert a module's parameters into the shards defined by
# a plan, when a model is split.


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's part of a model that is also divided into pipeline stages."""

    parameters: frozenset[str]
    """Names of the parameters to allocate, uninitialized, including all names of tied parameters.
    Other parameters remain on the meta device."""
    elsewhere: tuple[str, ...]
    """Modules that only other ranks run, including their submodules. This rank does not change
    them."""

    def runs(self, module: str) -> bool:
        """Returns whether this rank runs a module, at least in part."""
        return not any(
            module == other or module.startswith(f"{other}.") for other in self.elsewhere
        )


class Distributor:
    """Allocates this rank's part of each parameter. A parameter that is shared by several modules
    remains shared."""

    def __init__(self, mesh: DeviceMesh, share: Share, device: torch.device) -> None:
        self.share = share
        self._mesh = mesh
        self._device = device
        self._made: dict[int, nn.Parameter] = {}
        """The parameters created so far, by their own id and by the id of the parameter that each
        one replaces, because a tied parameter may be found by either."""

    def distribute(self, module: nn.Module, attribute: str, layout: ParameterLayout) -> None:
        """Replaces a parameter with this rank's part of it, uninitialized."""
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
    """Returns a copy of the part of a full tensor that belongs to rank `part` of `size` ranks.
    Parts have the same size, rounded up, except that the last ones may be smaller or empty."""
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
    """Returns the start and the length of a part, split in the same way as DTensor."""
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
    """Registers a hook that redistributes partial or replicated gradients before autograd
    accumulates them, so that they have the same placements as the parameter."""
    placements = parameter.placements  # type: ignore[attr-defined]  # set where it was cut

    def placed(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    parameter.register_hook(placed)
