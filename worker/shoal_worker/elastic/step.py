"""The step in progress, and the control word that rides in its last all-reduce.

The training thread owns a step. A collective's callback, on a thread of the process group, may mark it lost or hand it its control word
while the training thread waits for that collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal_common.errors import PreconditionError

from shoal_worker.elastic.contract import Placement, Share, StepSource, WeighRows
from shoal_worker.elastic.place import PLACE_WORD_LENGTH, Place, agree

CONTROL_LENGTH = 4 + PLACE_WORD_LENGTH
"""Numbers in a control word. Summed over the ranks as float32 at least, so whole numbers up to 2^24 are exact."""


@dataclasses.dataclass
class Step:
    """A step in progress."""

    placement: Placement
    source: StepSource | None
    """Whose samples it takes; None: the user's own loop, without a loader of Shoal's."""
    share: Share | None = None
    handed_out: bool = False
    left: bool = False
    """The loop that it belongs to was left before the step was finished."""
    first_live: bool = False
    """Its first batch ended the replay of a joiner's script."""
    micro_batch: float | None = None
    """Weight of the micro-batch that is being computed."""
    weigh: WeighRows | None = None
    """What parts of it weigh; None: their samples."""
    taken: int = 0
    """Batches of this rank that the user's loop has got."""
    micro_batches_weight: float = 0.0
    """Weight of the micro-batches of this rank that are done."""
    lost: str | None = None
    """Why the step is void; None: it is not."""
    control: list[float] | None = None
    """The control word summed over all ranks; None: not reduced yet."""
    loss: float | None = None
    """This rank's mean loss, if told."""

    @property
    def in_micro_batches(self) -> bool:
        """It is cut into micro-batches, instead of one plain batch per rank."""
        return self.share is not None and self.share.micro_batches is not None

    def check_whole(self) -> None:
        """Raises PreconditionError unless the inner loop took all micro-batches of this rank: a commit counts them all as trained on."""
        due = self.share.micro_batches if self.share is not None else None
        if due is not None and self.taken < due:
            raise PreconditionError(
                f"the inner loop has taken {self.taken} of this rank's {due} micro-batches, and the step would count all as trained on: "
                "call optimizer.step() after `for batch in step:` has come to its end; to leave a batch out use `continue`, not `break`",
                reason="STEP_NOT_WHOLE",
            )

    def control_word(self, *, border_wanted: bool, stop_told: bool, place: Place) -> list[float]:
        """What this rank adds: a border is wanted; its loss times its weight; that weight, if it told a loss; it was told that the job
        stops; where its script stands."""
        weight = 0.0
        if self.share is not None and self.loss is not None:
            weight = self.micro_batches_weight if self.in_micro_batches else self.share.weight
        loss = self.loss * weight if self.loss is not None and weight > 0 else 0.0
        return [float(border_wanted), loss, weight, float(stop_told), *place.word()]

    def take_control_word(self, summed: Sequence[float]) -> None:
        """The control word came back: the same on all ranks."""
        self.control = list(summed)

    @property
    def border_wanted(self) -> bool:
        """Some rank wants the next border to be one at which the membership changes."""
        return self.control is not None and self.control[0] > 0

    @property
    def stop_told(self) -> bool:
        """Some rank was told that the job stops: all stop at the next border, also those that will be told later."""
        return self.control is not None and self.control[3] > 0

    @property
    def ranks_agree(self) -> bool:
        """All ranks that took part meant the same step."""
        return self.control is None or agree(self.control[4:])

    @property
    def mean_loss(self) -> float | None:
        """Over the whole batch if the ranks told theirs, else this rank's own, if told."""
        if self.control is not None and self.control[2] > 0:
            return self.control[1] / self.control[2]
        return self.loss
