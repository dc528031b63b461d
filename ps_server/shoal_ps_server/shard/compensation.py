"""Delay compensation: converts a gradient computed on earlier values to an approximate gradient on
the current values.

Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
Algorithm 2 and equation 10: adds `strength * g * g * (now - then)` to the gradient g, element by
element, where g * g approximates the diagonal of the Hessian. A server therefore keeps the values
of the version that each member pulled last. All members with the same version share one copy, and
the current version needs no copy.

Pulled versions are not in the journal, since pulls do not wait for the disk. A push whose base
version is unknown is applied without compensation. The journal's record of a push contains whether
it was compensated. A recovery therefore searches the journal for such pushes before it replays
them, and keeps the values that they need (storage/recovery.py). Belongs to the thread that owns the
shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

import torch

from shoal_ps_server.shard.payload import largest_of


class BaseValues:
    """Earlier values of a partition that are needed to compensate future pushes, because members
    have pulled these values and may push gradients computed on them."""

    def __init__(
        self,
        *,
        pulled: Mapping[str, int] | None = None,
        copies: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Restores the values from a snapshot; by default there are none. Copies that no member
        needs are kept until the next change."""
        self.pulled: dict[str, int] = dict(pulled or {})
        """Member -> last version that it pulled."""
        self.copies: dict[int, torch.Tensor] = dict(copies or {})
        """Version -> its values, for versions that are no longer current."""
        self._due: Counter[int] = Counter()
        """Version -> number of pending pushes that will be compensated with its values."""

    def note_pull(self, member_id: str, version: int) -> None:
        """Records that a member is pulling the current version."""
        self.pulled[member_id] = version
        self._drop()

    def forget_all_but(self, members: Container[str]) -> None:
        """Forgets the versions pulled by members that are not in `members`."""
        self.pulled = {
            member: version for member, version in self.pulled.items() if member in members
        }
        self._drop()

    def expect(self, version: int) -> None:
        """Registers a pending push that will be compensated with the values of `version`."""
        self._due[version] += 1

    def settle(self, version: int) -> None:
        """Unregisters a push that has been applied or refused. `version`: version whose values
        compensated it."""
        self._due[version] -= 1
        self._due += Counter()  # removes counts of 0
        self._drop()

    def before_change(self, version: int, values: torch.Tensor) -> None:
        """Keeps a copy of the values of `version`, the current version, if they will be needed
        later. Must be called before the values change."""
        if version in self._needed():
            self.copies[version] = values.clone()

    def _needed(self) -> set[int]:
        return {*self.pulled.values(), *self._due}

    def _drop(self) -> None:
        if self.copies:
            needed = self._needed()
            self.copies = {
                version: copy for version, copy in self.copies.items() if version in needed
            }


def compensated(
    gradient: torch.Tensor, *, now: torch.Tensor, then: torch.Tensor, strength: float, limit: float
) -> torch.Tensor:
    """Converts a gradient on the values `then` to an approximate gradient on the values `now`. All
    tensors have the same shape and dtype; 16-bit types are computed in float32.

    `limit`: largest magnitude allowed in the result. If any element would exceed it or be NaN, the
    approximation is too inaccurate, and the gradient is returned unchanged.
    """
    wide = torch.float32 if gradient.element_size() < 4 else gradient.dtype
    own = gradient.to(wide)
    moved = now.to(wide) - then.to(wide)
    found = moved.mul_(own).mul_(own).mul_(strength).add_(own)
    return found.to(gradient.dtype) if largest_of(found) <= limit else gradient
