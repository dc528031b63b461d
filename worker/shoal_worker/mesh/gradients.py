"""The gradients of a step as far as this rank holds them: added up over micro-batches by weight, then over the replicas.

They lie in one flat vector, beside how the buffers changed and which parameters were used, so that the replicas' sum is one all-reduce. It
knows nothing of how a step ends. The training thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal_worker.elastic.group import Group


class MeshGradients:
    """Of one division of the ranks."""

    def __init__(
        self,
        pieces: Mapping[str, nn.Parameter],
        *,
        collect: Callable[[], Mapping[str, torch.Tensor | None]],
        counts: Callable[[str], bool],
        buffers: int,
        averages: bool,
        device: torch.device,
    ) -> None:
        """`collect()` takes this rank's gradients out of the module, by name. `counts(name)`: this rank counts the parameter in the norm.
        `buffers`: elements of them. `averages`: losses are means, so gradients weigh what their samples do."""
        self._pieces = {name: piece for name, piece in pieces.items() if piece.requires_grad}
        self._collect, self._averages = collect, averages
        self._counted = [name for name in self._pieces if counts(name)]
        wide = any(piece.dtype == torch.float64 for piece in self._pieces.values())
        sizes = [*(piece.numel() for piece in self._pieces.values()), buffers, len(self._pieces), 1]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64 if wide else torch.float32, device=device)
        *sums, self._changes, self._presence, self._weight = self._flat.split(sizes)
        self.sums = {name: total.view(piece.shape) for (name, piece), total in zip(self._pieces.items(), sums, strict=True)}
        """By name, not divided by anything."""

    def begin(self) -> None:
        """Of a step."""
        self._flat.zero_()

    def add(self, weight: float, changes: torch.Tensor) -> None:
        """What the passes since the last time have left in the module. One that weighs nothing may hold anything, and is left out."""
        found = self._collect()
        if not weight > 0:
            return
        for index, name in enumerate(self._pieces):
            gradient = found.get(name)
            if gradient is not None:
                self.sums[name].add_(gradient.to(self._flat.dtype), alpha=weight if self._averages else 1.0)
                self._presence[index] += 1
        self._changes.add_(changes.to(self._flat), alpha=weight)
        self._weight += weight

    @property
    def like(self) -> torch.Tensor:
        """Of the dtype and on the device that changes of buffers are wanted in."""
        return self._flat

    @property
    def present(self) -> Mapping[str, bool]:
        """Which parameters were used."""
        return {name: count > 0 for name, count in zip(self._pieces, self._presence.tolist(), strict=True)}

    def use(self, names: Sequence[str]) -> None:
        """Parameters that another rank, which holds them too, has used."""
        for index, name in enumerate(self._pieces):
            if name in names:
                self._presence[index] += 1

    def sum_over(self, replicas: Group) -> None:
        """Raises MembershipChanged."""
        replicas.all_reduce(self._flat)

    @property
    def divisor(self) -> float:
        """Of the sums."""
        return self.total_weight if self._averages else 1.0

    @property
    def total_weight(self) -> float:
        """Of the whole batch."""
        return float(self._weight) or 1.0

    @property
    def changes(self) -> torch.Tensor:
        """Of the buffers, the mean over the batch."""
        mean: torch.Tensor = self._changes / self.total_weight
        return mean

    def squared_norm(self) -> float:
        """What this rank counts of the sums' squared norm."""
        return sum(float(self.sums[name].double().square().sum()) for name in self._counted)

    def hand_out(self, divisor: float) -> None:
        """Gives the optimizer its gradients, the sums over `divisor`: none for parameters that no replica used."""
        present = self.present
        for name, piece in self._pieces.items():
            piece.grad = self.sums[name].div(divisor).to(piece.dtype) if present[name] else None

    def scale(self, factor: float) -> None:
        """What was handed out."""
        for piece in self._pieces.values():
            if piece.grad is not None:
                piece.grad.mul_(factor)

    def own_norm(self) -> float:
        """Of what was handed out here."""
        return math.sqrt(sum(float(p.grad.double().square().sum()) for p in self._pieces.values() if p.grad is not None))

    def forget(self) -> None:
        """What was handed out."""
        for piece in self._pieces.values():
            piece.grad = None
