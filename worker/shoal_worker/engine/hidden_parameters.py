"""What stands for parameters and gradients that are not where torch looks for them, so that torch's
own calls raise instead of being wrong.

A module's parameters stay the same objects, also while their values are freed or cut over ranks,
and so do those whose gradients are summed into shards. Whoever looks at them then would find
nothing: an empty state dict, a norm of zero. So their class changes for that time, as torch's own
lazy parameters change theirs:

- A parameter without values (`hide`) tells what it is (shape, dtype, number of elements), and
  raises at every use of its values.
- A parameter without a gradient of its own (`hide_gradient`) computes as ever; its `.grad` is
  there, and raises at every use.

Inside of passes they are plain parameters (`show`), so a step costs two changes of class for each,
and nothing in the computation. It knows nothing of how parameters are cut: who cuts them says when
they are elsewhere.
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

from shoal_worker.torch_internals import DisableTorchFunctionSubclass, pytree

_ATTRIBUTE: Final = "_shoal_place"
_GRADIENT: Final[Any] = torch.Tensor.grad
"""torch's own accessor, which subclasses below put another before."""

inside = DisableTorchFunctionSubclass
"""A context for whoever knows what it finds: hidden parameters do not raise."""


def want_gradients(parameters: Iterable[torch.Tensor], wanted: bool) -> None:
    """Sets `requires_grad`, of hidden ones as well."""
    with inside():
        for parameter in parameters:
            parameter.requires_grad_(wanted)


class Whereabouts:
    """What the hidden parameters of one model have in common."""

    def __init__(self, strategy: str = "") -> None:
        self.strategy = strategy
        self.pending = False
        """Gradients of the step in progress are in the ranks' sum, and no update has taken them."""
        self.gradient: Any = torch.empty(0).as_subclass(_Gradient)
        """What `.grad` is where there is a gradient, but elsewhere."""
        self.gradient.whereabouts = self
        self._pieces: list[weakref.ref[torch.Tensor]] = []

    def look_at(self, pieces: Iterable[torch.Tensor]) -> None:
        """Code of the user's may look at the gradients of these pieces, which this rank updates: a
        GradScaler, say."""
        own = list(pieces)
        guard_parts(own, guarded=True)
        self._pieces = [weakref.ref(piece) for piece in own]
        for gradient in self.gradients():
            gradient.__dict__[_SEEN] = False

    def gradients(self) -> list[torch.Tensor]:
        """Returns those gradients."""
        found = (gradient_of(piece) for each in self._pieces if (piece := each()) is not None)
        return [gradient for gradient in found if gradient is not None]


class HiddenParameter:
    """What is to be known of one parameter while it is hidden."""

    __slots__ = ("gradient", "name", "shape", "whereabouts")

    def __init__(
        self, name: str, whereabouts: Whereabouts, shape: torch.Size | None = None
    ) -> None:
        """`shape`: of the whole; None: the tensor knows."""
        self.name = name
        self.whereabouts = whereabouts
        self.shape = shape
        self.gradient = False
        """There is a gradient, elsewhere."""


class _Hidden:
    """A parameter of which something is elsewhere."""

    __slots__ = ()
    shown: ClassVar[type[torch.Tensor]]
    """The class that it has when nothing is."""

    @property
    def grad(self) -> Any:
        place: HiddenParameter = self.__dict__[_ATTRIBUTE]
        return place.whereabouts.gradient if place.gradient else gradient_of(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        place: HiddenParameter = self.__dict__[_ATTRIBUTE]
        if value is not None:
            raise ConfigurationError(
                f"the gradient of {place.name!r} was set: with "
                f"strategy={place.whereabouts.strategy!r} gradients are summed into shards, and no "
                "rank holds a whole one; scale the loss, or take ddp"
            )
        if place.whereabouts.pending and self.grad is not None:
            raise PreconditionError(
                f"the gradient of {place.name!r} was set to None between backward() and "
                f"optimizer.step(): with strategy={place.whereabouts.strategy!r} it is in the "
                "ranks' sum already; call optimizer.zero_grad() or model.zero_grad(), on every "
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


class _Absent(_Hidden):
    """A parameter whose values are elsewhere."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = _TELLS.get(func)
        if told is not None:
            return told(args[0].__dict__[_ATTRIBUTE], func, args, kwargs or {})
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
            f"<parameter {place.name!r}, cut over the ranks with "
            f"strategy={place.whereabouts.strategy!r}>"
        )


class _Gradient(torch.Tensor):
    """Stands for gradients that are elsewhere."""

    whereabouts: Whereabouts

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.as_subclass:
            # torch's is untyped
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        found = next(
            each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _Gradient)
        )
        if (told := _OF_A_SCALER.get(func)) is not None:
            return told(found.whereabouts.gradients())
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        raise PreconditionError(
            f"{_name(func)} of p.grad: with strategy={found.whereabouts.strategy!r} gradients are "
            "summed into what each rank updates, and not left in the parameters. "
            "model.clip_grad_norm_(max_norm) clips by the norm over all ranks; "
            "model.get_gradients() gives what this rank has of them"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # torch's has one argument, for its own use
        return f"<gradient, summed over the ranks with strategy={self.whereabouts.strategy!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


def _unscale(given: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """A GradScaler unscales gradients, some of which may stand for those that this rank updates
    with: does so with each of those once."""
    gradients = {id(each): each for each in given if not isinstance(each, _Gradient)}
    for each in given:
        if isinstance(each, _Gradient):
            gradients |= {id(one): one for one in each.whereabouts.gradients()}
    kinds: dict[Any, list[torch.Tensor]] = {}
    with inside():
        for gradient in gradients.values():
            if not gradient.__dict__.get(_SEEN):
                gradient.__dict__[_SEEN] = True
                kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for (_, device), alike in kinds.items():
            here = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(alike, here, inverse.to(device))
            found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device)))


_SEEN: Final = "_shoal_unscaled"
_T: Final[Any] = torch.Tensor
_OF_A_SCALER: Final[dict[Any, Callable[[Any], Any]]] = {
    _T.is_sparse.__get__: lambda gradients: False,
    _T.dtype.__get__: lambda gradients: gradients[0].dtype if gradients else torch.float32,
    _T.device.__get__: lambda gradients: gradients[0].device if gradients else torch.device("cpu"),
}
"""What a GradScaler asks of gradients."""


class _Part(torch.Tensor):
    """What this rank updates with, while code of the user's may look at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            # which a GradScaler does on all ranks
            return _unscale(*args)
        if func not in _TELLS:
            raise PreconditionError(
                f"{_name(func)} of a gradient that this rank updates with: it is but a part of the "
                "step's, whose sum the ranks have agreed on. model.clip_grad_norm_(max_norm) "
                "clips on all of them; model.get_gradients() gives this rank's part"
            )
        with inside():
            return func(*args, **(kwargs or {}))


def _refusal(func: Any, hidden: _Absent) -> PreconditionError:
    place: HiddenParameter = hidden.__dict__[_ATTRIBUTE]
    return PreconditionError(
        f"{_name(func)} of parameter {place.name!r}: with strategy={place.whereabouts.strategy!r} "
        "this rank has its values in passes only. Called on every rank, model.full_state_dict() "
        "and model.gather_full_parameters() give copies of them, model.with_parameters(values) "
        "sets them, and model.clone() copies the model. A method of the module that computes with "
        "them is called as model.NAME(...), after model.register_forward_method('NAME')"
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


def _told(tell: Callable[..., Any]) -> Callable[..., Any]:
    """`tell` for a shape that the tensor does not have by itself."""

    @functools.wraps(tell)
    def told(place: HiddenParameter, func: Any, args: Any, kwargs: Any) -> Any:
        return (
            _same(place, func, args, kwargs)
            if place.shape is None
            else tell(place.shape, *args, **kwargs)
        )

    return told


_TELLS: Final[dict[Any, Callable[..., Any]]] = {
    _T.shape.__get__: _told(lambda shape, _: shape),
    _T.ndim.__get__: _told(lambda shape, _: len(shape)),
    _T.nbytes.__get__: _told(lambda shape, own: math.prod(shape) * own.element_size()),
    _T.size: _told(lambda shape, _, dim=None: shape if dim is None else shape[dim]),
    **dict.fromkeys((_T.numel, _T.nelement, torch.numel), _told(lambda shape, _: math.prod(shape))),
    **dict.fromkeys((_T.dim, _T.ndimension), _told(lambda shape, _: len(shape))),
    _T.__len__: _told(lambda shape, _: shape[0]),
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
"""What a parameter without values answers: what it is, and not what is in it."""


# --------------------------------------------------------------------------------- users' own hooks

_REGISTER: Final = ("register_hook", "register_post_accumulate_grad_hook")


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """The hooks that a user has put on a tensor's gradient."""
    with inside():
        tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values() if not _is_own(hook)]


def _is_own(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return bool(module.split(".")[0] == "shoal_worker")


def refuse_hooks(parameters: Iterable[tuple[str, torch.Tensor]], strategy: str) -> None:
    """No hook of a user's on the gradients of these parameters, by name, is to be lost: other
    tensors compute in their places.

    From here on their `register_hook` and `register_post_accumulate_grad_hook` raise
    ConfigurationError.

    Raises:
        ConfigurationError: one has such a hook.
    """
    for name, parameter in parameters:
        if hooks_of(parameter):
            raise _no_hooks(name, strategy)
        for method in _REGISTER:
            setattr(parameter, method, _registering(parameter, method, _no_hooks(name, strategy)))


def _registering(
    parameter: torch.Tensor, method: str, refusal: ConfigurationError
) -> Callable[..., Any]:
    """What `parameter.method` is from here on. It holds no reference to the parameter, which holds
    it."""
    me, register = weakref.ref(parameter), getattr(torch.Tensor, method)

    def registering(hook: Any) -> Any:
        own = me()
        if own is None or not _is_own(hook):
            raise refusal
        return register(own, hook)

    return registering


def _no_hooks(name: str, strategy: str) -> ConfigurationError:
    return ConfigurationError(
        f"a hook on the gradient of parameter {name!r}, by register_hook or "
        f"register_post_accumulate_grad_hook: with strategy={strategy!r} other tensors, parts of "
        "it, take its place whenever the ranks are divided, and the hook would be lost. "
        "model.clip_grad_norm_(max_norm) and the loss's scale change gradients, "
        "model.get_gradients() shows this rank's part of them; under ddp, zero1, zero2, zero3, "
        "fsdp and hsdp such hooks are called, with the gradient of this rank's samples"
    )


def guard_parts(pieces: Iterable[torch.Tensor], *, guarded: bool) -> None:
    """Code of the user's may look at the gradients of these pieces from here on, or the optimizer
    alone."""
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
    """The values of a parameter are elsewhere from here on, its gradient as `place` says. Of one
    that was hidden already the latter."""
    if isinstance(tensor, _Absent):
        tensor.__dict__[_ATTRIBUTE].gradient |= place.gradient
    else:
        _become(tensor, place, _Absent)


def hide_gradient(tensor: Any, place: HiddenParameter) -> None:
    """The gradient of a parameter is elsewhere from here on, as `place` says."""
    if isinstance(tensor, _Hidden):
        tensor.__dict__[_ATTRIBUTE].gradient |= place.gradient
    else:
        _become(tensor, place, _Hidden)


def _become(tensor: Any, place: HiddenParameter, mixed: Any) -> None:
    kind: Any = tensor.shown if isinstance(tensor, _Hidden) else type(tensor)
    tensor.__dict__[_ATTRIBUTE] = place
    tensor.__class__ = _class(kind, mixed)


def show(tensor: Any, place: HiddenParameter) -> None:
    """Nothing of a parameter is hidden any more, if it was by this `place`."""
    if isinstance(tensor, _Hidden) and tensor.__dict__.get(_ATTRIBUTE) is place:
        del tensor.__dict__[_ATTRIBUTE]
        tensor.__class__ = tensor.shown  # type: ignore[assignment]  # one of the same layout


def show_gradient(tensor: Any, place: HiddenParameter) -> None:
    """The gradient of a parameter that has its values is its own again."""
    if not isinstance(tensor, _Absent):
        show(tensor, place)


class Leaves:
    """Parameters that are hidden and shown together."""

    def __init__(self, leaves: Sequence[torch.Tensor], places: Sequence[HiddenParameter]) -> None:
        self._leaves = list(zip(leaves, places, strict=True))
        self._without_gradients = False
        """The gradients of some are hidden."""

    def hide(self) -> None:
        """The values of all are elsewhere."""
        for leaf, place in self._leaves:
            hide(leaf, place)

    def show(self) -> None:
        """Nothing of them is hidden."""
        for leaf, place in self._leaves:
            show(leaf, place)

    def gradient_taken(self, index: int) -> None:
        """One has left its gradient elsewhere."""
        self._leaves[index][1].gradient = True

    def hide_gradients(self) -> None:
        """A backward pass is over: who looks for the gradients that were taken is told where they
        are."""
        self._without_gradients = True
        for leaf, place in self._leaves:
            if place.gradient:
                hide_gradient(leaf, place)

    def gradients_handed_out(self, present: Sequence[bool]) -> None:
        """This rank has its parts of the ranks' gradients now, also of parameters that only other
        ranks have used. `present`: of which."""
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
        """Some have a gradient elsewhere."""
        return any(place.gradient for _, place in self._leaves)

    def show_gradients(self) -> None:
        """A pass begins: autograd is to find plain parameters."""
        if self._without_gradients:
            self._without_gradients = False
            for leaf, place in self._leaves:
                show_gradient(leaf, place)

    def forget_gradients(self) -> None:
        """Autograd has left none, or none that was not taken."""
        for leaf, _ in self._leaves:
            if not isinstance(leaf, _Hidden):
                leaf.grad = None

    def drop_gradients(self) -> None:
        """There are no gradients elsewhere either."""
        for leaf, place in self._leaves:
            if place.gradient or isinstance(leaf, _Hidden):
                drop_gradient(leaf, place)


def is_hidden(tensor: Any) -> bool:
    """The values of a parameter are elsewhere."""
    return isinstance(tensor, _Absent)


def refuse_loading(module: nn.Module) -> None:
    """`load_state_dict` of it, or of a part of it, raises before it changes anything, if it is
    given values of hidden parameters."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(_check_loading)


def _check_loading(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        if is_hidden(parameter) and prefix + name in state_dict:
            # it is one of those
            raise _refusal("load_state_dict()", parameter)  # type: ignore[arg-type]


def blank_copies(module: nn.Module) -> dict[int, Any]:
    """For `copy.deepcopy`: parameters without values in the places of those that are hidden, to be
    given some."""
    with inside():
        return {
            id(p): nn.Parameter(
                torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad
            )
            for p in module.parameters()
            if is_hidden(p)
        }


def gradient_of(tensor: Any) -> torch.Tensor | None:
    """The gradient that autograd has left in a parameter, hidden or not."""
    if not isinstance(tensor, _Hidden):
        return tensor.grad  # type: ignore[no-any-return]  # any tensor's
    with inside():
        return _GRADIENT.__get__(tensor)  # type: ignore[no-any-return]  # a getset descriptor's


def drop_gradient(tensor: Any, place: HiddenParameter | None = None) -> None:
    """Autograd has left none in a parameter. With `place` there is none elsewhere either."""
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
