"""SyncBatchNorm in an elastic job: each layer normalizes over all ranks' samples.

torch's own layer requires CUDA and the default process group, which an elastic job does not have.
The class of such layers in a trained model is therefore changed to `SynchronizedNorm`. These layers
communicate with the other ranks during passes (`ranks_in_passes.py`).

The statistics weight each rank's values as the step weights the rank's samples: a rank with fewer
samples counts less, and a rank with a stand-in batch does not count.

The method is that of Ioffe and Szegedy, "Batch Normalization", 2015, section 3, applied to all
ranks' samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from shoal_common.errors import ConfigurationError
from shoal_common.failpoints import failpoint
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.engine.step.ranks_in_passes import RanksInPasses
from shoal_worker.torch_internals import _BatchNorm, uncompiled


def synchronize_norms(module: nn.Module, session: StrategySession, *, sums: bool) -> None:
    """Makes the SyncBatchNorm layers of `module` normalize over all ranks of `session`. `sums`:
    True if losses are sums, not means."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    ranks = NormsOfRanks(session, sums=sums) if layers else None
    for layer in layers:
        layer.__class__ = SynchronizedNorm
        layer.__dict__["ranks"] = ranks


class SynchronizedNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm layer in a trained model. Behaves like BatchNorm in evaluation, in a copy of
    the model, and outside of steps."""

    ranks: NormsOfRanks | None

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes `input`, of shape (samples, channels, ...)."""
        factor = self.ranks.factor() if self.training and self.ranks is not None else None
        if self.ranks is None or factor is None:
            output: torch.Tensor = _BatchNorm.forward(self, input)
            return output
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return self.ranks.normalize(self, input, factor)


class _Statistics(NamedTuple):
    """Statistics of a layer's input, per channel, over all ranks."""

    mean: torch.Tensor
    variance: torch.Tensor
    """Biased variance."""
    values: float
    """Number of values per channel, over all ranks."""


class NormsOfRanks:
    """Connects one model's synchronized layers with the other ranks. Copies of the model have None
    in its place."""

    @override
    def __init__(self, session: StrategySession, *, sums: bool) -> None:
        self._ranks = RanksInPasses(session, "synchronized norms")
        self._sums = sums

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()

    def factor(self) -> float | None:
        """Returns the factor by which this rank's gradients are multiplied in the sum across ranks.
        Returns None if this pass does not belong to a step with other ranks.

        Raises:
            ConfigurationError: the step is split into micro-batches.
        """
        if self._ranks.in_micro_batches:
            raise ConfigurationError(
                "the model has a SyncBatchNorm, but the steps are divided into micro-batches: "
                "ranks have different numbers of them, so a layer cannot normalize over all "
                "ranks. Leave out micro_batch_size= (in a Trainer, the accumulation of "
                "gradients), or use BatchNorm or GroupNorm"
            )
        weight = self._ranks.weight
        return float(weight > 0) if weight is not None and self._sums else weight

    def normalize(
        self, layer: nn.SyncBatchNorm, values: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """Normalizes `values`, of shape (samples, channels, ...), over all ranks, and updates the
        layer's running statistics."""
        found = self._statistics(values.detach(), counts=factor > 0)
        if found is None:  # the step is aborted, so any values suffice
            zeros = values.new_zeros(values.shape[1])
            return nn.functional.batch_norm(
                values, zeros, zeros + 1, layer.weight, layer.bias, training=False
            )
        if found.values <= 1:
            raise ValueError(
                "expected more than 1 value per channel over all ranks when training, got input "
                f"size {tuple(values.shape)}"
            )
        _update_running_statistics(layer, found)
        inverse = torch.rsqrt(found.variance + layer.eps)
        arguments = (
            values,
            layer.weight,
            layer.bias,
            found.mean,
            inverse,
            found.values,
            factor,
            self,
        )
        output: torch.Tensor = _Normalized.apply(*arguments)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def sum(self, own: torch.Tensor) -> torch.Tensor | None:
        """Sums the flat tensors of all ranks in rank order. Returns None if the step is lost."""
        rows = self._gather(own)
        return rows.sum(0) if rows is not None else None

    @torch.no_grad()
    def _statistics(self, values: torch.Tensor, *, counts: bool) -> _Statistics | None:
        channels, wide = values.shape[1], _wide(values)
        count = values.numel() // channels if counts else 0
        if count:
            variance, mean = torch.var_mean(wide, _dimensions(values), correction=0)
            own = torch.cat([mean.double(), variance.double() * count])
        else:
            own = wide.new_zeros(2 * channels, dtype=torch.float64)
        rows = self._gather(torch.cat([own, own.new_tensor([float(count)])]))
        if rows is None:
            return None
        means, squares, numbers = rows.split([channels, channels, 1], dim=1)
        total = float(numbers.sum())
        mean = (means * numbers).sum(0) / max(total, 1.0)
        variance = (squares + numbers * (means - mean).square()).sum(0) / max(total, 1.0)
        return _Statistics(mean=mean.to(wide.dtype), variance=variance.to(wide.dtype), values=total)

    def _gather(self, own: torch.Tensor) -> torch.Tensor | None:
        return self._ranks.gather(own, before=lambda: failpoint("norms.before_gather"))


class _Normalized(torch.autograd.Function):
    """Computes (values - mean) / deviation * weight + bias. The backward pass sums the ranks'
    contributions to the gradients of the statistics."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        values, weight, bias, mean, inverse, count, factor, ranks = arguments
        ctx.save_for_backward(values, weight, mean, inverse)
        ctx.count, ctx.factor, ctx.ranks = count, factor, ranks
        scale = inverse if weight is None else inverse * weight
        normalized = (_wide(values) - _spread(mean, values)) * _spread(scale, values)
        return (normalized if bias is None else normalized + _spread(bias, values)).to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, mean, inverse = ctx.saved_tensors
        gradient, dimensions = _wide(gradients[0]), _dimensions(values)
        normalized = (_wide(values) - _spread(mean, values)) * _spread(inverse, values)
        of_bias, of_weight = gradient.sum(dimensions), (gradient * normalized).sum(dimensions)
        of_values = None
        if ctx.needs_input_grad[0]:
            # The loss is the sum over ranks of factor * the rank's loss, and the returned gradient
            # will be multiplied by the factor.
            own = torch.cat([of_bias, of_weight]).double() * ctx.factor
            summed = ctx.ranks.sum(own)
            if summed is None or ctx.factor == 0:
                of_values = torch.zeros_like(values)
            else:
                shift, slope = (summed / (ctx.count * ctx.factor)).to(gradient.dtype).chunk(2)
                scale = inverse if weight is None else inverse * weight
                through = gradient - _spread(shift, values) - normalized * _spread(slope, values)
                of_values = (through * _spread(scale, values)).to(values.dtype)
        wants_weight, wants_bias = ctx.needs_input_grad[1:3]
        return (
            of_values,
            of_weight.to(weight.dtype) if wants_weight else None,
            of_bias.to(gradients[0].dtype if weight is None else weight.dtype)
            if wants_bias
            else None,
            *(None,) * 5,
        )


def _update_running_statistics(layer: nn.SyncBatchNorm, found: _Statistics) -> None:
    """Updates the layer's running statistics with `found`, the statistics of the current batch."""
    if layer.running_mean is None or layer.running_var is None:
        return
    with torch.no_grad():
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        layer.running_mean.lerp_(found.mean.to(layer.running_mean), share)
        layer.running_var.lerp_(
            (found.variance * (found.values / (found.values - 1))).to(layer.running_var), share
        )


def _dimensions(values: torch.Tensor) -> list[int]:
    """Returns the indices of all dimensions except the channels."""
    return [0, *range(2, values.dim())]


def _spread(of_channels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Reshapes a vector with one element per channel so that it broadcasts over `values`, whose
    second dimension is the channels."""
    return of_channels.view(1, -1, *[1] * (values.dim() - 2))


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Converts values to a dtype wide enough for long sums."""
    return values if values.dtype is torch.float64 else values.float()


def _nobody() -> None:
    """Returns None. An unpickled model has None in place of its `NormsOfRanks`."""
