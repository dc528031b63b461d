"""The step in progress, and the control word that rides in its closing.

A step ends the same way under every strategy. First the gradients are summed: a rank that has all
it needs to apply the step has *sealed* it. Then comes the closing, one small all-reduce: who has
its sum knows that every rank has sealed, so the step counts, whatever fails afterwards. A rank that
sealed and then lost the closing is in doubt, until a peer of the next generation tells whether it
saw the closing.

The training thread owns a step. A collective's callback, on a thread of the process group, may mark
it lost while the training thread waits for that collective.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final, NamedTuple, SupportsFloat

from shoal_common.errors import PreconditionError, ShoalError

from shoal_worker.elastic.course import Course
from shoal_worker.elastic.loader_interface import Placement, Share, StepSource, WeighRows

# -------------------------------------------------------------------------- where the script stands
#
# Where the user's script stands among its training loops: in which loader, which epoch, which step.
#
# All ranks must stand at one place when they take a step together, and deal its samples alike. So a
# place rides, as a few small numbers, in the control word of each step; and a joiner is told its
# peers' place when it is fed, so that its script passes over every loop before it. Pure.

_BASE = 1 << 20
"""Each number and its square are sent, and summed over up to 8192 ranks they are exact in
float64."""
_DEALING = 2
"""Digits of `ScriptPosition.dealing`: of two that differ, one in 2^40 looks the same."""

PLACE_WORD_LENGTH = 1 + 2 * (3 + _DEALING)
"""Numbers that a place takes in a control word."""


class ScriptPosition(NamedTuple):
    """One step of one loop. Without a loader of Shoal's: no name, and zeros."""

    loader: str
    """Its name; empty: the user's own loop."""
    number: int
    """Number of the loader, in the order in which the script made them; from 1."""
    epoch: int
    step: int
    """In the epoch."""
    dealing: int = 0
    """Digest of what the loader deals by, and of the step: where one does not tell ranks' loaders
    apart, that of the next step does."""

    def word(self) -> list[float]:
        """What this rank adds to the control word. From the ranks' sum, `agree` says whether all
        added the same."""
        values = (
            self.number % _BASE,
            self.epoch % _BASE,
            self.step % _BASE,
            *_digits(self.dealing, _DEALING),
        )
        return [1.0, *map(float, values), *(float(value * value) for value in values)]


def agree(summed: Sequence[float]) -> bool:
    """Whether all ranks added the same numbers to a word, such as `ScriptPosition.word`: the mean
    of squares is the square of the mean for equal numbers only."""
    count, *numbers = map(int, summed)  # their products are exact as integers only
    half = len(numbers) // 2
    return all(
        count * squares == total * total
        for total, squares in zip(numbers[:half], numbers[half:], strict=True)
    )


def _digits(value: int, count: int) -> list[int]:
    """The last `count` digits of `value`, the last one first."""
    return [value // _BASE**index % _BASE for index in range(count)]


# ----------------------------------------------------------------------------- the step in progress

_BORDER, _LOSS, _WEIGHT, _STOP, _LEAVING = range(5)
"""Places in a control word; see `Step.control_word`."""
_OWN: Final = 5
"""Numbers of a control word that are the step's own; the others say whether settings agree, writes
in passes and between steps, and what was evaluated, and where the script stands."""
_DIGEST: Final = 4
"""Numbers that say whether the ranks have the same digest: two digits of it, and their squares."""
_SETTINGS: Final = _OWN
_WRITES: Final = _SETTINGS + _DIGEST
_BETWEEN: Final = _WRITES + _DIGEST
_EVALUATED: Final = _BETWEEN + _DIGEST
_PLACE: Final = _EVALUATED + _DIGEST
CONTROL_LENGTH: Final = _PLACE + PLACE_WORD_LENGTH
"""Numbers in a control word. Summed over the ranks as float64, so whole numbers up to 2^53 are
exact."""


def _digest_word(digest: int) -> list[float]:
    digits = [float(digit) for digit in _digits(digest, 2)]
    return [*digits, *(digit * digit for digit in digits)]


class StepPhase(enum.Enum):
    """How far a step has come on this rank."""

    OPEN = "open"
    """Its gradients are not summed, or not all: no rank can have seen the closing."""
    SEALED = "sealed"
    """This rank has all that it needs to apply it. Whether every rank has, only the closing
    tells."""
    DECIDED = "decided"
    """The closing was seen, here or by a surviving peer: the step counts."""
    VOID = "void"
    """No survivor saw the closing: no rank applies it."""


@dataclasses.dataclass
class Step:
    """A step in progress."""

    placement: Placement
    source: StepSource | None
    """Whose samples it takes; None: the user's own loop, without a loader of Shoal's."""
    of: str = ""
    """Says whose step it is where there are several models, or which of them it has updated: alike
    on all ranks. Empty: there is one."""
    course: Course = dataclasses.field(default_factory=Course)
    """What this rank has issued of the step's collectives, and of those of a step before it that
    was left."""
    share: Share | None = None
    handed_out: bool = False
    touched: bool = False
    """The script has called the model in it."""
    left: bool = False
    """The loop that it belongs to was left before the step was finished."""
    first_live: bool = False
    """Its first batch ended the replay of a joiner's script."""
    micro_batch: float | None = None
    """Weight of the micro-batch that is being computed."""
    micro_batch_index: int | None = None
    """Its number over the whole global batch, from 0; of plain batches the rank's."""
    weigh: WeighRows | None = None
    """What parts of it weigh; None: their samples."""
    taken: int = 0
    """Batches of this rank that the user's loop has got."""
    micro_batches_weight: float = 0.0
    """Weight of the micro-batches of this rank that are done."""
    phase: StepPhase = StepPhase.OPEN
    lost: str | None = None
    """Why its group is over, of a step that is not decided: nothing more is sent in it. None: the
    group works, or the step is decided."""
    control: list[float] | None = None
    """The control word summed over all ranks; None: not reduced yet."""
    loss: SupportsFloat | None = None
    """This rank's mean loss, if told. To make it a number is to wait for the device that computes
    it."""
    known: bool = False
    """The servers have had its batch from another member, which died before it had said so
    (async_sgd)."""
    refused: ShoalError | None = None
    """Why its gradients cannot be used, on all ranks alike: the script is told so instead of the
    update, until it clears them."""
    writes: int = 0
    """Digest of what the passes wrote to parameters; 0: nothing."""
    written_between: int = 0
    """Digest of what was written to parameters and buffers since the last step, outside of any; 0:
    nothing."""
    evaluated: int = 0
    """Digest of what the model was evaluated on since the last step; see `EvaluationComparison`."""
    pushed: Sequence[int] | None = None
    """Numbers of the leased batches that count with it: those of its round, or none before that
    one's last step. None: its own alone."""

    @property
    def in_micro_batches(self) -> bool:
        """It is cut into micro-batches, instead of one plain batch per rank."""
        return self.share is not None and self.share.micro_batches is not None

    def issues(self, what: str) -> None:
        """A collective of the step is about to be issued. `what`: see `Course.add`."""
        if self.lost is None:
            self.course.add(what, self.of)

    def check_whole(self) -> None:
        """Raises PreconditionError unless the inner loop took all micro-batches of this rank: a
        commit counts them all as trained on."""
        due = self.share.micro_batches if self.share is not None else None
        if due is not None and self.taken < due:
            raise PreconditionError(
                f"the inner loop has taken {self.taken} of this rank's {due} micro-batches, and "
                "the step would count all as trained on: call optimizer.step() after `for batch "
                "in step:` has come to its end; to leave a batch out use `continue`, not `break`",
                reason="STEP_NOT_WHOLE",
            )

    def control_word(
        self,
        *,
        border_wanted: bool,
        stop_told: bool,
        leaving: bool,
        settings: int,
        place: ScriptPosition,
    ) -> list[float]:
        """What this rank adds: a border is wanted; its loss times its weight; that weight, if it
        told a loss; it was told that the job stops; it was asked to leave; digests of its
        optimizer's settings, of what its passes wrote, of what was written between steps, and of
        what was evaluated there; where its script stands."""
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
        own = (float(border_wanted), loss, weight, float(stop_told), float(leaving))
        return [*own, *digits, *place.word()]

    def fail(self, reason: str) -> None:
        """A collective of the step failed. Of a step whose outcome is known, that changes
        nothing."""
        if self.phase in (StepPhase.OPEN, StepPhase.SEALED) and self.lost is None:
            self.lost = reason

    def seal(self) -> None:
        """The gradients are summed, and this rank has all that it needs to apply the step."""
        if self.phase is StepPhase.OPEN and self.lost is None:
            self.phase = StepPhase.SEALED

    def decide(self, summed: Sequence[float]) -> None:
        """The closing was seen, by this rank or by a peer that survived: the step counts. `summed`:
        its control word, the same on all ranks."""
        self.control, self.phase, self.lost = list(summed), StepPhase.DECIDED, None

    def void(self) -> None:
        """No survivor saw the closing."""
        self.phase, self.lost = StepPhase.VOID, self.lost or "void"

    @property
    def undecided(self) -> bool:
        """Its group is over, and what became of the step is not known here."""
        return self.lost is not None and self.phase is not StepPhase.VOID

    @property
    def in_doubt(self) -> bool:
        """It may have been applied by a peer."""
        return self.lost is not None and self.phase is StepPhase.SEALED

    @property
    def border_wanted(self) -> bool:
        """Some rank wants the next border to be one at which the membership changes."""
        return self.control is not None and self.control[_BORDER] > 0

    @property
    def stop_told(self) -> bool:
        """Some rank was told that the job stops: all stop at the next border, also those that will
        be told later."""
        return self.control is not None and self.control[_STOP] > 0

    @property
    def all_leave(self) -> bool:
        """Every rank was asked to leave, as in an allocation that is taken back: they stop at the
        next border, together."""
        return self.control is not None and self.control[_LEAVING] == self.control[_PLACE]

    @property
    def ranks_agree(self) -> bool:
        """All ranks that took part meant the same step."""
        return self.control is None or agree(self.control[_PLACE:])

    @property
    def settings_agree(self) -> bool:
        """The optimizers of all ranks that took part have the same settings."""
        return self._agree(_SETTINGS)

    @property
    def writes_agree(self) -> bool:
        """All ranks that took part wrote the same to the same parameters in their passes, or
        nothing."""
        return self._agree(_WRITES)

    @property
    def between_agrees(self) -> bool:
        """All ranks that took part found the same written between steps, or nothing."""
        return self._agree(_BETWEEN)

    @property
    def evaluated_alike(self) -> bool:
        """All ranks that took part evaluated the model on the same inputs, and this is one of
        them."""
        return self.evaluated != 0 and self.control is not None and self._agree(_EVALUATED)

    def _agree(self, begins: int) -> bool:
        return self.control is None or agree(
            [self.control[_PLACE], *self.control[begins : begins + _DIGEST]]
        )

    @property
    def mean_loss(self) -> float | None:
        """Over the whole batch if the ranks told theirs, else this rank's own, if told."""
        if self.loss_of_all is not None:
            return self.loss_of_all
        return None if self.loss is None else float(self.loss)

    @property
    def weight_of_all(self) -> float | None:
        """What the batches weigh whose loss the ranks told, over all ranks; None: no rank has told
        one, or they are not summed yet."""
        return None if self.control is None or self.control[_WEIGHT] <= 0 else self.control[_WEIGHT]

    @property
    def loss_of_all(self) -> float | None:
        """The mean loss over the whole batch; None: no rank has told its own, or the ranks' are not
        summed yet."""
        if self.control is None or self.control[_WEIGHT] <= 0:
            return None
        return self.control[_LOSS] / self.control[_WEIGHT]


def not_finished(*, elsewhere: bool) -> PreconditionError:
    """The error for a script that asks for a batch while the step of the last one is in progress.
    `elsewhere`: of another loader, when some of several models were updated in that step."""
    text = (
        "the next batch was asked for, but optimizer.step() was not called for the last one; call "
        "it once per iteration, which is one step over all ranks. To accumulate gradients over "
        "several backward passes, give the loader micro_batch_size= and loop over loader.steps(); "
        "where batches are only read, make the loader with train=False"
    )
    if elsewhere:
        text = (
            "a batch of another loader was asked for between the steps of two optimizers, which "
            "are one step of the run on one batch: ask for it behind the last of them. Where a "
            "step needs samples of two datasets, put these into one "
            "(torch.utils.data.StackDataset), or make a loader of the other with train=False"
        )
    return PreconditionError(text, reason="STEP_NOT_FINISHED")
