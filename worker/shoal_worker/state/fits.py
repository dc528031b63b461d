"""Checks whether a saved state fits the model or optimizer that loads it, before anything changes.
Also checks whether an optimizer's state can be sharded.

A torch model's `load_state_dict` copies matching entries and raises only afterwards. A torch
optimizer's `load_state_dict` compares the numbers of groups and parameters, but accepts moments of
any shape; the next step then fails or broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError
from torch import nn


def check_tensors_fit(
    tensors: Mapping[str, torch.Tensor], module: nn.Module, shapes: Mapping[str, torch.Size]
) -> None:
    """Checks that a state dict, as returned by `full_state_dict` under any strategy, fits a module.
    `shapes`: unsharded shapes of the tensors in `module`'s state.

    Raises:
        CorruptDataError (MODEL_DIFFERS): names or shapes differ."""
    differing = sorted(set(tensors) ^ set(shapes)) or [
        name for name, shape in shapes.items() if tensors[name].shape != shape
    ]
    if differing:
        raise CorruptDataError(
            f"the state belongs to a different model than this {type(module).__name__}: names or "
            f"shapes differ, among them {differing[:3]}; load it into the model that saved it",
            reason="MODEL_DIFFERS",
        )


ELEMENTWISE: Final = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adadelta",
        "Adagrad",
        "RMSprop",
        "Rprop",
        "ASGD",
    }
)
"""Optimizers of torch.optim that compute the update of each element only from that element's
gradient and state. Their state therefore has the parameters' shapes."""

WHOLE_TENSORS: Final = frozenset({"Adafactor", "Muon", "LAMB", "RowWiseAdagrad"})
"""Optimizers of torch.optim and shoal.optim that compute the update of each tensor only from that
tensor's gradient and state, but need the entire tensor."""
ACROSS_TENSORS: Final = frozenset({"LBFGS"})
"""Optimizers of torch.optim whose update of a tensor depends on other tensors."""


def check_fits(
    saved: Any, optimizer: torch.optim.Optimizer, shapes: Sequence[Sequence[torch.Size]]
) -> None:
    """Checks that a state dict of a single process's optimizer fits this optimizer. `shapes`:
    unsharded shapes of the parameters in each of this optimizer's groups.

    Raises:
        CorruptDataError (OPTIMIZER_DIFFERS): `saved` is not such a state, or belongs to a different
            optimizer or different parameters.
    """
    groups, state = (
        (saved.get("param_groups"), saved.get("state")) if isinstance(saved, dict) else (None, None)
    )
    if (
        not isinstance(groups, list)
        or not isinstance(state, dict)
        or not all(isinstance(g, dict) and "params" in g for g in groups)
    ):
        raise _differs("it lacks param_groups or state")
    theirs, here = [len(group["params"]) for group in groups], [len(group) for group in shapes]
    if theirs != here:
        raise _differs(
            f"its parameter groups have {theirs} parameters, but this optimizer's have {here}"
        )
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        # New releases of torch add flags, and schedulers add their own settings, so either may be
        # missing.
        settled = {
            name
            for name, value in optimizer.defaults.items()
            if value is not None and not isinstance(value, bool)
        }
        lacking = sorted(settled & own.keys() - group.keys())
        if lacking:
            raise _differs(f"its settings lack {lacking}, which {type(optimizer).__name__} has")
    if type(optimizer).__name__ not in ELEMENTWISE:
        return
    numbered = dict(
        zip(
            (n for g in groups for n in g["params"]),
            (shape for group in shapes for shape in group),
            strict=True,
        )
    )
    for number, own_state in state.items():
        for key, value in own_state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > 0
                and value.shape != numbered.get(number)
            ):
                raise _differs(
                    f"{key!r} of its parameter {number} has shape {tuple(value.shape)}, but the "
                    f"parameter has shape {numbered.get(number)}"
                )


def _differs(what: str) -> CorruptDataError:
    return CorruptDataError(
        f"the state belongs to another optimizer: {what}; nothing was changed; load it into the "
        "optimizer that saved it",
        reason="OPTIMIZER_DIFFERS",
    )


def check_elementwise(optimizer: torch.optim.Optimizer, *, elementwise: bool) -> None:
    """Raises ConfigurationError unless the optimizer has not stepped yet and its update is
    elementwise, as known to Shoal or declared by the user."""
    if type(optimizer).__name__ not in ELEMENTWISE and not elementwise:
        raise ConfigurationError(
            f"{type(optimizer).__name__} is not known to update each element independently, but "
            "this strategy splits parameters into flat pieces; use one of "
            f"{', '.join(sorted(ELEMENTWISE))}, or pass elementwise_optimizer=True if it does"
        )
    _check_fresh(optimizer)


def takes_whole_tensors(
    optimizer: torch.optim.Optimizer, *, elementwise: bool, whole_tensors: bool | None
) -> bool:
    """Returns whether an optimizer needs entire tensors. `elementwise`, `whole_tensors`: the user's
    declarations.

    Raises:
        ConfigurationError: the optimizer is unknown and not declared, the declaration is wrong, or
            the optimizer has stepped before.
    """
    name = type(optimizer).__name__
    if name in ACROSS_TENSORS:
        raise ConfigurationError(
            f"{name} updates all parameters together, from sums over all of them, but no rank has "
            "all parameters with this strategy; use strategy='ddp', or an optimizer that updates "
            f"each tensor independently, such as {', '.join(sorted(WHOLE_TENSORS))}"
        )
    if elementwise and (whole_tensors or name in WHOLE_TENSORS):
        reason = (
            "whole_tensors=True declares that it updates whole tensors"
            if whole_tensors
            else "it updates whole tensors"
        )
        raise ConfigurationError(
            f"elementwise_optimizer=True is wrong for {name}: {reason}; leave "
            "elementwise_optimizer out"
        )
    if whole_tensors is False and name in WHOLE_TENSORS:
        raise ConfigurationError(
            f"whole_tensors=False is wrong for {name}, which updates whole tensors; leave "
            "whole_tensors out"
        )
    if not elementwise and not whole_tensors and name not in ELEMENTWISE | WHOLE_TENSORS:
        raise ConfigurationError(
            f"{name} is unknown to Shoal: pass elementwise_optimizer=True if it updates each "
            "element independently, so that parameters can be split into flat pieces, or "
            "whole_tensors=True if it updates each tensor independently. An optimizer that "
            "combines several tensors needs strategy='ddp'"
        )
    _check_fresh(optimizer)
    return bool(whole_tensors) or name in WHOLE_TENSORS


def _check_fresh(optimizer: torch.optim.Optimizer) -> None:
    if any(float(own.get("step", 1)) > 0 for own in optimizer.state.values()):
        raise ConfigurationError(
            "the optimizer has already taken steps; call as_distributed first, then load its state"
        )
