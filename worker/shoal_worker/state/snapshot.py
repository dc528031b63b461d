"""A state as it was at one moment, in host memory and apart from the live tensors, so that training may go on while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shoal_worker.state.tree import Json, flatten, unflatten


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What `flatten` gives, with contiguous CPU tensors that nothing else holds."""

    structure: Json
    tensors: dict[str, torch.Tensor]

    @classmethod
    def take(cls, state: object) -> Snapshot:
        """Copies `state`; blocks until the copy is complete, also from a device.

        Raises:
            ConfigurationError (STATE_UNSUPPORTED): the state holds something that cannot be carried.
        """
        structure, tensors = flatten(state)
        return cls(structure=structure, tensors={name: copied(tensor) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> Any:
        """The state again; it shares memory with this snapshot."""
        return unflatten(self.structure, self.tensors)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory."""
    resolved = tensor.resolve_conj().resolve_neg()
    return torch.empty(resolved.shape, dtype=resolved.dtype, device="cpu").copy_(resolved)
