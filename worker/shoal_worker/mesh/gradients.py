"""The gradients of a step as far as this rank holds them: added up over micro-batches by weight, then over the replicas.

Beside them lie how the buffers changed and which parameters were used, which the replicas sum as well. It knows nothing of how a step ends.
The training thread owns it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from shoal_worker.elastic.group import Group


class MeshGradients(abc.ABC):
    """Of one division of the ranks."""

    def __init__(self, pieces: Mapping[str, nn.Parameter], *, sums: int, buffers: int, averages: bool, device: torch.device) -> None:
        """`sums`: elements of gradients that travel with the rest. `buffers`: elements of them. `averages`: losses are means, so gradients
        weigh what their samples do."""
        self._pieces = {name: piece for name, piece in pieces.items() if piece.requires_grad}
        self._averages = averages
        wide = any(piece.dtype == torch.float64 for piece in self._pieces.values())
        sizes = [sums, buffers, len(self._pieces), 1]
        self._flat = torch.zeros(sum(sizes), dtype=torch.float64 if wide else torch.float32, device=device)
        parts: Sequence[torch.Tensor] = self._flat.split(sizes)
        self._sums, self._changes, self._presence, self._weight = parts

    @abc.abstractmethod
    def added(self, name: str) -> torch.Tensor:
        """What was added of one parameter's gradient and is not summed over the replicas yet, in its shape; not divided by anything."""

    @abc.abstractmethod
    def squared_norm(self) -> float:
        """What this rank counts of the sums' squared norm."""

    @abc.abstractmethod
    def hand_out(self, divisor: float) -> None:
        """Gives the optimizer its gradients, the sums over `divisor`: none for parameters that no replica used."""

    @abc.abstractmethod
    def scale(self, factor: float) -> None:
        """What was handed out."""

    @abc.abstractmethod
    def own_norm(self) -> float:
        """Of what was handed out here of this rank's own."""

    @abc.abstractmethod
    def forget(self) -> None:
        """What was handed out."""

    def begin(self) -> None:
        """Of a step."""
        self._flat.zero_()

    def add(self, weight: float, found: Mapping[str, torch.Tensor | None], changes: torch.Tensor) -> None:
        """What some passes have left: gradients by name, and changes of buffers. Passes that weigh nothing may have left anything, and are
        left out."""
        if not weight > 0:
            return
        for name in self._pieces:
            gradient = found.get(name)
            if gradient is not None:
                own = self.added(name)
                own.add_(gradient.to(own.dtype), alpha=self.factor(weight))
        self._presence += torch.tensor([found.get(name) is not None for name in self._pieces]).to(self._presence)
        self._changes.add_(changes.to(self._flat), alpha=weight)
        self._weight += weight

    def factor(self, weight: float) -> float:
        """Of the gradients of a pass that weighs so much."""
        return weight if self._averages else float(weight > 0)

    @property
    def any_left(self) -> bool:
        """Passes have left gradients here already, before `add`."""
        return False

    sums_passes = False
    """The replicas sum each pass, which `sum_pass` does, instead of the step."""

    @abc.abstractmethod
    def sum_pass(self) -> None:
        """What was added since the last time is whole: also of what this rank shares with others of its replica. A failure marks the step
        lost."""

    def take_part(self) -> None:
        """In a pass of other replicas, for which this one has no samples."""
        if self.sums_passes:
            self.sum_pass()

    def sum_over(self, replicas: Group) -> None:
        """Of the step. Raises MembershipChanged."""
        replicas.all_reduce(self._flat)

    @property
    def names(self) -> Sequence[str]:
        """The parameters that have gradients here."""
        return list(self._pieces)

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


class ReplicatedGradients(MeshGradients):
    """Each replica has them whole. They lie in one flat vector with the rest, so that the replicas' sum is one all-reduce."""

    def __init__(
        self, pieces: Mapping[str, nn.Parameter], *, counts: Callable[[str], bool], buffers: int, averages: bool, device: torch.device
    ) -> None:
        """`counts(name)`: this rank counts the parameter in the norm."""
        sizes = [piece.numel() for piece in pieces.values() if piece.requires_grad]
        super().__init__(pieces, sums=sum(sizes), buffers=buffers, averages=averages, device=device)
        parts: Sequence[torch.Tensor] = self._sums.split(sizes)
        self._own = {name: part.view(piece.shape) for (name, piece), part in zip(self._pieces.items(), parts, strict=True)}
        self._counted = [name for name in self._pieces if counts(name)]

    def added(self, name: str) -> torch.Tensor:
        """See `MeshGradients`."""
        return self._own[name]

    def sum_pass(self) -> None:
        """See `MeshGradients`: not wanted."""

    def squared_norm(self) -> float:
        """See `MeshGradients`."""
        return sum(_squared_norm(self._own[name]) for name in self._counted)

    def hand_out(self, divisor: float) -> None:
        """See `MeshGradients`."""
        present = self.present
        for name, piece in self._pieces.items():
            piece.grad = self._own[name].div(divisor).to(piece.dtype) if present[name] else None

    def scale(self, factor: float) -> None:
        """See `MeshGradients`."""
        for piece in self._pieces.values():
            if piece.grad is not None:
                piece.grad.mul_(factor)

    def own_norm(self) -> float:
        """See `MeshGradients`."""
        return math.sqrt(sum(_squared_norm(p.grad) for p in self._pieces.values() if p.grad is not None))

    def forget(self) -> None:
        """See `MeshGradients`."""
        for piece in self._pieces.values():
            piece.grad = None


def _squared_norm(gradient: torch.Tensor) -> float:
    """In float64: the squares of large gradients are beyond float32."""
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
