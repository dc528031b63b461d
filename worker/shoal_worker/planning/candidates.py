"""Selects the strategies and meshes that are worth considering for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal_worker.mesh.layouts import Axes
from shoal_worker.replicated.rounds import RoundOptions
from shoal_worker.sharding.unit import Stage

_MOST_STAGES: Final = 16
"""Maximum number of stages. With usual batch sizes, the ranks of a longer pipeline would wait
longer than they compute."""
MICRO_BATCHES_PER_STAGE: Final = 4
"""Number of micro-batches per stage. With this number, a pipeline's ranks wait for about a fifth of
the step."""
STAGES: Final = {
    "zero1": Stage.OPTIMIZER,
    "zero2": Stage.GRADIENTS,
    "zero3": Stage.PARAMETERS,
    "fsdp": Stage.PARAMETERS,
    "hsdp": Stage.PARAMETERS,
}
"""State that each strategy shards across ranks. Also applies to the data axis of a hybrid."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy, together with the mesh in which it arranges the ranks."""

    strategy: str
    axes: Axes
    along_data: str = "ddp"
    """Strategy that a hybrid uses on its data axis."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `as_distributed`, except `strategy` and a pipeline's `micro_batches`."""

    @property
    def label(self) -> str:
        """Short name of the choice; tp, pp and dp are the sizes of the tensor, pipeline and data
        axes."""
        axes = self.axes
        if self.strategy == "hsdp":
            shards: int = self.options["shard_size"]
            return f"hsdp {shards} shards x {axes.data // shards}"
        sizes = [
            f"{letters}{size}"
            for letters, size in (("tp", axes.tensor), ("pp", axes.pipeline))
            if size > 1
        ]
        cut = [self.along_data] if self.strategy == "hybrid" and self.along_data != "ddp" else []
        return " ".join([self.strategy, *([*sizes, f"dp{axes.data}"] if sizes else []), *cut])


def choices(world_size: int, ranks_per_host: int) -> Iterator[Choice]:
    """Yields the strategies worth planning for a number of ranks, the simplest first."""
    alone = Axes(pipeline=1, tensor=1, data=world_size)
    for strategy in ("ddp", "zero1", "zero2", "fsdp", "zero3"):
        if world_size > 1 or strategy == "ddp":
            yield Choice(strategy=strategy, axes=alone)
    for size in _replica_sizes(world_size, ranks_per_host):
        yield Choice(strategy="hsdp", axes=alone, options={"shard_size": size})
    if world_size > 1:
        yield Choice(
            strategy="local_sgd", axes=alone, options={"sync_every": RoundOptions().sync_every}
        )
    host = min(ranks_per_host, world_size)
    tensors = [size for size in _divisors(world_size) if host % size == 0]
    pipelines = [size for size in _divisors(world_size) if size <= _MOST_STAGES]
    for tensor in tensors:
        for pipeline in pipelines:
            if tensor * pipeline > 1 and world_size % (tensor * pipeline) == 0:
                yield from _on_mesh(
                    Axes(pipeline=pipeline, tensor=tensor, data=world_size // (tensor * pipeline))
                )


def _on_mesh(axes: Axes) -> Iterator[Choice]:
    tensor = {"tensor_parallel_size": axes.tensor} if axes.tensor > 1 else {}
    pipeline = {"pipeline_parallel_size": axes.pipeline} if axes.pipeline > 1 else {}
    whole = "hybrid" if tensor and pipeline else "tensor" if tensor else "pipeline"
    yield Choice(strategy=whole, axes=axes, options=tensor | pipeline)
    if axes.data > 1:
        for along in ("zero1", "fsdp"):  # zero2 needs as much memory as zero1, and sends more
            options = tensor | pipeline | {"data_parallel_strategy": along}
            yield Choice(strategy="hybrid", axes=axes, along_data=along, options=options)


def _replica_sizes(world_size: int, ranks_per_host: int) -> Iterator[int]:
    """Yields numbers of ranks per replica for hsdp: the ranks of one host, two hosts, four hosts
    and so on. If there is only one host, yields half of its ranks."""
    size = ranks_per_host if ranks_per_host < world_size else world_size // 2
    while 1 < size < world_size:
        if world_size % size == 0:
            yield size
        size *= 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
