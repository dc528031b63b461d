"""Tracks the parameters of an optimizer's groups as set by a strategy, in order to detect
replacements.

From `as_distributed` on, a strategy knows what an optimizer updates: the model's parameters, or
this rank's pieces of them. Parameters that a script adds later would be updated by this rank alone,
with a gradient that nobody has summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from shoal_common.errors import ConfigurationError


class GroupMembers(list[torch.Tensor]):
    """List that a strategy assigns to `group["params"]`. It detects added parameters."""

    def __init__(self, members: Iterable[torch.Tensor]) -> None:
        super().__init__(members)
        self.given = tuple(self)


class Memberships:
    """Latest parameters of the groups of a run's optimizers as set by a strategy."""

    def __init__(self) -> None:
        self._groups: list[GroupMembers] = []

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Adopts the groups as the user created them."""
        for group in groups:
            group["params"] = GroupMembers(group["params"])
        self._groups = [group["params"] for group in groups]

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises ConfigurationError if a script has added parameters to a group or removed some.
        Cheap enough for each step."""
        for number, (group, members) in enumerate(zip(groups, self._groups, strict=False)):
            now = group["params"]
            if isinstance(now, GroupMembers) and now is not members:
                # the strategy has set a new layout
                members = self._groups[number] = now
            if len(now) != len(members.given) or any(
                one is not other for one, other in zip(now, members.given, strict=True)
            ):
                raise _changed(number, now, members.given)


def _changed(
    number: int, now: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> ConfigurationError:
    known, found = {id(one) for one in given}, {id(one) for one in now}
    come = [tuple(one.shape) for one in now if id(one) not in known]
    gone = [tuple(one.shape) for one in given if id(one) not in found]
    what = ", ".join(
        f"{len(shapes)} {verb} (shapes {shapes[:3]})"
        for verb, shapes in (("have come", come), ("are gone", gone))
        if shapes
    )
    return ConfigurationError(
        f"the members of parameter group {number} are not those that as_distributed put there (the "
        f"parameters, or this rank's pieces of them): {what or 'their order is another'}. "
        "Gradients of others are not summed over the ranks, and workers that join have the first "
        "ones. Change values in place (model.with_parameters(values)); give the optimizer all "
        "parameters before as_distributed, and freeze those that are not to be trained with "
        "requires_grad_(False)"
    )
