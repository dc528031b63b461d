"""A training loader's position in its run: its cursor, and the epoch of an iteration. Checkpoints
contain the position, and joiners receive it.

The cursor counts samples, not steps, so that a run can continue with a different global batch size.
A `Cursor` is immutable; each of its transitions is a method that returns a new one.

Inside `epochs()`, an iteration belongs to that loop's epoch. Otherwise the k-th iteration is epoch
k, not counting iterations that are abandoned before their first commit (`next(iter(loader))`, to
look at a batch). An iteration of a finished epoch yields nothing. An iteration of the cursor's
epoch yields the remaining batches, and an iteration of a later epoch yields all batches. If the
script leaves the loop over the batches early and starts the next epoch, the rest of the epoch is
abandoned. If it leaves `epochs()` as well, for example because of a time limit, the rest is not
abandoned, and a resumed run continues in the middle of the epoch. The same applies when
`epochs(max_steps=...)` ends.

This module does not deal samples or use the session. May be used only on the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.data.sampling import EpochPlan


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A training loader's position after the last committed step."""

    epoch: int = 0
    """Epoch, counted from 0. After an epoch's last step, this is the next epoch."""
    samples: int = 0
    """Number of finished samples in the epoch."""
    step: int = 0
    """Number of finished steps in the epoch."""
    global_step: int = 0
    """Number of steps committed so far, over all epochs."""

    def after_step(self, step: range, plan: EpochPlan) -> Cursor:
        """Returns the cursor after the commit of `step`, which must begin at this cursor."""
        moved = Cursor(
            epoch=self.epoch,
            samples=step.stop,
            step=self.step + 1,
            global_step=self.global_step + 1,
        )
        return moved if plan.step(moved.samples) else moved.at_epoch(self.epoch + 1)

    def after_leased_batch(self) -> Cursor:
        """Returns the cursor after the commit of a leased batch. Only `global_step` advances,
        because no single member knows which of the epoch's batches are finished."""
        return replace(self, global_step=self.global_step + 1)

    def at_epoch(self, epoch: int) -> Cursor:
        """Returns the cursor at the beginning of `epoch`."""
        return replace(self, epoch=epoch, samples=0, step=0)

    def to_state(self) -> dict[str, Any]:
        """Returns the cursor as a JSON-able dictionary."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """Creates a cursor from the result of `to_state`, ignoring other keys.

        Raises:
            CorruptDataError: a field is missing or not a non-negative integer.
        """
        values = {name: state.get(name) for name in ("epoch", "samples", "step", "global_step")}
        for name, value in values.items():
            if type(value) is not int or value < 0:
                raise CorruptDataError(
                    f"the loader's state has {name}={value!r}; expected a whole number of at least "
                    "0"
                )
        return cls(**values)  # type: ignore[arg-type]  # checked above


_STATE_VERSION = 1


class Orders(Protocol):
    """Interface of an object that determines the order of samples in each epoch."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Values that, together with the epoch number, determine the order unless a sampler draws
        it. JSON-able.
        """
        ...

    @property
    def identity(self) -> str:
        """Digest that identifies the dataset."""
        ...

    @property
    def drawn(self) -> bool:
        """True if a sampler determines the order."""
        ...

    def digest(self, epoch: int) -> str | None:
        """Returns the digest of an order drawn by a sampler. Returns None if the loader's arguments
        determine the order."""
        ...


class LoaderProgress:
    """A training loader's position in its run: its cursor, and the epoch of its next iteration."""

    def __init__(self, orders: Orders) -> None:
        self.cursor = Cursor()
        """Position after the last commit or, if an iteration has started a later epoch since, the
        beginning of that epoch."""
        self.within: int | None = None
        """Epoch that `epochs()` yielded last; None outside of `epochs()`."""
        self.max_steps: int | None = None
        """Total number of committed steps after which the enclosing loop over `epochs()` ends;
        None: no limit.
        """
        self._orders = orders
        self._next_epoch = 0
        self._loaded_next_epoch = 0
        """Next epoch according to the last loaded state; 0 once the script has reached it. Until
        then, the script may have to skip iterations."""
        self._leased_in: int | None = None
        """Epoch of the last committed leased batch."""

    @property
    def next_epoch(self) -> int:
        """Implements `StepSource.next_epoch`."""
        return max(self._next_epoch, self._loaded_next_epoch)

    @property
    def passed_iterations(self) -> int:
        """Implements `StepSource.next_iteration`."""
        return self._next_epoch

    def count_from(self, epoch: int | None) -> None:
        """Implements `StepSource.count_from`."""
        self._next_epoch = self._loaded_next_epoch if epoch is None else epoch

    @property
    def next_iteration(self) -> int:
        """Epoch that an iteration belongs to if it begins now."""
        return self._next_epoch if self.within is None else self.within

    def is_past(self, epoch: int) -> bool:
        """Returns whether the run has finished or abandoned this epoch."""
        return epoch < self._loaded_next_epoch or epoch < self.cursor.epoch

    @property
    def has_all_steps(self) -> bool:
        """True if the run has committed as many steps as the enclosing loop over `epochs()` allows
        (`max_steps`)."""
        return self.max_steps is not None and self.cursor.global_step >= self.max_steps

    @property
    def takes_last_step(self) -> bool:
        """True if the next commit completes the `max_steps` of the enclosing loop over
        `epochs()`."""
        return self.max_steps is not None and self.cursor.global_step + 1 >= self.max_steps

    def move_to(self, epoch: int) -> None:
        """Prepares an iteration of `epoch`: moves the cursor to the beginning of `epoch` if the
        cursor is in an earlier epoch."""
        if self.cursor.epoch < epoch:
            self.cursor = self.cursor.at_epoch(epoch)

    def take_part(self, epoch: int) -> None:
        """Records that a step of `epoch` begins. This means that the script has reached the epoch
        at which a loaded state continues, and has no more iterations to skip."""
        self.move_to(epoch)
        self._next_epoch, self._loaded_next_epoch = epoch, 0

    def end_iteration(self, epoch: int) -> None:
        """Records that the iteration of `epoch` has finished."""
        self._next_epoch = max(self._next_epoch, epoch + 1)

    def leave_epochs(self, epoch: int) -> None:
        """Records that the script has left the loop over epochs during `epoch`. A resumed run
        continues with the rest of `epoch`, if any.
        """
        if self.cursor.epoch == epoch:
            self._next_epoch = epoch

    @property
    def gives_up(self) -> int | None:
        """Epoch whose remaining samples are abandoned because the script left the loop over its
        batches early; None if there is none."""
        cursor = self.cursor
        return cursor.epoch if cursor.step and self._next_epoch > cursor.epoch else None

    @property
    def repeats(self) -> int | None:
        """Epoch that a run resumed from this cursor would repeat from the beginning, because it is
        not known which of the epoch's leased batches are finished; None if there is none."""
        return self.cursor.epoch if self.cursor.epoch == self._leased_in else None

    def finish_leased_batch(self) -> None:
        """Records that a leased batch has been committed."""
        self.cursor = self.cursor.after_leased_batch()
        self._leased_in = self.cursor.epoch

    def end_epoch(self) -> None:
        """Records that the cursor's epoch has no further step. The cursor moves to the next
        epoch."""
        self.cursor = self.cursor.at_epoch(self.cursor.epoch + 1)

    # ---------------------------------------------------------------------------------------- state

    def capture(self) -> dict[str, Any]:
        """Returns the cursor, in samples, together with the values that determine the order of the
        samples. JSON-able.
        """
        return {
            "version": _STATE_VERSION,
            **self.cursor.to_state(),
            "next_epoch": self.next_epoch,
            **self._orders.arguments,
            "identity": self._orders.identity,
            "order": self._orders.digest(self.cursor.epoch) if self.cursor.samples else None,
        }

    def checked(self, state: Mapping[str, Any], *, loader: str, leased: bool) -> tuple[Cursor, int]:
        """Checks a captured state, and returns the position that it contains, for `take`.

        `loader`: name of the loader in error messages. `leased`: True if the loader leases batches;
        its cursor is then always at the beginning of an epoch.

        Raises:
            CorruptDataError: this is not a loader's state, or it is from a newer release.
            ConfigurationError: the cursor is in the middle of an epoch whose order is different in
                this loader, so samples would be lost or seen twice.
        """
        if state.get("version") != _STATE_VERSION:
            raise CorruptDataError(
                f"loader {loader!r}: the state has version {state.get('version')!r}, but this "
                f"release reads version {_STATE_VERSION}"
            )
        cursor, next_epoch = Cursor.from_state(state), state.get("next_epoch")
        if type(next_epoch) is not int or next_epoch < 0:
            raise CorruptDataError(
                f"the loader's state has next_epoch={next_epoch!r}; expected a whole number of at "
                "least 0"
            )
        if cursor.samples and not leased:
            self._check_order(cursor, state, loader)
        return cursor, next_epoch

    def take(self, checked: tuple[Cursor, int]) -> None:
        """Moves to a position returned by `checked`."""
        self.cursor, next_epoch = checked
        # a state from the last step of an iteration does not count that iteration as finished
        self._loaded_next_epoch = max(next_epoch, self.cursor.epoch)

    def _check_order(self, cursor: Cursor, state: Mapping[str, Any], loader: str) -> None:
        arguments = self._orders.arguments
        here = {"length": arguments["length"], "order": self._orders.digest(cursor.epoch)}
        if not self._orders.drawn:
            here |= arguments
        if "identity" in state:  # earlier releases did not save this value
            here["identity"] = self._orders.identity
        for field, value in here.items():
            if state.get(field) != value:
                if field == "identity":
                    raise ConfigurationError(
                        f"loader {loader!r}: the state is {cursor.samples} samples into epoch "
                        f"{cursor.epoch} of a dataset with other contents "
                        f"(identity={state.get(field)!r}, but this one has {value!r}), so samples "
                        "would be lost or seen twice. Use the same dataset, or a state saved "
                        "between epochs"
                    )
                raise ConfigurationError(
                    f"loader {loader!r}: the state is {cursor.samples} samples into epoch "
                    f"{cursor.epoch}, whose order had {field}={state.get(field)!r}, but this "
                    f"loader has {field}={value!r}, so samples would be lost or seen twice. Use "
                    "the same dataset, seed, shuffle and sampler, or a state saved between epochs"
                )
