"""Splits a batch into micro-batches, which pass through the pipeline one after another.

Every rank of a pipeline splits the same batch in the same way. The sizes of micro-batches differ by
at most one sample. A batch with fewer samples than micro-batches is split into single samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from shoal_common.errors import ConfigurationError

from shoal_worker.torch_internals import pytree

# -------------------------------------------------------------------- inputs and outputs of a stage
#
# Inputs and outputs of a stage. A `Call` contains the arguments of the model. Every stage has them,
# because all ranks of a replica are given the same batch. A `Border` contains the tensors that one
# stage passes to the next, and how they are structured.


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of the model's forward method."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: Any) -> Call:
        """Returns the call with these inputs: a mapping becomes keyword arguments, a tuple becomes
        positional arguments, and any other value becomes a single argument."""
        if isinstance(inputs, Mapping):
            return cls(kwargs=dict(inputs))
        return cls(args=inputs if isinstance(inputs, tuple) else (inputs,))


@dataclass(frozen=True, kw_only=True)
class Border:
    """The value that one pipeline stage passes to the next."""

    tensors: tuple[torch.Tensor, ...]
    wrapped: int = 0
    """Length of the tuple of tensors that the next stage expects. 0 if it expects a single tensor
    that is not in a tuple."""
    given: int = 0
    """Bit mask of the elements of the tuple that are not None, apart from the first one. Layered
    models send only the first element."""

    @classmethod
    def of(cls, value: Any, what: str) -> Border:
        """Returns the border for `value`, which one block of a chain passes to the next. `what`:
        name of the block, for errors.

        Raises:
            TypeError: the value is neither a tensor nor a tuple of tensors.
        """
        if isinstance(value, torch.Tensor):
            return cls(tensors=(value,))
        if (
            isinstance(value, tuple | list)
            and value
            and all(isinstance(one, torch.Tensor) for one in value)
        ):
            return cls(tensors=tuple(value), wrapped=len(value))
        raise TypeError(
            f"{what} returned {type(value).__name__}, but only a tensor or a tuple of tensors can "
            "pass between stages; pass other cut_points"
        )

    def value(self) -> Any:
        """Returns the value as the next block of a chain expects it."""
        return self.tensors if self.wrapped else self.tensors[0]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in a value, including those in nested mappings, tuples and lists, and in
    attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


def keep_gradients_from(output: Any) -> None:
    """Makes the backward pass of `output` start from zeros, even if the gradients that arrive there
    are not finite."""
    for one in pytree.tree_leaves(output):
        if isinstance(one, torch.Tensor) and one.requires_grad:
            one.register_hook(torch.zeros_like)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Part of a batch that passes through the pipeline as a unit."""

    inputs: Any
    """Arguments of the model: a mapping of keyword arguments, a tuple of positional arguments, or a
    single argument."""
    targets: Any = None
    weight: float
    """Weight of the micro-batch within the batch, such as its number of samples or tokens. The
    batch's loss is the weighted mean of its micro-batches' losses."""
    samples: int
    """Number of samples."""
    seed: int | None = None
    """Seed of random numbers. Each stage combines it with its own index. None: stages use the
    current state of the random generators."""

    @property
    def call(self) -> Call:
        """Arguments with which to call the model."""
        return Call.of(self.inputs)

    @functools.cached_property
    def signature(self) -> int:
        """62-bit hash of the structure, shapes and dtypes of the inputs."""
        leaves, structure = pytree.tree_flatten(self.inputs)
        shapes = [
            f"{tuple(one.shape)}{one.dtype}"
            if isinstance(one, torch.Tensor)
            else type(one).__name__
            for one in leaves
        ]
        return xxhash.xxh3_64_intdigest(f"{structure}{shapes}".encode()) >> 2


def cut_batch(
    inputs: Any,
    targets: Any = None,
    *,
    count: int,
    weight_fn: Callable[[Any, Any], float] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Splits a batch into `count` micro-batches along the first dimension, or into single samples
    if there are fewer than `count`.

    Tensors of one dimension or more are split and must have the same number of rows; every other
    value is passed to all micro-batches. A tensor that has this number of rows by chance, such as a
    T x T mask with T samples, is split as well, because it cannot be distinguished from a batch.

    Args:
        inputs: inputs of the batch; see `MicroBatch`.
        targets: targets, which are split in the same way.
        count: number of micro-batches; at least 1.
        weight_fn: function that returns the weight of a micro-batch from its inputs and targets;
            None: the weight is the number of samples.
        seeds: one seed for each micro-batch.

    Raises:
        ConfigurationError: there are no samples, the numbers of rows differ, or a weight is
            negative or not finite.
    """
    if count < 1:
        raise ConfigurationError(f"micro_batches={count}: expected at least 1")
    leaves, structure = pytree.tree_flatten((inputs, targets))
    sizes = {one.shape[0] for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 0}
    if not sizes:
        raise ConfigurationError(
            "the batch contains no tensor with a first dimension; split the batch yourself and "
            "pass the MicroBatches"
        )
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the batch's tensors have {' and '.join(map(str, sorted(sizes)))} rows; expected the "
            "same number of samples in the first dimension of each. If that is impossible, split "
            "the batch yourself and pass the MicroBatches"
        )
    rows = sizes.pop()
    if rows == 0:
        raise ConfigurationError(
            "the batch has 0 rows; expected at least one sample. Do not call train_step on a "
            "replica without samples"
        )
    count = min(count, rows)
    sections = [rows // count + (index < rows % count) for index in range(count)]
    parts = [
        one.split(sections) if isinstance(one, torch.Tensor) and one.dim() > 0 else [one] * count
        for one in leaves
    ]
    batches = []
    for index, samples in enumerate(sections):
        own_inputs, own_targets = pytree.tree_unflatten([part[index] for part in parts], structure)
        weight = float(samples if weight_fn is None else weight_fn(own_inputs, own_targets))
        if not 0 <= weight < float("inf"):
            raise ConfigurationError(
                f"weight_fn returned {weight} for micro-batch {index}; expected a finite number "
                "of at least 0"
            )
        seed = None if seeds is None else seeds[index]
        batches.append(
            MicroBatch(
                inputs=own_inputs, targets=own_targets, weight=weight, samples=samples, seed=seed
            )
        )
    return batches


def merge_outputs(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Combines the outputs of micro-batches. Tensors are concatenated along the first dimension;
    numbers and scalar tensors are averaged, weighted by `samples`."""
    flattened = [pytree.tree_flatten(one) for one in outputs]
    merged: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flattened), strict=True):
        first = leaves[0]
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            merged.append(torch.cat(list(leaves)))
        elif isinstance(first, torch.Tensor | float) and (
            not isinstance(first, torch.Tensor) or first.is_floating_point()
        ):
            merged.append(
                sum(one * count for one, count in zip(leaves, samples, strict=True)) / sum(samples)
            )
        else:
            merged.append(first)
    return pytree.tree_unflatten(merged, flattened[0][1])
