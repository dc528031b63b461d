"""State of a module: its parameters, its buffers, and the other entries of `state_dict()`, each
under its key in the state dict.

`state_dict()` may use names other than `named_parameters()`, because wrappers (activation
checkpointing) and hooks rename, omit or replace entries. An entry is therefore identified by its
tensor, not by its name. Parameters that hooks omit from `state_dict()` are nevertheless part of the
state, under their names in the module, because joiners, repeated steps and checkpoints need them.

Entries that are neither parameters nor buffers (`get_extra_state()`, and entries made by a module's
own `state_dict` hooks) are passed unchanged to the module's own `load_state_dict`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError
from torch import nn

from shoal_worker.engine.state.extremes import follows_extremes
from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.state.tree import flatten


class ModuleState:
    """Current state of a module. Shares memory with the module."""

    def __init__(self, module: nn.Module) -> None:
        with inside():
            self._listed: Mapping[str, Any] = nn.Module.state_dict(module, keep_vars=True)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        named = parameters | dict(module.named_buffers(remove_duplicate=False))
        own = {id(tensor) for tensor in named.values()}
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameters and persistent buffers, by key. A tied tensor appears under each of its
        keys."""
        self.others: dict[str, Any] = {}
        """Extra state, and entries made by hooks, by key."""
        self.replaced: set[str] = set()
        """Keys whose entry in `state_dict()` is not the module's own tensor."""
        for key, value in self._listed.items():
            if id(value) in own:
                self.tensors[key] = value
            elif key in named:
                self.tensors[key] = named[key]
                self.replaced.add(key)
            else:
                self.others[key] = value
        found = {id(tensor): key for key, tensor in reversed(self.tensors.items())}
        self.left_out = {
            name: tensor
            for name, tensor in parameters.items()
            if id(tensor) not in found and name not in self.tensors
        }
        """Parameters missing from `state_dict()`, by their own names."""
        self.tensors |= self.left_out
        found |= {id(tensor): name for name, tensor in reversed(self.left_out.items())}
        self.keys: dict[str, str] = {
            name: name if self.tensors.get(name) is tensor else found[id(tensor)]
            for name, tensor in named.items()
            if id(tensor) in found
        }
        """Name of a parameter or buffer in the module -> its key."""

    def captured(self) -> OrderedDict[str, Any]:
        """Returns the complete state: the entries of `state_dict()`, plus the parameters that hooks
        omit from it. If a hook has replaced a parameter or a buffer, returns the module's own
        tensor. Shares memory with the module."""
        state: OrderedDict[str, Any] = OrderedDict()
        with inside():
            for key in (*self._listed, *self.left_out):
                state[key] = self.tensors[key].detach() if key in self.tensors else self.others[key]
        if hasattr(self._listed, "_metadata"):
            # torch attaches this attribute
            state._metadata = self._listed._metadata  # type: ignore[attr-defined]
        return state

    def beside_parameters(self) -> dict[str, Any]:
        """Returns the entries of `captured` that are not parameters: buffers and extra state."""
        return {
            key: value
            for key, value in self.captured().items()
            if not isinstance(self.tensors.get(key), nn.Parameter)
        }

    def shapes(self, *, listed: bool = False) -> dict[str, torch.Size | None]:
        """Returns the shapes of the entries; None for entries whose shape need not match. `listed`:
        True for the entries of `state_dict()`, where hooks may have replaced tensors."""
        shapes: dict[str, torch.Size | None] = {
            key: tensor.shape for key, tensor in self.tensors.items()
        }
        if listed:
            shapes |= {key: getattr(self._listed[key], "shape", None) for key in self.replaced}
        return shapes | dict.fromkeys(self.others)

    def shown(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Converts `values` in the format of `captured` for the module's own `load_state_dict`.
        Entries that hooks replace in `state_dict()` are taken from the current `state_dict()`."""
        if self.replaced.isdisjoint(values):
            return values
        given = OrderedDict(values)
        given.update((key, self._listed[key]) for key in self.replaced & values.keys())
        if hasattr(values, "_metadata"):
            given._metadata = values._metadata  # type: ignore[attr-defined]
        return given


def other_entries(module: nn.Module) -> dict[str, Any]:
    """Returns the extra state of the module and its submodules, and entries made by hooks, by
    key."""
    return ModuleState(module).others


def check_state_can_travel(module: nn.Module, strategy: str, *, whole: bool) -> None:
    """Checks that every entry of the module's state can be sent to a joiner and saved; otherwise
    raises ConfigurationError. `whole`: True if every rank has unsharded parameters. If it is False,
    entries that a hook computes from parameters are refused too."""
    state = ModuleState(module)
    for key, value in state.others.items():
        try:
            flatten(value)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"entry {key!r} of the module's state_dict(): {error}. It has to be sent to "
                "joiners and saved in checkpoints; make get_extra_state(), or the hook that "
                "creates the entry, return supported values",
                reason=error.reason,
            ) from error
    if whole:
        return
    if computed := [*sorted(state.replaced), *_computed(module, state)]:
        raise ConfigurationError(
            f"entry {computed[0]!r} of the module's state_dict() is not a parameter, buffer or "
            "extra state, but was computed from parameters by a hook: with "
            f"strategy={strategy!r}, no rank has whole parameters between passes. Remove the hook "
            "and convert the result of model.full_state_dict(), or use strategy='ddp'"
        )


def _computed(module: nn.Module, state: ModuleState) -> list[str]:
    """Returns the keys of entries that hooks compute from parameters. To find them, temporarily
    removes the elements of all parameters, and checks which entries change."""
    hooked = {key: value for key, value in state.others.items() if not key.endswith("_extra_state")}
    if not hooked or any(tensor.is_meta for tensor in state.tensors.values()):
        return []
    values = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        for parameter, value in values:
            parameter.data = value.new_empty(0)
        now = ModuleState(module).others
    except (RuntimeError, IndexError, ValueError):
        return sorted(hooked)
    finally:
        for parameter, value in values:
            parameter.data = value
    return [
        key for key, value in hooked.items() if key not in now or _shape(value) != _shape(now[key])
    ]


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else None


def check_model_fits(
    values: Mapping[str, Any], module: nn.Module, shapes: Mapping[str, torch.Size | None]
) -> None:
    """Checks that a state fits the module. `values`: the result of `ModuleState.captured` or, with
    any strategy, of `full_state_dict`. `shapes`: unsharded shapes, from `ModuleState.shapes`.

    Parameters that the module's `state_dict()` omits may be missing. Buffers that have no elements
    in this module may have any shape in the state.

    Raises:
        CorruptDataError (MODEL_DIFFERS): names or shapes differ.
    """
    state = ModuleState(module)
    differing = [key for key in shapes if key not in values and key not in state.left_out]
    differing += [key for key in values if key not in shapes and not _is_unset(module, key)]
    differing += [
        key
        for key, shape in shapes.items()
        if shape is not None
        and key in values
        and not _takes(module, key, state.tensors.get(key), shape, values[key])
    ]
    if differing:
        raise CorruptDataError(
            f"the state belongs to a different model than this {type(module).__name__}: names or "
            f"shapes differ, among them {sorted(differing)[:3]}; load it into the model that "
            "saved it",
            reason="MODEL_DIFFERS",
        )


def _takes(
    module: nn.Module, key: str, own: torch.Tensor | None, shape: torch.Size, value: Any
) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    if value.shape == shape:
        return True
    owner, name = _owner(module, key)
    sized_late = shape.numel() == 0 or (owner is not None and follows_extremes(owner, name))
    return own is not None and not isinstance(own, nn.Parameter) and sized_late


def _owner(module: nn.Module, key: str) -> tuple[nn.Module | None, str]:
    path, _, name = key.rpartition(".")
    try:
        return module.get_submodule(path), name
    except AttributeError:
        return None, name


def _is_unset(module: nn.Module, key: str) -> bool:
    """Returns whether the key belongs to a buffer that is still None in this module, because it
    receives its value in the first passes."""
    owner, name = _owner(module, key)
    return owner is not None and name in owner._buffers and owner._buffers[name] is None


@torch.no_grad()
def load_captured(module: nn.Module, values: Mapping[str, Any], *, listed: bool = False) -> None:
    """Loads a state that fits the module, or some of its entries. The module's hooks run as in
    torch's own `load_state_dict`. `listed`: True if the values come from `state_dict()`, so that
    loading hooks must reverse the changes that saving hooks made; False if they come from
    `captured`."""
    for owner, name, value in _buffers_to_make(module, values):
        device = next((tensor.device for tensor in module.parameters()), value.device)
        owner._buffers[name] = torch.empty_like(value, device=device)
    given = values if listed else ModuleState(module).shown(values)
    nn.Module.load_state_dict(module, given, strict=False)
    state = ModuleState(module)
    replaced = frozenset() if listed else state.replaced
    for name, key in state.keys.items():
        # Saving hooks that rename entries have counterparts for loading, or need none.
        if key in values and (key != name or key in state.left_out or key in replaced):
            state.tensors[key].copy_(values[key])


def _buffers_to_make(
    module: nn.Module, values: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yields (owner, name, value) for each buffer that needs memory before its value in `values`
    can be loaded."""
    for key, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        owner, name = _owner(module, key)
        if owner is None or name not in owner._buffers:
            continue
        own = owner._buffers[name]
        if own is None or (
            own.shape != value.shape and (own.numel() == 0 or follows_extremes(owner, name))
        ):
            yield owner, name, value
