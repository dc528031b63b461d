"""Collectives among all ranks of a world in one thread. Each rank issues its part; after all have,
the first wait completes the collective.

Callers must issue on all ranks before they wait on any, as `reduce_together` does. The bytes that a
rank sends are counted as by `GradientCompressor.wire_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from shoal_worker.compression import CompressedReduction, GradientCompressor


class World:
    def __init__(self, size: int) -> None:
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.pending: dict[int, list] = {}

    def complete(self, number: int) -> None:
        issued = self.pending.pop(number, None)
        if issued is None:
            return
        assert len(issued) == len(self.ranks), (
            f"only {len(issued)} ranks issued collective {number}"
        )
        assert len({kind for kind, *_ in issued}) == 1
        outputs, inputs = [one[1] for one in issued], [one[2] for one in issued]
        kind = issued[0][0]
        for rank, output in enumerate(outputs):
            if kind == "all_reduce":
                output.copy_(torch.stack(inputs).sum(0))
            elif kind == "all_gather":
                output.view(len(inputs), -1).copy_(torch.stack([one.view(-1) for one in inputs]))
            else:
                output.copy_(torch.stack([one.view(len(inputs), -1)[rank] for one in inputs]))


class Handle:
    def __init__(self, complete: Callable[[], None]) -> None:
        self.wait = complete


class Rank:
    """The methods of a CommunicationBackend that exchanges use."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.issued, self.sent = world, rank, 0, Fraction(0)

    @property
    def world_size(self) -> int:
        return len(self.world.ranks)

    def all_reduce(self, tensor, *, async_op):
        self.sent += Fraction(2 * (self.world_size - 1) * tensor.nbytes, self.world_size)
        return self._issue("all_reduce", tensor, tensor)

    def all_gather(self, output, tensor, *, async_op):
        assert output.nbytes == self.world_size * tensor.nbytes
        self.sent += (self.world_size - 1) * tensor.nbytes
        return self._issue("all_gather", output, tensor)

    def all_to_all(self, output, tensor, *, async_op):
        assert output.nbytes == tensor.nbytes
        self.sent += Fraction((self.world_size - 1) * tensor.nbytes, self.world_size)
        return self._issue("all_to_all", output, tensor)

    def _issue(self, kind, output, tensor):
        number = self.issued
        self.issued += 1
        self.world.pending.setdefault(number, []).append((kind, output, tensor.clone()))
        # must not be read before the wait
        output.fill_(torch.nan if output.is_floating_point() else 0xAB)
        assert self.world.pending[number][-1] is self.world.pending[number][self.rank], (
            "ranks must issue in rank order"
        )
        return Handle(lambda: self.world.complete(number))


def reductions(compressor: GradientCompressor, size: int) -> list[CompressedReduction]:
    return [CompressedReduction(compressor) for _ in range(size)]


def reduce_together(
    ranks: Sequence[CompressedReduction],
    buckets: Sequence[torch.Tensor],
    *,
    step: int = 0,
    index: int = 0,
    shapes: Sequence[Sequence[int]] | None = None,
    commit: bool = True,
) -> tuple[list[torch.Tensor], World]:
    """Sums copies of one bucket over all ranks and commits. Returns the results, and the world,
    which has counted the sent bytes."""
    world = World(len(ranks))
    started = [
        one.start(bucket.clone(), backend, index=index, step=step, shapes=shapes)
        for one, bucket, backend in zip(ranks, buckets, world.ranks, strict=True)
    ]
    results = finish(started)
    if commit:
        for one in ranks:
            one.commit()
    return results, world


def finish(started: Sequence) -> list[torch.Tensor]:
    while not all(one.done for one in started):
        for one in started:
            one.advance()
    return [one.wait() for one in started]
