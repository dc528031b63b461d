"""Which elements travel from which rank to which when shards are cut anew. Pure arithmetic: all ranks compute the same from two layouts.

A unit's shards lie at positions: position p of w is the p-th of w equal parts of its flat vector. Before a move each old position is held
by one or more ranks (its owner, its buddy); after it, each rank holds the positions given to it. One all-to-all per vector does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal_worker.elastic.contract import StateLostError


class ShardsLostError(StateLostError):
    """Nobody holds some position any more."""

    def __init__(self, positions: Sequence[int], world_size: int) -> None:
        super().__init__(
            f"nobody holds the shards {list(positions)} of {world_size} any more: all ranks died at once that held them, and only a "
            "checkpoint can replace them. A script that calls shoal.save_checkpoint goes back to the newest by itself within an epoch; "
            "started anew, one that calls shoal.resume goes on from it",
            reason="SHARDS_LOST",
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Elements [start, end) of the flat vector that one rank sends to another, from one position to one position."""

    start: int
    end: int
    old_position: int
    new_position: int


def senders(holders: Mapping[int, Sequence[int]], positions: int) -> list[int]:
    """Who sends each old position: the rank among its holders that has sent least so far. `holders`: ranks by position.

    Raises:
        ShardsLostError: a position has none.
    """
    lost = [position for position in range(positions) if not holders.get(position)]
    if lost:
        raise ShardsLostError(lost, positions)
    load: dict[int, int] = {}
    chosen = []
    for position in range(positions):
        sender = min(holders[position], key=lambda rank: (load.get(rank, 0), rank))
        load[sender] = load.get(sender, 0) + 1
        chosen.append(sender)
    return chosen


def runs(*, numel: int, old_shard: int, new_shard: int, sends: Sequence[int], gets: Sequence[Sequence[int]]) -> list[list[list[Run]]]:
    """[sender][receiver] -> the runs that travel, in the order in which they lie in the message.

    Args:
        numel: elements of the flat vector, without padding.
        old_shard, new_shard: elements of a shard before and after, padding included.
        sends: the rank that sends each old position.
        gets: the new positions that each rank of the new group will hold.
    """
    table: list[list[list[Run]]] = [[[] for _ in gets] for _ in gets]
    for receiver, positions in enumerate(gets):
        for new_position in positions:
            first, last = new_position * new_shard, min(numel, (new_position + 1) * new_shard)
            for old_position in range(first // old_shard, -(-last // old_shard) if last > first else first // old_shard):
                start, end = max(first, old_position * old_shard), min(last, (old_position + 1) * old_shard)
                if start < end:
                    run = Run(start=start, end=end, old_position=old_position, new_position=new_position)
                    table[sends[old_position]][receiver].append(run)
    return table


def message(table: Sequence[Sequence[Sequence[Run]]], rank: int, shards: Mapping[int, torch.Tensor], old_shard: int) -> torch.Tensor:
    """What `rank` sends, to all receivers one after the other. `shards`: the old positions that it holds."""
    parts = [
        shards[run.old_position][run.start - run.old_position * old_shard : run.end - run.old_position * old_shard]
        for to_receiver in table[rank]
        for run in to_receiver
    ]
    return torch.cat(parts) if parts else next(iter(shards.values())).new_empty(0)


def sizes(table: Sequence[Sequence[Sequence[Run]]], rank: int) -> tuple[list[int], list[int]]:
    """Elements that `rank` receives from each rank, and sends to each."""
    received = [sum(run.end - run.start for run in row[rank]) for row in table]
    sent = [sum(run.end - run.start for run in to_receiver) for to_receiver in table[rank]]
    return received, sent


def place(
    table: Sequence[Sequence[Sequence[Run]]], rank: int, received: torch.Tensor, shards: Mapping[int, torch.Tensor], new_shard: int
) -> None:
    """Puts what `rank` received where it belongs. `shards`: its new positions, to be filled."""
    offset = 0
    for row in table:
        for run in row[rank]:
            length, begins = run.end - run.start, run.start - run.new_position * new_shard
            shards[run.new_position][begins : begins + length] = received[offset : offset + length]
            offset += length
