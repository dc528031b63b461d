"""An optimizer as users write them: Muon for the matrices and AdamW for the rest, in one class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class MuonAndAdamW(torch.optim.Optimizer):
    """An optimizer that needs `whole_tensors=True`. Its state of a matrix has a list in addition to
    the momentum."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float = 0.05) -> None:
        matrices = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        groups = [
            {"params": each, "matrices": of_them}
            for each, of_them in ((matrices, True), (rest, False))
            if each
        ]
        super().__init__(groups, {"lr": lr, "momentum": 0.9, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        # torch's method returns the closure's loss
        """Updates the parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                (self._of_matrix if group["matrices"] else self._of_other)(
                    parameter, parameter.grad, state, group
                )

    def _of_matrix(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict, group: dict
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
            state["seen"] = [
                torch.zeros(parameter.shape[0], parameter.shape[0], dtype=parameter.dtype),
                0,
            ]
        state["seen"][0].add_(gradient @ gradient.T)
        state["seen"][1] += 1
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = state["momentum_buffer"] / (state["momentum_buffer"].norm() + 1e-9)
        for _ in range(3):
            update = 1.5 * update - 0.5 * update @ update.T @ update
        length = 1 + state["seen"][0].trace().sqrt() / state["seen"][1]
        parameter.add_(update, alpha=-group["lr"] / float(length))

    def _of_other(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict, group: dict
    ) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = float(state["step"])
        root = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + 1e-8
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**step))
