"""The step in progress, the trace of its collectives, and the step vote that its commit all-reduce
sums.

A step ends in the same way under every strategy. First, the gradients are summed. A rank that has
everything it needs to apply the step has *prepared* it. A small commit all-reduce follows. If a
rank receives its sum, every rank has prepared the step, so the step is committed, regardless of
later failures. If the commit all-reduce fails on a prepared rank, that rank is in doubt until a
peer in the next generation reports whether it received the result.

The training thread owns a step. While it waits for a collective, the collective's callback may mark
the step as failed, from a thread of the process group.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, SupportsFloat

from shoal_common.errors import PreconditionError, ShoalError

from shoal_worker.elastic.contract.loader_interface import Placement, Share, StepSource, WeighRows

_BASE = 1 << 20
"""Base in which a step vote represents a number as digits. Each digit and its square are sent;
their sums over up to 8192 ranks are exact in float64."""
_DEALING = 2
"""Number of digits of `ScriptPosition.dealing` that are sent. Two different values collide with
probability 2^-40."""

PLACE_WORD_LENGTH = 1 + 2 * (3 + _DEALING)
"""Number of values in a step vote that encode a position."""


class ScriptPosition(NamedTuple):
    """Position of the user's script in its training loops: loader, epoch and step.

    All ranks must be at the same position, with the same samples, when they take a step together.
    The step vote therefore includes the position. A joiner receives its peers' position together
    with the state, so that its script skips earlier loops. Without a Shoal loader, the name is
    empty and the numbers are 0.
    """

    loader: str
    """Name of the loader; empty for the user's own loop."""
    number: int
    """Index of the loader, counted from 1 in order of creation."""
    epoch: int
    step: int
    """Step in the epoch."""
    dealing: int = 0
    """Digest of the loader's distribution of samples, and of the step. If digests of different
    distributions are equal by chance, the digests of the next step reveal the difference."""

    def word(self) -> list[float]:
        """Encodes the position as numbers for the step vote. From the sum over all ranks, `agree`
        determines whether all ranks passed the same position."""
        values = (
            self.number % _BASE,
            self.epoch % _BASE,
            self.step % _BASE,
            *_digits(self.dealing, _DEALING),
        )
        return [1.0, *map(float, values), *(float(value * value) for value in values)]


def agree(summed: Sequence[float]) -> bool:
    """Returns whether all ranks passed the same numbers. `summed`: sum over all ranks of encoded
    values (such as `ScriptPosition.word`), which contains the sum of each number and of its square.
    The mean of the squares equals the square of the mean only if all numbers are equal."""
    count, *numbers = map(int, summed)  # only products of integers are exact
    half = len(numbers) // 2
    return all(
        count * squares == total * total
        for total, squares in zip(numbers[:half], numbers[half:], strict=True)
    )


def _digits(value: int, count: int) -> list[int]:
    """Returns the `count` least significant digits of `value` in base `_BASE`, least significant
    first."""
    return [value // _BASE**index % _BASE for index in range(count)]


# ------------------------------------------------------------------- the trace of its collectives
#
# When ranks wait, the traces of their collectives in a step are compared. All ranks must issue the
# same collectives, so one of two traces must be a prefix of the other. If they differ at some
# position, the scripts have diverged: for example, one rank has called an optimizer's `step` while
# another has omitted it and continued with the next pass. Each rank then waits in a collective that
# the other rank never issues.
#
# The training thread writes the trace or, while it waits, the thread of a backward pass. The desync
# detector's thread reads it.

GRADIENTS = "reduces gradients of a backward pass"
FORWARD = "runs a forward pass of the model"
EXTREMES = "reduces buffers that hold minima and maxima"
SUM = "reduces the step's gradients"
COMMIT = (
    "commits the step (optimizer.step(), or train_step, clip_grad_norm_ and others that commit "
    "early)"
)
BATCH = "ends the batch (steps the last of all optimizers, or requests the next batch)"


class CollectiveTrace:
    """Trace of the collectives that this rank has issued in the current step."""

    def __init__(self) -> None:
        self._place: tuple[int, ...] = ()
        self._issued: list[str] = []

    def begin(self, *place: int) -> None:
        """Begins the trace of a step. `place`: generation and position of the step. If a step at
        the same place was begun before and abandoned, continues its trace."""
        if place != self._place:
            self._place, self._issued = place, []

    def add(self, what: str, of: str = "") -> None:
        """Adds a collective that is about to be issued. `what`: the action, beginning with a verb.
        `of`: name of the model, if there are several."""
        self._issued.append(f"{what}, of {of}" if of else what)

    def encode(self, *, passes: bool) -> dict[str, Any]:
        """Returns the trace as JSON, for `apart` on another rank. Each distinct text is included
        once. `passes`: whether to include forward passes, which are the same for all ranks of one
        replica."""
        issued = [each for each in list(self._issued) if passes or not each.startswith(FORWARD)]
        texts = list(dict.fromkeys(issued))
        numbers = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "issued": [numbers[text] for text in issued]}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Compares two ranks' traces (results of `CollectiveTrace.encode`). Returns the two actions at
    the first position where the traces differ, or None if the ranks did not diverge."""
    lists = ([each["texts"][number] for number in each["issued"]] for each in (one, other))
    return next(
        ((mine, theirs) for mine, theirs in zip(*lists, strict=False) if mine != theirs), None
    )


# ----------------------------------------------------------------------------- the step in progress

_BOUNDARY, _LOSS, _WEIGHT, _STOP, _LEAVING = range(5)
"""Indices of the first values in a step vote; see `Step.step_vote`."""
_OWN: Final = 5
"""Number of values in a step vote before the digests. The digests show whether the ranks have the
same optimizer settings, have written the same values in passes and between steps, and have
evaluated the same batches."""
_DIGEST: Final = 4
"""Number of values that encode one digest: two digits and their squares."""
_SETTINGS: Final = _OWN
_WRITES: Final = _SETTINGS + _DIGEST
_BETWEEN: Final = _WRITES + _DIGEST
_EVALUATED: Final = _BETWEEN + _DIGEST
_PLACE: Final = _EVALUATED + _DIGEST
CONTROL_LENGTH: Final = _PLACE + PLACE_WORD_LENGTH
"""Length of a step vote. The ranks sum it as float64, so integers up to 2^53 are exact."""


def _digest_word(digest: int) -> list[float]:
    digits = [float(digit) for digit in _digits(digest, 2)]
    return [*digits, *(digit * digit for digit in digits)]


class Requests(NamedTuple):
    """The ranks' requests for the next step boundary, taken from a summed step vote."""

    boundary: bool
    """True if a rank has requested a membership change."""
    stop: bool
    """True if a rank knows that the job is stopping. All ranks stop at the next boundary, including
    ranks that have not learned of the stop yet."""
    all_leave: bool
    """True if every rank has been asked to leave, for example because an allocation is reclaimed.
    All ranks stop together at the next boundary."""


class Difference(enum.Enum):
    """Kind of difference between ranks, as shown by a summed step vote."""

    POSITION = "position"
    """The ranks are at different steps, or in steps of different models."""
    SETTINGS = "settings"
    """The ranks' optimizers have different settings."""
    WRITES = "writes"
    """The ranks' passes made different writes to parameters, or to buffers that must stay the same
    on all ranks."""
    WRITES_BETWEEN = "writes between steps"
    """The ranks made different writes between steps. The resulting values may still be the same."""


class StepPhase(enum.Enum):
    """Phase of a step on this rank."""

    OPEN = "open"
    """Some gradients are not yet summed: no rank can have seen the commit all-reduce."""
    PREPARED = "prepared"
    """This rank has everything needed to apply the step. The commit all-reduce will reveal whether
    every rank has."""
    COMMITTED = "committed"
    """This rank or a surviving peer received the result of the commit all-reduce: the step
    is committed."""
    ABORTED = "aborted"
    """No survivor received the result of the commit all-reduce: no rank applies the step."""


@dataclasses.dataclass
class Step:
    """A step in progress."""

    placement: Placement
    source: StepSource | None
    """Loader of the step's samples; None: the user's own loop without a Shoal loader."""
    of: str = ""
    """Name of the step's model, or names of the models that the step has updated, if there are
    several models; the same on all ranks. Empty if there is only one model."""
    trace: CollectiveTrace = dataclasses.field(default_factory=CollectiveTrace)
    """Trace of this rank's collectives in the step, and in an abandoned attempt at the same
    position."""
    share: Share | None = None
    in_micro_batches: bool = dataclasses.field(init=False, default=False)
    """True if the step is split into micro-batches instead of one plain batch per rank."""
    handed_out: bool = False
    touched: bool = False
    """True if the script has called the model in this step."""
    left: bool = False
    """True if the script has left the loop over the loader before the step was finished."""
    first_live: bool = False
    """True if a joiner's script finished its replay by receiving the first batch of this step."""
    micro_batch: float | None = None
    """Weight of the current micro-batch."""
    samples: int = 0
    """Number of samples in the current or last micro-batch; 0: unknown, because the samples do not
    come from a Shoal loader."""
    micro_batch_index: int | None = None
    """Index of the current micro-batch in the global batch, from 0; for a plain batch, the rank."""
    weigh: WeighRows | None = None
    """Function that computes the weights of parts of the micro-batch; None: a part's weight is its
    number of samples."""
    taken: int = 0
    """Number of this rank's batches that the user's loop has received."""
    micro_batches_weight: float = 0.0
    """Total weight of this rank's finished micro-batches."""
    phase: StepPhase = StepPhase.OPEN
    lost: str | None = None
    """Reason why the step's group has failed. The step then starts no further collectives. None
    while the group works, and in a committed step."""
    control: list[float] | None = None
    """Step vote summed over all ranks; None if not reduced yet."""
    loss: SupportsFloat | None = None
    """This rank's mean loss, if reported. `float()` waits for the device that computes it."""
    known: bool = False
    """True if another member had pushed the step's batch to the servers and died before it could
    report the push (async_sgd)."""
    refused: ShoalError | None = None
    """Error if the step's gradients cannot be used; the same on all ranks. `optimizer.step()`
    raises it until the script clears the gradients."""
    writes: int = 0
    """Digest of what forward and backward passes wrote to parameters, and to buffers that must stay
    the same on all ranks; 0 if they wrote nothing."""
    written_between: int = 0
    """Digest of the values that the script wrote to parameters and buffers between the previous
    step and this one; 0 if it wrote none."""
    evaluated: int = 0
    """Digest of the inputs that the model was evaluated on since the last step; see
    `EvaluationComparison`."""
    pushed: Sequence[int] | None = None
    """Numbers of the leased batches that count with this step: in the last step of a round, all
    batches of the round; in earlier steps, none. None: only the step's own batch."""
    offered: Sequence[float] = ()
    """Numbers that the loader offers for a sum across all ranks, if the step ends a round."""
    summed: Sequence[float] | None = None
    """Sums of the ranks' `offered`; None if the step does not end a round or has not ended yet."""

    def __post_init__(self) -> None:
        if self.share is not None:
            self.assign(self.share)

    def assign(self, share: Share) -> None:
        """Stores this rank's share of the step."""
        self.share, self.in_micro_batches = share, share.micro_batches is not None

    def issues(self, what: str) -> None:
        """Records a collective of the step that is about to be issued. `what`: see
        `CollectiveTrace.add`."""
        if self.lost is None:
            self.trace.add(what, self.of)

    def check_complete(self) -> None:
        """Raises PreconditionError unless the script's inner loop has received all micro-batches of
        this rank. None may be skipped, because a commit records all of them as trained on."""
        due = self.share.micro_batches if self.share is not None else None
        if due is not None and self.taken < due:
            raise PreconditionError(
                f"optimizer.step() was called after {self.taken} of this rank's {due} "
                "micro-batches, but the step would count all of them as trained on. Call it "
                "after the loop `for batch in step:` has ended; to skip a batch, use `continue` "
                "instead of `break`",
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
        """Returns the numbers that this rank contributes to the step vote, in this order:

        - whether a membership change is requested
        - loss times weight, and the weight (0 without a loss)
        - whether the job is known to be stopping, and whether this rank has to leave
        - four digests: of the optimizer settings, `writes`, `written_between` and `evaluated`
        - the script's position."""
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
        """Marks the step as failed because one of its collectives has failed. Changes nothing if
        the outcome is known."""
        if self.phase in (StepPhase.OPEN, StepPhase.PREPARED) and self.lost is None:
            self.lost = reason

    def prepare(self) -> None:
        """Marks the step as prepared: the gradients are summed, and this rank has everything needed
        to apply it."""
        if self.phase is StepPhase.OPEN and self.lost is None:
            self.phase = StepPhase.PREPARED

    def decide(self, summed: Sequence[float]) -> None:
        """Commits the step, because this rank or a surviving peer received the result of the commit
        all-reduce. `summed`: the step vote summed over all ranks."""
        self.control, self.phase, self.lost = list(summed), StepPhase.COMMITTED, None

    def abort(self) -> None:
        """Aborts the step, because no survivor received the result of the commit all-reduce."""
        self.phase, self.lost = StepPhase.ABORTED, self.lost or "aborted"

    @property
    def unresolved(self) -> bool:
        """True if the step's group has failed and this rank does not know the step's outcome."""
        return self.lost is not None and self.phase is not StepPhase.ABORTED

    @property
    def in_doubt(self) -> bool:
        """True if a peer may have applied the step, but this rank does not know."""
        return self.lost is not None and self.phase is StepPhase.PREPARED

    @property
    def requests(self) -> Requests:
        """All ranks' requests for the next step boundary, from the summed step vote."""
        if self.control is None:
            return Requests(boundary=False, stop=False, all_leave=False)
        return Requests(
            boundary=self.control[_BOUNDARY] > 0,
            stop=self.control[_STOP] > 0,
            all_leave=self.control[_LEAVING] == self.control[_PLACE],
        )

    @property
    def difference(self) -> Difference | None:
        """First kind of difference between the ranks that the summed step vote shows; None if it
        shows no difference."""
        if self.control is None:
            return None
        if not agree(self.control[_PLACE:]):
            return Difference.POSITION
        compared = (
            (_SETTINGS, Difference.SETTINGS),
            (_WRITES, Difference.WRITES),
            (_BETWEEN, Difference.WRITES_BETWEEN),
        )
        return next((what for begins, what in compared if not self._agree(begins)), None)

    @property
    def evaluated_alike(self) -> bool:
        """True if all ranks have evaluated the model, on the same inputs, since the last step."""
        return self.evaluated != 0 and self.control is not None and self._agree(_EVALUATED)

    def _agree(self, begins: int) -> bool:
        return self.control is None or agree(
            [self.control[_PLACE], *self.control[begins : begins + _DIGEST]]
        )

    @property
    def mean_loss(self) -> float | None:
        """Mean loss over the global batch if it is known, otherwise this rank's own loss; None if
        neither is."""
        if self.loss_of_all is not None:
            return self.loss_of_all
        return None if self.loss is None else float(self.loss)

    @property
    def weight_of_all(self) -> float | None:
        """Total weight, over all ranks, of the batches with reported losses; None if no rank has
        reported a loss, or the step vote has not been summed yet."""
        return None if self.control is None or self.control[_WEIGHT] <= 0 else self.control[_WEIGHT]

    @property
    def loss_of_all(self) -> float | None:
        """Mean loss over the global batch; None if no rank has reported a loss, or the step vote
        has not been summed yet."""
        if self.control is None or self.control[_WEIGHT] <= 0:
            return None
        return self.control[_LOSS] / self.control[_WEIGHT]


def not_finished(*, elsewhere: bool, asynchronous: bool) -> PreconditionError:
    """Returns the error for a script that requests a batch before it has finished the last step.
    `elsewhere`: True if the batch belongs to a different loader, and the unfinished step has
    updated only some of several models. `asynchronous`: True if workers take steps independently
    (async_sgd)."""
    accumulate = (
        "which is one step of this worker. To accumulate gradients over several backward passes, "
        "pass a larger batch_size= to the loader and run a pass on each part of the batch"
        if asynchronous
        else "which is one step over all ranks. To accumulate gradients over several backward "
        "passes, pass micro_batch_size= to the loader and loop over loader.steps()"
    )
    text = (
        "the next batch was requested, but optimizer.step() was not called for the previous one. "
        f"Call it once per iteration, {accumulate}. If batches are only read, create the loader "
        "with train=False"
    )
    if elsewhere:
        text = (
            "a batch of another loader was requested between the steps of two optimizers, which "
            "together form one step on one batch; request it after the last of them has stepped. "
            "If a step needs samples of two datasets, combine them into one "
            "(torch.utils.data.StackDataset), or create a loader of the second one with "
            "train=False"
        )
    return PreconditionError(text, reason="STEP_NOT_FINISHED")


def not_repeated(lost: str, taken: str) -> PreconditionError:
    """Returns the error for a script that continues with a step of loader `taken` after a step of
    loader `lost` was aborted. If it were committed, the run would take its steps in another order
    than without the fault."""
    return PreconditionError(
        f"a step of loader {lost!r} was aborted because of a fault and must be repeated, but the "
        f"script continued with a step of loader {taken!r}. Take the next step of another loader "
        "only if optimizer.step() returned a true value: in a loop over the batches, `if not "
        "optimizer.step(): continue`. To continue this run, resume from a checkpoint",
        reason="STEP_NOT_FINISHED",
    )
