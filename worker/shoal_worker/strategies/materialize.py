"""Memory for a module that was built on the meta device, before it receives its values.

torch makes new parameters for that. An optimizer made from the old ones would go on with those, and change nothing without a word; modules
that shared a parameter would have one each.
"""

from __future__ import annotations

import torch
from torch import nn


def materialize(module: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Gives `module` memory on `device`, with any values in it. `optimizer` gets the new parameters; what was shared is shared again."""
    before = dict(module.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(before.items())}
    module.to_empty(device=device)
    after = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in before.items():
        if name != first[id(parameter)]:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, after[first[id(parameter)]])
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [after[first[id(parameter)]] for parameter in group["params"]]
