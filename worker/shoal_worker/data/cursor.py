"""Where a training loader stands in its run: its cursor, and which epoch an iteration is. This is
what checkpoints keep and joiners get.

The cursor counts samples, not steps, so that a run can go on with another global batch size. It is
pure; one method per move.

Inside `epochs()`, an iteration is of the epoch that stands there; else the k-th iteration is of
epoch k, where one that is broken off before its first commit (`next(iter(loader))`, to look at a
batch) does not count. An iteration of an epoch that is over yields nothing; of the cursor's, the
rest; of a later one, all of it. Leaving the loop over the batches early, and going on to the next
epoch, gives up what remained. Leaving `epochs()` as well gives up nothing: a time limit has ended
the script, and what is resumed goes on within the epoch.

Deals nothing and knows no session. Used by the training thread alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from shoal_common.errors import ConfigurationError, CorruptDataError

from shoal_worker.data.sampling import EpochPlan


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The place after the last committed step."""

    epoch: int = 0
    """0-based. After an epoch's last step: the next one."""
    samples: int = 0
    """Positions of the epoch that are done."""
    step: int = 0
    """Steps of the epoch that are done."""
    global_step: int = 0
    """Steps committed in all epochs."""

    def after_step(self, step: range, plan: EpochPlan) -> Cursor:
        """`step`, the one at this cursor, is committed."""
        moved = Cursor(
            epoch=self.epoch,
            samples=step.stop,
            step=self.step + 1,
            global_step=self.global_step + 1,
        )
        return moved if plan.step(moved.samples) else moved.at_epoch(self.epoch + 1)

    def after_leased_batch(self) -> Cursor:
        """A leased batch is committed; which ones of the epoch are done is not for one member to
        know."""
        return replace(self, global_step=self.global_step + 1)

    def at_epoch(self, epoch: int) -> Cursor:
        """At the head of `epoch`."""
        return replace(self, epoch=epoch, samples=0, step=0)

    def to_state(self) -> dict[str, Any]:
        """Returns the cursor as what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """The inverse; other keys are ignored.

        Raises:
            CorruptDataError: a field is missing or no count.
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
    """The order of the samples in each epoch."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What an order that is not drawn follows from, with the epoch. JSON-able."""
        ...

    @property
    def identity(self) -> str:
        """The identity of what is put in order."""
        ...

    @property
    def drawn(self) -> bool:
        """Whether a sampler makes the order."""
        ...

    def digest(self, epoch: int) -> str | None:
        """Digest of a drawn order; None when the order follows from the loader's arguments."""
        ...


class LoaderProgress:
    """The cursor and the count of epochs."""

    def __init__(self, orders: Orders) -> None:
        self.cursor = Cursor()
        """After the last commit, or at the head of the epoch that an iteration has moved on to."""
        self.within: int | None = None
        """The epoch that `epochs()` has given out; None outside of it."""
        self._orders = orders
        self._next_epoch = 0
        self._loaded_next_epoch = 0
        """The next epoch in the state that was loaded last. The script may still have to pass over
        iterations to get there."""

    @property
    def next_epoch(self) -> int:
        """See `StepSource.next_epoch`."""
        return max(self._next_epoch, self._loaded_next_epoch)

    @property
    def passed_iterations(self) -> int:
        """See `StepSource.next_iteration`."""
        return self._next_epoch

    def count_from(self, epoch: int | None) -> None:
        """See `StepSource.count_from`."""
        self._next_epoch = self._loaded_next_epoch if epoch is None else epoch

    @property
    def next_iteration(self) -> int:
        """The epoch of the iteration that begins now."""
        return self._next_epoch if self.within is None else self.within

    def is_past(self, epoch: int) -> bool:
        """The run has left this epoch behind."""
        return epoch < self._loaded_next_epoch or epoch < self.cursor.epoch

    def move_to(self, epoch: int) -> None:
        """An iteration of `epoch` goes on from the cursor, or from the epoch's head if the cursor
        is before that."""
        if self.cursor.epoch < epoch:
            self.cursor = self.cursor.at_epoch(epoch)

    def take_part(self, epoch: int) -> None:
        """A step of `epoch` begins: the script has come to the place that the loaded state told
        of."""
        self.move_to(epoch)
        self._next_epoch, self._loaded_next_epoch = epoch, 0

    def end_iteration(self, epoch: int) -> None:
        """The iteration of `epoch` is over, and counts."""
        self._next_epoch = max(self._next_epoch, epoch + 1)

    def leave_epochs(self, epoch: int) -> None:
        """The loop over epochs was left in `epoch`. Its rest, if there is one, is still to be
        done."""
        if self.cursor.epoch == epoch:
            self._next_epoch = epoch

    @property
    def gives_up(self) -> int | None:
        """The epoch whose rest is given up, since the loop over its batches was left early; None:
        there is none."""
        cursor = self.cursor
        return cursor.epoch if cursor.step and self._next_epoch > cursor.epoch else None

    def end_epoch(self) -> None:
        """The cursor's epoch has no further step."""
        self.cursor = self.cursor.at_epoch(self.cursor.epoch + 1)

    # ---------------------------------------------------------------------------------------- state

    def capture(self) -> dict[str, Any]:
        """The cursor, in samples, and what its meaning depends on. JSON-able."""
        return {
            "version": _STATE_VERSION,
            **self.cursor.to_state(),
            "next_epoch": self.next_epoch,
            **self._orders.arguments,
            "identity": self._orders.identity,
            "order": self._orders.digest(self.cursor.epoch) if self.cursor.samples else None,
        }

    def checked(self, state: Mapping[str, Any], *, loader: str, leased: bool) -> tuple[Cursor, int]:
        """Reads a captured state, for `take`. `loader`: its name, for errors. `leased`: no rank
        stands within an epoch.

        Raises:
            CorruptDataError: this is no loader's state, or a newer release's.
            ConfigurationError: the cursor is within an epoch whose order is another one here, so
                samples would be lost or seen twice.
        """
        if state.get("version") != _STATE_VERSION:
            raise CorruptDataError(
                f"loader {loader!r}: the state has version {state.get('version')!r}; this release "
                f"reads {_STATE_VERSION}"
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
        """Takes over what `checked` has read."""
        self.cursor, self._loaded_next_epoch = checked

    def _check_order(self, cursor: Cursor, state: Mapping[str, Any], loader: str) -> None:
        arguments = self._orders.arguments
        here = {"length": arguments["length"], "order": self._orders.digest(cursor.epoch)}
        if not self._orders.drawn:
            here |= arguments
        if "identity" in state:  # earlier releases did not write it
            here["identity"] = self._orders.identity
        for field, value in here.items():
            if state.get(field) != value:
                raise ConfigurationError(
                    f"loader {loader!r}: the state is {cursor.samples} samples into epoch "
                    f"{cursor.epoch} of an order with {field}={state.get(field)!r}, but here it is "
                    f"{value!r}: samples would be lost or seen twice. Use the same dataset, seed, "
                    "shuffle and sampler, or a state saved between epochs"
                )
