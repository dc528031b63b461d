"""Parameter values passed by users, checks of a model before training, and models on the meta
device.

Values that a script sets, such as a file's contents or another model's values, must be the same on
all ranks. If they differed, no rank would notice, and each would continue with its own values. The
ranks therefore compare digests of the values before they use them. If one rank cannot read the
values, no rank uses them.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from shoal_common.errors import ConfigurationError, ShoalError
from torch import nn
from torch.nn.parameter import is_lazy

from shoal_worker.elastic.state.schedulers_and_scalers import GroupMembers
from shoal_worker.engine.state.hidden_parameters import hooks_of
from shoal_worker.engine.state.module_state import ModuleState
from shoal_worker.state.digest import state_digest

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.state.strategy_interface import StrategySession

# ----------------------------------------------------------------------- parameters that users give


def named_values(
    parameters: torch.Tensor | Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Converts the argument of `with_parameters` to a dict from parameter names to values. `own`:
    the model's unsharded parameters, in order.

    Raises:
        ConfigurationError: a name, a shape or the number of elements does not match.
    """
    given = (
        _unflatten_vector(parameters, own)
        if isinstance(parameters, torch.Tensor)
        else dict(parameters)
    )
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ConfigurationError(f"with_parameters: the model has no parameters {unknown[:5]}")
    for name, value in given.items():
        if value.shape != own[name].shape:
            raise ConfigurationError(
                f"with_parameters: {name!r} has shape {tuple(value.shape)}, but the model's "
                f"parameter has {tuple(own[name].shape)}"
            )
    return given


def _unflatten_vector(
    vector: torch.Tensor, own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    total = sum(p.numel() for p in own.values())
    if vector.dim() != 1 or vector.numel() != total:
        raise ConfigurationError(
            f"with_parameters: expected a flat vector of {total} elements, got shape "
            f"{tuple(vector.shape)}"
        )
    return dict(
        zip(
            own,
            (
                v.view_as(p)
                for v, p in zip(
                    vector.split([p.numel() for p in own.values()]), own.values(), strict=True
                )
            ),
            strict=True,
        )
    )


def check_optimizer_covers(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that all tensors of the optimizer are parameters of the module; otherwise raises
    ConfigurationError."""
    own = {id(p) for p in module.parameters()}
    foreign = sum(
        1 for group in optimizer.param_groups for p in group["params"] if id(p) not in own
    )
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {foreign} tensor(s) that are not parameters of the model; "
            "create it from this model's parameters()"
        )


def check_trains(module: nn.Module) -> None:
    """Checks that at least one parameter of the module requires gradients; otherwise raises
    ConfigurationError."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigurationError(
            "the model has no parameter with requires_grad=True, so there is nothing to train"
        )


def check_shaped(module: nn.Module) -> None:
    """Raises ConfigurationError if the module has lazy parameters or buffers, because they get
    their shapes only in the first forward pass."""
    if any(is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ConfigurationError(
            "the model has lazy parameters or buffers without a shape: run one batch through it "
            "before as_distributed"
        )


def check_unquantized(module: nn.Module, *, kind: str = "base model", instead: str = "") -> None:
    """Raises ConfigurationError if bitsandbytes has quantized a parameter of the module, because
    some values of such a parameter are stored in attributes of the Python object. `kind`,
    `instead`: for the error message, what the module is, and how to save memory without
    quantization."""
    instead = instead or ", and set strategy='zero3' or 'fsdp' to divide it among the ranks"
    for name, parameter in module.named_parameters():
        found = type(parameter)
        if any(one.__module__.partition(".")[0] == "bitsandbytes" for one in found.__mro__):
            raise ConfigurationError(
                f"parameter {name!r} is a {found.__module__}.{found.__name__}, whose scales are "
                "neither parameters nor buffers, so ranks could not compare, send or save them. "
                f"Expected a {kind} that is not quantized in 4 or 8 bits: load it without "
                f"quantization_config, in bfloat16{instead}",
                reason="QUANTIZED_BY_BITSANDBYTES",
            )


def check_memory(modules: Sequence[nn.Module], strategy: str, *, kept: bool) -> None:
    """Raises ConfigurationError if two parameters, or a parameter and a buffer, share memory and at
    least one of the two is trained.

    Most strategies move each parameter to separate memory, after which two tensors would no longer
    share theirs. `kept`: True if the strategy leaves parameters where they are. In this case, two
    parameters may share memory, but a parameter and a buffer may not, because buffers are written
    at the end of a step.
    """
    members = [
        _Member(
            f"{kind} {name!r}" + (f" of model {number}" if len(modules) > 1 else ""),
            kind == "buffer",
            tensor,
        )
        for number, module in enumerate(modules)
        for kind, named in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        )
        for name, tensor in named
        if _has_memory(tensor)
    ]
    before: list[_Member] = []
    for member in sorted(members, key=lambda one: one.begin):
        before = [other for other in before if other.end > member.begin]
        for other in before:
            if (
                other.tensor is not member.tensor
                and other.matters_beside(member, kept=kept)
                and other.shares_elements_with(member)
            ):
                advice = (
                    "Clone the buffer, or use the parameter instead"
                    if other.is_buffer or member.is_buffer
                    else (
                        "To tie them, give both modules the same nn.Parameter (decoder.weight = "
                        "encoder.weight), or use one of them in the other's forward "
                        "(encoder.weight.t()); otherwise clone() one"
                    )
                )
                raise ConfigurationError(
                    f"{other.name} and {member.name} are two tensors that share memory: with "
                    f"strategy={strategy!r}, each gets its own memory, and their values would "
                    f"diverge. {advice}"
                )
        before.append(member)


class ModuleMembers:
    """Parameters that a module had when `as_distributed` was called. A strategy that reduces only
    these parameters' gradients uses this class to check that no other parameters are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {id(parameter): parameter for parameter in module.parameters()}
        self._look()

    def _look(self) -> None:
        owners = list(self._module.modules())
        self._tables = [table for owner in owners for table in (owner._parameters, owner._modules)]
        self._sizes = list(map(len, self._tables))
        self._places = [(owner._parameters, name) for owner in owners for name in owner._parameters]
        self._found = [table[name] for table, name in self._places]

    def check(self) -> None:
        """Checks that no parameter that was added later requires gradients; otherwise raises
        ConfigurationError. Known parameters may have other names or be in other submodules. Fast
        enough to be called in each step."""
        now = [table.get(name) for table, name in self._places]
        if list(map(len, self._tables)) == self._sizes and all(map(operator.is_, now, self._found)):
            return
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise ConfigurationError(
                    f"parameter {name!r} was added to the model or replaced after as_distributed, "
                    "so its gradients are not summed over the ranks. Change values in place "
                    "(model.with_parameters(values), or p.copy_ within torch.no_grad()); create "
                    "all parameters before as_distributed, and freeze those used later with "
                    "requires_grad_(False)"
                )
        self._look()


class _Member:
    """A parameter or buffer of a model, with its range of memory."""

    def __init__(self, name: str, is_buffer: bool, tensor: torch.Tensor) -> None:
        self.name = name
        self.is_buffer = is_buffer
        self.tensor = tensor
        self.extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        """Number of memory elements from the tensor's first element to its last."""
        self.begin = tensor.data_ptr()
        self.end = self.begin + self.extent * tensor.element_size()

    def matters_beside(self, other: _Member, *, kept: bool) -> bool:
        """Returns whether it is an error if this tensor and `other` share memory. `kept`: see
        `check_memory`.
        """
        trained = any(not one.is_buffer and one.tensor.requires_grad for one in (self, other))
        return (
            trained
            and self.tensor.device == other.tensor.device
            and (not kept or self.is_buffer or other.is_buffer)
        )

    def shares_elements_with(self, other: _Member) -> bool:
        """Returns whether this tensor shares an element with `other`, which begins within this
        tensor's memory range. Two columns of a matrix overlap in range but share no element."""
        size, apart = self.tensor.element_size(), other.begin - self.begin
        without_gaps = all(one.extent == one.tensor.numel() for one in (self, other))
        if without_gaps or other.tensor.element_size() != size or apart % size:
            return True
        taken = torch.zeros(max(self.extent, apart // size + other.extent), dtype=torch.bool)
        taken.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        return bool(
            taken.as_strided(other.tensor.shape, other.tensor.stride(), apart // size).any()
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are stored at a memory address. False for tensors on the
    meta device, sparse tensors and wrapper classes."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return (
        plain
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_lazy(tensor)
        and tensor.numel() > 0
    )


T = TypeVar("T")


def agreed(session: StrategySession, kind: str, read: Callable[[], T]) -> T:
    """Returns the result of `read` after checking, in a collective operation, that all ranks have
    the same result. `kind`: the user's call, for error messages.

    Raises:
        ConfigurationError: the results differ between ranks, or `read` failed on another rank.
        ShoalError: the error of `read` on this rank.
    """
    value, refused, report = None, None, {}
    try:
        value = read()
        report = {"digest": f"{state_digest(value):016x}"}
    except ShoalError as error:
        refused, report = error, {"error": str(error)}

    def body(channel: Channel) -> list[Any]:
        return [json.loads(each) for each in channel.exchange(json.dumps(report).encode())]

    everyones = session.operation(kind, body)
    if refused is not None:
        raise refused
    for rank, other in enumerate(everyones):
        if "error" in other:
            raise ConfigurationError(
                f"{kind}: rank {rank} was given invalid values, so no rank applies any: "
                f"{other['error']}"
            )
        if other != everyones[0]:
            raise ConfigurationError(
                f"{kind}: rank {rank} was given different values than rank 0 (digests "
                f"{other['digest']} and {everyones[0]['digest']}); pass the same values on all "
                "ranks"
            )
    assert value is not None
    return value


# ------------------------------------------------------------------------ models on the meta device


def has_values(module: nn.Module) -> bool:
    """Returns whether no parameter or buffer is on the meta device."""
    return not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def unsaved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that state_dict omits (persistent=False), by name. They are sent to peers
    with the state, because a peer whose buffers are uninitialized, or have been initialized
    randomly, would compute different results.
    """
    saved = {id(tensor) for tensor in ModuleState(module).tensors.values()}
    return {
        name: buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if id(buffer) not in saved
    }


def take_unsaved(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Loads a peer's `unsaved_buffers` into the module. Skips buffers with a different shape or
    dtype: for example, the shape of a cache may vary."""
    _take_buffers(module, unsaved_buffers(module), buffers)


def take_buffers(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Loads a peer's buffers into the module, including buffers that state_dict omits. Skips
    buffers with a different shape or dtype."""
    _take_buffers(module, dict(module.named_buffers(remove_duplicate=False)), buffers)


@torch.no_grad()
def _take_buffers(
    module: nn.Module, owned: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> None:
    for name, own in owned.items():
        value = buffers.get(name)
        if (
            value is None
            or (value.shape, value.dtype) != (own.shape, own.dtype)
            or torch.equal(own, there := value.to(own.device))
        ):
            continue
        if any(
            stride == 0 and size > 1 for stride, size in zip(own.stride(), own.shape, strict=True)
        ):
            # an expanded tensor cannot be written to
            path, _, last = name.rpartition(".")
            module.get_submodule(path)._buffers[last] = there.clone()
        else:
            own.copy_(there)


def materialize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Allocates uninitialized memory on `device` for all tensors on the meta device, and moves all
    other tensors to `device`.

    torch creates new tensors for this. The new parameters replace the old ones in the optimizer's
    groups, and modules that share a tensor continue to share it. `buffers`: a peer's
    `unsaved_buffers`, with values for buffers on the meta device.

    Raises:
        ConfigurationError: a buffer's values are missing from `buffers` or have a different shape,
            or a parameter has hooks. Nothing is changed.
    """
    given = _given(module, buffers or {})
    for _, _, tensor in _places(module):
        if tensor.device != device and hooks_of(tensor):
            raise ConfigurationError(
                f"a parameter of shape {tuple(tensor.shape)} on {tensor.device} has hooks "
                "(register_hook, register_post_accumulate_grad_hook), which would be lost when a "
                f"tensor on {device} replaces it; do not create the model on the meta device, or "
                "register the hooks after the first step has begun"
            )
    moved: dict[int, torch.Tensor] = {}
    for tensors, name, tensor in _places(module):
        if id(tensor) not in moved:
            moved[id(tensor)] = _on(device, tensor)
        tensors[name] = moved[id(tensor)]
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = GroupMembers(moved[id(parameter)] for parameter in group["params"])
    own = dict(module.named_buffers(remove_duplicate=False))
    for name, value in given.items():
        own[name].copy_(value)


def _given(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the values in `buffers` for those buffers on the meta device that state_dict
    omits."""
    wanted = {name: buffer for name, buffer in unsaved_buffers(module).items() if buffer.is_meta}
    for name, buffer in wanted.items():
        if name not in buffers or buffers[name].shape != buffer.shape:
            raise ConfigurationError(
                f"buffer {name!r} is on the meta device and not in state_dict (persistent=False), "
                "and the state to load has no value for it; create that buffer on the CPU, or "
                "register it as persistent"
            )
    return {name: buffers[name] for name in wanted}


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    moved = (
        torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
    )
    return (
        nn.Parameter(moved, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else moved
    )


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Returns a (dict, name, tensor) triple for each parameter and buffer in the module; the dict
    is the `_parameters` or `_buffers` that contains it. A shared tensor occurs several times."""
    return [
        (tensors, name, tensor)
        for owner in module.modules()
        for tensors in (owner._parameters, owner._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
