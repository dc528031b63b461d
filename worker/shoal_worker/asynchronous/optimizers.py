"""A worker's two optimizers: the user's optimizer, and the optimizer that the servers run. Without
inner steps, they are the same object.

Each worker controls the settings of both (learning rates, and the position in a schedule). This
module provides these settings to the servers, to joiners and to checkpoints. The state of an
optimizer (momentum, moments) stays where the optimizer steps: on the servers or, with inner steps,
on the worker. This module neither takes steps nor sends anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.parameter_servers.options import AsyncOptions, Revision, ServerOptimizer


class Optimizers:
    """The user's optimizer of a worker, and the optimizer that the servers run. Both have the same
    parameters."""

    def __init__(
        self, own: torch.optim.Optimizer, options: AsyncOptions, names: Mapping[int, str]
    ) -> None:
        """`own`: the user's optimizer. `names`: id(parameter) -> name of the parameter.

        Raises:
            ConfigurationError: the two optimizers have different parameters, the outer one has step
                hooks, or `ServerOptimizer` rejects the servers' optimizer.
        """
        self.own = own
        self.on_servers = own if options.outer_optimizer is None else options.outer_optimizer
        """The outer optimizer if there are inner steps, otherwise the user's optimizer."""
        self._steps_here = options.outer_optimizer is not None
        check_same_parameters(own, self.on_servers, names)
        self._refuse_outer_hooks()
        argument = "outer_optimizer" if self._steps_here else "optimizer"
        self.schedule = ServerOptimizer(
            self.on_servers, names, delay_compensation=options.delay_compensation, argument=argument
        )

    def look(self) -> Revision:
        """Records changes that schedulers have made to the settings of the servers' optimizer, and
        returns the revision of these settings.

        Raises:
            ConfigurationError: the outer optimizer has step hooks.
        """
        self._refuse_outer_hooks()
        return self.schedule.look()

    def _refuse_outer_hooks(self) -> None:
        outer = self.on_servers
        if self._steps_here and (
            outer._optimizer_step_pre_hooks or outer._optimizer_step_post_hooks
        ):
            raise ConfigurationError(
                f"outer_optimizer={type(outer).__name__} has a step hook, which would never run: "
                "the parameter servers step this optimizer. Do the hook's work in the loop, after "
                "a step with which model.steps_in_round becomes 0"
            )

    def schedules(self) -> dict[str, Any]:
        """Returns the optimizers' settings and schedule positions, for joiners. Moments of an inner
        optimizer are not included: on a joiner, they start from zero."""
        state = {"groups": self.own.state_dict()["param_groups"], "revision": self.look().number}
        if self._steps_here:
            state["outer_groups"] = self.on_servers.state_dict()["param_groups"]
        return state

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Loads what `schedules` has returned on a peer."""
        _load_settings(self.own, state["groups"])
        if self._steps_here:
            _load_settings(self.on_servers, state["outer_groups"])
        self.schedule.adopt(state["revision"])

    def kept_here(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the part of a state dict that this worker loads. Without inner steps, that is
        everything except momentum and moments: the servers have these, so only a synchronous run
        can have saved them."""
        return (
            state if self._steps_here else {"state": {}, "param_groups": state.get("param_groups")}
        )

    def check_checkpoint(self, state: Mapping[str, Any] | None) -> None:
        """Raises CorruptDataError (OPTIMIZER_DIFFERS) unless `state` is a state dict of the user's
        optimizer."""
        groups = state["param_groups"] if state is not None else []
        own = self.own.param_groups
        if len(groups) != len(own) or any(
            mine.keys() - loaded.keys() - {"initial_lr"}
            for mine, loaded in zip(own, groups, strict=True)
        ):
            raise CorruptDataError(
                f"the checkpoint was saved with another optimizer: its {len(groups)} parameter "
                f"groups differ from the {len(own)} groups of this optimizer in number or "
                "settings; resume with the optimizer that was saved, or from another checkpoint",
                reason="OPTIMIZER_DIFFERS",
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state that has passed `check_checkpoint`."""
        if self._steps_here and state["state"]:
            self.own.load_state_dict(dict(state))
        else:  # workers do not use momentum and moments of a synchronous run
            _load_settings(self.own, state["param_groups"])


def _load_settings(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Loads the settings of parameter groups into the optimizer. Leaves its state as it is, because
    some optimizers create state in their constructor."""
    optimizer.load_state_dict({"state": optimizer.state_dict()["state"], "param_groups": groups})


def check_same_parameters(
    inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, names: Mapping[int, str]
) -> None:
    """Raises ConfigurationError unless both optimizers have the same parameters. `names`:
    id(parameter) -> name of the parameter."""
    here, there = (
        {id(p) for group in each.param_groups for p in group["params"]} for each in (inner, outer)
    )
    if differing := sorted(
        names.get(each, "a tensor that does not belong to the model") for each in here ^ there
    ):
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ConfigurationError(
            f"outer_optimizer={type(outer).__name__} and the optimizer must have the same "
            f"parameters, but these are in only one of the two: {', '.join(differing[:5])}{more}"
        )
