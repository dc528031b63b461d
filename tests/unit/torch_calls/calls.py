"""torch's own calls on a distributed model, under every strategy. Each is either correct or raises
an error that names the call to use instead.

page.py generates docs/torch-calls.md from this table, and test_torch_calls.py runs it: each call is
made on the distributed model and on a plain one that a single process trains on the same samples.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

RIGHT: Final = "right"
CLIP: Final = "model.clip_grad_norm_"
WHOLE: Final = "model.full_state_dict()"
LOAD: Final = "model.load_full("
VALUES: Final = "model.with_parameters(values)"
BEFORE: Final = "before as_distributed"
ZERO: Final = "optimizer.zero_grad()"
SCALE: Final = "scale the loss"
STATE: Final = "optimizer.state_dict()"
CLONE: Final = "model.clone()"
LOOP: Final = "in the loop"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A group of strategies under which ranks have the same view of what torch uses."""

    says: str
    rows: Mapping[str, Mapping[str, Any]]
    """Arguments of `as_distributed` by name."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call that scripts make."""

    says: str
    do: Callable[[Any, Any, Any], Any]
    """Called with the model, the optimizer and the user's module. Returns the value to compare, if
    any."""
    gradients: bool = False
    """True if the call is made between `backward()` and `step()`, otherwise between steps."""
    loops: bool = False
    """True if the call iterates over the parameters. Its changes before the refusal remain."""
    cut: str = RIGHT
    """Expected name where parameters are sharded."""
    state: str = RIGHT
    """Expected name where gradients and optimizer state are sharded."""
    whole: str = RIGHT
    """Expected name where nothing is sharded."""

    def expected(self, kind: str) -> str:
        return str(getattr(self, kind))


def _hybrid(**options: Any) -> dict[str, Any]:
    return {"strategy": "hybrid", **options}


KINDS: Final[Mapping[str, Kind]] = {
    "whole": Kind(
        says="`ddp`, `local_sgd`",
        rows={
            "ddp": {"strategy": "ddp"},
            "local_sgd": {"strategy": "local_sgd", "sync_every": 1000},
        },
    ),
    "state": Kind(
        says="`zero1`, `zero2`, `hybrid` without stages and tensor parallelism",
        rows={
            "zero1": {"strategy": "zero1"},
            "zero2": {"strategy": "zero2"},
            "hybrid-ddp": _hybrid(data_parallel_strategy="ddp"),
            "hybrid-zero1": _hybrid(data_parallel_strategy="zero1"),
            "hybrid-zero2": _hybrid(data_parallel_strategy="zero2"),
        },
    ),
    "cut": Kind(
        says="`zero3`, `fsdp`, `hsdp`, `tensor`, `pipeline`, other `hybrid`s, and any with "
        "`param_dtype=` or `offload=`",
        rows={
            "zero3": {"strategy": "zero3"},
            "fsdp": {"strategy": "fsdp"},
            "hsdp": {"strategy": "hsdp", "shard_size": 2},
            "zero1-param_dtype": {"strategy": "zero1", "param_dtype": torch.float32},
            "zero2-param_dtype": {"strategy": "zero2", "param_dtype": torch.float32},
            "tensor": {"strategy": "tensor"},
            "pipeline": {"strategy": "pipeline", "micro_batches": 2},
            "hybrid-fsdp": _hybrid(data_parallel_strategy="fsdp"),
            **{
                f"hybrid-{cut}-{along}": _hybrid(data_parallel_strategy=along, **options)
                for cut, options in (
                    ("tensor", {"tensor_parallel_size": 2}),
                    ("pipeline", {"pipeline_parallel_size": 2, "micro_batches": 2}),
                )
                for along in ("ddp", "zero1", "zero2", "fsdp")
            },
        },
    ),
}


def world_of(row: str) -> int:
    """Returns the number of ranks for a row."""
    return 4 if row == "hsdp" or row.startswith(("hybrid-tensor", "hybrid-pipeline")) else 2


def _values(module: Any) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.parameters()]


def _members(optimizer: Any) -> list[torch.Tensor]:
    return [member for group in optimizer.param_groups for member in group["params"]]


def _named(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.detach().clone() for name, value in state.items()}


def _other(net: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns new values for all parameters."""
    return {
        f"{prefix}{name}": torch.full(p.shape, 0.01 * (i + 1), dtype=p.dtype)
        for i, (name, p) in enumerate(net.named_parameters())
    }


def _load_model(model: Any, _: Any, net: nn.Module) -> None:
    model.load_state_dict(_other(net, "module." if model is not net else ""))


def _each(do: Callable[[Any], Any]) -> Callable[[Any, Any, Any], None]:
    def all_of_them(model: Any, optimizer: Any, net: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                do(parameter)

    return all_of_them


def _gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _set_gradient(parameter: Any) -> None:
    parameter.grad = torch.full(parameter.shape, 0.1, dtype=parameter.dtype)


def _groups_clipped(model: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    return [nn.utils.clip_grad_norm_(group["params"], 0.05) for group in optimizer.param_groups]


def _averaged(model: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    average = AveragedModel(model)
    average.update_parameters(model)
    return _values(average)


def _saved(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _optimizer_state(optimizer: Any) -> list[Any]:
    state = optimizer.state_dict()
    return [state["state"][i]["momentum_buffer"].clone() for i in sorted(state["state"])]


def _outputs(model: Any, optimizer: Any, net: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        output: torch.Tensor = model(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))
    model.train()
    return output.full_tensor() if hasattr(output, "full_tensor") else output


CALLS: Final[list[Call]] = [
    Call(
        says="`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`",
        do=lambda model, optimizer, net: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says="the same with `module.parameters()`, of the user's own module",
        do=lambda model, optimizer, net: nn.utils.clip_grad_norm_(net.parameters(), 0.05),
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says='the same with `optimizer.param_groups[0]["params"]`',
        do=_groups_clipped,
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says="`torch.nn.utils.clip_grad_value_`",
        do=lambda model, optimizer, net: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says="`torch.nn.utils.get_total_norm` of the gradients",
        do=lambda model, optimizer, net: nn.utils.get_total_norm(_gradients(model)),
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says="`p.grad.mul_(...)`, `p.grad.norm()`",
        do=lambda model, optimizer, net: [
            gradient.mul_(0.5).norm() for gradient in _gradients(model)
        ],
        gradients=True,
        state=CLIP,
        cut=CLIP,
    ),
    Call(
        says="`p.grad is None`",
        do=lambda model, optimizer, net: torch.tensor([p.grad is None for p in model.parameters()]),
        gradients=True,
    ),
    Call(says="`p.grad = ...`", do=_each(_set_gradient), gradients=True, state=SCALE, cut=SCALE),
    Call(
        says="`model.clip_grad_norm_(1.0)`",
        do=lambda model, optimizer, net: (
            model.clip_grad_norm_(0.05)
            if model is not net
            else nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        ),
        gradients=True,
    ),
    Call(
        says="`optimizer.zero_grad()` before `step()`",
        do=lambda model, optimizer, net: optimizer.zero_grad(),
        gradients=True,
    ),
    Call(
        says="`model.zero_grad()` before `step()`",
        do=lambda model, optimizer, net: model.zero_grad(),
        gradients=True,
    ),
    Call(
        says="`module.zero_grad()` before `step()`",
        do=lambda model, optimizer, net: net.zero_grad(),
        gradients=True,
        state=ZERO,
        cut=ZERO,
    ),
    Call(
        says="`module.zero_grad()` after `step()`", do=lambda model, optimizer, net: net.zero_grad()
    ),
    Call(
        says="`p.numel()`, `p.shape`, `p.requires_grad`",
        do=lambda model, optimizer, net: torch.tensor(
            [
                [p.numel(), *p.shape[:1], p.size(-1), p.dim(), p.requires_grad]
                for p in model.parameters()
            ]
        ),
    ),
    Call(
        says="`repr(p)`", do=lambda model, optimizer, net: len(repr(list(model.parameters()))) > 0
    ),
    Call(
        says="`model.state_dict()`",
        do=lambda model, optimizer, net: _named(model.state_dict()),
        cut=WHOLE,
    ),
    Call(
        says="`module.state_dict()`",
        do=lambda model, optimizer, net: _named(net.state_dict()),
        cut=WHOLE,
    ),
    Call(says="`model.load_state_dict(...)`", do=_load_model, cut=LOAD),
    Call(
        says="`module.load_state_dict(...)`",
        do=lambda model, optimizer, net: net.load_state_dict(_other(net)) and None,
        cut=VALUES,
    ),
    Call(
        says="`torch.nn.utils.parameters_to_vector`",
        do=lambda model, optimizer, net: (
            nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        ),
        cut=VALUES,
    ),
    Call(
        says="`p.mul_(...)`, `p.data.mul_(...)`",
        do=_each(lambda p: p.data.mul_(0.9)),
        loops=True,
        cut=VALUES,
    ),
    Call(
        says="`p.data_ptr()`",
        do=lambda model, optimizer, net: all(p.data_ptr() for p in model.parameters()),
        cut=VALUES,
    ),
    Call(
        says="`torch.nn.init.constant_(p, ...)`",
        do=_each(lambda p: nn.init.constant_(p, 0.02)),
        loops=True,
        cut=VALUES,
    ),
    Call(
        says="`copy.deepcopy(model)`, `AveragedModel(model)`",
        do=lambda model, optimizer, net: _values(copy.deepcopy(model)),
    ),
    Call(says="`AveragedModel(model).update_parameters(model)`", do=_averaged, cut=VALUES),
    Call(
        says="`copy.deepcopy(module)`",
        do=lambda model, optimizer, net: _values(copy.deepcopy(net)),
        cut=CLONE,
    ),
    Call(
        says="`torch.save(model, path)`",
        do=lambda model, optimizer, net: _values(_saved(model)),
        whole=WHOLE,
        state=WHOLE,
        cut=WHOLE,
    ),
    Call(
        says="`model.half()`, `model.float()`, `model.to(another dtype or device)`",
        do=lambda model, optimizer, net: model.float().double() and None,
        state=BEFORE,
        cut=BEFORE,
    ),
    Call(
        says="`model.to(...)` that changes nothing",
        do=lambda model, optimizer, net: model.to("cpu") and None,
    ),
    Call(
        says="`model.requires_grad_(True)`, `model.train()`, `model.eval()`",
        do=lambda model, optimizer, net: model.requires_grad_().eval().train() and None,
    ),
    Call(says="`model(x)` in evaluation mode, on every rank", do=_outputs),
    Call(
        says="`optimizer.register_step_pre_hook(...)`, `register_step_post_hook(...)`",
        do=lambda model, optimizer, net: optimizer.register_step_post_hook(
            lambda *_: None
        ).remove(),
        state=LOOP,
        cut=LOOP,
    ),
    Call(
        says='values in `optimizer.param_groups`: `sum(p.norm() ** 2 for p in group["params"])`',
        do=lambda model, optimizer, net: [p.detach().norm() for p in _members(optimizer)],
        cut=VALUES,
    ),
    Call(
        says="`p.numel()`, `p.shape` in `optimizer.param_groups`",
        do=lambda model, optimizer, net: [
            torch.tensor([p.numel(), *p.shape]) for p in _members(optimizer)
        ],
    ),
    Call(
        says="`optimizer.state_dict()`, on every rank",
        do=lambda model, optimizer, net: _optimizer_state(optimizer),
    ),
    Call(
        says="`torch.save(optimizer, path)`",
        do=lambda model, optimizer, net: _saved(optimizer) and None,
        whole=STATE,
        state=STATE,
        cut=STATE,
    ),
]
