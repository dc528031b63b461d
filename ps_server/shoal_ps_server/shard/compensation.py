"""Delay compensation: what a gradient would be on the values as they are now, approximated from
what it is on those that a member pulled.

Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
Algorithm 2 and equation 10: to the gradient g is added `strength * g * g * (now - then)`, element
by element, whose g * g stands for the Hessian's diagonal. So a server keeps, for each member, the
values of the version that it pulled last: one copy for all members that pulled the same, and none
of the version that the server is at.

Which version a member has pulled is not in the journal: pulls wait for no disk. A push whose base
is not known here is applied as it came. The journal's record of a push says whether it is
compensated; a recovery looks ahead for these and keeps the values that they need
(storage/recovery.py). Belongs to the thread that owns the shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

import torch

from shoal_ps_server.shard.payload import largest_of


class BaseValues:
    """The values of one partition that gradients of pushes to come were computed on."""

    def __init__(
        self,
        *,
        pulled: Mapping[str, int] | None = None,
        copies: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Those of a snapshot, or none. Copies that nothing refers to stay until the next
        change."""
        self.pulled: dict[str, int] = dict(pulled or {})
        """Member -> version that it pulled last."""
        self.copies: dict[int, torch.Tensor] = dict(copies or {})
        """Version -> its values, if they have changed since."""
        self._due: Counter[int] = Counter()
        """Version -> how many pushes that will be compensated with it are on their way."""

    def note_pull(self, member_id: str, version: int) -> None:
        """A member pulls the version that the partition is at."""
        self.pulled[member_id] = version
        self._drop()

    def forget_all_but(self, members: Container[str]) -> None:
        """Drops what other members have pulled."""
        self.pulled = {
            member: version for member, version in self.pulled.items() if member in members
        }
        self._drop()

    def expect(self, version: int) -> None:
        """A push that will be compensated with this version is on its way."""
        self._due[version] += 1

    def settle(self, version: int) -> None:
        """It has been applied, or is refused."""
        self._due[version] -= 1
        self._due += Counter()  # without what is at 0
        self._drop()

    def before_change(self, version: int, values: torch.Tensor) -> None:
        """The values, which are those of `version`, are about to change."""
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
    """A gradient on the values `then` as one on the values `now`; all of one shape and type. 16-bit
    types are computed with in float32.

    `limit`: the largest magnitude that the result may have. Where any element of it would be
    larger, or no number, the gradient is returned as it is: so far off is no approximation any
    more.
    """
    wide = torch.float32 if gradient.element_size() < 4 else gradient.dtype
    own = gradient.to(wide)
    moved = now.to(wide) - then.to(wide)
    found = moved.mul_(own).mul_(own).mul_(strength).add_(own)
    return found.to(gradient.dtype) if largest_of(found) <= limit else gradient
