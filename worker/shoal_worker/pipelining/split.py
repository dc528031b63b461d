"""Splits a model into pipeline stages. The result is a printable value that is the same on every
rank.

Each stage is a contiguous sequence of blocks. By default, stages are balanced by the size of their
parameters in bytes: the largest stage is as small as possible. Among such splits, one with a small
sum of squared sizes is chosen (by dynamic programming). The parameters' values and devices are not
used, so a model on the meta device is split in the same way.

Blocks are found by the model's structure, not by tracing. Three forms of models are supported. A
model with a method `pipeline_blocks()`, or an `nn.Sequential`, is a **chain**: each block takes the
output of the previous one. A model with a `ModuleList` of layers of one class (such as GPT, BERT
and Llama, wherever the list is nested) is **layered**: modules registered before the list
(embeddings) run before the layers, and modules registered after the list (norm, head) run after
them. A layered model keeps its own `forward`; partial.py runs parts of it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from shoal_common.errors import ConfigurationError
from torch import nn

from shoal_worker.torch_internals import _NormBase

_REMEDY: Final = (
    "make the model an nn.Sequential, keep its repeated layers in one nn.ModuleList, or give it a "
    "method pipeline_blocks() that returns its submodules in the order in which they run, each "
    "taking the output of the previous one"
)


@runtime_checkable
class OffersBlocks(Protocol):
    """A model that declares where it can be split."""

    def pipeline_blocks(self) -> list[nn.Module]:
        """Returns the model's submodules in execution order. The first submodule takes the model's
        inputs. Each later submodule takes its predecessor's result (a tensor, or a tuple of
        tensors, as one argument). The last submodule's result is the model's output. The model can
        be split between any two of them."""
        ...


class Form(enum.StrEnum):
    """Structure of a model."""

    CHAIN = "chain"
    LAYERED = "layered"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Part of a model that is never split: one or more submodules that run one after another."""

    names: tuple[str, ...]
    """Names of the block's submodules in the model. In a layered model, all modules before the
    layers form one block, and all modules after the layers form another."""

    @property
    def name(self) -> str:
        """Name that `cut_points` uses for the beginning of this block."""
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sequence of blocks of one model."""

    form: Form
    blocks: tuple[Block, ...]
    layers: str | None = None
    """Name of the ModuleList; None for a chain."""
    has_embedding: bool = False
    """True if the first block of a layered model precedes the layers."""
    has_head: bool = False
    """True if the last block of a layered model follows the layers."""
    everywhere: tuple[str, ...] = ()
    """In a layered model, the modules that contain the layers and own parameters or buffers
    directly; "" is the model itself. Their forward code runs on every stage, and may use these
    tensors there."""


def find_blocks(module: nn.Module) -> Blocks:
    """Returns the blocks of a model.

    Raises:
        ConfigurationError: the model has none of the three forms, or its `pipeline_blocks()`
            returns invalid blocks.
    """
    if isinstance(module, OffersBlocks):
        return _offered(module)
    if _is_plain_sequential(module):
        return Blocks(
            form=Form.CHAIN,
            blocks=tuple(Block(names=(name,)) for name, _ in _flattened(module, "")),
        )
    found = _longest_list(module)
    if found is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no structure that can be split into pipeline stages: "
            f"{_REMEDY}"
        )
    return _layered(module, found)


def stateful(module: nn.Module) -> bool:
    """Returns whether a module must be on a single stage, because it has parameters or statistics
    that change in training. Other modules (dropout, activations, tables of constants) may be on
    several stages."""
    if next(module.parameters(), None) is not None:
        return True
    return any(
        isinstance(part, _NormBase) and part.track_running_stats for part in module.modules()
    )


def _offered(module: OffersBlocks) -> Blocks:
    assert isinstance(module, nn.Module)
    names = {id(part): name for name, part in module.named_modules()}
    offered = list(module.pipeline_blocks())
    foreign = [type(part).__name__ for part in offered if id(part) not in names]
    if foreign or not offered:
        raise ConfigurationError(
            f"pipeline_blocks() of {type(module).__name__} returned {foreign or 'nothing'}; "
            "expected submodules of the model, so that their parameters have names"
        )
    inside = {id(p) for part in offered for p in part.parameters()}
    left_out = [name for name, p in module.named_parameters() if id(p) not in inside]
    if left_out:
        raise ConfigurationError(
            f"pipeline_blocks() of {type(module).__name__} leaves out the parameters "
            f"{left_out[:5]}; each parameter must be in a block"
        )
    return Blocks(
        form=Form.CHAIN, blocks=tuple(Block(names=(names[id(part)],)) for part in offered)
    )


def _is_plain_sequential(module: nn.Module) -> bool:
    hooked = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not hooked
    )


def _flattened(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the submodules of a Sequential, including the submodules of nested Sequentials."""
    for name, part in module._modules.items():
        # named_children() omits the second occurrence of a module
        if part is not None and _is_plain_sequential(part) and part._modules:
            yield from _flattened(part, f"{prefix}{name}.")
        elif part is not None:
            yield f"{prefix}{name}", part


def _longest_list(module: nn.Module) -> str | None:
    """Returns the name of the ModuleList with the most parameters. Only lists with at least two
    entries, all of the same class, are considered. Among lists with the same number of parameters,
    the outermost is chosen."""
    candidates = [
        (sum(p.numel() for p in part.parameters()), -name.count("."), name)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList)
        and len(part) > 1
        and len({type(entry) for entry in part}) == 1
        and stateful(part)
    ]
    return max(candidates)[2] if candidates else None


def _layered(module: nn.Module, layers: str) -> Blocks:
    """Returns the blocks of a model with a list of layers: one block of all modules registered
    before the list (at any level around it), one block per layer, and one block of all modules
    registered after the list."""
    entries = list(module.get_submodule(layers)._modules.items())
    if len({id(layer) for _, layer in entries}) < len(entries):
        raise ConfigurationError(
            f"{layers!r} contains the same module more than once, but a module can be on only one "
            f"pipeline stage: {_REMEDY}"
        )
    path = layers.split(".")
    around = [".".join(path[:depth]) for depth in range(len(path))]
    before: list[str] = []
    after: list[str] = []
    for depth, owner in reversed(list(enumerate(around))):
        # from the inside out: the order in which these modules run after the layers
        names = [name for name, _ in module.get_submodule(owner).named_children()]
        position = names.index(path[depth])
        own = [f"{owner}.{name}" if owner else name for name in names]
        before = [name for name in own[:position] if stateful(module.get_submodule(name))] + before
        after += [name for name in own[position + 1 :] if stateful(module.get_submodule(name))]
    return Blocks(
        form=Form.LAYERED,
        blocks=(
            *([Block(names=tuple(before))] if before else []),
            *(Block(names=(f"{layers}.{name}",)) for name, _ in entries),
            *([Block(names=tuple(after))] if after else []),
        ),
        layers=layers,
        has_embedding=bool(before),
        has_head=bool(after),
        everywhere=tuple(
            name
            for name in around
            if module.get_submodule(name)._parameters or module.get_submodule(name)._buffers
        ),
    )


_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage's part of the model."""

    index: int
    first: int
    """Index of the stage's first block."""
    last: int
    """Index after the stage's last block."""
    modules: tuple[str, ...]
    """Names of the stage's submodules, in execution order."""
    parameters: int
    """Number of parameter elements, including elements shared with other stages."""
    parameter_bytes: int


@dataclass(frozen=True, kw_only=True)
class SharedParameter:
    """A parameter with copies on several stages: a tied weight, or a parameter of a module that
    contains the layers. The copies' gradients are summed."""

    names: tuple[str, ...]
    """All names of the parameter, in the model's order. The first one is its name in the
    optimizer's state."""
    stages: tuple[int, ...]
    """Stages that have a copy, in ascending order. The first stage is the owner: its rank sums the
    copies' gradients."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Assignment of a model's parts to stages."""

    blocks: Blocks
    stages: tuple[StagePlan, ...]
    placement: Mapping[str, tuple[int, ...]]
    """Stages of each parameter and buffer, by its name, in the model's order. A tied tensor is
    listed under each of its names. A tensor's first stage is its owner."""
    shared: tuple[SharedParameter, ...]

    def __str__(self) -> str:
        names = [_abbreviated(stage.modules) for stage in self.stages]
        width = max(len("modules"), *(len(name) for name in names))
        lines = [f"stage  {'modules':<{width}}  parameters       bytes"]
        lines += [
            f"{stage.index:>5}  {name:<{width}}  {stage.parameters:>10,}  "
            f"{_readable(stage.parameter_bytes):>10}"
            for stage, name in zip(self.stages, names, strict=True)
        ]
        lines += [
            f"shared by stages {', '.join(map(str, one.stages))}: {' = '.join(one.names)}"
            for one in self.shared
        ]
        return "\n".join(lines)


def split_model(
    module: nn.Module, stages: int, *, cut_points: Sequence[str] | None = None
) -> Split:
    """Splits a model into `stages` stages.

    Args:
        module: the complete model; its parameters may be on the meta device.
        stages: number of stages, at least 1 and at most the number of blocks.
        cut_points: names of the submodules that begin a new stage, in order, one fewer than stages;
            None: stages are balanced by the size of their parameters in bytes.

    Raises:
        ConfigurationError: the model cannot be split, has too few blocks, or does not have the
            block of a cut point.
    """
    blocks = find_blocks(module)
    if not 1 <= stages <= len(blocks.blocks):
        raise ConfigurationError(
            f"stages={stages}: {type(module).__name__} has {len(blocks.blocks)} blocks "
            f"({_abbreviated([b.name for b in blocks.blocks])}); expected at least 1 stage and at "
            "most one per block"
        )
    named = named_tensors(module)
    if cut_points is None:
        borders = balanced_borders(
            [sum(_bytes(t) for t in _unique(_of(block.names, named))) for block in blocks.blocks],
            stages,
        )
    else:
        borders = _named_borders(blocks, stages, cut_points)
    placement = _placement(blocks, borders, named)
    return Split(
        blocks=blocks,
        stages=tuple(
            _stage_plan(blocks, index, first, last, placement, named)
            for index, (first, last) in enumerate(borders)
        ),
        placement=placement,
        shared=_shared(placement, named, module),
    )


def balanced_borders(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divides `sizes` into `parts` non-empty contiguous ranges and returns the start and end index
    of each. Minimizes the largest sum of any range. Ties are broken by the sum of the squared sums,
    separately for each prefix, so that sum is not always the smallest possible. Takes
    O(len(sizes)^2 * parts) time."""
    totals = [0]
    for size in sizes:
        totals.append(totals[-1] + size)
    best: list[tuple[int, int] | None] = [(0, 0), *[None] * len(sizes)]
    chosen: list[list[int]] = []
    for _ in range(parts):
        following: list[tuple[int, int] | None] = [None] * (len(sizes) + 1)
        cuts = [0] * (len(sizes) + 1)
        for end in range(1, len(sizes) + 1):
            for start in range(end):
                known, run = best[start], totals[end] - totals[start]
                if known is None:
                    continue
                candidate = (max(known[0], run), known[1] + run * run)
                current = following[end]
                if current is None or candidate < current:
                    following[end], cuts[end] = candidate, start
        best = following
        chosen.append(cuts)
    borders: list[tuple[int, int]] = []
    end = len(sizes)
    for cuts in reversed(chosen):
        borders.append((cuts[end], end))
        end = cuts[end]
    return borders[::-1]


def _named_borders(blocks: Blocks, stages: int, cut_points: Sequence[str]) -> list[tuple[int, int]]:
    names = [block.name for block in blocks.blocks]
    if isinstance(cut_points, str):
        raise ConfigurationError(f"cut_points={cut_points!r}: expected a list of submodule names")
    if len(cut_points) != stages - 1:
        raise ConfigurationError(
            f"cut_points={list(cut_points)}: {stages} stages need {stages - 1} cut points"
        )
    unknown = [name for name in cut_points if name not in names[1:]]
    if unknown:
        raise ConfigurationError(
            f"cut_points: no block begins at {unknown}; expected names from "
            f"{_abbreviated(names[1:])}"
        )
    starts = [0, *(names.index(name) for name in cut_points), len(names)]
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise ConfigurationError(
            f"cut_points={list(cut_points)}: expected distinct names in the order in which the "
            "blocks run"
        )
    return list(itertools.pairwise(starts))


def _placement(
    blocks: Blocks, borders: Sequence[tuple[int, int]], named: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Returns the stages of each tensor. A tied parameter is on the stages of all its names."""
    prefixes = [
        tuple(f"{name}." for block in blocks.blocks[first:last] for name in block.names)
        for first, last in borders
    ]
    stages = tuple(range(len(borders)))
    own: dict[str, tuple[int, ...]] = {}
    for name in named:
        inside = tuple(stage for stage in stages if name.startswith(prefixes[stage]))
        # Tensors of modules that contain the layers, and constants (of modules without parameters),
        # are on every stage.
        own[name] = inside or stages
    everywhere_of: dict[int, set[int]] = {}
    for name, tensor in named.items():
        everywhere_of.setdefault(id(tensor), set()).update(own[name])
    return {name: tuple(sorted(everywhere_of[id(tensor)])) for name, tensor in named.items()}


def _shared(
    placement: Mapping[str, tuple[int, ...]], named: Mapping[str, torch.Tensor], module: nn.Module
) -> tuple[SharedParameter, ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    shared: list[SharedParameter] = []
    statistics = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, _NormBase)
        for name in part._buffers
    }
    for aliases in names.values():
        stages = placement[aliases[0]]
        if len(stages) == 1:
            continue
        if isinstance(named[aliases[0]], nn.Parameter):
            shared.append(SharedParameter(names=tuple(aliases), stages=stages))
        elif statistics & set(aliases):
            raise ConfigurationError(
                f"the running statistics {aliases} would be on stages {list(stages)}, but a batch "
                "norm that is used in several places must be on a single stage; pass other "
                "cut_points"
            )
    return tuple(shared)


def _stage_plan(
    blocks: Blocks,
    index: int,
    first: int,
    last: int,
    placement: Mapping[str, tuple[int, ...]],
    named: Mapping[str, torch.Tensor],
) -> StagePlan:
    held = _unique(
        t for name, t in named.items() if isinstance(t, nn.Parameter) and index in placement[name]
    )
    return StagePlan(
        index=index,
        first=first,
        last=last,
        modules=tuple(name for block in blocks.blocks[first:last] for name in block.names),
        parameters=sum(t.numel() for t in held),
        parameter_bytes=sum(_bytes(t) for t in held),
    )


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all parameters and buffers by name, including non-persistent buffers, in the order of
    the state dict. Tied tensors appear under each of their names."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _of(names: Sequence[str], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    prefixes = tuple(f"{name}." for name in names)
    return [
        tensor
        for name, tensor in named.items()
        if isinstance(tensor, nn.Parameter) and name.startswith(prefixes)
    ]


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _readable(size: int) -> str:
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{0 if unit == 0 else 1}f} {_UNITS[unit]}"


def _abbreviated(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]}"
