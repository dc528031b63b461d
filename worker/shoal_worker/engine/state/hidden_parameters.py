"""Placeholders for parameters and gradients that are not stored where torch expects them. With
them, torch's own methods raise errors instead of returning wrong results.

A module's parameters stay the same objects while their values are freed or sharded, or while their
gradients are summed into shards. A caller that inspected them at that time would get wrong results,
such as a norm of zero. During that time, the objects therefore have a different class, as torch's
own lazy parameters do:

- A parameter without values (`hide`) reports its metadata (shape, dtype, number of elements), and
  raises whenever its values are used.
- A parameter whose gradient is stored elsewhere (`hide_gradient`) can be used in computations as
  usual. Its `.grad` is a placeholder that raises whenever it is used.

During passes, they are ordinary parameters (`show`). This costs two changes of class per parameter
per step, and does not slow down the computation. This module does not depend on how parameters are
sharded; its callers decide when to hide them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.overrides import resolve_name
from torch.utils.hooks import RemovableHandle

from shoal_worker.torch_internals import DisableTorchFunctionSubclass, in_backward, pytree

_ATTRIBUTE: Final = "_shoal_place"
_GRADIENT: Final[Any] = torch.Tensor.grad
"""torch's own property `.grad`, overridden by the subclasses below."""

inside = DisableTorchFunctionSubclass
"""Context for internal code, in which operations on hidden parameters do not raise errors."""


def want_gradients(parameters: Iterable[torch.Tensor], wanted: bool) -> None:
    """Sets `requires_grad` of the parameters, including hidden ones."""
    with inside():
        for parameter in parameters:
            parameter.requires_grad_(wanted)


class Whereabouts:
    """State shared by all hidden parameters of one model."""

    def __init__(self, strategy: str = "") -> None:
        self.strategy = strategy
        self.pending = False
        """True if gradients of the current step are part of the ranks' sum, and the optimizer has
        not used them yet."""
        self.unscaled: float | torch.Tensor = 1.0
        """Factor by which a GradScaler has multiplied the gradients of the current step."""
        self.gradient: Any = torch.empty(0).as_subclass(_Gradient)
        """Value of `.grad` while the gradient is stored elsewhere."""
        self.gradient.whereabouts = self
        self._pieces: list[weakref.ref[torch.Tensor]] = []

    def look_at(self, pieces: Iterable[torch.Tensor]) -> None:
        """Sets the pieces of parameters that this rank updates. From now on, user code such as a
        GradScaler may inspect the gradients of these pieces, but not change them."""
        own = list(pieces)
        guard_parts(own, guarded=True)
        self._pieces = [weakref.ref(piece) for piece in own]
        for gradient in self.gradients():
            gradient.__dict__.update({_SEEN: False, _SEEN_BY: self})

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of the pieces set by `look_at`."""
        found = (gradient_of(piece) for each in self._pieces if (piece := each()) is not None)
        return [gradient for gradient in found if gradient is not None]


class HiddenParameter:
    """Description of a parameter, used while its values or its gradient are hidden."""

    __slots__ = ("gradient", "name", "shape", "whereabouts")

    def __init__(
        self, name: str, whereabouts: Whereabouts, shape: torch.Size | None = None
    ) -> None:
        """`shape`: unsharded shape; None: the tensor's own shape."""
        self.name = name
        self.whereabouts = whereabouts
        self.shape = shape
        self.gradient = False
        """True if the parameter has a gradient that is stored elsewhere."""


class _Hidden:
    """Class of a parameter whose values or gradient are stored elsewhere."""

    __slots__ = ()
    shown: ClassVar[type[torch.Tensor]]
    """Class of the parameter while it is not hidden."""

    @property
    def grad(self) -> Any:
        place: HiddenParameter = self.__dict__[_ATTRIBUTE]
        return place.whereabouts.gradient if place.gradient else gradient_of(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        place: HiddenParameter = self.__dict__[_ATTRIBUTE]
        if value is not None:
            raise _cannot_set(place)
        if place.whereabouts.pending and self.grad is not None:
            raise PreconditionError(
                f"the gradient of {place.name!r} was set to None between backward() and "
                f"optimizer.step(): with strategy={place.whereabouts.strategy!r}, the ranks' sum "
                "already includes it; call optimizer.zero_grad() or model.zero_grad(), on every "
                "rank"
            )
        drop_gradient(self, place)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _as_shown(self, call: Callable[[], Any]) -> Any:
        place, hidden = self.__dict__.pop(_ATTRIBUTE), self.__class__
        self.__class__ = self.shown  # type: ignore[assignment]  # one of the same layout
        try:
            return call()
        finally:
            self.__class__ = hidden
            self.__dict__[_ATTRIBUTE] = place

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._as_shown(lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_shown(lambda: self.__reduce_ex__(protocol))


def _cannot_set(place: HiddenParameter) -> ConfigurationError:
    return ConfigurationError(
        f"cannot set the gradient of {place.name!r}: with "
        f"strategy={place.whereabouts.strategy!r}, gradients are summed into shards and "
        "no rank has the full gradient; scale the loss instead, or use ddp"
    )


class _Absent(_Hidden):
    """Class of a parameter whose values are not on this rank. Most operations on it raise an
    error."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answering = _QUERIES.get(func)
        if answering is not None:
            return answering(args[0].__dict__[_ATTRIBUTE], func, args, kwargs or {})
        raise _refusal(
            func,
            next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _Absent)),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _refusal("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickling", self)

    def __repr__(self, **_: Any) -> str:
        place: HiddenParameter = self.__dict__[_ATTRIBUTE]
        return (
            f"<parameter {place.name!r}, sharded over the ranks with "
            f"strategy={place.whereabouts.strategy!r}>"
        )


class _Gradient(torch.Tensor):
    """Placeholder in `.grad` for a gradient that is stored elsewhere."""

    whereabouts: Whereabouts

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.as_subclass:
            # torch's own method is untyped
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        found = next(
            each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _Gradient)
        )
        if (answering := _OF_A_SCALER.get(func)) is not None:
            return answering(found.whereabouts.gradients())
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        raise PreconditionError(
            f"{_name(func)} cannot be used on p.grad: with "
            f"strategy={found.whereabouts.strategy!r}, gradients are summed into shards, which "
            "the ranks update, instead of being stored in p.grad. Use "
            "model.clip_grad_norm_(max_norm) to clip by the norm over all ranks, and "
            "model.get_gradients() to read this rank's gradients"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # torch's method has an argument that only torch uses
        return f"<gradient, summed over the ranks with strategy={self.whereabouts.strategy!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def _unscale(given: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Unscales the gradients `given` for a GradScaler. A placeholder among them stands for the
    gradients of all of this rank's pieces. Each gradient is unscaled only once, even if there are
    several placeholders. Records the factor: it cannot be computed from gradients that are all
    zero."""
    gradients = {id(each): each for each in given if not isinstance(each, _Gradient)}
    for each in given:
        if isinstance(each, _Gradient):
            each.whereabouts.unscaled = inverse
            gradients |= {id(one): one for one in each.whereabouts.gradients()}
    kinds: dict[Any, list[torch.Tensor]] = {}
    with inside():
        for gradient in gradients.values():
            if not gradient.__dict__.get(_SEEN):
                gradient.__dict__[_SEEN] = True
                if (whereabouts := gradient.__dict__.get(_SEEN_BY)) is not None:
                    whereabouts.unscaled = inverse
                kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for (_, device), alike in kinds.items():
            here = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(alike, here, inverse.to(device))
            found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device)))


_SEEN: Final = "_shoal_unscaled"
"""Attribute of a gradient: True if a GradScaler has unscaled it."""
_SEEN_BY: Final = "_shoal_whereabouts"
"""Attribute of a gradient: the `Whereabouts` that records the factor."""
_T: Final[Any] = torch.Tensor
_OF_A_SCALER: Final[dict[Any, Callable[[Any], Any]]] = {
    _T.is_sparse.__get__: lambda gradients: False,
    _T.dtype.__get__: lambda gradients: gradients[0].dtype if gradients else torch.float32,
    _T.device.__get__: lambda gradients: gradients[0].device if gradients else torch.device("cpu"),
}
"""Properties of gradients that a GradScaler reads."""


class _Part(torch.Tensor):
    """Class of the gradient of a piece that this rank updates, at times when user code may inspect
    the gradient but not change it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            # a GradScaler calls this on all ranks
            return _unscale(*args)
        if func not in _QUERIES:
            raise PreconditionError(
                f"{_name(func)} is not allowed on this gradient, because it is only this rank's "
                "part of the gradient that was summed over the ranks. Use "
                "model.clip_grad_norm_(max_norm) to clip on all ranks, and model.get_gradients() "
                "to read this rank's part"
            )
        with inside():
            return func(*args, **(kwargs or {}))


def _refusal(func: Any, hidden: _Absent) -> PreconditionError:
    place: HiddenParameter = hidden.__dict__[_ATTRIBUTE]
    return PreconditionError(
        f"{_name(func)} cannot be used on parameter {place.name!r}: with "
        f"strategy={place.whereabouts.strategy!r}, this rank has its values only during forward "
        "and backward passes. On every rank, call model.full_state_dict() or "
        "model.gather_full_parameters() to copy the values, model.with_parameters(values) to set "
        "them, or model.clone() to copy the model. To call a method of the module that uses "
        "parameters, call model.register_forward_method('NAME') once, and then model.NAME(...)"
    )


def _name(func: Any) -> str:
    if func is torch.Tensor.detach:
        return "detach() or state_dict()"
    name = (
        func
        if isinstance(func, str)
        else resolve_name(func) or getattr(func, "__name__", repr(func))
    )
    return name.removeprefix("torch.Tensor.").removesuffix(".__get__").removesuffix(".__set__")


def _same(place: HiddenParameter, func: Any, args: Any, kwargs: Any) -> Any:
    with inside():
        return func(*args, **kwargs)


def _of_shape(tell: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that answers queries of a hidden parameter's shape. It calls `tell` with
    the unsharded shape if that is known to differ from the tensor's own shape, and torch's function
    otherwise."""

    @functools.wraps(tell)
    def answering(place: HiddenParameter, func: Any, args: Any, kwargs: Any) -> Any:
        return (
            _same(place, func, args, kwargs)
            if place.shape is None
            else tell(place.shape, *args, **kwargs)
        )

    return answering


_QUERIES: Final[dict[Any, Callable[..., Any]]] = {
    _T.shape.__get__: _of_shape(lambda shape, _: shape),
    _T.ndim.__get__: _of_shape(lambda shape, _: len(shape)),
    _T.nbytes.__get__: _of_shape(lambda shape, own: math.prod(shape) * own.element_size()),
    _T.size: _of_shape(lambda shape, _, dim=None: shape if dim is None else shape[dim]),
    **dict.fromkeys(
        (_T.numel, _T.nelement, torch.numel), _of_shape(lambda shape, _: math.prod(shape))
    ),
    **dict.fromkeys((_T.dim, _T.ndimension), _of_shape(lambda shape, _: len(shape))),
    _T.__len__: _of_shape(lambda shape, _: shape[0]),
    **{
        getattr(_T, name).__get__: _same
        for name in (
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "is_leaf",
            "grad_fn",
            "itemsize",
            "_version",
            "retains_grad",
        )
    },
    **{
        getattr(_T, name).__get__: _same
        for name in dir(_T)
        if name.startswith("is_") and not callable(getattr(_T, name))
    },
    **{
        getattr(_T, name): _same
        for name in ("is_floating_point", "is_complex", "is_inference", "is_signed", "element_size")
    },
    **dict.fromkeys(
        (
            torch.is_floating_point,
            torch.is_complex,
            torch.is_inference,
            _T.requires_grad_,
            _T.get_device,
        ),
        _same,
    ),
    _T.requires_grad.__set__: _same,
    **{
        getattr(_T, name): _same for name in ("register_hook", "register_post_accumulate_grad_hook")
    },
}
"""Functions of torch that read only metadata, so that they work on a parameter without values."""


# --------------------------------------------------------------------------------- users' own hooks

_REGISTER: Final = ("register_hook", "register_post_accumulate_grad_hook")


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """Returns the hooks that the user has registered on a tensor for its gradient."""
    with inside():
        tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values() if not _is_own(hook)]


def run_last(hooks: Iterable[tuple[torch.Tensor, RemovableHandle]]) -> None:
    """Makes Shoal's post-accumulate-grad hooks run after the user's hooks, even if the user has
    registered them later. Does nothing within a backward pass, because torch is using the hooks at
    that time.

    `hooks`: pairs of a parameter and the handle that `register_post_accumulate_grad_hook` returned
    for Shoal's hook.
    """
    if in_backward():
        return
    with inside():
        for parameter, handle in hooks:
            registered = parameter._post_accumulate_grad_hooks
            if next(reversed(registered)) != handle.id:
                # torch calls them in the order of insertion, regardless of move_to_end
                registered[handle.id] = registered.pop(handle.id)


def _is_own(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return bool(module.split(".")[0] == "shoal_worker")


def refuse_hooks(parameters: Iterable[tuple[str, torch.Tensor]], strategy: str) -> None:
    """Refuses hooks of the user on the gradients of parameters. Such hooks would be lost, because
    other tensors replace the parameters in the computation.

    Raises ConfigurationError if a parameter has such a hook. From then on, `register_hook` and
    `register_post_accumulate_grad_hook` of the parameters raise ConfigurationError. `parameters`:
    pairs of name and parameter.
    """
    for name, parameter in parameters:
        if hooks_of(parameter):
            raise _no_hooks(name, strategy)
        for method in _REGISTER:
            setattr(parameter, method, _registering(parameter, method, _no_hooks(name, strategy)))


def _registering(
    parameter: torch.Tensor, method: str, refusal: ConfigurationError
) -> Callable[..., Any]:
    """Returns a function that replaces `method` of a parameter (`register_hook`, for example) and
    raises `refusal` for hooks other than Shoal's own. The function has only a weak reference to the
    parameter, because the parameter refers to the function."""
    me, register = weakref.ref(parameter), getattr(torch.Tensor, method)

    def registering(hook: Any) -> Any:
        own = me()
        if own is None or not _is_own(hook):
            raise refusal
        return register(own, hook)

    return registering


def _no_hooks(name: str, strategy: str) -> ConfigurationError:
    return ConfigurationError(
        f"parameter {name!r} has a hook on its gradient (register_hook or "
        f"register_post_accumulate_grad_hook), which would be lost: with strategy={strategy!r}, "
        "other tensors replace the parameter whenever the ranks change. Use "
        "model.clip_grad_norm_(max_norm) or scale the loss to change gradients, and "
        "model.get_gradients() to read this rank's part. ddp, zero1, zero2, zero3, fsdp and hsdp "
        "call such hooks, with the gradient of this rank's samples"
    )


def guard_parts(pieces: Iterable[torch.Tensor], *, guarded: bool) -> None:
    """Sets how the gradients of these pieces may be used. `guarded`: True if user code may inspect
    them, but not change them; False if only the optimizer uses them."""
    for piece in pieces:
        gradient: Any = gradient_of(piece)
        if gradient is not None and isinstance(gradient, _Part) is not guarded:
            gradient.__class__ = _Part if guarded else torch.Tensor


@functools.cache
def _class(kind: Any, mixed: Any) -> Any:
    return type(
        kind.__name__,
        (mixed, kind),
        {"__slots__": (), "shown": kind, "__module__": kind.__module__},
    )


def hide(tensor: Any, place: HiddenParameter) -> None:
    """Hides a parameter's values, and also its gradient if `place.gradient` is True. If the values
    are already hidden, hides only the gradient."""
    if isinstance(tensor, _Absent):
        tensor.__dict__[_ATTRIBUTE].gradient |= place.gradient
    else:
        _become(tensor, place, _Absent)


def hide_gradient(tensor: Any, place: HiddenParameter) -> None:
    """Hides a parameter's gradient if `place.gradient` is True. The values remain usable."""
    if isinstance(tensor, _Hidden):
        tensor.__dict__[_ATTRIBUTE].gradient |= place.gradient
    else:
        _become(tensor, place, _Hidden)


def _become(tensor: Any, place: HiddenParameter, mixed: Any) -> None:
    kind: Any = tensor.shown if isinstance(tensor, _Hidden) else type(tensor)
    tensor.__dict__[_ATTRIBUTE] = place
    tensor.__class__ = _class(kind, mixed)


def show(tensor: Any, place: HiddenParameter) -> None:
    """Makes a parameter that was hidden with this `place` an ordinary parameter again."""
    if isinstance(tensor, _Hidden) and tensor.__dict__.get(_ATTRIBUTE) is place:
        del tensor.__dict__[_ATTRIBUTE]
        tensor.__class__ = tensor.shown  # type: ignore[assignment]  # one of the same layout


def show_gradient(tensor: Any, place: HiddenParameter) -> None:
    """Makes a parameter's `.grad` an ordinary attribute again, if the parameter's values are not
    hidden."""
    if not isinstance(tensor, _Absent):
        show(tensor, place)


class Leaves:
    """Parameters of one unit, which are hidden and shown together."""

    def __init__(self, leaves: Sequence[torch.Tensor], places: Sequence[HiddenParameter]) -> None:
        self._leaves = list(zip(leaves, places, strict=True))
        self._without_gradients = False
        """True if some gradients of these parameters are hidden."""

    def hide(self) -> None:
        """Hides the values of all parameters."""
        for leaf, place in self._leaves:
            hide(leaf, place)

    def show(self) -> None:
        """Makes all parameters ordinary parameters again."""
        for leaf, place in self._leaves:
            show(leaf, place)

    def take_gradient(self, index: int) -> torch.Tensor | None:
        """Removes and returns the gradient that autograd has stored in the parameter with this
        index; None if there is none. Records that the gradient is now stored elsewhere."""
        leaf, place = self._leaves[index]
        gradient = take_gradient(leaf)
        place.gradient |= gradient is not None
        return gradient

    def hide_gradients(self) -> None:
        """Hides the gradients that have been moved elsewhere. Called after a backward pass."""
        self._without_gradients = True
        for leaf, place in self._leaves:
            if place.gradient:
                hide_gradient(leaf, place)

    def gradients_handed_out(self, present: Sequence[bool]) -> None:
        """Records that this rank has received its part of the summed gradients, and hides the
        gradients of parameters that only other ranks have used. `present`: for each parameter, True
        if some rank has used it."""
        others = [
            place
            for (_, place), here in zip(self._leaves, present, strict=True)
            if here and not place.gradient
        ]
        if others:
            for place in others:
                place.gradient = True
            self.hide_gradients()

    @property
    def have_gradients(self) -> bool:
        """True if the gradients of some parameters have been moved elsewhere."""
        return any(place.gradient for _, place in self._leaves)

    def show_gradients(self) -> None:
        """Makes the gradients hidden by `hide_gradients` ordinary gradients again, because autograd
        needs them at the beginning of a pass. Does not affect parameters whose values are
        hidden."""
        if self._without_gradients:
            self._without_gradients = False
            for leaf, place in self._leaves:
                show_gradient(leaf, place)

    def forget_gradients(self) -> None:
        """Removes gradients that autograd has stored in the parameters and that have not been moved
        elsewhere."""
        for leaf, _ in self._leaves:
            if not isinstance(leaf, _Hidden):
                leaf.grad = None

    def refuse_set_gradients(self) -> None:
        """Checks that no gradients are left in the parameters. Called when the gradients of all the
        step's passes have been moved elsewhere. The script must have set any gradient that is left.

        Raises:
            ConfigurationError: the script has set a parameter's gradient.
        """
        for leaf, place in self._leaves:
            if gradient_of(leaf) is not None:
                raise _cannot_set(place)

    def drop_gradients(self) -> None:
        """Discards the gradients that are stored elsewhere, and gradients set by the script."""
        for leaf, place in self._leaves:
            drop_gradient(leaf, place)


def is_hidden(tensor: Any) -> bool:
    """Returns whether a parameter's values are hidden."""
    return isinstance(tensor, _Absent)


def find_moved(parameters: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> int | None:
    """Returns the index of a parameter that is not hidden, but is not stored in the corresponding
    tensor of `memory`, or has a different dtype; None if there is none."""
    for index, (parameter, own) in enumerate(zip(parameters, memory, strict=True)):
        if not is_hidden(parameter) and (
            parameter.data_ptr() != own.data_ptr() or parameter.dtype != own.dtype
        ):
            return index
    return None


def refuse_loading(module: nn.Module) -> None:
    """Makes `load_state_dict` of the module and its submodules raise an error if the state dict
    contains values of hidden parameters. The error is raised before anything is loaded."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(_check_loading)


def _check_loading(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        if is_hidden(parameter) and prefix + name in state_dict:
            # a hidden parameter is an _Absent
            raise _refusal("load_state_dict()", parameter)  # type: ignore[arg-type]


def blank_copies(module: nn.Module) -> dict[int, Any]:
    """Returns a memo for `copy.deepcopy` that replaces hidden parameters with empty ones."""
    with inside():
        return {
            id(p): nn.Parameter(
                torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad
            )
            for p in module.parameters()
            if is_hidden(p)
        }


def gradient_of(tensor: Any) -> torch.Tensor | None:
    """Returns the gradient that autograd has stored in a parameter, even if the parameter is
    hidden."""
    if not isinstance(tensor, _Hidden):
        return tensor.grad  # type: ignore[no-any-return]  # any tensor's
    with inside():
        return _GRADIENT.__get__(tensor)  # type: ignore[no-any-return]  # a getset descriptor's


def take_gradient(tensor: Any) -> torch.Tensor | None:
    """Removes and returns the gradient that autograd has stored in a parameter, even if the
    parameter is hidden."""
    gradient = gradient_of(tensor)
    drop_gradient(tensor)
    return gradient


def drop_gradient(tensor: Any, place: HiddenParameter | None = None) -> None:
    """Removes a parameter's gradient. `place`: description of the parameter; if given, a gradient
    that is stored elsewhere is forgotten too."""
    if place is not None:
        place.gradient = False
        show_gradient(tensor, place)
        if isinstance(tensor, _Hidden):
            tensor.__dict__[_ATTRIBUTE].gradient = False
    if not isinstance(tensor, _Hidden):
        tensor.grad = None
        return
    with inside():
        _GRADIENT.__set__(tensor, None)
