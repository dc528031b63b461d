"""Registered user state, which is sent to joiners and saved in checkpoints. Schedulers of the run's
optimizers, gradient scalers and averaged models are registered automatically. This module also
detects parameters that a script later adds to an optimizer's groups.

Schedulers and similar objects are advanced by a call in the user's loop, usually after
`optimizer.step()`. The call must have no effect in two cases: the step was aborted, or the script
repeats the call for a skipped epoch after a resume or in a joiner. If the step is aborted only
after the call, the advance is undone. The method that advances an object is therefore wrapped at
registration: `step` of a scheduler, `update` of a scaler, `update_parameters` of an averaged model.
The wrapper asks `RegisteredState` whether the call counts.

Any other registered object is restored to the state that it had when the script received the
aborted step's batch: once when the step is aborted, and again when it is repeated. In a loop
without a Shoal loader, the batch is not repeated, and later changes may belong to the next batch.
There, the object is restored only once, to the state that it had at the beginning of the step.
Everything runs on the training thread.

Registration is automatic because joiners would train with wrong learning rates if a script did not
call `register_state`. torch has no hook for new objects, so `__new__` of their classes is replaced
with a function that records each new object here. Objects of a kind are numbered in order of
creation, which is the same on every rank. When the next step begins, the objects are complete, and
the session registers those that belong to its model or optimizer.

A resumed script and a joiner enter `loader.epochs(n)` at the run's current epoch, so an object
created in such a loop is numbered within its epoch. An object created between two batches would
receive its state too late, in the middle of a step. It is refused unless it is registered with
`register_state`. If a loaded state has not been claimed by an object by the first committed step,
it is dropped with a warning, so that no later object receives it.

Copies (for example `copy.deepcopy` of the best average so far) belong to the user and are not
recorded. torch's classes are modified once per process, when this module is imported. Their
behaviour stays the same."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
import xxhash
from shoal_common.errors import ConfigurationError, PreconditionError
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

from shoal_worker.state.tree import flatten
from shoal_worker.torch_internals import has_unscaled, scales


class GroupMembers(list[torch.Tensor]):
    """List that a strategy assigns to `group["params"]`. If the entry later has a different type,
    the script has replaced the list."""

    def __init__(self, members: Iterable[torch.Tensor]) -> None:
        super().__init__(members)
        self.given = tuple(self)


class Memberships:
    """Parameters that a strategy has assigned to the parameter groups of a run's optimizers.

    After `as_distributed`, an optimizer updates a fixed set of tensors: the model's parameters, or
    this rank's pieces of them. A parameter that a script added later would be updated with this
    rank's own gradient, which is not summed across ranks.
    """

    def __init__(self) -> None:
        self._groups: list[GroupMembers] = []

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Records the groups' parameters as the user created them."""
        for group in groups:
            group["params"] = GroupMembers(group["params"])
        self._groups = [group["params"] for group in groups]

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Checks that a script has neither added parameters to a group nor removed any; otherwise
        raises ConfigurationError. Fast enough to be called in each step."""
        for number, (group, members) in enumerate(zip(groups, self._groups, strict=False)):
            now = group["params"]
            if isinstance(now, GroupMembers) and now is not members:
                # the strategy has set a new layout
                members = self._groups[number] = now
            if len(now) != len(members.given) or any(
                one is not other for one, other in zip(now, members.given, strict=True)
            ):
                raise _changed(number, now, members.given)


def _changed(
    number: int, now: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> ConfigurationError:
    known, found = {id(one) for one in given}, {id(one) for one in now}
    come = [tuple(one.shape) for one in now if id(one) not in known]
    gone = [tuple(one.shape) for one in given if id(one) not in found]
    what = ", ".join(
        f"{len(shapes)} {verb} (shapes {shapes[:3]})"
        for verb, shapes in (("have come", come), ("are gone", gone))
        if shapes
    )
    return ConfigurationError(
        f"parameter group {number} no longer has the members that as_distributed put there (the "
        f"parameters, or this rank's pieces of them): {what or 'their order has changed'}. "
        "Gradients of other tensors are not summed over the ranks, and joiners receive the "
        "original members. Change values in place (model.with_parameters(values)); pass all "
        "parameters to the optimizer before as_distributed, and freeze unused ones with "
        "requires_grad_(False)"
    )


NAMES: Final[dict[type[Any], str]] = {
    LRScheduler: "scheduler",
    torch.amp.GradScaler: "scaler",
    AveragedModel: "averaged",
}
"""Prefix of automatic names, by class of the object. A number is appended."""
_AUTOMATIC: Final = "shoal."
"""Prefix of the names of automatically registered objects."""


class Place(NamedTuple):
    """Position of the script in its loops when it creates an object."""

    epochs: str = ""
    """Epochs of the enclosing `epochs()` loops, such as "loader@3"; empty outside of such loops."""
    after_batches: bool = False
    """True if the epoch's iteration over the batches has ended."""
    within_batches: bool = False
    """True if a batch has been handed out and its loop has not ended. A resumed script may not
    reach such a position."""


class Made(NamedTuple):
    """An object created by the script."""

    name: str
    one: Any
    place: Place = Place()


class _Thread(threading.local):
    """Counters and recently created objects of one thread; thread-local, because ranks may be
    threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.made: list[tuple[str, weakref.ref[Any], Place]] = []
        self.place: Callable[[], Place] = Place


_own: Final = _Thread()


def newly_made() -> list[Made]:
    """Returns the objects created by this thread since the last call, oldest first."""
    made, _own.made = _own.made, []
    return [
        Made(name, one, place)
        for name, reference, place in made
        if (one := reference()) is not None
    ]


def _automatic_name(kind: str, place: Place) -> str:
    """Returns the name of an object created at this position, which is the same in a resumed script
    and in a joiner."""
    where = f"{place.epochs}{'+' if place.after_batches else ''}." if place.epochs else ""
    prefix = f"{_AUTOMATIC}{kind}.{where}"
    number = _own.counts[prefix]
    _own.counts[prefix] += 1
    return f"{prefix}{number}"


def _note(kind: Any, name: str) -> None:
    plain: Any = kind.__new__

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        one = plain(cls) if plain is object.__new__ else plain(cls, *args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__") not in ("copyreg", "copy"):
            place = _own.place()
            _own.made.append((_automatic_name(name, place), weakref.ref(one), place))
        return one

    kind.__new__ = new


for _kind, _name in NAMES.items():
    _note(_kind, _name)


_log = logging.getLogger(__name__)

_OF_A_LENGTH: Final = (
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.LambdaLR,
    lr_scheduler.LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.PolynomialLR,
)
"""Schedulers whose arguments may contain the length of the run. Schedulers that combine others are
registered besides these."""
_NO_SETTINGS: Final = frozenset({"params", "param_names"})
_MOST_KEPT: Final = 64 << 20
"""Maximum size, in bytes, of the tensors in an object that is copied in each step, to be restored
if the step is aborted."""
_MOST_TEXT: Final = 256 << 10
"""Maximum size of the rest of a copied object's state, as characters of JSON. This corresponds to
about 10,000 numbers, which take 10 ms to copy."""
_FIXED: Final = frozenset({bool, float, int, str, type(None)})
"""Types whose values do not change in place."""
_ADVANCES: Final = {"get_scale": "update", "update_parameters": "update_parameters", "": "step"}
"""Attribute that identifies a kind of object -> the method that advances such an object."""


@runtime_checkable
class Stateful(Protocol):
    """Interface that registered objects must have."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class _Before:
    """State of an object before it advanced in the current step, whose outcome is unknown."""

    value: Any
    state: dict[str, Any]
    settings: list[dict[str, Any]]
    advances: int


class RegisteredState:
    """Registered objects by name. Decides whether a call that advances one of them takes effect."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._pending: dict[str, Any] = {}
        self._aborted = False
        """True if the last step has been aborted: advances are ignored until the next step
        begins."""
        self._open = False
        """True if a step has begun and its outcome is unknown."""
        self._early: dict[str, _Before] = {}
        """State of each object that has advanced in the current step, before the advance."""
        self._again: dict[str, _Before] = {}
        """States, before the aborted step, of objects other than schedulers, scalers and averages;
        kept until the step is repeated."""
        self._comes_again = True
        """True if the current step's batch will be repeated if the step is aborted, because it came
        from a Shoal loader."""
        self._copied: set[str] = set()
        """Names of objects whose state is copied in each step."""
        self._too_large: set[str] = set()
        """Names of objects that are too large to be copied in each step. A warning has been logged
        for each."""
        self._advanced: (
            tuple[dict[str, dict[str, Any]], list[dict[str, Any]], dict[str, int], float | None]
            | None
        ) = None
        """States of the objects after they advanced, kept while the advances are withdrawn, with
        the optimizers' settings, the numbers of advances and the loss scale at that time."""
        self._advances: dict[str, int] = {}
        """Number of advances of each object in the run."""
        self._passing = False
        """True if the script has just skipped an iteration of a loader."""
        self._passed: dict[str, int] = {}
        """Number of advances of each object during skipped iterations since a state was loaded.
        That state already contains these advances."""
        self._loaded: dict[str, int] = {}
        """Number of advances of each object in the loaded state."""
        self._loaded_settings: list[dict[str, Any]] | None = None
        """The optimizers' settings in the loaded state, until a step begins. They are needed
        because the constructor of a scheduler changes the settings."""
        self._optimizers: list[torch.optim.Optimizer] = []
        """The run's optimizers as created by the user, one per model."""
        self._found: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """Automatically registered objects that the script still references."""
        self._undecided: list[Made] = []
        """Objects created before an optimizer was known."""
        self._unnamed: list[Made] = []
        """Objects created between two batches, where a resumed script may not create the same
        objects."""
        self._unchecked = False
        """True if a state has been loaded and no step has been committed since."""
        self._loaded_place = ""
        """Epochs whose loop over the batches had already ended when the loaded state was
        captured."""
        self.applying = False
        """True while one of the run's optimizers executes its step. Steps of other optimizers are
        then part of that step."""
        self._device: torch.device | None = None
        """This rank's device; None before `as_distributed`."""
        self._model: dict[int, weakref.ref[torch.Tensor]] = {}
        """The models' parameters as created by the user, by id."""
        self._groups: list[list[int]] = []
        """Numbers of the models' parameters in each of the optimizers' groups, as created by the
        user."""
        self._memberships = Memberships()
        """Current parameters of the optimizers' groups."""
        self._parameters = ""
        """Digest of which parameters are in the groups, and which of them are trained."""
        self._last_scale: float | None = None
        """Factor that a GradScaler, registered or not, applied to the last step's loss; None if
        there was none."""
        self._scale_before: float | None = None
        """Value of `_last_scale` before the current step."""
        self._digest = 0
        self._digested: list[Any] = []
        """Alternating names and values that `_digest` was computed from; empty if the digest must
        be recomputed."""

    def advance_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds an optimizer of the run, in the form in which the user created it, so that its
        schedulers are registered automatically."""
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)

    def made_from(
        self,
        parameters: Iterable[torch.Tensor],
        *optimizers: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        """Sets the run's optimizers, in the form in which the user created them. `parameters`: all
        parameters of the models. `device`: this rank's device."""
        self._device = device
        for value in self._all.values():
            self._create_scale(value)
        self._optimizers = []
        known = list(parameters)
        numbers = {id(parameter): number for number, parameter in enumerate(known)}
        groups = [
            group
            for optimizer in optimizers
            if optimizer is not None
            for group in optimizer.param_groups
        ]
        self._model = {id(parameter): weakref.ref(parameter) for parameter in known}
        self._groups = [
            [numbers.get(id(parameter), -1) for parameter in group["params"]] for group in groups
        ]
        self._memberships.begin(groups)
        self.note_trained([parameter.requires_grad for parameter in known])

    def number_by(self, place: Callable[[], Place]) -> None:
        """Sets the function that returns the script's position. The position becomes part of the
        names of objects that this thread creates from now on."""
        _own.place = place

    def let_go(self) -> None:
        """Releases the model at the end of the run. Later changes to the model are no longer
        checked."""
        self._model = {}
        _own.place = Place
        if not _own.made:
            # the next run of this process numbers its objects from 0, as a new process would
            _own.counts.clear()

    def unclaimed(self) -> list[str]:
        """Names in the loaded state for which the script has not registered an object."""
        return sorted(self._pending)

    def check_groups(self) -> None:
        """Checks that the script has not added groups or parameters to the run's optimizers since
        `as_distributed`; otherwise raises ConfigurationError."""
        groups = self._param_groups
        if self._groups and len(groups) > len(self._groups):
            raise ConfigurationError(
                f"the optimizers passed to as_distributed now have {len(groups)} parameter groups "
                f"instead of {len(self._groups)}, but gradients of parameters added later are not "
                "summed over the ranks. Add all parameters before as_distributed, and freeze "
                "those used later with requires_grad_(False)"
            )
        self._memberships.check(groups)

    def check_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer that is about to step. Raises ConfigurationError if it updates
        parameters of the run's models without being one of the run's optimizers."""
        if not self._optimizers or self.applying or self._is_own(optimizer):
            return
        for parameter in (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            known = self._model.get(id(parameter))
            if known is not None and known() is parameter:
                raise ConfigurationError(
                    f"a second optimizer ({type(optimizer).__name__}) stepped parameters of the "
                    "model passed to as_distributed: its updates are not undone when a step is "
                    "lost, and its state is neither sent to joiners nor saved in checkpoints. "
                    "Pass as_distributed a single optimizer, with a parameter group for each of "
                    "the two"
                )

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Records which parameters of the model require gradients from now on."""
        self._parameters = (
            f"{xxhash.xxh3_64_intdigest(repr((self._groups, list(trained))).encode()):016x}"
        )

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns the optimizer's index among the run's optimizers, in the order of
        `as_distributed`."""
        return next(
            (number for number, known in enumerate(self._optimizers) if known is optimizer), 0
        )

    def _is_own(self, optimizer: Any) -> bool:
        """Returns whether `optimizer` is one of the run's optimizers, or the user's wrapper of
        one."""
        own = getattr(optimizer, "optimizer", optimizer)
        return any(known is own for known in self._optimizers)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Settings that must be the same on all ranks. These are the hyperparameters of the run's
        optimizers by group, the last loss scale, and a digest of which parameters are in the groups
        and which of them require gradients. Contains only plain values, because the text form of
        other values may differ between ranks."""
        plain = [
            {
                name: plain
                for name, value in group.items()
                if name not in _NO_SETTINGS and (plain := _plain(value)) is not None
            }
            for group in self._param_groups
        ]
        return [*plain, {"loss scale": self._last_scale, "parameters": self._parameters}]

    def settings_digest(self) -> int:
        """Returns a digest of `settings`, which is the same for equal numbers of different types.
        The digest is recomputed only if a value has changed or may have changed in place."""
        now: list[Any] = [self._last_scale, self._parameters]
        kinds = set[type]()
        for group in self._param_groups:
            for name, value in group.items():
                if name not in _NO_SETTINGS:
                    now += (name, value)
                    kinds.update(map(type, value) if type(value) is tuple else (type(value),))
        fixed = kinds <= _FIXED
        if not fixed or now != self._digested:
            self._digest = xxhash.xxh3_64_intdigest(repr(_canonical(self.settings)).encode())
            self._digested = now if fixed else []
        return self._digest

    def scaled_by(self, scale: float) -> None:
        """Records a GradScaler's factor for the loss of the applied step."""
        self._last_scale = scale

    def register(self, name: str, value: object, *, copied: bool = False) -> None:
        """Registers `value` under `name`. If a loaded state contains an entry of that name, loads
        it into the object. `copied`: True to copy the object's state in each step, and to restore
        it if the step is aborted.

        Raises:
            ConfigurationError: `value` lacks state_dict or load_state_dict, its state cannot be
                stored, or the name is already registered for a different object.
        """
        if not isinstance(value, Stateful):
            raise ConfigurationError(
                f"register_state({name}=...): {type(value).__name__} has no state_dict() and "
                "load_state_dict(); register an object that has both"
            )
        if name in self._objects and self._objects[name] is not value:
            raise ConfigurationError(
                f"register_state({name}=...): the name {name!r} is already used by another "
                "object; choose another name"
            )
        if name in self._objects:
            return
        for known in [known for known, one in self._found.items() if one is value]:
            del self._found[known]
        self._take(name, value, self._objects)
        # Schedulers and scalers need no copy, because calls to their wrapped methods can be
        # ignored. A loader's state takes effect only in its next iteration.
        if copied and not isinstance(value, tuple(NAMES)) and not _is_loader(value):
            self._copied.add(name)

    def _take(self, name: str, value: Any, where: MutableMapping[str, Any]) -> None:
        # raises now if the state could not be sent or saved later
        flatten({name: value.state_dict()})
        where[name] = value
        self._create_scale(value)
        advance = next(
            method for marker, method in _ADVANCES.items() if hasattr(value, marker) or not marker
        )
        if callable(getattr(value, advance, None)):
            self._gate(name, value, advance)
        if name in self._pending:
            _load(value, self._pending.pop(name))
            if self._loaded_settings is not None and isinstance(value, LRScheduler):
                self._put_settings(self._loaded_settings)

    def _create_scale(self, value: Any) -> None:
        """Creates the scale of a GradScaler on this rank's device. torch creates it in the first
        `scale()`, which a rank without a micro-batch does not call before `unscale_()`."""
        if isinstance(value, torch.amp.GradScaler) and self._device is not None:
            value.scale(torch.zeros((), device=self._device))

    @property
    def _all(self) -> dict[str, Any]:
        return {**self._objects, **self._found}

    def schedules_of_a_length(self) -> list[str]:
        """Returns the types of registered schedulers whose learning rates may depend on the number
        of epochs or steps of the run, sorted."""
        self.find_new()
        return sorted(
            {type(one).__name__ for one in self._all.values() if isinstance(one, _OF_A_LENGTH)}
        )

    def find(self, name: str) -> Stateful | None:
        """Returns the object registered under `name`, or None."""
        return self._objects.get(name)

    def loss_scale(self, scaler: str | None) -> float:
        """Returns the current loss scale of a registered GradScaler. `scaler`: name of the scaler;
        empty: no scaler, so the scale is 1; None: the product over all scalers."""
        scalers = {
            name: value
            for name, value in self._all.items()
            if hasattr(value, "get_scale") and scaler in (None, name)
        }
        return math.prod(float(value.get_scale()) for value in scalers.values())

    def check_scalers(self) -> None:
        """Raises PreconditionError if a GradScaler has unscaled the gradients of a step before all
        of its micro-batches have added to them."""
        if any(has_unscaled(value) for value in self._all.values()):
            raise PreconditionError(
                "scaler.unscale_() was called inside the loop over the step's micro-batches, "
                "before their gradients were summed; call it after that loop"
            )

    def scaler_of(self, optimizer: object) -> str:
        """Returns the name of the registered GradScaler that steps `optimizer`; empty if there is
        none."""
        return next(
            (
                name
                for name, value in self._all.items()
                if hasattr(value, "get_scale") and scales(value, optimizer)
            ),
            "",
        )

    def capture(self) -> dict[str, Any]:
        """Returns the state of all registered objects."""
        self.find_new()
        states = {name: value.state_dict() for name, value in self._all.items()} | self._pending
        states |= {name: before.state for name, before in self._again.items()}
        place = _own.place()
        return {
            "states": states,
            "scale": self._last_scale,
            "advances": dict(self._advances),
            "place": place.epochs if place.after_batches else "",
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Loads a captured state into the registered objects. States for other names are kept until
        objects are registered under these names."""
        self.find_new()
        states = dict(captured["states"])
        for name, value in self._all.items():
            if name in states:
                _load(value, states.pop(name))
        self._pending, self._last_scale = states, captured.get("scale")
        self._unchecked, self._loaded_place = True, captured.get("place", "")
        self._scale_before = self._last_scale
        self._loaded = dict(captured.get("advances", {}))
        self._advances, self._passed, self._early = dict(self._loaded), {}, {}
        self._advanced = None
        self._again = self._copies() if self._aborted and self._comes_again else {}

    def restored(self) -> None:
        """Records that the optimizers now have the settings of the state that was restored last."""
        self._loaded_settings = self._copied_settings()

    def restoring(self) -> Callable[[], None]:
        """Returns a function that undoes a failed `restore`: it reloads the state that each object
        has now. If an object refuses its state, the others are still restored."""
        self.find_new()
        objects = self._all
        before = {name: copy.deepcopy(value.state_dict()) for name, value in objects.items()}
        pending, scale = self._pending, self._last_scale
        counts = self._advances, self._passed, self._loaded

        def put_back() -> None:
            for name, state in before.items():
                try:
                    objects[name].load_state_dict(state)
                except Exception as error:  # in the user's object; the others are still restored
                    _log.warning("the registered state %r could not be restored: %s", name, error)
            self._pending, self._last_scale = pending, scale
            self._advances, self._passed, self._loaded = counts

        return put_back

    def keep_for_redo(self) -> None:
        """Keeps a copy of the current state, because the script will repeat the steps that follow
        this state."""
        self._again = self._copies(limited=False)

    def put_back_again(self) -> None:
        """Restores registered objects to their state before the aborted step, because that step is
        about to be repeated with the same batch."""
        again, self._again = self._again, {}
        for before in again.values():
            before.value.load_state_dict(copy.deepcopy(before.state))

    def step_begins(self) -> None:
        """Begins a step. From now on, advances count again."""
        self._aborted = False
        self._open, self._early, self._advanced = True, {}, None
        self._scale_before = self._last_scale
        self.find_new()
        self._refuse_unnamed()

    def step_taken(self, *, may_be_lost: bool = False, comes_again: bool = True) -> None:
        """Records that the script receives its part of the step, and has therefore caught up with
        the run. `may_be_lost`: True to copy the registered objects, so that they can be restored if
        the step is aborted. `comes_again`: True if the same batch is handed out again after an
        aborted step."""
        # A joiner's first step begins at the start of its loop over epochs, before it creates the
        # epoch's objects.
        self.find_new()
        self._refuse_unnamed()
        self._passing, self._loaded = False, {}
        self._comes_again = comes_again
        if may_be_lost:
            self._early |= self._copies()

    def _copies(self, *, limited: bool = True) -> dict[str, _Before]:
        """Returns copies of the state of registered objects. `limited`: True to omit large
        objects."""
        copies = {
            name: self._copy(name, value, limited=limited)
            for name, value in self._objects.items()
            if name in self._copied
        }
        return {name: before for name, before in copies.items() if before is not None}

    def _copy(self, name: str, value: Any, *, limited: bool) -> _Before | None:
        if not limited:
            return _Before(
                value, copy.deepcopy(value.state_dict()), [], self._advances.get(name, 0)
            )
        if name in self._too_large:
            return None
        state = value.state_dict()
        structure, tensors = flatten({name: state})
        if (
            sum(tensor.nbytes for tensor in tensors.values()) > _MOST_KEPT
            or len(json.dumps(structure)) > _MOST_TEXT
        ):
            self._too_large.add(name)
            _log.warning(
                "the registered object %r holds more than %d MiB of tensors, or %d KiB of other "
                "values, so it is not copied in each step, and changes made in a lost step are "
                "not undone. Change it only after optimizer.step(), and only if that returned a "
                "true value",
                name,
                _MOST_KEPT >> 20,
                _MOST_TEXT >> 10,
            )
            return None
        return _Before(value, copy.deepcopy(state), [], self._advances.get(name, 0))

    def step_committed(self) -> None:
        """Records that the current step is committed, so that its advances are final."""
        self._open, self._early, self._again = False, {}, {}
        self._loaded_settings = None
        if self._unchecked:
            self._unchecked = False
            self._drop_unclaimed()

    def _drop_unclaimed(self) -> None:
        """Drops the loaded states of automatic names that no object has claimed, with a warning,
        because objects created later are different ones."""
        dropped = [
            name
            for name in self._pending
            if name.startswith(tuple(f"{_AUTOMATIC}{kind}." for kind in NAMES.values()))
        ]
        for name in dropped:
            del self._pending[name]
        over = f".{self._loaded_place}." if self._loaded_place else None
        # otherwise the object's epoch had already ended when the state was saved
        lost = [name for name in dropped if over is None or over not in name]
        if lost:
            _log.warning(
                "the loaded state of %s was dropped, because the script did not create these "
                "objects before its first step: create schedulers, gradient scalers and averaged "
                "models before the loop or at the start of an epoch, or name them with "
                "shoal.register_state(name=...)",
                ", ".join(lost),
            )

    def _refuse_unnamed(self) -> None:
        """Raises ConfigurationError if the script has created an object between two batches without
        registering it by name. A resumed script may not reach that point, so the automatic number
        of the object could differ."""
        unnamed, self._unnamed = self._unnamed, []
        named = list(self._objects.values())
        for made in unnamed:
            if all(known is not made.one for known in named):
                raise ConfigurationError(
                    f"an object of type {type(made.one).__name__} was created between two "
                    "batches: a process that joins or resumes at that point would not create it, "
                    "or would load the state of another object into it. Create it before the "
                    "loop over the batches, or name it where it is created: "
                    "shoal.register_state(some_name=...)"
                )

    def passed_over(self) -> None:
        """Records that the script has skipped an iteration of a loader. From now on, its calls may
        repeat advances that the run has already made."""
        self._passing = True

    def find_new(self) -> None:
        """Registers newly created objects that belong to the run."""
        made = newly_made()
        if not made and (not self._undecided or not self._optimizers):
            return
        candidates, self._undecided = [*self._undecided, *made], []
        for name, one, place in candidates:
            if not self._optimizers:
                self._undecided.append(Made(name, one, place))
            elif self._belongs(one) and all(known is not one for known in self._objects.values()):
                if place.within_batches:
                    self._unnamed.append(Made(name, one, place))
                    continue
                try:
                    self._take(name, one, self._found)
                except ConfigurationError as error:
                    _log.warning(
                        "%s will not be sent to joiners or saved in checkpoints: %s",
                        type(one).__name__,
                        error,
                    )

    def _belongs(self, one: Any) -> bool:
        if not isinstance(one, LRScheduler):
            return True
        optimizer = getattr(one, "optimizer", None)
        return optimizer is not None and self._is_own(optimizer)

    def step_aborted(self) -> None:
        """Undoes the advances made in an aborted step. Later advances are ignored until the next
        step begins."""
        self.find_new()
        self._aborted = True
        if self._comes_again:
            self._again |= {
                name: before for name, before in self._early.items() if name in self._copied
            }
        self.step_undone()

    def step_undone(self) -> None:
        """Undoes the advances made in the current step. Later advances count again, unlike after
        `step_aborted`."""
        self.find_new()
        if self._open:
            self._last_scale = self._scale_before
        self._put_back_early()
        self._open, self._early, self._advanced = False, {}, None

    def withdraw(self) -> None:
        """Undoes the advances in the current step while its outcome is unknown, because the state
        may be sent to peers. Must be followed by `reinstate` or `step_aborted`."""
        if self._advanced is None:
            after = {
                name: copy.deepcopy(before.value.state_dict())
                for name, before in self._early.items()
            }
            self._advanced = after, self._copied_settings(), dict(self._advances), self._last_scale
            self._put_back_early()
            self._last_scale = self._scale_before

    def reinstate(self) -> None:
        """Restores the advances undone by `withdraw`, because the step is committed."""
        if self._advanced is not None:
            after, settings, self._advances, self._last_scale = self._advanced
            self._advanced = None
            for name, state in after.items():
                self._early[name].value.load_state_dict(state)
            self._put_settings(settings)

    def _put_back_early(self) -> None:
        for name, before in reversed(self._early.items()):
            before.value.load_state_dict(copy.deepcopy(before.state))
            self._put_settings(before.settings)
            self._advances[name] = before.advances

    def _copied_settings(self) -> list[dict[str, Any]]:
        return [
            {
                name: copy.deepcopy(value)
                for name, value in group.items()
                if name not in _NO_SETTINGS
            }
            for group in self._param_groups
        ]

    def _put_settings(self, settings: list[dict[str, Any]]) -> None:
        for group, own in zip(self._param_groups, settings, strict=False):
            group.update(copy.deepcopy(own))

    def _counts(self, name: str, value: Any) -> bool:
        """Returns whether an advance that the script requests counts for the run. If it does, and a
        step is in progress, first copies the object's state."""
        if self._aborted:
            return False
        if self._passing and self._passed.get(name, 0) < self._loaded.get(name, 0):
            self._passed[name] = self._passed.get(name, 0) + 1
            return False
        if self._open and name not in self._early:
            state = copy.deepcopy(value.state_dict())
            self._early[name] = _Before(
                value, state, self._copied_settings(), self._advances.get(name, 0)
            )
        self._advances[name] = self._advances.get(name, 0) + 1
        return True

    def _gate(self, name: str, value: Any, method: str) -> None:
        kind, gate = type(value), _reference(value)
        advance = getattr(kind, method)

        @functools.wraps(advance)
        def gated(own: Any, *args: Any, **kwargs: Any) -> Any:
            if own is not gate():  # the object is a copy, which belongs to the user
                return advance(own, *args, **kwargs)
            if not self._counts(name, own):
                if method == "update":
                    # As update() does at its end; otherwise the next step would seem to be a second
                    # step. A scaler that is not enabled has no such states.
                    getattr(own, "_per_optimizer_states", {}).clear()
                return None
            return advance(own, *args, **kwargs)

        # A separate class instead of an instance attribute, because schedulers put their instance
        # attributes into state_dict().
        members = {method: gated, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        if not hasattr(value, "__dict__"):
            # its class has __slots__ and can be replaced only by a class with the same slots
            members["__slots__"] = ()
        value.__class__ = type(kind.__name__, (kind,), members)


def _load(value: Stateful, state: dict[str, Any]) -> None:
    """Loads a state received from another process into `value`. Renames the keys of an averaged
    model if necessary: on a rank with the full model, the average was made from a `ShardedModel`,
    whose keys have an additional prefix "module."."""
    if isinstance(value, AveragedModel):
        own = value.state_dict().keys()
        once, twice = "module.", "module.module."
        renamed = {
            name.replace(twice, once, 1) if name.startswith(twice) else name: tensor
            for name, tensor in state.items()
        }
        if renamed.keys() != own:
            renamed = {
                name.replace(once, twice, 1) if name.startswith(once) else name: tensor
                for name, tensor in state.items()
            }
        if state.keys() != own and renamed.keys() == own:
            state = renamed
    value.load_state_dict(state)


def _is_loader(value: Any) -> bool:
    """Returns whether `value` yields samples. Modules (`nn.Sequential`, a collection of metrics)
    and containers can be iterated over too, but loaders cannot be indexed. torch's
    `IterableDataset` inherits a `__getitem__` that raises."""
    return isinstance(value, IterableDataset) or (
        isinstance(value, Iterable)
        and not isinstance(value, torch.nn.Module)
        and not hasattr(value, "__getitem__")
    )


def _plain(value: Any) -> Any:
    """Returns a form of `value` whose text is the same on all ranks if the ranks' values are equal;
    None if there is no such form."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, bool | int | float | str) else None


def _canonical(settings: Any) -> Any:
    """Converts equal numbers in `settings` to the same representation: 1, True and 1.0 become the
    same, as do 0.0 and -0.0."""
    if isinstance(settings, Mapping):
        return {name: _canonical(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_canonical(value) for value in settings]
    return float(settings) + 0.0 if isinstance(settings, bool | int | float) else settings


def _reference(value: Any) -> Callable[[], Any]:
    """Returns a weak reference: a function that returns the object while the script still
    references it. (A strong reference would form a cycle with the object's own class, and keep the
    object alive until a garbage collection.) If the object's class does not support weak
    references, the function always returns the object."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
