"""Optimizers that torch lacks, as subclasses of `torch.optim.Optimizer`. `shoal.optim` exports
them. Workers accept them from users, and parameter servers run them.

`LAMB` combines all elements of a tensor, and `RowWiseAdagrad` all elements of a row. Both are
therefore correct only for tensors that are not split (in a single process, or under strategies that
replicate the model); strategies that split tensors refuse them.

Values and state of 16-bit types are computed in float32 and rounded once. Norms do not depend on
the number of threads, so a parameter server that recovers on a different machine computes the same
bits (`torch.linalg.vector_norm` guarantees this, `sum` does not).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shoal_common.errors import ConfigurationError


class _OwnOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers in this module."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. Returns the loss that `closure` recomputes;
        None if no closure is given.

        Raises:
            ConfigurationError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.numel():
                    continue
                if parameter.grad.layout is not torch.strided:
                    raise ConfigurationError(
                        f"{type(self).__name__}: a gradient has layout {parameter.grad.layout}; "
                        "expected a dense gradient: create the embedding with sparse=False"
                    )
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in alike.values():
                gradients = [
                    _wide(parameter.grad) for parameter in parameters if parameter.grad is not None
                ]
                self._update(
                    parameters,
                    list(torch._foreach_neg(gradients)) if group["maximize"] else gradients,
                    group,
                )
        return loss

    def _update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Updates parameters that share a device and a dtype. `gradients`: gradients to descend
        along (negated if `maximize` is set), in the dtype used for computation; read-only."""
        raise NotImplementedError


class LAMB(_OwnOptimizer):
    """Adam, with each tensor's step scaled to the learning rate times the norm of the tensor.

    Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes", ICLR 2020, with its bias correction and phi(z) = z: with r = m' / (sqrt(v') + eps) and
    u = r + weight_decay * w the step is `lr * |w| / |u| * u`, with Euclidean norms over the tensor.
    If either norm is zero, the ratio is 1. Put tensors without weight decay (biases, norms) into a
    parameter group with `weight_decay=0`.

    State per tensor: two tensors of its shape and dtype (`exp_avg`, `exp_avg_sq`), and `step`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """The arguments have the same meaning as in `torch.optim.Adam`. `maximize`: True to ascend
        instead of descend.

        Raises:
            ConfigurationError: an invalid value.
        """
        _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigurationError(f"betas={betas}: expected two numbers in [0, 1)")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def _update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [float(state["step"]) for state in states]
        values = [_wide(parameter) for parameter in parameters]
        means = [_wide(state["exp_avg"]) for state in states]
        squares = [_wide(state["exp_avg_sq"]) for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        roots = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(updates, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, values, alpha=group["weight_decay"])
        own, length = (
            torch.stack(torch._foreach_norm(values)),
            torch.stack(torch._foreach_norm(updates)),
        )
        ratios = torch.where((own > 0) & (length > 0), own / length, torch.ones_like(own))
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(values, updates, alpha=-float(group["lr"]))
        if values[0] is not parameters[0]:
            torch._foreach_copy_(parameters, values)
            torch._foreach_copy_([state["exp_avg"] for state in states], means)
            torch._foreach_copy_([state["exp_avg_sq"] for state in states], squares)


class RowWiseAdagrad(_OwnOptimizer):
    """Adagrad with one accumulator per row: the sum of the row's mean squared gradients.

    For a row w with gradient g: `sum += mean(g * g)`, `w -= lr * g / (sqrt(sum) + eps)`, where g
    includes `weight_decay * w`. A row is the part selected by one index of a tensor's first
    dimension; for a vector each element is a row, which gives plain Adagrad. Meant for embeddings:
    the state has one number per row instead of one per element. (Gupta, Bengio and Weston,
    "Training Highly Multiclass Classifiers", JMLR 2014; Naumov et al., "Deep Learning
    Recommendation Model for Personalization and Recommendation Systems", 2019; FBGEMM's
    EXACT_ROWWISE_ADAGRAD.)

    State per tensor: `sum`, one number per row, in float64 for a float64 tensor and otherwise in
    float32.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        """The arguments have the same meaning as in `torch.optim.Adagrad`. `maximize`: True to
        ascend instead of descend.

        Raises:
            ConfigurationError: an invalid value.
        """
        _check_not_negative(
            lr=lr,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
                "maximize": maximize,
            },
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state without rounding the sums to the parameters' dtype, as
        `torch.optim.Optimizer.load_state_dict` would."""
        super().load_state_dict(state_dict)
        numbers: Iterable[int] = (
            number for group in state_dict["param_groups"] for number in group["params"]
        )
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]["sum"]
                self.state[parameter]["sum"] = saved.to(
                    device=parameter.device, dtype=_wide_type(parameter), copy=True
                )

    def _update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        for parameter, given in zip(parameters, gradients, strict=True):
            rows, state = parameter.shape[0] if parameter.dim() else 1, self.state[parameter]
            if not state:
                begin = group["initial_accumulator_value"]
                state["sum"] = torch.full(
                    (rows,), begin, dtype=_wide_type(parameter), device=parameter.device
                )
            values = _wide(parameter)
            gradient = (
                given.add(values, alpha=group["weight_decay"]) if group["weight_decay"] else given
            )
            by_row = gradient.reshape(rows, -1)
            state["sum"].add_(
                torch.linalg.vector_norm(by_row / math.sqrt(by_row.shape[1]), dim=1).square_()
            )
            update = by_row / state["sum"].sqrt().add_(group["eps"]).unsqueeze(1)
            values.add_(update.reshape(parameter.shape), alpha=-float(group["lr"]))
            if values is not parameter:
                parameter.copy_(values)


class DelayedNesterov(_OwnOptimizer):
    """SGD with Nesterov momentum for gradients that arrive one after another from several workers,
    as in the outer steps of local SGD.

    Algorithm 3 of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, with c
    = 0: each gradient g immediately moves the values by `lr * g / every`. After every `every`
    gradients the momentum, m' = momentum * m + their mean, moves the values by `lr * momentum *
    m'`.

    `every` gradients, in any order, amount to one step of `torch.optim.SGD` with `nesterov=True`
    and their mean; usually `every` is the number of workers. With `every=1`, each gradient is such
    a step. If `weight_decay` is not 0, g includes `weight_decay * w`.

    State per tensor: two tensors of its shape and dtype (`momentum_buffer`, `gradient_sum`), and
    `step`, the number of gradients since the last momentum step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.7,
        momentum: float = 0.9,
        every: int = 1,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """The arguments have the same meaning as in `torch.optim.SGD`. `every`: number of gradients
        per momentum step, >= 1.

        Raises:
            ConfigurationError: an invalid value.
        """
        _check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if momentum >= 1:
            raise ConfigurationError(f"momentum={momentum}: expected a number in [0, 1)")
        if every < 1 or every != int(every):
            raise ConfigurationError(
                f"every={every}: expected a whole number of gradients, at least 1, usually the "
                "number of workers"
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "every": every,
                "weight_decay": weight_decay,
                "maximize": maximize,
            },
        )

    def _update(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        group: Mapping[str, Any],
    ) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        for parameter, given in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["momentum_buffer"] = torch.zeros_like(parameter)
                state["gradient_sum"] = torch.zeros_like(parameter)
            values, total = _wide(parameter), _wide(state["gradient_sum"])
            gradient = (
                given.add(values, alpha=group["weight_decay"]) if group["weight_decay"] else given
            )
            total.add_(gradient)
            values.add_(gradient, alpha=-lr / group["every"])
            state["step"].add_(1)
            if state["step"] >= group["every"]:
                moves = _wide(state["momentum_buffer"])
                moves.mul_(momentum).add_(total, alpha=1 / float(state["step"]))
                values.add_(moves, alpha=-lr * momentum)
                total.zero_()
                state["step"].zero_()
                state["momentum_buffer"].copy_(moves)
            state["gradient_sum"].copy_(total)
            parameter.copy_(values)


def _wide_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a float32 copy of a 16-bit tensor, for computations; returns other tensors
    unchanged."""
    return tensor.to(_wide_type(tensor))


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"{name}={value}: expected a finite number, 0 or above")
