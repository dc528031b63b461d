"""What every engine does with a batch: call the module, find its loss, and follow the gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.step import Step
from shoal_worker.torch_internals import pytree

Loss = Callable[[Any, Any], torch.Tensor]
"""Computes the loss of an output and its targets: one number, such as the mean over the batch."""


def call_module(module: Callable[..., Any], inputs: Any) -> Any:
    """Calls `module` with `inputs`: a mapping as keyword arguments, a tuple as positional ones, all else as one argument."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(inputs)


def loss_of(output: Any, targets: Any, loss_fn: Loss | None) -> torch.Tensor:
    """The loss of an output: `loss_fn(output, targets)`, or the output's `.loss`.

    Raises:
        ConfigurationError: there is neither, or it is no one number.
    """
    if loss_fn is not None:
        return _one_number(loss_fn(output, targets))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f"train_step without loss_fn needs an output with a .loss tensor; the model returned {type(output).__name__}"
        )
    return _one_number(loss)


def _one_number(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ConfigurationError(f"the loss is {found}: expected a tensor of one element, such as the mean over the batch")
    return loss


def check_reproducible(config: ShardingConfiguration, step: Step) -> None:
    """Raises ConfigurationError for a step whose result would depend on the number of ranks although `deterministic=True` was asked for."""
    if config.deterministic and not step.in_micro_batches:
        raise ConfigurationError(
            "deterministic=True needs micro-batches, whose results do not depend on the number of ranks: give micro_batch_size= to "
            "the ElasticDataLoader and iterate over loader.steps()"
        )


def half_a_pass() -> PreconditionError:
    """A backward pass was caught in the middle, by a script that goes on."""
    return PreconditionError(
        "a backward pass of this step raised an error half way: some of its gradients were sent to the other ranks, others are missing, so "
        "this rank can neither finish the step nor take it back; let the error end the process",
        reason="BACKWARD_INCOMPLETE",
    )


def when_gradients_come(tree: Any, call: Callable[[Any], None], *, mode: Literal["any", "all"]) -> None:
    """Calls `call` once in a backward pass: when any, or all, of the tensors in `tree` that want a gradient get theirs."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else pytree.tree_leaves(tree)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(found) == 1:
        found[0].register_hook(call)  # what the other comes down to, at a tenth of its price
    elif found:
        torch.autograd.graph.register_multi_grad_hook(found, call, mode=mode)
