"""Where a model can be cut: its sequence of blocks, found by structure and not by tracing.

Three forms are known. A model that **offers** its blocks (`pipeline_blocks()`) and an `nn.Sequential` are **chains**: each block takes what
the one before it returned. A model with a `ModuleList` of equal layers (GPT, BERT, Llama and their kin, wherever the list is nested) is
**layered**: what is registered before the list (embeddings) runs before it, what is registered after it (norm, head) after it. A layered
model keeps its own `forward`; partial.py says how a part of it runs. This module decides nothing about where the cuts fall (split.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from shoal_common.errors import ConfigurationError
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_REMEDY: Final = (
    "make it an nn.Sequential, keep its repeated layers in one nn.ModuleList, or give it a method pipeline_blocks() that returns the "
    "list of "
    "its submodules in the order in which they run, each taking what the one before it returned"
)


@runtime_checkable
class OffersBlocks(Protocol):
    """A model that says how it is cut."""

    def pipeline_blocks(self) -> list[nn.Module]:
        """Its submodules in the order in which they run. The first takes the model's inputs, each other one what the one before it
        returned (a tensor, or a tuple of tensors, as one argument), and the last one's output is the model's. Cuts fall between them."""
        ...


class Form(enum.StrEnum):
    """How the parts of a model hang together."""

    CHAIN = "chain"
    LAYERED = "layered"


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece that is not cut: one or more submodules that run one after the other."""

    names: tuple[str, ...]
    """Names of its submodules in the model. In a layered model those before and after the layers make one block each."""

    @property
    def name(self) -> str:
        """What a cut point in front of it is called."""
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sequence of blocks of one model."""

    form: Form
    blocks: tuple[Block, ...]
    layers: str | None = None
    """Name of the ModuleList; None for a chain."""
    has_embedding: bool = False
    """Layered: whether the first block comes before the layers."""
    has_head: bool = False
    """Layered: whether the last block comes after the layers."""
    everywhere: tuple[str, ...] = ()
    """Layered: modules around the layers that own parameters or buffers directly, "" being the model itself. Their forward code runs on
    every
    stage and may use these there."""


def find_blocks(module: nn.Module) -> Blocks:
    """The blocks of a model.

    Raises:
        ConfigurationError: the model has none of the three forms, or what it offers does not add up.
    """
    if isinstance(module, OffersBlocks):
        return _offered(module)
    if _is_plain_sequential(module):
        return Blocks(form=Form.CHAIN, blocks=tuple(Block(names=(name,)) for name, _ in _flattened(module, "")))
    found = _longest_list(module)
    if found is None:
        raise ConfigurationError(f"{type(module).__name__} cannot be cut into pipeline stages by its structure: {_REMEDY}")
    return _layered(module, found)


def stateful(module: nn.Module) -> bool:
    """Whether a module belongs to one stage: it has parameters, or statistics that training changes. Others (dropout, activations, tables
    of
    constants) may be on several."""
    if next(module.parameters(), None) is not None:
        return True
    return any(isinstance(part, _NormBase) and part.track_running_stats for part in module.modules())


def _offered(module: OffersBlocks) -> Blocks:
    assert isinstance(module, nn.Module)
    names = {id(part): name for name, part in module.named_modules()}
    offered = list(module.pipeline_blocks())
    foreign = [type(part).__name__ for part in offered if id(part) not in names]
    if foreign or not offered:
        raise ConfigurationError(
            f"pipeline_blocks() of {type(module).__name__} gave {foreign or 'nothing'}: expected submodules of the model, so that their "
            "parameters have names"
        )
    inside = {id(p) for part in offered for p in part.parameters()}
    left_out = [name for name, p in module.named_parameters() if id(p) not in inside]
    if left_out:
        raise ConfigurationError(
            f"pipeline_blocks() of {type(module).__name__} leaves out the parameters {left_out[:5]}: each parameter must be in a block"
        )
    return Blocks(form=Form.CHAIN, blocks=tuple(Block(names=(names[id(part)],)) for part in offered))


def _is_plain_sequential(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked


def _flattened(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a Sequential, and of those in it."""
    for name, part in module._modules.items():  # not named_children(), which gives a module that is used twice once
        if part is not None and _is_plain_sequential(part) and part._modules:
            yield from _flattened(part, f"{prefix}{name}.")
        elif part is not None:
            yield f"{prefix}{name}", part


def _longest_list(module: nn.Module) -> str | None:
    """The outermost ModuleList of most parameters whose entries are all of one class, two at least."""
    candidates = [
        (sum(p.numel() for p in part.parameters()), -name.count("."), name)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1 and len({type(entry) for entry in part}) == 1 and stateful(part)
    ]
    return max(candidates)[2] if candidates else None


def _layered(module: nn.Module, layers: str) -> Blocks:
    """What is registered before the list, in any of the modules around it, comes before it; what is registered after it, after it."""
    entries = list(module.get_submodule(layers)._modules.items())
    if len({id(layer) for _, layer in entries}) < len(entries):
        raise ConfigurationError(f"{layers!r} holds the same module more than once, which cannot be on several stages: {_REMEDY}")
    path = layers.split(".")
    around = [".".join(path[:depth]) for depth in range(len(path))]
    before: list[str] = []
    after: list[str] = []
    for depth, owner in reversed(list(enumerate(around))):  # from the inside out, as it runs after the layers
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
        everywhere=tuple(name for name in around if module.get_submodule(name)._parameters or module.get_submodule(name)._buffers),
    )
