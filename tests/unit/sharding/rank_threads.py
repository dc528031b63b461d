"""Ranks as threads of the test, with the collectives that sharding needs and a count of the bytes
that they would send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tests.ranks.threads import run_threads

_DEADLINE_S = 60


class _Done:
    def wait(self) -> bool:
        return True


class RankThread:
    """The collectives of one rank."""

    lost = False

    def __init__(
        self, rank: int, world_size: int, slots: list[Any], barrier: threading.Barrier
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.calls: list[tuple[str, int]] = []
        self.sent_bytes = 0
        """Bytes sent by the optimal algorithms: (N-1)/N of the full tensor for an all-gather or a
        reduce-scatter."""
        self._slots = slots
        self._barrier = barrier

    def _exchange(self, kind: str, value: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append((kind, value.numel()))
        self._slots[self.rank] = (kind, value.numel(), value.clone())
        self._barrier.wait(_DEADLINE_S)
        everybody = list(self._slots)
        assert len({slot[:2] for slot in everybody}) == 1, (
            f"ranks disagree on the collective: {[slot[:2] for slot in everybody]}"
        )
        self._barrier.wait(_DEADLINE_S)
        return [slot[2] for slot in everybody]

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> _Done:
        gathered = self._exchange("all_gather", shard)
        full.copy_(torch.cat(gathered))
        self.sent_bytes += shard.numel() * shard.element_size() * (self.world_size - 1)
        return _Done()

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> _Done:
        gathered = self._exchange("reduce_scatter", full)
        shard.copy_(sum(gathered)[self.rank * shard.numel() : (self.rank + 1) * shard.numel()])
        self.sent_bytes += shard.numel() * shard.element_size() * (self.world_size - 1)
        return _Done()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(self._exchange("all_reduce", tensor)))
        self.sent_bytes += (
            2 * tensor.numel() * tensor.element_size() * (self.world_size - 1) // self.world_size
        )

    def all_reduce_short(self, tensor: torch.Tensor) -> bool:
        self.all_reduce(tensor)
        return True

    def all_gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return [
            gathered.tolist()
            for gathered in self._exchange("all_gather_integers", torch.tensor(list(values)))
        ]

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> None:
        self._slots[self.rank] = tensor.split(list(input_sizes))
        self._barrier.wait(_DEADLINE_S)
        received = [parts[self.rank] for parts in self._slots]
        assert [part.numel() for part in received] == list(output_sizes)
        output.copy_(torch.cat(received))
        self._barrier.wait(_DEADLINE_S)

    def exchange(self, payload: bytes) -> list[bytes]:
        self._slots[self.rank] = payload
        self._barrier.wait(_DEADLINE_S)
        values = list(self._slots)
        self._barrier.wait(_DEADLINE_S)
        return values


def run_ranks(world_size: int, body: Callable[[RankThread], Any]) -> list[Any]:
    """Runs `body` once per rank and returns its results by rank. If a rank fails, the other ranks
    stop waiting."""
    slots: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size)

    bodies = [
        partial(body, RankThread(rank, world_size, slots, barrier)) for rank in range(world_size)
    ]
    return run_threads(bodies, when_one_fails=barrier.abort)
