"""The step in progress, and the step vote that is part of its commit all-reduce.

A step ends in the same way under every strategy. First the gradients are summed. A rank that has
everything it needs to apply the step has *prepared* it. A small commit all-reduce follows: a rank
that has its sum knows that every rank has prepared, so the step counts, whatever fails afterwards.
If a rank has prepared, but the commit all-reduce fails, it is in doubt until a peer in the next
generation reports whether it has seen the result.

The training thread owns a step. A collective's callback, on a thread of the process group, may mark
it lost while the training thread waits for that collective.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, SupportsFloat

from shoal_common.errors import PreconditionError, ShoalError

from shoal_worker.elastic.contract.collective_trace import CollectiveTrace
from shoal_worker.elastic.contract.loader_interface import Placement, Share, StepSource, WeighRows

# -------------------------------------------------------------------------- where the script stands
#
# Where the user's script stands among its training loops: in which loader, which epoch, which step.
#
# All ranks must stand at one place when they take a step together, and deal its samples alike. So a
# place rides, as a few small numbers, in the step vote of each step; and a joiner is told its
# peers' place when it is fed, so that its script passes over every loop before it. Pure.

_BASE = 1 << 20
"""Each number and its square are sent, and summed over up to 8192 ranks they are exact in
float64."""
_DEALING = 2
"""Digits of `ScriptPosition.dealing`: two different values collide once in 2^40."""

PLACE_WORD_LENGTH = 1 + 2 * (3 + _DEALING)
"""Numbers used by a position in a step vote."""


class ScriptPosition(NamedTuple):
    """One step of one loop. Without a Shoal loader: no name, and zeros."""

    loader: str
    """Name of the loader; empty: the user's own loop."""
    number: int
    """Number of the loader, in order of creation by the script; from 1."""
    epoch: int
    step: int
    """Step in the epoch."""
    dealing: int = 0
    """Digest of the loader's distribution of samples and of the step: if one collides, the next
    step's reveals the difference."""

    def word(self) -> list[float]:
        """Returns this rank's part of the step vote. From the ranks' sum, `agree` determines
        whether all added the same."""
        values = (
            self.number % _BASE,
            self.epoch % _BASE,
            self.step % _BASE,
            *_digits(self.dealing, _DEALING),
        )
        return [1.0, *map(float, values), *(float(value * value) for value in values)]


def agree(summed: Sequence[float]) -> bool:
    """Returns whether all ranks added the same numbers to a word such as `ScriptPosition.word`: the
    mean of squares equals the square of the mean only for equal numbers."""
    count, *numbers = map(int, summed)  # their products are exact as integers only
    half = len(numbers) // 2
    return all(
        count * squares == total * total
        for total, squares in zip(numbers[:half], numbers[half:], strict=True)
    )


def _digits(value: int, count: int) -> list[int]:
    """Returns the last `count` digits of `value`, the last one first."""
    return [value // _BASE**index % _BASE for index in range(count)]


# ----------------------------------------------------------------------------- the step in progress

_BOUNDARY, _LOSS, _WEIGHT, _STOP, _LEAVING = range(5)
"""Indices in a step vote; see `Step.step_vote`."""
_OWN: Final = 5
"""Number of a step vote's values that belong to the step itself. The others show whether the ranks
agree in settings, in writes within passes and between steps, in evaluations, and in the script's
position."""
_DIGEST: Final = 4
"""Numbers that check whether the ranks have the same digest: two digits of it, and their
squares."""
_SETTINGS: Final = _OWN
_WRITES: Final = _SETTINGS + _DIGEST
_BETWEEN: Final = _WRITES + _DIGEST
_EVALUATED: Final = _BETWEEN + _DIGEST
_PLACE: Final = _EVALUATED + _DIGEST
CONTROL_LENGTH: Final = _PLACE + PLACE_WORD_LENGTH
"""Length of a step vote. Summed over the ranks as float64, so integers up to 2^53 are exact."""


def _digest_word(digest: int) -> list[float]:
    digits = [float(digit) for digit in _digits(digest, 2)]
    return [*digits, *(digit * digit for digit in digits)]


class StepPhase(enum.Enum):
    """Phase of a step on this rank."""

    OPEN = "open"
    """Gradients are not, or not all, summed: no rank can have seen the commit all-reduce."""
    PREPARED = "prepared"
    """This rank has everything needed to apply it. Only the commit all-reduce reveals whether every
    rank has."""
    COMMITTED = "committed"
    """The commit all-reduce was seen, here or by a surviving peer: the step counts."""
    ABORTED = "aborted"
    """No survivor saw the commit all-reduce: no rank applies it."""


@dataclasses.dataclass
class Step:
    """A step in progress."""

    placement: Placement
    source: StepSource | None
    """Loader of its samples; None: the user's own loop without a Shoal loader."""
    of: str = ""
    """Identifies the model if there are several, or the models that the step has updated; the same
    on all ranks. Empty for a single model."""
    trace: CollectiveTrace = dataclasses.field(default_factory=CollectiveTrace)
    """Trace of this rank's collectives in the step, and in an earlier, abandoned step."""
    share: Share | None = None
    handed_out: bool = False
    touched: bool = False
    """True if the script has called the model in it."""
    left: bool = False
    """True if its loop was left before the step was finished."""
    first_live: bool = False
    """True if its first batch ended the replay of a joiner's script."""
    micro_batch: float | None = None
    """Weight of the current micro-batch."""
    micro_batch_index: int | None = None
    """Index over the entire global batch, from 0; for plain batches the rank's."""
    weigh: WeighRows | None = None
    """Returns the weights of its parts; None: their number of samples."""
    taken: int = 0
    """Number of batches of this rank that the user's loop has received."""
    micro_batches_weight: float = 0.0
    """Total weight of this rank's finished micro-batches."""
    phase: StepPhase = StepPhase.OPEN
    lost: str | None = None
    """Reason why its group has ended, for a step that is not committed: nothing more is sent in it.
    None: the group works, or the step is committed."""
    control: list[float] | None = None
    """Step vote summed over all ranks; None if not reduced yet."""
    loss: SupportsFloat | None = None
    """This rank's mean loss, if reported. Converting it to a number waits for the device that
    computes it."""
    known: bool = False
    """True if the servers have its batch from another member, which died before it could report
    that (async_sgd)."""
    refused: ShoalError | None = None
    """Reason why its gradients cannot be used, the same on all ranks: the script gets this error
    instead of the update, until it clears them."""
    writes: int = 0
    """Digest of the passes' writes to parameters; 0 if none."""
    written_between: int = 0
    """Digest of the writes to parameters and buffers between the previous step and this one; 0 if
    none."""
    evaluated: int = 0
    """Digest of what the model was evaluated on since the last step; see `EvaluationComparison`."""
    pushed: Sequence[int] | None = None
    """Numbers of the leased batches that count with it: those of its round, or none before its last
    step. None: only its own."""

    @property
    def in_micro_batches(self) -> bool:
        """True if it is split into micro-batches instead of one plain batch per rank."""
        return self.share is not None and self.share.micro_batches is not None

    def issues(self, what: str) -> None:
        """Records a collective of the step that is about to be issued. `what`: see
        `CollectiveTrace.add`."""
        if self.lost is None:
            self.trace.add(what, self.of)

    def check_whole(self) -> None:
        """Raises PreconditionError unless the inner loop received all micro-batches of this rank,
        because a commit counts all of them as trained on."""
        due = self.share.micro_batches if self.share is not None else None
        if due is not None and self.taken < due:
            raise PreconditionError(
                f"the inner loop took {self.taken} of this rank's {due} micro-batches, but the "
                "step would count all of them as trained on: call optimizer.step() after `for "
                "batch in step:` has finished; to skip a batch use `continue`, not `break`",
                reason="STEP_NOT_WHOLE",
            )

    def step_vote(
        self,
        *,
        boundary_wanted: bool,
        stop_announced: bool,
        leaving: bool,
        settings: int,
        place: ScriptPosition,
    ) -> list[float]:
        """Returns this rank's summand: whether a step boundary is requested; its loss times its
        weight; that weight, if it reported a loss; whether it was notified that the job stops;
        whether it was asked to leave; digests of its optimizer's settings, of writes in passes, of
        writes between steps, and of evaluations; and its script's position."""
        weight = 0.0
        if self.share is not None and self.loss is not None:
            weight = self.micro_batches_weight if self.in_micro_batches else self.share.weight
        loss = float(self.loss) * weight if self.loss is not None and weight > 0 else 0.0
        digits = [
            *_digest_word(settings),
            *_digest_word(self.writes),
            *_digest_word(self.written_between),
            *_digest_word(self.evaluated),
        ]
        own = (float(boundary_wanted), loss, weight, float(stop_announced), float(leaving))
        return [*own, *digits, *place.word()]

    def fail(self, reason: str) -> None:
        """Handles a failed collective of the step. Changes nothing for a step with a known
        outcome."""
        if self.phase in (StepPhase.OPEN, StepPhase.PREPARED) and self.lost is None:
            self.lost = reason

    def prepare(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply it."""
        if self.phase is StepPhase.OPEN and self.lost is None:
            self.phase = StepPhase.PREPARED

    def decide(self, summed: Sequence[float]) -> None:
        """Commits the step: this rank or a surviving peer saw the commit all-reduce. `summed`: its
        step vote, the same on all ranks."""
        self.control, self.phase, self.lost = list(summed), StepPhase.COMMITTED, None

    def abort(self) -> None:
        """Aborts the step, since no survivor saw the commit all-reduce."""
        self.phase, self.lost = StepPhase.ABORTED, self.lost or "aborted"

    @property
    def unresolved(self) -> bool:
        """True if its group has ended and its outcome is unknown here."""
        return self.lost is not None and self.phase is not StepPhase.ABORTED

    @property
    def in_doubt(self) -> bool:
        """True if it may have been applied by a peer."""
        return self.lost is not None and self.phase is StepPhase.PREPARED

    @property
    def boundary_wanted(self) -> bool:
        """True if some rank wants a membership change at the next step boundary."""
        return self.control is not None and self.control[_BOUNDARY] > 0

    @property
    def stop_announced(self) -> bool:
        """True if some rank knows that the job stops: all stop at the next boundary, including
        those that learn of it later."""
        return self.control is not None and self.control[_STOP] > 0

    @property
    def all_leave(self) -> bool:
        """True if every rank was asked to leave, as when an allocation is reclaimed: they stop
        together at the next boundary."""
        return self.control is not None and self.control[_LEAVING] == self.control[_PLACE]

    @property
    def ranks_agree(self) -> bool:
        """True if all participating ranks meant the same step."""
        return self.control is None or agree(self.control[_PLACE:])

    @property
    def settings_agree(self) -> bool:
        """True if the optimizers of all participating ranks have the same settings."""
        return self._agree(_SETTINGS)

    @property
    def writes_agree(self) -> bool:
        """True if all participating ranks wrote the same values to the same parameters in their
        passes, or nothing."""
        return self._agree(_WRITES)

    @property
    def between_agrees(self) -> bool:
        """True if all participating ranks found the same writes between steps, or none."""
        return self._agree(_BETWEEN)

    @property
    def evaluated_alike(self) -> bool:
        """True if all participating ranks evaluated the model on the same inputs, and this is one
        of them."""
        return self.evaluated != 0 and self.control is not None and self._agree(_EVALUATED)

    def _agree(self, begins: int) -> bool:
        return self.control is None or agree(
            [self.control[_PLACE], *self.control[begins : begins + _DIGEST]]
        )

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over the entire batch if the ranks reported theirs, otherwise this rank's own,
        if reported."""
        if self.loss_of_all is not None:
            return self.loss_of_all
        return None if self.loss is None else float(self.loss)

    @property
    def weight_of_all(self) -> float | None:
        """Total weight of the batches with reported losses over all ranks; None if no rank has
        reported one, or they are not summed yet."""
        return None if self.control is None or self.control[_WEIGHT] <= 0 else self.control[_WEIGHT]

    @property
    def loss_of_all(self) -> float | None:
        """Mean loss over the entire batch; None if no rank has reported its own, or they are not
        summed yet."""
        if self.control is None or self.control[_WEIGHT] <= 0:
            return None
        return self.control[_LOSS] / self.control[_WEIGHT]


def not_finished(*, elsewhere: bool, asynchronous: bool) -> PreconditionError:
    """Returns the error for a script that requests a batch while the step of the last one is in
    progress. `elsewhere`: the batch belongs to another loader, while some of several models were
    updated in that step. `asynchronous`: workers take steps of their own."""
    accumulate = (
        "which is one step of this worker. To accumulate gradients over several backward passes, "
        "pass a larger batch_size= to the loader and run a pass on each part of the batch"
        if asynchronous
        else "which is one step over all ranks. To accumulate gradients over several backward "
        "passes, pass micro_batch_size= to the loader and loop over loader.steps()"
    )
    text = (
        "the next batch was requested, but optimizer.step() was not called for the last one; call "
        f"it once per iteration, {accumulate}. If batches are only read, create the loader with "
        "train=False"
    )
    if elsewhere:
        text = (
            "a batch of another loader was requested between the steps of two optimizers, which "
            "together form one step on one batch; request it after the last optimizer's step. If "
            "a step needs samples of two datasets, combine them into one "
            "(torch.utils.data.StackDataset), or create a loader of the second one with "
            "train=False"
        )
    return PreconditionError(text, reason="STEP_NOT_FINISHED")
