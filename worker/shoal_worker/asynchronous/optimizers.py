"""A worker's optimizers: the user's, and the one run by the servers. They are the same except with
inner steps.

Each worker controls their settings (learning rates and the position in a schedule); this module
passes them to the servers, to joiners and into checkpoints. The state of an optimizer (momentum,
moments) stays where the step is taken: on the servers or, with inner steps, on the worker. This
module takes no steps and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.parameter_servers.options import AsyncOptions, Revision, ServerOptimizer


class Optimizers:
    """The user's and the servers' optimizer, over the same parameters."""

    def __init__(
        self, own: torch.optim.Optimizer, options: AsyncOptions, names: Mapping[int, str]
    ) -> None:
        """Wraps `own`, the user's optimizer; `names` maps id(parameter) to its name.

        Raises:
            ConfigurationError: the optimizers have different parameters, or the outer one has step
                hooks; and as `ServerOptimizer`.
        """
        self.own = own
        self.on_servers = own if options.outer_optimizer is None else options.outer_optimizer
        """The outer optimizer with inner steps, otherwise the user's."""
        self._steps_here = options.outer_optimizer is not None
        check_same_parameters(own, self.on_servers, names)
        self._refuse_outer_hooks()
        argument = "outer_optimizer" if self._steps_here else "optimizer"
        self.schedule = ServerOptimizer(
            self.on_servers, names, delay_compensation=options.delay_compensation, argument=argument
        )

    def look(self) -> Revision:
        """Records changes that schedulers have made to the optimizer run by the servers.

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
        """Returns the settings and their position in the schedule, for joiners. Without an inner
        optimizer's moments, which a joiner starts anew."""
        state = {"groups": self.own.state_dict()["param_groups"], "revision": self.look().number}
        if self._steps_here:
            state["outer_groups"] = self.on_servers.state_dict()["param_groups"]
        return state

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Takes over a peer's `schedules`."""
        _load_settings(self.own, state["groups"])
        if self._steps_here:
            _load_settings(self.on_servers, state["outer_groups"])
        self.schedule.adopt(state["revision"])

    def kept_here(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the part of a state dict that this worker loads. Momentum and moments from a
        synchronous run are not kept on the workers, except with inner steps."""
        return (
            state if self._steps_here else {"state": {}, "param_groups": state.get("param_groups")}
        )

    def check_checkpoint(self, state: Mapping[str, Any] | None) -> None:
        """Raises CorruptDataError (OPTIMIZER_DIFFERS) unless this is a state dict of the user's
        optimizer."""
        groups = state["param_groups"] if state is not None else []
        own = self.own.param_groups
        if len(groups) != len(own) or any(
            mine.keys() - loaded.keys() - {"initial_lr"}
            for mine, loaded in zip(own, groups, strict=True)
        ):
            raise CorruptDataError(
                f"the checkpoint belongs to another optimizer: its {len(groups)} parameter groups "
                f"differ from the {len(own)} of this optimizer in number or settings; resume with "
                "the optimizer that was saved, or from another checkpoint",
                reason="OPTIMIZER_DIFFERS",
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state accepted by `check_checkpoint`."""
        if self._steps_here and state["state"]:
            self.own.load_state_dict(dict(state))
        else:  # momentum and moments of a synchronous run have no place on the workers
            _load_settings(self.own, state["param_groups"])


def _load_settings(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    """Takes over the settings of parameter groups. State stays: some optimizers make theirs with
    themselves."""
    optimizer.load_state_dict({"state": optimizer.state_dict()["state"], "param_groups": groups})


def check_same_parameters(
    inner: torch.optim.Optimizer, outer: torch.optim.Optimizer, names: Mapping[int, str]
) -> None:
    """Raises ConfigurationError unless both optimizers are made from the same parameters. `names`:
    id(parameter) -> its name."""
    here, there = (
        {id(p) for group in each.param_groups for p in group["params"]} for each in (inner, outer)
    )
    if differing := sorted(
        names.get(each, "a tensor that is not of the model") for each in here ^ there
    ):
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ConfigurationError(
            f"outer_optimizer={type(outer).__name__} and the optimizer must have the same "
            f"parameters, but one of them lacks {', '.join(differing[:5])}{more}"
        )
